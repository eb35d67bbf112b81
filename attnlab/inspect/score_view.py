"""What a recorded call says about one request: every head's weights over its keys, or one head's scores by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.checks import positive, require
from attnlab.trace import STAGES, CallTrace, ScoreTrace, Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreView:
    """One query's weights over its keys, `[heads, keys]` fp32 on the CPU: what each key's value was multiplied with.

    A row sums to 1, or to less where a sink without a key takes its share. The query stands at position `query`.
    `tokens` are the texts of the keys, or nothing; `ranges` are the splits that the keys were read in.
    """

    layer: int
    request: int
    query: int
    kv_heads: int
    page_size: int
    weights: Float[Tensor, "heads keys"]
    ranges: tuple[tuple[int, int], ...] = ()
    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        positive("page_size", self.page_size)
        positive("kv_heads", self.kv_heads)
        require(self.weights.dim() == 2, f"weights: expected [heads, keys], got {list(self.weights.shape)}")
        require(
            self.heads > 0 and self.heads % self.kv_heads == 0,
            f"kv_heads: expected a divisor of the {self.heads} heads, got {self.kv_heads}",
        )
        _check_tokens(self.tokens, self.keys, self.request)

    @classmethod
    def of(cls, trace: Trace, *, layer: int, request: int) -> ScoreView:
        """Take a request's weights out of the first recorded call of a layer.

        >>> from attnlab.inspect.record import Scores
        >>> from attnlab.inspect.workbench import workbench
        >>> wb = workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
        >>> with wb.record(scores=Scores(stages=("weights",), pool="key")) as trace:
        ...     out = wb.decode(18)
        >>> view = ScoreView.of(trace, layer=18, request=0)
        >>> view.weights.shape, view.query, view.group
        (torch.Size([9, 300]), 299, 3)
        """
        return cls.of_call(trace.call(layer), request=request, tokens=_tokens_of(trace, request))

    @classmethod
    def of_call(cls, call: CallTrace, *, request: int, tokens: Sequence[str] = ()) -> ScoreView:
        """Take a request's weights out of a recorded call; `tokens` are the texts of its keys, and may go on."""
        score = _recorded(call, request, "weights")
        missing = [head for head in range(call.heads) if head not in score.heads]
        require(
            not missing,
            f"heads: layer {call.layer} has the weights of heads {_listed(score.heads)}, not of {_listed(missing)}; "
            f"record with {_wish(('weights',))}, which takes all heads",
        )
        rows = torch.tensor([score.heads.index(head) for head in range(call.heads)])
        keys = call.lens[request]
        return cls(
            layer=call.layer,
            request=request,
            query=keys - 1,  # a decoding query is its request's last token
            kv_heads=call.kv_heads,
            page_size=call.page_size,
            weights=score.values[rows],
            ranges=call.ranges[request],
            tokens=_cut(tokens, keys, request),
        )

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.weights.shape[0]

    @property
    def keys(self) -> int:
        """Keys that the query could see."""
        return self.weights.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a KV head: head h reads KV head h // group."""
        return self.heads // self.kv_heads

    def share(self, start: int, stop: int) -> Float[Tensor, " heads"]:
        """Return how much of each head's weight lies on keys `start` to `stop` - 1, fp64."""
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
    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rest = [x for x in (self.scaled, self.capped, self.masked, self.weights) if x is not None]
        shapes = [list(x.shape) for x in (self.raw, *rest)]
        require(
            all(shape == [self.keys] for shape in shapes),
            f"stages: expected [keys] each, and as many keys, got {shapes}",
        )
        _check_tokens(self.tokens, self.keys, self.request)

    @classmethod
    def of(cls, trace: Trace, *, layer: int, request: int, head: int) -> StageView:
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
        return cls.of_call(trace.call(layer), request=request, head=head, tokens=_tokens_of(trace, request))

    @classmethod
    def of_call(cls, call: CallTrace, *, request: int, head: int, tokens: Sequence[str] = ()) -> StageView:
        """Take one head's scores out of a recorded call; `tokens` are the texts of its keys, and may go on."""
        require(0 <= head < call.heads, f"head: the layer has heads 0 to {call.heads - 1}, got {head!r}")
        rows = {}
        for stage in STAGES:
            score = _recorded(call, request, stage, STAGES)
            require(
                head in score.heads,
                f"head: layer {call.layer} has the {stage} scores of heads {_listed(score.heads)}, not of {head}; "
                f"record with {_wish(STAGES)}, which takes all heads",
            )
            rows[stage] = score.values[score.heads.index(head)]
        keys = call.lens[request]
        return cls(
            layer=call.layer,
            request=request,
            query=keys - 1,  # a decoding query is its request's last token
            head=head,
            kv_head=head // (call.heads // call.kv_heads),
            scale=call.scale,
            raw=rows["raw"],
            scaled=rows["scaled"],
            capped=None if torch.equal(rows["capped"], rows["scaled"]) else rows["capped"],
            masked=rows["masked"],
            weights=rows["weights"],
            tokens=_cut(tokens, keys, request),
        )

    @property
    def keys(self) -> int:
        """Keys of the request, masked ones included."""
        return self.raw.shape[0]


def _recorded(call: CallTrace, request: int, stage: str, wanted: Sequence[str] = ("weights",)) -> ScoreTrace:
    """Return a request's scores at a stage, key by key; raise ValueError that says what to record."""
    reqs = len(call.ranges)
    known = f"requests 0 to {reqs - 1}" if reqs else "no request"
    require(0 <= request < reqs, f"request: the call of layer {call.layer} has {known}, got {request!r}")
    record = f"record with {_wish(wanted)}"
    found = [score for score in call.scores if (score.request, score.stage) == (request, stage)]
    if not found:
        kept = sorted({score.stage for score in call.scores if score.request == request}, key=STAGES.index)
        raise ValueError(
            f"stage: of request {request}, layer {call.layer} has recorded {_listed(kept)}, not {stage}; {record} "
            "(what did not fit the budget is listed in trace.left_out)"
        )
    by_key = next((score for score in found if score.by_key), None)
    if by_key is None:
        widest = max(b - a for a, b in zip(found[0].edges, found[0].edges[1:], strict=False))
        raise ValueError(
            f"pool: the {stage} of request {request} in layer {call.layer} were recorded in bins of up to {widest:,} "
            f"keys, a picture looks at every key; {record}"
        )
    return by_key


def _wish(stages: Sequence[str]) -> str:
    """Return the call that records what is needed."""
    return f"scores=Scores(stages={tuple(stages)!r}, pool='key')"


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "nothing"


def _tokens_of(trace: Trace, request: int) -> tuple[str, ...]:
    return trace.tokens[request] if 0 <= request < len(trace.tokens) else ()


def _cut(tokens: Sequence[str], keys: int, request: int) -> tuple[str, ...]:
    """Return the texts of the keys; the text may go on after the query."""
    require(
        not tokens or len(tokens) >= keys,
        f"tokens: request {request} has {keys:,} keys, but the texts of only {len(tokens):,} tokens",
    )
    return tuple(tokens[:keys])


def _check_tokens(tokens: Sequence[str], keys: int, request: int) -> None:
    require(
        len(tokens) in (0, keys),
        f"tokens: expected a text for each of the {keys:,} keys of request {request}, or none, got {len(tokens):,}",
    )
