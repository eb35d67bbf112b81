"""Where the columns of a draft's picture stand: cached keys, then each branch's pages, of which some are shortened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from attnlab.inspect.draft_view import DraftView

TAIL, EDGE = 10, 26
"""So many of the last cached keys have a column each; as many as EDGE where the window's edge is among them."""
POOLED, COPY, REST = 3.0, 4, 3
"""Columns that all earlier keys take together, and that a copied page, and the unused end of a page, take at most."""
GAP = 0.7
"""Columns between the cached keys and a branch, unless these share a page, and between branches."""
WIDTH, SIDE = 5.65, 0.28
"""Inches of all columns at most, and of one."""
MOST_ROWS, MOST_COLUMNS = 24, 110
"""Branches that would need more are not drawn."""

Kind = Literal["earlier", "cached", "copy", "draft", "rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Columns `first` up to `end` of the request table, `left` units from the picture's edge and `width` wide."""

    kind: Kind
    branch: int
    first: int
    end: int
    left: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftColumns:
    """All stretches, left to right, of the first `kept` branches."""

    kept: int
    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, view: DraftView) -> DraftColumns:
        """Lay a view out."""
        per_branch = min(view.copied, COPY) + view.drafts + min(_unused(view), REST) + GAP
        by_width = int((MOST_COLUMNS - EDGE - POOLED) / per_branch)
        kept = min(view.topk, max(1, by_width), max(1, MOST_ROWS // (view.drafts - 1)))
        parts = _cached(view)
        for branch in range(kept):
            parts += _branch(view, branch)
        stretches, left, owner = [], 0.0, -1
        for kind, branch, first, end, width in parts:
            shares_page = branch == 0 and view.copied > 0  # a gap in a page would look like a slot
            left += GAP * (branch != owner and not shares_page)
            owner = branch
            stretches.append(Stretch(kind=kind, branch=branch, first=first, end=end, left=left, width=width))
            left += width
        return cls(kept=kept, stretches=tuple(stretches))

    @property
    def unit(self) -> float:
        """Inches of a column."""
        return min(SIDE, WIDTH / (self.stretches[-1].left + self.stretches[-1].width))

    @property
    def width(self) -> float:
        """Inches of all columns."""
        return (self.stretches[-1].left + self.stretches[-1].width) * self.unit

    def span(self, s: Stretch) -> tuple[float, float]:
        """Return where a stretch lies, in inches."""
        return s.left * self.unit, (s.left + s.width) * self.unit

    def frame(self, branch: int) -> tuple[float, float]:
        """Return where all columns of a branch lie, in inches; -1: those of cached keys."""
        spans = [self.span(s) for s in self.stretches if s.branch == branch]
        return spans[0][0], spans[-1][1]

    def spans(self, first: int, end: int) -> list[tuple[float, float]]:
        """Return where columns `first` up to `end` lie, in inches: one piece, or several with gaps between them."""
        pieces: list[tuple[float, float]] = []
        for s in self.stretches:
            a, b = max(first, s.first), min(end, s.end)
            if a < b:
                x = np.interp([a, b], [s.first, s.end], [s.left, s.left + s.width]) * self.unit
                joined = bool(pieces) and x[0] - pieces[-1][1] < 1e-6
                left = pieces.pop()[0] if joined else float(x[0])
                pieces.append((left, float(x[1])))
        return pieces


Part = tuple[Kind, int, int, int, float]


def _unused(view: DraftView) -> int:
    return view.stride - view.copied - view.drafts if view.page_size > 1 else 0


def _cached(view: DraftView) -> list[Part]:
    edge = min((read.first for read in view.reads), default=0)
    tail = view.cached - edge + 2 if edge > 0 and view.cached - edge + 2 <= EDGE else TAIL
    split = max(0, view.cached - tail)
    split = 0 if split <= POOLED else split
    earlier: list[Part] = [("earlier", -1, 0, split, POOLED)] if split else []
    return [*earlier, ("cached", -1, split, view.cached, float(view.cached - split))]


def _branch(view: DraftView, branch: int) -> list[Part]:
    first = view.column_of(branch, 0)
    parts: list[Part] = []
    if branch and view.copied:
        parts.append(("copy", branch, first - view.copied, first, float(min(view.copied, COPY))))
    parts.append(("draft", branch, first, first + view.drafts, float(view.drafts)))
    if rest := _unused(view):
        end = first + view.drafts
        parts.append(("rest", branch, end, end + rest, float(min(rest, REST))))
    return parts
