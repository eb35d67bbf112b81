"""Temperature by length: scores of a query at position p > T grow by log2(p) / log2(T). Source: Grok-2 (xAI)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlab._triton import jit, tl


def temperature(q_pos: Tensor, length: int) -> Tensor:
    """Return the factor of a query at each position, fp32 (fp64 for fp64 positions); 1 up to position `length`."""
    position = q_pos if q_pos.is_floating_point() else q_pos.float()
    return torch.where(position > length, position.clamp(min=1).log2() / math.log2(length), 1.0)


@jit
def temperature_triton(q_pos, LENGTH: tl.constexpr):
    grown = tl.log2(tl.maximum(q_pos, 1).to(tl.float32)) / tl.log2(LENGTH * 1.0)
    return tl.where(q_pos > LENGTH, grown, 1.0)
