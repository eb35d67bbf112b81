"""What heads do, by what they read: the first token, the one before, those near by, what followed a copy, or all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.checks import one_of, require
from attnlab.trace import CallTrace, ScoreTrace, Trace

Behaviour = Literal["induction", "previous", "sink", "local", "diffuse"]
BEHAVIOURS: tuple[Behaviour, ...] = ("induction", "previous", "sink", "local", "diffuse")
"""In the order in which a head is named: the rarer behaviour first."""
LOCAL = 16
"""Keys that count as near by: the query's own and those just before it."""
LEAST_KEYS = 2 * LOCAL
"""Keys that a query must have, its own included: with fewer of them most are near by."""
FROM: dict[Behaviour, float] = {"induction": 0.1, "previous": 0.4, "sink": 0.8, "local": 0.5, "diffuse": 0.3}
"""The number from which on a head is called so. Few tokens of a text repeat, so induction counts from far less on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One head's numbers, each from 0 to 1, means over the queries that were looked at.

    `sink`: the weight on the first token. `previous`: on the token before the query's own. `local`: on the last 16
    tokens, its own included. `induction`: on tokens that followed an earlier copy of the query's token, over the
    `repeats` queries whose token had one; None where there was none, or texts are not known. `diffuse`: how many keys
    equally shared weight would be on, exp(entropy), of all; beside a sink logit of the weight that the keys share.
    """

    layer: int
    head: int
    kv_head: int
    queries: int
    repeats: int
    sink: float
    previous: float
    local: float
    induction: float | None
    diffuse: float

    def number(self, behaviour: Behaviour) -> float | None:
        """Return the number of a behaviour; None where it could not be told."""
        return {
            "induction": self.induction,
            "previous": self.previous,
            "sink": self.sink,
            "local": self.local,
            "diffuse": self.diffuse,
        }[one_of("behaviour", behaviour, BEHAVIOURS)]

    @property
    def names(self) -> tuple[Behaviour, ...]:
        """What the head is called, rarest first; empty for one that does a bit of everything."""
        found = ((name, self.number(name)) for name in BEHAVIOURS)
        return tuple(name for name, number in found if number is not None and number >= FROM[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of some recorded layers, by layer and number. `str` is a table; `show` draws it."""

    heads: tuple[Head, ...]

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, in order."""
        return tuple(dict.fromkeys(head.layer for head in self.heads))

    def named(self, behaviour: Behaviour) -> tuple[Head, ...]:
        """Return the heads that are called so, the strongest first.

        Raises ValueError for a behaviour that is none.
        """
        one_of("behaviour", behaviour, BEHAVIOURS)
        return tuple(sorted((h for h in self.heads if behaviour in h.names), key=lambda h: -(h.number(behaviour) or 0)))

    def __str__(self) -> str:
        lines = [f"layer head {' '.join(f'{name:>9}' for name in BEHAVIOURS)}  called"]
        for head in self.heads:
            numbers = [head.number(name) for name in BEHAVIOURS]
            cells = " ".join(f"{'-' if x is None else f'{x:.2f}':>9}" for x in numbers)
            lines.append(f"{head.layer:5} {head.head:4} {cells}  {', '.join(head.names) or 'mixed'}")
        return "\n".join(lines)


def heads(trace: Trace, *, tokens: Sequence[Sequence[str]] | None = None) -> Heads:
    """Say what the heads of a recording do, by the weights of its queries, each over the keys up to its own.

    The trace must hold weights by key of all heads, from the first token on; many queries, of an extend, say more than
    a decode's one. Left out are queries with fewer than 32 keys up to their own; those whose rows go on beyond it (of
    a layer that is not causal, or under a mask of one's own); and those that see nothing of the first token, which
    lies before their window. The first token is that of the request, which need not be the first of its text: without
    the token that a model made its sink, its sink heads cannot be told. `tokens[r]` are the texts of request r's
    tokens, those of the trace unless given.
    Raises ValueError where nothing of that kind was recorded.
    Sources: sinks (Xiao et al., 2024, StreamingLLM), previous-token and induction heads (Olsson et al., 2022).

    >>> import attnlab
    >>> from attnlab.inspect.record import Scores
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[2048], layers=[18], policy="seed", engine="eager")
    >>> with wb.record(scores=Scores(pool="key"), queries=range(-32, 0)) as trace:
    ...     out = wb.extend(18, last=32)
    >>> [(head.head, round(head.sink, 2)) for head in heads(trace).named("sink")]
    [(8, 1.0), (7, 0.9)]
    """
    sums: dict[int, _Sums] = {}
    for call in map(trace.told, trace.calls):
        own, position = (dict(zip(call.rows, values, strict=True)) for values in (call.own, call.q_pos))
        for score in call.scores:
            row, texts = (score.request, score.query), call.tokens if tokens is None else tokens
            # Drafts of a tree follow no text, an encoder's keys are another's, and a part may lack the query's own key.
            if call.cross or own[row] != position[row] or not _says_something(call, score, own[row]):
                continue
            in_text = score.request < len(texts)
            mine = sums.setdefault(call.layer, _Sums(heads=call.heads, kv_heads=call.kv_heads))
            mine.add(score.values.double(), own[row], texts[score.request] if in_text else ())
    require(
        bool(sums),
        f"trace: it has no weights by key of queries that see the first token and {LEAST_KEYS} keys up to "
        "their own, the last of their row; record "
        "with scores=Scores(pool='key'), such as of wb.extend(layer, last=128)",
    )
    return Heads(heads=tuple(head for layer in sorted(sums) for head in sums[layer].heads(layer)))


def _says_something(call: CallTrace, score: ScoreTrace, own: int) -> bool:
    """Whether a row has the weights of all heads, key by key, over enough keys from the first token to its own."""
    whole = score.stage == "weights" and score.by_key and score.heads == tuple(range(call.heads))
    ends = score.edges[-1] == own + 1 >= LEAST_KEYS
    # A key that no head gives any weight is hidden: a softmax leaves every visible one some.
    return whole and ends and call.start[score.request] == 0 and bool((score.values[:, 0] != 0).any())


class _Sums:
    """Sums over the queries of one layer."""

    def __init__(self, *, heads: int, kv_heads: int) -> None:
        self.kv_heads, self.queries, self.repeats = kv_heads, 0, 0
        self.of: dict[str, Tensor] = defaultdict(lambda: torch.zeros(heads, dtype=torch.float64))

    def add(self, weights: Float[Tensor, "heads keys"], own: int, texts: Sequence[str]) -> None:
        """Add a query, whose own key is number `own`."""
        self.queries += 1
        self.of["sink"] += weights[:, 0]
        self.of["previous"] += weights[:, own - 1]
        self.of["local"] += weights[:, own + 1 - LOCAL : own + 1].sum(1)
        # A sink logit takes its part of the weight; entropy is that of what the keys share, which sums to 1.
        total = weights.sum(1, keepdim=True)
        share = weights / torch.where(total > 0, total, 1.0)
        self.of["diffuse"] += torch.special.entr(share).sum(1).exp() / (own + 1)
        if followed := following(texts, own):
            self.repeats += 1
            self.of["induction"] += weights[:, followed].sum(1)

    def heads(self, layer: int) -> Iterator[Head]:
        """Yield what every head does."""
        means = {name: (total / self.queries).tolist() for name, total in self.of.items() if name != "induction"}
        induction = (self.of["induction"] / max(1, self.repeats)).tolist()
        group = len(induction) // self.kv_heads
        for head in range(len(induction)):
            yield Head(
                layer=layer,
                head=head,
                kv_head=head // group,
                queries=self.queries,
                repeats=self.repeats,
                induction=induction[head] if self.repeats else None,
                **{name: values[head] for name, values in means.items()},
            )


def following(tokens: Sequence[str], own: int) -> list[int]:
    """Return the keys that followed an earlier copy of token `own`: what an induction head reads.

    >>> following(["a", "b", "c", "a", "d", "a"], 5)
    [1, 4]
    """
    if own >= len(tokens):  # a token that has no text, such as one that was appended
        return []
    return [key + 1 for key in range(own - 1) if tokens[key] == tokens[own]]
