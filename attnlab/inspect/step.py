"""One request's part of a plan, at one layer, on the host: what tables and pictures of plans are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attnlab.batch import Lens
from attnlab.checks import require
from attnlab.mask import CustomMask
from attnlab.plan.plans import DecodePlan, ExtendPlan, Plan, Queries, VerifyPlan
from attnlab.spec import Sight

Mode = Literal["decode", "extend", "verify"]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Runs = tuple[tuple[int, int], ...]
"""Numbers as runs `(first, end)`, in rising order, with gaps between them."""


def mode_of(plan: Plan) -> Mode:
    """Return the mode of a plan in a word."""
    match plan:
        case DecodePlan():
            return "decode"
        case ExtendPlan():
            return "extend"
        case VerifyPlan():
            return "verify"


def prefix_and_new(plan: Plan) -> tuple[list[int], list[int]]:
    """Return each request's keys that are there before its queries', and its queries. Waits for the device.

    A decode's one query is its last token, and a padded row has none.
    """
    match plan:
        case DecodePlan():
            seq = _read(plan.batch.seq)
            return [max(n - 1, 0) for n in seq], [min(n, 1) for n in seq]
        case ExtendPlan():
            return _read(plan.batch.prefix), _read(plan.batch.new)
        case VerifyPlan():
            return _read(plan.batch.prefix), _read(plan.batch.drafts)


def live_rows(prefix: Sequence[int], new: Sequence[int]) -> int:
    """Return how many rows stand for requests: those behind the last one with a token are padding.

    >>> live_rows([4, 0, 7, 0, 0], [1, 0, 1, 0, 0])
    3
    """
    return max((r + 1 for r, tokens in enumerate(zip(prefix, new, strict=True)) if any(tokens)), default=0)


def _read(lens: Lens) -> list[int]:
    values: list[int] = lens.device.tolist()
    return values


def runs_of(numbers: Iterable[int]) -> Runs:
    """Return rising numbers as runs of neighbours.

    >>> runs_of([0, 1, 2, 7, 9, 10])
    ((0, 3), (7, 8), (9, 11))
    """
    values = np.asarray(list(numbers) if not isinstance(numbers, np.ndarray) else numbers, dtype=np.int64)
    if not len(values):
        return ()
    cuts = np.flatnonzero(np.diff(values) != 1) + 1
    starts, ends = values[np.concatenate([[0], cuts])], values[np.concatenate([cuts - 1, [len(values) - 1]])] + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def joined(spans: Iterable[tuple[int, int]]) -> Runs:
    """Return the union of spans `(first, end)`, empty ones left out, as runs.

    >>> joined([(5, 9), (0, 2), (8, 12), (3, 3), (2, 4)])
    ((0, 4), (5, 12))
    """
    runs: list[list[int]] = []
    for first, end in sorted(set(spans)):
        if runs and first <= runs[-1][1] and first < end:
            runs[-1][1] = max(runs[-1][1], end)
        elif first < end:
            runs.append([first, end])
    return tuple((first, end) for first, end in runs)


def total(runs: Runs) -> int:
    """Return how many numbers some runs hold."""
    return sum(end - first for first, end in runs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What the queries of one request have before them in the layers of one lane.

    `cached` keys were there before; `positions` are those of the queries, which are the request's new tokens, and
    `write` the storage slots that these go to. The list, padding left out, holds `slots` of the keys from position
    `listed_from` on. `bits` is a custom mask, bool `[new, cached + new]`, or None.
    """

    mode: Mode
    request: int
    row: int
    layer: int
    space: str
    sight: Sight
    cached: int
    positions: Ints
    write: Ints
    start: int
    listed_from: int
    slots: Ints
    bits: Bools | None

    @classmethod
    def of(cls, plan: Plan, *, request: int, layer: int) -> Step:
        """Read a request out of a plan (waits for the device). Raises ValueError where there is none such."""
        prefix, new = prefix_and_new(plan)
        reqs = len(prefix)
        require(reqs > 0, f"request: the plan has no request, got {request!r}")
        require(0 <= request < reqs, f"request: expected 0 to {reqs - 1}, got {request!r}")
        lane = plan.lane(layer)
        require(
            not lane.cross,
            f"layer: expected one that reads its request's own keys, got {layer!r}, whose queries all see every key of "
            "an encoder; describe(plan) lists these",
        )
        layout, cached, count = lane.layout, prefix[request], new[request]
        first, end = layout.index.indptr[request : request + 2].tolist()
        start, listed_from = int(layout.start[request]), int(layout.start_visible[request])
        padding = min(listed_from - start, end - first)
        if isinstance(plan, DecodePlan):
            at, positions, bits = request, np.full(count, cached, dtype=np.int64), None
        else:
            at = int(plan.queries.indptr[request])
            positions = _host(plan.queries.positions[at : at + count])
            bits = _bits(plan.queries, request, new=count, cached=cached)
        return cls(
            mode=mode_of(plan),
            request=request,
            row=int(plan.batch.rows[request]),
            layer=layer,
            space=layout.index.space,
            sight=layout.sight,
            cached=cached,
            positions=positions,
            write=_host(lane.write_slots[at : at + count]),
            start=start,
            listed_from=listed_from,
            slots=_host(layout.index.slots[first + padding : end]),
            bits=bits,
        )

    @property
    def new(self) -> int:
        """How many queries, and so new tokens, there are."""
        return len(self.positions)

    @property
    def listed(self) -> int:
        """How many of the cached keys the list holds: the new ones, which a one-pass list holds too, left out."""
        return max(0, min(len(self.slots), self.cached - self.listed_from))

    def reach(self, number: int, *, masked: bool | None = None) -> tuple[int, int]:
        """Return the positions `(first, end)` that a query's sight takes in, whatever the mask says."""
        position = int(self.positions[number])
        last = self.sight.last(position, masked=self.bits is not None if masked is None else masked)
        return self.sight.first(position), 2**31 if last is None else last + 1

    def old(self, number: int) -> Runs:
        """Return which cached positions a query reads."""
        low, high = self.listed_from, self.listed_from + self.listed
        first, end = self.reach(number)
        first, end = max(first, low), min(end, high)
        if self.bits is None:
            return ((first, end),) if first < end else ()
        return runs_of(np.flatnonzero(self.bits[number, first : max(end, first)]) + first)

    def fresh(self, number: int) -> Ints:
        """Return which new tokens a query reads, by their number."""
        first, end = self.reach(number)
        within = (self.positions >= first) & (self.positions < end)
        if self.bits is not None:
            within &= self.bits[number, self.cached :]
        elif self.sight.causal:
            within &= np.arange(self.new) <= number
        return np.flatnonzero(within)

    def most_fresh(self) -> int:
        """Return the most new tokens, its own among them, that one query reads."""
        if self.bits is not None:
            return max((len(self.fresh(i)) for i in range(self.new)), default=0)
        # Without a mask new tokens stand one behind the other.
        counts = [self._fresh_span(i) for i in range(self.new)]
        return max(counts, default=0)

    def _fresh_span(self, number: int) -> int:
        first, end = self.reach(number)
        last = self.cached + (number + 1 if self.sight.causal else self.new)
        return min(end, last) - max(first, self.cached)

    def read(self) -> Runs:
        """Return which cached positions any of the queries reads."""
        if self.bits is None:
            ends = {self.old(i) for i in _one_of_each(self.positions)}
            return joined(run for runs in ends for run in runs)
        seen = np.zeros(self.cached, dtype=np.bool_)
        for i in range(self.new):
            for first, end in self.old(i):
                seen[first:end] = True
        return runs_of(np.flatnonzero(seen))


def _one_of_each(positions: Ints) -> Sequence[int]:
    """Return a query for every position: those that share one see the same cached keys, where no mask says else."""
    numbers: list[int] = np.unique(positions, return_index=True)[1].tolist()
    return numbers


def _host(x: Tensor) -> Ints:
    return np.asarray(x.cpu().numpy(), dtype=np.int64)


def _bits(queries: Queries, request: int, *, new: int, cached: int) -> Bools | None:
    if not isinstance(queries.mask, CustomMask):
        return None
    at = int(queries.mask_indptr[request])
    return np.asarray(queries.mask.rows_of(at, new=new, cached=cached).cpu().numpy(), dtype=np.bool_)
