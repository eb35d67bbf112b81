"""Split schedule: where are the cuts, and is anybody given too much?

A row is a request, a block one range of its keys. One panel a schedule, so that policies can be compared on one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from numpy.typing import NDArray

from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.splits import HostSplits, SplitPlan
from attnlab.plots.key_axis import KNEE_SHARE, KeyAxis
from attnlab.plots.picture import HINT, Picture
from attnlab.plots.schedule_panel import Panel, draw_margin
from attnlab.plots.schedule_view import ScheduleView, distinct, even_share, in_words, schedule_views, statement
from attnlab.plots.show import show
from attnlab.plots.style import (
    DPI,
    FOOTER,
    HEADER,
    LEFT,
    SECOND_SHADE,
    SIZE,
    Theme,
    boxes,
    canvas,
    fit,
    header,
    inches,
    mix,
    write,
)
from attnlab.plots.words import between, key_label, plural, times

PLOT_LEFT, PLOT_WIDTH = 1.30, 6.25
PANEL_HEAD, PANEL_FOOT, AXIS_NAME = 0.50, 0.34, 0.20
"""Inches above a panel for its name and notes, below it for the ticks, below the last one for the axis' name."""
FINE = 0.035
"""Blocks narrower than so many inches are not drawn one by one: their cuts would merge into a grey."""
LEAST_BLOCK = 0.025
"""No block is drawn narrower."""
BLOCK_HALF = 0.37
"""Half the height of a block, in rows."""


@show.register(DecodePlan, Lane, SplitPlan, HostSplits, ScheduleView)
def split_schedule(*xs: DecodePlan | Lane | SplitPlan | HostSplits | ScheduleView) -> Picture:
    """Return a picture of one or more schedules, each in its own panel.

    `schedule_views(plan, name=..., multiprocessors=...)` gives a plan another name, or a device to compare with.
    """
    views = distinct(view for x in xs for view in ((x,) if isinstance(x, ScheduleView) else schedule_views(x)))
    title = statement(views)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, views)

    return Picture(draw=draw, title=title, alt=in_words(views))


def _figure(theme: Theme, title: str, views: Sequence[ScheduleView]) -> Figure:
    panels = [Panel.of(view) for view in views if view.ranges]
    axis = _axis(views)
    body = sum(PANEL_HEAD + panel.height + PANEL_FOOT for panel in panels)
    figure = canvas(HEADER + body + AXIS_NAME * bool(panels) + FOOTER)
    header(figure, theme, title, _caption(views, axis), _source(panels))
    at = figure.get_figheight() - HEADER
    for i, panel in enumerate(panels):
        at -= PANEL_HEAD + panel.height
        ax = inches(figure, PLOT_LEFT, at, PLOT_WIDTH, panel.height)
        _draw_axis(ax, theme, axis, panel, named=i == len(panels) - 1)
        _draw_rows(ax, theme, axis, panel)
        _draw_longest(ax, theme, axis, panel)
        _draw_head(figure, theme, panel, at + panel.height)
        draw_margin(figure, theme, panel, at)
        at -= PANEL_FOOT
    return figure


def _axis(views: Sequence[ScheduleView]) -> KeyAxis:
    """Return the one axis of all panels. A request that two views cut must not be second to itself."""
    pairs = [([0, 0, *sorted(view.lens)])[-2:] for view in views]
    return KeyAxis.of([max(pair[i] for pair in pairs) for i in (0, 1)])


def _caption(views: Sequence[ScheduleView], axis: KeyAxis) -> str:
    if not any(view.ranges for view in views):
        return (
            "A batch with at least one request has a row for each of them here, cut into the ranges that programs read."
        )
    head = " for one KV head" if any(view.kv_heads is not None for view in views) else ""
    reads = f"Each row is one request, each block the keys that one program reads{head}"
    marks = f"{reads} (shades alternate to show the cuts)."
    if axis.knee is None:
        return f"{marks}\nBlocks may be read side by side, but a step cannot end before its longest block is read."
    seam = f"Right of the dashed seam the key axis is {times(axis.squeeze)} compressed; both parts are linear."
    return f"{marks}\n{seam} No step ends before its longest block is read."


def _source(panels: Sequence[Panel]) -> str:
    """Explain the marks of the margin that occur."""
    if not panels:
        return ""
    views = [panel.view for panel in panels]
    parts = ["Margin: ranges asked for, and ranges that hold keys"]
    if any(n > u for view in views for n, u in zip(view.nominal, view.used, strict=True)):
        parts[0] += " (rounding left the outlined ones empty)"
    if any(view.spare for view in views):
        parts.append("Grey outline: launched for no range, as the grid has a fixed size")
    if any(view.kv_heads is not None for view in views):
        parts.append("Programs: per tile of heads")
    return ". ".join(parts) + "."


def _draw_axis(ax: Axes, theme: Theme, axis: KeyAxis, panel: Panel, *, named: bool) -> None:
    ax.set_xlim(0, 1)
    ax.set_ylim(*panel.limits)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ticks = axis.ticks()
    ax.set_xticks(axis.at(ticks).tolist(), [key_label(k) for k in ticks])
    if axis.knee is not None:
        ax.axvspan(KNEE_SHARE, 1, color=theme.panel, zorder=-5, lw=0)
        ax.axvline(KNEE_SHARE, color=theme.faint, lw=0.8, ls=(0, (2, 2)), zorder=-1)
    if named:
        ax.set_xlabel("key position in the request (tokens)")


def _draw_rows(ax: Axes, theme: Theme, axis: KeyAxis, panel: Panel) -> None:
    view = panel.view
    for y, r in enumerate(panel.rows):
        note: dict[str, Any] = {"va": "center", "size": SIZE["tick"]}
        ax.text((LEFT - PLOT_LEFT) / PLOT_WIDTH, y, f"r{r}", ha="left", color=theme.soft, **note)
        ax.text(-0.008, y, f"{panel.lens[r]:,}", ha="right", **note)
        _draw_blocks(ax, theme, axis, y, r, view.ranges[r])
    if panel.folded:
        _draw_folded(ax, theme, axis, panel)


def _draw_blocks(ax: Axes, theme: Theme, axis: KeyAxis, y: int, r: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Draw a request's ranges: two shades in turn; runs of very short ones as one finely hatched block."""
    if not ranges:
        return
    edges = axis.at(ranges)
    fine = _fine_runs(edges)
    number = np.arange(len(edges))
    hint = HINT + _range_words(r, ranges)
    for parity, fill in enumerate((theme.request(r), theme.shade(r))):
        _add(ax, theme, edges[(number % 2 == parity) & ~fine], y, fill, theme.hatch(r), hint)
    starts, ends = (
        np.flatnonzero(np.diff(fine, prepend=False) & fine),
        np.flatnonzero(np.diff(fine, append=False) & fine),
    )
    merged = np.stack([edges[starts, 0], edges[ends, 1]], axis=-1)
    _add(ax, theme, merged, y, mix(theme.request(r), theme.paper, SECOND_SHADE / 2), theme.hatch(r) + "|" * 8, hint)


def _fine_runs(edges: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which ranges are too narrow to be told apart and have such a neighbour."""
    narrow = (edges[:, 1] - edges[:, 0]) * PLOT_WIDTH < FINE
    before, after = np.roll(narrow, 1), np.roll(narrow, -1)
    before[0] = after[-1] = False
    return narrow & (before | after)


def _add(ax: Axes, theme: Theme, edges: NDArray[np.float64], y: int, fill: str, hatch: str, hint: str) -> None:
    """Add blocks in one colour. Their edge is paper: it draws both the gap between blocks and the hatch."""
    if not len(edges):
        return
    x0, x1 = edges[:, 0], np.maximum(edges[:, 1], edges[:, 0] + LEAST_BLOCK / PLOT_WIDTH)
    path = boxes(x0, x1, y - BLOCK_HALF, y + BLOCK_HALF)
    ax.add_patch(PathPatch(path, fc=fill, ec=theme.paper, lw=0.7, hatch=hatch, gid=hint, clip_on=False))


def _range_words(r: int, ranges: Sequence[tuple[int, int]]) -> str:
    listed = ", ".join(f"{start:,}–{end - 1:,}" for start, end in ranges[:24]) + (", …" if len(ranges) > 24 else "")
    return f"r{r}: {plural(ranges[-1][1], 'key')} in {plural(len(ranges), 'range')}: {listed}"


def _draw_folded(ax: Axes, theme: Theme, axis: KeyAxis, panel: Panel) -> None:
    """Draw all other requests as one grey block, up to the shortest's end and on to the longest's, with words."""
    y = len(panel.rows)
    note: dict[str, Any] = {"va": "center", "size": SIZE["tick"]}
    lens = [panel.lens[r] for r in panel.folded]
    low, high = axis.at([min(lens), max(lens)])
    path = boxes([0, low], [low, max(high, low + LEAST_BLOCK / PLOT_WIDTH)], y - BLOCK_HALF, y + BLOCK_HALF)
    ax.add_patch(PathPatch(path, fc=theme.idle, ec=theme.paper, lw=0.7, clip_on=False))
    ax.text((LEFT - PLOT_LEFT) / PLOT_WIDTH, y, f"{len(lens):,} others", ha="left", color=theme.soft, **note)
    used = between([panel.used[r] for r in panel.folded], "range")
    words = f"{between(lens, 'key')}, {used} each"
    inside = high > 0.5
    ax.text(0.01 if inside else high + 0.01, y, words, color=theme.ink, **note)


def _draw_longest(ax: Axes, theme: Theme, axis: KeyAxis, panel: Panel) -> None:
    """Put a bracket under the longest range, where its request has a row."""
    keys, r, i = panel.view.longest
    if not keys or r not in panel.rows:
        return
    start, end = axis.at(panel.view.ranges[r][i])
    y = panel.rows.index(r) + BLOCK_HALF + 0.05
    xs, ys = [start, start, max(end, start + 0.006), max(end, start + 0.006)], [y, y + 0.14, y + 0.14, y]
    ax.plot(xs, ys, color=theme.accent, lw=1.3, clip_on=False, solid_joinstyle="miter", zorder=5)


def _draw_head(figure: Figure, theme: Theme, panel: Panel, top: float) -> None:
    """Name the schedule; say in numbers what it launches, and how long its longest range is."""
    view, right = panel.view, PLOT_LEFT + PLOT_WIDTH
    write(figure, LEFT, top + 0.25, view.name, size=SIZE["head"], weight="bold", va="bottom")
    note: dict[str, Any] = {"size": SIZE["note"], "va": "bottom"}
    keys, r, _ = view.longest
    longest, even = f"longest range: {plural(keys, 'key')}, r{r}", even_share(view)
    if even is not None and keys > even:
        longest += f" = {times(keys / even)} an even share"
    if keys:
        written = write(figure, right, top + 0.07, longest, ha="right", color=theme.accent, **note)
        right = written.get_window_extent().x0 / DPI - 0.15
    fit(write(figure, LEFT, top + 0.07, _launch_words(view), color=theme.soft, **note), right)


def _launch_words(view: ScheduleView) -> str:
    ranges = plural(sum(view.used), "range")
    if view.kv_heads is None or view.working is None:
        return ranges
    words = f"{ranges} × {plural(view.kv_heads, 'KV head')} = {plural(view.working, 'program')} with keys"
    return words if view.spare is None else f"{words}, {view.spare:,} launched empty"
