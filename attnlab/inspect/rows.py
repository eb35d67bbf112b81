"""The rows of a call that are looked at: which query of which request each is, and which keys it is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnlab.checks import require
from attnlab.eager.core import visible_keys
from attnlab.engines import Engine
from attnlab.mask import CAUSAL, CustomMask, Mask
from attnlab.memory.pool import KVView
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.score_call import ScoreCall
from attnlab.spec import AttentionSpec, Sight
from attnlab.trace import Stage, finite_or_zero

Call = DecodeCall | ExtendCall | VerifyCall

SLICE_BYTES = 64 << 20
"""Scores of one stage that are on the device at once; those of a long request are made some rows at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A query: `query` is its number among its request's new tokens, `token` among those of the step.

    `alone`: in a decode it is its request's only one.
    """

    request: int
    query: int
    token: int
    alone: bool = False

    def __str__(self) -> str:
        return f"request {self.request}" + ("" if self.alone else f", query {self.query}")


def chosen_rows(queries: Sequence[int] | None, new: Sequence[int]) -> tuple[Row, ...]:
    """Return the rows of a step whose requests have so many `new` tokens; None: all of them.

    Numbers below 0 count from the last token. A request that has fewer tokens gives those that it has; a number that no
    request has raises ValueError.

    >>> [(row.request, row.query, row.token) for row in chosen_rows((0, -1), [3, 0, 1])]
    [(0, 0, 0), (0, 2, 2), (2, 0, 3)]
    """
    rows, first, most = [], 0, max(new, default=0)
    for number in queries or ():
        require(
            -most <= number < most or not most,
            f"queries: expected numbers of a request's new tokens, {-most} to {most - 1}, got {number}",
        )
    for request, count in enumerate(new):
        numbers = range(count) if queries is None else sorted({n % count for n in queries if -count <= n < count})
        rows += [Row(request=request, query=n, token=first + n) for n in numbers]
        first += count
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestKeys:
    """One request's keys in the order of its text: its list's without the padding, then those of the new tokens.

    `sources` says where they lie: slots of a view each. Key j stands at `position[j]` (int32), and new token n's is key
    `own + n`, also where a call leaves it out; None: the keys are an encoder's. `sight` and `mask` hide keys: the bit
    of query n and key j is number `bits_at + n * bits_row + column + j`.
    """

    sources: tuple[tuple[KVView, Tensor], ...]
    position: Int[Tensor, " keys"]
    own: int | None
    sight: Sight
    mask: Mask
    bits_at: int
    bits_row: int
    column: int

    @classmethod
    def of(cls, call: Call, request: int) -> RequestKeys:
        """Read a request's keys out of a call (waits for the device)."""
        layout, device = call.lane.layout, call.view.k.device
        at, to = layout.index.indptr[request : request + 2].tolist()
        start, first = int(layout.start[request]), int(layout.start_visible[request])
        slots = layout.index.slots[min(at + first - start, to) : to]
        position = torch.arange(first, first + len(slots), dtype=torch.int32, device=device)
        if isinstance(call, DecodeCall):  # its one query, the last token, has its key in the list
            return cls(
                sources=((call.view, slots),),
                position=position,
                own=None if layout.sight.cross else len(slots) - 1,
                sight=layout.sight,
                mask=CAUSAL,
                bits_at=0,
                bits_row=0,
                column=first,
            )
        queries = call.queries
        begin, end = queries.indptr[request : request + 2].tolist()
        one_pass, parts = (call.one_pass, call.parts) if isinstance(call, ExtendCall) else (False, "all")
        own, column, sources = len(slots) - (end - begin) * one_pass, first, [(call.view, slots)]
        prefix = first + own
        if parts == "new":
            sources, position, own, column = [], position[:0], 0, prefix
        if parts != "cached" and call.k is not None and not one_pass:
            sources.append((KVView(k=call.k, v=call.k), torch.arange(begin, end, device=device)))
            position = torch.cat([position, queries.positions[begin:end]])
        return cls(
            sources=tuple(sources),
            position=position,
            own=None if layout.sight.cross else own,
            sight=layout.sight,
            mask=queries.mask,
            bits_at=int(queries.mask_indptr[request]),
            bits_row=prefix + end - begin,
            column=column,
        )

    @property
    def keys(self) -> int:
        """How many there are."""
        return self.position.shape[0]

    def own_key(self, query: int) -> int:
        """Return which key is a query's own, or the last one where none of them is."""
        return self.keys - 1 if self.own is None else min(self.own + query, self.keys - 1)

    def in_row(self, query: int) -> int:
        """Return how many keys a query's row has: all, or those up to its own where causality alone hides any."""
        ordered = self.sight.causal and not isinstance(self.mask, CustomMask)
        return self.own_key(query) + 1 if ordered else self.keys

    def visible(self, query: Tensor, q_pos: Tensor) -> Bool[Tensor, "rows keys"]:
        """Return which keys some queries see: number `query[i]` of the new tokens, at `q_pos[i]`."""
        key, number = torch.arange(self.keys, device=q_pos.device), query[:, None]
        seen: Tensor = visible_keys(
            self.sight,
            self.mask,
            q_pos=q_pos[:, None],
            kv_pos=self.position,
            q_number=number,
            kv_number=key - (self.own or 0),
            bit=self.bits_at + number * self.bits_row + self.column + key,
        )
        return seen.expand(len(query), self.keys)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowScores:
    """Some rows of one request at any stage of their pipeline, made by the engine that ran the call."""

    engine: Engine
    call: Call
    keys: RequestKeys
    query: Int[Tensor, " rows"]
    token: Int[Tensor, " rows"]
    q_pos: Int[Tensor, " rows"]
    known: dict[tuple[AttentionSpec, bool], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine, call: Call, keys: RequestKeys, rows: Sequence[Row]) -> RowScores:
        """Take rows of one request."""
        device = call.q.device
        token = torch.tensor([row.token for row in rows], dtype=torch.int64, device=device)
        if isinstance(call, DecodeCall):
            q_pos = keys.position[-1:] if keys.keys else keys.position.new_full((1,), -1)
        else:
            q_pos = call.queries.positions[token]
        query = torch.tensor([row.query for row in rows], dtype=torch.int64, device=device)
        return cls(engine=engine, call=call, keys=keys, query=query, token=token, q_pos=q_pos)

    def at(self, stage: Stage) -> Float[Tensor, "rows heads keys"]:
        """Return the scores of a stage before the weights, fp32 on the device; stages that are the same are made once.

        Before `masked` hidden keys have a score too, unless a modifier changes it, which is asked for visible keys
        alone. A decode's list has no hidden key.
        """
        spec = spec_at(self.call.spec, stage)
        hides = (stage == "masked" or spec.mod is not None) and not isinstance(self.call, DecodeCall)
        if (spec, hides) not in self.known:
            self.known[spec, hides] = self._made(spec, hides=hides)
        return self.known[spec, hides]

    def weights(self, lse: Float[Tensor, "rows heads"]) -> Float[Tensor, "rows heads keys"]:
        """Return what each key's value is multiplied with, given the log-sum-exp of each row's scores."""
        # A sink takes its share of the denominator, so that weights beside one sum to less than 1.
        total = lse if self.call.sinks is None else torch.logaddexp(lse, self.call.sinks.float())
        return torch.exp(self.at("masked") - finite_or_zero(total)[..., None])

    def _made(self, spec: AttentionSpec, *, hides: bool) -> Tensor:
        every = len(self.query), self.keys.keys
        visible = (
            self.keys.visible(self.query, self.q_pos)
            if hides
            else torch.ones(every, dtype=torch.bool, device=self.query.device)
        )
        parts, first = [], 0
        for view, slots in self.keys.sources:
            here = slice(first, first + len(slots))
            first += len(slots)
            asked = ScoreCall(
                spec=spec,
                view=view,
                slots=slots,
                kv_pos=self.keys.position[here],
                visible=visible[:, here].contiguous(),
                q=self.call.q,
                tokens=self.token,
                q_pos=self.q_pos,
                aux=self.call.aux if spec.mod is not None else None,
            )
            parts.append(self.engine.scores(asked))
        if not parts:
            return torch.empty(len(self.query), spec.heads, 0, device=self.call.q.device)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def spec_at(spec: AttentionSpec, stage: Stage) -> AttentionSpec:
    """Return the attention whose score pipeline ends at a stage."""
    plain = replace(spec, softcap=None, temperature_len=None, mod=None)
    return {"raw": replace(plain, scale=1.0), "scaled": plain}.get(stage, spec)


def in_slices(rows: Sequence[Row], *, row_bytes: int) -> Iterator[Sequence[Row]]:
    """Yield rows in turns that take `SLICE_BYTES` at most, or one at a time."""
    step = max(1, SLICE_BYTES // max(1, row_bytes))
    yield from (rows[at : at + step] for at in range(0, len(rows), step))
