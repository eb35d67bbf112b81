"""Time the recording of scores of long requests on a GPU: `python -m attnlab.bench.scores`.

One request: all but some last tokens are cached, these ask together (an extend), and their rows of scores are recorded,
pooled on the device. Before any time is printed, the log-sum-exp of every row is held to the kernel's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from attnlab.backend import AttentionBackend
from attnlab.batch import ExtendBatch
from attnlab.bench.decode import DecodeShape, build
from attnlab.checks import require
from attnlab.inspect.bins import Pool
from attnlab.inspect.record import Scores, record
from attnlab.plan.plans import ExtendPlan
from attnlab.trace import Stage, Trace

REPEATS = 5
CLOSE = 2e-3
"""How far the log-sum-exp of recorded scores may be from the kernel's: bf16 products, each summed in its own order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTime:
    """One measurement: milliseconds of an extend alone and with its rows recorded, and bytes."""

    plain_ms: float
    recorded_ms: float
    kept_bytes: int
    peak_bytes: int
    off: float


def measure(shape: DecodeShape, rows: int, wanted: Scores) -> ScoreTime:
    """Record the last `rows` queries of the shape's one request, and check them against the kernel's log-sum-exp."""
    device = torch.device("cuda")
    backend, _ = build(shape, "seed", device)
    batch = ExtendBatch.of(rows=backend.table.rows, prefix=[shape.tokens - rows], new=[rows], device=device)
    plan, q = backend.plan(batch), torch.randn(rows, shape.heads, shape.dim, device=device, dtype=shape.dtype)
    lse = torch.full((rows, shape.heads), float("nan"), device=device)
    trace = _recorded(backend, plan, q, lse, wanted)
    off = float((trace.call(0).lse - lse.cpu()).abs().max())
    require(off < CLOSE, f"scores: their log-sum-exp is {off} from the kernel's", RuntimeError)
    require(not trace.left_out, f"scores: left out {trace.left_out}", RuntimeError)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    recorded = [_seconds(lambda: _recorded(backend, plan, q, lse, wanted)) for _ in range(REPEATS)]
    peak = torch.cuda.max_memory_allocated() - before
    plain = [_seconds(lambda: _extend(backend, plan, q, lse)) for _ in range(REPEATS)]
    return ScoreTime(
        plain_ms=1e3 * median(plain),
        recorded_ms=1e3 * median(recorded),
        kept_bytes=trace.bytes,
        peak_bytes=peak,
        off=off,
    )


def _extend(backend: AttentionBackend, plan: ExtendPlan, q: torch.Tensor, lse: torch.Tensor) -> None:
    backend.extend(0, q, None, None, plan, save=False, lse=lse)


def _recorded(backend: AttentionBackend, plan: ExtendPlan, q: torch.Tensor, lse: torch.Tensor, wanted: Scores) -> Trace:
    with record(backend, scores=wanted, queries=None, budget_bytes=8 << 30) as trace:
        _extend(backend, plan, q, lse)
    return trace


def _seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Print a line for weights by page, weights by key, and all stages by page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    shape = DecodeShape(requests=1, tokens=args.tokens, heads=32, kv_heads=8, dim=128)
    print(f"{torch.cuda.get_device_name()}, {shape}, the last {args.rows} queries")
    stages: tuple[Stage, ...] = ("raw", "scaled", "masked", "weights")
    pools: tuple[tuple[str, tuple[Stage, ...], Pool], ...] = (
        ("weights by page", ("weights",), "page"),
        ("weights by key", ("weights",), "key"),
        ("four stages by page", stages, "page"),
    )
    for name, kept, pool in pools:
        found = measure(shape, args.rows, Scores(stages=kept, pool=pool))
        print(
            f"{name:20} extend {found.plain_ms:7.2f} ms, recorded {found.recorded_ms:8.1f} ms; kept "
            f"{found.kept_bytes / 1e6:7.1f} MB, {found.peak_bytes / 1e6:6.1f} MB more on the device at most; "
            f"log-sum-exp off by {found.off:.1e}"
        )


if __name__ == "__main__":
    main()
