"""Scores of decode calls, computed again from the paged cache for whoever wants to look at them.

The decode kernel never stores a score: looking costs this kernel, not looking costs nothing. It runs the same score
pipeline in the same order, on tiles that begin elsewhere: its numbers are those that the decode kernel had in its
registers, up to the order in which a dot product is summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.kernels.core import load_queries, load_tile, score_tile, slot_offsets
from attnlab.kernels.decode import head_tiles, split_constants
from attnlab.kernels.launch import lifted, slot_stride
from attnlab.kernels.target import Target
from attnlab.plan.call import DecodeCall
from attnlab.spec import AttentionSpec

SHARED = (
    *("GROUP", "QK_DIM", "BLOCK_H", "BLOCK_N", "BLOCK_D", "BLOCK_R", "PAGE_SIZE"),
    *("HAS_SOFTCAP", "TEMPERATURE_LEN", "MOD", "COMPUTE"),
)
"""Compile-time arguments that the score kernel has in common with the decode kernel."""


def decode_scores(call: DecodeCall, spec: AttentionSpec, *, requests: Tensor, max_keys: int, target: Target) -> Tensor:
    """Return the scores of some requests, `[rows, heads, max_keys]` fp32; -inf beyond a request's keys.

    Computes: s[i, h, n] = pipeline(q[requests[i], h] . k[n]), the pipeline being that of `spec`.
    Shapes: `requests [rows]` int32; the rest as `DecodeCall` has it.
    Grid: (key tiles, KV heads x head tiles, rows): a program owns a tile of keys and up to 16 query heads of one group.
    Reads/writes: the keys of the requests' slots; the cells of these keys. All others hold -inf from the start.
    """
    q, view, layout = call.q, call.view, call.lane.layout
    aux = call.aux if spec.mod is not None else None
    rows = requests.shape[0]
    out = torch.full((rows, spec.heads, max_keys), float("-inf"), dtype=torch.float32, device=q.device)
    if rows == 0 or max_keys == 0:
        return out
    constants, options = split_constants(spec=spec, view=view, target=target, q_dtype=q.dtype)
    q = lifted(q, target)
    key_tiles = -(-max_keys // constants["BLOCK_N"])
    bias = q if aux is None else aux  # any tensor will do where no modifier reads it
    _decode_scores_kernel[(key_tiles, spec.kv_heads * head_tiles(spec.group), rows)](
        q,
        view.k,
        layout.index.slots,
        layout.index.indptr,
        layout.start,
        requests,
        out,
        bias,
        max_keys,
        spec.scale * view.k_scale,
        1.0 if spec.softcap is None else spec.softcap,
        q.stride(0),
        q.stride(1),
        view.k.stride(0),
        slot_stride(view, view.k),
        view.k.stride(-2),
        bias.stride(0),
        bias.stride(1),
        bias.shape[2],
        KV_HEADS=spec.kv_heads,
        **{name: constants[name] for name in SHARED},
        **options,
    )
    return out


@jit(do_not_specialize=("max_keys",))
def _decode_scores_kernel(
    q_ptr,
    k_ptr,
    slots_ptr,
    indptr_ptr,
    start_ptr,
    requests_ptr,
    out_ptr,
    aux_ptr,
    max_keys,
    scale,
    softcap,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    aux_stride_token,
    aux_stride_head,
    aux_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QK_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE_LEN: tl.constexpr,
    MOD: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    # 1. What is mine: a tile of one request's keys, and up to 16 heads of one group.
    row = tl.program_id(2)
    req = tl.load(requests_ptr + row).to(tl.int64)
    kv_head = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    list_start = tl.load(indptr_ptr + req)
    keys = tl.minimum(tl.load(indptr_ptr + req + 1) - list_start, max_keys)
    start = tl.load(start_ptr + req)
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = entry < keys
    PACKED: tl.constexpr = BLOCK_H > 1
    member = tl.program_id(1) // KV_HEADS * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = member < GROUP
    head = kv_head * GROUP + member

    # 2. Queries against keys, as in the decode kernel.
    q_rows = q_ptr + req * q_stride_token + head * q_stride_head
    slots = tl.load(slots_ptr + list_start + entry, mask=mask_n, other=0)
    k_rows = k_ptr + slot_offsets(slots, k_stride_page, k_stride_slot, PAGE_SIZE) + kv_head * k_stride_head
    q, q_rest = load_queries(q_rows, mask_h, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
    scores = score_tile(
        q,
        q_rest,
        load_tile(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE),
        k_rows,
        mask_n,
        mask_h[:, None] & mask_n[None, :],
        start + keys - 1,
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
        BLOCK_D,
        BLOCK_R,
        PACKED,
        HAS_SOFTCAP,
        TEMPERATURE_LEN,
        MOD,
        COMPUTE,
    )

    # 3. Keep them.
    cell = (row.to(tl.int64) * KV_HEADS * GROUP + head[:, None]) * max_keys + entry[None, :]
    tl.store(out_ptr + cell, scores, mask=mask_h[:, None] & mask_n[None, :])
