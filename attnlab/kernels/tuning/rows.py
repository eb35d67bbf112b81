"""What the table of tunings is made of: kernels, conditions, rows, and the runs that they were measured in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnlab.checks import one_of, require
from attnlab.kernels.target import Target

INTERPRETER, HIP, CUDA = "interpreter", "hip", "cuda"
NUMBERS = ("qk_dim", "v_dim", "widest", "group", "rows", "held")
"""Words of shapes that count: `widest` is the larger of both dims, `rows` what a request brings of a tile at most,
`held` how many programs a multiprocessor holds."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
OF_DTYPE = ("compute", "kv")
"""Words of shapes that are dtypes: that of the dots, and that of the pool."""
FLAGS = ("masked", "bounded", "modifier")
"""Words of shapes that hold or not: a mask hides cached keys, a window or chunk does, a modifier changes scores."""
MOST_TAKEN = 4096
"""Shapes whose rows a table remembers: extends of ever other lengths must not fill the host's memory."""
ANY = "any"
"""The condition of a row for all shapes that no row before it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What rows may say of a kernel: the fields of its config, the words that its shapes have, where it runs.

    `serves` are conditions that hold of every shape that it is asked for.
    """

    fields: tuple[str, ...]
    words: tuple[str, ...]
    runs_on: tuple[str, ...] = (INTERPRETER, HIP, CUDA)
    serves: str = ANY


_N = ("block_n", "num_warps", "num_stages")
_MN = ("block_m", *_N)
_ROWS = ("qk_dim", "v_dim", "compute", "kv", "masked", "modifier", "rows")

KERNELS: dict[str, Kernel] = {
    "decode_split": Kernel(fields=_N, words=("qk_dim", "group", "compute")),
    "decode_shares": Kernel(fields=_N, words=("qk_dim", "v_dim", "compute", "kv", "modifier", "held")),
    "decode_groups": Kernel(
        fields=_N, words=("qk_dim", "v_dim"), runs_on=(INTERPRETER, "sm_90"), serves="v_dim > 32, widest <= 128"
    ),
    "decode_latent": Kernel(fields=_N, words=(), runs_on=(INTERPRETER, "sm_90")),
    "verify_split": Kernel(fields=_MN, words=_ROWS),
    "verify_shares": Kernel(fields=_MN, words=(*_ROWS, "bounded")),
    "extend": Kernel(fields=_MN, words=_ROWS),
    "extend_hopper": Kernel(
        fields=(*_MN, "registers"),
        words=("qk_dim", "v_dim"),
        runs_on=(INTERPRETER, "sm_90"),
        serves="v_dim > 32, widest <= 256",
    ),
}
"""By the name of the module, or of the launcher where a module has several; "decode_groups" is `decode_shares` for
tiles of 64 query heads."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on a shape: `qk_dim > 256`, `kv = fp8`, `masked`, `not masked`."""

    word: str
    compares: str
    value: Any

    @classmethod
    def of(cls, text: str) -> Condition:
        """Return what a text says; raise ValueError where it says nothing that shapes have.

        >>> print(Condition.of("kv = fp8"), Condition.of("rows <= 16").holds({"rows": 17}))
        kv = fp8 False
        """
        if found := re.fullmatch(r"(not )?(\w+)", text):
            denied, word = found.groups()
            require(word in FLAGS, f"expected one of {', '.join(FLAGS)}, or a comparison, got {text!r}")
            return cls(word, "=", denied is None)
        found = re.fullmatch(r"(\w+) (<=|>|=) (\w+)", text)
        if found is None:
            raise ValueError(f"expected conditions such as 'v_dim <= 128, kv = fp8, not masked', got {text!r}")
        word, compares, value = found.groups()
        if word in OF_DTYPE and compares == "=":
            return cls(word, compares, DTYPES[one_of(word, value, list(DTYPES))])
        require(word in NUMBERS, f"expected one of {', '.join((*NUMBERS, *OF_DTYPE))} before {compares}, got {word!r}")
        require(value.isdecimal(), f"{word}: expected a whole number behind {compares}, got {value!r}")
        return cls(word, compares, int(value))

    def holds(self, shape: Mapping[str, Any]) -> bool:
        """Whether it holds of a shape."""
        value = shape[self.word]
        if self.compares == "=":
            return bool(value == self.value)
        return bool(value <= self.value) if self.compares == "<=" else bool(value > self.value)

    def __str__(self) -> str:
        if self.word in FLAGS:
            return self.word if self.value else f"not {self.word}"
        value = next((name for name, dtype in DTYPES.items() if dtype == self.value), self.value)
        return f"{self.word} {self.compares} {value}"


def conditions(text: str) -> tuple[Condition, ...]:
    """Return the conditions of a shape class, all of which must hold.

    >>> [str(one) for one in conditions("v_dim > 32, widest <= 256")], conditions("any")
    (['v_dim > 32', 'widest <= 256'], ())
    """
    return () if text == ANY else tuple(Condition.of(part) for part in text.split(", "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where figures are from: the device, its versions, the state of the source (None: not known), and the file."""

    device: str
    versions: str
    commit: str | None
    when: str | None
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a row took: microseconds by workload, and the name of the run."""

    run: str
    us: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A config for the shapes that no row of its kernel before it takes, on some devices.

    `measured` is None where nobody has timed it, and `unmeasured` says why; `why` is what else there is to say.
    """

    kernel: str
    on: tuple[str, ...]
    when: tuple[Condition, ...]
    config: dict[str, int | None]
    measured: Measured | None = None
    unmeasured: str | None = None
    why: str | None = None

    @property
    def shapes(self) -> str:
        """The shape class in words."""
        return ", ".join(map(str, self.when)) or ANY

    @property
    def title(self) -> str:
        """What the row is for."""
        return f"{self.kernel} on {', '.join(self.on)}: {self.shapes}"

    def takes(self, names: Sequence[str], shape: Mapping[str, Any]) -> bool:
        """Whether it is for a device of those names, and for a shape."""
        return any(name in self.on for name in names) and all(one.holds(shape) for one in self.when)


def names_of(target: Target) -> tuple[str, ...]:
    """Return what rows may call a target.

    >>> names_of(Target(kind="cuda", arch=90))
    ('sm_90', 'cuda')
    """
    return (f"sm_{target.arch}", CUDA) if target.kind == "cuda" else (target.kind,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """All rows, and the runs behind them. A table is one object: what is kept by it is kept by identity."""

    about: tuple[str, ...]
    runs: dict[str, Run]
    rows: tuple[Row, ...]
    _taken: dict[tuple[Any, ...], Row] = field(init=False, repr=False, default_factory=dict)

    def row(self, kernel: str, target: Target, shape: dict[str, Any]) -> Row:
        """Return the first row that takes a shape. `shape` has the kernel's words, in their order; `rows` may be None.

        Raises ValueError where the kernel has no row for the target.
        """
        key = (kernel, target, *shape.values())
        found = self._taken.get(key)
        if found is None:
            if len(self._taken) >= MOST_TAKEN:
                self._taken.clear()
            found = self._taken[key] = self._search(kernel, target, shape)
        return found

    def _search(self, kernel: str, target: Target, shape: dict[str, Any]) -> Row:
        known = KERNELS[one_of("kernel", kernel, list(KERNELS))].words
        require(tuple(shape) == known, f"shape: {kernel} has {', '.join(known)}, in this order, got {', '.join(shape)}")
        names, full = names_of(target), completed(shape)
        for row in self.rows:
            if row.kernel == kernel and row.takes(names, full):
                return row
        raise ValueError(
            f"kernel: {kernel} runs on {', '.join(KERNELS[kernel].runs_on)}, got a target of {' or '.join(names)}"
        )

    @property
    def taken(self) -> tuple[Row, ...]:
        """The rows that were asked for lately."""
        return tuple(self._taken.values())

    def changed(self, old: Row, *new: Row, runs: Mapping[str, Run] | None = None) -> Table:
        """Return a table with other rows in the place of one; runs that no row names any more are left out."""
        at = self.rows.index(old)
        rows = (*self.rows[:at], *new, *self.rows[at + 1 :])
        named = {row.measured.run for row in rows if row.measured is not None}
        known = {**self.runs, **(runs or {})}
        return Table(about=self.about, rows=rows, runs={name: run for name, run in known.items() if name in named})

    def trying(self, row: Row, config: dict[str, int | None]) -> Table:
        """Return a table whose row has another config, unmeasured."""
        return self.changed(row, replace(row, config=config, measured=None, unmeasured="a candidate"))


def completed(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shape with what follows from it: the wider dim; rows that may be of any number are very many."""
    full = dict(shape)
    if "qk_dim" in full and "v_dim" in full:
        full["widest"] = max(full["qk_dim"], full["v_dim"])
    if "rows" in full and full["rows"] is None:
        full["rows"] = math.inf
    return full
