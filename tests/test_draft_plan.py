"""Plans of drafts: what is listed, shared, cut and refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.backend import AttentionBackend
from attnlab.batch import MAX_LEN, DeviceLens, DraftBatch, HostLens, Lens
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.build import Planner
from attnlab.plan.draft import DraftCut, DraftPlan, branch_lens, branch_stride, draft_columns, draft_room, most_entries
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import HostPolicy, SplitBounds, SplitContext, SplitPolicy, SplitSizes, resolve_policy
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec, Sight
from tests.contracts.test_plan_ops import OPS, both_ops, ints
from tests.strategies import DEVICE, lengths
from tests.syncs import no_waiting
from tests.test_plan import BROKEN_PROMISES, POLICIES, tensors_of

CTX = SplitContext(heads=8, kv_heads=2, v_dim=16, mla=False, context_len=4096, multiprocessors=132, rows_per_seq=2)


class Bench:
    """Requests of `lens` cached tokens, with slots for their drafts behind these, unless `room` is less."""

    def __init__(
        self,
        lens: Sequence[int],
        *,
        topk: int = 2,
        steps: int = 3,
        page: int = 1,
        window: int | None = None,
        policy: Any = "static",
        ops: str = "eager",
        room: int | None = None,
        max_context: int = 2048,
        sliding: bool = False,
    ) -> None:
        self.lens, self.topk, self.steps, self.page = list(lens), topk, steps, page
        spec = AttentionSpec(heads=4, kv_heads=2, qk_dim=8, v_dim=8, scale=0.3)
        layers = [spec, dataclasses.replace(spec, window=window)]
        self.model = ModelSpec(
            name="toy",
            layers=tuple(LayerSpec(index=i, attention=a, pool_layer=i) for i, a in enumerate(layers)),
            context_len=max_context,
            page_size=page,
            kv_dtype=torch.float32,
            mla=False,
        )
        slots = page * (8 + sum(-(-(n + self.room(n)) // page) for n in lens))
        self.pool: KVPool = MHAPool(self.model, num_slots=slots, device=DEVICE)
        if sliding:
            self.pool = WindowPool(self.model, num_slots=slots, sliding_slots=slots, device=DEVICE)
        self.table = RequestTable(max_requests=len(lens) + 1, max_context=max_context, num_slots=slots, device=DEVICE)
        self.cache = PagedCache(table=self.table, pool=self.pool)
        self.rows = [self.cache.admit() for _ in lens][::-1]
        for row, n in zip(self.rows, lens, strict=True):
            self.cache.append(row, n)
            self.cache.append(row, (self.room(n) if room is None else room) if n else 0)
        self.planner = Planner(
            model=self.model,
            pool=self.pool,
            table=self.table,
            policy=resolve_policy(policy),
            ops=OPS[ops],
            multiprocessors=132,
        )

    def room(self, n: int) -> int:
        return draft_room(n, topk=self.topk, steps=self.steps, page_size=self.page)

    def batch(self, seq: Lens | None = None, rows: Sequence[int] | None = None) -> DraftBatch:
        return DraftBatch(
            rows=torch.tensor(self.rows if rows is None else rows, dtype=torch.int64),
            seq=HostLens.of(self.lens, device=DEVICE) if seq is None else seq,
            topk=self.topk,
            steps=self.steps,
        )

    def plan(self, seq: Lens | None = None) -> DraftPlan:
        return self.planner.build(self.batch(seq))

    def backend(self, **options: Any) -> AttentionBackend:
        return AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=self.table,
            engine="eager",
            policy=self.planner.policy,
            multiprocessors=132,
            **options,
        )


# --- Where drafts lie -------------------------------------------------------------------------------------------


@given(cached=st.integers(1, 40), topk=st.integers(1, 5), steps=st.integers(1, 6), page=st.sampled_from([1, 2, 4, 16]))
def test_branches_have_pages_of_their_own_and_the_room_ends_with_the_last_draft(
    cached: int, topk: int, steps: int, page: int
) -> None:
    stride = branch_stride(cached, steps=steps, page_size=page)
    assert branch_stride(ints([cached]), steps=steps, page_size=page).tolist() == [stride]
    # Branch t writes into a copy of the cached tokens' last page, and into the pages that follow it.
    first = [cached // page + t * stride // page for t in range(topk)]
    columns = [[cached + t * stride + i for i in range(steps)] for t in range(topk)]
    pages = [sorted({column // page for column in mine}) for mine in columns]
    assert all(mine[0] == at for mine, at in zip(pages, first, strict=True))
    assert all(before[-1] < after[0] for before, after in zip(pages, pages[1:], strict=False))
    assert stride - page < cached % page + steps <= stride
    assert cached + draft_room(cached, topk=topk, steps=steps, page_size=page) == columns[-1][-1] + 1


@given(bound=st.integers(0, 50), topk=st.integers(1, 4), steps=st.integers(1, 6), page=st.sampled_from([1, 2, 4, 16]))
def test_the_columns_of_a_bound_are_those_of_its_worst_length(bound: int, topk: int, steps: int, page: int) -> None:
    room = {"topk": topk, "steps": steps, "page_size": page}
    worst = max((n + draft_room(n, **room) for n in range(1, bound + 1)), default=0)
    assert draft_columns(DeviceLens(device=ints([0]), bound_each=bound, bound_total=bound), **room) == worst


def test_room_for_drafts_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="topk: expected at least 1, got 0"):
        draft_room(5, topk=0, steps=3, page_size=1)
    with pytest.raises(ValueError, match="cached: expected at least 0 tokens, got -1"):
        draft_room(-1, topk=1, steps=3, page_size=1)


# --- How long the lists are -------------------------------------------------------------------------------------


def test_a_row_of_lists_has_room_for_every_branch_of_every_request() -> None:
    """B32: 8 requests of up to 4,096 tokens overflow a row of 8 x 8 x 4,096 / 8 once they have 4,096 in all."""
    seq = HostLens.of([513] * 8, device="cpu")
    entries = [most_entries(branch_lens(seq, 8, ahead=ahead), Sight()) for ahead in (1, 2, 3)]
    assert entries == [8 * (8 * 513 + 8 * ahead) for ahead in (1, 2, 3)]
    assert entries[0] > 8 * 4096
    bounded = DeviceLens(device=seq.device, bound_each=4096, bound_total=8 * 4096)
    assert most_entries(branch_lens(bounded, 8, ahead=3), Sight()) == 8 * (8 * 4096 + 8 * 3)


@both_ops
@given(
    lens=st.lists(lengths(300), max_size=4),
    topk=st.integers(1, 4),
    steps=st.integers(2, 5),
    window=st.none() | st.integers(1, 40),
    chunk=st.none() | st.integers(1, 40),
)
@settings(max_examples=15)
def test_the_longest_steps_lists_just_fill_a_row(
    ops: str, lens: list[int], topk: int, steps: int, window: int | None, chunk: int | None
) -> None:
    seq, sight = HostLens.of(lens, device=DEVICE), Sight(window=window, chunk=chunk)
    ahead = [branch_lens(seq, topk, ahead=i + 1) for i in range(steps)]
    entries = max(most_entries(mine, sight) for mine in ahead)
    if ops == "triton" and len(lens) * topk * steps > 12:
        return
    bench = Bench(lens, topk=topk, steps=steps)
    lists = OPS[ops].drafts(
        table=bench.table.slots,
        rows=ints(bench.rows, torch.int64),
        cached=seq.device,
        stride=branch_stride(seq.device, steps=steps, page_size=1),
        topk=topk,
        steps=steps,
        sight=sight,
        translation=bench.pool.translation(0),
        capacity=2 * entries,
    )
    assert lists.indptr[:, -1].tolist() == [most_entries(mine, sight) for mine in ahead]
    assert int(lists.indptr[:, -1].max()) == entries


def test_lists_that_offsets_cannot_hold_are_refused_when_the_batch_is_made() -> None:
    with pytest.raises(
        ValueError, match=r"topk: 8 branches of 3 drafts over up to 134,217,728 .* of up to 1,073,741,848"
    ):
        DraftBatch.of(rows=[0], lens=[MAX_LEN // 8], topk=8, steps=3, device="cpu")


@pytest.mark.parametrize(("name", "bad"), [("topk", 0), ("steps", 0), ("topk", -1), ("steps", 2.0)])
def test_branches_and_steps_are_at_least_one(name: str, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name}: expected"):
        DraftBatch.of(rows=[0], lens=[3], device="cpu", **{"topk": 2, "steps": 2, name: bad})


# --- Plans ------------------------------------------------------------------------------------------------------


@both_ops
@pytest.mark.parametrize("page", [1, 4])
def test_a_step_is_a_decode_of_every_branch(ops: str, page: int) -> None:
    bench = Bench([5, 0, 8], page=page, ops=ops)
    plan = bench.plan()
    plan.validate(num_slots=bench.pool.num_slots)
    assert len(plan.steps) == 2
    for i, step in enumerate(plan.steps):
        assert step.batch.rows.tolist() == [row for row in bench.rows for _ in range(2)]
        assert step.batch.seq.device.tolist() == [6 + i, 6 + i, 0, 0, 9 + i, 9 + i]
        index, written = step.lane(0).layout.index, step.lane(0).write_slots.tolist()
        offsets, wanted = index.indptr.tolist(), []
        for r, n in enumerate(bench.lens):
            held = bench.table.slots_of(bench.rows[r]).tolist()
            for t in range(2):
                first = n + t * branch_stride(n, steps=3, page_size=page)
                wanted.append(held[:n] + held[first : first + i + 1] if n else [])
        assert [index.slots[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)] == wanted
        assert written == [mine[-1] if mine else 0 for mine in wanted]


@pytest.mark.parametrize("policy", POLICIES)
def test_both_ops_make_the_same_plan(policy: str) -> None:
    plans = [Bench([1, 300, 0, 31], page=4, window=20, policy=policy, ops=ops).plan() for ops in OPS]
    for a, b in zip(*(tensors_of(plan.steps) for plan in plans), strict=True):
        assert torch.equal(a, b)


def test_the_lists_of_all_steps_lie_in_one_buffer_each() -> None:
    plan = Bench([5, 9], steps=4).plan()
    for part in ("indptr", "slots"):
        rows = [getattr(step.lane(0).layout.index, part) for step in plan.steps]
        assert len({row.untyped_storage().data_ptr() for row in rows}) == 1
        gaps = {b.data_ptr() - a.data_ptr() for a, b in zip(rows, rows[1:], strict=False)}
        assert len(gaps) == 1 and gaps.pop() >= rows[0].numel() * rows[0].element_size()


def test_two_live_plans_share_no_memory() -> None:
    bench = Bench([5, 9])
    plans = [bench.plan(), bench.plan()]
    first, second = ({x.untyped_storage().data_ptr() for x in tensors_of(plan) if x.numel()} for plan in plans)
    assert first and second and not first & second


def test_branches_of_one_draft_have_no_step_and_need_no_room() -> None:
    bench = Bench([5, 0], steps=1, room=0)
    plan = bench.plan()
    assert plan.steps == ()
    plan.validate(num_slots=bench.pool.num_slots)


@both_ops
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lens", [[], [0], [0, 0]], ids=str)
def test_nothing_cached_is_nothing_read(lens: list[int], policy: str, ops: str) -> None:
    bench = Bench(lens, policy=policy, ops=ops)
    plan = bench.plan()
    plan.validate(num_slots=bench.pool.num_slots)
    for step in plan.steps:
        for lane in step.lanes:
            assert not lane.layout.index.indptr.any() and not lane.write_slots.any()
            assert lane.splits.to_host().lens == (0,) * (2 * len(lens))


@both_ops
def test_a_padded_row_drafts_into_the_sink_also_where_its_row_is_in_use(ops: str) -> None:
    """B30: a step of fewer requests keeps the rows of a larger one in its padding."""
    bench = Bench([5, 8], ops=ops)
    for i, step in enumerate(bench.plan(HostLens.of([0, 8], device=DEVICE)).steps):
        assert step.batch.seq.device.tolist() == [0, 0, 9 + i, 9 + i]
        assert step.lane(0).write_slots.tolist()[:2] == [0, 0]
        assert step.lane(0).layout.index.indptr.tolist() == [0, 0, 0, 9 + i, 18 + 2 * i]


@both_ops
def test_device_lens_give_the_plan_of_host_lens(ops: str) -> None:
    """B46: ranges come from live lengths; bounds only size the buffers."""
    bench = Bench([257, 0, 33], page=4, window=20, ops=ops)
    loose = DeviceLens(device=ints(bench.lens), bound_each=400, bound_total=500)
    for known, unknown in zip(bench.plan().steps, bench.plan(loose).steps, strict=True):
        for a, b in zip(known.lanes, unknown.lanes, strict=True):
            live = int(a.layout.index.indptr[-1])
            assert torch.equal(a.layout.index.indptr, b.layout.index.indptr)
            assert torch.equal(a.layout.index.slots[:live], b.layout.index.slots[:live])
            assert torch.equal(a.write_slots, b.write_slots)
            assert a.splits.to_host().ranges == b.splits.to_host().ranges


@both_ops
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BROKEN_PROMISES)
def test_lengths_that_break_their_promise_overrun_no_buffer(name: str, policy: str, ops: str) -> None:
    bench = Bench([50, 50, 50], policy=policy, ops=ops)
    plan = bench.plan(DeviceLens(device=ints(BROKEN_PROMISES[name]), bound_each=40, bound_total=100))
    for step in plan.steps:
        for lane in step.lanes:
            lane.layout.validate(num_slots=bench.pool.num_slots)
            live = lane.layout.index.indptr.diff().tolist()
            assert sum(live) <= lane.layout.index.slots.shape[0]
            lane.splits.validate(live)
            lane.schedule.validate(lane.splits)
    with pytest.raises(ValueError, match="lens: "):
        plan.validate(num_slots=bench.pool.num_slots)


@both_ops
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.skipif(DEVICE != "cpu", reason="torch watches there")
def test_planning_does_not_wait_for_the_device(ops: str, policy: str) -> None:
    bench = Bench([5, 0, 9], page=4, window=7, policy=policy, ops=ops)
    batch = bench.batch(DeviceLens(device=ints(bench.lens), bound_each=9, bound_total=14))
    with no_waiting(on_host=[batch.rows]):
        bench.planner.build(batch)


def test_rows_and_lengths_may_be_known_to_the_device_alone() -> None:
    """The meta device has no numbers: whoever asked for one would be told so."""
    bench = Bench([5, 9], page=4, window=7)
    table = RequestTable(max_requests=3, max_context=2048, num_slots=bench.pool.num_slots, device="meta")
    pool = MHAPool(bench.model, num_slots=bench.pool.num_slots, device="meta")
    planner = dataclasses.replace(bench.planner, pool=pool, table=table)
    lens = torch.zeros(2, dtype=torch.int32, device="meta")
    seq = DeviceLens(device=lens, bound_each=9, bound_total=14)
    plan = planner.build(DraftBatch(rows=lens.long(), seq=seq, topk=2, steps=3))
    assert {x.device.type for x in tensors_of(plan)} == {"meta"}


def test_explain_names_the_keys_of_one_branch() -> None:
    bench = Bench([5, 8], page=4, window=3)
    held = bench.table.slots_of(bench.rows[1]).tolist()
    full, sliding = bench.plan().explain(1, 3)
    # Branch 1 of request 1: two pages behind the cached tokens, of which the first is whole.
    assert [key.position for key in full.keys] == list(range(10))
    assert [key.slot for key in full.keys] == [*held[:8], *held[12:14]]
    assert [tuple(key) for key in sliding.keys] == [(7, held[7]), (8, held[12]), (9, held[13])]
    with pytest.raises(ValueError, match="step: expected one of 2, counted from 0, got 2"):
        bench.plan().explain(2, 0)
    with pytest.raises(ValueError, match="branch: expected one of 4, counted from 0, got 4"):
        bench.plan().explain(0, 4)


def changed(plan: DraftPlan, step: int, change: Callable[[Any], Any]) -> DraftPlan:
    """The plan, with the tensors of one step's only lane changed in place."""
    change(plan.steps[step].lanes[0])
    return plan


BROKEN: dict[str, tuple[Callable[[DraftPlan], DraftPlan], str]] = {
    "a sibling's draft": (
        lambda plan: changed(plan, 1, lambda lane: lane.layout.index.slots[5:6].copy_(lane.layout.index.slots[12:13])),
        r"slots: step 1, branch 0 has its drafts at \[6, 7\], lists \[9, 7\]",
    ),
    "a draft of an earlier step overwritten": (
        lambda plan: changed(plan, 1, lambda lane: (lane.write_slots[0].fill_(6), lane.layout.index.slots[6].fill_(6))),
        r"write_slots: drafts share their slot",
    ),
    "a step missing": (
        lambda plan: dataclasses.replace(plan, steps=plan.steps[:1]),
        r"steps: expected 2 for branches of 3 drafts, got 1",
    ),
    "steps exchanged": (
        lambda plan: dataclasses.replace(plan, steps=plan.steps[::-1]),
        r"steps: step 0 expected branches of \[6, 6\] tokens, got \[7, 7\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_validate_finds(name: str) -> None:
    change, message = BROKEN[name]
    bench = Bench([5])
    bench.plan().validate(num_slots=bench.pool.num_slots)
    with pytest.raises(ValueError, match=message):
        change(bench.plan()).validate(num_slots=bench.pool.num_slots)


# --- Ranges -----------------------------------------------------------------------------------------------------


def ranges(plan: DraftPlan, step: int, branch: int = 0) -> list[tuple[int, int]]:
    return list(plan.steps[step].lane(0).splits.to_host().ranges[branch])


def test_all_steps_are_cut_as_the_policy_cuts_the_cached_tokens() -> None:
    plan = Bench([100], policy=Static(splits=3)).plan()
    assert ranges(plan, 0) == [(0, 64), (64, 101)] and ranges(plan, 1) == [(0, 64), (64, 102)]
    assert plan.steps[0].lane(0).splits.nominal.tolist() == [3, 3]


def test_drafts_that_would_make_one_range_too_many_make_all_larger() -> None:
    plan = Bench([256], steps=4).plan()
    for step in range(3):
        assert ranges(plan, step) == [(at, min(at + 64, 257 + step)) for at in range(0, 257, 64)]


def test_a_tile_stays_a_tile() -> None:
    plan = Bench([64], policy=Tile(tile=16), steps=4).plan()
    assert ranges(plan, 2) == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 67)]


class Narrow(SplitPolicy):
    """Promises two ranges of at least 8 keys, and asks for ranges of one."""

    name = "narrow"

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        return SplitBounds(max_ranges=2, min_size=8)

    def sizes(self, lens: torch.Tensor, ctx: SplitContext) -> SplitSizes:
        return SplitSizes(size=torch.ones_like(lens), nominal=lens)


@given(
    lens=st.lists(lengths(300), max_size=4),
    topk=st.integers(1, 3),
    steps=st.integers(2, 5),
    window=st.none() | st.integers(1, 40),
    policy=st.sampled_from([*POLICIES, Static(splits=1), Tile(tile=1), Narrow()]),
)
@settings(max_examples=25)
def test_ranges_cover_every_steps_lists_within_the_policys_bounds(
    lens: list[int], topk: int, steps: int, window: int | None, policy: Any
) -> None:
    bench = Bench(lens, topk=topk, steps=steps, window=window, policy=policy)
    plan = bench.plan()
    plan.validate(num_slots=bench.pool.num_slots)  # covers: every key in one range
    for number, lane in enumerate(plan.steps[0].lanes):
        layer = bench.model.layers[number]
        ctx = bench.planner.context([layer])
        longest = max((n + steps - 1 for n in lens), default=steps)
        bounds = bench.planner.policy.bounds(bound_max=min(longest, layer.attention.window or longest), ctx=ctx)
        for step in plan.steps:
            splits = step.lanes[number].splits
            assert max(splits.to_host().effective, default=0) <= bounds.max_ranges
            assert splits.nominal.tolist() == lane.splits.nominal.tolist()


def test_the_seeds_counts_are_those_of_the_cached_tokens_with_so_many_rows_a_sequence() -> None:
    bench = Bench([100, 700], topk=4, policy="seed")
    ctx = dataclasses.replace(bench.planner.context(bench.model.layers[:1]), rows_per_seq=4)
    wanted = resolve_policy("seed").counts(ints([100] * 4 + [700] * 4), ctx)
    for step in bench.plan().steps:
        assert torch.equal(step.lane(0).splits.nominal, wanted)


def test_sizes_of_another_shape_are_refused() -> None:
    seq = HostLens.of([5], device=DEVICE)
    wrong = SplitSizes(size=ints([32]), nominal=ints([1]))
    with pytest.raises(ValueError, match=r"size: expected \[2\] int32, got \[1\] int32 .*policy 'static'"):
        DraftCut.of(Static(), seq, [branch_lens(seq, 2, ahead=1)], Sight(), CTX, lambda policy, lens, ctx: wrong)


# --- What is refused --------------------------------------------------------------------------------------------


def refused(bench: Bench, batch: DraftBatch, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        bench.planner.build(batch)


def test_drafts_without_slots_are_refused() -> None:
    bench = Bench([5, 8], page=4, room=3)
    refused(
        bench, bench.batch(), "seq: request 0 asks for 5 tokens and 7 more for its drafts, row 1 of the table holds 8"
    )


def test_rows_that_are_none_or_asked_for_twice_are_refused() -> None:
    bench = Bench([5, 8])
    refused(bench, bench.batch(rows=[1, 9]), "rows: request 1 is in row 9; the table has rows 0 to 2")
    refused(bench, bench.batch(rows=[1, 1]), "rows: requests 0 and 1 are both row 1")


def test_drafts_beyond_the_table_or_the_model_are_refused() -> None:
    bench = Bench([5], page=4, max_context=64)
    loose = DeviceLens(device=ints([5]), bound_each=62, bound_total=62)
    refused(
        bench, bench.batch(loose), r"seq: a request of up to 62 tokens takes up to 73 columns .*\(2 branches of 3\)"
    )
    longer = DeviceLens(device=ints([5]), bound_each=63, bound_total=63)
    refused(bench, bench.batch(longer), "seq: a request of up to 65 tokens, but the table has 64 columns")


def test_keys_that_slid_out_are_missed_by_the_first_step() -> None:
    bench = Bench([40], page=4, window=10, sliding=True)
    bench.cache.slide_out(bench.rows[0], query=40)
    bench.plan().validate(num_slots={"full": bench.pool.num_slots, "sliding": bench.pool.view(1).num_slots})
    bench.cache.slide_out(bench.rows[0], query=46)
    refused(bench, bench.batch(), r"rows: request 0 \(row 0\): its query at position 40 sees back to 31 in layer 1")


def test_a_model_that_reads_an_encoder_does_not_draft() -> None:
    bench = Bench([5])
    first, second = bench.model.layers
    cross = dataclasses.replace(second.attention, cross=True, causal=False)
    model = dataclasses.replace(bench.model, layers=(first, dataclasses.replace(second, attention=cross)))
    planner = dataclasses.replace(bench.planner, model=model)
    with pytest.raises(ValueError, match="batch: layer 1 of model 'toy' reads an encoder's keys, of which draft steps"):
        planner.build(bench.batch())


def test_lengths_on_another_device_are_refused() -> None:
    bench = Bench([5])
    refused(bench, bench.batch(HostLens.of([5], device="meta")), "seq: expected lengths on .* got meta")


def test_a_host_policy_needs_lengths_that_the_host_knows() -> None:
    bench = Bench([5], policy=HostPolicy(name="mine", rule=lambda lens, ctx: [[(0, n)] for n in lens], max_ranges=1))
    assert ranges(bench.plan(), 1) == [(0, 7)]
    loose = DeviceLens(device=ints([5]), bound_each=5, bound_total=5)
    refused(bench, bench.batch(loose), "policy 'mine' is written in plain Python and needs lengths", TypeError)


@given(
    lens=st.lists(lengths(300), min_size=1, max_size=4),
    topk=st.integers(2, 8),
    window=st.none() | st.integers(1, 40),
    policy=st.sampled_from([*POLICIES, Tile(tile=8)]),
)
@settings(max_examples=20)
def test_scratch_of_the_size_that_the_error_asks_for_is_enough(
    lens: list[int], topk: int, window: int | None, policy: Any
) -> None:
    bench = Bench(lens, topk=topk, window=window, policy=policy)
    with pytest.raises(ValueError, match="rows of a decode") as error:
        bench.backend(max_requests=1, max_tokens=1).plan(bench.batch())
    words = str(error.value)
    counts = f"batch: {len(lens)} requests x {topk} branches are {len(lens) * topk} rows of a decode and may need"
    assert words.startswith(counts)
    asked = {name: int(size.replace(",", "")) for name, size in re.findall(r"(max_\w+) of at least ([\d,]+)", words)}
    assert asked["max_requests"] == len(lens) * topk and asked.get("max_tokens", 2) > 1
    bench.backend(**{"max_tokens": 1, **asked}).plan(bench.batch())


@pytest.mark.parametrize(
    ("policy", "built", "words"),
    [
        (
            Tile(tile=8),
            {"max_requests": 4, "max_tokens": 30},
            "build the backend with max_tokens of at least 84, as every",
        ),
        (
            "static",
            {"max_requests": 1, "max_tokens": 99},
            "build the backend with max_requests of at least 4, as every",
        ),
    ],
)
def test_the_error_about_scratch_names_what_lacks_alone(policy: Any, built: dict[str, int], words: str) -> None:
    bench = Bench([20, 20], topk=2, steps=2, policy=policy)
    with pytest.raises(ValueError, match=words):
        bench.backend(**built).plan(bench.batch())


def test_a_draft_plan_is_not_decoded_as_a_whole() -> None:
    bench = Bench([5])
    server = bench.backend(max_requests=2)
    q = torch.zeros(2, 4, 8, device=DEVICE)
    with pytest.raises(TypeError, match="plan: expected a DecodePlan, got DraftPlan; decode its steps"):
        server.decode(0, q, None, None, server.plan(bench.batch()), save=False)  # type: ignore[arg-type]


def test_a_plan_from_before_drafts_were_dropped_is_refused() -> None:
    bench = Bench([5])
    server = bench.backend(max_requests=2)
    plan = server.plan(bench.batch())
    bench.cache.truncate(bench.rows[0], 5)
    q, kv = torch.zeros(2, 4, 8, device=DEVICE), torch.zeros(2, 2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="plan: made for another state of the pool"):
        server.decode(0, q, kv, kv, plan.steps[0])
