"""Decode of many heads over latent rows (MLA): a row is loaded once, for the scores and the values of up to 64 heads.

The variant of `decode_shares.py` for schedules whose programs pack LATENT_TILE heads: the same segments, partials and
lone answers, and the same merge. With 16 heads a program, eight programs load each row of DeepSeek's; with 64 two do,
and then tensor cores set the pace, not the memory. What keeps them busy here are habits of Triton's compiler, found in
its intermediate text (TTGIR) and confirmed by timing; each is told where it is made use of, and all of them rest on a
branch that is always taken, which the compiler cannot know. Where such habits are not enough, a kernel says itself who
waits for whom: `decode_latent_hopper.py`, a third faster, which is launched where it serves.
Source of the method: FlashMLA (DeepSeek, 2025), as far as Triton can say it; the schedule is Stream-K's (Osama et al.,
2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlab._triton import device_clock, jit, multiprocessor, release_dependents, tl, wait_for_earlier
from attnlab.arguments import Arguments, Names
from attnlab.kernels.core import (
    LN_2,
    LOG2_E,
    finite_or_zero,
    join_sink,
    load_queries,
    load_tile,
    score_pipeline,
    slot_offsets,
    store_states,
    write_rows,
)
from attnlab.kernels.decode_latent_hopper import DECODE_LATENT_HOPPER, serves
from attnlab.kernels.launch import early_launch, narrow, plain_scores, sendable, tile_constants
from attnlab.kernels.launcher import Launched, Launcher, with_times
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.call import DecodeCall
from attnlab.plan.tiles import LATENT_TILE, head_tiles
from attnlab.spec import AttentionSpec

ALWAYS = 3
"""The kernel's `flag`: every branch that asks whether it is above 0, 1 or 2 is taken."""
TAKEN = Arguments(Names(free=("flag",)), free=(ALWAYS,))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Tile size and launch options for one target."""

    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, target: Target) -> LatentConfig:
        """Return the choice of the table (`attnlab.kernels.tuning`).

        On a Hopper GPU 64 queries and two tiles of 64 rows, of 576 columns each, take 216 KB, a tile of weights 8: one
        program fills a multiprocessor. Its accumulator, 64 x 512, is half the registers of eight warps.
        """
        return cls(**tuned("decode_latent", target))


def decode_latent(call: DecodeCall, *, target: Target) -> Launched | None:
    """Leave the softmax states of segments that are to be merged in `call.partials`, and whole answers in `call.out`.

    Computes: as `decode_shares`. The layer is one of those that `shares_tile` gives LATENT_TILE.
    Shapes: as `DecodeCall` has them.
    Grid: (head tiles, programs): a program owns its segments of the schedule, and up to 64 query heads of a group. The
    tiles of one program of the schedule come one after the other: they run at a time and walk the same rows in step,
    so that the second finds them in the L2 cache.
    Reads/writes: the latent rows of the segments' slots alone; of partials and outputs, its own rows.
    """
    spec, schedule = call.spec, call.lane.schedule
    if call.out.shape[0] == 0:
        return None
    sent = sendable(call, target)
    launcher = DECODE_LATENT_HOPPER if serves(call, target) else DECODE_LATENT
    launched = launcher.launch(
        target,
        (head_tiles(spec.group, LATENT_TILE), schedule.programs, 1),
        (sent.arguments, call.view.arguments, call.lane.arguments, call.partials.arguments, TAKEN),
        spec=spec,
        view=call.view,
        target=target,
        q_dtype=call.q.dtype,
        has_lse=call.lse is not None,
        keeps=call.keeps,
        timed=call.times is not None,
    )
    if sent.out is not call.out:
        call.out.copy_(sent.out)
    return launched


def latent_constants(
    *, spec: AttentionSpec, view: KVView, target: Target, q_dtype: torch.dtype, has_lse: bool, keeps: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on."""
    compute = compute_dtype(q_dtype, view.k.dtype)
    config = LatentConfig.choose(target)
    constants: dict[str, Any] = {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "BLOCK_H": LATENT_TILE,
        **tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n),
        # Then a score is a product times a positive number, and largest products are largest scores.
        "PLAIN": plain_scores(spec, view),
        "HAS_SINKS": spec.has_sinks,
        "HAS_LSE": has_lse,
        "KEEPS": keeps,
        "NARROW": narrow(view.k, view.v),
        "STAGES": config.num_stages,
        "PDL": target.has_pdl,
    }
    return constants, {"num_warps": config.num_warps, **early_launch(target)}


@jit(do_not_specialize=("flag",))
def _decode_latent_kernel(
    q_ptr,
    k_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
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
    softcap,
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
    flag,
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
    tl.static_assert(V_IS_K_TILE and BLOCK_R > 0 and MOD is None)
    # 1. What is mine: some segments, for up to 64 heads of a group. Strides may be large: offsets are 64-bit.
    member = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = member < GROUP
    number = tl.load(programs_ptr + tl.program_id(1))
    end = tl.load(programs_ptr + tl.program_id(1) + 1)
    while number < end:
        segment = segments_ptr + number * 5
        req = tl.load(segment).to(tl.int64)
        kv_head = tl.load(segment + 1)
        first = tl.load(segment + 2)
        last = tl.load(segment + 3)
        partial = tl.load(segment + 4).to(tl.int64)
        k_head_ptr = k_ptr + kv_head.to(tl.int64) * k_stride_head
        list_start = tl.load(indptr_ptr + req)
        list_end = tl.load(indptr_ptr + req + 1)
        start = tl.load(start_ptr + req)
        q_pos = start + list_end - list_start - 1
        head = kv_head * GROUP + member
        q_rows = q_ptr + req * q_stride_token + head.to(tl.int64) * q_stride_head
        q, q_rest = load_queries(q_rows, mask_h, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)

        # 2. Its rows, a tile at a time. The maximum is that of scores times log2(e), for exp2 is what the hardware has.
        # The sum of a row of weights stays a row, [heads, keys], until the end: to add up across threads in every step
        # is what costs.
        running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
        for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            entry = at + tl.arange(0, BLOCK_N)
            mask_n = entry < last
            # Behind the segment's last row comes that row again, with weight 0: what it holds is as finite as it was,
            # and no load needs a mask.
            slots = tl.load(slots_ptr + list_start + tl.minimum(entry, last - 1))
            if NARROW:
                slots = slots.to(tl.int32)
            rows = k_head_ptr + slot_offsets(slots, k_stride_page, k_stride_slot, PAGE_SIZE)
            k = load_tile(rows, None, 0, BLOCK_D, QK_DIM, COMPUTE)
            k_rest = load_tile(rows, None, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE)
            # All that is computed stands in one branch, and leaves it for the next step alone. The pipeliner sends such
            # a branch to the end of the step, behind the copies of the next tile; without it the copies come last, and
            # a multiprocessor with room for one tile ahead would wait for them in every step.
            if flag > 0:
                # A dot that leads to another dot is laid out with all warps along its rows. Eight warps along 64 rows
                # are two groups of four that each compute everything. The compiler follows results through the text,
                # but not out of a branch; so each dot has one, and the second branch asks another question than the
                # first, lest both be made one. Now the warps are four along the heads by two along the keys.
                if flag > 1:
                    products = tl.dot(q, tl.trans(k), input_precision="ieee")
                else:
                    # Never computed. A tile that is read once is given a third buffer; this is its second use.
                    products = tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
                if flag > 2:
                    products = tl.dot(q_rest, tl.trans(k_rest), products, input_precision="ieee")
                    if PLAIN:
                        scores = tl.where(mask_n[None, :], products, float("-inf"))
                        factor = scale * LOG2_E  # one multiply-add makes an exponent of a product
                    else:
                        scores = score_pipeline(
                            products,
                            q_pos,
                            (start + entry)[None, :],
                            req,
                            head[:, None],
                            mask_n[None, :],
                            scale,
                            softcap,
                            None,
                            0,
                            0,
                            0,
                            HAS_SOFTCAP,
                            TEMPERATURE_LEN,
                            MOD,
                        )
                        factor = LOG2_E
                    new_max = tl.maximum(running_max, tl.max(scores, 1) * factor)
                    shift = finite_or_zero(new_max)
                    p = tl.exp2(scores * factor - shift[:, None])
                    fade = tl.exp2(running_max - shift)
                    sums = sums * fade[:, None] + p
                    running_max = new_max
                    weights = p.to(COMPUTE)
                else:
                    # Never computed. One number for all, so that it takes any layout: values that had one of their own
                    # would be converted, through shared memory that there is none left of.
                    fade = tl.full([BLOCK_H], at, tl.int32).to(tl.float32)
                    weights = tl.full([BLOCK_H, BLOCK_N], at, tl.int32).to(COMPUTE)
                acc = tl.dot(weights, k, acc * fade[:, None], input_precision="ieee")
        running_max = running_max * LN_2
        running_sum = tl.sum(sums, 1)

        # 3. Of a request that nobody else reads for this head the state is the whole answer; recordings want it then,
        # too. Last, for then the accumulator's registers are free to be stored from.
        state = partial * GROUP + member
        owner = merge_indptr_ptr + req * KV_HEADS + kv_head
        if tl.load(owner + 1) - tl.load(owner) == 1:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head, mask=mask_h, other=0.0).to(tl.float32)
                whole_max, whole_sum, fade = join_sink(running_max, running_sum, sink)
                whole = acc * fade[:, None]
            else:
                whole_max, whole_sum, whole = running_max, running_sum, acc
            write_rows(
                whole_max,
                whole_sum,
                whole * v_scale,
                out_ptr + req * out_stride_token + head.to(tl.int64) * out_stride_head,
                lse_ptr + req * lse_stride_token + head.to(tl.int64) * lse_stride_head,
                mask_h,
                V_DIM,
                BLOCK_V,
                HAS_LSE,
            )
        elif not KEEPS:
            store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_h, V_DIM, BLOCK_V)
        if KEEPS:
            store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_h, V_DIM, BLOCK_V)
        number += 1
    if PDL:
        release_dependents()
    if TIMES:
        note = times_ptr + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 3
        tl.store(note, multiprocessor().to(tl.int64))
        tl.store(note + 1, began)
        tl.store(note + 2, device_clock())


DECODE_LATENT = Launcher(_decode_latent_kernel, with_times(latent_constants))
