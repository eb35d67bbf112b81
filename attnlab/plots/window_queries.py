"""The upper half of a window layout: which keys every query reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from attnlab.inspect.step import Runs
from attnlab.inspect.window_view import QueryLine, WindowView
from attnlab.plots.cells import box, fill, hover
from attnlab.plots.page_boxes import CHARACTER
from attnlab.plots.style import DPI, LEFT, RIGHT, SIZE, Theme, boxes, mix, text_on
from attnlab.plots.window_axis import WindowAxis, spread
from attnlab.plots.window_facts import queries, seam_words

PLOT_LEFT, PLOT_WIDTH = 1.30, 6.72
ALONE, PITCH = 0.28, 0.128
"""Inches of the only query's row, and from row to row of several."""
OWN = 0.03
"""A query's own key is not narrower, in inches."""
ROW_GAP = 0.022
OLD_TINT = 0.72
"""How far keys that are kept but not read are moved towards the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The colours of one request, by what becomes of its keys."""

    read: str
    new: str
    kept: str
    gone: str
    others: str

    @classmethod
    def of(cls, theme: Theme, request: int) -> Look:
        """Take them from the request's colour."""
        color = theme.request(request)
        return cls(
            read=color,
            new=theme.shade(request),
            kept=mix(color, theme.paper, OLD_TINT),
            gone=mix(color, theme.paper, 0.86),
            others=mix(theme.idle, theme.faint, 0.3),
        )

    def of_state(self, state: Literal["read", "new", "kept", "gone"]) -> str:
        """Return the colour of a page of that state."""
        return {"read": self.read, "new": self.new, "kept": self.kept, "gone": self.gone}[state]


def panel_height(view: WindowView) -> float:
    """Return the inches of all queries' rows."""
    return ALONE if len(view.queries) <= 1 else PITCH * len(view.queries)


def draw_queries(ax: Axes, theme: Theme, view: WindowView, axis: WindowAxis) -> None:
    """Draw a row for every query, and on its left and right what it is and reads. `ax` counts inches, downwards."""
    height, look = panel_height(view), Look.of(theme, view.request)
    edge, end = (float(axis.x(position)) * PLOT_WIDTH for position in (view.edge, view.tokens))
    if edge > 0:
        fill(ax, box(0, edge, 0, height), theme.idle, hint=_unread(view))
    fill(ax, box(edge, end, 0, height), theme.panel)
    pitch = height / max(1, len(view.queries))
    gap = 0 if len(view.queries) <= 1 else ROW_GAP / 2
    rows = [(query, i * pitch + gap, (i + 1) * pitch - gap) for i, query in enumerate(view.queries)]
    for color, parts in (
        (look.read, [(_spans(axis, query.old, 0), top, low) for query, top, low in rows]),
        (look.new, [(_spans(axis, query.new, view.cached), top, low) for query, top, low in rows]),
    ):
        _fill_all(ax, color, parts)
    own = [(_own(axis, view, query), top, low) for query, top, low in rows]
    _fill_all(ax, theme.accent, own)
    _draw_border(ax, theme, view, axis, height)
    for query, top, low in rows:
        hover(ax, box(0, end, top, low), query_words(query), theme)
    _write_rows(ax, theme, view, rows)
    _write_inside(ax, theme, view, axis, height)
    _write_ticks(ax, theme, view, axis, height)


def query_words(query: QueryLine) -> str:
    """Return what is said of a query where the mouse rests."""
    old = ", ".join(f"{a:,} to {b - 1:,}" for a, b in query.old[:6]) + (", …" if len(query.old) > 6 else "")
    at = f" ({old})" if old else ""
    return f"query {query.number} at {query.position:,}: {query.old_keys:,} cached{at} + {query.new_keys:,} new"


def _spans(axis: WindowAxis, runs: Runs, shift: int) -> NDArray[np.float64]:
    """Return the left and right edges of runs, in inches."""
    return axis.x(np.array(runs, dtype=np.float64).reshape(-1, 2) + shift) * PLOT_WIDTH


def _own(axis: WindowAxis, view: WindowView, query: QueryLine) -> NDArray[np.float64]:
    """Return where a query's own key is: wide enough to be seen."""
    left, right = axis.x([view.cached + query.number, view.cached + query.number + 1]) * PLOT_WIDTH
    return np.array([[min(left, right - OWN), right]])


def _fill_all(ax: Axes, color: str, parts: list[tuple[NDArray[np.float64], float, float]]) -> None:
    """Fill the spans of all rows as one path."""
    edges = [(a, b, top, low) for spans, top, low in parts for a, b in spans.tolist()]
    if edges:
        left, right, top, low = np.array(edges).T
        fill(ax, boxes(left, right, top, low), color)


def _draw_border(ax: Axes, theme: Theme, view: WindowView, axis: WindowAxis, height: float) -> None:
    """Draw the line between cached and new keys, and dashed ones where the axis changes its scale."""
    for i, (position, ratio) in enumerate(axis.seams()):
        x = float(axis.x(position)) * PLOT_WIDTH
        if position != view.cached:
            ax.plot([x, x], [-0.17, height + 0.06], color=theme.faint, lw=0.9, ls=(0, (2, 2)), clip_on=False)
        words = seam_words(ratio)
        fits = x + CHARACTER * len(words) < PLOT_WIDTH
        side: dict[str, Any] = {
            "ha": "left" if fits else "right",
            "va": "bottom",
            "size": SIZE["small"],
            "color": theme.soft,
        }
        ax.text(x if fits else x + 0.02, -0.2 - 0.15 * i, words, **side)
    note: dict[str, Any] = {"size": SIZE["small"], "va": "bottom"}
    if view.mode == "decode" and view.queries:
        x = float(axis.x(view.cached + 0.5)) * PLOT_WIDTH
        words = f"query {view.queries[0].position:,}"
        half = CHARACTER * len(words) / 2
        ax.text(min(max(x, half), PLOT_WIDTH - half), -0.05, words, ha="center", color=theme.accent, **note)
    elif view.queries:
        x = float(axis.x(view.cached)) * PLOT_WIDTH
        ax.plot([x, x], [-0.05, height], color=theme.ink, lw=0.9, clip_on=False, zorder=4)
        if x > 0.6:
            ax.text(x - 0.05, -0.05, "cached", ha="right", color=theme.soft, **note)
        if x < PLOT_WIDTH - 0.25:
            ax.text(x + 0.05, -0.05, "new", ha="left", color=theme.soft, **note)


def _write_rows(ax: Axes, theme: Theme, view: WindowView, rows: list[tuple[QueryLine, float, float]]) -> None:
    """Name the mode, say where every query stands, and count what it reads."""
    small: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft}
    bold: dict[str, Any] = {"ha": "left", "va": "bottom", "size": SIZE["label"], "weight": "bold"}
    x, count = LEFT - PLOT_LEFT, query_count(view)
    if len(rows) <= 1:
        middle = panel_height(view) / 2
        ax.text(x, middle - 0.01, view.mode, **bold)
        ax.text(x, middle + 0.03, count, ha="left", va="top", **small)
    else:
        name = ax.text(x, -0.2, view.mode, **bold)
        end = name.get_window_extent().x1 / DPI - PLOT_LEFT
        ax.text(end + 0.1, -0.2, count, ha="left", va="bottom", **small)
        ax.text(-0.07, -0.05, "query at", ha="right", va="bottom", **small)
    if rows:
        margin = RIGHT - PLOT_LEFT
        ax.text(margin, -0.05, "cached\n+ new keys", ha="right", va="bottom", linespacing=1.15, **small)
    for query, top, low in rows:
        y = (top + low) / 2
        counts = f"{query.old_keys:,} + {query.new_keys:,}"
        ax.text(margin, y, counts, ha="right", va="center_baseline", size=SIZE["small"])
        if len(rows) > 1:
            ax.text(-0.07, y, f"{query.position:,}", ha="right", va="center_baseline", **small)


def query_count(view: WindowView) -> str:
    """Return how many queries there are, and how many of them have a row."""
    count = queries(view)
    return f"{count}, {len(view.queries)} of them here" if view.new > len(view.queries) else count


def _unread(view: WindowView) -> str:
    if view.edge == 1:
        return "key 0: not seen"
    who = "not seen" if view.new <= 1 else "no draft sees them" if view.mode == "verify" else "no query sees them"
    return f"keys 0 to {view.edge - 1:,}: {who}"


def _write_inside(ax: Axes, theme: Theme, view: WindowView, axis: WindowAxis, height: float) -> None:
    """Write into the grey what is not seen, and into the only query's bar what is."""
    edge = float(axis.x(view.edge)) * PLOT_WIDTH
    look: dict[str, Any] = {"ha": "center", "va": "center", "size": SIZE["note"]}
    wide = CHARACTER * SIZE["note"] / SIZE["small"]
    for words in (_unread(view), _unread(view).replace(": ", ":\n")):
        longest = max(map(len, words.split("\n")))
        if edge > wide * longest + 0.1 and height >= ALONE + 0.2 * words.count("\n"):
            ax.text(edge / 2, height / 2, words, color=theme.soft, linespacing=1.3, **look)
            break
    if view.mode == "decode" and view.queries and len(view.queries[0].old) == 1:
        (query,) = view.queries
        left, right = axis.x([view.edge, view.cached]) * PLOT_WIDTH
        words = f"{view.edge:,} to {query.position:,}: {query.old_keys + query.new_keys:,} keys"
        if right - left > 1.1 * wide * len(words) + 0.1:
            color = text_on(theme.request(view.request))
            ax.text((left + right) / 2, height / 2, words, color=color, weight="bold", **look)


def _write_ticks(ax: Axes, theme: Theme, view: WindowView, axis: WindowAxis, height: float) -> None:
    """Write the positions where something changes, and the axis' name where there is most room."""
    wide = CHARACTER * SIZE["tick"] / SIZE["small"]
    last = view.tokens - 1
    ends = [view.edge, view.cached if view.mode != "decode" else last, 0, last]
    ticks = []
    for position in dict.fromkeys(at for at in ends if 0 <= at <= max(last, 0)):
        # Drafts stand in batch order, which in a tree is not that of their positions.
        words = f"draft {view.new - 1}" if view.mode == "verify" and position == last else f"{position:,}"
        half = wide * len(words) / 2
        x = float(axis.x(position)) * PLOT_WIDTH
        ticks.append((min(max(x, half), PLOT_WIDTH - half), 2 * half, words))
    look: dict[str, Any] = {"va": "top", "color": theme.soft}
    free = spread([(middle, width) for middle, width, _ in ticks], 0.1)
    shown = [tick for tick, is_free in zip(ticks, free, strict=True) if is_free]
    for middle, _, words in shown:
        ax.text(middle, height + 0.06, words, ha="center", size=SIZE["tick"], **look)
    taken = sorted((middle - width / 2, middle + width / 2) for middle, width, _ in shown)
    borders = [(0.0, 0.0), *taken, (PLOT_WIDTH, PLOT_WIDTH)]
    gaps = [(b[0] - a[1], (a[1] + b[0]) / 2) for a, b in pairwise(borders)]
    ax.text(max(gaps)[1], height + 0.055, "key position (tokens)", ha="center", size=SIZE["label"], **look)
