"""Which program reads which range, in which order, and where it leaves its partial result.

A schedule is a list of segments, one row of int32 each: request, KV head, first and last list entry, partial. Kernels
read nothing else of the split plan, so any dealing of ranges to programs is a value of this type.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import require, tensor
from attnlab.plan.splits import SplitPlan, offsets_of

SEGMENT = ("request", "kv_head", "first", "last", "partial")
"""The columns of a segment: it reads list entries `[first, last)`; an empty one (first == last) does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Segments in launch order, program p owning segment p.

    The partials of (request r, KV head h) are `merge_indptr[r * kv_heads + h]` up to the next entry, in key order;
    whatever order the programs run in, the merge reads them so.
    """

    segments: Int[Tensor, "programs 5"]
    merge_indptr: Int[Tensor, " reqs_kv_heads_1"]
    kv_heads: int

    def __post_init__(self) -> None:
        tensor("segments", self.segments, shape=["programs", len(SEGMENT)], dtype=torch.int32)
        tensor(
            "merge_indptr",
            self.merge_indptr,
            shape=["reqs * kv_heads + 1"],
            dtype=torch.int32,
            device=self.segments.device,
        )

    @property
    def programs(self) -> int:
        """Programs launched per head tile; those whose segment is empty return at once."""
        return self.segments.shape[0]

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
        return cls(
            segments=torch.stack(wide, -1).reshape(-1, 5).int(),
            merge_indptr=merge_indptr,
            kv_heads=kv_heads,
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
        range_at = {row[4]: row[:4] for row in live}
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
                    merged == [(r, h, start, end) for start, end in mine],
                    f"schedule: request {r}, KV head {h}: partials are not its own, in key order",
                )
