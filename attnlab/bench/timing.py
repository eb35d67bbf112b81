"""Clocks. Engines of a row take turns, so that heat and clocks of the device drift alike for all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Protocol

import torch
from torch import Tensor

ROUNDS, MOST_REPLAYS, LEAST_REPLAYS = 5, 20, 2
"""Turns that each engine takes, and replays in one of them."""
TURN_US = 10_000.0
"""About how long a turn is."""
CHAIN_US, MOST_CHAINED = 400.0, 20
"""A shorter call is captured several times into one graph, so often at most, that a replay takes about so long: to
launch a graph costs some microseconds, which are not the call's. A server's graph holds all layers of a step, too."""
LAYERS = 20
"""Calls, one after another, that the host's side is timed by, as a step's layers make them."""
STEPS = 5
"""Steps of so many calls in a turn of the host's clock."""
SWEPT_BYTES = 256 << 20
"""Read before a cold replay: more than any L2 cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of a call, each time it was timed, and what it answered the last time."""

    samples_us: tuple[float, ...]
    answer: Any

    @property
    def median_us(self) -> float:
        """The middle one."""
        return float(median(self.samples_us))

    @property
    def spread_us(self) -> tuple[float, float]:
        """The first and the third quartile."""
        if len(self.samples_us) < 2:
            return self.median_us, self.median_us
        low, _, high = quantiles(self.samples_us, n=4, method="inclusive")
        return low, high


class Held(Protocol):
    """A call that is ready to be repeated."""

    answer: Any

    def repeat(self, *, cold: bool) -> list[float]:
        """Repeat it for a turn, and return the microseconds of each time."""


class Named(Protocol):
    """A clock, by its name."""

    name: str


class Timer(Named, Protocol):
    """Times calls that have run before."""

    rounds: int

    def hold(self, call: Callable[[], Any]) -> Held:
        """Make a call ready to be repeated. What it raises is the call's own fault."""


def timed(held: Sequence[Held], *, rounds: int, cold: bool = False) -> list[Timing]:
    """Return a timing for each of the calls, which take turns; `cold` sweeps the caches before every one."""
    samples: list[list[float]] = [[] for _ in held]
    for _ in range(rounds):
        for mine, one in zip(samples, held, strict=True):
            mine += one.repeat(cold=cold)
    return [Timing(samples_us=tuple(mine), answer=one.answer) for mine, one in zip(samples, held, strict=True)]


class WallTimer:
    """The host's clock, for a CPU, whose caches are left as they are."""

    name, rounds = "wall clock", ROUNDS

    def hold(self, call: Callable[[], Any]) -> Held:
        """Keep the call."""
        return _Waited(call)


class _Waited:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.answer = call, None

    def repeat(self, *, cold: bool) -> list[float]:
        begin = time.perf_counter()
        self.answer = self.call()
        return [(time.perf_counter() - begin) * 1e6]


class HostTimer:
    """The host's clock until a call returns, in the mean of a step's calls, one after another.

    The device is idle when the first begins, and never waited for.
    """

    name, rounds = f"host's clock; calls: the mean of {LAYERS}, one after another; plans: alone", ROUNDS

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def hold(self, call: Callable[[], Any]) -> Held:
        """Keep the call."""
        return _Returned(call, self.device)


class _Returned:
    def __init__(self, call: Callable[[], Any], device: torch.device) -> None:
        self.call, self.device, self.answer = call, device, None

    def repeat(self, *, cold: bool) -> list[float]:
        times = []
        for _ in range(STEPS):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(LAYERS):
                self.answer = self.call()
            times.append((time.perf_counter() - begin) * 1e6 / LAYERS)
        return times


class GraphTimer:
    """CUDA events around replays of a graph that holds a call, or several times a short one, one behind the other."""

    name, rounds = "CUDA-graph replays", ROUNDS

    def hold(self, call: Callable[[], Any]) -> Held:
        """Capture the call. What it answers is set to NaN then: an answer that is right was made by a replay."""
        return _Replayed(call)


class _Replayed:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call  # a graph reads the memory of what it was captured from, and does not hold it
        self.graph, self.answer = _captured(call, 1)
        self.graph.replay()
        once = max(1.0, min(_replayed(self.graph, 3)))
        self.chained = max(1, min(MOST_CHAINED, round(CHAIN_US / once)))
        self.turns = {True: _replays(once), False: _replays(once * self.chained)}
        self.chain = self.graph
        self.own, self.last = self.answer, self.answer
        if self.chained > 1:
            self.chain, self.last = _captured(call, self.chained)

    def repeat(self, *, cold: bool) -> list[float]:
        graph, self.answer = (self.graph, self.own) if cold else (self.chain, self.last)
        graph.replay()  # not timed: what ran before it belongs to another
        if cold:
            return _swept(graph, self.turns[cold])
        return [took / self.chained for took in _replayed(graph, self.turns[cold])]


def _replays(us: float) -> int:
    """Return how many replays of so many microseconds make a turn."""
    return max(LEAST_REPLAYS, min(MOST_REPLAYS, round(TURN_US / us)))


def _captured(call: Callable[[], Any], times: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    gc.disable()  # a graph that the collector frees while another is captured breaks the capture
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                answer = call()
    finally:
        gc.enable()
    for x in answer if isinstance(answer, list | tuple) else [answer]:
        if isinstance(x, Tensor) and x.is_floating_point():
            x.fill_(float("nan"))
    return graph, answer


def _replayed(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Return the microseconds of so many replays, one behind the other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def _sweep() -> Tensor:
    return torch.zeros(SWEPT_BYTES // 4, device="cuda")


def _swept(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Return the microseconds of so many replays, before each of which the caches are read full of something else."""
    other = _sweep()
    total = other.new_zeros(())
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in pairs:
        torch.sum(other, 0, out=total)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in pairs]
