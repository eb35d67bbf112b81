"""Extend for Hopper: long prompts at the speed of its tensor cores, where sight alone hides keys.

The variant of `extend.py` for what most layers of most models are: no mask, no modifier. What makes it fast:

- Most tiles of keys are seen whole by every query of a program. They are attended without any mask.
- Two programs share a multiprocessor, so that one computes while the other waits. Each thread then has 128 registers,
  and none to spare: what the end needs is computed anew there rather than kept. Spills would cost more than their
  loads and stores, as ptxas makes tensor core instructions wait for each other where it must spill.
- A step's arithmetic stands in `if flag > 0`, which always holds, but which the compiler cannot see through. Its
  pipeliner would put the copies of the next tile behind the arithmetic of this one; an `if` whose results go to the
  next step alone it puts last, so that the copies are on their way before the arithmetic begins.
- Whole tiles of new keys, and of cached ones in pages that hold a tile, are fetched in boxes (`boxes.py`) rather than
  gathered row by row: extends over pages of 64 take nine tenths of the time. The arithmetic is the same either way.

Source of the method: FlashAttention-2 (Dao, 2023), over paged keys, with its exponentials of base 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.kernels.boxes import NO_BOXES, boxes_of, fits_box, rows_of_pages
from attnlab.kernels.core import (
    LOG2_E,
    dots,
    finite_or_zero,
    join_sink,
    load_queries,
    load_tile,
    score_pipeline,
    slot_offsets,
    visible_keys,
    write_rows,
)
from attnlab.kernels.launch import (
    lifted,
    narrow,
    padded,
    scales_last,
    sight_constants,
    slot_stride,
    tile_constants,
    written,
)
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.extend_call import ExtendCall
from attnlab.spec import AttentionSpec

FLAG = 1
"""A number of the launch that is always 1, which the compiler does not know."""
FEW_QUERIES = 64
"""Up to so many of a request are better served by the smaller tiles of `extend.py`."""


def serves(call: ExtendCall, target: Target) -> bool:
    """Whether this variant is the faster one for a call that it can serve.

    A few queries are better served by smaller tiles, unless no tile may depend on what else is in the batch.
    """
    few = call.queries.most <= FEW_QUERIES and not call.batch_invariant
    return target.is_hopper and not few and has_tiles(call.spec, call.view, call.q.dtype) and can_serve(call)


def can_serve(call: ExtendCall) -> bool:
    """Whether the kernel computes what the call asks for, on any device.

    Queries stand one behind the other, nothing behind a window is seen, and scores are scaled last.
    """
    spec, queries = call.spec, call.queries
    both_ways = spec.sight.partial and not spec.sight.causal
    plain = spec.mod is None and queries.bits is None and scales_last(spec.scale, call.view.k_scale)
    return plain and (queries.ordered or spec.cross) and not both_ways


def has_tiles(spec: AttentionSpec, view: KVView, q_dtype: torch.dtype) -> bool:
    """Whether tensor cores take tiles of this shape as stored: 16-bit, values no narrower than a tile of keys."""
    half = (torch.bfloat16, torch.float16)
    stored = view.k.dtype in half and compute_dtype(q_dtype, view.k.dtype) in half
    return stored and max(spec.qk_dim, spec.v_dim) <= 256 and padded(spec.v_dim) >= 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig:
    """Tile sizes and launch options. `num_stages` is of all loops; `registers` is the most that a thread may have."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int | None

    @classmethod
    def choose(cls, spec: AttentionSpec, target: Target) -> HopperConfig:
        """Return the choice of the table (`attnlab.kernels.tuning`)."""
        return cls(**tuned("extend_hopper", target, qk_dim=spec.qk_dim, v_dim=spec.v_dim))


def extend_hopper(call: ExtendCall, *, target: Target) -> None:
    """Attend for every query token, and write `call.out` and, where given, `call.lse`, as `extend.extend` does.

    Grid: (query heads x query tiles of the longest request, requests), as there.
    """
    spec, view, layout, queries = call.spec, call.view, call.lane.layout, call.queries
    reqs, tokens = layout.index.reqs, call.q.shape[0]
    if reqs == 0 or tokens == 0 or queries.most == 0:
        return
    constants, options = hopper_constants(
        spec=spec,
        view=view,
        target=target,
        q_dtype=call.q.dtype,
        one_pass=call.one_pass,
        parts=call.parts,
        has_sinks=call.sinks is not None,
        has_lse=call.lse is not None,
        all_narrow=narrow(view.k, view.v, *(x for x in (call.k, call.v) if x is not None)),
    )
    q = lifted(call.q, target)
    # In one pass the new tokens' keys lie in the pool: then, and where an option is off, any tensor will do.
    k_new, v_new = (q if x is None else lifted(x, target) for x in (call.k, call.v))
    boxes = boxes_of_call(call, k_new, v_new, block_n=constants["BLOCK_N"])
    rows = written(call.out, target)
    lse, sinks = (q if x is None else x for x in (call.lse, call.sinks))
    _extend_hopper_kernel[(spec.heads * -(-queries.most // constants["BLOCK_M"]), reqs)](
        q,
        k_new,
        v_new,
        view.k,
        view.v,
        rows,
        lse,
        sinks,
        layout.index.slots,
        layout.index.indptr,
        layout.start,
        layout.start_visible,
        queries.indptr,
        queries.positions,
        spec.scale,
        spec.scale * view.k_scale,
        view.v_scale,
        1.0 if spec.softcap is None else spec.softcap,
        layout.sight.window or 0,
        layout.sight.chunk or 0,
        FLAG,
        *boxes,
        q.stride(0),
        q.stride(1),
        k_new.stride(0),
        k_new.stride(1),
        v_new.stride(0),
        v_new.stride(1),
        view.k.stride(0),
        slot_stride(view, view.k),
        view.k.stride(-2),
        view.v.stride(0),
        slot_stride(view, view.v),
        view.v.stride(-2),
        rows.stride(0),
        rows.stride(1),
        lse.stride(0),
        lse.stride(1),
        **constants,
        **options,
    )
    if rows is not call.out:
        call.out.copy_(rows)


def takes_boxes(spec: AttentionSpec) -> bool:
    """Whether whole tiles of this attention can be boxes.

    Under a window or in chunks few tiles are seen whole, and lists begin anywhere: boxes save nothing there, and more
    registers would spill. Caps and temperatures already take what registers there are: boxes would more than double
    the spills of Grok's shape (48 to 120 bytes), some of them inside the loops over keys, and nobody has timed whether
    they pay for that.
    """
    capped = spec.softcap is not None or spec.temperature_len is not None
    return not spec.sight.partial and not capped and fits_box(spec.qk_dim) and fits_box(spec.v_dim)


def reads_boxes(spec: AttentionSpec, *, run: int, one_pass: bool, parts: str, block_n: int) -> tuple[bool, bool]:
    """Return whether whole tiles of cached keys can be boxes, and those of new ones, wherever memory allows it.

    Each can where the call reads such keys. Cached ones must be listed in runs of consecutive slots that hold a tile.
    """
    takes = takes_boxes(spec)
    cached = takes and parts != "new" and run % block_n == 0
    new = takes and parts != "cached" and not one_pass
    return cached, new


def boxes_of_call(call: ExtendCall, k_new: Tensor, v_new: Tensor, *, block_n: int) -> tuple[Any, Any, Any, Any]:
    """Return the descriptors of cached keys and values, and of new ones, which are `k_new` and `v_new`.

    A pair is None where the call does not read it, or where its tiles must be gathered: keys whose slots are not known
    to be consecutive, and memory that a box cannot be laid over. A prompt of which nothing is cached has boxes of its
    new keys alone: a loop with more of them, which it would not enter, costs registers.
    """
    layout, view = call.lane.layout, call.view
    cached, new = reads_boxes(call.spec, run=layout.run, one_pass=call.one_pass, parts=call.parts, block_n=block_n)
    of_cached = of_new = NO_BOXES
    if cached and layout.index.slots.shape[0] > 0:
        of_cached = boxes_of(rows_of_pages(view.k), rows_of_pages(view.v), block_n=block_n)
    if new:
        of_new = boxes_of(k_new, v_new, block_n=block_n)
    return *of_cached, *of_new


def hopper_constants(
    *,
    spec: AttentionSpec,
    view: KVView,
    target: Target,
    q_dtype: torch.dtype,
    one_pass: bool,
    parts: str,
    has_sinks: bool,
    has_lse: bool,
    all_narrow: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on."""
    compute = compute_dtype(q_dtype, view.k.dtype)
    config = HopperConfig.choose(spec, target)
    tiles = tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n)
    constants: dict[str, Any] = {
        "HEADS": spec.heads,
        "GROUP": spec.group,
        "BLOCK_M": config.block_m,
        **{name: value for name, value in tiles.items() if name not in ("MOD", "V_IS_K_TILE")},
        "STAGES": config.num_stages,
        "NARROW": all_narrow,
        "ONE_PASS": one_pass,
        "READ_CACHED": parts != "new",
        "READ_NEW": not one_pass and parts != "cached",
        "CAUSAL": spec.sight.causal,
        **{name: on for name, on in sight_constants(spec, masked=False).items() if name != "HAS_MASK"},
        "HAS_SINKS": has_sinks,
        "HAS_LSE": has_lse,
    }
    options: dict[str, Any] = {"num_warps": config.num_warps}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    return constants, options


@jit(do_not_specialize=("window", "chunk", "flag"))
def _extend_hopper_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    start_visible_ptr,
    q_indptr_ptr,
    positions_ptr,
    scale,
    scale_cached,
    v_scale,
    softcap,
    window,
    chunk,
    flag,
    k_boxes,
    v_boxes,
    k_new_boxes,
    v_new_boxes,
    q_stride_token,
    q_stride_head,
    k_new_stride_token,
    k_new_stride_head,
    v_new_stride_token,
    v_new_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
    NARROW: tl.constexpr,
    ONE_PASS: tl.constexpr,
    READ_CACHED: tl.constexpr,
    READ_NEW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    # 1. What is mine: a tile of queries of one request, for one head. They stand one behind the other.
    req = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEADS
    first_token = tl.load(q_indptr_ptr + req).to(tl.int64)
    new = (tl.load(q_indptr_ptr + req + 1) - first_token).to(tl.int32)
    if tile * BLOCK_M >= new:
        return
    kv_head = (head // GROUP).to(tl.int64)
    k_column, v_column = (head // GROUP) * QK_DIM, (head // GROUP) * V_DIM
    q_number = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # among the request's new tokens
    mask_m = q_number < new
    token = first_token + q_number
    lowest = tl.load(positions_ptr + first_token + tile * BLOCK_M)
    highest = lowest + tl.minimum(BLOCK_M, new - tile * BLOCK_M) - 1
    q_pos = lowest + tl.arange(0, BLOCK_M)
    q_rows = q_ptr + token * q_stride_token + head.to(tl.int64) * q_stride_head
    q, q_rest = load_queries(q_rows, mask_m, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)

    # 2. The cached keys, of a list that in one pass holds the new ones too.
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    list_start = tl.load(indptr_ptr + req)
    listed = tl.load(indptr_ptr + req + 1) - list_start
    start = tl.load(start_ptr + req)
    if READ_CACHED:
        running_max, running_sum, acc = _attend_span(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            q_pos,
            lowest,
            highest,
            start,
            tl.load(start_visible_ptr + req),
            listed,
            slots_ptr + list_start,
            k_ptr + kv_head * k_stride_head,
            k_stride_page,
            k_stride_slot,
            v_ptr + kv_head * v_stride_head,
            v_stride_page,
            v_stride_slot,
            k_boxes,
            v_boxes,
            0,
            k_column,
            v_column,
            scale_cached,
            softcap,
            window,
            chunk,
            flag,
            QK_DIM,
            V_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_R,
            BLOCK_V,
            PAGE_SIZE,
            HAS_SOFTCAP,
            TEMPERATURE_LEN,
            COMPUTE,
            STAGES,
            NARROW,
            True,
            CAUSAL and ONE_PASS,
            HAS_WINDOW,
            HAS_CHUNK,
        )
        acc = acc * v_scale

    # 3. The new keys, straight from the call: they are not scaled, and lie one behind the other.
    if READ_NEW:
        running_max, running_sum, acc = _attend_span(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            q_pos,
            lowest,
            highest,
            start + listed,
            start + listed,
            new,
            slots_ptr,
            k_new_ptr + first_token * k_new_stride_token + kv_head * k_new_stride_head,
            k_new_stride_token,
            k_new_stride_token,
            v_new_ptr + first_token * v_new_stride_token + kv_head * v_new_stride_head,
            v_new_stride_token,
            v_new_stride_token,
            k_new_boxes,
            v_new_boxes,
            tl.load(q_indptr_ptr + req),  # again: what was kept would spill in the loops
            k_column,
            v_column,
            scale,
            softcap,
            window,
            chunk,
            flag,
            QK_DIM,
            V_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_R,
            BLOCK_V,
            1,
            HAS_SOFTCAP,
            TEMPERATURE_LEN,
            COMPUTE,
            STAGES,
            NARROW,
            False,
            CAUSAL,
            HAS_WINDOW,
            HAS_CHUNK,
        )

    # 4. Maxima are of base 2. The sink joins the denominator once; then normalise.
    running_max = running_max / 1.4426950408889634
    if HAS_SINKS:
        running_max, running_sum, fade = join_sink(running_max, running_sum, tl.load(sinks_ptr + head).to(tl.float32))
        acc = acc * fade[:, None]
    # Anew, as if the compiler had not seen it: rows that were kept would hold 16 registers through all loops.
    q_number = tile * BLOCK_M + tl.arange(0, BLOCK_M) * flag
    mask_m = q_number < new
    token = first_token + q_number
    out_rows = out_ptr + token * out_stride_token + head.to(tl.int64) * out_stride_head
    lse_rows = lse_ptr + token * lse_stride_token + head.to(tl.int64) * lse_stride_head
    write_rows(running_max, running_sum, acc, out_rows, lse_rows, mask_m, V_DIM, BLOCK_V, HAS_LSE)


@jit
def _attend_span(
    running_max,
    running_sum,
    acc,
    q,
    q_rest,
    q_pos,
    lowest,
    highest,
    start,
    start_visible,
    count,
    list_ptr,
    k_head_ptr,
    k_stride_page,
    k_stride_slot,
    v_head_ptr,
    v_stride_page,
    v_stride_slot,
    k_boxes,
    v_boxes,
    first_row,
    k_column,
    v_column,
    scale,
    softcap,
    window,
    chunk,
    flag,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
    NARROW: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """The softmax state of queries `lowest` to `highest` after `count` keys, of which the first stands at `start`.

    The keys lie where a list says (LISTED) or one behind the other. Tiles that no query sees are left out; those that
    all see whole come in the middle, without masks; PART 0 and 2 are the tiles in front of and behind them.
    Those in the middle are boxes where there are any: rows from the tile's first slot on, or from `first_row + at` on.
    """
    tl.static_assert(k_boxes is None or (v_boxes is not None and BLOCK_R == 0))
    # 1. The first key that any query sees, and the first that all of them see.
    seen_from = start_visible
    whole_from = start_visible
    if HAS_WINDOW:
        seen_from = tl.maximum(seen_from, lowest - window + 1)
        whole_from = tl.maximum(whole_from, highest - window + 1)
    if HAS_CHUNK:
        seen_from = tl.maximum(seen_from, lowest // chunk * chunk)
        whole_from = tl.maximum(whole_from, highest // chunk * chunk)
    # 2. Behind the last key that any query sees, and that all of them see.
    seen_to = count
    whole_to = count
    if CAUSAL:
        seen_to = tl.minimum(count, highest + 1 - start)
        whole_to = tl.minimum(count, lowest + 1 - start)
    # 3. Four borders of tiles. Where no tile is seen whole, the first two parts end together, or the last two begin so.
    begin = tl.maximum(seen_from - start, 0) // BLOCK_N * BLOCK_N
    middle = tl.maximum(tl.minimum(tl.cdiv(whole_from - start, BLOCK_N) * BLOCK_N, seen_to), begin)
    behind = tl.maximum(whole_to // BLOCK_N * BLOCK_N, middle)
    borders = (begin, middle, behind, seen_to)

    for PART in tl.static_range(3):
        if PART != 0 or HAS_WINDOW or HAS_CHUNK:
            for at in tl.range(borders[PART], borders[PART + 1], BLOCK_N, num_stages=STAGES):
                visible = None
                if PART == 1 and k_boxes is not None:
                    row = tl.load(list_ptr + at).to(tl.int32) if LISTED else first_row + at
                    k = k_boxes.load([row, k_column]).to(COMPUTE)
                    v = v_boxes.load([row, v_column]).to(COMPUTE)
                else:
                    entry = at + tl.arange(0, BLOCK_N)
                    if PART == 1:
                        mask_n = None
                        rows = tl.load(list_ptr + entry) if LISTED else entry
                    else:
                        mask_n = entry < seen_to
                        rows = tl.load(list_ptr + entry, mask=mask_n, other=0) if LISTED else entry
                        kv_pos = start + entry
                        visible = visible_keys(
                            q_pos,
                            kv_pos,
                            q_pos,
                            kv_pos,
                            kv_pos,
                            tl.full([1], True, tl.int1),  # of queries that are not there nothing is written
                            mask_n & (kv_pos >= start_visible),
                            None,
                            None,
                            None,
                            window,
                            chunk,
                            CAUSAL,
                            False,
                            HAS_WINDOW,
                            HAS_CHUNK,
                            False,
                        )
                    rows = rows.to(tl.int32) if NARROW else rows.to(tl.int64)
                    k_rows = k_head_ptr + slot_offsets(rows, k_stride_page, k_stride_slot, PAGE_SIZE)
                    v_rows = v_head_ptr + slot_offsets(rows, v_stride_page, v_stride_slot, PAGE_SIZE)
                    k = load_tile(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE)
                    if BLOCK_R > 0:
                        k_rest = load_tile(k_rows, mask_n, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE)
                    v = load_tile(v_rows, mask_n, 0, BLOCK_V, V_DIM, COMPUTE)
                if flag > 0:  # always: see the top of this file
                    scores = dots(q, k, True)
                    if BLOCK_R > 0:
                        scores += dots(q_rest, k_rest, True)
                    if HAS_SOFTCAP or TEMPERATURE_LEN > 0:
                        scores = score_pipeline(
                            scores,
                            q_pos[:, None],
                            None,
                            None,
                            None,
                            visible,
                            scale,
                            softcap,
                            None,
                            None,
                            None,
                            None,
                            HAS_SOFTCAP,
                            TEMPERATURE_LEN,
                            None,
                        )
                        factor = LOG2_E
                    else:
                        if visible is not None:
                            scores = tl.where(visible, scores, float("-inf"))
                        factor = scale * LOG2_E
                    # The factor joins the subtraction in one instruction.
                    new_max = tl.maximum(running_max, tl.max(scores, 1) * factor)
                    shift = finite_or_zero(new_max)
                    p = tl.exp2(scores * factor - shift[:, None])
                    fade = tl.exp2(running_max - shift)
                    running_sum = running_sum * fade + tl.sum(p, 1)
                    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
                    running_max = new_max
    return running_max, running_sum, acc
