"""Relative bias: a learned number per query token, head and distance, added to the score.

Source: the example modifier of SGLang's Triton kernels (`relative_bias_score_mod`); the idea is T5's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.mods.registry import register_score_mod
from attnlab.spec import ScoreMod


def _relative_bias(
    scores: Tensor, q_pos: Tensor, kv_pos: Tensor, q_index: Tensor, head: Tensor, aux: Tensor | None
) -> Tensor:
    """Return scores + aux[q_index, head, q_pos - kv_pos] where the distance lies in the table, else scores."""
    if aux is None:
        raise ValueError("aux: relative_bias needs [tokens, heads, width], got None")
    distance = q_pos - kv_pos
    inside = (distance >= 0) & (distance < aux.shape[2])
    bias = aux[q_index, head, distance.clamp(0, aux.shape[2] - 1)].to(scores.dtype)
    return torch.where(inside, scores + bias, scores)


@jit
def _relative_bias_triton(
    scores,
    q_pos,
    kv_pos,
    q_index,
    head,
    valid,
    aux_ptr,
    aux_stride_token,
    aux_stride_head,
    aux_width,
):
    distance = q_pos - kv_pos
    inside = valid & (distance >= 0) & (distance < aux_width)
    offset = q_index.to(tl.int64) * aux_stride_token + head.to(tl.int64) * aux_stride_head + distance
    return scores + tl.load(aux_ptr + offset, mask=inside, other=0.0).to(tl.float32)


relative_bias = register_score_mod(
    ScoreMod(name="relative_bias", torch=_relative_bias, triton=_relative_bias_triton, needs_aux=True)
)
