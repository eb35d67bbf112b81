"""ALiBi: a penalty that grows with distance, steeper in each later head. Source: Press et al., 2022.

Head h of 8 has slope 2^-(h + 1), as published for eight heads; later heads go on in the same row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.mods.registry import register_score_mod
from attnlab.spec import ScoreMod


def _alibi(scores: Tensor, q_pos: Tensor, kv_pos: Tensor, q_index: Tensor, head: Tensor, aux: Tensor | None) -> Tensor:
    """Return scores - 2^-(head + 1) * (q_pos - kv_pos)."""
    slope = torch.exp2(-(head + 1.0)).to(scores.dtype)
    return scores - slope * (q_pos - kv_pos)


@jit
def _alibi_triton(
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
    slope = tl.exp2(-(head + 1.0))
    return scores - slope * (q_pos - kv_pos).to(tl.float32)


alibi = register_score_mod(ScoreMod(name="alibi", torch=_alibi, triton=_alibi_triton, needs_aux=False))
