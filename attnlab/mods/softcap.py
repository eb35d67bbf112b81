"""Soft cap: cap * tanh(score / cap), the saturating form. Source: Gemma 2, Grok-1."""

import torch
from torch import Tensor

from attnlab._triton import jit, tl


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Return the scores squeezed into (-cap, cap)."""
    return cap * torch.tanh(scores / cap)


@jit
def soft_cap_triton(scores, cap):
    # tanh(x) = 2 sigmoid(2x) - 1 saturates at any size; a quotient of exponentials overflows at |x| > 88.
    return cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
