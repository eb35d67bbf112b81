"""Split-KV verify: drafts attend to ranges of the cached keys, then the ranges are merged, with the drafts among them.

Reference: verify_splitkv_fwd, which serves chains without masks, windows, sinks or caps only. Here it is decode's
family: the same schedule and partials, with rows that are query tokens x heads of a group, so that all drafts of a
request share every key that is loaded.
Source of the method: Flash-Decoding (Dao et al., 2023), tree attention of SpecInfer (Miao et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlab._triton import jit, release_dependents, tl, wait_for_earlier
from attnlab.kernels.core import join_sink, load_queries, merge_states, store_states, write_rows
from attnlab.kernels.launch import merge_options, padded, sendable, sight_constants, tile_constants
from attnlab.kernels.launcher import Launched, Launcher
from attnlab.kernels.sweep import attend_list, attend_new, seen_drafts
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.extend_call import VerifyCall
from attnlab.plan.tiles import NARROW_DIM
from attnlab.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Tile sizes and launch options of the verify kernels for one shape on one target."""

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
        rows: int | None,
    ) -> VerifyConfig:
        """Return the choice of the table (`attnlab.kernels.tuning`) for so many rows (drafts x group) a request.

        None: one that holds for any number. What few rows cannot fill of a tile is cut off.
        """
        found = cls(
            **tuned(
                "verify_split",
                target,
                qk_dim=spec.qk_dim,
                v_dim=spec.v_dim,
                compute=compute,
                kv=kv_dtype,
                masked=masked,
                modifier=spec.mod is not None,
                rows=rows,
            )
        )
        return found if rows is None else replace(found, block_m=min(found.block_m, padded(rows)))


MERGE_BLOCK_N = 32
"""Drafts that are attended to at a time."""
MERGE_BLOCK_M = 16
"""Rows whose partials a program merges: accumulators of 512 columns need the registers."""


def verify_split(call: VerifyCall, *, target: Target) -> Launched | None:
    """Leave the softmax state of every draft over every segment of the schedule in `call.partials`.

    Computes: over the keys n of a segment that the draft sees, max = max s[n], sum = sum exp(s[n] - max), acc = sum
    exp(s[n] - max) v[n]. Nothing seen: -inf, 0, 0.
    Shapes: as `VerifyCall` has them; partials `[partials, drafts x group, ...]` fp32, drafts being the most of a
    request.
    Grid: (segments, tiles of rows): a program owns a range of keys of one KV head, and a tile of (draft, head) pairs.
    Reads/writes: the keys and values of the segment's slots; of the partials, the segment's own rows.
    """
    spec, view, lane, queries = call.spec, call.view, call.lane, call.queries
    segments = lane.schedule.segments.shape[0]
    if segments == 0 or queries.most == 0:
        return None
    rows = queries.most * spec.group
    return VERIFY_SPLIT.launch(
        target,
        lambda tiles: (segments, -(-rows // tiles["BLOCK_M"]), 1),
        (
            sendable(call, target).arguments,
            view.arguments,
            lane.arguments,
            call.partials.arguments,
            queries.arguments,
        ),
        spec=spec,
        view=view,
        target=target,
        q_dtype=call.q.dtype,
        rows=None if call.batch_invariant else rows,
        masked=queries.cached_masked,
    )


def verify_merge(call: VerifyCall, *, target: Target) -> Launched | None:
    """Merge every draft's partials, let it attend to the drafts that it sees, and write `call.out` and `call.lse`.

    Under even shares, where `answers_alone` holds, requests of one segment are passed over: they were answered where it
    was read.
    Computes: the state over a draft's partials, values times v_scale; then, over the drafts of its request that it
    sees, unscaled, as `extend` does; the sink joins last. Nothing seen: out 0, lse -inf (the sink, if any).
    Shapes: as `VerifyCall` has them.
    Grid: (requests x KV heads, tiles of rows): a program owns a tile of (draft, head) pairs.
    Reads/writes: partials that segments own, through `merge_indptr`; the request's drafts; its own output rows.
    """
    spec, view, lane, queries = call.spec, call.view, call.lane, call.queries
    reqs = lane.layout.index.reqs
    if reqs == 0 or queries.most == 0:
        return None
    sent = sendable(call, target)
    launched = VERIFY_MERGE.launch(
        target,
        (reqs * spec.kv_heads, -(-queries.most * spec.group // MERGE_BLOCK_M), 1),
        (sent.arguments, view.arguments, lane.arguments, call.partials.arguments, queries.arguments),
        spec=spec,
        view=view,
        target=target,
        q_dtype=call.q.dtype,
        ordered=queries.ordered,
        masked=queries.bits is not None,
        read_new=call.k is not None,
        has_lse=call.lse is not None,
        skips_alone=lane.schedule.persistent and answers_alone(spec, view),
    )
    if sent.out is not call.out:
        call.out.copy_(sent.out)
    return launched


def answers_alone(spec: AttentionSpec, view: KVView) -> bool:
    """Whether programs of even shares attend to the drafts, too, where a request has one range, and answer at once.

    They need the room for it, which wide values and modifiers take, and queries that are multiplied by new keys as they
    are by cached ones.
    """
    return spec.v_dim <= NARROW_DIM and spec.mod is None and not view.paired


def verify_constants(
    *,
    spec: AttentionSpec,
    view: KVView,
    target: Target,
    q_dtype: torch.dtype,
    rows: int | None,
    masked: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the split kernel's compile-time arguments and launch options; `masked`: a mask may hide cached keys."""
    compute = compute_dtype(q_dtype, view.k.dtype)
    config = VerifyConfig.choose(spec, target, compute=compute, kv_dtype=view.k.dtype, masked=masked, rows=rows)
    constants: dict[str, Any] = {
        "GROUP": spec.group,
        "BLOCK_M": config.block_m,
        **tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n),
        **sight_constants(spec, masked=masked),
        "PDL": target.has_pdl,
    }
    return constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def verify_merge_constants(
    *,
    spec: AttentionSpec,
    view: KVView,
    target: Target,
    q_dtype: torch.dtype,
    ordered: bool,
    masked: bool,
    read_new: bool,
    has_lse: bool,
    skips_alone: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the merge kernel's compile-time arguments and launch options; `skips_alone`: lone partials are answers."""
    compute = compute_dtype(q_dtype, view.k.dtype)
    constants = tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=MERGE_BLOCK_N)
    del constants["PAGE_SIZE"]  # what it reads of the cache lies in the partials
    return {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "BLOCK_M": MERGE_BLOCK_M,
        **constants,
        "READ_NEW": read_new,
        "ORDERED": ordered,
        "CAUSAL": spec.sight.causal,
        **sight_constants(spec, masked=masked),
        "HAS_SINKS": spec.has_sinks,
        "HAS_LSE": has_lse,
        "PDL": target.has_pdl,
        "SKIPS_ALONE": skips_alone,
    }, merge_options(target, num_warps=8 if max(spec.qk_dim, spec.v_dim) > 256 else 4)


@jit(do_not_specialize=("rows", "num_bits", "window", "chunk"))
def _verify_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    segments_ptr,
    q_indptr_ptr,
    positions_ptr,
    bits_ptr,
    mask_indptr_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    aux_ptr,
    scale_cached,
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
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. What is mine: a range of one request's cached keys, for one KV head, and a tile of (draft, head) pairs.
    segment = segments_ptr + tl.program_id(0) * 5
    req = tl.load(segment).to(tl.int64)
    kv_head = tl.load(segment + 1).to(tl.int64)
    first = tl.load(segment + 2)
    last = tl.load(segment + 3)
    partial = tl.load(segment + 4).to(tl.int64)
    first_token = tl.load(q_indptr_ptr + req).to(tl.int64)
    drafts = (tl.load(q_indptr_ptr + req + 1) - first_token).to(tl.int32)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if (first >= last) | (tl.program_id(1) * BLOCK_M >= drafts * GROUP):
        return
    q_number = row // GROUP
    mask_m = q_number < drafts
    head = kv_head * GROUP + row % GROUP
    token = first_token + q_number
    q_pos = tl.load(positions_ptr + token, mask=mask_m, other=0)
    q_rows = q_ptr + token * q_stride_token + head * q_stride_head
    q, q_rest = load_queries(q_rows, mask_m, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)

    # 2. My keys, a tile at a time. All are behind every draft: window, chunk and mask alone can hide them.
    list_start = tl.load(indptr_ptr + req)
    start = tl.load(start_ptr + req)
    cached = start + tl.load(indptr_ptr + req + 1) - list_start
    bits_row = q_number.to(tl.int64) * (cached + drafts)
    if HAS_MASK:
        bits_row += tl.load(mask_indptr_ptr + req)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    running_max, running_sum, acc = attend_list(
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
        first,
        last,
        slots_ptr + list_start,
        start,
        start,
        cached,
        k_ptr + kv_head * k_stride_head,
        k_stride_page,
        k_stride_slot,
        v_ptr + kv_head * v_stride_head,
        v_stride_page,
        v_stride_slot,
        bits_ptr,
        bits_row,
        num_bits,
        window,
        chunk,
        scale_cached,
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
        PAGE_SIZE,
        V_IS_K_TILE,
        HAS_SOFTCAP,
        TEMPERATURE_LEN,
        MOD,
        COMPUTE,
        True,
        HAS_MASK,
        HAS_WINDOW,
        HAS_CHUNK,
        False,  # a mask of drafts alone goes unread here
    )

    # 3. Leave the states.
    state = partial * rows + row
    store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_m, V_DIM, BLOCK_V)
    if PDL:
        release_dependents()


@jit(do_not_specialize=("rows", "num_bits", "window", "chunk"))
def _verify_merge_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    aux_ptr,
    bits_ptr,
    indptr_ptr,
    start_ptr,
    merge_indptr_ptr,
    q_indptr_ptr,
    positions_ptr,
    mask_indptr_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    scale,
    v_scale,
    softcap,
    rows,
    num_bits,
    window,
    chunk,
    q_stride_token,
    q_stride_head,
    k_new_stride_token,
    k_new_stride_head,
    v_new_stride_token,
    v_new_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    aux_stride_token,
    aux_stride_head,
    aux_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    READ_NEW: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
    SKIPS_ALONE: tl.constexpr,
):
    if PDL:
        wait_for_earlier()
    # 1. What is mine: a tile of (draft, head) pairs of one request and KV head, and where their partials lie.
    owner = tl.program_id(0)
    req = (owner // KV_HEADS).to(tl.int64)
    kv_head = (owner % KV_HEADS).to(tl.int64)
    first_token = tl.load(q_indptr_ptr + req).to(tl.int64)
    drafts = (tl.load(q_indptr_ptr + req + 1) - first_token).to(tl.int32)
    if tl.program_id(1) * BLOCK_M >= drafts * GROUP:
        return
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_number = row // GROUP
    mask_m = q_number < drafts
    head = kv_head * GROUP + row % GROUP
    token = first_token + q_number
    first_partial = tl.load(merge_indptr_ptr + owner)
    last_partial = tl.load(merge_indptr_ptr + owner + 1)
    if SKIPS_ALONE:  # noqa: SIM102  (a constant of the compilation, then a number of the device)
        if last_partial - first_partial == 1:  # the answer was written where the one partial was made
            return

    # 2. Merge them in key order. A draft that saw none of a range's keys left -inf there, which weighs nothing.
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = mask_m[:, None] & (offs_v < V_DIM)[None, :]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    stride = rows.to(tl.int64)
    for partial in range(first_partial, last_partial):
        state = partial * stride + row
        maxima = tl.load(max_ptr + state, mask=mask_m, other=float("-inf"))
        sums = tl.load(sum_ptr + state, mask=mask_m, other=0.0)
        accs = tl.load(acc_ptr + state[:, None] * V_DIM + offs_v[None, :], mask=mask_v, other=0.0)
        running_max, running_sum, acc = merge_states(running_max, running_sum, acc, maxima, sums, accs)
    acc = acc * v_scale

    # 3. The drafts among themselves.
    if READ_NEW:
        q_pos = tl.load(positions_ptr + token, mask=mask_m, other=0)
        q_rows = q_ptr + token * q_stride_token + head * q_stride_head
        q, q_rest = load_queries(q_rows, mask_m, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
        list_start = tl.load(indptr_ptr + req)
        cached = tl.load(start_ptr + req) + tl.load(indptr_ptr + req + 1) - list_start
        bits_row = q_number.to(tl.int64) * (cached + drafts)
        if HAS_MASK:
            bits_row += tl.load(mask_indptr_ptr + req)
        last_row = (tl.program_id(1) + 1) * BLOCK_M - 1
        first_new, last_new = seen_drafts(
            q_pos,
            mask_m,
            drafts,
            last_row,
            cached,
            window,
            chunk,
            GROUP,
            BLOCK_N,
            ORDERED,
            CAUSAL,
            HAS_MASK,
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
            first_new,
            last_new,
            first_token,
            positions_ptr,
            cached,
            k_new_ptr + kv_head * k_new_stride_head,
            k_new_stride_token,
            v_new_ptr + kv_head * v_new_stride_head,
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
            BLOCK_N,
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
            HAS_MASK,
            HAS_WINDOW,
            HAS_CHUNK,
        )

    # 4. The sink joins the denominator once, whatever the number of splits; then normalise.
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=mask_m, other=0.0).to(tl.float32)
        running_max, running_sum, fade = join_sink(running_max, running_sum, sink)
        acc = acc * fade[:, None]
    out_rows = out_ptr + token * out_stride_token + head * out_stride_head
    lse_rows = lse_ptr + token * lse_stride_token + head * lse_stride_head
    write_rows(running_max, running_sum, acc, out_rows, lse_rows, mask_m, V_DIM, BLOCK_V, HAS_LSE)


VERIFY_SPLIT = Launcher(_verify_split_kernel, verify_constants)
VERIFY_MERGE = Launcher(_verify_merge_kernel, verify_merge_constants)
