"""One decode call: everything that an engine, or whoever looks over its shoulder, needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnlab.arguments import Arguments, Names
from attnlab.checks import (
    contiguous,
    describe,
    last_axis_contiguous,
    own_memory,
    require,
    same_device,
    storages,
    tensor,
)
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.tiles import HEAD_TILE, head_tiles
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of queries and outputs."""


CALL = Names(
    pointers=("q_ptr", "aux_ptr", "out_ptr", "lse_ptr", "sinks_ptr", "times_ptr"),
    numbers=(
        "scale",
        "softcap",
        "q_stride_token",
        "q_stride_head",
        "aux_stride_token",
        "aux_stride_head",
        "aux_width",
        "out_stride_token",
        "out_stride_head",
        "lse_stride_token",
        "lse_stride_head",
    ),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeCall:
    """A layer's attention over a lane of a plan, checked when it is made, so that engines need not look again.

    `q` is `[reqs, heads, qk_dim]`, `out` `[reqs, heads, v_dim]`, both fp32, fp16 or bf16; `lse` `[reqs, heads]` fp32 or
    None; `sinks` `[heads]` exactly where the layer has them; `aux` `[reqs, heads, width]` exactly where its modifier
    reads one. `partials` is the scratch, `[partials, group, ...]`, packed; `keeps`: what is a whole answer leaves its
    state there, too, which nobody needs to merge (engine "eager" leaves all in any case). `times` `[programs, head
    tiles, 3]` int64, where given, is filled with multiprocessor, start and end (ns) of every program that is launched:
    one a segment, unless the schedule is persistent.
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
    keeps: bool = False

    def __post_init__(self) -> None:
        if not self._looks_right():  # calls that are right are many: words only where they are needed
            self._check()

    def _looks_right(self) -> bool:
        """Whether a short look finds nothing wrong. It says no where it does not look: to aux, and odd strides."""
        spec, view, lane, partials, q = self.spec, self.view, self.lane, self.partials, self.q
        reqs, schedule, device = lane.splits.reqs, lane.schedule, view.k.device
        return (
            view.dims == (spec.kv_heads, spec.qk_dim, spec.v_dim)
            and schedule.kv_heads == spec.kv_heads
            and schedule.segments.device == device
            and (lane.layout.sight is (sight := spec.sight) or lane.layout.sight == sight)
            and partials.packed
            and partials.acc.shape == (schedule.partials, spec.group, spec.v_dim)
            and partials.acc.device == device
            and rows_look_right(q, (reqs, spec.heads, spec.qk_dim), device)
            and sinks_look_right(spec, self.sinks, device)
            and answers_look_right(
                self.out,
                self.lse,
                (reqs, spec.heads, spec.v_dim),
                device,
                (*view.memory, *storages(q, self.sinks)),
            )
            and no_aux(spec, self.aux)
        )

    def _check(self) -> None:
        """Raise unless all is right."""
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
        # Some rows are answered while queries of others are still to be read.
        read: dict[str, Tensor | None] = {"the pool's keys": self.view.k, "the pool's values": self.view.v}
        read |= {"q": self.q, "sinks": self.sinks, "aux": self.aux}
        own_memory("out", self.out, read)
        if self.lse is not None:
            own_memory("lse", self.lse, {**read, "out": self.out})

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of what the call itself brings. Where nothing is read any tensor stands."""
        spec, q, out = self.spec, self.q, self.out
        aux = q if self.aux is None else self.aux
        lse = q if self.lse is None else self.lse
        sinks = q if self.sinks is None else self.sinks
        q_token, q_head, _ = q.stride()
        lse_strides = lse.stride()[:2]
        aux_token, aux_head, _ = aux.stride()
        out_token, out_head, _ = out.stride()
        softcap = 1.0 if spec.softcap is None else spec.softcap
        numbers = (spec.scale * self.view.k_scale, softcap, q_token, q_head, aux_token, aux_head, aux.shape[2])
        return Arguments(CALL, (q, aux, out, lse, sinks, self.times), (*numbers, out_token, out_head, *lse_strides))

    @property
    def head_tile(self) -> int:
        """Query heads of a group that a program packs: the schedule's, but that fp32 queries leave no room for more."""
        tile = self.lane.schedule.head_tile
        wide = tile != HEAD_TILE and compute_dtype(self.q.dtype, self.view.k.dtype) == torch.float32
        return HEAD_TILE if wide else tile

    @property
    def head_tiles(self) -> int:
        """How many programs share the query heads of a group."""
        return head_tiles(self.spec.group, self.head_tile)


def rows_look_right(x: object, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether a short look at what is read row by row finds nothing wrong."""
    return (
        isinstance(x, Tensor) and x.shape == shape and x.dtype in FLOATS and x.device == device and x.stride()[-1] == 1
    )


def answers_look_right(
    out: object, lse: object, shape: tuple[int, int, int], device: torch.device, read: Sequence[int]
) -> bool:
    """Whether what is written is shaped as it must be, packed, and apart: it is no part of the storages `read`."""
    return (
        isinstance(out, Tensor)
        and out.shape == shape
        and out.dtype in FLOATS
        and out.device == device
        and out.is_contiguous()
        and (memory := out.untyped_storage().data_ptr()) not in read
        and (
            lse is None
            or isinstance(lse, Tensor)
            and lse.shape == shape[:2]
            and lse.dtype == torch.float32
            and lse.device == device
            and lse.is_contiguous()
            and (of_lse := lse.untyped_storage().data_ptr()) not in read
            and of_lse != memory
        )
    )


def sinks_look_right(spec: AttentionSpec, sinks: Tensor | None, device: torch.device) -> bool:
    """Whether sinks are there exactly where the layer has them, one logit per head."""
    if sinks is None:
        return not spec.has_sinks
    return spec.has_sinks and rows_look_right(sinks, (spec.heads,), device)


def no_aux(spec: AttentionSpec, aux: Tensor | None) -> bool:
    """Whether there is no aux, and none is needed: a short look does not look at any."""
    return aux is None and not (spec.mod is not None and spec.mod.needs_aux)


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
