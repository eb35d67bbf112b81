"""Ordered things in colour: maps that have the paper at zero, scales from numbers to colours, and their bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from attnlab.plots.cells import Pixels, box, draw_cells, outline
from attnlab.plots.style import SIZE, Theme, inches, write

MAPS: dict[str, dict[str, tuple[str, ...]]] = {
    "weight": {
        "light": ("#FFFFFF", "#D5E3F1", "#9CC0DF", "#5B93C4", "#2A659F", "#123F70", "#071F3D"),
        "dark": ("#14171C", "#17324E", "#1F5585", "#3A81B8", "#72AFDB", "#B5D8F0", "#F4FAFF"),
    },
    "score": {
        "light": (
            *("#7A3300", "#C2641A", "#EBA868", "#F9E3CC", "#FFFFFF"),
            *("#D3E4F3", "#7FB0DA", "#2F73B3", "#0A3868"),
        ),
        "dark": (
            *("#FFD9A8", "#F0A050", "#B5682A", "#53351F", "#14171C"),
            *("#1B3A57", "#2F74AE", "#6FB1E6", "#CBE7FF"),
        ),
    },
}
"""From nothing to all, and from minus (orange) to plus (blue). Zero is the paper in both themes: strong is not dark."""
BAR_WIDTH = 0.13
BAR_STEPS = 128
LEVELS = 96
"""Cells have so many colours, more than the eye tells apart: a noisy image of them is then half as large a file."""
LEAST_SEEN = 0.14
"""Where the smallest difference lies on the map of differences: beside the paper, which stands for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How numbers become colours: `place` puts them between 0 and 1 on the map; ticks explain the bar."""

    name: str
    map: LinearSegmentedColormap
    place: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    ticks: tuple[tuple[float, str], ...]

    def colors(self, values: ArrayLike) -> Pixels:
        """Return the values' colours, RGBA: one axis more than `values`."""
        placed = np.clip(self.place(np.asarray(values, dtype=np.float64)), 0, 1)
        return np.asarray(self.map(np.round(placed * LEVELS) / LEVELS, bytes=True), dtype=np.uint8)


def weight_scale(theme: Theme, floor: float) -> Scale:
    """Return the logarithmic scale of weights, from `floor` (a power of ten, and all below it: the paper) to 1."""
    decades = round(-np.log10(floor))
    return Scale(
        name="weight",
        map=_map("weight", theme.name),
        place=lambda weights: 1 + np.log10(np.maximum(weights, floor)) / decades,
        ticks=tuple((10.0**-i, f"{100 * 10.0**-i:g}%") for i in range(decades + 1)),
    )


def share_scale(theme: Theme, name: str) -> Scale:
    """Return the even scale of shares, from 0, the paper, to 1."""
    ticks = tuple((i / 4, f"{i / 4:.0%}") for i in range(5))
    return Scale(name=name, map=_map("weight", theme.name), place=lambda shares: shares, ticks=ticks)


def score_scale(theme: Theme, limit: float, *, lower: bool = False) -> Scale:
    """Return the scale of scores, symmetric about zero whatever they are; `lower` says that some lie below its end."""
    least = f"{'≤ ' if lower else ''}−{limit:g}"
    return Scale(
        name="score",
        map=_map("score", theme.name),
        place=lambda scores: (1 + scores / limit) / 2,
        ticks=((limit, f"+{limit:g}"), (0.0, "0"), (-limit, least)),
    )


def difference_scale(theme: Theme) -> Scale:
    """Return the logarithmic scale of relative differences, 1e-8 to 1; whatever is not 0 can be told from it."""

    def place(values: NDArray[np.float64]) -> NDArray[np.float64]:
        placed = 1 + np.log10(np.clip(values, 1e-8, 1.0)) / 8
        return np.where(values > 0, LEAST_SEEN + (1 - LEAST_SEEN) * placed, 0.0)

    return Scale(
        name="difference",
        map=_map("weight", theme.name),
        place=place,
        ticks=((1.0, "≥ 1"), *((10.0**-i, f"1e-{i}") for i in (2, 4, 6)), (1e-8, "≤ 1e-8"), (0.0, "0")),
    )


@cache
def _map(name: str, theme: str) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list(f"attnlab_{name}_{theme}", MAPS[name][theme], N=512)


def draw_bar(figure: Figure, theme: Theme, scale: Scale, *, left: float, top: float, height: float) -> None:
    """Draw the bar of a scale, inches from the lower left: its name above, its ticks on the right, a hair-line frame.

    The frame is needed as the bar's zero is the paper.
    """
    ax = inches(figure, left, top - height, BAR_WIDTH, height)
    ax.axis("off")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    steps = np.arange(BAR_STEPS, 0, -1)[:, None] / BAR_STEPS
    draw_cells(ax, np.asarray(scale.map(steps, bytes=True), dtype=np.uint8), (0, 1, 0, 1))
    outline(ax, box(0, 1, 0, 1), theme.faint, 0.6)
    for y, (_, words) in zip(scale.place(np.array([value for value, _ in scale.ticks])), scale.ticks, strict=True):
        ax.plot([1, 1.3], [y, y], color=theme.faint, lw=0.7, clip_on=False)
        ax.text(1.6, y, words, size=SIZE["tick"], color=theme.soft, va="center")
    middle = left + BAR_WIDTH / 2
    write(figure, middle, top + 0.08, scale.name, size=SIZE["small"], color=theme.soft, ha="center", va="bottom")
