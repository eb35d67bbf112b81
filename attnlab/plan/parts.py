"""A lane made part by part, by the functions of PlanOps and by torch: its meaning, which serves every policy."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.plan.index import KVIndex
from attnlab.plan.lanes import LaneWork, Source, held
from attnlab.plan.layout import Extent, KVLayout
from attnlab.plan.ops import PlanOps
from attnlab.plan.plans import Lane
from attnlab.plan.policy import HostPolicy
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import SplitPlan, cut_live, splits_of_ranges


def lane_of_parts(ops: PlanOps, work: LaneWork) -> Lane:
    """Return a lane: the extent of its lists, how they are cut and dealt, their slots and those of new tokens."""
    end = held(work.lens)
    extent = ops.extent(query=end - work.behind, end=end, sight=work.sight, align=1, capacity=work.entries)
    splits = _splits(ops, work, extent.indptr.diff())
    return Lane(
        layout=KVLayout(
            index=index_at(ops, work.source, work.rows, extent, capacity=work.entries),
            start=extent.start,
            start_visible=extent.start_visible,
            sight=work.sight,
        ),
        write_slots=_write_slots(ops, work),
        splits=splits,
        schedule=Schedule.of(work.policy, splits, work.ctx, uncut=work.uncut),
    )


def _splits(ops: PlanOps, work: LaneWork, live: Int[Tensor, " reqs"]) -> SplitPlan:
    if isinstance(work.policy, HostPolicy):
        return splits_of_ranges(work.asked or [], live, policy=work.policy.label(work.ctx))
    return cut_live(work.policy, live, work.ctx, ops.sizes, bounds=work.bounds, total=work.total)


def _write_slots(ops: PlanOps, work: LaneWork) -> Int[Tensor, " tokens"]:
    """Return where new tokens go: under cross-attention nowhere, which is the sink."""
    if work.sight.cross:
        return torch.zeros(work.tokens, dtype=torch.int64, device=work.rows.device)
    return index_at(ops, work.source, work.rows, work.new_tokens(), capacity=work.tokens).slots


def index_at(ops: PlanOps, source: Source, rows: Int[Tensor, " reqs"], extent: Extent, *, capacity: int) -> KVIndex:
    """Return the slots at those positions of rows, in the id space of a storage: gathered, translated, once."""
    ids = ops.gather(
        table=source.table,
        rows=rows.clamp(0, source.table.shape[0] - 1),
        start=extent.start,
        first=extent.start_visible,
        indptr=extent.indptr,
        capacity=capacity,
    )
    index = KVIndex(indptr=extent.indptr, slots=ids, space=source.space)
    return index.translated(source.translation, ops.translate)
