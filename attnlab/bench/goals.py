"""What an H200 is to reach (`data/goals.json`), held to what runs measured: `attnlab bench --goals RUN.json ...`.

A ratio is taken within one run. Where several runs have a row, the newest one that measured it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from attnlab.assets import load_json
from attnlab.bench.result import Result, Row
from attnlab.checks import one_of, require

Measure = Literal["time over", "TB/s", "TFLOP/s", "us", "rate over"]
AT_LEAST: tuple[Measure, ...] = ("TB/s", "TFLOP/s", "rate over")
"""Measures of which more is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One goal: every one of `rows` is to reach `goal`. None is a goal with a moonshot alone.

    `measure`: time over, of `of` over the quickest of the peers `over`, at most so much; TB/s and TFLOP/s, at least;
    us, at most; rate over, tokens a second over those of the row in the same place of `over`, at least.

    >>> one = next(one for one in goals() if one.rows == ("decode-1x128k",) and one.measure == "TB/s")
    >>> one.work, one.goal, one.margin(4.3) > 0
    ('decode of 1 request of 131,072', 4.1, True)
    """

    work: str
    rows: tuple[str, ...]
    measure: Measure
    of: str
    over: tuple[str, ...]
    goal: float | None
    moonshot: float | None

    def __post_init__(self) -> None:
        one_of("measure", self.measure, get_args(Measure))
        require(len(self.rows) > 0, f"rows: goal {self.work!r} has none")
        needs = self.measure in ("time over", "rate over")
        require(bool(self.over) == needs, f"over: goal {self.work!r} is {self.measure!r}, got {self.over}")
        paired = self.measure != "rate over" or len(self.over) == len(self.rows)
        require(paired, f"over: goal {self.work!r} has {len(self.rows)} rows, got {len(self.over)} beside them")
        numbers = [number for number in (self.goal, self.moonshot) if number is not None]
        require(
            len(numbers) > 0 and min(numbers) > 0, f"goal: expected numbers above 0, got {self.goal}, {self.moonshot}"
        )

    @property
    def words(self) -> str:
        """What is measured, in words."""
        mine = "" if self.of == "attnlab" else f"{self.of}'s "
        match self.measure:
            case "time over":
                return f"{mine}time over {' or '.join(self.over)}"
            case "rate over":
                return f"{mine}token rate over the row beside it"
            case _:
                return f"{mine}{self.measure}"

    def margin(self, measured: float) -> float | None:
        """Return how much better than the goal a number is, as a share of the goal; below 0: missed. None: no goal."""
        if self.goal is None:
            return None
        return (measured - self.goal if self.measure in AT_LEAST else self.goal - measured) / self.goal

    def reaches(self, measured: float) -> bool:
        """Whether a number is as good as the moonshot, where there is one."""
        if self.moonshot is None:
            return False
        return measured >= self.moonshot if self.measure in AT_LEAST else measured <= self.moonshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one row made of a goal: a number, or None and `why` there is none.

    `ceiling` is what it would have been at the speed that the device had in that run; None where no ceiling applies.
    """

    wanted: Wanted
    row: str
    measured: float | None
    ceiling: float | None = None
    why: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where nothing was measured, or there is a moonshot alone."""
        margin = None if self.measured is None else self.wanted.margin(self.measured)
        return None if margin is None else margin >= 0

    @property
    def beyond(self) -> bool:
        """Whether the goal is missed and asks for more than the device's ceiling in that run."""
        best = None if self.ceiling is None else self.wanted.margin(self.ceiling)
        return self.met is False and best is not None and best < 0

    @property
    def verdict(self) -> str:
        """Met or missed, and by how much of the goal.

        >>> one = next(one for one in goals() if one.measure == "us" and one.goal == 60)
        >>> Outcome(wanted=one, row=one.rows[0], measured=66.0).verdict
        'missed by 10.0%'
        >>> Outcome(wanted=one, row=one.rows[0], measured=66.0, ceiling=63.0).verdict
        'missed by 10.0%, by the ceiling too (63)'
        """
        if self.measured is None:
            return f"not measured: {self.why}"
        margin = self.wanted.margin(self.measured)
        moonshot = "the moonshot" if self.wanted.reaches(self.measured) else ""
        if margin is None:
            return moonshot or "not the moonshot"
        words = f"{'met' if margin >= 0 else 'missed'} by {abs(margin):.1%}"
        if self.beyond:
            words += f", by the ceiling too ({self.ceiling:.4g})"
        return f"{words}, {moonshot}" if moonshot else words


def goals() -> list[Wanted]:
    """Return all goals of the shipped table. Raises ValueError where the file is damaged."""
    content: list[dict[str, Any]] = load_json("goals.json", "goals")
    names = {one.name for one in fields(Wanted)}
    for one in content:
        require(set(one) == names, f"goals.json: expected {sorted(names)} of each goal, got {sorted(one)}")
    return [Wanted(**{**one, "rows": tuple(one["rows"]), "over": tuple(one["over"])}) for one in content]


def outcomes(results: Sequence[Result], wanted: Sequence[Wanted]) -> list[Outcome]:
    """Return what the runs made of every row of every goal, in the order of the goals."""
    by_age = sorted(results, key=lambda result: result.machine.when)
    return [_outcome(by_age, one, place) for one in wanted for place in range(len(one.rows))]


def summary(found: Sequence[Outcome]) -> str:
    """Return in words how many rows of how many goals are met."""
    asked = [one for one in found if one.wanted.goal is not None]
    measured = [one for one in asked if one.met is not None]
    met, beyond = (
        sum(map(bool, counted)) for counted in ([one.met for one in measured], [one.beyond for one in found])
    )
    more = f"; beyond the device's ceiling in their run: {beyond}" if beyond else ""
    return f"{met} of {len(measured)} goals of rows are met{more}; {len(asked) - len(measured)} were not measured"


def _outcome(results: Sequence[Result], wanted: Wanted, place: int) -> Outcome:
    name, why = wanted.rows[place], "no run has the row"
    for result in reversed(results):
        rows = {row.name: row for row in result.rows}
        if name not in rows:
            continue
        row, timed = rows[name], rows[name].time_of(wanted.of)
        bound = _bound(result, row)
        if timed is None:
            why = f"no time of {wanted.of}"
        elif wanted.measure == "time over":
            others = [one for peer in wanted.over if (one := row.time_of(peer)) is not None]
            if others:
                least = min(one.median_us for one in others)
                return Outcome(
                    wanted=wanted, row=name, measured=timed.median_us / least, ceiling=bound and bound / least
                )
            why = f"no time of {' or '.join(wanted.over)}{_reasons(row, wanted.over)}"
        elif wanted.measure == "rate over":
            twin = rows.get(wanted.over[place])
            other = None if twin is None else twin.time_of(wanted.of)
            if other is not None:
                return Outcome(wanted=wanted, row=name, measured=other.median_us / timed.median_us)
            why = f"the run has no time of {wanted.over[place]}"
        else:
            at_best = bound and _rate(row, bound, wanted.measure)
            return Outcome(
                wanted=wanted, row=name, measured=_rate(row, timed.median_us, wanted.measure), ceiling=at_best
            )
    return Outcome(wanted=wanted, row=name, measured=None, why=why)


def _bound(result: Result, row: Row) -> float | None:
    """Return the microseconds that reading or multiplying alone would take; None without either, or a ceiling."""
    if result.ceilings is None:
        return None
    return result.ceilings.bound_us(kv_bytes=row.kv_bytes, flops=row.flops) or None


def _rate(row: Row, us: float, unit: Measure) -> float:
    if unit == "us":
        return us
    return (row.kv_bytes if unit == "TB/s" else row.flops) / us / 1e6


def _reasons(row: Row, peers: Sequence[str]) -> str:
    """Return why a row has no time of these peers, where it says so."""
    found = {other.peer: other.why for other in row.not_timed if other.peer in peers}
    return f" ({'; '.join(dict.fromkeys(found.values()))})" if found else ""
