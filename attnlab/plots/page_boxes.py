"""Pages as boxes with labels, and a request's page table in position order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.path import Path
from numpy.typing import ArrayLike, NDArray

from attnlab.inspect.page_map import PageMap
from attnlab.plots.cells import box, fill, outline
from attnlab.plots.style import RIGHT, SIZE, Theme, boxes, fit, mix, text_on
from attnlab.plots.words import plural, short

Ints = NDArray[np.int64]

TABLE_WIDTH, TABLE_HEIGHT = 8.05, 0.24
SLOTS_IN_A_ROW = 24
"""A page table of fewer pages does not fill the width."""
MOST_PIECES = 160
"""A page table of more pieces is drawn as one bar."""
CHARACTER = 0.066
"""Inches of a character in small type, in the widest font, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Where boxes of one size stand: `pitch` and `row` from one to the next, `columns` of them in a row."""

    pitch: float
    row: float
    columns: int
    width: float
    height: float

    def corner(self, at: int) -> tuple[float, float]:
        """Return the left and upper edge of a box."""
        left, top = at % self.columns * self.pitch, at // self.columns * self.row
        return left, top + (self.row - self.height) / 2

    def path(self, at: Ints, filled: ArrayLike = 1.0) -> Path:
        """Return one path of boxes, each filled to a share of its width."""
        left, top = at % self.columns * self.pitch, at // self.columns * self.row + (self.row - self.height) / 2
        return boxes(left, left + self.width * np.asarray(filled), top, top + self.height)


def draw_held(ax: Axes, theme: Theme, pool: PageMap, r: int, place: Boxes, pages: Ints, at: Ints) -> None:
    """Draw a request's pages at some places: its colour as far as they are filled, an outline to their end."""
    number = pool.numbers[r]
    color, filled = theme.request(number), pool.keys[pages] / pool.page_size
    partly = filled < 1
    if partly.any():
        outline(ax, place.path(at[partly]), mix(color, theme.paper, 0.25))
    hint = f"{short(pool.names[r])}: {plural(pool.lens[r], 'key')} in {plural(len(pool.tables[r]), 'page')}"
    fill(ax, place.path(at, filled), color, hint=hint, hatch=theme.hatch(number), edge=theme.paper)


def draw_label(
    ax: Axes, theme: Theme, place: Boxes, at: int, words: str, filled: float, color: str, *, plain: bool
) -> None:
    """Write into a box: on its filled part where there is room, else on the empty one, else over both."""
    left, top = place.corner(at)
    y = top + place.height / 2
    need, on, off = CHARACTER * len(words), place.width * filled, place.width * (1 - filled)
    if on >= need or filled == 1:
        write_inside(ax, left + on / 2, y, words, color, plain=plain)
    elif off >= need:
        write_inside(ax, left + on + off / 2, y, words, theme.paper, plain=True)
    else:
        write_inside(ax, left + place.width / 2, y, words, theme.paper, plain=False)


def write_inside(ax: Axes, x: float, y: float, words: str, color: str, *, plain: bool) -> None:
    """Write on a colour; where that is not plain, lay some of it under the words."""
    text = ax.text(x, y, words, color=text_on(color), size=SIZE["small"], ha="center", va="center_baseline")
    if not plain:
        text.set_bbox({"fc": color, "ec": "none", "pad": 0.6})


def draw_table(ax: Axes, theme: Theme, pool: PageMap, r: int) -> None:
    """Draw a request's pages in position order, with their numbers: one by one, as runs of neighbours, or as a bar."""
    table, name = pool.tables[r], short(pool.names[r], 16)
    if not table:
        _head_table(ax, f"Page table of {name}: no key yet")
        return
    width = TABLE_WIDTH / max(len(table), SLOTS_IN_A_ROW)
    keys, pieces = plural(pool.lens[r], "key"), pool.pieces(r)
    if width >= CHARACTER * len(str(max(table))) + 0.04:
        _head_table(ax, f"Page table of {name}: where its {keys} lie, in reading order (page numbers)")
        _draw_table_pages(ax, theme, pool, r, width)
        return
    count = f"{plural(len(table), 'page')}, {plural(len(pieces), 'piece')}"
    _head_table(ax, f"Page table of {name}: its {keys} lie in {count}, in reading order (first to last page)")
    _draw_table_pieces(ax, theme, pool, r, pieces)


def _head_table(ax: Axes, words: str) -> None:
    fit(ax.text(0, -0.07, words, size=SIZE["note"], weight="bold", va="bottom"), RIGHT)


def _draw_table_pages(ax: Axes, theme: Theme, pool: PageMap, r: int, width: float) -> None:
    pages, number = np.array(pool.tables[r]), pool.numbers[r]
    at = np.arange(len(pages))
    place = Boxes(pitch=width, row=TABLE_HEIGHT, columns=len(pages), width=width - 0.035, height=TABLE_HEIGHT)
    draw_held(ax, theme, pool, r, place, pages, at)
    filled = pool.keys[pages] / pool.page_size
    for i, page in enumerate(pages.tolist()):
        color, plain = theme.request(number), not theme.hatch(number)
        draw_label(ax, theme, place, i, f"{page}", float(filled[i]), color, plain=plain)


def _draw_table_pieces(ax: Axes, theme: Theme, pool: PageMap, r: int, pieces: Sequence[tuple[int, int]]) -> None:
    number, count = pool.numbers[r], len(pool.tables[r])
    color, hatch = theme.request(number), theme.hatch(number)
    sizes = np.array([last - first + 1 for first, last in pieces])
    edges = np.concatenate([[0], sizes.cumsum()]) / count * TABLE_WIDTH
    if len(pieces) > MOST_PIECES:
        fill(ax, box(0, TABLE_WIDTH, 0, TABLE_HEIGHT), color, hatch=hatch, edge=theme.paper)
        return
    path = boxes(edges[:-1], np.maximum(edges[1:] - 0.02, edges[:-1] + 0.01), 0, TABLE_HEIGHT)
    fill(ax, path, color, hatch=hatch, edge=theme.paper)
    for (first, last), left, right in zip(pieces, edges, edges[1:], strict=False):
        words = f"{first}–{last}" if last > first else f"{first}"
        if right - left >= CHARACTER * len(words) + 0.04:
            write_inside(ax, (left + right) / 2, TABLE_HEIGHT / 2, words, color, plain=not hatch)
