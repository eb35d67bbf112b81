"""One extend or verify call: several queries a request, over cached keys and those that come with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attnlab.arguments import Arguments, Names
from attnlab.checks import last_axis_contiguous, one_of, own_memory, require, same_device, storages, tensor
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.call import (
    FLOATS,
    answers_look_right,
    check_aux,
    check_partials,
    check_sight,
    check_sinks,
    no_aux,
    rows_look_right,
    sinks_look_right,
)
from attnlab.plan.plans import ExtendLane, Lane, Queries
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

Parts = Literal["all", "cached", "new"]
SEVERAL = Names(
    pointers=("q_ptr", "k_new_ptr", "v_new_ptr", "out_ptr", "lse_ptr", "sinks_ptr", "aux_ptr"),
    numbers=(
        "scale",
        "scale_cached",
        "softcap",
        "q_stride_token",
        "q_stride_head",
        "k_new_stride_token",
        "k_new_stride_head",
        "v_new_stride_token",
        "v_new_stride_head",
        "out_stride_token",
        "out_stride_head",
        "lse_stride_token",
        "lse_stride_head",
        "aux_stride_token",
        "aux_stride_head",
        "aux_width",
    ),
    free=("rows", "window", "chunk"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtendCall:
    """A layer's attention for the queries of a plan, checked when it is made: engines need not look again.

    `q` is `[tokens, heads, qk_dim]`, `k` and `v` of the new tokens `[tokens, kv_heads, dim]`, `out` `[tokens, heads,
    v_dim]`, all fp32, fp16 or bf16; `lse` `[tokens, heads]` fp32 or None; `sinks` `[heads]` exactly where the layer has
    them; `aux` `[tokens, heads, width]` exactly where its modifier reads one. Under MLA `v` is `k`'s first columns.
    `one_pass`: the lists hold the new tokens too, which then are read from the pool. `parts` leaves the cached or the
    new keys out, for results that are merged by their LSE elsewhere; positions stay the same. A part needs no sink,
    which joins once, after the merge; one that is given joins the part. `k` and `v` may be None where the call does not
    read them. `batch_invariant`: no tile may depend on what else is in the batch.
    """

    layer: int
    spec: AttentionSpec
    view: KVView
    lane: ExtendLane
    queries: Queries
    one_pass: bool
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    out: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None
    aux: Tensor | None = None
    parts: Parts = "all"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        one_of("parts", self.parts, ("all", "cached", "new"))
        require(self.parts == "all" or not self.one_pass, "parts: one pass reads one list, which cannot be told apart")
        reads_new = self.parts != "cached" and not self.one_pass
        takes_sinks = self.parts == "all" or self.spec.cross or self.sinks is not None
        if not _looks_right(self, reads_new=reads_new, takes_sinks=takes_sinks):  # words only where they are needed
            _check(self, reads_new=reads_new, takes_sinks=takes_sinks)

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of what the call itself brings."""
        return _arguments(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifyCall:
    """A layer's attention for drafts, over cached keys that are split, then over the drafts themselves.

    Tensors are those of `ExtendCall`; `k` and `v` are None where an encoder's keys are read, and no drafts. `partials`
    is the scratch: a row per partial, of `queries.most x group` states; `keeps` as in `DecodeCall`. `batch_invariant`:
    no tile may depend on what else is in the batch.
    """

    layer: int
    spec: AttentionSpec
    view: KVView
    lane: Lane
    queries: Queries
    partials: Partials
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    out: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None
    aux: Tensor | None = None
    batch_invariant: bool = False
    keeps: bool = False

    def __post_init__(self) -> None:
        if not self._looks_right():  # calls that are right are many: words only where they are needed
            self._check()

    def _looks_right(self) -> bool:
        """Whether a short look finds nothing wrong."""
        spec, partials, schedule = self.spec, self.partials, self.lane.schedule
        return (
            schedule.kv_heads == spec.kv_heads
            and _looks_right(self, reads_new=self.k is not None, takes_sinks=True)
            and partials.packed
            and partials.acc.shape == (schedule.partials, self.queries.most * spec.group, spec.v_dim)
            and partials.acc.device == self.view.k.device
        )

    def _check(self) -> None:
        """Raise unless all is right."""
        kv_heads = self.lane.schedule.kv_heads
        require(
            kv_heads == self.spec.kv_heads,
            f"plan: deals ranges to {kv_heads} KV heads, layer {self.layer} has {self.spec.kv_heads}",
        )
        _check(self, reads_new=self.k is not None, takes_sinks=True)
        count, rows = self.lane.schedule.partials, self.queries.most * self.spec.group
        hint = (
            f"the plan has {count} partials of {self.queries.most} drafts, layer {self.layer} {self.spec.heads} heads"
        )
        check_partials(self.partials, count, rows, self.spec.v_dim, self.view.k.device, hint)

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of what the call itself brings."""
        return _arguments(self)


def _looks_right(call: ExtendCall | VerifyCall, *, reads_new: bool, takes_sinks: bool) -> bool:
    """Whether a short look finds nothing wrong with tensors. It says no where it does not look: as in decode calls."""
    spec, view, sight = call.spec, call.view, call.lane.layout.sight
    tokens, device, q, k, v = call.queries.positions.shape[0], view.k.device, call.q, call.k, call.v
    return (
        view.dims == (spec.kv_heads, spec.qk_dim, spec.v_dim)
        and call.queries.indptr.device == device
        and (sight is spec.sight or sight == spec.sight)
        and rows_look_right(q, (tokens, spec.heads, spec.qk_dim), device)
        and (
            k is v is None
            and not reads_new
            or k is not None
            and v is not None
            and rows_look_right(k, (tokens, spec.kv_heads, spec.qk_dim), device)
            and rows_look_right(v, (tokens, spec.kv_heads, spec.v_dim), device)
            and k.dtype == v.dtype == q.dtype
        )
        and (sinks_look_right(spec, call.sinks, device) if takes_sinks else call.sinks is None)
        and answers_look_right(
            call.out,
            call.lse,
            (tokens, spec.heads, spec.v_dim),
            device,
            (*view.memory, *storages(q, k, v, call.sinks)),
        )
        and no_aux(spec, call.aux)
    )


def _arguments(call: ExtendCall | VerifyCall) -> Arguments:
    """Return the arguments of a call; where nothing is read, or written, its queries stand."""
    spec, view, sight, q = call.spec, call.view, call.lane.layout.sight, call.q
    k, v, lse, sinks, aux = (q if x is None else x for x in (call.k, call.v, call.lse, call.sinks, call.aux))
    scales = spec.scale, spec.scale * view.k_scale, 1.0 if spec.softcap is None else spec.softcap
    strides = [step for x in (q, k, v, call.out, lse, aux) for step in x.stride()[:2]]
    rows = call.queries.most * spec.group
    return Arguments(
        SEVERAL,
        (q, k, v, call.out, lse, sinks, aux),
        (*scales, *strides, aux.shape[2]),
        (rows, sight.window or 0, sight.chunk or 0),
    )


def _check(call: ExtendCall | VerifyCall, *, reads_new: bool, takes_sinks: bool) -> None:
    """Raise unless all tensors fit the plan, the layer and each other, and what is written is read by nobody."""
    spec, tokens, device = call.spec, call.queries.positions.shape[0], call.view.k.device
    call.view.check_fits(spec)
    there = call.queries.indptr.device
    require(same_device(there, device), f"plan: made on {there}, the pool is on {device}")
    hint = f"the plan has {tokens} query tokens, layer {call.layer} {spec.heads} heads and {spec.kv_heads} KV heads"
    shapes: dict[str, tuple[Tensor | None, int, int]] = {
        "q": (call.q, spec.heads, spec.qk_dim),
        "out": (call.out, spec.heads, spec.v_dim),
    }
    for name, x, dim in (("k", call.k, spec.qk_dim), ("v", call.v, spec.v_dim)):
        if reads_new or x is not None:
            shapes[name] = (x, spec.kv_heads, dim)
    for name, (x, heads, dim) in shapes.items():
        last_axis_contiguous(name, tensor(name, x, shape=(tokens, heads, dim), dtype=FLOATS, device=device, hint=hint))
    if call.k is not None and call.v is not None:
        # What was read back of a pool may need to be wider than the queries.
        allowed = (call.q.dtype, compute_dtype(call.q.dtype, call.view.k.dtype))
        same = call.k.dtype == call.v.dtype and call.k.dtype in allowed
        got = f"{call.k.dtype} and {call.v.dtype}"
        require(same, f"k, v: expected the dtype of q, {call.q.dtype}, got {got}", TypeError)
    if call.lse is not None:
        tensor("lse", call.lse, shape=(tokens, spec.heads), dtype=torch.float32, device=device, hint=hint)
    if takes_sinks:
        check_sinks(spec, call.sinks, device)
    check_aux(spec, call.aux, tokens, device, hint)
    check_sight(spec, call.lane.layout, call.layer)
    read: dict[str, Tensor | None] = {"the pool's keys": call.view.k, "the pool's values": call.view.v}
    read |= {"q": call.q, "k": call.k, "v": call.v, "sinks": call.sinks, "aux": call.aux}
    own_memory("out", call.out, read)
    if call.lse is not None:
        own_memory("lse", call.lse, {**read, "out": call.out})
