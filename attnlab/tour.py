"""The tour: real attention of a trained model, decoded from a paged cache in splits, merged, and compared with the
oracle.

One batch with lengths from real serving traffic, under three split policies; and one request through the Triton kernels
themselves. No GPU, no download.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.progress import Progress
from torch import Tensor

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab.eager import oracle
from attnlab.inspect.footprint import Footprint
from attnlab.inspect.merge import MergeSteps
from attnlab.inspect.samples import MODEL, Sample
from attnlab.inspect.traffic import draw_decode_lens, scale_to, trace_title
from attnlab.inspect.workbench import Workbench, workbench
from attnlab.plan.plans import Lane
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import SplitPolicy

POLICIES = (Seed(max_splits=8), Static(splits=8), Tile(tile=128))
KERNEL_TOKENS = 700
"""Length of the request that goes through the kernels: at least three ranges under every policy."""
KERNEL_LAYER = 18
SINK_HEAD, DIFFUSE_HEAD = (18, 3), (0, 5)
"""(layer, head) of the two merges that are drawn: one puts most weight on the first token, the other spreads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One row of the tour's table. Errors are the largest absolute ones of fp32 outputs against the fp64 oracle."""

    footprint: Footprint
    eager_error: float
    kernel_error: float | None
    kernel_ranges: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TourResult:
    """What the tour found, for the table and the page."""

    trace: str
    drawn: tuple[int, ...]
    lens: tuple[int, ...]
    rows: tuple[PolicyResult, ...]
    lanes: tuple[Lane, ...]
    merges: tuple[MergeSteps, ...]

    @property
    def batch_words(self) -> str:
        """A sentence on where the lengths come from, and by how much they were scaled."""
        words = f"{len(self.lens)} request{'s' * (len(self.lens) != 1)} with lengths drawn from {self.trace}"
        if self.drawn == self.lens:
            return f"{words}; none is longer than the recorded text, so none was scaled."
        factor = max(self.lens) / max(self.drawn)
        return (
            f"{words}; the longest has {max(self.drawn):,} tokens, the recorded text {max(self.lens):,}, so all were "
            f"scaled by {factor:.2g}."
        )


def kernel_words() -> str:
    """Say how kernels run here, or why they cannot."""
    if _triton.PROBLEM is not None:
        return f"not run: {_triton.PROBLEM}"
    return "interpreted on the CPU" if INTERPRETED else f"compiled, on {torch.cuda.get_device_name()}"


def run_tour(*, trace: str, requests: int, seed: int, progress: Progress) -> TourResult:
    """Decode the batch under every policy, one request through the kernels, and two heads for the merge picture."""
    sample = Sample.load("long")
    drawn = draw_decode_lens(trace, requests, seed=seed)
    lens = scale_to(drawn, len(sample.tokens))
    layers = len(sample.layers)
    steps = layers + 1 + len(POLICIES) * (layers + (_triton.PROBLEM is None)) + 1  # truths, policies, merges
    task = progress.add_task("decoding", total=steps)

    def step(what: str) -> None:
        progress.update(task, description=what, advance=1)

    first = workbench(MODEL, lens=lens, policy=POLICIES[0], engine="eager")
    truth = _truth(first, step)
    single = workbench(MODEL, lens=[KERNEL_TOKENS], policy=POLICIES[0], engine="eager", layers=(KERNEL_LAYER,))
    single_truth = _truth(single, step)
    rows, lanes = [], []
    for policy in POLICIES:
        bench = workbench(MODEL, lens=lens, policy=policy, engine="eager")
        plan = bench.plan()
        error = _worst(bench, truth, step)
        kernel = _through_the_kernels(policy, single_truth, step)
        spec = bench.model.layers[0].attention
        footprint = Footprint.of(plan.lanes[0], spec, multiprocessors=bench.backend.planner.multiprocessors or 1)
        rows.append(
            PolicyResult(
                footprint=footprint,
                eager_error=error,
                kernel_error=kernel[0],
                kernel_ranges=kernel[1],
            )
        )
        lanes.append(plan.lanes[0])
    merges = _merges(step)
    progress.update(task, description="decoded")
    return TourResult(
        trace=trace_title(trace),
        drawn=tuple(drawn),
        lens=tuple(lens),
        rows=tuple(rows),
        lanes=tuple(lanes),
        merges=merges,
    )


def _truth(bench: Workbench, step: Callable[[str], None]) -> dict[int, Tensor]:
    """Return the fp64 oracle's outputs of every layer, `[reqs, heads, v_dim]`."""
    truth = {}
    for layer in bench.layers:
        q, _, _ = bench.newest(layer)
        scale = bench.model.layer(layer).attention.scale
        outs = [oracle.attention(q[r], *bench.cached(layer, r), scale=scale)[0] for r in range(len(bench.lens))]
        truth[layer] = torch.stack(outs)
        step(f"oracle, layer {layer}")
    return truth


def _worst(bench: Workbench, truth: dict[int, Tensor], step: Callable[[str], None]) -> float:
    """Decode every layer in fp32 and return the largest error."""
    plan, worst = bench.plan(), 0.0
    for layer in bench.layers:
        q, k, v = bench.newest(layer)
        out = bench.backend.decode(layer, q.float(), k, v, plan)
        error = float((out.cpu().double() - truth[layer]).abs().max())
        worst = error if math.isnan(error) else max(worst, error)  # max(0.0, nan) would be 0.0
        step(f"{bench.backend.policy.name}, layer {layer}, {bench.backend.engine.name}")
    return worst


def _through_the_kernels(
    policy: SplitPolicy, truth: dict[int, Tensor], step: Callable[[str], None]
) -> tuple[float | None, int]:
    """Decode one request with the Triton engine; return its error and how many ranges it had."""
    if _triton.PROBLEM is not None:
        return None, 0
    device = "cpu" if INTERPRETED else "cuda"
    bench = workbench(
        MODEL, lens=[KERNEL_TOKENS], policy=policy, engine="triton", layers=(KERNEL_LAYER,), device=device
    )
    ranges = bench.plan().lanes[0].splits.to_host().effective[0]
    return _worst(bench, truth, step), ranges


def _merges(step: Callable[[str], None]) -> tuple[MergeSteps, ...]:
    tokens = len(Sample.load("long").tokens)
    bench = workbench(MODEL, lens=[tokens], policy=Static(splits=8), engine="eager")
    steps = tuple(
        replace(bench.merge(layer, request=0, head=head), about="the whole text")
        for layer, head in (SINK_HEAD, DIFFUSE_HEAD)
    )
    step("merging two heads")
    return steps
