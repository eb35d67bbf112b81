"""What a picture of a benchmark's result says in words."""

from __future__ import annotations

from collections.abc import Sequence

from attnlab.bench.result import FIRST, RECORDINGS, Goal, Result, Row
from attnlab.plots.words import plural, share, times

MOST_ROWS = 48


def ratios(row: Row) -> dict[str, float]:
    """Return attnlab's time over each other peer's; below 1 attnlab is the faster one."""
    first = row.time_of(FIRST)
    if first is None:
        return {}
    return {one.peer: first.median_us / one.median_us for one in row.timed if one.peer != FIRST}


def held(row: Row) -> bool:
    """Whether attnlab and some peer that is not attnlab were timed."""
    return any(not peer.startswith(FIRST) for peer in ratios(row))


def statement(result: Result, rows: Sequence[Row]) -> str:
    """Return the picture's title: how attnlab stands to others and to the ceiling, or what recordings cost."""
    costs = [1 / ratio - 1 for row in rows for ratio in ratios(row).values()]
    if costs and all(row.group == RECORDINGS for row in rows):
        of_all = "closed or open" if not any(row.not_timed for row in rows) else "of what was timed"
        return f"Recording costs a decode at most {max(0.0, *costs):.1%}, {of_all}"
    shares = [part for row in rows if (part := result.ceiling_share(row, FIRST)) is not None]
    there = [row for row in rows if row.time_of(FIRST) is not None]
    if not there:
        return "No workload has a time of attnlab"
    near = f"attnlab timed on {plural(len(there), 'workload')}"  # a run without ceilings: a host's
    near = f"attnlab reaches up to {share(max(shares))} of the ceiling" if shares else near
    against = [row for row in rows if held(row)]
    if not against:
        return near
    faster = sum(all(ratio < 1 for peer, ratio in ratios(row).items() if not peer.startswith(FIRST)) for row in against)
    others = [peer for peer in result.peers if not peer.startswith(FIRST)]
    named = " and ".join(others) if len(others) < 3 else f"all {len(others)} others"
    return f"{near}, and beats {named} on {faster} of {plural(len(against), 'workload')}"


def growth(curve: str, rows: Sequence[Row]) -> str:
    """Return how attnlab's time grows along a curve: a sentence's beginning, or nothing."""
    timed = [(row.x, one.median_us) for row in rows if (one := row.time_of(FIRST)) is not None and row.x]
    if len(timed) < 2:
        return f"{curve}: fewer than two points"
    (x0, first), (x1, last) = timed[0], timed[-1]
    return f"{times((x1 or 1) / (x0 or 1))} the {curve}, {times(last / first)} the time"


def row_words(result: Result, row: Row) -> str:
    """Return a row for those who cannot see it."""
    first = row.time_of(FIRST)
    part = result.ceiling_share(row, FIRST)
    if first is None:
        return f"{row.name}: attnlab not timed."
    others = [f"{ratio:.2f} of {peer}'s" for peer, ratio in ratios(row).items()]
    held_to = f", {', '.join(others)} time" if others else ""
    reached = "" if part is None else f", {share(part)} of the ceiling"
    return f"{row.name}: {first.median_us:,.1f} us{reached}{held_to}."


def goals_statement(goals: Sequence[Goal]) -> str:
    """Return how many goals are met."""
    asked = [goal for goal in goals if goal.goal is not None]
    missed = [goal.name for goal in asked if not goal.met]
    worst = f"; {missed[0]} is not" if len(missed) == 1 else ""
    return f"{len(asked) - len(missed)} of {plural(len(asked), 'goal')} are met{worst}"


def source(result: Result) -> str:
    """Return where the numbers are from."""
    machine = result.machine
    commit = "" if machine.commit is None else f", commit {machine.commit}"
    return f"{machine.device}, {machine.timer}, {machine.when[:10]}{commit}"
