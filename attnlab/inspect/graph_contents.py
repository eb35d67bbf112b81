"""A graph's tensors by what they hold: of the latest step, of which of its requests, or of none.

It is told from their contents alone: an entry behind the live ones is padding where it holds the value that stands for
nothing, and left over from an earlier step where it holds any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attnlab.batch import VerifyBatch, lens_of
from attnlab.graphs.graph import Graph
from attnlab.inspect.step import Runs, runs_of, total
from attnlab.inspect.words import lane_name
from attnlab.plan.draft import DraftPlan
from attnlab.plan.plans import DecodePlan, ExtendLane, ExtendPlan, Lane, Plan, Queries, VerifyPlan
from attnlab.plan.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Tensors of a graph that have an axis in common: `capacity` entries of a `unit` each, `nbytes` together.

    The live entries come first: `parts[r]` of them are those of the step's request r. `stale` are runs behind them that
    an earlier step has left. `read`: whether kernels read there too, for the sake of padded rows.
    """

    name: str
    owner: str
    unit: str
    capacity: int
    parts: tuple[int, ...]
    stale: Runs
    nbytes: int
    read: bool

    @property
    def live(self) -> int:
        """Entries of the latest step."""
        return sum(self.parts)

    @property
    def left_over(self) -> int:
        """Entries that an earlier step has left."""
        return total(self.stale)

    @property
    def padded(self) -> int:
        """Entries that hold what stands for nothing."""
        return self.capacity - self.live - self.left_over

    def bytes_of(self, entries: int) -> float:
        """Return the bytes of so many entries."""
        return self.nbytes * entries / max(1, self.capacity)


def tokens_of(graph: Graph) -> list[int]:
    """Return the query tokens of each request of the latest step. Waits for the device."""
    plan = graph.latest
    if isinstance(plan, DecodePlan | DraftPlan):
        return [graph.shape.each] * graph.requests
    return _counts(plan.queries.indptr)[: graph.requests]


def buffers_of(graph: Graph) -> Iterator[Buffer]:
    """Go through a graph's fixed memory: the batch, the plan's queries and lanes, the inputs. Waits for the device."""
    yield from _Reader(graph).buffers()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A tensor of a buffer, and which of its entries hold something."""

    memory: Tensor
    holds: NDArray[np.bool_]

    @classmethod
    def of(cls, x: Tensor) -> _Column:
        """Entries along the first axis hold something where any of their numbers is not 0."""
        return cls(memory=x, holds=_host(x.flatten(1).ne(0).any(1) if x.dim() > 1 else x.ne(0)))

    @classmethod
    def of_offsets(cls, indptr: Tensor, *, each: int = 1) -> _Column:
        """An entry is the list between two offsets, or `each` of them, and holds something where one is not empty."""
        return cls(memory=indptr, holds=_host(indptr.diff().view(-1, each).ne(0).any(1)))

    @classmethod
    def of_segments(cls, segments: Tensor) -> _Column:
        """A segment that ends where it begins does nothing, whatever else it says."""
        return cls(memory=segments, holds=_host(segments[:, 2] != segments[:, 3]))


class _Reader:
    """Reads one graph. Of memory that several buffers name the first has the bytes."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._plan = graph, graph.latest
        self._ones, self._tokens = [1] * graph.requests, tokens_of(graph)
        drafting = isinstance(graph.latest, DraftPlan)
        self._rows, self._row = ([1] * graph.live, "row") if drafting else (self._ones, "request")
        self._sizes = {x.data_ptr(): x.nbytes for x in graph.buffers.values()}

    def buffers(self) -> Iterator[Buffer]:
        plan, inputs = self._plan, self._graph.inputs
        batches = (self._graph.batch, plan.batch)
        lens = [lens.device for batch in batches for lens in lens_of(batch)]
        yield self._buffer("rows", "batch", "request", self._ones, [_Column.of(batch.rows) for batch in batches])
        yield self._buffer("lengths", "batch", "request", self._ones, [_Column.of(x) for x in lens])
        if isinstance(plan, ExtendPlan | VerifyPlan):
            yield from self._queries(plan.queries)
        if isinstance(plan, DraftPlan):
            for i, step in enumerate(plan.steps):
                columns = [_Column.of(step.batch.rows), _Column.of(step.batch.seq.device)]
                yield self._buffer("rows, lengths", f"step {i}", self._row, self._rows, columns)
                yield from self._lanes(step, f"step {i}, ")
        else:
            yield from self._lanes(plan, "")
        if inputs:
            yield self._buffer(", ".join(inputs), "inputs", "token", self._tokens, [*map(_Column.of, inputs.values())])

    def _lanes(self, plan: Plan, of: str) -> Iterator[Buffer]:
        for number, lane in enumerate(plan.lanes):
            layers = [layer for layer, its in plan.lane_of_layer.items() if its == number]
            owner = of + lane_name(layers, lane.layout.index.space, lane.layout.sight)
            yield from self._lane(lane, owner)
            if isinstance(lane, Lane):
                yield from self._programs(lane.schedule, owner)

    def _queries(self, queries: Queries) -> Iterator[Buffer]:
        offsets = [_Column.of_offsets(queries.indptr), _Column.of_offsets(queries.mask_indptr)]
        yield self._buffer("offsets", "queries", "request", self._ones, offsets)
        depths = [batch.depth for batch in (self._graph.batch, self._plan.batch) if isinstance(batch, VerifyBatch)]
        positions = [_Column.of(x) for x in (queries.positions, *depths)]
        yield self._buffer("positions", "queries", "token", self._tokens, positions)
        if queries.bits is not None:
            bits = _counts(queries.mask_indptr)
            yield self._buffer("mask", "queries", "entry", bits, [_Column.of(queries.bits)], read=False, gaps=True)

    def _lane(self, lane: ExtendLane, owner: str) -> Iterator[Buffer]:
        index, starts = lane.layout.index, (lane.layout.start, lane.layout.start_visible)
        offsets = [_Column.of_offsets(index.indptr), *map(_Column.of, starts)]
        listed, ranges = _counts(index.indptr), []
        if isinstance(lane, Lane):
            merged = _Column.of_offsets(lane.schedule.merge_indptr, each=lane.schedule.kv_heads)
            offsets += [_Column.of_offsets(lane.splits.indptr), _Column.of(lane.splits.nominal), merged]
            ranges = [_Column.of(x) for x in (lane.splits.request, lane.splits.start, lane.splits.end)]
        yield self._buffer("offsets", owner, self._row, self._rows, offsets)
        yield self._buffer("list", owner, "slot", listed, [_Column.of(index.slots)], read=False)
        yield self._buffer("write slots", owner, "token", self._tokens, [_Column.of(lane.write_slots)])
        if isinstance(lane, Lane):
            yield self._buffer("ranges", owner, "range", _counts(lane.splits.indptr), ranges, read=False)

    def _programs(self, schedule: Schedule, owner: str) -> Iterator[Buffer]:
        """The segments that are dealt out, and which program has which of them."""
        live = int(schedule.merge_indptr[-1])
        request, reqs = schedule.segments[:live, 0].long(), len(self._rows)
        segments = request.bincount(minlength=reqs).tolist()
        dealt = _Column.of_segments(schedule.segments)
        yield self._buffer("segments", owner, "segment", segments, [dealt], read=False)
        first = schedule.program_indptr[:-1][schedule.program_indptr.diff() > 0].long()
        programs = schedule.segments[first, 0].long().bincount(minlength=reqs).tolist()
        owned = _Column.of_offsets(schedule.program_indptr)
        yield self._buffer("programs", owner, "program", programs, [owned])

    def _by_request(self, parts: Sequence[int]) -> tuple[int, ...]:
        """Return what each live request has; the rows of a draft's lists are branches, request by request."""
        requests, live = self._graph.requests, self._graph.live
        if not isinstance(self._plan, DraftPlan) or len(parts) == requests:
            return tuple(parts[:requests])
        each = self._graph.shape.each
        return tuple(sum(parts[at : at + each]) for at in range(0, live, each))

    def _buffer(
        self,
        name: str,
        owner: str,
        unit: str,
        parts: Sequence[int],
        columns: Sequence[_Column],
        *,
        read: bool = True,
        gaps: bool = False,
    ) -> Buffer:
        """Return a buffer. `gaps`: 0 may be left over as well, so that gaps in what holds something are no padding."""
        parts = self._by_request(parts)
        live = sum(parts)
        left = np.flatnonzero(np.any([column.holds[live:] for column in columns], axis=0)) + live
        stale = ((live, int(left[-1]) + 1),) if gaps and len(left) else runs_of(left)
        return Buffer(
            name=name,
            owner=owner,
            unit=unit,
            capacity=len(columns[0].holds),
            parts=parts,
            stale=stale,
            nbytes=sum(self._sizes.pop(column.memory.data_ptr(), 0) for column in columns),
            read=read,
        )


def _counts(indptr: Tensor) -> list[int]:
    counts: list[int] = indptr.diff().tolist()
    return counts


def _host(x: Tensor) -> NDArray[np.bool_]:
    return np.asarray(x.cpu().numpy(), dtype=np.bool_)
