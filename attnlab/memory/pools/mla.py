"""The latent pool: multi-head latent attention keeps one row a token, and its values are the row's first columns.

Source of the method: DeepSeek-V2 (2024), in its absorbed form, where all query heads read the same latent row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.checks import placed, require
from attnlab.memory.pool import KVView, check_slots, check_storage, quantize, scatter
from attnlab.memory.pools.mha import check_rows
from attnlab.memory.slots import SlotAllocator
from attnlab.spec import ModelSpec


class MLAPool:
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
        check_storage("kv_dtype", model.kv_dtype)
        self.allocator = SlotAllocator(num_slots=num_slots, page_size=model.page_size)
        self.num_slots, self.page_size = num_slots, model.page_size
        self.device = placed(device)
        self._views = []
        for layer in model.layers:
            spec = layer.attention
            rows = torch.zeros(num_slots, spec.kv_heads, spec.qk_dim, dtype=model.kv_dtype, device=self.device)
            self._views.append(KVView(k=rows, v=rows[..., : spec.v_dim], k_scale=scale, v_scale=scale, v_in_k=True))

    @property
    def epoch(self) -> int:
        """Rises when slots are freed."""
        return self.allocator.epoch

    def view(self, layer: int) -> KVView:
        """Return the layer's latent rows, once as keys and once, cut, as values."""
        require(
            0 <= layer < len(self._views),
            f"layer: the pool has layers 0 to {len(self._views) - 1}, got {layer}",
        )
        return self._views[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Check slots and latent rows `[tokens, 1, qk_dim]`, then store them. V lies in K: pass None, or that view."""
        check_slots(slots, self.num_slots, self.device)
        self.store(layer, slots, k, v)

    @torch.no_grad()
    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store rows at slots that a plan proved to lie in the pool."""
        view = self.view(layer)
        check_rows("k", k, slots, view.kv_heads, view.k.shape[-1], self.device)
        require(
            v is None or (isinstance(v, Tensor) and v.data_ptr() == k.data_ptr()),
            "v: under MLA the values are the first columns of k; pass None, or that view of k",
        )
        scatter(view.k, slots, quantize(k, view.k_scale, view.k))

    def space(self, layer: int) -> str:
        """Return the one id space of a plain pool."""
        return "pool"

    def slots_for(self, layer: int, slots: Tensor) -> Tensor:
        """Return the slots unchanged: there is one id space."""
        return slots

    def check_integrity(self) -> None:
        """Raise RuntimeError where a page is lost, shared or the sink's."""
        self.allocator.check_integrity()
