"""Even shares: every program reads as much as any other, each key is read once, and the answers are the oracle's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlab
from attnlab.batch import DecodeBatch, VerifyBatch
from attnlab.eager import oracle
from attnlab.inspect.record import record
from attnlab.inspect.resources import GQA, MLA
from attnlab.kernels import launch
from attnlab.kernels.decode import MergeTiles
from attnlab.kernels.target import Target
from attnlab.plan.draft import draft_room
from attnlab.plan.policies.balanced import Balanced
from attnlab.plan.policy import SharePolicy, SplitBounds, SplitContext, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import cut, share_starts, splits_of_shares, splits_of_sizes
from attnlab.plots.schedule_view import cut_view
from attnlab.plots.show import show
from attnlab.spec import AttentionSpec
from attnlab.trace import Trace
from tests.cases import CASES, ENGINES, Case, Stand
from tests.extend_cases import Case as SeveralCase
from tests.extend_cases import Stand as SeveralStand
from tests.serving import Server
from tests.strategies import DEVICE, lens
from tests.syncs import nothing_waits
from tests.test_no_sync import MODES, on_device
from tests.test_verify import VERIFIED
from tests.tolerances import LSE, OUTPUT

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
TOY = CASES[0]


@dataclass(frozen=True, kw_only=True)
class Few(SharePolicy):
    """Few shares, so that every program reads parts of several requests."""

    name = "few"
    tile: int = 32
    count: int = 3

    def shares(self, ctx: SplitContext) -> int:
        return self.count


def context(kv_heads: int = 2, multiprocessors: int | None = 132) -> SplitContext:
    return SplitContext(
        heads=8, kv_heads=kv_heads, v_dim=32, mla=False, context_len=1 << 20, multiprocessors=multiprocessors
    )


# Cutting and dealing


@given(batch=lens(max_len=5_000), shares=st.integers(1, 40), tile=st.sampled_from([1, 16, 128]), kv=st.integers(1, 4))
def test_every_key_is_read_once_and_shares_differ_by_a_tile_at_most(
    batch: list[int], shares: int, tile: int, kv: int
) -> None:
    policy = Few(tile=tile, count=shares)
    splits = cut(policy, batch, context())
    splits.validate(batch)
    schedule = Schedule.even_shares(splits, kv_heads=kv, shares=shares, tile=tile)
    schedule.validate(splits)
    assert schedule.programs == shares * kv and schedule.persistent
    tiles = [0] * schedule.programs
    owned, rows = schedule.program_indptr.tolist(), schedule.segments.tolist()
    for program in range(schedule.programs):
        mine = rows[owned[program] : owned[program + 1]]
        assert {row[1] for row in mine} <= {program % kv}
        tiles[program] = sum(-(-(last - first) // tile) for _, _, first, last, _ in mine)
        assert all(first % tile == 0 for _, _, first, _, _ in mine)
    total = sum(-(-n // tile) for n in batch)
    assert set(tiles) <= {total // shares, -(-total // shares)}
    assert sum(splits.to_host().effective) <= len(batch) + shares


@given(total=st.integers(0, 1 << 30), shares=st.integers(1, 4096))
def test_shares_begin_evenly_apart_also_in_long_lines(total: int, shares: int) -> None:
    starts = share_starts(torch.tensor(total, dtype=torch.int32), shares).tolist()
    assert starts == [i * total // shares for i in range(shares)]


@given(batch=lens(max_len=3_000, min_reqs=1), slack=st.integers(0, 500))
def test_what_is_promised_holds_every_range(batch: list[int], slack: int) -> None:
    for policy in (Balanced(), Few(count=5)):
        bounds = policy.bounds(bound_max=max(batch) + slack, ctx=context())
        host = cut(policy, batch, context()).to_host()
        assert max(host.effective) <= bounds.max_ranges
        assert sum(host.effective) <= bounds.capacity(reqs=len(batch), total=sum(batch) + slack)


def test_there_are_as_many_shares_as_programs_run_at_a_time() -> None:
    assert Balanced(programs=2).shares(context(kv_heads=8)) == 33
    assert Balanced(programs=1).shares(replace(context(), heads=200, kv_heads=200)) == 1
    assert Balanced(programs=2).shares(context(multiprocessors=None)) == 128
    assert Balanced().shares(context(kv_heads=8)) == 66
    assert Balanced().shares(replace(context(kv_heads=8), v_dim=256)) == 33
    short = replace(context(kv_heads=8), v_dim=64, requests=64, longest=128)
    assert Balanced().shares(short) == 132 and Balanced().shares(replace(short, longest=129)) == 66
    mla = replace(context(), heads=128, kv_heads=1, v_dim=512, mla=True)
    assert Balanced().shares(mla) == 132 // 8  # its heads are eight tiles


def test_few_requests_have_one_program_a_multiprocessor_and_8_bits_two() -> None:
    many = replace(context(kv_heads=8), requests=9)
    few = replace(many, requests=8)
    assert [Balanced().shares(ctx) for ctx in (many, few)] == [66, 16]
    assert [Balanced().shares(replace(ctx, kv_itemsize=1)) for ctx in (many, few)] == [66, 33]
    assert Balanced().shares(replace(few, v_dim=256)) == 33
    assert Balanced().shares(replace(few, heads=32, drafts=4, kv_itemsize=1)) == 33
    stand = Stand(TOY.but(policy=Balanced(), lens=(5,)), "eager", "cpu")
    assert stand.plan().lanes[0].schedule.programs == 132  # plans tell the policy how many requests there are


def test_drafts_have_one_program_a_multiprocessor_and_over_8_bits_two() -> None:
    """The rows of a tile are drafts x heads of a group: 64, or half as many of wide values."""
    verify = replace(context(kv_heads=8), heads=32)
    assert [Balanced().shares(replace(verify, drafts=n)) for n in (1, 4, 16, 17, 33)] == [16, 16, 16, 8, 5]
    assert [Balanced().shares(replace(verify, drafts=n, kv_itemsize=1)) for n in (4, 16)] == [33, 33]
    assert Balanced().shares(replace(verify, drafts=16, v_dim=256)) == 8
    assert Balanced(programs=2).shares(replace(verify, drafts=16)) == 33
    mla = replace(context(), heads=16, kv_heads=1, v_dim=512, mla=True, drafts=4)
    assert Balanced().shares(mla) == 132 // 2


@pytest.mark.parametrize("name", ["tile", "programs"])
def test_a_parameter_is_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        Balanced(**{name: 0})


def test_a_short_capacity_cuts_what_does_not_fit_instead_of_writing_behind() -> None:
    """Lengths that only the device knows may be more than was promised; nothing is written outside of the buffers."""
    lens = torch.tensor([300, 300], dtype=torch.int32)
    splits = splits_of_shares(lens, shares=8, tile=32, capacity=3, policy="x")
    assert splits.request.shape == (3,)


# Decoding


@engines
@pytest.mark.parametrize("policy", [Balanced(), Few()], ids=["balanced", "few"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_agrees_with_the_oracle(case: Case, policy: SharePolicy, engine: str, device: str) -> None:
    Stand(case.but(policy=policy), engine, device).check()


@engines
def test_partials_are_the_oracles_for_each_range_alone_or_not(engine: str, device: str) -> None:
    stand = Stand(TOY.but(policy=Few(count=4), heads=40, lens=(200, 5, 0, 96), sinks=True), engine, device)
    plan = stand.plan()
    stand.run(plan, keeps=True)
    partials, lane = stand.backend.partials(1, plan), plan.lane(1)
    owners = lane.schedule.merge_indptr.tolist()
    effective = lane.splits.to_host().effective
    assert 1 in effective and max(effective) > 1
    for r, ranges in enumerate(lane.splits.to_host().ranges):
        for h in range(2):
            for p, (start, end) in zip(range(owners[2 * r + h], owners[2 * r + h + 1]), ranges, strict=True):
                k, v = stand.k[r][start:end], stand.v[r][start:end]
                out, lse = oracle.attention(stand.q[r], k, v, scale=stand.spec.scale)
                mine = slice(20 * h, 20 * h + 20)
                torch.testing.assert_close(partials.lse[p].double(), lse[mine], **LSE)
                torch.testing.assert_close(partials.output[p].double(), out[mine], **OUTPUT[torch.float32])


@engines
def test_states_of_whole_answers_are_left_out_and_said_to_be(engine: str, device: str) -> None:
    stand = Stand(TOY.but(policy=Few(count=4), heads=40, lens=(200, 5, 0, 96), sinks=True), engine, device)
    plan = stand.plan()
    owners = plan.lane(1).schedule.merge_indptr.tolist()
    alone = [first for first, last in pairwise(owners) if last - first == 1]
    stand.backend.workspace.fill(float("nan"))
    kept = stand.run(plan, keeps=True)
    assert alone and stand.backend.partials(1, plan).acc[alone].isfinite().all()
    stand.backend.workspace.fill(float("nan"))
    for a, b in zip(kept, stand.run(plan), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match=r"^partials: the last call left .*; pass keeps=True to decode or verify$"):
        stand.backend.partials(1, plan)
    if engine == "triton":  # eager leaves them all
        left = stand.backend.workspace.partials(count=owners[-1], group=20, v_dim=stand.spec.v_dim)
        assert left.acc[alone].isnan().all() and left.max[alone].isnan().all()
    for wrong in ("no", 1, None):
        with pytest.raises(TypeError, match=f"^keeps: expected a bool, got {wrong!r}$"):
            stand.run(plan, keeps=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^plan: expected a DecodePlan or VerifyPlan, got "):
        stand.backend.partials(1, None)  # type: ignore[arg-type]
    # A call that is refused leaves nothing, and what was left is as it was.
    with pytest.raises(TypeError, match="^q: "):
        stand.backend.decode(1, stand.q.double(), None, None, plan, sinks=stand.sinks, save=False, keeps=True)
    with pytest.raises(RuntimeError, match="^partials: "):
        stand.backend.partials(1, plan)
    stand.run(plan, keeps=True)
    with pytest.raises(TypeError, match="^q: "):
        stand.backend.decode(1, stand.q.double(), None, None, plan, sinks=stand.sinks, save=False)
    stand.backend.partials(1, plan)


def test_states_of_drafts_are_left_out_where_they_are_answers() -> None:
    case = CHAIN.but(prefix=(400, 300, 5, 40), new=(20, 5, 2, 3), policy=Few(count=4))
    stand = SeveralStand(case, *ENGINES[-1])
    plan = stand.backend.plan(stand.batch)
    owners = plan.lane(1).schedule.merge_indptr.tolist()
    alone = [first for first, last in pairwise(owners) if last - first == 1]
    shape = {"count": plan.lane(1).schedule.partials, "group": 20 * stand.spec.group, "v_dim": stand.spec.v_dim}
    assert alone and len(alone) < len(owners) - 1
    outs = []
    for keeps in (True, False):
        stand.backend.workspace.fill(float("nan"))
        outs.append(stand.backend.verify(1, *stand.new(), plan, keeps=keeps))
        left = stand.backend.workspace.partials(**shape).max[alone]
        assert left.isnan().all() != keeps
    assert torch.equal(*outs)
    with pytest.raises(RuntimeError, match="^partials: "):
        stand.backend.partials(1, plan)


def test_a_schedule_whose_lists_are_cut_is_not_uncut() -> None:
    ctx = context()
    splits = cut(Few(count=4), [200, 5, 96], ctx)
    schedule = Schedule.of(Few(count=4), splits, ctx)
    schedule.validate(splits)
    with pytest.raises(
        ValueError, match=r"^uncut: request 0, KV head 0 has \d+ partials, and nothing would merge them$"
    ):
        replace(schedule, uncut=True).validate(splits)
    with pytest.raises(ValueError, match="^uncut: expected a persistent schedule"):
        replace(schedule, uncut=True, persistent=False)


def test_of_short_lists_nothing_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a window no longer than a tile, or of short requests: also of requests without keys, and with sinks."""
    short = TOY.but(policy=Balanced(), lens=(200, 5, 0, 128), window=128, sinks=True)
    for case in (short, short.but(sinks=False), short.but(window=None, lens=(128, 0, 1))):
        merged = Stand(case.but(policy="seed"), *ENGINES[-1]).run()
        stand = Stand(case, *ENGINES[-1])
        plan = stand.plan()
        assert plan.lane(1).schedule.uncut
        with monkeypatch.context() as patch:
            patch.setattr("attnlab.kernels.decode.decode_merge", forbidden)
            stand.backend.workspace.fill(float("nan"))
            out, lse = stand.run(plan)
        torch.testing.assert_close(out, merged[0], **OUTPUT[torch.float32])
        torch.testing.assert_close(lse, merged[1], **LSE)
        stand.check()
    longer = Stand(short.but(window=129), *ENGINES[-1]).plan()
    assert not longer.lane(1).schedule.uncut


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("nothing was to be merged")


@engines
def test_scratch_that_nobody_owns_never_reaches_an_output(engine: str, device: str) -> None:
    stand = Stand(TOY.but(lens=(256, 5, 0, 70), policy=Few()), engine, device)
    poisoned = stand.run()
    stand.backend.workspace.fill(0.0)
    for a, b in zip(poisoned, stand.run(), strict=True):
        assert torch.equal(a, b)


@engines
def test_many_ranges_of_wide_values_are_merged_a_few_columns_at_a_time(engine: str, device: str) -> None:
    latent = {"heads": 16, "kv_heads": 1, "qk_dim": 576, "v_dim": 512, "mla": True}
    stand = Stand(TOY.but(lens=(400,), sinks=True, policy=Few(tile=16, count=20), **latent), engine, device)
    stand.check()
    assert stand.plan().lanes[0].schedule.partials == 21


def test_tiles_of_the_merge_follow_the_number_of_ranges() -> None:
    wide, usual = MLA.spec(), GQA.spec()

    def tiles(spec: AttentionSpec, *, ranges: int, persistent: bool = True) -> MergeTiles:
        target = Target(kind="cuda", arch=90)
        return MergeTiles.choose(spec, target, persistent=persistent, ranges=ranges, owners=8)

    for ranges, wanted in {1: (4, 512, 1), 4: (4, 512, 1), 8: (8, 512, 1), 21: (32, 128, 4), 66: (64, 64, 8)}.items():
        made = tiles(wide, ranges=ranges)
        assert (made.block_s, made.block_v, made.of_dim) == wanted
    assert tiles(wide, ranges=66, persistent=False).of_dim == tiles(usual, ranges=66).of_dim == 1
    assert [tiles(usual, ranges=ranges).num_stages for ranges in (1, 66)] == [3, 3]
    assert [tiles(usual, ranges=ranges, persistent=False).num_stages for ranges in (1, 66)] == [1, 1]
    few, many = tiles(usual, ranges=8), tiles(usual, ranges=9)
    assert (few.block_s, few.block_v, few.num_warps) == (4, 128, 1)
    assert (many.block_s, many.block_v, many.num_warps) == (16, 128, 2)


def test_wide_offsets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(TOY.but(policy=Few()), *ENGINES[-1])
    narrow = stand.run()
    monkeypatch.setattr(launch, "NARROW_BELOW", 0)
    for a, b in zip(narrow, stand.run(), strict=True):
        assert torch.equal(a, b)


def test_times_have_a_row_for_every_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand = Stand(TOY.but(policy=Balanced(), lens=(5,)), "eager", "cpu")
    monkeypatch.setattr(stand.backend.engine, "check_times", lambda: None)
    with record(stand.backend, times=True) as trace:
        stand.run()
    schedule = stand.plan().lanes[0].schedule
    assert len(trace.calls[0].times) == schedule.programs == 132
    trace.save(tmp_path / "t")
    for call in (trace.calls[0], Trace.load(tmp_path / "t").calls[0]):
        assert torch.equal(call.program_indptr, schedule.program_indptr)
        assert int(call.program_indptr[-1]) <= len(call.segments)


# Verifying

CHAIN = SeveralCase(id="chain", why="", mask="chain", prefix=(200, 8, 0, 97), new=(4, 9, 3, 0), policy=Few())
MASKED = CHAIN.but(id="masked", mask="random", new=(4, 9, 3, 2))
DRAFTED = [
    *(case.but(policy=Few()) for case in VERIFIED),
    CHAIN.but(id="balanced", why="a share a range", policy=Balanced(tile=32)),
    CHAIN.but(id="window-of-tiles", why="hidden, whole and cut tiles", prefix=(400, 300), new=(20, 5), window=250),
    CHAIN.but(
        id="window-of-drafts", why="tiles that a window hides from all but a few", prefix=(300,), window=12, new=(40,)
    ),
    CHAIN.but(id="chunk-of-tiles", why="a chunk that begins in a tile", prefix=(300, 250), new=(5, 9), chunk=160),
    CHAIN.but(
        id="chunk-begins-among-drafts", why="cached keys hidden from later drafts", prefix=(300,), new=(40,), chunk=160
    ),
    CHAIN.but(id="no-rows-in-a-tile", why="no row says where its window begins", prefix=(3, 90), new=(2, 40), window=5),
    *(
        CHAIN.but(
            id=f"tiles-of-drafts-{name}",
            why="the first tile of drafts is loaded ahead, full or not; of others none, one, or two more",
            prefix=(70, 33, 96, 64, 40),
            new=(1, 15, 16, 17, 33),
            **features,
        )
        for name, features in {
            "chain": {"sinks": True},
            "tree": {"mask": "tree", "window": 60},
            "read-back": {"read_back": True, "k_scale": 0.5, "v_scale": 0.25},
            "dim-80": {"qk_dim": 80, "v_dim": 80, "softcap": 5.0, "temperature_len": 32},
            "latent": {"mask": "tree", "kv_heads": 1, "qk_dim": 48, "v_dim": 32, "mla": True, "read_back": True},
        }.items()
    ),
    CHAIN.but(id="several-tiles", why="requests without drafts for some tiles", prefix=(200, 90, 70), new=(40, 2, 20)),
]


@engines
@pytest.mark.parametrize("case", DRAFTED, ids=lambda case: case.id)
def test_verify_agrees_with_the_oracle(case: SeveralCase, engine: str, device: str) -> None:
    SeveralStand(case, engine, device).check("verify")


@engines
@pytest.mark.parametrize("case", [MASKED, MASKED.but(window=90)], ids=["mask", "mask in a window"])
def test_a_mask_over_cached_keys_is_read(case: SeveralCase, engine: str, device: str) -> None:
    """Its bits hide cached keys too, which whole tiles otherwise show to all."""
    stand = SeveralStand(case, engine, device)
    drafts = VerifyBatch.chain(rows=stand.rows, prefix=case.prefix, drafts=case.new, device=stand.device)
    lse = torch.full((sum(case.new), stand.spec.heads), float("nan"), device=stand.device)
    plan = stand.backend.plan(replace(drafts, mask=stand.batch.mask))
    out = stand.backend.verify(1, *stand.new(), plan, lse=lse)
    want_out, want_lse = stand.expected()
    torch.testing.assert_close(out.double(), want_out, **OUTPUT[torch.float32])
    torch.testing.assert_close(lse.double(), want_lse, **LSE)


@engines
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("mask", ["chain", "tree"])
def test_a_requests_own_drafts_alone_reach_it(mask: str, engine: str, device: str) -> None:
    """Those of others, and what lies before the first one and behind the last, may be NaN."""
    stand = SeveralStand(CHAIN.but(prefix=(70, 33, 96, 64, 40), new=(1, 15, 16, 17, 33), mask=mask), engine, device)
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


@engines
def test_scratch_that_nobody_owns_reaches_no_draft(engine: str, device: str) -> None:
    stand = SeveralStand(CHAIN.but(new=(4, 40, 3, 0)), engine, device)
    poisoned = stand.run("verify")
    stand.backend.workspace.fill(0.0)
    for a, b in zip(poisoned, stand.run("verify"), strict=True):
        assert torch.equal(a, b)


def test_drafts_leave_the_same_states_on_both_engines() -> None:
    """What is recorded is what each range gave: also of ranges with hidden, whole and cut tiles."""
    case = CHAIN.but(prefix=(400, 300, 5), new=(20, 5, 2), window=250, policy=Few(count=4))
    left = []
    for engine, device in (("eager", DEVICE), ENGINES[-1]):
        stand = SeveralStand(case, engine, device)
        plan = stand.backend.plan(stand.batch)
        stand.backend.verify(1, *stand.new(), plan, keeps=True)
        partials, splits = stand.backend.partials(1, plan), plan.lane(1).splits
        rows = (torch.tensor(case.new, device=partials.lse.device) * stand.spec.group)[splits.request.long()]
        live = torch.arange(partials.lse.shape[1], device=rows.device) < rows[:, None]
        live &= (splits.start < splits.end)[:, None]
        owned = torch.zeros_like(partials.lse, dtype=torch.bool)
        for r in range(len(case.new)):
            for h in range(stand.spec.kv_heads):
                at = slice(*plan.lane(1).schedule.merge_indptr[r * stand.spec.kv_heads + h :][:2].tolist())
                owned[at] = live[splits.indptr[r] : splits.indptr[r + 1]]
        left.append((partials.lse[owned], partials.output[owned]))
    (lse, out), (its_lse, its_out) = left
    assert lse.shape[0] > 100
    torch.testing.assert_close(its_lse, lse, **LSE)
    torch.testing.assert_close(its_out, out, **OUTPUT[torch.float32])


def test_wide_offsets_give_drafts_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = SeveralStand(CHAIN, *ENGINES[-1])
    narrow = stand.run("verify")
    monkeypatch.setattr(launch, "NARROW_BELOW", 0)
    for a, b in zip(narrow, stand.run("verify"), strict=True):
        assert torch.equal(a, b)


@dataclass(frozen=True, kw_only=True)
class Told(Few):
    """Keeps what it was told of drafts; a verify has more shares than a decode."""

    name = "told"
    drafts: list[int | None] = field(default_factory=list)

    def shares(self, ctx: SplitContext) -> int:
        self.drafts.append(ctx.drafts)
        return 3 if ctx.drafts is None else 9


def test_a_policy_knows_how_many_drafts_a_request_has_at_most() -> None:
    """Of a decode it is told none; the scratch holds what it asks for in either mode."""
    policy = Told()
    stand = SeveralStand(CHAIN.but(policy=policy), "eager", "cpu")
    policy.drafts.clear()
    stand.check("verify")
    assert set(policy.drafts) == {9}
    policy.drafts.clear()
    plan = stand.backend.plan(DecodeBatch.of(rows=stand.rows[:2], lens=[204, 12], device="cpu"))
    assert set(policy.drafts) == {None} and plan.lane(1).schedule.programs == 3 * stand.spec.kv_heads


# Everything else that cuts


@pytest.mark.parametrize("pool", ["window", "unified mla"])
def test_replays_give_the_bits_of_the_eager_path(pool: str) -> None:
    """Padded rows have no tile, so that they move no cut."""
    engine = "triton" if DEVICE == "cuda" else "eager"
    assert set(Server(pool, engine=engine, policy=Few(tile=16), device=DEVICE).run(40)) == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_planning_waits_for_nothing(mode: str) -> None:
    server = Server("window", engine="eager", policy=Balanced(), device=DEVICE, modes=[])
    batch = on_device(server, server.batch(mode, [server.admit(n) for n in (40, 3, 17)]))
    with nothing_waits(batch.rows):
        server.backend.plan(batch)


@settings(max_examples=10)
@given(batch=lens(max_len=400, min_reqs=1, max_reqs=5))
def test_a_workbench_decodes_as_under_any_other_policy(batch: list[int]) -> None:
    one, other = (
        attnlab.workbench("SmolLM2-135M", lens=batch, policy=policy, engine="eager", layers=[18])
        for policy in ("balanced", "static")
    )
    torch.testing.assert_close(one.decode(18), other.decode(18), **OUTPUT[torch.float16])


def test_a_picture_says_that_programs_share_ranges() -> None:
    view = cut_view(Balanced(programs=2), [5000, 17, 300], context(kv_heads=8, multiprocessors=8))
    assert view.working == 16 and view.spare == 0
    assert "8 KV heads shared by 16 programs with keys" in show(view).to_svg()


@given(batch=lens(max_len=2_000, min_reqs=1), size=st.integers(1, 300), most=st.integers(1, 20))
def test_sizes_that_would_break_what_is_promised_of_all_requests_are_raised(
    batch: list[int], size: int, most: int
) -> None:
    bounds = SplitBounds(max_ranges=1000, min_size=1, in_all=most)
    held = torch.tensor(batch, dtype=torch.int32)
    sizes = SplitSizes(size=torch.full_like(held, size), nominal=torch.ones_like(held))
    splits = splits_of_sizes(sizes, held, policy="x", bounds=bounds, total=sum(batch))
    splits.validate(batch)
    assert int(splits.indptr[-1]) <= len(batch) + most


@pytest.mark.parametrize("engine", ["eager"])
def test_drafts_that_grow_beyond_their_shares_are_cut_in_fewer_ranges(engine: str) -> None:
    """Twelve steps over four cached tokens: every list ends four times as long as what was dealt."""
    steps = 12
    wb = attnlab.workbench(
        *("SmolLM2-135M",), lens=[4, 4, 4, 4], room=steps, policy=Few(tile=2, count=2), engine=engine, layers=[18]
    )
    for row in wb.table.rows:
        wb.cache.append(row, draft_room(4, topk=1, steps=steps, page_size=1))
    batch = attnlab.DraftBatch.of(rows=wb.table.rows, lens=[4] * 4, topk=1, steps=steps, device="cpu")
    for i, step in enumerate(wb.backend.plan(batch).steps):
        lane = step.lane(18)
        lane.splits.validate([5 + i] * 4)
        lane.schedule.validate(lane.splits)


def test_an_empty_segment_belongs_to_no_program() -> None:
    """The program that owned it would answer for its request, which has keys elsewhere."""
    stand = Stand(TOY.but(policy=Balanced(), lens=(20, 30)), "eager", "cpu")
    lane = stand.plan().lanes[0]
    schedule = lane.schedule
    empty = torch.zeros(1, 5, dtype=torch.int32)
    owned = schedule.program_indptr.clone()
    live = schedule.segments[: int(owned[-1])]
    replace(schedule, segments=torch.cat([live, empty])).validate(lane.splits)
    owned[-1] += 1
    with pytest.raises(ValueError, match="reads nothing"):
        replace(schedule, segments=torch.cat([live, empty]), program_indptr=owned).validate(lane.splits)


@pytest.mark.parametrize("heads", [8, 4])
def test_outputs_share_no_memory_with_queries(heads: int) -> None:
    """Some requests are answered while the queries of others are still to be read."""
    stand = Stand(TOY.but(policy=Balanced(), lens=(20, 30, 40, 50), heads=heads), "eager", "cpu")
    rows = torch.zeros(6, heads, 32)
    with pytest.raises(ValueError, match="out: shares its memory with q"):
        stand.backend.decode(1, rows[1:5], None, None, stand.plan(), save=False, out=rows[2:6])
    lse = rows.view(-1)[: 4 * heads].view(4, heads)
    with pytest.raises(ValueError, match="lse: shares its memory with q"):
        stand.backend.decode(1, rows[1:5], None, None, stand.plan(), save=False, lse=lse)
