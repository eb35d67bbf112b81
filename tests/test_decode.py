"""Decode on every engine against the fp64 oracle: the named cases, the pitfalls, and what must not matter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch
from attnlab.eager import oracle
from attnlab.eager import sweep as eager_sweep
from attnlab.inspect.workbench import workbench
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool, KVView
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec
from tests.cases import CASES, ENGINES, FP8, Case, Stand, decode_one, poison
from tests.tolerances import FP8_STATISTIC, LSE, OUTPUT

TOY = CASES[0]
engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


@engines
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_agrees_with_the_oracle(case: Case, engine: str, device: str) -> None:
    Stand(case, engine, device).check()


@engines
def test_output_does_not_depend_on_the_number_of_splits(engine: str, device: str) -> None:
    case = TOY.but(lens=(257, 300), sinks=True)
    for splits in (1, 2, 3, 7, 8, 64):
        Stand(case.but(policy=Static(splits=splits)), engine, device).check()


@engines
@pytest.mark.parametrize("policy", ["seed", "static", "tile"])
def test_scratch_that_nobody_owns_never_reaches_an_output(engine: str, device: str, policy: str) -> None:
    """B01: 29 splits asked for, 8 hold keys; the rest of the scratch is NaN, then zero."""
    policy = Seed(max_splits=64) if policy == "seed" else policy
    stand = Stand(TOY.but(lens=(256, 5, 0), policy=policy), engine, device)
    splits = stand.plan().lanes[0].splits.to_host()
    assert sum(splits.nominal) > sum(splits.effective) or policy == "tile"
    poisoned = stand.run()
    stand.backend.workspace.fill(0.0)
    clean = stand.run()
    for a, b in zip(poisoned, clean, strict=True):
        assert torch.equal(a, b)


@engines
def test_partials_are_the_oracles_for_each_range(engine: str, device: str) -> None:
    stand = Stand(TOY.but(policy="static", heads=40), engine, device)
    plan = stand.plan()
    stand.run(plan)
    partials, lane = stand.backend.partials(1, plan), plan.lane(1)
    owners = lane.schedule.merge_indptr.tolist()
    for r, ranges in enumerate(lane.splits.to_host().ranges):
        for h in range(2):
            rows = range(owners[2 * r + h], owners[2 * r + h + 1])
            assert len(rows) == len(ranges)
            for p, (start, end) in zip(rows, ranges, strict=True):
                k, v = stand.k[r][start:end], stand.v[r][start:end]
                out, lse = oracle.attention(stand.q[r], k, v, scale=stand.spec.scale)
                mine = slice(20 * h, 20 * h + 20)
                torch.testing.assert_close(partials.lse[p].double(), lse[mine], **LSE)
                torch.testing.assert_close(partials.output[p].double(), out[mine], **OUTPUT[torch.float32])


@engines
def test_a_query_of_zeros_gives_the_mean_of_the_values(engine: str, device: str) -> None:
    """B21: uniform attention exposes a lane beyond the end that is counted."""
    stand = Stand(TOY.but(lens=(300, 33)), engine, device)
    stand.q.zero_()
    out, lse = stand.run()
    for r, n in enumerate((300, 33)):
        mean = stand.v[r].double().mean(0).repeat_interleave(4, 0)
        torch.testing.assert_close(out[r].double(), mean, **OUTPUT[torch.float32])
        torch.testing.assert_close(lse[r].double(), torch.full_like(lse[r], n).double().log(), **LSE)


@engines
def test_unit_values_return_the_weights(engine: str, device: str) -> None:
    stand = Stand(TOY.but(lens=(32,), heads=2, kv_heads=1), engine, device)
    stand.pool.write(1, stand.table.slots_of(stand.rows[0]).long(), stand.k[0], torch.eye(32, device=device)[:, None])
    scores = torch.einsum("hd,nd->hn", stand.q[0].double(), stand.k[0][:, 0].double()) * stand.spec.scale
    torch.testing.assert_close(stand.run()[0][0].double(), scores.softmax(-1), **OUTPUT[torch.float32])


@engines
@pytest.mark.parametrize("dim", [13, 16, 64, 80, 96, 112, 160, 192, 256, 288, 320, 576])
@pytest.mark.parametrize("kv_heads", [1, 4], ids=["group", "mha"])
def test_the_last_column_counts(engine: str, device: str, dim: int, kv_heads: int) -> None:
    """B37: all signal in the last column of q, k and v."""
    case = TOY.but(id=f"last-{dim}", heads=4, kv_heads=kv_heads, qk_dim=dim, v_dim=dim, lens=(40,))
    stand = Stand(case, engine, device)
    for x in (stand.q, stand.k[0], stand.v[0]):
        x[..., :-1] = 0
    stand.pool.write(1, stand.table.slots_of(stand.rows[0]).long(), stand.k[0], stand.v[0])
    stand.check()


@engines
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 18, 20, 24, 32, 48])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_every_query_head_reads_its_own_kv_head(engine: str, device: str, group: int, kv_heads: int) -> None:
    """B36: V of KV head h is the constant h + 1, so each output says which one was read."""
    case = TOY.but(id="groups", heads=group * kv_heads, kv_heads=kv_heads, qk_dim=16, v_dim=16, lens=(9,))
    stand = Stand(case, engine, device)
    stand.v[0][:] = torch.arange(1.0, kv_heads + 1, device=device)[None, :, None]
    stand.pool.write(1, stand.table.slots_of(stand.rows[0]).long(), stand.k[0], stand.v[0])
    want = torch.arange(kv_heads, device=device).repeat_interleave(group) + 1.0
    torch.testing.assert_close(stand.run()[0][0, :, 0], want, **OUTPUT[torch.float32])


@engines
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_a_cap_changes_the_output_and_survives_large_scores(engine: str, device: str, softcap: float) -> None:
    """B12: the quotient form of tanh overflows; an ignored cap would leave the output as it was."""
    case = TOY.but(scale=400.0)
    plain = Stand(case, engine, device).run()[0]
    capped = Stand(case.but(softcap=softcap), engine, device)
    assert not torch.allclose(plain, capped.run()[0])
    capped.check()


@engines
def test_a_modifier_that_hides_a_whole_split_gives_no_nan(engine: str, device: str) -> None:
    """The original gives NaN where a modifier returns -inf for every key of a range."""
    stand = Stand(TOY.but(lens=(300,), mod="relative_bias", policy="static"), engine, device)
    stand.aux[:] = float("-inf")  # the last 16 keys are hidden, all of the last range's among them if it is short
    out, lse = stand.run()
    want, want_lse = stand.expected()
    torch.testing.assert_close(out.double(), want, **OUTPUT[torch.float32])
    torch.testing.assert_close(lse.double(), want_lse, **LSE)
    # Now all keys of request 0 are hidden, and of request 1 a whole range beside a live one.
    short = Stand(TOY.but(lens=(9, 40), mod="relative_bias", policy=Tile(tile=16)), engine, device)
    short.aux[:] = float("-inf")
    out, lse = short.run()
    want, want_lse = short.expected()
    torch.testing.assert_close(out.double(), want, **OUTPUT[torch.float32])
    torch.testing.assert_close(lse.double(), want_lse, **LSE)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(lse[0], torch.full_like(lse[0], float("-inf")))


@engines
@pytest.mark.parametrize("sink", [float("-inf"), -10.0, 0.0, 10.0, 100.0, float("inf")])
def test_a_sink_counts_once_whatever_the_splits(engine: str, device: str, sink: float) -> None:
    """B11: a sink in every split's denominator would be off by 1e-2."""
    for policy in ("static", "tile"):
        stand = Stand(TOY.but(lens=(300, 0), sinks=True, policy=policy), engine, device)
        stand.sinks[:] = sink
        stand.check()


@engines
def test_pages_in_another_order_give_the_same_bits(engine: str, device: str) -> None:
    """B35: where the slots lie must not matter."""
    case = TOY.but(page_size=4, layout="pages")
    first, second = Stand(case, engine, device), Stand(case.but(id="other-pages"), engine, device)
    second.q, second.k, second.v = first.q, first.k, first.v
    for row, k, v in zip(second.rows, first.k, first.v, strict=True):
        second.pool.write(1, second.table.slots_of(row).long(), k, v)
    assert not torch.equal(first.plan().lanes[0].layout.index.slots, second.plan().lanes[0].layout.index.slots)
    assert torch.equal(first.run()[0], second.run()[0])


@engines
@pytest.mark.parametrize("policy", ["static", "tile"])
def test_invariant_policies_give_the_same_bits_in_any_batch(engine: str, device: str, policy: str) -> None:
    """B40: the neighbours' lengths must not change a request's bits."""
    alone, crowd = TOY.but(lens=(300,), policy=policy), TOY.but(lens=(300, 900, 1), policy=policy)
    a, b = Stand(alone, engine, device), Stand(crowd, engine, device)
    b.q[0], b.k[0], b.v[0] = a.q[0], a.k[0], a.v[0]
    b.pool.write(1, b.table.slots_of(b.rows[0]).long(), a.k[0], a.v[0])
    assert torch.equal(a.run()[0][0], b.run()[0][0])


@engines
def test_requests_may_come_in_any_order(engine: str, device: str) -> None:
    stand = Stand(TOY, engine, device)
    out, lse = stand.run()
    order = torch.tensor([2, 0, 3, 1])
    stand.case = TOY.but(lens=tuple(TOY.lens[i] for i in order))
    stand.rows, stand.q = [stand.rows[i] for i in order], stand.q[order]
    again, lse_again = stand.run()
    assert torch.equal(again, out[order]) and torch.equal(lse_again, lse[order])


@engines
def test_no_requests_at_all(engine: str, device: str) -> None:
    stand = Stand(TOY, engine, device)
    stand.case, stand.rows = TOY.but(lens=()), []
    stand.q = stand.q[:0]
    out, lse = stand.run()
    assert out.shape == (0, 8, 32) and lse.shape == (0, 8)


@engines
def test_all_requests_empty(engine: str, device: str) -> None:
    """B45: nothing but padding must neither divide by zero nor read a slot."""
    out, lse = Stand(TOY.but(lens=(0, 0, 0)), engine, device).run()
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == float("-inf")).all())


@engines
def test_saving_stores_the_newest_token_and_padding_goes_to_the_sink(engine: str, device: str) -> None:
    stand = Stand(TOY.but(lens=(5, 0, 200)), engine, device)
    newest = [k[-1] if len(k) else torch.zeros_like(stand.k[0][0]) for k in stand.k]
    values = [v[-1] if len(v) else torch.zeros_like(stand.v[0][0]) for v in stand.v]
    want = stand.run()[0]
    view = stand.pool.view(1)
    for row in (stand.rows[0], stand.rows[2]):
        poison(view.k[stand.table.slots_of(row)[-1:].long()])
        view.k[stand.table.slots_of(row)[-1].long()] = float("nan")
    out = stand.backend.decode(1, stand.q, torch.stack(newest), torch.stack(values), stand.plan())
    assert torch.equal(out, want)
    assert bool((view.k[0] == 0).all()) and int(torch.isnan(view.k[:, 0, 0]).sum()) > 200


@engines
def test_strided_queries_and_outputs(engine: str, device: str) -> None:
    stand = Stand(TOY, engine, device)
    want = stand.run()[0]
    wide = torch.full((4, 8, 100), float("nan"), device=device)
    wide[..., 7:39] = stand.q
    out = torch.full((4, 9, 40), float("nan"), device=device)
    given = {"save": False, "out": out[:, 1:, 5:37]}
    stand.backend.decode(1, wide[..., 7:39], None, None, stand.plan(), **given)
    assert torch.equal(out[:, 1:, 5:37], want)
    assert int(torch.isnan(out).sum()) == out.numel() - want.numel()


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_queries_may_be_a_slice_of_a_fused_projection(engine: str, device: str, dtype: torch.dtype) -> None:
    stand = Stand(TOY.but(dtype=dtype, kv_dtype=dtype, mod="relative_bias"), engine, device)
    want = stand.run()[0]
    fused = torch.full((4, 24, 32), float("nan"), dtype=dtype, device=device)
    fused[:, 8:16] = stand.q
    stand.q = fused[:, 8:16]
    assert torch.equal(stand.run()[0], want)


@engines
def test_a_modifiers_change_to_its_lengths_stays_its_own(engine: str, device: str) -> None:
    class Greedy(Static):
        def sizes(self, lens, ctx):
            lens.clamp_(min=40)
            return super().sizes(lens, ctx)

        sizes_triton = sizes

    stand = Stand(TOY.but(lens=(5, 0, 200), policy=Greedy()), engine, device)
    stand.check()


@engines
def test_lengths_that_change_behind_the_hosts_back_overrun_nothing(engine: str, device: str) -> None:
    """A server that bumps lengths in place: the plan stays inside what it was told."""
    stand = Stand(TOY.but(lens=(100, 1, 1)), engine, device)
    batch = stand.batch
    batch.seq.device.fill_(100)
    lane = stand.backend.plan(batch).lanes[0]
    assert int(lane.layout.index.indptr[-1]) <= 102


@engines
@pytest.mark.parametrize("cap", [50.0, 1e3, 1e6, 1e9])
def test_a_cap_far_above_the_scores_changes_nothing(engine: str, device: str, cap: float) -> None:
    plain = Stand(TOY, engine, device).run()[0]
    capped = Stand(TOY.but(softcap=cap), engine, device).run()[0]
    if cap >= 1e6:
        torch.testing.assert_close(capped, plain, **OUTPUT[torch.float32])
    Stand(TOY.but(softcap=cap), engine, device).check()


@engines
def test_a_pool_is_no_part_of_autograds_graph(engine: str, device: str) -> None:
    stand = Stand(TOY, engine, device)
    k = torch.randn(4, 2, 32, device=device, requires_grad=True)
    q = stand.q.clone().requires_grad_()
    out = stand.backend.decode(1, q, k, k.clone(), stand.plan())
    assert not (
        out.requires_grad
        or stand.pool.view(1).k.requires_grad
        or stand.backend.partials(1, stand.plan()).acc.requires_grad
    )


@engines
def test_a_changed_schedule_runs_as_it_says(engine: str, device: str) -> None:
    """The plan is data: segments in reverse order, or several to a program, give the same bits."""
    stand = Stand(TOY.but(policy="static"), engine, device)
    plan = stand.plan()
    lane = plan.lanes[0]
    count = lane.schedule.segments.shape[0]
    reversed_order = {"segments": lane.schedule.segments.flip(0), "program_indptr": [*range(count + 1)]}
    shared = {"program_indptr": [0, 3, 3, count]}
    for change in (reversed_order, shared):
        change["program_indptr"] = torch.tensor(change["program_indptr"], dtype=torch.int32, device=device)
        schedule = dataclasses.replace(lane.schedule, **change)
        schedule.validate(lane.splits)
        changed = dataclasses.replace(plan, lanes=(dataclasses.replace(lane, schedule=schedule),))
        stand.backend.workspace.fill(float("nan"))
        assert torch.equal(stand.run(changed)[0], stand.run(plan)[0])


@engines
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, FP8], ids=["fp32", "fp16", "bf16", "fp8"]
)
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(576, 512), (288, 256)])
def test_mla_in_every_dtype_with_two_scales(
    engine: str, device: str, dtype: torch.dtype, qk_dim: int, v_dim: int
) -> None:
    """One stored row, read once as a key times k_scale and once as a value times v_scale."""
    q_dtype = torch.bfloat16 if dtype == FP8 else dtype
    case = TOY.but(id="mla", heads=32, kv_heads=1, qk_dim=qk_dim, v_dim=v_dim, mla=True, dtype=q_dtype, kv_dtype=dtype)
    stand = Stand(case.but(k_scale=0.2), engine, device)
    stand.pool.views[1] = dataclasses.replace(stand.pool.view(1), k_scale=0.05)
    rows = [stand.stored(k, 0.2) for k in stand.k]
    stand.k, stand.v = [row / 4 for row in rows], [row[..., :v_dim] for row in rows]
    stand.stored = lambda x, scale: x  # rounded above
    want, want_lse = stand.expected()
    out, lse = stand.run()
    torch.testing.assert_close(out.double(), want, **OUTPUT[q_dtype])
    torch.testing.assert_close(lse.double(), want_lse, **LSE)


@pytest.mark.skipif(ENGINES[0][1] != "cpu", reason="test_decode_gpu.py does it with memory behind every page")
@engines
@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_slots_beyond_2_31_elements_are_read(engine: str, device: str, mla: bool) -> None:
    """B24, B25. The pool is never touched but at its far end, so that the rest of it takes no memory."""
    heads, kv_heads, qk_dim, v_dim = (4, 1, 576, 512) if mla else (8, 8, 128, 128)
    slots = 2**31 // (kv_heads * qk_dim) + 500
    k = torch.empty(slots, kv_heads, qk_dim, dtype=torch.uint8).view(FP8)
    v = k[..., :v_dim] if mla else torch.empty(slots, kv_heads, v_dim, dtype=torch.uint8).view(FP8)
    far = torch.randperm(400)[:40] + slots - 400
    for x in (k,) if mla else (k, v):
        x.view(torch.uint8)[far] = torch.randn(40, kv_heads, x.shape[2]).to(FP8).view(torch.uint8)
    spec = AttentionSpec(heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim, scale=qk_dim**-0.5)
    q, out = decode_one(engine, spec, KVView(k=k, v=v, v_in_k=mla), far, torch.float32)
    rows = (x.view(torch.uint8)[far].view(FP8) for x in (k, v))
    want, _ = oracle.attention(q, *rows, scale=spec.scale)
    torch.testing.assert_close(out.double(), want, **OUTPUT[torch.float32])


@engines
def test_layers_may_differ_in_heads_and_dims(engine: str, device: str) -> None:
    """B38: scratch sized by one layer's value dimension would be overrun, or misread, by another's."""
    wide = AttentionSpec(heads=8, kv_heads=2, qk_dim=32, v_dim=64, scale=0.2)
    narrow = AttentionSpec(heads=12, kv_heads=4, qk_dim=64, v_dim=16, scale=0.1)
    layers = tuple(LayerSpec(index=i, attention=a, pool_layer=i) for i, a in enumerate((wide, narrow)))
    model = ModelSpec(name="mixed", layers=layers, context_len=300, page_size=1, kv_dtype=torch.float32, mla=False)
    wb = workbench(model, lens=[300, 0, 40], policy="static", engine=engine, device=device)
    plan = wb.plan()
    assert len(plan.lanes) == 2
    for layer, spec in enumerate((wide, narrow)):
        wb.backend.workspace.fill(float("nan"))
        out = wb.decode(layer, plan)
        q, _, _ = wb.newest(layer)
        for r in range(3):
            k, v = (x.to(device) for x in wb.cached(layer, r))
            want, _ = oracle.attention(q[r], k, v, scale=spec.scale)
            torch.testing.assert_close(out[r].double(), want, **OUTPUT[torch.float32])


@engines
def test_fp8_stays_close_to_the_unrounded_values(engine: str, device: str) -> None:
    """B39. The scales make the most of fp8's range; without them the values would leave it."""
    case = TOY.but(lens=(300, 64), kv_dtype=FP8, k_scale=0.05, v_scale=0.02, qk_dim=64, v_dim=64)
    stand = Stand(case, engine, device)
    exact = Stand(case.but(kv_dtype=torch.float32), engine, device)
    error = (stand.run()[0] - exact.expected()[0]).abs().mean()
    assert 0 < error <= FP8_STATISTIC * exact.expected()[0].std()


@pytest.mark.skipif(ENGINES[0][1] != "cpu", reason="needs memory behind every page")
@engines
def test_a_head_beyond_2_31_elements_is_read(engine: str, device: str) -> None:
    """Head-major storage: the stride between heads, not that between slots, is large."""
    slots = 2**31 // (7 * 64) + 500
    storage = torch.empty(8, slots, 64, dtype=torch.uint8).view(FP8)
    used = torch.randperm(400)[:40] + slots - 400
    storage.view(torch.uint8)[:, used] = torch.randn(8, 40, 64).to(FP8).view(torch.uint8)
    rows = storage.permute(1, 0, 2)
    spec = AttentionSpec(heads=16, kv_heads=8, qk_dim=64, v_dim=64, scale=0.125)
    q, out = decode_one(engine, spec, KVView(k=rows, v=rows), used, torch.float32)
    row = rows.view(torch.uint8)[used].view(FP8)
    want, _ = oracle.attention(q, row, row, scale=spec.scale)
    torch.testing.assert_close(out.double(), want, **OUTPUT[torch.float32])


@engines
def test_latent_rows_may_be_page_major(engine: str, device: str) -> None:
    storage = torch.full((6, 3, 4, 1, 288), float("nan"), device=device)
    k = storage[:, 1]  # pages of 4 rows, two others between them
    used = torch.tensor([21, 4, 5, 6, 11, 23], device=device)
    k[used // 4, used % 4] = torch.randn(6, 1, 288, device=device)
    spec = AttentionSpec(heads=20, kv_heads=1, qk_dim=288, v_dim=256, scale=0.06)
    q, out = decode_one(engine, spec, KVView(k=k, v=k[..., :256], v_in_k=True), used, torch.float32)
    row = k[used // 4, used % 4]
    want, _ = oracle.attention(q, row, row[..., :256], scale=spec.scale)
    torch.testing.assert_close(out.double(), want, **OUTPUT[torch.float32])


def test_the_eager_engine_cuts_a_long_segment_always_at_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is bounded by chunks; what else is in the batch must not move a chunk's border in a request."""
    monkeypatch.setattr(eager_sweep, "MAX_GATHERED", 3 * eager_sweep.TILE * 32)
    alone, crowd = TOY.but(lens=(900,), policy=Static(splits=1)), TOY.but(lens=(40, 900, 300), policy=Static(splits=1))
    a, b = Stand(alone, "eager", "cpu"), Stand(crowd, "eager", "cpu")
    b.q[1], b.k[1], b.v[1] = a.q[0], a.k[0], a.v[0]
    b.pool.write(1, b.table.slots_of(b.rows[1]).long(), a.k[0], a.v[0])
    b.check()
    assert torch.equal(a.run()[0][0], b.run()[0][1])


@engines
@pytest.mark.parametrize("pool", ["window", "unified"])
def test_what_slid_out_is_not_read_and_its_pages_may_be_anybodys(engine: str, device: str, pool: str) -> None:
    """B14, B33: before and after sliding out, and after pages moved, every bit of the output is the same."""
    stand = Stand(TOY.but(window=40, page_size=4, pool=pool, lens=(63, 200, 41)), engine, device)
    before = stand.run()
    for r, n in enumerate(stand.case.lens):
        stand.pool.slide_out(stand.rows[r], query=n - 1)
    kept = stand.pool.view(1)
    live = torch.cat([lane.layout.index.slots for lane in stand.plan().lanes[1:]])
    dead = torch.ones(kept.num_slots, dtype=torch.bool, device=device)
    dead[live] = False
    pages, offsets = dead.nonzero().flatten() // kept.page_size, dead.nonzero().flatten() % kept.page_size
    for x in (kept.k, kept.v):
        if x.dim() == 3:
            x[dead] = float("nan")
        else:
            x[pages, offsets] = float("nan")
    for a, b in zip(before, stand.run(), strict=True):
        assert torch.equal(a, b)
    if isinstance(stand.pool, UnifiedPool):
        stand.pool.allocator.release("hole")
        assert stand.pool.compact() > 0
        for a, b in zip(before, stand.run(), strict=True):
            assert torch.equal(a, b)


@engines
@pytest.mark.parametrize("pool", ["window", "unified"])
def test_layers_of_a_hybrid_model_have_heads_and_dims_of_their_own(engine: str, device: str, pool: str) -> None:
    """B38: full and sliding layers differ in query heads, KV heads and value dimension; linear ones keep nothing."""
    wide = AttentionSpec(heads=8, kv_heads=2, qk_dim=32, v_dim=48, scale=0.2)
    narrow = AttentionSpec(heads=4, kv_heads=4, qk_dim=16, v_dim=16, scale=0.25, window=20)
    kinds = [narrow, wide, narrow]
    model = ModelSpec(
        name="hybrid",
        layers=tuple(LayerSpec(index=2 * i + 1, attention=a, pool_layer=i) for i, a in enumerate(kinds)),
        linear=(0, 2, 4),
        context_len=128,
        page_size=4,
        kv_dtype=torch.float32,
        mla=False,
    )
    slots, sliding = 256, 128
    made: KVPool = (
        WindowPool(model, num_slots=slots, sliding_slots=sliding, device=device)
        if pool == "window"
        else UnifiedPool(model, num_slots=slots, virtual_slots=slots, sliding_slots=sliding, device=device)
    )
    for layer in range(len(kinds)):
        for x in (made.view(layer).k, made.view(layer).v):
            poison(x)
    table = RequestTable(max_requests=3, max_context=128, num_slots=slots, device=device)
    cache = PagedCache(table=table, pool=made)
    lens = (70, 33, 0)
    rows = [cache.admit() for _ in lens]
    drawn = [
        [(torch.randn(n, spec.kv_heads, spec.qk_dim), torch.randn(n, spec.kv_heads, spec.v_dim)) for n in lens]
        for spec in kinds
    ]
    for row, n in zip(rows, lens, strict=True):
        cache.append(row, n)
    for layer in range(len(kinds)):
        for row, (k, v) in zip(rows, drawn[layer], strict=True):
            made.write(layer, table.slots_of(row).long(), k.to(device), v.to(device))
    for row, n in zip(rows, lens, strict=True):
        cache.slide_out(row, query=max(0, n - 1))
    backend = AttentionBackend(
        model=model, pool=made, table=table, engine=engine, policy="seed", max_requests=3, multiprocessors=132
    )
    backend.workspace.fill(float("nan"))
    plan = backend.plan(DecodeBatch.of(rows=rows, lens=lens, device=device))
    for layer, spec in enumerate(kinds):
        q = torch.randn(3, spec.heads, spec.qk_dim)
        out = backend.decode(2 * layer + 1, q.to(device), None, None, plan, save=False)
        for r in range(3):
            k, v = drawn[layer][r]
            want, _ = oracle.attention(q[r], k, v, scale=spec.scale, window=spec.window)
            torch.testing.assert_close(out[r].cpu().double(), want, **OUTPUT[torch.float32])
    with pytest.raises(ValueError, match="has attention in layers 1, 3, 5, got 2 .a linear-attention layer"):
        backend.decode(2, q.to(device), None, None, plan, save=False)
