"""What the branches of one request read in every step of a draft, and where their slots lie, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnlab.checks import require
from attnlab.plan.draft import DraftPlan, branch_stride
from attnlab.plan.plans import DecodePlan
from attnlab.spec import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRead:
    """What one branch reads in one step: the cached keys from `first` on, `cached` of them, then drafts of its own.

    `strays` are slots of its list that are none of these. Its draft goes to `write`.
    """

    branch: int
    step: int
    first: int
    cached: int
    drafts: tuple[int, ...]
    strays: tuple[int, ...]
    write: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """One request's draft in the layers of one lane: `topk` branches of `drafts` drafts after `cached` tokens.

    `requests` of the batch are drafted for, this one among them. `cached_slots` are those of the cached positions from
    `listed_from` on, which some list names. `own[t]` are the slots of branch t's drafts; its last one, of which no
    query is made, has none here.
    """

    request: int
    requests: int
    layer: int
    space: str
    sight: Sight
    cached: int
    topk: int
    drafts: int
    page_size: int
    listed_from: int
    cached_slots: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    reads: tuple[DraftRead, ...]

    @classmethod
    def of(cls, plan: DraftPlan, *, request: int, layer: int) -> DraftView:
        """Read a request's branches out of a plan (waits for the device). Raises ValueError where there is none such.

        >>> import attnlab
        >>> wb = attnlab.workbench("SmolLM2-135M", lens=[40, 40], policy="static", engine="eager", layers=[18])
        >>> wb.cache.truncate(0, 30)
        >>> slots = wb.cache.append(0, attnlab.draft_room(30, topk=2, steps=3, page_size=1))
        >>> plan = wb.backend.plan(attnlab.DraftBatch.of(rows=[0], lens=[30], topk=2, steps=3, device="cpu"))
        >>> view = DraftView.of(plan, request=0, layer=18)
        >>> [(read.step, read.branch, read.cached, read.drafts) for read in view.reads]
        [(0, 0, 30, (0,)), (0, 1, 30, (0,)), (1, 0, 30, (0, 1)), (1, 1, 30, (0, 1))]
        """
        batch = plan.batch
        require(batch.seq.count > 0, f"request: the plan has no request, got {request!r}")
        require(0 <= request < batch.seq.count, f"request: expected 0 to {batch.seq.count - 1}, got {request!r}")
        require(len(plan.steps) > 0, "plan: branches of one draft need no step, so there is nothing that they read")
        cached, lane = int(batch.seq.device[request]), plan.steps[0].lane(layer)
        branches = range(request * batch.topk, (request + 1) * batch.topk)
        lists = [[_list_of(step, layer, branch) for branch in branches] for step in plan.steps]
        writes = [step.lane(layer).write_slots[branches.start : branches.stop].tolist() for step in plan.steps]
        own = tuple(zip(*writes, strict=True)) if cached else ((),) * batch.topk
        known = dict(entry for mine in lists[0] for entry in mine if entry[0] < cached)
        listed_from = min(known, default=cached)
        return cls(
            request=request,
            requests=int(batch.seq.device.count_nonzero()),
            layer=layer,
            space=lane.layout.index.space,
            sight=lane.layout.sight,
            cached=cached,
            topk=batch.topk,
            drafts=batch.steps,
            page_size=plan.page_size,
            listed_from=listed_from,
            cached_slots=tuple(known.get(position, 0) for position in range(listed_from, cached)),
            own=own,
            reads=tuple(
                _read(mine, branch=t, step=i, cached=cached, known=known, own=own[t], write=writes[i][t])
                for i, of_step in enumerate(lists)
                for t, mine in enumerate(of_step)
            )
            if cached
            else (),
        )

    @property
    def stride(self) -> int:
        """Slots from one branch's drafts to the next one's."""
        return branch_stride(self.cached, steps=self.drafts, page_size=self.page_size)

    @property
    def copied(self) -> int:
        """Cached keys in the page in which they end: every branch but the first has room for a copy of them."""
        return self.cached % self.page_size

    def page_of(self, column: int) -> int | None:
        """Return the storage's page behind a column of the request table; None where no list says."""
        first = column // self.page_size * self.page_size
        slots = (self.slot_of(c) for c in range(first, first + self.page_size))
        return next((slot // self.page_size for slot in slots if slot), None)

    def slot_of(self, column: int) -> int:
        """Return the slot of a column that is read or written; 0 where no list says."""
        if column < self.cached:
            return self.cached_slots[column - self.listed_from] if column >= self.listed_from else 0
        branch, draft = divmod(column - self.cached, self.stride)
        return self.own[branch][draft] if branch < self.topk and draft < len(self.own[branch]) else 0

    def column_of(self, branch: int, draft: int) -> int:
        """Return where a draft stands in the request table."""
        return self.cached + branch * self.stride + draft


Entry = tuple[int, int]
"""A listed key: its position, and its slot."""


def _list_of(step: DecodePlan, layer: int, branch: int) -> list[Entry]:
    layout = step.lane(layer).layout
    first, end = layout.index.indptr[branch : branch + 2].tolist()
    return list(enumerate(layout.index.slots[first:end].tolist(), start=int(layout.start[branch])))


def _read(
    entries: Sequence[Entry],
    *,
    branch: int,
    step: int,
    cached: int,
    known: dict[int, int],
    own: Sequence[int],
    write: int,
) -> DraftRead:
    """Sort a branch's list by whose its keys are."""
    mine = dict(enumerate(own[: step + 1], start=cached))
    right = [position for position, slot in entries if {**known, **mine}.get(position) == slot]
    old = [position for position in right if position < cached]
    return DraftRead(
        branch=branch,
        step=step,
        first=min(old, default=cached),
        cached=len(old),
        drafts=tuple(position - cached for position in right if position >= cached),
        strays=tuple(slot for position, slot in entries if {**known, **mine}.get(position) != slot),
        write=write,
    )
