"""A lane in two launches: every policy's is what it is part by part, buffer by buffer, tails included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlab.batch import DeviceLens, HostLens, Lens
from attnlab.eager.index import EagerPlanOps
from attnlab.graphs.memory import tensors_of
from attnlab.kernels.index import TritonPlanOps
from attnlab.kernels.lanes import cut_for_kernels
from attnlab.memory.pool import Translation
from attnlab.plan import policies  # noqa: F401  (registers the policies)
from attnlab.plan.lanes import LaneWork, Source
from attnlab.plan.layout import Extent
from attnlab.plan.ops import PlanOps
from attnlab.plan.plans import Lane
from attnlab.plan.policies.balanced import Balanced
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import (
    SharePolicy,
    SplitBounds,
    SplitContext,
    SplitPolicy,
    SplitSizes,
    resolve_policy,
    split_policies,
)
from attnlab.spec import Sight
from tests.strategies import DEVICE, contexts, lens

OPS: dict[str, PlanOps] = {"eager": EagerPlanOps(), "triton": TritonPlanOps(torch.device(DEVICE))}
COLUMNS, ROWS, PAGE = 700, 5, 4
TABLE = torch.arange(ROWS * COLUMNS, dtype=torch.int32, device=DEVICE).view(ROWS, COLUMNS)
PAGES = torch.tensor([0] + [(7 * i) % 1000 if i % 5 else -1 for i in range(1, ROWS * COLUMNS // PAGE)], device=DEVICE)
SAME = Source(TABLE, "pool", Translation.same("pool", page_size=PAGE))
TRANSLATED = Source(
    TABLE, "full", Translation(source="full", target="sliding", pages=PAGES, page_size=PAGE, stride=2 * PAGE)
)
PLAIN = SplitContext(heads=32, kv_heads=8, v_dim=64, mla=False, context_len=1 << 20, multiprocessors=132)


@dataclass(frozen=True, kw_only=True)
class Few(SharePolicy):
    """Any number of shares of any tiles: fewer tiles than shares, and more."""

    name = "few"
    tile: int = 16
    count: int = 5

    def shares(self, ctx: SplitContext) -> int:
        return self.count


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def work_of(policy: SplitPolicy, batch: Lens, ctx: SplitContext = PLAIN, **changes: Any) -> LaneWork:
    fields: dict[str, Any] = {
        "source": SAME,
        "rows": ints([r % ROWS for r in range(batch.count)], torch.int64),
        "lens": batch,
        "behind": 1,
        "sight": Sight(),
        "tokens": batch.count,
        "written": None,
        **changes,
    }
    return LaneWork.of(policy, ctx, **fields)


def check(work: LaneWork, *, fast: bool = True) -> Lane:
    """Hold the two lanes to each other, in every tensor; return that of the kernels."""
    assert (cut_for_kernels(work) is not None) == (fast and work.lens.count > 0)
    parts, lane = OPS["eager"].lane(work), OPS["triton"].lane(work)
    wanted, got = dict(tensors_of("", parts)), dict(tensors_of("", lane))
    assert wanted.keys() == got.keys()
    for path, x in wanted.items():
        assert (got[path].dtype, got[path].shape) == (x.dtype, x.shape), path
        assert torch.equal(got[path], x), f"{path}: {x.tolist()}, got {got[path].tolist()}"
    for name in ("kv_heads", "partials", "persistent", "head_tile"):
        assert getattr(lane.schedule, name) == getattr(parts.schedule, name)
    assert (lane.splits.policy, lane.layout.index.space) == (parts.splits.policy, parts.layout.index.space)
    lane.splits.validate(lane.layout.index.indptr.diff().tolist())
    lane.schedule.validate(lane.splits)
    return lane


spans = st.none() | st.integers(1, 300)
sights = st.builds(Sight, window=spans, chunk=spans)
shares = st.builds(Few, tile=st.sampled_from([1, 16, 128]), count=st.integers(1, 40))
any_policy = st.one_of(
    shares,
    st.sampled_from([resolve_policy(name) for name in split_policies.names()]).filter(
        lambda policy: isinstance(policy, SplitPolicy) and policy.name in ("balanced", "seed", "static", "tile")
    ),
    st.builds(Seed, max_splits=st.integers(1, 64)),
    st.builds(Static, splits=st.integers(1, 40)),
    st.builds(Tile, tile=st.integers(1, 300)),
)


@given(
    policy=any_policy,
    batch=lens(COLUMNS),
    ctx=contexts(),
    sight=sights,
    behind=st.integers(0, 1),
    translated=st.booleans(),
)
def test_two_launches_make_the_lane_of_its_parts(
    policy: SplitPolicy, batch: list[int], ctx: SplitContext, sight: Sight, behind: int, translated: bool
) -> None:
    held = HostLens.of(batch, device=DEVICE)
    check(work_of(policy, held, ctx, sight=sight, behind=behind, source=TRANSLATED if translated else SAME))


@given(
    policy=any_policy,
    batch=st.lists(st.integers(-5, 2000), min_size=1, max_size=8),
    each=st.integers(0, COLUMNS),
    total=st.integers(0, 3000),
    sight=sights,
    rows=st.lists(st.integers(-3, ROWS + 3), min_size=8, max_size=8),
)
def test_broken_promises_are_cut_off_alike(
    policy: SplitPolicy, batch: list[int], each: int, total: int, sight: Sight, rows: list[int]
) -> None:
    """Lengths beyond their bounds, and rows beyond the table, of which the host knows nothing."""
    promised = DeviceLens(device=ints(batch), bound_each=each, bound_total=total)
    check(work_of(policy, promised, sight=sight, rows=ints(rows[: len(batch)], torch.int64)))


@given(
    policy=any_policy,
    requests=st.lists(st.tuples(st.integers(0, COLUMNS), st.integers(0, 20)), max_size=8),
    tail=st.integers(0, 3),
    translated=st.booleans(),
)
def test_new_tokens_are_written_where_they_stand(
    policy: SplitPolicy, requests: list[tuple[int, int]], tail: int, translated: bool
) -> None:
    new = [n for _, n in requests]
    indptr = ints([sum(new[:r]) for r in range(len(new) + 1)])
    cached = HostLens.of([n for n, _ in requests], device=DEVICE)
    written = Extent(start=cached.device, start_visible=cached.device, indptr=indptr)
    source = TRANSLATED if translated else SAME
    check(work_of(policy, cached, source=source, behind=0, written=written, tokens=sum(new) + tail))


@pytest.mark.parametrize("policy", [Seed(), Balanced(), Few()], ids=str)
def test_layers_that_read_an_encoder_write_to_the_sink(policy: SplitPolicy) -> None:
    lane = check(work_of(policy, HostLens.of([30, 0, 7], device=DEVICE), behind=0, sight=Sight(cross=True)))
    assert lane.write_slots.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", [Seed(), Balanced(), Tile(tile=64)], ids=str)
@pytest.mark.parametrize("reqs", [511, 512, 513, 1300])
def test_sums_are_carried_over_any_number_of_requests(policy: SplitPolicy, reqs: int) -> None:
    batch = HostLens.of([(37 * r) % 90 if r % 7 else 0 for r in range(reqs)], device=DEVICE)
    check(work_of(policy, batch, sight=Sight(window=64)))


@pytest.mark.parametrize("policy", [Seed(), Static(), Balanced()], ids=str)
@pytest.mark.parametrize("batch", [[], [0], [0, 0, 0]], ids=str)
def test_batches_without_a_key_are_planned_alike(policy: SplitPolicy, batch: list[int]) -> None:
    check(work_of(policy, HostLens.of(batch, device=DEVICE)))


class Halves:
    """Sizes of two ranges a request, to mix into a policy."""

    def sizes(self, lens: torch.Tensor, ctx: SplitContext) -> SplitSizes:
        size = ((lens + 1) // 2).clamp(min=1)
        return SplitSizes(size=size, nominal=torch.full_like(lens, 2))


def test_a_policy_with_sizes_of_its_own_has_no_rule_of_anothers() -> None:
    class Doubled(Static):
        def sizes(self, lens: torch.Tensor, ctx: SplitContext) -> Any:
            return super().sizes(2 * lens, ctx)

    check(work_of(Doubled(), HostLens.of([300, 5], device=DEVICE)), fast=False)

    class Capped(Seed):
        def counts(self, lens: torch.Tensor, ctx: SplitContext) -> Any:
            return super().counts(lens, ctx).clamp(max=2)

    class Mixed(Halves, Tile):
        pass

    for policy in (Capped(), Mixed()):
        check(work_of(policy, HostLens.of([900, 5], device=DEVICE)), fast=False)


@dataclass(frozen=True, kw_only=True)
class Tight(Few):
    """Bounds that even shares cannot keep: they have bounds of their own."""

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        return SplitBounds(max_ranges=1, min_size=1)


class Growing(SharePolicy):
    """A number of shares that is another one whenever it is asked for: a plan asks once."""

    name, tile, asked = "growing", 16, 3

    def shares(self, ctx: SplitContext) -> int:
        self.asked += 1
        return self.asked


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("policy", [Tight(tile=16, count=2), Growing()], ids=lambda policy: type(policy).__name__)
def test_plans_hold_to_one_answer_of_a_share_policy(policy: SharePolicy, ops: str) -> None:
    """Found by a fuzzer: segments were written behind their memory."""
    lane = OPS[ops].lane(work_of(policy, HostLens.of([600, 5, 0, 77, 64], device=DEVICE)))
    lane.splits.validate(lane.layout.index.indptr.diff().tolist())
    lane.schedule.validate(lane.splits)


@pytest.mark.parametrize(
    ("policy", "words"),
    [(Few(tile=0), "tile"), (Few(count=0), "shares"), (Few(count=1 << 20), "shares: expected at most 16,384")],
)
def test_shares_that_no_plan_has_room_for_are_refused(policy: SharePolicy, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        work_of(policy, HostLens.of([64], device=DEVICE))
