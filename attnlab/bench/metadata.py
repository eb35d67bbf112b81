"""Time what a decode step needs before its first layer: `python -m attnlab.bench.metadata [--sglang FOLDER]`.

Host microseconds of a plan made anew, those of a captured graph's plan (checks and copies included), and the device's
microseconds per replay; SGLang's own kernels beside them, where a folder with their files is given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from attnlab import graphs
from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch
from attnlab.bench.decode import graph_time_us
from attnlab.bench.sglang_metadata import SglangMetadata
from attnlab.checks import require
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.plans import DecodePlan
from attnlab.spec import AttentionSpec, ModelSpec

HEADS, KV_HEADS, DIM, MAX_SPLITS, REPEATS = 32, 8, 16, 8, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataTime:
    """Microseconds of one step: of the host, and of the device when replayed."""

    who: str
    requests: int
    host_us: float
    replay_us: float


def backend_of(
    requests: int, tokens: int, device: str, multiprocessors: int | None, *, policy: str
) -> AttentionBackend:
    """Return a backend over as many requests of as many tokens, their slots in random order."""
    spec = AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, qk_dim=DIM, v_dim=DIM, scale=DIM**-0.5)
    model = ModelSpec.uniform(spec, layers=1, context_len=tokens, page_size=1, kv_dtype=torch.bfloat16)
    slots = requests * tokens + 1
    pool = MHAPool(model, num_slots=slots, device=device)
    table = RequestTable(max_requests=requests, max_context=tokens, num_slots=slots, device=device)
    for mine in (torch.randperm(slots - 1, generator=torch.Generator().manual_seed(0)) + 1).split(tokens):
        table.append(table.admit(), mine)
    return AttentionBackend(
        model=model,
        pool=pool,
        table=table,
        engine="triton",
        policy=policy,
        max_requests=requests,
        multiprocessors=multiprocessors,
    )


def host_time_us(work: Callable[[], object]) -> float:
    """Return the median microseconds that the host spends on a call, the device being idle when it begins."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times[REPEATS // 10 :])


def measure(requests: int, tokens: int, kernels: dict[str, object] | None, *, policy: str) -> list[MetadataTime]:
    """Return attnlab's times, anew and captured, and SGLang's."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    backend = backend_of(requests, tokens, "cuda", count, policy=policy)
    batch = DecodeBatch.of(rows=backend.table.rows, lens=[tokens] * requests, device="cuda")
    padding = torch.zeros(requests, device="cuda")
    graph = graphs.capture(backend, lambda plan, x: x, graphs.DecodeShape(requests=requests), inputs={"x": padding})
    graph.plan(batch)  # else what is timed below would be the padding that a graph begins with
    made = backend.planner.make(graph.batch)
    listed = int(made.lane(0).layout.index.indptr[-1]) if isinstance(made, DecodePlan) else 0
    require(listed == requests * tokens, f"metadata: expected {requests * tokens:,} slots listed, got {listed:,}")
    anew = graph_time_us(lambda: backend.planner.make(graph.batch))
    found = [
        MetadataTime(
            who="attnlab, a plan", requests=requests, host_us=host_time_us(lambda: backend.plan(batch)), replay_us=anew
        ),
        MetadataTime(
            who="attnlab, a graph's plan",
            requests=requests,
            host_us=host_time_us(lambda: graph.plan(batch)),
            replay_us=anew,
        ),
    ]
    if kernels is not None:
        step = SglangMetadata(
            kernels=kernels,
            table=backend.table.slots,
            rows=torch.arange(requests, device="cuda"),
            lens=batch.seq.device,
            heads=HEADS,
            kv_heads=KV_HEADS,
            max_splits=MAX_SPLITS,
            multiprocessors=count,
        ).step()
        step()
        found.append(
            MetadataTime(who="SGLang", requests=requests, host_us=host_time_us(step), replay_us=graph_time_us(step))
        )
    return found


def main() -> None:
    """Print a line per batch size and system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", type=Path, help="folder of SGLang's kernels/ops/attention")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of each request")
    parser.add_argument("--policy", default="seed", help="the split policy of attnlab's plans; SGLang's is the seed")
    options = parser.parse_args()
    kernels = None if options.sglang is None else SglangMetadata.kernels_of(options.sglang)
    print(torch.cuda.get_device_name())
    for requests in (1, 64, 512):
        for row in measure(requests, options.tokens, kernels, policy=options.policy):
            name = f"{row.who:24} {row.requests:4} x {options.tokens:,}"
            print(f"{name}  host {row.host_us:7.1f} us   replay {row.replay_us:7.1f} us", flush=True)


if __name__ == "__main__":
    main()
