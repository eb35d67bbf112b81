"""A lane's integer work in two launches: requests are counted, then all that there is room for is written.

The first kernel (`lane_counts`) is one program; in the second (`lane_lists`) every program has a block to write.
"""

from __future__ import annotations

from attnlab.kernels.lane_counts import count_lane
from attnlab.kernels.lane_lists import write_lane
from attnlab.kernels.lane_memory import LaneMemory
from attnlab.kernels.target import Target
from attnlab.plan.index import KVIndex, check_space
from attnlab.plan.lanes import LaneWork
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.policy import HostPolicy, SharePolicy
from attnlab.plan.schedule import SEGMENT, Schedule
from attnlab.plan.size_rules import SizeRule
from attnlab.plan.splits import SplitPlan
from attnlab.plan.tiles import HEAD_TILE


def cut_for_kernels(work: LaneWork) -> SharePolicy | SizeRule | None:
    """Return the cut of a lane where kernels know it: even shares, or a policy's rule of sizes; else None."""
    policy = work.policy
    if work.lens.count == 0 or isinstance(policy, HostPolicy):
        return None
    return policy if isinstance(policy, SharePolicy) else policy.size_rule(reqs=work.lens.count, ctx=work.ctx)


def lane_in_two_launches(work: LaneWork, cut: SharePolicy | SizeRule, target: Target) -> Lane:
    """Return the lane of `lane_of_parts`, for at least one request."""
    translation, kv_heads = work.source.translation, work.ctx.kv_heads
    check_space(work.source.space, translation, reqs=work.lens.count)
    shares = cut.shares(work.ctx) if isinstance(cut, SharePolicy) else 0
    memory = LaneMemory.of(work, shares=shares)
    count_lane(work, cut, memory, target)
    write_lane(work, cut, memory, target)
    return Lane(
        layout=KVLayout(
            index=KVIndex(indptr=memory.indptr, slots=memory.slots, space=translation.target),
            start=memory.start,
            start_visible=memory.start,
            sight=work.sight,
        ),
        write_slots=memory.write,
        splits=SplitPlan(
            policy=work.policy.label(work.ctx),
            indptr=memory.range_indptr,
            request=memory.request,
            start=memory.range_start,
            end=memory.range_end,
            nominal=memory.nominal,
        ),
        schedule=Schedule(
            segments=memory.segments.view(-1, len(SEGMENT)),
            program_indptr=memory.program_indptr,
            merge_indptr=memory.merge_indptr,
            kv_heads=kv_heads,
            partials=work.ranges * kv_heads,
            persistent=shares > 0,
            uncut=shares > 0 and work.uncut,
            head_tile=work.ctx.head_tile if shares else HEAD_TILE,
        ),
    )
