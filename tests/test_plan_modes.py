"""Plans of every mode: windows at their borders, trees by depth, padded rows, and what is refused.

`tests/test_bookkeeping.py` holds whole plans to a model; here are the cases that people shipped wrong, by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import Batch, DecodeBatch, DeviceLens, ExtendBatch, HostLens, VerifyBatch
from attnlab.mask import CAUSAL, CustomMask, ancestors, depths
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.build import ONE_PASS_TILE
from attnlab.plan.plans import Lane, Plan
from attnlab.plan.policy import HostPolicy
from attnlab.plan.signature import differences, numbers_of
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec, Sight
from tests.pools import tell_spaces_apart
from tests.strategies import DEVICE

WIDE = AttentionSpec(heads=4, kv_heads=2, qk_dim=8, v_dim=8, scale=0.3)


class Server:
    """Requests of some lengths in a cache, and a backend over it. Layer 0 sees all keys, layer 1 those of `sight`.

    The table keeps requests in the pool's pages, or in those of `table_pages`.
    """

    def __init__(
        self,
        lens: list[int],
        *,
        pool: str = "plain",
        page_size: int = 1,
        table_pages: int | None = None,
        engine: str = "eager",
        **sight: int,
    ) -> None:
        self.model = ModelSpec(
            name="two kinds",
            layers=(
                LayerSpec(index=0, attention=WIDE, pool_layer=0),
                LayerSpec(index=1, attention=dataclasses.replace(WIDE, **sight), pool_layer=1),  # type: ignore[arg-type]
            ),
            context_len=4096,
            page_size=page_size,
            kv_dtype=torch.float32,
            mla=False,
        )
        slots = (sum(-(-n // page_size) for n in lens) + 4 + len(lens)) * page_size
        self.pool = self._pool(pool, slots)
        self.table = RequestTable(
            max_requests=len(lens) + 2,
            max_context=4096,
            num_slots=self.pool.num_slots,
            device=DEVICE,
            page_size=page_size if table_pages is None else table_pages,
        )
        self.cache = PagedCache(table=self.table, pool=self.pool)
        settle = tell_spaces_apart(self.pool)
        self.rows = [self.cache.admit() for _ in lens]
        for row, n in zip(self.rows, lens, strict=True):
            self.cache.append(row, n)
        settle()
        self.engine = engine

    def _pool(self, pool: str, slots: int) -> KVPool:
        if pool == "window":
            return WindowPool(self.model, num_slots=slots, sliding_slots=slots, device=DEVICE)
        if pool == "unified":
            return UnifiedPool(self.model, num_slots=slots, virtual_slots=slots, sliding_slots=slots, device=DEVICE)
        return MHAPool(self.model, num_slots=slots, device=DEVICE)

    def backend(self, *, policy: Any = "tile", deterministic: bool = False) -> AttentionBackend:
        return AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=self.table,
            engine="triton" if deterministic and DEVICE != "cpu" else self.engine,  # eager is not, on a GPU
            policy=policy,
            max_requests=max(1, len(self.rows)),
            multiprocessors=132,
            deterministic=deterministic,
        )

    def plan(self, batch: Batch, **how: Any) -> Plan:
        plan = self.backend(**how).plan(batch)
        layers = range(len(self.model.layers))
        plan.validate(num_slots={self.pool.translation(i).target: self.pool.view(i).num_slots for i in layers})
        for i, layer in enumerate(self.model.layers):
            self._check_translated(plan, i, layer.index)
        return plan

    def _check_translated(self, plan: Plan, place: int, layer: int) -> None:
        """What is listed are the slots of the table, looked up in the pool's page table by hand."""
        layout, translation = plan.lane(layer).layout, self.pool.translation(place)
        slots, offsets = layout.index.slots.tolist(), layout.index.indptr.tolist()
        rows = plan.batch.rows.tolist()
        for r, row in enumerate(rows):
            start, visible = int(layout.start[r]), int(layout.start_visible[r])
            for j, slot in enumerate(slots[offsets[r] : offsets[r + 1]]):
                held = int(self.table.slots[row, max(start + j, visible)])
                if translation.pages is not None:
                    page, offset = divmod(held, translation.page_size)
                    held = int(translation.pages[page]) * translation.stride + offset
                assert slot == held


def listed(plan: Plan, request: int, layer: int = 1) -> list[int]:
    """The positions that a request's list holds."""
    layout = plan.lane(layer).layout
    start, count = int(layout.start[request]), int(layout.index.indptr.diff()[request])
    return list(range(start, start + count))


def positions(plan: Plan, request: int, query: int, layer: int = 1) -> list[int]:
    """The positions of what a query reads."""
    (mine,) = (reading for reading in plan.explain(request, query) if layer in reading.layers)
    return [key.position for key in mine.keys]


# --- Windows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", ["eager", "triton"])
@pytest.mark.parametrize("pool", ["plain", "window", "unified"])
@pytest.mark.parametrize(
    ("length", "window", "first"), [(6, 4, 2), (3, 4, 0), (4, 4, 0), (5, 4, 1), (9, 1, 8), (1, 1, 0)]
)
def test_a_decode_window_holds_the_query_and_what_comes_before_it(
    ops: str, pool: str, length: int, window: int, first: int
) -> None:
    """B14: with a window of 4, the last of 6 tokens sees {2, 3, 4, 5}."""
    server = Server([length], pool=pool, window=window, engine=ops)
    plan = server.plan(DecodeBatch.of(rows=server.rows, lens=[length], device=DEVICE))
    assert listed(plan, 0) == positions(plan, 0, 0) == list(range(first, length))
    assert listed(plan, 0, layer=0) == list(range(length))
    lane = plan.lane(1)
    assert isinstance(lane, Lane) and lane.splits.to_host().lens == (length - first,)


def test_the_long_window_of_the_report() -> None:
    """B14: 5,000 tokens and a window of 4,096 begin at key 904."""
    assert Sight(window=4096).first(4999) == 904


@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_decode_extend_verify_and_one_pass_see_the_same_keys(window: int) -> None:
    """B15: query p sees max(0, p - w + 1) to p, however the step that it comes with is made."""
    server = Server([12], window=window)
    for cached in range(12):
        new = 12 - cached
        common: dict[str, Any] = {"rows": server.rows, "prefix": [cached], "device": DEVICE}
        extend = ExtendBatch.of(new=[new], **common)
        plans = [
            server.plan(extend),
            server.plan(extend, deterministic=True),
            server.plan(VerifyBatch.chain(drafts=new, **common)),
        ]
        for i in range(new):
            p = cached + i
            wanted = list(range(max(0, p - window + 1), p + 1))
            assert [positions(plan, 0, i) for plan in plans] == [wanted] * 3
            decode = server.plan(DecodeBatch.of(rows=server.rows, lens=[p + 1], device=DEVICE))
            assert positions(decode, 0, 0) == wanted


def test_siblings_of_a_tree_see_the_same_prefix() -> None:
    """B16: a window goes by depth, not by the place in the batch; in either order of a long and a short request."""
    server = Server([11, 5], window=4)
    trees = {0: [-1, 0, 0], 1: [-1, 0]}
    for order in ([0, 1], [1, 0]):
        batch = VerifyBatch.tree(
            rows=[server.rows[r] for r in order],
            prefix=[(8, 3)[r] for r in order],
            parents=[trees[r] for r in order],
            device=DEVICE,
        )
        plan = server.plan(batch)
        long = order.index(0)
        assert [positions(plan, long, i) for i in range(3)] == [[5, 6, 7, 8], [6, 7, 8, 9], [6, 7, 8, 9]]
        assert [positions(plan, 1 - long, i) for i in range(2)] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_a_window_that_hides_nothing_gives_the_lists_of_no_window() -> None:
    """B19: no window, and one as long as the request, are the same; a window of 1 is the query itself."""
    lens = [9, 30]
    plans = []
    for sight in ({"window": 30}, {"window": 4096}, {}):
        server = Server(lens, **sight)
        plans.append(server.plan(DecodeBatch.of(rows=server.rows, lens=lens, device=DEVICE)).lane(1).layout)
    for layout in plans[1:]:
        assert torch.equal(layout.index.slots, plans[0].index.slots)
        assert torch.equal(layout.start, plans[0].start)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_refused(window: int) -> None:
    """B19: 0 and -1 are other systems' words for no window; here that is None."""
    with pytest.raises(ValueError, match=f"window: expected at least 1, got {window}"):
        dataclasses.replace(WIDE, window=window)


@pytest.mark.parametrize(("length", "first"), [(1, 0), (7, 0), (8, 0), (9, 8), (16, 8), (17, 16)])
def test_a_chunk_begins_at_its_border(length: int, first: int) -> None:
    server = Server([length], chunk=8)
    plan = server.plan(DecodeBatch.of(rows=server.rows, lens=[length], device=DEVICE))
    assert listed(plan, 0) == positions(plan, 0, 0) == list(range(first, length))


def test_a_prompt_that_crosses_a_chunks_border_leaves_the_old_chunk_behind() -> None:
    server = Server([20], chunk=8)
    plan = server.plan(ExtendBatch.of(rows=server.rows, prefix=[6], new=[14], device=DEVICE))
    assert listed(plan, 0) == list(range(6))
    assert [positions(plan, 0, i) for i in (0, 1, 2, 13)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8],
        [16, 17, 18, 19],
    ]


def test_lists_of_a_window_are_allocated_as_such() -> None:
    """B46: by what the window can hold, never by the context."""
    server = Server([3000, 3000], window=16)
    host = server.plan(DecodeBatch.of(rows=server.rows, lens=[3000, 3000], device=DEVICE))
    lens = DeviceLens(
        device=torch.tensor([3000, 3000], dtype=torch.int32, device=DEVICE), bound_each=4096, bound_total=6001
    )
    device = server.plan(DecodeBatch(rows=torch.tensor(server.rows), seq=lens))
    for plan in (host, device):
        assert plan.lane(1).layout.index.slots.shape == (32,)
    assert torch.equal(host.lane(1).layout.index.slots, device.lane(1).layout.index.slots)


# --- One pass ---------------------------------------------------------------------------------------------------


def test_one_pass_lists_begin_at_a_tiles_border_however_a_prompt_is_cut() -> None:
    """B40: entry j stands at the same place of a tile whatever was cached."""
    server = Server([700], window=200)
    slots = server.table.slots_of(server.rows[0]).tolist()
    for cached in (0, 1, 127, 128, 129, 200, 331, 511, 699):
        batch = ExtendBatch.of(rows=server.rows, prefix=[cached], new=[700 - cached], device=DEVICE)
        layout = server.plan(batch, deterministic=True).lane(1).layout
        start, visible = int(layout.start[0]), int(layout.start_visible[0])
        assert start % ONE_PASS_TILE == 0 and 0 <= visible - start < ONE_PASS_TILE
        assert visible == max(0, cached - 199)
        mine = layout.index.slots[: int(layout.index.indptr[-1])].tolist()
        assert mine == [slots[max(start + j, visible)] for j in range(700 - start)]


@pytest.mark.parametrize("pool", ["plain", "window", "unified"])
@pytest.mark.parametrize(
    ("page_size", "one_pass", "full", "partial"),
    [(1, False, 1, 1), (16, False, 16, 1), (64, True, 64, 64), (256, True, 256, ONE_PASS_TILE)],
)
def test_a_layout_knows_how_many_entries_are_consecutive_slots(
    pool: str, page_size: int, one_pass: bool, full: int, partial: int
) -> None:
    server = Server([700, 3], pool=pool, page_size=page_size, window=300)
    batch = ExtendBatch.of(rows=server.rows, prefix=[600, 0], new=[100, 3], device=DEVICE)
    plan = server.plan(batch, deterministic=one_pass)  # validates it
    assert [plan.lane(layer).layout.run for layer in (0, 1)] == [full, partial]


def test_a_table_that_knows_of_no_pages_promises_none() -> None:
    server = Server([200], page_size=64, table_pages=1)
    batch = ExtendBatch.of(rows=server.rows, prefix=[150], new=[50], device=DEVICE)
    assert server.plan(batch).lane(0).layout.run == 1


def test_pages_larger_than_those_of_a_translation_are_consecutive_within_these() -> None:
    server = Server([200], pool="unified", page_size=16, window=300)
    larger = RequestTable(max_requests=1, max_context=256, num_slots=256, device=DEVICE, page_size=48)
    backend = AttentionBackend(
        model=server.model,
        pool=server.pool,
        table=larger,
        engine="eager",
        policy="tile",
        max_requests=1,
        multiprocessors=132,
    )
    empty = ExtendBatch.of(rows=[larger.admit()], prefix=[0], new=[0], device=DEVICE)
    assert backend.plan(empty).lane(0).layout.run == 16


def test_validate_finds_a_page_that_is_torn() -> None:
    server = Server([200], page_size=64, window=150)
    batch = ExtendBatch.of(rows=server.rows, prefix=[190], new=[10], device=DEVICE)
    for layer, at, message in ((0, 65, "entry 65 reads slot .* up to each multiple of 64"), (1, 3, None)):
        plan = server.backend(deterministic=layer == 1).plan(batch)
        layout = plan.lane(layer).layout
        assert layout.run == 64
        layout.index.slots[at] = layout.index.slots[at - 2]
        if message is None:  # hidden: a copy of the first key that is seen
            layout.validate(num_slots=server.pool.num_slots)
            continue
        with pytest.raises(ValueError, match=message):
            layout.validate(num_slots=server.pool.num_slots)


def test_a_graph_bakes_in_how_many_entries_are_consecutive() -> None:
    paged, plain = Server([200], page_size=64), Server([200], page_size=64, table_pages=1)
    batch = ExtendBatch.of(rows=paged.rows, prefix=[150], new=[50], device=DEVICE)
    found = differences(numbers_of(paged.plan(batch)), numbers_of(plain.plan(batch)))
    assert "lanes[0].layout.run: captured 64, got 1" in found


def test_a_padded_list_is_not_split() -> None:
    server = Server([300], window=100)
    batch = ExtendBatch.of(rows=server.rows, prefix=[250], new=[50], device=DEVICE)
    padded = server.plan(batch, deterministic=True).lane(1).layout
    decode = server.plan(DecodeBatch.of(rows=server.rows, lens=[300], device=DEVICE)).lane(1)
    with pytest.raises(ValueError, match="one with padding is not split"):
        dataclasses.replace(decode, layout=padded)


def test_determinism_takes_a_policy_that_looks_at_each_request_alone() -> None:
    server = Server([5])
    for policy in ("tile", "static"):
        server.backend(policy=policy, deterministic=True)
    halves = HostPolicy(name="mine", rule=lambda lens, ctx: [[(0, n)] if n else [] for n in lens], max_ranges=1)
    for policy in ("seed", halves):
        with pytest.raises(ValueError, match=r"deterministic: policy '(seed|mine)' cuts a request by what else is"):
            server.backend(policy=policy, deterministic=True)
    server.backend(policy=dataclasses.replace(halves, batch_invariant=True), deterministic=True)


# --- Every mode -------------------------------------------------------------------------------------------------


def batches(rows: list[int], lens: list[int]) -> dict[str, Batch]:
    """A batch of every mode over requests that hold so many tokens."""
    new = [min(n, 3) for n in lens]
    prefix = [n - m for n, m in zip(lens, new, strict=True)]
    common: dict[str, Any] = {"rows": rows, "prefix": prefix, "device": DEVICE}
    return {
        "decode": DecodeBatch.of(rows=rows, lens=lens, device=DEVICE),
        "extend": ExtendBatch.of(new=new, **common),
        "masked extend": ExtendBatch.of(
            new=new,
            mask=CustomMask.of(
                [torch.ones(m, n, dtype=torch.bool, device=DEVICE) for m, n in zip(new, lens, strict=True)]
            ),
            **common,
        )
        if rows
        else ExtendBatch.of(new=new, **common),
        "chain": VerifyBatch.chain(drafts=new, **common),
        "tree": VerifyBatch.tree(parents=[[-1, 0, 0][:n] for n in new], **common),
    }


MODES = list(batches([], []))


@pytest.mark.parametrize("ops", ["eager", "triton"])
@pytest.mark.parametrize("pool", ["plain", "window", "unified"])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_nobody_has_empty_lists(mode: str, pool: str, ops: str) -> None:
    server = Server([], pool=pool, window=4, engine=ops)
    for deterministic in (False, True):
        plan = server.plan(batches([], [])[mode], deterministic=deterministic)
        for lane in plan.lanes:
            assert lane.layout.index.indptr.tolist() == [0] and lane.write_slots.tolist() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", ["plain", "window", "unified"])
def test_two_live_plans_of_a_mode_share_no_memory(mode: str, pool: str) -> None:
    server = Server([70, 0, 33], pool=pool, window=8)
    batch = batches(server.rows, [70, 0, 33])[mode]
    plans = [server.plan(batch), server.plan(batch)]
    lanes = [memory_of(plan.lanes) for plan in plans]
    assert lanes[0] and not lanes[0] & lanes[1]
    assert not lanes[0] & {server.table.slots.untyped_storage().data_ptr()}
    # A mask is the one thing that stays the caller's: it may be large.
    masks = memory_of(getattr(batch, "mask", None))
    whole = [memory_of(plan) - masks for plan in plans]
    assert not whole[0] & whole[1] and not whole[0] & memory_of(batch)


def memory_of(x: object) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors_of(x) if t.numel()}


def tensors_of(x: object) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from tensors_of(getattr(x, field.name))
    elif isinstance(x, tuple):
        for item in x:
            yield from tensors_of(item)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["lens"] if DEVICE == "cpu" else ["rows", "lens", "both"])
def test_what_only_the_device_knows_gives_the_same_plan(mode: str, what: str) -> None:
    """Bounds may be loose: the lists are the same, only the buffers are longer."""
    server = Server([70, 0, 33], window=8)
    known = batches(server.rows, [70, 0, 33])[mode]
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(known):
        value = getattr(known, field.name)
        # How many drafts there are is the host's: a mask's and a depth's sizes hang on it.
        if isinstance(value, HostLens) and what != "rows" and field.name != "drafts":
            loose = 5 if field.name != "new" else 0
            changes[field.name] = DeviceLens(
                device=value.device, bound_each=value.bound_max + loose, bound_total=value.bound_total + loose
            )
    if what != "lens":
        changes["rows"] = known.rows.to(DEVICE) if DEVICE != "cpu" else known.rows
    mine, wanted = (server.plan(batch) for batch in (dataclasses.replace(known, **changes), known))
    for a, b in zip(mine.lanes, wanted.lanes, strict=True):
        assert a.layout.index.indptr.tolist() == b.layout.index.indptr.tolist()
        live = int(b.layout.index.indptr[-1])
        assert a.layout.index.slots[:live].tolist() == b.layout.index.slots[:live].tolist()
        assert a.layout.start.tolist() == b.layout.start.tolist()
        assert a.write_slots.tolist() == b.write_slots.tolist()


def test_a_plan_from_before_pages_moved_is_refused() -> None:
    """B35: after a compaction the lists of before point at other requests' tokens."""
    server = Server([9, 9], pool="unified", window=4)
    backend = server.backend()
    server.cache.release(server.rows[0])
    batch = DecodeBatch.of(rows=[server.rows[1]], lens=[9], device=DEVICE)
    plan = backend.plan(batch)
    assert isinstance(server.pool, UnifiedPool) and server.pool.compact() > 0
    q = torch.ones(1, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"plan: made for another state of the pool .* plan again"):
        backend.decode(0, q, None, None, plan, save=False)
    backend.decode(0, q, None, None, backend.plan(batch), save=False)


@pytest.mark.parametrize("pool", ["window", "unified"])
def test_a_query_whose_keys_slid_out_is_refused(pool: str) -> None:
    server = Server([40], pool=pool, page_size=4, window=8)
    server.cache.slide_out(server.rows[0], query=39)
    server.plan(DecodeBatch.of(rows=server.rows, lens=[40], device=DEVICE))
    with pytest.raises(
        ValueError,
        match=r"rows: request 0 \(row 0\): its query at position 20 sees back to 13 in layer 1 \(window 8\), but keys "
        "before 32 have slid out",
    ):
        server.plan(DecodeBatch.of(rows=server.rows, lens=[21], device=DEVICE))


# --- What is refused --------------------------------------------------------------------------------------------


def test_a_window_beside_an_encoder_is_refused() -> None:
    model = Server([5], window=4).model
    reader = LayerSpec(index=2, attention=dataclasses.replace(WIDE, cross=True), pool_layer=2)
    with pytest.raises(
        ValueError,
        match=r"cross, window: model 'two kinds' has an encoder \(layer 2 reads it\), and layer 1 sees window 4 only",
    ):
        dataclasses.replace(model, layers=(*model.layers, reader))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="heads: expected a multiple of kv_heads 3, got 4"):
        dataclasses.replace(WIDE, kv_heads=3)


@pytest.mark.parametrize("pool", [MHAPool, WindowPool, UnifiedPool])
def test_a_page_size_that_does_not_divide_is_refused(pool: Any) -> None:
    model = Server([5], window=4, page_size=16).model
    extra = {MHAPool: {}, WindowPool: {"sliding_slots": 64}, UnifiedPool: {"virtual_slots": 64}}[pool]
    with pytest.raises(ValueError, match="16.*100|100.*16"):
        pool(model, num_slots=100, device=DEVICE, **extra)


@pytest.mark.parametrize("bits", [0, 10, 12])
def test_a_mask_of_another_size_is_refused(bits: int) -> None:
    mask = CustomMask(bits=torch.ones(bits, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(
        ValueError, match=rf"mask: expected 11 entries, .* cached \[3, 0\] and new \[2, 1\], got {bits}"
    ):
        ExtendBatch.of(rows=[0, 1], prefix=[3, 0], new=[2, 1], mask=mask, device=DEVICE)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0], "draft 0: expected -1, the root has no parent, got 0"),
        ([-1, 1], "draft 1: expected an earlier draft, 0 to 0, got 1"),
        ([-1, 0, -1], "draft 2: expected an earlier draft, 0 to 1, got -1"),
        ([-1, 0.0], "draft 1: expected an earlier draft, 0 to 0, got 0.0"),
        ([True], "draft 0: expected -1, the root has no parent, got True"),
    ],
)
def test_a_tree_that_is_none_is_refused(parents: list[Any], message: str) -> None:
    for read in (ancestors, depths):
        with pytest.raises(ValueError, match=message):
            read(parents)


def test_a_mask_is_bytes_in_a_row() -> None:
    with pytest.raises(TypeError, match=r"mask: expected \[pairs\] uint8, got \[4\] float32"):
        CustomMask(bits=torch.ones(4))
    with pytest.raises(ValueError, match="mask: expected a contiguous tensor"):
        CustomMask(bits=torch.ones(8, dtype=torch.uint8)[::2])
    with pytest.raises(TypeError, match=r"mask of request 1: expected \[new, keys\] bool or uint8"):
        CustomMask.of([torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2)])
    with pytest.raises(TypeError, match=r"mask: expected Causal\(\) or a CustomMask, got None"):
        ExtendBatch.of(rows=[0], prefix=[1], new=[1], device=DEVICE, mask=None)  # type: ignore[arg-type]


def test_depths_are_one_for_every_draft() -> None:
    batch = VerifyBatch.chain(rows=[0], prefix=[4], drafts=3, device=DEVICE)
    with pytest.raises(ValueError, match=r"depth: expected \[3\] int32 on cpu, got \[2\]|depth: expected \[3\] int32"):
        dataclasses.replace(batch, depth=batch.depth[:2])
    with pytest.raises(ValueError, match="rows: expected one per request of prefix"):
        dataclasses.replace(batch, rows=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("request_", "query", "message"),
    [
        (2, 0, "request: expected 0 to 1, got 2"),
        (-1, 0, "request: expected 0 to 1, got -1"),
        (0, 3, "query: request 0 has 3 of them, counted from 0, got 3"),
        (1, 0, "query: request 1 has none in this step: it is a padded row, or brings no new token"),
    ],
)
@pytest.mark.parametrize("mode", ["extend", "chain", "tree"])
def test_explain_names_what_there_is(mode: str, request_: int, query: int, message: str) -> None:
    server = Server([9, 0])
    plan = server.plan(batches(server.rows, [9, 0])[mode])
    with pytest.raises(ValueError, match=message):
        plan.explain(request_, query)


def test_explain_says_why() -> None:
    server = Server([11], pool="window", window=4)
    plan = server.plan(VerifyBatch.tree(rows=server.rows, prefix=[8], parents=[[-1, 0, 0]], device=DEVICE))
    wide, narrow = plan.explain(0, 2)
    assert str(wide) == (
        "layer 0, in 'full': the query at position 9 reads 10 keys, positions 0 to 9: every key before it is in sight, "
        "and the mask decides among those; 1 left out"
    )
    assert str(narrow) == (
        "layer 1, in 'sliding': the query at position 9 reads 4 keys, positions 6 to 9: a window of 4 keys goes back "
        "to 6, and the mask decides among those; 7 left out"
    )


def test_a_query_that_sees_itself_alone_is_refused_where_its_page_slid_out() -> None:
    server = Server([16], pool="unified", page_size=16, window=1)
    server.cache.slide_out(server.rows[0], query=16)
    with pytest.raises(ValueError, match="its query at position 15 sees back to 15 in layer 1"):
        server.plan(DecodeBatch.of(rows=server.rows, lens=[16], device=DEVICE))


@pytest.mark.parametrize("pool", ["window", "unified"])
@pytest.mark.parametrize("least", [None, (20,), (38,)])
def test_lengths_that_only_the_device_knows_must_be_long_enough_for_what_slid_out(
    pool: str, least: tuple[int, ...] | None
) -> None:
    """A shorter request than the host thinks of would read what is gone: the sink."""
    server = Server([40], pool=pool, page_size=4, window=8)
    server.cache.slide_out(server.rows[0], query=37)
    lens = DeviceLens(
        device=torch.tensor([40], dtype=torch.int32, device=DEVICE), bound_each=40, bound_total=40, least=least
    )
    batch = DecodeBatch(rows=torch.tensor(server.rows), seq=lens)
    if least == (38,):
        assert listed(server.plan(batch), 0) == list(range(32, 40))
    else:
        with pytest.raises(ValueError, match="if it is as short as `least` lets it be sees back to .* slid out"):
            server.plan(batch)


@pytest.mark.parametrize("pool", ["window", "unified"])
def test_slots_of_another_owner_than_the_row_are_refused(pool: str) -> None:
    server = Server([5], pool=pool, window=4)
    row = server.table.admit()
    server.table.append(row, server.pool.allocator.allocate("somebody", 3))
    with pytest.raises(
        ValueError, match=f"owner: 3 slots are asked for under {row}, who owns 0; in a .*Pool the owner of"
    ):
        server.plan(DecodeBatch.of(rows=[row], lens=[3], device=DEVICE))


@pytest.mark.parametrize("ops", ["eager", "triton"])
def test_nobody_with_room_for_many_has_empty_lists(ops: str) -> None:
    """A batch of no request, whose bounds are those of a full one."""
    server = Server([], window=4, engine=ops)
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    lens = DeviceLens(device=nothing, bound_each=8, bound_total=64)
    rows = torch.zeros(0, dtype=torch.int64)
    for batch in (
        DecodeBatch(rows=rows, seq=lens),
        ExtendBatch(rows=rows, prefix=lens, new=lens),
        VerifyBatch(
            rows=rows, prefix=lens, drafts=lens, depth=torch.zeros(64, dtype=torch.int32, device=DEVICE), mask=CAUSAL
        ),
    ):
        assert [lane.layout.index.indptr.tolist() for lane in server.plan(batch).lanes] == [[0], [0]]


def test_a_plan_is_of_the_lengths_that_it_was_made_of() -> None:
    """A server counts its lengths on in place; plans of before must not change with them."""
    server = Server([9])
    batch = DecodeBatch.of(rows=server.rows, lens=[5], device=DEVICE)
    plan = server.plan(batch)
    batch.seq.device.add_(1)
    assert positions(plan, 0, 0) == [0, 1, 2, 3, 4]


WRONG: dict[str, tuple[str, Any, str]] = {
    "a slot below 0": ("write_slots", lambda slots: slots - 100, "write_slots: expected 0 to"),
    "a slot beyond the storage": ("write_slots", lambda slots: slots + 10**6, "write_slots: expected 0 to"),
    "the sink": ("write_slots", lambda slots: slots * 0, "write_slots: "),
    "one slot twice": ("write_slots", lambda slots: slots * 0 + 1, "write_slots: "),
    "a list that begins late": ("start", lambda start: start + 1, "layout: request 0 lists positions"),
    "a list that begins early": ("start", lambda start: start - 1, "layout: request 0 lists positions"),
}


@pytest.mark.parametrize("mode", ["decode", "extend", "tree"])
@pytest.mark.parametrize("what", WRONG)
def test_validate_finds(what: str, mode: str) -> None:
    server = Server([30, 20], window=8)
    plan = server.plan(batches(server.rows, [30, 20])[mode])
    field, change, message = WRONG[what]
    lane = plan.lane(1)
    if field == "start":
        moved = {name: change(getattr(lane.layout, name)) for name in ("start", "start_visible")}
        broken = dataclasses.replace(lane, layout=dataclasses.replace(lane.layout, **moved))
    else:
        broken = dataclasses.replace(lane, write_slots=change(lane.write_slots))
    lanes = tuple(broken if each is lane else each for each in plan.lanes)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, lanes=lanes).validate(num_slots=server.pool.num_slots)  # type: ignore[arg-type]


def test_batches_are_of_one_device_and_no_longer_than_offsets_hold() -> None:
    near = HostLens(values=(2**30,), device=torch.tensor([2**30], dtype=torch.int32, device=DEVICE))
    with pytest.raises(
        ValueError, match=r"prefix, new: expected at most 1,073,741,824 tokens in all, got 2,147,483,648"
    ):
        ExtendBatch(rows=torch.tensor([0]), prefix=near, new=near)
    far = HostLens(values=(1,), device=torch.tensor([1], dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="new: expected on .* like prefix, got meta"):
        ExtendBatch(rows=torch.tensor([0]), prefix=HostLens.of([1], device=DEVICE), new=far)


def test_least_is_one_number_for_every_request() -> None:
    with pytest.raises(ValueError, match="least: expected one number for each of 2 requests, got 1"):
        DeviceLens(device=torch.zeros(2, dtype=torch.int32), bound_each=4, bound_total=8, least=(1,))


def test_decode_takes_the_plan_of_a_decode() -> None:
    server = Server([10])
    backend, q = server.backend(), torch.ones(1, 4, 8, device=DEVICE)
    verify = backend.plan(VerifyBatch.chain(rows=server.rows, prefix=[9], drafts=1, device=DEVICE))
    for plan in (verify, None):
        with pytest.raises(TypeError, match="plan: expected a DecodePlan, got (VerifyPlan|NoneType)"):
            backend.decode(0, q, None, None, plan, save=False)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="batch: expected a DecodeBatch, ExtendBatch, VerifyBatch or DraftBatch, got NoneType"
    ):
        backend.plan(None)  # type: ignore[call-overload]


def test_ranges_of_a_host_policy_end_where_the_lists_do() -> None:
    """Lengths on the host that are not those of the device must not make a kernel read the next request's keys."""
    server = Server([10, 10])
    halves = HostPolicy(name="halves", rule=lambda lens, ctx: [[(0, n // 2), (n // 2, n)] for n in lens], max_ranges=2)
    lying = HostLens(values=(10, 10), device=torch.tensor([4, 10], dtype=torch.int32, device=DEVICE))
    plan = server.backend(policy=halves).plan(DecodeBatch(rows=torch.tensor(server.rows), seq=lying))
    splits = plan.lane(0).splits
    assert splits.start.tolist() == [0, 4, 0, 5] and splits.end.tolist() == [4, 4, 5, 10]


@pytest.mark.parametrize("pool", ["window", "unified"])
def test_a_shared_prefix_is_refused_where_keys_slide_out(pool: str) -> None:
    server = Server([16], pool=pool, page_size=4, window=8)
    slots = server.table.slots_of(server.rows[0])
    other = server.cache.admit()
    server.table.append(other, slots[:8].cpu())
    server.table.append(other, server.pool.allocator.allocate(other, 1))
    with pytest.raises(ValueError, match=f"owner: 9 slots are asked for under {other}, who owns 1; .* not shared"):
        server.plan(DecodeBatch.of(rows=[other], lens=[9], device=DEVICE))


def test_a_prefix_that_the_host_knows_is_checked_by_itself() -> None:
    server = Server([20], window=8)
    new = DeviceLens(device=torch.tensor([1], dtype=torch.int32, device=DEVICE), bound_each=1, bound_total=1)
    batch = ExtendBatch(rows=torch.tensor(server.rows), prefix=HostLens.of([50], device=DEVICE), new=new)
    with pytest.raises(ValueError, match="seq: request 0 asks for 50 tokens, row 0 of the table holds 20"):
        server.plan(batch)


def test_a_layer_that_sees_all_keys_cannot_live_where_they_slide_out() -> None:
    server = Server([64], pool="window", page_size=4, window=8)
    server.cache.slide_out(server.rows[0], query=64)
    first, second = server.model.layers
    swapped = tuple(dataclasses.replace(a, pool_layer=b.pool_layer) for a, b in ((first, second), (second, first)))
    server.model = dataclasses.replace(server.model, layers=swapped)
    with pytest.raises(ValueError, match="sees back to 0 in layer 0 .all keys., but keys before 56 have slid out"):
        server.plan(DecodeBatch.of(rows=server.rows, lens=[64], device=DEVICE))


def test_loose_bounds_of_all_tokens_are_held_to_those_of_each() -> None:
    server = Server([20])
    lens = DeviceLens(device=torch.tensor([20], dtype=torch.int32, device=DEVICE), bound_each=20, bound_total=2**24)
    assert server.backend().plan(DecodeBatch(rows=torch.tensor(server.rows), seq=lens)).lane(
        0
    ).layout.index.slots.shape == (20,)


def test_a_mask_that_is_too_short_is_found() -> None:
    server = Server([10, 13])
    lens = [
        DeviceLens(device=torch.tensor(n, dtype=torch.int32, device=DEVICE), bound_each=16, bound_total=32)
        for n in ([8, 10], [2, 3])
    ]
    mask = CustomMask(bits=torch.ones(3, dtype=torch.uint8, device=DEVICE))
    batch = ExtendBatch(rows=torch.tensor(server.rows), prefix=lens[0], new=lens[1], mask=mask)
    with pytest.raises(ValueError, match="mask: expected 59 entries, got 3"):
        server.plan(batch)


@pytest.mark.parametrize(
    ("prefix", "error"),
    [([2**33], "lens: request 0: expected 0 to"), ([-1], "0 to 1,073,741,824"), ([2**29], "their mask")],
)
def test_a_trees_prefix_is_checked_before_its_mask_is_made(prefix: list[int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        VerifyBatch.tree(rows=[0], prefix=prefix, parents=[[-1, 0, 0]], device=DEVICE)


def test_lengths_are_whole_numbers_however_they_are_made() -> None:
    for values, error in (((-3,), ValueError), ((2.5,), TypeError), ((True,), TypeError)):
        with pytest.raises(error, match="values: expected"):
            HostLens(values=values, device=torch.zeros(1, dtype=torch.int32))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seq: expected HostLens or DeviceLens, got NoneType"):
        DecodeBatch(rows=torch.tensor([0]), seq=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("request_", [True, None, "a", 1.0])
def test_explain_takes_numbers(request_: Any) -> None:
    server = Server([9])
    plan = server.plan(ExtendBatch.of(rows=server.rows, prefix=[4], new=[5], device=DEVICE))
    with pytest.raises(TypeError, match="request: expected an int, got"):
        plan.explain(request_, 0)


def test_explain_names_the_rule_that_set_the_bound() -> None:
    server = Server([30], window=500, chunk=10)
    plan = server.plan(DecodeBatch.of(rows=server.rows, lens=[26], device=DEVICE))
    assert "its chunk of 10 began at 20" in plan.explain(0)[1].why
