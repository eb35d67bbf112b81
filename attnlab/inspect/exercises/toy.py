"""The toy batch of the lessons."""

from __future__ import annotations

import torch

from attnlab.inspect.exercises.registry import TOY_LENS
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, Workbench, workbench
from attnlab.spec import AttentionSpec, ModelSpec


def toy(policy: str = "seed") -> Workbench:
    """Return the toy batch on a workbench: 4 requests, 8 query heads, 2 KV heads, 64 dimensions, pages of 4."""
    attention = AttentionSpec(heads=8, kv_heads=2, qk_dim=64, v_dim=64, scale=0.125)
    model = ModelSpec.uniform(attention, layers=1, context_len=2048, page_size=4, kv_dtype=torch.float32)
    return workbench(model, lens=TOY_LENS, policy=policy, engine="eager", multiprocessors=H200_MULTIPROCESSORS)
