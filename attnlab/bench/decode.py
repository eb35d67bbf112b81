"""Time one decode call on a GPU: `python -m attnlab.bench.decode`.

The output is compared with the fp64 oracle before any time is printed. Times are medians of CUDA-graph replays;
bytes are those of the keys and values that must be read once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch
from attnlab.checks import require
from attnlab.eager import oracle
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.plans import DecodePlan
from attnlab.plan.policy import split_policies
from attnlab.spec import AttentionSpec, ModelSpec

WARMUP, REPEATS = 10, 100


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
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        return 2 * self.requests * self.tokens * self.kv_heads * self.dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """One measurement: microseconds per call, and the largest error against the oracle."""

    policy: str
    time_us: float
    max_error: float


def build(shape: DecodeShape, policy: str, device: torch.device) -> tuple[AttentionBackend, DecodePlan]:
    """Return a backend over a filled pool, and the plan of the shape's batch."""
    spec = AttentionSpec(
        heads=shape.heads, kv_heads=shape.kv_heads, qk_dim=shape.dim, v_dim=shape.dim, scale=shape.dim**-0.5
    )
    model = ModelSpec.uniform(spec, layers=1, context_len=shape.tokens, page_size=1, kv_dtype=shape.dtype)
    num_slots = shape.requests * shape.tokens + 1
    pool = MHAPool(model, num_slots=num_slots, device=device)
    table = RequestTable(max_requests=shape.requests, max_context=shape.tokens, num_slots=num_slots, device=device)
    order = torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(0)) + 1
    for slots in order.split(shape.tokens):
        table.append(table.admit(), slots)
    for x in (pool.view(0).k, pool.view(0).v):
        x.normal_()
    backend = AttentionBackend(
        model=model,
        pool=pool,
        table=table,
        engine="triton",
        policy=policy,
        max_requests=shape.requests,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
    )
    lens = [shape.tokens] * shape.requests
    return backend, backend.plan(DecodeBatch.of(rows=table.rows, lens=lens, device=device))


def measure(shape: DecodeShape, policy: str, *, checked: int = 2) -> DecodeTime:
    """Check the first requests against the oracle, then time the call."""
    device = torch.device("cuda")
    backend, plan = build(shape, policy, device)
    q = torch.randn(shape.requests, shape.heads, shape.dim, device=device, dtype=shape.dtype)
    out = torch.full_like(q, float("nan"))

    def call() -> None:
        backend.decode(0, q, None, None, plan, save=False, out=out)

    call()
    view, table = backend.pool.view(0), backend.table
    error = 0.0
    for row in table.rows[:checked]:
        slots = table.slots_of(row).long()
        want, _ = oracle.attention(q[row], view.k[slots], view.v[slots], scale=shape.dim**-0.5)
        off = float((out[row].double() - want).abs().max())
        require(math.isfinite(off), f"decode under {policy!r} gave numbers that are not finite", RuntimeError)
        error = max(error, off)
    return DecodeTime(policy=policy, time_us=graph_time_us(call), max_error=error)


def graph_time_us(call: Callable[[], object]) -> float:
    """Return the median time of a call, replayed from a CUDA graph. It must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(WARMUP):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return 1000.0 * float(median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)))


def main() -> None:
    """Print one line per policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    args = parser.parse_args()
    shape = DecodeShape(
        requests=args.requests, tokens=args.tokens, heads=args.heads, kv_heads=args.kv_heads, dim=args.dim
    )
    print(f"{torch.cuda.get_device_name()}, {shape}, {shape.kv_bytes / 1e9:.3f} GB of keys and values")
    for policy in split_policies.names():
        result = measure(shape, policy)
        rate = shape.kv_bytes / result.time_us / 1e6
        print(f"{policy:10} {result.time_us:9.1f} us  {rate:5.2f} TB/s  max error {result.max_error:.1e}")


if __name__ == "__main__":
    main()
