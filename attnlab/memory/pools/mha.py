"""The plain pool: keys and values of multi-head and grouped-query attention, two buffers a layer."""

from __future__ import annotations

from typing import Literal

import torch

from attnlab.checks import one_of, require
from attnlab.memory.buffers import Memory, paged_buffers, slot_buffers
from attnlab.memory.plain import PlainPool
from attnlab.memory.pool import KVView
from attnlab.spec import ModelSpec


class MHAPool(PlainPool):
    """Keys and values of every layer with attention.

    `layout="slots"`: each layer has `k [slots, kv_heads, qk_dim]` and `v [slots, kv_heads, v_dim]` of its own.
    `layout="pages"`: one buffer whose pages hold that page of all layers, so that a page moves as one piece; a layer's
    view is `[pages, page_size, kv_heads, dim]`. Rows are stored divided by their scale, in the model's `kv_dtype`
    (fp32, fp16, bf16 or fp8-e4m3).

    >>> from attnlab.spec import ModelSpec
    >>> pool = MHAPool(ModelSpec.load("SmolLM2-135M"), num_slots=64, device="cpu")
    >>> list(pool.view(0).k.shape)
    [64, 3, 64]
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        num_slots: int,
        device: torch.device | str,
        layout: Literal["slots", "pages"] = "slots",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        one_of("layout", layout, ("slots", "pages"))
        require(not model.mla, f"model {model.name!r} keeps latent rows; build an MLAPool")
        super().__init__(model, num_slots=num_slots, device=device)
        specs = [layer.attention for layer in model.layers]
        memory: Memory = {"num_slots": num_slots, "dtype": model.kv_dtype, "device": self.device}
        if layout == "slots":
            pairs = [slot_buffers(spec, **memory) for spec in specs]
        else:
            _, pairs = paged_buffers(specs, page_size=model.page_size, **memory)
        self.views = [KVView(k=k, v=v, k_scale=k_scale, v_scale=v_scale) for k, v in pairs]
