"""Recording: what exists only inside a decode call, copied out while it happens.

Partial results lie in the scratch after every call, so keeping them needs no hook in a kernel. Scores are computed
again right after the call, from the paged cache. Times alone are noted by the programs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.checks import one_of, positive, require
from attnlab.kernels.decode import HEAD_TILE
from attnlab.plan.call import DecodeCall
from attnlab.plan.plans import Lane
from attnlab.plan.splits import HostSplits
from attnlab.spec import AttentionSpec
from attnlab.trace import STAGES, CallTrace, ScoreTrace, Stage, Trace

BY_KEY_UP_TO = 256
"""Requests of so many keys are recorded key by key unless a pooling is chosen; longer ones by page."""
PAGE = 16
"""Keys per page where the pool's own pages hold a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Which scores to keep. None means all requests, all heads.

    `stages`: `raw` (the dot product), `scaled`, `capped` (with temperature and modifier, where the layer has them),
    `masked`, `weights` (what each key's value is multiplied with). `pool`: by `key`, `page` or `split`; None takes
    keys up to 256 of them and pages beyond. `reduce` makes a bin one number: `max`, `sum` or `logsumexp`; None
    takes the sum of weights and the maximum of scores.
    """

    stages: tuple[Stage, ...] = ("weights",)
    requests: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    pool: Literal["key", "page", "split"] | None = None
    reduce: Literal["max", "sum", "logsumexp"] | None = None

    def __post_init__(self) -> None:
        for stage in self.stages:
            one_of("stages", stage, STAGES)
        if self.pool is not None:
            one_of("pool", self.pool, ("key", "page", "split"))
        if self.reduce is not None:
            one_of("reduce", self.reduce, tuple(REDUCE))


@contextmanager
def record(
    backend: AttentionBackend,
    *,
    partials: bool = True,
    scores: Scores | bool = False,
    times: bool = False,
    layers: Sequence[int] | None = None,
    budget_bytes: int = 256 << 20,
) -> Iterator[Trace]:
    """Record the decode calls made inside the block; the trace fills as they happen.

    `partials` keeps every split's output and log-sum-exp, `scores` what a `Scores` asks for (True: all weights),
    `times` when each program ran (compiled kernels only). What would not fit the budget is left out, and the trace
    says so. Outputs are the same bits as without a recording.

    >>> import attnlab
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
    >>> with attnlab.record(wb.backend, scores=True) as trace:
    ...     out = wb.decode(18)
    >>> [score.values.shape for score in trace.call(18).scores]
    [torch.Size([9, 19]), torch.Size([9, 40])]
    """
    positive("budget_bytes", budget_bytes)
    for layer in layers or ():
        backend.model.layer(layer)
    require(
        backend.tracer is None,
        "record: this backend is being recorded already; end the other block first",
        RuntimeError,
    )
    _refuse_capture()
    wanted = Scores() if scores is True else scores or None
    if times:
        backend.engine.check_times()
    trace = Trace()
    backend.tracer = Recorder(
        backend=backend,
        trace=trace,
        partials=partials,
        scores=wanted,
        times=times,
        layers=None if layers is None else frozenset(layers),
        budget_bytes=budget_bytes,
    )
    try:
        yield trace
    finally:
        backend.tracer = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """The tracer behind `record`: copies parts of each call into the trace while the budget lasts."""

    backend: AttentionBackend
    trace: Trace
    partials: bool
    scores: Scores | None
    times: bool
    layers: frozenset[int] | None
    budget_bytes: int

    def times_for(self, layer: int, lane: Lane) -> Tensor | None:
        """Return room for multiprocessor, start and end of every program, where times are wanted."""
        _refuse_capture()
        if not self._looks_at(layer):
            return None
        spec = self.backend.model.layer(layer).attention
        if self.scores is not None:  # here, since nothing was stored yet
            _check_members("requests", self.scores.requests or (), lane.splits.reqs)
            _check_members("heads", self.scores.heads or (), spec.heads)
        if not self.times:
            return None
        shape = (lane.schedule.segments.shape[0], -(-spec.group // HEAD_TILE), 3)
        return torch.zeros(shape, dtype=torch.int64, device=lane.schedule.segments.device)

    def decoded(self, call: DecodeCall) -> None:
        """Keep what was asked for of this call."""
        if not self._looks_at(call.layer):
            return
        splits, spec = call.lane.splits.to_host(), call.spec
        kept = _Budget(
            trace=self.trace, limit=self.budget_bytes, who=f"call {len(self.trace.calls)}, layer {call.layer}"
        )
        lses, outs = _by_request(call, splits)
        reqs = len(splits.ranges)
        lse = torch.stack([x.logsumexp(0) for x in lses]) if reqs else torch.zeros(0, spec.heads)
        kept.take("log-sum-exps", [lse])
        keeps_lse = self.partials and kept.take("partial log-sum-exps", lses)
        keeps_out = self.partials and kept.take("partial outputs", outs)
        scores = () if self.scores is None else tuple(self._scores(call, splits, lse, self.scores, kept))
        keeps_times = call.times is not None and kept.take("times", [call.times])
        self.trace.calls.append(
            CallTrace(
                layer=call.layer,
                policy=splits.policy,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                scale=spec.scale,
                page_size=self.backend.pool.page_size,
                ranges=splits.ranges,
                nominal=splits.nominal,
                lse=lse.cpu(),
                partial_lse=tuple(x.cpu() for x in lses) if keeps_lse else (),
                partial_out=tuple(x.cpu() for x in outs) if keeps_out else (),
                scores=scores,
                times=call.times.flatten(0, 1).cpu() if keeps_times and call.times is not None else None,
            )
        )

    def _looks_at(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def _scores(
        self, call: DecodeCall, splits: HostSplits, lse: Tensor, wanted: Scores, kept: _Budget
    ) -> Iterator[ScoreTrace]:
        reqs = len(splits.ranges)
        requests = range(reqs) if wanted.requests is None else wanted.requests
        heads = tuple(range(call.spec.heads)) if wanted.heads is None else wanted.heads
        for request in requests:
            keys = splits.lens[request]
            edges = _edges(wanted, keys, splits.ranges[request], self.backend.pool.page_size)
            for stage in wanted.stages:
                cells = len(heads) * (len(edges) - 1)
                if not kept.room(f"{stage} of request {request}", 4 * cells):
                    continue
                values = self._stage(call, request, keys, stage, lse[request])[list(heads)]
                reduce = wanted.reduce or ("sum" if stage == "weights" else "max")
                yield ScoreTrace(
                    request=request,
                    stage=stage,
                    reduce=reduce,
                    heads=heads,
                    edges=edges,
                    values=_pool(values, edges, reduce).cpu(),
                )

    def _stage(self, call: DecodeCall, request: int, keys: int, stage: Stage, lse: Tensor) -> Tensor:
        """Return one request's scores at a stage, `[heads, keys]` fp32, on the device."""
        spec = _spec_at(call.spec, stage)
        asked = torch.tensor([request], dtype=torch.int32, device=call.q.device)
        scores = self.backend.engine.scores(call, spec, requests=asked, max_keys=keys)[0]
        if stage != "weights":
            return scores
        # A sink takes its share of the denominator, so that weights beside one sum to less than 1.
        total = lse if call.sinks is None else torch.logaddexp(lse, call.sinks.float())
        return torch.exp(scores - total[:, None])


@dataclass(slots=True, kw_only=True)
class _Budget:
    """Counts what a call keeps, and says in the trace what it had to leave out."""

    trace: Trace
    limit: int
    who: str
    used: int = 0

    def room(self, what: str, size: int) -> bool:
        """Reserve so many bytes, or note what is left out."""
        if self.trace.bytes + self.used + size > self.limit:
            self.trace.left_out.append(f"{self.who}: {what} ({size:,} bytes; the budget is {self.limit:,})")
            return False
        self.used += size
        return True

    def take(self, what: str, tensors: Sequence[Tensor]) -> bool:
        """Reserve room for these tensors."""
        return self.room(what, sum(x.numel() * x.element_size() for x in tensors))


REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(-1),
    "sum": lambda x: x.sum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
}


def _pool(values: Tensor, edges: tuple[int, ...], reduce: str) -> Tensor:
    """Return one number per bin, `[heads, bins]`."""
    if len(edges) - 1 == values.shape[1]:
        return values
    bins = [REDUCE[reduce](values[:, a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return torch.stack(bins, -1) if bins else values[:, :0]


def _edges(wanted: Scores, keys: int, ranges: tuple[tuple[int, int], ...], page_size: int) -> tuple[int, ...]:
    """Return where bins begin, and the end."""
    pool = wanted.pool or ("key" if keys <= BY_KEY_UP_TO else "page")
    if pool == "split":
        return tuple(start for start, _ in ranges) + ((keys,) if ranges else (0,))
    width = 1 if pool == "key" else (page_size if page_size > 1 else PAGE)
    return (*range(0, keys, width), keys)


def _by_request(call: DecodeCall, splits: HostSplits) -> tuple[list[Tensor], list[Tensor]]:
    """Return every request's partial LSEs `[splits, heads]` and outputs `[splits, heads, v_dim]`."""
    lse, out, spec = call.partials.lse, call.partials.output, call.spec
    owners = call.lane.schedule.merge_indptr.tolist()
    lses, outs = [], []
    for r, mine in enumerate(splits.ranges):
        rows = [slice(owners[o], owners[o + 1]) for o in range(r * spec.kv_heads, (r + 1) * spec.kv_heads)]
        count = len(mine)
        lses.append(torch.stack([lse[row] for row in rows], 1).reshape(count, spec.heads))
        outs.append(torch.stack([out[row] for row in rows], 1).reshape(count, spec.heads, spec.v_dim))
    return lses, outs


def _spec_at(spec: AttentionSpec, stage: Stage) -> AttentionSpec:
    """Return the attention whose score pipeline ends at a stage. A decode's query sees every key of its list."""
    plain = replace(spec, softcap=None, temperature_len=None, mod=None)
    return {"raw": replace(plain, scale=1.0), "scaled": plain}.get(stage, spec)


def _check_members(name: str, numbers: Sequence[int], count: int) -> None:
    for number in numbers:
        require(0 <= number < count, f"{name}: expected 0 to {count - 1}, got {number}")


def _refuse_capture() -> None:
    require(
        not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()),
        "record: a CUDA graph is being captured, and copying to the host cannot be part of it; record outside of it",
        RuntimeError,
    )
