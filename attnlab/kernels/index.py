"""Index lists on the device: the Triton half of PlanOps."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.kernels.target import launching_on
from attnlab.plan.policy import SplitContext, SplitPolicy, SplitSizes

_BLOCK = 512


class TritonPlanOps:
    """PlanOps in Triton kernels, launched on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather(self, *, table: Tensor, rows: Tensor, start: Tensor, indptr: Tensor, capacity: int) -> Tensor:
        """Computes: entry `indptr[r] + j` of the result = `table[rows[r], start[r] + j]`, int64; the tail is 0.

        Shapes: `table [max_requests, max_context]` int32; `rows`, `start` `[reqs]`; `indptr [reqs + 1]` int32.
        Grid: one program per request, which copies its row in chunks.
        Reads/writes: nothing else; columns are kept inside the table.
        """
        slots = torch.zeros(capacity, dtype=torch.int64, device=table.device)
        if rows.shape[0] and capacity:
            with launching_on(self.device):
                _gather_kernel[(rows.shape[0],)](
                    table, rows, start, indptr, slots, table.stride(0), table.shape[1], BLOCK=_BLOCK
                )
        return slots

    def sizes(self, policy: SplitPolicy, lens: Tensor, ctx: SplitContext) -> SplitSizes:
        """Return the policy's range sizes, from its Triton half where it has one."""
        with launching_on(self.device):
            return policy.sizes_triton(lens, ctx)


@jit
def _gather_kernel(
    table_ptr,
    rows_ptr,
    start_ptr,
    indptr_ptr,
    slots_ptr,
    table_stride,
    columns,
    BLOCK: tl.constexpr,
):
    # Reference: create_flashinfer_kv_indices_triton.
    req = tl.program_id(0)
    row = tl.load(rows_ptr + req).to(tl.int64)  # rows * columns may pass 2^31
    start = tl.load(start_ptr + req)
    first = tl.load(indptr_ptr + req)
    last = tl.load(indptr_ptr + req + 1)
    for at in range(first, last, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        column = start + entry - first
        live = entry < last
        slot = tl.load(table_ptr + row * table_stride + column, mask=live & (column < columns), other=0)
        tl.store(slots_ptr + entry, slot.to(tl.int64), mask=live)
