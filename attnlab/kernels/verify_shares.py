"""Verify over even shares: a program reads one share of all keys for the drafts of whichever requests it falls into.

The variant of `verify.py`'s split stage for schedules that deal several segments to a program. It leaves the same
partials, for the same merge; where a request has one range, and `answers_alone` holds, the drafts are attended to on
the spot and the answer is written. Cached keys stand before every draft: a window, a chunk or a mask is all that hides
them, so that most tiles need no mask. On a Hopper GPU `verify_shares_hopper.py` computes plain scores of few drafts.
Source of the method: Stream-K (Osama et al., 2023), LeanAttention (Sanovar et al., 2024), tree attention of SpecInfer
(Miao et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlab._triton import jit, release_dependents, tl, wait_for_earlier
from attnlab.kernels import verify_shares_hopper
from attnlab.kernels.core import (
    attend_shares_tile,
    join_sink,
    load_queries,
    load_segment,
    natural,
    slot_offsets,
    store_states,
    visible_keys,
    write_rows,
)
from attnlab.kernels.launch import (
    early_launch,
    narrow,
    pair_constants,
    plain_scores,
    sendable,
    sight_constants,
    tile_constants,
)
from attnlab.kernels.launcher import Launched, Launcher
from attnlab.kernels.pairs import join_columns, load_paired_queries
from attnlab.kernels.sweep import attend_loaded_new, attend_new, load_new, seen_drafts
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.kernels.verify import answers_alone
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.extend_call import VerifyCall
from attnlab.spec import AttentionSpec

BLOCK_NEW = 16
"""Drafts that are attended to at a time, the fewest that a tensor core multiplies. The first so many are loaded beside
the queries, where that was timed (Hopper): a program that has its multiprocessor alone would wait for them after the
keys. Elsewhere the registers that they take spill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySharesConfig:
    """Tile sizes and launch options for one shape on one target. `num_stages` is of the loop over most keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(
        cls,
        spec: AttentionSpec,
        target: Target,
        *,
        compute: torch.dtype,
        kv_dtype: torch.dtype,
        masked: bool,
        rows: int,
    ) -> VerifySharesConfig:
        """Return the choice of the table (`attnlab.kernels.tuning`) for so many rows (drafts x group) a request.

        `masked`: the bits of a mask are read for cached keys.
        """
        return cls(
            **tuned(
                "verify_shares",
                target,
                qk_dim=spec.qk_dim,
                v_dim=spec.v_dim,
                compute=compute,
                kv=kv_dtype,
                masked=masked,
                modifier=spec.mod is not None,
                rows=rows,
                bounded=spec.sight.partial,
            )
        )


def verify_shares(call: VerifyCall, *, target: Target) -> Launched | None:
    """Leave drafts' softmax states over segments that are to be merged in `call.partials`, whole answers in `call.out`.

    Computes: as `verify_split`; where `answers_alone` holds and a request has one segment of a KV head, what
    `verify_merge` computes of it too, and the state only where `call.keeps`.
    Shapes: as `VerifyCall` has them.
    Grid: (programs, tiles of rows): a program owns its segments of the schedule, and a tile of (draft, head) pairs.
    Reads/writes: the keys and values of the segments' slots, and drafts; of partials and outputs, its own rows.
    """
    spec, view, lane, queries = call.spec, call.view, call.lane, call.queries
    if lane.layout.index.reqs == 0 or queries.most == 0:
        return None
    if verify_shares_hopper.serves(call, target):
        return verify_shares_hopper.VERIFY_SHARES_HOPPER.launch(
            target,
            (lane.schedule.programs, 1, 1),
            (call.arguments, view.arguments, lane.arguments, call.partials.arguments, queries.arguments),
            spec=spec,
            view=view,
            target=target,
            new_masked=queries.bits is not None,
            has_lse=call.lse is not None,
            keeps=call.keeps,
        )
    rows, sent = queries.most * spec.group, sendable(call, target)
    launched = VERIFY_SHARES.launch(
        target,
        lambda tiles: (lane.schedule.programs, -(-rows // tiles["BLOCK_M"]), 1),
        (
            sent.arguments,
            view.pair_arguments if view.paired else view.arguments,
            lane.arguments,
            call.partials.arguments,
            queries.arguments,
        ),
        spec=spec,
        view=view,
        target=target,
        q_dtype=call.q.dtype,
        rows=rows,
        masked=queries.cached_masked,
        ordered=queries.ordered,
        new_masked=queries.bits is not None,
        read_new=call.k is not None,
        has_lse=call.lse is not None,
        keeps=call.keeps,
    )
    if sent.out is not call.out:
        call.out.copy_(sent.out)
    return launched


def verify_shares_constants(
    *,
    spec: AttentionSpec,
    view: KVView,
    target: Target,
    q_dtype: torch.dtype,
    rows: int,
    masked: bool,
    ordered: bool,
    new_masked: bool,
    read_new: bool,
    has_lse: bool,
    keeps: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on.

    `masked`: the bits of a mask are read for cached keys; `new_masked`: for drafts.
    """
    compute = compute_dtype(q_dtype, view.k.dtype)
    answers = answers_alone(spec, view)
    config = VerifySharesConfig.choose(spec, target, compute=compute, kv_dtype=view.k.dtype, masked=masked, rows=rows)
    tiles = tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n)
    constants: dict[str, Any] = {
        "GROUP": spec.group,
        "BLOCK_M": config.block_m,
        **tiles,
        **pair_constants(spec=spec, view=view, compute=tiles["COMPUTE"]),
        "PLAIN": plain_scores(spec, view),
        **sight_constants(spec, masked=masked),
        "NARROW": narrow(view.k, view.v),
        "STAGES": config.num_stages,
        "PDL": target.has_pdl,
        "KV_HEADS": spec.kv_heads,
        "BLOCK_NEW": BLOCK_NEW,
        "AHEAD": answers and read_new and (target.is_hopper or target.kind == "interpreter"),
        "ANSWERS": answers,
        "READ_NEW": read_new,
        "ORDERED": ordered,
        "CAUSAL": spec.sight.causal,
        "NEW_MASK": new_masked,
        "HAS_SINKS": spec.has_sinks,
        "HAS_LSE": has_lse,
        "KEEPS": keeps,
    }
    return constants, {"num_warps": config.num_warps, "num_stages": 1, **early_launch(target)}


@jit
def first_shown_to_all(q_pos, mask_m, window, chunk, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """The first position from which on no window or chunk hides a cached key from any of the queries."""
    highest = tl.max(tl.where(mask_m, q_pos, 0), 0)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(first, highest - window + 1)
    if HAS_CHUNK:
        first = tl.maximum(first, highest // chunk * chunk)
    return first


@jit(do_not_specialize=("rows", "num_bits", "window", "chunk"))
def _verify_shares_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    segments_ptr,
    programs_ptr,
    q_indptr_ptr,
    positions_ptr,
    bits_ptr,
    mask_indptr_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    aux_ptr,
    merge_indptr_ptr,
    k_new_ptr,
    v_new_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    scale_cached,
    scale,
    v_scale,
    softcap,
    rows,
    num_bits,
    window,
    chunk,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    aux_stride_token,
    aux_stride_head,
    aux_width,
    k_new_stride_token,
    k_new_stride_head,
    v_new_stride_token,
    v_new_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    PLAIN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
    AHEAD: tl.constexpr,
    ANSWERS: tl.constexpr,
    READ_NEW: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEW_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KEEPS: tl.constexpr,
):
    # What the kernel before reads or writes is not touched before it has ended.
    if PDL:
        wait_for_earlier()
    # Where bits are read, or a modifier may look at what is seen, every tile has a mask.
    ALWAYS: tl.constexpr = HAS_MASK or MOD is not None
    BOUNDED: tl.constexpr = HAS_WINDOW or HAS_CHUNK
    PAIRS: tl.constexpr = k_ptr.dtype.element_ty == tl.int16
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_number = row // GROUP
    number = tl.load(programs_ptr + tl.program_id(0))
    end = tl.load(programs_ptr + tl.program_id(0) + 1)
    request, segment_head, first, last, partial = load_segment(segments_ptr, number, number < end)
    list_start = tl.load(indptr_ptr + request)
    list_end = tl.load(indptr_ptr + request + 1)
    start = tl.load(start_ptr + request)
    first_row = tl.load(q_indptr_ptr + request)
    last_row = tl.load(q_indptr_ptr + request + 1)
    while number < end:
        # 1. What is mine: a range of one request's cached keys, for one KV head, and a tile of (draft, head) pairs.
        ahead = load_segment(segments_ptr, number + 1, number + 1 < end)
        req = request.to(tl.int64)
        kv_head = segment_head.to(tl.int64)
        owner = merge_indptr_ptr + req * KV_HEADS + kv_head
        partials = tl.load(owner + 1) - tl.load(owner)
        k_head_ptr = k_ptr + kv_head * k_stride_head
        v_head_ptr = v_ptr + kv_head * v_stride_head
        cached = start + list_end - list_start
        first_token = first_row.to(tl.int64)
        drafts = (last_row - first_row).to(tl.int32)
        if tl.program_id(1) * BLOCK_M >= drafts * GROUP:
            last = first  # another request has drafts for this tile
        mask_m = q_number < drafts
        head = kv_head * GROUP + row % GROUP
        token = first_token + q_number
        q_pos = tl.load(positions_ptr + token, mask=mask_m, other=0)

        # 2. The first drafts, if they are attended to here, and the queries: both are waited for at once.
        if ANSWERS and READ_NEW:
            k_new_head_ptr = k_new_ptr + kv_head * k_new_stride_head
            v_new_head_ptr = v_new_ptr + kv_head * v_new_stride_head
            first_new, last_new = seen_drafts(
                q_pos,
                mask_m,
                drafts,
                (tl.program_id(1) + 1) * BLOCK_M - 1,
                cached,
                window,
                chunk,
                GROUP,
                BLOCK_NEW,
                ORDERED,
                CAUSAL,
                NEW_MASK,
                HAS_WINDOW,
                HAS_CHUNK,
            )
        if AHEAD:
            new_tile = load_new(
                first_new,
                tl.where(partials == 1, last_new, first_new),
                first_token,
                k_new_head_ptr,
                k_new_stride_token,
                v_new_head_ptr,
                v_new_stride_token,
                QK_DIM,
                V_DIM,
                BLOCK_NEW,
                BLOCK_D,
                BLOCK_R,
                BLOCK_V,
                V_IS_K_TILE,
                COMPUTE,
            )
        q_rows = q_ptr + token * q_stride_token + head * q_stride_head
        if PAIRS:
            q, q_rest, power = load_paired_queries(q_rows, mask_m, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
            factor = scale_cached * power
        else:
            q, q_rest = load_queries(q_rows, mask_m, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
            factor = scale_cached
        bits_row = q_number.to(tl.int64) * (cached + drafts)
        if HAS_MASK or NEW_MASK:
            bits_row += tl.load(mask_indptr_ptr + req)

        # 3. Its keys: tiles that a window or a chunk hides from some, whole tiles that all see, the rest of a tile.
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V // 2 if PAIRS else BLOCK_V], tl.float32)
        if PAIRS:
            acc = (acc, acc)
        clear = first
        if BOUNDED and not ALWAYS:
            shown = first_shown_to_all(q_pos, mask_m, window, chunk, HAS_WINDOW, HAS_CHUNK) - start
            clear = first + tl.cdiv(tl.maximum(tl.minimum(shown, last) - first, 0), BLOCK_N) * BLOCK_N
        whole = clear + tl.maximum(last - clear, 0) // BLOCK_N * BLOCK_N
        # Parts: 0 hidden from some, 1 whole tiles, 2 the rest. Where every tile has a mask anyway, 1 is all of it.
        for PART in tl.static_range(0 if BOUNDED and not ALWAYS else 1, 2 if ALWAYS else 3):
            begin = first if PART == 0 else (clear if PART == 1 else whole)
            stop = last if PART == 2 or ALWAYS else (tl.minimum(clear, last) if PART == 0 else whole)
            for at in tl.range(begin, stop, BLOCK_N, num_stages=STAGES if PART == 1 else 1):
                entry = at + tl.arange(0, BLOCK_N)
                kv_pos = start + entry
                if PART != 1 or ALWAYS:
                    mask_n = entry < last
                    slots = tl.load(slots_ptr + list_start + entry, mask=mask_n, other=0)
                    visible = visible_keys(
                        q_pos,
                        kv_pos,
                        q_number,
                        kv_pos - cached,
                        kv_pos,
                        mask_m,
                        mask_n,
                        bits_ptr,
                        bits_row,
                        num_bits,
                        window,
                        chunk,
                        False,
                        HAS_MASK,
                        HAS_WINDOW,
                        HAS_CHUNK,
                        False,
                    )
                else:
                    mask_n = None
                    slots = tl.load(slots_ptr + list_start + entry)
                    visible = None
                if NARROW:
                    slots = slots.to(tl.int32)
                k_rows = k_head_ptr + slot_offsets(slots, k_stride_page, k_stride_slot, PAGE_SIZE)
                v_rows = v_head_ptr + slot_offsets(slots, v_stride_page, v_stride_slot, PAGE_SIZE)
                running_max, running_sum, acc = attend_shares_tile(
                    running_max,
                    running_sum,
                    acc,
                    q,
                    q_rest,
                    k_rows,
                    v_rows,
                    mask_n,
                    visible,
                    q_pos[:, None],
                    kv_pos[None, :],
                    token[:, None],
                    head[:, None],
                    factor,
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
                    V_IS_K_TILE,
                    HAS_SOFTCAP,
                    TEMPERATURE_LEN,
                    MOD,
                    COMPUTE,
                    PLAIN,
                )

        # The next segment's lists, while the last keys are added up.
        request_ahead, head_ahead, first_ahead, last_ahead, partial_ahead = ahead
        start_ahead = tl.load(start_ptr + request_ahead)
        list_start_ahead = tl.load(indptr_ptr + request_ahead)
        list_end_ahead = tl.load(indptr_ptr + request_ahead + 1)
        first_row = tl.load(q_indptr_ptr + request_ahead)
        last_row = tl.load(q_indptr_ptr + request_ahead + 1)
        if PAIRS:
            running_sum, acc = join_columns(running_sum, acc, BLOCK_M, BLOCK_V)
        if PLAIN:
            running_max = natural(running_max)
        # 4. Leave the states to the merge, unless they are about to be answers; recordings want them then, too.
        state = partial.to(tl.int64) * rows + row
        if KEEPS or not ANSWERS:
            store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_m, V_DIM, BLOCK_V)

        # 5. Nobody else reads this request for this head: the drafts among themselves, the sink, and that is all.
        if ANSWERS:  # noqa: SIM102  (a constant of the compilation, then a number of the device)
            if partials == 1:
                acc = acc * v_scale
                if READ_NEW:
                    if AHEAD:
                        running_max, running_sum, acc = attend_loaded_new(
                            running_max,
                            running_sum,
                            acc,
                            q,
                            q_rest,
                            q_pos,
                            q_number,
                            token,
                            head[:, None],
                            mask_m,
                            new_tile,
                            first_new,
                            last_new,
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
                            BLOCK_NEW,
                            BLOCK_R,
                            HAS_SOFTCAP,
                            TEMPERATURE_LEN,
                            MOD,
                            ORDERED,
                            CAUSAL,
                            NEW_MASK,
                            HAS_WINDOW,
                            HAS_CHUNK,
                        )
                    running_max, running_sum, acc = attend_new(
                        running_max,
                        running_sum,
                        acc,
                        q,
                        q_rest,
                        q_pos,
                        q_number,
                        token,
                        head[:, None],
                        mask_m,
                        first_new + BLOCK_NEW if AHEAD else first_new,
                        last_new,
                        first_token,
                        positions_ptr,
                        cached,
                        k_new_head_ptr,
                        k_new_stride_token,
                        v_new_head_ptr,
                        v_new_stride_token,
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
                        QK_DIM,
                        V_DIM,
                        BLOCK_NEW,
                        BLOCK_D,
                        BLOCK_R,
                        BLOCK_V,
                        V_IS_K_TILE,
                        HAS_SOFTCAP,
                        TEMPERATURE_LEN,
                        MOD,
                        COMPUTE,
                        ORDERED,
                        CAUSAL,
                        NEW_MASK,
                        HAS_WINDOW,
                        HAS_CHUNK,
                    )
                if HAS_SINKS:
                    sink = tl.load(sinks_ptr + head, mask=mask_m, other=0.0).to(tl.float32)
                    running_max, running_sum, fade = join_sink(running_max, running_sum, sink)
                    acc = acc * fade[:, None]
                write_rows(
                    running_max,
                    running_sum,
                    acc,
                    out_ptr + token * out_stride_token + head * out_stride_head,
                    lse_ptr + token * lse_stride_token + head * lse_stride_head,
                    mask_m,
                    V_DIM,
                    BLOCK_V,
                    HAS_LSE,
                )
            elif not KEEPS:
                store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_m, V_DIM, BLOCK_V)
        number += 1
        request, segment_head, first, last, partial = request_ahead, head_ahead, first_ahead, last_ahead, partial_ahead
        start, list_start, list_end = start_ahead, list_start_ahead, list_end_ahead
    if PDL:
        release_dependents()


VERIFY_SHARES = Launcher(_verify_shares_kernel, verify_shares_constants)
