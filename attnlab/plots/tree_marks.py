"""The cells of a tree mask, by what they say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.colors import to_rgba_array
from matplotlib.path import Path

from attnlab.inspect.tree_view import Draft
from attnlab.plots.cells import Pixels
from attnlab.plots.style import boxes
from attnlab.plots.tree_layout import Panels

Cell = tuple[float, float, float, float]
"""Left, right, upper and lower edge, in inches."""


def path_of(cells: list[Cell], inset: tuple[float, float]) -> Path:
    """Return one path of cells, each smaller by an inset across and down."""
    left, right, top, low = np.array(cells).T
    return boxes(left + inset[0], right - inset[0], top + inset[1], low - inset[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Cells by what they say: cached keys that are seen, what is out of sight, other branches, drafts by depth."""

    seen: list[Cell]
    out: list[Cell]
    empty: list[Cell]
    drafts: dict[int, list[Cell]]

    @classmethod
    def of(cls, panels: Panels) -> Marks:
        """Mark all rows. Without gaps between cells neighbours are one."""
        marks = cls(seen=[], out=[], empty=[], drafts={})
        for row, number in enumerate(panels.view.order):
            draft, edges = panels.view.drafts[number], (row * panels.pitch, (row + 1) * panels.pitch)
            marks._cached(panels, draft, edges)
            marks._others(panels, draft, edges)
        if panels.apart:
            return marks
        return cls(seen=_joined(marks.seen), out=_joined(marks.out), empty=[], drafts={})

    def _cached(self, panels: Panels, draft: Draft, edges: tuple[float, float]) -> None:
        """Mark cached keys column by column; of a column that is seen in part, the parts."""
        for column in panels.columns:
            at = column.start
            for first, end in (*draft.cached, (column.stop, column.stop)):
                first, end = max(first, at), min(end, column.stop)
                if first > end:
                    continue
                for some, a, b in ((self.out, at, first), (self.seen, first, end)):
                    if a < b:
                        some.append((panels.x(a), panels.x(b), *edges))
                at = max(at, end)

    def _others(self, panels: Panels, draft: Draft, edges: tuple[float, float]) -> None:
        seen, hidden = set(draft.seen), set(draft.hidden)
        for number in panels.view.order:
            left = panels.draft_x(number)
            cell = (left, left + panels.unit, *edges)
            if number in seen:
                self.drafts.setdefault(panels.shade(panels.view.drafts[number]), []).append(cell)
            elif number in hidden:
                self.out.append(cell)
            else:
                self.empty.append(cell)


def _joined(cells: list[Cell]) -> list[Cell]:
    """Return cells of which neighbours in a row are one, and then those below each other that are equally wide."""
    wide: list[Cell] = []
    for cell in cells:
        last = wide[-1] if wide else None
        if last is not None and last[2:] == cell[2:] and abs(last[1] - cell[0]) < 1e-9:
            wide[-1] = (last[0], *cell[1:])
        else:
            wide.append(cell)
    tall: dict[tuple[float, float], list[Cell]] = {}
    for left, right, top, low in wide:
        column = tall.setdefault((round(left, 6), round(right, 6)), [])
        if column and abs(column[-1][3] - top) < 1e-9:
            column[-1] = (*column[-1][:3], low)
        else:
            column.append((left, right, top, low))
    return [cell for column in tall.values() for cell in column]


def pixels_of(panels: Panels) -> Pixels:
    """Return the drafts' part as an image of one pixel a cell, clear where nothing is seen."""
    pixels = np.zeros((panels.rows, panels.rows, 4), dtype=np.uint8)
    colors = np.round(255 * to_rgba_array(panels.ramp)).astype(np.uint8)
    for row, number in enumerate(panels.view.order):
        for other in panels.view.drafts[number].seen:
            pixels[row, panels.row_of[other]] = colors[panels.shade(panels.view.drafts[other])]
    return pixels
