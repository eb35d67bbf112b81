"""Cells: many of them as one small image or one path, areas for the mouse, and where labels stand."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from numpy.typing import NDArray

from attnlab.plots.picture import HINT
from attnlab.plots.style import Theme, boxes

Pixels = NDArray[np.uint8]
"""Colours, RGBA in the last axis."""

UNSEEN = 0.004
"""The opacity of areas that only the mouse finds; with 0 matplotlib would not fill them, and a mouse ignores holes."""


def draw_cells(ax: Axes, pixels: Pixels, extent: tuple[float, float, float, float]) -> None:
    """Draw coloured cells `[rows, columns, RGBA]`, first row on top, between left, right, bottom and top.

    They travel as an image of a pixel a cell, which viewers enlarge without smoothing: a thousand cells in a kilobyte.
    """
    limits = ax.get_xlim(), ax.get_ylim()
    left, right, low, high = extent
    # In axes turned upside down the image's lower edge has the larger number.
    ax.imshow(pixels, extent=(left, right, low, high), interpolation="none", aspect="auto", clip_on=False)
    ax.set_xlim(*limits[0])
    ax.set_ylim(*limits[1])


def fill(ax: Axes, path: Path, color: str, *, hint: str = "", hatch: str = "", edge: str = "none") -> None:
    """Fill one path of many boxes; a hatch is drawn in the colour of the edge."""
    gid = HINT + hint if hint else None
    ax.add_patch(PathPatch(path, fc=color, ec=edge, lw=0, hatch=hatch, gid=gid, clip_on=False))


def outline(ax: Axes, path: Path, color: str, width: float = 0.8) -> None:
    """Draw the outlines of one path of many boxes."""
    ax.add_patch(PathPatch(path, fc="none", ec=color, lw=width, clip_on=False))


def box(left: float, right: float, low: float, high: float) -> Path:
    """Return a path of one box."""
    return boxes([left], [right], low, high)


def hover(ax: Axes, path: Path, hint: str, theme: Theme) -> None:
    """Lay an area over cells where the mouse finds words (SVG, HTML); it is not to be seen."""
    ax.add_patch(PathPatch(path, fc=to_rgba(theme.paper, UNSEEN), lw=0, gid=HINT + hint, clip_on=False, zorder=9))


def label_step(least: float) -> int:
    """Return a power of two that is not less: labels so many cells apart do not meet, and are round.

    >>> [label_step(x) for x in (0.3, 1.0, 2.5)]
    [1, 1, 4]
    """
    return 1 << max(0, ceil(log2(max(least, 1.0))))
