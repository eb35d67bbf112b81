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
def load_tile(rows, mask_rows, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Columns FIRST to FIRST + BLOCK of the rows at these pointers; 0 beyond DIM and in masked rows."""
    columns = FIRST + tl.arange(0, BLOCK)
    mask = mask_rows[:, None] & (columns < DIM)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(COMPUTE)


@jit
def dots(q, k, PACKED: tl.constexpr):
    """[rows, keys] dot products: on tensor cores for a packed group, elementwise for a single query head."""
    if PACKED:
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        products = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :]
    return products


@jit
def weighted_sum(p, v, PACKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """[rows, v_dim] sums of values, weighted by [rows, keys]."""
    if PACKED:
        total = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    else:
        total = tl.sum(tl.reshape(p, (BLOCK_N, 1)) * v.to(tl.float32), 0)[None, :]
    return total


@jit
def score_pipeline(
    products,
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
    scores = products * scale
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


@jit
def softmax_step(running_max, running_sum, acc, scores, v, PACKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The softmax state of [rows], one tile of keys later."""
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = finite_or_zero(new_max)
    p = tl.exp(scores - shift[:, None])
    fade = tl.exp(running_max - shift)
    acc = acc * fade[:, None] + weighted_sum(p, v, PACKED, BLOCK_N)
    running_sum = running_sum * fade + tl.sum(p, 1)
    return new_max, running_sum, acc


@jit
def visible_keys(
    q_pos,
    kv_pos,
    number,
    other,
    column,
    mask_m,
    mask_n,
    bits_ptr,
    bits_row,
    num_bits,
    window,
    chunk,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """[queries, keys]: which keys a query sees, by sight and then by mask or causality.

    `number` and `other` are places among the request's new tokens, `other` below 0 for a cached key; `column` is the
    key's in a row of the mask, whose first bit is number `bits_row` of `num_bits`.
    """
    visible = mask_m[:, None] & mask_n[None, :]
    if HAS_WINDOW:
        visible = visible & (q_pos[:, None] - kv_pos[None, :] < window)
    if HAS_CHUNK:
        visible = visible & (kv_pos[None, :] // chunk == q_pos[:, None] // chunk)
    if HAS_MASK:
        bit = bits_row[:, None] + column[None, :]
        # Where only the device knows the lengths nobody could check the mask's size: what it lacks is hidden.
        bits = tl.load(bits_ptr + bit, mask=visible & (bit < num_bits), other=0)
        visible = visible & (bits != 0)
    elif CAUSAL:
        visible = visible & (other[None, :] <= number[:, None])
    elif HAS_WINDOW:
        visible = visible & (kv_pos[None, :] - q_pos[:, None] < window)
    return visible
