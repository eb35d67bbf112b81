"""Bad input to a decode call: an error that names it, before anything runs, with nothing stored."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

import attnlab
from attnlab.batch import DecodeBatch, DeviceLens
from attnlab.memory.pool import KVView
from attnlab.plan.schedule import Schedule
from attnlab.spec import AttentionSpec, ScoreMod
from tests.cases import CASES, ENGINES, Stand

TOY = CASES[0]
engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


def arguments(stand: Stand) -> dict[str, object]:
    """A call of layer 1 that works."""
    k = torch.randn(4, 2, 32, device=stand.device)
    return {"layer": 1, "q": stand.q, "k": k, "v": k.clone(), "plan": stand.plan()}


BAD_CALLS: dict[str, tuple[Callable[[Stand, dict[str, object]], None], str]] = {
    "q of another head count": (
        lambda s, a: a.update(q=s.q[:, :7]),
        r"q: expected \[4, 8, 32\] .* got \[4, 7, 32\] float32 on .*layer 1 8 heads",
    ),
    "q of another batch": (lambda s, a: a.update(q=s.q[:3]), r"q: expected \[4, 8, 32\].*the plan has 4 requests"),
    "q of integers": (
        lambda s, a: a.update(q=s.q.int()),
        r"q: expected .* float32 or float16 or bfloat16.*got .*int32",
    ),
    "q that is no tensor": (lambda s, a: a.update(q=[1, 2]), r"q: expected .*got list"),
    "q whose last axis is strided": (
        lambda s, a: a.update(q=torch.randn(4, 8, 64, device=s.device)[..., ::2]),
        r"q: the last axis must be contiguous",
    ),
    "k without tokens": (lambda s, a: a.update(k=a["k"][:1]), r"k: expected \[4, 2, 32\].* got \[1, 2, 32\]"),
    "k of another dimension": (lambda s, a: a.update(k=a["k"][..., :16]), r"k: expected \[4, 2, 32\]"),
    "k missing": (lambda s, a: a.update(k=None), r"k: expected .*pass save=False"),
    "v missing": (lambda s, a: a.update(v=None), r"v: expected values beside the keys, got None"),
    "v of another head count": (lambda s, a: a.update(v=a["v"][:, :1]), r"v: expected \[4, 2, 32\]"),
    "k though nothing is saved": (lambda s, a: a.update(save=False), r"k, v: with save=False nothing is stored"),
    "a layer that is not there": (
        lambda s, a: a.update(layer=7),
        r"layer: model 'uniform' has attention in layers 0, 1, got 7",
    ),
    "sinks that the layer does not have": (
        lambda s, a: a.update(sinks=torch.zeros(8, device=s.device)),
        r"sinks: expected None, as the layer has no sinks, got \[8\] float32",
    ),
    "aux without a modifier": (
        lambda s, a: a.update(aux=s.q),
        r"aux: expected None, as no modifier of the layer reads it",
    ),
    "out of another shape": (lambda s, a: a.update(out=s.q[..., :8]), r"out: expected \[4, 8, 32\]"),
    "lse of another dtype": (
        lambda s, a: a.update(lse=torch.zeros(4, 8, dtype=torch.float64, device=s.device)),
        r"lse: expected \[4, 8\] float32 .*got \[4, 8\] float64",
    ),
    "out over the pool": (
        lambda s, a: a.update(out=s.pool.view(1).k.view(-1)[:1024].view(4, 8, 32)),
        "out: shares its memory with the pool, which calls write",
    ),
    "out and lse in one": (
        lambda s, a: a.update(
            out=(both := torch.zeros(2048, device=s.device))[:1024].view(4, 8, 32), lse=both[1024:1056].view(4, 8)
        ),
        r"lse: shares its memory with out",
    ),
    "an lse that is one number": (
        lambda s, a: a.update(lse=torch.zeros(1, 1, device=s.device).expand(4, 8)),
        r"lse: is expanded",
    ),
    "a plan after slots were freed": (
        lambda s, a: s.pool.allocator.release("hole"),
        r"plan: made for another state of the pool",
    ),
}


@engines
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_decode_call_stores_nothing(engine: str, device: str, name: str) -> None:
    spoil, message = BAD_CALLS[name]
    stand = Stand(TOY, engine, device)
    call = arguments(stand)
    stand.backend.decode(**call)  # it does work
    spoil(stand, call)
    before = [x.clone() for x in (stand.pool.view(1).k, stand.pool.view(1).v)]
    with pytest.raises((ValueError, TypeError), match=re.compile(message, re.DOTALL)):
        stand.backend.decode(**call)
    for old, new in zip(before, (stand.pool.view(1).k, stand.pool.view(1).v), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))


def test_a_plan_changed_into_something_kernels_cannot_read_is_refused() -> None:
    stand = Stand(TOY, "eager", ENGINES[0][1])
    schedule = stand.plan().lanes[0].schedule
    turned = schedule.segments.t().contiguous().t()
    with pytest.raises(ValueError, match="segments: expected a contiguous tensor"):
        dataclasses.replace(schedule, segments=turned)
    plan = stand.plan()
    fewer = Schedule.one_range_a_program(plan.lanes[0].splits, kv_heads=1)
    changed = dataclasses.replace(plan, lanes=(dataclasses.replace(plan.lanes[0], schedule=fewer),))
    with pytest.raises(ValueError, match="plan: deals ranges to 1 KV heads, layer 1 has 2"):
        stand.run(changed)


def test_missing_sinks_and_aux_are_named() -> None:
    for change, message in (
        ({"sinks": True}, r"sinks: expected one logit per head, \[8\], got"),
        ({"mod": "relative_bias"}, r"aux: expected \[4, 8, width\], which the layer's modifier reads"),
    ):
        stand = Stand(TOY.but(**change), "eager", ENGINES[0][1])
        with pytest.raises(ValueError, match=message):
            stand.backend.decode(1, stand.q, None, None, stand.plan(), save=False)


def test_mla_refuses_values_of_their_own() -> None:
    case = TOY.but(mla=True, kv_heads=1, qk_dim=48, v_dim=32)
    stand = Stand(case, "eager", ENGINES[0][1])
    k = torch.randn(4, 1, 48, device=stand.device)
    with pytest.raises(ValueError, match="v: under MLA the values are the first columns of k"):
        stand.backend.decode(1, stand.q, k, torch.randn(4, 1, 32, device=stand.device), stand.plan())


def test_a_batch_larger_than_the_backend_was_built_for() -> None:
    stand = Stand(TOY, "eager", ENGINES[0][1])
    rows = torch.zeros(400, dtype=torch.int64, device=stand.device)
    lens = torch.full((400,), 200, dtype=torch.int32, device=stand.device)
    with pytest.raises(ValueError, match="larger max_requests"):
        stand.backend.plan(DecodeBatch(rows=rows, seq=DeviceLens(device=lens, bound_each=200, bound_total=80_000)))


def test_an_unknown_engine_or_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="engine: expected one of eager, triton, got 'cuda'"):
        attnlab.workbench("SmolLM2-135M", lens=[4], policy="seed", engine="cuda")
    with pytest.raises(ValueError, match="policy: expected one of .*seed.*static.*tile.*, got 'best'"):
        attnlab.workbench("SmolLM2-135M", lens=[4], policy="best", engine="eager")
    with pytest.raises(ValueError, match="model: got 'GPT-5'; did you mean .*attnlab.ModelSpec.names"):
        attnlab.workbench("GPT-5", lens=[4], policy="seed", engine="eager")


def test_a_request_longer_than_the_recorded_text_is_told_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"request 1 has 5,000 tokens, the recorded text 2,048; scale the lengths"):
        attnlab.workbench("SmolLM2-135M", lens=[4, 5000], policy="seed", engine="eager")


def test_a_public_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'workbnech'; its names are .*workbench"):
        attnlab.workbnech  # noqa: B018


def test_values_taken_from_the_pool_itself_are_stored_whole() -> None:
    stand = Stand(TOY, "eager", ENGINES[0][1])
    view, slots = stand.pool.view(1), stand.table.slots_of(stand.rows[2])[:4].long()
    source = view.v[slots[:2]].clone()
    stand.pool.write(1, slots[2:], view.k[slots[:2]], view.v[int(slots[0]) : int(slots[0]) + 1].expand(2, 2, 32))
    assert torch.equal(view.v[slots[2]], source[0]) and torch.equal(view.v[slots[3]], source[0])


def test_numbers_that_kernels_cannot_take_are_refused_early() -> None:
    good = {"heads": 2, "kv_heads": 1, "qk_dim": 8, "v_dim": 8}
    for scale in (torch.tensor(0.5), True, 1e39, float("nan")):
        with pytest.raises((TypeError, ValueError), match="scale: expected a"):
            AttentionSpec(**good, scale=scale)
    with pytest.raises(TypeError, match=r"softcap: expected a Python number, got .*pass float\(softcap\)"):
        AttentionSpec(**good, scale=0.5, softcap=torch.tensor(5.0))
    rows = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="k_scale: expected a positive number"):
        KVView(k=rows, v=rows, k_scale=1e-45)
    with pytest.raises(TypeError, match="triton: score modifier 'half' needs both halves, got None"):
        ScoreMod(name="half", torch=lambda *a: a[0], triton=None, needs_aux=False)
