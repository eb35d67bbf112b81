"""`verify_splitkv_fwd`: a chain of drafts for each request, over cached keys that are split."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from attnlab.compat.sglang.arguments import (
    attention_of,
    engine_on,
    kv_index,
    kv_view,
    new_partials,
    output_rows,
    query_offsets,
    split_lane,
)
from attnlab.compat.sglang.extend import new_keys
from attnlab.engines import Engine
from attnlab.mask import CAUSAL
from attnlab.plan.extend_call import VerifyCall
from attnlab.plan.layout import KVLayout, positions_behind
from attnlab.plan.plans import Queries


@torch.no_grad()
def verify_splitkv_fwd(
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
    max_bs: int | None = None,
    *,
    engine: str | Engine = "triton",
) -> bool:
    """Attend with every draft to the cached keys and to the drafts up to itself; return whether it could.

    Arguments are those of `extend_attention_fwd`, which serves what this refuses. It returns False, and touches
    nothing, where there are sinks, a window, a cap or a temperature; where it is not causal; where q, k, v or the
    buffers are not 3-D; where heads do not fit, or dims differ (MLA); unless every request has `max_len_extend` drafts.
    `custom_mask` is not looked at: the caller knows that drafts are chains. A request's cached keys are cut in 4, 8 or
    16 by the average length of `kv_indices`.

    Differs from the original: a request without cached keys attends to its drafts (theirs gives NaN). A scale that is
    no number raises TypeError (theirs is then 1); None is 1. Scratch is new for each call; `max_bs` is unread.
    """
    shapes = (q_extend, k_extend, v_extend, k_buffer, v_buffer)
    extras = sinks is not None or any(_active(x) for x in (sliding_window_size, logit_cap, xai_temperature_len))
    drafts = _count(max_len_extend)
    if extras or not is_causal or not _shapes_fit(*shapes) or not _counts_fit(q_extend, qo_indptr, drafts):
        return False
    view = kv_view(k_buffer, v_buffer, k_scale=k_scale, v_scale=v_scale)
    runner, device = engine_on(engine, view.k.device), view.k.device
    spec, _ = attention_of("q_extend", q_extend, view, engine=runner, sm_scale=sm_scale or None)
    k, v = new_keys(q_extend, k_extend, v_extend, spec)
    reqs, tokens = qo_indptr.shape[0] - 1, q_extend.shape[0]
    layout = KVLayout.full(kv_index(kv_indptr, kv_indices, reqs=reqs, device=device, view=view))
    cached, splits = layout.index.indptr.diff(), _splits(kv_indices.shape[0] // reqs)
    lane = split_lane(layout, torch.full_like(cached, splits), most=splits, kv_heads=spec.kv_heads)
    indptr = query_offsets("q_extend", qo_indptr, reqs=reqs, tokens=tokens, device=device)
    runner.verify(
        VerifyCall(
            layer=0,
            spec=spec,
            view=view,
            lane=lane,
            queries=Queries(
                indptr=indptr,
                positions=positions_behind(cached, indptr, tokens=tokens),
                ordered=True,
                most=drafts,
                mask=CAUSAL,
                mask_indptr=torch.zeros(reqs + 1, dtype=torch.int64, device=device),
            ),
            partials=new_partials(lane, spec, queries=drafts),
            q=q_extend,
            k=k,
            v=v,
            out=output_rows("o_extend", o_extend, q_extend, view),
        )
    )
    return True


def _splits(average: int) -> int:
    """Return how many splits cached keys of that average length are cut into."""
    return 4 if average < 4096 else 8 if average < 8192 else 16


def _active(option: float | None) -> bool:
    return option is not None and option > 0


def _count(number: Any) -> int:
    """Return a number of drafts; 0 for what is none."""
    try:
        return operator.index(number)
    except TypeError:
        return 0


def _shapes_fit(q: Tensor, k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor) -> bool:
    """Whether all are 3-D, of one head dimension, with as many KV heads in the buffers as among the drafts."""
    if any(x.dim() != 3 for x in (q, k, v, k_buffer, v_buffer)):
        return False
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    return (
        kv_heads > 0
        and heads % kv_heads == 0
        and k_buffer.shape[1] == v_buffer.shape[1] == kv_heads
        and k.shape[2] == k_buffer.shape[2] == v.shape[2] == v_buffer.shape[2] == dim
    )


def _counts_fit(q: Tensor, qo_indptr: Tensor, drafts: int) -> bool:
    """Whether there are requests, all of so many drafts."""
    reqs = qo_indptr.shape[0] - 1
    return reqs >= 1 and drafts >= 1 and q.shape[0] == reqs * drafts
