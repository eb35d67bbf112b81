"""The axis of key positions in a window layout: unseen keys, seen ones, new ones, each part linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

SEEN_LEAST, SEEN_MOST, SEEN_KEY = 0.25, 0.50, 0.012
"""Of the width: where keys that are read, new ones included, would have less than SEEN_LEAST they get SEEN_MOST, but
no key more than SEEN_KEY."""
NEW_MOST, NEW_TOKEN, NEW_SHARE = 0.30, 0.0022, 0.6
"""Of the width: several new tokens have NEW_TOKEN each, all together at most NEW_MOST, where that is more than their
share; but no more than NEW_SHARE of what all keys that are read have."""
ALL_MOST = 0.7
"""Of the width: so far keys that are read are widened together with the new ones, for the sake of one scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAxis:
    """Positions `knots` lie at shares `at` of the width, those between them in proportion."""

    knots: tuple[int, ...]
    at: tuple[float, ...]

    @classmethod
    def of(cls, *, edge: int, cached: int, tokens: int) -> WindowAxis:
        """Give unseen keys (up to `edge`), seen ones (up to `cached`) and new ones (up to `tokens`) their widths.

        All on one scale where every part can be seen; else a part that matters gets more.

        >>> WindowAxis.of(edge=260, cached=387, tokens=388).seams()
        []
        >>> [(position, round(ratio)) for position, ratio in WindowAxis.of(edge=4872, cached=4999, tokens=5000).seams()]
        [(4872, 38)]
        """
        if not tokens:
            return cls(knots=(0, 1), at=(0.0, 1.0))
        new, close = tokens - cached, tokens - edge
        near = close / tokens
        wanted = min(SEEN_MOST, SEEN_KEY * close)
        if edge and near < min(SEEN_LEAST, wanted):
            near = wanted
        own = near * new / close if close else 0.0
        wanted = min(NEW_MOST, NEW_TOKEN * new)
        if edge < cached and new > 1 and own < wanted:
            if edge and near * wanted / own <= ALL_MOST:
                near *= wanted / own
            own = max(near * new / close, min(wanted, NEW_SHARE * near))
        knots, ends = [0, edge, cached, tokens], [0.0, 1 - near, 1 - own, 1.0]
        keep = [i for i, knot in enumerate(knots) if i == 0 or knot > knots[i - 1]]
        return cls(knots=tuple(knots[i] for i in keep), at=tuple(ends[i] for i in keep))

    def x(self, positions: ArrayLike) -> NDArray[np.float64]:
        """Return where positions lie, 0 to 1."""
        return np.asarray(np.interp(np.asarray(positions, dtype=np.float64), self.knots, self.at))

    def seams(self) -> list[tuple[int, float]]:
        """Return positions at which the scale changes, and how many times wider a key is right of them than left."""
        sizes, widths = np.diff(self.knots), np.diff(self.at)
        scale = widths / sizes
        pairs = zip(self.knots[1:-1], (scale[1:] / scale[:-1]).tolist(), strict=True)
        return [(knot, ratio) for knot, ratio in pairs if abs(ratio - 1) > 0.05]


def spread(wanted: Sequence[tuple[float, float]], room: float) -> list[bool]:
    """Return which labels (middle, width) are written so that none meets another; earlier ones go first.

    >>> spread([(0.0, 0.4), (0.3, 0.4), (1.0, 0.4)], 0.05)
    [True, False, True]
    """
    taken: list[tuple[float, float]] = []
    shown = []
    for middle, width in wanted:
        left, right = middle - width / 2 - room / 2, middle + width / 2 + room / 2
        free = all(right <= a or b <= left for a, b in taken)
        shown.append(free)
        if free:
            taken.append((left, right))
    return shown
