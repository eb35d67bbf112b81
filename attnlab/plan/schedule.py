"""Which program reads which range, in which order, and where it leaves its partial result.

A schedule is a list of segments, one row of int32 each: request, KV head, first and last list entry, partial. Kernels
read nothing else of the split plan, so any dealing of ranges to programs is a value of this type: a range a program,
or an even share of all keys a program.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import contiguous, require, tensor
from attnlab.plan.policy import HostPolicy, SharePolicy, SplitContext, SplitPolicy, resolve_policy
from attnlab.plan.splits import SplitPlan, offsets_of, owner_of, share_starts
from attnlab.plan.tiles import HEAD_TILE, head_tiles

SEGMENT = ("request", "kv_head", "first", "last", "partial")
"""The columns of a segment: it reads list entries `[first, last)`. Empty ones (first == last) stand behind all others,
and belong to no program of a persistent schedule."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Segments in order; program p reads `program_indptr[p]` up to the next entry, one after the other.

    Each segment leaves its own partial, a row of the scratch below `partials`. Those of (request r, KV head h) are
    `merge_indptr[r * kv_heads + h]` up to the next entry, in key order: whatever order the programs run in, the merge
    reads them so. All tensors are int32 and contiguous. `persistent`: the grid is of programs that walk through their
    segments; else every segment is a program. `uncut`: of a persistent one, no list is long enough to be cut; a merge
    would find nothing, and is not launched where the split kernel looks after requests without keys (decode, but for
    latent tiles). A program packs `head_tile` query heads of a group. Call `validate` after changing one by hand.
    """

    segments: Int[Tensor, "segments 5"]
    program_indptr: Int[Tensor, " programs_1"]
    merge_indptr: Int[Tensor, " reqs_kv_heads_1"]
    kv_heads: int
    partials: int
    persistent: bool = False
    uncut: bool = False
    head_tile: int = HEAD_TILE

    def __post_init__(self) -> None:
        device = self.segments.device
        tensor("segments", self.segments, shape=["segments", len(SEGMENT)], dtype=torch.int32)
        for name, x in (("program_indptr", self.program_indptr), ("merge_indptr", self.merge_indptr)):
            tensor(name, x, shape=["entries"], dtype=torch.int32, device=device)
            contiguous(name, x)
            require(x.shape[0] >= 1, f"{name}: expected at least the entry 0, got none")
        contiguous("segments", self.segments)
        require(self.persistent or not self.uncut, "uncut: expected a persistent schedule, whose programs give answers")

    @property
    def programs(self) -> int:
        """Programs launched per head tile; those without a segment return at once."""
        return self.program_indptr.shape[0] - 1

    def head_tiles(self, group: int) -> int:
        """Return how many programs share a segment's query heads, `group` of them."""
        return head_tiles(group, self.head_tile)

    def working(self) -> int:
        """Return how many of them have a segment. Waits for the device."""
        return int((self.program_indptr.diff() > 0).sum())

    @classmethod
    def of(
        cls, policy: str | SplitPolicy | HostPolicy, splits: SplitPlan, ctx: SplitContext, *, uncut: bool = False
    ) -> Schedule:
        """Return the dealing that goes with a policy's cuts; `uncut`: none of the lists can be cut."""
        policy = resolve_policy(policy)
        if isinstance(policy, SharePolicy):
            dealt = cls.even_shares(splits, kv_heads=ctx.kv_heads, shares=policy.shares(ctx), tile=policy.tile)
            return replace(dealt, head_tile=ctx.head_tile, uncut=uncut)
        return cls.one_range_a_program(splits, kv_heads=ctx.kv_heads)

    @classmethod
    def one_range_a_program(cls, splits: SplitPlan, *, kv_heads: int) -> Schedule:
        """Return the original's dealing: each range and KV head has a program of its own. No host sync.

        KV heads come fastest, so that programs that run at the same time read the same tokens.
        """
        counts = splits.indptr.diff()
        of_head = torch.arange(kv_heads, dtype=torch.int32, device=counts.device)
        # Partials are numbered by (request, KV head, range), so that a merge reads consecutive ones.
        merge_indptr = offsets_of(counts.repeat_interleave(kv_heads))
        number = torch.arange(splits.capacity, dtype=torch.int32, device=counts.device)
        request = splits.request.long()
        within = number - splits.indptr[request]
        if splits.reqs:
            first_partial = merge_indptr[request[:, None] * kv_heads + of_head]
            partial = first_partial + within[:, None]
        else:
            partial = number[:, None] + of_head
        columns = [splits.request, None, splits.start, splits.end, None]
        shape = (splits.capacity, kv_heads)
        wide = [of_head.expand(shape) if c is None else c[:, None].expand(shape) for c in columns]
        wide[4] = torch.where(wide[2] < wide[3], partial, 0)
        programs = splits.capacity * kv_heads
        owned = torch.arange(programs + 1, dtype=torch.int32, device=counts.device)
        return cls(
            segments=torch.stack(wide, -1).reshape(-1, 5).int(),
            program_indptr=torch.minimum(owned, merge_indptr[-1]),
            merge_indptr=merge_indptr,
            kv_heads=kv_heads,
            partials=programs,
        )

    @classmethod
    def even_shares(cls, splits: SplitPlan, *, kv_heads: int, shares: int, tile: int) -> Schedule:
        """Deal ranges that were cut at shares of one size: program `c * kv_heads + h` reads share c for KV head h.

        `splits` are those of `splits_of_shares`. Neighbouring programs read the same tokens. No host sync.
        """
        device, capacity = splits.indptr.device, splits.capacity
        number = torch.arange(capacity, dtype=torch.int32, device=device)
        live = number < splits.indptr[-1]
        # A range lies in the share that holds its first tile of the line of all.
        tiles = -(-(splits.end - splits.start) // tile)
        offset = offsets_of(tiles)
        share = owner_of(offset[:-1], torch.cat([share_starts(offset[-1], shares), offset[-1:]]))
        counts = torch.zeros(shares, dtype=torch.int32, device=device).scatter_add_(0, share.long(), live.int())
        first = offsets_of(counts)  # of every share's first range
        head = torch.arange(kv_heads, dtype=torch.int32, device=device)
        merge_indptr = offsets_of(splits.indptr.diff().repeat_interleave(kv_heads))
        request = splits.request.long()
        within = (number - splits.indptr[request])[:, None]
        partial = merge_indptr[request[:, None] * kv_heads + head] + within if splits.reqs else within + head
        columns = (splits.request[:, None], head, splits.start[:, None], splits.end[:, None], partial)
        row = torch.stack([x.expand(capacity, kv_heads) for x in columns], -1)
        place = first[share][:, None] * kv_heads + head * counts[share][:, None] + (number - first[share])[:, None]
        place = torch.where(live[:, None], place, capacity * kv_heads).long()
        segments = torch.zeros(capacity * kv_heads + 1, len(SEGMENT), dtype=torch.int32, device=device)
        segments.index_put_((place.flatten(),), row.reshape(-1, len(SEGMENT)).int())
        programs = (first[:-1, None] * kv_heads + head * counts[:, None]).flatten()
        return cls(
            segments=segments[:-1],
            program_indptr=torch.cat([programs, first[-1:] * kv_heads]).int(),
            merge_indptr=merge_indptr,
            kv_heads=kv_heads,
            partials=capacity * kv_heads,
            persistent=True,
        )

    def validate(self, splits: SplitPlan) -> None:
        """Read both (waits for the device); raise ValueError unless every range is dealt once to every KV head."""
        live = [tuple(row) for row in self.segments.tolist() if row[2] < row[3]]
        dealt = Counter(row[:4] for row in live)
        ranges = splits.to_host().ranges
        wanted = Counter(
            (r, h, start, end) for r, mine in enumerate(ranges) for start, end in mine for h in range(self.kv_heads)
        )
        for segment in wanted - dealt:
            raise ValueError(f"schedule: no program reads {dict(zip(SEGMENT, segment, strict=False))}")
        for segment in dealt - wanted:
            raise ValueError(f"schedule: {dict(zip(SEGMENT, segment, strict=False))} is read too often")
        self._check_programs()
        range_at = {row[4]: row[:4] for row in live}
        beyond = [partial for partial in range_at if not 0 <= partial < self.partials]
        require(not beyond, f"schedule: partial {beyond[:1]} is none of the scratch's {self.partials} rows")
        require(
            len(range_at) == len(live),
            "schedule: two programs leave their partial in the same place",
        )
        tensor("merge_indptr", self.merge_indptr, shape=[splits.reqs * self.kv_heads + 1])
        offsets = self.merge_indptr.tolist()
        require(offsets[0] == 0, f"merge_indptr: expected to begin with 0, got {offsets[0]}")
        for r, mine in enumerate(ranges):
            for h in range(self.kv_heads):
                at = r * self.kv_heads + h
                merged = [range_at.get(partial) for partial in range(offsets[at], offsets[at + 1])]
                require(
                    len(merged) <= 1 or not self.uncut,
                    f"uncut: request {r}, KV head {h} has {len(merged)} partials, and nothing would merge them",
                )
                require(
                    merged == [(r, h, start, end) for start, end in mine],
                    f"schedule: request {r}, KV head {h}: partials are not its own, in key order",
                )

    def _check_programs(self) -> None:
        owned = self.program_indptr.tolist()
        rows = self.segments.tolist()
        with_keys = [i for i, row in enumerate(rows) if row[2] < row[3]]
        in_bounds = owned[0] == 0 and owned == sorted(owned) and owned[-1] <= len(rows)
        require(
            in_bounds and (not with_keys or with_keys[-1] < owned[-1]),
            "schedule: program_indptr does not give every segment with keys to one program",
        )
        empty = [i for i, row in enumerate(rows[: owned[-1]]) if row[2] >= row[3]]
        require(
            not (self.persistent and empty),
            f"schedule: segment {empty[:1]} reads nothing, and a program that walks through its segments would answer "
            "for it; leave it to no program",
        )
