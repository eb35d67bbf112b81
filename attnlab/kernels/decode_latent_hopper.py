"""Decode of many heads over latent rows of 512 + 64 columns (DeepSeek's MLA) by groups of warps that do not wait alike.

The variant of `decode_latent.py` for Hopper GPUs: the same segments, partials and lone answers, and the same merge.
There, all warps load, multiply and weigh in step, and tensor cores rest while weights are computed. Here a program has
three groups of four warps, written in Gluon, which leaves to its author what Triton's compiler decides otherwise:

- One group loads. It fetches the next tile of rows as soon as room for half a tile is free, and asks for the one after
  that to be brought into the L2 cache.
- Two groups attend. Side 0 scores the even tiles and sums up the left half of the answers' columns, side 1 the odd
  tiles and the right half: an accumulator of 64 x 512 numbers fits the registers of neither. Each hands its tile's
  weights to the other, so that one weighs while the other multiplies.

They meet at barriers in shared memory (mbarriers), of which each says one thing: a tile is full, is free, is weighed.
Gluon has no interpreter; on a CPU, and for scores that are not products alone, `decode_latent.py` computes the same.
Source of the method: FlashMLA (DeepSeek, 2025), whose two groups alternate in this way.
"""

from __future__ import annotations

from typing import Any

import torch

from attnlab._triton import (
    device_clock,
    gl,
    gluon_jit,
    hopper,
    multiprocessor,
    release_dependents,
    tl,
    wait_for_earlier,
)
from attnlab.kernels.core import LN_2, LOG2_E
from attnlab.kernels.groups import (
    COPY_COLUMNS,
    COPY_ROWS,
    COPYING,
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
from attnlab.kernels.launcher import Launcher, with_times
from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView
from attnlab.plan.call import DecodeCall
from attnlab.plan.tiles import LATENT_ROW
from attnlab.spec import AttentionSpec

if gl is not None:
    OTHERS_WARPS = tl.constexpr([WARPS, WARPS])
    # A thread's registers, of those of side 1 and of those that load; side 0 has what is left. To attend takes 160 for
    # 64 x 256 answers and 64 x 64 scores alone.
    OTHERS_REGISTERS = tl.constexpr([232, 40])
    # A program's tiles: heads by keys, and of both the columns, two halves that are values, too, and the rest.
    HEADS = tl.constexpr(64)
    KEYS = tl.constexpr(64)
    HALF = tl.constexpr(256)
    REST = tl.constexpr(64)
    # Who holds what. Scores and answers: as tensor cores leave them, 16 rows a warp; rows of one are rows of the other.
    SCORES = tl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
    SCORE_ROWS = tl.constexpr(gl.SliceLayout(1, SCORES.value))
    ANSWERS = tl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
    ROWS = tl.constexpr(gl.SliceLayout(1, ANSWERS.value))
    # What is asked for ahead are lines of 128 bytes, one a thread, of the rows whose sixteenths it copies.
    LINES = tl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
    # Numbers lie in shared memory one behind the other.
    NUMBERS = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def is_for(spec: AttentionSpec, view: KVView) -> bool:
    """Whether it computes a layer of those with LARGE_TILE: one over LATENT_ROW, whose scores are products alone."""
    return (spec.qk_dim, spec.v_dim) == LATENT_ROW and plain_scores(spec, view)


def serves(call: DecodeCall, target: Target) -> bool:
    """Whether it computes a call here: queries in the pool's dtype, and both in rows that can be copied as they lie."""
    q, k = call.q, call.view.k
    return target.is_hopper and is_for(call.spec, call.view) and can_copy(q, k)


def latent_hopper_constants(
    *, spec: AttentionSpec, view: KVView, target: Target, q_dtype: torch.dtype, has_lse: bool, keeps: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on."""
    constants: dict[str, Any] = {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "PAGE_SIZE": view.page_size,
        "HAS_SINKS": spec.has_sinks,
        "HAS_LSE": has_lse,
        "KEEPS": keeps,
        "NARROW": narrow(view.k, view.v),
        "PDL": target.has_pdl,
    }
    return constants, {"num_warps": WARPS, **early_launch(target)}


@gluon_jit
def _decode_latent_hopper_kernel(
    q_ptr,
    k_ptr,
    slots_ptr,
    indptr_ptr,
    segments_ptr,
    programs_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    merge_indptr_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    times_ptr,
    scale,
    v_scale,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KEEPS: tl.constexpr,
    NARROW: tl.constexpr,
    PDL: tl.constexpr,
    TIMES: tl.constexpr,
):
    # What the kernel before reads or writes is not touched before it has ended.
    if PDL:
        wait_for_earlier()
    if TIMES:
        began = device_clock()
    # 1. Room: queries once, two tiles of rows, 216 KB in all. A row's halves lie apart, for each has its own reader.
    # Behind its scores the last 64 columns of a tile are done with, and its weights, as large, take their place.
    HALF_PRECISION: tl.constexpr = q_ptr.dtype.element_ty
    q = gl.allocate_shared_memory(HALF_PRECISION, [2, HEADS, HALF], TILE)
    q_rest = gl.allocate_shared_memory(HALF_PRECISION, [HEADS, REST], TILE)
    left = gl.allocate_shared_memory(HALF_PRECISION, [2, KEYS, HALF], TILE)
    right = gl.allocate_shared_memory(HALF_PRECISION, [2, KEYS, HALF], TILE)
    rest = gl.allocate_shared_memory(HALF_PRECISION, [2, KEYS, REST], TILE)
    maxima = gl.allocate_shared_memory(gl.float32, [2, HEADS], NUMBERS)
    sums = gl.allocate_shared_memory(gl.float32, [4, HEADS], NUMBERS)

    # 2. Barriers, and how often each is signalled until those who wait go on: by every thread that copies, or once.
    BARRIER: tl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    hopper.mbarrier.init(q_full, count=COPYING)
    hopper.mbarrier.init(q_free, count=2)
    for b in gl.static_range(2):
        hopper.mbarrier.init(left_full.index(b), count=COPYING)
        hopper.mbarrier.init(left_free.index(b), count=1)
        hopper.mbarrier.init(right_full.index(b), count=COPYING)
        hopper.mbarrier.init(right_free.index(b), count=1)
        hopper.mbarrier.init(weighed.index(b), count=1)
        hopper.mbarrier.init(summed.index(b), count=1)

    # 3. Each group its own way. Tuples of numbers are written where they are given: a named one forgets constants.
    tiles = (q, q_rest, left, right, rest)
    schedule = (segments_ptr, programs_ptr, merge_indptr_ptr)
    states = (acc_ptr, max_ptr, sum_ptr)
    written = (sinks_ptr, out_ptr, lse_ptr)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0,
                    tiles,
                    (maxima, sums),
                    (q_full, q_free, left_full, right_full, left_free, weighed, summed),
                    schedule,
                    states,
                    written,
                    (scale, v_scale),
                    (out_stride_token, out_stride_head, lse_stride_token, lse_stride_head),
                    KV_HEADS,
                    GROUP,
                    HAS_SINKS,
                    HAS_LSE,
                    KEEPS,
                ),
            ),
            (
                _attend,
                (
                    1,
                    tiles,
                    (maxima, sums),
                    (q_full, q_free, left_full, right_full, right_free, weighed, summed),
                    schedule,
                    states,
                    written,
                    (scale, v_scale),
                    (out_stride_token, out_stride_head, lse_stride_token, lse_stride_head),
                    KV_HEADS,
                    GROUP,
                    HAS_SINKS,
                    HAS_LSE,
                    KEEPS,
                ),
            ),
            (
                _load,
                (
                    tiles,
                    (q_full, q_free, left_full, right_full, left_free, right_free),
                    (q_ptr, k_ptr, slots_ptr, indptr_ptr),
                    (segments_ptr, programs_ptr),
                    (q_stride_token, q_stride_head),
                    (k_stride_page, k_stride_slot, k_stride_head),
                    GROUP,
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
    if TIMES:
        note = times_ptr + (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) * 3
        gl.store(note, multiprocessor().to(gl.int64))
        gl.store(note + 1, began)
        gl.store(note + 2, device_clock())


@gluon_jit
def _load(
    tiles,
    signals,
    read,
    schedule,
    q_strides,
    k_strides,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """The group that loads: queries of each segment, and its rows, a tile at a time, two in turns."""
    q, q_rest, left, right, rest = tiles
    q_full, q_free, left_full, right_full, left_free, right_free = signals
    q_ptr, k_ptr, slots_ptr, indptr_ptr = read
    segments_ptr, programs_ptr = schedule
    # Of heads beyond the group the last one's query is read again; what it finds is not written.
    member = gl.minimum(gl.program_id(0) * HEADS + gl.arange(0, HEADS, layout=COPY_ROWS), GROUP - 1)
    line = gl.arange(0, 8, layout=gl.SliceLayout(0, LINES)) * 64
    first_number = gl.load(programs_ptr + gl.program_id(1))
    number = first_number
    end = gl.load(programs_ptr + gl.program_id(1) + 1)
    pair = 0
    while number < end:
        req, kv_head, first, last, _ = load_segment(segments_ptr, number)
        list_ptr = slots_ptr + gl.load(indptr_ptr + req)
        k_head_ptr = k_ptr + kv_head.to(gl.int64) * k_strides[2]
        entry = first + gl.arange(0, KEYS, layout=COPY_ROWS)
        slots = gl.load(list_ptr + gl.minimum(entry, last - 1))
        hopper.mbarrier.wait(q_free, ((number - first_number) & 1) ^ 1)
        q_rows = q_ptr + req * q_strides[0] + (kv_head * GROUP + member).to(gl.int64) * q_strides[1]
        _copy(q.index(0), q_rows, 0, HALF)
        _copy(q.index(1), q_rows, HALF, HALF)
        _copy(q_rest, q_rows, 2 * HALF, REST)
        hopper.async_copy.mbarrier_arrive(q_full, increment_count=False)
        for _at in range(first, last, 2 * KEYS):
            for b in gl.static_range(2):
                rows = _rows(k_head_ptr, slots, k_strides, PAGE_SIZE, NARROW)
                # The next tile's slots are on their way while this tile waits for room. Behind the segment's last row
                # comes that row again, as finite as it is.
                entry += KEYS
                slots = gl.load(list_ptr + gl.minimum(entry, last - 1))
                hopper.mbarrier.wait(left_free.index(b), (pair & 1) ^ 1)
                _copy(left.index(b), rows, 0, HALF)
                hopper.async_copy.mbarrier_arrive(left_full.index(b), increment_count=False)
                # Both sides read a tile's weights, which lie where its last columns go.
                hopper.mbarrier.wait(right_free.index(b), (pair & 1) ^ 1)
                _copy(right.index(b), rows, HALF, HALF)
                _copy(rest.index(b), rows, 2 * HALF, REST)
                hopper.async_copy.mbarrier_arrive(right_full.index(b), increment_count=False)
                # There is no room yet for the next tile, but in the L2 cache, from where it will come sooner: eight
                # lines of each row, one a thread; the ninth, its last columns, would take a second step.
                ahead = _rows(k_head_ptr, slots, k_strides, PAGE_SIZE, NARROW)
                ahead = gl.convert_layout(ahead, gl.SliceLayout(1, LINES))[:, None] + line[None, :]
                gl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; // $0", "=r,l", [ahead], dtype=gl.int32, is_pure=False, pack=1
                )
            pair += 1
        number += 1
    hopper.async_copy.wait_group(0)  # nothing is on its way when the program ends


@gluon_jit
def _rows(k_head_ptr, slots, k_strides, PAGE_SIZE: tl.constexpr, NARROW: tl.constexpr):
    """Where the rows of slots begin."""
    if NARROW:
        slots = slots.to(gl.int32)
    return k_head_ptr + slot_offsets(slots, k_strides, PAGE_SIZE)


@gluon_jit
def _copy(tile, rows, first: tl.constexpr, columns: tl.constexpr):
    """Begin to copy columns of rows into a tile; whoever waits for it is told by a barrier."""
    at = first + gl.arange(0, columns, layout=COPY_COLUMNS)
    hopper.async_copy.async_copy_global_to_shared(tile, rows[:, None] + at[None, :])


@gluon_jit
def _attend(
    SIDE: tl.constexpr,
    tiles,
    exchanged,
    signals,
    schedule,
    states,
    written,
    factors,
    strides,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """A group that attends. Side 0 scores even tiles and answers for the left half of the columns, side 1 the others.

    Both take the tiles in their order, and so fade alike: a tile's maximum is that of all before it, too.
    """
    q, q_rest, left, right, rest = tiles
    maxima, sums = exchanged
    q_full, q_free, left_full, right_full, free, weighed, summed = signals  # `free`: of the half that is mine
    segments_ptr, programs_ptr, merge_indptr_ptr = schedule
    scale, v_scale = factors
    sinks_ptr, out_ptr, lse_ptr = written
    out_stride_token, out_stride_head, lse_stride_token, lse_stride_head = strides
    values = left if SIDE == 0 else right
    first_number = gl.load(programs_ptr + gl.program_id(1))
    number = first_number
    end = gl.load(programs_ptr + gl.program_id(1) + 1)
    factor = scale * LOG2_E  # one multiply-add makes an exponent of a product
    pair = 0
    while number < end:
        req, kv_head, first, last, partial = load_segment(segments_ptr, number)
        turn = (number - first_number) & 1
        running_max = gl.full([HEADS], float("-inf"), gl.float32, SCORE_ROWS)
        running_sum = gl.zeros([HEADS], gl.float32, SCORE_ROWS)  # of the tiles that this side scores
        acc = gl.zeros([HEADS, HALF], gl.float32, ANSWERS)
        hopper.mbarrier.wait(q_full, turn)
        hopper.fence_async_shared()
        for at in range(first, last, 2 * KEYS):
            phase = pair & 1
            # 0, which the compiler cannot know: where all tiles lie would be computed once, and kept in registers that
            # there are not enough of.
            even = pair >> 30
            odd = even + 1
            entry = at + SIDE * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))

            products = _multiply(q, q_rest, left, right, rest, left_full, right_full, even + SIDE, phase)
            # Tile 0: weighed by side 0, while side 1 waits for products of its own.
            if SIDE == 0:
                products = hopper.warpgroup_mma_wait(0, deps=[products])
                middle, fade, added = _weigh(products, entry < last, running_max, factor, 0, rest, maxima, weighed)
                running_sum = running_sum * fade + added
            else:
                middle, fade = _weighed(running_max, 0, phase, maxima, weighed)
                running_sum = running_sum * fade
            acc = acc * gl.convert_layout(fade, ROWS)[:, None]
            acc = hopper.warpgroup_mma(rest.index(even), values.index(even), acc, is_async=True)
            # Tile 1: weighed by side 1, while both multiply.
            if SIDE == 1:
                products = hopper.warpgroup_mma_wait(1, deps=[products])
                running_max, fade, added = _weigh(products, entry < last, middle, factor, 1, rest, maxima, weighed)
                running_sum = running_sum * fade + added
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            hopper.mbarrier.arrive(free.index(0), count=1)
            if SIDE == 0:
                running_max, fade = _weighed(middle, 1, phase, maxima, weighed)
                running_sum = running_sum * fade
            acc = acc * gl.convert_layout(fade, ROWS)[:, None]
            acc = hopper.warpgroup_mma(rest.index(odd), values.index(odd), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            hopper.mbarrier.arrive(free.index(1), count=1)
            pair += 1
        hopper.mbarrier.arrive(q_free, count=1)

        # Both sides' sums. There is room for two segments': a side may be one ahead of the other, and no more, as no
        # program has a segment without keys (`Schedule.validate`) and a pair of tiles is weighed by both.
        sums.index(turn * 2 + SIDE).store(running_sum)
        hopper.mbarrier.arrive(summed.index(SIDE), count=1)
        hopper.mbarrier.wait(summed.index(1 - SIDE), turn)
        running_sum = sums.index(turn * 2).load(ROWS) + sums.index(turn * 2 + 1).load(ROWS)
        running_max = gl.convert_layout(running_max, ROWS) * LN_2

        member = gl.program_id(0) * HEADS + gl.arange(0, HEADS, layout=ROWS)
        mine = member < GROUP
        columns = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, ANSWERS))
        owner = merge_indptr_ptr + req * KV_HEADS + kv_head
        alone = gl.load(owner + 1) - gl.load(owner) == 1
        if KEEPS or not alone:
            # To be merged; recordings want it in any case.
            state = partial * GROUP + member
            store_states(running_max, running_sum, acc, states, state, columns, mine, 2 * HALF, SIDE == 0)
        if alone:
            head = kv_head * GROUP + member
            if HAS_SINKS:
                sink = gl.load(sinks_ptr + head, mask=mine, other=0.0).to(gl.float32)
                running_max, running_sum, fade = join_sink(running_max, running_sum, sink)
                acc = acc * fade[:, None]
            head = head.to(gl.int64)
            write_rows(
                running_max,
                running_sum,
                acc,
                v_scale,
                out_ptr + req * out_stride_token + head * out_stride_head,
                lse_ptr + req * lse_stride_token + head * lse_stride_head,
                columns,
                mine,
                HAS_LSE and SIDE == 0,
            )
        number += 1


@gluon_jit
def _multiply(q, q_rest, left, right, rest, left_full, right_full, b, phase):
    """Begin to multiply all queries with the rows of tile `b`, each half as soon as it is there."""
    products = gl.zeros([HEADS, KEYS], gl.float32, SCORES)
    none = b >> 1  # 0, as a number that the compiler does not know
    hopper.mbarrier.wait(left_full.index(b), phase)
    hopper.fence_async_shared()  # what others copied is seen by tensor cores, too
    products = hopper.warpgroup_mma(
        q.index(none), left.index(b).permute((1, 0)), products, use_acc=False, is_async=True
    )
    hopper.mbarrier.wait(right_full.index(b), phase)
    hopper.fence_async_shared()
    products = hopper.warpgroup_mma(q.index(none + 1), right.index(b).permute((1, 0)), products, is_async=True)
    return hopper.warpgroup_mma(q_rest, rest.index(b).permute((1, 0)), products, is_async=True)


@gluon_jit
def _weigh(products, seen, running_max, factor, b: tl.constexpr, rest, maxima, weighed):
    """Leave weights and maxima of tile `b` for both sides; the new maximum, what all before fades by, the sum."""
    products = gl.where(seen[None, :], products, float("-inf"))
    new_max = gl.maximum(running_max, gl.max(products, 1) * factor)
    shift = finite_or_zero(new_max)
    p = gl.exp2(products * factor - shift[:, None])
    maxima.index(b).store(new_max)
    rest.index(b).store(p.to(rest.dtype))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(weighed.index(b), count=1)
    return new_max, gl.exp2(running_max - shift), gl.sum(p, 1)


@gluon_jit
def _weighed(running_max, b: tl.constexpr, phase, maxima, weighed):
    """Wait until the other side has weighed tile `b`; the new maximum, and what all before fades by."""
    hopper.mbarrier.wait(weighed.index(b), phase)
    new_max = maxima.index(b).load(SCORE_ROWS)
    return new_max, gl.exp2(running_max - finite_or_zero(new_max))


DECODE_LATENT_HOPPER = Launcher(_decode_latent_hopper_kernel, with_times(latent_hopper_constants))
