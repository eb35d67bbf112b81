"""Scores of decode calls in torch: the twin of kernels/scores.py."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.eager.decode import modify_scores
from attnlab.plan.call import DecodeCall
from attnlab.spec import AttentionSpec


def decode_scores(call: DecodeCall, spec: AttentionSpec, *, requests: Tensor, max_keys: int) -> Tensor:
    """Return the scores of some requests, `[rows, heads, max_keys]` fp32; -inf beyond a request's keys."""
    q, view, layout = call.q, call.view, call.lane.layout
    aux = call.aux if spec.mod is not None else None
    req = requests.long()
    rows, indptr = req.shape[0], layout.index.indptr.long()
    nothing = torch.full((rows, spec.heads, max_keys), float("-inf"), device=q.device)
    if rows == 0 or max_keys == 0:
        return nothing
    entry = torch.arange(max_keys, device=q.device)
    valid = entry < (indptr[req + 1] - indptr[req])[:, None]  # (rows, keys)
    # Lanes beyond the end read the request's own first key; of a request without keys they read nothing of use.
    within = torch.where(valid, entry, 0)
    slots = layout.index.slots[(indptr[req][:, None] + within).clamp(max=layout.index.slots.shape[0] - 1)]
    heads = torch.arange(spec.kv_heads, device=q.device)[:, None]
    k = view.rows(view.k, slots[:, None], heads).float()  # (rows, kv_heads, keys, qk_dim)
    queries = q[req].float().unflatten(1, (spec.kv_heads, spec.group)) * (spec.scale * view.k_scale)
    scores = queries @ k.mT  # (rows, kv_heads, group, keys), scaled in the decode's order
    head = heads * spec.group + torch.arange(spec.group, device=q.device)
    scores = modify_scores(
        scores.flatten(0, 1),
        layout,
        spec,
        aux,
        req.repeat_interleave(spec.kv_heads),
        head.repeat(rows, 1),
        within.repeat_interleave(spec.kv_heads, 0),
    )
    return torch.where(valid[:, None], scores.view(rows, spec.heads, max_keys), nothing)
