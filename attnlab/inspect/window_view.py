"""Window layouts as plain numbers: which keys the queries of one request see, and where its pages lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attnlab.checks import require
from attnlab.inspect.step import Ints, Mode, Runs, Step, joined, runs_of, total
from attnlab.memory.pool import KVPool, Translation
from attnlab.memory.requests import RequestTable
from attnlab.plan.plans import Plan
from attnlab.spec import ModelSpec, Sight

MOST_QUERIES = 16
"""Of more queries than these, so many are looked at one by one: the first, the last, and some between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLine:
    """What one query reads: `old` are runs of cached positions, `new` runs of new tokens, by their number."""

    number: int
    position: int
    old: Runs
    new: Runs

    @property
    def old_keys(self) -> int:
        """Cached keys that it reads."""
        return total(self.old)

    @property
    def new_keys(self) -> int:
        """New tokens that it reads, itself among them."""
        return total(self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """One id space that pages lie in: its name, how many pages it has, and which of them others have. 0 is the sink."""

    name: str
    pages: int
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The positions `first` up to `end` of the request, and their page in every space: None where it has none."""

    first: int
    end: int
    pages: tuple[int | None, ...]

    @property
    def gone(self) -> bool:
        """Whether the layer's storage has no page for these positions: they slid out, and map to the sink."""
        return self.pages[-1] is None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowView:
    """One request at one layer of a step: `cached` keys, `new` tokens behind them, and where both lie.

    A decode's one new token is its query. `queries` are at most MOST_QUERIES of the `new` ones; none of all reads more
    than `most_new` new tokens. `read` are the cached positions that any query reads, `listed` those that the plan's
    list names. `spaces` lead from the request table's ids to the layer's storage, `pieces` are the request's pages in
    text order. `example` is a position, and its id in every space. `strays` are positions that the plan reads elsewhere
    than the pool has them now. `stale`: the plan is of an older epoch than the pool.
    """

    mode: Mode
    request: int
    row: int
    layer: int
    sight: Sight
    masked: bool
    cached: int
    new: int
    queries: tuple[QueryLine, ...]
    most_new: int
    read: Runs
    listed: tuple[int, int]
    page_size: int
    spaces: tuple[Space, ...]
    pieces: tuple[Piece, ...]
    example: tuple[int, tuple[int, ...]] | None
    strays: tuple[int, ...]
    stale: bool

    @classmethod
    def of(
        cls, *, pool: KVPool, table: RequestTable, model: ModelSpec, plan: Plan, request: int, layer: int
    ) -> WindowView:
        """Look at a request of a plan, and at the pool as it is now. Waits for the device.

        `request` counts the plan's requests, `layer` is the model's number of it.
        """
        step = Step.of(plan, request=request, layer=layer)
        way = pool.translation(model.layer(layer).pool_layer)
        tokens = step.cached + step.new
        held = min(tokens, table.max_context)
        ids = table.slots[step.row, :held].cpu().long()
        require(held == tokens, f"table: has {held:,} columns, request {request} has {tokens:,} tokens")
        stored = way.apply(ids.to(pool.device)).cpu().numpy()
        pieces = _pieces(ids.numpy(), way, pool.page_size)
        read = step.read()
        return cls(
            mode=step.mode,
            request=request,
            row=step.row,
            layer=layer,
            sight=step.sight,
            masked=step.bits is not None,
            cached=step.cached,
            new=step.new,
            queries=tuple(_line(step, number) for number in sampled(step.new)),
            most_new=step.most_fresh(),
            read=read,
            listed=(step.listed_from, step.listed_from + step.listed),
            page_size=pool.page_size,
            spaces=_spaces(pool, way, model.layer(layer).pool_layer, step.row, pieces),
            pieces=pieces,
            example=_example(read[0][0] if read else step.cached, ids, stored, way),
            strays=_strays(step, stored),
            stale=plan.epoch != pool.epoch,
        )

    @property
    def tokens(self) -> int:
        """All keys of the request, new ones included."""
        return self.cached + self.new

    @property
    def live(self) -> Runs:
        """The positions that are read from the pool: a decode's own key is stored first, and read with the others."""
        own = ((self.cached, self.tokens),) if self.mode == "decode" else ()
        return joined((*self.read, *own))

    @property
    def edge(self) -> int:
        """The first cached position that any query reads; `cached` where none is read."""
        return self.read[0][0] if self.read else self.cached

    @property
    def gone(self) -> int:
        """Pages that slid out of the layer's storage."""
        return sum(piece.gone for piece in self.pieces)


def sampled(count: int, most: int = MOST_QUERIES) -> list[int]:
    """Return all numbers below `count`, or `most` of them: the first, the last, and some at even distances.

    >>> sampled(3), sampled(300, 4)
    ([0, 1, 2], [0, 100, 199, 299])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _line(step: Step, number: int) -> QueryLine:
    return QueryLine(
        number=number,
        position=int(step.positions[number]),
        old=step.old(number),
        new=runs_of(step.fresh(number)),
    )


def _pieces(ids: Ints, way: Translation, page_size: int) -> tuple[Piece, ...]:
    """Return the request's pages in text order. A page is cut where its ids are not neighbours."""
    if not len(ids):
        return ()
    starts = np.concatenate([[True], (np.diff(ids) != 1) | (ids[1:] % page_size == 0)])
    first = np.flatnonzero(starts)
    pages = ids[first] // page_size
    stored: list[int] = pages.tolist() if way.pages is None else way.pages.cpu()[torch.from_numpy(pages)].tolist()
    ends = [*first[1:].tolist(), len(ids)]
    return tuple(
        Piece(first=a, end=b, pages=(page,) if way.pages is None else (page, at if at >= 0 else None))
        for a, b, page, at in zip(first.tolist(), ends, pages.tolist(), stored, strict=True)
    )


def _spaces(pool: KVPool, way: Translation, layer: int, row: int, pieces: Sequence[Piece]) -> tuple[Space, ...]:
    """Return the table's space, and the storage's where that is another one."""
    size = pool.page_size
    held = {int(page) for owner in pool.allocator.owners for page in pool.allocator.slots_of(owner)[::size] // size}
    mine = [{piece.pages[level] for piece in pieces} for level in range(1 + (way.pages is not None))]
    spaces = [Space(name=pool.table_space, pages=pool.num_slots // size, others=_others(held, mine[0]))]
    if way.pages is not None:
        used = {page for page in way.pages.tolist() if page > 0}
        # Where layers share a page, a view ends with its own layer's part of the last one.
        pages = -(-pool.view(layer).num_slots // way.stride)
        spaces.append(Space(name=way.target, pages=pages, others=_others(used, mine[1])))
    return tuple(spaces)


def _others(used: Iterable[int], mine: set[int | None]) -> tuple[int, ...]:
    return tuple(sorted(page for page in used if page not in mine))


def _example(position: int, ids: torch.Tensor, stored: Ints, way: Translation) -> tuple[int, tuple[int, ...]] | None:
    """Return a key, the first that is read or else the first new one, and its id in every space."""
    if position >= len(ids):
        return None
    places = [int(ids[position])] + ([] if way.pages is None else [int(stored[position])])
    return position, tuple(places)


def _strays(step: Step, stored: Ints) -> tuple[int, ...]:
    """Return positions that the list, or the step's own tokens, have elsewhere than the pool has them now."""
    first = step.listed_from
    listed = stored[first : first + step.listed]
    apart = np.flatnonzero(step.slots[: len(listed)] != listed) + first
    own = np.flatnonzero(step.write != stored[step.cached :]) + step.cached
    return (*apart.tolist(), *own.tolist())
