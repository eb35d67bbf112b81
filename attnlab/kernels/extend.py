"""Extend: several queries a request, over the cached keys of a list, then over the keys that come with the call.

Reference: extend_attention_fwd, and where lists hold all keys (one pass) extend_attention_fwd_unified: here one kernel,
whose second loop is then empty.
Source of the method: FlashAttention-2 (Dao, 2023), over paged keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlab._triton import jit, tl
from attnlab.kernels.core import (
    dots,
    finite_or_zero,
    load_tile,
    score_pipeline,
    slot_offsets,
    softmax_step,
    visible_keys,
)
from attnlab.kernels.decode import compute_dtype, dim_tiles, lifted, slot_stride, tl_dtype
from attnlab.kernels.target import Target
from attnlab.mask import CustomMask
from attnlab.plan.extend_call import ExtendCall
from attnlab.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendConfig:
    """Tile sizes and launch options of the extend kernel for one shape on one target.

    A one-pass list begins at a multiple of 128 positions, which `block_n` divides: so tiles of keys are the same
    however a prompt is cut.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, spec: AttentionSpec, target: Target, *, fp32: bool) -> ExtendConfig:
        """Return the choice; the one place where it is made."""
        if target.kind == "interpreter":
            return cls(block_m=64, block_n=128, num_warps=4, num_stages=1)  # its cost is Python per operation
        if spec.qk_dim > 256 or (fp32 and spec.qk_dim > 128):
            return cls(block_m=16, block_n=32, num_warps=4, num_stages=1)
        if spec.qk_dim > 128 or fp32:
            return cls(block_m=32, block_n=32, num_warps=4, num_stages=1)
        return cls(block_m=64, block_n=64, num_warps=4, num_stages=2)


def extend(call: ExtendCall, *, target: Target) -> None:
    """Attend for every query token, and write `call.out` and, where given, `call.lse`.

    Computes: over the keys n that the query sees, out = sum p[n] v[n] / Z with p = exp(s - M), Z = sum p + exp(sink -
    M); lse = M + ln Z. Cached keys and values are scaled, new ones are not. Nothing seen: out 0, lse -inf (the sink).
    Shapes: as `ExtendCall` has them.
    Grid: (query tiles of the longest request, query heads, requests): a program owns a tile of queries of one head.
    Reads/writes: the slots of the request's list, its new tokens; the output rows of its own queries.
    """
    spec, view, layout, queries = call.spec, call.view, call.lane.layout, call.queries
    reqs, tokens = layout.index.reqs, call.q.shape[0]
    if reqs == 0 or tokens == 0 or queries.most == 0:
        return
    compute = compute_dtype(call.q.dtype, view.k.dtype)
    config = ExtendConfig.choose(spec, target, fp32=compute == torch.float32)
    block_d, block_r = dim_tiles(spec.qk_dim)
    q, k_new, v_new = (lifted(x, target) for x in (call.q, call.k, call.v))
    # The interpreter truncates where it should round to bf16: torch rounds instead.
    out = torch.zeros_like(call.out, dtype=torch.float32) if target.kind == "interpreter" else call.out
    any_floats = q  # where an option is off, any tensor will do
    lse = any_floats if call.lse is None else call.lse
    sinks = any_floats if call.sinks is None else call.sinks
    bias = any_floats if call.aux is None else call.aux
    bits = queries.mask.bits if isinstance(queries.mask, CustomMask) else layout.start
    _extend_kernel[(-(-queries.most // config.block_m), spec.heads, reqs)](
        q,
        k_new,
        v_new,
        view.k,
        view.v,
        out,
        lse,
        sinks,
        bias,
        bits,
        layout.index.slots,
        layout.index.indptr,
        layout.start,
        layout.start_visible,
        queries.indptr,
        queries.positions,
        queries.mask_indptr,
        spec.scale,
        view.k_scale,
        view.v_scale,
        1.0 if spec.softcap is None else spec.softcap,
        bits.shape[0],
        layout.sight.window or 0,
        layout.sight.chunk or 0,
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
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        bias.stride(0),
        bias.stride(1),
        bias.shape[2],
        GROUP=spec.group,
        QK_DIM=spec.qk_dim,
        V_DIM=spec.v_dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        BLOCK_V=max(16, 1 << (spec.v_dim - 1).bit_length()),
        PAGE_SIZE=view.page_size,
        ONE_PASS=call.one_pass,
        READ_CACHED=call.parts != "new",
        READ_NEW=not call.one_pass and call.parts != "cached",
        CAUSAL=layout.sight.causal,
        HAS_MASK=isinstance(queries.mask, CustomMask),
        HAS_WINDOW=layout.sight.window is not None,
        HAS_CHUNK=layout.sight.chunk is not None,
        HAS_SINKS=spec.has_sinks,
        HAS_LSE=call.lse is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        TEMPERATURE_LEN=spec.temperature_len or 0,
        MOD=None if spec.mod is None else spec.mod.triton,
        COMPUTE=tl.float32 if target.kind == "interpreter" else tl_dtype(compute),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if out is not call.out:
        live = int(queries.indptr[-1])
        call.out[:live] = out[:live].to(call.out.dtype)


@jit(do_not_specialize=("num_bits", "window", "chunk"))
def _extend_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    aux_ptr,
    bits_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    start_visible_ptr,
    q_indptr_ptr,
    positions_ptr,
    mask_indptr_ptr,
    scale,
    k_scale,
    v_scale,
    softcap,
    num_bits,
    window,
    chunk,
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
    aux_stride_token,
    aux_stride_head,
    aux_width,
    GROUP: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PASS: tl.constexpr,
    READ_CACHED: tl.constexpr,
    READ_NEW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    # 1. What is mine: a tile of queries of one request, for one head.
    req = tl.program_id(2).to(tl.int64)
    first_token = tl.load(q_indptr_ptr + req).to(tl.int64)
    new = (tl.load(q_indptr_ptr + req + 1) - first_token).to(tl.int32)
    if tl.program_id(0) * BLOCK_M >= new:
        return
    head = tl.program_id(1)
    kv_head = (head // GROUP).to(tl.int64)
    number = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # among the request's new tokens
    mask_m = number < new
    token = first_token + number
    q_pos = tl.load(positions_ptr + token, mask=mask_m, other=0)
    q_rows = q_ptr + token * q_stride_token + head.to(tl.int64) * q_stride_head
    q = load_tile(q_rows, mask_m, 0, BLOCK_D, QK_DIM, COMPUTE)
    if BLOCK_R > 0:
        q_rest = load_tile(q_rows, mask_m, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE)

    # 2. Its keys: a list of cached ones, which in one pass holds the new ones too.
    list_start = tl.load(indptr_ptr + req)
    listed = tl.load(indptr_ptr + req + 1) - list_start
    start = tl.load(start_ptr + req)
    start_visible = tl.load(start_visible_ptr + req)
    cached = start + listed
    if ONE_PASS:
        cached -= new
    bits_row = number.to(tl.int64) * (cached + new)
    if HAS_MASK:
        bits_row += tl.load(mask_indptr_ptr + req)
    k_head_ptr = k_ptr + kv_head * k_stride_head
    v_head_ptr = v_ptr + kv_head * v_stride_head

    # 3. The cached keys, a tile at a time. Entries that no query of the tile sees are left out, by whole tiles.
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    last_entry = listed
    if not READ_CACHED:
        last_entry = 0
    if ONE_PASS and CAUSAL and not HAS_MASK:
        last_entry = tl.minimum(listed, listed - new + (tl.program_id(0) + 1) * BLOCK_M)
    first_entry = 0
    if HAS_WINDOW:
        lowest = tl.min(tl.where(mask_m, q_pos, 2147483647), 0)
        first_entry = tl.maximum(lowest - window + 1 - start, 0) // BLOCK_N * BLOCK_N
    for at in range(first_entry, last_entry, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        mask_n = entry < last_entry
        kv_pos = start + entry
        slots = tl.load(slots_ptr + list_start + entry, mask=mask_n, other=0)
        k_rows = k_head_ptr + slot_offsets(slots, k_stride_page, k_stride_slot, PAGE_SIZE)
        products = dots(q, load_tile(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE), True)
        if BLOCK_R > 0:
            products += dots(q_rest, load_tile(k_rows, mask_n, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE), True)
        visible = visible_keys(
            q_pos,
            kv_pos,
            number,
            kv_pos - cached,  # below 0 for cached keys
            kv_pos,
            mask_m,
            mask_n & (kv_pos >= start_visible),
            bits_ptr,
            bits_row,
            num_bits,
            window,
            chunk,
            CAUSAL,
            HAS_MASK,
            HAS_WINDOW,
            HAS_CHUNK,
        )
        scores = score_pipeline(
            products,
            q_pos[:, None],
            kv_pos[None, :],
            token[:, None],
            head,
            visible,
            scale * k_scale,
            softcap,
            aux_ptr,
            aux_stride_token,
            aux_stride_head,
            aux_width,
            HAS_SOFTCAP,
            TEMPERATURE_LEN,
            MOD,
        )
        v_rows = v_head_ptr + slot_offsets(slots, v_stride_page, v_stride_slot, PAGE_SIZE)
        v = load_tile(v_rows, mask_n, 0, BLOCK_V, V_DIM, COMPUTE)
        running_max, running_sum, acc = softmax_step(running_max, running_sum, acc, scores, v, True, BLOCK_N)
    acc = acc * v_scale

    # 4. The new keys, straight from the call: they are not scaled.
    if READ_NEW:
        last_new = new
        if CAUSAL and not HAS_MASK:
            last_new = tl.minimum(new, (tl.program_id(0) + 1) * BLOCK_M)
        for at in range(0, last_new, BLOCK_N):
            other = at + tl.arange(0, BLOCK_N)
            mask_n = other < last_new
            kv_token = first_token + other
            kv_pos = tl.load(positions_ptr + kv_token, mask=mask_n, other=0)
            k_rows = k_new_ptr + kv_token * k_new_stride_token + kv_head * k_new_stride_head
            products = dots(q, load_tile(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE), True)
            if BLOCK_R > 0:
                products += dots(q_rest, load_tile(k_rows, mask_n, BLOCK_D, BLOCK_R, QK_DIM, COMPUTE), True)
            visible = visible_keys(
                q_pos,
                kv_pos,
                number,
                other,
                cached + other,
                mask_m,
                mask_n,
                bits_ptr,
                bits_row,
                num_bits,
                window,
                chunk,
                CAUSAL,
                HAS_MASK,
                HAS_WINDOW,
                HAS_CHUNK,
            )
            scores = score_pipeline(
                products,
                q_pos[:, None],
                kv_pos[None, :],
                token[:, None],
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
            v_rows = v_new_ptr + kv_token * v_new_stride_token + kv_head * v_new_stride_head
            v = load_tile(v_rows, mask_n, 0, BLOCK_V, V_DIM, COMPUTE)
            running_max, running_sum, acc = softmax_step(running_max, running_sum, acc, scores, v, True, BLOCK_N)

    # 5. The sink joins the denominator once; then normalise. Nothing seen: out 0, lse -inf.
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        new_max = tl.maximum(running_max, sink)
        shift = finite_or_zero(new_max)
        # A sink of +inf takes everything: exp(inf - inf) would be NaN.
        endless = sink == float("inf")
        fade = tl.where(endless, 0.0, tl.exp(running_max - shift))
        acc = acc * fade[:, None]
        running_sum = running_sum * fade + tl.where(endless, 1.0, tl.exp(sink - shift))
        running_max = new_max
    safe = tl.where(running_sum == 0.0, 1.0, running_sum)
    offs_v = tl.arange(0, BLOCK_V)
    out_rows = out_ptr + token * out_stride_token + head.to(tl.int64) * out_stride_head
    cells = out_rows[:, None] + offs_v[None, :]
    mask_out = mask_m[:, None] & (offs_v < V_DIM)[None, :]
    tl.store(cells, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=mask_out)
    if HAS_LSE:
        lse_rows = lse_ptr + token * lse_stride_token + head.to(tl.int64) * lse_stride_head
        tl.store(lse_rows, running_max + tl.log(safe), mask=mask_m)
