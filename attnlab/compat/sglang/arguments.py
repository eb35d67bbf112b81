"""What arguments of the original's functions become: engines, views, lists, attention specs, masks.

All is checked here under the caller's names, before anything is launched. Nothing waits for the device: sizes come from
shapes, and what only the device knows is held to them. On a CPU, where looking costs nothing, it is refused instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnlab.checks import describe, last_axis_contiguous, member, number, own_memory, positive, require, tensor, whole
from attnlab.compat.sglang.mods import modifier
from attnlab.compat.sglang.values import check_lengths, check_listed, check_offsets, held
from attnlab.engines import Engine, engine_for
from attnlab.mask import CAUSAL, CustomMask, Mask
from attnlab.memory.pool import KVView, check_storage
from attnlab.plan.call import FLOATS, check_sinks
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.policy import MIN_BLOCK, SplitBounds, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import splits_of_sizes
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

INTEGERS = (torch.int32, torch.int64)
MAX_INT32 = 2**31 - 1


def engine_on(engine: str | Engine, device: torch.device) -> Engine:
    """Return the engine of that name on a device, made once, or the given one."""
    return _engine(engine, device) if isinstance(engine, str) else engine


@cache
def _engine(name: str, device: torch.device) -> Engine:
    return engine_for(name, device)


# --- Buffers and lists ------------------------------------------------------------------------------------------


def kv_view(
    k_buffer: Tensor,
    v_buffer: Tensor,
    *,
    k_scale: float | None,
    v_scale: float | None,
    page_size: int = 1,
    has_mla: bool = False,
) -> KVView:
    """Return the buffers of a layer as engines read them; scales that are None are 1.

    Of a page-major buffer `page_size` is that of its shape, or 1; beside a buffer by slot it changes nothing.
    """
    for name, x in (("k_buffer", k_buffer), ("v_buffer", v_buffer)):
        if not isinstance(x, Tensor) or x.dim() not in (3, 4):
            wanted = "[slots, kv_heads, dim] or [pages, page_size, kv_heads, dim]"
            raise TypeError(f"{name}: expected {wanted}, got {describe(x)}")
        check_storage(name, x.dtype)
        last_axis_contiguous(name, x)
    positive("page_size", page_size)
    require(
        k_buffer.dim() == 3 or page_size in (1, k_buffer.shape[1]),
        f"page_size: expected {k_buffer.shape[1]} as k_buffer {list(k_buffer.shape)} has it, got {page_size}",
    )
    same = k_buffer.shape[:-1] == v_buffer.shape[:-1] and k_buffer.dtype == v_buffer.dtype
    require(
        same and k_buffer.device == v_buffer.device,
        f"v_buffer: expected slots, heads, dtype and device of k_buffer, {describe(k_buffer)}, got "
        f"{describe(v_buffer)}",
    )
    in_k = k_buffer.data_ptr() == v_buffer.data_ptr() and k_buffer.stride() == v_buffer.stride()
    require(
        not has_mla or (in_k and v_buffer.shape[-1] <= k_buffer.shape[-1]),
        "has_mla: expected v_buffer to be a view of k_buffer's first columns, which then are read once; pass "
        "k_buffer[..., :v_dim], or has_mla=False",
    )
    return KVView(
        k=k_buffer,
        v=v_buffer,
        k_scale=_scale("k_scale", k_scale),
        v_scale=_scale("v_scale", v_scale),
        v_in_k=bool(has_mla),
    )


def _scale(name: str, value: float | None) -> float:
    return 1.0 if value is None else number(name, value, positive=True)


def entries(name: str, x: Tensor | None, *, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the first `count` entries of an integer list, contiguous, as `dtype`; buffers may be longer."""
    given = tensor(name, x, shape=["entries"], dtype=INTEGERS, device=device)
    require(given.shape[0] >= count, f"{name}: expected at least {count} entries, got {given.shape[0]}")
    mine = given[:count]
    if mine.dtype == torch.int64 and dtype == torch.int32:  # what 32 bits do not hold must not change its sign
        mine = mine.clamp(min=-MAX_INT32, max=MAX_INT32)
    return mine.to(dtype).contiguous()


def kv_index(
    kv_indptr: Tensor, kv_indices: Tensor, *, reqs: int, device: torch.device, view: KVView | None = None
) -> KVIndex:
    """Return the lists of `reqs` requests. int64 slots are taken as they lie there, int32 ones are copied.

    On a CPU, ValueError where offsets leave the slots, or slots the `view` that they are read from. On a GPU offsets
    that leave the slots are held to them: a list then is shorter, and nothing is read outside.
    """
    slots = tensor("kv_indices", kv_indices, shape=["slots"], dtype=INTEGERS, device=device).long().contiguous()
    indptr = entries("kv_indptr", kv_indptr, count=reqs + 1, device=device, dtype=torch.int32)
    check_offsets("kv_indptr", indptr, end=slots.shape[0], of="kv_indices")
    if view is not None:
        check_listed("kv_indices", slots, indptr, count=view.num_slots, of="slots of k_buffer")
    return KVIndex(indptr=held(indptr, min(slots.shape[0], MAX_INT32)), slots=slots, space="pool")


def query_offsets(of: str, qo_indptr: Tensor, *, reqs: int, tokens: int, device: torch.device) -> Tensor:
    """Return where each request's rows of the queries `of` begin, int32 `[reqs + 1]`, checked and held as lists are."""
    indptr = entries("qo_indptr", qo_indptr, count=reqs + 1, device=device, dtype=torch.int32)
    check_offsets("qo_indptr", indptr, end=tokens, of=of)
    return held(indptr, tokens)


def split_lane(layout: KVLayout, counts: Tensor, *, most: int, kv_heads: int) -> Lane:
    """Return lists that are cut into `counts` splits each, at the original's borders: multiples of 32 keys.

    Counts are held to `most`, so that no key is lost; a request with keys has at least one split.
    """
    lens = layout.index.indptr.diff()
    splits = splits_of_sizes(
        SplitSizes.of_counts(lens, counts.clamp(max=most)),
        lens,
        policy="as given",
        bounds=SplitBounds(max_ranges=most, min_size=MIN_BLOCK),
        total=layout.index.slots.shape[0],
    )
    return Lane(
        layout=layout,
        splits=splits,
        schedule=Schedule.one_range_a_program(splits, kv_heads=kv_heads),
        write_slots=layout.index.slots[:0],  # nothing is stored
    )


def new_partials(lane: Lane, spec: AttentionSpec, *, queries: int = 1) -> Partials:
    """Return scratch for a lane, of up to `queries` query tokens a request."""
    shape, device = (lane.schedule.partials, spec.group * queries), lane.schedule.segments.device
    return Partials(
        acc=torch.empty(*shape, spec.v_dim, dtype=torch.float32, device=device),
        max=torch.empty(shape, dtype=torch.float32, device=device),
        sum=torch.empty(shape, dtype=torch.float32, device=device),
    )


def check_rank(dcp_size: int, dcp_rank: int) -> None:
    """Raise unless `dcp_rank` is one of so many."""
    member("dcp_rank", dcp_rank, positive("dcp_size", dcp_size), of=f"a group of {dcp_size}")


# --- Attention --------------------------------------------------------------------------------------------------


def attention_of(
    name: str,
    q: Tensor,
    view: KVView,
    *,
    engine: Engine,
    sm_scale: float | None,
    logit_cap: float | None = None,
    xai_temperature_len: int | None = None,
    sinks: Tensor | None = None,
    score_mod: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    causal: bool = True,
    sliding_window_size: int | None = None,
) -> tuple[AttentionSpec, Tensor | None]:
    """Return the attention of queries `[tokens, heads, qk_dim]` over a view, and the tensor that its modifier reads.

    The queries are checked as the argument `name`. `sm_scale` None is one over the root of qk_dim. A cap or temperature
    length that is not positive is none. The window's number is a radius, the visible keys minus one: W becomes our
    window of W + 1; None, -1 and 0 see all.
    """
    engine.check_storage(view.k.dtype)
    kv_heads, qk_dim, device = view.kv_heads, view.k.shape[-1], view.k.device
    tensor(name, q, shape=("tokens", "heads", qk_dim), dtype=FLOATS, device=device, hint="as the keys have it")
    last_axis_contiguous(name, q)
    heads = q.shape[1]
    require(heads % kv_heads == 0, f"{name}: expected a multiple of the {kv_heads} KV heads, got {heads} heads")
    mod, aux = modifier(score_mod, aux_tensors, q=q, engine=engine)
    cap = 0.0 if logit_cap is None else number("logit_cap", logit_cap, positive=False)
    temperature = -1 if xai_temperature_len is None else whole("xai_temperature_len", xai_temperature_len)
    require(temperature != 1, "xai_temperature_len: expected more than 1 or -1, got 1, whose logarithm is 0")
    radius = -1 if sliding_window_size is None else whole("sliding_window_size", sliding_window_size)
    spec = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=view.v.shape[-1],
        scale=qk_dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale, positive=False),
        causal=bool(causal),
        window=min(radius + 1, MAX_INT32) if radius > 0 else None,
        softcap=cap if cap > 0 else None,
        temperature_len=temperature if temperature > 0 else None,
        mod=mod,
        has_sinks=sinks is not None,
    )
    check_sinks(spec, sinks, device)
    return spec, aux


def output_rows(name: str, out: Tensor, q: Tensor, view: KVView) -> Tensor:
    """Return `out` if it takes `[tokens, heads, v_dim]` and lies in memory that nothing else of the call does."""
    tensor(name, out, shape=(q.shape[0], q.shape[1], view.v.shape[-1]), dtype=FLOATS, device=q.device)
    own_memory(name, out, {"k_buffer": view.k, "v_buffer": view.v, "the queries": q})
    return last_axis_contiguous(name, out)


def mask_of(
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    *,
    reqs: int,
    cached_visible: bool,
    device: torch.device,
) -> tuple[Mask, Tensor]:
    """Return the mask, and where each request's bytes begin (int64 `[reqs + 1]`, the last entry unread)."""
    if custom_mask is None:
        return CAUSAL, torch.zeros(reqs + 1, dtype=torch.int64, device=device)
    tensor("custom_mask", custom_mask, shape=["pairs"], dtype=(torch.uint8, torch.bool), device=device)
    require(mask_indptr is not None, "mask_indptr: expected where each request's bytes of custom_mask begin, got None")
    starts = entries("mask_indptr", mask_indptr, count=reqs, device=device, dtype=torch.int64)
    check_lengths("mask_indptr", starts)
    starts = starts.clamp(min=0)  # a start beyond the mask hides what it would show; one in front of it would be read
    bits = custom_mask.contiguous().view(torch.uint8)
    return CustomMask(bits=bits, cached_visible=cached_visible), torch.nn.functional.pad(starts, (0, 1))
