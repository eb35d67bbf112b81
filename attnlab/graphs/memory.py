"""A plan whose memory is filled again for every step: by a CUDA graph of the planning itself, or by copying.

Planning never waits for the device, so it can be captured; a policy in plain Python cannot, and a CPU has no graphs:
there the plan is made as ever and copied to where the first one lies.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlab.batch import LENS, Batch, DraftBatch, ExtendBatch, HostLens, VerifyBatch, lens_of, names_of
from attnlab.checks import require
from attnlab.kernels.target import launching_on
from attnlab.mask import CustomMask
from attnlab.plan.build import Planner
from attnlab.plan.draft import DraftPlan
from attnlab.plan.plans import Plan, Turn
from attnlab.plan.policy import HostPolicy, SplitBounds, SplitContext, SplitPolicy, SplitSizes

AnyBatch = Batch | DraftBatch
"""What a graph can be captured for."""
Filled = Plan | DraftPlan
"""The plan of such."""
F = TypeVar("F", bound=Plan | DraftPlan)
Pair = tuple[str, Tensor, Tensor]
"""A name, and what the memory and a step's batch have under it."""


class PlanMemory:
    """Plans of one graph: all of them lie where the first one does.

    `batch` is the memory that steps are copied to. `recorded`: planning is captured in a CUDA graph.
    """

    def __init__(self, planner: Planner, batch: AnyBatch, *, max_ranges: int, recorded: bool) -> None:
        self._planner, self.batch, self._max_ranges = planner, batch, max_ranges
        self._places = {name: x for name in names_of(type(batch)) if (x := _tensor(getattr(batch, name))) is not None}
        self._own = {storage_of(x): f"batch.{name}" for name, x in self._places.items()}
        self._on_host = isinstance(planner.policy, HostPolicy)
        self.graph = torch.cuda.CUDAGraph() if recorded and not self._on_host else None
        policy = Room(planner.policy) if isinstance(planner.policy, HostPolicy) else planner.policy
        largest = replace(planner, policy=policy)

        def make() -> Filled:
            return largest.make(batch, max_ranges=max_ranges)

        with launching_on(batch.rows.device):
            made = make() if self.graph is None else recorded_in(self.graph, make)
        self.turn = Turn()
        self.first = renewed(made, epoch=planner.pool.epoch, turn=self.turn)

    def fill(self, given: AnyBatch) -> Filled:
        """Return the plan of a step, in the same memory as all before it, whose turn is over.

        What can be refused is refused before anything is written, and before that turn ends.
        """
        pairs = [(name, x, y) for name, x in self._places.items() if (y := _tensor(getattr(given, name))) is not None]
        check_room(self.batch, given, pairs, self._own)
        made = self._made(padded_on_host(self.batch, given)) if self._on_host else None
        self.turn.over = True
        refill_batch(given, pairs)
        with launching_on(self.batch.rows.device):
            if self.graph is not None:
                self.graph.replay()
            else:
                copy_plan(self.first, self._made(self.batch) if made is None else made)
        self.turn = Turn()
        return renewed(self.first, epoch=self._planner.pool.epoch, turn=self.turn)

    def _made(self, batch: AnyBatch) -> Filled:
        return self._planner.make(batch, max_ranges=self._max_ranges)


def recorded_in(graph: torch.cuda.CUDAGraph, work: Callable[[], Any]) -> Any:
    """Capture some work in a CUDA graph, after it ran twice, so that its kernels are compiled; return its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    with no_collection(), torch.cuda.graph(graph):
        return work()


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now, and not before the end: a graph that is freed while another is captured breaks it."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def renewed(plan: F, *, epoch: int, turn: Turn) -> F:
    """Return a new plan object over a plan's memory; of a draft, so are its steps. Nothing is looked at again."""
    made: F = object.__new__(type(plan))
    for name in names_of(type(plan)):
        object.__setattr__(made, name, getattr(plan, name))
    object.__setattr__(made, "epoch", epoch)
    object.__setattr__(made, "turn", turn)
    if isinstance(plan, DraftPlan):
        object.__setattr__(made, "steps", tuple(renewed(step, epoch=epoch, turn=turn) for step in plan.steps))
    return made


def check_room(memory: AnyBatch, given: AnyBatch, pairs: Sequence[Pair], own: Mapping[int, str]) -> None:
    """Raise ValueError where the memory is too small for a step's batch, or its mask lies askew in the memory's own.

    `own` names the memory's tensors by the address of their storage.
    """
    _check_totals(memory, given)
    for name, there, here in pairs:
        room, live = there.shape[0], here.shape[0]
        if live > room:
            raise ValueError(f"{name}: expected at most the {room:,} entries that were captured, got {live:,}")
        if name != "mask":
            check_apart(name, here, there, own)
            continue
        askew = _shares(there, here) and there.data_ptr() != here.data_ptr()
        require(not askew, "mask: lies in the graph's own memory, but not at their beginning; fill them from the front")


def check_apart(name: str, x: Tensor, there: Tensor, own: Mapping[int, str]) -> None:
    """Raise ValueError where what is copied to `there` is a graph's own and may be overwritten before it is read.

    `own` has the graph's tensors by the address of their storage. What lies in its own place already is welcome.
    """
    if x.numel() == 0:
        return
    owner = own.get(storage_of(x))
    if owner is None:
        return
    in_place = _shares(x, there) and x.data_ptr() == there.data_ptr() and x.is_contiguous()
    require(
        in_place,
        f"{name}: lies in the graph's own memory ({owner}), elsewhere than where it is copied to, and might be "
        f"overwritten before it is read; pass {name}.clone()",
    )


def _check_totals(memory: AnyBatch, given: AnyBatch) -> None:
    """Raise ValueError where requests have more tokens together than there is room for: lists would be cut off."""
    for name in names_of(type(memory)):
        there, here = getattr(memory, name), getattr(given, name)
        if not isinstance(there, LENS) or not isinstance(here, LENS):
            continue
        total, room = min(here.bound_total, here.bound_max * here.count), there.bound_total
        if total > room:
            known = isinstance(here, HostLens)
            bound, promise = ("", "") if known else ("up to ", "promise a smaller bound_total, or ")
            raise ValueError(
                f"{name}: {bound}{total:,} tokens in all, the graph was captured for {room:,}, the backend's "
                f"max_tokens; {promise}build the backend with max_tokens of at least {total:,} (tokens whose slots "
                "several requests share count for each of them), and capture again"
            )


def refill_batch(given: AnyBatch, pairs: Sequence[Pair]) -> None:
    """Copy a step's batch, which fits, to the front of the memory it is paired with; all rows behind it become padding.

    Entries of a mask that were written in place are not copied, and what lies behind them stays. Behind entries that
    are copied an earlier step's stay where the host knows that nobody reads them; else they are cleared, as 0 hides.
    """
    for name, there, here in pairs:
        live, in_place = here.shape[0], name == "mask" and _shares(there, here)
        full = live == there.shape[0]
        if not in_place:
            (there if full else there[:live]).copy_(here, non_blocking=True)
        if not full and (name != "mask" or not (in_place or _known(given))):
            there[live:].zero_()


def _known(batch: AnyBatch) -> bool:
    """Whether the host knows all lengths; a mask then has an entry for every pair."""
    return all(isinstance(lens, HostLens) for lens in lens_of(batch))


def storage_of(x: Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return x.untyped_storage().data_ptr()


def _shares(a: Tensor, b: Tensor) -> bool:
    return storage_of(a) == storage_of(b)


def padded_on_host(memory: AnyBatch, given: AnyBatch) -> AnyBatch:
    """Return the batch with its padded rows, of lengths that the host knows, as a policy in plain Python needs them.

    It lies in memory of its own, so that a plan that is refused has changed nothing; but for a mask's entries, of which
    planning looks at the number alone.
    """
    changes: dict[str, Any] = {}
    for field in fields(memory):
        there, here = getattr(memory, field.name), getattr(given, field.name)
        if isinstance(here, HostLens):
            missing = there.count - here.count
            lens = torch.nn.functional.pad(here.device, (0, missing))
            changes[field.name] = HostLens(values=(*here.values, *[0] * missing), device=lens)
        elif isinstance(there, CustomMask):
            changes[field.name] = replace(there, bits=there.bits[: _bits(given)])
        elif field.name == "depth":
            changes[field.name] = here
        elif field.name == "rows":
            rows = here.to(there.device, there.dtype, non_blocking=True)
            changes[field.name] = torch.nn.functional.pad(rows, (0, there.shape[0] - rows.shape[0]))
    return replace(memory, **changes)


def _bits(batch: AnyBatch) -> int:
    """Return how many entries a batch's mask has; of lengths that the host knows, where it brings none."""
    if not isinstance(batch, ExtendBatch | VerifyBatch):
        return 0
    if isinstance(batch.mask, CustomMask):
        return batch.mask.bits.shape[0]
    new = batch.new if isinstance(batch, ExtendBatch) else batch.drafts
    return sum(n * (p + n) for p, n in zip(batch.prefix.least_each, new.least_each, strict=True))


def copy_plan(memory: Any, made: Any) -> None:
    """Copy a plan's tensors to the front of another's: behind them offsets stay what they are last, all else is 0."""
    fresh = dict(tensors_of("", made))
    for path, there in tensors_of("", memory):
        here = fresh[path]
        if there.data_ptr() == here.data_ptr() or there.shape[0] == 0:
            continue
        live = here.shape[0]
        require(live <= there.shape[0], f"{path}: expected at most {there.shape[0]} entries as captured, got {live}")
        there[:live].copy_(here)
        there[live:] = here[-1:] if path.endswith("indptr") else 0


def tensors_of(path: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """Return all tensors of a plan, a batch, or a tuple of such, each with its path: `lanes[0].layout.index.slots`."""
    if isinstance(x, Tensor):
        yield path, x
    elif isinstance(x, tuple):
        for i, item in enumerate(x):
            yield from tensors_of(f"{path}[{i}]", item)
    elif is_dataclass(x):
        for field in fields(x):
            yield from tensors_of(f"{path}.{field.name}", getattr(x, field.name))


def _tensor(x: Any) -> Tensor | None:
    """Return what a field of a batch keeps on the device."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, LENS):
        return x.device
    return x.bits if isinstance(x, CustomMask) else None


@dataclass(frozen=True)
class Room(SplitPolicy):
    """Stands in for a policy in plain Python where only its promises are needed: the memory of its largest plan."""

    host: HostPolicy
    name = "room for a policy in plain Python"

    def label(self, ctx: SplitContext) -> str:
        """Return the policy's own name."""
        return self.host.label(ctx)

    def bounds(self, *, bound_max: int, ctx: SplitContext) -> SplitBounds:
        """Return the policy's own promises."""
        return self.host.bounds(bound_max=bound_max, ctx=ctx)

    def sizes(self, lens: Tensor, ctx: SplitContext) -> SplitSizes:
        """Return sizes that are as good as any."""
        one = torch.ones_like(lens, dtype=torch.int32)
        return SplitSizes(size=one, nominal=one)
