"""Whole tiles of keys as boxes, which the copy engine of a Hopper GPU (TMA) fetches by itself.

A gather holds an address for every row that a thread copies; a box needs two coordinates. It takes rows that lie one
behind the other, so that a list of slots is read in boxes only where its layout says so (`KVLayout.run`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlab._triton import TensorDescriptor
from attnlab.kernels.launch import padded

WIDEST = 256
"""Columns that a side of a box may have."""
ALIGNED = 16
"""Bytes that a box's memory, and the step from row to row, must be a multiple of."""
NO_BOXES = (None, None)


def fits_box(dim: int) -> bool:
    """Whether rows of so many columns are a tile without a rest, no wider than a box."""
    return dim == padded(dim) and dim <= WIDEST


def boxes_of(k: Tensor | None, v: Tensor | None, *, block_n: int) -> tuple[Any, Any]:
    """Return descriptors of boxes of `block_n` rows of one head of `k` and of `v`, `[rows, kv_heads, dim]` each.

    Both are None where one of them is, or cannot be read so. The box of a head begins at column `head * dim`.
    """
    if k is None or v is None or not (_is_readable(k) and _is_readable(v)):
        return NO_BOXES
    return _descriptor(k, block_n), _descriptor(v, block_n)


def rows_of_pages(x: Tensor) -> Tensor | None:
    """Return a view's `k` or `v` as `[slots, kv_heads, dim]`; None where its pages do not lie one behind the other."""
    if x.dim() == 3:
        return x
    return x.flatten(0, 1) if x.stride(0) == x.shape[1] * x.stride(1) else None


def _is_readable(x: Tensor) -> bool:
    """Whether the heads of each row lie side by side, rows apart from each other, and all of it where boxes begin."""
    rows, heads, dim = x.shape
    side_by_side = (heads == 1 or x.stride(1) == dim) and x.stride(2) == 1 and (rows == 1 or x.stride(0) >= heads * dim)
    aligned = x.data_ptr() % ALIGNED == 0 and x.stride(0) * x.itemsize % ALIGNED == 0
    return rows > 0 and fits_box(dim) and side_by_side and aligned


def _descriptor(x: Tensor, block_n: int) -> Any:
    rows, heads, dim = x.shape
    return TensorDescriptor(x, shape=[rows, heads * dim], strides=[x.stride(0), 1], block_shape=[block_n, dim])
