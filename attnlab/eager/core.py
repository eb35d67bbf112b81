"""What every eager attention shares: the score pipeline, which keys are seen, softmax states and the sink.

The twin of kernels/core.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.mask import CustomMask, Mask
from attnlab.mods.softcap import soft_cap
from attnlab.mods.temperature import temperature
from attnlab.spec import AttentionSpec, Sight

State = tuple[Tensor, Tensor, Tensor]
"""Maximum and sum `[rows, ...]`, accumulator `[rows, ..., v_dim]`."""


def modified(
    scores: Tensor,
    spec: AttentionSpec,
    *,
    q_pos: Tensor,
    kv_pos: Tensor,
    token: Tensor,
    head: Tensor,
    aux: Tensor | None,
) -> Tensor:
    """Return scores capped, tempered and modified, in this order. All index tensors broadcast against the scores."""
    if spec.softcap is not None:
        scores = soft_cap(scores, spec.softcap)
    if spec.temperature_len is not None:
        scores = scores * temperature(q_pos, spec.temperature_len)
    if spec.mod is not None:
        scores = spec.mod.torch(scores, q_pos, kv_pos, token, head, aux)
    return scores


def visible_keys(
    sight: Sight,
    mask: Mask,
    *,
    q_pos: Tensor,
    kv_pos: Tensor,
    q_number: Tensor,
    kv_number: Tensor,
    bit: Tensor,
) -> Tensor:
    """Return which keys a query sees, by sight and then by mask or causality; all arguments broadcast.

    `q_number` and `kv_number` are places among a request's new tokens, below 0 for a cached key; `bit` is the pair's
    in a custom mask. A key at a position below 0 is seen by nobody.
    """
    visible = (kv_pos >= 0) & (kv_pos >= sight.first(q_pos))
    if sight.chunk is not None:
        visible = visible & (kv_pos // sight.chunk == q_pos // sight.chunk)
    if isinstance(mask, CustomMask):
        have = mask.bits.shape[0]
        # What a mask lacks is hidden: where only the device knows the lengths nobody could check its size.
        shown = (bit < have) & (mask.bits[bit.clamp(max=have - 1)] != 0) if have else visible & False
        return visible & (shown | (kv_number < 0)) if mask.cached_visible else visible & shown
    if sight.causal:
        return visible & (kv_number <= q_number)
    return visible if sight.window is None else visible & (kv_pos - q_pos < sight.window)


def finite(maximum: Tensor) -> Tensor:
    """Return what to subtract before exp: the maximum, or 0 where nothing was seen."""
    return torch.where(maximum == float("-inf"), 0.0, maximum)


def state_of(scores: Tensor, v: Tensor) -> State:
    """Return the states of rows that saw some keys: scores `[tiles, ..., keys]`, values `[tiles, keys, v_dim]`."""
    maximum = scores.amax(-1)
    p = torch.exp(scores - finite(maximum)[..., None])
    return maximum, p.sum(-1), (p.flatten(1, -2) @ v).view(*maximum.shape, v.shape[-1])


def merge_states(one: State, other: State) -> State:
    """Return the states of rows that saw both sets of keys."""
    top = torch.maximum(one[0], other[0])
    old, new = torch.exp(one[0] - finite(top)), torch.exp(other[0] - finite(top))
    return top, one[1] * old + other[1] * new, one[2] * old[..., None] + other[2] * new[..., None]


def join_sink(state: State, sink: Tensor) -> State:
    """Return the states with the sink, a logit for every row, in their denominators."""
    maximum, total, acc = state
    top = torch.maximum(maximum, sink)
    endless = sink == float("inf")  # takes everything; exp(inf - inf) would be NaN
    fade = torch.where(endless, 0.0, torch.exp(maximum - finite(top)))
    total = total * fade + torch.where(endless, 1.0, torch.exp(sink - finite(top)))
    return top, total, acc * fade[..., None]


def normalised(state: State) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of states: 0 and -inf where nothing was seen."""
    maximum, total, acc = state
    safe = torch.where(total == 0, 1.0, total)
    return acc / safe[..., None], maximum + safe.log()


def merged(states: State, row: Tensor, rows: int) -> State:
    """Return the states merged by row: -inf, 0 and 0 where a row has none."""
    maximum, total, acc = states
    top = maximum.new_full((rows, *maximum.shape[1:]), float("-inf"))
    top.scatter_reduce_(0, row[:, None].expand_as(maximum), maximum, "amax")
    fade = torch.exp(maximum - finite(top)[row])
    return top, _sum_by_row(total * fade, row, rows), _sum_by_row(acc * fade[..., None], row, rows)


def _sum_by_row(x: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the sums of x's entries that share a row, always added in the same order."""
    sums = x.new_zeros((rows, *x.shape[1:]))
    # On a GPU index_add_ adds in any order; index_put_ sorts first.
    return sums.index_put_((row,), x, accumulate=True) if x.is_cuda else sums.index_add_(0, row, x)
