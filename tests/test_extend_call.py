"""An extend or verify call is looked at shortly, and closely where that finds anything: both refuse the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlab.mask import CAUSAL
from attnlab.memory.pool import KVView
from attnlab.mods.registry import score_mods
from attnlab.plan import extend_call
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.plans import Queries
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec
from tests.cases import lane_of

SPEC = AttentionSpec(heads=4, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25, has_sinks=True)
META = torch.device("meta")
STATES = ("acc", "max", "sum")
TOKENS = 3
Given = dict[str, Any]
Kind = type[ExtendCall] | type[VerifyCall]
EXTEND = {"one_pass": False}


def right(kind: Kind) -> Given:
    lane = lane_of(torch.arange(1, 40), 2)
    count, rows = lane.schedule.partials, 2 * TOKENS
    partials = Partials(acc=torch.zeros(count, rows, 16), max=torch.zeros(count, rows), sum=torch.zeros(count, rows))
    positions = torch.arange(39, 39 + TOKENS, dtype=torch.int32)
    queries = Queries(
        indptr=torch.tensor([0, TOKENS], dtype=torch.int32),
        positions=positions,
        ordered=True,
        most=TOKENS,
        mask=CAUSAL,
        mask_indptr=torch.tensor([0, TOKENS * 42]),
    )
    given = {
        "layer": 0,
        "spec": SPEC,
        "view": KVView(k=torch.zeros(64, 2, 16), v=torch.zeros(64, 2, 16)),
        "lane": lane,
        "queries": queries,
        "q": torch.zeros(TOKENS, 4, 16),
        "k": torch.zeros(TOKENS, 2, 16),
        "v": torch.zeros(TOKENS, 2, 16),
        "out": torch.zeros(TOKENS, 4, 16),
        "lse": torch.zeros(TOKENS, 4),
        "sinks": torch.zeros(4),
    }
    return given | (EXTEND if kind is ExtendCall else {"partials": partials})


def looked_at(kind: Kind, given: Given) -> bool:
    """What a short look says: whether it leaves nothing to be checked."""
    closely: list[object] = []

    def check(*args: object, **options: object) -> None:
        closely.append(args)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_check", "check_partials", "require"):
            patch.setattr(extend_call, name, check if name != "require" else lambda *args: None)
        kind(**given)
    return not closely


def with_partials(a: Given, **changed: Any) -> Given:
    return {"partials": replace(a["partials"], **changed)}


def fewer_rows(a: Given) -> Given:
    return {name: getattr(a["partials"], name)[:, :4].contiguous() for name in STATES}


WRONG: dict[str, Callable[[Given], Given]] = {
    "q of another shape": lambda a: {"q": torch.zeros(2, 4, 16)},
    "q of integers": lambda a: {"q": torch.zeros(3, 4, 16, dtype=torch.int32)},
    "q elsewhere": lambda a: {"q": torch.zeros(3, 4, 16, device=META)},
    "q by columns": lambda a: {"q": torch.zeros(3, 16, 4).mT},
    "q no tensor": lambda a: {"q": [[0.0]]},
    "k of another shape": lambda a: {"k": torch.zeros(3, 4, 16)},
    "k of integers": lambda a: {"k": torch.zeros(3, 2, 16, dtype=torch.int32)},
    "k elsewhere": lambda a: {"k": torch.zeros(3, 2, 16, device=META)},
    "k by columns": lambda a: {"k": torch.zeros(3, 16, 2).mT},
    "k no tensor": lambda a: {"k": [[0.0]]},
    "v of another shape": lambda a: {"v": torch.zeros(2, 2, 16)},
    "v elsewhere": lambda a: {"v": torch.zeros(3, 2, 16, device=META)},
    "v by columns": lambda a: {"v": torch.zeros(3, 16, 2).mT},
    "keys without values": lambda a: {"v": None},
    "values without keys": lambda a: {"k": None, "v": torch.zeros(2, 2, 16)},
    "k and v of two dtypes": lambda a: {"k": torch.zeros(3, 2, 16).half()},
    "new tokens of another dtype": lambda a: {name: torch.zeros(3, 2, 16).half() for name in "kv"},
    "out of another shape": lambda a: {"out": torch.zeros(3, 4, 8)},
    "out of fp64": lambda a: {"out": torch.zeros(3, 4, 16, dtype=torch.float64)},
    "out elsewhere": lambda a: {"out": torch.zeros(3, 4, 16, device=META)},
    "out expanded": lambda a: {"out": torch.zeros(3, 1, 16).expand(3, 4, 16)},
    "out in q": lambda a: {"out": a["q"]},
    "out in the new keys": lambda a: {"k": (k := torch.zeros(6, 2, 16))[:3], "out": k.view(3, 4, 16)},
    "out in the new values": lambda a: {"v": (v := torch.zeros(6, 2, 16))[3:], "out": v.view(3, 4, 16)},
    "out in the cached keys": lambda a: {"out": a["view"].k[:6].view(3, 4, 16)},
    "out in the cached values": lambda a: {"out": a["view"].v[:6].view(3, 4, 16)},
    "out in the sinks": lambda a: {"out": (out := torch.zeros(3, 4, 16)), "sinks": out.view(-1)[:4]},
    "lse of another shape": lambda a: {"lse": torch.zeros(12)},
    "lse of bf16": lambda a: {"lse": torch.zeros(3, 4, dtype=torch.bfloat16)},
    "lse elsewhere": lambda a: {"lse": torch.zeros(3, 4, device=META)},
    "lse expanded": lambda a: {"lse": torch.zeros(3, 1).expand(3, 4)},
    "lse in out": lambda a: {"lse": a["out"].view(-1)[:12].view(3, 4)},
    "lse in q": lambda a: {"lse": a["q"].view(-1)[:12].view(3, 4)},
    "lse in the new keys": lambda a: {"lse": a["k"].view(-1)[:12].view(3, 4)},
    "lse in the cached values": lambda a: {"lse": a["view"].v.view(-1)[:12].view(3, 4)},
    "lse in the sinks": lambda a: {"lse": (lse := torch.zeros(3, 4)), "sinks": lse[0]},
    "no sinks": lambda a: {"sinks": None},
    "sinks where there are none": lambda a: {"spec": replace(SPEC, has_sinks=False)},
    "sinks of another shape": lambda a: {"sinks": torch.zeros(5)},
    "sinks of integers": lambda a: {"sinks": torch.zeros(4, dtype=torch.int32)},
    "sinks elsewhere": lambda a: {"sinks": torch.zeros(4, device=META)},
    "sinks with gaps": lambda a: {"sinks": torch.zeros(8)[::2]},
    "sinks no tensor": lambda a: {"sinks": [0.0] * 4},
    "aux that nobody reads": lambda a: {"aux": torch.zeros(3, 4, 3)},
    "no aux": lambda a: {"spec": replace(SPEC, mod=score_mods.get("relative_bias"))},
    "another sight": lambda a: {"spec": replace(SPEC, window=4)},
    "more KV heads": lambda a: {"spec": replace(SPEC, kv_heads=4)},
    "another head dim": lambda a: {"spec": replace(SPEC, qk_dim=8)},
    "a pool of other heads": lambda a: {"view": KVView(k=torch.zeros(64, 4, 16), v=torch.zeros(64, 4, 16))},
    "a plan elsewhere": lambda a: {"view": KVView(**dict.fromkeys("kv", torch.zeros(64, 2, 16, device=META)))},
}  # fmt: skip
OF_VERIFY: dict[str, Callable[[Given], Given]] = {
    "too little scratch": lambda a: with_partials(a, **{x: getattr(a["partials"], x)[1:] for x in STATES}),
    "scratch of fewer drafts": lambda a: with_partials(a, **fewer_rows(a)),
    "scratch of bf16": lambda a: with_partials(a, acc=a["partials"].acc.bfloat16()),
    "scratch with gaps": lambda a: with_partials(a, acc=torch.zeros(*a["partials"].acc.shape[:2], 32)[..., :16]),
    "scratch elsewhere": lambda a: with_partials(a, max=a["partials"].max.to(META)),
    "a schedule of other heads": lambda a: {"lane": lane_of(torch.arange(1, 40), 1)},
}  # fmt: skip
OF_EXTEND: dict[str, Callable[[Given], Given]] = {
    "no new tokens": lambda a: {"k": None, "v": None},
    "new keys alone, and none": lambda a: {"k": None, "v": None, "parts": "new", "sinks": None},
    "wrong sinks of a part": lambda a: {"sinks": torch.zeros(5), "parts": "cached"},
    "sinks of a part that has none": lambda a: {"spec": replace(SPEC, has_sinks=False), "parts": "new"},
    "one pass, and k of another shape": lambda a: {"one_pass": True, "k": torch.zeros(3, 4, 16)},
    "cached keys alone, and v elsewhere": lambda a: {"parts": "cached", "v": torch.zeros(3, 2, 16, device=META)},
}  # fmt: skip
CASES = [
    *((kind, name, change) for kind in (ExtendCall, VerifyCall) for name, change in WRONG.items()),
    *((VerifyCall, name, change) for name, change in OF_VERIFY.items()),
    *((ExtendCall, name, change) for name, change in OF_EXTEND.items()),
]
RIGHT: dict[str, tuple[Kind, Given]] = {
    "extend": (ExtendCall, {}),
    "one pass": (ExtendCall, {"one_pass": True, "k": None, "v": None}),
    "cached keys": (ExtendCall, {"parts": "cached", "k": None, "v": None, "sinks": None}),
    "new keys": (ExtendCall, {"parts": "new", "sinks": None}),
    "verify": (VerifyCall, {}),
    "verify without an LSE": (VerifyCall, {"lse": None}),
    "verify without sinks": (VerifyCall, {"sinks": None, "spec": replace(SPEC, has_sinks=False)}),
    "queries with gaps": (VerifyCall, {"q": torch.zeros(TOKENS, 4, 32)[..., :16]}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_call_is_found_right_by_a_short_look(name: str) -> None:
    kind, changed = RIGHT[name]
    given = right(kind) | changed
    assert looked_at(kind, given)
    kind(**given)


@pytest.mark.parametrize(("kind", "name", "change"), CASES, ids=[f"{kind.__name__}, {name}" for kind, name, _ in CASES])
def test_what_is_refused_is_never_found_right_by_a_short_look(
    kind: Kind, name: str, change: Callable[[Given], Given]
) -> None:
    given = right(kind)
    given |= change(given)
    assert not looked_at(kind, given)
    with pytest.raises((ValueError, TypeError)):
        kind(**given)


def test_odd_strides_and_what_was_read_back_are_right_on_closer_inspection() -> None:
    for changed in ({"out": torch.zeros(TOKENS, 4, 32)[..., :16]}, {"q": torch.zeros(TOKENS, 4, 16).half()}):
        given = right(VerifyCall) | changed
        assert not looked_at(VerifyCall, given)
        VerifyCall(**given)
