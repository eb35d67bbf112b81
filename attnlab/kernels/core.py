"""Device functions that every attention kernel shares: paged addresses, the score pipeline, softmax states."""

from __future__ import annotations

from attnlab._triton import jit, tl
from attnlab.mods.softcap import soft_cap_triton
from attnlab.mods.temperature import temperature_triton


@jit
def slot_offsets(slots, stride_page, stride_slot, PAGE_SIZE: tl.constexpr):
    """Element offsets of int64 slots. A page-major buffer may have any stride between its pages."""
    if PAGE_SIZE == 1:
        offsets = slots * stride_slot
    else:
        offsets = (slots // PAGE_SIZE) * stride_page + (slots % PAGE_SIZE) * stride_slot
    return offsets


@jit
def score_pipeline(
    dots,
    q_pos,
    kv_pos,
    q_index,
    head,
    valid,
    scale,
    softcap,
    aux_ptr,
    aux_stride_token,
    aux_stride_head,
    aux_width,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
):
    """Scores from dot products, in the fixed order: scale, cap, temperature, modifier, mask."""
    scores = dots * scale
    if HAS_SOFTCAP:
        scores = soft_cap_triton(scores, softcap)
    if TEMPERATURE_LEN > 0:
        scores = scores * temperature_triton(q_pos, TEMPERATURE_LEN)
    if MOD is not None:
        scores = MOD(
            scores,
            q_pos,
            kv_pos,
            q_index,
            head,
            valid,
            aux_ptr,
            aux_stride_token,
            aux_stride_head,
            aux_width,
        )
    return tl.where(valid, scores, float("-inf"))


@jit
def finite_or_zero(maximum):
    """What to subtract before exp: the maximum, or 0 where nothing was seen (-inf minus -inf would be NaN)."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
