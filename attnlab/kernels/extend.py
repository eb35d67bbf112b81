"""Extend: several queries a request, over the cached keys of a list, then over the keys that come with the call.

Reference: extend_attention_fwd, and where lists hold all keys (one pass) extend_attention_fwd_unified: here one kernel,
whose second loop is then empty. What Hopper runs for long prompts without masks is `extend_hopper.py`.
Source of the method: FlashAttention-2 (Dao, 2023), over paged keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlab._triton import jit, tl
from attnlab.kernels.core import first_visible, join_sink, load_queries, write_rows
from attnlab.kernels.launch import sendable, sight_constants, tile_constants
from attnlab.kernels.launcher import Launcher
from attnlab.kernels.sweep import attend_list, attend_new
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import tuned
from attnlab.memory.pool import KVView, compute_dtype
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
    def choose(
        cls,
        spec: AttentionSpec,
        target: Target,
        *,
        compute: torch.dtype,
        kv_dtype: torch.dtype,
        masked: bool,
        most: int | None,
    ) -> ExtendConfig:
        """Return the choice of the table (`attnlab.kernels.tuning`) for up to `most` queries a request.

        None: one that holds for any number.
        """
        return cls(
            **tuned(
                "extend",
                target,
                qk_dim=spec.qk_dim,
                v_dim=spec.v_dim,
                compute=compute,
                kv=kv_dtype,
                masked=masked,
                modifier=spec.mod is not None,
                rows=most,
            )
        )


def extend(call: ExtendCall, *, target: Target) -> None:
    """Attend for every query token, and write `call.out` and, where given, `call.lse`.

    Computes: over the keys n that the query sees, out = sum p[n] v[n] / Z with p = exp(s - M), Z = sum p + exp(sink -
    M); lse = M + ln Z. Cached keys and values are scaled, new ones are not. Nothing seen: out 0, lse -inf (the sink).
    Shapes: as `ExtendCall` has them.
    Grid: (query heads x query tiles of the longest request, requests): a program owns a tile of queries of one head.
    Heads of a group are neighbours, as they read the same keys; the last tiles, which see most, come first.
    Reads/writes: the slots of the request's list, its new tokens; the output rows of its own queries.
    """
    spec, view, queries = call.spec, call.view, call.queries
    reqs, tokens = call.lane.layout.index.reqs, call.q.shape[0]
    if reqs == 0 or tokens == 0 or queries.most == 0:
        return
    sent = sendable(call, target)
    EXTEND.launch(
        target,
        lambda tiles: (spec.heads * -(-queries.most // tiles["BLOCK_M"]), reqs, 1),
        (sent.arguments, view.arguments, call.lane.arguments, queries.arguments),
        spec=spec,
        view=view,
        target=target,
        q_dtype=call.q.dtype,
        config=ExtendConfig.choose(  # numbers of queries are many, choices few: what is known is found by these
            spec,
            target,
            compute=compute_dtype(call.q.dtype, view.k.dtype),
            kv_dtype=view.k.dtype,
            masked=queries.bits is not None,
            most=None if call.batch_invariant else queries.most,
        ),
        masked=queries.bits is not None,
        cached_visible=queries.cached_visible,
        ordered=queries.ordered,
        one_pass=call.one_pass,
        parts=call.parts,
        has_sinks=call.sinks is not None,
        has_lse=call.lse is not None,
    )
    if sent.out is not call.out:
        call.out.copy_(sent.out)


def extend_constants(
    *,
    spec: AttentionSpec,
    view: KVView,
    target: Target,
    q_dtype: torch.dtype,
    config: ExtendConfig,
    masked: bool,
    cached_visible: bool,
    ordered: bool,
    one_pass: bool,
    parts: str,
    has_sinks: bool,
    has_lse: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's compile-time arguments and launch options: all that a compiled variant depends on."""
    compute = compute_dtype(q_dtype, view.k.dtype)
    constants: dict[str, Any] = {
        "HEADS": spec.heads,
        "GROUP": spec.group,
        "BLOCK_M": config.block_m,
        **tile_constants(spec=spec, view=view, target=target, compute=compute, block_n=config.block_n),
        "ONE_PASS": one_pass,
        "READ_CACHED": parts != "new",
        "READ_NEW": not one_pass and parts != "cached",
        "ORDERED": ordered,
        "CAUSAL": spec.sight.causal,
        **sight_constants(spec, masked=masked),
        "CACHED_VISIBLE": cached_visible,
        "HAS_SINKS": has_sinks,
        "HAS_LSE": has_lse,
    }
    return constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}


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
    scale_cached,
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
    V_IS_K_TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    COMPUTE: tl.constexpr,
    ONE_PASS: tl.constexpr,
    READ_CACHED: tl.constexpr,
    READ_NEW: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    CACHED_VISIBLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    # 1. What is mine: a tile of queries of one request, for one head.
    req = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEADS
    first_token = tl.load(q_indptr_ptr + req).to(tl.int64)
    new = (tl.load(q_indptr_ptr + req + 1) - first_token).to(tl.int32)
    if tile * BLOCK_M >= new:
        return
    kv_head = (head // GROUP).to(tl.int64)
    q_number = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # among the request's new tokens
    mask_m = q_number < new
    token = first_token + q_number
    q_pos = tl.load(positions_ptr + token, mask=mask_m, other=0)
    q_rows = q_ptr + token * q_stride_token + head.to(tl.int64) * q_stride_head
    q, q_rest = load_queries(q_rows, mask_m, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)

    # 2. Its keys: a list of cached ones, which in one pass holds the new ones too.
    list_start = tl.load(indptr_ptr + req)
    listed = tl.load(indptr_ptr + req + 1) - list_start
    start = tl.load(start_ptr + req)
    start_visible = tl.load(start_visible_ptr + req)
    cached = start + listed
    if ONE_PASS:
        cached -= new
    bits_row = q_number.to(tl.int64) * (cached + new)
    if HAS_MASK:
        bits_row += tl.load(mask_indptr_ptr + req)
    first = first_visible(q_pos, mask_m, window, chunk, HAS_WINDOW, HAS_CHUNK)

    # 3. The cached keys, a tile at a time. Entries that no query of the tile sees are left out, by whole tiles.
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    first_entry = tl.maximum(first - start, 0) // BLOCK_N * BLOCK_N
    last_entry = listed
    if not READ_CACHED:
        last_entry = 0
    if ONE_PASS and CAUSAL and not HAS_MASK:
        last_entry = tl.minimum(listed, listed - new + (tile + 1) * BLOCK_M)
    running_max, running_sum, acc = attend_list(
        running_max,
        running_sum,
        acc,
        q,
        q_rest,
        q_pos,
        q_number,
        token,
        head,
        mask_m,
        first_entry,
        last_entry,
        slots_ptr + list_start,
        start,
        start_visible,
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
        CAUSAL,
        HAS_MASK,
        HAS_WINDOW,
        HAS_CHUNK,
        CACHED_VISIBLE,
    )
    acc = acc * v_scale

    # 4. The new keys, straight from the call: they are not scaled.
    if READ_NEW:
        first_new = 0
        if ORDERED:  # then a key's place says where it stands; drafts of a tree share positions
            first_new = tl.maximum(first - cached, 0) // BLOCK_N * BLOCK_N
        last_new = new
        if CAUSAL and not HAS_MASK:
            last_new = tl.minimum(new, (tile + 1) * BLOCK_M)
        elif HAS_WINDOW and ORDERED and not HAS_MASK:
            last_new = tl.minimum(new, (tile + 1) * BLOCK_M + tl.minimum(window, new))
        running_max, running_sum, acc = attend_new(
            running_max,
            running_sum,
            acc,
            q,
            q_rest,
            q_pos,
            q_number,
            token,
            head,
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

    # 5. The sink joins the denominator once; then normalise.
    if HAS_SINKS:
        running_max, running_sum, fade = join_sink(running_max, running_sum, tl.load(sinks_ptr + head).to(tl.float32))
        acc = acc * fade[:, None]
    out_rows = out_ptr + token * out_stride_token + head.to(tl.int64) * out_stride_head
    lse_rows = lse_ptr + token * lse_stride_token + head.to(tl.int64) * lse_stride_head
    write_rows(running_max, running_sum, acc, out_rows, lse_rows, mask_m, V_DIM, BLOCK_V, HAS_LSE)


EXTEND = Launcher(_extend_kernel, extend_constants)
