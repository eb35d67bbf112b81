"""One head's column in a picture of merges: which splits have room for a label there, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from attnlab.plots.key_axis import tick_step
from attnlab.plots.merge_view import MergeView, Numbers

SIDE, WIDEST_PITCH = 0.22, 0.9
"""Inches from the column's edge to its first split, and at most from split to split."""
LABEL = 0.36
"""Inches from one value to the next, so that they do not meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Where one head's axes stand, in inches, and where their scales, shared by all columns, end."""

    view: MergeView
    left: float
    width: float
    lse_span: float
    weight_top: float
    distance_top: float

    @property
    def pitch(self) -> float:
        """Inches from split to split; a few do not spread over the whole width."""
        return min(WIDEST_PITCH, (self.width - 2 * SIDE) / max(1, self.view.count - 1))

    @property
    def limits(self) -> tuple[float, float]:
        """What the axes' left and right edge stand for, in splits."""
        last = self.view.count - 1
        side = (self.width / self.pitch - last) / 2
        return -side, last + side

    @property
    def numbers(self) -> dict[int, str]:
        """The splits whose numbers are written, and those numbers."""
        return {i: str(self.view.number[i]) for i in self.regular(LABEL)}

    def labelled(self) -> list[int]:
        """Return the splits that have room for a value, the heaviest first."""
        return thinned((int(i) for i in np.argsort(-self.view.weight, kind="stable")), LABEL / self.pitch)

    def clear(self, heights: Numbers, shown: Sequence[int]) -> list[int]:
        """Return those above which there is room for a value: no neighbour under the label is higher."""
        reach = int(0.5 * LABEL / self.pitch + 0.5)
        return [i for i in shown if heights[i] >= heights[max(0, i - reach) : i + reach + 1].max()]

    def regular(self, wide: float) -> list[int]:
        """Return the splits that have room for a number so many inches wide: all, or 1, 3, 5, ..., or 1, 5, 10, ..."""
        gap = ceil(wide / self.pitch)
        step = gap if gap <= 2 else tick_step(gap + 1, 1)
        kept = [i for i, number in enumerate(self.view.number) if number % step == (step == 2)]
        return thinned([0, *kept], gap)


def thinned(wanted: Iterable[int], gap: float) -> list[int]:
    """Return those positions that keep a gap from the ones before them in the list.

    >>> thinned([9, 0, 2, 4, 6, 8], 2)
    [9, 0, 2, 4, 6]
    """
    kept: list[int] = []
    for i in wanted:
        if all(abs(i - other) >= gap for other in kept):
            kept.append(i)
    return kept
