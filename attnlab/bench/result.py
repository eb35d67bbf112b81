"""What a run of the benchmark found, as plain data, and as JSON that says all of it.

No GPU is needed to read one: `attnlab.bench.load("run.json")`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from attnlab.checks import require
from attnlab.files import write_whole

FIRST = "attnlab"
"""The peer that the others are held to: its time over theirs."""
RECORDINGS = "hooks"
"""The group of rows that hold a decode's time while it is recorded, and after, beside its own."""
FORMAT = "attnlab bench 1"
Reason = Literal["declined", "wrong", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a run was: the device, what was installed, and which state of the source (None: not known)."""

    device: str
    multiprocessors: int | None
    versions: dict[str, str]
    commit: str | None
    when: str
    timer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device did at most in this run: 10^12 bytes a second copied and read, 10^12 operations of a product."""

    copy_tb_s: float
    read_tb_s: float
    matmul_tflop_s: float

    def bound_us(self, *, kv_bytes: int, flops: int) -> float:
        """Return the microseconds under which no call of so many bytes and operations can be.

        >>> Ceilings(copy_tb_s=4.0, read_tb_s=4.0, matmul_tflop_s=800.0).bound_us(kv_bytes=400_000_000, flops=8)
        100.0
        """
        return max(kv_bytes / self.read_tb_s, flops / self.matmul_tflop_s) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A call that is right, and what it took: the median, first and third quartile of microseconds.

    `variant` is what the peer chose, of several ways of its own; `error` the largest against the oracle.
    """

    peer: str
    median_us: float
    low_us: float
    high_us: float
    error: float
    variant: str = ""

    @property
    def noise(self) -> float:
        """How far apart the quartiles are, as a share of the median."""
        return (self.high_us - self.low_us) / self.median_us


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTimed:
    """A peer without a time, and why: it does not offer the row, its result was wrong, or it raised."""

    peer: str
    reason: Reason
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload and what each peer made of it. `checked` says which outputs were held to the oracle.

    `x` is the row's place on the curve whose name its group is, None of rows that are on no curve.
    """

    name: str
    mode: str
    group: str
    shape: str
    kv_bytes: int
    flops: int
    checked: str
    timed: tuple[Timed, ...]
    not_timed: tuple[NotTimed, ...] = ()
    x: float | None = None

    def time_of(self, peer: str) -> Timed | None:
        """Return a peer's time; None where it has none."""
        return next((timed for timed in self.timed if timed.peer == peer), None)

    @property
    def tb_s(self) -> dict[str, float]:
        """10^12 bytes of keys and values a second, by peer."""
        return {timed.peer: self.kv_bytes / timed.median_us / 1e6 for timed in self.timed}

    @property
    def tflop_s(self) -> dict[str, float]:
        """10^12 operations a second, by peer."""
        return {timed.peer: self.flops / timed.median_us / 1e6 for timed in self.timed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A thing measured on the host, beside what it is to be: `measured` is good up to `goal`, in `unit`."""

    name: str
    measured: float
    goal: float | None
    unit: str
    noise: float = 0.0

    def __post_init__(self) -> None:
        require(self.goal is None or self.goal > 0, f"goal: expected more than 0 or None, got {self.goal!r}")

    @property
    def met(self) -> bool | None:
        """Whether it is reached; None where there is no goal."""
        return None if self.goal is None else self.measured <= self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run: where, what the device can do, and its rows or goals. `left_out`: workloads that time did not allow."""

    machine: Machine
    ceilings: Ceilings | None = None
    rows: tuple[Row, ...] = ()
    goals: tuple[Goal, ...] = ()
    left_out: tuple[str, ...] = ()
    format: str = field(default=FORMAT)

    @property
    def peers(self) -> list[str]:
        """Those with a time in some row, in the order of the first."""
        return list(dict.fromkeys(timed.peer for row in self.rows for timed in row.timed))

    def row(self, name: str) -> Row:
        """Return a workload's row; raise ValueError with the names that there are."""
        found = {row.name: row for row in self.rows}
        require(name in found, f"row: the result has {', '.join(found) or 'no rows'}, got {name!r}")
        return found[name]

    def ceiling_share(self, row: Row, peer: str) -> float | None:
        """Return how near a peer's row comes to what the device can do, 1 at most but for noise; None: not timed."""
        timed = row.time_of(peer)
        if timed is None or self.ceilings is None:
            return None
        return self.ceilings.bound_us(kv_bytes=row.kv_bytes, flops=row.flops) / timed.median_us

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, whole or not at all."""
        write_whole(path, (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode(), name="out")


def load(path: str | Path) -> Result:
    """Return the result that a run wrote. Raises ValueError where the file holds none, OSError where it cannot be read.

    >>> import tempfile
    >>> machine = Machine(device="CPU", multiprocessors=None, versions={}, commit=None, when="", timer="wall clock")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "run.json"
    ...     Result(machine=machine).save(path)
    ...     load(path).machine.device
    'CPU'
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # no text, or no JSON
        raise ValueError(f"result: {str(path)!r} is no JSON file ({error}); attnlab bench writes one") from error
    found = content.get("format") if isinstance(content, dict) else None
    require(
        found == FORMAT,
        f"result: {str(path)!r} is none of this version's; expected format {FORMAT!r}, got {found!r}; "
        "attnlab bench --out writes one",
    )
    try:
        return Result(
            machine=_made(Machine, content["machine"]),
            ceilings=None if content["ceilings"] is None else _made(Ceilings, content["ceilings"]),
            rows=tuple(_row(row) for row in content["rows"]),
            goals=tuple(_made(Goal, goal) for goal in content["goals"]),
            left_out=tuple(_words(content["left_out"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"result: {str(path)!r} is damaged: {reason}") from error


def _words(content: Any) -> list[str]:
    words = isinstance(content, list) and all(isinstance(name, str) for name in content)
    require(words, f"left_out: expected a list of names, got {content!r}")
    return list(content)


def _row(content: Mapping[str, Any]) -> Row:
    parts = {
        "timed": tuple(_made(Timed, timed) for timed in content["timed"]),
        "not_timed": tuple(_made(NotTimed, other) for other in content["not_timed"]),
    }
    for other in parts["not_timed"]:
        require(other.reason in get_args(Reason), f"reason: expected one of {get_args(Reason)}, got {other.reason!r}")
    made: Row = _made(Row, {**content, **parts})
    return made


MOST = 1e30
"""No time, count or rate is more."""
ABOVE_0 = ("copy_tb_s", "read_tb_s", "matmul_tflop_s", "median_us", "measured", "goal")
"""What others are divided by."""


def _made(kind: type[Any], content: Mapping[str, Any]) -> Any:
    """Return a dataclass of what JSON holds; raise where a field is missing or unknown, or not what is due."""
    unknown = set(content) - {one.name for one in fields(kind)}
    require(not unknown, f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    for one in fields(kind):
        value: Any = content.get(one.name)
        optional, due = one.type.endswith("| None"), one.type.removesuffix(" | None")
        if one.name not in content or (value is None and optional):
            continue
        if due in ("float", "int"):
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST
            require(number, f"{one.name}: expected a number from 0 on, got {value!r}")
            require(one.name not in ABOVE_0 or value > 0, f"{one.name}: expected more than 0, got {value!r}")
        elif due in ("str", "dict[str, str]"):
            kind_of = str if due == "str" else dict
            require(isinstance(value, kind_of), f"{one.name}: expected {due}, got {value!r}")
    return kind(**content)


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")
