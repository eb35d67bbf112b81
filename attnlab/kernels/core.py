"""Device functions that attention kernels share: segments, paged addresses, the score pipeline, softmax states."""

from __future__ import annotations

from typing import Any

from attnlab._triton import jit, tl
from attnlab.kernels.pairs import LIFT, load_pairs
from attnlab.mods.softcap import soft_cap_triton
from attnlab.mods.temperature import temperature_triton

LOG2_E: Any = None if tl is None else tl.constexpr(1.4426950408889634)
LN_2: Any = None if tl is None else tl.constexpr(0.6931471805599453)


@jit
def slot_offsets(slots, stride_page, stride_slot, PAGE_SIZE: tl.constexpr):
    """Element offsets of int64 slots. A page-major buffer may have any stride between its pages."""
    if PAGE_SIZE == 1:
        offsets = slots * stride_slot
    else:
        offsets = (slots // PAGE_SIZE) * stride_page + (slots % PAGE_SIZE) * stride_slot
    return offsets


@jit
def load_segment(segments_ptr, number, live):
    """A segment of a schedule: request, KV head, first and last entry, partial; zeros where not `live`.

    Programs of even shares load the next one while they read the keys of this one: what they wait for, at the start of
    a segment, is where its request's list begins, and then the list itself.
    """
    row = segments_ptr + number * 5
    req = tl.load(row, mask=live, other=0)
    kv_head = tl.load(row + 1, mask=live, other=0)
    first = tl.load(row + 2, mask=live, other=0)
    last = tl.load(row + 3, mask=live, other=0)
    partial = tl.load(row + 4, mask=live, other=0)
    return req, kv_head, first, last, partial


@jit
def load_tile(rows, mask_rows, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Columns FIRST to FIRST + BLOCK of the rows at these pointers; 0 beyond DIM and in masked rows, if any are."""
    columns = FIRST + tl.arange(0, BLOCK)
    if mask_rows is not None:
        mask = mask_rows[:, None] & (columns < DIM)[None, :]
        tile = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)
    elif FIRST + BLOCK > DIM:
        tile = tl.load(rows[:, None] + columns[None, :], mask=(columns < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(rows[:, None] + columns[None, :])
    return tile.to(COMPUTE)


@jit
def load_queries(
    rows, mask_rows, QK_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, COMPUTE: tl.constexpr
):
    """The main columns of queries, and the other ones where there are any (BLOCK_R is not 0)."""
    q = load_tile(rows, mask_rows, 0, BLOCK_D, QK_DIM, COMPUTE)
    if BLOCK_R > 0:
        q_rest = load_tile(rows, mask_rows, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE)
    else:
        q_rest = q
    return q, q_rest


@jit
def load_keys(rows, mask_rows, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Columns of keys or values: a tile; where they are stored in pairs (kernels/pairs.py), even and odd columns."""
    if rows.dtype.element_ty == tl.int16:
        tile = load_pairs(rows, mask_rows, FIRST, BLOCK, DIM, COMPUTE)
    else:
        tile = load_tile(rows, mask_rows, FIRST, BLOCK, DIM, COMPUTE)
    return tile


@jit
def products_of(q, k, PACKED: tl.constexpr, PAIRS: tl.constexpr):
    """[rows, keys] dot products of tiles, or of even and odd columns."""
    if PAIRS:
        products = dots(q[0], k[0], PACKED)
        products += dots(q[1], k[1], PACKED)
    else:
        products = dots(q, k, PACKED)
    return products


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
def faded_and_more(acc, fade, p, v, PACKED: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The accumulator, faded, and the values of another tile; of pairs a pair."""
    if PAIRS:
        even = acc[0] * fade[:, None] + weighted_sum(p, v[0], PACKED, BLOCK_N)
        odd = acc[1] * fade[:, None] + weighted_sum(p, v[1], PACKED, BLOCK_N)
        acc = (even, odd)
    else:
        acc = acc * fade[:, None] + weighted_sum(p, v, PACKED, BLOCK_N)
    return acc


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
    if valid is not None:
        scores = tl.where(valid, scores, float("-inf"))
    return scores


@jit
def finite_or_zero(maximum):
    """What to subtract before exp: the maximum, or 0 where nothing was seen (-inf minus -inf would be NaN)."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@jit
def score_tile(
    q,
    q_rest,
    k,
    k_rows,
    mask_n,
    visible,
    q_pos,
    kv_pos,
    q_index,
    head,
    scale,
    softcap,
    aux_ptr,
    aux_stride_token,
    aux_stride_head,
    aux_width,
    QK_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """[rows, keys] scores of queries against a tile of keys; -inf where not `visible`.

    `k` are the main columns of the keys, `q_rest` the queries' other ones, read only where BLOCK_R is not 0.
    """
    PAIRS: tl.constexpr = k_rows.dtype.element_ty == tl.int16
    products = products_of(q, k, PACKED, PAIRS)
    if BLOCK_R > 0:
        k_rest = load_keys(k_rows, mask_n, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE)
        products += products_of(q_rest, k_rest, PACKED, PAIRS)
    return score_pipeline(
        products,
        q_pos,
        kv_pos,
        q_index,
        head,
        visible,
        scale,
        softcap,
        aux_ptr,
        aux_stride_token,
        aux_stride_head,
        aux_width,
        HAS_SOFTCAP,
        TEMPERATURE_LEN,
        MOD,
    )


@jit
def weights_of(running_max, scores, PAIRS: tl.constexpr):
    """The largest score with those of a tile, their weights against it, and what the state so far fades by."""
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = finite_or_zero(new_max)
    p = tl.exp(scores - (shift - LIFT * LN_2 if PAIRS else shift)[:, None])
    fade = tl.exp(running_max - shift)
    return new_max, p, fade


@jit
def attend_tile(
    running_max,
    running_sum,
    acc,
    q,
    q_rest,
    k_rows,
    v_rows,
    mask_n,
    visible,
    q_pos,
    kv_pos,
    q_index,
    head,
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
    PACKED: tl.constexpr,
    V_IS_K_TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The softmax state of [rows] queries, one tile of keys later: the step that every attention kernel repeats.

    The state is the largest score, the sum of exp(score - largest), and the values weighted likewise. `k_rows` and
    `v_rows` point at the keys and values; where V_IS_K_TILE the values are the main columns of the keys.
    """
    PAIRS: tl.constexpr = k_rows.dtype.element_ty == tl.int16
    k = load_keys(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE)
    scores = score_tile(
        q,
        q_rest,
        k,
        k_rows,
        mask_n,
        visible,
        q_pos,
        kv_pos,
        q_index,
        head,
        scale,
        softcap,
        aux_ptr,
        aux_stride_token,
        aux_stride_head,
        aux_width,
        QK_DIM,
        BLOCK_D,
        BLOCK_R,
        PACKED,
        HAS_SOFTCAP,
        TEMPERATURE_LEN,
        MOD,
        COMPUTE,
    )
    new_max, p, fade = weights_of(running_max, scores, PAIRS)
    # Only now: values that are loaded before the exponentials would hold registers meanwhile.
    if V_IS_K_TILE:
        v = k
    else:
        v = load_keys(v_rows, mask_n, 0, BLOCK_V // 2 if PAIRS else BLOCK_V, V_DIM, COMPUTE)
    acc = faded_and_more(acc, fade, p, v, PACKED, PAIRS, BLOCK_N)
    running_sum = running_sum * fade + tl.sum(p, 1)
    return new_max, running_sum, acc


@jit
def attend_loaded_tile(
    running_max,
    running_sum,
    acc,
    q,
    q_rest,
    k,
    k_rest,
    v,
    visible,
    q_pos,
    kv_pos,
    q_index,
    head,
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
):
    """The step of `attend_tile` for keys and values that were loaded ahead; of a packed group, not in pairs."""
    products = dots(q, k, True)
    if BLOCK_R > 0:
        products += dots(q_rest, k_rest, True)
    scores = score_pipeline(
        products,
        q_pos,
        kv_pos,
        q_index,
        head,
        visible,
        scale,
        softcap,
        aux_ptr,
        aux_stride_token,
        aux_stride_head,
        aux_width,
        HAS_SOFTCAP,
        TEMPERATURE_LEN,
        MOD,
    )
    new_max, p, fade = weights_of(running_max, scores, False)
    acc = faded_and_more(acc, fade, p, v, True, False, BLOCK_N)
    running_sum = running_sum * fade + tl.sum(p, 1)
    return new_max, running_sum, acc


@jit
def attend_plain_tile(
    running_max,
    running_sum,
    acc,
    q,
    q_rest,
    k_rows,
    v_rows,
    mask_n,
    visible,
    factor,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_IS_K_TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The step of `attend_tile` for scores that are products times a number above 0, and nothing else: half its work.

    `factor` is that number times log2(e): one multiply-add makes the exponent of 2 of a product, which the hardware
    raises as it is. The largest score is kept times log2(e), too, until `natural` has it.
    """
    PAIRS: tl.constexpr = k_rows.dtype.element_ty == tl.int16
    k = load_keys(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE)
    products = products_of(q, k, True, PAIRS)
    if BLOCK_R > 0:
        k_rest = load_keys(k_rows, mask_n, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE)
        products += products_of(q_rest, k_rest, True, PAIRS)
    if visible is not None:
        products = tl.where(visible, products, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(products, 1) * factor)
    shift = finite_or_zero(new_max)
    fade = tl.exp2(running_max - shift)
    if PAIRS:
        p = tl.exp2(products * factor[:, None] - (shift - LIFT)[:, None])
    else:
        p = tl.exp2(products * factor - shift[:, None])
    # Only now, as in `attend_tile`.
    if V_IS_K_TILE:
        v = k
    else:
        v = load_keys(v_rows, mask_n, 0, BLOCK_V // 2 if PAIRS else BLOCK_V, V_DIM, COMPUTE)
    acc = faded_and_more(acc, fade, p, v, True, PAIRS, BLOCK_N)
    running_sum = running_sum * fade + tl.sum(p, 1)
    return new_max, running_sum, acc


@jit
def attend_shares_tile(
    running_max,
    running_sum,
    acc,
    q,
    q_rest,
    k_rows,
    v_rows,
    mask_n,
    visible,
    q_pos,
    kv_pos,
    q_index,
    head,
    factor,
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
    PLAIN: tl.constexpr,
):
    """The step of programs of even shares: `attend_plain_tile` where scores are PLAIN, else `attend_tile`.

    `factor` is what products are scaled by: a number, or one for each row where the pool is read in pairs.
    """
    if PLAIN:
        running_max, running_sum, acc = attend_plain_tile(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            k_rows,
            v_rows,
            mask_n,
            visible,
            factor * LOG2_E,
            QK_DIM,
            V_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_R,
            BLOCK_V,
            V_IS_K_TILE,
            COMPUTE,
        )
    else:
        running_max, running_sum, acc = attend_tile(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            k_rows,
            v_rows,
            mask_n,
            visible,
            q_pos,
            kv_pos,
            q_index,
            head,
            factor[:, None] if k_rows.dtype.element_ty == tl.int16 else factor,
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
def natural(running_max):
    """The largest score, of what `attend_plain_tile` keeps of it."""
    return running_max * LN_2


@jit
def store_states(
    state,
    running_max,
    running_sum,
    acc,
    max_ptr,
    sum_ptr,
    acc_ptr,
    mask_rows,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Leave softmax states, unnormalised: no logarithm, no division, nothing undefined where nothing was seen."""
    offs_v = tl.arange(0, BLOCK_V)
    tl.store(max_ptr + state, running_max, mask=mask_rows)
    tl.store(sum_ptr + state, running_sum, mask=mask_rows)
    cells = acc_ptr + state[:, None] * V_DIM + offs_v[None, :]
    tl.store(cells, acc, mask=mask_rows[:, None] & (offs_v < V_DIM)[None, :])


@jit
def merge_states(running_max, running_sum, acc, maxima, sums, accs):
    """The softmax state of [rows] queries and that of others, as if they had seen both sets of keys."""
    new_max = tl.maximum(running_max, maxima)
    shift = finite_or_zero(new_max)
    fade = tl.exp(running_max - shift)
    weight = tl.exp(maxima - shift)
    acc = acc * fade[:, None] + accs * weight[:, None]
    return new_max, running_sum * fade + sums * weight, acc


@jit
def join_sink(running_max, running_sum, sink):
    """The state with the sink in its denominator: new maximum, new sum, and what the accumulator fades by."""
    new_max = tl.maximum(running_max, sink)
    shift = finite_or_zero(new_max)
    # A sink of +inf takes everything: exp(inf - inf) would be NaN.
    endless = sink == float("inf")
    fade = tl.where(endless, 0.0, tl.exp(running_max - shift))
    return new_max, running_sum * fade + tl.where(endless, 1.0, tl.exp(sink - shift)), fade


@jit
def visible_keys(
    q_pos,
    kv_pos,
    q_number,
    kv_number,
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
    CACHED_VISIBLE: tl.constexpr,
):
    """[queries, keys]: which keys a query sees, by sight and then by mask or causality.

    `q_number` and `kv_number` are places among the request's new tokens, below 0 for a cached key; `column` is the
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
        asked = visible & (bit < num_bits)
        if CACHED_VISIBLE:
            asked = asked & (kv_number[None, :] >= 0)
        shown = tl.load(bits_ptr + bit, mask=asked, other=0) != 0
        if CACHED_VISIBLE:
            shown = shown | (kv_number[None, :] < 0)
        visible = visible & shown
    elif CAUSAL:
        visible = visible & (kv_number[None, :] <= q_number[:, None])
    elif HAS_WINDOW:
        visible = visible & (kv_pos[None, :] - q_pos[:, None] < window)
    return visible


@jit
def first_visible(q_pos, mask_m, window, chunk, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """The first position that any of the queries sees. Keys before it need not be loaded."""
    lowest = tl.min(tl.where(mask_m, q_pos, 2147483647), 0)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(first, lowest - window + 1)
    if HAS_CHUNK:
        first = tl.maximum(first, lowest // chunk * chunk)
    return first


@jit
def write_rows(
    running_max,
    running_sum,
    acc,
    out_rows,
    lse_rows,
    mask_m,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Normalise the softmax states of [rows] and store them. Nothing seen: out 0, lse -inf."""
    safe = tl.where(running_sum == 0.0, 1.0, running_sum)
    offs_v = tl.arange(0, BLOCK_V)
    cells = out_rows[:, None] + offs_v[None, :]
    mask_out = mask_m[:, None] & (offs_v < V_DIM)[None, :]
    tl.store(cells, (acc / safe[:, None]).to(out_rows.dtype.element_ty), mask=mask_out)
    if HAS_LSE:
        tl.store(lse_rows, running_max + tl.log(safe), mask=mask_m)
