"""What leads from one bar of a window layout to the next: lines for single pages, bands for runs of neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from attnlab.plots.style import Theme, ink_of, mix
from attnlab.plots.window_bars import BAR, Bars, State
from attnlab.plots.window_queries import PLOT_WIDTH, Look

BEND = 0.05
WIDE = 0.12
"""Runs of pages that are so wide at one end, in inches, are drawn as a band, others as a line."""
MOST_LINKS = 150
"""Of more runs the longest are drawn, those that are read before others."""

Way = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Pages that are neighbours at both ends, whose left and right edges are `upper` and `lower`, in inches."""

    state: State
    pages: int
    upper: tuple[float, float]
    lower: tuple[float, float]

    @property
    def is_live(self) -> bool:
        """Whether this step reads or fills them."""
        return self.state in ("read", "new")

    @property
    def is_band(self) -> bool:
        """Whether both edges are drawn."""
        return self.pages > 1 and max(b - a for a, b in (self.upper, self.lower)) > WIDE

    def band(self, top: float, low: float) -> Way:
        """Return the area between both edges."""
        left, right = self.ways(top, low) if self.is_band else ([], [])
        return [*left, *right[::-1]]

    def ways(self, top: float, low: float) -> list[Way]:
        """Return a band's two edges, or one line from middle to middle."""
        ends = zip(self.upper, self.lower, strict=True)
        if not self.is_band:
            ends = zip([sum(self.upper) / 2], [sum(self.lower) / 2], strict=True)
        return [[(a, top), (a, top + BEND), (b, low - BEND), (b, low)] for a, b in ends]


def links(bars: Bars, level: int) -> Iterator[Link]:
    """Return what leads to a space from the bar above it."""
    pieces, run = bars.view.pieces, list[int]()
    for i in range(len(pieces) + 1):
        if run and (i == len(pieces) or not _continues(bars, run[-1], i, level)):
            yield _link(bars, run, level)
            run = []
        if i < len(pieces) and pieces[i].pages[level] is not None:
            run.append(i)


def _continues(bars: Bars, i: int, j: int, level: int) -> bool:
    a, b = bars.view.pieces[i].pages, bars.view.pieces[j].pages
    ends = [(a[k], b[k]) for k in range(max(0, level - 1), level + 1)]
    return bars.states[i] == bars.states[j] and all(x is not None and y == x + 1 for x, y in ends)


def _link(bars: Bars, run: Sequence[int], level: int) -> Link:
    first, last = bars.view.pieces[run[0]], bars.view.pieces[run[-1]]
    left, right = bars.axis.x([first.first, last.end]) * PLOT_WIDTH
    ends = [bars.cells(first.pages[k] or 0, last.pages[k] or 0, k) for k in range(max(0, level - 1), level + 1)]
    return Link(
        state=bars.states[run[0]],
        pages=len(run),
        upper=ends[0] if level else (float(left), float(right)),
        lower=ends[-1],
    )


def draw_links(ax: Axes, theme: Theme, look: Look, bars: Bars, level: int) -> None:
    """Draw bands below lines, and what this step reads or fills above what it does not."""
    shown = sorted(links(bars, level), key=lambda link: (not link.is_live, -link.pages))[:MOST_LINKS]
    top, low = bars.tops[level] + BAR, bars.tops[level + 1]
    for is_live in (False, True):
        mine = [link for link in shown if link.is_live == is_live]
        band = mix(look.read, theme.paper, 0.84) if is_live else theme.panel
        for link in mine:
            if link.is_band:
                _add(ax, [link.band(top, low)], fc=band, lw=0)
        ways = [way for link in mine for way in link.ways(top, low)]
        if ways:
            line = {"ec": ink_of(look.read, theme), "lw": 1.2} if is_live else {"ec": theme.faint, "lw": 0.6}
            _add(ax, ways, fc="none", **line)


def _add(ax: Axes, ways: Sequence[Way], **look: Any) -> None:
    """Add lines, or areas, as one path."""
    points = [point for way in ways for point in way]
    codes = [code for way in ways for code in (Path.MOVETO, *[Path.LINETO] * (len(way) - 1))]
    ax.add_patch(PathPatch(Path(points, codes), clip_on=False, **look))
