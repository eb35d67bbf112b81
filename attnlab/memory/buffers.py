"""The memory behind the views: a buffer a layer, or pages that hold all layers' rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from jaxtyping import Shaped
from torch import Tensor

from attnlab.checks import require
from attnlab.spec import AttentionSpec

Envelope = Shaped[Tensor, "pages page_width"]
"""One row a page, which holds that page of every layer, so that a page moves as one piece."""


class Memory(TypedDict):
    """What all of these are asked for."""

    num_slots: int
    dtype: torch.dtype
    device: torch.device


Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


def slot_buffers(spec: AttentionSpec, *, num_slots: int, dtype: torch.dtype, device: torch.device) -> Pair:
    """Return `[num_slots, kv_heads, qk_dim]` and `[num_slots, kv_heads, v_dim]`, memory of one layer's own."""
    shapes = [(num_slots, spec.kv_heads, dim) for dim in (spec.qk_dim, spec.v_dim)]
    k, v = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
    return k, v


def latent_buffers(spec: AttentionSpec, *, num_slots: int, dtype: torch.dtype, device: torch.device) -> Pair:
    """Return one layer's latent rows `[num_slots, kv_heads, qk_dim]`, and their first columns as values."""
    k = torch.zeros(num_slots, spec.kv_heads, spec.qk_dim, dtype=dtype, device=device)
    return k, k[..., : spec.v_dim]


def paged_buffers(
    specs: Sequence[AttentionSpec], *, num_slots: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Envelope, list[Pair]]:
    """Return one envelope for all layers, and each one's `[pages, page_size, kv_heads, dim]` keys and values in it."""
    widths = [s.kv_heads * dim for s in specs for dim in (s.qk_dim, s.v_dim)]
    pages, page_width = num_slots // page_size, page_size * sum(widths)
    envelope = torch.zeros(pages, page_width, dtype=dtype, device=device)
    pairs, offset = [], 0
    for spec in specs:
        pair = []
        for dim in (spec.qk_dim, spec.v_dim):
            size = (pages, page_size, spec.kv_heads, dim)
            stride = (page_width, spec.kv_heads * dim, dim, 1)
            pair.append(envelope.as_strided(size, stride, offset))
            offset += page_size * spec.kv_heads * dim
        pairs.append((pair[0], pair[1]))
    return envelope, pairs


def dense_buffers(
    specs: Sequence[AttentionSpec], *, num_slots: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Envelope, list[Pair]]:
    """Return one envelope of latent rows for all layers, and each layer's rows in it, by dense id.

    Layer l's rows begin `l * page_size` rows into the envelope, and one page lies `layers * page_size` rows behind the
    other: the row of slot s of page p is `p * layers * page_size + s` in the view of every layer.
    """
    shapes = {(s.kv_heads, s.qk_dim) for s in specs}
    require(
        len(shapes) == 1,
        f"model: layers that share a page need rows of one shape, got (kv_heads, qk_dim) {sorted(shapes)}; build an "
        "MLAPool",
    )
    heads, qk_dim = shapes.pop()
    pages, layers = num_slots // page_size, len(specs)
    envelope = torch.zeros(pages, layers * page_size * heads * qk_dim, dtype=dtype, device=device)
    rows, reach = envelope.view(-1, heads, qk_dim), ((pages - 1) * layers + 1) * page_size
    starts = range(0, layers * page_size, page_size)
    keys = [rows[start : start + reach] for start in starts]
    return envelope, [(k, k[..., : spec.v_dim]) for k, spec in zip(keys, specs, strict=True)]
