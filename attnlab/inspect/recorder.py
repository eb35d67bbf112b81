"""What records: it looks at every call of a backend, and copies parts of it into a trace while the budget lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.checks import one_of, require, whole
from attnlab.inspect.bins import POOLS, Bins, Pool, pooled
from attnlab.inspect.merge import RequestPartials
from attnlab.inspect.rows import RequestKeys, Row, RowScores, chosen_rows, in_slices
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.plans import Queries
from attnlab.plan.schedule import Schedule
from attnlab.plan.workspace import FLOAT_BYTES
from attnlab.spec import AttentionSpec
from attnlab.trace import REDUCTIONS, STAGES, CallTrace, Mode, Reduce, ScoreTrace, Stage, Trace

TextsOf = Callable[[Sequence[int]], Sequence[int | None]]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Which scores to keep of the queries that are recorded. None means all requests, all heads.

    A list names something, and nothing twice: one that is empty or repeats raises ValueError.

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
        stages = _listed("stages", self.stages, "stages, such as ('weights',)")
        object.__setattr__(self, "stages", _once("stages", stages, "scores=False keeps none"))
        for stage in self.stages:
            one_of("stages", stage, STAGES)
            if self.reduce is not None:
                one_of(f"reduce ({stage})", self.reduce, REDUCTIONS[stage])
        for name in ("requests", "heads"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _once(name, numbers(name, value), f"{name}=None takes all"))
        if self.pool is not None:
            one_of("pool", self.pool, POOLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """The tracer behind `record`: copies parts of each call into the trace while the budget lasts."""

    backend: AttentionBackend
    trace: Trace
    partials: bool
    scores: Scores | None
    times: bool
    layers: frozenset[int] | None
    queries: tuple[int, ...] | None
    budget: Budget
    texts_of: TextsOf | None

    def times_for(self, call: DecodeCall) -> Tensor | None:
        """Return room for multiprocessor, start and end of every program, where times are wanted."""
        refuse_capture()
        if not self._looks_at(call.layer):
            return None
        self._check_wanted(call.layer, reqs=call.lane.splits.reqs)  # here, since nothing was stored yet
        if not self.times:
            return None
        shape = (len(_owned(call.lane.schedule)) - 1, call.head_tiles, 3)
        return torch.zeros(shape, dtype=torch.int64, device=call.lane.schedule.segments.device)

    def check_queries(self, layer: int, queries: Queries) -> None:
        """Raise ValueError where no request of a step has a query, a request or a head that is to be recorded."""
        refuse_capture()
        if self._looks_at(layer):
            counts = queries.indptr.diff().tolist()
            self._check_wanted(layer, reqs=len(counts))
            chosen_rows(self.queries, counts)

    def decoded(self, call: DecodeCall) -> None:
        """Keep what was asked for of a decode."""
        if not self._begins(call):
            return
        splits, spec, kept = call.lane.splits.to_host(), call.spec, self.budget
        reqs = len(splits.ranges)
        if not self._has_room(reqs, spec):
            return
        owners = call.lane.schedule.merge_indptr.tolist()
        mine = [RequestPartials.of(call.partials, r, owners=owners, kv_heads=spec.kv_heads) for r in range(reqs)]
        lses = [x.lse for x in mine]
        lse = torch.stack([x.logsumexp(0) for x in lses]) if reqs else torch.zeros(0, spec.heads)
        partials = sum(splits.effective) * spec.heads * FLOAT_BYTES
        keeps_lse = self.partials and kept.room("partial log-sum-exps", partials)
        keeps_out = self.partials and kept.room("partial outputs", partials * spec.v_dim)
        start, out = tuple(call.lane.layout.start.tolist()), self._outputs(call, range(reqs))
        scores: list[ScoreTrace] = []
        for request in self._scored(reqs):
            keys, row = RequestKeys.of(call, request), Row(request=request, query=0, token=request, alone=True)
            scores += self._look(call, keys, [row], splits.ranges[request], self.scores, lse[request : request + 1])[1]
        schedule, times = call.lane.schedule, call.times
        owned, timed = _owned(schedule), 0 if times is None else times.nbytes
        keeps_times = times is not None and kept.room("times", schedule.segments.nbytes + owned.nbytes + timed)
        self.trace.calls.append(
            CallTrace(
                **self._described(call, "decode", policy=splits.policy),
                ranges=splits.ranges,
                nominal=splits.nominal,
                start=start,
                rows=tuple((request, 0) for request in range(reqs)),
                # A decoding query is its request's last token.
                q_pos=tuple(first + keys - 1 for first, keys in zip(start, splits.lens, strict=True)),
                own=tuple(keys - 1 for keys in splits.lens),
                lse=lse.cpu(),
                out=out,
                partial_lse=tuple(x.cpu() for x in lses) if keeps_lse else (),
                partial_out=tuple(x.output.cpu() for x in mine) if keeps_out else (),
                scores=tuple(scores),
                segments=schedule.segments.cpu() if keeps_times else None,
                program_indptr=owned.cpu() if keeps_times else None,
                times=times.cpu() if keeps_times and times is not None else None,
                texts=self._texts(call.lane.write_slots.tolist()),
            )
        )

    def attended(self, call: ExtendCall | VerifyCall) -> None:
        """Keep what was asked for of an extend or a verify: of the chosen queries alone."""
        if not self._begins(call):
            return
        offsets: list[int] = call.queries.indptr.tolist()
        new = [end - first for first, end in pairwise(offsets)]
        rows = chosen_rows(self.queries, new)
        if not self._has_room(len(rows), call.spec):
            return
        keys = [RequestKeys.of(call, request) for request in range(len(new))]
        ranges, nominal, policy = _taken(call, [x.keys for x in keys])
        scored, out = set(self._scored(len(new))), self._outputs(call, [row.token for row in rows])
        lses, scores = [torch.zeros(0, call.spec.heads)], []
        for request, mine in groupby(rows, key=lambda row: row.request):
            wanted = self.scores if request in scored else None
            found = self._look(call, keys[request], list(mine), ranges[request], wanted, None)
            lses.append(found[0].cpu())
            scores += found[1]
        slots = call.lane.write_slots.tolist()
        self.trace.calls.append(
            CallTrace(
                **self._described(call, "verify" if isinstance(call, VerifyCall) else "extend", policy=policy),
                ranges=ranges,
                nominal=nominal,
                start=tuple(x.column for x in keys),
                rows=tuple((row.request, row.query) for row in rows),
                q_pos=tuple(call.queries.positions[[row.token for row in rows]].tolist()),
                own=tuple(keys[row.request].own_key(row.query) for row in rows),
                lse=torch.cat(lses),
                out=out,
                scores=tuple(scores),
                texts=self._texts([slots[at] if n else 0 for at, n in zip(offsets, new, strict=False)]),
            )
        )

    def _looks_at(self, layer: int) -> bool:
        return not self.budget.full and (self.layers is None or layer in self.layers)

    def _begins(self, call: DecodeCall | ExtendCall | VerifyCall) -> bool:
        """Name the call at hand, if it is to be kept."""
        self.budget.who = f"call {len(self.trace.calls)}, layer {call.layer}"
        return self._looks_at(call.layer)

    def _has_room(self, rows: int, spec: AttentionSpec) -> bool:
        """Whether the least that is kept of a call has room; if not, this was the last one."""
        self.budget.full = not self.budget.room("everything, and all later calls", rows * spec.heads * FLOAT_BYTES)
        return not self.budget.full

    def _check_wanted(self, layer: int, *, reqs: int) -> None:
        if self.scores is not None:
            _check_members("requests", self.scores.requests, reqs)
            _check_members("heads", self.scores.heads, self.backend.model.layer(layer).attention.heads)

    def _scored(self, reqs: int) -> Sequence[int]:
        """Return the requests whose scores are kept."""
        if self.scores is None:
            return ()
        return range(reqs) if self.scores.requests is None else self.scores.requests

    def _described(self, call: DecodeCall | ExtendCall | VerifyCall, mode: Mode, *, policy: str) -> dict[str, Any]:
        spec = call.spec
        return {
            "layer": call.layer,
            "mode": mode,
            "policy": policy,
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "scale": spec.scale,
            "softcap": spec.softcap,
            "temperature_len": spec.temperature_len,
            "mod": None if spec.mod is None else spec.mod.name,
            "has_sinks": spec.has_sinks,
            "cross": spec.cross,
            "page_size": self.backend.pool.page_size,
        }

    def _outputs(self, call: DecodeCall | ExtendCall | VerifyCall, tokens: Sequence[int]) -> Tensor | None:
        """Return some tokens' outputs as fp32, where they are wanted and have room."""
        size = len(tokens) * call.spec.heads * call.spec.v_dim * FLOAT_BYTES
        if not self.partials or not self.budget.room("outputs", size):
            return None
        return call.out[list(tokens)].float().cpu()

    def _texts(self, slots: Sequence[int]) -> tuple[int | None, ...]:
        return () if self.texts_of is None else tuple(self.texts_of(slots))

    def _look(
        self,
        call: DecodeCall | ExtendCall | VerifyCall,
        keys: RequestKeys,
        rows: Sequence[Row],
        ranges: Ranges,
        wanted: Scores | None,
        lse: Tensor | None,
    ) -> tuple[Tensor, list[ScoreTrace]]:
        """Return log-sum-exps `[rows, heads]` of a request's rows, and what is wanted of their scores.

        Where the call left no log-sum-exp, it is that of the scores.
        """
        heads, scores, sums = call.spec.heads, [], []
        for mine in in_slices(rows, row_bytes=heads * keys.keys * FLOAT_BYTES):
            found = RowScores.of(self.backend.engine, call, keys, mine)
            total = found.at("masked").logsumexp(-1) if lse is None else lse
            sums.append(total)
            if wanted is None:
                continue
            weights = found.weights(total) if "weights" in wanted.stages else None
            for i, row, stage, edges in self._admitted(wanted, keys, mine, ranges, heads):
                values = found.at(stage) if stage != "weights" or weights is None else weights
                scores.append(_pooled(wanted, values[i, :, : edges[-1]], row, stage, edges))
        return torch.cat(sums), scores

    def _admitted(
        self, wanted: Scores, keys: RequestKeys, rows: Sequence[Row], ranges: Ranges, heads: int
    ) -> list[tuple[int, Row, Stage, tuple[int, ...]]]:
        """Return which row at which stage in which bins is kept, as far as the budget goes."""
        found = []
        for i, row in enumerate(rows):
            count = keys.in_row(row.query)
            cut = tuple((a, min(b, count)) for a, b in ranges if a < count)
            edges = Bins.of(wanted.pool, keys=count, ranges=cut, page_size=self.backend.pool.page_size).edges
            size = (heads if wanted.heads is None else len(wanted.heads)) * (len(edges) - 1) * FLOAT_BYTES
            for stage in wanted.stages:
                if self.budget.room(f"{stage} of {row}", size):
                    found.append((i, row, stage, edges))
        return found


def _pooled(wanted: Scores, values: Tensor, row: Row, stage: Stage, edges: tuple[int, ...]) -> ScoreTrace:
    heads = tuple(range(len(values))) if wanted.heads is None else wanted.heads
    reduce = REDUCTIONS[stage][0] if wanted.reduce is None else wanted.reduce
    return ScoreTrace(
        request=row.request,
        query=row.query,
        stage=stage,
        reduce=reduce,
        heads=heads,
        edges=edges,
        values=pooled(values[list(heads)], edges, reduce).cpu(),
    )


def _owned(schedule: Schedule) -> Int[Tensor, " programs_1"]:
    """Return which segments each launched program reads: program p those from entry p up to the next."""
    if schedule.persistent:
        return schedule.program_indptr
    segments = schedule.segments  # a program each, the empty ones included
    return torch.arange(segments.shape[0] + 1, dtype=torch.int32, device=segments.device)


def _taken(call: ExtendCall | VerifyCall, keys: Sequence[int]) -> tuple[tuple[Ranges, ...], tuple[int, ...], str]:
    """Return how programs took each request's keys: in which ranges, how many were asked for, and by which policy."""
    if isinstance(call, ExtendCall):
        return tuple(((0, n),) if n else () for n in keys), (1,) * len(keys), "none"
    splits = call.lane.splits.to_host()
    cached = (mine[-1][1] if mine else 0 for mine in splits.ranges)
    drafts = (((n, total),) if total > n else () for n, total in zip(cached, keys, strict=True))
    ranges = tuple((*mine, *last) for mine, last in zip(splits.ranges, drafts, strict=True))
    return ranges, splits.nominal, splits.policy


@dataclass(slots=True, kw_only=True)
class Budget:
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


def _listed(name: str, values: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list of {wanted}, got {values!r}")
    return tuple(values)


def numbers(name: str, values: Any) -> tuple[int, ...]:
    """Return numbers of layers, requests or heads as plain ints."""
    try:
        return tuple(whole(name, value) for value in _listed(name, values, "numbers"))
    except TypeError:
        raise TypeError(f"{name}: expected a list of numbers, got {values!r}") from None


def _once(name: str, values: tuple[Any, ...], way_out: str) -> tuple[Any, ...]:
    """Return a list that names something, and nothing twice, or raise."""
    require(bool(values), f"{name}: expected at least one, got none; {way_out}")
    require(len({*values}) == len(values), f"{name}: expected each one once, got {values}")
    return values


def _check_members(name: str, numbers: Sequence[int] | None, count: int) -> None:
    """Raise at a number that is none of the `count` there are; None: all of them are meant."""
    for number in () if numbers is None else numbers:
        require(0 <= number < count, f"{name}: expected 0 to {count - 1}, got {number}")


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is being captured."""
    require(
        not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()),
        "record: a CUDA graph is being captured, and copying to the host cannot be part of it; record outside of it",
        RuntimeError,
    )
