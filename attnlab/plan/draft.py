"""Multi-step drafting: where drafts lie in the request table, how the lists of all steps are cut, and the plan.

Reference: TritonMultiStepDraftBackend. There all steps share the counts of splits, and lists know no windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.batch import DeviceLens, DraftBatch, HostLens, Lens
from attnlab.checks import positive, require, tensor, whole
from attnlab.plan.explain import Reading
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import DraftLists, KVLayout
from attnlab.plan.plans import DecodePlan, Lane, Turn
from attnlab.plan.policy import MIN_BLOCK, HostPolicy, SplitBounds, SplitContext, SplitPolicy, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.signature import Signature, signature_of
from attnlab.plan.splits import (
    Ranges,
    SizesOf,
    SplitPlan,
    known_lens,
    ranges_of_host,
    splits_of_ranges,
    splits_of_sizes,
)
from attnlab.spec import Sight

T = TypeVar("T", int, Tensor)


def branch_stride(cached: T, *, steps: int, page_size: int) -> T:
    """Return how many columns of the request table lie between the drafts of one branch and those of the next.

    Draft i of branch t, both counted from 0, is in column `cached + t * branch_stride + i`. A branch has whole pages:
    its own copy of the page in which the cached tokens end, and those that its `steps` drafts fill from there.

    >>> branch_stride(130, steps=3, page_size=1), branch_stride(130, steps=3, page_size=4)
    (3, 8)
    """
    return -(-(cached % page_size + steps) // page_size) * page_size


def draft_room(cached: int, *, topk: int, steps: int, page_size: int) -> int:
    """Return how many tokens a request appends behind its `cached` ones, so that all branches' drafts have slots.

    >>> draft_room(130, topk=4, steps=3, page_size=1), draft_room(130, topk=4, steps=3, page_size=4)
    (12, 27)
    """
    for name, value in (("topk", topk), ("steps", steps), ("page_size", page_size)):
        positive(name, value)
    require(whole("cached", cached) >= 0, f"cached: expected at least 0 tokens, got {cached}")
    return (topk - 1) * branch_stride(cached, steps=steps, page_size=page_size) + steps


def draft_columns(seq: Lens, *, topk: int, steps: int, page_size: int) -> int:
    """Return the most columns of the request table that a request takes, its drafts included."""
    if seq.count == 0:
        return 0
    if isinstance(seq, HostLens):
        lens: Sequence[int] = seq.values
    else:  # what is taken grows by a page with every page of cached tokens, but not evenly in between
        lens = range(max(1, seq.bound_max - page_size + 1), seq.bound_max + 1)
    room = {"topk": topk, "steps": steps, "page_size": page_size}
    return max((n + draft_room(n, **room) for n in lens if n), default=0)


def branch_lens(seq: Lens, topk: int, *, ahead: int) -> Lens:
    """Return the lengths of all branches, request by request, `ahead` tokens ahead; a padded row's stay 0.

    On the device they are held to what the host was told of them, so that no buffer is overrun.

    >>> branch_lens(HostLens.of([5, 0], device="cpu"), 2, ahead=1).values
    (6, 6, 0, 0)
    """

    def grown(lens: Sequence[int]) -> tuple[int, ...]:
        return tuple(n + ahead if n else 0 for n in lens for _ in range(topk))

    held = seq.device.clamp(0, seq.bound_max)
    device = torch.where(held > 0, held + ahead, 0).repeat_interleave(topk)
    if isinstance(seq, HostLens):
        return HostLens(values=grown(seq.values), device=device)
    return DeviceLens(
        device=device,
        bound_each=seq.bound_max + ahead,
        bound_total=topk * (seq.bound_total + seq.count * ahead),
        least=grown(seq.least_each),
    )


def most_entries(lens: Lens, sight: Sight) -> int:
    """Return how many entries the lists of all that the last token of each request sees have together, at most.

    >>> most_entries(branch_lens(HostLens.of([5, 300], device="cpu"), 4, ahead=1), Sight(window=128))
    536
    """
    if isinstance(lens, HostLens):
        return sum(_seen(lens.values, sight))
    each = min(lens.bound_max, sight.span or lens.bound_max)
    return min(lens.bound_total, each * lens.count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftCut:
    """How layers of one kind cut the lists of all steps: as the policy does the cached tokens, asked once.

    `asked` are its range sizes or, of a policy in plain Python, each step's ranges. A step's lists have at most
    `entries` together.
    """

    policy: str
    bounds: SplitBounds
    entries: int
    asked: SplitSizes | Sequence[Ranges]

    @classmethod
    def of(
        cls,
        policy: SplitPolicy | HostPolicy,
        seq: Lens,
        steps: Sequence[Lens],
        sight: Sight,
        ctx: SplitContext,
        sizes_of: SizesOf,
    ) -> DraftCut:
        """Ask the policy for branches over `seq` cached tokens, `ctx.rows_per_seq` a request, that become `steps`."""
        cached = branch_lens(seq, ctx.rows_per_seq, ahead=0)
        longest = max(mine.bound_max for mine in steps)
        asked: SplitSizes | list[Ranges]
        if isinstance(policy, HostPolicy):
            ranges = ranges_of_host(policy, _seen(known_lens(policy, cached), sight), ctx)
            asked = [_stretched(ranges, _seen(known_lens(policy, mine), sight)) for mine in steps]
        else:
            n = cached.device
            asked = sizes_of(policy, n - torch.minimum(n, sight.first(n - 1)), ctx)
            tensor("size", asked.size, shape=list(n.shape), dtype=torch.int32, hint=f"policy {policy.name!r}")
        return cls(
            policy=policy.label(ctx),
            bounds=policy.bounds(bound_max=min(longest, sight.span or longest), ctx=ctx),
            entries=max(most_entries(mine, sight) for mine in steps),
            asked=asked,
        )

    def splits(self, lists: DraftLists) -> list[SplitPlan]:
        """Return the ranges of every step's lists, held to the entries that these really have."""
        lens = lists.indptr.diff(dim=1)
        if not isinstance(self.asked, SplitSizes):
            pairs = zip(self.asked, lens, strict=True)
            return [splits_of_ranges(ranges, live, policy=self.policy) for ranges, live in pairs]
        sizes = _raised(self.asked, lens.amax(0), self.bounds)
        return [
            splits_of_sizes(sizes, live, policy=self.policy, bounds=self.bounds, total=self.entries) for live in lens
        ]

    def lanes(self, lists: DraftLists, *, sight: Sight, space: str, kv_heads: int) -> list[Lane]:
        """Return a lane for every step, over the one buffer that holds the lists of all."""
        return [
            Lane(
                layout=KVLayout(
                    index=KVIndex(indptr=lists.indptr[i], slots=lists.slots[i], space=space),
                    start=lists.start[i],
                    start_visible=lists.start[i],
                    sight=sight,
                ),
                write_slots=lists.write[i],
                splits=splits,
                schedule=Schedule.one_range_a_program(splits, kv_heads=kv_heads),
            )
            for i, splits in enumerate(self.splits(lists))
        ]


def check_scratch(
    batch: DraftBatch,
    cuts: Sequence[DraftCut],
    max_ranges: int | None,
    *,
    max_requests: int | None,
    max_tokens: int | None,
) -> None:
    """Raise ValueError where a step may need more ranges than the scratch holds: `cuts` are those of all layers.

    The words name which of `max_requests` and `max_tokens`, of which the scratch was made, is too small.
    """
    entries = max(cut.entries for cut in cuts)
    capacity = max(cut.bounds.capacity(reqs=batch.branches, total=cut.entries) for cut in cuts)
    needs = (("max_requests", batch.branches, max_requests), ("max_tokens", entries, max_tokens))
    lacking = [(name, least) for name, least, has in needs if has is None or has < least]
    listed = " and ".join(f"{name} of at least {least:,}" for name, least in lacking)
    require(
        max_ranges is None or capacity <= max_ranges,
        f"batch: {batch.seq.count:,} requests x {batch.topk} branches are {batch.branches:,} rows of a decode and may "
        f"need {capacity:,} ranges, the scratch holds {max_ranges}; build the backend with {listed}, as "
        "every branch lists its request's tokens anew",
    )


def _seen(lens: Sequence[int], sight: Sight) -> list[int]:
    """Return how many tokens the last of so many sees."""
    return [n - min(n, sight.first(n - 1)) for n in lens]


def _stretched(ranges: Ranges, lens: Sequence[int]) -> Ranges:
    """Return ranges as they are, but for the last of each list, which ends where the list does."""
    kept = [[(a, b) for a, b in mine if a < n] for mine, n in zip(ranges, lens, strict=True)]
    return [[*mine[:-1], (mine[-1][0], n)] if mine else [] for mine, n in zip(kept, lens, strict=True)]


def _raised(sizes: SplitSizes, longest: Int[Tensor, " branches"], bounds: SplitBounds) -> SplitSizes:
    """Return the sizes for lists that become so long: all steps are cut alike, and none in more ranges than promised.

    Where drafts would make one range too many, the size becomes an even share, rounded up to whole blocks of keys.
    """
    size = sizes.size.clamp(min=bounds.min_size)
    share = bounds.least_size(longest)
    even = -(-share // MIN_BLOCK) * MIN_BLOCK
    return SplitSizes(size=torch.where(size < share, even, size), nominal=sizes.nominal)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftPlan:
    """The steps of a draft, planned at once: `steps[i]`, counted from 0, is a DecodePlan with a row for every branch.

    `backend.decode(layer, q, k, v, plan.steps[i])` stores draft i of all branches and attends with them. The lists of
    all steps lie in one buffer, a row a step. Branches of one draft need no step, and have none. Branches have pages of
    their own, of `page_size` slots, from the one in which the cached tokens end.
    """

    batch: DraftBatch
    steps: tuple[DecodePlan, ...]
    epoch: int
    page_size: int
    turn: Turn = field(default_factory=Turn)

    def __post_init__(self) -> None:
        got, wanted = len(self.steps), self.batch.steps - 1
        require(got == wanted, f"steps: expected {wanted} for branches of {wanted + 1} drafts, got {got}")
        for step in self.steps:
            rows, branches = step.batch.seq.count, self.batch.branches
            require(rows == branches, f"steps: expected a row for each of {branches} branches, got {rows}")

    def signature(self) -> Signature:
        """Return what a CUDA graph bakes in of this plan: addresses, shapes, compile-time choices."""
        return signature_of(self)

    def validate(self, *, num_slots: int | Mapping[str, int]) -> None:
        """Read all tensors (waits for the device); raise ValueError where any of them is inconsistent.

        `num_slots`: slots of the storage, or of each id space by name.
        """
        self.batch.seq.validate()
        for i, step in enumerate(self.steps):
            wanted = branch_lens(self.batch.seq, self.batch.topk, ahead=i + 1).device.tolist()
            got = step.batch.seq.device.tolist()
            require(got == wanted, f"steps: step {i} expected branches of {wanted[:8]} tokens, got {got[:8]}")
            step.validate(num_slots=num_slots)
        for number in range(len(self.steps[0].lanes) if self.steps else 0):
            _validate_branches([step.lanes[number] for step in self.steps])

    def explain(self, step: int, branch: int) -> tuple[Reading, ...]:
        """Return which slots a branch reads in a step, in which pool, and why: a reading for every lane."""
        for name, number, count in (("step", step, len(self.steps)), ("branch", branch, self.batch.branches)):
            got = whole(name, number)
            require(0 <= got < count, f"{name}: expected one of {count}, counted from 0, got {got}")
        return self.steps[step].explain(branch)


def _validate_branches(lanes: Sequence[Lane]) -> None:
    """Check that no two drafts share a slot, and that a branch lists its own drafts alone, in their order."""
    written = [lane.write_slots.tolist() for lane in lanes]
    live = [slot for slots in written for slot in slots if slot != 0]
    require(len(set(live)) == len(live), f"write_slots: drafts share their slot, {live[:8]}")
    for i, lane in enumerate(lanes):
        offsets, slots = lane.layout.index.indptr.tolist(), lane.layout.index.slots.tolist()
        for branch, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
            most = min(b - a, i + 1)
            own = [mine[branch] for mine in written[: i + 1]][i + 1 - most :]
            got = slots[b - most : b]
            require(got == own, f"slots: step {i}, branch {branch} has its drafts at {own}, lists {got}")
