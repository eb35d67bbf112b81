"""A panel of the attention picture: heads as rows in frames, with their names on the left and numbers on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from attnlab.inspect.score_view import ScoreView
from attnlab.plots.attention_facts import strongest
from attnlab.plots.cells import Pixels, draw_cells, label_step, outline
from attnlab.plots.picture import HINT
from attnlab.plots.style import SIZE, Theme, boxes, inches, write
from attnlab.plots.words import share

PANEL_LEFT = 1.06
NAMES_AT = 0.48
"""Inches from the figure's left to the middle of the KV heads' names."""
MARGIN = 0.55
"""Inches from a panel's right edge to where its numbers end."""
GAP = 0.5
"""Of a row, between frames."""
ROW, TALLEST = 0.17, 2.3
"""Inches of a head's row, and of all of them: many heads have thinner ones."""
LABEL = 0.125
"""Inches that a label needs: of thinner rows only some have one, and numbers are those of frames."""
MOST_HINTS = 64
"""More heads do not have their strongest keys listed for the mouse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where heads stand within a panel, in rows from its top, and which of them share a frame.

    Where every head has a KV head of its own, frames would say nothing, and there is one.
    """

    heads: int
    frames: int

    @classmethod
    def of(cls, view: ScoreView) -> Rows:
        """Frame those that share a KV head."""
        return cls(heads=view.heads, frames=view.kv_heads if view.group > 1 else 1)

    @property
    def members(self) -> int:
        """Heads of a frame."""
        return self.heads // self.frames

    @property
    def total(self) -> float:
        """Rows of a panel, gaps included."""
        return self.heads + GAP * (self.frames - 1)

    @property
    def pitch(self) -> float:
        """Inches of a row."""
        return min(ROW, TALLEST / self.total)

    @property
    def height(self) -> float:
        """Inches of a panel."""
        return self.total * self.pitch

    def top(self, head: int) -> float:
        """Return where a head's row begins."""
        return head + GAP * (head // self.members)

    def groups(self) -> list[range]:
        """Return the heads of every frame."""
        return [range(f * self.members, (f + 1) * self.members) for f in range(self.frames)]

    def pixels(self, colors: Pixels) -> Pixels:
        """Return `[heads, columns]` colours with gaps that are clear: two lines a head, one a gap."""
        lines = np.repeat(colors, 2, axis=0).reshape(self.frames, 2 * self.members, *colors.shape[1:])
        gap = np.zeros((self.frames, 1, *colors.shape[1:]), dtype=np.uint8)
        return np.concatenate([lines, gap], axis=1).reshape(-1, *colors.shape[1:])[:-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """One panel on the figure: its axes count columns from the left and rows from the top."""

    figure: Figure
    theme: Theme
    view: ScoreView
    rows: Rows
    bottom: float
    width: float
    columns: int

    @property
    def right(self) -> float:
        """The right edge, in inches."""
        return PANEL_LEFT + self.width

    @property
    def top(self) -> float:
        """The upper edge, in inches."""
        return self.bottom + self.rows.height

    def x(self, column: float) -> float:
        """Return inches from the left."""
        return PANEL_LEFT + column / self.columns * self.width

    def y(self, row: float) -> float:
        """Return inches from the bottom."""
        return self.top - row * self.rows.pitch

    def write(self, x: float, y: float, words: str, **look: Any) -> Any:
        """Write small words at a place in inches, soft unless told otherwise."""
        return write(self.figure, x, y, words, **{"size": SIZE["tick"], "color": self.theme.soft, **look})


def draw_heads(panel: Panel, colors: Pixels) -> Axes:
    """Draw heads by columns: cells, frames and names."""
    rows, theme = panel.rows, panel.theme
    ax = inches(panel.figure, PANEL_LEFT, panel.bottom, panel.width, rows.height)
    ax.axis("off")
    ax.set_xlim(0, panel.columns)
    ax.set_ylim(rows.total, 0)
    draw_cells(ax, rows.pixels(colors), (0, panel.columns, rows.total, 0))
    tops = np.array([rows.top(group[0]) for group in rows.groups()])
    outline(ax, boxes(0, panel.columns, tops, tops + rows.members), theme.faint, 0.6)
    _name_heads(panel)
    return ax


def _name_heads(panel: Panel) -> None:
    rows, view = panel.rows, panel.view
    every = label_step(LABEL / rows.pitch)
    for head in range(0, rows.heads, every):
        hint = {"gid": HINT + strongest(view, head)} if rows.heads <= MOST_HINTS else {}
        panel.write(PANEL_LEFT - 0.07, panel.y(rows.top(head) + 0.5), f"q{head}", ha="right", va="center", **hint)
    name: dict[str, Any] = {"ha": "center", "va": "center", "weight": "bold", "rotation": 90}
    if view.group == 1:
        words = "KV 0" if view.heads == 1 else "KV = q"
        upright = rows.height > 0.45
        panel.write(NAMES_AT, panel.y(rows.total / 2), words, **name | {"rotation": 90 if upright else 0})
        return
    upright = rows.members * rows.pitch > 0.42
    every = label_step(LABEL / rows.pitch / (rows.members + GAP))
    for frame in range(0, rows.frames, every):
        y = panel.y(rows.top(frame * rows.members) + rows.members / 2)
        panel.write(NAMES_AT, y, f"KV {frame}", **name | {"rotation": 90 if upright else 0})


def draw_margin(panel: Panel, name: str, values: Sequence[float]) -> None:
    """Write each head's share at the right of its row; of rows too thin for that, each frame's mean, or that of all."""
    rows, right = panel.rows, panel.right + MARGIN
    if rows.pitch >= LABEL:
        lines = [[head] for head in range(rows.heads)]
    elif (rows.members + GAP) * rows.pitch >= LABEL:
        lines = [list(group) for group in rows.groups()]
    else:
        lines = [list(range(rows.heads))]
    mean = "" if len(lines) == rows.heads else ",\nmean"
    head: dict[str, Any] = {"size": SIZE["small"], "ha": "right", "va": "bottom", "linespacing": 1.1}
    panel.write(right, panel.top + 0.06, name + mean, **head)
    for line in lines:
        value = float(np.mean([values[h] for h in line]))
        y = panel.y((rows.top(line[0]) + rows.top(line[-1]) + 1) / 2)
        weight = "bold" if value >= 0.5 else "normal"
        panel.write(right, y, share(value), ha="right", va="center", color=panel.theme.ink, weight=weight)


def draw_line(figure: Figure, color: str, points: Sequence[tuple[float, float]], width: float = 0.7) -> None:
    """Draw a line through places in inches."""
    path = Polygon(points, closed=False, transform=figure.dpi_scale_trans, fill=False, ec=color, lw=width)
    figure.add_artist(path)
