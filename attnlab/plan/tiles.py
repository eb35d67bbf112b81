"""Tiles: what policies that count programs and kernels that launch them must agree on."""

from __future__ import annotations

HEAD_TILE = 16
"""Query heads of one group that a program packs into a tile, the original's too; the tensor core's smallest side."""
NARROW_DIM = 128
"""Of values up to so wide an H200 multiprocessor holds four programs of even shares, of wider ones two (measured)."""


def head_tiles(group: int) -> int:
    """Return how many programs share the query heads of a group of that size: the tiles of up to 16 that it needs.

    >>> [head_tiles(group) for group in (1, 8, 16, 20)]
    [1, 1, 1, 2]
    """
    return -(-group // HEAD_TILE)
