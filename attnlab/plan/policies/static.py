"""Static: every request in the same number of ranges.

Source: SGLang's static-splits option; also what the seed does where the multiprocessor count is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import positive
from attnlab.plan.policy import MIN_BLOCK, SplitBounds, SplitContext, SplitPolicy, SplitSizes, split_policy
from attnlab.plan.size_rules import SizeRule, same_count


@split_policy("static")
@dataclass(frozen=True, kw_only=True)
class Static(SplitPolicy):
    """Ask for `splits` ranges, whatever the length; rounding to 32 keys leaves short requests fewer.

    Batch-invariant: a request's ranges depend on its own length alone. They move as it grows.
    """

    batch_invariant = True
    splits: int = 8

    def __post_init__(self) -> None:
        positive("splits", self.splits)

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        """Return `splits` ranges of at least 32 keys."""
        return SplitBounds(max_ranges=self.splits, min_size=MIN_BLOCK)

    def sizes(self, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return the length's share, rounded up to 32 keys. A length of 0 asks for no range."""
        return SplitSizes.of_counts(lens, torch.where(lens > 0, self.splits, 0).int())

    def size_rule(self, *, reqs: int, ctx: SplitContext) -> SizeRule:
        """Return the same in Triton."""
        return SizeRule(function=same_count, numbers=(self.splits, 0, 0))
