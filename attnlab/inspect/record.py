"""Recording: what exists only inside a decode call, copied out while it happens.

Partial results lie in the scratch after every call, so keeping them needs no hook in a kernel. Scores are computed
again right after the call, from the paged cache. Times alone are noted by the programs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.checks import one_of, require, whole
from attnlab.inspect.bins import POOLS, Bins, Pool, pooled
from attnlab.inspect.merge import RequestPartials
from attnlab.kernels.decode import head_tiles
from attnlab.plan.call import DecodeCall
from attnlab.plan.plans import Lane
from attnlab.plan.splits import HostSplits
from attnlab.plan.workspace import FLOAT_BYTES
from attnlab.spec import AttentionSpec
from attnlab.trace import REDUCTIONS, STAGES, CallTrace, Reduce, ScoreTrace, Stage, Trace, finite_or_zero

TextsOf = Callable[[Lane], Sequence[int | None]]

BUDGET_BYTES = 256 << 20
"""What a recording keeps at most, unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Which scores to keep. None means all requests, all heads.

    `stages`: `raw` (the dot product), `scaled`, `capped` (with temperature and modifier, where the layer has them),
    `masked`, `weights` (what each key's value is multiplied with). `pool`: by `key`, `page` or `split`; None takes
    keys up to 256 of them and pages beyond. `reduce` makes a bin one number: `max` or `logsumexp` of scores, `sum` or
    `max` of weights; None takes the maximum of scores and the sum of weights.
    """

    stages: tuple[Stage, ...] = ("weights",)
    requests: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    pool: Pool | None = None
    reduce: Reduce | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", _listed("stages", self.stages, "stages, such as ('weights',)"))
        for stage in self.stages:
            one_of("stages", stage, STAGES)
            if self.reduce is not None:
                one_of(f"reduce ({stage})", self.reduce, REDUCTIONS[stage])
        for name in ("requests", "heads"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _numbers(name, value))
        if self.pool is not None:
            one_of("pool", self.pool, POOLS)


@contextmanager
def record(
    backend: AttentionBackend,
    *,
    partials: bool = True,
    scores: Scores | bool = False,
    times: bool = False,
    layers: Sequence[int] | None = None,
    budget_bytes: int = BUDGET_BYTES,
    texts_of: TextsOf | None = None,
) -> Iterator[Trace]:
    """Record the decode calls made inside the block; the trace fills as they happen.

    `partials` keeps every split's output and log-sum-exp, `scores` what a `Scores` asks for (True: all weights),
    `times` when each program ran (compiled kernels only). What would not fit the budget is left out, and the trace
    says so. Outputs are the same bits as without a recording. `texts_of` says which of the texts that one puts into
    `trace.tokens` are those of a lane's requests; without it they are taken to be in the batch's order.

    >>> import attnlab
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
    >>> with attnlab.record(wb.backend, scores=True) as trace:
    ...     out = wb.decode(18)
    >>> [score.values.shape for score in trace.call(18).scores]
    [torch.Size([9, 19]), torch.Size([9, 40])]
    """
    if not isinstance(backend, AttentionBackend):
        raise TypeError(
            f"backend: expected an AttentionBackend, got {type(backend).__name__}; a workbench has its own: wb.record()"
        )
    require(whole("budget_bytes", budget_bytes) >= 1, f"budget_bytes: expected at least 1, got {budget_bytes}")
    wanted = _wished(scores)
    looked_at = None if layers is None else frozenset(_numbers("layers", layers))
    for layer in looked_at or ():
        backend.model.layer(layer)
    require(
        backend.tracer is None,
        "record: this backend is being recorded already; end the other block first",
        RuntimeError,
    )
    _refuse_capture()
    if times:
        backend.engine.check_times()
    trace = Trace()
    backend.tracer = Recorder(
        backend=backend,
        trace=trace,
        partials=partials,
        scores=wanted,
        times=times,
        layers=looked_at,
        budget=_Budget(trace=trace, limit=budget_bytes),
        texts_of=texts_of,
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
    budget: _Budget
    texts_of: TextsOf | None

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
        shape = (lane.schedule.segments.shape[0], head_tiles(spec.group), 3)
        return torch.zeros(shape, dtype=torch.int64, device=lane.schedule.segments.device)

    def passed(self, layer: int, mode: str) -> None:
        """Say once of every mode that its calls are not recorded."""
        note = f"{mode}: calls of several queries a request are not recorded"
        if self._looks_at(layer) and note not in self.trace.left_out:
            self.trace.left_out.append(note)

    def decoded(self, call: DecodeCall) -> None:
        """Keep what was asked for of this call."""
        if not self._looks_at(call.layer):
            return
        splits, spec, kept = call.lane.splits.to_host(), call.spec, self.budget
        reqs = len(splits.ranges)
        kept.who = f"call {len(self.trace.calls)}, layer {call.layer}"
        if not kept.room("everything, and all later calls", reqs * spec.heads * FLOAT_BYTES):
            kept.full = True
            return
        owners = call.lane.schedule.merge_indptr.tolist()
        mine = [RequestPartials.of(call.partials, r, owners=owners, kv_heads=spec.kv_heads) for r in range(reqs)]
        lses = [x.lse for x in mine]
        lse = torch.stack([x.logsumexp(0) for x in lses]) if reqs else torch.zeros(0, spec.heads)
        rows = sum(splits.effective) * spec.heads * FLOAT_BYTES
        keeps_lse = self.partials and kept.room("partial log-sum-exps", rows)
        keeps_out = self.partials and kept.room("partial outputs", rows * spec.v_dim)
        scores = () if self.scores is None else tuple(self._scores(call, splits, lse, self.scores))
        segments, times = call.lane.schedule.segments, call.times
        keeps_times = times is not None and kept.room("times", segments.nbytes + times.nbytes)
        start = tuple(call.lane.layout.start.tolist())
        self.trace.calls.append(
            CallTrace(
                layer=call.layer,
                policy=splits.policy,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                scale=spec.scale,
                softcap=spec.softcap,
                temperature_len=spec.temperature_len,
                mod=None if spec.mod is None else spec.mod.name,
                has_sinks=spec.has_sinks,
                page_size=self.backend.pool.page_size,
                ranges=splits.ranges,
                nominal=splits.nominal,
                start=start,
                # A decoding query is its request's last token.
                q_pos=tuple(first + keys - 1 for first, keys in zip(start, splits.lens, strict=True)),
                lse=lse.cpu(),
                partial_lse=tuple(x.cpu() for x in lses) if keeps_lse else (),
                partial_out=tuple(x.output.cpu() for x in mine) if keeps_out else (),
                scores=scores,
                segments=segments.cpu() if keeps_times else None,
                times=times.cpu() if keeps_times and times is not None else None,
                texts=() if self.texts_of is None else tuple(self.texts_of(call.lane)),
            )
        )

    def _looks_at(self, layer: int) -> bool:
        return not self.budget.full and (self.layers is None or layer in self.layers)

    def _scores(self, call: DecodeCall, splits: HostSplits, lse: Tensor, wanted: Scores) -> Iterator[ScoreTrace]:
        requests = range(len(splits.ranges)) if wanted.requests is None else wanted.requests
        heads = tuple(range(call.spec.heads)) if wanted.heads is None else wanted.heads
        for request in requests:
            keys, ranges = splits.lens[request], splits.ranges[request]
            edges = Bins.of(wanted.pool, keys=keys, ranges=ranges, page_size=self.backend.pool.page_size).edges
            at_stage = self._stages(call, request, keys, list(heads), lse[request])
            for stage in wanted.stages:
                size = len(heads) * (len(edges) - 1) * FLOAT_BYTES
                if not self.budget.room(f"{stage} of request {request}", size):
                    continue
                reduce = wanted.reduce or REDUCTIONS[stage][0]
                yield ScoreTrace(
                    request=request,
                    stage=stage,
                    reduce=reduce,
                    heads=heads,
                    edges=edges,
                    values=pooled(at_stage(stage), edges, reduce).cpu(),
                )

    def _stages(
        self, call: DecodeCall, request: int, keys: int, heads: list[int], lse: Tensor
    ) -> Callable[[Stage], Tensor]:
        """Return what gives some heads' scores at a stage, `[heads, keys]` fp32, on the device.

        Stages whose pipelines are the same are computed once.
        """
        asked = torch.tensor([request], dtype=torch.int32, device=call.q.device)
        known: dict[AttentionSpec, Tensor] = {}

        def at(stage: Stage) -> Tensor:
            spec = _spec_at(call.spec, stage)
            if spec not in known:
                known[spec] = self.backend.engine.scores(call, spec, requests=asked, max_keys=keys)[0, heads]
            if stage != "weights":
                return known[spec]
            # A sink takes its share of the denominator, so that weights beside one sum to less than 1.
            total = lse if call.sinks is None else torch.logaddexp(lse, call.sinks.float())
            return torch.exp(known[spec] - finite_or_zero(total[heads])[:, None])

        return at


@dataclass(slots=True, kw_only=True)
class _Budget:
    """Counts the bytes that are kept, and says in the trace what had to be left out; `who` is the call at hand."""

    trace: Trace
    limit: int
    who: str = ""
    used: int = 0
    full: bool = False

    def room(self, what: str, size: int) -> bool:
        """Reserve so many bytes, or note what is left out."""
        if self.used + size > self.limit:
            self.trace.left_out.append(f"{self.who}: {what} ({size:,} bytes; the budget is {self.limit:,})")
            return False
        self.used += size
        return True


def _wished(scores: object) -> Scores | None:
    """Return what `record` was asked to keep of scores."""
    if isinstance(scores, Scores) or scores is None or scores is False:
        return scores or None
    if scores is True:
        return Scores()
    raise TypeError(f"scores: expected a Scores, True or False, got {scores!r}; see attnlab.Scores")


def _listed(name: str, values: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list of {wanted}, got {values!r}")
    return tuple(values)


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    """Return numbers of layers, requests or heads as plain ints."""
    try:
        return tuple(whole(name, value) for value in _listed(name, values, "numbers"))
    except TypeError:
        raise TypeError(f"{name}: expected a list of numbers, got {values!r}") from None


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
