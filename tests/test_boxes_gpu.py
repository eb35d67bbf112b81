"""Whole tiles in boxes, compiled for Hopper: against the oracle, against the gather, in a graph, far into a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import graphs
from attnlab.backend import AttentionBackend
from attnlab.batch import ExtendBatch
from attnlab.eager import oracle
from attnlab.kernels import extend_hopper
from attnlab.kernels.boxes import NO_BOXES
from attnlab.kernels.target import Target
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.plans import Plan
from attnlab.spec import AttentionSpec, ModelSpec
from tests import test_cross
from tests.extend_cases import Case, Stand, noted_boxes
from tests.tolerances import LSE, OUTPUT

pytestmark = pytest.mark.gpu
boxes = noted_boxes

BF16, FP16 = torch.bfloat16, torch.float16
BASE = Case(
    id="",
    why="",
    heads=4,
    kv_heads=2,
    qk_dim=128,
    v_dim=128,
    dtype=BF16,
    kv_dtype=BF16,
    page_size=64,
    policy="tile",
    prefix=(200, 64, 0, 130, 300),
    new=(150, 65, 200, 7, 129),
)
SHAPES: dict[str, dict[str, Any]] = {
    **{f"{qk}-{v}": {"qk_dim": qk, "v_dim": v} for qk, v in ((64, 64), (128, 128), (256, 256), (128, 64), (64, 128))},
    "32-64": {"qk_dim": 32, "v_dim": 64},
    "128-fp16": {"dtype": FP16, "kv_dtype": FP16},
    "128-mqa": {"kv_heads": 1},
    "128-pages-of-128": {"page_size": 128},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "scales": {"k_scale": 0.5, "v_scale": 0.25},
    "both ways": {"causal": False},
}
GATHERED: dict[str, dict[str, Any]] = {
    "pages-of-16": {"page_size": 16},
    "gaps": {"layout": "pages"},
    "unified": {"pool": "unified"},
    "192-128": {"qk_dim": 192},
    "80": {"qk_dim": 80, "v_dim": 80},
    "window": {"window": 100, "sinks": True},
    "window in one pass": {"window": 100, "one_pass": True},
    "chunk": {"chunk": 128},
    "cap": {"softcap": 5.0},
    "temperature": {"temperature_len": 32},
}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not Target.of(torch.device("cuda")).is_hopper:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("one_pass", [False, True], ids=["two lists", "one pass"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_agree_with_the_oracle(shape: str, features: str, one_pass: bool, boxes: list[tuple[bool, bool]]) -> None:
    case = BASE.but(id=f"boxes {shape} {features}", one_pass=one_pass, **SHAPES[shape]).but(**FEATURES[features])
    Stand(case, "triton", "cuda").check()
    assert boxes == [(True, not one_pass)]


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered_agrees_with_the_oracle(name: str, boxes: list[tuple[bool, bool]]) -> None:
    Stand(BASE.but(id=f"gathered {name}", **GATHERED[name]), "triton", "cuda").check()
    assert boxes == [(False, name in ("pages-of-16", "gaps", "unified"))]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shared_prefix_agrees_with_the_oracle(shape: str, boxes: list[tuple[bool, bool]]) -> None:
    case = BASE.but(id=f"shared {shape}", prefix=(300, 200), new=(100, 129), **SHAPES[shape])
    stand = Stand(case, "triton", "cuda")
    stand.share(128)
    stand.check()
    assert boxes == [(True, True)]


def test_an_encoders_keys_come_in_boxes(boxes: list[tuple[bool, bool]]) -> None:
    case = test_cross.TOY.but(id="boxes", page_size=64, qk_dim=128, v_dim=128, dtype=BF16, kv_dtype=BF16)
    test_cross.Stand(case, "triton", "cuda").check("extend")
    assert boxes == [(True, False)]


@pytest.mark.parametrize("one_pass", [False, True], ids=["two lists", "one pass"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_and_gathers_give_the_same_bits(
    shape: str, features: str, one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B40: how keys lie, and how a call's tensors are aligned, must not change what is computed."""
    case = BASE.but(id=f"bits {shape} {features}", one_pass=one_pass, **SHAPES[shape]).but(**FEATURES[features])
    stand = Stand(case, "triton", "cuda")
    want = stand.run()
    monkeypatch.setattr(extend_hopper, "boxes_of_call", lambda *given, block_n: (*NO_BOXES, *NO_BOXES))
    for mine, other in zip(stand.run(), want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("begins", [0, 1, 8])
def test_new_keys_may_begin_anywhere(begins: int, boxes: list[tuple[bool, bool]]) -> None:
    """Boxes begin at 16 bytes, which 8 numbers are and 1 is not; keys are often columns of a wider projection."""
    stand = Stand(BASE.but(id=f"begins at {begins}"), "triton", "cuda")
    given = stand.new

    def moved(x: Tensor) -> Tensor:
        wide = torch.full((x.shape[0], 2 * x[0].numel() + 16), float("nan"), dtype=x.dtype, device=x.device)
        return wide[:, begins : begins + x[0].numel()].copy_(x.flatten(1)).unflatten(1, x.shape[1:])

    def new(parts: Any = None) -> tuple[Tensor, ...]:
        q, k, v = given(parts)
        return q, moved(k), moved(v)

    stand.new = new  # type: ignore[method-assign,assignment]
    stand.check()
    assert boxes == [(True, begins % 8 == 0)]


def test_the_far_end_of_a_pool_beyond_2_31_elements(boxes: list[tuple[bool, bool]]) -> None:
    """B24, B25: a box is found by its row, so that no offset in elements can wrap."""
    spec = AttentionSpec(heads=8, kv_heads=2, qk_dim=128, v_dim=128, scale=128**-0.5)
    tokens, first = 4_096, 3_900
    pages = 2**31 // (64 * spec.kv_heads * spec.qk_dim) + 100
    model = ModelSpec.uniform(spec, layers=1, context_len=tokens, page_size=64, kv_dtype=BF16, mla=False)
    pool = MHAPool(model, num_slots=pages * 64, device="cuda")
    view = pool.view(0)
    view.k.fill_(float("nan"))
    view.v.fill_(float("nan"))
    table = RequestTable(max_requests=1, max_context=tokens, num_slots=pages * 64, device="cuda", page_size=64)
    own = torch.arange(pages - tokens // 64, pages).flip(0)
    slots = (own[:, None] * 64 + torch.arange(64)).flatten()
    row = table.admit()
    table.append(row, slots)
    there = slots.to("cuda")
    k, v = (torch.randn(tokens, spec.kv_heads, spec.qk_dim, device="cuda", dtype=BF16) for _ in range(2))
    pool.write(0, there, k, v)
    backend = AttentionBackend(
        model=model, pool=pool, table=table, engine="triton", policy="tile", max_requests=1, multiprocessors=132
    )
    q = torch.randn(tokens - first, spec.heads, spec.qk_dim, device="cuda", dtype=BF16)
    lse = torch.full((tokens - first, spec.heads), float("nan"), device="cuda")
    batch = ExtendBatch.of(rows=[row], prefix=[first], new=[tokens - first], device="cuda")
    out = backend.extend(0, q, None, None, backend.plan(batch), lse=lse)
    assert boxes == [(True, True)]
    for position in (first, tokens - 1):
        want, want_lse = oracle.attention(
            q[position - first], k[: position + 1], v[: position + 1], scale=spec.scale, q_pos=position
        )
        torch.testing.assert_close(out[position - first].double(), want, **OUTPUT[BF16])
        torch.testing.assert_close(lse[position - first].double(), want_lse, **LSE)


def test_a_graph_replays_its_boxes(boxes: list[tuple[bool, bool]]) -> None:
    stand = Stand(BASE.but(id="graph"), "triton", "cuda")
    q, k, v = stand.new()
    plan, out = stand.backend.plan(stand.batch), torch.empty_like(q)
    stand.backend.extend(1, q, k, v, plan, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stand.backend.extend(1, q, k, v, plan, out=out)
    for x in (k, v):
        x.copy_(x.flip(0))
    graph.replay()
    replayed = out.clone()
    stand.backend.extend(1, q, k, v, plan, out=out)
    assert torch.equal(replayed, out) and boxes == [(True, True)] * 3


def test_one_graph_serves_other_lengths_with_its_boxes(boxes: list[tuple[bool, bool]]) -> None:
    """What is captured once must hold for every step: nothing cached, borders of tiles, rows of padding."""
    stand = Stand(BASE.but(id="graph of several", prefix=(200,) * 4, new=(150,) * 4), "triton", "cuda")

    def step(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        lse = torch.full(q.shape[:2], float("nan"), device=q.device)
        return stand.backend.extend(1, q, k, v, plan, lse=lse), lse

    inputs = dict(zip("qkv", stand.new(), strict=True))
    graph = graphs.capture(stand.backend, step, graphs.ExtendShape(requests=4, new=150), inputs=inputs)
    captured = len(boxes)
    for prefix, new in (
        ((0, 0, 0, 0), (150, 63, 64, 65)),
        ((63, 64, 65, 130), (129, 65, 130, 7)),
        ((64, 0, 200, 0), (70, 0, 66, 0)),
    ):
        stand.restart(stand.case.but(id=f"replayed {prefix}", prefix=prefix, new=new))
        out, lse = graph.run(stand.batch, **dict(zip("qkv", stand.new(), strict=True)))
        want, want_lse = stand.expected()
        torch.testing.assert_close(out.double(), want, **OUTPUT[BF16])
        torch.testing.assert_close(lse.double(), want_lse, **LSE)
    assert set(boxes) == {(True, True)} and len(boxes) == captured, "nothing was launched but by the graph"
