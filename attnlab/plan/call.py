"""One decode call: everything that an engine, or whoever looks over its shoulder, needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.checks import contiguous, describe, last_axis_contiguous, own_memory, require, same_device, tensor
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.tiles import HEAD_TILE, head_tiles
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of queries and outputs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeCall:
    """A layer's attention over a lane of a plan, checked when it is made, so that engines need not look again.

    `q` is `[reqs, heads, qk_dim]`, `out` `[reqs, heads, v_dim]`, both fp32, fp16 or bf16; `lse` `[reqs, heads]` fp32 or
    None; `sinks` `[heads]` exactly where the layer has them; `aux` `[reqs, heads, width]` exactly where its modifier
    reads one. `partials` is the scratch, `[partials, group, ...]`, packed. `times` `[programs, head tiles, 3]` int64,
    where given, is filled with multiprocessor, start and end (ns) of every program that is launched: one a segment,
    unless the schedule is persistent.
    """

    layer: int
    spec: AttentionSpec
    view: KVView
    lane: Lane
    partials: Partials
    q: Tensor
    out: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None
    aux: Tensor | None = None
    times: Tensor | None = None

    def __post_init__(self) -> None:
        spec, reqs, device = self.spec, self.lane.splits.reqs, self.view.k.device
        self.view.check_fits(spec)
        require(
            self.lane.schedule.kv_heads == spec.kv_heads,
            f"plan: deals ranges to {self.lane.schedule.kv_heads} KV heads, layer {self.layer} has {spec.kv_heads}",
        )
        lane_device = self.lane.schedule.segments.device
        require(same_device(lane_device, device), f"plan: made on {lane_device}, the pool is on {device}")
        hint = f"the plan has {reqs} requests, layer {self.layer} {spec.heads} heads"
        tensor("q", self.q, shape=(reqs, spec.heads, spec.qk_dim), dtype=FLOATS, device=device, hint=hint)
        last_axis_contiguous("q", self.q)
        tensor("out", self.out, shape=(reqs, spec.heads, spec.v_dim), dtype=FLOATS, device=device, hint=hint)
        last_axis_contiguous("out", self.out)
        if self.lse is not None:
            tensor("lse", self.lse, shape=(reqs, spec.heads), dtype=torch.float32, device=device, hint=hint)
        check_sinks(spec, self.sinks, device)
        check_aux(spec, self.aux, reqs, device, hint)
        check_sight(spec, self.lane.layout, self.layer)
        check_partials(self.partials, self.lane.schedule.partials, spec.group, spec.v_dim, device, hint)
        read = {"the pool's keys": self.view.k, "the pool's values": self.view.v, "sinks": self.sinks, "aux": self.aux}
        own_memory("out", self.out, read)
        if self.lse is not None:
            own_memory("lse", self.lse, {**read, "out": self.out})

    @property
    def head_tile(self) -> int:
        """Query heads of a group that a program packs: the schedule's, but that fp32 queries leave no room for more."""
        wide = compute_dtype(self.q.dtype, self.view.k.dtype) == torch.float32
        return HEAD_TILE if wide else self.lane.schedule.head_tile

    @property
    def head_tiles(self) -> int:
        """How many programs share the query heads of a group."""
        return head_tiles(self.spec.group, self.head_tile)


def check_partials(partials: Partials, count: int, rows: int, v_dim: int, device: torch.device, hint: str) -> None:
    """Raise unless the scratch has as many states as kernels leave there: they find each by its number, packed."""
    states = [
        ("partials.acc", partials.acc, (v_dim,)),
        ("partials.max", partials.max, ()),
        ("partials.sum", partials.sum, ()),
    ]
    for name, x, values in states:
        shape = (count, rows, *values)
        contiguous(name, tensor(name, x, shape=shape, dtype=torch.float32, device=device, hint=hint))


def check_sight(spec: AttentionSpec, layout: KVLayout, layer: int) -> None:
    """Raise unless the lists hold what the layer's queries see."""
    require(
        layout.sight == spec.sight,
        f"plan: its lists are for {layout.sight}, layer {layer} sees {spec.sight}; the plan belongs to another backend",
    )


def check_sinks(spec: AttentionSpec, sinks: Tensor | None, device: torch.device) -> None:
    """Raise unless sinks are there exactly where the layer has them, one logit per head."""
    if (sinks is not None) != spec.has_sinks:
        wanted = f"one logit per head, [{spec.heads}]" if spec.has_sinks else "None, as the layer has no sinks"
        raise ValueError(f"sinks: expected {wanted}, got {describe(sinks)}")
    if sinks is not None:
        last_axis_contiguous("sinks", tensor("sinks", sinks, shape=(spec.heads,), dtype=FLOATS, device=device))


def check_aux(spec: AttentionSpec, aux: Tensor | None, tokens: int, device: torch.device, hint: str) -> None:
    """Raise unless `aux` is there exactly where the layer's modifier reads one, a row per query token."""
    needs_aux = spec.mod is not None and spec.mod.needs_aux
    if (aux is not None) != needs_aux:
        shaped = f"[{tokens}, {spec.heads}, width], which the layer's modifier reads"
        wanted = shaped if needs_aux else "None, as no modifier of the layer reads it"
        raise ValueError(f"aux: expected {wanted}, got {describe(aux)}")
    if aux is not None:
        shape = (tokens, spec.heads, "width")
        require(aux.dim() != 3 or aux.shape[2] >= 1, "aux: expected a width of at least 1, got 0")
        last_axis_contiguous("aux", tensor("aux", aux, shape=shape, dtype=FLOATS, device=device, hint=hint))
