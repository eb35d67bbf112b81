"""Time calls of several queries a request on a GPU: `python -m attnlab.bench.several`.

Some queries are compared with the fp64 oracle before any time is printed. Times are medians of CUDA-graph replays, over
slots in random order, page size 1. FLOPs are those of visible (query, key) pairs; bytes those of the cached keys and
values, read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import ExtendBatch, VerifyBatch
from attnlab.bench.decode import graph_time_us
from attnlab.checks import require
from attnlab.eager import oracle
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.plans import ExtendPlan, VerifyPlan
from attnlab.spec import AttentionSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is timed: equal requests of `cached` tokens and `new` ones, or as many drafts where a `policy` splits."""

    name: str
    requests: int
    cached: int
    new: int
    heads: int = 32
    kv_heads: int = 8
    qk_dim: int = 128
    v_dim: int = 128
    window: int | None = None
    mla: bool = False
    one_pass: bool = False
    policy: str | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        """The attention of this shape."""
        return AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            scale=self.qk_dim**-0.5,
            window=self.window,
        )

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over all pairs that are seen."""
        most = self.cached + self.new if self.window is None else self.window
        pairs = sum(min(most, self.cached + i + 1) for i in range(self.new))
        return 2 * (self.qk_dim + self.v_dim) * self.heads * self.requests * pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of cached keys and values."""
        width = self.qk_dim + (0 if self.mla else self.v_dim)
        return self.requests * self.cached * self.kv_heads * width * self.dtype.itemsize


SHAPES = [
    *(Shape(name="prefill", requests=1, cached=0, new=n) for n in (4096, 8192)),
    Shape(name="chunk", requests=1, cached=4096, new=512),
    Shape(name="few", requests=16, cached=4096, new=16),
    Shape(name="prefill in one pass", requests=1, cached=0, new=8192, one_pass=True),
    Shape(name="chunk in one pass", requests=1, cached=4096, new=512, one_pass=True),
    Shape(name="window of 4,096", requests=1, cached=0, new=16384, window=4096),
    Shape(name="64 columns", requests=1, cached=0, new=8192, heads=9, kv_heads=3, qk_dim=64, v_dim=64),
    Shape(name="256 columns", requests=1, cached=0, new=8192, heads=8, kv_heads=4, qk_dim=256, v_dim=256),
    Shape(name="192 and 128 columns", requests=1, cached=0, new=4096, heads=64, qk_dim=192),
    Shape(name="mla", requests=1, cached=0, new=4096, heads=16, kv_heads=1, qk_dim=576, v_dim=512, mla=True),
    *(Shape(name="drafts", requests=64, cached=4096, new=n, policy="seed") for n in (4, 8, 16)),
    Shape(name="drafts", requests=64, cached=4096, new=16, policy="tile"),
    Shape(name="drafts", requests=8, cached=16384, new=8, policy="seed"),
    Shape(
        name="drafts, mla",
        requests=16,
        cached=4096,
        new=4,
        heads=16,
        kv_heads=1,
        qk_dim=576,
        v_dim=512,
        mla=True,
        policy="seed",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A shape, built: what the call reads and writes."""

    shape: Shape
    backend: AttentionBackend
    plan: ExtendPlan | VerifyPlan
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    out: Tensor

    @classmethod
    def of(cls, shape: Shape, *, engine: str, device: str, multiprocessors: int | None) -> Call:
        """Return the call over a pool that is filled at random."""
        spec, context, reqs = shape.spec, shape.cached + shape.new, shape.requests
        model = ModelSpec.uniform(spec, layers=1, context_len=context, page_size=1, kv_dtype=shape.dtype, mla=shape.mla)
        num_slots = reqs * context + 1
        pool: KVPool = (MLAPool if shape.mla else MHAPool)(model, num_slots=num_slots, device=device)
        table = RequestTable(max_requests=reqs, max_context=context, num_slots=num_slots, device=device)
        order = torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(0)) + 1
        for slots in order.split(context):
            table.append(table.admit(), slots)
        pool.view(0).k.normal_()
        if not shape.mla:
            pool.view(0).v.normal_()
        backend = AttentionBackend(
            model=model,
            pool=pool,
            table=table,
            engine=engine,
            policy=shape.policy or "tile",
            max_requests=reqs,
            max_drafts=shape.new if shape.policy else 1,
            multiprocessors=multiprocessors,
            deterministic=shape.one_pass,
        )
        rows, prefix = list(table.rows), [shape.cached] * reqs
        batch = (
            VerifyBatch.chain(rows=rows, prefix=prefix, drafts=shape.new, device=device)
            if shape.policy
            else ExtendBatch.of(rows=rows, prefix=prefix, new=[shape.new] * reqs, device=device)
        )
        tokens = reqs * shape.new
        q = torch.randn(tokens, spec.heads, spec.qk_dim, device=device, dtype=shape.dtype)
        out = q.new_full((tokens, spec.heads, spec.v_dim), float("nan"))
        k = v = None
        if not shape.one_pass:  # which reads all keys from the pool
            k = torch.randn(tokens, spec.kv_heads, spec.qk_dim, device=device, dtype=shape.dtype)
            v = None if shape.mla else torch.randn(tokens, spec.kv_heads, spec.v_dim, device=device, dtype=shape.dtype)
        return cls(shape=shape, backend=backend, plan=backend.plan(batch), q=q, k=k, v=v, out=out)

    def run(self) -> None:
        """Attend once. Nothing is stored, so that every run reads the same."""
        self.backend.forward(0, self.q, self.k, self.v, self.plan, save=False, out=self.out)

    def error(self) -> float:
        """Return the largest error of the first and last queries of the first request against the oracle."""
        shape, view = self.shape, self.backend.pool.view(0)
        slots = self.backend.table.slots_of(self.backend.table.rows[0]).long()
        k, v = view.k[slots], view.v[slots]
        if self.k is not None:
            new_v = self.k[..., : shape.v_dim] if self.v is None else self.v
            k = torch.cat([k[: shape.cached], self.k[: shape.new]])
            v = torch.cat([v[: shape.cached], new_v[: shape.new]])
        worst = 0.0
        for i in (0, shape.new - 1):
            position = shape.cached + i
            first = shape.spec.sight.first(position)
            seen = slice(first, position + 1)
            want, _ = oracle.attention(self.q[i], k[seen], v[seen], scale=shape.spec.scale)
            off = float((self.out[i].double() - want).abs().max())
            require(math.isfinite(off), f"{shape.name}: gave numbers that are not finite", RuntimeError)
            worst = max(worst, off)
        return worst


def main() -> None:
    """Print one line per shape."""
    print(torch.cuda.get_device_name())
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for shape in SHAPES:
        call = Call.of(shape, engine="triton", device="cuda", multiprocessors=count)
        call.run()
        error, time_us = call.error(), graph_time_us(call.run)
        size = f"{shape.requests} x ({shape.cached:,} + {shape.new:,})"
        rates = f"{shape.flops / time_us / 1e6:6.0f} TFLOP/s {shape.kv_bytes / time_us / 1e6:5.2f} TB/s"
        name = f"{shape.name}{f', {shape.policy}' if shape.policy else ''}"
        print(f"{name:24} {size:22} {time_us:9.1f} us {rates}  max error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
