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

from attnlab.inspect.workbench import Workbench
from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.splits import HostSplits, SplitPlan
from attnlab.plots.key_axis import KNEE_SHARE, KeyAxis
from attnlab.plots.picture import HINT, Picture
from attnlab.plots.schedule_panel import Panel, box_pitch, draw_margin
from attnlab.plots.schedule_view import ScheduleView, distinct, in_words, schedule_views, statement
from attnlab.plots.show import show
from attnlab.plots.style import (
    DPI,
    FOOTER,
    HEADER,
    LEFT,
    LIGHT,
    SIZE,
    Theme,
    boxes,
    canvas,
    fit,
    header,
    inches,
    write,
)
from attnlab.plots.words import between, key_label, plural, times, two_digits

PLOT_LEFT, PLOT_WIDTH = 1.30, 6.25
PANEL_HEAD, PANEL_FOOT, AXIS_NAME, CAPTION_LINE = 0.50, 0.34, 0.20, 0.17
"""Inches above a panel for its name and notes, below it for the ticks, below the last one for the axis' name; and of a
third caption line, where marks occur that need it."""
FINE = 0.035
"""Blocks narrower than so many inches are not drawn one by one: their cuts would merge into a grey."""
STRIPES, LEAST_STRIPED = "|" * 6, 0.1
"""How such runs are hatched, and from how many inches on; narrower ones are plain."""
LEAST_BLOCK = 0.025
"""No block is drawn narrower."""
BLOCK_HALF = 0.37
"""Half the height of a block, in rows."""


@show.register(DecodePlan, Lane, SplitPlan, HostSplits, ScheduleView, Workbench)
def split_schedule(*xs: DecodePlan | Lane | SplitPlan | HostSplits | ScheduleView | Workbench) -> Picture:
    """Return a picture of one or more schedules, each in its own panel; of a workbench, that of its plan.

    `schedule_views(plan, name=..., multiprocessors=..., head_tiles=...)` gives a plan another name, or a device to
    compare with.
    """
    views = distinct(view for x in xs for view in ((x,) if isinstance(x, ScheduleView) else schedule_views(x)))
    title = statement(views)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, views)

    return Picture(draw=draw, title=title, alt=in_words(views))


def _figure(theme: Theme, title: str, views: Sequence[ScheduleView]) -> Figure:
    panels = [Panel.of(view) for view in views if view.ranges]
    axis, pitch = KeyAxis.of(*(view.ranges for view in views)), box_pitch(panels)
    caption = _caption(panels, axis)
    head = HEADER + CAPTION_LINE  # reserved even where no third line is needed: a control must not move the panels
    body = sum(PANEL_HEAD + panel.height + PANEL_FOOT for panel in panels)
    figure = canvas(head + body + AXIS_NAME * bool(panels) + FOOTER)
    header(figure, theme, title, caption, _source(panels, boxed=pitch is not None))
    at = figure.get_figheight() - head
    for i, panel in enumerate(panels):
        at -= PANEL_HEAD + panel.height
        ax = inches(figure, PLOT_LEFT, at, PLOT_WIDTH, panel.height)
        _draw_axis(ax, theme, axis, panel, named=i == len(panels) - 1)
        _draw_rows(ax, theme, axis, panel)
        _draw_longest(ax, theme, axis, panel)
        _draw_head(figure, theme, panel, at + panel.height)
        draw_margin(figure, theme, panel, at, pitch)
        at -= PANEL_FOOT
    return figure


def _caption(panels: Sequence[Panel], axis: KeyAxis) -> str:
    if not panels:
        return (
            "A batch with at least one request has a row for each of them here, cut into the ranges that programs read."
        )
    head = " for one KV head" if any(panel.view.kv_heads is not None for panel in panels) else ""
    row = "branch of a draft" if any(panel.view.row == "branch" for panel in panels) else "request"
    reads = f"Each row is one {row}, each block the keys that one program reads{head}"
    lines = [f"{reads} (shades alternate to show the cuts)."]
    if axis.knee is None:
        lines.append("Blocks may be read side by side, but a step cannot end before its longest block is read.")
    else:
        across = "a block across it in part" if axis.cut else "both parts are linear"
        seam = f"Right of the dashed seam the key axis is {times(axis.squeeze)} compressed; {across}."
        lines.append(f"{seam} No step ends before its longest block is read.")
    return "\n".join([*lines, *_marks(panels, axis)])


def _marks(panels: Sequence[Panel], axis: KeyAxis) -> list[str]:
    """Return a line that explains the marks that only some batches need, if this one does."""
    marks = []
    drawn = (axis.at(panel.view.ranges[r]) for panel in panels for r in panel.rows if panel.used[r])
    if any((np.ptp(_joined(edges, _fine(edges)), axis=1) >= LEAST_STRIPED / PLOT_WIDTH).any() for edges in drawn):
        marks.append("Striped: ranges too short to be drawn one by one.")
    if any(LIGHT.hatch(r) for panel in panels for r in panel.rows):
        marks.append(f"Hatched: from r{len(LIGHT.requests)} on the colours repeat.")
    if any(panel.folded for panel in panels):
        marks.append("Grey: all other requests, up to the end of their longest.")
    return [" ".join(marks)] if marks else []


def _source(panels: Sequence[Panel], *, boxed: bool) -> str:
    """Explain the words and marks of the margin that occur."""
    if not panels:
        return ""
    views = [panel.view for panel in panels]
    parts = ["Margin: ranges asked for, and ranges that hold keys"]
    if boxed and any(panel.view.nominal[r] > panel.used[r] for panel in panels for r in panel.rows):
        parts[0] += " (outlined: none)"
    if any(view.spare_ranges for view in views):
        parts.append("Spare: the launch has a fixed size, and these programs return at once")
    if any(view.kv_heads is not None and view.head_tiles is None for view in views):
        parts.append("Programs: per tile of heads")
    elif any(view.per_multiprocessor is not None for view in views):
        parts.append("A multiprocessor holds several programs at a time")
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
    """Draw a request's ranges: two shades in turn; runs of very short ones as one striped block."""
    if not ranges:
        return
    edges, number = axis.at(ranges), np.arange(len(ranges))
    fine, hint = _fine(edges), HINT + _range_words(r, ranges)
    for parity, fill in enumerate((theme.request(r), theme.shade(r))):
        _add(ax, theme, edges[(number % 2 == parity) & ~fine], y, fill, theme.hatch(r), hint)
    joined = _joined(edges, fine)
    wide = np.ptp(joined, axis=1) >= LEAST_STRIPED / PLOT_WIDTH
    for runs, stripes in ((joined[wide], STRIPES), (joined[~wide], "")):
        _add(ax, theme, runs, y, theme.request(r), theme.hatch(r) + stripes, hint)


def _fine(edges: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which ranges are too narrow to be told apart and have such a neighbour."""
    narrow = (edges[:, 1] - edges[:, 0]) * PLOT_WIDTH < FINE
    before, after = np.roll(narrow, 1), np.roll(narrow, -1)
    before[0] = after[-1] = False
    return narrow & (before | after)


def _joined(edges: NDArray[np.float64], fine: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the edges of runs of such ranges."""
    starts = fine & ~np.roll(fine, 1)
    ends = fine & ~np.roll(fine, -1)
    starts[:1], ends[-1:] = fine[:1], fine[-1:]
    return np.stack([edges[starts, 0], edges[ends, 1]], axis=-1)


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
    """Draw all other requests as one grey block, up to the end of the longest of them, with words."""
    y = len(panel.rows)
    note: dict[str, Any] = {"va": "center", "size": SIZE["tick"]}
    lens = [panel.lens[r] for r in panel.folded]
    high = float(axis.at(max(lens)))
    path = boxes([0], [max(high, LEAST_BLOCK / PLOT_WIDTH)], y - BLOCK_HALF, y + BLOCK_HALF)
    ax.add_patch(PathPatch(path, fc=theme.idle, ec=theme.faint, lw=0.7, clip_on=False))
    ax.text((LEFT - PLOT_LEFT) / PLOT_WIDTH, y, f"{len(lens):,} others", ha="left", color=theme.soft, **note)
    used = between([panel.used[r] for r in panel.folded], "range")
    words = f"{between(lens, 'key')}, {used} each"
    inside = high > 0.5
    ax.text(0.01 if inside else high + 0.01, y, words, color=theme.ink, **note)


def _draw_longest(ax: Axes, theme: Theme, axis: KeyAxis, panel: Panel) -> None:
    """Put a bracket under the longest range, where its request has a row."""
    if not panel.view.longest or panel.peak[0] not in panel.rows:
        return
    r, i = panel.peak
    start, end = axis.at(panel.view.ranges[r][i])
    y = panel.rows.index(r) + BLOCK_HALF + 0.05
    xs, ys = [start, start, max(end, start + 0.006), max(end, start + 0.006)], [y, y + 0.14, y + 0.14, y]
    ax.plot(xs, ys, color=theme.accent, lw=1.3, clip_on=False, solid_joinstyle="miter", zorder=5)


def _draw_head(figure: Figure, theme: Theme, panel: Panel, top: float) -> None:
    """Name the schedule; say in numbers what it launches, and how long its longest range is."""
    right, note = PLOT_LEFT + PLOT_WIDTH, {"size": SIZE["note"], "va": "bottom"}
    fit(write(figure, LEFT, top + 0.07, _launch_words(panel.view), color=theme.soft, **note), right)
    if panel.view.longest:
        words = _longest_words(panel)
        written = write(figure, right, top + 0.25, words, ha="right", color=theme.accent, **note)
        right = written.get_window_extent().x0 / DPI - 0.15
    fit(write(figure, LEFT, top + 0.25, panel.view.name, size=SIZE["head"], weight="bold", va="bottom"), right)


def _longest_words(panel: Panel) -> str:
    view, (r, _), even = panel.view, panel.peak, panel.view.even
    where = f"r{r}" if r in panel.rows else f"r{r} among the others"
    ties = f" (tied by {len(view.peaks) - 1:,})" if len(view.peaks) > 1 else ""
    measure = f", {times(view.longest / even)} an even share" if even is not None and view.longest > even else ""
    return f"longest range: {plural(view.longest, 'key')}, {where}{ties}{measure}"


def _launch_words(view: ScheduleView) -> str:
    ranges = plural(sum(view.used), "range")
    if view.kv_heads is None or view.working is None:
        return ranges
    tiles = f" × {view.head_tiles} head tiles" if view.head_tiles not in (None, 1) else ""
    dealt = "=" if view.busy is None else "shared by"  # where a program may read several
    words = f"{ranges} × {plural(view.kv_heads, 'KV head')}{tiles} {dealt} {plural(view.working, 'program')} with keys"
    if view.per_multiprocessor is not None:
        device = plural(view.multiprocessors or 1, "multiprocessor")
        words += f", {two_digits(view.per_multiprocessor)} for each of {device}"
    words += "" if view.spare is None else f", {view.spare:,} launched empty"
    return words + (f"; {plural(view.padded, 'padded row')} left out" if view.padded else "")
