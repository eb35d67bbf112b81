"""Tile: cut at fixed positions, every `tile` keys.

Source: batch-invariant inference (SGLang's and FlashInfer's fixed split sizes). SGLang derives a count,
ceil(len / tile), and then even ranges from the count, so that its cuts move as a request grows; here they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.checks import positive
from attnlab.plan.policy import SplitBounds, SplitContext, SplitPolicy, SplitSizes, split_policy
from attnlab.plan.size_rules import SizeRule, parts_of


@split_policy("tile")
@dataclass(frozen=True, kw_only=True)
class Tile(SplitPolicy):
    """Ranges of `tile` keys; only the last is shorter.

    Deterministic: cuts depend neither on the batch nor on the request's final length, so the order in which a
    key is summed never changes.
    """

    batch_invariant = True
    tile: int = 256

    def __post_init__(self) -> None:
        positive("tile", self.tile)

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        """Return as many tiles as the longest request has."""
        return SplitBounds(max_ranges=max(1, -(-bound_max // self.tile)), min_size=self.tile)

    def sizes(self, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return `tile` for every request."""
        return SplitSizes(size=torch.full_like(lens, self.tile), nominal=-(-lens // self.tile))

    def size_rule(self, *, reqs: int, ctx: SplitContext) -> SizeRule:
        """Return the same in Triton."""
        return SizeRule(function=_tiles, numbers=(self.tile, 0, 0))


@jit
def _tiles(lens, longest, shortest, tile, b, c):
    return tl.zeros_like(lens) + tile, parts_of(lens, tile)
