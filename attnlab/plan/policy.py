"""Split policies: the rules that cut a request's keys into ranges, and how one is registered.

A policy on the device answers with one range size per request; a policy in plain Python with the ranges themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import positive, require, tensor
from attnlab.plan.size_rules import SizeRule
from attnlab.plan.tiles import HEAD_TILE
from attnlab.registry import Registry

MOST_SHARES = 1 << 14
"""Shares that a policy may deal: far more than programs run at a time."""
MIN_BLOCK = 32
"""Where a policy asks for a number of ranges, their size is rounded up to a multiple of this many keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitContext:
    """What a policy may look at besides the lengths: host numbers only.

    `multiprocessors` is None where the device does not say. `rows_per_seq` rows share one sequence's length (the
    branches of a draft); a plain decode has 1. A program of even shares packs `head_tile` query heads of a group, as
    `plan.tiles` says. `requests` is how many a batch has, and `longest` the most keys that one of them reads; None
    where one answer holds for any. `kv_itemsize` is the bytes of a number in the pool. `drafts` is the most query
    tokens of a request whose keys they read together (a verify); None elsewhere.
    """

    heads: int
    kv_heads: int
    v_dim: int
    mla: bool
    context_len: int
    multiprocessors: int | None
    rows_per_seq: int = 1
    head_tile: int = HEAD_TILE
    drafts: int | None = None
    requests: int | None = None
    longest: int | None = None
    kv_itemsize: int = 2

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "v_dim", "context_len", "rows_per_seq", "head_tile", "kv_itemsize"):
            positive(name, getattr(self, name))
        for name in ("multiprocessors", "drafts", "requests", "longest"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBounds:
    """What a policy promises: at most `max_ranges` per request, none (but a last one) under `min_size` keys.

    `in_all`, where not None: all requests together have at most so many ranges more than there are requests.
    """

    max_ranges: int
    min_size: int
    in_all: int | None = None

    def __post_init__(self) -> None:
        positive("max_ranges", self.max_ranges)
        positive("min_size", self.min_size)
        if self.in_all is not None:
            positive("in_all", self.in_all)

    def least_size(self, lens: Int[Tensor, " reqs"]) -> Int[Tensor, " reqs"]:
        """Return the smallest range size, for each request, that keeps what is promised of their number."""
        least = -(-lens // self.max_ranges)
        if self.in_all is None:
            return least
        return torch.maximum(least, (-(-lens.sum() // self.in_all)).to(least.dtype))

    def capacity(self, *, reqs: int, total: int) -> int:
        """Return the most ranges that `reqs` requests of `total` tokens together can have."""
        most = min(reqs * self.max_ranges, total // self.min_size + reqs)
        return most if self.in_all is None else min(most, reqs + self.in_all)


class SplitPolicy(ABC):
    """A rule that cuts requests into ranges, on the device: tensors in, tensors out, without waiting for it.

    It answers with one range size per request: range i covers `[i * size, min((i + 1) * size, len))`. Ranges made
    that way cover every key once, whatever the sizes. Sizes that would break the promised bounds are raised.
    """

    name: str
    batch_invariant = False
    """Whether a request is cut the same whatever else is in the batch: sizes of its own length alone."""

    def label(self, ctx: SplitContext) -> str:
        """Return the name with the parameters' values, for tables and pictures: `tile 128`."""
        if not is_dataclass(self):
            return self.name
        return " ".join([self.name, *(str(getattr(self, field.name)) for field in fields(self))])

    @abstractmethod
    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        """Return what holds for every request of up to `bound_max` tokens; scratch is sized by it."""

    @abstractmethod
    def sizes(self, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return a range size per request, in torch: the policy's meaning."""

    def sizes_triton(self, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return the same from a Triton kernel, where the policy has one."""
        return self.sizes(lens, ctx)

    def size_rule(self, *, reqs: int, ctx: SplitContext) -> SizeRule | None:
        """Return the same for planning's own kernel, where the policy has it: a lane is then made in two launches."""
        return None

    def __init_subclass__(cls, **given: Any) -> None:
        """Give a policy no kernel of another's: whatever it changes may change its sizes."""
        super().__init_subclass__(**given)
        if "size_rule" not in vars(cls):
            cls.size_rule = SplitPolicy.size_rule  # type: ignore[method-assign]
        if "sizes_triton" not in vars(cls):
            cls.sizes_triton = SplitPolicy.sizes_triton  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitSizes:
    """`size`: keys per range; `nominal`: ranges asked for, before rounding. Both int32 `[reqs]`, on the device."""

    size: Int[Tensor, " reqs"]
    nominal: Int[Tensor, " reqs"]

    def __post_init__(self) -> None:
        tensor("size", self.size, shape=["reqs"], dtype=torch.int32)
        tensor("nominal", self.nominal, shape=[self.size.shape[0]], dtype=torch.int32, device=self.size.device)

    @classmethod
    def of_counts(cls, lens: Int[Tensor, " reqs"], counts: Int[Tensor, " reqs"]) -> SplitSizes:
        """Return the seed's sizes for so many ranges: the length's share, rounded up to MIN_BLOCK keys.

        Fewer ranges than asked for may come out: 257 keys in 8 are 5 of 64.
        """
        share = -(-lens // counts.clamp(min=1))
        return cls(size=-(-share // MIN_BLOCK) * MIN_BLOCK, nominal=counts)


class SharePolicy(SplitPolicy):
    """A rule that cuts a whole batch into even shares, whatever requests these fall into.

    A share is what one program reads for its KV head, at most a few requests' parts. Where several steps have one cut
    (drafts) requests are cut at multiples of a share's size instead.
    """

    tile: int
    """Keys of the tiles that are dealt."""

    def label(self, ctx: SplitContext) -> str:
        """Return the name with the number of shares, for tables and pictures."""
        return f"{self.name} {self.shares(ctx)}"

    @abstractmethod
    def shares(self, ctx: SplitContext) -> int:
        """Return how many shares every KV head's keys are dealt in."""

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        """Return what cuts at the borders of shares and of requests come to: one a request, and one a share.

        A request falls into at most all shares; the one more is that of a draft, whose lists grow behind the cuts.
        """
        shares = self.shares(ctx)
        most = max(1, min(shares + 1, -(-bound_max // self.tile)))
        return SplitBounds(max_ranges=most, min_size=1, in_all=shares)

    def sizes(self, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return the size of a share for every request."""
        shares, tiles = self.shares(ctx), -(-lens // self.tile)
        size = ((tiles.sum() + shares - 1) // shares).clamp(min=1).int() * self.tile
        return SplitSizes(size=torch.ones_like(lens) * size, nominal=-(-lens // size))

    def dealt(self, ctx: SplitContext) -> DealtShares:
        """Return the rule with its number of shares, asked once, for a plan to hold to.

        Raises TypeError or ValueError where shares or tile are no numbers that plans have room for.
        """
        count = self.shares(ctx)
        for name, value in (("tile", self.tile), ("shares", count)):
            positive(f"policy {self.name!r}: {name}", value)
        require(
            count <= MOST_SHARES,
            f"policy {self.name!r}: shares: expected at most {MOST_SHARES:,}, got {count:,}; no device runs as many "
            "programs at a time",
        )
        return DealtShares(name=self.name, words=self.label(ctx), tile=self.tile, count=count)


@dataclass(frozen=True, kw_only=True)
class DealtShares(SharePolicy):
    """A share policy's answer for layers that share a lane; its bounds are those that even shares have."""

    name: str
    words: str
    tile: int
    count: int

    def label(self, ctx: SplitContext) -> str:
        """Return the policy's own words."""
        return self.words

    def shares(self, ctx: SplitContext) -> int:
        """Return the number that was asked for."""
        return self.count

    def dealt(self, ctx: SplitContext) -> DealtShares:
        """Return itself."""
        return self


HostRule = Callable[[Sequence[int], SplitContext], Sequence[Sequence[tuple[int, int]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPolicy:
    """A policy in plain Python: lengths in, `[(start, end), ...]` per request out. The host must know the lengths."""

    name: str
    rule: HostRule
    max_ranges: int
    batch_invariant: bool = False

    def label(self, ctx: SplitContext) -> str:
        """Return the name, for tables and pictures."""
        return self.name

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        """Return the promised number of ranges per request; sizes may be anything."""
        return SplitBounds(max_ranges=self.max_ranges, min_size=1)


split_policies: Registry[Any] = Registry("policy", home="attnlab.plan.policies")
"""Policy classes (their instances are policies) and host policies, by name."""


def split_policy(name: str, *, needs_host_lens: bool = False, max_ranges: int | None = None) -> Callable[[Any], Any]:
    """Register a split policy: a SplitPolicy class, or with `needs_host_lens` a function in plain Python.

    A function takes the lengths and a SplitContext and returns each request's ranges. They are checked before
    anything runs; `max_ranges`, the most that it gives to one request, sizes the scratch.

    >>> @split_policy("in-two", needs_host_lens=True, max_ranges=2)
    ... def halves(lens, ctx):
    ...     return [[(0, n // 2), (n // 2, n)] if n > 1 else [(0, n)] * n for n in lens]
    >>> halves.name
    'in-two'
    """
    require(
        needs_host_lens == (max_ranges is not None),
        f"max_ranges: a policy in plain Python states it, a SplitPolicy class has bounds() instead, got {max_ranges}",
    )

    if not isinstance(name, str):
        raise TypeError(f'split_policy: expected a name, @split_policy("mine"), got {name!r}')

    def add(item: Any) -> Any:
        policy = item
        if needs_host_lens and max_ranges is not None:
            policy = HostPolicy(name=name, rule=item, max_ranges=positive("max_ranges", max_ranges))
        else:
            is_policy = isinstance(item, type) and issubclass(item, SplitPolicy)
            require(is_policy, f"policy {name!r}: expected a SplitPolicy class, got {item!r}", TypeError)
            item.name = name
        return split_policies.add(name, policy, owner=item.__module__)

    return add


def resolve_policy(policy: str | SplitPolicy | HostPolicy) -> SplitPolicy | HostPolicy:
    """Return the policy of that name with its published parameters, or the given one unchanged."""
    if isinstance(policy, str):
        found = split_policies.get(policy)
        made: SplitPolicy | HostPolicy = found() if isinstance(found, type) else found
        return made
    require(
        isinstance(policy, SplitPolicy | HostPolicy),
        f"policy: expected one of {', '.join(split_policies.names())}, or a policy (a function becomes one by "
        f"@split_policy), got {policy!r}",
        TypeError,
    )
    return policy
