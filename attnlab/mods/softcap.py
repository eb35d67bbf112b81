"""Soft cap: cap * tanh(score / cap), the saturating form. Source: Gemma 2, Grok-1."""

import torch
from torch import Tensor

from attnlab._triton import jit, tl


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Return the scores squeezed into (-cap, cap)."""
    return cap * torch.tanh(scores / cap)


@jit
def soft_cap_triton(scores, cap):
    x = scores / cap
    # tanh by the exponential of a negative number: it saturates at any size, where exp(x) overflows at x > 88. Near 0
    # its difference from 1 cancels, and the series is exact to fp32.
    e = tl.exp(-2 * tl.abs(x))
    far = cap * (1 - e) / (1 + e)
    x2 = x * x
    near = scores * (1 - x2 * (1.0 / 3 - x2 * (2.0 / 15 - x2 * (17.0 / 315))))
    return tl.where(tl.abs(x) < 0.15, near, tl.where(x < 0, -far, far))
