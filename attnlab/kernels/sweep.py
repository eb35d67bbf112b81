"""Device functions that sweep keys for a tile of query tokens: those of a list, then those that come with the call.

Extend runs both, one after the other; verify runs the first for every range of the cached keys, the second where the
ranges are merged, or where a request has but one. A row is a query token's head: `head` is one number, or one for every
row.
"""

from __future__ import annotations

from attnlab._triton import jit, tl
from attnlab.kernels.core import (
    attend_loaded_tile,
    attend_tile,
    first_visible,
    load_tile,
    slot_offsets,
    visible_keys,
)


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
def visible_new(
    q_pos,
    q_number,
    mask_m,
    first,
    last,
    first_token,
    positions_ptr,
    cached,
    bits_ptr,
    bits_row,
    num_bits,
    window,
    chunk,
    BLOCK_N: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """A tile of new tokens from number `first` on: which they are, where they stand, which there are, who sees them.

    Where ORDERED they stand one behind the other after the cached ones; else each has its position written down.
    """
    kv_number = first + tl.arange(0, BLOCK_N)
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
    return kv_token, kv_pos, mask_n, visible


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
    """The softmax state after a request's new tokens `first` to `last`, of which number 0 is token `first_token`."""
    for at in range(first, last, BLOCK_N):
        kv_token, kv_pos, mask_n, visible = visible_new(
            q_pos,
            q_number,
            mask_m,
            at,
            last,
            first_token,
            positions_ptr,
            cached,
            bits_ptr,
            bits_row,
            num_bits,
            window,
            chunk,
            BLOCK_N,
            ORDERED,
            CAUSAL,
            HAS_MASK,
            HAS_WINDOW,
            HAS_CHUNK,
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


@jit
def seen_drafts(
    q_pos,
    mask_m,
    drafts,
    last_row,
    cached,
    window,
    chunk,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """The first and the last of a request's drafts that a tile of rows up to `last_row` may see, in whole tiles."""
    first_new = 0
    if ORDERED:
        first = first_visible(q_pos, mask_m, window, chunk, HAS_WINDOW, HAS_CHUNK)
        # A tile without a row sees nothing from any number on, the largest one too.
        first_new = tl.minimum(tl.maximum(first - cached, 0), drafts) // BLOCK_N * BLOCK_N
    last_new = drafts
    if CAUSAL and not HAS_MASK:
        last_new = tl.minimum(drafts, last_row // GROUP + 1)
    return first_new, last_new


@jit
def load_new(
    first,
    last,
    first_token,
    k_head_ptr,
    k_stride_token,
    v_head_ptr,
    v_stride_token,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_IS_K_TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """A tile of new tokens from number `first` on: keys, their other columns (BLOCK_R is not 0), values; 0 from `last`.

    For `attend_loaded_new`: who loads them with the queries waits for both at once.
    """
    number = first + tl.arange(0, BLOCK_N)
    token = first_token + number
    mask_n = number < last
    k_rows = k_head_ptr + token * k_stride_token
    k = load_tile(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE)
    k_rest = load_tile(k_rows, mask_n, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE) if BLOCK_R > 0 else k
    v = k if V_IS_K_TILE else load_tile(v_head_ptr + token * v_stride_token, mask_n, 0, BLOCK_V, V_DIM, COMPUTE)
    return k, k_rest, v


@jit
def attend_loaded_new(
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
    tile,
    first,
    last,
    first_token,
    positions_ptr,
    cached,
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
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """The softmax state after the `tile` of new tokens that `load_new` has loaded, as `attend_new` has it."""
    _, kv_pos, _, visible = visible_new(
        q_pos,
        q_number,
        mask_m,
        first,
        last,
        first_token,
        positions_ptr,
        cached,
        bits_ptr,
        bits_row,
        num_bits,
        window,
        chunk,
        BLOCK_N,
        ORDERED,
        CAUSAL,
        HAS_MASK,
        HAS_WINDOW,
        HAS_CHUNK,
    )
    k, k_rest, v = tile
    return attend_loaded_tile(
        running_max,
        running_sum,
        acc,
        q,
        q_rest,
        k,
        k_rest,
        v,
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
        BLOCK_N,
        BLOCK_R,
        HAS_SOFTCAP,
        TEMPERATURE_LEN,
        MOD,
    )
