"""One schedule's panel: which requests have a row in it, and the margin that says what was asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from attnlab.plots.schedule_view import ScheduleView
from attnlab.plots.style import SIZE, Theme, boxes, inches, write
from attnlab.plots.words import plural

MAX_ROWS, KEPT_ROWS = 24, 8
"""Of a batch of more requests than MAX_ROWS, the KEPT_ROWS longest have a row each; the others share one."""
MAX_BOXES = 12
"""Where more ranges than this are asked for a request, the margins of all panels have numbers instead of boxes."""
MARGIN_LEFT, MARGIN_WIDTH = 7.74, 1.11
ASKED_AT = 0.55
"""Where numbers of ranges asked for end, in inches from the margin's left."""
BOX = 0.08
"""The side of a box, in inches, where there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A view, laid out: the requests that have a row, in batch order, and those that share the last one."""

    view: ScheduleView
    lens: tuple[int, ...]
    used: tuple[int, ...]
    rows: tuple[int, ...]
    folded: tuple[int, ...]

    @classmethod
    def of(cls, view: ScheduleView) -> Panel:
        """Fold what is too much for a row each."""
        lens = view.lens
        everyone = range(len(lens))
        kept = everyone if len(lens) <= MAX_ROWS else sorted(everyone, key=lambda r: (-lens[r], r))[:KEPT_ROWS]
        has_row = set(kept)
        folded = tuple(r for r in everyone if r not in has_row)
        return cls(view=view, lens=lens, used=view.used, rows=tuple(sorted(kept)), folded=folded)

    @property
    def peak(self) -> tuple[int, int]:
        """Request and number of the longest range that a reader is pointed to: of several, the first with a row."""
        return min(self.view.peaks, key=lambda peak: peak[0] not in self.rows)

    @property
    def lines(self) -> int:
        """Rows, the shared one included."""
        return max(1, len(self.rows) + bool(self.folded))

    @property
    def height(self) -> float:
        """Inches of the rows."""
        return self.lines * self.pitch

    @property
    def pitch(self) -> float:
        """Inches from row to row: the more rows, the closer."""
        return min(0.26, max(0.155, 2.36 / self.lines))

    @property
    def limits(self) -> tuple[float, float]:
        """The rows that the axes' lower and upper edge stand for, with room for the bracket below the last row."""
        return self.lines - 0.5 + 0.04 / self.pitch, -0.6


def box_pitch(panels: Sequence[Panel]) -> float | None:
    """Return inches from box to box in every panel's margin, or None where there are too many for boxes."""
    most = max((max(panel.view.nominal[r], panel.used[r]) for panel in panels for r in panel.rows), default=0)
    return min(0.1, 0.84 / most) if 0 < most <= MAX_BOXES else None


def draw_margin(figure: Figure, theme: Theme, panel: Panel, bottom: float, pitch: float | None) -> None:
    """List ranges asked for (boxes, or a number) and ranges that hold keys (a number) beside every row."""
    rows, nominal, used = panel.rows, panel.view.nominal, panel.used
    ax = inches(figure, MARGIN_LEFT, bottom, MARGIN_WIDTH, panel.height)
    ax.set_xlim(0, MARGIN_WIDTH)
    ax.set_ylim(*panel.limits)
    ax.axis("off")
    for y, r in enumerate(rows):
        _number(ax, MARGIN_WIDTH, y, used[r])
        if pitch is None:
            _number(ax, ASKED_AT, y, nominal[r])
        else:
            _draw_asked(ax, theme.request(r), y, nominal[r], used[r], pitch, BOX / 2 / panel.pitch)
    if panel.folded:
        _number(ax, ASKED_AT, len(rows), sum(nominal[r] for r in panel.folded))
        _number(ax, MARGIN_WIDTH, len(rows), sum(used[r] for r in panel.folded))
    head: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "va": "bottom"}
    top = bottom + panel.height + 0.07
    asked_at, side = (MARGIN_LEFT + ASKED_AT, "right") if pitch is None else (MARGIN_LEFT, "left")
    write(figure, asked_at, top, "asked", ha=side, **head)
    write(figure, MARGIN_LEFT + MARGIN_WIDTH, top, "used", ha="right", **head)
    if panel.view.spare_ranges:
        spare = f"+ {plural(panel.view.spare_ranges, 'spare range')}"
        write(figure, MARGIN_LEFT + MARGIN_WIDTH, bottom - 0.23, spare, ha="right", **head)


def _draw_asked(ax: Axes, color: str, y: int, asked: int, used: int, pitch: float, half: float) -> None:
    """Draw a box for each range asked for: filled where it holds keys, an outline where rounding left it empty."""
    left = np.arange(max(asked, used)) * pitch + 0.01
    for some, fill in ((left[:used], color), (left[used:], "none")):
        if len(some):
            path = boxes(some, some + 0.72 * pitch, y - half, y + half)
            ax.add_patch(PathPatch(path, fc=fill, ec=color, lw=0.8, clip_on=False))


def _number(ax: Axes, x: float, y: int, value: int) -> None:
    ax.text(x, y, f"{value:,}", ha="right", va="center", size=SIZE["tick"])
