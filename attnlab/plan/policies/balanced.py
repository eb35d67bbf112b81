"""Balanced: every program reads the same number of keys, whichever requests they belong to.

Source of the method: Stream-K (Osama et al., 2023) and LeanAttention (Sanovar et al., 2024), with whole tiles dealt by
column: a share is read by one program for every KV head, so that heads walk the same tokens in step.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.checks import positive
from attnlab.plan.policy import SharePolicy, SplitContext, split_policy
from attnlab.plan.tiles import HEAD_TILE, NARROW_DIM, head_tiles, row_tiles

FEW = 8
"""Requests up to which a decode has one program a multiprocessor (of 8-bit numbers two)."""
SHORT = 8
"""Programs of narrow heads where no list is longer than a tile: each waits for one tile alone, so many must wait."""
UNKNOWN = 128
"""Multiprocessors where the device does not say."""


@split_policy("balanced")
@dataclass(frozen=True, kw_only=True)
class Balanced(SharePolicy):
    """Deal tiles of `tile` keys to all programs that a device holds at a time, an even share each.

    `programs` are those that a multiprocessor holds; None: as many as were fastest on an H200. Four hide each other's
    waits in a decode of many requests; eight where heads are narrow and no list longer than a tile. One, with more keys
    on their way, leaves fewer partials to merge: of few requests, over latent rows, of drafts; two there of 8-bit
    numbers. Two in a decode of values wider than 128. One where a tile packs more than 16 heads, two if these are
    narrow. Not batch-invariant: where a request is cut depends on all that come before it.
    """

    tile: int = 128
    programs: int | None = None

    def __post_init__(self) -> None:
        positive("tile", self.tile)
        if self.programs is not None:
            positive("programs", self.programs)

    def shares(self, ctx: SplitContext) -> int:
        """Return as many shares as programs of one KV head run at a time."""
        group = ctx.heads // ctx.kv_heads
        tiles = head_tiles(group, ctx.head_tile)
        if ctx.drafts is not None:
            tiles = row_tiles(ctx.drafts * group, v_dim=ctx.v_dim)
        running = (ctx.multiprocessors or UNKNOWN) * (self.programs or _held(ctx, self.tile))
        return max(1, running // (ctx.kv_heads * tiles))


def _held(ctx: SplitContext, tile: int) -> int:
    """Return how many programs a multiprocessor holds at a time."""
    few = 2 if ctx.kv_itemsize == 1 else 1
    if ctx.drafts is not None or ctx.mla:
        return few
    if ctx.v_dim > NARROW_DIM:
        return 2
    if ctx.requests is not None and ctx.requests <= FEW:
        return few
    if ctx.head_tile > HEAD_TILE:
        return 2 if ctx.v_dim <= NARROW_DIM // 2 else 1
    short = ctx.longest is not None and ctx.longest <= tile
    return SHORT if short and ctx.v_dim <= NARROW_DIM // 2 and ctx.kv_itemsize > 1 else 4
