"""What a recorded call says about one query: every head's weights over its keys, or one head's scores by stage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.checks import member, positive, require
from attnlab.inspect.bins import POOLS, Bins, Pool
from attnlab.trace import STAGES, CallTrace, ScoreTrace, Stage, Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreView:
    """One query's weights over its keys, `[heads, bins]` fp32 on the CPU: what each key's value was multiplied with.

    A bin is a key, or the sum over a page or split (`pool`). A row sums to 1, or to less where a sink without a key
    takes its share. The query stands at position `query`, the first key at `start`; its own key is `query - start`, or
    `own_key`, where keys share positions (drafts of a tree). `tokens` are the texts of the keys, or nothing; `ranges`
    are the splits that the keys were read in.
    """

    layer: int
    request: int
    query: int
    kv_heads: int
    page_size: int
    weights: Float[Tensor, "heads bins"]
    start: int = 0
    pool: Pool = "key"
    ranges: tuple[tuple[int, int], ...] = ()
    tokens: tuple[str, ...] = ()
    own_key: int | None = None

    def __post_init__(self) -> None:
        positive("page_size", self.page_size)
        positive("kv_heads", self.kv_heads)
        require(self.weights.dim() == 2, f"weights: expected [heads, keys], got {list(self.weights.shape)}")
        require(
            self.heads > 0 and self.heads % self.kv_heads == 0,
            f"kv_heads: expected a divisor of the {self.heads} heads, got {self.kv_heads}",
        )
        bins = self.weights.shape[1]
        require(
            self.pool == "key" or len(self.edges) == bins + 1,
            f"pool: the {self.keys:,} keys have {len(self.edges) - 1} bins by {self.pool}, the weights {bins}",
        )
        _check_query(self.own, self.keys, self.query, self.start)
        _check_tokens(self.tokens, self.keys, self.request)
        for head, row in enumerate(self.weights):
            _check_finite("weights", row, request=self.request, head=head)

    @classmethod
    def of(cls, trace: Trace, *, layer: int, request: int, query: int | None = None) -> ScoreView:
        """Take the weights of a request's query out of the first recorded call of a layer.

        `query` is its number among the request's new tokens; None: the only one that was recorded.

        >>> from attnlab.inspect.record import Scores
        >>> from attnlab.inspect.workbench import workbench
        >>> wb = workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
        >>> with wb.record(scores=Scores(stages=("weights",), pool="key")) as trace:
        ...     out = wb.decode(18)
        >>> view = ScoreView.of(trace, layer=18, request=0)
        >>> view.weights.shape, view.query, view.group
        (torch.Size([9, 300]), 299, 3)
        """
        return cls.of_call(trace.call(layer), request=request, query=query)

    @classmethod
    def of_call(
        cls,
        call: CallTrace,
        *,
        request: int,
        query: int | None = None,
        tokens: Sequence[str] | None = None,
        by_key: bool = True,
    ) -> ScoreView:
        """Take a query's weights out of a recorded call: those by key, or with `by_key=False` sums as well.

        `tokens` are the texts of the request's tokens, the call's own unless they are given.
        """
        row = call.row(request, query)
        score = _recorded(call, row, "weights", by_key=by_key)
        keys = score.edges[-1]
        missing = [head for head in range(call.heads) if head not in score.heads]
        require(
            not missing,
            f"heads: layer {call.layer} has the weights of heads {_listed(score.heads)}, not of {_listed(missing)}; "
            f"record with {_wish(('weights',))}, which takes all heads",
        )
        rows = torch.tensor([score.heads.index(head) for head in range(call.heads)])
        return cls(
            layer=call.layer,
            request=request,
            query=call.q_pos[row],
            own_key=call.own[row],
            kv_heads=call.kv_heads,
            page_size=call.page_size,
            weights=score.values[rows],
            start=call.start[request],
            pool=_pool(call, score) or "key",
            ranges=_cut_ranges(call, score),
            tokens=_cut(call, tokens, row, keys),
        )

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.weights.shape[0]

    @property
    def keys(self) -> int:
        """Keys that the query could see."""
        if self.pool == "key":
            return self.weights.shape[1]
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def own(self) -> int:
        """Which of the keys is the query's own."""
        return self.query - self.start if self.own_key is None else self.own_key

    @property
    def edges(self) -> tuple[int, ...]:
        """Where bins begin, and the end."""
        return Bins.of(self.pool, keys=self.keys, ranges=self.ranges, page_size=self.page_size).edges

    @property
    def group(self) -> int:
        """Query heads that share a KV head: head h reads KV head h // group."""
        return self.heads // self.kv_heads

    def share(self, start: int, stop: int) -> Float[Tensor, " heads"]:
        """Return how much of each head's weight lies on keys `start` to `stop` - 1, fp64; bins are not cut."""
        if self.pool != "key":
            start, stop = bisect_left(self.edges, start), bisect_left(self.edges, stop)
        return self.weights[:, start:stop].double().sum(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageView:
    """One head's scores over a request's keys, `[keys]` fp32 on the CPU, at every stage from dot product to weight.

    `scaled` is `raw` times `scale`. `capped` is None where the layer caps, tempers and modifies nothing, so that it
    would repeat `scaled`. `masked` is -inf at keys that the query must not see; their weight is 0.
    """

    layer: int
    request: int
    query: int
    head: int
    kv_head: int
    scale: float
    raw: Float[Tensor, " keys"]
    scaled: Float[Tensor, " keys"]
    capped: Float[Tensor, " keys"] | None
    masked: Float[Tensor, " keys"]
    weights: Float[Tensor, " keys"]
    start: int = 0
    tokens: tuple[str, ...] = ()
    own_key: int | None = None

    def __post_init__(self) -> None:
        rest = [x for x in (self.scaled, self.capped, self.masked, self.weights) if x is not None]
        shapes = [list(x.shape) for x in (self.raw, *rest)]
        require(
            all(shape == [self.keys] for shape in shapes),
            f"stages: expected [keys] each, and as many keys, got {shapes}",
        )
        _check_query(self.own, self.keys, self.query, self.start)
        for stage in STAGES[1:]:  # raw is not shown; what fp32 cannot hold of it the scale may bring back
            row = getattr(self, stage)
            if row is not None:
                _check_finite(stage, row, request=self.request, head=self.head, hidden=stage != "weights")
        _check_tokens(self.tokens, self.keys, self.request)

    @classmethod
    def of(cls, trace: Trace, *, layer: int, request: int, head: int, query: int | None = None) -> StageView:
        """Take one head's scores out of the first recorded call of a layer; all stages must have been recorded.

        >>> from attnlab.inspect.record import Scores
        >>> from attnlab.inspect.workbench import workbench
        >>> wb = workbench("SmolLM2-135M", lens=[40], policy="seed", engine="eager")
        >>> with wb.record(scores=Scores(stages=STAGES, pool="key")) as trace:
        ...     out = wb.decode(18)
        >>> view = StageView.of(trace, layer=18, request=0, head=5)
        >>> view.kv_head, view.keys, view.capped is None
        (1, 40, True)
        """
        return cls.of_call(trace.call(layer), request=request, head=head, query=query)

    @classmethod
    def of_call(
        cls,
        call: CallTrace,
        *,
        request: int,
        head: int,
        query: int | None = None,
        tokens: Sequence[str] | None = None,
    ) -> StageView:
        """Take one head's scores out of a recorded call, with query and texts as in ScoreView."""
        head = member("head", head, call.heads, of="the layer")
        row = call.row(request, query)
        rows = {}
        for stage in STAGES:
            score = _recorded(call, row, stage, STAGES)
            require(
                head in score.heads,
                f"head: layer {call.layer} has the {stage} scores of heads {_listed(score.heads)}, not of {head}; "
                f"record with {_wish(STAGES)}, which takes all heads",
            )
            rows[stage] = score.values[score.heads.index(head)]
        return cls(
            layer=call.layer,
            request=request,
            query=call.q_pos[row],
            own_key=call.own[row],
            head=head,
            kv_head=head // (call.heads // call.kv_heads),
            scale=call.scale,
            raw=rows["raw"],
            scaled=rows["scaled"],
            capped=None if torch.equal(rows["capped"], rows["scaled"]) else rows["capped"],
            masked=rows["masked"],
            weights=rows["weights"],
            start=call.start[request],
            tokens=_cut(call, tokens, row, rows["raw"].shape[0]),
        )

    @property
    def keys(self) -> int:
        """Keys of the request, masked ones included."""
        return self.raw.shape[0]

    @property
    def own(self) -> int:
        """Which of the keys is the query's own."""
        return self.query - self.start if self.own_key is None else self.own_key


def _recorded(
    call: CallTrace, row: int, stage: Stage, wanted: Sequence[Stage] = ("weights",), *, by_key: bool = True
) -> ScoreTrace:
    """Return a row's scores at a stage, key by key where they are; raise ValueError that says what to record."""
    request, query = call.rows[row]
    record = f"record with {_wish(wanted)}"
    found = [score for score in call.scores if (score.request, score.query, score.stage) == (request, query, stage)]
    if not found:
        mine = [score.stage for score in call.scores if (score.request, score.query) == (request, query)]
        kept = sorted(set(mine), key=STAGES.index)
        raise ValueError(
            f"stage: of request {request}, layer {call.layer} has recorded {_listed(kept)}, not {stage}; {record} "
            "(what did not fit the budget is listed in trace.left_out)"
        )
    fine = [score for score in found if score.by_key]
    sums = [score for score in found if not by_key and score.reduce == "sum" and _pool(call, score)]
    if not fine + sums:
        widest = max(b - a for a, b in pairwise(found[0].edges))
        raise ValueError(
            f"pool: the {stage} of request {request} in layer {call.layer} were recorded in bins of up to {widest:,} "
            f"keys, by {found[0].reduce}; {'this looks at every key' if by_key else 'those do not add up'}; {record}"
        )
    return (fine + sums)[0]


def _pool(call: CallTrace, score: ScoreTrace) -> Pool | None:
    """Return by what scores were pooled, None where that is nothing known."""
    keys, ranges = score.edges[-1], _cut_ranges(call, score)
    made = ((pool, Bins.of(pool, keys=keys, ranges=ranges, page_size=call.page_size)) for pool in POOLS)
    return next((pool for pool, bins in made if bins.edges == score.edges), None)


def _cut_ranges(call: CallTrace, score: ScoreTrace) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a request as far as a query's row goes."""
    keys = score.edges[-1]
    return tuple((first, min(end, keys)) for first, end in call.ranges[score.request] if first < keys)


def _wish(stages: Sequence[str]) -> str:
    """Return the call that records what is needed."""
    return f"scores=Scores(stages={tuple(stages)!r}, pool='key')"


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "nothing"


def _cut(call: CallTrace, tokens: Sequence[str] | None, row: int, keys: int) -> tuple[str, ...]:
    """Return the texts of the keys; the text may begin before the first of them, and go on after the query.

    Without `tokens` they are the recording's, and none where tokens were appended that it knows no texts of.
    """
    request, _ = call.rows[row]
    start, end = call.start[request], call.start[request] + keys
    if tokens is None:
        known = call.tokens[request] if request < len(call.tokens) else ()
        tokens = known if len(known) >= end else ()
    require(
        not tokens or len(tokens) >= end,
        f"tokens: request {request} has {end:,} keys, but the texts of only {len(tokens):,} tokens",
    )
    return tuple(tokens[start:end])


def _check_query(own: int, keys: int, query: int, start: int) -> None:
    require(
        not keys or 0 <= own < keys,
        f"query: expected the position of one of the keys, {start:,} to {start + keys - 1:,}, got {query!r}",
    )


def _check_finite(name: str, row: Tensor, *, request: int, head: int, hidden: bool = False) -> None:
    """Raise where a picture would state nonsense: at NaN or an infinity, but for the -inf of `hidden` keys."""
    bad = ~torch.isfinite(row) & ~(hidden & (row == float("-inf")))
    if bad.any():
        key = int(bad.nonzero()[0])
        raise ValueError(
            f"{name}: expected finite numbers, got {float(row[key])} in head {head} of request {request}, column "
            f"{key}; look for NaN or infinity in its query and in the cached keys"
        )


def _check_tokens(tokens: Sequence[str], keys: int, request: int) -> None:
    require(
        len(tokens) in (0, keys),
        f"tokens: expected a text for each of the {keys:,} keys of request {request}, or none, got {len(tokens):,}",
    )
