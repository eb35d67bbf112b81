"""Plans: the index against a plain loop, ranges and schedules, and batches that break their promises."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlab.assets import data_path
from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, DeviceLens, HostLens, Lens
from attnlab.eager.index import EagerPlanOps, _copied_by_row, _selected_at_once
from attnlab.kernels.index import TritonPlanOps
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.build import Planner
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.ops import PlanOps
from attnlab.plan.plans import DecodePlan
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import (
    HostPolicy,
    SplitBounds,
    SplitContext,
    SplitPolicy,
    SplitSizes,
    resolve_policy,
    split_policies,
    split_policy,
)
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import SplitPlan, offsets_of, splits_of_host, splits_of_sizes
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec, Sight
from tests.strategies import DEVICE, Held, cut_batches, tables

OPS: dict[str, PlanOps] = {"eager": EagerPlanOps(), "triton": TritonPlanOps(torch.device(DEVICE))}
both_ops = pytest.mark.parametrize("ops", OPS)
POLICIES = ["seed", "static", "tile"]


def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# --- The index --------------------------------------------------------------------------------------------------


def gather(ops: str, held: Held, start: list[int], *, spare: int = 0) -> list[int]:
    """Gather what each request holds from position `start` on."""
    counts = [n - at for n, at in zip(held.lens, start, strict=True)]
    slots = OPS[ops].gather(
        table=held.table.slots,
        rows=held.row_tensor,
        start=ints(start),
        first=ints(start),
        indptr=offsets_of(ints(counts)),
        capacity=sum(counts) + spare,
    )
    assert slots.dtype == torch.int64
    return slots.tolist()


@both_ops
@given(held=tables(), data=st.data())
def test_gather_equals_a_plain_loop(ops: str, held: Held, data: st.DataObject) -> None:
    start = [data.draw(st.integers(0, n)) for n in held.lens]
    wanted = [slot for mine, at in zip(held.slots, start, strict=True) for slot in mine[at:]]
    assert gather(ops, held, start, spare=3) == wanted + [0, 0, 0]


@both_ops
@pytest.mark.parametrize("kind", ["nostart", "start"])
def test_gather_gives_the_originals_index(ops: str, kind: str) -> None:
    with np.load(data_path("golden/original/flashinfer_kv_indices.npz")) as file:
        golden = {name: torch.from_numpy(file[name]).to(DEVICE) for name in file.files}
    wanted, start = golden[f"{kind}_kv_indices"], golden["kv_start_idx"].int()
    start = start if kind == "start" else torch.zeros_like(start)
    slots = OPS[ops].gather(
        table=golden["req_to_token"],
        rows=golden["req_pool_indices"],
        start=start,
        first=start,
        indptr=golden[f"{kind}_kv_indptr"],
        capacity=wanted.shape[0],
    )
    assert torch.equal(slots, wanted)


@both_ops
def test_gather_reads_a_request_of_a_million_tokens(ops: str) -> None:
    table = torch.arange(2_000_000, dtype=torch.int32, device=DEVICE).view(2, 1_000_000)
    slots = OPS[ops].gather(
        table=table, rows=ints([1]), start=ints([0]), first=ints([0]), indptr=ints([0, 1_000_000]), capacity=1_000_000
    )
    assert torch.equal(slots, torch.arange(1_000_000, 2_000_000, device=DEVICE))


@both_ops
def test_gather_serves_4096_requests(ops: str) -> None:
    table = torch.arange(4096 * 3, dtype=torch.int32, device=DEVICE).view(4096, 3)
    counts = [row % 4 for row in range(4096)]
    slots = OPS[ops].gather(
        table=table,
        rows=torch.arange(4095, -1, -1, device=DEVICE),
        start=torch.zeros(4096, dtype=torch.int32, device=DEVICE),
        first=torch.zeros(4096, dtype=torch.int32, device=DEVICE),
        indptr=offsets_of(ints(counts)),
        capacity=sum(counts),
    )
    assert slots.tolist() == [3 * (4095 - i) + j for i in range(4096) for j in range(counts[i])]


@both_ops
@pytest.mark.parametrize("capacity", [0, 5])
def test_gather_of_no_request_is_all_sink(ops: str, capacity: int) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    table = torch.full((2, 4), 7, dtype=torch.int32, device=DEVICE)
    slots = OPS[ops].gather(table=table, rows=none.long(), start=none, first=none, indptr=ints([0]), capacity=capacity)
    assert slots.tolist() == [0] * capacity


@pytest.mark.parametrize(
    ("indptr", "slots", "message"),
    [
        ([1, 2], [5, 6], "indptr: expected to begin with 0, got 1"),
        ([0, 2, 1], [5, 6], r"indptr: request 1 has -1 slots \(from 2 to 1\)"),
        ([0, 1, 3], [5, 6], "slots: expected at least 3, got 2"),
        ([0, 1, 3], [5, 6, 8], "slots: request 1, position 1 reads slot 8; expected 1 to 7"),
        ([0, 0, 1], [0], "slots: request 1, position 0 reads slot 0; expected 1 to 7"),
    ],
)
def test_an_index_that_leaves_the_pool_is_found(indptr: list[int], slots: list[int], message: str) -> None:
    index = KVIndex(indptr=ints(indptr), slots=ints(slots, torch.int64), space="pool")
    with pytest.raises(ValueError, match=message):
        index.validate(num_slots=8)


def test_the_tail_of_an_index_is_not_read() -> None:
    KVIndex(indptr=ints([0, 2]), slots=ints([5, 6, -1, 99], torch.int64), space="pool").validate(num_slots=8)


def test_a_full_layout_begins_at_position_0() -> None:
    layout = KVLayout.full(KVIndex(indptr=ints([0, 1]), slots=ints([5], torch.int64), space="pool"))
    layout.validate(num_slots=8)
    with pytest.raises(ValueError, match="start: a full layout begins at position 0"):
        dataclasses.replace(layout, start=ints([3])).validate(num_slots=8)
    with pytest.raises(ValueError, match="start: expected no negative position"):
        dataclasses.replace(layout, start=ints([-3]), sight=Sight(window=4)).validate(num_slots=8)
    with pytest.raises(ValueError, match=r"start: expected \[1\] int32"):
        dataclasses.replace(layout, start=ints([0, 0]))


# --- Ranges -----------------------------------------------------------------------------------------------------


CTX = SplitContext(heads=8, kv_heads=2, v_dim=16, mla=False, context_len=4096, multiprocessors=132)


def host_policy(ranges: Any, *, max_ranges: int = 4) -> HostPolicy:
    return HostPolicy(name="mine", rule=lambda lens, ctx: ranges, max_ranges=max_ranges)


def split(ranges: list[list[tuple[int, int]]]) -> SplitPlan:
    lens = [mine[-1][1] if mine else 0 for mine in ranges]
    return splits_of_host(host_policy(ranges, max_ranges=64), lens, CTX, ints(lens))


@given(ranges=cut_batches())
def test_a_host_policys_ranges_arrive_unchanged(ranges: list[list[tuple[int, int]]]) -> None:
    plan = split(ranges)
    host = plan.to_host()
    assert [list(mine) for mine in host.ranges] == ranges
    assert host.effective == host.nominal == tuple(len(mine) for mine in ranges)
    plan.validate(host.lens)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([[(0, 5), (5, 9)], []], r"policy 'mine': request 0: keys 9 to 9 are in no range"),
        ([[], []], r"request 0: keys 0 to 9 are in no range"),
        ([[(0, 5), (4, 10)], []], r"request 0: range \[4, 10\) overlaps the one before, which ends at 5"),
        ([[(0, 5), (6, 10)], []], r"request 0: range \[6, 10\) leaves a gap to the one before, which ends at 5"),
        ([[(1, 10)], []], r"request 0: range \[1, 10\) leaves a gap"),
        ([[(0, 11)], []], r"request 0: range \[0, 11\) goes beyond its 10 keys"),
        ([[(0, 10)], [(0, 1)]], r"request 1: range \[0, 1\) goes beyond its 0 keys"),
        ([[(0, 10), (10, 10)], []], r"request 0: range \[10, 10\) holds no key"),
        ([[(0, 5), (5, 3), (3, 10)], []], r"request 0: range \[5, 3\) holds no key"),
        ([[(0, 2), (2, 4), (4, 6), (6, 10)], []], r"request 0 has 4 ranges, more than the promised max_ranges 3"),
        ([[(0, 10)]], r"expected ranges for 2 requests, got 1"),
        ([[(0, 10)], [], []], r"expected ranges for 2 requests, got 3"),
        ([[(0, 5.0), (5.0, 10)], []], r"request 0: expected ranges as pairs of ints, got \(0, 5.0\)"),
        ([[0, 10], []], r"request 0: expected ranges as pairs of ints, got 0"),
        ([[(0, 5, 10)], []], r"request 0: expected ranges as pairs of ints, got \(0, 5, 10\)"),
        (None, r"expected a list of ranges for each request, got None"),
        ([None, None], r"request 0: expected a list of ranges, got None"),
    ],
)
def test_a_host_policy_that_is_wrong_is_told_before_anything_runs(ranges: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        splits_of_host(host_policy(ranges, max_ranges=3), [10, 0], CTX, ints([10, 0]))


def test_a_host_policy_may_answer_in_numpy_and_cannot_change_the_lengths() -> None:
    def rule(lens: Sequence[int], ctx: SplitContext) -> Any:
        mine = [[(np.int64(0), np.int32(n))] for n in lens]
        lens.clear()  # type: ignore[attr-defined]
        return iter(mine)

    policy = HostPolicy(name="mine", rule=rule, max_ranges=1)
    lens = [3, 4]
    plan = splits_of_host(policy, lens, CTX, ints(lens))
    assert plan.to_host().ranges == (((0, 3),), ((0, 4),)) and lens == [3, 4]


BROKEN_SPLITS: dict[str, tuple[dict[str, list[int]], str]] = {
    "gap": ({"start": [0, 6, 0, 0]}, r"request 0: range \[6, 9\) leaves a gap"),
    "beyond": ({"end": [5, 9, 3, 0]}, r"request 1: range \[0, 3\) goes beyond its 2 keys"),
    "owner": ({"request": [0, 1, 1, 0]}, "request numbers disagree with indptr"),
    "live tail": ({"end": [5, 9, 2, 4]}, "entry 3 lies beyond the last range but is not empty"),
    "offsets beyond": ({"indptr": [0, 2, 5]}, "indptr: ends at 5, beyond the capacity of 4"),
}


@pytest.mark.parametrize("name", BROKEN_SPLITS)
def test_validate_finds_ranges_with(name: str) -> None:
    change, message = BROKEN_SPLITS[name]
    good = {"indptr": [0, 2, 3], "request": [0, 0, 1, 0], "start": [0, 5, 0, 0], "end": [5, 9, 2, 0], "nominal": [2, 1]}
    SplitPlan(policy="mine", **{k: ints(v) for k, v in good.items()}).validate([9, 2])
    with pytest.raises(ValueError, match=message):
        SplitPlan(policy="mine", **{k: ints(v) for k, v in {**good, **change}.items()}).validate([9, 2])


class OneKey(SplitPolicy):
    """Promises ranges of 8 keys and at most 4, and asks for ranges of one."""

    name = "one-key"

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        return SplitBounds(max_ranges=4, min_size=8)

    def sizes(self, lens: Tensor, ctx: SplitContext) -> SplitSizes:
        return SplitSizes(size=torch.ones_like(lens), nominal=lens)


def test_sizes_that_break_the_policys_own_promise_are_raised() -> None:
    lens, policy = ints([0, 7, 30, 100]), OneKey()
    bounds = policy.bounds(bound_max=100, ctx=CTX)
    plan = splits_of_sizes(policy.sizes(lens, CTX), lens, policy="one-key", bounds=bounds, total=137)
    plan.validate([0, 7, 30, 100])
    assert plan.to_host().effective == (0, 1, 4, 4)
    assert plan.to_host().nominal == (0, 7, 30, 100)


@pytest.mark.parametrize("size", [-1, 0, 2**31 - 1])
def test_no_size_whatever_loses_a_key(size: int) -> None:
    lens = ints([2**30, 0, 1])
    sizes = SplitSizes(size=torch.full_like(lens, size), nominal=torch.ones_like(lens))
    bounds = SplitBounds(max_ranges=8, min_size=32)
    splits_of_sizes(sizes, lens, policy="mine", bounds=bounds, total=2**30 + 1).validate([2**30, 0, 1])


@pytest.mark.parametrize("count", [1, 3, 7, 8])
def test_the_longest_request_of_all_is_cut_without_overflow(count: int) -> None:
    lens = ints([2**30])
    sizes, bounds = Static(splits=count).sizes(lens, CTX), SplitBounds(max_ranges=count, min_size=32)
    splits_of_sizes(sizes, lens, policy="static", bounds=bounds, total=2**30).validate([2**30])


@pytest.mark.parametrize("bad", [ints([4, 4]).long(), ints([4, 4]).float(), ints([4])])
def test_sizes_of_another_shape_or_dtype_are_refused(bad: Tensor) -> None:
    lens = ints([8, 8])
    with pytest.raises((TypeError, ValueError), match=r"size: expected \[.*\] int32.*, got"):
        splits_of_sizes(
            SplitSizes(size=bad, nominal=torch.ones_like(bad, dtype=torch.int32)),
            lens,
            policy="mine",
            bounds=SplitBounds(max_ranges=8, min_size=1),
            total=16,
        )


def test_a_policy_is_registered_in_one_of_two_forms() -> None:
    with pytest.raises(TypeError, match="policy 'x': expected a SplitPolicy class, got <function"):
        split_policy("x")(lambda lens, ctx: [])
    with pytest.raises(ValueError, match="max_ranges: a policy in plain Python states it"):
        split_policy("x", needs_host_lens=True)
    with pytest.raises(ValueError, match="max_ranges: a policy in plain Python states it"):
        split_policy("x", max_ranges=4)
    assert "x" not in split_policies.names()


def test_a_policy_is_a_name_or_an_object() -> None:
    tile = Tile(tile=64)
    assert resolve_policy(tile) is tile and resolve_policy("tile") == Tile()
    with pytest.raises(ValueError, match="policy: expected one of balanced, seed, static, tile.*, got 'sead'"):
        resolve_policy("sead")
    with pytest.raises(TypeError, match=r"policy: expected one of balanced, seed, .*got 8"):
        resolve_policy(8)  # type: ignore[arg-type]


# --- The schedule -----------------------------------------------------------------------------------------------


@given(ranges=cut_batches(), kv_heads=st.integers(1, 4), spare=st.integers(0, 5))
def test_every_range_is_read_once_for_every_kv_head(
    ranges: list[list[tuple[int, int]]], kv_heads: int, spare: int
) -> None:
    splits = split(ranges)
    pad = {name: torch.nn.functional.pad(getattr(splits, name), (0, spare)) for name in ("request", "start", "end")}
    if ranges:  # a batch without requests has no buffer to leave room in
        splits = dataclasses.replace(splits, **pad)
    schedule = Schedule.one_range_a_program(splits, kv_heads=kv_heads)
    schedule.validate(splits)
    live = {tuple(row[:4]): row[4] for row in schedule.segments.tolist() if row[2] < row[3]}
    offsets, partials = schedule.merge_indptr.tolist(), []
    for r, mine in enumerate(ranges):
        for h in range(kv_heads):
            found = [live.pop((r, h, a, b)) for a, b in mine]
            at = r * kv_heads + h
            assert found == list(range(offsets[at], offsets[at + 1]))
            partials += found
    assert not live and len(partials) == len(set(partials))
    assert schedule.programs == splits.capacity * kv_heads


BROKEN_SCHEDULES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a segment dropped": (lambda s, m: s[0, 2:4].zero_(), "no program reads .*'request': 0, 'kv_head': 0, 'first': 0"),
    "a segment twice": (lambda s, m: s[1].copy_(s[0]), "schedule: no program reads"),
    "one more segment": (lambda s, m: s[6].copy_(s[0]), "'request': 0, 'kv_head': 0, .* is read too often"),
    "a segment moved": (lambda s, m: s[0, 3].add_(1), "no program reads .*'last': 5"),
    "partials exchanged": (
        lambda s, m: s[:, 4].copy_(s[[2, 1, 0, 3, 4, 5, 6, 7], 4]),
        "request 0, KV head 0: partials are not its own, in key order",
    ),
    "a partial shared": (lambda s, m: s[0, 4].copy_(s[1, 4]), "two programs leave their partial in the same place"),
    "a partial unread": (lambda s, m: s[0, 4].fill_(6), "request 0, KV head 0: partials are not its own"),
    "a hole to merge": (
        lambda s, m: (s[4:6, 4].add_(1), m[3:].add_(1)),
        "request 1, KV head 0: partials are not its own, in key order",
    ),
    "offsets too short": (lambda s, m: m.resize_(4), r"merge_indptr: expected \[5\]"),
}


@pytest.mark.parametrize("name", BROKEN_SCHEDULES)
def test_validate_finds_a_schedule_with(name: str) -> None:
    change, message = BROKEN_SCHEDULES[name]
    splits = split([[(0, 5), (5, 9)], [(0, 2)]])
    pad = {n: torch.nn.functional.pad(getattr(splits, n), (0, 1)) for n in ("request", "start", "end")}
    splits = dataclasses.replace(splits, **pad)
    schedule = Schedule.one_range_a_program(splits, kv_heads=2)
    schedule.validate(splits)
    change(schedule.segments, schedule.merge_indptr)
    with pytest.raises(ValueError, match=message):
        schedule.validate(splits)


# --- Plans ------------------------------------------------------------------------------------------------------


class Bench:
    """A table of a few requests over a small pool, and plans from it; `lens[r]` tokens are in row `rows[r]`."""

    def __init__(
        self,
        lens: Sequence[int],
        *,
        policy: Any = "seed",
        ops: str = "eager",
        max_context: int = 2048,
        kv_heads: int = 2,
    ) -> None:
        attention = AttentionSpec(heads=4, kv_heads=kv_heads, qk_dim=8, v_dim=8, scale=0.3)
        self.model = ModelSpec.uniform(
            attention, layers=2, context_len=max_context, page_size=1, kv_dtype=torch.float32
        )
        self.pool = MHAPool(self.model, num_slots=sum(lens) + 8, device=DEVICE)
        self.table = RequestTable(
            max_requests=len(lens) + 2, max_context=max_context, num_slots=self.pool.num_slots, device=DEVICE
        )
        self.rows = list(reversed([self.table.admit() for _ in lens]))
        self.policy, self.ops, self.lens = resolve_policy(policy), ops, list(lens)
        for row, n in zip(self.rows, lens, strict=True):
            self.table.append(row, self.pool.allocator.allocate(row, n).flip(0))

    def planner(self, model: ModelSpec | None = None) -> Planner:
        return Planner(
            model=self.model if model is None else model,
            pool=self.pool,
            table=self.table,
            policy=self.policy,
            ops=OPS[self.ops],
            multiprocessors=132,
        )

    def batch(self, seq: Lens | None = None, rows: Any = None) -> DecodeBatch:
        return DecodeBatch(
            rows=torch.tensor(self.rows if rows is None else rows, dtype=torch.int64),
            seq=HostLens.of(self.lens, device=DEVICE) if seq is None else seq,
        )

    def plan(self, seq: Lens | None = None, rows: Any = None) -> DecodePlan:
        return self.planner().build(self.batch(seq, rows))

    def slots(self, r: int) -> list[int]:
        return self.table.slots_of(self.rows[r]).tolist()


@both_ops
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lens", [[], [0], [1], [0, 0, 0], [300, 0, 1, 33], [1] * 40], ids=str)
def test_a_plan_reads_every_requests_slots_and_writes_to_its_last(lens: list[int], policy: str, ops: str) -> None:
    bench = Bench(lens, policy=policy, ops=ops)
    plan = bench.plan()
    plan.validate(num_slots=bench.pool.num_slots)
    lane = plan.lane(1)
    offsets = lane.layout.index.indptr.tolist()
    assert offsets == [sum(lens[:r]) for r in range(len(lens) + 1)]
    for r, n in enumerate(lens):
        assert lane.layout.index.slots[offsets[r] : offsets[r] + n].tolist() == bench.slots(r)
    assert lane.write_slots.tolist() == [bench.slots(r)[-1] if n else 0 for r, n in enumerate(lens)]
    assert lane.splits.to_host().lens == tuple(lens)


@pytest.mark.parametrize("policy", POLICIES)
def test_both_ops_make_the_same_plan(policy: str) -> None:
    lens = [1, 700, 0, 31, 1025, 32]
    eager, triton = (Bench(lens, policy=policy, ops=ops).plan() for ops in OPS)
    for a, b in zip(tensors_of(eager.lanes), tensors_of(triton.lanes), strict=True):
        assert torch.equal(a, b)


@both_ops
def test_a_padded_row_writes_to_the_sink_also_where_its_row_is_in_use(ops: str) -> None:
    """B28: replayed batches keep stale rows in their padding."""
    lane = Bench([5, 6], ops=ops).plan(HostLens.of([5, 0], device=DEVICE)).lane(0)
    assert lane.write_slots.tolist()[1] == 0 and lane.layout.index.indptr.tolist() == [0, 5, 5]


def test_4096_requests_make_a_plan() -> None:
    bench = Bench([r % 5 for r in range(4096)], max_context=8)
    plan = bench.plan()
    plan.validate(num_slots=bench.pool.num_slots)
    assert plan.lane(0).splits.to_host().lens == tuple(bench.lens)


def test_a_million_tokens_make_a_plan() -> None:
    bench = Bench([1_000_000, 3], max_context=1_000_000, policy="tile")
    splits = bench.plan().lane(0).splits
    splits.validate([1_000_000, 3])
    assert splits.to_host().effective == (3907, 1)


BROKEN_PROMISES: dict[str, list[int]] = {
    "each too long": [90, 90, 5],
    "all together too long": [40, 40, 40],
    "one far too long": [2**31 - 1, 0, 3],
    "all far too long": [2**31 - 1] * 3,
    "negative": [-7, 40, -(2**31)],
}


@both_ops
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BROKEN_PROMISES)
def test_lengths_that_break_their_promise_overrun_no_buffer(name: str, policy: str, ops: str) -> None:
    bench = Bench([50, 50, 50], policy=policy, ops=ops)
    broken = DeviceLens(device=ints(BROKEN_PROMISES[name]), bound_each=40, bound_total=100)
    plan = bench.plan(broken)
    for lane in plan.lanes:
        lane.layout.validate(num_slots=bench.pool.num_slots)
        live = lane.layout.index.indptr.diff().tolist()
        assert sum(live) <= lane.layout.index.slots.shape[0] == 100 and max(live) <= 40
        lane.splits.validate(live)
        lane.schedule.validate(lane.splits)
        assert int(lane.schedule.segments[:, 4].max()) < lane.schedule.programs
    with pytest.raises(ValueError, match="lens: "):
        plan.validate(num_slots=bench.pool.num_slots)


@both_ops
@pytest.mark.parametrize("policy", POLICIES)
def test_device_lens_give_the_plan_of_host_lens(policy: str, ops: str) -> None:
    """B46: ranges come from live lengths; bounds only size the buffers."""
    bench = Bench([257, 0, 33, 1000], policy=policy, ops=ops)
    loose = DeviceLens(device=ints(bench.lens), bound_each=2048, bound_total=4000)
    known, unknown = bench.plan().lane(0), bench.plan(loose).lane(0)
    assert known.splits.to_host().ranges == unknown.splits.to_host().ranges
    assert torch.equal(known.layout.index.indptr, unknown.layout.index.indptr)
    assert torch.equal(known.layout.index.slots, unknown.layout.index.slots[:1290])
    assert torch.equal(known.write_slots, unknown.write_slots)


def test_rows_on_the_host_are_checked_also_where_lengths_are_on_the_device() -> None:
    bench = Bench([5, 6])
    batch = DecodeBatch(rows=torch.tensor([1, 99]), seq=DeviceLens(device=ints([5, 6]), bound_each=6, bound_total=11))
    with pytest.raises(ValueError, match="rows: request 1 is in row 99; the table has rows 0 to 3"):
        bench.planner().build(batch)


@pytest.mark.gpu
def test_rows_on_the_device_that_are_none_of_the_tables_are_padding() -> None:
    bench = Bench([5, 6])
    lens = DeviceLens(device=ints([5, 6]), bound_each=6, bound_total=11)
    batch = DecodeBatch(rows=torch.tensor([-4, 99], device="cuda"), seq=lens)
    lane = bench.planner().build(batch).lane(0)
    # What is nobody's row is padding: it reads nothing and writes to the sink.
    assert lane.layout.index.indptr.tolist() == [0, 0, 0] and lane.write_slots.tolist() == [0, 0]


def test_one_row_is_not_decoded_twice() -> None:
    bench = Bench([5, 6])
    twice = DecodeBatch.of(rows=[bench.rows[0]] * 2, lens=[5, 5], device=DEVICE)
    with pytest.raises(ValueError, match="rows: requests 0 and 1 are both row 1; they would write the same slot"):
        bench.planner().build(twice)


def test_a_request_longer_than_its_row_is_refused() -> None:
    bench = Bench([5, 6])
    with pytest.raises(ValueError, match="seq: request 1 asks for 7 tokens, row 0 of the table holds 6"):
        bench.plan(HostLens.of([5, 7], device=DEVICE))
    with pytest.raises(ValueError, match="rows: request 0 is in row 4; the table has rows 0 to 3"):
        bench.plan(rows=[4, 0])


def test_lengths_beyond_the_table_or_the_model_are_refused() -> None:
    bench = Bench([5], max_context=64)
    for seq in (
        HostLens.of([65], device=DEVICE),
        DeviceLens(device=ints([5]), bound_each=65, bound_total=65),
    ):
        with pytest.raises(ValueError, match="seq: a request of up to 65 tokens, but the table has 64 columns"):
            bench.plan(seq)
    short = dataclasses.replace(bench.model, context_len=4)
    with pytest.raises(ValueError, match="and the model a context of 4"):
        bench.planner(short).build(bench.batch())


def test_lengths_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=f"seq: expected lengths on {DEVICE}.* like the pool, got meta"):
        Bench([5]).plan(HostLens.of([5], device="meta"))


def test_a_host_policy_needs_lengths_that_the_host_knows() -> None:
    bench = Bench([5], policy=host_policy([[(0, 5)]]))
    assert bench.plan().lane(0).splits.to_host().ranges == (((0, 5),),)
    with pytest.raises(
        TypeError, match=r"policy 'mine' is written in plain Python and needs .*\(HostLens\), got DeviceLens"
    ):
        bench.plan(DeviceLens(device=ints([5]), bound_each=5, bound_total=5))


def test_layers_of_one_kind_share_a_lane_and_others_have_their_own() -> None:
    wide = AttentionSpec(heads=4, kv_heads=2, qk_dim=8, v_dim=8, scale=0.3)
    kinds = [wide, dataclasses.replace(wide, kv_heads=4), dataclasses.replace(wide, softcap=5.0)]
    bench = Bench([40])
    model = dataclasses.replace(
        bench.model,
        layers=tuple(LayerSpec(index=10 + i, attention=a, pool_layer=i % 2) for i, a in enumerate(kinds)),
    )
    plan = bench.planner(model).build(bench.batch())
    assert plan.lane_of_layer == {10: 0, 11: 1, 12: 0}
    assert [lane.schedule.kv_heads for lane in plan.lanes] == [2, 4]
    with pytest.raises(ValueError, match="layer: this plan has layers 10, 12, 11, got 0"):
        plan.lane(0)


def tensors_of(x: object) -> Iterator[Tensor]:
    """Every tensor inside a plan."""
    if isinstance(x, Tensor):
        yield x
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from tensors_of(getattr(x, field.name))
    elif isinstance(x, tuple):
        for item in x:
            yield from tensors_of(item)


@both_ops
@pytest.mark.parametrize("policy", POLICIES)
def test_two_live_plans_share_no_memory(policy: str, ops: str) -> None:
    bench = Bench([70, 0, 33], policy=policy, ops=ops)
    plans = [bench.plan(), bench.plan()]
    first, second = ({x.untyped_storage().data_ptr() for x in tensors_of(plan.lanes) if x.numel()} for plan in plans)
    assert first and second and not first & second


@both_ops
def test_a_plan_is_unchanged_by_the_next_one(ops: str) -> None:
    bench = Bench([70, 0, 33], ops=ops)
    plan = bench.plan()
    before = [x.clone() for x in tensors_of(plan.lanes)]
    bench.table.slots.fill_(1)
    bench.plan(HostLens.of([5, 0, 3], device=DEVICE))
    for was, now in zip(before, tensors_of(plan.lanes), strict=True):
        assert torch.equal(was, now)


def backend(bench: Bench) -> AttentionBackend:
    return AttentionBackend(
        model=bench.model,
        pool=bench.pool,
        table=bench.table,
        engine="eager",
        policy=bench.policy,
        max_requests=2,
        multiprocessors=132,
    )


def test_a_plan_from_before_slots_were_freed_is_refused_and_nothing_is_stored() -> None:
    bench = Bench([5, 6])
    server = backend(bench)
    plan = server.plan(bench.batch())
    bench.pool.allocator.release(bench.rows[0])
    q, kv = torch.ones(2, 4, 8, device=DEVICE), torch.ones(2, 2, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"plan: made for another state of the pool .* plan again"):
        server.decode(0, q, kv, kv, plan)
    assert not bench.pool.view(0).k.any()


def test_a_plan_of_another_backend_is_refused() -> None:
    mine, other = Bench([5, 6]), Bench([5, 6])
    plan = backend(other).plan(other.batch())
    with pytest.raises(ValueError, match="the plan belongs to another backend"):
        backend(mine).decode(0, torch.ones(2, 4, 8, device=DEVICE), None, None, plan, save=False)


def test_a_plan_that_the_scratch_cannot_hold_is_refused() -> None:
    bench = Bench([500, 500, 500])
    with pytest.raises(ValueError, match=r"batch: may need 24 ranges, the scratch holds 16; .* larger max_requests"):
        backend(bench).plan(bench.batch())


def test_a_policy_is_found_by_name_in_a_fresh_process() -> None:
    """Nothing but the rule's own door is imported: its file registers itself when it is asked for."""
    words = (
        "from attnlab.plan.policy import SplitContext; from attnlab.plan.splits import cut; "
        "ctx = SplitContext(heads=4, kv_heads=2, v_dim=16, mla=False, context_len=64, multiprocessors=8); "
        "print(cut('seed', [5], ctx).to_host().ranges)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(((0, 5),),)"


@given(data=st.data(), reqs=st.integers(1, 5), columns=st.integers(1, 9))
def test_both_ways_to_gather_lists_agree(data: st.DataObject, reqs: int, columns: int) -> None:
    """A CPU copies slices of rows; a GPU's entries are selected at once, and none may lie outside of the table."""
    numbers = lambda low, high: data.draw(st.lists(st.integers(low, high), min_size=reqs, max_size=reqs))  # noqa: E731
    table = torch.arange(1, 4 * columns + 1, dtype=torch.int32).view(4, columns)
    lens, spare = numbers(0, 12), data.draw(st.integers(0, 3))
    capacity = sum(lens) + spare
    ends = torch.tensor([0, *lens]).cumsum(0).clamp(max=max(0, capacity - data.draw(st.integers(0, 3)))).int()
    rows = torch.tensor(numbers(0, 3))
    start, first = (torch.tensor(numbers(-4, 12), dtype=torch.int32) for _ in range(2))
    if capacity == 0:
        return
    given_to = (table, rows, start, first, ends, capacity)
    copied = _copied_by_row(*given_to)
    assert copied.dtype == torch.int64 and torch.equal(copied, _selected_at_once(*given_to))
