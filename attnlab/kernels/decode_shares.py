"""Decode over even shares: a program reads one share of all keys, segment after segment, of whichever requests.

The variant of `decode.py` for schedules that deal several segments to a program. It leaves the same partials, and
merges with the same kernel; answers that need no merge are written at once, and leave no partial unless these are kept.
Source of the method: Stream-K (Osama et al., 2023), LeanAttention (Sanovar et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlab._triton import device_clock, jit, multiprocessor, release_dependents, tl, wait_for_earlier
from attnlab.kernels.core import (
    attend_shares_tile,
    join_sink,
    load_queries,
    load_segment,
    natural,
    slot_offsets,
    store_states,
    write_rows,
)
from attnlab.kernels.launch import early_launch, narrow, pair_constants, plain_scores, sendable, tile_constants
from attnlab.kernels.launcher import Launched, Launcher, with_times
from attnlab.kernels.pairs import join_columns, load_paired_queries
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.call import DecodeCall
from attnlab.plan.tiles import LARGE_TILE
from attnlab.spec import AttentionSpec

WIDE = 256
"""Columns of keys up to which a multiprocessor has room for several tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesConfig:
    """Tile size and launch options for one shape on one target. `num_stages` is of the loop over whole tiles."""

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
        held: int,
        head_tile: int,
    ) -> SharesConfig:
        """Return the choice of the table (`attnlab.kernels.tuning`) where a multiprocessor holds so many programs.

        The fewer programs, the more keys each must have on their way: about 128 KB of them on a multiprocessor.
        """
        if head_tile == LARGE_TILE:
            return cls(**tuned("decode_groups", target, qk_dim=spec.qk_dim, v_dim=spec.v_dim))
        return cls(
            **tuned(
                "decode_shares",
                target,
                qk_dim=spec.qk_dim,
                v_dim=spec.v_dim,
                compute=compute,
                kv=kv_dtype,
                modifier=spec.mod is not None,
                held=held,
            )
        )


def decode_shares(call: DecodeCall, *, target: Target) -> Launched | None:
    """Leave the softmax states of segments that are to be merged in `call.partials`, and whole answers in `call.out`.

    Computes: as `decode_split`; where a request has one segment of a KV head, what `decode_merge` computes of it too,
    and where `call.keeps` its state as well. Under an `uncut` schedule that is every answer, those of requests without
    keys too.
    Shapes: as `DecodeCall` has them.
    Grid: (programs, head tiles): a program owns its segments of the schedule, and a tile of a group's query heads.
    Reads/writes: the keys and values of the segments' slots alone; of partials and outputs, its own rows.
    """
    spec, view, schedule = call.spec, call.view, call.lane.schedule
    if call.out.shape[0] == 0:
        return None
    sent = sendable(call, target)
    launched = DECODE_SHARES.launch(
        target,
        (schedule.programs, call.head_tiles, 1),
        (
            sent.arguments,
            view.pair_arguments if view.paired else view.arguments,
            call.lane.arguments,
            call.partials.arguments,
        ),
        spec=spec,
        view=view,
        target=target,
        q_dtype=call.q.dtype,
        has_lse=call.lse is not None,
        keeps=call.keeps,
        uncut=schedule.uncut,
        held=target.held(schedule.programs * call.head_tiles),
        head_tile=call.head_tile,
        timed=call.times is not None,
    )
    if sent.out is not call.out:
        call.out.copy_(sent.out)
    return launched


def shares_constants(
    *,
    spec: AttentionSpec,
    view: KVView,
    target: Target,
    q_dtype: torch.dtype,
    has_lse: bool,
    held: int,
    head_tile: int,
    keeps: bool,
    uncut: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on.

    `held` is how many programs a multiprocessor holds at a time, `head_tile` how many query heads each packs.
    """
    compute = compute_dtype(q_dtype, view.k.dtype)
    if spec.qk_dim > WIDE and not view.v_in_k:
        held = max(held, 2)  # wide keys and values of their own leave no room for loads that are far ahead
    config = SharesConfig.choose(spec, target, compute=compute, kv_dtype=view.k.dtype, held=held, head_tile=head_tile)
    tiles = tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n)
    constants: dict[str, Any] = {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "BLOCK_H": head_tile,
        **tiles,
        **pair_constants(spec=spec, view=view, compute=tiles["COMPUTE"]),
        "PLAIN": plain_scores(spec, view),
        "HAS_SINKS": spec.has_sinks,
        "HAS_LSE": has_lse,
        "KEEPS": keeps,
        "UNCUT": uncut,
        "NARROW": narrow(view.k, view.v),
        "STAGES": config.num_stages,
        "PDL": target.has_pdl,
    }
    return constants, {"num_warps": config.num_warps, **early_launch(target)}


@jit
def answer_nothing(
    req,
    member,
    mask_h,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write the answers of a request without keys: output 0, and the LSE of its sinks alone, -inf without any."""
    for kv_head in range(KV_HEADS):
        head = kv_head * GROUP + member
        running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_H], tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=mask_h, other=0.0).to(tl.float32)
            running_max, running_sum, _ = join_sink(running_max, running_sum, sink)
        write_rows(
            running_max,
            running_sum,
            tl.zeros([BLOCK_H, BLOCK_V], tl.float32),
            out_ptr + req * out_stride_token + head.to(tl.int64) * out_stride_head,
            lse_ptr + req * lse_stride_token + head.to(tl.int64) * lse_stride_head,
            mask_h,
            V_DIM,
            BLOCK_V,
            HAS_LSE,
        )


@jit(do_not_specialize=("requests",))
def _decode_shares_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    segments_ptr,
    programs_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    aux_ptr,
    merge_indptr_ptr,
    requests,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    times_ptr,
    scale,
    softcap,
    v_scale,
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
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
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
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KEEPS: tl.constexpr,
    UNCUT: tl.constexpr,
    NARROW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    TIMES: tl.constexpr,
):
    # What the kernel before reads or writes is not touched before it has ended.
    if PDL:
        wait_for_earlier()
    if TIMES:
        began = device_clock()
    # 1. What is mine: some segments, for a tile of a group's heads. Strides may be large: offsets are 64-bit.
    PAIRS: tl.constexpr = k_ptr.dtype.element_ty == tl.int16
    member = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = member < GROUP
    number = tl.load(programs_ptr + tl.program_id(0))
    end = tl.load(programs_ptr + tl.program_id(0) + 1)
    request, kv_head, first, last, partial = load_segment(segments_ptr, number, number < end)
    list_start = tl.load(indptr_ptr + request)
    list_end = tl.load(indptr_ptr + request + 1)
    start = tl.load(start_ptr + request)
    if UNCUT:
        # No merge follows, which would have answered for requests that nobody reads, as they have no keys.
        empty = tl.program_id(0)
        while empty < requests:
            if tl.load(indptr_ptr + empty) == tl.load(indptr_ptr + empty + 1):
                answer_nothing(
                    empty.to(tl.int64),
                    member,
                    mask_h,
                    sinks_ptr,
                    out_ptr,
                    lse_ptr,
                    out_stride_token,
                    out_stride_head,
                    lse_stride_token,
                    lse_stride_head,
                    KV_HEADS,
                    GROUP,
                    V_DIM,
                    BLOCK_H,
                    BLOCK_V,
                    HAS_SINKS,
                    HAS_LSE,
                )
            empty += tl.num_programs(0)
    while number < end:
        ahead = load_segment(segments_ptr, number + 1, number + 1 < end)
        req = request.to(tl.int64)
        owner = merge_indptr_ptr + req * KV_HEADS + kv_head
        partials = tl.load(owner + 1) - tl.load(owner)
        k_head_ptr = k_ptr + kv_head.to(tl.int64) * k_stride_head
        v_head_ptr = v_ptr + kv_head.to(tl.int64) * v_stride_head
        q_pos = start + list_end - list_start - 1
        head = kv_head * GROUP + member
        q_rows = q_ptr + req * q_stride_token + head.to(tl.int64) * q_stride_head
        if PAIRS:
            q, q_rest, power = load_paired_queries(q_rows, mask_h, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
            factor = scale * power
        else:
            q, q_rest = load_queries(q_rows, mask_h, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
            factor = scale

        # 2. Its keys: whole tiles without a mask (unless a modifier may look at one), then the rest of a tile.
        running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_V // 2 if PAIRS else BLOCK_V], tl.float32)
        if PAIRS:
            acc = (acc, acc)
        whole = first + (last - first) // BLOCK_N * BLOCK_N
        for REST in tl.static_range(2):
            begin = whole if REST else first
            stop = last if REST else whole
            for at in tl.range(begin, stop, BLOCK_N, num_stages=1 if REST else STAGES):
                entry = at + tl.arange(0, BLOCK_N)
                if REST or MOD is not None:
                    mask_n = entry < last
                    visible = mask_h[:, None] & mask_n[None, :]
                    slots = tl.load(slots_ptr + list_start + entry, mask=mask_n, other=0)
                else:
                    mask_n = None
                    visible = None
                    slots = tl.load(slots_ptr + list_start + entry)
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
                    q_pos,
                    (start + entry)[None, :],
                    req,
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

        if PAIRS:
            running_sum, acc = join_columns(running_sum, acc, BLOCK_H, BLOCK_V)
        if PLAIN:
            running_max = natural(running_max)

        request_ahead, kv_head_ahead, first_ahead, last_ahead, partial_ahead = ahead
        start_ahead = tl.load(start_ptr + request_ahead)
        list_start_ahead = tl.load(indptr_ptr + request_ahead)
        list_end_ahead = tl.load(indptr_ptr + request_ahead + 1)

        # 3. Leave the state to the merge, unless it is the whole answer; recordings want it then, too.
        state = partial.to(tl.int64) * GROUP + member
        if KEEPS:
            store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_h, V_DIM, BLOCK_V)
        if partials == 1:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head, mask=mask_h, other=0.0).to(tl.float32)
                running_max, running_sum, fade = join_sink(running_max, running_sum, sink)
                acc = acc * fade[:, None]
            write_rows(
                running_max,
                running_sum,
                acc * v_scale,
                out_ptr + req * out_stride_token + head.to(tl.int64) * out_stride_head,
                lse_ptr + req * lse_stride_token + head.to(tl.int64) * lse_stride_head,
                mask_h,
                V_DIM,
                BLOCK_V,
                HAS_LSE,
            )
        elif not KEEPS:
            store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_h, V_DIM, BLOCK_V)
        number += 1
        request, kv_head, first, last, partial = request_ahead, kv_head_ahead, first_ahead, last_ahead, partial_ahead
        start, list_start, list_end = start_ahead, list_start_ahead, list_end_ahead
    if PDL:
        release_dependents()
    if TIMES:
        note = times_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 3
        tl.store(note, multiprocessor().to(tl.int64))
        tl.store(note + 1, began)
        tl.store(note + 2, device_clock())


DECODE_SHARES = Launcher(_decode_shares_kernel, with_times(shares_constants))
