"""Graph memory: what does a captured graph keep, and which of it is of the latest step?

A row is a buffer, as wide as its capacity; under each other those of one part of the plan. Several steps, or several
graphs, stand below each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.checks import require
from attnlab.graphs.graph import Graph
from attnlab.inspect.graph_contents import Buffer
from attnlab.inspect.graph_view import GraphView
from attnlab.plots.cells import box, fill, hover, outline
from attnlab.plots.graph_facts import buffer_words, caption, heading, in_words, source, statement
from attnlab.plots.narrow import Edges, apart
from attnlab.plots.page_boxes import CHARACTER, write_inside
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import FOOTER, HEADER, LEFT, RIGHT, SIZE, Theme, boxes, canvas, fit, header, inches, mix
from attnlab.plots.words import plural, short
from attnlab.units import size

PLOT_LEFT, PLOT_WIDTH = 1.55, 3.55
COLUMNS = {"live": 5.74, "padding": 6.42, "left over": 7.0, "of": 8.17, "memory": RIGHT}
"""Where the numbers of a column end, in inches from the left."""
ROW, OWNER, HEAD, FOOT = 0.2, 0.25, 0.30, 0.46
"""Inches of a buffer's row, of its owner's name, above the rows of a panel, and below them."""
BAR, GAP = 0.145, 0.012
"""Inches of a bar, and between two requests in it."""
STRIPES = "|" * 6
MOST_STEPS = 3


@show.register(Graph, GraphView)
def graph_memory(*xs: Graph | GraphView) -> Picture:
    """Return a picture of a graph’s memory, after its latest step; as `GraphView.of(graph)`, after an earlier one."""
    require(len(xs) <= MOST_STEPS, f"show: a picture shows up to {MOST_STEPS} graphs or steps, got {len(xs)}")
    views = [x if isinstance(x, GraphView) else GraphView.of(x) for x in xs]
    title = statement(views)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, [_Panel(view=view) for view in views])

    return Picture(draw=draw, title=title, alt=in_words(views))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """A view, laid out: its buffers by owner, from the top down."""

    view: GraphView

    @property
    def groups(self) -> list[tuple[str, list[Buffer]]]:
        """Every owner with its buffers."""
        return [(owner, list(its)) for owner, its in groupby(self.view.buffers, key=lambda buffer: buffer.owner)]

    @property
    def height(self) -> float:
        """Inches of all rows."""
        return len(self.groups) * OWNER + len(self.view.buffers) * ROW


def _figure(theme: Theme, title: str, panels: list[_Panel]) -> Figure:
    figure = canvas(HEADER + sum(HEAD + panel.height + FOOT for panel in panels) + FOOTER)
    at = figure.get_figheight() - HEADER
    marks: set[str] = set()
    for panel in panels:
        at -= HEAD + panel.height
        ax = inches(figure, PLOT_LEFT, at, PLOT_WIDTH, panel.height)
        ax.set_xlim(0, PLOT_WIDTH)
        ax.set_ylim(panel.height, 0)
        _draw_axis(ax, named=panel is panels[-1])
        _draw_columns(ax, theme, panel)
        marks |= _draw_rows(ax, theme, panel)
        at -= FOOT
    views = [panel.view for panel in panels]
    header(figure, theme, title, caption(views, marks), source(views))
    return figure


def _draw_axis(ax: Axes, *, named: bool) -> None:
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ticks = np.linspace(0, 1, 5)
    ax.set_xticks((ticks * PLOT_WIDTH).tolist(), [f"{tick:.0%}" for tick in ticks])
    if named:
        ax.set_xlabel("share of what was captured")


def _draw_columns(ax: Axes, theme: Theme, panel: _Panel) -> None:
    """Say what the panel is of, and name the columns of numbers."""
    fit(ax.text(LEFT - PLOT_LEFT, -0.17, heading(panel.view), size=SIZE["head"], weight="bold", va="bottom"))
    head: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "ha": "right", "va": "center"}
    for name, right in COLUMNS.items():
        ax.text(right - PLOT_LEFT, 0.0, name, **head)


def _draw_rows(ax: Axes, theme: Theme, panel: _Panel) -> set[str]:
    """Draw every buffer; return the marks that need words."""
    y, marks = 0.0, set[str]()
    for owner, buffers in panel.groups:
        words: dict[str, Any] = {"size": SIZE["small"], "weight": "bold", "color": theme.soft, "va": "center"}
        fit(ax.text(LEFT - PLOT_LEFT, y + OWNER - 0.1, short(owner, 64), **words), PLOT_LEFT + PLOT_WIDTH)
        y += OWNER
        for buffer in buffers:
            marks |= _draw_buffer(ax, theme, buffer, y + ROW / 2)
            y += ROW
    return marks


def _draw_buffer(ax: Axes, theme: Theme, buffer: Buffer, y: float) -> set[str]:
    """Draw a buffer's bar and its numbers; return the marks that need words."""
    top, low, scale = y - BAR / 2, y + BAR / 2, PLOT_WIDTH / max(1, buffer.capacity)
    outline(ax, box(0, PLOT_WIDTH, top, low), theme.rule)
    for first, end in buffer.stale:
        left, right = first * scale, max(end * scale, first * scale + 0.02)
        fill(ax, box(left, right, top, low), mix(theme.faint, theme.paper, 0.86), hatch="/////", edge=theme.faint)
        if buffer.read:
            fill(ax, box(left, right, low + 0.005, low + 0.03), theme.accent)
    marks = _draw_live(ax, theme, buffer, scale, top, low)
    _draw_numbers(ax, theme, buffer, y)
    hover(ax, box(0, PLOT_WIDTH, top, low), buffer_words(buffer), theme)
    return marks


def _draw_live(ax: Axes, theme: Theme, buffer: Buffer, scale: float, top: float, low: float) -> set[str]:
    """Fill the live part: every request's in its colour, runs of narrow ones striped in grey."""
    ends = np.cumsum([0, *buffer.parts]) * scale
    kept = np.flatnonzero(np.diff(ends) > 0)
    edges: Edges = np.stack([ends[kept], ends[kept + 1]], axis=-1)
    single, runs = apart(edges)
    for r, (left, right) in zip(kept[single].tolist(), edges[single].tolist(), strict=True):
        color, plain = theme.request(r), not theme.hatch(r)
        path = box(left, max(right - GAP, left + GAP), top, low)
        fill(ax, path, color, hatch=theme.hatch(r), edge=theme.paper)
        if right - left > CHARACTER * len(f"r{r}") + 0.06:
            write_inside(ax, (left + right - GAP) / 2, (top + low) / 2, f"r{r}", color, plain=plain)
    if len(runs):
        path = boxes(runs[:, 0], np.maximum(runs[:, 1] - GAP, runs[:, 0] + GAP), top, low)
        fill(ax, path, theme.faint, hatch=STRIPES, edge=theme.paper)
    hatched = any(theme.hatch(r) for r in kept[single].tolist())
    return {mark for mark, occurs in {"striped": len(runs) > 0, "hatched": hatched}.items() if occurs}


def _draw_numbers(ax: Axes, theme: Theme, buffer: Buffer, y: float) -> None:
    note: dict[str, Any] = {"size": SIZE["tick"], "va": "center"}
    ax.text(LEFT - PLOT_LEFT, y, short(buffer.name, 18), ha="left", **note)
    numbers = {"live": buffer.live, "padding": buffer.padded, "left over": buffer.left_over}
    for name, number in numbers.items():
        loud = name == "left over" and number > 0 and buffer.read
        color = theme.accent if loud else theme.ink if number else theme.faint
        ax.text(COLUMNS[name] - PLOT_LEFT, y, f"{number:,}", ha="right", color=color, **note)
    ax.text(COLUMNS["of"] - PLOT_LEFT, y, plural(buffer.capacity, buffer.unit), ha="right", color=theme.soft, **note)
    ax.text(COLUMNS["memory"] - PLOT_LEFT, y, size(buffer.nbytes), ha="right", color=theme.soft, **note)
