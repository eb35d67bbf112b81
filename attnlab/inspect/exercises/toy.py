"""The toy batch of the lessons, and their model of two kinds of layers."""

from __future__ import annotations

import torch

from attnlab.inspect.exercises.registry import TOY_LENS
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, Workbench, workbench
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec


def toy(policy: str = "seed") -> Workbench:
    """Return the toy batch on a workbench: 4 requests, 8 query heads, 2 KV heads, 64 dimensions, pages of 4."""
    model = ModelSpec.uniform(_attention(), layers=1, context_len=2048, page_size=4, kv_dtype=torch.float32)
    return workbench(model, lens=TOY_LENS, policy=policy, engine="eager", multiprocessors=H200_MULTIPROCESSORS)


def two_kinds(*, window: int, page_size: int = 4) -> ModelSpec:
    """Return a model whose layer 0 sees all keys, and layer 1 those of a window. Its shape is the toy's.

    >>> [str(layer.attention.sight) for layer in two_kinds(window=16).layers]
    ['all keys', 'window 16']
    """
    kinds = (_attention(), _attention(window))
    return ModelSpec(
        name="two kinds",
        layers=tuple(LayerSpec(index=i, attention=kind, pool_layer=i) for i, kind in enumerate(kinds)),
        context_len=2048,
        page_size=page_size,
        kv_dtype=torch.float32,
        mla=False,
    )


def _attention(window: int | None = None) -> AttentionSpec:
    return AttentionSpec(heads=8, kv_heads=2, qk_dim=64, v_dim=64, scale=0.125, window=window)
