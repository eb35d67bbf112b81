"""Split-KV decode: every range of keys is attended on its own, then the partial results are merged.

Reference: decode_attention_fwd, its normal (one query head a program) and its grouped kernel; here one text, since
they differ in how a tile of queries meets a tile of keys and in nothing else. What a program reads comes from the
schedule.
Source of the method: Flash-Decoding (Dao et al., 2023), online softmax (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlab._triton import device_clock, jit, multiprocessor, release_dependents, tl, wait_for_earlier
from attnlab.arguments import Arguments, Names
from attnlab.kernels.core import attend_tile, finite_or_zero, join_sink, load_queries, slot_offsets, store_states
from attnlab.kernels.launch import merge_options, padded, sendable, tile_constants
from attnlab.kernels.launcher import Launched, Launcher, with_times
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.call import DecodeCall
from attnlab.plan.tiles import HEAD_TILE, head_tiles
from attnlab.spec import AttentionSpec

OF_OWNERS = Names(free=("owners",))
MERGERS = 16
"""Programs of a merge that a multiprocessor is given, at most, where most have nothing to merge."""
LATENT_ABOVE = 256
"""Partials of values wider than that are merged by tiles that follow the number of ranges: those of latent rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Tile sizes and launch options of the split kernel for one shape on one target."""

    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, spec: AttentionSpec, target: Target, *, fp32: bool) -> SplitConfig:
        """Return the choice of the table (`attnlab.kernels.tuning`)."""
        compute = torch.float32 if fp32 else torch.bfloat16
        return cls(**tuned("decode_split", target, qk_dim=spec.qk_dim, group=spec.group, compute=compute))


def decode_split(call: DecodeCall, *, target: Target) -> Launched | None:
    """Leave the softmax state of every segment of the schedule in `call.partials`.

    Computes: over the keys n of a segment, max = max s[n], sum = sum exp(s[n] - max), acc = sum exp(s[n] - max) v[n].
    Shapes: as `DecodeCall` has them; partials `[partials, group, ...]` fp32.
    Grid: (segments, head tiles): a program owns a range of keys of one KV head, and up to 16 query heads of its
    group. A schedule that deals several segments to a program is for `decode_shares`: partials would be the same, but
    `decode_merge` passes over lone ones, which this kernel does not answer.
    Reads/writes: the keys and values of the segment's slots alone; of the partials, the segment's own row.
    """
    spec, lane = call.spec, call.lane
    segments = lane.schedule.segments.shape[0]
    if segments == 0:
        return None
    return DECODE_SPLIT.launch(
        target,
        (segments, head_tiles(spec.group), 1),
        (sendable(call, target).arguments, call.view.arguments, lane.arguments, call.partials.arguments),
        spec=spec,
        view=call.view,
        target=target,
        q_dtype=call.q.dtype,
        timed=call.times is not None,
    )


def split_constants(
    *, spec: AttentionSpec, view: KVView, target: Target, q_dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on."""
    compute = compute_dtype(q_dtype, view.k.dtype)
    config = SplitConfig.choose(spec, target, fp32=compute == torch.float32)
    constants: dict[str, Any] = {
        "GROUP": spec.group,
        "BLOCK_H": 1 if spec.group == 1 else HEAD_TILE,
        **tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n),
        "PDL": target.has_pdl,
    }
    return constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}


TIMED_REGISTERS = 64
"""Registers of a thread of a timed split on a Hopper GPU, of keys up to 192 columns in half precision. Left to itself
it takes 72 where it takes 64 without times: a program less on each multiprocessor, and often another wave of them."""


def timed_split_constants(*, timed: bool, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the same for calls that may be timed, by programs as many at a time as of those that are not."""
    constants, options = with_times(split_constants)(timed=timed, **asked)
    spec, view, target = asked["spec"], asked["view"], asked["target"]
    small = spec.group > 1 and spec.qk_dim <= 192 and spec.mod is None and view.k.dtype.itemsize == 2
    if timed and target.is_hopper and small and asked["q_dtype"] != torch.float32:
        options = {**options, "maxnreg": TIMED_REGISTERS}
    return constants, options


def decode_merge(call: DecodeCall, *, target: Target) -> Launched | None:
    """Merge the partials of every request and KV head into `call.out`.

    Under even shares those that are alone are passed over: the split kernel has written their answers.
    Computes: with M = max of the partials' maxima and of the sink, out = v_scale * sum exp(max - M) acc / Z and
    lse = M + ln Z, where Z = sum exp(max - M) sum + exp(sink - M). Nothing seen: out 0, lse -inf (the sink, if any).
    Shapes: as `DecodeCall` has them.
    Grid: (requests x KV heads / `MergeTiles.owners`, query heads of a group, dim tiles): a program owns a row of the
    output, or some of its columns, of each of its owners: of one, or, under even shares, where most have nothing to
    merge, of a few that lie a grid apart.
    Reads/writes: partials that segments own, through `merge_indptr`; never a row that nobody wrote.
    """
    spec, schedule, requests = call.spec, call.lane.schedule, call.out.shape[0]
    if requests == 0:
        return None
    sent = sendable(call, target)
    owners = requests * spec.kv_heads
    tiles = MergeTiles.choose(
        spec, target, persistent=schedule.persistent, ranges=-(-schedule.partials // owners), owners=owners
    )
    launched = DECODE_MERGE.launch(
        target,
        (-(-owners // tiles.owners), spec.group, tiles.of_dim),
        (
            sent.arguments,
            call.view.arguments,
            call.lane.arguments,
            call.partials.arguments,
            Arguments(OF_OWNERS, free=(owners,)),
        ),
        spec=spec,
        target=target,
        has_lse=call.lse is not None,
        persistent=schedule.persistent,
        tiles=tiles,
    )
    if sent.out is not call.out:
        call.out.copy_(sent.out)
    return launched


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTiles:
    """How a merge is dealt: columns and partials that are merged at a time, tiles of a row, owners a program.

    `num_stages` is of the loop over partials: with more than one the next ones are on their way.
    """

    block_v: int
    block_s: int
    of_dim: int
    owners: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, spec: AttentionSpec, target: Target, *, persistent: bool, ranges: int, owners: int) -> MergeTiles:
        """Return the choice; the one place where it is made.

        `ranges`: partials of a request and KV head, in the mean of what the schedule has room for; `owners`: pairs of a
        request and a KV head.
        """
        block_v = padded(spec.v_dim)
        block_s, num_warps, num_stages = max(4, 2048 // block_v), 2, 1
        # Even shares cut a lone request in as many ranges as there are programs, and of many requests each in few.
        if persistent and spec.v_dim > LATENT_ABOVE:
            # Of many partials few columns at a time, so that programs are many and need not walk far.
            block_s = min(64, padded(ranges)) if ranges > 8 else (8 if ranges > 4 else 4)
            block_v = min(block_v, 4096 // block_s)
        elif persistent:
            # A long request among short ones has many partials all the same: what comes next is loaded ahead.
            num_stages = 3
            if ranges <= 8:
                # The fastest that were timed: of little shared memory, most of which a split's programs still hold.
                block_s, num_warps = 4, 1
        of_dim = padded(spec.v_dim) // block_v
        most = max(1, MERGERS * target.multiprocessors // (spec.group * of_dim))
        each = 1 << (-(-owners // most) - 1).bit_length() if persistent else 1
        return cls(
            block_v=block_v, block_s=block_s, of_dim=of_dim, owners=each, num_warps=num_warps, num_stages=num_stages
        )


def merge_constants(
    *, spec: AttentionSpec, target: Target, has_lse: bool, persistent: bool, tiles: MergeTiles
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the merge kernel's compile-time arguments and launch options; `persistent`: lone partials are answers."""
    constants = {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "V_DIM": spec.v_dim,
        "BLOCK_V": tiles.block_v,
        "BLOCK_S": tiles.block_s,
        "DIM_TILES": tiles.of_dim,
        "HAS_SINKS": spec.has_sinks,
        "HAS_LSE": has_lse,
        "PDL": target.has_pdl,
        "SKIPS_ALONE": persistent,
        "OWNERS": tiles.owners,
        "STAGES": tiles.num_stages,
    }
    return constants, merge_options(target, num_warps=tiles.num_warps)


@jit
def _decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    segments_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    aux_ptr,
    times_ptr,
    scale,
    softcap,
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
    PDL: tl.constexpr,
    TIMES: tl.constexpr,
):
    if TIMES:
        began = device_clock()
    # 1. What is mine: a range of one request's keys, for one KV head. Strides may be large: offsets are 64-bit.
    segment = segments_ptr + tl.program_id(0) * 5
    req = tl.load(segment).to(tl.int64)
    kv_head = tl.load(segment + 1)
    first = tl.load(segment + 2)
    last = tl.load(segment + 3)
    # Before the return: Triton 3.6 then keeps 64 registers instead of 72, which is one more program a multiprocessor.
    partial = tl.load(segment + 4).to(tl.int64)
    if first >= last:
        return
    k_head_ptr = k_ptr + kv_head.to(tl.int64) * k_stride_head
    v_head_ptr = v_ptr + kv_head.to(tl.int64) * v_stride_head
    list_start = tl.load(indptr_ptr + req)
    list_end = tl.load(indptr_ptr + req + 1)
    start = tl.load(start_ptr + req)
    q_pos = start + list_end - list_start - 1

    # 2. My queries: up to 16 heads of the group, in two tiles where the head dimension is not a power of two.
    PACKED: tl.constexpr = BLOCK_H > 1
    member = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = member < GROUP
    head = kv_head * GROUP + member
    q_rows = q_ptr + req * q_stride_token + head.to(tl.int64) * q_stride_head
    q, q_rest = load_queries(q_rows, mask_h, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)

    # 3. My keys, a tile at a time, with the softmax state of all tiles so far.
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for at in range(first, last, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        mask_n = entry < last
        slots = tl.load(slots_ptr + list_start + entry, mask=mask_n, other=0)
        running_max, running_sum, acc = attend_tile(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            k_head_ptr + slot_offsets(slots, k_stride_page, k_stride_slot, PAGE_SIZE),
            v_head_ptr + slot_offsets(slots, v_stride_page, v_stride_slot, PAGE_SIZE),
            mask_n,
            mask_h[:, None] & mask_n[None, :],
            q_pos,
            (start + entry)[None, :],
            req,
            head[:, None],
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
            PACKED,
            V_IS_K_TILE,
            HAS_SOFTCAP,
            TEMPERATURE_LEN,
            MOD,
            COMPUTE,
        )

    # 4. Leave the state.
    state = partial * GROUP + member
    store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_h, V_DIM, BLOCK_V)
    if PDL:
        release_dependents()
    if TIMES:
        note = times_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 3
        tl.store(note, multiprocessor().to(tl.int64))
        tl.store(note + 1, began)
        tl.store(note + 2, device_clock())


@jit
def merge_row(
    req,
    head,
    first,
    last,
    acc_ptr,
    max_ptr,
    sum_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    v_scale,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DIM_TILES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Merge partials `first` to `last` into a row of the output, or a tile of its columns."""
    offs_v = tl.arange(0, BLOCK_V)
    if DIM_TILES > 1:
        offs_v += tl.program_id(2) * BLOCK_V
    mask_v = offs_v < V_DIM

    # Merge them in key order, a few at a time.
    running_max = float("-inf")
    running_sum = 0.0
    acc = tl.zeros([BLOCK_V], tl.float32)
    for at in tl.range(first, last, BLOCK_S, num_stages=STAGES):
        partial = at + tl.arange(0, BLOCK_S)
        live = partial < last
        state = partial.to(tl.int64) * GROUP + head % GROUP
        maxima = tl.load(max_ptr + state, mask=live, other=float("-inf"))
        sums = tl.load(sum_ptr + state, mask=live, other=0.0)
        outputs = tl.load(
            acc_ptr + state[:, None] * V_DIM + offs_v[None, :],
            mask=live[:, None] & mask_v[None, :],
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(maxima, 0))
        shift = finite_or_zero(new_max)
        weights = tl.exp(maxima - shift)
        fade = tl.exp(running_max - shift)
        acc = acc * fade + tl.sum(weights[:, None] * outputs, 0)
        running_sum = running_sum * fade + tl.sum(weights * sums, 0)
        running_max = new_max

    # The sink joins the denominator once, whatever the number of splits.
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        running_max, running_sum, fade = join_sink(running_max, running_sum, sink)
        acc = acc * fade

    # Normalise. Nothing seen: out 0, lse -inf. Every tile of columns has found the same LSE.
    nothing = running_sum == 0.0
    out = acc / tl.where(nothing, 1.0, running_sum) * v_scale
    out_row = out_ptr + req * out_stride_token + head * out_stride_head
    tl.store(out_row + offs_v, out.to(out_ptr.dtype.element_ty), mask=mask_v)
    if HAS_LSE:
        lse = running_max + tl.log(tl.where(nothing, 1.0, running_sum))
        tl.store(lse_ptr + req * lse_stride_token + head * lse_stride_head, lse)


@jit(do_not_specialize=("owners",))
def _decode_merge_kernel(
    acc_ptr,
    max_ptr,
    sum_ptr,
    merge_indptr_ptr,
    owners,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    v_scale,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DIM_TILES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
    SKIPS_ALONE: tl.constexpr,
    OWNERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    if PDL:
        wait_for_earlier()
    # 1. What is mine: a query head of a group, in one of the request's KV heads, or in one of a few whose partials are
    # mostly alone: what was answered where it was made is passed over, some at a time.
    member = tl.program_id(1)
    if SKIPS_ALONE and OWNERS > 1:
        mine = tl.program_id(0) + tl.arange(0, OWNERS) * tl.num_programs(0)
        begins = tl.load(merge_indptr_ptr + mine, mask=mine < owners, other=0)
        ends = tl.load(merge_indptr_ptr + mine + 1, mask=mine < owners, other=1)
        if tl.sum((ends - begins != 1).to(tl.int32), 0) == 0:
            return
    for number in range(OWNERS):
        owner = tl.program_id(0) + number * tl.num_programs(0)
        first = tl.load(merge_indptr_ptr + owner, mask=owner < owners, other=0)
        last = tl.load(merge_indptr_ptr + owner + 1, mask=owner < owners, other=1)
        wanted = owner < owners
        if SKIPS_ALONE:
            wanted = wanted & (last - first != 1)
        if wanted:
            merge_row(
                (owner // KV_HEADS).to(tl.int64),
                (owner % KV_HEADS * GROUP + member).to(tl.int64),
                first,
                last,
                acc_ptr,
                max_ptr,
                sum_ptr,
                sinks_ptr,
                out_ptr,
                lse_ptr,
                v_scale,
                out_stride_token,
                out_stride_head,
                lse_stride_token,
                lse_stride_head,
                GROUP,
                V_DIM,
                BLOCK_V,
                BLOCK_S,
                DIM_TILES,
                HAS_SINKS,
                HAS_LSE,
                STAGES,
            )


DECODE_SPLIT = Launcher(_decode_split_kernel, timed_split_constants)
DECODE_MERGE = Launcher(_decode_merge_kernel, merge_constants)
