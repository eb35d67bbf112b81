"""The latent pool: multi-head latent attention keeps one row a token, and its values are the row's first columns.

Source of the method: DeepSeek-V2 (2024), in its absorbed form, where all query heads read the same latent row.
"""

from __future__ import annotations

import torch

from attnlab.checks import require
from attnlab.memory.buffers import Memory, latent_buffers
from attnlab.memory.plain import PlainPool
from attnlab.memory.pool import KVView
from attnlab.spec import ModelSpec


class MLAPool(PlainPool):
    """Latent rows `[slots, 1, qk_dim]` of every layer; V is the view of their first `v_dim` columns.

    One `scale` serves both, since there is one stored row.

    >>> from attnlab.spec import ModelSpec
    >>> pool = MLAPool(ModelSpec.load("DeepSeek-V3").only((0,)), num_slots=64, device="cpu")
    >>> view = pool.view(0)
    >>> view.v.shape[-1], view.v.data_ptr() == view.k.data_ptr()
    (512, True)
    """

    def __init__(self, model: ModelSpec, *, num_slots: int, device: torch.device | str, scale: float = 1.0) -> None:
        require(model.mla, f"model {model.name!r} keeps keys and values apart; build an MHAPool")
        super().__init__(model, num_slots=num_slots, device=device)
        memory: Memory = {"num_slots": num_slots, "dtype": model.kv_dtype, "device": self.device}
        pairs = [latent_buffers(layer.attention, **memory) for layer in model.layers]
        self.views = [KVView(k=k, v=v, k_scale=scale, v_scale=scale, v_in_k=True) for k, v in pairs]
