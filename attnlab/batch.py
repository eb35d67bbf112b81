"""What a step works on: which requests, and how long they are. One type per mode.

Lengths live on the device, where plans use them. Where the host knows them too they come as `HostLens`; where
only the device does (after drafting, say), as `DeviceLens` with the bounds that allocation needs. No plan reads
a length back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import require, tensor

MAX_LEN = 2**30
"""Tokens of a request, and of a batch. Offsets are int32; half of their range leaves room for rounding up."""


@runtime_checkable
class Lens(Protocol):
    """Lengths of a batch's requests, in tokens."""

    @property
    def device(self) -> Int[Tensor, " reqs"]:
        """The lengths, int32, on the device."""

    @property
    def count(self) -> int:
        """How many requests there are."""

    @property
    def bound_max(self) -> int:
        """No request is longer than this."""

    @property
    def bound_total(self) -> int:
        """All requests together are no longer than this: what plans allocate by."""

    def validate(self) -> None:
        """Read the lengths (waits for the device) and raise ValueError where they are not what the host thinks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLens:
    """Lengths that the host knows; `values` is `device` as a tuple of ints.

    >>> HostLens.of([5, 64, 200, 1], device="cpu").bound_total
    270
    """

    values: tuple[int, ...]
    device: Int[Tensor, " reqs"]

    def __post_init__(self) -> None:
        tensor("lens", self.device, shape=[len(self.values)], dtype=torch.int32)

    @classmethod
    def of(cls, lens: Sequence[int], *, device: torch.device | str) -> HostLens:
        """Check the lengths and copy them to the device, once."""
        values = tuple(_tokens(f"lens: request {i}", n) for i, n in enumerate(lens))
        require(
            sum(values) <= MAX_LEN,
            f"lens: expected at most {MAX_LEN:,} tokens in all (offsets are int32), got {sum(values):,}",
        )
        return cls(
            values=values,
            device=torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True),
        )

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self.values)

    @property
    def bound_max(self) -> int:
        """The longest request, exactly."""
        return max(self.values, default=0)

    @property
    def bound_total(self) -> int:
        """All tokens, exactly."""
        return sum(self.values)

    def validate(self) -> None:
        """Read the lengths (waits for the device) and raise ValueError where the host has others."""
        for i, (here, there) in enumerate(zip(self.values, self.device.tolist(), strict=True)):
            require(here == there, f"lens: request {i} has {here} tokens on the host, {there} on the device")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceLens:
    """Lengths that only the device knows, with the caller's promise of how long they can be.

    A longer request than `bound_each`, or a larger sum than `bound_total`, breaks the promise: `validate()` reads
    the lengths and says so; plans cannot, since they never wait for the device.
    """

    device: Int[Tensor, " reqs"]
    bound_each: int
    bound_total: int

    def __post_init__(self) -> None:
        tensor("lens", self.device, shape=["reqs"], dtype=torch.int32)
        _tokens("bound_each", self.bound_each)
        _tokens("bound_total", self.bound_total)

    @property
    def count(self) -> int:
        """How many requests there are."""
        return self.device.shape[0]

    @property
    def bound_max(self) -> int:
        """No request is longer than this."""
        return self.bound_each

    def validate(self) -> None:
        """Read the lengths (waits for the device) and raise ValueError where they break the promised bounds."""
        values = self.device.tolist()
        for i, n in enumerate(values):
            require(
                0 <= n <= self.bound_each,
                f"lens: request {i} has {n} tokens, outside 0 to bound_each {self.bound_each}",
            )
        require(
            sum(values) <= self.bound_total,
            f"lens: {sum(values)} tokens in all, more than bound_total {self.bound_total}",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeBatch:
    """One query token per request. `seq` counts the tokens to read, the one being decoded included.

    `rows` are the requests' rows in the request table, on the host (then they are checked against the table) or on
    the device (then they are not read, only kept inside it). A length of 0 is a padded row: it reads nothing and writes
    to the sink. No rows at all is an idle step, and works.
    """

    rows: Int[Tensor, " reqs"]
    seq: Lens

    @classmethod
    def of(cls, *, rows: Sequence[int], lens: Sequence[int], device: torch.device | str) -> DecodeBatch:
        """Return a batch whose rows and lengths the host knows; `device` is the pool's."""
        whole = [operator.index(row) for row in rows]
        return cls(rows=torch.tensor(whole, dtype=torch.int64), seq=HostLens.of(lens, device=device))

    def __post_init__(self) -> None:
        tensor("rows", self.rows, shape=["reqs"], dtype=(torch.int32, torch.int64))
        require(
            self.rows.shape[0] == self.seq.count,
            f"rows: expected one per request of seq ({self.seq.count}), got {self.rows.shape[0]}",
        )


def _tokens(name: str, n: int) -> int:
    """Return `n`, a number of tokens, or raise."""
    is_int = isinstance(n, int) and not isinstance(n, bool)
    if is_int and 0 <= n <= MAX_LEN:  # words only where they are needed: this runs for every request of every step
        return n
    require(is_int, f"{name}: expected an int, got {n!r}", TypeError)
    raise ValueError(f"{name}: expected 0 to {MAX_LEN:,} tokens, got {n:,}")
