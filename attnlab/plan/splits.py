"""How each request's keys are cut: the ranges, as plain data.

Reference: the original's decode kernels derive ranges from a count per request and round them to 32 keys. Here kernels
read the ranges, so that a policy may cut as it likes, and a picture shows what runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.batch import HostLens, Lens
from attnlab.checks import require, tensor
from attnlab.plan.policy import (
    HostPolicy,
    SharePolicy,
    SplitBounds,
    SplitContext,
    SplitPolicy,
    SplitSizes,
    resolve_policy,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPlan:
    """Every request's ranges, as the device has them.

    Ranges `indptr[r]` to `indptr[r + 1]` are request r's, in key order; range i covers list entries
    `[start[i], end[i])` of request `request[i]`. Buffers have a fixed capacity; entries from `indptr[-1]` on are
    empty. All int32.
    """

    policy: str
    indptr: Int[Tensor, " reqs_1"]
    request: Int[Tensor, " capacity"]
    start: Int[Tensor, " capacity"]
    end: Int[Tensor, " capacity"]
    nominal: Int[Tensor, " reqs"]

    def __post_init__(self) -> None:
        device = self.indptr.device
        tensor("indptr", self.indptr, shape=[self.reqs + 1], dtype=torch.int32)
        tensor("nominal", self.nominal, shape=[self.reqs], dtype=torch.int32, device=device)
        for name, x in (("request", self.request), ("start", self.start), ("end", self.end)):
            tensor(name, x, shape=[self.capacity], dtype=torch.int32, device=device)

    @property
    def reqs(self) -> int:
        """How many requests there are."""
        return self.indptr.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Ranges that the buffers can hold."""
        return self.request.shape[0]

    def to_host(self) -> HostSplits:
        """Return a copy in plain Python. Waits for the device."""
        offsets, starts, ends = self.indptr.tolist(), self.start.tolist(), self.end.tolist()
        ranges = tuple(
            tuple(zip(starts[a:b], ends[a:b], strict=True)) for a, b in zip(offsets, offsets[1:], strict=False)
        )
        return HostSplits(policy=self.policy, ranges=ranges, nominal=tuple(self.nominal.tolist()))

    def validate(self, lens: Sequence[int]) -> None:
        """Read the ranges (waits for the device); raise ValueError unless they cover each request's keys once."""
        require(len(lens) == self.reqs, f"lens: expected {self.reqs} requests, got {len(lens)}")
        live = int(self.indptr[-1])
        require(live <= self.capacity, f"indptr: ends at {live}, beyond the capacity of {self.capacity} ranges")
        full = (self.start < self.end)[live:].nonzero().flatten().tolist()
        if full:
            raise ValueError(f"ranges: entry {live + full[0]} lies beyond the last range but is not empty")
        host = self.to_host()
        check_ranges(host.ranges, lens, policy=self.policy, max_ranges=None)
        owners = [r for r, mine in enumerate(host.ranges) for _ in mine]
        require(
            self.request.tolist()[: len(owners)] == owners,
            f"policy {self.policy!r}: the ranges' request numbers disagree with indptr",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSplits:
    """A SplitPlan in plain Python: what tables and pictures read."""

    policy: str
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    nominal: tuple[int, ...]

    def __post_init__(self) -> None:
        check_ranges(self.ranges, self.lens, policy=self.policy, max_ranges=None)
        reqs, got = len(self.ranges), len(self.nominal)
        require(got == reqs, f"nominal: expected a number for each of {reqs} requests, got {got}")

    @property
    def effective(self) -> tuple[int, ...]:
        """Ranges that hold keys, per request; rounding may leave fewer than were asked for."""
        return tuple(len(mine) for mine in self.ranges)

    @property
    def lens(self) -> tuple[int, ...]:
        """Keys per request."""
        return tuple(mine[-1][1] if mine else 0 for mine in self.ranges)


def check_ranges(
    ranges: Sequence[Sequence[tuple[int, int]]],
    lens: Sequence[int],
    *,
    policy: str,
    max_ranges: int | None,
) -> None:
    """Raise ValueError unless each request's ranges are non-empty, in order, and cover `[0, len)` once."""
    who = f"policy {policy!r}"
    require(
        len(ranges) == len(lens),
        f"{who}: expected ranges for {len(lens)} requests, got {len(ranges)}",
    )
    for r, (mine, length) in enumerate(zip(ranges, lens, strict=True)):
        at = 0
        for start, end in mine:
            what = "overlaps" if start < at else "leaves a gap to"
            require(
                start == at,
                f"{who}: request {r}: range [{start}, {end}) {what} the one before, which ends at {at}",
            )
            require(start < end, f"{who}: request {r}: range [{start}, {end}) holds no key")
            require(
                end <= length,
                f"{who}: request {r}: range [{start}, {end}) goes beyond its {length} keys",
            )
            at = end
        require(at == length, f"{who}: request {r}: keys {at} to {length - 1} are in no range")
        require(
            max_ranges is None or len(mine) <= max_ranges,
            f"{who}: request {r} has {len(mine)} ranges, more than the promised max_ranges {max_ranges}",
        )


Ranges = list[list[tuple[int, int]]]
"""Of every request, `(start, end)` of each range, in order."""

SizesOf = Callable[[SplitPolicy, Tensor, SplitContext], SplitSizes]


def cut(policy: str | SplitPolicy | HostPolicy, lens: Sequence[int], ctx: SplitContext) -> SplitPlan:
    """Return how a policy cuts a batch, on the CPU, without a pool or a model: for studying policies.

    >>> ctx = SplitContext(heads=32, kv_heads=8, v_dim=128, mla=False, context_len=4096, multiprocessors=132)
    >>> cut("static", [257, 5], ctx).to_host().effective
    (5, 1)
    """
    policy, host = resolve_policy(policy), HostLens.of(lens, device="cpu")
    if isinstance(policy, HostPolicy):
        return splits_of_host(policy, host.values, ctx, host.device)
    policy = policy.dealt(ctx) if isinstance(policy, SharePolicy) else policy
    bounds = policy.bounds(bound_max=host.bound_max, ctx=ctx)
    return cut_live(policy, host.device, ctx, _sizes_in_torch, bounds=bounds, total=host.bound_total)


def _sizes_in_torch(policy: SplitPolicy, lens: Tensor, ctx: SplitContext) -> SplitSizes:
    return policy.sizes(lens, ctx)


def cut_live(
    policy: SplitPolicy,
    live: Int[Tensor, " reqs"],
    ctx: SplitContext,
    sizes_of: SizesOf,
    *,
    bounds: SplitBounds,
    total: int,
) -> SplitPlan:
    """Return the ranges of requests of `live` lengths, which come to `total` tokens at most, on their device."""
    if isinstance(policy, SharePolicy):
        return splits_of_shares(
            live,
            shares=policy.shares(ctx),
            tile=policy.tile,
            capacity=bounds.capacity(reqs=live.shape[0], total=total),
            policy=policy.label(ctx),
        )
    sizes = sizes_of(policy, live.clone(), ctx)  # a rule that writes into its lengths must not change ours
    return splits_of_sizes(sizes, live, policy=policy.label(ctx), bounds=bounds, total=total)


def splits_of_sizes(
    sizes: SplitSizes, lens: Int[Tensor, " reqs"], *, policy: str, bounds: SplitBounds, total: int
) -> SplitPlan:
    """Return the ranges of those sizes, with room for the most that `total` tokens can need. No host sync.

    Sizes below what the bounds promise are raised to it: the buffers then hold every range, whatever came.
    """
    reqs = lens.shape[0]
    tensor("size", sizes.size, shape=[reqs], dtype=torch.int32, device=lens.device, hint=f"policy {policy!r}")
    capacity = bounds.capacity(reqs=reqs, total=total)
    size = torch.maximum(sizes.size.clamp(min=bounds.min_size), bounds.least_size(lens))
    indptr = offsets_of(-(-lens // size))
    if reqs == 0:
        nothing = torch.zeros(0, dtype=torch.int32, device=lens.device)
        return SplitPlan(
            policy=policy,
            indptr=indptr,
            request=nothing,
            start=nothing,
            end=nothing,
            nominal=nothing,
        )
    number = torch.arange(capacity, dtype=torch.int32, device=lens.device)
    request = owner_of(number, indptr)
    start = (number - indptr[request]) * size[request]
    end = torch.minimum(start + size[request], lens[request])
    live = number < indptr[-1]
    return SplitPlan(
        policy=policy,
        indptr=indptr,
        request=(request * live).int(),
        start=(start * live).int(),
        end=(end * live).int(),
        nominal=sizes.nominal.int(),
    )


def splits_of_host(policy: HostPolicy, lens: Sequence[int], ctx: SplitContext, live: Int[Tensor, " reqs"]) -> SplitPlan:
    """Return a host policy's ranges, checked, on the device; held to `live`, the lengths that the lists really have."""
    return splits_of_ranges(ranges_of_host(policy, lens, ctx), live, policy=policy.label(ctx))


def known_lens(policy: HostPolicy, lens: Lens) -> tuple[int, ...]:
    """Return the lengths for a policy in plain Python; raise TypeError where only the device knows them."""
    if not isinstance(lens, HostLens):
        raise TypeError(
            f"policy {policy.name!r} is written in plain Python and needs lengths that the host knows "
            f"(HostLens), got {type(lens).__name__}"
        )
    return lens.values


def ranges_of_host(policy: HostPolicy, lens: Sequence[int], ctx: SplitContext) -> Ranges:
    """Return a host policy's ranges, checked."""
    ranges = _ranges(policy.rule(list(lens), ctx), f"policy {policy.name!r}")
    check_ranges(ranges, lens, policy=policy.name, max_ranges=policy.max_ranges)
    return ranges


def splits_of_ranges(ranges: Ranges, live: Int[Tensor, " reqs"], *, policy: str) -> SplitPlan:
    """Return each request's ranges on the device; held to `live`, the lengths that the lists really have."""
    flat = [(r, a, b) for r, mine in enumerate(ranges) for a, b in mine]
    table = torch.tensor(flat, dtype=torch.int32).reshape(-1, 3).to(live.device, non_blocking=True)
    counts = torch.tensor([len(mine) for mine in ranges], dtype=torch.int32).to(live.device, non_blocking=True)
    most = live[table[:, 0].long()]
    return SplitPlan(
        policy=policy,
        indptr=offsets_of(counts),
        request=table[:, 0].contiguous(),
        start=torch.minimum(table[:, 1], most),
        end=torch.minimum(table[:, 2], most),
        nominal=counts,
    )


def _ranges(answer: Any, who: str) -> Ranges:
    """Return what a host rule answered as lists of pairs of ints (numpy's are some), or raise with what it gave."""
    require(
        isinstance(answer, Iterable), f"{who}: expected a list of ranges for each request, got {answer!r}", TypeError
    )
    ranges: Ranges = []
    for mine in answer:
        where = f"{who}: request {len(ranges)}"
        require(isinstance(mine, Iterable), f"{where}: expected a list of ranges, got {mine!r}", TypeError)
        ranges.append([])
        for pair in mine:
            try:
                start, end = pair
                ranges[-1].append((operator.index(start), operator.index(end)))
            except (TypeError, ValueError):
                raise TypeError(f"{where}: expected ranges as pairs of ints, got {pair!r}") from None
    return ranges


def offsets_of(counts: Int[Tensor, " n"]) -> Int[Tensor, " n_1"]:
    """Return `[0, counts[0], counts[0] + counts[1], ...]`, int32."""
    offsets = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
    return offsets


def owner_of(entries: Int[Tensor, " n"], indptr: Int[Tensor, " reqs_1"]) -> Int[Tensor, " n"]:
    """Return which request's list each entry lies in; entries beyond the last list get the last request."""
    owner = torch.searchsorted(indptr[1:], entries, right=True)
    return owner.clamp(max=indptr.shape[0] - 2)


def owners(indptr: Int[Tensor, " reqs_1"], count: int) -> Int[Tensor, " count"]:
    """Return `owner_of` entries 0 up to `count`, int32: borders are counted, which is quicker than a search for each.

    >>> owners(torch.tensor([0, 2, 2, 3], dtype=torch.int32), 4).tolist()
    [0, 0, 2, 2]
    """
    borders = indptr[1:-1].clamp(0, count).long()
    begun = torch.zeros(count + 1, dtype=torch.int32, device=indptr.device)
    begun.scatter_add_(0, borders, torch.ones_like(borders, dtype=torch.int32))
    return begun[:count].cumsum(0, dtype=torch.int32)


def splits_of_shares(lens: Int[Tensor, " reqs"], *, shares: int, tile: int, capacity: int, policy: str) -> SplitPlan:
    """Return the ranges that begin with a request or with a share; at most `reqs + shares - 1`. No host sync.

    Share c holds tiles `c * total // shares` up to the next share's of the `total` that all requests have, each of
    `tile` keys but for a request's last.
    """
    reqs, device = lens.shape[0], lens.device
    if reqs == 0 or capacity == 0:
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        return SplitPlan(
            policy=policy, indptr=offsets_of(lens), request=nothing, start=nothing, end=nothing, nominal=lens
        )
    tiles = -(-lens // tile)
    offset = offsets_of(tiles)  # of every request's first tile in the line
    first = share_starts(offset[-1], shares)
    # Where anything begins, in order; what begins at the same place as the next is empty.
    begin = torch.cat([offset[:-1], first]).sort().values
    until = torch.cat([begin[1:], offset[-1:]])
    live = begin < until
    place = torch.where(live, live.cumsum(0) - 1, capacity)
    request = owner_of(begin, offset)
    start = (begin - offset[request]) * tile
    end = torch.minimum((until - offset[request]) * tile, lens[request])

    def packed(x: Tensor) -> Tensor:
        room = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        return room.scatter_(0, place.clamp(max=capacity), x.int())[:capacity]

    counts = torch.zeros(reqs, dtype=torch.int32, device=device).scatter_add_(0, request.long(), live.int())
    return SplitPlan(
        policy=policy,
        indptr=offsets_of(counts),
        request=packed(request),
        start=packed(start),
        end=packed(end),
        nominal=counts,
    )


def share_starts(total: Int[Tensor, ""], shares: int) -> Int[Tensor, " shares"]:
    """Return the first tile of every share of a line of `total` tiles."""
    number = torch.arange(shares, dtype=torch.int64, device=total.device)
    return (number * total // shares).int()
