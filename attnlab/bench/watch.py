"""Stopwatches around eager calls, which end where a tracer begins to look: recording is timed without its copies."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.plans import Queries
from attnlab.trace import Tracer

AHEAD_CYCLES = 2_000_000
"""About a millisecond that the device is kept busy before a call, in which the host says all of it."""


class Watch(Protocol):
    """Times what happens between `begin` and `end`."""

    name: str

    def begin(self) -> None:
        """Start."""

    def end(self) -> None:
        """Stop; what happens later does not count."""

    def us(self) -> float:
        """Return the microseconds between both, once they are over."""


class HostWatch:
    """The host's clock."""

    name = "wall clock"

    def begin(self) -> None:
        """Start."""
        self.since = time.perf_counter()

    def end(self) -> None:
        """Stop."""
        self.until = time.perf_counter()

    def us(self) -> float:
        """Return the microseconds between."""
        return (self.until - self.since) * 1e6


class DeviceWatch:
    """CUDA events. The host runs ahead while the device is kept busy, so that its own time does not count."""

    name = "CUDA events around eager calls"

    def __init__(self) -> None:
        self.since, self.until = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        """Start, behind a millisecond of nothing."""
        torch.cuda._sleep(AHEAD_CYCLES)
        self.since.record()

    def end(self) -> None:
        """Stop behind what was launched so far."""
        self.until.record()

    def us(self) -> float:
        """Return the microseconds between, when the device has reached the end."""
        self.until.synchronize()
        return 1e3 * float(self.since.elapsed_time(self.until))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A tracer whose look at a decode is no part of what is timed."""

    inner: Tracer
    watch: Watch

    def times_for(self, call: DecodeCall) -> Tensor | None:
        """Hand it on: what a recorder allocates for a call is part of it."""
        return self.inner.times_for(call)

    def decoded(self, call: DecodeCall) -> None:
        """Stop the watch, then look."""
        self.watch.end()
        self.inner.decoded(call)

    def check_queries(self, layer: int, queries: Queries) -> None:
        """Hand it on."""
        self.inner.check_queries(layer, queries)

    def attended(self, call: ExtendCall | VerifyCall) -> None:
        """Hand it on."""
        self.inner.attended(call)
