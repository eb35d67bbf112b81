"""Device functions that sweep keys for a tile of query tokens: those of a list, then those that come with the call.

Extend runs both, one after the other; verify runs the first for every range of the cached keys, the second where the
ranges are merged, or where a request has but one. A row is a query token's head: `head` is one number, or one for every
row.
"""

from __future__ import annotations

from attnlab._triton import jit, tl
from attnlab.kernels.core import attend_tile, slot_offsets, visible_keys


@jit
def attend_list(
    running_max,
    running_sum,
    acc,
    q,
    q_rest,
    q_pos,
    q_number,
    token,
    head,
    mask_m,
    first,
    last,
    list_ptr,
    start,
    start_visible,
    cached,
    k_head_ptr,
    k_stride_page,
    k_stride_slot,
    v_head_ptr,
    v_stride_page,
    v_stride_slot,
    bits_ptr,
    bits_row,
    num_bits,
    window,
    chunk,
    scale,
    softcap,
    aux_ptr,
    aux_stride_token,
    aux_stride_head,
    aux_width,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    V_IS_K_TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    COMPUTE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    CACHED_VISIBLE: tl.constexpr,
):
    """The softmax state after entries `first` to `last` of a list, whose first one stands at position `start`."""
    for at in range(first, last, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        mask_n = entry < last
        kv_pos = start + entry
        slots = tl.load(list_ptr + entry, mask=mask_n, other=0)
        visible = visible_keys(
            q_pos,
            kv_pos,
            q_number,
            kv_pos - cached,
            kv_pos,
            mask_m,
            mask_n & (kv_pos >= start_visible),
            bits_ptr,
            bits_row,
            num_bits,
            window,
            chunk,
            CAUSAL,
            HAS_MASK,
            HAS_WINDOW,
            HAS_CHUNK,
            CACHED_VISIBLE,
        )
        running_max, running_sum, acc = attend_tile(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            k_head_ptr + slot_offsets(slots, k_stride_page, k_stride_slot, PAGE_SIZE),
            v_head_ptr + slot_offsets(slots, v_stride_page, v_stride_slot, PAGE_SIZE),
            mask_n,
            visible,
            q_pos[:, None],
            kv_pos[None, :],
            token[:, None],
            head,
            scale,
            softcap,
            aux_ptr,
            aux_stride_token,
            aux_stride_head,
            aux_width,
            QK_DIM,
            V_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_R,
            BLOCK_V,
            True,
            V_IS_K_TILE,
            HAS_SOFTCAP,
            TEMPERATURE_LEN,
            MOD,
            COMPUTE,
        )
    return running_max, running_sum, acc


@jit
def attend_new(
    running_max,
    running_sum,
    acc,
    q,
    q_rest,
    q_pos,
    q_number,
    token,
    head,
    mask_m,
    first,
    last,
    first_token,
    positions_ptr,
    cached,
    k_head_ptr,
    k_stride_token,
    v_head_ptr,
    v_stride_token,
    bits_ptr,
    bits_row,
    num_bits,
    window,
    chunk,
    scale,
    softcap,
    aux_ptr,
    aux_stride_token,
    aux_stride_head,
    aux_width,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_IS_K_TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    COMPUTE: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """The softmax state after a request's new tokens `first` to `last`, of which number 0 is token `first_token`.

    Where ORDERED they stand one behind the other after the cached ones; else each has its position written down.
    """
    for at in range(first, last, BLOCK_N):
        kv_number = at + tl.arange(0, BLOCK_N)
        mask_n = kv_number < last
        kv_token = first_token + kv_number
        if ORDERED:
            kv_pos = cached + kv_number
        else:
            kv_pos = tl.load(positions_ptr + kv_token, mask=mask_n, other=0)
        visible = visible_keys(
            q_pos,
            kv_pos,
            q_number,
            kv_number,
            cached + kv_number,
            mask_m,
            mask_n,
            bits_ptr,
            bits_row,
            num_bits,
            window,
            chunk,
            CAUSAL,
            HAS_MASK,
            HAS_WINDOW,
            HAS_CHUNK,
            False,
        )
        running_max, running_sum, acc = attend_tile(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            k_head_ptr + kv_token * k_stride_token,
            v_head_ptr + kv_token * v_stride_token,
            mask_n,
            visible,
            q_pos[:, None],
            kv_pos[None, :],
            token[:, None],
            head,
            scale,
            softcap,
            aux_ptr,
            aux_stride_token,
            aux_stride_head,
            aux_width,
            QK_DIM,
            V_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_R,
            BLOCK_V,
            True,
            V_IS_K_TILE,
            HAS_SOFTCAP,
            TEMPERATURE_LEN,
            MOD,
            COMPUTE,
        )
    return running_max, running_sum, acc
