"""Index lists in torch: the eager half of PlanOps."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.plan.policy import SplitContext, SplitPolicy, SplitSizes
from attnlab.plan.splits import owner_of


class EagerPlanOps:
    """PlanOps in torch, on any device."""

    def gather(self, *, table: Tensor, rows: Tensor, start: Tensor, indptr: Tensor, capacity: int) -> Tensor:
        """Return int64 slots: entry `indptr[r] + j` is `table[rows[r], start[r] + j]`. The tail is 0, the sink."""
        if rows.shape[0] == 0 or capacity == 0:
            return torch.zeros(capacity, dtype=torch.int64, device=table.device)
        entry = torch.arange(capacity, dtype=torch.int32, device=table.device)
        req = owner_of(entry, indptr)
        column = start[req] + entry - indptr[req]
        live = (entry < indptr[-1]) & (column < table.shape[1])
        return torch.where(live, table[rows[req], column.clamp(max=table.shape[1] - 1)].long(), 0)

    def sizes(self, policy: SplitPolicy, lens: Tensor, ctx: SplitContext) -> SplitSizes:
        """Return the policy's range sizes."""
        return policy.sizes(lens, ctx)
