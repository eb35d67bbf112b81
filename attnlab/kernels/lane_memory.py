"""What planning a lane writes: views of one allocation, as one each would take longer than the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.plan.lanes import LaneWork
from attnlab.plan.schedule import SEGMENT


@dataclass(frozen=True, slots=True, eq=False)
class LaneMemory:
    """The tensors of a lane, int32 but for the slots, before they are written.

    `unit`: of sizes each request's, of shares where each request's tiles begin in the line of all.
    """

    start: Tensor
    indptr: Tensor
    unit: Tensor
    nominal: Tensor
    range_indptr: Tensor
    merge_indptr: Tensor
    request: Tensor
    range_start: Tensor
    range_end: Tensor
    segments: Tensor
    program_indptr: Tensor
    slots: Tensor
    write: Tensor

    @classmethod
    def of(cls, work: LaneWork, *, shares: int) -> LaneMemory:
        """Allocate for a lane of so many shares, or with 0 of a program for every range."""
        reqs, ranges, kv_heads, device = work.lens.count, work.ranges, work.ctx.kv_heads, work.rows.device
        sizes = [reqs, reqs + 1, reqs + 1, reqs, reqs + 1, reqs * kv_heads + 1, ranges, ranges, ranges]
        sizes += [ranges * kv_heads * len(SEGMENT), (shares or ranges) * kv_heads + 1]
        # Each begins at 16 bytes, so that one compiled kernel serves all: what is missing to that lies between them.
        lengths = [length for size in sizes for length in (size, -size % 4)]
        views = torch.empty(sum(lengths), dtype=torch.int32, device=device).split_with_sizes(lengths)[::2]
        slots = torch.empty(work.entries, dtype=torch.int64, device=device)
        # Under cross-attention no token is stored: all go to the sink.
        write = (torch.zeros if work.sight.cross else torch.empty)(work.tokens, dtype=torch.int64, device=device)
        tensors = [*views, slots, write]
        return cls(*tensors)
