"""The axis of key positions. One long request among short ones gets a seam, beyond which the axis is compressed.

Both parts are linear: on a logarithmic axis equal ranges would look unequal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

KNEE_SHARE = 0.62
"""Part of the width that lies before the seam."""
SEAM_FROM = 4
"""There is a seam where the longest request has at least this many times the keys of the second longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAxis:
    """Key positions 0 to `top` on a width of 1; from `knee` on compressed, where there is one."""

    top: int
    knee: int | None = None

    @classmethod
    def of(cls, lens: Sequence[int]) -> KeyAxis:
        """Return the axis on which requests of these lengths can be seen together."""
        second, top = [0, 0, *sorted(lens)][-2:]
        if second == 0 or top < SEAM_FROM * second:
            return cls(top=max(1, top))
        step = tick_step(second, 6)
        knee = -(-second // step) * step
        return cls(top=top, knee=knee if 2 * knee < top else second)

    @property
    def squeeze(self) -> float:
        """How many times more keys a stretch of the axis stands for beyond the seam than before it; else 1."""
        if self.knee is None:
            return 1.0
        return (self.top - self.knee) / (1 - KNEE_SHARE) * KNEE_SHARE / self.knee

    def at(self, keys: ArrayLike) -> NDArray[np.float64]:
        """Return where keys lie, 0 to 1."""
        positions = np.asarray(keys, dtype=np.float64)
        if self.knee is None:
            return positions / self.top
        return np.asarray(np.interp(positions, (0, self.knee, self.top), (0, KNEE_SHARE, 1)))

    def ticks(self) -> list[int]:
        """Return round positions to label."""
        if self.knee is None:
            return list(range(0, self.top + 1, tick_step(self.top, 8)))
        near = range(0, self.knee + 1, tick_step(self.knee, 6))
        step = tick_step(self.top - self.knee, 4)
        far = [k for k in range(0, self.top + 1, step) if self.at(k) > KNEE_SHARE + 0.05]
        return [*(k for k in near if self.at(k) < KNEE_SHARE - 0.04), self.knee, *far]


def tick_step(span: int, most: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, ... that fits at most `most` times into the span.

    >>> tick_step(22648, 6), tick_step(1_000_000, 8)
    (5000, 200000)
    """
    unit = 1
    while True:
        for step in (unit, 2 * unit, 5 * unit):
            if step * most >= span:
                return step
        unit *= 10
