"""The axis of key positions. One long request among short ones may get a seam, beyond which the axis is compressed.

Both parts are linear: on a logarithmic axis equal ranges would look unequal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ranges = Sequence[tuple[int, int]]
"""A request's ranges `(first key, end)`, in key order."""

KNEE_SHARE = 0.62
"""Part of the width that lies before the seam."""
SEAM_FROM, SEAM_TO = 3, 16
"""How many times the keys before the seam the longest request must have: else a seam shows little, or distorts much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAxis:
    """Key positions 0 to `top` on a width of 1; from `knee` on compressed, where there is one.

    `cut` is the longest range that lies on both sides of the knee, in keys: 0 wherever a knee between ranges exists.
    """

    top: int
    knee: int | None = None
    cut: int = 0

    @classmethod
    def of(cls, *batches: Sequence[Ranges]) -> KeyAxis:
        """Return the one axis on which these batches can be seen together, each given as its requests' ranges.

        A seam has the second longest request and a whole range of the longest before it. Where a range is longer than
        the second longest request there is none: it would make equal ranges of the longest look unequal for nothing.
        """
        longest = [ranges for ranges in (max(batch, key=_keys, default=()) for batch in batches) if ranges]
        top = max((_keys(ranges) for ranges in longest), default=1)
        second = max((sorted(map(_keys, batch))[-2] for batch in batches if len(batch) > 1), default=0)
        widest = max((end - start for ranges in chain(*batches) for start, end in ranges), default=0)
        if not widest <= second <= top <= SEAM_TO * second:
            return cls(top=top)
        ends = sorted({end for ranges in longest for _, end in ranges if second <= end <= top / SEAM_FROM})
        cut, knee = min(((max(_cut(ranges, end) for ranges in longest), end) for end in ends), default=(0, None))
        return cls(top=top, knee=knee, cut=cut)

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
        """Return round positions to label, and the knee."""
        if self.knee is None:
            return list(range(0, self.top + 1, tick_step(self.top, 8)))
        near = range(0, self.knee + 1, tick_step(self.knee, 6))
        step = tick_step(self.top - self.knee, 4)
        far = [k for k in range(0, self.top + 1, step) if self.at(k) > KNEE_SHARE + 0.07]
        return [*(k for k in near if self.at(k) < KNEE_SHARE - 0.07), self.knee, *far]


def _keys(ranges: Ranges) -> int:
    return ranges[-1][1] if ranges else 0


def _cut(ranges: Ranges, knee: int) -> int:
    """Return how many keys the range has that lies on both sides of the knee."""
    start, end = ranges[bisect_right(ranges, knee, key=lambda its: its[0]) - 1]
    return end - start if start < knee < end else 0


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
