"""Page map: whose is this slot, and what could be freed?

A cell is a page, rows run left to right; below, the page table of one request, and what the marks count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.checks import require
from attnlab.inspect.page_map import PageMap
from attnlab.memory.slots import SlotAllocator
from attnlab.plots.cells import box, draw_cells, fill, hover, label_step, outline
from attnlab.plots.page_boxes import CHARACTER, TABLE_HEIGHT, TABLE_WIDTH, Boxes, draw_held, draw_label, draw_table
from attnlab.plots.page_grid import Grid, pixels_of, row_words
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import DPI, HEADER, RIGHT, SIZE, Theme, canvas, fit, header, inches
from attnlab.plots.words import plural, share, short

GRID_LEFT, GRID_WIDTH = 0.78, TABLE_WIDTH
ABOVE, ROW, GRID_HEIGHT = 0.28, 0.226, 3.62
"""Inches above the cells for the slots' numbers, of a row of labelled cells, and of all rows at most."""
GAP, ROW_GAP = 0.055, 0.06
"""Inches between labelled cells."""
OWNERS, TABLE, LEGEND, FOOT = 0.34, 0.66, 0.40, 0.30
"""Inches for the colours' names, for the page table, for the counts, and for the line of the source."""
MOST_OWNERS = 8


@show.register(PageMap, SlotAllocator)
def page_map(*xs: PageMap | SlotAllocator) -> Picture:
    """Return a picture of a pool's pages. `PageMap.of(allocator, names=..., highlight=...)` chooses what it says."""
    require(len(xs) == 1, f"show: a picture shows 1 pool, got {len(xs)}")
    pool = xs[0] if isinstance(xs[0], PageMap) else PageMap.of(xs[0])
    title = statement(pool)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, pool)

    return Picture(draw=draw, title=title, alt=in_words(pool))


def statement(pool: PageMap) -> str:
    """Return the picture's title: how much is taken, and what releasing the highlighted request would free."""
    owners = sum(length > 0 for length in pool.lens)
    if owners == 0:
        return (
            f"All {plural(pool.pages - 1, 'page')} of the pool are free"
            if pool.pages > 2
            else "The pool’s only page is free"
        )
    taken = share(pool.held / (pool.pages - 1))
    hold = "hold" if owners > 1 else "holds"
    title = f"{plural(owners, 'request')} {hold} {taken} of the pool’s pages"
    if pool.highlight is None or owners == 1:
        return title
    name, mine = short(pool.names[pool.highlight], 16), len(pool.tables[pool.highlight])
    return f"{title}; releasing {name} would free {mine:,} of these {pool.held:,}"


def in_words(pool: PageMap) -> str:
    """Return what the picture shows, for those who cannot see it."""
    counts = ", ".join(f"{words} {count:,}" for words, count in _counts(pool))
    listed = "; ".join(
        f"{short(name)}: {plural(length, 'key')} in {plural(len(table), 'page')}"
        for name, length, table in list(zip(pool.names, pool.lens, pool.tables, strict=True))[:12]
    )
    more = f" and {len(pool.names) - 12:,} other requests" if len(pool.names) > 12 else ""
    owners = f" {listed}{more}." if listed else ""
    return f"A pool of {plural(pool.pages, 'page')} of {plural(pool.page_size, 'slot')}. Slots: {counts}.{owners}"


def _counts(pool: PageMap) -> list[tuple[str, int]]:
    return [
        ("with a key", pool.used),
        ("empty end of a last page", pool.tail),
        ("free", pool.free),
        ("sink page", pool.page_size),
    ]


def _figure(theme: Theme, title: str, pool: PageMap) -> Figure:
    grid = Grid.of(pool)
    row = ROW if grid.labelled else min(ROW, max(0.056, GRID_HEIGHT / grid.rows))
    height = grid.rows * row
    owners = 0.0 if grid.labelled or not pool.held else OWNERS
    table = TABLE if pool.highlight is not None else 0.0
    figure = canvas(HEADER + ABOVE + height + owners + table + LEGEND + FOOT + 0.1)
    header(figure, theme, title, _caption(pool, grid), _source(pool))
    at = figure.get_figheight() - HEADER - ABOVE - height
    ax = _axes(figure, at, height)
    _number_slots(ax, theme, grid, row)
    if grid.labelled:
        _draw_pages(ax, theme, pool, grid)
    else:
        _draw_pixels(ax, theme, pool, grid, row)
    if owners:
        at -= owners
        _draw_owners(_axes(figure, at, 0.18), theme, pool)
    if pool.highlight is not None:
        at -= table
        draw_table(_axes(figure, at + 0.08, TABLE_HEIGHT), theme, pool, pool.highlight)
    _draw_legend(_axes(figure, FOOT + 0.14, 0.16), theme, pool)
    return figure


def _axes(figure: Figure, bottom: float, height: float) -> Axes:
    """Return axes that count inches, to the right and downwards."""
    ax = inches(figure, GRID_LEFT, bottom, GRID_WIDTH, height)
    ax.axis("off")
    ax.set_xlim(0, GRID_WIDTH)
    ax.set_ylim(height, 0)
    return ax


def _caption(pool: PageMap, grid: Grid) -> str:
    size = f"{plural(pool.pages, 'page')} of {pool.page_size:,}" if pool.page_size > 1 else "pages of one"
    cell = "" if grid.together == 1 else f", {grid.together} in a cell"
    first = f"A pool of {pool.pages * pool.page_size:,} slots in {size}{cell}; rows run left to right."
    if pool.held:
        first += f" Colour is the owner{_example(pool) if grid.labelled else ''}."
    sink = "Page 0 belongs to nobody: slot 0 is the sink that padded rows write to."
    if grid.together > 1:
        return f"{first}\nA bar is as long as the cell has keys; grey where nobody has most of them. {sink}"
    short_bar = "A bar that stops short is a last page still filling up. " if pool.page_size > 1 else ""
    return f"{first}\n{short_bar}{sink}"


def _example(pool: PageMap) -> str:
    """Explain a label by one that is there."""
    r = pool.highlight
    if r is None or not pool.tables[r]:
        return ""
    number = max(0, len(pool.tables[r]) - 2)
    start = number * pool.page_size
    end = min(pool.lens[r], start + pool.page_size) - 1
    keys = f"keys {start:,} to {end:,}" if end > start else f"key {start:,}"
    name = short(pool.names[r], 16)
    return f"; “{name}·{number}” holds {keys} of {name}"


def _source(pool: PageMap) -> str:
    if not pool.held:
        return "The first request gets the lowest pages."
    return "An allocator hands out the lowest free page first. A request’s keys fill its pages in position order."


def _number_slots(ax: Axes, theme: Theme, grid: Grid, row: float) -> None:
    """Write the first slot of rows on the left, and how far columns are from it above."""
    look: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft}
    for i in range(0, grid.rows, label_step(0.15 / row)):
        ax.text(-0.08, (i + 0.5) * row, f"{grid.slot(i * grid.columns):,}", ha="right", va="center", **look)
    width = GRID_WIDTH / grid.columns
    for i in range(0, min(grid.columns, grid.cells), label_step(0.75 / width)):
        words = f"slot +{grid.slot(i):,}"
        ax.text(i * width, -0.07, words, ha="left", va="bottom", **look)


def _draw_pages(ax: Axes, theme: Theme, pool: PageMap, grid: Grid) -> None:
    """Draw every page as a box with a label: filled as far as it has keys, an outline where it has none."""
    width = GRID_WIDTH / grid.columns
    place = Boxes(pitch=width, row=ROW, columns=grid.columns, width=width - GAP, height=ROW - ROW_GAP)
    keys = pool.keys
    free = np.flatnonzero(keys[1:] == 0) + 1
    if len(free):
        outline(ax, place.path(free), theme.rule)
    fill(ax, place.path(np.array([0])), theme.ink, hint="page 0: the sink")
    draw_label(ax, theme, place, 0, "sink" if width < 0.7 else "sink (slot 0)", 1.0, theme.ink, plain=True)
    for r, table in enumerate(pool.tables):
        if table:
            pages = np.array(table)
            draw_held(ax, theme, pool, r, place, pages, pages)
            for number, page in enumerate(table):
                words = _page_label(pool.names[r], number, place.width)
                color, plain = theme.request(pool.numbers[r]), not theme.hatch(pool.numbers[r])
                draw_label(ax, theme, place, page, words, keys[page] / pool.page_size, color, plain=plain)


def _page_label(name: str, number: int, width: float) -> str:
    """Return a page's label, cut to a width in inches, or nothing."""
    most = int((width - 0.04) / CHARACTER) - len(f"·{number}")
    return f"{short(name, most)}·{number}" if most >= 2 or most == len(name) else ""


def _draw_pixels(ax: Axes, theme: Theme, pool: PageMap, grid: Grid, row: float) -> None:
    """Draw cells too many for labels as an image, and say of each row whose they are where the mouse rests."""
    draw_cells(ax, pixels_of(theme, pool, grid), (0, GRID_WIDTH, grid.rows * row, 0))
    for i, words in enumerate(row_words(pool, grid)):
        hover(ax, box(0, GRID_WIDTH, i * row, (i + 1) * row), words, theme)


def _draw_owners(ax: Axes, theme: Theme, pool: PageMap) -> None:
    """Name the colours of the requests with the most pages, in batch order: their cells have no labels."""
    held = [r for r, table in enumerate(pool.tables) if table]
    largest = sorted(held, key=lambda r: -len(pool.tables[r]))[:MOST_OWNERS]
    x, shown = _write_on(ax, theme, 0.0, "Pages") + 0.2, []
    for r in sorted(largest, key=lambda r: pool.numbers[r]):
        if x > GRID_WIDTH - 1.7:
            break
        number = pool.numbers[r]
        fill(ax, box(x, x + 0.16, 0.03, 0.15), theme.request(number), hatch=theme.hatch(number), edge=theme.paper)
        x = _write_on(ax, theme, x + 0.21, f"{short(pool.names[r], 10)}  {len(pool.tables[r]):,}") + 0.2
        shown.append(r)
    if others := len(held) - len(shown):
        rest = pool.held - sum(len(pool.tables[r]) for r in shown)
        _write_on(ax, theme, x, f"{plural(others, 'other')}  {rest:,}")


def _write_on(ax: Axes, theme: Theme, x: float, words: str) -> float:
    """Write words at x and return where they end, in inches."""
    text = ax.text(x, 0.09, words, size=SIZE["note"], va="center_baseline", color=theme.soft)
    return float(fit(text, RIGHT).get_window_extent().x1) / DPI - GRID_LEFT


def _draw_legend(ax: Axes, theme: Theme, pool: PageMap) -> None:
    """Draw each mark with what it counts, in slots."""
    x = _write_on(ax, theme, 0.0, "Slots") + 0.25
    looks = ((theme.soft, theme.soft), ("none", theme.soft), ("none", theme.rule), (theme.ink, theme.ink))
    for (words, count), (face, edge) in zip(_counts(pool), looks, strict=True):
        mark = box(x, x + 0.2, 0.02, 0.15)
        if face != "none":
            fill(ax, mark, face)
        outline(ax, mark, edge)
        x = _write_on(ax, theme, x + 0.26, f"{words}  {count:,}") + 0.3
