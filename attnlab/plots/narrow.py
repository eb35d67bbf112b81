"""Blocks of a row that are too narrow to be drawn one by one: runs of them become one block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Edges = NDArray[np.float64]
"""Left and right edges, `[blocks, 2]`, in inches, left to right."""

FINE = 0.035
"""Narrower blocks beside each other are not told apart."""


def apart(edges: Edges) -> tuple[NDArray[np.bool_], Edges]:
    """Return which blocks are drawn by themselves, and the edges of the runs that the others become.

    >>> apart(np.array([[0.0, 0.2], [0.2, 0.21], [0.21, 0.22], [0.22, 0.4], [0.4, 0.41]]))[0].tolist()
    [True, False, False, True, True]
    """
    if not len(edges):
        return np.zeros(0, dtype=np.bool_), np.zeros((0, 2))
    narrow = np.concatenate([[False], np.diff(edges, axis=1)[:, 0] < FINE, [False]])
    fine = narrow[1:-1] & (narrow[:-2] | narrow[2:])
    ends = np.flatnonzero(np.diff(np.concatenate([[False], fine, [False]]).astype(np.int8)))
    return ~fine, np.stack([edges[ends[::2], 0], edges[ends[1::2] - 1, 1]], axis=-1)
