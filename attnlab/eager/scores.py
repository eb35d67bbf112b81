"""Scores in torch: the twin of kernels/scores.py."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.eager.core import modified
from attnlab.plan.score_call import ScoreCall


def scores(call: ScoreCall) -> Tensor:
    """Return the scores of some queries, `[rows, heads, keys]` fp32; -inf where a key is not visible."""
    spec, view, device = call.spec, call.view, call.q.device
    kv_heads = torch.arange(spec.kv_heads, device=device)
    k = view.rows(view.k, call.slots[:, None], kv_heads).float()  # (keys, kv_heads, qk_dim)
    queries = call.q[call.tokens].float().unflatten(1, (spec.kv_heads, spec.group)) * (spec.scale * view.k_scale)
    raw = queries.transpose(0, 1).flatten(1, 2) @ k.permute(1, 2, 0)  # (kv_heads, rows x group, keys)
    products = raw.view(spec.kv_heads, call.rows, spec.group, call.keys).transpose(0, 1).flatten(1, 2)
    found = modified(
        products,
        spec,
        q_pos=call.q_pos[:, None, None],
        kv_pos=call.kv_pos,
        token=call.tokens[:, None, None],
        head=torch.arange(spec.heads, device=device)[:, None],
        aux=call.aux,
    )
    return torch.where(call.visible[:, None], found, float("-inf"))
