"""The extend kernel for Hopper, interpreted: the cases of extend that it can serve, and properties of drawn ones.

Compiled it runs wherever `test_several_gpu.py` extends, as the engine chooses it there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab.inspect import resources
from attnlab.inspect.resources.shapes import SHAPES
from attnlab.kernels import extend_hopper, launch
from attnlab.kernels.extend_hopper import HopperConfig, can_serve, has_tiles
from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView
from attnlab.plan.extend_call import ExtendCall
from tests import test_cross
from tests.cases import FP8
from tests.extend_cases import CASES, Case, Stand, noted_boxes
from tests.strategies import extend_cases

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are chosen for what they were built for")
boxes = noted_boxes

MORE = [
    Case(id="whole", why="tiles that every query sees whole, cached and new", prefix=(70, 64, 0), new=(66, 96, 97)),
    Case(id="one-pass", why="tiles seen whole in a list of both", prefix=(70, 64, 0), new=(66, 96, 97), one_pass=True),
    Case(id="window-whole", why="whole tiles between two edges", window=100, prefix=(300, 5), new=(70, 130)),
    Case(id="window-narrow", why="no tile is seen whole", window=20, prefix=(300, 5), new=(70, 130)),
    Case(id="window-one-pass", why="a list that begins behind hidden keys", window=100, prefix=(300, 5), new=(70, 130)),
    Case(id="chunks", why="a tile of queries in two chunks", chunk=50, prefix=(120, 5), new=(70, 130)),
    Case(id="dim-80-whole", why="columns of the rest in whole tiles", qk_dim=80, v_dim=80, prefix=(70,), new=(66,)),
    Case(id="pages-whole", why="whole tiles of pages", page_size=4, pool="unified", prefix=(70,), new=(66,)),
    Case(id="cap-whole", why="caps without a mask", softcap=5.0, temperature_len=32, prefix=(70,), new=(66,)),
    Case(id="sinks-whole", why="sinks of natural base", sinks=True, prefix=(70,), new=(66,)),
    Case(id="both-ways", why="new tokens see all new ones", causal=False, prefix=(70,), new=(66,)),
]

PAGES = Case(id="boxes", why="tiles fetched whole", prefix=(200, 64, 130, 0), new=(70, 130, 9, 66), page_size=64)
BOXES: list[tuple[Case, bool, bool]] = [
    (PAGES, True, True),
    (PAGES.but(id="boxes-of-half-a-page", page_size=128), True, True),
    (PAGES.but(id="boxes-bf16", dtype=torch.bfloat16, kv_dtype=torch.bfloat16, page_size=32), True, True),
    (PAGES.but(id="boxes-fp8", dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.05, v_scale=0.2), True, True),
    (PAGES.but(id="boxes-wide-values", qk_dim=16, v_dim=64), True, True),
    (PAGES.but(id="boxes-mqa", kv_heads=1, heads=2), True, True),
    (PAGES.but(id="boxes-sinks", sinks=True), True, True),
    (PAGES.but(id="boxes-scales", k_scale=0.5, v_scale=0.25), True, True),
    (PAGES.but(id="boxes-both-ways", causal=False), True, True),
    (PAGES.but(id="boxes-256", qk_dim=256, v_dim=256, prefix=(70,), new=(66,)), True, True),
    (PAGES.but(id="boxes-nothing-cached", prefix=(0, 0), new=(70, 130)), False, True),
    (PAGES.but(id="boxes-nothing-cached-one-pass", prefix=(0, 0), new=(70, 130), one_pass=True), True, False),
    (PAGES.but(id="boxes-one-pass", one_pass=True), True, False),
    (PAGES.but(id="boxes-read-back", read_back=True), True, True),
    (PAGES.but(id="boxes-of-new-keys", page_size=16), False, True),
    (PAGES.but(id="pages-with-gaps", layout="pages"), False, True),
    (PAGES.but(id="pages-of-several-layers", pool="unified"), False, True),
    (PAGES.but(id="no-boxes-window", window=100), False, False),
    (PAGES.but(id="no-boxes-window-one-pass", window=100, one_pass=True), False, False),
    (PAGES.but(id="no-boxes-chunk", chunk=128), False, False),
    (PAGES.but(id="no-boxes-cap", softcap=5.0), False, False),
    (PAGES.but(id="no-boxes-temperature", temperature_len=32), False, False),
    (PAGES.but(id="no-boxes-80", qk_dim=80, v_dim=80), False, False),
    (PAGES.but(id="no-boxes-192", qk_dim=192, v_dim=128, prefix=(70,), new=(66,)), False, False),
]
"""Whether cached keys are read in boxes, and new ones."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[ExtendCall]:
    """Make the engine choose the kernel wherever it can serve; return the calls that it served."""
    served: list[ExtendCall] = []
    launch = extend_hopper.extend_hopper

    def noted(call: ExtendCall, *, target: Target) -> None:
        served.append(call)
        launch(call, target=target)

    monkeypatch.setattr(extend_hopper, "serves", lambda call, target: can_serve(call))
    monkeypatch.setattr(extend_hopper, "extend_hopper", noted)
    return served


def served_cases() -> list[Case]:
    both_ways = [case.id for case in CASES if not case.causal and (case.window or case.chunk)]
    return [case for case in CASES if not case.mask and not case.mod and not case.mla and case.id not in both_ways]


@pytest.mark.parametrize("case", [*served_cases(), *MORE], ids=lambda case: case.id)
def test_what_it_serves_agrees_with_the_oracle(case: Case, launches: list[ExtendCall]) -> None:
    if case.id in ("one-pass", "window-one-pass"):
        case = case.but(one_pass=True, policy="tile")
    Stand(case, "triton", "cpu").check()
    assert launches


@pytest.mark.parametrize(("case", "cached", "new"), BOXES, ids=lambda x: x.id if isinstance(x, Case) else "")
def test_boxes_agree_with_the_oracle(
    case: Case, cached: bool, new: bool, launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    Stand(case, "triton", "cpu").check()
    assert launches and boxes == [(cached, new)]


def test_boxes_of_a_shared_prefix_agree_with_the_oracle(
    launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    stand = Stand(PAGES.but(id="shared", prefix=(200, 150), new=(70, 66)), "triton", "cpu")
    stand.share(128)
    stand.check()
    assert launches and boxes == [(True, True)]


def test_boxes_of_an_encoders_keys_agree_with_the_oracle(
    launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    test_cross.Stand(test_cross.TOY.but(page_size=64), "triton", "cpu").check("extend")
    assert launches and boxes == [(True, False)]


@pytest.mark.parametrize("case", [PAGES, PAGES.but(one_pass=True)], ids=["cached and new", "one pass"])
def test_a_table_without_pages_is_gathered_with_the_same_bits(
    case: Case, launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    paged, plain = (Stand(case.but(paged_table=has_pages), "triton", "cpu") for has_pages in (True, False))
    for mine, other in zip(plain.run(), paged.run(), strict=True):
        assert torch.equal(mine, other)
    assert boxes == [(False, not case.one_pass), (True, not case.one_pass)]


def odd(x: Tensor, how: str) -> Tensor:
    """The same rows in memory that no box can be laid over."""
    tokens, heads, dim = x.shape
    match how:
        case "begins anywhere":
            memory = x.new_empty(x.numel() + 1)[1:].view(x.shape)
        case "rows begin anywhere":
            memory = x.new_empty(tokens, heads * dim + 1)[:, : heads * dim].unflatten(1, (heads, dim))
        case "heads apart":
            memory = x.new_empty(tokens, heads, dim + 8)[..., :dim]
        case "heads outermost":
            memory = x.new_empty(heads, tokens, dim).transpose(0, 1)
    return memory.copy_(x)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("how", ["begins anywhere", "rows begin anywhere", "heads apart", "heads outermost"])
def test_new_keys_that_lie_oddly_are_gathered_with_the_same_bits(
    how: str, which: str, launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    want = Stand(PAGES, "triton", "cpu").run()[0].clone()
    call = replace(launches[0], out=torch.empty_like(want), **{which: odd(getattr(launches[0], which), how)})
    extend_hopper.extend_hopper(call, target=Target.of(torch.device("cpu")))
    assert torch.equal(call.out, want) and boxes == [(True, True), (True, False)]


def test_pages_one_behind_the_other_are_read_in_boxes(
    launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    want = Stand(PAGES, "triton", "cpu").run()[0].clone()
    view = launches[0].view
    paged = replace(view, k=view.k.unflatten(0, (-1, 64)), v=view.v.unflatten(0, (-1, 64)))
    call = replace(launches[0], out=torch.empty_like(want), view=paged)
    extend_hopper.extend_hopper(call, target=Target.of(torch.device("cpu")))
    assert torch.equal(call.out, want) and boxes == [(True, True)] * 2


@pytest.mark.parametrize(("parts", "cached", "new"), [("cached", True, False), ("new", False, True)])
def test_a_part_has_boxes_of_its_own_keys_alone(
    parts: Any, cached: bool, new: bool, launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    Stand(PAGES, "triton", "cpu").run()
    extend_hopper.extend_hopper(replace(launches[0], parts=parts), target=Target.of(torch.device("cpu")))
    assert boxes[-1] == (cached, new)


def test_rows_of_another_tensor_between_are_no_hindrance(
    launches: list[ExtendCall], boxes: list[tuple[bool, bool]]
) -> None:
    """Keys and values as columns of one projection, as models compute them."""
    want = Stand(PAGES, "triton", "cpu").run()[0].clone()
    k, v = launches[0].k, launches[0].v
    assert k is not None and v is not None
    joined = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    k, v = (x.unflatten(1, k.shape[1:]) for x in joined.chunk(2, dim=1))
    call = replace(launches[0], out=torch.empty_like(want), k=k, v=v)
    extend_hopper.extend_hopper(call, target=Target.of(torch.device("cpu")))
    assert torch.equal(call.out, want) and boxes[-1] == (True, True)


@pytest.mark.parametrize("change", [{"mask": "random"}, {"mod": "alibi"}, {"window": 20, "causal": False}], ids=str)
def test_what_it_cannot_serve_is_left_to_the_other(change: dict[str, Any], launches: list[ExtendCall]) -> None:
    Stand(CASES[0].but(**change), "triton", "cpu").check()
    assert not launches


def test_a_scale_that_comes_last_in_no_fp32_is_left_to_the_other(launches: list[ExtendCall]) -> None:
    Stand(CASES[0], "triton", "cpu").run()
    (call,) = launches
    for scale in (0.0, -0.5, 1e-40, 3e38):
        spec = replace(call.spec, scale=scale)
        assert not can_serve(replace(call, spec=spec))


@settings(max_examples=max(1, settings().max_examples // 8))
@given(case=extend_cases(small=True))
def test_what_is_drawn_agrees_with_the_oracle(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend_hopper, "serves", lambda call, target: can_serve(call))
        Stand(case, "triton", "cpu").check()


@pytest.mark.parametrize("window", [None, 40])
def test_one_pass_gives_the_same_bits_however_a_prompt_is_cut(window: int | None, launches: list[ExtendCall]) -> None:
    """B40: a tile that one query sees in part is masked for its neighbours too, which must not change their bits."""
    case = Case(id="cut", why="", prefix=(0,), new=(200,), window=window, one_pass=True, sinks=True)
    whole = Stand(case, "triton", "cpu")
    want, want_lse = whole.run()
    for first, last in ((0, 70), (70, 133), (133, 200)):
        part = Stand(case.but(prefix=(first,), new=(last - first,)), "triton", "cpu")
        mine, uncut = part.inputs, whole.inputs
        mine.k[0], mine.v[0], mine.q[0] = uncut.k[0][:last], uncut.v[0][:last], uncut.q[0][first:last]
        part.inputs = replace(mine, sinks=uncut.sinks)
        part.cache(0, first)
        out, lse = part.run()
        assert torch.equal(out, want[first:last]) and torch.equal(lse, want_lse[first:last])


def test_tiles_are_those_that_tensor_cores_take() -> None:
    hopper = resources.TARGETS["sm_90"]
    for shape in SHAPES:
        if has_tiles(shape.spec(), shape.view(), shape.dtype):
            config = HopperConfig.choose(shape.spec(), hopper)
            assert config.block_n <= shape.v_dim and config.block_m % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_other_storage_is_left_to_the_other(dtype: torch.dtype) -> None:
    spec = resources.GQA.spec()
    x = torch.empty(2, 8, 128, dtype=dtype)
    assert not has_tiles(spec, KVView(k=x, v=x.clone()), torch.bfloat16)
    assert not has_tiles(spec, resources.GQA.view(), torch.float32)


def test_wide_offsets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, launches: list[ExtendCall]) -> None:
    case = next(case for case in MORE if case.id == "whole")
    narrow = Stand(case, "triton", "cpu").run()
    monkeypatch.setattr(launch, "NARROW_BELOW", 0)
    for mine, other in zip(Stand(case, "triton", "cpu").run(), narrow, strict=True):
        assert torch.equal(mine, other)
