"""Verify over even shares by two groups of warps: one loads, through segment after segment, the other attends.

The variant of `verify_shares.py` for Hopper GPUs: the same partials and whole answers, for the same merge. There a
program loads as far ahead as its loop over a segment's keys goes, and begins anew at every segment, and for the drafts
behind it. Here, in Gluon, a group of warps of its own fills a ring of tiles with keys and values, whichever segment
they belong to, and drafts, where they are attended to on the spot, are one more tile. Tensor cores take tiles of 64
rows; fewer are padded, as all of them wait for memory anyway.

Both groups walk the same segments and count places of the ring alike. They meet at barriers in shared memory
(mbarriers), of which each says one thing: a tile is full, or it is free.
Gluon has no interpreter; on a CPU, and for all that this kernel leaves out, `verify_shares.py` computes the same.
Source of the method: as `verify_shares.py`; producers and consumers as in FlashAttention-3 (Shah et al., 2024).
"""

from __future__ import annotations

from typing import Any

import torch

from attnlab._triton import gl, gluon_jit, hopper, release_dependents, tl, wait_for_earlier
from attnlab.kernels.core import LN_2, LOG2_E
from attnlab.kernels.groups import (
    COPY_COLUMNS,
    COPY_ROWS,
    COPYING,
    HALVES,
    TILE,
    WARPS,
    can_copy,
    finite_or_zero,
    join_sink,
    load_segment,
    slot_offsets,
    store_states,
    write_rows,
)
from attnlab.kernels.launch import early_launch, narrow, plain_scores
from attnlab.kernels.launcher import Launcher
from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView
from attnlab.plan.extend_call import VerifyCall
from attnlab.spec import AttentionSpec

KEYS = {64: 128, 128: 64}
"""Keys of a tile, by columns: 16 KB."""
MOST_ROWS = 64
"""(Draft, head) pairs of a request: one tile of rows, and so no more drafts than a tile has keys."""
STAGES = 5
"""Tiles of keys and of values in the ring, 160 KB; two tiles of queries beside it take up to 32."""

if gl is not None:
    ROWS_A_TILE = tl.constexpr(MOST_ROWS)
    # Warps of the group that loads, and a thread's registers there; those that attend have what is left.
    OTHERS_WARPS = tl.constexpr([WARPS])
    OTHERS_REGISTERS = tl.constexpr([80])


def is_for(spec: AttentionSpec, view: KVView, *, q_dtype: torch.dtype, rows: int) -> bool:
    """Whether the kernel computes a layer's verify of so many (draft, head) pairs a request, wherever tensors lie.

    Scores are products alone, all cached keys are seen, and scaled as drafts are; one half precision throughout.
    """
    return (
        rows <= MOST_ROWS
        and spec.qk_dim == spec.v_dim
        and spec.qk_dim in KEYS
        and q_dtype == view.k.dtype
        and q_dtype in HALVES
        and not view.v_in_k
        and not spec.sight.partial
        and plain_scores(spec, view)
        and view.k_scale == view.v_scale == 1.0
    )


def serves(call: VerifyCall, target: Target) -> bool:
    """Whether the kernel computes a call here: as `is_for` says, no mask over cached keys, rows that can be copied."""
    spec, view, queries = call.spec, call.view, call.queries
    if not target.is_hopper or call.k is None or call.v is None or queries.cached_masked:
        return False
    rows = queries.most * spec.group
    return is_for(spec, view, q_dtype=call.q.dtype, rows=rows) and can_copy(call.q, call.k, call.v, view.k, view.v)


def verify_shares_hopper_constants(
    *, spec: AttentionSpec, view: KVView, target: Target, new_masked: bool, has_lse: bool, keeps: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on."""
    constants: dict[str, Any] = {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "DIM": spec.qk_dim,
        "KEYS": KEYS[spec.qk_dim],
        "STAGES": STAGES,
        "PAGE_SIZE": view.page_size,
        "CAUSAL": spec.sight.causal,
        "NEW_MASK": new_masked,
        "HAS_SINKS": spec.has_sinks,
        "HAS_LSE": has_lse,
        "KEEPS": keeps,
        "NARROW": narrow(view.k, view.v),
        "PDL": target.has_pdl,
    }
    return constants, {"num_warps": WARPS, **early_launch(target)}


@gluon_jit(do_not_specialize=("rows", "num_bits"))
def _verify_shares_hopper_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_new_ptr,
    v_new_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    segments_ptr,
    programs_ptr,
    q_indptr_ptr,
    bits_ptr,
    mask_indptr_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    merge_indptr_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    scale,
    rows,
    num_bits,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    k_new_stride_token,
    k_new_stride_head,
    v_new_stride_token,
    v_new_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEW_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KEEPS: tl.constexpr,
    NARROW: tl.constexpr,
    PDL: tl.constexpr,
):
    # What the kernel before reads or writes is not touched before it has ended.
    if PDL:
        wait_for_earlier()
    # 1. Room: queries of this segment and the next, and the ring.
    ELEMENT: tl.constexpr = q_ptr.dtype.element_ty
    q = gl.allocate_shared_memory(ELEMENT, [2, ROWS_A_TILE, DIM], TILE)
    k = gl.allocate_shared_memory(ELEMENT, [STAGES, KEYS, DIM], TILE)
    v = gl.allocate_shared_memory(ELEMENT, [STAGES, KEYS, DIM], TILE)

    # 2. Barriers, and how often each is signalled until those who wait go on: by every thread that copies, or once.
    BARRIER: tl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for b in gl.static_range(2):
        hopper.mbarrier.init(q_full.index(b), count=COPYING)
        hopper.mbarrier.init(q_free.index(b), count=1)
    for b in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(b), count=COPYING)
        hopper.mbarrier.init(k_free.index(b), count=1)
        hopper.mbarrier.init(v_full.index(b), count=COPYING)
        hopper.mbarrier.init(v_free.index(b), count=1)

    # 3. Each group its own way. Tuples of numbers are written where they are given: a named one forgets constants.
    queries = (q, q_full, q_free)
    ring = (k, k_full, k_free, v, v_full, v_free)
    schedule = (segments_ptr, programs_ptr, merge_indptr_ptr, q_indptr_ptr)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    queries,
                    ring,
                    schedule,
                    (indptr_ptr, start_ptr, bits_ptr, mask_indptr_ptr, num_bits),
                    (acc_ptr, max_ptr, sum_ptr),
                    rows,
                    (sinks_ptr, out_ptr, lse_ptr),
                    (out_stride_token, out_stride_head, lse_stride_token, lse_stride_head),
                    scale,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    KEYS,
                    STAGES,
                    CAUSAL,
                    NEW_MASK,
                    HAS_SINKS,
                    HAS_LSE,
                    KEEPS,
                ),
            ),
            (
                _load,
                (
                    queries,
                    ring,
                    schedule,
                    (q_ptr, k_ptr, v_ptr, k_new_ptr, v_new_ptr, slots_ptr, indptr_ptr),
                    (q_stride_token, q_stride_head),
                    (k_stride_page, k_stride_slot, k_stride_head),
                    (v_stride_page, v_stride_slot, v_stride_head),
                    (k_new_stride_token, k_new_stride_head, v_new_stride_token, v_new_stride_head),
                    KV_HEADS,
                    GROUP,
                    DIM,
                    KEYS,
                    STAGES,
                    PAGE_SIZE,
                    NARROW,
                ),
            ),
        ],
        OTHERS_WARPS,
        OTHERS_REGISTERS,
    )
    if PDL:
        release_dependents()


@gluon_jit
def _work(schedule, number, KV_HEADS: tl.constexpr):
    """A segment as both groups see it: whose it is, how far it goes, how many drafts ask, whether it answers them.

    A request without drafts has nobody to read its keys for: no tile of it is loaded, and none attended to.
    """
    segments_ptr, _, merge_indptr_ptr, q_indptr_ptr = schedule
    req, kv_head, first, last, partial = load_segment(segments_ptr, number)
    first_token = gl.load(q_indptr_ptr + req).to(gl.int64)
    drafts = (gl.load(q_indptr_ptr + req + 1) - first_token).to(gl.int32)
    owner = merge_indptr_ptr + req * KV_HEADS + kv_head
    alone = (gl.load(owner + 1) - gl.load(owner) == 1) & (drafts > 0)
    last = gl.where(drafts > 0, last, first)
    return req, kv_head, first, last, partial, first_token, drafts, alone


@gluon_jit
def _after(stage, phase, STAGES: tl.constexpr):
    """The next place of the ring, and the phase of its barriers: another one each time around."""
    around = stage == STAGES - 1
    return gl.where(around, 0, stage + 1), gl.where(around, phase ^ 1, phase)


@gluon_jit
def _load(
    queries,
    ring,
    schedule,
    read,
    q_strides,
    k_strides,
    v_strides,
    new_strides,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """The group that loads: queries of each segment, its keys and values, and drafts behind them."""
    q, q_full, q_free = queries
    q_ptr, k_ptr, v_ptr, k_new_ptr, v_new_ptr, slots_ptr, indptr_ptr = read
    row = gl.arange(0, ROWS_A_TILE, layout=COPY_ROWS)
    columns = gl.arange(0, DIM, layout=COPY_COLUMNS)
    every = columns >= 0  # all of them, so that the mask has a tile's shape
    first_number = gl.load(schedule[1] + gl.program_id(0))
    number = first_number
    end = gl.load(schedule[1] + gl.program_id(0) + 1)
    stage = 0
    phase = 1  # a place that was never used is free
    while number < end:
        req, kv_head, first, last, _, first_token, drafts, alone = _work(schedule, number, KV_HEADS)
        kv_head = kv_head.to(gl.int64)
        # Slots are asked for before the queries, and then a tile ahead: rows cannot be before they are here. Behind the
        # segment's last entry comes that one again, with weight 0: its row is as finite as it was.
        list_ptr = slots_ptr + gl.load(indptr_ptr + req)
        entry = first + gl.arange(0, KEYS, layout=COPY_ROWS)
        slots = gl.load(list_ptr + gl.maximum(gl.minimum(entry, last - 1), first))
        turn = (number - first_number) & 1
        hopper.mbarrier.wait(q_free.index(turn), (((number - first_number) >> 1) & 1) ^ 1)
        q_rows = q_ptr + (first_token + row // GROUP) * q_strides[0] + (kv_head * GROUP + row % GROUP) * q_strides[1]
        mine = (row // GROUP < drafts)[:, None] & every[None, :]
        hopper.async_copy.async_copy_global_to_shared(q.index(turn), q_rows[:, None] + columns[None, :], mask=mine)
        hopper.async_copy.mbarrier_arrive(q_full.index(turn), increment_count=False)
        for _at in range(first, last, KEYS):
            if NARROW:
                slots = slots.to(gl.int32)
            k_rows = k_ptr + kv_head * k_strides[2] + slot_offsets(slots, k_strides, PAGE_SIZE)
            v_rows = v_ptr + kv_head * v_strides[2] + slot_offsets(slots, v_strides, PAGE_SIZE)
            entry += KEYS
            slots = gl.load(list_ptr + gl.minimum(entry, last - 1))
            _fill(k_rows, v_rows, ring, stage, phase, DIM)
            stage, phase = _after(stage, phase, STAGES)
        if alone:
            token = first_token + gl.minimum(gl.arange(0, KEYS, layout=COPY_ROWS), drafts - 1)
            k_rows = k_new_ptr + token * new_strides[0] + kv_head * new_strides[1]
            v_rows = v_new_ptr + token * new_strides[2] + kv_head * new_strides[3]
            _fill(k_rows, v_rows, ring, stage, phase, DIM)
            stage, phase = _after(stage, phase, STAGES)
        number += 1
    hopper.async_copy.wait_group(0)  # nothing is on its way when the program ends


@gluon_jit
def _fill(k_rows, v_rows, ring, stage, phase, DIM: tl.constexpr):
    """Begin to copy a tile of keys and of values to a place of the ring, each as soon as it is free there."""
    k, k_full, k_free, v, v_full, v_free = ring
    columns = gl.arange(0, DIM, layout=COPY_COLUMNS)
    hopper.mbarrier.wait(k_free.index(stage), phase)
    hopper.async_copy.async_copy_global_to_shared(k.index(stage), k_rows[:, None] + columns[None, :])
    hopper.async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
    hopper.mbarrier.wait(v_free.index(stage), phase)
    hopper.async_copy.async_copy_global_to_shared(v.index(stage), v_rows[:, None] + columns[None, :])
    hopper.async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)


@gluon_jit
def _attend(
    queries,
    ring,
    schedule,
    masks,
    states,
    rows,
    written,
    strides,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEW_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """The group that attends: to each tile in its turn, and then to the drafts, where nobody else reads the request."""
    # Who holds what: scores and answers as tensor cores leave them, 16 rows a warp.
    SCORES: tl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ANSWERS: tl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    SCORE_ROWS: tl.constexpr = gl.SliceLayout(1, SCORES)
    SCORE_KEYS: tl.constexpr = gl.SliceLayout(0, SCORES)
    ROWS: tl.constexpr = gl.SliceLayout(1, ANSWERS)
    q, q_full, q_free = queries
    sinks_ptr, out_ptr, lse_ptr = written
    out_stride_token, out_stride_head, lse_stride_token, lse_stride_head = strides
    row = gl.arange(0, ROWS_A_TILE, layout=ROWS)
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, ANSWERS))
    first_number = gl.load(schedule[1] + gl.program_id(0))
    number = first_number
    end = gl.load(schedule[1] + gl.program_id(0) + 1)
    factor = scale * LOG2_E  # one multiply-add makes an exponent of a product
    stage = 0
    phase = 0
    while number < end:
        req, kv_head, first, last, partial, first_token, drafts, alone = _work(schedule, number, KV_HEADS)
        turn = (number - first_number) & 1
        running_max = gl.full([ROWS_A_TILE], float("-inf"), gl.float32, SCORE_ROWS)
        running_sum = gl.zeros([ROWS_A_TILE], gl.float32, SCORE_ROWS)
        acc = gl.zeros([ROWS_A_TILE, DIM], gl.float32, ANSWERS)
        hopper.mbarrier.wait(q_full.index(turn), ((number - first_number) >> 1) & 1)
        for at in range(first, last, KEYS):
            seen = (at + gl.arange(0, KEYS, layout=SCORE_KEYS) < last)[None, :]
            running_max, running_sum, acc = _step(
                q.index(turn), ring, stage, phase, seen, running_max, running_sum, acc, factor, KEYS, SCORES, ANSWERS
            )
            stage, phase = _after(stage, phase, STAGES)
        mine = row // GROUP < drafts
        if KEEPS or not alone:
            # To be merged; recordings want them in any case.
            natural_max = gl.convert_layout(running_max, ROWS) * LN_2
            kept_sum = gl.convert_layout(running_sum, ROWS)
            store_states(natural_max, kept_sum, acc, states, partial * rows + row, columns, mine, DIM, True)
        if alone:
            seen = _seen_drafts(req, drafts, masks, GROUP, KEYS, CAUSAL, NEW_MASK, SCORE_ROWS, SCORE_KEYS)
            running_max, running_sum, acc = _step(
                q.index(turn), ring, stage, phase, seen, running_max, running_sum, acc, factor, KEYS, SCORES, ANSWERS
            )
            stage, phase = _after(stage, phase, STAGES)
            whole_max = gl.convert_layout(running_max, ROWS) * LN_2
            whole_sum = gl.convert_layout(running_sum, ROWS)
            head = kv_head * GROUP + row % GROUP
            token = first_token + row // GROUP
            if HAS_SINKS:
                sink = gl.load(sinks_ptr + head, mask=mine, other=0.0).to(gl.float32)
                whole_max, whole_sum, fade = join_sink(whole_max, whole_sum, sink)
                acc = acc * fade[:, None]
            out_rows = out_ptr + token * out_stride_token + head.to(gl.int64) * out_stride_head
            lse_rows = lse_ptr + token * lse_stride_token + head.to(gl.int64) * lse_stride_head
            write_rows(whole_max, whole_sum, acc, 1.0, out_rows, lse_rows, columns, mine, HAS_LSE)
        hopper.mbarrier.arrive(q_free.index(turn), count=1)
        number += 1


@gluon_jit
def _seen_drafts(
    req,
    drafts,
    masks,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEW_MASK: tl.constexpr,
    SCORE_ROWS: tl.constexpr,
    SCORE_KEYS: tl.constexpr,
):
    """[rows, keys]: which drafts of a request see which, by its mask or by causality."""
    indptr_ptr, start_ptr, bits_ptr, mask_indptr_ptr, num_bits = masks
    q_number = gl.arange(0, ROWS_A_TILE, layout=SCORE_ROWS) // GROUP
    k_number = gl.arange(0, KEYS, layout=SCORE_KEYS)
    seen = (q_number < drafts)[:, None] & (k_number < drafts)[None, :]
    if NEW_MASK:
        cached = gl.load(start_ptr + req) + gl.load(indptr_ptr + req + 1) - gl.load(indptr_ptr + req)
        line = gl.load(mask_indptr_ptr + req) + q_number.to(gl.int64) * (cached + drafts)
        bit = line[:, None] + (cached + k_number)[None, :]
        # Where only the device knows the lengths nobody could check the mask's size: what it lacks is hidden.
        seen = seen & (gl.load(bits_ptr + bit, mask=seen & (bit < num_bits), other=0) != 0)
    elif CAUSAL:
        seen = seen & (k_number[None, :] <= q_number[:, None])
    return seen


@gluon_jit
def _step(
    q,
    ring,
    stage,
    phase,
    seen,
    running_max,
    running_sum,
    acc,
    factor,
    KEYS: tl.constexpr,
    SCORES: tl.constexpr,
    ANSWERS: tl.constexpr,
):
    """The softmax state, of base 2, after the ring's next tile."""
    k, k_full, k_free, v, v_full, v_free = ring
    hopper.mbarrier.wait(k_full.index(stage), phase)
    hopper.fence_async_shared()  # what others copied is seen by tensor cores, too
    products = gl.zeros([ROWS_A_TILE, KEYS], gl.float32, SCORES)
    products = hopper.warpgroup_mma(q, k.index(stage).permute((1, 0)), products, use_acc=False, is_async=True)
    products = hopper.warpgroup_mma_wait(0, deps=[products])
    hopper.mbarrier.arrive(k_free.index(stage), count=1)
    products = gl.where(seen, products, float("-inf"))
    new_max = gl.maximum(running_max, gl.max(products, 1) * factor)
    shift = finite_or_zero(new_max)
    p = gl.exp2(products * factor - shift[:, None])
    fade = gl.exp2(running_max - shift)
    running_sum = running_sum * fade + gl.sum(p, 1)
    weights = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, ANSWERS, 2))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, ANSWERS))[:, None]
    hopper.mbarrier.wait(v_full.index(stage), phase)
    hopper.fence_async_shared()
    acc = hopper.warpgroup_mma(weights, v.index(stage), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    hopper.mbarrier.arrive(v_free.index(stage), count=1)
    return new_max, running_sum, acc


VERIFY_SHARES_HOPPER = Launcher(_verify_shares_hopper_kernel, verify_shares_hopper_constants)
