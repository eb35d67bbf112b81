"""What kernels are launched with, in groups that are looked at once: a storage's, a lane's, a scratch's, a call's own.

A storage lives as long as its pool, a lane for a step; only what a call brings itself is new each time. So each of
these knows its arguments, by the names that kernels have for them, and `kernels.launcher` puts groups together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from torch import Tensor

Number = int | float
MOST = 4096
"""Kinds and variants that are remembered, each; beyond that all are looked up anew."""
T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """What kernels call the arguments of a group. A compiled variant may hold of `free` numbers, whatever they are."""

    pointers: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    free: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """The names in the order of the values."""
        return self.pointers + self.numbers + self.free


class Arguments:
    """Arguments of kernels by name: what Triton is given, what a compiled kernel is sent, and of which kind they are.

    Groups of one `kind`, a number, can be sent to the same compiled variant. They have the same names, dtypes, places
    in 16 bytes, types and values of numbers; of free ones the type and what lies above 31 bits. That is what Triton
    specialises on, or more. Addresses are read here, once: a group is good for as long as its tensors are what they
    were. A pointer may be None, if the kernel takes that.

    >>> import torch
    >>> names = Names(pointers=("x_ptr",), numbers=("x_stride",), free=("tokens",))
    >>> a, b, c = (Arguments(names, (torch.zeros(4),), (n,), (tokens,)) for n, tokens in ((4, 1), (4, 7), (8, 7)))
    >>> a.kind == b.kind, b.kind == c.kind
    (True, False)
    """

    __slots__ = ("given", "kind", "names", "sent")

    def __init__(
        self,
        names: Names,
        pointers: tuple[Tensor | None, ...] = (),
        numbers: tuple[Number, ...] = (),
        free: tuple[int, ...] = (),
    ) -> None:
        addresses = [None if x is None else x.data_ptr() for x in pointers]
        key = (
            names,
            *[None if x is None else x.dtype for x in pointers],
            *[x and x % 16 for x in addresses],
            *map(type, numbers),
            *numbers,
            *map(type, free),
            *[n >> 31 for n in free],  # 0 or -1 where it fits 32 bits, which is what Triton then passes
        )
        kind = _KINDS.get(key)
        if kind is None:
            _check_counts(names, pointers, numbers, free)
            kind = remembered(_KINDS, key, next(_NUMBERS))
        self.names, self.kind = names, kind
        self.given = pointers + numbers + free
        self.sent = (*addresses, *numbers, *free)

    def __reduce__(self) -> tuple[object, ...]:
        """Make a copy anew: its tensors lie elsewhere."""
        a, b = len(self.names.pointers), len(self.names.pointers) + len(self.names.numbers)
        return Arguments, (self.names, self.given[:a], self.given[a:b], self.given[b:])


def _check_counts(names: Names, *groups: tuple[object, ...]) -> None:
    wanted = [len(mine) for mine in (names.pointers, names.numbers, names.free)]
    got = [len(mine) for mine in groups]
    if got != wanted:
        raise TypeError(f"arguments: expected {wanted} pointers, numbers and free ones for {names.all}, got {got}")


def remembered(known: dict[K, T], key: K, value: T) -> T:
    """Return the value, which is known from now on, and all others no longer where there are too many."""
    if len(known) >= MOST:
        known.clear()
    known[key] = value
    return value


_KINDS: dict[tuple[object, ...], int] = {}
_NUMBERS = count()  # none is given twice, also after kinds were forgotten
