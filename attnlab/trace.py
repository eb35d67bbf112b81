"""What a recording holds: plain numbers on the host, saved and read back without a GPU and without pickle.

Reference of the format: safetensors, with one JSON document in its header. Tensors are named `call.field.request`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from attnlab.checks import member, number, one_of, positive, require, tensor
from attnlab.files import place, write_whole
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.plans import Queries
from attnlab.plan.schedule import SEGMENT
from attnlab.plan.splits import check_ranges

Mode = Literal["decode", "extend", "verify"]
Stage = Literal["raw", "scaled", "capped", "masked", "weights"]
Reduce = Literal["max", "sum", "logsumexp"]
MODES: tuple[Mode, ...] = ("decode", "extend", "verify")
STAGES: tuple[Stage, ...] = ("raw", "scaled", "capped", "masked", "weights")
"""What a score goes through: the dot product, times the scale, capped (tempered and modified too), masked, softmax."""
_OF_SCORES: tuple[Reduce, ...] = ("max", "logsumexp")
REDUCTIONS: dict[str, tuple[Reduce, ...]] = {**dict.fromkeys(STAGES, _OF_SCORES), "weights": ("sum", "max")}
"""How the keys of a bin become one number, by stage; the first is the default. Weights add up, scores do not."""
FORMAT = 5
MOST_HEADER = 90_000_000
"""Bytes of JSON: safetensors reads no header of more than 100 million, the names of tensors included."""


@runtime_checkable
class Tracer(Protocol):
    """Looks at every call of a backend while it is attached."""

    def times_for(self, call: DecodeCall) -> Tensor | None:
        """Return a tensor for the programs of a call to note when they ran, or None. Nothing was stored yet."""

    def decoded(self, call: DecodeCall) -> None:
        """Look at a call. It must not change a tensor."""

    def check_queries(self, layer: int, queries: Queries) -> None:
        """Raise ValueError where what is to be recorded of a step of several queries a request is not in it."""

    def attended(self, call: ExtendCall | VerifyCall) -> None:
        """Look at a call of several queries a request. It must not change a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreTrace:
    """One query's scores at one stage. `values` is `[heads, bins]` fp32; bin i holds keys `edges[i]` to `edges[i + 1]`.

    `query` is its number among the request's new tokens, of which a decode has one. `heads` are query head numbers;
    `reduce` says how the keys of a bin became one number (`max`, `sum`, `logsumexp`).
    """

    request: int
    query: int
    stage: Stage
    reduce: Reduce
    heads: tuple[int, ...]
    edges: tuple[int, ...]
    values: Tensor

    def __post_init__(self) -> None:
        one_of("stage", self.stage, STAGES)
        one_of(f"reduce ({self.stage})", self.reduce, REDUCTIONS[self.stage])
        rising = list(self.edges) == sorted(set(self.edges)) and self.edges[:1] == (0,)
        require(rising, f"edges: expected 0, then rising key numbers, got {self.edges[:8]}")
        tensor("values", self.values, shape=[len(self.heads), len(self.edges) - 1], dtype=torch.float32)

    @property
    def by_key(self) -> bool:
        """Whether every bin is one key."""
        return self.edges == tuple(range(len(self.edges)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallTrace:
    """One recorded call.

    Lists over requests: `ranges` are those of the keys as programs took them, of a verify the last one its drafts, of
    an extend a single one; `nominal` is how many were asked for; `start` is the position of the first key. Lists over
    rows, the queries that were looked at: `rows` are (request, number among its new tokens), `q_pos` their positions,
    `own` which of the request's keys is theirs, or the last one where none is, as under `cross` (an encoder's keys).
    `lse` is `[rows, heads]` without sinks: of a decode made of the kernel's partial results, else of scores computed
    again; `out`, where kept, is `[rows, heads, v_dim]` fp32. A decode has a row for every request.

    `partial_lse[r]` is `[splits, heads]` and `partial_out[r]` `[splits, heads, v_dim]`, natural log and normalised, of
    decodes alone. `times`, where programs noted them, is `[programs, head tiles, 3]` int64: multiprocessor, start and
    end in nanoseconds of the device's clock, 0 for a program that did not run. Program p read the rows
    `program_indptr[p]` up to the next entry (`[programs + 1]` int32) of the schedule's `segments [segments, 5]`: one,
    unless programs are persistent. `texts` say which of the trace's `tokens` are each request's, None: none of
    them; empty: the first are the first's, and so on. `tokens` are these texts, where the trace put them here. Parts
    that were not asked for are empty.
    """

    layer: int
    mode: Mode
    policy: str
    heads: int
    kv_heads: int
    scale: float
    softcap: float | None
    temperature_len: int | None
    mod: str | None
    has_sinks: bool
    page_size: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    nominal: tuple[int, ...]
    start: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    q_pos: tuple[int, ...]
    own: tuple[int, ...]
    lse: Tensor
    cross: bool = False
    out: Tensor | None = None
    partial_lse: tuple[Tensor, ...] = ()
    partial_out: tuple[Tensor, ...] = ()
    scores: tuple[ScoreTrace, ...] = ()
    segments: Tensor | None = None
    program_indptr: Tensor | None = None
    times: Tensor | None = None
    texts: tuple[int | None, ...] = ()
    tokens: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "page_size"):
            positive(name, getattr(self, name))
        require(self.heads % self.kv_heads == 0, f"heads: {self.heads} are no multiple of {self.kv_heads} KV heads")
        number("scale", self.scale, positive=False)
        check_ranges(self.ranges, self.lens, policy=self.policy, max_ranges=None)
        reqs = len(self.ranges)
        one_of("mode", self.mode, MODES)
        for name in ("nominal", "start"):
            got = len(getattr(self, name))
            require(got == reqs, f"{name}: expected a number for each of {reqs} requests, got {got}")
        self._check_rows(reqs)
        require(len(self.texts) in (0, reqs), f"texts: expected those of {reqs} requests or none, got {self.texts}")
        self._check_partials(reqs)
        lens, rows = self.lens, set(self.rows)
        for score in self.scores:
            if (score.request, score.query) not in rows:
                self.row(score.request, score.query)  # names those that are there
            known = all(0 <= head < self.heads for head in score.heads)
            require(known, f"heads: expected 0 to {self.heads - 1}, got {score.heads}")
            keys = lens[score.request]
            fits = score.edges[-1] == keys if self.mode == "decode" else score.edges[-1] <= keys
            require(fits, f"edges: expected the {keys} keys of a request, got {score.edges[-1]}")
        self._check_times()

    def _check_times(self) -> None:
        there = {x is not None for x in (self.times, self.segments, self.program_indptr)}
        require(len(there) == 1, "times: they come with the segments that were timed, and those of each program")
        if self.times is None or self.segments is None or self.program_indptr is None:
            return
        tensor("segments", self.segments, shape=["segments", len(SEGMENT)], dtype=torch.int32)
        tensor("program_indptr", self.program_indptr, shape=["programs_1"], dtype=torch.int32)
        owned, count = self.program_indptr.tolist(), len(self.segments)
        require(
            owned == sorted(owned) and owned[:1] == [0] and owned[-1] <= count,
            f"program_indptr: expected 0, then rising numbers up to {count} segments, got {owned[:8]}",
        )
        hint = "a row for every program"
        tensor("times", self.times, shape=[len(owned) - 1, "head tiles", 3], dtype=torch.int64, hint=hint)

    def _check_rows(self, reqs: int) -> None:
        """Check what runs over rows."""
        count = len(self.rows)
        for name in ("q_pos", "own"):
            got = len(getattr(self, name))
            require(got == count, f"{name}: expected a number for each of {count} rows, got {got}")
        lens = self.lens
        known = all(0 <= request < reqs and query >= 0 for request, query in self.rows)
        require(known, f"rows: expected requests 0 to {reqs - 1} and queries from 0 on, got {self.rows[:8]}")
        require(len(set(self.rows)) == count, f"rows: expected each query once, got {self.rows[:8]}")
        every = tuple((request, 0) for request in range(reqs))
        require(
            self.mode != "decode" or self.rows == every, f"rows: a decode has one a request, in order; got {self.rows}"
        )
        for (request, _), own in zip(self.rows, self.own, strict=True):
            require(-1 <= own < max(1, lens[request]), f"own: expected one of {lens[request]} keys, got {own}")
        tensor("lse", self.lse, shape=[count, self.heads], dtype=torch.float32)
        if self.out is not None:
            tensor("out", self.out, shape=[count, self.heads, "v_dim"], dtype=torch.float32)

    def row(self, request: int, query: int | None) -> int:
        """Return the row of a request's query; None: the only one that was recorded of it.

        Raises ValueError with those that were.
        """
        member("request", request, len(self.ranges), of=f"the call of layer {self.layer}")
        found = [i for i, (r, n) in enumerate(self.rows) if r == request and query in (None, n)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(str(n) for r, n in self.rows if r == request) or "none"
        raise ValueError(
            f"query: of request {request}, layer {self.layer} has recorded queries {known}, got {query!r}; name one"
        )

    def only(self, request: int) -> CallTrace:
        """Return what was recorded of one request, as of a call where it is number 0: for `compare` across batches.

        Times are of the programs of the whole batch, and are left out. Raises ValueError where the call has no such
        request.
        """
        mine = member("request", request, len(self.ranges), of=f"the call of layer {self.layer}")
        rows = [i for i, (r, _) in enumerate(self.rows) if r == mine]
        return replace(
            self,
            ranges=(self.ranges[mine],),
            nominal=(self.nominal[mine],),
            start=(self.start[mine],),
            rows=tuple((0, self.rows[i][1]) for i in rows),
            q_pos=tuple(self.q_pos[i] for i in rows),
            own=tuple(self.own[i] for i in rows),
            lse=self.lse[rows],
            out=None if self.out is None else self.out[rows],
            partial_lse=self.partial_lse[mine : mine + 1],
            partial_out=self.partial_out[mine : mine + 1],
            scores=tuple(replace(score, request=0) for score in self.scores if score.request == mine),
            segments=None,
            program_indptr=None,
            times=None,
            texts=(self.texts[mine] if self.texts else mine,),
            tokens=self.tokens[mine : mine + 1],
        )

    def _check_partials(self, reqs: int) -> None:
        for name, parts in (("partial_lse", self.partial_lse), ("partial_out", self.partial_out)):
            require(not parts or self.mode == "decode", f"{name}: kept of decodes alone, got those of {self.mode!r}")
            require(len(parts) in (0, reqs), f"{name}: expected those of {reqs} requests or none, got {len(parts)}")
            for r, x in enumerate(parts):
                shape: tuple[int | str, ...] = (len(self.ranges[r]), self.heads)
                shape += ("v_dim",) if name == "partial_out" else ()
                tensor(f"{name}.{r}", x, shape=shape, dtype=torch.float32)

    @property
    def lens(self) -> tuple[int, ...]:
        """Keys per request."""
        return tuple(mine[-1][1] if mine else 0 for mine in self.ranges)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Merge weights per request, `[splits, heads]`: exp(partial lse - lse). They sum to 1 over the splits.

        A head from which a modifier hides every key has none: all its weights are 0.
        """
        return tuple(torch.exp(mine - finite_or_zero(self.lse[r])) for r, mine in enumerate(self.partial_lse))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for _, x in self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "lse", self.lse
        if self.out is not None:
            yield "out", self.out
        for name, parts in (("partial_lse", self.partial_lse), ("partial_out", self.partial_out)):
            yield from ((f"{name}.{r}", x) for r, x in enumerate(parts))
        yield from ((f"scores.{i}", s.values) for i, s in enumerate(self.scores))
        timed = {"segments": self.segments, "program_indptr": self.program_indptr, "times": self.times}
        yield from ((name, x) for name, x in timed.items() if x is not None)


def finite_or_zero(lse: Tensor) -> Tensor:
    """Return what to subtract before exp: the log-sum-exp, or 0 where nothing was seen (-inf - -inf would be NaN)."""
    return torch.where(lse == float("-inf"), 0.0, lse)


@dataclass(slots=True, kw_only=True, eq=False)
class Trace:
    """A recording: its calls in order, and what did not fit the budget or cannot be recorded, in words.

    `tokens[r]` are the texts of request r's tokens, where the recorder was told them.
    """

    calls: list[CallTrace] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tokens: tuple[tuple[str, ...], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(call.bytes for call in self.calls)

    def call(self, layer: int) -> CallTrace:
        """Return the first recorded call of a layer, with the texts; raise ValueError with the recorded layers."""
        for call in self.calls:
            if call.layer == layer:
                return self.told(call)
        known = ", ".join(dict.fromkeys(str(call.layer) for call in self.calls)) or "none"
        raise ValueError(f"layer: this trace has calls of layers {known}, got {layer!r}")

    def told(self, call: CallTrace) -> CallTrace:
        """Return a call of this trace with the texts of its requests' tokens, where they are known."""
        of_request = dict(enumerate(self.tokens))
        known = tuple(of_request.get(-1 if which is None else which, ()) for which in call.texts)
        return replace(call, tokens=known if call.texts else self.tokens)

    def save(self, path: str | Path) -> None:
        """Write the trace as one safetensors file; its header carries everything that is no tensor, as JSON.

        Raises OSError that says what is wrong with the path; a file that was there stays as it was then.
        """
        place(path)
        tensors = {f"{i}.{name}": x.numpy() for i, call in enumerate(self.calls) for name, x in call._tensors()}
        document = {
            "format": FORMAT,
            "calls": [_call_document(call) for call in self.calls],
            "left_out": self.left_out,
            "tokens": self.tokens,
        }
        header = json.dumps(document, default=index)  # numpy's ints are some
        require(
            len(header) <= MOST_HEADER,
            f"trace: what is no tensor takes {len(header):,} bytes; a file can hold {MOST_HEADER:,} of that, so "
            "record fewer calls",
        )
        write_whole(path, save(tensors, metadata={"attnlab_trace": header}))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a saved trace.

        Raises FileNotFoundError, or ValueError where the file is no whole trace, or one of another version's format.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"trace: there is no file {path}")
        try:
            path.open("rb").close()
        except OSError as error:
            raise type(error)(f"trace: {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
        try:
            with safe_open(path, framework="pt") as file:
                header = (file.metadata() or {}).get("attnlab_trace")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        except Exception as error:  # safetensors raises an exception type of its own for anything malformed
            raise ValueError(f"trace: {path} is no whole safetensors file ({error})") from error
        if header is None:
            raise ValueError(f"trace: {path} is a safetensors file, but no trace of attnlab's")
        try:
            document = json.loads(header)
            format = index(document["format"])
            if format == FORMAT:
                return _trace_of(document, tensors)
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"trace: the header of {path} is damaged, or disagrees with its tensors ({error!r})"
            ) from error
        raise ValueError(
            f"trace: {path} has format {format}, this attnlab reads {FORMAT}; record it again, or read it with the "
            "version that wrote it"
        )


_PLAIN = (
    *("layer", "mode", "policy", "heads", "kv_heads", "page_size", "cross"),
    *("scale", "softcap", "temperature_len", "mod", "has_sinks"),
    *("ranges", "nominal", "start", "rows", "q_pos", "own", "texts"),
)
_SCORE_PLAIN = ("request", "query", "stage", "reduce", "heads")


def _call_document(call: CallTrace) -> dict[str, Any]:
    return {
        **{name: getattr(call, name) for name in _PLAIN},
        "partials": [len(call.partial_lse), len(call.partial_out)],
        "scores": [
            {**{name: getattr(score, name) for name in _SCORE_PLAIN}, "edges": _edges_document(score.edges)}
            for score in call.scores
        ],
        "out": call.out is not None,
        "times": call.times is not None,
    }


def _edges_document(edges: tuple[int, ...]) -> Any:
    """Return bins of one width as that and the number of keys: most are keys or pages, and there may be many."""
    width, keys = (*edges, 1)[1], edges[-1]
    return {"width": width, "keys": keys} if edges == (*range(0, keys, width), keys) else edges


def _edges_of(document: Any, bins: int) -> tuple[int, ...]:
    """Return what `_edges_document` was given; a header of few bytes must not bring forth more edges than bins."""
    if not isinstance(document, dict):
        return _ints(document)
    width, keys = positive("width", document["width"]), index(document["keys"])
    got = -(-keys // width)
    require(got == bins, f"edges: {keys:,} keys have {got:,} bins of {width:,}, the values {bins:,}")
    return (*range(0, keys, width), keys)


def _trace_of(document: dict[str, Any], tensors: dict[str, Tensor]) -> Trace:
    calls = [_call_of(row, i, tensors) for i, row in enumerate(document["calls"])]
    tokens = tuple(tuple(str(t) for t in texts) for texts in document["tokens"])
    return Trace(calls=calls, left_out=[str(x) for x in document["left_out"]], tokens=tokens)


def _call_of(row: dict[str, Any], i: int, tensors: dict[str, Tensor]) -> CallTrace:
    """Rebuild a call; it checks itself."""
    lses, outs = map(index, row["partials"])
    scores = enumerate(row["scores"])
    return CallTrace(
        layer=index(row["layer"]),
        mode=row["mode"],
        policy=str(row["policy"]),
        heads=row["heads"],
        kv_heads=row["kv_heads"],
        scale=row["scale"],
        softcap=None if row["softcap"] is None else number("softcap", row["softcap"], positive=True),
        temperature_len=None if row["temperature_len"] is None else index(row["temperature_len"]),
        mod=None if row["mod"] is None else str(row["mod"]),
        has_sinks=bool(row["has_sinks"]),
        cross=bool(row["cross"]),
        page_size=row["page_size"],
        ranges=tuple(tuple((index(a), index(b)) for a, b in mine) for mine in row["ranges"]),
        nominal=_ints(row["nominal"]),
        start=_ints(row["start"]),
        rows=tuple((index(request), index(query)) for request, query in row["rows"]),
        q_pos=_ints(row["q_pos"]),
        own=_ints(row["own"]),
        texts=tuple(None if which is None else index(which) for which in row["texts"]),
        lse=tensors[f"{i}.lse"],
        out=tensors[f"{i}.out"] if row["out"] else None,
        partial_lse=tuple(tensors[f"{i}.partial_lse.{r}"] for r in range(lses)),
        partial_out=tuple(tensors[f"{i}.partial_out.{r}"] for r in range(outs)),
        scores=tuple(_score_of(score, tensors[f"{i}.scores.{n}"]) for n, score in scores),
        segments=tensors[f"{i}.segments"] if row["times"] else None,
        program_indptr=tensors[f"{i}.program_indptr"] if row["times"] else None,
        times=tensors[f"{i}.times"] if row["times"] else None,
    )


def _score_of(row: dict[str, Any], values: Tensor) -> ScoreTrace:
    return ScoreTrace(
        request=index(row["request"]),
        query=index(row["query"]),
        stage=row["stage"],
        reduce=row["reduce"],
        heads=_ints(row["heads"]),
        edges=_edges_of(row["edges"], values.shape[-1]),
        values=values,
    )


def _ints(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(index(n) for n in numbers)
