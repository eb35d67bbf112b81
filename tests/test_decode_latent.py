"""Many heads over latent rows: the same answers, partials and times, from programs that pack 64 heads."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attnlab import _triton
from attnlab.eager import oracle
from attnlab.inspect.record import record
from attnlab.inspect.resources import MLA
from attnlab.kernels import decode_latent, decode_shares, launch
from attnlab.plan.policies.balanced import Balanced
from attnlab.plan.policy import SharePolicy, SplitContext
from attnlab.plan.splits import cut
from attnlab.plan.tiles import HEAD_TILE, LARGE_TILE, head_tiles, shares_tile
from attnlab.plots.schedule_view import cut_view
from attnlab.spec import AttentionSpec
from tests.cases import ENGINES, Case, Stand
from tests.test_balanced import Few
from tests.tolerances import LSE, OUTPUT

HALF = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
FEW = Few(count=3)
MANY = Case(
    id="many",
    why="two tiles of heads, the second nearly empty; lone answers, ranges that are merged, rows without a key",
    heads=72,
    kv_heads=1,
    qk_dim=80,
    v_dim=64,
    mla=True,
    lens=(200, 5, 0, 96, 1),
    policy=FEW,
    **HALF,
)
CASES = [
    MANY,
    MANY.but(id="balanced", why="a program has one tile of keys at most", policy=Balanced()),
    MANY.but(id="forty", why="one tile of heads, not full", heads=40),
    MANY.but(id="two-kv-heads", why="rows of two latent heads a slot", heads=80, kv_heads=2),
    MANY.but(id="fp16", why="the other half precision", dtype=torch.float16, kv_dtype=torch.float16),
    MANY.but(id="tile-borders", why="lengths at the tile's border", lens=(63, 64, 65, 127, 128, 129)),
    MANY.but(id="one-key", why="a single key is its own softmax", lens=(1,)),
    MANY.but(id="sinks", why="a sink joins lone answers where they are made, others where they are merged", sinks=True),
    MANY.but(id="scale", why="one scale for keys and values", k_scale=0.25),
    MANY.but(id="negative-scale", why="the largest product is the smallest score", scale=-0.1),
    MANY.but(id="no-scale", why="all keys weigh the same", scale=0.0),
    MANY.but(id="cap", why="cap and temperature in their order", softcap=5.0, temperature_len=32, k_scale=0.5),
    MANY.but(id="pages", why="slots of pages", page_size=16),
    MANY.but(id="window", why="lists that begin late, positions that matter", window=40, temperature_len=32),
    MANY.but(id="unified", why="virtual slots, pages far apart", page_size=4, pool="unified"),
    MANY.but(id="minicpm", why="256 + 32 columns", heads=40, qk_dim=288, v_dim=256, lens=(70, 5)),
    MANY.but(id="deepseek", why="512 + 64 columns, two full tiles of heads", heads=128, qk_dim=576, v_dim=512),
]
engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


@pytest.fixture(autouse=True)
def _by_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is another for DeepSeek's rows; `test_decode_latent_hopper.py` is about that one."""
    monkeypatch.setattr(decode_latent, "serves", lambda call, target: False)


@engines
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_agrees_with_the_oracle(case: Case, engine: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(case, engine, device)
    if engine == "triton":
        skip_other_gpus(stand)
        monkeypatch.setattr(decode_shares, "decode_shares", None)  # it is not what runs
    stand.check()


def skip_other_gpus(stand: Stand) -> None:
    if not stand.backend.engine.large_tiles:
        pytest.skip("needs a Hopper GPU")


@engines
def test_partials_are_the_oracles_for_each_range_alone_or_not(engine: str, device: str) -> None:
    stand = Stand(MANY.but(sinks=True), engine, device)
    check_partials(stand)
    if engine == "triton":  # eager leaves all states
        plan = stand.plan()
        stand.backend.workspace.fill(float("nan"))
        stand.run(plan)
        owners, spec = plan.lane(1).schedule.merge_indptr.tolist(), stand.spec
        alone = [first for first, last in pairwise(owners) if last - first == 1]
        left = stand.backend.workspace.partials(count=owners[-1], group=spec.group, v_dim=spec.v_dim)
        assert left.acc[alone].isnan().all()


def check_partials(stand: Stand) -> None:
    """Compare what all ranges leave, if it is kept, with the oracle; to keep it must not change a bit."""
    plan = stand.plan()
    stand.run(plan, keeps=True)
    partials, lane = stand.backend.partials(1, plan), plan.lane(1)
    owners, splits = lane.schedule.merge_indptr.tolist(), lane.splits.to_host()
    assert 1 in splits.effective and max(splits.effective) > 1
    for r, ranges in enumerate(splits.ranges):
        for p, (start, end) in zip(range(owners[r], owners[r + 1]), ranges, strict=True):
            k, v = (stand.stored(x[r][start:end], 1.0) for x in (stand.k, stand.v))
            out, lse = oracle.attention(stand.q[r], k, v, scale=stand.spec.scale)
            torch.testing.assert_close(partials.lse[p].double(), lse, **LSE)
            torch.testing.assert_close(partials.output[p].double(), out, **OUTPUT[stand.case.dtype])
    kept = stand.run(plan, keeps=True)
    stand.backend.workspace.fill(float("nan"))
    for a, b in zip(kept, stand.run(plan), strict=True):
        assert torch.equal(a, b)


@engines
def test_scratch_that_nobody_owns_never_reaches_an_output(engine: str, device: str) -> None:
    stand = Stand(MANY, engine, device)
    poisoned = stand.run()
    stand.backend.workspace.fill(0.0)
    for a, b in zip(poisoned, stand.run(), strict=True):
        assert torch.equal(a, b)


def test_wide_offsets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(MANY, *ENGINES[-1])
    narrow = stand.run()
    monkeypatch.setattr(launch, "NARROW_BELOW", 0)
    for a, b in zip(narrow, stand.run(), strict=True):
        assert torch.equal(a, b)


def test_queries_that_no_tile_has_room_for_are_served_sixteen_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(MANY.but(dtype=torch.float32), *ENGINES[-1])
    monkeypatch.setattr(decode_latent, "decode_latent", None)
    stand.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["half", "full"])
def test_times_have_a_row_for_every_program(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(MANY.but(policy=Balanced(), dtype=dtype), "eager", "cpu")
    monkeypatch.setattr(stand.backend.engine, "check_times", lambda: None)
    with record(stand.backend, times=True) as trace:
        stand.run()
    assert trace.calls[0].times.shape == (66, 2 if dtype == torch.bfloat16 else 5, 3)


@pytest.mark.gpu
def test_programs_note_when_they_ran() -> None:
    stand = Stand(MANY.but(heads=128, lens=(3000, 5000)), *ENGINES[-1])
    skip_other_gpus(stand)
    with record(stand.backend, times=True) as trace:
        stand.run()
    times = trace.calls[0].times
    assert bool((times[..., 1] > 0).all()) and bool((times[..., 2] >= times[..., 1]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [FEW, Balanced()], ids=["few", "balanced"])
@pytest.mark.parametrize("lens", [(4096,), (700, 2000, 1, 1025)], ids=["one", "uneven"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_long_lists_are_read_right(lens: tuple[int, ...], policy: SharePolicy, page_size: int) -> None:
    """The pipelined loop, many times around."""
    case = MANY.but(heads=128, qk_dim=576, v_dim=512, policy=policy, lens=lens, page_size=page_size)
    stand = Stand(case, *ENGINES[-1])
    skip_other_gpus(stand)
    stand.check()


# Planning


def spec(**changes: object) -> AttentionSpec:
    return replace(AttentionSpec(heads=128, kv_heads=1, qk_dim=576, v_dim=512, scale=0.07), **changes)


def test_tiles_are_wide_where_many_heads_read_latent_rows_in_half_precision() -> None:
    mla = {"mla": True, "kv_dtype": torch.bfloat16}
    assert shares_tile([spec(), spec(heads=40)], **mla) == LARGE_TILE
    assert shares_tile([spec()], mla=True, kv_dtype=torch.float16) == LARGE_TILE
    assert shares_tile([spec(), spec(heads=15)], **mla) == HEAD_TILE
    assert shares_tile([spec(v_dim=288, qk_dim=352)], **mla) == HEAD_TILE  # the values are no main tile
    assert shares_tile([spec(qk_dim=512)], **mla) == HEAD_TILE  # there are no other columns
    assert shares_tile([spec(v_dim=32, qk_dim=48)], **mla) == HEAD_TILE  # values narrower than a tile of keys
    assert shares_tile([spec(qk_dim=640)], **mla) == HEAD_TILE  # two tiles of its rows fit no multiprocessor
    assert shares_tile([MLA_WITH_MOD.spec()], **mla) == HEAD_TILE
    assert shares_tile([spec()], mla=True, kv_dtype=torch.float8_e4m3fn) == HEAD_TILE
    assert shares_tile([spec()], mla=False, kv_dtype=torch.bfloat16) == HEAD_TILE
    assert [head_tiles(group, LARGE_TILE) for group in (64, 65, 128)] == [1, 2, 2]


def test_tiles_are_wide_for_sixteen_heads_where_they_have_a_kernel_of_their_own() -> None:
    mla = {"mla": True, "kv_dtype": torch.bfloat16}
    assert shares_tile([spec(heads=16)], **mla) == LARGE_TILE
    assert shares_tile([spec(heads=16, softcap=5.0)], **mla) == HEAD_TILE
    assert shares_tile([spec(heads=16, temperature_len=32)], **mla) == HEAD_TILE
    assert shares_tile([spec(heads=16, qk_dim=288, v_dim=256)], **mla) == HEAD_TILE
    assert shares_tile([spec(heads=17, softcap=5.0), spec(heads=17, qk_dim=288, v_dim=256)], **mla) == LARGE_TILE


MLA_WITH_MOD = replace(MLA, mod="alibi")


def test_there_is_one_program_a_multiprocessor() -> None:
    ctx = SplitContext(
        heads=128, kv_heads=1, v_dim=512, mla=True, context_len=1 << 20, multiprocessors=132, head_tile=LARGE_TILE
    )
    assert Balanced().shares(ctx) == 66
    assert Balanced().shares(replace(ctx, heads=64)) == 132
    assert Balanced(programs=2).shares(ctx) == 132
    splits = cut(Balanced(), [100_000, 5], ctx)
    assert len(splits.to_host().ranges[0]) == 66
    assert cut_view(Balanced(), [100_000, 5], ctx).working == 132


def test_the_twin_follows_the_same_schedule() -> None:
    plans = [Stand(MANY, engine, device).plan().lane(1).schedule for engine, device in ENGINES]
    if plans[0].head_tile == plans[1].head_tile:  # on other GPUs the twin plans as for a Hopper one all the same
        assert plans[0].head_tile == LARGE_TILE and plans[0].head_tiles(72) == 2
        assert torch.equal(plans[0].segments, plans[1].segments)


# The compiler's habits that the kernel rests on

FACTS = """
from attnlab.inspect import resources
for variant in resources.variants(resources.TARGETS["sm_90"]):
    if variant.name.startswith("latent:"):
        print(">>>", variant.name, resources.compile_variant(variant, "sm_90").shared)
        print(resources.ttgir(variant))
"""
SHARED = 232_448
"""Bytes that one program may have on a Hopper multiprocessor."""


@pytest.fixture(scope="module")
def texts(compiling: dict[str, str]) -> dict[str, str]:
    """TTGIR of every compiled variant of this kernel, by its name and shared memory."""
    done = subprocess.run([sys.executable, "-c", FACTS], env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(part.split("\n", 1) for part in done.stdout.split(">>> ")[1:])


needs_triton = pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton")


@needs_triton
def test_two_tiles_of_rows_fit_a_multiprocessor(texts: dict[str, str]) -> None:
    sizes = {head.rsplit(" ", 1)[0]: int(head.rsplit(" ", 1)[1]) for head in texts}
    assert len(sizes) >= 3 and max(sizes.values()) <= SHARED
    for text in texts.values():
        buffers = re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x64x(\d+)x(?:bf|f)16", text)
        assert [count for count, _ in buffers] == ["2", "2"], buffers


@needs_triton
def test_no_warp_repeats_what_another_computes(texts: dict[str, str]) -> None:
    for text in texts.values():
        layouts = re.findall(r"nvidia_mma<\{versionMajor = 3.*?warpsPerCTA = \[(\d, \d)\]", text)
        assert set(layouts) == {"4, 2"}


@needs_triton
def test_the_next_tile_is_on_its_way_before_this_one_is_computed(texts: dict[str, str]) -> None:
    for text in texts.values():
        loop = text[text.index("scf.for") :]  # nothing is copied behind it
        copies, dots = (
            [found.start() for found in re.finditer(word, loop)]
            for word in ("async_copy_global_to_local", "warp_group_dot ")
        )
        assert len(copies) == 4 and len(dots) == 4 and copies[-1] < dots[0]
