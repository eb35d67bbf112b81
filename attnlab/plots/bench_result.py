"""A benchmark's result: how near each workload comes to what the device can do, and how it stands to each peer.

Cost as work grows is `bench_curves.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnlab.bench.result import FIRST, Goal, Result, Row
from attnlab.checks import one_of, require
from attnlab.plots.bench_curves import curves_picture
from attnlab.plots.bench_facts import (
    MOST_ROWS,
    goals_statement,
    ratios,
    row_words,
    source,
    statement,
)
from attnlab.plots.chart import HUES, MARKERS
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import FOOTER, HEADER, LEFT, SIZE, Theme, boxes, canvas, header, inches, ink_of, text_on, write
from attnlab.plots.words import share, short

NAMES, BAR, GAP = 2.25, 2.25, 0.80
"""Inches of the names of workloads, of the bars, and between these and the ratios, where attnlab's time stands."""
RATIO = 3.20
ROW, HALF = 0.215, 0.32
"""Inches of a row; half of a bar, as a share of it."""
KEY, AXIS = 0.30, 0.46
"""Inches of the row that names peers, and of the axes' words."""
TICKS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Of ratios; what lies beyond is drawn at the edge."""
CLOSE = (0.9, 0.95, 1.0, 1.05, 1.1)
"""Those of a run all of whose ratios lie between these ends, as those of recordings do."""
FULL = 1.1
SHORT = 0.15
"""Shares of the ceiling whose bar is too short for its number."""


@show.register(Result)
def bench_result(*results: Result, kind: Literal["rows", "curves"] | None = None) -> Picture:
    """Return a picture of a run: its rows, or its curves; which one is said by `kind` where it has both.

    Goals of a host are drawn as shares of what was wanted.
    """
    require(len(results) == 1, f"show: a picture shows 1 result, got {len(results)}; attnlab bench --compare holds two")
    (result,) = results
    if result.goals:
        return _goals_picture(result)
    require(len(result.rows) > 0, "show: the result has no rows; the run was cut off before the first")
    rows, on_curves = [row for row in result.rows if row.x is None], [row for row in result.rows if row.x is not None]
    chosen = one_of("kind", kind or ("rows" if rows else "curves"), ("rows", "curves"))
    there = rows if chosen == "rows" else on_curves
    require(len(there) > 0, f"kind: the result has no {chosen}")
    return _rows_picture(result, rows) if chosen == "rows" else curves_picture(result, on_curves)


def _rows_picture(result: Result, rows: Sequence[Row]) -> Picture:
    shown = rows[:MOST_ROWS]
    title = statement(result, rows)
    alt = " ".join(row_words(result, row) for row in shown)

    def draw(theme: Theme) -> Figure:
        return _rows_figure(result, shown, len(rows) - len(shown), title, theme)

    return Picture(draw=draw, title=title, alt=alt)


def _rows_figure(result: Result, rows: Sequence[Row], left_out: int, title: str, theme: Theme) -> Figure:
    body = ROW * len(rows)
    bottom = FOOTER + AXIS
    figure = canvas(bottom + body + KEY + HEADER)
    shares = [result.ceiling_share(row, FIRST) for row in rows]
    bounded = any(part is not None for part in shares)  # what runs on a host has no ceiling
    bars = (
        "Bars: what reading all keys and values, or computing all products, takes at the speed measured in this run,"
        "\nas a share of attnlab's time. "
    )
    more = f"; {left_out} more rows are in the result" if left_out else ""
    caption = f"{bars if bounded else ''}Marks: attnlab's time over a peer's; left of 1 attnlab is faster{more}."
    header(figure, theme, title, caption, source(result))
    start = LEFT + NAMES + (BAR if bounded else 0) + GAP
    right = inches(figure, start, bottom, LEFT + NAMES + BAR + GAP + RATIO - start, body)
    peers = [peer for peer in result.peers if peer != FIRST]
    _marks(right, rows, peers, theme)
    for number, row in enumerate(rows):
        y = bottom + body - (number + 0.5) * ROW
        write(figure, LEFT, y, short(row.name, 34), size=SIZE["note"], va="center")
        first = row.time_of(FIRST)
        words = "not timed" if first is None else f"{first.median_us:,.0f} us"
        write(figure, start - 0.12, y, words, size=SIZE["note"], ha="right", va="center", color=theme.soft)
    if bounded:
        left = inches(figure, LEFT + NAMES, bottom, BAR, body)
        _bars(left, [part or 0.0 for part in shares], theme, top=FULL)
        left.set_xlabel("share of the device's ceiling")
        left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
        for number, part in enumerate(shares):
            if part is not None:
                bar, inside = LEFT + NAMES + BAR * min(part, FULL) / FULL, part > SHORT
                color, side = (text_on(ink_of(theme.requests[0], theme)), "right") if inside else (theme.soft, "left")
                x, y = bar - 0.06 if inside else bar + 0.06, bottom + body - (number + 0.5) * ROW
                write(figure, x, y, share(part), size=SIZE["note"], ha=side, va="center", color=color)
    _key(figure, peers, theme, bottom + body + 0.12)
    return figure


def _bars(ax: Axes, lengths: Sequence[float], theme: Theme, *, top: float) -> None:
    y = np.arange(len(lengths)) + 0.5
    path = boxes(0, np.minimum(lengths, top), y - HALF, y + HALF)
    ax.add_patch(PathPatch(path, facecolor=ink_of(theme.requests[0], theme), edgecolor="none"))
    ax.axvline(1.0, color=theme.accent, linewidth=1.0)
    ax.set(xlim=(0, top), ylim=(len(lengths), 0))
    ax.yaxis.set_major_locator(NullLocator())


def _marks(ax: Axes, rows: Sequence[Row], peers: Sequence[str], theme: Theme) -> None:
    """Draw a mark for each peer of each row, on a logarithmic axis."""
    every = [ratios(row) for row in rows]
    there = [ratio for mine in every for peer, ratio in mine.items() if peer in peers]
    ticks = CLOSE if there and CLOSE[0] <= min(there) and max(there) <= CLOSE[-1] else TICKS
    low, high = ticks[0], ticks[-1]
    margin = (high / low) ** 0.02
    ax.set_xscale("log", base=2)
    ax.set(xlim=(low / margin, high * margin), ylim=(len(rows), 0), xlabel="attnlab's time over the peer's")
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"1/{1 / x:g}" if x <= 0.5 else f"{x:g}"))
    ax.yaxis.set_major_locator(NullLocator())
    ax.hlines(np.arange(len(rows)) + 0.5, low, high, color=theme.rule, linewidth=0.5, zorder=0)
    ax.axvline(1.0, color=theme.accent, linewidth=1.0, zorder=1)
    for number, peer in enumerate(peers):
        found = [(mine[peer], i + 0.5) for i, mine in enumerate(every) if peer in mine]
        if found:
            x = np.clip([ratio for ratio, _ in found], low, high)
            marker, color = _look(number, theme)
            filled = color if number < len(MARKERS) else theme.paper
            ax.plot(
                x, [y for _, y in found], marker, color=color, markersize=5, markerfacecolor=filled, linestyle="none"
            )


def _look(number: int, theme: Theme) -> tuple[str, str]:
    """Return the mark of a peer and its colour; from the seventh on marks are hollow."""
    return MARKERS[number % len(MARKERS)], ink_of(theme.requests[HUES[number % len(HUES)]], theme)


def _key(figure: Figure, peers: Sequence[str], theme: Theme, y: float) -> None:
    """Name the peers beside their marks, in one row above the panels."""
    x = LEFT
    for number, peer in enumerate(peers):
        marker, color = _look(number, theme)
        ax = inches(figure, x, y - 0.06, 0.14, 0.14)
        ax.set_axis_off()
        filled = color if number < len(MARKERS) else theme.paper
        ax.plot([0], [0], marker, color=color, markersize=5.5, markerfacecolor=filled)
        text = write(figure, x + 0.18, y, short(peer, 16), size=SIZE["note"], va="center")
        x = text.get_window_extent().x1 / figure.dpi + 0.22


def _goals_picture(result: Result) -> Picture:
    goals = [goal for goal in result.goals if goal.goal is not None]
    require(len(goals) > 0, "show: the result has no goals")
    title = goals_statement(goals)
    alt = " ".join(f"{goal.name}: {goal.measured:.3g} {goal.unit} of {goal.goal:g} {goal.unit}." for goal in goals)

    def draw(theme: Theme) -> Figure:
        return _goals_figure(result, goals, title, theme)

    return Picture(draw=draw, title=title, alt=alt)


def _goals_figure(result: Result, goals: Sequence[Goal], title: str, theme: Theme) -> Figure:
    body, bottom = ROW * len(goals), FOOTER + AXIS
    figure = canvas(bottom + body + HEADER)
    caption = "A bar is what was measured, as a share of what it is to be at most.\nWhat ends left of the line is met."
    header(figure, theme, title, caption, source(result))
    parts = [goal.measured / goal.goal for goal in goals if goal.goal]
    ax = inches(figure, LEFT + NAMES + 0.6, bottom, BAR + 1.6, body)
    _bars(ax, parts, theme, top=max(FULL, *parts))
    ax.set_xlabel("measured over goal")
    for number, goal in enumerate(goals):
        y = bottom + body - (number + 0.5) * ROW
        write(figure, LEFT, y, short(goal.name, 44), size=SIZE["note"], va="center")
        words = f"{goal.measured:,.3g} of {goal.goal:g} {goal.unit}"
        write(figure, LEFT + NAMES + BAR + 2.3, y, words, size=SIZE["note"], va="center", color=theme.soft)
    return figure
