"""Tiles: what policies that count programs and kernels that launch them must agree on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlab.spec import AttentionSpec

HEAD_TILE = 16
"""Query heads of one group that a program packs into a tile, the original's too; the tensor core's smallest side."""
LATENT_TILE = 64
"""Query heads that a program of even shares packs where they read latent rows: the rows of a Hopper tensor core."""
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

    LATENT_TILE where each has more heads than fit HEAD_TILE, over latent rows in half precision whose main columns, the
    highest power of two, are the values (512 of 576). Not under a modifier: what it needs of a multiprocessor is its
    own affair, and such a tile leaves nothing.

    >>> deepseek = AttentionSpec(heads=128, kv_heads=1, qk_dim=576, v_dim=512, scale=0.07)
    >>> shares_tile([deepseek], mla=True, kv_dtype=torch.bfloat16)
    64
    """
    latent = mla and kv_dtype in (torch.bfloat16, torch.float16)
    latent = latent and all(_many_over_latent_rows(layer) for layer in layers)
    return LATENT_TILE if latent else HEAD_TILE


def _many_over_latent_rows(layer: AttentionSpec) -> bool:
    main, rest = layer.v_dim, layer.qk_dim - layer.v_dim
    many = layer.group > HEAD_TILE and layer.mod is None
    return many and all(x >= HEAD_TILE and x & (x - 1) == 0 for x in (main, rest)) and rest < main
