"""Builds plans: the one `match` over the kinds of batch, and the steps that it is made of.

Reference: triton_backend.py, init_forward_metadata. No step waits for the device; what must be bounded is bounded
by host numbers that the lengths carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.batch import DecodeBatch, HostLens, Lens
from attnlab.checks import require, same_device
from attnlab.memory.pool import KVPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.policy import HostPolicy, SplitContext, SplitPolicy, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import SplitPlan, cut_lens
from attnlab.spec import LayerSpec, ModelSpec


@runtime_checkable
class PlanOps(Protocol):
    """The device functions that planning needs; each engine brings its own."""

    def gather(
        self,
        *,
        table: Int[Tensor, "max_requests max_context"],
        rows: Int[Tensor, " reqs"],
        start: Int[Tensor, " reqs"],
        indptr: Int[Tensor, " reqs_1"],
        capacity: int,
    ) -> Int[Tensor, " capacity"]:
        """Return int64 slots: entry `indptr[r] + j` is `table[rows[r], start[r] + j]`. The tail is 0, the sink."""

    def sizes(self, policy: SplitPolicy, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return the policy's range sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What plans are made from, for as long as a server runs; `build` makes one."""

    model: ModelSpec
    pool: KVPool
    table: RequestTable
    policy: SplitPolicy | HostPolicy
    ops: PlanOps
    multiprocessors: int | None

    def build(self, batch: DecodeBatch, *, max_ranges: int | None = None) -> DecodePlan:
        """Return the plan of a step. Lengths, rows and ranges are checked before any list is gathered.

        `max_ranges` is what the scratch holds, where the plan is to be run: a batch that may need more is refused.
        """
        match batch:
            case DecodeBatch():
                return self._decode(batch, max_ranges)
            case _:
                assert_never(batch)

    def kinds(self) -> dict[Kind, list[LayerSpec]]:
        """Return the layers that share a lane: same KV heads, same visible keys, same id space."""
        kinds: dict[Kind, list[LayerSpec]] = {}
        for layer in self.model.layers:
            a = layer.attention
            kinds.setdefault((a.kv_heads, a.window, a.chunk, self.pool.space(layer.pool_layer)), []).append(layer)
        return kinds

    def context(self, layers: Sequence[LayerSpec]) -> SplitContext:
        """Return what the policy may look at for layers that share a lane.

        Where they differ in query heads the largest count is taken, as one split serves them all.
        """
        return SplitContext(
            heads=max(layer.attention.heads for layer in layers),
            kv_heads=layers[0].attention.kv_heads,
            v_dim=max(layer.attention.v_dim for layer in layers),
            mla=self.model.mla,
            context_len=self.model.context_len,
            multiprocessors=self.multiprocessors,
        )

    def _decode(self, batch: DecodeBatch, max_ranges: int | None) -> DecodePlan:
        lens, kinds = batch.seq, self.kinds()
        rows = self._rows(batch)
        for layers in kinds.values():
            _refuse_partial_sight(layers)
        indptr = _offsets(lens)
        live = indptr.diff()
        cuts = [cut_lens(self.policy, lens, live, self.context(layers), self.ops.sizes) for layers in kinds.values()]
        for splits in cuts:
            require(
                max_ranges is None or splits.capacity <= max_ranges,
                f"batch: may need {splits.capacity:,} ranges, the scratch holds {max_ranges}; build the backend with "
                "a larger max_requests or max_tokens",
            )
        pairs = zip(kinds.values(), cuts, strict=True)
        return DecodePlan(
            batch=batch,
            lanes=tuple(self._lane(layers[0], rows, indptr, live, splits, lens) for layers, splits in pairs),
            lane_of_layer={layer.index: i for i, layers in enumerate(kinds.values()) for layer in layers},
            epoch=self.pool.epoch,
            multiprocessors=self.multiprocessors,
        )

    def _rows(self, batch: DecodeBatch) -> Int[Tensor, " reqs"]:
        """Return the rows on the device. Rows on the host are checked first, those on the device kept in bounds."""
        lens, table = batch.seq, self.table
        require(
            lens.bound_max <= min(table.max_context, self.model.context_len),
            f"seq: a request of up to {lens.bound_max:,} tokens, but the table has {table.max_context:,} columns "
            f"and the model a context of {self.model.context_len:,}",
        )
        require(
            same_device(lens.device.device, self.pool.device),
            f"seq: expected lengths on {self.pool.device} like the pool, got {lens.device.device}",
        )
        if batch.rows.device.type == "cpu":
            table.check_holds(batch.rows.tolist(), lens.values if isinstance(lens, HostLens) else None)
        return batch.rows.to(self.pool.device, torch.int64, non_blocking=True).clamp(0, table.max_requests - 1)

    def _lane(
        self, layer: LayerSpec, rows: Tensor, indptr: Tensor, live: Tensor, splits: SplitPlan, lens: Lens
    ) -> Lane:
        start = torch.zeros_like(live)
        slots = self.ops.gather(
            table=self.table.slots, rows=rows, start=start, indptr=indptr, capacity=lens.bound_total
        )
        translated = self.pool.slots_for(layer.pool_layer, slots)
        index = KVIndex(indptr=indptr, slots=translated, space=self.pool.space(layer.pool_layer))
        last = (live.long() - 1).clamp(min=0)
        newest = torch.where(live > 0, self.table.slots[rows, last].long(), 0)
        return Lane(
            layout=KVLayout(index=index, start=start, window=None),
            splits=splits,
            schedule=Schedule.one_range_a_program(splits, kv_heads=layer.attention.kv_heads),
            write_slots=self.pool.slots_for(layer.pool_layer, newest),
        )


Kind = tuple[int, int | None, int | None, str]
"""KV heads, window, chunk, id space."""


def _refuse_partial_sight(layers: Sequence[LayerSpec]) -> None:
    attention, numbers = layers[0].attention, [layer.index for layer in layers]
    for name, value in (("window", attention.window), ("chunk", attention.chunk)):
        require(
            value is None,
            f"layers {', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''} have {name} {value}: "
            "plans for layers that see only part of the keys are not built yet; choose layers with full attention",
            NotImplementedError,
        )


def _offsets(lens: Lens) -> Int[Tensor, " reqs_1"]:
    """Return the offsets of the lengths, held to what the host was told of them, so that no buffer is overrun."""
    each = lens.device.clamp(0, lens.bound_max).long()
    return torch.nn.functional.pad(each.cumsum(0).clamp(max=lens.bound_total), (1, 0)).int()
