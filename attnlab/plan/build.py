"""Builds plans: the one `match` over the kinds of batch, and the steps that it is made of.

Reference: triton_backend.py, init_forward_metadata. No step waits for the device; what must be bounded is bounded
by host numbers that the lengths carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, assert_never, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.batch import DecodeBatch, DeviceLens, HostLens, Lens
from attnlab.checks import require, same_device
from attnlab.memory.pool import KVPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.policy import HostPolicy, SplitContext, SplitPolicy, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import SplitPlan, offsets_of, splits_of_host, splits_of_sizes
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec


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

    def build(self, batch: DecodeBatch) -> DecodePlan:
        """Return the plan of a step. Raises before anything is allocated where the batch cannot be served."""
        match batch:
            case DecodeBatch():
                return self._decode(batch)
            case _:
                assert_never(batch)

    def context(self, attention: AttentionSpec) -> SplitContext:
        """Return what the policy may look at for layers of this kind.

        Where layers differ in query heads the largest count is taken, as one split serves them all.
        """
        heads = max(layer.attention.heads for layer in self.model.layers)
        return SplitContext(
            heads=heads,
            kv_heads=attention.kv_heads,
            v_dim=attention.v_dim,
            mla=self.model.mla,
            context_len=self.model.context_len,
            multiprocessors=self.multiprocessors,
        )

    def _decode(self, batch: DecodeBatch) -> DecodePlan:
        lens, rows = batch.seq, self._rows(batch)
        kinds: dict[tuple[int, int | None, int | None], list[LayerSpec]] = {}
        for layer in self.model.layers:
            key = (layer.attention.kv_heads, layer.attention.window, layer.attention.chunk)
            kinds.setdefault(key, []).append(layer)
        lanes = tuple(self._lane(layers[0], rows, lens) for layers in kinds.values())
        lane_of = {x.index: i for i, layers in enumerate(kinds.values()) for x in layers}
        return DecodePlan(batch=batch, lanes=lanes, lane_of_layer=lane_of, epoch=self.pool.epoch)

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
        if batch.rows.device.type == "cpu" and isinstance(lens, HostLens):
            table.check_holds(batch.rows.tolist(), lens.values)
        return batch.rows.to(self.pool.device, torch.int64, non_blocking=True).clamp(0, table.max_requests - 1)

    def _lane(self, layer: LayerSpec, rows: Int[Tensor, " reqs"], lens: Lens) -> Lane:
        attention = layer.attention
        for name in ("window", "chunk"):
            value = getattr(attention, name)
            require(
                value is None,
                f"layer {layer.index} has {name} {value}: plans for layers that see only part of the keys are not "
                "built yet; choose layers with full attention",
                NotImplementedError,
            )
        indptr = _offsets(lens)
        live = indptr.diff()
        layout = self._full_layout(layer.pool_layer, rows, indptr, lens.bound_total)
        splits = self._splits(attention, live, lens)
        last = (live.long() - 1).clamp(min=0)
        newest = torch.where(live > 0, self.table.slots[rows, last].long(), 0)
        return Lane(
            layout=layout,
            splits=splits,
            schedule=Schedule.one_range_a_program(splits, kv_heads=attention.kv_heads),
            write_slots=self.pool.slots_for(layer.pool_layer, newest),
        )

    def _full_layout(self, pool_layer: int, rows: Tensor, indptr: Tensor, total: int) -> KVLayout:
        start = torch.zeros(indptr.shape[0] - 1, dtype=torch.int32, device=indptr.device)
        slots = self.ops.gather(table=self.table.slots, rows=rows, start=start, indptr=indptr, capacity=total)
        index = KVIndex(indptr=indptr, slots=self.pool.slots_for(pool_layer, slots), space="pool")
        return KVLayout.full(index)

    def _splits(self, attention: AttentionSpec, live: Tensor, lens: Lens) -> SplitPlan:
        ctx, policy = self.context(attention), self.policy
        if isinstance(policy, HostPolicy):
            if not isinstance(lens, HostLens):
                raise TypeError(
                    f"policy {policy.name!r} is written in plain Python and needs lengths that the host knows "
                    f"(HostLens), got {type(lens).__name__}"
                )
            return splits_of_host(policy, lens.values, ctx, live.device)
        bounds = policy.bounds(bound_max=lens.bound_max, ctx=ctx)
        sizes = self.ops.sizes(policy, live, ctx)
        return splits_of_sizes(sizes, live, policy=policy.label, bounds=bounds, total=lens.bound_total)


def _offsets(lens: Lens) -> Int[Tensor, " reqs_1"]:
    """Return the offsets of the lengths, held to what the host was promised, so that no buffer is overrun."""
    if isinstance(lens, DeviceLens):
        each = lens.device.clamp(0, lens.bound_each).long()
        return torch.nn.functional.pad(each.cumsum(0).clamp(max=lens.bound_total), (1, 0)).int()
    return offsets_of(lens.device)
