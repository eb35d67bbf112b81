"""Seed: the original's heuristic, which weighs the batch's longest request against the free multiprocessors.

Source: SGLang, `get_num_kv_splits_triton` (its pull request 4553). Counts are exact; requests of length 0 take no
part and get none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.checks import positive, require
from attnlab.plan.policy import MIN_BLOCK, SplitBounds, SplitContext, SplitPolicy, SplitSizes, split_policy
from attnlab.plan.size_rules import SizeRule, same_count, sizes_of_counts
from attnlab.plan.tiles import HEAD_TILE


@split_policy("seed")
@dataclass(frozen=True, kw_only=True)
class Seed(SplitPolicy):
    """Give every request about as many keys per range as fill the device once, but at most `max_splits` ranges.

    Not batch-invariant: a request's ranges depend on its neighbours. Under MLA the cap is raised (see `cap`).
    """

    max_splits: int = 8

    def __post_init__(self) -> None:
        positive("max_splits", self.max_splits)

    def cap(self, ctx: SplitContext) -> int:
        """Return the most ranges per request. MLA has one KV head, so it needs more of them to fill the device."""
        if not ctx.mla or ctx.multiprocessors is None:
            return self.max_splits
        fills_device = _next_power_of_2(ctx.multiprocessors)
        holds_context = _next_power_of_2(-(-ctx.context_len // MIN_BLOCK))
        return max(self.max_splits, min(fills_device, holds_context))

    def label(self, ctx: SplitContext) -> str:
        """Return the name with the cap that holds for these layers."""
        return f"{self.name} {self.cap(ctx)}"

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        """Return the cap, and ranges of at least 32 keys."""
        return SplitBounds(max_ranges=self.cap(ctx), min_size=MIN_BLOCK)

    def sizes(self, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return the sizes of `counts`."""
        return SplitSizes.of_counts(lens, self.counts(lens, ctx))

    def sizes_triton(self, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return the sizes of `counts_triton`."""
        return SplitSizes.of_counts(lens, self.counts_triton(lens, ctx))

    def counts(self, lens: Int[Tensor, " rows"], ctx: SplitContext) -> Int[Tensor, " rows"]:
        """Return the ranges asked for, int32, in torch. `ctx.rows_per_seq` consecutive rows share a length."""
        cap, programs_per_range = self.cap(ctx), self._programs_per_range(lens.shape[0], ctx)
        if lens.numel() == 0 or ctx.multiprocessors is None:
            return torch.where(lens > 0, cap, 0).int()
        longest = lens.max().clamp(min=1).long()
        shortest = torch.where(lens > 0, lens, longest).min()
        shortest = torch.where(longest * 8 < shortest * 10, longest, shortest)
        # Ranges of the size of the shortest request ...
        by_imbalance = _cdiv(longest, _cdiv(longest, shortest).clamp(max=cap))
        # ... or as many as the device has room for; fp32 throughout, as the count is cut to a whole number.
        growth = torch.log2(longest.float() / 64.0).clamp(min=1.0)
        room = (growth * ctx.multiprocessors).int()
        by_room = _cdiv(longest, _cdiv(room, programs_per_range).clamp(max=cap))
        return torch.maximum(_cdiv(lens, by_imbalance), _cdiv(lens, by_room)).int()

    def counts_triton(self, lens: Int[Tensor, " rows"], ctx: SplitContext) -> Int[Tensor, " rows"]:
        """Return the same counts from one program of a Triton kernel."""
        cap, programs_per_range = self.cap(ctx), self._programs_per_range(lens.shape[0], ctx)
        if lens.numel() == 0 or ctx.multiprocessors is None:
            return torch.where(lens > 0, cap, 0).int()
        counts = torch.empty_like(lens, dtype=torch.int32)
        _seed_counts_kernel[(1,)](
            lens,
            counts,
            lens.shape[0],
            programs_per_range,
            cap,
            ctx.multiprocessors,
            BLOCK=max(256, _next_power_of_2(lens.shape[0])),
        )
        return counts

    def size_rule(self, *, reqs: int, ctx: SplitContext) -> SizeRule:
        """Return the sizes of the same counts in Triton."""
        if ctx.multiprocessors is None:
            return SizeRule(function=same_count, numbers=(self.cap(ctx), 0, 0))
        return SizeRule(
            function=_seed_sizes, numbers=(self._programs_per_range(reqs, ctx), self.cap(ctx), ctx.multiprocessors)
        )

    def _programs_per_range(self, rows: int, ctx: SplitContext) -> int:
        """Return how many programs one range of every row takes."""
        require(
            rows % ctx.rows_per_seq == 0,
            f"lens: expected a multiple of rows_per_seq {ctx.rows_per_seq}, as many rows share a sequence, got {rows}",
        )
        return rows * _head_tiles(ctx)


def _head_tiles(ctx: SplitContext) -> int:
    """Programs per row and range: one per query head under MHA, else one per 16 heads of a group."""
    group = ctx.heads // ctx.kv_heads
    return ctx.heads if group == 1 else -(-ctx.heads // min(HEAD_TILE, group))


def _cdiv(a: Tensor, b: Tensor | int) -> Tensor:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@jit
def _seed_counts(lens, longest, shortest, programs_per_range, cap, multiprocessors):
    # Reference: get_num_kv_splits_triton.
    shortest = tl.where(longest * 8 < shortest * 10, longest, shortest)
    by_imbalance = tl.cdiv(longest, tl.minimum(tl.cdiv(longest, shortest), cap))
    growth = tl.maximum(tl.log2(longest.to(tl.float32) / 64.0), 1.0)
    room = (growth * multiprocessors).to(tl.int32)
    by_room = tl.cdiv(longest, tl.minimum(tl.cdiv(room, programs_per_range), cap))
    return tl.maximum(tl.cdiv(lens, by_imbalance), tl.cdiv(lens, by_room))


@jit
def _seed_sizes(lens, longest, shortest, programs_per_range, cap, multiprocessors):
    counts = _seed_counts(
        lens.to(tl.int64), longest.to(tl.int64), shortest.to(tl.int64), programs_per_range, cap, multiprocessors
    )
    return sizes_of_counts(lens, counts.to(tl.int32))


@jit(do_not_specialize=("rows", "programs_per_range", "cap"))
def _seed_counts_kernel(lens_ptr, counts_ptr, rows, programs_per_range, cap, multiprocessors, BLOCK: tl.constexpr):
    # One program; a lane a row.
    offs = tl.arange(0, BLOCK)
    mask = offs < rows
    lens = tl.load(lens_ptr + offs, mask=mask, other=0).to(tl.int64)
    longest = tl.maximum(tl.max(lens, 0), 1)
    shortest = tl.min(tl.where(lens > 0, lens, longest), 0)
    counts = _seed_counts(lens, longest, shortest, programs_per_range, cap, multiprocessors)
    tl.store(counts_ptr + offs, counts.to(tl.int32), mask=mask)
