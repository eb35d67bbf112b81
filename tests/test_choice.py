"""What `backend_for` chooses, and that it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlab
from attnlab.assets import load_json
from attnlab.choice import PUBLISHED, measured_policy
from attnlab.kernels.target import Target
from attnlab.plan.policy import split_policies
from attnlab.spec import ModelSpec

MODEL = ModelSpec.load("SmolLM2-135M").only((0,))
ROOM = {"num_slots": 64, "max_requests": 2, "max_context": 32}


def chosen(**given: object) -> tuple[attnlab.AttentionBackend, str]:
    said: list[str] = []
    backend = attnlab.backend_for(MODEL, "cpu", **ROOM, **given, say=said.append)  # type: ignore[arg-type]
    (line,) = said
    return backend, line


def test_where_nothing_was_measured_the_published_rule_is_taken_and_said() -> None:
    backend, line = chosen()
    assert (backend.engine.name, backend.policy.name) == ("eager", PUBLISHED)
    assert line == "engine eager: there is no GPU here. policy seed: no other was measured for engine eager on a CPU"


def test_what_is_given_is_taken() -> None:
    backend, line = chosen(policy="balanced", engine="eager")
    assert backend.policy.name == "balanced" and line == "engine eager: given. policy balanced: given"


def test_a_deterministic_backend_gets_a_policy_that_it_takes() -> None:
    backend, line = chosen(deterministic=True)
    assert backend.policy.batch_invariant and "looks at each request alone" in line


def test_on_hopper_the_measured_policy_is_taken_with_its_figures() -> None:
    name, words = measured_policy("triton", Target(kind="cuda", arch=90))
    assert name == "balanced"
    assert "faster than seed (0.10 to 0.95 of its time over 10 batches; one H200" in words


@pytest.mark.parametrize(
    ("engine", "target", "where"),
    [
        ("triton", Target(kind="cuda", arch=80), "cuda 80"),
        ("triton", Target(kind="hip"), "hip"),
        ("eager", Target(kind="cuda", arch=90), "cuda 90"),
        ("triton", None, "a CPU"),
    ],
)
def test_elsewhere_nothing_is_claimed(engine: str, target: Target | None, where: str) -> None:
    name, words = measured_policy(engine, target)
    assert name == PUBLISHED and words == f"no other was measured for engine {engine} on {where}"


def test_every_row_names_policies_that_exist_and_is_faster() -> None:
    for row in load_json("measured_policies.json", "rows"):
        assert {row["policy"], row["against"]} <= set(split_policies.names())
        assert row["shapes"] and all(each["took"] < each["against_took"] for each in row["shapes"])


def test_the_backend_serves_a_step() -> None:
    backend, _ = chosen()
    row = backend.table.admit()
    slots = backend.pool.allocator.allocate(row, 4)
    backend.table.append(row, slots)
    plan = backend.plan(attnlab.ExtendBatch.of(rows=[row], prefix=[0], new=[4], device="cpu"))
    q, k, v = (torch.randn(4, heads, 64).half() for heads in (9, 3, 3))
    assert backend.extend(0, q, k, v, plan).isfinite().all()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "engine": ({"engine": "eagre"}, ValueError, "engine: expected one of eager, triton or None, got 'eagre'"),
    "an engine's class": ({"engine": 5}, ValueError, "engine: expected one of eager, triton or None, got 5"),
    "policy": ({"policy": 5}, TypeError, "policy"),
    "device": ({"device": "meta"}, ValueError, "device: expected a CPU or a GPU, got 'meta'"),
    "model": ({"model": "SmolLM2-135M"}, TypeError, r"model: expected a ModelSpec.*ModelSpec.load\(name\)"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_named(what: str) -> None:
    given, error, words = BAD[what]
    with pytest.raises(error, match=words):
        attnlab.backend_for(**{"model": MODEL, "device": "cpu", **ROOM, **given})
