"""How a tree mask is laid out: rows by draft, columns by key, a shade for every depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.inspect.tree_view import Draft, TreeView
from attnlab.plots.cells import label_step
from attnlab.plots.color_map import weight_scale
from attnlab.plots.page_boxes import CHARACTER
from attnlab.plots.style import LEFT, Theme, inches
from attnlab.plots.token_text import visible
from attnlab.plots.tree_facts import Column, columns_of
from attnlab.plots.words import plural

TREE_LEFT, TREE_RIGHT, TREE_RIGHT_PLAIN = LEFT + 0.12, 3.50, 2.80
"""Inches: the tree's first column, and where its numbers end, with texts and without."""
MASK_RIGHT, MARGIN = 8.02, 0.08
"""Inches: where the mask ends at the latest, and from there to its numbers."""
DEEP = 0.77
"""At most so many inches from depth to depth."""
SIDE = 0.24
"""No column of the mask is wider, in inches."""
CACHED = 1.2
"""Cached keys and the gap behind them have so many inches at least, where their columns allow."""
GAP = 0.7
"""Columns between cached keys and drafts."""
ROW, TALLEST = 0.26, 4.7
"""Inches of a row, and of all rows at most."""
LABELLED = 0.15
"""Rows from so many inches on have all their numbers and texts."""
FRAMED = 20
"""Of more drafts, cells that are not seen have no frame of their own."""
SHADES = {"light": (0.80, 0.34), "dark": (0.82, 0.40)}
"""Where on the map the first and the last depth lie."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panels:
    """A view, laid out: rows by draft, columns by key."""

    theme: Theme
    view: TreeView
    columns: list[Column]
    row_of: dict[int, int]
    ramp: tuple[str, ...]

    @classmethod
    def of(cls, theme: Theme, view: TreeView) -> Panels:
        """Give every draft a row, and every depth a shade."""
        return cls(
            theme=theme,
            view=view,
            columns=columns_of(view),
            row_of={number: row for row, number in enumerate(view.order)},
            ramp=ramp_of(theme, view.depth),
        )

    @property
    def rows(self) -> int:
        """How many drafts there are."""
        return len(self.view.drafts)

    @property
    def pitch(self) -> float:
        """Inches of a row."""
        return min(ROW, TALLEST / max(1, self.rows))

    @property
    def height(self) -> float:
        """Inches of all rows."""
        return self.rows * self.pitch

    @property
    def every(self) -> int:
        """Every how many rows have labels."""
        return label_step(0.125 / self.pitch)

    @property
    def tree_right(self) -> float:
        """Inches: where the tree's numbers end."""
        return TREE_RIGHT if self.view.tokens else TREE_RIGHT_PLAIN

    @property
    def mask_left(self) -> float:
        """Inches: where the mask begins."""
        return self.tree_right + 0.16

    @property
    def first_draft(self) -> float:
        """Columns from the mask's left edge to the drafts."""
        last = self.columns[-1] if self.columns else None
        return 0.0 if last is None else last.left + last.width + GAP

    @property
    def cached_unit(self) -> float:
        """Inches of a column of one cached key: where drafts are very many, more than of a draft's."""
        if not self.columns:
            return 0.0
        share = (MASK_RIGHT - self.mask_left) / (self.first_draft + self.rows)
        return min(SIDE, max(share, CACHED / self.first_draft))

    @property
    def unit(self) -> float:
        """Inches of a draft's column."""
        return min(SIDE, (MASK_RIGHT - self.mask_left - self.drafts_left) / self.rows)

    @property
    def drafts_left(self) -> float:
        """Inches from the mask's left edge to the drafts."""
        return self.first_draft * self.cached_unit

    @property
    def mask_width(self) -> float:
        """Inches of the mask."""
        return self.drafts_left + self.rows * self.unit

    @property
    def drafts_name(self) -> str:
        """What stands above the drafts' columns."""
        return plural(self.rows, "draft") + (", in row order" if self.rows > 9 else "")

    @property
    def margin(self) -> float:
        """Inches from the mask's left edge to the numbers at its right."""
        named = self.drafts_left + CHARACTER * len(self.drafts_name) + 0.1
        return max(self.mask_width + MARGIN, named)

    @property
    def names(self) -> list[str]:
        """What stands below the columns of cached keys."""
        view = self.view
        texts = (view.cached_text(column.start) for column in self.columns)
        return [_name(column, text) for column, text in zip(self.columns, texts, strict=True)]

    @property
    def below(self) -> float:
        """Inches that names below the columns need."""
        drafts = [visible(text) for text in map(self.view.text, self.view.order) if text is not None] or ["000"]
        return 0.2 + CHARACTER * max(map(len, [*self.names, *drafts]))

    @property
    def apart(self) -> bool:
        """Whether cells have gaps between them."""
        return self.rows <= FRAMED and self.unit > 0.1

    @property
    def deep(self) -> float:
        """Inches from depth to depth."""
        room = self.tree_right - TREE_LEFT - (1.15 if self.view.tokens else 0.75)
        return min(DEEP, room / max(1, self.view.depth))

    def shade(self, draft: Draft) -> int:
        """Return a draft's place in the ramp: its depth."""
        return max(0, min(draft.depth, len(self.ramp) - 1))

    def color(self, draft: Draft) -> str:
        """Return a draft's shade."""
        return self.ramp[self.shade(draft)]

    def x(self, position: float) -> float:
        """Return where a cached position lies, in inches from the mask's left edge."""
        if not self.columns:
            return 0.0
        knots = [column.start for column in self.columns] + [self.columns[-1].stop]
        at = [column.left for column in self.columns] + [self.columns[-1].left + self.columns[-1].width]
        return float(np.interp(position, knots, at)) * self.cached_unit

    def draft_x(self, number: int) -> float:
        """Return where a draft's column begins, in inches from the mask's left edge."""
        return self.drafts_left + self.row_of[number] * self.unit


def _name(column: Column, text: str | None) -> str:
    if column.stop - column.start > 1:
        return f"{column.stop - column.start:,} keys"
    return f"{column.start:,}" if text is None else visible(text)


def ramp_of(theme: Theme, depth: int) -> tuple[str, ...]:
    """Return a colour for every depth: depth is an order, so it gets shades, and the root the ink."""
    first, last = SHADES[theme.name]
    shades = weight_scale(theme, 1e-3).map(np.linspace(first, last, max(1, depth)), bytes=True)
    return (theme.ink, *("#{:02X}{:02X}{:02X}".format(*shade[:3].tolist()) for shade in shades))


def inch_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Return axes that count inches, to the right and downwards."""
    ax = inches(figure, left, bottom, width, height)
    ax.axis("off")
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    return ax
