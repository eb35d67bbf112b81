"""`extend_attention_fwd` and its one-pass sibling: several queries a request, over cached keys and new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.checks import last_axis_contiguous, require, tensor, whole
from attnlab.compat.sglang.arguments import (
    MAX_INT32,
    attention_of,
    engine_on,
    entries,
    kv_index,
    kv_view,
    mask_of,
    output_rows,
    query_offsets,
)
from attnlab.compat.sglang.values import check_lengths, check_offsets, held
from attnlab.engines import Engine
from attnlab.mask import Mask
from attnlab.plan.extend_call import ExtendCall
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout, positions_behind
from attnlab.plan.plans import ExtendLane, Queries
from attnlab.spec import AttentionSpec


@torch.no_grad()
def extend_attention_fwd(
    q_extend: Tensor,
    k_extend: Tensor,
    v_extend: Tensor,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    is_causal: bool,
    mask_indptr: Tensor | None,
    max_len_extend: int,
    k_scale: float | None,
    v_scale: float | None,
    sm_scale: float | None = None,
    logit_cap: float | None = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int | None = -1,
    sinks: Tensor | None = None,
    window_kv_offsets: Tensor | None = None,
    xai_temperature_len: int | None = -1,
    lse_extend: Tensor | None = None,
    skip_prefix: bool = False,
    skip_extend: bool = False,
    page_size: int = 1,
    score_mod: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    *,
    engine: str | Engine = "triton",
) -> None:
    """Attend with every new token to the cached keys of its list, then to the new ones, into `o_extend`.

    `q_extend` `[tokens, heads, qk_dim]`, `k_extend` `[tokens, kv_heads, qk_dim]`, `v_extend` and `o_extend` by v_dim,
    fp32, fp16 or bf16; the lists `kv_indptr [>= reqs + 1]`, `kv_indices` are of the cached keys alone, `qo_indptr`
    `[reqs + 1]` of the new tokens, int32 or int64. `custom_mask`, uint8 or bool, holds new x (cached + new) bytes for
    each request from `mask_indptr` on; it replaces causality, and speaks of cached keys only where
    `skip_prefix_custom_mask` is False. `sliding_window_size` W is a radius: W earlier keys and the query itself; None,
    -1 and 0 see all. Under a window `window_kv_offsets` (int, `[>= reqs]`) says how many cached keys the lists leave
    out in front; with a mask it must. `sm_scale` None or 0 is one over the root of qk_dim. `max_len_extend`: no request
    has more new tokens, or rows are left out. `skip_prefix` and `skip_extend` leave a side out, whose buffers then go
    unread; positions stay. `lse_extend` `[tokens, heads]` fp32 is filled with the natural log-sum-exp, the sink
    included.

    Differs from the original: a mask alone decides (theirs, where `is_causal`, hides what lies behind the tile of
    queries, and where it is not, new keys more than W behind the query). A query that sees nothing but a sink has the
    sink as its LSE, not inf or NaN. Positions count from the request's first key where `window_kv_offsets` says where
    the list begins, for temperature and modifiers too; else from the list's. fp8 keys are lifted to q's dtype. Offsets
    are held to what they count; on a CPU, ValueError where they leave it, and where a slot leaves the buffers.
    Raises TypeError or ValueError, naming the argument, before anything is written.
    """
    view = kv_view(
        k_extend if skip_prefix else k_buffer,
        v_extend if skip_prefix else v_buffer,
        k_scale=k_scale,
        v_scale=v_scale,
        page_size=1 if skip_prefix else page_size,
    )
    runner, device, reqs = engine_on(engine, view.k.device), view.k.device, _reqs(qo_indptr)
    spec, aux = attention_of(
        "q_extend",
        q_extend,
        view,
        engine=runner,
        sm_scale=sm_scale or None,
        logit_cap=logit_cap,
        xai_temperature_len=xai_temperature_len,
        sinks=sinks,
        score_mod=score_mod,
        aux_tensors=aux_tensors,
        causal=is_causal,
        sliding_window_size=sliding_window_size,
    )
    new = None if skip_extend else new_keys(q_extend, k_extend, v_extend, spec)
    if lse_extend is not None:
        tensor("lse_extend", lse_extend, shape=q_extend.shape[:2], dtype=torch.float32, device=device)
    require(
        custom_mask is None or spec.window is None or window_kv_offsets is not None,
        "window_kv_offsets: with a custom_mask and a window, expected how many cached keys each list leaves out, "
        "got None; rows of the mask hold these too",
    )
    start = _start("window_kv_offsets", window_kv_offsets, spec, reqs, device)
    if skip_prefix:  # lists of nothing, which end where the new tokens begin
        cached = entries("kv_indptr", kv_indptr, count=reqs + 1, device=device, dtype=torch.int32)
        check_offsets("kv_indptr", cached, end=MAX_INT32, of="any list")
        start = start + held(cached, MAX_INT32).diff()
        kv_indptr, kv_indices = torch.zeros_like(kv_indptr), kv_indices[:0]
    skipped = bool(skip_prefix_custom_mask)
    layout, queries = _asked(
        spec,
        q_extend,
        kv_index(kv_indptr, kv_indices, reqs=reqs, device=device, view=view),
        qo_indptr=qo_indptr,
        start=start,
        mask=mask_of(custom_mask, mask_indptr, reqs=reqs, cached_visible=skipped, device=device),
        most=max_len_extend,
        one_pass=False,
    )
    runner.extend(
        ExtendCall(
            layer=0,
            spec=spec,
            view=view,
            lane=ExtendLane(layout=layout, write_slots=layout.index.slots[:0]),
            queries=queries,
            one_pass=False,
            q=q_extend,
            k=None if new is None else new[0],
            v=None if new is None else new[1],
            out=output_rows("o_extend", o_extend, q_extend, view),
            lse=lse_extend,
            sinks=sinks,
            aux=aux,
            parts="cached" if skip_extend else "all",
        )
    )


@torch.no_grad()
def extend_attention_fwd_unified(
    q: Tensor,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float | None,
    v_scale: float | None,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    max_len_extend: int,
    custom_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    logit_cap: float | None = 0.0,
    is_causal: bool = True,
    sliding_window_size: int | None = -1,
    sinks: Tensor | None = None,
    window_start_pos: Tensor | None = None,
    xai_temperature_len: int | None = -1,
    page_size: int = 1,
    score_mod: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    *,
    engine: str | Engine = "triton",
) -> None:
    """Attend with every new token to one list of cached and new keys (of `build_unified_kv_indices`), into `o`.

    Shapes and dtypes are those of `extend_attention_fwd`; the new tokens' keys lie in the buffers already, and all are
    scaled. `prefix_lens` `[>= reqs]` are what the lists leave beside the new tokens; the lists themselves are believed.
    A mask speaks of cached keys too. Bits depend on the request alone, not on the batch.

    Differs from the original: a query that sees nothing gives 0, not NaN. The temperature is log2(p) / log2(T) for
    p > T, as everywhere (theirs is T / (p + 1) for p >= T, here alone). `window_start_pos` `[>= reqs]`, which cancels
    in theirs, is where a window's list begins: temperature and modifiers count positions from the request's first key,
    and rows of a mask have cached + new bytes, those of keys before the window included.
    Raises TypeError or ValueError, naming the argument, before anything is written.
    """
    view = kv_view(k_buffer, v_buffer, k_scale=k_scale, v_scale=v_scale, page_size=page_size)
    runner, device, reqs = engine_on(engine, view.k.device), view.k.device, _reqs(qo_indptr)
    spec, aux = attention_of(
        "q",
        q,
        view,
        engine=runner,
        sm_scale=sm_scale or None,
        logit_cap=logit_cap,
        xai_temperature_len=xai_temperature_len,
        sinks=sinks,
        score_mod=score_mod,
        aux_tensors=aux_tensors,
        causal=is_causal,
        sliding_window_size=sliding_window_size,
    )
    entries("prefix_lens", prefix_lens, count=reqs, device=device, dtype=torch.int32)
    layout, queries = _asked(
        spec,
        q,
        kv_index(kv_indptr, kv_indices, reqs=reqs, device=device, view=view),
        qo_indptr=qo_indptr,
        start=_start("window_start_pos", window_start_pos, spec, reqs, device),
        mask=mask_of(custom_mask, mask_indptr, reqs=reqs, cached_visible=False, device=device),
        most=max_len_extend,
        one_pass=True,
    )
    runner.extend(
        ExtendCall(
            layer=0,
            spec=spec,
            view=view,
            lane=ExtendLane(layout=layout, write_slots=layout.index.slots[:0]),
            queries=queries,
            one_pass=True,
            q=q,
            k=None,
            v=None,
            out=output_rows("o", o, q, view),
            sinks=sinks,
            aux=aux,
            batch_invariant=True,
        )
    )


def new_keys(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the new tokens' keys and values if they fit the queries and the layer, or raise."""
    for name, x, dim in (("k_extend", k, spec.qk_dim), ("v_extend", v, spec.v_dim)):
        shape = (q.shape[0], spec.kv_heads, dim)
        tensor(name, x, shape=shape, dtype=q.dtype, device=q.device, hint="as q_extend and the buffers have it")
        last_axis_contiguous(name, x)
    return k, v


def _reqs(qo_indptr: Tensor) -> int:
    tensor("qo_indptr", qo_indptr, shape=["reqs + 1"])
    require(qo_indptr.shape[0] >= 1, "qo_indptr: expected at least the entry 0, got none")
    return qo_indptr.shape[0] - 1


def _start(name: str, given: Tensor | None, spec: AttentionSpec, reqs: int, device: torch.device) -> Tensor:
    """Return where each list begins, int32: what its caller says of a window's list, position 0 of any other."""
    if spec.window is None or given is None:
        return torch.zeros(reqs, dtype=torch.int32, device=device)
    start = entries(name, given, count=reqs, device=device, dtype=torch.int32)
    check_lengths(name, start)
    return start.clamp(min=0)


def _asked(
    spec: AttentionSpec,
    q: Tensor,
    index: KVIndex,
    *,
    qo_indptr: Tensor,
    start: Tensor,
    mask: tuple[Mask, Tensor],
    most: int,
    one_pass: bool,
) -> tuple[KVLayout, Queries]:
    """Return the lists with their positions, and the queries, which stand behind the cached keys."""
    tokens = q.shape[0]
    name = "q" if one_pass else "q_extend"
    indptr = query_offsets(name, qo_indptr, reqs=index.reqs, tokens=tokens, device=q.device)
    cached = start + index.indptr.diff()
    if one_pass:
        cached = cached - indptr.diff()
    longest = whole("max_len_extend", most)
    require(longest >= 0, f"max_len_extend: expected the new tokens of the longest request, got {longest}")
    return KVLayout(index=index, start=start, start_visible=start, sight=spec.sight), Queries(
        indptr=indptr,
        positions=positions_behind(cached, indptr, tokens=tokens),
        ordered=True,
        most=min(longest, tokens),
        mask=mask[0],
        mask_indptr=mask[1],
    )
