"""How a pool's pages are laid out in cells, and cells without labels as an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import to_rgba
from numpy.typing import NDArray

from attnlab.inspect.page_map import PageMap
from attnlab.plots.cells import Pixels
from attnlab.plots.style import HATCHES, Theme
from attnlab.plots.words import short

Ints = NDArray[np.int64]

LABELLED, MOST_CELLS = 256, 4096
"""Up to LABELLED pages have labels; beyond MOST_CELLS several pages share a cell."""
CELL_PIXELS = {32: (40, 14), 64: (20, 9)}
"""Pixels of a cell, across and down, by the number of columns: about 160 to the inch."""
LINE = 2
"""Pixels between cells, and of an outline: viewers may drop single ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells of `together` pages each, row by row in `columns`; `labelled` ones are drawn as boxes."""

    cells: int
    columns: int
    together: int
    page_size: int
    labelled: bool

    @classmethod
    def of(cls, pool: PageMap) -> Grid:
        """Choose columns by the number of pages: the fewer, the wider."""
        together = 1
        while pool.pages > MOST_CELLS * together:
            together *= 2
        cells = -(-pool.pages // together)
        columns = next((c for most, c in ((128, 8), (LABELLED, 16), (1024, 32)) if cells <= most), 64)
        return cls(
            cells=cells, columns=columns, together=together, page_size=pool.page_size, labelled=cells <= LABELLED
        )

    @property
    def rows(self) -> int:
        """Rows of cells."""
        return -(-self.cells // self.columns)

    def slot(self, cell: int) -> int:
        """Return the first slot of a cell."""
        return cell * self.together * self.page_size


def cell_owner(pool: PageMap, grid: Grid) -> tuple[Ints, Ints]:
    """Return of every cell its keys and its owner: the request with more than half of them, or -1."""
    keys, owner = pool.keys, pool.owner
    if grid.together == 1:
        return keys, np.where(keys > 0, owner, -1)
    cell = np.arange(pool.pages) // grid.together
    total = np.bincount(cell, weights=keys, minlength=grid.cells).astype(np.int64)
    reqs = max(1, len(pool.names))
    pairs, inverse = np.unique(cell * reqs + owner, return_inverse=True)
    share = np.bincount(inverse, weights=keys)
    best = np.full(grid.cells, -1, dtype=np.int64)
    most = 2 * share > total[pairs // reqs]
    best[pairs[most] // reqs] = pairs[most] % reqs
    return total, best


def pixels_of(theme: Theme, pool: PageMap, grid: Grid) -> Pixels:
    """Return all cells as an image: filled in the owner's colour as far as they have keys, an outline where free."""
    wide, high = CELL_PIXELS[grid.columns]
    keys, owner = cell_owner(pool, grid)
    capacity = grid.together * grid.page_size
    count = grid.rows * grid.columns
    cells = np.zeros((count, high - LINE, wide - LINE, 4), dtype=np.uint8)
    cells[: grid.cells] = _outline(theme, cells.shape[1:])
    across = np.arange(wide - LINE)
    for r in np.unique(owner[keys > 0]).tolist():
        mine = np.flatnonzero((owner == r) & (keys > 0))
        # At least a pixel column: a cell with a key must not look free.
        columns = np.maximum(2, np.ceil(keys[mine] / capacity * (wide - LINE)))
        filled = across < columns[:, None]
        cells[mine] = np.where(filled[:, None, :, None], _fill(theme, pool, r, cells.shape[1:]), cells[mine])
    if grid.together == 1:
        cells[0] = _rgba(theme.ink)
    room = np.zeros((count, high, wide, 4), dtype=np.uint8)
    room[:, : high - LINE, : wide - LINE] = cells
    return room.reshape(grid.rows, grid.columns, high, wide, 4).swapaxes(1, 2).reshape(grid.rows * high, -1, 4)


def _rgba(color: str) -> Pixels:
    return np.round(255 * np.asarray(to_rgba(color))).astype(np.uint8)


def _outline(theme: Theme, shape: tuple[int, ...]) -> Pixels:
    cell = np.zeros(shape, dtype=np.uint8)
    cell[:] = _rgba(theme.rule)
    cell[LINE:-LINE, LINE:-LINE] = _rgba(theme.paper)
    return cell


def _fill(theme: Theme, pool: PageMap, r: int, shape: tuple[int, ...]) -> Pixels:
    """Return a whole cell in a request's colour and hatch; grey where it has no single owner."""
    cell = np.zeros(shape, dtype=np.uint8)
    if r < 0:
        cell[:] = _rgba(theme.faint)
        return cell
    number = pool.numbers[r]
    cell[:] = _rgba(theme.request(number))
    y, x = np.indices(shape[:2])
    up, down = (x + y) % 6 < LINE, (x - y) % 6 < LINE
    lines = dict(zip(HATCHES, (False & up, up, down, up | down), strict=True))[theme.hatch(number)]
    cell[lines] = _rgba(theme.paper)
    return cell


def row_words(pool: PageMap, grid: Grid, most: int = 6) -> Iterator[str]:
    """Return what is said of every row of cells: its pages, and who has how many of them."""
    owner = np.where(pool.keys > 0, pool.owner, -1)
    step = grid.columns * grid.together
    for first in range(0, pool.pages, step):
        row = owner[first : first + step]
        reqs, counts = np.unique(row[row >= 0], return_counts=True)
        top = np.argsort(-counts, kind="stable")[:most]
        parts = [f"{short(pool.names[reqs[i]], 16)} {counts[i]:,}" for i in top]
        if len(reqs) > most:
            parts.append(f"{len(reqs) - most:,} others")
        free = int((row < 0).sum()) - (first == 0)
        parts.append(f"free {free:,}")
        yield f"pages {first:,} to {first + len(row) - 1:,}: {', '.join(parts)}"
