"""The plan types: everything integer that a step's attention needs, made once, as plain data.

Reference: ForwardMetadata, whose sixteen fields of which up to nine are empty are three types here, one a mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.arguments import Arguments, Names
from attnlab.batch import Batch, DecodeBatch, ExtendBatch, Lens, VerifyBatch
from attnlab.checks import require, tensor
from attnlab.mask import CAUSAL, CustomMask, Mask
from attnlab.plan.explain import Query, Reading, check_query, mask_row, reading
from attnlab.plan.layout import KVLayout, together
from attnlab.plan.schedule import Schedule
from attnlab.plan.signature import Signature, signature_of
from attnlab.plan.splits import SplitPlan
from attnlab.plan.workspace import scratch_bytes

QUERIES = Names(
    pointers=("q_indptr_ptr", "positions_ptr", "bits_ptr", "mask_indptr_ptr"),
    free=("num_bits",),
)
OF_LISTS = ("slots_ptr", "indptr_ptr", "start_ptr", "start_visible_ptr")
EXTEND_LANE = Names(pointers=OF_LISTS)
LANE = Names(pointers=(*OF_LISTS, "segments_ptr", "programs_ptr", "merge_indptr_ptr"), free=("requests",))


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtendLane:
    """What layers of one kind share: the cached keys they see, and where new tokens go.

    `write_slots` are int64 `[tokens]`, in the id space of the layers' storage; padded rows write to slot 0, and so do
    layers that read an encoder's keys, as they store none.
    """

    layout: KVLayout
    write_slots: Int[Tensor, " tokens"]

    def __post_init__(self) -> None:
        device = self.layout.index.slots.device
        tensor("write_slots", self.write_slots, shape=["tokens"], dtype=torch.int64, device=device)

    @property
    def cross(self) -> bool:
        """Whether the keys are an encoder's."""
        return self.layout.sight.cross

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of its lists; all layers of the lane are launched with these."""
        return Arguments(EXTEND_LANE, self._lists)

    @property
    def _lists(self) -> tuple[Tensor, ...]:
        index, layout = self.layout.index, self.layout
        return index.slots, index.indptr, layout.start, layout.start_visible


@dataclass(frozen=True, kw_only=True, eq=False)
class Lane(ExtendLane):
    """A lane whose cached keys are split: how they are cut, and who reads what."""

    splits: SplitPlan
    schedule: Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        reqs = self.splits.reqs
        require(
            self.layout.index.reqs == reqs,
            f"lane: the layout is of {self.layout.index.reqs} requests, the splits of {reqs}",
        )
        require(self.layout.align == 1, "lane: split kernels read every entry of a list; one with padding is not split")
        expected = reqs * self.schedule.kv_heads + 1
        got = self.schedule.merge_indptr.shape[0]
        require(got == expected, f"merge_indptr: expected {expected} entries (requests x KV heads + 1), got {got}")

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of its lists and of who reads them; all layers of the lane are launched with these."""
        schedule = self.schedule
        pointers = (*self._lists, schedule.segments, schedule.program_indptr, schedule.merge_indptr)
        return Arguments(LANE, pointers, free=(self.layout.index.reqs,))

    @cached_property
    def repeats(self) -> dict[Any, Any]:
        """What was launched over it, by scratch and attention: an engine's, to launch the next layer by."""
        return {}

    def scratch_bytes(self, *, heads: int, v_dim: int) -> int:
        """Return the bytes of partials that a layer with so many heads leaves."""
        group = heads // self.schedule.kv_heads
        return scratch_bytes(partials=self.schedule.partials, group=group, v_dim=v_dim)

    def validate_splits(self) -> None:
        """Read the splits and the schedule (waits for the device); raise ValueError where they are inconsistent."""
        self.splits.validate(self.layout.index.indptr.diff().tolist())
        self.schedule.validate(self.splits)


@dataclass(slots=True, eq=False)
class Turn:
    """How long a plan is good that lies in memory which is filled again for the next step: until then."""

    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePlan:
    """A decode step: `lanes`, and for every layer number which lane it takes. A row has one query, its last token.

    `epoch` is the pool's at the time of planning, and `turn` that of the plan's memory; attention refuses a plan of
    another epoch, or whose turn is over. `multiprocessors` is what the policy counted with, None where unknown.
    """

    batch: DecodeBatch
    lanes: tuple[Lane, ...]
    lane_of_layer: dict[int, int]
    epoch: int
    multiprocessors: int | None
    turn: Turn = field(default_factory=Turn)

    def __post_init__(self) -> None:
        for lane in self.lanes:
            tensor("write_slots", lane.write_slots, shape=[self.batch.seq.count], hint="one for every request")

    def lane(self, layer: int) -> Lane:
        """Return what this layer reads. Raises ValueError where the plan has no such layer."""
        return self.lanes[_lane_number(self.lane_of_layer, layer)]

    def signature(self) -> Signature:
        """Return what a CUDA graph bakes in of this plan: addresses, shapes, compile-time choices."""
        return signature_of(self)

    def validate(self, *, num_slots: int | Mapping[str, int]) -> None:
        """Read all tensors (waits for the device); raise ValueError where any of them is inconsistent.

        `num_slots`: slots of the storage, or of each id space by name.
        """
        self.batch.seq.validate()
        lens = self.batch.seq.device.tolist()
        for lane in self.lanes:
            _validate_lane(lane, num_slots)
            _validate_sight(lane, self.batch, first_queries=[n - 1 for n in lens], ends=lens)
            lane.validate_splits()
            if lane.cross:
                continue
            last = (lane.layout.index.indptr[1:].long() - 1).tolist()
            newest = [int(lane.layout.index.slots[at]) if n else 0 for at, n in zip(last, lens, strict=True)]
            written = lane.write_slots.tolist()
            require(
                written == newest, f"write_slots: expected each request's newest slot, {newest[:8]}, got {written[:8]}"
            )

    def explain(self, request: int, query: int = 0) -> tuple[Reading, ...]:
        """Return which slots a request's one query reads, in which pool, and why: a reading for every lane."""
        lens = self.batch.seq.device.tolist()
        check_query(request, query, [min(n, 1) for n in lens])
        last = lens[request] - 1
        asked = Query(position=last, cached=last, siblings=(last,), number=0)
        slots = [self.lanes[i].write_slots[request : request + 1].tolist() for i in range(len(self.lanes))]
        return tuple(
            reading(asked, lane.layout, mine, request=request, layers=_layers_of(self.lane_of_layer, i))
            for i, (lane, mine) in enumerate(zip(self.lanes, slots, strict=True))
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """The query tokens of a step with several a request: those of r are `indptr[r]` up to the next entry.

    `positions` are int32 `[tokens]`: where each stands in its request; `ordered`: one behind the other, from the end of
    the cached ones on (drafts of a tree share positions). `most`: no request has more. `mask_indptr` is int64
    `[reqs + 1]`: where each request's entries of a custom mask begin, `new x (cached + new)` of them.
    """

    indptr: Int[Tensor, " reqs_1"]
    positions: Int[Tensor, " tokens"]
    ordered: bool
    most: int
    mask: Mask
    mask_indptr: Int[Tensor, " reqs_1"]

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of them; where no mask is read any tensor stands for its entries."""
        bits = self.positions if self.bits is None else self.bits
        return Arguments(QUERIES, (self.indptr, self.positions, bits, self.mask_indptr), free=(bits.shape[0],))

    @cached_property
    def unmasked(self) -> Queries:
        """The same without a custom mask, which speaks of a request's own keys: as an encoder's are seen."""
        return replace(self, mask=CAUSAL)

    @property
    def bits(self) -> Tensor | None:
        """The entries of a custom mask; None where causality decides."""
        return self.mask.bits if isinstance(self.mask, CustomMask) else None

    @property
    def cached_visible(self) -> bool:
        """Whether a custom mask shows every cached key."""
        return isinstance(self.mask, CustomMask) and self.mask.cached_visible

    @property
    def cached_masked(self) -> bool:
        """Whether a custom mask may hide cached keys, so that its entries of them are read."""
        return isinstance(self.mask, CustomMask) and not self.mask.cached_visible

    def validate(self, prefix: Lens, new: Lens) -> None:
        """Read all tensors (waits for the device); raise ValueError where any of them is inconsistent."""
        for lens in (prefix, new):
            lens.validate()
        cached, counts = prefix.device.tolist(), new.device.tolist()
        require(self.indptr.diff().tolist() == counts, f"queries: offsets give {self.indptr.diff().tolist()[:8]}")
        pairs = [n * k for n, k in zip(counts, together(prefix, new).device.tolist(), strict=True)]
        require(self.mask_indptr.diff().tolist() == pairs, f"mask: offsets expected rows of {pairs[:8]} entries")
        if isinstance(self.mask, CustomMask):
            bits, wanted = self.mask.bits.shape[0], sum(pairs)
            require(bits >= wanted, f"mask: expected {wanted:,} entries, got {bits:,}")
        at = 0
        for r, (p, n) in enumerate(zip(cached, counts, strict=True)):
            mine = self.positions[at : at + n].tolist()
            bad = [q for q in mine if not p <= q < p + n]
            require(not bad, f"positions: request {r} has a query at {bad[:1]}, outside {p} to {p + n - 1}")
            given = f"positions: request {r} is said to have its queries in order, got {mine[:8]}"
            require(not self.ordered or mine == list(range(p, p + n)), given)
            at += n


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendPlan:
    """An extend step: prefill, a chunk of one, draft-extend, or a mix.

    The lists hold the cached keys; the new tokens' come with the call, or are read back at `write_slots`. Where
    `one_pass`, lists hold the new tokens too, in position order, and begin at a border of 128 positions, so that a
    kernel which sweeps them in tiles adds in the same order however a prompt is cut into chunks; an encoder's keys
    have lists of their own either way.
    """

    batch: ExtendBatch
    queries: Queries
    lanes: tuple[ExtendLane, ...]
    lane_of_layer: dict[int, int]
    epoch: int
    one_pass: bool
    turn: Turn = field(default_factory=Turn)

    def lane(self, layer: int) -> ExtendLane:
        """Return what this layer reads. Raises ValueError where the plan has no such layer."""
        return self.lanes[_lane_number(self.lane_of_layer, layer)]

    def signature(self) -> Signature:
        """Return what a CUDA graph bakes in of this plan: addresses, shapes, compile-time choices."""
        return signature_of(self)

    def validate(self, *, num_slots: int | Mapping[str, int]) -> None:
        """Read all tensors (waits for the device); raise ValueError where any of them is inconsistent."""
        self.queries.validate(self.batch.prefix, self.batch.new)
        cached = self.batch.prefix.device.tolist()
        ends = together(self.batch.prefix, self.batch.new).device.tolist() if self.one_pass else cached
        for lane in self.lanes:
            _validate_lane(lane, num_slots, tokens=int(self.queries.indptr[-1]))
            _validate_sight(lane, self.batch, first_queries=cached, ends=ends)

    def explain(self, request: int, query: int) -> tuple[Reading, ...]:
        """Return which slots a query of a request reads, in which pool, and why: a reading for every lane."""
        return _explain(self.queries, self.batch.prefix, self.lanes, self.lane_of_layer, request, query)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyPlan:
    """A step in which the target model decides on drafts. The cached keys are split like a decode's."""

    batch: VerifyBatch
    queries: Queries
    lanes: tuple[Lane, ...]
    lane_of_layer: dict[int, int]
    epoch: int
    multiprocessors: int | None
    turn: Turn = field(default_factory=Turn)

    def lane(self, layer: int) -> Lane:
        """Return what this layer reads. Raises ValueError where the plan has no such layer."""
        return self.lanes[_lane_number(self.lane_of_layer, layer)]

    def signature(self) -> Signature:
        """Return what a CUDA graph bakes in of this plan: addresses, shapes, compile-time choices."""
        return signature_of(self)

    def validate(self, *, num_slots: int | Mapping[str, int]) -> None:
        """Read all tensors (waits for the device); raise ValueError where any of them is inconsistent."""
        self.queries.validate(self.batch.prefix, self.batch.drafts)
        cached = self.batch.prefix.device.tolist()
        for lane in self.lanes:
            _validate_lane(lane, num_slots, tokens=int(self.queries.indptr[-1]))
            _validate_sight(lane, self.batch, first_queries=cached, ends=cached)
            lane.validate_splits()

    def explain(self, request: int, query: int) -> tuple[Reading, ...]:
        """Return which slots a draft of a request reads, in which pool, and why: a reading for every lane."""
        return _explain(self.queries, self.batch.prefix, self.lanes, self.lane_of_layer, request, query)


Plan = DecodePlan | ExtendPlan | VerifyPlan


def _lane_number(lane_of_layer: dict[int, int], layer: int) -> int:
    if layer not in lane_of_layer:
        known = ", ".join(map(str, lane_of_layer))
        raise ValueError(f"layer: this plan has layers {known}, got {layer!r}")
    return lane_of_layer[layer]


def _layers_of(lane_of_layer: dict[int, int], lane: int) -> tuple[int, ...]:
    return tuple(layer for layer, number in lane_of_layer.items() if number == lane)


def _explain(
    queries: Queries,
    prefix: Lens,
    lanes: Sequence[ExtendLane],
    lane_of_layer: dict[int, int],
    request: int,
    query: int,
) -> tuple[Reading, ...]:
    check_query(request, query, queries.indptr.diff().tolist())
    first, end = queries.indptr[request : request + 2].tolist()
    siblings, cached = queries.positions[first:end].tolist(), int(prefix.device[request])
    offset = int(queries.mask_indptr[request])
    asked = Query(
        position=siblings[query],
        cached=cached,
        siblings=tuple(siblings),
        number=query,
        bits=mask_row(queries.mask, offset, number=query, new=end - first, cached=cached),
    )
    return tuple(
        reading(
            asked,
            lane.layout,
            lane.write_slots[first:end].tolist(),
            request=request,
            layers=_layers_of(lane_of_layer, i),
        )
        for i, lane in enumerate(lanes)
    )


def _validate_lane(lane: ExtendLane, num_slots: int | Mapping[str, int], *, tokens: int = 0) -> None:
    """Check a lane's list and write slots against its storage; the first `tokens` are live: none goes to the sink."""
    space = lane.layout.index.space
    if not isinstance(num_slots, int):
        require(space in num_slots, f"num_slots: expected one for id space {space!r}, got {sorted(num_slots)}")
    slots = num_slots if isinstance(num_slots, int) else num_slots[space]
    lane.layout.validate(num_slots=slots)
    written = lane.write_slots.tolist()
    outside = [slot for slot in written if not 0 <= slot < slots]
    require(not outside, f"write_slots: expected 0 to {slots - 1}, got {outside[:1]}")
    if lane.cross:
        stored = [slot for slot in written if slot != 0]
        require(not stored, f"write_slots: layers that read an encoder's keys store none, expected 0, got {stored[:1]}")
        return
    lost = [i for i, slot in enumerate(written[:tokens]) if slot == 0]
    require(not lost, f"write_slots: token {lost[:1]} is live, but goes to slot 0, the sink")
    live = [slot for slot in written if slot != 0]
    require(len(set(live)) == len(live), f"write_slots: tokens share their slot, {live[:8]}")


def _validate_sight(lane: ExtendLane, batch: Batch, *, first_queries: Sequence[int], ends: Sequence[int]) -> None:
    """Check that a lane's lists hold what its first queries see before these ends, or all of the encoder's keys."""
    if lane.cross:
        if batch.encoder is None:
            raise ValueError("encoder: the plan has lists of an encoder's keys, but its batch has no encoder")
        batch.encoder.lens.validate()
        first_queries = ends = batch.encoder.lens.device.tolist()
    lane.layout.validate_sight(first_queries=first_queries, ends=ends)
