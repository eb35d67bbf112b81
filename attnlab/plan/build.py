"""Builds plans: the one `match` over the kinds of batch, and the steps that it is made of.

Reference: triton_backend.py, init_forward_metadata. No step waits for the device; what must be bounded is bounded
by host numbers that the lengths carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import NamedTuple, overload

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.batch import B, Batch, DecodeBatch, DraftBatch, Encoder, ExtendBatch, Lens, VerifyBatch, lens_of, owned
from attnlab.mask import Mask
from attnlab.memory.pool import KVPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.admission import Admission, Kind
from attnlab.plan.draft import DraftCut, DraftPlan, branch_lens, branch_stride, check_scratch
from attnlab.plan.index import KVIndex
from attnlab.plan.lanes import LaneWork, Source, held
from attnlab.plan.layout import Extent, KVLayout, most_seen, positions_behind, together
from attnlab.plan.ops import PlanOps
from attnlab.plan.parts import index_at
from attnlab.plan.plans import DecodePlan, ExtendLane, ExtendPlan, Lane, Plan, Queries, VerifyPlan
from attnlab.plan.policy import HostPolicy, SplitContext, SplitPolicy
from attnlab.plan.tiles import HEAD_TILE, shares_tile
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec, Sight

ONE_PASS_TILE = 128
"""Lists that a one-pass extend sweeps begin at a multiple of so many positions: the widest tile of keys."""


class _Keys(NamedTuple):
    """Whose keys lists hold: the first `lens` tokens of these rows; first queries stand `behind` before their end."""

    rows: Tensor
    lens: Lens
    behind: int = 0


@dataclass(frozen=True, kw_only=True)
class Planner:
    """What plans are made from, for as long as a server runs; `build` makes one.

    `large_tiles`: programs of even shares pack more heads than others, where `plan.tiles` says so.
    `max_requests` and `max_tokens` are what the backend was built for, where there is one: refusals name what lacks.
    """

    model: ModelSpec
    pool: KVPool
    table: RequestTable
    policy: SplitPolicy | HostPolicy
    ops: PlanOps
    multiprocessors: int | None
    one_pass: bool = False
    large_tiles: bool = False
    max_requests: int | None = None
    max_tokens: int | None = None

    @overload
    def build(self, batch: DecodeBatch, *, max_ranges: int | None = None) -> DecodePlan: ...
    @overload
    def build(self, batch: ExtendBatch, *, max_ranges: int | None = None) -> ExtendPlan: ...
    @overload
    def build(self, batch: VerifyBatch, *, max_ranges: int | None = None) -> VerifyPlan: ...
    @overload
    def build(self, batch: DraftBatch, *, max_ranges: int | None = None) -> DraftPlan: ...
    def build(self, batch: Batch | DraftBatch, *, max_ranges: int | None = None) -> Plan | DraftPlan:
        """Return the plan of a step. Lengths, rows and ranges are checked before any list is gathered.

        `max_ranges` is what the scratch holds, where the plan is to be run: a batch that may need more is refused.
        """
        self.admission.check(batch)
        return self.make(batch, max_ranges=max_ranges)

    @overload
    def make(self, batch: Batch, *, max_ranges: int | None = None) -> Plan: ...
    @overload
    def make(self, batch: DraftBatch, *, max_ranges: int | None = None) -> DraftPlan: ...
    def make(self, batch: Batch | DraftBatch, *, max_ranges: int | None = None) -> Plan | DraftPlan:
        """Return the plan of a batch that was checked. All of it is work of the device, which a CUDA graph can hold."""
        match batch:
            case DecodeBatch():
                return self._decode(self._taken(batch), max_ranges)
            case ExtendBatch():
                return self._extend(self._taken(batch))
            case VerifyBatch():
                return self._verify(self._taken(batch), max_ranges)
            case DraftBatch():
                return self._draft(self._taken(batch), max_ranges)

    def _taken(self, batch: B) -> B:
        """Return the batch in memory of its own. Rows on the device that are none of the table's become padding."""
        encoder = None if isinstance(batch, DraftBatch) else batch.encoder
        of_encoder: dict[int, Tensor] = {} if encoder is None else self._padded(encoder.rows, [encoder.lens])
        return owned(batch, self._padded(batch.rows, lens_of(batch)), of_encoder)

    def _padded(self, rows: Tensor, lengths: Sequence[Lens]) -> dict[int, Tensor]:
        """Return copies of rows on the device and of their lengths, by the tensor that each is of; of others none."""
        if rows.device.type == "cpu":
            return {}
        lens = [mine.device for mine in lengths]
        copies = self.ops.pad(rows, lens, max_requests=self.table.max_requests)
        return {id(x): copy for x, copy in zip((rows, *lens), copies, strict=True)}

    @cached_property
    def admission(self) -> Admission:
        """What the host can tell of a batch."""
        return Admission(model=self.model, pool=self.pool, table=self.table, kinds=self.kinds)

    @cached_property
    def kinds(self) -> dict[Kind, list[LayerSpec]]:
        """The layers that share a lane: same KV heads, same visible keys, same id space."""
        kinds: dict[Kind, list[LayerSpec]] = {}
        for layer in self.model.layers:
            a, space = layer.attention, self.pool.translation(layer.pool_layer).target
            kinds.setdefault(Kind(a.kv_heads, a.sight, space), []).append(layer)
        return kinds

    @cached_property
    def lane_of_layer(self) -> dict[int, int]:
        """The number of each layer's lane."""
        return {layer.index: i for i, layers in enumerate(self.kinds.values()) for layer in layers}

    @cached_property
    def contexts(self) -> dict[Kind, SplitContext]:
        """What the policy may look at for each kind of layer, in a decode."""
        return {kind: self.context(layers) for kind, layers in self.kinds.items()}

    def context(self, layers: Sequence[LayerSpec], *, drafts: int | None = None) -> SplitContext:
        """Return what the policy may look at for layers that share a lane; `drafts`: of a request in a verify, at most.

        Where they differ in query heads the largest count is taken, as one split serves them all.
        """
        cross = layers[0].attention.cross
        return SplitContext(
            heads=max(layer.attention.heads for layer in layers),
            kv_heads=layers[0].attention.kv_heads,
            v_dim=max(layer.attention.v_dim for layer in layers),
            mla=self.model.mla,
            context_len=self.table.max_context if cross else self.model.context_len,
            multiprocessors=self.multiprocessors,
            head_tile=HEAD_TILE if drafts else self._head_tile([layer.attention for layer in layers]),
            drafts=drafts,
            kv_itemsize=self.model.kv_dtype.itemsize,
        )

    def _head_tile(self, layers: Sequence[AttentionSpec]) -> int:
        if not self.large_tiles:
            return HEAD_TILE
        return shares_tile(layers, mla=self.model.mla, kv_dtype=self.model.kv_dtype)

    def _decode(self, batch: DecodeBatch, max_ranges: int | None) -> DecodePlan:
        own = _Keys(self._rows(batch.rows), batch.seq, behind=1)
        return DecodePlan(
            batch=batch,
            lanes=self._split_lanes(own, batch.encoder, batch.seq.count, None, max_ranges),
            lane_of_layer=dict(self.lane_of_layer),
            epoch=self.pool.epoch,
            multiprocessors=self.multiprocessors,
        )

    def _extend(self, batch: ExtendBatch) -> ExtendPlan:
        rows = self._rows(batch.rows)
        keys = self._keys(_Keys(rows, batch.prefix), batch.encoder)
        new = _new_tokens(batch.prefix, batch.new)
        lanes = []
        for kind, layers in self.kinds.items():
            source = keys[kind.sight.cross]
            lists = (
                self._one_pass(batch, kind.sight)
                if self.one_pass and not kind.sight.cross
                else self._cached(source, kind.sight)
            )
            lanes.append(
                ExtendLane(
                    layout=self._layout(source.rows, layers, lists),
                    write_slots=self._write_slots(rows, layers, new),
                )
            )
        return ExtendPlan(
            batch=batch,
            queries=self._queries(batch.prefix, batch.new, new, batch.mask, depth=None, ordered=True),
            lanes=tuple(lanes),
            lane_of_layer=dict(self.lane_of_layer),
            epoch=self.pool.epoch,
            one_pass=self.one_pass,
        )

    def _verify(self, batch: VerifyBatch, max_ranges: int | None) -> VerifyPlan:
        own = _Keys(self._rows(batch.rows), batch.prefix)
        new = _new_tokens(batch.prefix, batch.drafts)
        queries = self._queries(batch.prefix, batch.drafts, new, batch.mask, depth=batch.depth, ordered=batch.ordered)
        return VerifyPlan(
            batch=batch,
            queries=queries,
            lanes=self._split_lanes(
                own, batch.encoder, new.capacity, new.extent, max_ranges, drafts=max(1, queries.most)
            ),
            lane_of_layer=dict(self.lane_of_layer),
            epoch=self.pool.epoch,
            multiprocessors=self.multiprocessors,
        )

    def _draft(self, batch: DraftBatch, max_ranges: int | None) -> DraftPlan:
        lens = [branch_lens(batch.seq, batch.topk, ahead=i + 1) for i in range(batch.steps - 1)]
        lanes = self._draft_lanes(batch, lens, max_ranges) if lens else []
        branches = batch.rows.repeat_interleave(batch.topk)
        steps = tuple(
            DecodePlan(
                batch=DecodeBatch(rows=branches, seq=mine),
                lanes=tuple(steps_of_lane[i] for steps_of_lane in lanes),
                lane_of_layer=dict(self.lane_of_layer),
                epoch=self.pool.epoch,
                multiprocessors=self.multiprocessors,
            )
            for i, mine in enumerate(lens)
        )
        return DraftPlan(batch=batch, steps=steps, epoch=self.pool.epoch, page_size=self.pool.page_size)

    def _draft_lanes(self, batch: DraftBatch, steps: Sequence[Lens], max_ranges: int | None) -> list[list[Lane]]:
        """Return for every kind of layer a lane for each step. The policy is asked before any list is gathered."""
        rows, cached = self._rows(batch.rows).clamp(0, self.table.max_requests - 1), held(batch.seq)
        cuts = []
        for kind in self.kinds:
            ctx = replace(self.contexts[kind], rows_per_seq=batch.topk)
            cuts.append(DraftCut.of(self.policy, batch.seq, steps, kind.sight, ctx, self.ops.sizes))
        check_scratch(batch, cuts, max_ranges, max_requests=self.max_requests, max_tokens=self.max_tokens)
        lanes = []
        for cut, (kind, layers) in zip(cuts, self.kinds.items(), strict=True):
            lists = self.ops.drafts(
                table=self.table.slots,
                rows=rows,
                cached=cached,
                stride=branch_stride(cached, steps=batch.steps, page_size=self.pool.page_size),
                topk=batch.topk,
                steps=len(steps),
                sight=kind.sight,
                translation=self.pool.translation(layers[0].pool_layer),
                capacity=cut.entries,
            )
            lanes.append(cut.lanes(lists, sight=kind.sight, space=kind.space, kv_heads=kind.kv_heads))
        return lanes

    def _keys(self, own: _Keys, encoder: Encoder | None) -> dict[bool, _Keys]:
        """Return whose keys layers read: those with `cross` an encoder's, the others the requests' own."""
        if encoder is None:
            return {False: own}
        return {False: own, True: _Keys(self._rows(encoder.rows), encoder.lens)}

    def _rows(self, rows: Tensor) -> Int[Tensor, " reqs"]:
        """Return the rows on the device; those that the host did not see may be none of the table's."""
        return rows.to(self.pool.device, torch.int64, non_blocking=True)

    def _split_lanes(
        self,
        own: _Keys,
        encoder: Encoder | None,
        tokens: int,
        written: Extent | None,
        max_ranges: int | None,
        *,
        drafts: int | None = None,
    ) -> tuple[Lane, ...]:
        """Return the lanes whose lists are split. The ranges of all are counted before anything is launched.

        `tokens` new ones are `written` to those positions; None: each request's newest token.
        """
        keys, works = self._keys(own, encoder), []
        for kind, layers in self.kinds.items():
            mine = keys[kind.sight.cross]
            ctx = self.contexts[kind] if drafts is None else self.context(layers, drafts=drafts)
            work = LaneWork.of(
                self.policy,
                replace(ctx, requests=max(1, mine.lens.count)),
                source=self._source(layers),
                rows=mine.rows,
                lens=mine.lens,
                behind=mine.behind,
                sight=kind.sight,
                tokens=tokens,
                written=written,
            )
            if max_ranges is not None and work.ranges > max_ranges:
                raise ValueError(
                    f"batch: may need {work.ranges:,} ranges, the scratch holds {max_ranges}; build the backend with "
                    "a larger max_requests or max_tokens"
                )
            works.append(work)
        return tuple(self.ops.lane(work) for work in works)

    def _source(self, layers: Sequence[LayerSpec]) -> Source:
        return Source(self.table.slots, self.pool.table_space, self.pool.translation(layers[0].pool_layer))

    def _cached(self, keys: _Keys, sight: Sight) -> _Lists:
        """Return the lists of cached tokens, from the first that a query sees."""
        end, (each, total) = held(keys.lens), most_seen(keys.lens, sight, behind=keys.behind)
        capacity = min(total, each * keys.lens.count)
        return _Lists(
            extent=self.ops.extent(query=end - keys.behind, end=end, sight=sight, align=1, capacity=capacity),
            capacity=capacity,
        )

    def _one_pass(self, batch: ExtendBatch, sight: Sight) -> _Lists:
        """Return the lists of cached and new tokens alike, from the tile's border before what the first query sees."""
        query, end = held(batch.prefix), held(together(batch.prefix, batch.new))
        padding = (ONE_PASS_TILE - 1) * batch.new.count if sight.partial else 0
        _, total = most_seen(batch.prefix, sight, behind=0)
        capacity = total + batch.new.bound_total + padding
        align = ONE_PASS_TILE if sight.partial else 1
        extent = self.ops.extent(query=query, end=end, sight=sight, align=align, capacity=capacity)
        return _Lists(extent=extent, capacity=capacity, align=align)

    def _layout(self, rows: Tensor, layers: Sequence[LayerSpec], lists: _Lists) -> KVLayout:
        return KVLayout(
            index=self._index(rows, layers, lists),
            start=lists.extent.start,
            start_visible=lists.extent.start_visible,
            sight=layers[0].attention.sight,
            align=lists.align,
            run=self._run(layers[0], lists),
        )

    def _run(self, layer: LayerSpec, lists: _Lists) -> int:
        """Return how many entries are consecutive slots of the layer's storage, from each multiple of as many on.

        The table's pages are, within one page of a translation, where lists begin at a page's border.
        """
        translation = self.pool.translation(layer.pool_layer)
        pages = self.table.page_size if translation.pages is None else gcd(self.table.page_size, translation.page_size)
        return gcd(pages, lists.align) if layer.attention.sight.partial else pages

    def _write_slots(self, rows: Tensor, layers: Sequence[LayerSpec], new: _Lists) -> Int[Tensor, " tokens"]:
        """Return where new tokens go: under cross-attention nowhere, which is the sink."""
        if layers[0].attention.cross:
            return torch.zeros(new.capacity, dtype=torch.int64, device=self.pool.device)
        return self._index(rows, layers, new).slots

    def _index(self, rows: Tensor, layers: Sequence[LayerSpec], lists: _Lists) -> KVIndex:
        return index_at(self.ops, self._source(layers), rows, lists.extent, capacity=lists.capacity)

    def _queries(
        self, prefix: Lens, new: Lens, lists: _Lists, mask: Mask, *, depth: Tensor | None, ordered: bool
    ) -> Queries:
        indptr, cached = lists.extent.indptr, held(prefix)
        counts = indptr.diff()
        return Queries(
            indptr=indptr,
            positions=positions_behind(cached, indptr, tokens=lists.capacity, depth=depth),
            ordered=ordered,
            most=min(new.bound_max, new.bound_total),
            mask=mask,
            mask_indptr=self.ops.mask_offsets(counts, cached + counts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """Positions of every request, and the most entries that they can be, which is what is allocated."""

    extent: Extent
    capacity: int
    align: int = 1


def _new_tokens(prefix: Lens, new: Lens) -> _Lists:
    """Return the positions of new tokens, right behind the cached ones."""
    start, ends = held(prefix), held(new).long().cumsum(0).clamp(max=new.bound_total)
    indptr = torch.nn.functional.pad(ends, (1, 0)).int()
    return _Lists(extent=Extent(start=start, start_visible=start, indptr=indptr), capacity=new.bound_total)
