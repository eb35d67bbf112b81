"""The plain pool: keys and values of multi-head and grouped-query attention, two buffers a layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from attnlab.checks import one_of, require
from attnlab.memory.plain import PlainPool, check_rows
from attnlab.memory.pool import KVView, quantize, scatter
from attnlab.spec import AttentionSpec, ModelSpec


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
        self._specs = [layer.attention for layer in model.layers]
        build = _slot_buffers if layout == "slots" else _page_buffers
        buffers = build(self._specs, num_slots, model.page_size, model.kv_dtype, self.device)
        self.views = [KVView(k=k, v=v, k_scale=k_scale, v_scale=v_scale) for k, v in buffers]

    @torch.no_grad()
    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store K `[tokens, kv_heads, qk_dim]` and V `[tokens, kv_heads, v_dim]`; both are checked before either."""
        view, spec = self.view(layer), self._specs[layer]
        check_rows("k", k, slots, spec.kv_heads, spec.qk_dim, self.device)
        if v is None:
            raise TypeError("v: expected values beside the keys, got None; only MLA keeps its values inside K")
        check_rows("v", v, slots, spec.kv_heads, spec.v_dim, self.device)
        k_rows, v_rows = quantize(k, view.k_scale, view.k), quantize(v, view.v_scale, view.v)
        scatter(view.k, slots, k_rows)
        scatter(view.v, slots, v_rows)


def _slot_buffers(
    specs: list[AttentionSpec],
    num_slots: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    def zeros(heads: int, dim: int) -> Tensor:
        return torch.zeros(num_slots, heads, dim, dtype=dtype, device=device)

    return [(zeros(s.kv_heads, s.qk_dim), zeros(s.kv_heads, s.v_dim)) for s in specs]


def _page_buffers(
    specs: list[AttentionSpec],
    num_slots: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    widths = [s.kv_heads * dim for s in specs for dim in (s.qk_dim, s.v_dim)]
    pages, page_width = num_slots // page_size, page_size * sum(widths)
    envelope = torch.zeros(pages, page_width, dtype=dtype, device=device)
    views, offset = [], 0
    for spec in specs:
        pair = []
        for dim in (spec.qk_dim, spec.v_dim):
            size = (pages, page_size, spec.kv_heads, dim)
            stride = (page_width, spec.kv_heads * dim, dim, 1)
            pair.append(envelope.as_strided(size, stride, offset))
            offset += page_size * spec.kv_heads * dim
        views.append((pair[0], pair[1]))
    return views
