"""Index lists: which slots does each request read, and how far are they apart?

A row is a request's list in position order, a block a run of neighbouring slots. Above them the buffer that holds all
lists, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.checks import require
from attnlab.inspect.index_view import IndexView, ListRow
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import ExtendLane
from attnlab.plots.cells import box, fill, hover, outline
from attnlab.plots.index_facts import caption, folded_words, in_words, positions, row_words, source, statement
from attnlab.plots.key_axis import KNEE_SHARE, KeyAxis
from attnlab.plots.narrow import apart
from attnlab.plots.page_boxes import CHARACTER, write_inside
from attnlab.plots.picture import Picture
from attnlab.plots.schedule_panel import KEPT_ROWS, MAX_ROWS
from attnlab.plots.show import show
from attnlab.plots.style import FOOTER, HEADER, LEFT, RIGHT, SIZE, Theme, boxes, canvas, header, inches, mix, write
from attnlab.plots.words import key_label, times

PLOT_LEFT, PLOT_WIDTH = 1.30, 6.32
BUFFER, BUFFER_HEIGHT = 0.74, 0.20
"""Inches for the buffer with its offsets, and of its bar."""
ROWS_HEAD, ROWS_FOOT = 0.30, 0.48
"""Inches above the rows for the margins' names, and below them for the ticks and the axis' name."""
STRIPES = "|" * 6
LEAST_BLOCK = 0.02
"""No block is drawn narrower, in inches."""
BLOCK = 0.76
"""Of a row's height."""


@show.register(IndexView, KVLayout, ExtendLane)
def index_lists(*xs: IndexView | KVLayout | ExtendLane) -> Picture:
    """Return a picture of the lists of a layout, or of an extend plan's lane."""
    require(len(xs) == 1, f"show: a picture shows the lists of 1 layout, got {len(xs)}")
    x = xs[0]
    view = x if isinstance(x, IndexView) else IndexView.of(x.layout if isinstance(x, ExtendLane) else x)
    title = statement(view)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, view)

    return Picture(draw=draw, title=title, alt=in_words(view))


def rows_of(view: IndexView) -> tuple[list[int], list[int]]:
    """Return the requests that have a row, in batch order, and those that share the last one."""
    kept = range(len(view.rows)) if len(view.rows) <= MAX_ROWS else view.longest(KEPT_ROWS)
    own = set(kept)
    return list(kept), [r for r in range(len(view.rows)) if r not in own]


def _figure(theme: Theme, title: str, view: IndexView) -> Figure:
    if not view.rows:
        figure = canvas(HEADER)
        header(figure, theme, title, caption(view))
        return figure
    kept, folded = rows_of(view)
    lines = len(kept) + bool(folded)
    pitch = min(0.26, max(0.155, 2.9 / lines))
    body = lines * pitch
    figure = canvas(HEADER + BUFFER + ROWS_HEAD + body + ROWS_FOOT + FOOTER)
    top = figure.get_figheight() - HEADER
    _draw_buffer(figure, theme, view, top - BUFFER + 0.30)
    at = top - BUFFER - ROWS_HEAD - body
    axis = KeyAxis.of([_ranges(row) for row in view.rows])
    ax = inches(figure, PLOT_LEFT, at, PLOT_WIDTH, body)
    ax.set_xlim(0, PLOT_WIDTH)
    ax.set_ylim(body, 0)
    _draw_axis(ax, theme, axis)
    striped = [_draw_row(ax, theme, axis, view, r, (i + 0.5) * pitch, pitch) for i, r in enumerate(kept)]
    if folded:
        _draw_folded(ax, theme, axis, [view.rows[r] for r in folded], (lines - 0.5) * pitch, pitch)
    head: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "ha": "right", "va": "bottom"}
    write(figure, PLOT_LEFT - 0.06, at + body + 0.06, "entries", **head)
    write(figure, RIGHT, at + body + 0.06, "positions", **head)
    hatched = any(theme.hatch(r) for r in kept)
    header(
        figure,
        theme,
        title,
        caption(view, striped=any(striped), folded=bool(folded), hatched=hatched),
        source(view) + _seam_words(axis),
    )
    return figure


def _ranges(row: ListRow) -> list[tuple[int, int]]:
    """Return a list's runs, padding first, as ranges of entries."""
    front = [(0, row.padding)] if row.padding else []
    return [*front, *((a, b) for a, b in row.runs.tolist())]


def _seam_words(axis: KeyAxis) -> str:
    if axis.knee is None:
        return ""
    return f" Right of the dashed seam the axis is {times(axis.squeeze)} compressed."


def _draw_buffer(figure: Figure, theme: Theme, view: IndexView, at: float) -> None:
    """Draw the buffer as one bar: every list in its request's colour, what is never read as an outline."""
    ax = inches(figure, PLOT_LEFT, at, PLOT_WIDTH, BUFFER_HEIGHT)
    ax.axis("off")
    ax.set_xlim(0, PLOT_WIDTH)
    ax.set_ylim(0, BUFFER_HEIGHT)
    scale = PLOT_WIDTH / max(1, view.capacity)
    note: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft}
    words: dict[str, Any] = {"ha": "left", "va": "center", "size": SIZE["label"], "weight": "bold"}
    ax.text(LEFT - PLOT_LEFT, BUFFER_HEIGHT / 2, "buffer", **words)
    ax.text(LEFT - PLOT_LEFT, -0.05, "offsets", ha="left", va="top", **note)
    outline(ax, box(0, PLOT_WIDTH, 0, BUFFER_HEIGHT), theme.rule)
    free = -1.0
    for r, row in enumerate(view.rows):
        if not row.entries:
            continue
        left, right = row.offset * scale, (row.offset + row.entries) * scale
        path = box(left, max(right - 0.012, left + 0.008), 0, BUFFER_HEIGHT)
        fill(ax, path, theme.request(r), hatch=theme.hatch(r), edge=theme.paper, hint=f"r{r}: {row_words(row)}")
        offset = f"{row.offset:,}"
        if right - left > CHARACTER * len(f"r{r}") + 0.06:
            write_inside(ax, (left + right) / 2, BUFFER_HEIGHT / 2, f"r{r}", theme.request(r), plain=not theme.hatch(r))
        if left - CHARACTER * len(offset) / 2 > free and left < PLOT_WIDTH - 0.75:
            ax.text(left, -0.05, offset, ha="center", va="top", **note)
            free = left + CHARACTER * len(offset) / 2 + 0.05
    if (PLOT_WIDTH - view.used * scale) > 0.8:
        middle = (PLOT_WIDTH + view.used * scale) / 2
        ax.text(middle, BUFFER_HEIGHT / 2, "never read", ha="center", va="center_baseline", **note)
    ax.text(PLOT_WIDTH, -0.05, f"{view.capacity:,}", ha="right", va="top", **note)


def _draw_axis(ax: Axes, theme: Theme, axis: KeyAxis) -> None:
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ticks = axis.ticks()
    ax.set_xticks((axis.at(ticks) * PLOT_WIDTH).tolist(), [key_label(k) for k in ticks])
    ax.set_xlabel("entry of the request’s list")
    if axis.knee is not None:
        ax.axvspan(KNEE_SHARE * PLOT_WIDTH, PLOT_WIDTH, color=theme.panel, zorder=-5, lw=0)
        ax.axvline(KNEE_SHARE * PLOT_WIDTH, color=theme.faint, lw=0.8, ls=(0, (2, 2)), zorder=-1)


def _draw_row(ax: Axes, theme: Theme, axis: KeyAxis, view: IndexView, r: int, y: float, pitch: float) -> bool:
    """Draw a request's list; return whether runs of it are too short to be told apart."""
    row, half = view.rows[r], BLOCK * pitch / 2
    note: dict[str, Any] = {"va": "center", "size": SIZE["tick"]}
    ax.text(LEFT - PLOT_LEFT, y, f"r{r}", ha="left", color=theme.soft, **note)
    ax.text(-0.06, y, f"{row.entries:,}", ha="right", **note)
    if not row.entries:
        return False
    ax.text(RIGHT - PLOT_LEFT, y, positions(row) if row.keys else "", ha="right", color=theme.soft, **note)
    color, hatch = theme.request(r), theme.hatch(r)
    if row.padding:
        end = float(axis.at(row.padding)) * PLOT_WIDTH
        path = box(0, max(end - 0.012, LEAST_BLOCK), y - half, y + half)
        fill(ax, path, mix(color, theme.paper, 0.86), hatch="/////", edge=color, hint=f"r{r}: {row.padding} of padding")
        outline(ax, path, color, 0.6)
    edges = axis.at(row.runs) * PLOT_WIDTH
    single, joined = apart(edges)
    sink = row.slots == 0
    for some, face, marks in (
        (edges[single & ~sink], color, hatch),
        (joined, color, hatch + STRIPES),
        (edges[single & sink], theme.ink, ""),
    ):
        if len(some):
            right = np.maximum(some[:, 1] - 0.012, some[:, 0] + LEAST_BLOCK)
            fill(ax, boxes(some[:, 0], right, y - half, y + half), face, hatch=marks, edge=theme.paper)
    _label_runs(ax, theme, row, edges, single, y, r)
    if row.keys and row.visible:
        fill(ax, box(-0.035, -0.012, y - half - 0.02, y + half + 0.02), theme.accent)
    hover(ax, box(0, float(edges[-1, 1]) if len(edges) else 0.1, y - half, y + half), f"r{r}: {row_words(row)}", theme)
    return len(joined) > 0


def _label_runs(ax: Axes, theme: Theme, row: ListRow, edges: np.ndarray, single: np.ndarray, y: float, r: int) -> None:
    """Write the slots into the blocks that have room for them."""
    for (left, right), (a, b), slot, drawn in zip(
        edges.tolist(), row.runs.tolist(), row.slots.tolist(), single.tolist(), strict=True
    ):
        room = right - left - 0.05
        if not drawn or room < CHARACTER:
            continue
        last = slot + b - a - 1
        one, several = (
            [f"slot {slot:,}", f"{slot:,}"],
            [f"slot {slot:,} to {last:,}", f"{slot:,}–{last:,}", f"{slot:,}…"],
        )
        options = one if b - a == 1 else several
        words = next((words for words in options if CHARACTER * len(words) <= room), "")
        if words:
            color = theme.ink if slot == 0 else theme.request(r)
            write_inside(ax, (left + right) / 2, y, words, color, plain=slot == 0 or not theme.hatch(r))


def _draw_folded(ax: Axes, theme: Theme, axis: KeyAxis, rows: Sequence[ListRow], y: float, pitch: float) -> None:
    """Draw all other requests as one grey block, up to the end of the longest list, with words."""
    half = BLOCK * pitch / 2
    note: dict[str, Any] = {"va": "center", "size": SIZE["tick"]}
    high = float(axis.at(max(row.entries for row in rows))) * PLOT_WIDTH
    path = box(0, max(high, LEAST_BLOCK), y - half, y + half)
    fill(ax, path, theme.idle)
    outline(ax, path, theme.faint, 0.7)
    ax.text(LEFT - PLOT_LEFT, y, f"{len(rows):,} others", ha="left", color=theme.soft, **note)
    ax.text(0.06 if high > 3 else high + 0.06, y, folded_words(list(rows)), color=theme.ink, **note)
