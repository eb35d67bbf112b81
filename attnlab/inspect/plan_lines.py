"""What `describe` says of a plan, in numbers: a line for every request of every lane, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnlab.plan.plans import DecodePlan, ExtendPlan, Lane, Plan
from attnlab.plan.splits import HostSplits
from attnlab.spec import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """What a lane has of one request.

    `edge` is the first position that its first query sees, by the lengths; the list begins at `start` with `padding`
    entries, and then names the keys from `listed_from` up to `end`, at `slots`. `unseen` cached keys lie before these.
    `asked` and `used` are ranges. `write` are the slots of its new tokens. `wrong` says what should be otherwise.
    """

    request: int
    row: int
    cached: int
    new: int
    edge: int
    start: int
    padding: int
    listed_from: int
    slots: tuple[int, ...]
    asked: int
    used: int
    write: tuple[int, ...]
    wrong: str

    @property
    def listed(self) -> int:
        """Keys that the list names."""
        return len(self.slots)

    @property
    def end(self) -> int:
        """The position behind the last listed key."""
        return self.listed_from + self.listed

    @property
    def unseen(self) -> int:
        """Keys of the request that no list names, as no query of this step sees them."""
        return min(self.listed_from, self.cached + self.new) if self.listed else self.cached


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounts:
    """Ranges and programs of a lane: programs are counted for each tile of heads."""

    asked: int
    used: int
    working: int
    launched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLines:
    """A lane: which layers take it, what they see, and a line for every request. `split` is None where none is cut."""

    layers: tuple[int, ...]
    space: str
    sight: Sight
    split: SplitCounts | None
    lines: tuple[RequestLine, ...]

    @property
    def padded(self) -> bool:
        """Whether a list begins with padding."""
        return any(line.padding for line in self.lines)


def lane_lines(plan: Plan, number: int, cached: Sequence[int], new: Sequence[int]) -> LaneLines:
    """Read a lane of a plan whose requests have so many cached and new tokens. Waits for the device.

    Of a lane that reads an encoder's keys these are the cached ones, and none is new.
    """
    lane, source = plan.lanes[number], plan.batch.rows
    if lane.cross and plan.batch.encoder is not None:
        source, cached = plan.batch.encoder.rows, plan.batch.encoder.lens.device.tolist()
        new = [0] * len(cached)
    layout = lane.layout
    host = lane.splits.to_host() if isinstance(lane, Lane) else None
    indptr, start, visible, rows, slots, write = (
        _list(x)
        for x in (
            layout.index.indptr,
            layout.start,
            layout.start_visible,
            source,
            layout.index.slots,
            lane.write_slots,
        )
    )
    lines, at = [], 0
    for r, (old, fresh) in enumerate(zip(cached, new, strict=True)):
        first, end = indptr[r : r + 2]
        padding = min(visible[r] - start[r], end - first)
        # Of a decode every row has an entry, padded ones too.
        own = slice(r, r + fresh) if isinstance(plan, DecodePlan) else slice(at, at + fresh)
        at += fresh
        edge = min(layout.sight.first(old), old + fresh)
        mine = tuple(slots[first + padding : end])
        last = old if isinstance(plan, ExtendPlan) and not plan.one_pass else old + fresh
        last = last if isinstance(plan, DecodePlan | ExtendPlan) else old
        lines.append(
            RequestLine(
                request=r,
                row=rows[r],
                cached=old,
                new=fresh,
                edge=edge,
                start=start[r],
                padding=padding,
                listed_from=visible[r],
                slots=mine,
                asked=0 if host is None else host.nominal[r],
                used=0 if host is None else host.effective[r],
                write=tuple(write[own]),
                wrong=_wrong(mine, visible[r], edge, last),
            )
        )
    return LaneLines(
        layers=tuple(layer for layer, its in plan.lane_of_layer.items() if its == number),
        space=layout.index.space,
        sight=layout.sight,
        split=_counts(lane, host) if isinstance(lane, Lane) and host is not None else None,
        lines=tuple(lines),
    )


def _counts(lane: Lane, host: HostSplits) -> SplitCounts:
    used = sum(host.effective)
    schedule = lane.schedule
    return SplitCounts(asked=sum(host.nominal), used=used, working=schedule.working(), launched=schedule.programs)


def _wrong(slots: Sequence[int], first: int, edge: int, end: int) -> str:
    """Return what is wrong with a list that should name the keys from `edge` up to `end`, or nothing."""
    wanted = max(0, end - edge)
    if len(slots) != wanted or (wanted and first != edge):
        keys = f"keys {edge:,} to {end - 1:,}" if wanted else "no key"
        return f"lengths and sight ask for {keys}, the list names {len(slots):,} from {first:,} on"
    if 0 in slots:
        return f"the key at position {first + slots.index(0):,} is read from slot 0, the sink"
    return ""


def _list(x: Tensor) -> list[int]:
    values: list[int] = x.tolist()
    return values
