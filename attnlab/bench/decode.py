"""One decode call under one policy, for lessons and for the scripts beside this file: right first, then timed.

`attnlab bench` times it beside its peers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.backend import AttentionBackend
from attnlab.bench.inputs import Inputs
from attnlab.bench.timing import GraphTimer, timed
from attnlab.bench.truth import Truth
from attnlab.bench.workload import Workload, heads
from attnlab.plan.plans import DecodePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What is timed: a batch of equal lengths, slots in random order, page size 1."""

    requests: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def work(self) -> Workload:
        """The shape as a workload of the benchmark."""
        return Workload(
            name=f"decode-{self.requests}x{self.tokens}",
            mode="decode",
            cached=(self.tokens,) * self.requests,
            attention=heads(self.heads, self.kv_heads, self.dim),
            dtype=self.dtype,
            kv_dtype=self.dtype,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        return self.work.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """One measurement: microseconds per call, and the largest error against the oracle."""

    policy: str
    time_us: float
    max_error: float


def build(shape: DecodeShape, policy: str, device: torch.device) -> tuple[AttentionBackend, DecodePlan]:
    """Return a backend over a filled pool, and the plan of the shape's batch."""
    inputs = Inputs(shape.work, device)
    backend = inputs.backend(engine="triton", policy=policy)
    plan = backend.plan(inputs.batch())
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"plan: expected a DecodePlan, got {type(plan).__name__}")
    return backend, plan


def measure(shape: DecodeShape, policy: str) -> DecodeTime:
    """Hold some requests to the oracle, then time the call on the GPU. Raises WrongResult where it is not right."""
    inputs = Inputs(shape.work, "cuda")
    backend = inputs.backend(engine="triton", policy=policy)
    plan, out = backend.plan(inputs.batch()), torch.full_like(inputs.q, float("nan"))

    def call() -> torch.Tensor:
        return backend.forward(0, inputs.q, None, None, plan, save=False, out=out)

    error = Truth.of(inputs).error(call())
    return DecodeTime(policy=policy, time_us=graph_time_us(call), max_error=error)


def graph_time_us(call: Callable[[], object]) -> float:
    """Return the median time of a call, replayed from a CUDA graph. It must have run before."""
    timer = GraphTimer()
    (timing,) = timed([timer.hold(call)], rounds=timer.rounds)
    return timing.median_us
