"""One look for every picture: two papers, colours of requests, type, and axes placed in inches.

Matplotlib enters here and nowhere below. No pyplot: figures are plain objects, so that pictures can be drawn without a
display, inside a widget's call-back, and beside whatever a notebook draws for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Text
from numpy.typing import ArrayLike

from attnlab.checks import one_of

WIDTH = 9.0
"""Inches, for every picture; the height grows with the content."""
DPI = 100
"""Pixels of an inch while text is measured."""
LEFT, RIGHT = 0.30, WIDTH - 0.15
"""Where text begins, and where it must have ended, in inches from the left."""
HEADER, FOOTER = 1.00, 0.32
"""Inches that the title with its two caption lines, and the line of the source, take."""

FONTS = ("Arial", "Liberation Sans", "Helvetica", "DejaVu Sans")
"""The first that is installed is used. The first three are equally wide; the last, always there, is wider."""
SIZE = {"title": 13.5, "caption": 9.2, "head": 10.0, "label": 9.0, "tick": 8.3, "note": 8.3, "small": 7.4, "big": 20.0}
"""Type sizes in points."""
LEAST_SIZE = 6.0

HATCHES = ("", "////", "\\\\\\\\", "xxxx")
"""Requests 12 to 23 wear the first twelve colours again with the second hatch, and so on. No dots: an SVG spells out
every one of them in curves."""
SECOND_SHADE = 0.38
"""How far the alternate shade of a request lies towards the paper, or else towards the ink."""
SEEN = 3.0
"""The least contrast to the paper of a mark that matters; the light paper's palest four colours have 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """The colours of one paper, by role.

    `ink` writes titles and numbers, `soft` captions, `faint` lines; `rule` frames what is empty, `panel` and `idle`
    lie under what is secondary. `accent` says "look here", once a picture. `requests` are told apart with any colour
    vision; they belong to requests, and in a chart, where there are none, to lines.
    """

    name: str
    paper: str
    ink: str
    soft: str
    faint: str
    rule: str
    panel: str
    idle: str
    accent: str
    good: str
    requests: tuple[str, ...]

    def request(self, number: int) -> str:
        """Return the colour of a request of the batch."""
        return self.requests[number % len(self.requests)]

    def hatch(self, number: int) -> str:
        """Return the hatch that tells a request from the one twelve before."""
        return HATCHES[number // len(self.requests) % len(HATCHES)]

    def shade(self, number: int) -> str:
        """Return the second shade of a request, for every other of its ranges: paler where that is SEEN."""
        paler, bolder = (mix(self.request(number), to, SECOND_SHADE) for to in (self.paper, self.ink))
        return paler if contrast(paler, self.paper) >= SEEN else bolder


LIGHT = Theme(
    name="light",
    paper="#FFFFFF",
    ink="#1B1F24",
    soft="#57606A",
    faint="#7B858F",
    rule="#D5DBE1",
    panel="#F3F5F7",
    idle="#E9EDF1",
    accent="#C2185B",
    good="#1A7F5A",
    requests=(
        *("#1E4DAD", "#E37517", "#2D8BA3", "#C8B609", "#892E74", "#57C2DB"),
        *("#99660B", "#F794A1", "#4F552E", "#9E92F7", "#C7496F", "#815ECD"),
    ),
)
DARK = Theme(
    name="dark",
    paper="#14171C",
    ink="#E8ECF0",
    soft="#A9B3BE",
    faint="#77828E",
    rule="#333A43",
    panel="#1C2128",
    idle="#252B33",
    accent="#FF7AA8",
    good="#5FD3A6",
    requests=(
        *("#1366B5", "#DF8E13", "#07A1B9", "#C7C81F", "#AA387F", "#3BD0E8"),
        *("#7B603B", "#F7A8A1", "#838130", "#A893FA", "#B6797F", "#7B71E4"),
    ),
)
# One palette for both papers leaves blue and plum without contrast on the dark one; lifting them makes pairs collide.
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


def theme_of(name: str) -> Theme:
    """Return the theme of that name, "light" or "dark"."""
    return THEMES[one_of("theme", name, list(THEMES))]


def luminance(color: str) -> float:
    """Return the relative luminance of a colour, as contrast ratios are defined on it."""
    rgb = np.asarray(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def mix(a: str, b: str, weight: float) -> str:
    """Return colour a, moved by `weight` of the way to b."""
    return str(to_hex((1 - weight) * np.asarray(to_rgb(a)) + weight * np.asarray(to_rgb(b))))


def text_on(fill: str) -> str:
    """Return near-black or white, whichever reads better on a fill."""
    return max("#0B0D10", "#FFFFFF", key=lambda color: contrast(color, fill))


def ink_of(color: str, theme: Theme, need: float = SEEN) -> str:
    """Return the same hue for lines, dots (SEEN) or text (4.5): moved to the ink until its contrast is `need`."""
    steps = (mix(color, theme.ink, i / 20) for i in range(21))
    return next((c for c in steps if contrast(c, theme.paper) >= need), theme.ink)


def rc(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings for a theme."""
    installed = set(font_manager.get_font_names())
    return {
        "figure.facecolor": theme.paper,
        "figure.dpi": DPI,
        "font.family": [font for font in FONTS if font in installed],
        "font.size": SIZE["note"],
        "text.color": theme.ink,
        "text.parse_math": False,  # a policy may be called "$"
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.faint,
        "axes.linewidth": 0.7,
        "axes.labelcolor": theme.soft,
        "axes.labelsize": SIZE["label"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": theme.faint,
        "xtick.labelcolor": theme.soft,
        "xtick.labelsize": SIZE["tick"],
        "xtick.major.size": 3,
        "xtick.major.width": 0.7,
        "lines.linewidth": 1.6,
        "patch.linewidth": 0,
        "hatch.linewidth": 0.7,
        "svg.fonttype": "none",
        "svg.hashsalt": "attnlab",
    }


_ONE_AT_A_TIME = RLock()
"""Matplotlib's settings are the process's: threads that draw take turns."""


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """Draw and save under a theme. Whatever the user has set for matplotlib neither matters nor changes."""
    with _ONE_AT_A_TIME, matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(rc(theme))
        yield


def canvas(height: float) -> Figure:
    """Return an empty figure of the common width that can measure text."""
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    return figure


def inches(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Return axes placed in inches from the lower left: labels of any length do not move them."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, bottom / h, width / w, height / h))


def write(figure: Figure, x: float, y: float, text: str, **look: Any) -> Text:
    """Write text at a place in inches from the lower left."""
    w, h = figure.get_size_inches()
    return figure.text(x / w, y / h, text, **look)


def header(figure: Figure, theme: Theme, title: str, caption: str, source: str = "") -> None:
    """Write what is seen (a sentence), how to read it (two lines) and, at the foot, where it comes from."""
    top = figure.get_figheight()
    fit(write(figure, LEFT, top - 0.20, title, size=SIZE["title"], weight="bold", va="top"))
    caption_look = {"size": SIZE["caption"], "color": theme.soft, "va": "top", "linespacing": 1.35}
    fit(write(figure, LEFT, top - 0.52, caption, **caption_look))
    if source:
        fit(write(figure, LEFT, 0.09, source, size=SIZE["small"], color=theme.soft, va="bottom"))


def fit(text: Text, right: float = RIGHT) -> Text:
    """Shrink text until it ends `right` inches from the left: a wider font must not push words off the canvas."""
    size = float(text.get_fontsize())
    while size > LEAST_SIZE:
        extent = text.get_window_extent()
        room = right * DPI - extent.x0
        if extent.width <= room:
            break
        # Widths of type go in steps, not quite with its size.
        size = max(LEAST_SIZE, size * min(0.98, room / extent.width))
        text.set_fontsize(size)
    return text


def boxes(x0: ArrayLike, x1: ArrayLike, y0: ArrayLike, y1: ArrayLike) -> Path:
    """Return one path of many boxes between these edges: a thousand boxes then cost as much as one."""
    left, right, low, high = np.broadcast_arrays(*(np.asarray(edge, dtype=float) for edge in (x0, x1, y0, y1)))
    xs = np.stack([left, right, right, left], axis=-1)
    ys = np.stack([low, low, high, high], axis=-1)
    return Path.make_compound_path_from_polys(np.stack([xs, ys], axis=-1))
