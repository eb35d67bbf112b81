"""Two runs, held against each other: which times moved, and by more than noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnlab.bench.result import Result
from attnlab.checks import require

LEAST_NOISE = 0.03
"""Times of one machine repeat within this share from run to run."""

Verdict = Literal["slower", "faster", "as before"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One time in both runs. `noise` is the larger of the two, as a share, and at least LEAST_NOISE."""

    name: str
    peer: str
    before: float
    after: float
    noise: float
    unit: str = "us"

    @property
    def ratio(self) -> float:
        """The later time over the earlier: above 1 is slower.

        >>> Change(name="decode", peer="attnlab", before=100.0, after=110.0, noise=0.03).verdict
        'slower'
        """
        return self.after / self.before

    @property
    def verdict(self) -> Verdict:
        """What moved by more than noise."""
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.noise) else "as before"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """All times that both runs have, and the names of those that one has alone, as (row, peer)."""

    before: Result
    after: Result
    changes: tuple[Change, ...]
    only_before: tuple[tuple[str, str], ...]
    only_after: tuple[tuple[str, str], ...]

    @property
    def slower(self) -> tuple[Change, ...]:
        """What got slower by more than noise."""
        return tuple(change for change in self.changes if change.verdict == "slower")


def compare_runs(before: Result, after: Result) -> RunComparison:
    """Return what changed between two runs, in the order of the later one.

    Raises ValueError where they have no time in common, or measured one thing in two units, or by two clocks.
    """
    clocks = before.machine.timer, after.machine.timer
    require(
        clocks[0] == clocks[1],
        f"compare: the runs have two clocks, {clocks[0]!r} and {clocks[1]!r}; run both again with one version",
    )
    early, late = _times(before), _times(after)
    require(
        bool(early.keys() & late.keys()),
        f"compare: the runs have no workload and peer in common: the one timed {_some(early)}, the other {_some(late)}",
    )
    changes = []
    for (name, peer), (time, noise, unit) in late.items():
        if (name, peer) in early and early[name, peer][0] > 0:
            was, its_noise, its_unit = early[name, peer]
            require(its_unit == unit, f"compare: {name} was measured in {its_unit} before, in {unit} after")
            most = max(LEAST_NOISE, noise, its_noise)
            changes.append(Change(name=name, peer=peer, before=was, after=time, noise=most, unit=unit))
    return RunComparison(
        before=before,
        after=after,
        changes=tuple(changes),
        only_before=tuple(key for key in early if key not in late),
        only_after=tuple(key for key in late if key not in early),
    )


def _some(times: dict[tuple[str, str], tuple[float, float, str]]) -> str:
    """Return the first few names in words."""
    names = list(dict.fromkeys(name for name, _ in times))
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") if names else "nothing"


def _times(result: Result) -> dict[tuple[str, str], tuple[float, float, str]]:
    """Return every time, its noise and its unit, by row and peer; what is measured on a host has no peer."""
    found = {(row.name, one.peer): (one.median_us, one.noise, "us") for row in result.rows for one in row.timed}
    return found | {(goal.name, ""): (goal.measured, goal.noise, goal.unit) for goal in result.goals}
