"""Groups of more than 16 query heads over even shares: a program packs up to 64 of them, and answers are the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attnlab.eager import oracle
from attnlab.inspect.record import record
from attnlab.mods.registry import score_mods
from attnlab.plan.policies.balanced import Balanced
from attnlab.plan.policy import SharePolicy, SplitContext
from attnlab.plan.tiles import HEAD_TILE, LARGE_TILE, head_tiles, shares_tile
from attnlab.spec import AttentionSpec
from tests.cases import ENGINES, FP8, Case, Stand
from tests.test_balanced import Few
from tests.tolerances import LSE, OUTPUT

HALF = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
FEW = Few(count=3)
TWENTY = Case(
    id="20",
    why="one tile, most of it empty; lone answers, ranges that are merged, rows without a key",
    heads=40,
    kv_heads=2,
    qk_dim=64,
    v_dim=64,
    lens=(200, 5, 0, 96, 1),
    policy=FEW,
    **HALF,
)
FALCON = TWENTY.but(id="71", why="two tiles of 64, the second nearly empty (Falcon-7B)", heads=71, kv_heads=1)
CASES = [
    TWENTY,
    TWENTY.but(id="17", why="one head more than a tile of 16", heads=17, kv_heads=1),
    TWENTY.but(id="29", why="as Falcon-180B has them", heads=58),
    TWENTY.but(id="32", why="half a tile", heads=32, kv_heads=1, qk_dim=128, v_dim=128),
    TWENTY.but(id="48", why="three quarters of a tile (StarCoder)", heads=48, kv_heads=1, qk_dim=128, v_dim=128),
    TWENTY.but(id="64", why="a full tile", heads=128),
    FALCON,
]
FEATURES = [
    {"id": "balanced", "why": "a program has one tile of keys at most", "policy": Balanced()},
    {
        "id": "uncut",
        "why": "no list is cut: nothing is merged",
        "policy": Balanced(),
        "lens": (128, 0, 1),
        "sinks": True,
    },
    {"id": "tile-borders", "why": "lengths at the tile's border", "lens": (63, 64, 65, 127, 128, 129)},
    {"id": "sinks", "why": "a sink joins lone answers where they are made, others at the merge", "sinks": True},
    {"id": "window", "why": "lists that begin late, positions that matter", "window": 40, "temperature_len": 32},
    {"id": "cap", "why": "cap and scales in their order", "softcap": 5.0, "k_scale": 0.5, "v_scale": 0.25},
    {"id": "alibi", "why": "a modifier that asks for the head", "mod": "alibi"},
    {"id": "bias", "why": "a modifier with its aux tensor", "mod": "relative_bias"},
    {"id": "pages", "why": "slots of pages", "page_size": 4, "layout": "pages"},
    {"id": "unified", "why": "virtual slots", "page_size": 4, "pool": "unified"},
    {"id": "fp16", "why": "the other half precision", "dtype": torch.float16, "kv_dtype": torch.float16},
    {"id": "fp8", "why": "columns in pairs", "kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.2},
    {"id": "fp8-128", "why": "pairs of wide heads", "kv_dtype": FP8, "qk_dim": 128, "v_dim": 128, "sinks": True},
    {"id": "dim-80", "why": "64 + 16 columns", "qk_dim": 80, "v_dim": 80},
    {"id": "dim-13", "why": "columns padded to 16", "qk_dim": 13, "v_dim": 13},
    {"id": "fp32-queries", "why": "they leave room for 16 heads alone", "dtype": torch.float32},
]
CASES += [
    case.but(**{**feature, "id": f"{case.id}-{feature['id']}"}) for case in (TWENTY, FALCON) for feature in FEATURES
]
engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


def tile_of(case: Case) -> int:
    few = case.mod is not None or case.kv_dtype == FP8 or case.v_dim <= 32
    return HEAD_TILE if few else LARGE_TILE


@engines
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_agrees_with_the_oracle(case: Case, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    if stand.backend.engine.large_tiles:
        assert stand.plan().lane(1).schedule.head_tile == tile_of(case)
    stand.check()


@engines
@pytest.mark.parametrize("case", [TWENTY, FALCON], ids=lambda case: case.id)
def test_partials_are_the_oracles_for_each_range_alone_or_not(case: Case, engine: str, device: str) -> None:
    stand = Stand(case.but(sinks=True), engine, device)
    plan = stand.plan()
    stand.backend.workspace.fill(float("nan"))
    kept = stand.run(plan, keeps=True)
    partials, lane = stand.backend.partials(1, plan), plan.lane(1)
    owners, splits = lane.schedule.merge_indptr.tolist(), lane.splits.to_host()
    group, kv_heads = stand.spec.group, stand.spec.kv_heads
    assert 1 in splits.effective and max(splits.effective) > 1
    for r, ranges in enumerate(splits.ranges):
        for h in range(kv_heads):
            at = r * kv_heads + h
            for p, (start, end) in zip(range(owners[at], owners[at + 1]), ranges, strict=True):
                k, v = (stand.stored(x[r][start:end], 1.0) for x in (stand.k, stand.v))
                out, lse = oracle.attention(stand.q[r], k, v, scale=stand.spec.scale)
                mine = slice(group * h, group * (h + 1))
                torch.testing.assert_close(partials.lse[p].double(), lse[mine], **LSE)
                torch.testing.assert_close(partials.output[p].double(), out[mine], **OUTPUT[torch.bfloat16])
    stand.backend.workspace.fill(float("nan"))
    for a, b in zip(kept, stand.run(plan), strict=True):
        assert torch.equal(a, b)
    if engine == "triton":  # eager leaves all states
        alone = [first for first, last in pairwise(owners) if last - first == 1]
        left = stand.backend.workspace.partials(count=owners[-1], group=group, v_dim=stand.spec.v_dim)
        assert left.acc[alone].isnan().all()


@pytest.mark.parametrize(
    ("case", "programs"),
    [(TWENTY, (132, 1)), (FALCON, (132, 2)), (TWENTY.but(dtype=torch.float32), (132, 2))],
    ids=["20", "71", "20-fp32-queries"],
)
def test_times_have_a_row_for_every_program(
    case: Case, programs: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(case.but(policy=Balanced(programs=1)), "eager", "cpu")
    monkeypatch.setattr(stand.backend.engine, "check_times", lambda: None)
    with record(stand.backend, times=True) as trace:
        stand.run()
    shares = 132 // (programs[1] if case is FALCON else 1)
    assert trace.calls[0].times.shape == (shares, programs[1], 3)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [FEW, Balanced()], ids=["few", "balanced"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [32, 71])
def test_long_lists_are_read_right(heads: int, dim: int, kv_dtype: torch.dtype, policy: SharePolicy) -> None:
    """The pipelined loop, many times around."""
    case = TWENTY.but(
        heads=heads, kv_heads=1, qk_dim=dim, v_dim=dim, kv_dtype=kv_dtype, lens=(700, 5000, 1, 1025), policy=policy
    )
    Stand(case, *ENGINES[-1]).check()


# Planning


def spec(**changes: object) -> AttentionSpec:
    return replace(AttentionSpec(heads=32, kv_heads=1, qk_dim=128, v_dim=128, scale=0.1), **changes)


def test_tiles_are_large_where_groups_are() -> None:
    half = {"mla": False, "kv_dtype": torch.bfloat16}
    tiles = {heads: shares_tile([spec(heads=heads)], **half) for heads in (16, 17, 71)}
    assert tiles == {16: HEAD_TILE, 17: LARGE_TILE, 71: LARGE_TILE}
    assert shares_tile([spec(heads=71), spec()], mla=False, kv_dtype=torch.float16) == LARGE_TILE
    assert shares_tile([spec(heads=71), spec(heads=8)], **half) == HEAD_TILE
    assert shares_tile([spec(qk_dim=192)], **half) == HEAD_TILE  # nobody has timed wider heads
    assert shares_tile([spec(v_dim=33)], **half) == LARGE_TILE
    assert shares_tile([spec(v_dim=32)], **half) == HEAD_TILE  # values narrower than a tile of keys
    assert shares_tile([spec(mod=score_mods.get("alibi"))], **half) == HEAD_TILE
    assert shares_tile([spec()], mla=False, kv_dtype=FP8) == HEAD_TILE
    assert shares_tile([spec()], mla=False, kv_dtype=torch.float32) == HEAD_TILE
    assert [head_tiles(71, tile) for tile in (HEAD_TILE, LARGE_TILE)] == [5, 2]


def test_a_multiprocessor_has_one_program_or_two_where_heads_are_narrow() -> None:
    ctx = SplitContext(
        heads=32, kv_heads=1, v_dim=128, mla=False, context_len=1 << 20, multiprocessors=132, head_tile=LARGE_TILE
    )
    assert Balanced().shares(ctx) == 132
    assert Balanced().shares(replace(ctx, v_dim=64)) == 264
    assert Balanced().shares(replace(ctx, v_dim=64, requests=1)) == 132
    assert Balanced().shares(replace(ctx, heads=71)) == 66


def test_the_twin_follows_the_same_schedule() -> None:
    for case in (TWENTY, FALCON):
        one, other = (Stand(case, engine, device).plan().lane(1).schedule for engine, device in ENGINES)
        if one.head_tile == other.head_tile:  # on other GPUs the twin plans as for a Hopper one all the same
            assert one.head_tile == tile_of(case)
            assert torch.equal(one.segments, other.segments)
