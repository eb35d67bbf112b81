"""The oracle: dense attention in fp64, one request and one head at a time. What everything else is held to.

It shares no code with what it checks: no paged cache, no splits, no plan, no engine. Read it once, slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Modify = Callable[[Tensor, int, Tensor, int], Tensor]
"""(scores of one query over its keys, query position, key positions, query head) -> scores."""


def attention(
    q: Float[Tensor, "heads qk_dim"],
    k: Float[Tensor, "keys kv_heads qk_dim"],
    v: Float[Tensor, "keys kv_heads v_dim"],
    *,
    scale: float,
    q_pos: int | None = None,
    softcap: float | None = None,
    temperature_len: int | None = None,
    modify: Modify | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    window: int | None = None,
    chunk: int | None = None,
    kv_pos: Sequence[int] | None = None,
    visible: Sequence[bool] | None = None,
) -> tuple[Float[Tensor, "heads v_dim"], Float[Tensor, " heads"]]:
    """Return one query token's output and natural log-sum-exp, fp64, over all keys given.

    Keys stand at positions 0, 1, ...; the query at `q_pos`, by default with the last key. Of these it sees the k with
    0 <= q_pos - k < `window`, and those of its own `chunk`, where there is one. Where `visible` is given, it says for
    each key whether it is seen, and these apply on top; `kv_pos` gives other positions (drafts of a tree share some).
    No key: output 0, LSE -inf (the sink, where there is one). The sink joins the denominator only; it is neither
    scaled nor capped.
    """
    heads, keys, kv_heads = q.shape[0], k.shape[0], k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    position = keys - 1 if q_pos is None else q_pos
    out = torch.zeros(heads, v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((heads,), -math.inf, dtype=torch.float64, device=q.device)
    at = list(range(keys)) if kv_pos is None else list(kv_pos)
    hidden = torch.tensor([not seen for seen in visible or [True] * keys], dtype=torch.bool, device=q.device)
    if window is not None:
        hidden |= torch.tensor([position - p >= window for p in at], dtype=torch.bool, device=q.device)
        if visible is None:
            hidden |= torch.tensor([position < p for p in at], dtype=torch.bool, device=q.device)
    if chunk is not None:
        hidden |= torch.tensor([p // chunk != position // chunk for p in at], dtype=torch.bool, device=q.device)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = k[:, kv_head] @ q[head] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if temperature_len is not None and position > temperature_len:
            scores = scores * (math.log2(position) / math.log2(temperature_len))
        if modify is not None:
            scores = modify(scores, position, torch.tensor(at, device=q.device), head)
        scores[hidden] = -math.inf
        everything = scores if sinks is None else torch.cat([scores, sinks[head].double().reshape(1)])
        if everything.numel():
            lse[head] = torch.logsumexp(everything, 0)
        if lse[head] != -math.inf and (sinks is None or sinks[head] != math.inf):
            out[head] = torch.exp(scores - lse[head]) @ v[:, kv_head]
    return out, lse
