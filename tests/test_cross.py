"""Cross-attention in every mode and on every engine: all keys of an encoder, whatever the step's own tokens do."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab._boot import INTERPRETED
from attnlab.backend import AttentionBackend
from attnlab.batch import Batch, DecodeBatch, DeviceLens, Encoder, ExtendBatch, HostLens, Lens, VerifyBatch
from attnlab.eager import oracle
from attnlab.inspect.step import Step
from attnlab.inspect.tree_view import TreeView
from attnlab.mask import CAUSAL, CustomMask
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.build import Planner
from attnlab.plan.plans import Lane, Plan, VerifyPlan
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec, ScoreMod
from tests.cases import ENGINES, FP8, device_of, poison
from tests.tolerances import LSE, output

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
MODES = ["decode", "extend", "masked", "chain", "tree"]
modes = pytest.mark.parametrize("mode", MODES)
COLUMNS, CONTEXT = 512, 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests of a decoder, and the lengths of their encoders. `why` says what it would catch that no other does."""

    id: str
    why: str
    prefix: tuple[int, ...] = (9, 40, 0, 5)
    new: tuple[int, ...] = (3, 1, 70, 0)
    encoder: tuple[int, ...] = (70, 0, 300, 0)
    heads: int = 4
    kv_heads: int = 2
    qk_dim: int = 32
    v_dim: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    page_size: int = 1
    softcap: float | None = None
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    mla: bool = False
    pool: str = "plain"
    deterministic: bool = False
    layers: int = 2

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


TOY = Case(id="toy", why="uneven encoders, a live request without one, and a padded row")
CASES = [
    Case(id="tiles", why="encoders at the borders of tiles", encoder=(127, 128, 129, 1)),
    Case(id="mha", why="one query head a KV head", heads=2, kv_heads=2),
    Case(id="group-5", why="a group that is no power of two", heads=10, kv_heads=2),
    Case(id="dim-80", why="64 + 16 columns, q and v dims differ", qk_dim=80, v_dim=13),
    Case(id="softcap", why="cap after the scale", softcap=5.0),
    Case(id="sinks", why="a request without an encoder gives out 0 and the sink", sinks=True),
    Case(id="pages", why="page-major, virtual slots", page_size=4, pool="unified"),
    Case(id="pages-of-64", why="whole tiles of keys in a page", page_size=64),
    Case(id="scales", why="all keys are cached, so all are scaled", k_scale=0.5, v_scale=0.25),
    Case(id="mla", why="latent rows: V in K", kv_heads=1, qk_dim=48, v_dim=32, mla=True),
    Case(id="one-pass", why="an encoder's keys are no part of the one list", deterministic=True, sinks=True),
    Case(id="fp16", why="half precision", dtype=torch.float16, kv_dtype=torch.float16),
    Case(id="fp8", why="an fp8 cache with scales", dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.05, v_scale=0.2),
]


class Stand:
    """A case, built: layers read their own keys and an encoder's in turns; what neither should read is NaN."""

    def __init__(self, case: Case, engine: str, device: str) -> None:
        self.case, self.device = case, device_of(engine, device, deterministic=case.deterministic)
        self.rng = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
        own = AttentionSpec(
            heads=case.heads,
            kv_heads=case.kv_heads,
            qk_dim=case.qk_dim,
            v_dim=case.v_dim,
            scale=case.qk_dim**-0.5,
            softcap=case.softcap,
            has_sinks=case.sinks,
        )
        self.specs = [replace(own, cross=bool(i % 2)) for i in range(case.layers)]
        self.model = ModelSpec(
            name="translator",
            layers=tuple(LayerSpec(index=i, attention=spec, pool_layer=i) for i, spec in enumerate(self.specs)),
            context_len=CONTEXT,
            page_size=case.page_size,
            kv_dtype=case.kv_dtype,
            mla=case.mla,
        )
        self.pool = self._pool()
        for layer in range(case.layers):
            for x in (self.pool.view(layer).k, self.pool.view(layer).v):
                poison(x)
        table = RequestTable(
            max_requests=12,
            max_context=COLUMNS,
            num_slots=self.pool.num_slots,
            device=self.device,
            page_size=self.pool.page_size,
        )
        self.cache = PagedCache(table=table, pool=self.pool)
        self.lens = [p + n for p, n in zip(case.prefix, case.new, strict=True)]
        self.cache.admit()  # row 0 stays empty: rows and request numbers differ
        self.rows = [self.cache.admit() for _ in self.lens]
        self.encoder_rows = [self.cache.admit() for _ in case.encoder]
        for at in range(0, max(*self.lens, *case.encoder, 1), 24):
            for row, n in zip([*self.rows, *self.encoder_rows], [*self.lens, *case.encoder], strict=True):
                self.cache.append(row, min(24, max(0, n - at)))
        self.backend = AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=table,
            engine=engine,
            policy="tile",
            max_requests=8,
            max_drafts=max(1, *case.new),
            multiprocessors=132,
            deterministic=case.deterministic,
        )
        self.backend.workspace.fill(float("nan"))
        self.q = [self.randn(n, case.heads, case.qk_dim).to(self.device, case.dtype) for n in case.new]
        self.k = {layer: self._stored_keys(layer) for layer in range(case.layers)}
        self.sinks = self.randn(case.heads).to(self.device) if case.sinks else None

    def _pool(self) -> KVPool:
        case = self.case
        if case.pool == "unified":
            return UnifiedPool(self.model, num_slots=1024, virtual_slots=1024, device=self.device)
        if case.mla:
            return MLAPool(self.model, num_slots=1024, device=self.device, scale=case.k_scale)
        return MHAPool(self.model, num_slots=1024, device=self.device, k_scale=case.k_scale, v_scale=case.v_scale)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def _stored_keys(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Draw a layer's keys and values, and store those that are cached: the encoder's, or the prefix."""
        case, cross = self.case, self.specs[layer].cross
        rows, lens = (self.encoder_rows, case.encoder) if cross else (self.rows, self.lens)
        drawn = []
        for row, n, p in zip(rows, lens, case.encoder if cross else case.prefix, strict=True):
            k = self.randn(n, case.kv_heads, case.qk_dim).to(self.device, case.dtype)
            v = k[..., : case.v_dim] if case.mla else self.randn(n, case.kv_heads, case.v_dim).to(k)
            slots = self.backend.table.slots_of(row)[:p].long()
            self.pool.write(layer, slots, k[:p], None if case.mla else v[:p])
            drawn.append((k, v))
        return drawn

    @property
    def encoder(self) -> Encoder:
        return Encoder.of(rows=self.encoder_rows, lens=self.case.encoder, device=self.device)

    def batch(self, mode: str, encoder: Encoder | None) -> Batch:
        case = self.case
        if mode == "decode":
            lens = [n if new else 0 for n, new in zip(self.lens, case.new, strict=True)]
            return DecodeBatch.of(rows=self.rows, lens=lens, device=self.device, encoder=encoder)
        common: dict[str, Any] = {"rows": self.rows, "prefix": case.prefix, "device": self.device, "encoder": encoder}
        if mode == "chain":
            return VerifyBatch.chain(drafts=list(case.new), **common)
        if mode == "tree":
            return VerifyBatch.tree(parents=[[-1, *([0] * n)][:n] for n in case.new], **common)
        # Every third row hides all keys of its own request: an encoder's it must not hide.
        bits = [torch.arange(n)[:, None].expand(n, p + n) % 3 > 0 for p, n in zip(case.prefix, case.new, strict=True)]
        mask = CustomMask(bits=CustomMask.of(bits).bits.to(self.device)) if mode == "masked" else CAUSAL
        return ExtendBatch.of(new=case.new, mask=mask, **common)

    def plan(self, mode: str) -> Plan:
        plan: Plan = self.backend.plan(self.batch(mode, self.encoder))
        plan.validate(num_slots={self.pool.translation(i).target: self.pool.view(i).num_slots for i in range(2)})
        return plan

    def queries(self, mode: str) -> Tensor:
        """A query for every token, of a decode for the last one of every request; a padded row has zeros."""
        if mode != "decode":
            return torch.cat(self.q)
        nothing = torch.zeros_like(torch.cat(self.q)[:1])
        return torch.cat([q[-1:] if len(q) else nothing for q in self.q])

    def run(self, plan: Plan, q: Tensor, *given: Tensor | None, layer: int = 1) -> tuple[Tensor, Tensor]:
        """Run one layer; return output and LSE."""
        lse = torch.full(q.shape[:2], float("nan"), device=self.device)
        out = torch.full((*q.shape[:2], self.case.v_dim), float("nan"), dtype=q.dtype, device=self.device)
        options: Any = {"sinks": self.sinks, "out": out, "lse": lse}
        self.backend.forward(layer, q, *(given or (None, None)), plan, **options)
        if isinstance(plan, VerifyPlan):  # which extend serves too, without splits
            unsplit = self.backend.extend(layer, q, *(given or (None, None)), plan, sinks=self.sinks)
            torch.testing.assert_close(unsplit, out, **output(self.case.dtype, self.case.softcap))
        return out, lse

    def stored(self, x: Tensor, scale: float) -> Tensor:
        """What the cache keeps of a row: rounded to its dtype, by plain torch."""
        scaled = x.float() / scale
        scaled = scaled.clamp(-448, 448) if self.case.kv_dtype == FP8 else scaled
        return scaled.to(self.case.kv_dtype).double() * scale

    def expected(self, mode: str, *, layer: int = 1) -> tuple[Tensor, Tensor]:
        """What the fp64 oracle says: every query of a request over all keys of its encoder."""
        case, outs = self.case, []
        q = self.queries(mode)
        owners = range(len(self.rows)) if mode == "decode" else [r for r, n in enumerate(case.new) for _ in range(n)]
        for i, r in enumerate(owners):
            k, v = self.k[layer][r]
            outs.append(
                oracle.attention(
                    q[i],
                    self.stored(k, case.k_scale),
                    self.stored(v, case.k_scale if case.mla else case.v_scale),
                    scale=self.specs[layer].scale,
                    softcap=case.softcap,
                    sinks=self.sinks,
                )
            )
        return torch.stack([out for out, _ in outs]), torch.stack([lse for _, lse in outs])

    def check(self, mode: str, *, layer: int = 1, plan: Plan | None = None) -> None:
        """Run a layer that reads an encoder, and compare with the oracle; the pool is as it was."""
        before = self.contents()
        out, lse = self.run(self.plan(mode) if plan is None else plan, self.queries(mode), layer=layer)
        want_out, want_lse = self.expected(mode, layer=layer)
        torch.testing.assert_close(out.double(), want_out, **output(self.case.dtype, self.case.softcap))
        torch.testing.assert_close(lse.double(), want_lse, **LSE)
        assert self.contents() == before

    def contents(self) -> list[bytes]:
        """All bytes of the pool."""
        views = [self.pool.view(layer) for layer in range(self.case.layers)]
        held = [x.contiguous().view(torch.uint8).cpu() for view in views for x in (view.k, view.v)]
        return [x.numpy().tobytes() for x in held]


@engines
@modes
def test_every_query_sees_all_keys_of_its_encoder(mode: str, engine: str, device: str) -> None:
    stand = Stand(TOY, engine, device)
    stand.check(mode)
    out, lse = stand.run(stand.plan(mode), stand.queries(mode))
    alone = 1 if mode == "decode" else TOY.new[0]  # request 1 is live and has no encoder
    assert bool((out[alone] == 0).all()) and bool((lse[alone] == float("-inf")).all())


@engines
@pytest.mark.parametrize("mode", ["decode", "extend", "tree"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cross_attention_agrees_with_the_oracle(case: Case, mode: str, engine: str, device: str) -> None:
    Stand(case, engine, device).check(mode)


@engines
@pytest.mark.parametrize("mode", ["decode", "extend", "chain"])
def test_layers_take_turns_in_one_plan(mode: str, engine: str, device: str) -> None:
    """What a layer of the request's own keys stores and reads is no other layer's business."""
    stand = Stand(TOY.but(id="turns", layers=4), engine, device)
    plan, q = stand.plan(mode), stand.queries(mode)
    assert len(plan.lanes) == 2 and plan.lane_of_layer == {0: 0, 1: 1, 2: 0, 3: 1}
    for layer in range(4):
        if stand.specs[layer].cross:
            stand.check(mode, layer=layer, plan=plan)
            continue
        if mode == "decode":
            for r, (k, v) in enumerate(stand.k[layer]):  # a decode's prefix is all but the last token
                slots = stand.backend.table.slots_of(stand.rows[r]).long()
                stand.pool.write(layer, slots[:-1], k[:-1], v[:-1])
            new = [torch.stack([pair[side][-1] for pair in stand.k[layer]]) for side in (0, 1)]
        else:
            new = [
                torch.cat([pair[side][p:] for pair, p in zip(stand.k[layer], TOY.prefix, strict=True)])
                for side in (0, 1)
            ]
        out, _ = stand.run(plan, q, *new, layer=layer)
        k, v = (x[:12].double() for x in stand.k[layer][0])  # request 0: its last token sees all twelve
        want, _ = oracle.attention(q[0 if mode == "decode" else 2], k, v, scale=stand.specs[layer].scale)
        torch.testing.assert_close(out[0 if mode == "decode" else 2].double(), want, **output(torch.float32))


@engines
@pytest.mark.parametrize("mode", ["decode", "extend", "chain"])
def test_lengths_that_only_the_device_knows(mode: str, engine: str, device: str) -> None:
    stand = Stand(TOY.but(encoder=(70, 0, 300, 20)), engine, device)
    on_device = torch.tensor(stand.case.encoder, dtype=torch.int32, device=device)
    lens = DeviceLens(device=on_device, bound_each=400, bound_total=900)
    rows = torch.tensor(stand.encoder_rows)
    stand.check(mode, plan=stand.backend.plan(stand.batch(mode, Encoder(rows=rows, lens=lens))))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="rows on the CPU are on the host: they are checked")
@modes
def test_a_row_that_the_table_does_not_have_is_an_encoder_that_is_not_there(mode: str) -> None:
    stand = Stand(TOY, *ENGINES[1])
    rows = torch.tensor([99, *stand.encoder_rows[1:]], device=stand.device)
    plan = stand.backend.plan(stand.batch(mode, Encoder(rows=rows, lens=stand.encoder.lens)))
    stand.case = TOY.but(encoder=(0, *TOY.encoder[1:]))
    k, v = stand.k[1][0]
    stand.k[1][0] = k[:0], v[:0]
    stand.check(mode, plan=plan)


@engines
@pytest.mark.parametrize("mode", ["decode", "extend", "tree"])
def test_requests_may_share_an_encoder(mode: str, engine: str, device: str) -> None:
    """Several samples of one text: the encoder ran once."""
    stand = Stand(TOY, engine, device)
    row, n = stand.encoder_rows[2], stand.case.encoder[2]
    shared = Encoder.of(rows=[row] * 4, lens=[n] * 4, device=device)
    stand.case = stand.case.but(encoder=(n,) * 4)
    stand.k[1] = [stand.k[1][2]] * 4
    stand.check(mode, plan=stand.backend.plan(stand.batch(mode, shared)))


def test_an_encoder_may_be_longer_than_the_decoders_context() -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(encoder=(CONTEXT + 1, 0, COLUMNS, 0)), engine, device)
    for mode in MODES:
        stand.check(mode)


# --- Bits -------------------------------------------------------------------------------------------------------


@engines
def test_a_deterministic_step_gives_the_same_bits_alone_and_in_a_batch(engine: str, device: str) -> None:
    stand = Stand(TOY.but(id="bits", deterministic=True, sinks=True), engine, device)
    for mode in ("decode", "extend"):
        q = stand.queries(mode)
        out, lse = stand.run(stand.plan(mode), q)
        first = 2 if mode == "decode" else 4
        last = first + (1 if mode == "decode" else 70)
        one = Encoder.of(rows=[stand.encoder_rows[2]], lens=[300], device=stand.device)
        common: dict[str, Any] = {"rows": [stand.rows[2]], "device": stand.device, "encoder": one}
        alone: Batch = DecodeBatch.of(lens=[70], **common)
        if mode == "extend":
            alone = ExtendBatch.of(prefix=[0], new=[70], **common)
        again, lse_again = stand.run(stand.backend.plan(alone), q[first:last])
        assert torch.equal(again, out[first:last]) and torch.equal(lse_again, lse[first:last])


@engines
def test_bits_do_not_depend_on_where_a_prompt_is_cut(engine: str, device: str) -> None:
    stand = Stand(TOY.but(id="cut", deterministic=True), engine, device)
    q = stand.queries("extend")[4:74]
    one = Encoder.of(rows=[stand.encoder_rows[2]], lens=[300], device=stand.device)
    common: dict[str, Any] = {"rows": [stand.rows[2]], "device": stand.device, "encoder": one}
    whole, _ = stand.run(stand.backend.plan(ExtendBatch.of(prefix=[0], new=[70], **common)), q)
    for cut in (1, 33, 64):
        parts = [
            stand.run(stand.backend.plan(ExtendBatch.of(prefix=[a], new=[b - a], **common)), q[a:b])[0]
            for a, b in ((0, cut), (cut, 70))
        ]
        assert torch.equal(torch.cat(parts), whole)


# --- Plans ------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_lane_of_an_encoder_lists_all_its_keys_and_writes_nothing(mode: str, deterministic: bool) -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(deterministic=deterministic), engine, device)
    plan = stand.plan(mode)
    lane = plan.lane(1)
    assert lane.cross and not plan.lane(0).cross
    assert lane.layout.index.indptr.diff().tolist() == list(TOY.encoder) and lane.layout.start.tolist() == [0] * 4
    assert lane.layout.index.slots[:70].tolist() == stand.backend.table.slots_of(stand.encoder_rows[0]).tolist()
    assert lane.write_slots.tolist() == [0] * (4 if mode == "decode" else 74)
    if isinstance(lane, Lane):
        assert lane.splits.to_host().effective == (1, 0, 2, 0)
    (mine,) = (reading for reading in plan.explain(2, 0) if 1 in reading.layers)
    assert [key.position for key in mine.keys] == list(range(300))
    assert mine.why.endswith("reads 300 keys, positions 0 to 299: they are an encoder's, of which every query sees all")


def test_explain_says_that_there_is_no_encoder() -> None:
    plan = Stand(TOY, *ENGINES[0]).plan("decode")
    assert plan.explain(1, 0)[1].why == (
        "the query at position 40 reads 0 keys: they are an encoder's, of which every query sees all"
    )


WRONG: dict[str, tuple[Any, str]] = {
    "a slot that is written": (
        lambda lane: replace(lane, write_slots=lane.write_slots + 1),
        "write_slots: layers that read an encoder's keys store none, expected 0, got .1",
    ),
    "a list that begins late": (
        lambda lane: replace(
            lane,
            layout=replace(lane.layout, start=lane.layout.start + 1, start_visible=lane.layout.start_visible + 1),
        ),
        "start: a full layout begins at position 0",
    ),
}


@modes
@pytest.mark.parametrize("what", WRONG)
def test_validate_finds(what: str, mode: str) -> None:
    plan: Any = Stand(TOY, *ENGINES[0]).plan(mode)
    change, message = WRONG[what]
    broken: Any = replace(plan, lanes=(plan.lanes[0], change(plan.lanes[1])))
    with pytest.raises(ValueError, match=message):
        broken.validate(num_slots=1024)


@modes
def test_validate_finds_lists_of_other_lengths_than_the_encoders(mode: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    plan: Any = stand.plan(mode)
    other = Encoder.of(rows=stand.encoder_rows, lens=[70, 1, 300, 0], device=stand.device)
    with pytest.raises(ValueError, match="layout: request 1 lists positions 0 to -1, expected 0 to 0"):
        replace(plan, batch=replace(plan.batch, encoder=other)).validate(num_slots=1024)
    with pytest.raises(ValueError, match="encoder: the plan has lists of an encoder's keys, but its batch has no"):
        replace(plan, batch=replace(plan.batch, encoder=None)).validate(num_slots=1024)
    lens = DeviceLens(device=stand.encoder.lens.device, bound_each=299, bound_total=900)
    broken = replace(plan.batch, encoder=Encoder(rows=torch.tensor(stand.encoder_rows), lens=lens))
    with pytest.raises(ValueError, match="lens: request 2 has 300 tokens, outside 0 to bound_each 299"):
        replace(plan, batch=broken).validate(num_slots=1024)


def test_only_a_lane_of_an_encoder_writes_nothing() -> None:
    plan: Any = Stand(TOY, *ENGINES[0]).plan("extend")
    own = replace(plan.lanes[0], write_slots=plan.lanes[0].write_slots * 0)
    with pytest.raises(ValueError, match="write_slots: token .0. is live, but goes to slot 0, the sink"):
        replace(plan, lanes=(own, plan.lanes[1])).validate(num_slots=1024)


@modes
def test_a_plan_is_of_the_encoder_that_it_was_made_of(mode: str) -> None:
    """A server counts its lengths on in place; plans of before must not change with them."""
    stand = Stand(TOY, *ENGINES[0])
    encoder = stand.encoder
    plan = stand.backend.plan(stand.batch(mode, encoder))
    encoder.lens.device.add_(1)
    encoder.rows.zero_()
    plan.validate(num_slots=1024)
    stand.check(mode, plan=plan)


@modes
def test_a_plan_ends_with_the_encoders_slots(mode: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    plan = stand.plan(mode)
    stand.cache.release(stand.encoder_rows[0])
    with pytest.raises(ValueError, match="plan: made for another state of the pool"):
        stand.run(plan, stand.queries(mode))


def test_an_idle_step_has_an_encoder_for_nobody() -> None:
    stand = Stand(TOY, *ENGINES[0])
    nobody = Encoder.of(rows=[], lens=[], device=stand.device)
    batch = DecodeBatch.of(rows=[], lens=[], device=stand.device, encoder=nobody)
    assert stand.run(stand.backend.plan(batch), stand.queries("decode")[:0])[0].shape == (0, 4, 32)


# --- What looks at plans ----------------------------------------------------------------------------------------


@modes
def test_a_description_has_the_encoders_rows_and_lengths(mode: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    description = attnlab.describe(stand.plan(mode))
    own, cross = description.lanes
    assert not any(line.wrong for lane in description.lanes for line in lane.lines)
    assert [line.row for line in own.lines] == stand.rows and [line.row for line in cross.lines] == stand.encoder_rows
    assert [line.listed for line in cross.lines] == list(TOY.encoder) and {line.write for line in cross.lines} == {()}
    assert "layer 1, in 'pool': all keys of an encoder" in str(description)


def test_a_recording_has_the_weights_of_an_encoders_keys() -> None:
    stand = Stand(TOY, *ENGINES[0])
    plan = stand.plan("decode")
    with attnlab.record(stand.backend, scores=True) as trace:
        stand.run(plan, stand.queries("decode"))
    scores = trace.call(1).scores
    assert scores[0].values.shape == (4, 70)
    torch.testing.assert_close(scores[0].values.sum(1), torch.ones(4))


@pytest.mark.parametrize("mode", ["decode", "tree"])
def test_a_plan_with_an_encoder_is_drawn(mode: str) -> None:
    assert attnlab.show(Stand(TOY, *ENGINES[0]).plan(mode)) is not None


def test_pictures_of_a_requests_own_keys_are_not_of_an_encoders() -> None:
    plan: Any = Stand(TOY, *ENGINES[0]).plan("tree")
    for look in (Step.of, TreeView.of):
        with pytest.raises(ValueError, match="layer: expected one that reads its request's own keys, got 1"):
            look(plan, request=0, layer=1)


# --- What is refused --------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("given", ["k", "v", "both"])
def test_an_encoders_layer_takes_no_keys(given: str, mode: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    plan, q = stand.plan(mode), stand.queries(mode)
    keys = torch.ones(q.shape[0], 2, 32, device=stand.device)
    before = stand.contents()
    with pytest.raises(
        ValueError,
        match="k, v: layer 1 reads an encoder's keys, which were stored when the encoder ran; pass None for both",
    ):
        stand.run(plan, q, keys if given != "v" else None, keys if given != "k" else None)
    assert stand.contents() == before


@modes
def test_a_query_of_another_batch_is_named(mode: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    with pytest.raises(ValueError, match=r"q: expected \[(4|74), 4, 32\] .* got \[(3|73), 4, 32\]"):
        stand.run(stand.plan(mode), stand.queries(mode)[1:])


@modes
def test_a_batch_has_an_encoder_exactly_where_the_model_does(mode: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    with pytest.raises(
        ValueError,
        match=r"encoder: layer 1 of model 'translator' reads an encoder's keys, the batch has none; pass encoder=Enc",
    ):
        stand.backend.plan(stand.batch(mode, None))
    planner = replace(stand.backend.planner, model=stand.model.only((0,)))
    with pytest.raises(ValueError, match=r"encoder: no layer of model 'translator' reads an encoder's keys .*leave it"):
        planner.build(stand.batch(mode, stand.encoder))


@modes
@pytest.mark.parametrize(
    ("rows", "lens", "message"),
    [
        ([5, 6, 7], [1, 0, 1], r"encoder: expected a row for each of the batch's 4 requests, got 3; .* has length 0"),
        ([5, 6, 12, 8], [1, 0, 1, 0], "encoder.rows: request 2 is in row 12; the table has rows 0 to 11"),
        ([5, 6, -1, 8], [1, 0, 1, 0], "encoder.rows: request 2 is in row -1; the table has rows 0 to 11"),
        ([5, 6, 7, 8], [71, 0, 1, 0], "encoder.lens: request 0 asks for 71 tokens, row 5 of the table holds 70"),
        ([5, 6, 7, 8], [1, 0, 513, 0], "encoder.lens: a request of up to 513 tokens, but the table has 512 columns$"),
    ],
)
def test_rows_and_lengths_of_an_encoder_are_checked(mode: str, rows: list[int], lens: list[int], message: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    assert stand.encoder_rows == [5, 6, 7, 8]
    encoder = Encoder.of(rows=rows, lens=lens, device=stand.device)
    with pytest.raises(ValueError, match=message):
        stand.backend.plan(stand.batch(mode, encoder))


def test_an_encoder_that_is_none_is_named() -> None:
    seq = HostLens.of([3], device="cpu")
    with pytest.raises(TypeError, match=r"encoder: expected an Encoder or None, got tuple"):
        DecodeBatch(rows=torch.tensor([0]), seq=seq, encoder=(1, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"encoder.rows: expected \[reqs\] int32 or int64, got \[1\] float32"):
        Encoder(rows=torch.tensor([0.0]), lens=seq)
    with pytest.raises(TypeError, match=r"encoder.lens: expected HostLens or DeviceLens, got list"):
        Encoder(rows=torch.tensor([0]), lens=[3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"encoder.rows: expected one per request of encoder.lens \(1\), got 2"):
        Encoder(rows=torch.tensor([0, 1]), lens=seq)
    far = HostLens(values=(3,), device=torch.tensor([3], dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="encoder.lens: expected on cpu like the batch's lengths, got meta"):
        DecodeBatch(rows=torch.tensor([0]), seq=seq, encoder=Encoder(rows=torch.tensor([0]), lens=far))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 4),
        ("chunk", 8),
        ("temperature_len", 32),
        ("mod", ScoreMod(name="m", torch=lambda scores, *_: scores, triton=object(), needs_aux=False)),
    ],
)
def test_what_goes_by_position_does_not_go_with_cross(name: str, value: Any) -> None:
    own = AttentionSpec(heads=4, kv_heads=2, qk_dim=8, v_dim=8, scale=0.3)
    with pytest.raises(ValueError, match=f"cross, {name}: a layer that reads an encoder's keys .*leave {name} away"):
        replace(own, cross=True, **{name: value})


@pytest.mark.parametrize(("name", "sees"), [("window", "window 4"), ("chunk", "chunk 4")])
def test_a_window_beside_an_encoder_is_refused(name: str, sees: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    first, second = stand.model.layers
    narrow = replace(first, attention=replace(first.attention, **{name: 4}))
    with pytest.raises(
        ValueError,
        match=rf"cross, {name}: model 'translator' has an encoder \(layer 1 reads it\), and layer 0 sees {sees} only",
    ):
        replace(stand.model, layers=(narrow, second))


def test_a_model_knows_its_encoders_layers() -> None:
    model = Stand(TOY.but(layers=4), *ENGINES[0]).model
    assert model.cross == (1, 3) and model.only((0, 2)).cross == ()
    assert str(model.layer(1).attention.sight) == "all keys of an encoder"


@pytest.mark.parametrize(("rows", "encoders"), [([0, 1], [2, 99]), ([0, 99], [2, 3])])
def test_a_batch_and_its_encoder_may_have_one_tensor_of_lengths(
    rows: list[int], encoders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are none of the table's are padded, with length 0: of one side alone."""

    def padded(self: Planner, rows: Tensor, lengths: Sequence[Lens]) -> dict[int, Tensor]:
        lens = [mine.device for mine in lengths]  # as on a device, whose rows the host does not know
        copies = self.ops.pad(rows, lens, max_requests=self.table.max_requests)
        return {id(x): copy for x, copy in zip((rows, *lens), copies, strict=True)}

    monkeypatch.setattr(Planner, "_padded", padded)
    stand = Stand(TOY, "eager", "cpu")
    lens = DeviceLens(device=torch.tensor([20, 30], dtype=torch.int32), bound_each=40, bound_total=80)
    encoder = Encoder(rows=torch.tensor(encoders), lens=lens)
    taken = stand.backend.planner._taken(DecodeBatch(rows=torch.tensor(rows), seq=lens, encoder=encoder))
    assert taken.encoder is not None
    for given, found in ((rows, taken.seq), (encoders, taken.encoder.lens)):
        assert found.device.tolist() == [0 if row == 99 else n for row, n in zip(given, (20, 30), strict=True)]
