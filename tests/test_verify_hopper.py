"""Verify by groups of warps on Hopper GPUs: what it serves, what it is compiled to, and there the oracle's answers.

Gluon has no interpreter: what is marked `gpu` runs on a Hopper GPU alone, where no other kernel may take the calls.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlab import _triton, graphs
from attnlab.backend import AttentionBackend
from attnlab.batch import VerifyBatch
from attnlab.eager import oracle
from attnlab.engines import EagerEngine
from attnlab.kernels import launch, verify, verify_shares, verify_shares_hopper
from attnlab.kernels.target import Target
from attnlab.kernels.verify_shares_hopper import KEYS, MOST_ROWS, is_for, serves
from attnlab.mask import CustomMask
from attnlab.memory.pool import FP8, KVView
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.requests import RequestTable
from attnlab.mods.registry import score_mods
from attnlab.plan.extend_call import VerifyCall
from attnlab.plan.plans import Plan
from attnlab.plan.policies.balanced import Balanced
from attnlab.spec import AttentionSpec, ModelSpec
from tests.extend_cases import Case, Stand
from tests.launches import SHARED
from tests.test_balanced import Few
from tests.tolerances import LSE, OUTPUT

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H200 = Target(kind="cuda", arch=90, multiprocessors=132)
BASE = Case(
    id="groups",
    why="lone answers and ranges that are merged, a request of which nothing is cached",
    heads=8,
    kv_heads=2,
    qk_dim=64,
    v_dim=64,
    dtype=BF16,
    kv_dtype=BF16,
    mask="chain",
    policy=Few(count=3),
    prefix=(8, 200, 0, 65),
    new=(4, 16, 3, 1),
)


# --- Which calls are served -------------------------------------------------------------------------------------


def call_of(case: Case, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> VerifyCall:
    """The call that a backend makes of a case, with other fields."""
    calls: list[VerifyCall] = []
    monkeypatch.setattr(EagerEngine, "verify", lambda self, call: calls.append(call))
    Stand(case, "eager", "cpu").run("verify")
    return replace(calls[0], **changed)


CALLS: dict[str, tuple[bool, dict[str, Any]]] = {
    "a chain": (True, {}),
    "a tree": (True, {"mask": "tree"}),
    "both ways": (True, {"causal": False}),
    "sinks": (True, {"sinks": True}),
    "fp16": (True, {"dtype": FP16, "kv_dtype": FP16}),
    "fp32": (False, {"dtype": FP32, "kv_dtype": FP32}),
    "queries of another half precision": (False, {"dtype": FP16}),
    "queries of fp32": (False, {"dtype": FP32}),
    "fp8 keys": (False, {"kv_dtype": FP8}),
    "128 columns": (True, {"qk_dim": 128, "v_dim": 128}),
    "32 columns": (False, {"qk_dim": 32, "v_dim": 32}),
    "80 columns": (False, {"qk_dim": 80, "v_dim": 80}),
    "256 columns": (False, {"qk_dim": 256, "v_dim": 256}),
    "fewer columns of values": (False, {"qk_dim": 128}),
    "latent rows": (False, {"kv_heads": 1, "qk_dim": 128, "v_dim": 64, "mla": True}),
    "latent rows that are all values": (False, {"kv_heads": 1, "mla": True}),
    "64 rows": (True, {"new": (16, 16, 16, 16)}),
    "more rows of one request": (False, {"new": (1, 17, 1, 1)}),
    "64 drafts of one head": (True, {"heads": 2, "new": (1, 64, 1, 1)}),
    "65 drafts of one head": (False, {"heads": 2, "new": (1, 65, 1, 1)}),
    "a group of 64": (True, {"heads": 128, "new": (1, 1, 1, 1)}),
    "a group of 65": (False, {"heads": 130, "new": (1, 1, 1, 1)}),
    "a window": (False, {"window": 40}),
    "a chunk": (False, {"chunk": 32}),
    "a cap": (False, {"softcap": 5.0}),
    "temperature": (False, {"temperature_len": 32}),
    "a modifier": (False, {"mod": "alibi"}),
    "scaled keys": (False, {"k_scale": 0.5}),
    "scaled values": (False, {"v_scale": 0.5}),
    "a scale of 0": (False, {"scale": 0.0}),
    "a negative scale": (False, {"scale": -0.1}),
    "pages of the table": (True, {"page_size": 4}),
    "pages of the pool": (True, {"page_size": 4, "layout": "pages"}),
    "pages of several layers": (True, {"page_size": 4, "pool": "unified"}),
    "drafts read back": (True, {"read_back": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_it_computes_is_served_on_hopper_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served, changed = CALLS[name]
    call = call_of(BASE.but(**changed), monkeypatch)
    assert serves(call, H200) == served
    others = [Target(kind="cuda", arch=80), Target(kind="cuda", arch=100), Target(kind="hip")]
    for target in (*others, Target(kind="interpreter")):
        assert not serves(call, target)


def askew(x: Tensor, by: int) -> Tensor:
    """The same numbers, so many elements behind an address that is a multiple of 16."""
    room = torch.zeros(x.numel() + by, dtype=x.dtype)
    return room[by:].view(x.shape).copy_(x)


def apart(x: Tensor, by: int) -> Tensor:
    """The same numbers, so many elements between two rows."""
    room = torch.zeros(*x.shape[:-1], x.shape[-1] + by, dtype=x.dtype)
    return room[..., : x.shape[-1]].copy_(x)


@pytest.mark.parametrize("name", ["q", "k", "v", "cached k", "cached v"])
@pytest.mark.parametrize(
    ("move", "by", "served"),
    [(askew, 8, True), (askew, 1, False), (askew, 4, False), (apart, 16, True), (apart, 8, False)],
)
def test_rows_are_copied_16_bytes_at_a_time(
    name: str, move: Callable[[Tensor, int], Tensor], by: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of whole steps, whatever the addresses allow: the compiler is told no more."""
    call = call_of(BASE, monkeypatch)
    field = name[-1]
    if "cached" in name:
        view = replace(call.view, **{field: move(getattr(call.view, field), by)})
        changed = replace(call, view=view)
    else:
        changed = replace(call, **{field: move(getattr(call, field), by)})
    assert serves(changed, H200) == served


def test_where_an_answer_goes_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(BASE, monkeypatch)
    for out in (askew(call.out, 1), apart(call.out, 8), call.out.float()):
        assert serves(replace(call, out=out), H200)


def test_an_encoders_keys_have_no_drafts_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not serves(call_of(BASE, monkeypatch, k=None, v=None), H200)


def test_masks_over_cached_keys_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(BASE.but(mask="tree"), monkeypatch)
    mask = replace(call.queries.mask, cached_visible=False)
    assert not serves(replace(call, queries=replace(call.queries, mask=mask)), H200)


FEATURES: list[dict[str, Any]] = [
    {"window": 40},
    {"chunk": 64},
    {"softcap": 30.0},
    {"temperature_len": 100},
    {"mod": score_mods.get("alibi")},
    {"scale": -0.1},
]


@given(
    dims=st.sampled_from([(64, 64), (128, 128), (64, 64), (128, 128), (96, 96), (64, 128), (256, 256)]),
    dtypes=st.sampled_from([(BF16, BF16), (FP16, FP16), (BF16, BF16), (FP16, BF16), (FP32, FP32), (BF16, FP8)]),
    group=st.integers(1, 70),
    drafts=st.one_of(st.integers(1, 4), st.integers(1, 70)),
    feature=st.sampled_from([*[None] * 6, *range(len(FEATURES))]),
    sinks=st.booleans(),
    scales=st.sampled_from([(1.0, 1.0)] * 4 + [(0.5, 1.0), (1.0, 0.5), (0.5, 0.5)]),
    page_size=st.sampled_from([1, 16]),
)
def test_drawn_layers_are_served_where_every_one_of_its_limits_holds(
    dims: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    group: int,
    drafts: int,
    feature: int | None,
    sinks: bool,
    scales: tuple[float, float],
    page_size: int,
) -> None:
    extra = {} if feature is None else FEATURES[feature]
    shape: dict[str, Any] = {"heads": 2 * group, "kv_heads": 2, "qk_dim": dims[0], "v_dim": dims[1]}
    spec = AttentionSpec(**{**shape, "scale": 0.1, "has_sinks": sinks, **extra})
    pages = (2,) if page_size == 1 else (2, page_size)
    k, v = (torch.empty(*pages, 2, n, dtype=dtypes[1], device="meta") for n in dims)
    view = KVView(k=k, v=v, k_scale=scales[0], v_scale=scales[1])
    plain = feature is None and scales == (1.0, 1.0)
    half = dtypes[0] == dtypes[1] != FP32
    wanted = plain and half and dims in ((64, 64), (128, 128)) and group * drafts <= 64
    assert is_for(spec, view, q_dtype=dtypes[0], rows=group * drafts) == wanted


def test_a_tile_of_keys_holds_all_drafts_that_a_tile_of_rows_can_ask_for() -> None:
    """They are attended to as one more tile; and what is copied by eight threads a row has whole lines."""
    assert min(KEYS.values()) >= MOST_ROWS
    assert all(columns % 64 == 0 and keys * columns * 2 == 16 * 1024 for columns, keys in KEYS.items())


# --- What it is compiled to -------------------------------------------------------------------------------------


FACTS = """
from attnlab.inspect import resources
for variant in resources.variants(resources.TARGETS["sm_90"]):
    if variant.name.startswith("verify shares" + resources.FOR_HOPPER):
        found = resources.compile_variant(variant, "sm_90")
        print(">>>", found.shared, found.spills, resources.serialized(variant), variant.name)
        print(resources.ptx(variant))
"""


@pytest.fixture(scope="module")
def texts(compiling: dict[str, str]) -> dict[str, str]:
    """PTX of every compiled variant, by shared memory, spills, whether ptxas serializes it, and name."""
    done = subprocess.run([sys.executable, "-c", FACTS], env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(part.split("\n", 1) for part in done.stdout.split(">>> ")[1:])


needs_triton = pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton")


@needs_triton
def test_the_ring_fits_a_multiprocessor_and_nothing_spills_or_waits_in_line(texts: dict[str, str]) -> None:
    assert {head.split(" ", 3)[3].split(": ")[1] for head in texts} >= {
        "gqa 4 x 128 (Llama-3)",
        "gqa 4 x 128, draft tree, sinks",
        "gqa 3 x 64 (SmolLM2)",
        "gqa 4 x 128, pages of 16",
    }
    for head in texts:
        shared, spills, serialized, _ = head.split(" ", 3)
        assert int(shared) <= SHARED, head
        assert (spills, serialized) == ("0", "False"), head


@needs_triton
def test_rows_come_16_bytes_a_thread_and_only_those_who_load_load_them(texts: dict[str, str]) -> None:
    """Where the compiler could not tell that addresses are multiples of 16 it would copy less, or not compile."""
    for head, text in texts.items():
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", text)
        dim = 64 if "x 64" in head else 128
        tile = KEYS[dim] * dim * 2 // (16 * 128)
        # Keys and values of cached rows, those of drafts, and queries.
        assert len(copies) == 4 * tile + 64 * dim * 2 // (16 * 128) and set(copies) == {"0x10"}, head


# --- On a GPU ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A note for every launch of the kernel. No other may take its calls."""
    if not Target.of(torch.device("cuda")).is_hopper:
        pytest.skip("needs a Hopper GPU")
    noted: list[object] = []
    launcher = verify_shares_hopper.VERIFY_SHARES_HOPPER
    launched = launcher.launch

    def noting(*given: Any, **asked: Any) -> Any:
        noted.append(given)
        return launched(*given, **asked)

    monkeypatch.setattr(launcher, "launch", noting)
    monkeypatch.setattr(verify_shares, "VERIFY_SHARES", None)
    monkeypatch.setattr(verify, "verify_split", None)
    return noted


def stand_of(case: Case) -> Stand:
    return Stand(case, "triton", "cuda")


def wide(case: Case, dim: int) -> Case:
    return case.but(id=f"{case.id}, {dim} columns", qk_dim=dim, v_dim=dim)


dims = pytest.mark.parametrize("dim", [64, 128])
ROWS = [
    *((group, drafts) for group in (1, 4, 8) for drafts in range(1, 17) if group * drafts <= 64),
    *((1, 64), (1, 63), (2, 32), (3, 21), (5, 12), (16, 4), (32, 2), (64, 1)),
]


@pytest.mark.gpu
@dims
@pytest.mark.parametrize(("group", "drafts"), ROWS)
def test_groups_and_drafts_agree_with_the_oracle(group: int, drafts: int, dim: int, ran: list[object]) -> None:
    """64 rows fill the tile; of fewer, the others are nobody's."""
    case = BASE.but(id=f"{group} x {drafts}", heads=2 * group, prefix=(70, 129, 3), new=(drafts,) * 3)
    stand_of(wide(case, dim)).check("verify")
    assert len(ran) == 1


LENS: dict[str, dict[str, Any]] = {
    "borders of tiles": {"prefix": (0, 1, 63, 64, 65, 127, 128, 129, 320), "new": (3,) * 9},
    "of whole requests": {"prefix": (0, 1, 63, 64, 65, 127, 128, 129, 320), "new": (3,) * 9, "policy": Balanced()},
    "borders anywhere": {"prefix": (300, 37, 1, 190), "new": (5,) * 4, "policy": Few(tile=1, count=7)},
    "many in one program": {
        "prefix": tuple(1 + 7 * i % 90 for i in range(40)),
        "new": tuple(i % 5 for i in range(40)),
        "policy": Few(count=1),
    },
    "several in each": {
        "prefix": tuple(1 + 13 * i % 200 for i in range(24)),
        "new": (2,) * 24,
        "policy": Few(count=5),
    },
    "one over many programs": {"prefix": (490,), "new": (16,), "policy": Few(count=15)},
    "fewer tiles than programs": {"prefix": (40, 3), "new": (2, 16), "policy": Few(count=9)},
    "ragged": {"prefix": (200, 64, 129, 1, 33), "new": (0, 16, 1, 0, 7)},
    "drafts of one alone": {"prefix": (200, 300, 100), "new": (0, 3, 0)},
    "nothing cached": {"prefix": (0, 0), "new": (5, 1)},
    "long rings": {"prefix": (490, 400, 480), "new": (4, 9, 1), "policy": Few(count=1)},
}


@pytest.mark.gpu
@dims
@pytest.mark.parametrize("mask", ["chain", "tree"])
@pytest.mark.parametrize("name", LENS)
def test_lengths_agree_with_the_oracle(name: str, mask: str, dim: int, ran: list[object]) -> None:
    """Rings that go on from segment to segment, partly filled tiles, queries of several segments in turns."""
    stand_of(wide(BASE.but(id=f"{name}, {mask}", mask=mask, **LENS[name]), dim)).check("verify")
    assert len(ran) == 1


VARIANTS: dict[str, dict[str, Any]] = {
    "tree": {"mask": "tree"},
    "both ways": {"causal": False},
    "sinks": {"sinks": True},
    "sinks that matter": {"sinks": True, "sink_size": 30.0, "mask": "tree"},
    "fp16": {"dtype": FP16, "kv_dtype": FP16, "mask": "tree", "sinks": True},
    "another scale": {"scale": 0.5},
    "one KV head": {"kv_heads": 1, "heads": 4},
    "pages of the table": {"page_size": 64},
    "pages of one slot": {"page_size": 1, "layout": "pages"},
    "pages of 64": {"page_size": 64, "layout": "pages", "mask": "tree"},
    "pages of several layers": {"page_size": 4, "pool": "unified"},
    "drafts read back": {"read_back": True},
}


@pytest.mark.gpu
@dims
@pytest.mark.parametrize("lens", ["borders of tiles", "ragged"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_agree_with_the_oracle(name: str, lens: str, dim: int, ran: list[object]) -> None:
    stand_of(wide(BASE.but(id=f"{name}, {lens}", **{**LENS[lens], **VARIANTS[name]}), dim)).check("verify")
    assert len(ran) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [float("-inf"), -10.0, 10.0, 100.0, float("inf")])
def test_a_sink_joins_once_however_large(sink: float, ran: list[object]) -> None:
    stand = stand_of(BASE.but(id=f"a sink of {sink}", sinks=True))
    stand.inputs.sinks[:] = sink
    stand.check("verify")
    assert len(ran) == 1


@pytest.mark.gpu
@dims
def test_masks_may_hide_drafts_from_all_or_anybody(dim: int, ran: list[object]) -> None:
    """No tree at all: some drafts nobody sees, themselves included, and some see none; cached keys are seen by all."""
    case = BASE.but(id="hidden drafts", mask="random", cached_visible=True, prefix=(8, 200, 33, 130), new=(4, 16, 9, 1))
    stand = stand_of(wide(case, dim))
    for each, cached in zip(stand.inputs.bits, case.prefix, strict=True):
        each[:, cached + 1 :: 3] = False
        each[::4, cached:] = False
    chain = VerifyBatch.chain(rows=stand.rows, prefix=case.prefix, drafts=case.new, device=stand.device)
    bits = CustomMask.of(stand.inputs.bits).bits.to(stand.device)
    plan = stand.backend.plan(replace(chain, mask=CustomMask(bits=bits, cached_visible=True)))
    q, k, v = stand.new()
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    out = stand.backend.verify(1, q, k, v, plan, lse=lse)
    want, want_lse = stand.expected()
    torch.testing.assert_close(out.double(), want, **OUTPUT[BF16])
    torch.testing.assert_close(lse.double(), want_lse, **LSE)
    assert len(ran) == 1


@pytest.mark.gpu
@dims
def test_a_query_of_zeros_gives_the_mean_of_the_values(dim: int, ran: list[object]) -> None:
    """B21: uniform attention exposes a row that is counted twice: behind a segment's end the last one comes again."""
    stand = stand_of(wide(BASE.but(id="mean", prefix=(257, 31, 1), new=(5, 2, 16)), dim))
    for q in stand.inputs.q:
        q.zero_()
    stand.check("verify")
    assert len(ran) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["chain", "tree"])
def test_a_requests_own_drafts_alone_reach_it(mask: str, ran: list[object]) -> None:
    """Those of others, and what lies before the first one and behind the last, may be NaN."""
    stand = stand_of(BASE.but(id=f"others, {mask}", prefix=(70, 33, 96, 64), new=(1, 15, 16, 7), mask=mask))
    (want, _), plan = stand.run("verify"), stand.backend.plan(stand.batch)
    q, k, v = stand.new()
    at = 0
    for n in stand.case.new:
        mine = slice(at, at + n)
        alone = []
        for drafts in (k, v):
            memory = torch.full((q.shape[0] + 64, *drafts.shape[1:]), float("nan"), dtype=k.dtype, device=k.device)
            alone.append(memory[32:-32])
            alone[-1][mine] = drafts[mine]
        assert torch.equal(stand.backend.verify(1, q, *alone, plan)[mine], want[mine])
        at += n
    assert len(ran) >= 2  # of this plan: what is known is repeated without being looked at again


@pytest.mark.gpu
@dims
def test_the_same_bits_come_again_whatever_lies_in_scratch(dim: int, ran: list[object]) -> None:
    stand = stand_of(wide(BASE.but(id="again", sinks=True), dim))
    first = stand.run("verify")
    for fill in (float("nan"), 0.0, float("inf")):
        stand.backend.workspace.fill(fill)
        for a, b in zip(first, stand.run("verify"), strict=True):
            assert torch.equal(a, b)
    assert len(ran) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("changed", [{}, {"page_size": 64, "layout": "pages"}], ids=["slots", "pages"])
def test_wide_offsets_give_the_same_bits(
    changed: dict[str, Any], ran: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = stand_of(BASE.but(id="wide", **changed))
    narrow = stand.run("verify")
    monkeypatch.setattr(launch, "NARROW_BELOW", 0)
    for a, b in zip(narrow, stand.run("verify"), strict=True):
        assert torch.equal(a, b)
    assert len(ran) == 2


@pytest.mark.gpu
@dims
def test_states_are_those_of_the_twin_and_lone_ones_are_kept_on_demand(dim: int, ran: list[object]) -> None:
    case = wide(BASE.but(id="states", prefix=(400, 300, 5, 40), new=(12, 5, 2, 3), policy=Few(count=4)), dim)
    left = []
    for engine in ("eager", "triton"):
        stand = Stand(case, engine, "cuda")
        plan = stand.backend.plan(stand.batch)
        stand.backend.verify(1, *stand.new(), plan, keeps=True)
        partials, lane = stand.backend.partials(1, plan), plan.lane(1)
        owners, ranges = lane.schedule.merge_indptr.tolist(), lane.splits.indptr.tolist()
        heads = stand.spec.kv_heads
        live = [
            (at, case.new[r] * stand.spec.group)
            for r in range(len(case.new))
            for h in range(heads)
            for at in range(owners[r * heads + h], owners[r * heads + h] + ranges[r + 1] - ranges[r])
        ]
        assert len(live) == owners[-1]
        states = [(partials.lse[at, :rows].clone(), partials.output[at, :rows].clone()) for at, rows in live]
        left.append(states)
    for (lse, out), (its_lse, its_out) in zip(*left, strict=True):
        torch.testing.assert_close(its_lse, lse, **LSE)
        torch.testing.assert_close(its_out, out, **OUTPUT[BF16])
    alone = [first for first, last in pairwise(owners) if last - first == 1]
    assert alone and len(alone) < len(owners) - 1
    shape = {"count": owners[-1], "group": 12 * stand.spec.group, "v_dim": dim}
    outs = []
    for keeps in (True, False):
        stand.backend.workspace.fill(float("nan"))
        outs.append(stand.backend.verify(1, *stand.new(), plan, keeps=keeps))
        assert stand.backend.workspace.partials(**shape).max[alone].isnan().all() != keeps
    assert torch.equal(*outs)
    assert len(ran) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["chain", "tree"])
def test_the_next_layer_is_launched_like_the_first(mask: str, ran: list[object]) -> None:
    stand = stand_of(BASE.but(id=f"layers, {mask}", mask=mask, sinks=True))
    plan, (q, k, v), sinks = stand.backend.plan(stand.batch), stand.new(), stand.inputs.sinks

    def layers() -> list[Tensor]:
        return [stand.backend.verify(layer, q, k, v, plan, sinks=sinks) for layer in (0, 1)]

    runs = [layers() for _ in range(3)]  # Triton compiles; known variants; repeats
    assert plan.lane(1).repeats and len(ran) < 6
    plan.lane(1).repeats.clear()
    stand.backend.workspace.fill(float("nan"))
    runs.append([stand.backend.verify(1, q, k, v, plan, sinks=sinks)] * 2)
    for run in runs[:3]:
        assert torch.equal(run[1], runs[3][1]) and torch.equal(run[0], runs[0][0])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["chain", "tree"])
def test_one_graph_serves_other_lengths(mask: str, ran: list[object]) -> None:
    """What is captured once must hold for every step: nothing cached, borders of tiles, rows of padding."""
    stand = stand_of(BASE.but(id=f"graph, {mask}", mask=mask, prefix=(400,) * 4, new=(7,) * 4, policy=Balanced()))
    rows = stand.rows

    def step(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        lse = torch.full(q.shape[:2], float("nan"), device=q.device)
        return stand.backend.verify(1, q, k, v, plan, lse=lse), lse

    shape = graphs.VerifyShape(requests=4, drafts=7, masked=mask == "tree")
    graph = graphs.capture(stand.backend, step, shape, inputs=dict(zip("qkv", stand.new(), strict=True)))
    captured = len(ran)
    assert captured > 0
    for prefix in ((0, 63, 64, 65), (400, 1, 129, 320), (0, 0, 0, 0), (128, 300), (37,)):
        stand.rows = rows[: len(prefix)]
        stand.restart(stand.case.but(id=f"replayed {prefix}", prefix=prefix, new=(7,) * len(prefix)))
        out, lse = graph.run(stand.batch, **dict(zip("qkv", stand.new(), strict=True)))
        want, want_lse = stand.expected()
        torch.testing.assert_close(out.double(), want, **OUTPUT[BF16])
        torch.testing.assert_close(lse.double(), want_lse, **LSE)
    assert len(ran) == captured, "nothing was launched but by the graph"


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
def test_the_far_end_of_a_pool_beyond_2_31_elements_is_read(page_size: int, ran: list[object]) -> None:
    """B24, B25: an offset in 32 bits would wrap to the pool's beginning, which is NaN."""
    spec = AttentionSpec(heads=8, kv_heads=2, qk_dim=128, v_dim=128, scale=128**-0.5)
    tokens, drafts = 4_096, 9
    pages = 2**31 // (64 * spec.kv_heads * spec.qk_dim) + 100
    model = ModelSpec.uniform(
        spec, layers=1, context_len=tokens + drafts, page_size=page_size, kv_dtype=BF16, mla=False
    )
    layout: Any = "slots" if page_size == 1 else "pages"
    pool = MHAPool(model, num_slots=pages * 64, device="cuda", layout=layout)
    view = pool.view(0)
    view.k.fill_(float("nan"))
    view.v.fill_(float("nan"))
    room = {"max_context": tokens + 64, "num_slots": pages * 64, "page_size": page_size}
    table = RequestTable(max_requests=1, device="cuda", **room)
    own = torch.arange(pages - tokens // 64 - 1, pages).flip(0)
    slots = (own[:, None] * 64 + torch.arange(64)).flatten()[: tokens + drafts]
    row = table.admit()
    table.append(row, slots)
    k, v = (torch.randn(tokens + drafts, spec.kv_heads, 128, device="cuda", dtype=BF16) for _ in range(2))
    pool.write(0, slots[:tokens].to("cuda"), k[:tokens], v[:tokens])
    backend = AttentionBackend(
        model=model,
        pool=pool,
        table=table,
        engine="triton",
        policy="balanced",
        max_requests=1,
        max_drafts=drafts,
        multiprocessors=132,
    )
    q = torch.randn(drafts, spec.heads, 128, device="cuda", dtype=BF16)
    lse = torch.full((drafts, spec.heads), float("nan"), device="cuda")
    batch = VerifyBatch.chain(rows=[row], prefix=[tokens], drafts=drafts, device="cuda")
    out = backend.verify(0, q, k[tokens:], v[tokens:], backend.plan(batch), lse=lse)
    assert len(ran) == 1 and view.elements > 2**31
    for i in (0, drafts - 1):
        end = tokens + i + 1
        want, want_lse = oracle.attention(q[i], k[:end], v[:end], scale=spec.scale, q_pos=end - 1)
        torch.testing.assert_close(out[i].double(), want, **OUTPUT[BF16])
        torch.testing.assert_close(lse[i].double(), want_lse, **LSE)
