"""Cost as work grows: a panel for each curve of a benchmark's result, a line for each peer."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log2

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from attnlab.bench.result import Result, Row
from attnlab.bench.workloads import CURVES
from attnlab.plots.bench_facts import growth, source
from attnlab.plots.chart import DASHES, MOST_LINES, line_rc, plain
from attnlab.plots.picture import Picture
from attnlab.plots.style import FOOTER, HEADER, LEFT, RIGHT, SIZE, Theme, canvas, header, inches, write

HEIGHT, HEAD, WORDS = 1.75, 0.30, 0.55
"""Inches of a panel, above it for its name, and below for the axis's words."""
Y_WORDS, BETWEEN, KEY = 0.62, 0.80, 0.28
MOST_TICKS = 6
SHORT = {"curve-batch": "requests", "curve-context": "tokens", "curve-splits": "ranges", "curve-pages": "slots a page"}


def curves_picture(result: Result, rows: Sequence[Row]) -> Picture:
    """Return a picture of the rows that are on curves."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: row.x or 0.0)
    first = next(iter(groups))
    title = f"{_capital(growth(SHORT.get(first, first), groups[first]))}: how the cost of a decode grows"
    alt = " ".join(f"{_named(name)}: {growth(SHORT.get(name, name), group)}." for name, group in groups.items())
    lines = [peer for peer in result.peers if any(row.time_of(peer) for row in rows)][:MOST_LINES]

    def draw(theme: Theme) -> Figure:
        with matplotlib.rc_context(line_rc(theme)):
            return _figure(result, groups, lines, title, theme)

    return Picture(draw=draw, title=title, alt=alt)


def _figure(result: Result, groups: dict[str, list[Row]], lines: Sequence[str], title: str, theme: Theme) -> Figure:
    down, across = -(-len(groups) // 2), min(2, len(groups))
    figure = canvas(FOOTER + down * (HEIGHT + HEAD + WORDS) + KEY + HEADER)
    caption = (
        "Microseconds of a call; both axes are logarithmic."
        "\nThe line without marks is what the device's measured ceiling allows for the same work."
    )
    header(figure, theme, title, caption, source(result))
    width = (RIGHT - LEFT - across * Y_WORDS - (across - 1) * (BETWEEN - Y_WORDS)) / across
    axes = None
    for number, (name, rows) in enumerate(groups.items()):
        left = LEFT + Y_WORDS + (number % 2) * (width + BETWEEN)
        bottom = FOOTER + WORDS + (down - 1 - number // 2) * (HEIGHT + HEAD + WORDS)
        axes = inches(figure, left, bottom, width, HEIGHT)
        _panel(axes, result, name, rows, lines, theme)
    if axes is not None:
        _key(figure, axes, theme, figure.get_figheight() - HEADER - 0.08)
    return figure


def _panel(ax: Axes, result: Result, name: str, rows: Sequence[Row], lines: Sequence[str], theme: Theme) -> None:
    xs = [row.x for row in rows if row.x is not None]
    for dash, peer in zip(DASHES, lines, strict=False):
        points = [(row.x or 0.0, one.median_us) for row in rows if (one := row.time_of(peer)) is not None]
        ax.plot([x for x, _ in points], [y for _, y in points], label=peer, linestyle=dash)
    if result.ceilings is not None:
        bound = [result.ceilings.bound_us(kv_bytes=row.kv_bytes, flops=row.flops) for row in rows]
        ax.plot(xs, bound, color=theme.soft, linestyle=":", marker="", linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel=_named(name), ylabel="µs" if name else "")
    ax.set_title(SHORT.get(name, name).capitalize(), pad=4)
    step = -(-len(xs) // MOST_TICKS)
    ax.xaxis.set_major_locator(FixedLocator(xs[::step]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _count(x)))
    low, high = ax.get_ylim()
    wide = high / low > 50
    if not wide:  # from one power of two to another: two ticks at least
        low, high = 2.0 ** floor(log2(low)), 2.0 ** ceil(log2(high))
        ax.set_ylim(low, high)
    ax.yaxis.set_major_locator(LogLocator(base=10 if wide else 2))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: plain(y)))
    for axis, ends in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, (low, high))):
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(NullLocator())
        axis.set_major_locator(FixedLocator([at for at in axis.get_majorticklocs() if ends[0] <= at <= ends[1]]))
    ax.set_ylim(low, high)


def _key(figure: Figure, ax: Axes, theme: Theme, y: float) -> None:
    """Name the lines in one row above the panels."""
    x = LEFT
    for dash, line in zip(DASHES, [line for line in ax.get_lines() if line.get_marker()], strict=False):
        name = str(line.get_label())
        mark = inches(figure, x, y - 0.06, 0.42, 0.12)
        mark.set_axis_off()
        mark.set(xlim=(0, 2), ylim=(-1, 1))
        look = {"color": line.get_color(), "linestyle": dash, "marker": line.get_marker()}
        mark.plot([0.1, 1, 1.9], [0, 0, 0], markevery=[1], **look)
        text = write(figure, x + 0.48, y, name, size=SIZE["note"], va="center", color=theme.ink)
        x = text.get_window_extent().x1 / figure.dpi + 0.22


def _named(group: str) -> str:
    return CURVES.get(group, group)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _count(x: float) -> str:
    """Return a power of two in short.

    >>> _count(4096.0), _count(2**20), _count(64.0)
    ('4k', '1M', '64')
    """
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if x >= size:
            return f"{x / size:g}{unit}"
    return f"{x:g}"
