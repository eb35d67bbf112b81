"""Tiles: what policies that count programs and kernels that launch them agree on.

Of a verify it is the most that a tile takes: masks, fp32 and older GPUs have smaller ones, and more programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlab.spec import AttentionSpec

HEAD_TILE = 16
"""Query heads of one group that a program packs into a tile, the original's too; the tensor core's smallest side."""
LARGE_TILE = 64
"""Query heads that a program of even shares packs where a group has more: the rows of a Hopper tensor core."""
LATENT_ROW = (576, 512)
"""Columns of keys and values of DeepSeek's latent rows, which have a kernel of their own on a Hopper GPU."""
MOST_LATENT_DIM = 576
"""Columns of a latent row up to which 64 queries, two tiles of 64 rows and weights fit a Hopper multiprocessor."""
FEWEST_COLUMNS = 33
"""Of values from which on a tile of LARGE_TILE rows is right: they are padded to 64 columns, and with fewer than a tile
has keys, 64 there, ptxas 12.8 gets products wrong."""
NARROW_DIM = 128
"""Of values up to so wide an H200 multiprocessor holds four programs of even shares, of wider ones two (measured)."""


def head_tiles(group: int, tile: int = HEAD_TILE) -> int:
    """Return how many programs share the query heads of a group of that size: the tiles of up to `tile` that it needs.

    >>> [head_tiles(group) for group in (1, 8, 16, 20)]
    [1, 1, 1, 2]
    """
    return -(-group // tile)


def shares_tile(layers: Sequence[AttentionSpec], *, mla: bool, kv_dtype: torch.dtype) -> int:
    """Return how many query heads a program of even shares packs, for layers that have one schedule; on a Hopper GPU.

    The more it packs, the fewer programs load the same keys. LARGE_TILE where each layer has more heads than fit
    HEAD_TILE, over keys in half precision: of FEWEST_COLUMNS up to NARROW_DIM columns, or latent rows of at most
    MOST_LATENT_DIM, whose main columns, the highest power of two, are the values (512 of 576). HEAD_TILE heads suffice
    over LATENT_ROW without a cap or temperature: three quarters of a tile are empty then, and the kernel for such rows
    is no slower for it. Not under a modifier: what it needs of a multiprocessor is its own affair, and such a tile
    leaves little.

    >>> deepseek = AttentionSpec(heads=128, kv_heads=1, qk_dim=576, v_dim=512, scale=0.07)
    >>> shares_tile([deepseek], mla=True, kv_dtype=torch.bfloat16)
    64
    """
    half = kv_dtype in (torch.bfloat16, torch.float16)
    fits = _fits_over_latent_rows if mla else _fits
    many = all(layer.group >= _fewest_heads(layer) and layer.mod is None and fits(layer) for layer in layers)
    return LARGE_TILE if half and many else HEAD_TILE


def _fewest_heads(layer: AttentionSpec) -> int:
    plain = layer.softcap is None and layer.temperature_len is None
    return HEAD_TILE if (layer.qk_dim, layer.v_dim) == LATENT_ROW and plain else HEAD_TILE + 1


def _fits(layer: AttentionSpec) -> bool:
    return layer.v_dim >= FEWEST_COLUMNS and max(layer.qk_dim, layer.v_dim) <= NARROW_DIM


def _fits_over_latent_rows(layer: AttentionSpec) -> bool:
    main, rest = layer.v_dim, layer.qk_dim - layer.v_dim
    powers_of_two = all(x & (x - 1) == 0 for x in (main, rest))
    return layer.qk_dim <= MOST_LATENT_DIM and powers_of_two and HEAD_TILE <= rest < main and main >= LARGE_TILE


def row_tile(v_dim: int) -> int:
    """Return how many rows (drafts x query heads of a group) a program packs into a tile, at most.

    64 are what a group of warps multiplies at once; of wide values it has registers for half as many.
    """
    return 64 if v_dim <= NARROW_DIM else 32


def row_tiles(rows: int, *, v_dim: int) -> int:
    """Return how many programs share the drafts x heads of a group: the tiles that so many rows need.

    >>> [row_tiles(drafts * 4, v_dim=128) for drafts in (1, 16, 17)]
    [1, 1, 2]
    """
    return -(-rows // row_tile(v_dim))
