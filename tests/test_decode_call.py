"""A decode call is looked at shortly, and closely where that finds anything: both refuse the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlab.memory.pool import KVView
from attnlab.mods.registry import score_mods
from attnlab.plan.call import DecodeCall
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec
from tests.cases import lane_of

SPEC = AttentionSpec(heads=4, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25, has_sinks=True)
META = torch.device("meta")
STATES = ("acc", "max", "sum")


def right() -> dict[str, Any]:
    k = torch.zeros(64, 2, 16)
    lane = lane_of(torch.arange(1, 40), 2)
    count = lane.schedule.partials
    return {
        "layer": 0,
        "spec": SPEC,
        "view": KVView(k=k, v=torch.zeros(64, 2, 16)),
        "lane": lane,
        "partials": Partials(acc=torch.zeros(count, 2, 16), max=torch.zeros(count, 2), sum=torch.zeros(count, 2)),
        "q": torch.zeros(1, 4, 16),
        "out": torch.zeros(1, 4, 16),
        "lse": torch.zeros(1, 4),
        "sinks": torch.zeros(4),
    }


def looked_at(given: dict[str, Any]) -> bool:
    """What a short look says, of calls that could not be made too."""
    call = object.__new__(DecodeCall)
    for name, value in ({"aux": None, "times": None} | given).items():
        object.__setattr__(call, name, value)
    return call._looks_right()


def with_partials(a: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"partials": replace(a["partials"], **changed)}


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "q of another shape": lambda a: {"q": torch.zeros(2, 4, 16)},
    "q of integers": lambda a: {"q": torch.zeros(1, 4, 16, dtype=torch.int32)},
    "q elsewhere": lambda a: {"q": torch.zeros(1, 4, 16, device=META)},
    "q by columns": lambda a: {"q": torch.zeros(1, 16, 4).mT},
    "q no tensor": lambda a: {"q": [[0.0]]},
    "out of another shape": lambda a: {"out": torch.zeros(1, 4, 8)},
    "out of fp64": lambda a: {"out": torch.zeros(1, 4, 16, dtype=torch.float64)},
    "out elsewhere": lambda a: {"out": torch.zeros(1, 4, 16, device=META)},
    "out expanded": lambda a: {"out": torch.zeros(1, 1, 16).expand(1, 4, 16)},
    "out in the keys": lambda a: {"out": a["view"].k[:2].view(1, 4, 16)},
    "out in the values": lambda a: {"out": a["view"].v[:2].view(1, 4, 16)},
    "out beside the keys": lambda a: {"view": replace(a["view"], k=torch.zeros(66, 2, 16)[2:]), "out": None},
    "out in the sinks": lambda a: {"out": torch.zeros(64).view(1, 4, 16), "sinks": None},
    "lse of another shape": lambda a: {"lse": torch.zeros(4)},
    "lse of bf16": lambda a: {"lse": torch.zeros(1, 4, dtype=torch.bfloat16)},
    "lse elsewhere": lambda a: {"lse": torch.zeros(1, 4, device=META)},
    "lse expanded": lambda a: {"lse": torch.zeros(1, 1).expand(1, 4)},
    "lse in out": lambda a: {"lse": a["out"].view(-1)[:4].view(1, 4)},
    "lse in the keys": lambda a: {"lse": a["view"].k.view(-1)[:4].view(1, 4)},
    "lse in the sinks": lambda a: {"lse": a["sinks"].view(1, 4)},
    "no sinks": lambda a: {"sinks": None},
    "sinks where there are none": lambda a: {"spec": replace(SPEC, has_sinks=False)},
    "sinks of another shape": lambda a: {"sinks": torch.zeros(5)},
    "sinks of integers": lambda a: {"sinks": torch.zeros(4, dtype=torch.int32)},
    "sinks elsewhere": lambda a: {"sinks": torch.zeros(4, device=META)},
    "sinks with gaps": lambda a: {"sinks": torch.zeros(8)[::2]},
    "sinks no tensor": lambda a: {"sinks": [0.0] * 4},
    "aux that nobody reads": lambda a: {"aux": torch.zeros(1, 4, 3)},
    "no aux": lambda a: {"spec": replace(SPEC, mod=score_mods.get("relative_bias"))},
    "another sight": lambda a: {"spec": replace(SPEC, window=4)},
    "more KV heads": lambda a: {"spec": replace(SPEC, kv_heads=4)},
    "another head dim": lambda a: {"spec": replace(SPEC, qk_dim=8)},
    "a plan elsewhere": lambda a: {"view": KVView(**dict.fromkeys("kv", torch.zeros(64, 2, 16, device=META)))},
    "too little scratch": lambda a: with_partials(a, **{x: getattr(a["partials"], x)[1:] for x in STATES}),
    "scratch of bf16": lambda a: with_partials(a, acc=a["partials"].acc.bfloat16()),
    "scratch with gaps": lambda a: with_partials(a, acc=torch.zeros(*a["partials"].acc.shape[:2], 32)[..., :16]),
    "scratch elsewhere": lambda a: with_partials(a, max=a["partials"].max.to(META)),
    "scratch of other maxima": lambda a: with_partials(a, max=a["partials"].max[:, :1].contiguous()),
    "sums with an axis more": lambda a: with_partials(a, sum=a["partials"].sum[..., None]),
}  # fmt: skip


def changed(name: str) -> dict[str, Any]:
    given = right()
    given |= WRONG[name](given)
    if name == "out beside the keys":  # in their storage, before the first of them
        k = given["view"].k
        given["out"] = k.new_zeros(0).set_(k.untyped_storage(), 0, (1, 4, 16))
    if name == "out in the sinks":
        given["sinks"] = given["out"].view(-1)[:4]
    return given


def test_a_right_call_is_found_right_by_a_short_look() -> None:
    given = right()
    assert looked_at(given)
    for name in ("lse", "sinks"):
        spec = replace(SPEC, has_sinks=name != "sinks")
        assert looked_at(given | {name: None, "spec": spec})


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_refused_is_never_found_right_by_a_short_look(wrong: str) -> None:
    given = changed(wrong)
    assert not looked_at(given)
    with pytest.raises((ValueError, TypeError)):
        DecodeCall(**given)


def test_odd_strides_are_right_on_closer_inspection() -> None:
    given = right() | {"out": torch.zeros(1, 4, 32)[..., :16]}
    assert not looked_at(given)
    assert DecodeCall(**given).out.stride() == (128, 32, 1)
