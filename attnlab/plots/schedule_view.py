"""What a picture of split schedules shows, as plain numbers, and the sentence that it states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attnlab.checks import require
from attnlab.inspect.step import live_rows, prefix_and_new
from attnlab.inspect.workbench import Workbench
from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.policy import HostPolicy, SplitContext, SplitPolicy, resolve_policy
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import HostSplits, SplitPlan, check_ranges, cut
from attnlab.plots.words import between, everything, plural, short, times
from attnlab.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """One way of cutting a batch: each request's ranges, and the programs that read them, as far as known.

    `nominal` are the ranges asked for per request. `programs` are launched for each head tile, a range and KV head
    each; those beyond the ranges return at once. `busy` of them have keys where one may read several ranges; None: each
    reads one. `head_tiles` are those of a KV head's query heads: where they are not
    known, programs are counted for one of them. `multiprocessors` gives the measure of an even share. None: not known.
    `padded` rows of the plan, which stand for no request, are left out. In a step of a draft with several branches a
    row is a "branch", and what is said here of requests goes for these.
    """

    name: str
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    nominal: tuple[int, ...]
    kv_heads: int | None = None
    head_tiles: int | None = None
    programs: int | None = None
    busy: int | None = None
    multiprocessors: int | None = None
    padded: int = 0
    row: Literal["request", "branch"] = "request"

    def __post_init__(self) -> None:
        require(
            len(self.ranges) == len(self.nominal),
            f"nominal: expected a number for each of {len(self.ranges)} requests, got {len(self.nominal)}",
        )
        check_ranges(self.ranges, self.lens, policy=self.name, max_ranges=None)

    @property
    def lens(self) -> tuple[int, ...]:
        """Keys per request."""
        return tuple(mine[-1][1] if mine else 0 for mine in self.ranges)

    @property
    def used(self) -> tuple[int, ...]:
        """Ranges that hold keys, per request."""
        return tuple(len(mine) for mine in self.ranges)

    @property
    def total(self) -> int:
        """Keys in the batch."""
        return sum(end - start for mine in self.ranges for start, end in mine)

    @property
    def longest(self) -> int:
        """Keys of the longest range; 0 if there is none."""
        return max((end - start for mine in self.ranges for start, end in mine), default=0)

    @property
    def peaks(self) -> list[tuple[int, int]]:
        """Where ranges as long as the longest are: request, and number within the request."""
        most = self.longest
        return [(r, i) for r, mine in enumerate(self.ranges) for i, (a, b) in enumerate(mine) if b - a == most]

    @property
    def dealt(self) -> int | None:
        """Programs that read a range: one for each of its KV heads and their head tiles."""
        return None if self.kv_heads is None else self.kv_heads * (self.head_tiles or 1)

    @property
    def working(self) -> int | None:
        """Programs that have keys."""
        if self.busy is not None:
            return self.busy * (self.head_tiles or 1)
        return None if self.dealt is None else self.dealt * sum(self.used)

    @property
    def spare(self) -> int | None:
        """Programs launched for no range: buffers have a fixed size, the number of ranges has not."""
        if self.programs is None or self.working is None:
            return None
        return self.programs * (self.head_tiles or 1) - self.working

    @property
    def spare_ranges(self) -> int | None:
        """The same in ranges; None where not known, or where programs are not dealt out by range and KV head."""
        if self.spare is None or self.busy is not None or not self.dealt or self.spare % self.dealt:
            return None
        return self.spare // self.dealt

    @property
    def per_multiprocessor(self) -> float | None:
        """Programs that have keys, for each multiprocessor."""
        known = self.working is not None and self.head_tiles is not None and self.multiprocessors is not None
        return (self.working or 0) / (self.multiprocessors or 1) if known else None

    @property
    def even(self) -> float | None:
        """Keys that each multiprocessor reads for a program, if all read alike."""
        if self.dealt is None or self.head_tiles is None or self.multiprocessors is None:
            return None
        return self.total * self.dealt / self.multiprocessors


def schedule_views(
    x: Workbench | DecodePlan | Lane | SplitPlan | HostSplits,
    *,
    name: str | None = None,
    multiprocessors: int | None = None,
    head_tiles: int | None = None,
) -> tuple[ScheduleView, ...]:
    """Return what a picture shows of a plan: a view for each of its lanes. Waits for the device.

    `name` replaces the policy's. `multiprocessors` (a plan knows its own) and `head_tiles` (a workbench knows them, a
    plan does not) give an even share of the device.
    """
    match x:
        case Workbench():
            plan = x.plan()
            views = schedule_views(plan, name=name, multiprocessors=multiprocessors)
            tiles = [head_tiles or _head_tiles(x.model, plan, lane) for lane in range(len(views))]
            return tuple(replace(view, head_tiles=n) for view, n in zip(views, tiles, strict=True))
        case DecodePlan():
            multiprocessors = x.multiprocessors if multiprocessors is None else multiprocessors
            given: dict[str, Any] = {"name": name, "multiprocessors": multiprocessors, "head_tiles": head_tiles}
            lanes = [schedule_views(lane, **given)[0] for lane in x.lanes]
            prefix, new = prefix_and_new(x)
            rows = [row for row, tokens in zip(x.batch.rows.tolist(), new, strict=True) if tokens]
            row: Literal["request", "branch"] = "request" if len({*rows}) == len(rows) else "branch"
            shown = [replace(_without_padding(view, live_rows(prefix, new)), row=row) for view in lanes]
            return tuple(_with_layers(view, x, i) for i, view in enumerate(shown))
        case Lane():
            (view,) = schedule_views(x.splits, name=name, multiprocessors=multiprocessors, head_tiles=head_tiles)
            return (replace(view, **_dealing(x.schedule)),)
        case SplitPlan():
            return schedule_views(x.to_host(), name=name, multiprocessors=multiprocessors, head_tiles=head_tiles)
        case HostSplits():
            name = x.policy if name is None else name
            return (
                ScheduleView(
                    name=name,
                    ranges=x.ranges,
                    nominal=x.nominal,
                    multiprocessors=multiprocessors,
                    head_tiles=head_tiles,
                ),
            )


def cut_view(policy: str | SplitPolicy | HostPolicy, lens: Sequence[int], ctx: SplitContext) -> ScheduleView:
    """Return what a picture shows of a policy's cuts, with the programs that would read them; it needs no pool."""
    splits = cut(policy, lens, ctx)
    schedule = Schedule.of(resolve_policy(policy), splits, ctx)
    tiles = schedule.head_tiles(ctx.heads // ctx.kv_heads)
    (view,) = schedule_views(splits, multiprocessors=ctx.multiprocessors, head_tiles=tiles)
    return replace(view, **_dealing(schedule))


def _dealing(schedule: Schedule) -> dict[str, Any]:
    """Return what a schedule adds to a view."""
    busy = schedule.working() if schedule.persistent else None
    return {"kv_heads": schedule.kv_heads, "programs": schedule.programs, "busy": busy}


def _head_tiles(model: ModelSpec, plan: DecodePlan, lane: int) -> int | None:
    """Return the head tiles of a lane's layers, if all have as many."""
    layers = [layer for layer, its in plan.lane_of_layer.items() if its == lane]
    tiles = {plan.lanes[lane].schedule.head_tiles(model.layer(layer).attention.group) for layer in layers}
    return tiles.pop() if len(tiles) == 1 else None


def _without_padding(view: ScheduleView, live: int) -> ScheduleView:
    """Return the view of the first `live` rows; a row behind them is kept where it has ranges all the same."""
    kept = max([live, *(r + 1 for r, mine in enumerate(view.ranges) if mine)])
    padded = len(view.ranges) - kept
    return replace(view, ranges=view.ranges[:kept], nominal=view.nominal[:kept], padded=padded)


def _with_layers(view: ScheduleView, plan: DecodePlan, lane: int) -> ScheduleView:
    if len(plan.lanes) == 1:
        return view
    layers = [layer for layer, its in plan.lane_of_layer.items() if its == lane]
    listed = ", ".join(map(str, layers[:4])) + (", …" if len(layers) > 4 else "")
    return replace(view, name=f"{view.name}, layer{'s' * (len(layers) != 1)} {listed}")


def distinct(views: Iterable[ScheduleView]) -> list[ScheduleView]:
    """Return the views under names that can be told apart, short enough for a title."""
    views = [replace(view, name=short(view.name)) for view in views]
    times_met, seen = Counter(view.name for view in views), Counter[str]()
    named = []
    for view in views:
        seen[view.name] += 1
        name = f"{view.name} ({seen[view.name]})" if times_met[view.name] > 1 else view.name
        named.append(replace(view, name=name))
    return named


def statement(views: Sequence[ScheduleView]) -> str:
    """Return the picture's title: what is true of these schedules, with the number that proves it."""
    if not any(view.ranges for view in views):
        return "There is no request in the batch, so there is nothing to read"
    if not any(view.total for view in views):
        return "No request in the batch has a key, so there is nothing to read"
    return _alone(views[0]) if len(views) == 1 else _compared(views)


def _alone(view: ScheduleView) -> str:
    longest, ranges = view.longest, sum(view.used)
    if ranges == 1:
        return f"Under {view.name} one range holds {everything(longest)}: nothing is cut"
    holds = f"Under {view.name} the longest of {ranges:,} ranges holds {plural(longest, 'key')}"
    if view.even is not None:
        measure = "within" if longest <= view.even else times(longest / view.even)
        return f"{holds}, {measure} an even share of {plural(view.multiprocessors or 1, 'multiprocessor')}"
    if longest * ranges == view.total:
        return f"Under {view.name} each of {ranges:,} ranges holds {plural(longest, 'key')}"
    ratio = longest * ranges / view.total
    return f"{holds}, {times(ratio)} the average" if ratio >= 1.05 else f"{holds}, hardly more than the average"


def _compared(views: Sequence[ScheduleView]) -> str:
    ordered = sorted(views, key=lambda view: view.longest)
    least, most = ordered[0], ordered[-1]
    low, high = least.longest, most.longest
    if low == high:
        names = " and ".join(view.name for view in views) if len(views) == 2 else f"all {len(views)} schedules"
        return f"The longest range holds {plural(high, 'key')} under {names} alike"
    factor = f", a factor of {high / low:,.0f}" if low and high >= 9.5 * low else ""
    if low and 1.05 * low <= high < 9.5 * low:
        factor = f", a factor of {high / low:.1f}"
    if len(views) == 2:
        return f"The longest range holds {plural(high, 'key')} under {most.name} and {low:,} under {least.name}{factor}"
    return f"The longest range holds from {plural(low, 'key')} under {least.name} to {high:,} under {most.name}{factor}"


def in_words(views: Sequence[ScheduleView]) -> str:
    """Return what the picture shows, for those who cannot see it."""
    return " ".join(f"{view.name}: {_one_in_words(view)}." for view in views)


def _one_in_words(view: ScheduleView) -> str:
    padded = f", and {plural(view.padded, 'padded row')}" if view.padded else ""
    if not view.total:
        return f"{plural(len(view.ranges), view.row)} without a key{padded}"
    longest = f"{plural(view.longest, 'key')}, in {view.row} {view.peaks[0][0]}"
    spare = f", {plural(view.spare, 'program')} launched for no range" if view.spare else ""
    return (
        f"{plural(len(view.ranges), view.row)} of {between(view.lens, 'key')} in {plural(sum(view.used), 'range')}, "
        f"{between(view.used, 'range')} a {view.row}; the longest, {longest}{spare}{padded}"
    )
