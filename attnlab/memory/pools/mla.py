"""The latent pool: multi-head latent attention keeps one row a token, and its values are the row's first columns.

Source of the method: DeepSeek-V2 (2024), in its absorbed form, where all query heads read the same latent row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.checks import require
from attnlab.memory.plain import PlainPool, check_rows
from attnlab.memory.pool import KVView, quantize, scatter
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
        self.views = []
        for layer in model.layers:
            spec = layer.attention
            rows = torch.zeros(num_slots, spec.kv_heads, spec.qk_dim, dtype=model.kv_dtype, device=self.device)
            self.views.append(KVView(k=rows, v=rows[..., : spec.v_dim], k_scale=scale, v_scale=scale, v_in_k=True))

    @torch.no_grad()
    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store latent rows `[tokens, 1, qk_dim]`. V lies in K: pass None, or that view of K."""
        view = self.view(layer)
        check_rows("k", k, slots, view.kv_heads, view.k.shape[-1], self.device)
        require(
            v is None or (isinstance(v, Tensor) and v.data_ptr() == k.data_ptr()),
            "v: under MLA the values are the first columns of k; pass None, or that view of k",
        )
        scatter(view.k, slots, quantize(k, view.k_scale, view.k))
