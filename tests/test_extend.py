"""Extend and verify on every engine against the fp64 oracle: named cases, and what must not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, DeviceLens, ExtendBatch, VerifyBatch
from attnlab.mask import CAUSAL, CustomMask
from attnlab.plan.extend_call import ExtendCall
from tests.cases import ENGINES
from tests.extend_cases import CASES, Case, Stand
from tests.tolerances import output

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


@engines
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_extend_agrees_with_the_oracle(case: Case, engine: str, device: str) -> None:
    Stand(case, engine, device).check()


TOY = CASES[0]


@engines
@pytest.mark.parametrize("window", [None, 40])
def test_one_pass_gives_the_same_bits_however_a_prompt_is_cut(engine: str, device: str, window: int | None) -> None:
    """B40: whatever was cached before, and whatever else is in the batch."""
    length = 300
    whole = Stand(
        TOY.but(id="cut", prefix=(0,), new=(length,), window=window, one_pass=True, sinks=True), engine, device
    )
    want, want_lse = whole.run()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3 if engine == "triton" else 10):
        cuts = sorted(torch.randint(1, length, (2,), generator=generator).tolist())
        for first, last in zip([0, *cuts], [*cuts, length], strict=True):
            if first == last:
                continue
            # The chunk beside a neighbour of another length; tokens are those of the whole.
            case = whole.case.but(
                prefix=(int(torch.randint(60, (), generator=generator)), first), new=(7, last - first)
            )
            part = Stand(case, engine, device)
            mine, uncut = part.inputs, whole.inputs
            mine.k[1], mine.v[1], mine.q[1] = uncut.k[0][:last], uncut.v[0][:last], uncut.q[0][first:last]
            part.inputs = replace(mine, sinks=uncut.sinks)
            part.cache(1, first)
            out, lse = part.run()
            assert torch.equal(out[7:], want[first:last])
            assert torch.equal(lse[7:], want_lse[first:last])


@engines
def test_a_query_of_zeros_gives_the_mean_of_the_values(engine: str, device: str) -> None:
    """B21: uniform attention exposes a lane beyond the end that is counted."""
    stand = Stand(TOY.but(prefix=(90, 3), new=(5, 70)), engine, device)
    for q in stand.inputs.q:
        q.zero_()
    stand.check()


@engines
@pytest.mark.parametrize("dim", [13, 16, 64, 80, 96, 128, 192, 256, 288, 320, 576])
def test_the_last_column_counts(engine: str, device: str, dim: int) -> None:
    """B37: all signal in the last column of q, k and v."""
    case = TOY.but(id=f"last-{dim}", heads=2, kv_heads=1, qk_dim=dim, v_dim=dim, prefix=(20,), new=(9,))
    stand = Stand(case, engine, device)
    for x in (stand.inputs.q[0], stand.inputs.k[0], stand.inputs.v[0]):
        x[..., :-1] = 0
    stand.cache(0, 20)
    stand.check()


@engines
def test_what_is_extended_is_what_later_steps_read(engine: str, device: str) -> None:
    """The new tokens' keys are stored, scaled, before attention runs; only they are."""
    stand = Stand(TOY.but(k_scale=0.5, v_scale=0.25), engine, device)
    stand.run()
    view = stand.pool.view(1)
    for row, k, v in zip(stand.rows, stand.inputs.k, stand.inputs.v, strict=True):
        slots = stand.backend.table.slots_of(row).long()
        torch.testing.assert_close(view.k[slots], k / 0.5)
        torch.testing.assert_close(view.v[slots], v / 0.25)


@engines
def test_nothing_is_launched_for_nobody(engine: str, device: str) -> None:
    stand = Stand(TOY.but(prefix=(5, 9), new=(0, 0)), engine, device)
    out, lse = stand.backend.extend(1, *stand.new(), stand.backend.plan(stand.batch)), None
    assert out.shape == (0, 4, 32) and lse is None


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a row too few": ({"q": lambda q: q[1:]}, ValueError, r"q: expected \[80, 4, 32\].*the plan has 80 query tokens"),
    "another dtype": ({"k": lambda k: k.half()}, TypeError, "k, v: expected the dtype of q"),
    "keys alone": ({"v": lambda v: None}, ValueError, "v: expected values beside the keys, got None"),
    "values alone": ({"k": lambda k: None}, ValueError, "k: expected keys beside the values, got None"),
    "wrong heads": ({"k": lambda k: k[:, :1]}, ValueError, r"k: expected \[80, 2, 32\]"),
    "sinks": ({"sinks": torch.zeros(4)}, ValueError, "sinks: expected None, as the layer has no sinks"),
    "aux": ({"aux": torch.zeros(80, 4, 3)}, ValueError, "aux: expected None"),
    "lse": ({"lse": torch.zeros(80, 3)}, ValueError, r"lse: expected \[80, 4\] float32"),
    "out": ({"out": torch.zeros(80, 4, 31)}, ValueError, r"out: expected \[80, 4, 32\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_and_nothing_is_stored(what: str) -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY, engine, device)
    changes, error, message = BAD[what]
    given: dict[str, Any] = dict(zip("qkv", stand.new(), strict=True))
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change.to(device)
    before = stand.pool.view(1).k.clone()
    with pytest.raises(error, match=message):
        stand.backend.extend(
            1, given.pop("q"), given.pop("k"), given.pop("v"), stand.backend.plan(stand.batch), **given
        )
    assert torch.equal(stand.pool.view(1).k.nan_to_num(7), before.nan_to_num(7))


def test_one_pass_cannot_read_what_is_not_stored() -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(one_pass=True), engine, device)
    plan = stand.backend.plan(stand.batch)
    with pytest.raises(ValueError, match="save: a plan in one pass reads the new tokens from the pool"):
        stand.backend.extend(1, *stand.new(), plan, save=False)


def test_extend_takes_the_plan_of_several_queries() -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY, engine, device)
    decode = stand.backend.plan(DecodeBatch.of(rows=stand.rows, lens=stand.case.lens, device=stand.device))
    for plan in (decode, None):
        with pytest.raises(TypeError, match="plan: expected an ExtendPlan or VerifyPlan, got (DecodePlan|NoneType)"):
            stand.backend.extend(1, *stand.new(), plan)  # type: ignore[arg-type]


@engines
def test_values_of_their_own_are_refused_under_mla(engine: str, device: str) -> None:
    stand = Stand(next(case for case in CASES if case.id == "mla"), engine, device)
    q, k, v = stand.new()
    with pytest.raises(ValueError, match="v: under MLA the values are the first columns of k"):
        stand.backend.extend(1, q, k, v.clone(), stand.backend.plan(stand.batch))


@engines
def test_what_a_mask_lacks_is_hidden_and_not_read(engine: str, device: str) -> None:
    """Where only the device knows the lengths, nobody could check a mask's size beforehand."""
    stand = Stand(TOY.but(prefix=(9,), new=(4,)), engine, device)
    lens = [
        DeviceLens(device=torch.tensor([n], dtype=torch.int32, device=device), bound_each=n, bound_total=n)
        for n in (9, 4)
    ]
    bits = torch.ones(30, dtype=torch.uint8, device=device)  # of 52: rows 0 and 1, and 4 bits of row 2
    batch = ExtendBatch(rows=torch.tensor(stand.rows), prefix=lens[0], new=lens[1], mask=CustomMask(bits=bits))
    lse = torch.zeros(4, 4, device=device)
    stand.backend.extend(1, *stand.new(), stand.backend.plan(batch), lse=lse)
    assert bool(lse[:3].isfinite().all()) and bool((lse[3] == float("-inf")).all())


@engines
@pytest.mark.parametrize("parts", ["cached", "new"])
def test_what_a_call_leaves_out_is_not_read(engine: str, device: str, parts: Any) -> None:
    stand = Stand(TOY, engine, device)
    plan = stand.backend.plan(stand.batch)
    q, k, v = stand.new()
    view = stand.pool.view(1)
    for x in (k, v) if parts == "cached" else (view.k, view.v):
        x.fill_(float("nan"))
    out = torch.full_like(q, 7.0)
    call = ExtendCall(
        layer=1,
        spec=stand.spec,
        view=view,
        lane=plan.lane(1),
        queries=plan.queries,
        one_pass=False,
        q=q,
        k=k,
        v=v,
        out=out,
        parts=parts,
    )
    stand.backend.engine.extend(call)
    assert bool(out.isfinite().all())


@engines
@pytest.mark.parametrize("call", ["extend", "verify"])
def test_slices_of_one_projection_are_read_by_their_strides(engine: str, device: str, call: str) -> None:
    """q, k and v as views of one tensor, as a fused projection leaves them; strides that nothing divides."""
    stand = Stand(TOY.but(mask="chain", new=(9, 5, 1, 0), policy="static"), engine, device)
    q, k, v = stand.new()
    fused = torch.full((q.shape[0], 8, 35), float("nan"), device=q.device)
    for x, at in ((q, 0), (k, 4), (v, 6)):
        fused[:, at : at + x.shape[1], :32] = x
    views = [fused[:, at : at + n, :32] for at, n in ((0, 4), (4, 2), (6, 2))]
    out = torch.full((q.shape[0], 7, 33), float("nan"), device=q.device)[:, 2:6, :32]
    plan, attend = stand.backend.plan(stand.batch), getattr(stand.backend, call)
    attend(1, *views, plan, out=out)
    assert torch.equal(out, attend(1, q, k, v, plan))


@engines
@pytest.mark.parametrize("call", ["extend", "verify"])
def test_what_is_not_saved_is_attended_and_not_stored(engine: str, device: str, call: str) -> None:
    stand = Stand(TOY.but(mask="chain", new=(9, 5, 1, 0)), engine, device)
    before, plan = stand.backend.pool.view(1).k.clone(), stand.backend.plan(stand.batch)
    attend = getattr(stand.backend, call)
    out = attend(1, *stand.new(), plan, save=False)
    assert torch.equal(stand.backend.pool.view(1).k.nan_to_num(7), before.nan_to_num(7))
    assert torch.equal(out, attend(1, *stand.new(), plan))


@engines
def test_rows_beyond_the_live_tokens_are_left_alone(engine: str, device: str) -> None:
    """Where only the device knows the lengths, buffers are as long as the bound says."""
    stand = Stand(TOY.but(prefix=(9, 40), new=(4, 3)), engine, device)
    prefix, new = (
        DeviceLens(device=torch.tensor(lens, dtype=torch.int32, device=device), bound_each=60, bound_total=total)
        for lens, total in (((9, 40), 70), ((4, 3), 12))
    )
    batch = ExtendBatch(rows=torch.tensor(stand.rows), prefix=prefix, new=new)
    given = [torch.cat([x, x.new_full((5, *x.shape[1:]), float("nan"))]) for x in stand.new()]
    out = given[0].new_full((12, 4, 32), 7.0)
    stand.backend.extend(1, *given, stand.backend.plan(batch), out=out)
    torch.testing.assert_close(out[:7], stand.run()[0], **output(torch.float32))
    assert bool((out[7:] == 7.0).all())


def test_a_part_takes_no_sink() -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(sinks=True), engine, device)
    plan = stand.backend.plan(stand.batch)
    with pytest.raises(ValueError, match="parts, sinks: 'new' keys alone have no sink; pass None"):
        stand.backend.extend(1, *stand.new(), plan, sinks=stand.inputs.sinks, parts="new")


@pytest.mark.parametrize("call", ["extend", "verify"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
@pytest.mark.parametrize("memory", ["the pool", "the backend's scratch"])
def test_no_argument_lies_in_memory_that_a_call_writes(call: str, name: str, memory: str) -> None:
    """Another layer's part of the pool neither; keys there would be overwritten before they are read."""
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(mask="chain", new=(9, 5, 1, 0), policy="static"), engine, device)
    inside = stand.backend.pool.view(0).k if memory == "the pool" else stand.backend.workspace.buffers[0]
    q, k, v = stand.new()
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": torch.empty(q.shape[:2])}
    given[name] = inside.view(-1)[: given[name].numel()].view(given[name].shape)
    plan = stand.backend.plan(stand.batch)
    with pytest.raises(ValueError, match=f"{name}: shares its memory with {memory}"):
        getattr(stand.backend, call)(1, given.pop("q"), given.pop("k"), given.pop("v"), plan, **given)


def test_an_output_that_overlaps_itself_is_refused() -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY, engine, device)
    out = torch.zeros(81 * 64, device=device).as_strided((80, 4, 32), (64, 16, 1))
    with pytest.raises(ValueError, match="out: is expanded or overlaps itself"):
        stand.backend.extend(1, *stand.new(), stand.backend.plan(stand.batch), out=out)


@pytest.mark.parametrize("call", ["extend", "verify", "decode"])
def test_a_plan_of_a_backend_that_sees_otherwise_is_refused(call: str) -> None:
    """Over one pool, whose epoch is theirs too."""
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(mask="chain", new=(3, 3, 3, 3)), engine, device)
    other = Stand(stand.case.but(window=8), engine, device).backend
    ours = stand.backend
    foreign = AttentionBackend(
        model=other.model,
        pool=ours.pool,
        table=ours.table,
        engine=engine,
        policy="tile",
        max_requests=4,
        multiprocessors=132,
    )
    lens = DecodeBatch.of(rows=stand.rows, lens=stand.case.lens, device=device)
    plan: Any = foreign.plan(lens if call == "decode" else stand.batch)
    q, k, v = (x[:4] if call == "decode" else x for x in stand.new())
    with pytest.raises(ValueError, match="plan: its lists are for window 8, layer 1 sees all keys"):
        getattr(ours, call)(1, q, k, v, plan)


def test_a_deterministic_backend_takes_its_own_kind_of_plan() -> None:
    engine, _ = ENGINES[0]
    stand = Stand(TOY.but(mask="chain", new=(3, 3, 3, 3)), engine, "cpu")
    ours = stand.backend
    strict = AttentionBackend(
        model=ours.model,
        pool=ours.pool,
        table=ours.table,
        engine=engine,
        policy="tile",
        max_requests=4,
        max_drafts=3,
        multiprocessors=132,
        deterministic=True,
    )
    batch = ExtendBatch.of(rows=stand.rows, prefix=stand.case.prefix, new=stand.case.new, device="cpu")
    for given, taking, message in (
        (strict, ours, "plan: made in one pass, for a deterministic backend; this one is not deterministic"),
        (ours, strict, "plan: made for a backend that is not deterministic; this one is deterministic"),
    ):
        with pytest.raises(ValueError, match=message):
            taking.extend(1, *stand.new(), given.plan(batch))
    static = AttentionBackend(
        model=ours.model,
        pool=ours.pool,
        table=ours.table,
        engine=engine,
        policy="static",
        max_requests=4,
        multiprocessors=132,
    )
    with pytest.raises(ValueError, match="plan: cut by policy 'static.*', this deterministic backend's is 'tile.*'"):
        strict.verify(1, *stand.new(), static.plan(stand.batch))


@pytest.mark.parametrize("call", ["extend", "verify"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sinks": [1.0] * 4}, "sinks: expected None"),
        ({"aux": [1]}, "aux: expected None"),
        ({"q": torch.tensor(1.0)}, "q: expected"),
        ({"q": [1.0]}, "q: expected"),
    ],
)
def test_what_is_no_such_tensor_is_named(call: str, changes: dict[str, Any], message: str) -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(mask="chain", new=(9, 5, 1, 0)), engine, device)
    given: dict[str, Any] = dict(zip("qkv", stand.new(), strict=True)) | changes
    plan = stand.backend.plan(stand.batch)
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(stand.backend, call)(1, given.pop("q"), given.pop("k"), given.pop("v"), plan, **given)


@engines
def test_no_token_at_all_though_there_might_have_been(engine: str, device: str) -> None:
    stand = Stand(TOY.but(prefix=(5, 9), new=(0, 0)), engine, device)
    prefix, none = (
        DeviceLens(device=torch.tensor(lens, dtype=torch.int32, device=device), bound_each=20, bound_total=total)
        for lens, total in (((5, 9), 40), ((0, 0), 0))
    )
    depth = torch.zeros(0, dtype=torch.int32, device=device)
    batch = VerifyBatch(rows=torch.tensor(stand.rows), prefix=prefix, drafts=none, depth=depth, mask=CAUSAL)
    for attend in (stand.backend.extend, stand.backend.verify):
        assert attend(1, *stand.new(), stand.backend.plan(batch)).shape == (0, 4, 32)


@engines
@pytest.mark.parametrize("call", ["extend", "verify"])
def test_what_is_read_back_keeps_the_range_of_its_pool(engine: str, device: str, call: str) -> None:
    """bfloat16 values that float16, the queries' type, cannot hold."""
    case = TOY.but(prefix=(0,), new=(2,), mask="chain", read_back=True, dtype=torch.float16, kv_dtype=torch.bfloat16)
    stand = Stand(case, engine, device)
    slots = stand.backend.table.slots_of(stand.rows[0]).long()
    far = torch.tensor([131072.0, -131072.0], device=device).view(2, 1, 1).expand(2, 2, 32)
    stand.backend.pool.write(1, slots, torch.zeros(2, 2, 32, device=device), far.contiguous())
    out = torch.empty(2, 4, 32, device=device)
    getattr(stand.backend, call)(1, stand.new()[0], None, None, stand.backend.plan(stand.batch), out=out)
    assert bool((out[0] == 131072.0).all()) and bool((out[1] == 0).all())
