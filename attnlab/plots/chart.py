"""Charts: a notebook's own numbers as lines, in the look of all other pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from attnlab.checks import require
from attnlab.plots.picture import Picture
from attnlab.plots.style import LEFT, RIGHT, SIZE, Theme, canvas, header, inches, ink_of, theme_of

TITLE, HEAD, FOOT, HEIGHT = 0.62, 0.24, 0.52, 2.3
"""Inches for the title, for the panels' heads, below the axes for the axis's words, and of the axes."""
Y_WORDS, BETWEEN, NAMES, NAME = 0.62, 0.9, 2.35, 0.21
"""Inches at the left of the axes, between two of them, for the names of lines beside one panel, and above several."""
MOST_PANELS = 2
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (1, 1.5)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
"""Lines differ in more than colour, and one that lies on another shows it between its dashes."""
HUES = (0, 1, 2, 3, 4, 10)
"""Which of the requests' colours lines have, in their order."""
MOST_LINES = len(HUES)
"""From the next one on, a line would look like the first."""
MOST_TICKS = 12
WIDE = 2**12
"""A logarithmic axis over a larger ratio has ticks at powers of 10, else of 2."""

Lines = Mapping[str, Sequence[float]]
"""A line's name, and its values."""


def chart(
    x: Sequence[float],
    *panels: Lines,
    title: str,
    xlabel: str,
    ylabel: str | Sequence[str],
    panel_titles: Sequence[str] = (),
    log: str = "",
    ylim: tuple[float, float] | None = None,
    theme: str = "light",
) -> Picture:
    """Return a picture of lines over the same `x`: a panel for each dict of a line's name and its values.

    `title` is a sentence that states what is to be seen; `panel_titles` are the panels' own, and `ylabel` may be one
    for each. `log` names the axes that are logarithmic: "x", "y" or "xy"; a linear y axis has 0 on it. Any colour
    vision tells the lines of a panel apart, 6 at most, which have dashes and markers too, in their order. `theme` is
    what a notebook displays, "light" or "dark".
    Raises ValueError where a line has not a value for each x, where a panel has more lines than can be told apart, and
    where a logarithmic axis would have no place for a value.

    >>> values = {"n": [1, 2, 4], "n squared": [1, 4, 16]}
    >>> picture = chart([1, 2, 4], values, title="Squares grow twice as steeply", xlabel="n", ylabel="value", log="xy")
    >>> picture.alt
    'value by n. n: 1 at 1, 4 at 4. n squared: 1 at 1, 16 at 4.'
    >>> chart([1, 2], {"n": [1]}, title="Too short", xlabel="n", ylabel="value")
    Traceback (most recent call last):
    ValueError: panels: line 'n' has 1 value for 2 of x
    """
    require(1 <= len(panels) <= MOST_PANELS, f"panels: expected 1 or {MOST_PANELS} dicts of lines, got {len(panels)}")
    require(log in ("", "x", "y", "xy"), f"log: expected x, y or xy, got {log!r}")
    require(title.strip() != "", "title: expected a sentence that states what is to be seen, got none")
    titles = len(panel_titles)
    require(titles in (0, len(panels)), f"panel_titles: expected {len(panels)}, one for each panel, got {titles}")
    ylabels = [ylabel] * len(panels) if isinstance(ylabel, str) else list(ylabel)
    require(len(ylabels) == len(panels), f"ylabel: expected {len(panels)}, one for each panel, got {len(ylabels)}")
    xs, made = [float(value) for value in x], []
    _fits("x", log, "x: it has", xs)
    _fits("y", log, "ylim: it has", ylim or ())
    for number, lines in enumerate(panels):
        values = {name: [float(value) for value in its] for name, its in lines.items()}
        words = f"panels: expected at most {MOST_LINES} lines in each, more look alike, got {len(values)}"
        require(len(values) <= MOST_LINES, f"{words}; leave some out, or draw two panels")
        for name, its in values.items():
            words = f"{len(its)} value{'s' * (len(its) != 1)}"
            require(len(its) == len(xs), f"panels: line {name!r} has {words} for {len(xs)} of x")
            _fits("y", log, f"panels: line {name!r} has", its)
        head = panel_titles[number] if panel_titles else ""
        made.append(_Panel(x=xs, lines=values, head=head, xlabel=xlabel, ylabel=ylabels[number], log=log, ylim=ylim))

    def draw(theme: Theme) -> Figure:
        with matplotlib.rc_context(line_rc(theme)):
            return _figure(theme, title, made)

    return Picture(draw=draw, title=title, alt=" ".join(panel.words for panel in made), theme=theme_of(theme).name)


def _fits(axis: str, log: str, whose: str, values: Sequence[float]) -> None:
    """Raise where a value has no logarithm, and its axis is logarithmic."""
    lost = [value for value in values if value <= 0 and axis in log]
    words = f"which has no place on a logarithmic {axis} axis; leave {axis!r} out of log={log!r}, or the value out"
    require(not lost, f"{whose} {', '.join(map(plain, lost))}, {words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One pair of axes, and the lines on it."""

    x: list[float]
    lines: dict[str, list[float]]
    head: str
    xlabel: str
    ylabel: str
    log: str
    ylim: tuple[float, float] | None

    @property
    def words(self) -> str:
        """What is to be seen: each line from its first value to its last."""
        parts = [f"{self.head}: {self.ylabel} by {self.xlabel}" if self.head else f"{self.ylabel} by {self.xlabel}"]
        for name, values in self.lines.items():
            ends = [f"{plain(y)} at {plain(at)}" for at, y in zip(self.x, values, strict=True)]
            parts.append(f"{name}: {', '.join([*ends[:1], *ends[1:][-1:]]) or 'nothing'}")
        return f"{'. '.join(parts)}."

    def draw(self, ax: Axes) -> None:
        """Draw lines and axes."""
        for name, values in self.lines.items():
            ax.plot(self.x, values, label=name)
        ax.set(xlabel=self.xlabel, ylabel=self.ylabel)
        ax.set_title(self.head, pad=4)
        if "x" in self.log:
            ax.set_xscale("log", base=2)
        if "y" in self.log:
            ax.set_yscale("log")
        else:
            low, high = ax.get_ylim()
            values = [value for its in self.lines.values() for value in its]
            ax.set_ylim(low if any(value < 0 for value in values) else 0, max(high, 0))
        if self.ylim:
            ax.set_ylim(*self.ylim)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
            axis.set_minor_formatter(NullFormatter())
            axis.set_minor_locator(NullLocator())
        low, high = ax.get_ylim()
        if "y" in self.log:
            ax.yaxis.set_major_locator(LogLocator(base=10 if high / low > WIDE else 2))
        if "x" in self.log and len(self.x) <= MOST_TICKS:
            ax.xaxis.set_major_locator(FixedLocator(self.x))
        for axis, ends in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            axis.set_major_locator(FixedLocator([at for at in axis.get_majorticklocs() if ends[0] <= at <= ends[1]]))


def line_rc(theme: Theme) -> dict[str, Any]:
    """Return what lines and their names need beside the look of all pictures."""
    colors = [ink_of(theme.requests[number], theme) for number in HUES]
    return {
        "axes.prop_cycle": cycler(color=colors) + cycler(marker=MARKERS) + cycler(linestyle=DASHES),
        "axes.titlesize": SIZE["head"],
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": theme.rule,
        "grid.linewidth": 0.6,
        "lines.markersize": 4.5,
        "lines.linewidth": 1.4,
        "legend.frameon": False,
        "legend.fontsize": SIZE["note"],
        "legend.handlelength": 3.2,
        "legend.labelcolor": theme.ink,
        "ytick.color": theme.faint,
        "ytick.labelcolor": theme.soft,
        "ytick.labelsize": SIZE["tick"],
        "ytick.major.size": 3,
        "ytick.major.width": 0.7,
    }


def _figure(theme: Theme, title: str, panels: Sequence[_Panel]) -> Figure:
    alone, heads = len(panels) == 1, HEAD * any(panel.head for panel in panels)
    below = 0.0 if alone else NAME * max(len(panel.lines) for panel in panels) + 0.1
    figure = canvas(TITLE + heads + HEIGHT + FOOT + below)
    width = (RIGHT - LEFT - Y_WORDS - NAMES * alone - BETWEEN * (len(panels) - 1)) / len(panels)
    for number, panel in enumerate(panels):
        left = LEFT + Y_WORDS + number * (width + BETWEEN)
        ax = inches(figure, left, FOOT + below, width, HEIGHT)
        panel.draw(ax)
        if len(panel.lines) > 1 or not alone:
            anchor = (1.0 + 0.1 / width, 1.0) if alone else (0.0, -FOOT / HEIGHT)
            ax.legend(loc="upper left", bbox_to_anchor=anchor, borderaxespad=0, borderpad=0)
    header(figure, theme, title, "")
    return figure


def plain(x: float) -> str:
    """Return a number for an axis, or for the words about one.

    >>> [plain(x) for x in (0, 1e-9, 2.5e-4, 0.0015, 0.25, 3.14159, 999.9, 34816.0)]
    ['0', '1e-9', '2.5e-4', '0.0015', '0.25', '3.14', '1,000', '34,816']
    """
    if 0 < abs(x) < 1e-3:
        digits, exponent = f"{x:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{x:,.0f}" if abs(x) >= 999.5 else f"{x:.3g}"
