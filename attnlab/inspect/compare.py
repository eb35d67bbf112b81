"""Two recordings of the same batch, held against each other: where they differ first, where most, and by how much.

They may come from different engines, policies, plans or dtypes of the cache. Parts are compared in the order of the
computation, so that the first one that differs is where to look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnlab.checks import require
from attnlab.inspect.differences import PARTS, Difference, Part, Piece, coarsest, joined, listed
from attnlab.inspect.words import counted, span_words
from attnlab.trace import STAGES, CallTrace, ScoreTrace, Trace

MOST_CALLS = 8
"""Calls that differ and have a table of their own in the words of a comparison."""
BATCH = {
    "layer": "layer",
    "mode": "mode",
    "lens": "keys of each request",
    "rows": "rows (request, query)",
    "q_pos": "positions of the queries",
    "heads": "heads",
}
"""What two recorded calls of one batch have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The first range of a request's keys that two runs took differently; None where a run has no such range.

    `requests` are all those that were cut differently. Their partial results cannot be compared.
    """

    request: int
    number: int
    a: tuple[int, int] | None
    b: tuple[int, int] | None
    requests: tuple[int, ...]

    @classmethod
    def of(cls, a: CallTrace, b: CallTrace) -> Cut | None:
        """Return the first of two calls, or None where all ranges are alike."""
        requests = tuple(r for r, (x, y) in enumerate(zip(a.ranges, b.ranges, strict=True)) if x != y)
        if not requests:
            return None
        pairs = enumerate(zip_longest(a.ranges[requests[0]], b.ranges[requests[0]]))
        number, (x, y) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        return cls(request=requests[0], number=number, a=x, b=y, requests=requests)

    def words(self, names: tuple[str, str]) -> str:
        """Return where the cuts part, in words."""
        x, y = ("none" if keys is None else f"keys {span_words(*keys)}" for keys in (self.a, self.b))
        return (
            f"cut differently: {listed(self.requests, 'request')}; first split {self.number} of request "
            f"{self.request}, {x} in {names[0]}, {y} in {names[1]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallComparison:
    """Two recordings of one call.

    `differences` has every part that both kept, in the order of the computation, equal ones included. `cut` says where
    the ranges part, None where both were cut alike; `not_compared` in words what one of them kept for nothing.
    """

    a: CallTrace
    b: CallTrace
    differences: tuple[Difference, ...]
    cut: Cut | None
    not_compared: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        """The earliest part that differs."""
        return next((x for x in self.differences if not x.same), None)

    def of(self, part: Part) -> Difference | None:
        """Return what a part differs by, None where it was not compared."""
        return next((x for x in self.differences if x.part == part), None)

    def by_head(self, part: Part) -> tuple[tuple[int, ...], Float[Tensor, "reqs heads"], Bool[Tensor, "reqs heads"]]:
        """Return the requests that have a part, the largest relative difference of each head, and whether it differs.

        A head of which nothing was compared has NaN.
        """
        pieces = list(pieces_of(self.a, self.b, part))
        requests = tuple(dict.fromkeys(piece.request for piece in pieces))
        largest = torch.full((len(requests), self.a.heads), torch.nan, dtype=torch.float64)
        differs = torch.zeros(largest.shape, dtype=torch.bool)
        for piece in pieces:
            row, heads = requests.index(piece.request), list(piece.heads)
            if piece.a.numel():
                largest[row, heads] = largest[row, heads].fmax(piece.relative.amax((1, 2)))
                differs[row, heads] |= piece.differs.flatten(1).any(1)
        return requests, largest, differs

    def piece(self, part: Part, request: int, query: int | None) -> Piece | None:
        """Return one query's numbers of a part in both runs, None where they were not compared."""
        pieces = pieces_of(self.a, self.b, part)
        return next((x for x in pieces if (x.request, x.query) == (request, query)), None)

    def words(self, names: tuple[str, str]) -> str:
        """Return the call's table: a line for each part that differs, and for those between them that do not."""
        lines = [f"layer {self.a.layer}, {self.a.mode} of {counted(len(self.a.ranges), 'request')}:"]
        for same, group in groupby(self.differences, key=lambda x: x.same):
            parts = list(group)
            if same:
                listed_parts = ", ".join(PARTS[x.part] for x in parts)
                lines.append(f"  the same bits: {listed_parts} ({sum(x.of for x in parts):,} numbers)")
            else:
                lines += [f"  {PARTS[x.part]} {x.words(names)}" for x in parts]
        lines += [f"  {words}" for words in self.facts(names)]
        return "\n".join(lines)

    def facts(self, names: tuple[str, str]) -> list[str]:
        """Return what else is to be said: other cuts, and what was not compared."""
        return [
            *([] if self.cut is None else [self.cut.words(names)]),
            *(f"not compared: {x}" for x in self.not_compared),
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """What `compare` returns: a comparison of every pair of calls. `print` it, or `attnlab.show` it."""

    names: tuple[str, str]
    calls: tuple[CallComparison, ...]

    @property
    def first(self) -> Difference | None:
        """The earliest part of the earliest call that differs, or None."""
        return next((x for x in self.differences if not x.same), None)

    @property
    def same(self) -> bool:
        """Whether all numbers that were compared have the same bits. Cuts may still differ, see `calls[i].cut`."""
        return self.first is None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Those of all calls, in the order of the computation."""
        return tuple(x for call in self.calls for x in call.differences)

    @property
    def numbers(self) -> int:
        """How many numbers were compared."""
        return sum(x.of for x in self.differences)

    @property
    def extent(self) -> str:
        """How far a statement on all numbers goes, in words."""
        return "in all that was compared" if any(call.not_compared for call in self.calls) else "everywhere"

    @property
    def summary(self) -> str:
        """One sentence: what differs first."""
        first, runs = self.first, " and ".join(self.names)
        if not self.numbers:
            return f"{runs} have no number to compare: no query was recorded"
        if first is None or first.first is None:
            numbers = f"{self.numbers:,} numbers of {counted(len(self.calls), 'call')}"
            return f"{runs} have the same bits {self.extent}: {numbers}"
        which = f" (call {first.call})" if len(self.calls) > 1 else ""
        return f"{runs} differ first in the {PARTS[first.part]} of layer {first.layer}{which}: {first.first}"

    def __repr__(self) -> str:
        return f"Comparison({counted(len(self.calls), 'call')}; {self.summary})"

    def __str__(self) -> str:
        """Return a table for each call that differs in numbers or cuts; a single call always has one."""
        told = [x for x in self.calls if x.first or x.cut or x.not_compared or len(self.calls) == 1]
        same = len(self.calls) - len(told)
        rest = [f"the same bits: {counted(same, 'other call')}"] * bool(same and told)
        more = len(told) - MOST_CALLS
        rest += [f"... and {counted(more, 'other call')}"] * (more > 0)
        return "\n".join([self.summary, *(x.words(self.names) for x in told[:MOST_CALLS]), *rest])


def compare(a: Trace | CallTrace, b: Trace | CallTrace, *, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compare two recordings of the same calls, number by number, and find where they differ first.

    Calls are paired in order. Of each pair are compared, as far as both recorded them: scores stage by stage (where the
    bins are the same), the partial results of every request that was cut alike, log-sum-exps, weights and outputs.
    `names` stand for the two runs in words and pictures. Raises ValueError where two calls are not of the same batch.

    >>> import attnlab
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="static", engine="eager")
    >>> with wb.record() as before:
    ...     out = wb.decode(18)
    >>> slot = int(wb.table.slots_of(wb.table.rows[0])[100])
    >>> wb.pool.view(wb.model.layer(18).pool_layer).v[slot, 1] += 1  # the value of one key, under one KV head
    >>> with wb.record() as after:
    ...     out = wb.decode(18)
    >>> comparison = attnlab.compare(before, after, names=("before", "after"))
    >>> comparison.same, str(comparison.first.first), comparison.first.heads
    (False, 'request 0, head 3, split 1, keys 64 to 127', (3, 4, 5))
    >>> print(attnlab.compare(before, before).summary)
    a and b have the same bits everywhere: 5,265 numbers of 1 call
    """
    ours, theirs = _calls("a", a), _calls("b", b)
    for name in _pair("names", names):
        require(isinstance(name, str) and bool(name.strip()), f"names: expected two words, got {names!r}", TypeError)
    require(names[0] != names[1], f"names: expected two that differ, got {names!r}")
    require(
        len(ours) == len(theirs),
        f"a, b: expected recordings of the same calls, got {counted(len(ours), 'call')} and "
        f"{counted(len(theirs), 'call')}; what a recording left out stands in trace.left_out",
    )
    pairs = enumerate(zip(ours, theirs, strict=True))
    return Comparison(names=names, calls=tuple(_compared(number, x, y) for number, (x, y) in pairs))


def _pair(name: str, values: Any) -> tuple[Any, Any]:
    require(isinstance(values, tuple) and len(values) == 2, f"{name}: expected a pair, got {values!r}", TypeError)
    return values[0], values[1]


def _calls(name: str, x: object) -> list[CallTrace]:
    if isinstance(x, CallTrace):
        return [x]
    if not isinstance(x, Trace):
        raise TypeError(f"{name}: expected a Trace or a CallTrace, got {type(x).__name__}; see attnlab.record")
    require(bool(x.calls), f"{name}: the recording has no call; run one inside of the record block")
    return list(x.calls)


def _compared(number: int, a: CallTrace, b: CallTrace) -> CallComparison:
    _check_same_batch(number, a, b)
    differences = []
    for part in PARTS:
        format = "float32" if part != "out" else coarser(a.out, b.out)
        found = [piece.difference(number, a.layer, format) for piece in pieces_of(a, b, part)]
        differences += [joined(found)] if found else []
    return CallComparison(
        a=a, b=b, differences=tuple(differences), cut=Cut.of(a, b), not_compared=tuple(_left_over(a, b))
    )


def _check_same_batch(number: int, a: CallTrace, b: CallTrace) -> None:
    for name, what in BATCH.items():
        x, y = getattr(a, name), getattr(b, name)
        require(
            x == y,
            f"b: call {number} is no other run of a's; {what}: {_short(x)} (layer {a.layer}) in a, {_short(y)} (layer "
            f"{b.layer}) in b; compare recordings of the same batch and layers",
        )
    if a.out is not None and b.out is not None:
        x, y = a.out.shape[-1], b.out.shape[-1]
        require(x == y, f"b: call {number} is no other run of a's; v_dim: {x} in a, {y} in b")


def _short(x: object) -> str:
    words = str(x)
    return words if len(words) <= 60 else words[:59] + "…"


def coarser(a: Tensor | None, b: Tensor | None) -> str:
    """Return the format in whose steps outputs are counted: the coarser one of those that hold each run's."""
    formats = [coarsest(x) for x in (a, b) if x is not None]
    return next((name for name in ("bfloat16", "float16") if name in formats), "float32")


def pieces_of(a: CallTrace, b: CallTrace, part: Part) -> Iterator[Piece]:
    """Yield a part of both runs row by row, as far as both kept it and cut it alike."""
    if part in STAGES:
        yield from _scores(a, b, part)
    elif part in ("lse", "out"):
        x, y = (a.lse, b.lse) if part == "lse" else (a.out, b.out)
        if x is not None and y is not None:
            for i in range(len(a.rows)):
                yield _piece(a, b, part, a.rows[i], x[i].reshape(a.heads, 1, -1), y[i].reshape(a.heads, 1, -1), (None,))
    else:
        name = part.replace(" ", "_")
        pairs = zip(getattr(a, name), getattr(b, name), strict=False)
        for i, (x, y) in enumerate(pairs):  # a decode, with a row for every request
            if a.ranges[i] == b.ranges[i]:
                mine = (_by_head(x), _by_head(y))
                yield _piece(a, b, part, a.rows[i], *mine, a.ranges[i])


def _by_head(x: Tensor) -> Float[Tensor, "heads splits numbers"]:
    """Turn a request's partial results, `[splits, heads]` or `[splits, heads, v_dim]`."""
    return x[..., None].flatten(2).transpose(0, 1).contiguous()


def _scores(a: CallTrace, b: CallTrace, part: Part) -> Iterator[Piece]:
    there = {_bins(score): score for score in b.scores if score.stage == part}
    for mine in a.scores:
        other = there.get(_bins(mine)) if mine.stage == part else None
        if other is None:
            continue
        heads = tuple(sorted({*mine.heads} & {*other.heads}))
        if heads:
            x, y = (s.values[[s.heads.index(head) for head in heads]][..., None] for s in (mine, other))
            keys = tuple(zip(mine.edges, mine.edges[1:], strict=False))
            yield _piece(a, b, part, (mine.request, mine.query), x, y, keys, heads)


def _bins(score: ScoreTrace) -> tuple[object, ...]:
    """Return what two runs' scores must have in common."""
    return score.request, score.query, score.reduce, score.edges


def _piece(
    a: CallTrace,
    b: CallTrace,
    part: Part,
    row: tuple[int, int],
    x: Tensor,
    y: Tensor,
    keys: tuple[tuple[int, int] | None, ...],
    heads: tuple[int, ...] | None = None,
) -> Piece:
    request, query = row
    splits = a.ranges[request]
    return Piece(
        part=part,
        request=request,
        query=None if a.mode == "decode" else query,
        heads=tuple(range(a.heads)) if heads is None else heads,
        keys=keys,
        splits=splits if splits == b.ranges[request] else (),
        a=x,
        b=y,
    )


def _left_over(a: CallTrace, b: CallTrace) -> Iterator[str]:
    """Yield in words what a run kept that the other has nothing to hold against."""
    for part in PARTS:
        if part in STAGES:
            mine, other = ({(_bins(x), frozenset(x.heads)) for x in run.scores if x.stage == part} for run in (a, b))
            alone = len({bins[:2] for bins, _ in mine ^ other})
            if alone:
                rows = counted(alone, "row")
                yield f"{PARTS[part]} of {rows}, kept by one run alone, in other bins or of other heads"
        elif part != "lse":
            x, y = (getattr(run, part.replace(" ", "_")) for run in (a, b))
            if (x is None or not len(x)) != (y is None or not len(y)) and a.rows:
                yield f"{PARTS[part]}, kept by one run alone"
