"""Scores of some queries, computed again from the paged cache for whoever wants to look at them.

The attention kernels never store a score: looking costs this kernel, not looking costs nothing. It runs the same score
pipeline in the same order, on tiles that begin elsewhere: its numbers are those that the attention kernel had in its
registers, up to the order in which a dot product is summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.kernels.core import load_queries, load_tile, score_tile, slot_offsets
from attnlab.kernels.decode import split_constants
from attnlab.kernels.launch import lifted, slot_stride
from attnlab.kernels.target import Target
from attnlab.plan.score_call import ScoreCall
from attnlab.plan.tiles import head_tiles

SHARED = (
    *("GROUP", "QK_DIM", "BLOCK_H", "BLOCK_N", "BLOCK_D", "BLOCK_R", "PAGE_SIZE"),
    *("HAS_SOFTCAP", "TEMPERATURE_LEN", "MOD", "COMPUTE"),
)
"""Compile-time arguments that the score kernel has in common with the decode kernel."""


def scores(call: ScoreCall, *, target: Target) -> Tensor:
    """Return the scores of some queries, `[rows, heads, keys]` fp32; -inf where a key is not visible.

    Computes: s[i, h, j] = pipeline(q[tokens[i], h] . k[slots[j]]).
    Shapes: as `ScoreCall` has them.
    Grid: (rows x key tiles, KV heads x head tiles): a program owns a tile of keys, and up to 16 query heads of one
    group of one row. Rows come first, so that a tile of keys stays in the cache while all rows read it.
    Reads/writes: the keys of the slots; every cell of the result.
    """
    spec, view = call.spec, call.view
    out = torch.empty((call.rows, spec.heads, call.keys), dtype=torch.float32, device=call.q.device)
    if out.numel() == 0:
        return out
    constants, options = split_constants(spec=spec, view=view, target=target, q_dtype=call.q.dtype)
    q = lifted(call.q, target)
    bias = q if call.aux is None else call.aux  # any tensor will do where no modifier reads it
    key_tiles = -(-call.keys // constants["BLOCK_N"])
    _scores_kernel[(call.rows * key_tiles, spec.kv_heads * head_tiles(spec.group))](
        q,
        view.k,
        call.slots,
        call.kv_pos,
        call.visible.view(torch.uint8),
        call.tokens,
        call.q_pos,
        out,
        bias,
        call.rows,
        call.keys,
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


@jit(do_not_specialize=("rows", "keys"))
def _scores_kernel(
    q_ptr,
    k_ptr,
    slots_ptr,
    kv_pos_ptr,
    visible_ptr,
    tokens_ptr,
    q_pos_ptr,
    out_ptr,
    aux_ptr,
    rows,
    keys,
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
    # 1. What is mine: a tile of keys, and up to 16 heads of one group of one row.
    row = (tl.program_id(0) % rows).to(tl.int64)
    entry = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = entry < keys
    kv_head = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    PACKED: tl.constexpr = BLOCK_H > 1
    member = tl.program_id(1) // KV_HEADS * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = member < GROUP
    head = kv_head * GROUP + member
    token = tl.load(tokens_ptr + row)
    visible = tl.load(visible_ptr + row * keys + entry, mask=mask_n, other=0) != 0

    # 2. Queries against keys, as in the attention kernels.
    q_rows = q_ptr + token * q_stride_token + head * q_stride_head
    slots = tl.load(slots_ptr + entry, mask=mask_n, other=0)
    k_rows = k_ptr + slot_offsets(slots, k_stride_page, k_stride_slot, PAGE_SIZE) + kv_head * k_stride_head
    q, q_rest = load_queries(q_rows, mask_h, QK_DIM, BLOCK_D, BLOCK_R, COMPUTE)
    scores = score_tile(
        q,
        q_rest,
        load_tile(k_rows, mask_n, 0, BLOCK_D, QK_DIM, COMPUTE),
        k_rows,
        mask_n,
        mask_h[:, None] & visible[None, :],
        tl.load(q_pos_ptr + row),
        tl.load(kv_pos_ptr + entry, mask=mask_n, other=0)[None, :],
        token,
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
    cell = (row * KV_HEADS * GROUP + head[:, None]) * keys + entry[None, :]
    tl.store(out_ptr + cell, scores, mask=mask_h[:, None] & mask_n[None, :])
