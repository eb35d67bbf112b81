"""Drafts on every engine against the fp64 oracle, step by step and branch by branch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnlab.plan.policy import HostPolicy
from tests.cases import ENGINES
from tests.draft_cases import CASES, Case, Stand
from tests.strategies import DEVICE
from tests.syncs import no_waiting

TOY = CASES[0]
engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


@engines
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_step_agrees_with_the_oracle(case: Case, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    plan = stand.backend.plan(stand.batch)
    layers = range(2)
    plan.validate(
        num_slots={stand.pool.translation(i).target: stand.pool.view(i).num_slots for i in layers},
    )
    stand.check(plan)


@engines
def test_lengths_that_only_the_device_knows_give_the_same_steps(engine: str, device: str) -> None:
    stand = Stand(TOY.but(page_size=4), engine, device)
    stand.check(stand.backend.plan(stand.unknown()))


@engines
def test_a_policy_in_plain_python_cuts_the_cached_tokens_and_its_last_range_grows(engine: str, device: str) -> None:
    asked = []

    def halves(lens, ctx):  # type: ignore[no-untyped-def]
        asked.append((list(lens), ctx.rows_per_seq))
        return [[(0, n // 2), (n // 2, n)] if n > 1 else [(0, n)] * n for n in lens]

    stand = Stand(TOY.but(policy=HostPolicy(name="halves", rule=halves, max_ranges=2)), engine, device)
    plan = stand.backend.plan(stand.batch)
    stand.check(plan)
    assert asked == [([5] * 3 + [70] * 3 + [1] * 3, 3)]
    assert plan.steps[1].lane(1).splits.to_host().ranges[2:4] == (((0, 2), (2, 7)), ((0, 35), (35, 72)))


@engines
def test_the_output_does_not_depend_on_what_a_sibling_drafted(engine: str, device: str) -> None:
    stand = Stand(TOY.but(page_size=4), engine, device)
    plan = stand.backend.plan(stand.batch)
    q = torch.randn(9, 4, 16, device=stand.device)
    k, v = (torch.randn(9, 2, 16, device=stand.device) for _ in range(2))
    others = torch.arange(9, device=stand.device) % 3 != 1
    outs = []
    for sibling in (1.0, float("nan")):
        for step in plan.steps:
            mine_k, mine_v = (torch.where(others[:, None, None], x * sibling, x) for x in (k, v))
            out = stand.backend.decode(1, q, mine_k, mine_v, step)
        outs.append(out[~others])
    assert torch.equal(*outs) and outs[0].isfinite().all()


@pytest.mark.skipif(DEVICE != "cpu", reason="torch watches there")
def test_no_step_waits_for_the_device() -> None:
    stand = Stand(TOY.but(page_size=4, window=40, pool="window"), "triton", "cpu")
    plan = stand.backend.plan(stand.unknown())
    q, kv = torch.randn(9, 4, 16), torch.randn(9, 2, 16)
    with no_waiting():
        for step in plan.steps:
            stand.backend.decode(1, q, kv, kv, step)


@engines
def test_no_request_drafts_nothing(engine: str, device: str) -> None:
    stand = Stand(TOY, engine, device)
    plan = stand.backend.plan(dataclasses.replace(stand.batch, **_nobody(stand)))
    plan.validate(num_slots=stand.pool.num_slots)
    none = torch.zeros(0, 4, 16, device=stand.device)
    for step in plan.steps:
        assert stand.backend.decode(1, none, none[:, :2], none[:, :2], step).shape == (0, 4, 16)


def _nobody(stand: Stand) -> dict[str, object]:
    seq = dataclasses.replace(stand.batch.seq, values=(), device=stand.batch.seq.device[:0])
    return {"rows": stand.batch.rows[:0], "seq": seq}
