"""Verify over even shares: a program reads one share of all keys for the drafts of whichever requests it falls into.

The variant of `verify.py`'s split stage for schedules that deal several segments to a program. It leaves the same
partials, for the same merge. Cached keys stand before every draft: what is left to hide them is a window, a chunk or a
mask, so that most tiles need no mask at all.
Source of the method: Stream-K (Osama et al., 2023), LeanAttention (Sanovar et al., 2024), tree attention of SpecInfer
(Miao et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlab._triton import jit, release_dependents, tl
from attnlab.kernels.core import attend_tile, load_queries, slot_offsets, store_states, visible_keys
from attnlab.kernels.launch import lifted, narrow, sight_constants, slot_stride, tile_constants
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.extend_call import VerifyCall
from attnlab.spec import AttentionSpec


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


def verify_shares(call: VerifyCall, *, target: Target) -> None:
    """Leave the softmax state of every draft over every segment of the schedule in `call.partials`.

    Computes, shapes: as `verify_split`.
    Grid: (programs, tiles of rows): a program owns its segments of the schedule, and a tile of (draft, head) pairs.
    Reads/writes: the keys and values of the segments' slots; of the partials, the segments' own rows.
    """
    spec, view, lane, queries = call.spec, call.view, call.lane, call.queries
    if lane.layout.index.reqs == 0 or queries.most == 0:
        return
    rows = queries.most * spec.group
    constants, options = verify_shares_constants(
        spec=spec, view=view, target=target, q_dtype=call.q.dtype, rows=rows, masked=queries.cached_masked
    )
    q = lifted(call.q, target)
    bias = q if call.aux is None else call.aux  # any tensor will do where no modifier reads it
    bits = lane.layout.start if queries.bits is None else queries.bits
    _verify_shares_kernel[(lane.schedule.programs, -(-rows // constants["BLOCK_M"]))](
        q,
        view.k,
        view.v,
        lane.layout.index.slots,
        lane.layout.index.indptr,
        lane.layout.start,
        lane.schedule.segments,
        lane.schedule.program_indptr,
        queries.indptr,
        queries.positions,
        bits,
        queries.mask_indptr,
        call.partials.acc,
        call.partials.max,
        call.partials.sum,
        bias,
        spec.scale * view.k_scale,
        1.0 if spec.softcap is None else spec.softcap,
        rows,
        bits.shape[0],
        lane.layout.sight.window or 0,
        lane.layout.sight.chunk or 0,
        q.stride(0),
        q.stride(1),
        view.k.stride(0),
        slot_stride(view, view.k),
        view.k.stride(-2),
        view.v.stride(0),
        slot_stride(view, view.v),
        view.v.stride(-2),
        bias.stride(0),
        bias.stride(1),
        bias.shape[2],
        **constants,
        **options,
    )


def verify_shares_constants(
    *, spec: AttentionSpec, view: KVView, target: Target, q_dtype: torch.dtype, rows: int, masked: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on."""
    compute = compute_dtype(q_dtype, view.k.dtype)
    config = VerifySharesConfig.choose(spec, target, compute=compute, kv_dtype=view.k.dtype, masked=masked, rows=rows)
    constants: dict[str, Any] = {
        "GROUP": spec.group,
        "BLOCK_M": config.block_m,
        **tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n),
        **sight_constants(spec, masked=masked),
        "NARROW": narrow(view.k, view.v),
        "STAGES": config.num_stages,
        "PDL": target.has_pdl,
    }
    return constants, {"num_warps": config.num_warps}


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
    scale,
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
    NARROW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Where bits are read, or a modifier may look at what is seen, every tile has a mask.
    ALWAYS: tl.constexpr = HAS_MASK or MOD is not None
    BOUNDED: tl.constexpr = HAS_WINDOW or HAS_CHUNK
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_number = row // GROUP
    number = tl.load(programs_ptr + tl.program_id(0))
    end = tl.load(programs_ptr + tl.program_id(0) + 1)
    while number < end:
        # 1. What is mine: a range of one request's cached keys, for one KV head, and a tile of (draft, head) pairs.
        segment = segments_ptr + number * 5
        req = tl.load(segment).to(tl.int64)
        kv_head = tl.load(segment + 1).to(tl.int64)
        first = tl.load(segment + 2)
        last = tl.load(segment + 3)
        partial = tl.load(segment + 4).to(tl.int64)
        k_head_ptr = k_ptr + kv_head * k_stride_head
        v_head_ptr = v_ptr + kv_head * v_stride_head
        list_start = tl.load(indptr_ptr + req)
        start = tl.load(start_ptr + req)
        cached = start + tl.load(indptr_ptr + req + 1) - list_start
        first_token = tl.load(q_indptr_ptr + req).to(tl.int64)
        drafts = (tl.load(q_indptr_ptr + req + 1) - first_token).to(tl.int32)
        if tl.program_id(1) * BLOCK_M >= drafts * GROUP:
            last = first  # another request has drafts for this tile
        mask_m = q_number < drafts
        head = kv_head * GROUP + row % GROUP
        token = first_token + q_number
        q_pos = tl.load(positions_ptr + token, mask=mask_m, other=0)
        q_rows = q_ptr + token * q_stride_token + head * q_stride_head
        q, q_rest = load_queries(q_rows, mask_m, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
        bits_row = q_number.to(tl.int64) * (cached + drafts)
        if HAS_MASK:
            bits_row += tl.load(mask_indptr_ptr + req)

        # 2. Its keys: tiles that a window or a chunk hides from some, whole tiles that all see, the rest of a tile.
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        clear = first
        if BOUNDED and not ALWAYS:
            shown = first_shown_to_all(q_pos, mask_m, window, chunk, HAS_WINDOW, HAS_CHUNK) - start
            clear = first + tl.cdiv(tl.maximum(tl.minimum(shown, last) - first, 0), BLOCK_N) * BLOCK_N
        whole = clear + tl.maximum(last - clear, 0) // BLOCK_N * BLOCK_N
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
                    True,
                    V_IS_K_TILE,
                    HAS_SOFTCAP,
                    TEMPERATURE_LEN,
                    MOD,
                    COMPUTE,
                )

        # 3. Leave the states.
        state = partial * rows + row
        store_states(state, running_max, running_sum, acc, max_ptr, sum_ptr, acc_ptr, mask_m, V_DIM, BLOCK_V)
        number += 1
    if PDL:
        release_dependents()
