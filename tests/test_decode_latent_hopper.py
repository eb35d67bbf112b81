"""Decode of DeepSeek's latent rows by groups of warps: whom it serves, what is compiled, and on a GPU the answers.

Gluon has no interpreter. On a CPU the kernel is compiled for a GPU that is not there, and its text is read.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import _triton
from attnlab.arguments import Arguments
from attnlab.eager import oracle
from attnlab.inspect.record import record
from attnlab.kernels import decode_latent, launch
from attnlab.kernels.decode_latent import DECODE_LATENT
from attnlab.kernels.decode_latent_hopper import DECODE_LATENT_HOPPER, is_for, serves
from attnlab.kernels.launcher import Launcher
from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView
from attnlab.plan.call import DecodeCall
from attnlab.plan.policies.balanced import Balanced
from attnlab.plan.policy import SharePolicy
from attnlab.plan.tiles import LARGE_TILE, shares_tile
from tests.cases import ENGINES, FP8, Case, Stand
from tests.test_balanced import Few
from tests.test_decode_latent import FEW, SHARED, check_partials
from tests.tolerances import output

H200 = Target(kind="cuda", arch=90, multiprocessors=132)
HALF = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
DEEPSEEK = Case(
    id="deepseek",
    why="two full tiles of heads; lone answers, ranges that are merged, rows without a key",
    heads=128,
    kv_heads=1,
    qk_dim=576,
    v_dim=512,
    mla=True,
    lens=(200, 5, 0, 96, 1),
    policy=FEW,
    **HALF,
)
BORDERS = (63, 64, 65, 127, 128, 129, 1, 0, 191, 192, 193)
CASES = [
    DEEPSEEK,
    *[DEEPSEEK.but(id=f"heads-{n}", why="a tile that is not full, or a second one", heads=n) for n in (16, 17, 40)],
    *[DEEPSEEK.but(id=f"heads-{n}", why="a full tile, and a second one with 8", heads=n) for n in (64, 72)],
    DEEPSEEK.but(id="borders", why="an odd tile without a key, with one, with all but one", lens=BORDERS),
    DEEPSEEK.but(id="borders-alone", why="whole lists, each read by one program", lens=BORDERS, policy=Few(count=1)),
    DEEPSEEK.but(id="borders-balanced", why="a program has one tile at most", lens=BORDERS, policy=Balanced()),
    DEEPSEEK.but(id="one-key", why="a single key is its own softmax", lens=(1,)),
    DEEPSEEK.but(id="segments", why="one program, many segments: each barrier goes round", lens=(3, 130, 70) * 7),
    DEEPSEEK.but(id="two-kv-heads", why="rows of two latent heads a slot", heads=80, kv_heads=2),
    DEEPSEEK.but(id="fp16", why="the other half precision", dtype=torch.float16, kv_dtype=torch.float16),
    DEEPSEEK.but(id="scale", why="one scale for keys and values", k_scale=0.25),
    DEEPSEEK.but(id="steep", why="few keys outweigh the others, and maxima rise from tile to tile", scale=0.25),
    DEEPSEEK.but(id="sinks", why="they join lone answers where these are made, others in the merge", sinks=True),
    DEEPSEEK.but(id="sinks-16", why="sinks of heads behind the group are not read", sinks=True, heads=16),
    DEEPSEEK.but(id="pages-16", why="slots of pages, of which a tile has several", page_size=16),
    DEEPSEEK.but(id="pages-64", why="slots of pages, one a tile", page_size=64, lens=(200, 64, 0, 129)),
    DEEPSEEK.but(id="window", why="lists that begin late", window=100),
    DEEPSEEK.but(id="unified", why="virtual slots, pages far apart", page_size=4, pool="unified"),
    DEEPSEEK.but(id="unified-64", why="the same, and a page a tile", page_size=64, pool="unified", heads=40),
]
OTHERS = {
    "another kernel's": {"heads": 40, "qk_dim": 288, "v_dim": 256},
    "fp32 queries": {"dtype": torch.float32},
    "fp16 queries of bf16 rows": {"dtype": torch.float16},
    "bytes": {"kv_dtype": FP8},
    "a cap": {"softcap": 5.0},
    "a temperature": {"temperature_len": 32},
    "a modifier": {"mod": "alibi"},
    "the largest product is the smallest score": {"scale": -0.1},
    "all keys weigh the same": {"scale": 0.0},
}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def call_of(stand: Stand) -> DecodeCall:
    """The call that a decode is for its engine, which does not answer it."""
    calls: list[DecodeCall] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand.backend.engine, "decode", calls.append)
        stand.run()
    return calls[0]


# Whom it serves


@each_case
def test_every_case_is_one_that_it_serves(case: Case) -> None:
    """And so the cases of a GPU, below, are what they say."""
    call = call_of(Stand(case, "eager", "cpu"))
    assert serves(call, H200) and call.head_tile == LARGE_TILE


@pytest.mark.parametrize("other", OTHERS)
def test_others_are_not_served(other: str) -> None:
    assert not serves(call_of(Stand(DEEPSEEK.but(**OTHERS[other]), "eager", "cpu")), H200)


@pytest.mark.parametrize(
    "target",
    [Target(kind="interpreter"), Target(kind="hip"), *(Target(kind="cuda", arch=arch) for arch in (80, 89, 100))],
    ids=lambda target: f"{target.kind}-{target.arch}",
)
def test_other_targets_are_not_served(target: Target) -> None:
    assert not serves(call_of(Stand(DEEPSEEK, "eager", "cpu")), target)


def moved(x: Tensor, by: int) -> Tensor:
    """The same rows behind so many elements of their memory."""
    return x.new_empty(x.numel() + by)[by:].view(x.shape).copy_(x)


def tokens_apart(x: Tensor, by: int) -> Tensor:
    """The same rows with room for so many elements between tokens, or slots."""
    tokens, heads, dim = x.shape
    return x.new_empty(tokens, heads * dim + by)[:, : heads * dim].unflatten(1, (heads, dim)).copy_(x)


def heads_apart(x: Tensor, by: int) -> Tensor:
    """The same rows with room for so many elements between heads."""
    tokens, heads, dim = x.shape
    return x.new_empty(tokens, heads, dim + by)[..., :dim].copy_(x)


@pytest.mark.parametrize("of", ["queries", "latent rows"])
@pytest.mark.parametrize(
    ("how", "by", "served"),
    [
        (moved, 8, True),
        (moved, 4, False),
        (moved, 1, False),
        (tokens_apart, 16, True),
        (tokens_apart, 8, False),
        (tokens_apart, 1, False),
        (heads_apart, 16, True),
        (heads_apart, 8, False),
    ],
)
def test_rows_that_16_bytes_at_a_time_can_be_copied_of_are_served(
    how: Callable[[Tensor, int], Tensor], by: int, served: bool, of: str
) -> None:
    """Numbers are 2 bytes; of strides Triton asks whether 16 divides them."""
    call = call_of(Stand(DEEPSEEK, "eager", "cpu"))
    q, k = call.q, call.view.k
    if of == "queries":
        q = how(q, by)
    else:
        k = how(k, by)
    view = KVView(k=k, v=k[..., :512], v_in_k=True)
    laid = DecodeCall(layer=0, spec=call.spec, view=view, lane=call.lane, partials=call.partials, q=q, out=call.out)
    assert serves(laid, H200) is served


@pytest.mark.parametrize("heads", [16, 17, 64, 128])
def test_programs_pack_64_heads_of_all_that_it_is_for(heads: int) -> None:
    case = DEEPSEEK.but(heads=heads)
    k = torch.empty(2, 1, 576, dtype=torch.bfloat16, device="meta")
    assert is_for(case.spec, KVView(k=k, v=k[..., :512], v_in_k=True))
    assert shares_tile([case.spec], mla=True, kv_dtype=torch.bfloat16) == LARGE_TILE


Launch = tuple[Launcher, tuple[int, int, int], tuple[Arguments, ...], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would have been launched: launcher, grid, groups of arguments, what constants are asked with."""
    made: list[Launch] = []
    for launcher in (DECODE_LATENT, DECODE_LATENT_HOPPER):

        def noted(target: Target, grid: Any, groups: Any, /, *, _launcher: Launcher = launcher, **asked: Any) -> None:
            made.append((_launcher, grid, groups, asked))

        monkeypatch.setattr(launcher, "launch", noted)
    return made


needs_triton = pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize(
    ("changes", "launcher"), [({}, DECODE_LATENT_HOPPER), ({"softcap": 5.0}, DECODE_LATENT)], ids=["plain", "capped"]
)
def test_a_launch_has_all_that_its_kernel_takes(
    changes: dict[str, Any], launcher: Launcher, launches: list[Launch]
) -> None:
    call = call_of(Stand(DEEPSEEK.but(**changes), "eager", "cpu"))
    decode_latent.decode_latent(call, target=H200)
    ((launched, grid, groups, asked),) = launches
    assert launched is launcher and grid == (2, 3, 1)
    constants, options = launched.constants(**asked)
    launched._order(constants, groups)  # raises where a name is missing, or unknown
    assert constants["HAS_LSE"] and not constants["TIMES"] and options["launch_pdl"]


# What is compiled

FACTS = """
import json
from attnlab.inspect import resources
for variant in resources.variants(resources.TARGETS["sm_90"]):
    if variant.name.startswith("latent" + resources.FOR_HOPPER):
        took = resources.compile_variant(variant, "sm_90")
        print(json.dumps([took.registers, took.spills, took.shared, resources.ptx(variant)]))
"""
SIDES = 2
THREADS = 3 * 128


@pytest.fixture(scope="module")
def facts(compiling: dict[str, str]) -> list[tuple[int, int, int, str]]:
    """Registers, spilled bytes and shared memory of every variant, and its PTX."""
    done = subprocess.run([sys.executable, "-c", FACTS], env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) >= 3
    return found


@needs_triton
def test_a_program_fits_a_multiprocessor(facts: list[tuple[int, int, int, str]]) -> None:
    for registers, spills, shared, _ in facts:
        assert shared <= SHARED and registers * THREADS <= 65_536 and spills == 0


@needs_triton
def test_those_that_attend_have_the_registers_of_those_that_load(facts: list[tuple[int, int, int, str]]) -> None:
    from attnlab.kernels.decode_latent_hopper import OTHERS_REGISTERS

    side_1, loads = OTHERS_REGISTERS.value
    for registers, _, _, ptx in facts:
        side_0 = 3 * registers - side_1 - loads
        asked = set(re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx))
        assert asked >= {("dec", str(side_0)), ("inc", str(side_1)), ("dec", str(loads))}


@needs_triton
def test_rows_of_scores_are_rows_of_answers(facts: list[tuple[int, int, int, str]]) -> None:
    """No layout is converted through shared memory: what is read back are the other's maxima, and both sides' sums."""
    rows_of_a_thread = 2
    for *_, ptx in facts:
        assert len(re.findall(r"ld\.shared\.b32", ptx)) == SIDES * (1 + 2) * rows_of_a_thread
        assert len(re.findall(r"st\.shared\.b32", ptx)) == SIDES * (1 + 1) * rows_of_a_thread
        assert "ldmatrix" not in ptx


@needs_triton
def test_a_signal_is_given_when_all_warps_of_a_group_are_done(facts: list[tuple[int, int, int, str]]) -> None:
    """One thread signals for 128: behind what they did last stands a barrier of theirs."""
    does = re.compile(
        r"wgmma\.wait_group|stmatrix|st\.shared|ld\.shared|fence\.proxy|bar\.sync|mbarrier\.arrive\.shared"
    )
    for *_, ptx in facts:
        steps = does.findall(ptx)
        before = [steps[i - 1] for i, step in enumerate(steps) if step == "mbarrier.arrive.shared"]
        assert before == ["bar.sync"] * SIDES * 5  # weighed, two tiles free, queries free, summed


@needs_triton
def test_each_side_scores_a_tile_of_two_and_multiplies_half_of_both(facts: list[tuple[int, int, int, str]]) -> None:
    for *_, ptx in facts:
        scores, answers = (len(re.findall(rf"wgmma\.mma_async.*{of}k16", ptx)) for of in ("m64n64", "m64n256"))
        assert scores == SIDES * 576 // 16 and answers == SIDES * 2 * 64 // 16


@needs_triton
def test_rows_are_copied_16_bytes_at_a_time(facts: list[tuple[int, int, int, str]]) -> None:
    for *_, ptx in facts:
        sizes = re.findall(r"cp\.async\.c.\.shared\.global [^;]*?, (\w+)(?:, \w+)?;", ptx)
        # Three times 64 rows, of queries and of two tiles: what each of 128 threads copies of them.
        assert set(sizes) == {"0x10"} and len(sizes) == 3 * 64 * 576 * 2 // 16 // 128
        assert "prefetch.global.L2" in ptx


@needs_triton
def test_who_loads_does_not_wait_for_slots_between_two_tiles(facts: list[tuple[int, int, int, str]]) -> None:
    """They are asked for before the wait for room: what is asked for behind the copies makes the next ones late."""
    for *_, ptx in facts:
        steps = re.findall(r"(ld\.global|cp\.async\.mbarrier|prefetch|mbarrier\.try_wait)", ptx)
        ahead = [i for i, step in enumerate(steps) if step == "prefetch" and steps[i - 1] != "prefetch"]
        assert len(ahead) == 2 and all(steps[i - 1] == "cp.async.mbarrier" for i in ahead)


# Answers, on a GPU


def hopper(case: Case) -> Stand:
    stand = Stand(case, *ENGINES[-1])
    if not stand.backend.engine.target.is_hopper:
        pytest.skip("needs a Hopper GPU, and compiled kernels")
    return stand


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other kernel of latent tiles is not what runs."""
    monkeypatch.setattr(DECODE_LATENT, "launch", None)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@each_case
def test_decode_agrees_with_the_oracle(case: Case) -> None:
    hopper(case).check()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("policy", [FEW, Balanced()], ids=["few", "balanced"])
@pytest.mark.parametrize("lens", [(4096,), (700, 2000, 1, 1025)], ids=["one", "uneven"])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_long_lists_are_read_right(heads: int, page_size: int, lens: tuple[int, ...], policy: SharePolicy) -> None:
    """The loop, many times around."""
    hopper(DEEPSEEK.but(heads=heads, page_size=page_size, lens=lens, policy=policy)).check()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_sixty_four_thousand_tokens_are_read_right() -> None:
    hopper(DEEPSEEK.but(heads=16, lens=(65_536, 3), policy=Balanced())).check()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("heads", [16, 72, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_partials_are_the_oracles_for_each_range_alone_or_not(heads: int, dtype: torch.dtype) -> None:
    check_partials(hopper(DEEPSEEK.but(sinks=True, heads=heads, dtype=dtype, kv_dtype=dtype)))


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@each_case
def test_scratch_that_nobody_owns_never_reaches_an_output(case: Case) -> None:
    """Scratch is NaN at first, and so are slots that no list names."""
    stand = hopper(case)
    poisoned = stand.run()
    stand.backend.workspace.fill(0.0)
    for a, b in zip(poisoned, stand.run(), strict=True):
        assert torch.equal(a, b) and not a.isnan().any()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("page_size", [1, 64])
def test_wide_offsets_give_the_same_bits(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = hopper(DEEPSEEK.but(page_size=page_size))
    narrow = stand.run()
    monkeypatch.setattr(launch, "NARROW_BELOW", 0)
    for a, b in zip(narrow, stand.run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_the_far_end_of_a_pool_beyond_2_31_elements_is_read() -> None:
    """B24: an offset in 32 bits would wrap to the pool's beginning, which is NaN."""
    stand = hopper(DEEPSEEK.but(lens=(300,), heads=64))
    slots = 2**31 // 576 + 5000
    k = torch.full((slots, 1, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    call = call_of(stand)
    listed = call.lane.layout.index.slots
    far = listed + (slots - 1 - int(listed.max()))
    k[far] = call.view.k[listed]
    listed.copy_(far)
    out = torch.empty_like(call.out)
    view = KVView(k=k, v=k[..., :512], v_in_k=True)
    given = {"layer": 0, "spec": call.spec, "lane": call.lane, "partials": call.partials, "q": call.q}
    stand.backend.engine.decode(DecodeCall(view=view, out=out, **given))
    want, _ = oracle.attention(stand.q[0], k[far], k[far][..., :512], scale=call.spec.scale)
    torch.testing.assert_close(out[0].double(), want, **output(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("how", "by"), [(moved, 1), (moved, 4), (tokens_apart, 1), (tokens_apart, 8), (heads_apart, 8)]
)
def test_queries_that_lie_askew_go_to_the_other_kernel(
    how: Callable[[Tensor, int], Tensor], by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = hopper(DEEPSEEK)
    stand.q = how(stand.q, by)
    monkeypatch.setattr(DECODE_LATENT_HOPPER, "launch", None)
    stand.check()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("how", "by"), [(moved, 8), (tokens_apart, 16), (heads_apart, 16)])
def test_queries_that_lie_apart_are_read_where_they_lie(how: Callable[[Tensor, int], Tensor], by: int) -> None:
    stand = hopper(DEEPSEEK)
    even = stand.run()
    stand.q = how(stand.q, by)
    for a, b in zip(even, stand.run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("heads", [16, 128])
def test_bits_are_the_same_each_time_and_in_a_graph(heads: int) -> None:
    """Whichever group is ahead: what is summed, and in which order, does not depend on it."""
    stand = hopper(DEEPSEEK.but(heads=heads, lens=(700, 2000, 1, 1025), policy=Balanced()))
    plan = stand.plan()
    first = stand.run(plan)
    for _ in range(20):
        for a, b in zip(first, stand.run(plan), strict=True):
            assert torch.equal(a, b)
    wanted = [stand.backend.decode(layer, stand.q, None, None, plan, save=False) for layer in (0, 1)][1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [stand.backend.decode(layer, stand.q, None, None, plan, save=False) for layer in (0, 1, 0, 1)]
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(out, wanted) for out in made)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_repeated_call_gives_the_bits_of_one_that_was_checked_in_full(sinks: bool) -> None:
    stand = hopper(DEEPSEEK.but(sinks=sinks))
    plan, given = stand.plan(), {"save": False, "sinks": stand.sinks}
    runs = [
        [stand.backend.decode(layer, stand.q, None, None, plan, **given) for layer in (0, 1)] for _ in range(3)
    ]  # Triton compiles; known variants; repeats
    assert plan.lane(1).repeats
    assert all(torch.equal(out, runs[0][0]) for run in runs for out in run)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("heads", [16, 128])
def test_programs_note_when_they_ran(heads: int) -> None:
    stand = hopper(DEEPSEEK.but(heads=heads, lens=(3000, 5000)))
    with record(stand.backend, times=True) as trace:
        stand.check()
    times = trace.calls[0].times
    assert times.shape == (3, -(-heads // LARGE_TILE), 3)
    assert bool((times[..., 1] > 0).all()) and bool((times[..., 2] >= times[..., 1]).all())
