"""Split-KV verify on every engine against the fp64 oracle, over the cases of extend; and what must not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from attnlab._boot import INTERPRETED
from attnlab.batch import DecodeBatch, DeviceLens, ExtendBatch, VerifyBatch
from attnlab.mask import CAUSAL, CustomMask
from tests.cases import ENGINES
from tests.extend_cases import CASES, Case, Stand
from tests.strategies import extend_cases
from tests.tolerances import output

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])

CHAIN = Case(id="chain", why="", mask="chain", prefix=(8, 200, 0, 70), new=(4, 9, 3, 0), policy="static")
FEW = 9
"""Drafts of a request, at most, where a case of extend has more new tokens."""


def drafted(case: Case, mask: str) -> Case:
    """The case as one of drafts: same layer, same cached keys, few new tokens."""
    new = tuple(min(n, FEW) for n in case.new)
    return case.but(id=f"{case.id}, {mask}", mask=mask, new=new, policy="static")


VERIFIED = [
    *(case.but(policy="static") for case in CASES if case.verifies),
    *(drafted(case, mask) for case in CASES if case.mask is None and not case.one_pass for mask in ("chain", "tree")),
    CHAIN.but(id="nobody-cached", why="no cached key at all", prefix=(0, 0), new=(5, 1)),
    CHAIN.but(id="many-drafts", why="more rows than any tile", prefix=(40, 0), new=(150, 7)),
    CHAIN.but(id="many-drafts-tree", why="and a mask", prefix=(40, 0), new=(90, 7), mask="tree", window=30),
    CHAIN.but(id="group-20", why="rows of a draft in two tiles", heads=40, kv_heads=2),
]


@engines
@pytest.mark.parametrize("case", VERIFIED, ids=lambda case: case.id)
def test_verify_agrees_with_the_oracle(case: Case, engine: str, device: str) -> None:
    Stand(case, engine, device).check("verify")


@engines
@pytest.mark.parametrize("policy", ["seed", "tile"])
def test_any_policy_may_cut_the_cached_keys(engine: str, device: str, policy: str) -> None:
    Stand(CHAIN.but(prefix=(300, 5, 130), new=(3, 3, 3), policy=policy), engine, device).check("verify")


@engines
def test_drawn_drafts_agree_with_the_oracle(engine: str, device: str) -> None:
    few, all_of_them = settings().max_examples // 8, settings().max_examples

    @settings(max_examples=all_of_them if engine == "eager" else few)
    @given(case=extend_cases(small=INTERPRETED and engine == "triton"))
    def drawn(case: Case) -> None:
        mask = case.mask if case.verifies else ("tree", "chain")[case.placement % 2]
        policy = ("static", "seed", "tile")[case.placement % 3]
        Stand(case.but(mask=mask, policy=policy, one_pass=False), engine, device).check("verify")

    drawn()


@engines
@pytest.mark.parametrize("mask", ["chain", "tree"])
def test_a_request_has_the_same_bits_alone_and_among_others(engine: str, device: str, mask: str) -> None:
    """The deterministic backend: neither how many drafts others have nor how long they are may matter."""
    case = CHAIN.but(prefix=(300, 260, 0, 33), new=(4, 1, 18, 6), mask=mask, one_pass=True, policy="tile", sinks=True)
    among = Stand(case, engine, device)
    out, lse = among.run("verify")
    at = 0
    for r, (p, n) in enumerate(zip(case.prefix, case.new, strict=True)):
        alone = Stand(case.but(prefix=(p,), new=(n,)), engine, device, inputs=among.inputs.pick([r]))
        mine, its_lse = alone.run("verify")
        assert torch.equal(mine, out[at : at + n])
        assert torch.equal(its_lse, lse[at : at + n])
        at += n


@engines
def test_a_query_of_zeros_gives_the_mean_of_the_values(engine: str, device: str) -> None:
    """B21: uniform attention exposes a key that is counted twice, or a lane beyond a range's end."""
    stand = Stand(CHAIN.but(prefix=(257, 31), new=(5, 2)), engine, device)
    for q in stand.inputs.q:
        q.zero_()
    stand.check("verify")


@engines
@pytest.mark.parametrize("policy", ["static", "balanced"])
def test_a_draft_that_sees_nothing_gives_nothing(policy: str, engine: str, device: str) -> None:
    """kernels.md 9.6: no cached key and no draft in sight, beside others or alone: out 0, lse -inf, no NaN."""
    stand = Stand(CHAIN.but(prefix=(0, 40, 30), new=(3, 3, 2), policy=policy), engine, device)
    bits = [torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]]), torch.ones(3, 43), torch.zeros(2, 32)]
    bits[1][1] = 0
    mask = CustomMask(bits=CustomMask.of([x.bool() for x in bits]).bits.to(device))
    lse = torch.full((8, 4), float("nan"), device=device)
    out = stand.backend.verify(1, *stand.new(), stand.backend.plan(replace(stand.batch, mask=mask)), lse=lse)
    seen = torch.tensor([True, False, True, True, False, True, False, False], device=device)
    assert bool((out[~seen] == 0).all()) and bool((lse[~seen] == float("-inf")).all())
    assert bool(out[seen].isfinite().all()) and bool(lse[seen].isfinite().all())


@engines
def test_a_mask_of_drafts_alone_shows_every_cached_key(engine: str, device: str) -> None:
    stand = Stand(CHAIN.but(mask="tree", prefix=(8, 70, 0), new=(7, 3, 5)), engine, device)
    tree = stand.batch.mask
    assert tree.cached_visible
    noise = torch.rand(tree.bits.shape[0], device=device) < 0.5
    for r, (p, n) in enumerate(zip(stand.case.prefix, stand.case.new, strict=True)):
        at = sum(n * (p + n) for p, n in zip(stand.case.prefix[:r], stand.case.new[:r], strict=True))
        noise[at : at + n * (p + n)].view(n, p + n)[:, p:] = True
    mask = CustomMask(bits=tree.bits * noise, cached_visible=True)
    plan = stand.backend.plan(replace(stand.batch, mask=mask))
    assert torch.equal(stand.backend.verify(1, *stand.new(), plan), stand.run("verify")[0])


@engines
def test_lengths_that_only_the_device_knows(engine: str, device: str) -> None:
    """Rows beyond the live drafts, and scratch that no range owns, are left alone."""
    stand = Stand(CHAIN.but(prefix=(70, 9), new=(4, 3)), engine, device)
    q, k, v = stand.new()
    prefix, drafts = (
        DeviceLens(
            device=torch.tensor(lens, dtype=torch.int32, device=device), bound_each=max(lens) + 2, bound_total=total
        )
        for lens, total in ((stand.case.prefix, 90), (stand.case.new, 10))
    )
    depth = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 0, 0], dtype=torch.int32, device=device)
    batch = VerifyBatch(rows=torch.tensor(stand.rows), prefix=prefix, drafts=drafts, depth=depth, mask=CAUSAL)
    padded = [torch.cat([x, x.new_full((3, *x.shape[1:]), float("nan"))]) for x in (q, k, v)]
    out = padded[0].new_full((10, 4, 32), 7.0)
    stand.backend.verify(1, *padded, stand.backend.plan(batch), out=out)
    want, _ = stand.run("verify")
    torch.testing.assert_close(out[:7], want, **output(torch.float32))
    assert bool((out[7:] == 7.0).all())


@engines
def test_forward_takes_the_path_that_the_plan_is_made_for(engine: str, device: str) -> None:
    stand = Stand(CHAIN, engine, device)
    q, k, v = stand.new()
    plan = stand.backend.plan(stand.batch)
    assert torch.equal(stand.backend.forward(1, q, k, v, plan), stand.backend.verify(1, q, k, v, plan))
    for one_pass in (False, True):
        stand = Stand(CHAIN.but(mask=None, one_pass=one_pass, policy="tile"), engine, device)
        extend, (q, k, v) = stand.backend.plan(stand.batch), stand.new()
        assert torch.equal(stand.backend.forward(1, q, k, v, extend), stand.backend.extend(1, q, k, v, extend))
    decode = stand.backend.plan(DecodeBatch.of(rows=stand.rows[:2], lens=[12, 209], device=stand.device))
    one = (q[:2], k[:2], v[:2])
    assert torch.equal(stand.backend.forward(1, *one, decode), stand.backend.decode(1, *one, decode))
    with pytest.raises(TypeError, match="plan: expected a DecodePlan, ExtendPlan or VerifyPlan, got None"):
        stand.backend.forward(1, *one, None)  # type: ignore[arg-type]


@engines
@pytest.mark.parametrize("pool", ["plain", "unified"])
def test_what_is_verified_is_what_later_steps_read(engine: str, device: str, pool: str) -> None:
    stand = Stand(CHAIN.but(k_scale=0.5, v_scale=0.25, pool=pool, page_size=4), engine, device)
    stand.run("verify")
    view = stand.backend.pool.view(1)
    plan = stand.backend.plan(stand.batch)
    _, k, v = stand.new()
    heads = torch.arange(2, device=view.k.device)
    slots = plan.lane(1).write_slots[:, None]
    torch.testing.assert_close(view.rows(view.k, slots, heads), k / 0.5)
    torch.testing.assert_close(view.rows(view.v, slots, heads), v / 0.25)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a row too few": ({"q": lambda q: q[1:]}, ValueError, r"q: expected \[16, 4, 32\].*the plan has 16 query tokens"),
    "another dtype": ({"k": lambda k: k.half()}, TypeError, "k, v: expected the dtype of q"),
    "keys alone": ({"v": lambda v: None}, ValueError, "v: expected values beside the keys, got None"),
    "values alone": ({"k": lambda k: None}, ValueError, "k: expected keys beside the values, got None"),
    "sinks": ({"sinks": torch.zeros(4)}, ValueError, "sinks: expected None, as the layer has no sinks"),
    "lse": ({"lse": torch.zeros(16, 3)}, ValueError, r"lse: expected \[16, 4\] float32"),
    "out": ({"out": torch.zeros(16, 4, 31)}, ValueError, r"out: expected \[16, 4, 32\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_and_nothing_is_stored(what: str) -> None:
    engine, device = ENGINES[0]
    stand = Stand(CHAIN, engine, device)
    changes, error, message = BAD[what]
    given: dict[str, Any] = dict(zip("qkv", stand.new(), strict=True))
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change.to(device)
    before = stand.backend.pool.view(1).k.clone()
    plan = stand.backend.plan(stand.batch)
    with pytest.raises(error, match=message):
        stand.backend.verify(1, given.pop("q"), given.pop("k"), given.pop("v"), plan, **given)
    assert torch.equal(stand.backend.pool.view(1).k.nan_to_num(7), before.nan_to_num(7))


def test_verify_takes_the_plan_of_drafts() -> None:
    engine, device = ENGINES[0]
    stand = Stand(CHAIN, engine, device)
    extend = stand.backend.plan(
        ExtendBatch.of(rows=stand.rows, prefix=stand.case.prefix, new=stand.case.new, device=device)
    )
    for plan in (extend, None):
        with pytest.raises(TypeError, match="plan: expected a VerifyPlan, got (ExtendPlan|NoneType)"):
            stand.backend.verify(1, *stand.new(), plan)  # type: ignore[arg-type]


def test_more_drafts_than_the_scratch_holds_are_refused_before_anything_is_stored() -> None:
    engine, device = ENGINES[0]
    stand = Stand(CHAIN.but(prefix=(400, 400), new=(2, 2)), engine, device)
    many = VerifyBatch.chain(rows=stand.rows, prefix=[300, 300], drafts=[17, 17], device=device)
    plan, given = stand.backend.plan(many), [torch.zeros(34, heads, 32, device=device) for heads in (4, 2, 2)]
    before = stand.backend.pool.view(1).k.clone()
    with pytest.raises(ValueError, match="plan: a request of up to 17 drafts, the scratch is for 16; .*max_drafts"):
        stand.backend.verify(1, *given, plan)
    assert torch.equal(stand.backend.pool.view(1).k.nan_to_num(7), before.nan_to_num(7))
    assert stand.backend.extend(1, *given, plan).shape == (34, 4, 32)  # which needs none
