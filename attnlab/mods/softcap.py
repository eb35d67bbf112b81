"""Soft cap: cap * tanh(score / cap), the saturating form. Source: Gemma 2, Grok-1."""

import torch
from torch import Tensor

from attnlab._triton import jit, tl


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Return the scores squeezed into (-cap, cap)."""
    return cap * torch.tanh(scores / cap)


@jit
def soft_cap_triton(scores, cap):
    # tanh by the exponential of a negative number: it saturates at any size, where exp(x) overflows at x > 88.
    e = tl.exp(-2 * tl.abs(scores) / cap)
    squeezed = cap * (1 - e) / (1 + e)
    return tl.where(scores < 0, -squeezed, squeezed)
