"""Where a request's pages stand in a window layout: the bars of text and spaces, and what becomes of every page."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from attnlab.inspect.window_view import WindowView
from attnlab.plots.window_axis import WindowAxis
from attnlab.plots.window_queries import PLOT_WIDTH

BAR, LINK = 0.22, 0.62
"""Inches of a bar of pages, and between two of them."""
CELL = 0.042
"""Pages narrower than so many inches have no cell of their own."""
LEAST = 0.022
"""No page of the request is drawn narrower, in inches."""
PAGE = 0.04
"""Where a page of the text is narrower, in inches, pages of the text run together."""

State = Literal["read", "new", "kept", "gone"]
"""What becomes of a page: read by this step, filled by it, kept unread, or slid out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bars:
    """The bars: the text's, and one for every space. `tops[i]` is where bar i begins, in inches from the first."""

    view: WindowView
    axis: WindowAxis
    tops: tuple[float, ...]
    states: tuple[State, ...]

    @classmethod
    def of(cls, view: WindowView, axis: WindowAxis) -> Bars:
        """Lay the bars out."""
        tops = tuple(i * (BAR + LINK) for i in range(1 + len(view.spaces)))
        return cls(view=view, axis=axis, tops=tops, states=_states(view))

    @property
    def apart(self) -> bool:
        """Whether pages of the text have gaps between them, and numbers."""
        if not self.view.pieces:
            return False
        edges = self.axis.x([(piece.first, piece.end) for piece in self.view.pieces]) * PLOT_WIDTH
        return float(np.diff(edges, axis=1).min()) > PAGE

    def cells(self, first: int, last: int, level: int) -> tuple[float, float]:
        """Return the edges of a run of pages in a space, in inches."""
        width = PLOT_WIDTH / self.view.spaces[level].pages
        left, right = first * width, (last + 1) * width
        if right - left >= LEAST:
            return left, right
        middle = min(max((left + right) / 2, LEAST / 2), PLOT_WIDTH - LEAST / 2)
        return middle - LEAST / 2, middle + LEAST / 2

    def stretches(self) -> list[tuple[int, int, State]]:
        """Return the text's pages, or where these run together neighbours of one state, as positions `(first, end)`."""
        pairs = zip(self.view.pieces, self.states, strict=True)
        if self.apart:
            return [(piece.first, piece.end, state) for piece, state in pairs]
        groups = [(state, list(group)) for state, group in groupby(pairs, key=lambda pair: pair[1])]
        return [(group[0][0].first, group[-1][0].end, state) for state, group in groups]

    def cut(self, first: int, end: int, state: State) -> list[tuple[int, int, State]]:
        """Return a stretch, cut where reading begins or ends, and where new tokens begin."""
        view = self.view
        borders = {first, end, view.cached, *(x for run in view.live for x in run)}
        inside = sorted(x for x in borders if first <= x <= end)
        rest: State = "gone" if state == "gone" else "kept"
        parts: list[tuple[int, int, State]] = []
        for a, b in zip(inside, inside[1:], strict=False):
            if state == "read" and any(x <= a and b <= y for x, y in view.live):
                parts.append((a, b, "read"))
            else:
                parts.append((a, b, "new" if a >= view.cached else rest))
        return parts


def _states(view: WindowView) -> tuple[State, ...]:
    live = np.zeros(view.tokens + 1, dtype=np.int64)
    for first, end in view.live:
        live[first + 1 : end + 1] = 1
    before = live.cumsum()
    states: list[State] = []
    for piece in view.pieces:
        if before[piece.end] > before[piece.first]:
            states.append("read")
        elif piece.end > view.cached and view.new:
            states.append("new")
        else:
            states.append("gone" if piece.gone else "kept")
    return tuple(states)
