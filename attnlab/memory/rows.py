"""How rows of keys and values get into a layer's storage, and from place to place in it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnlab.checks import require, tensor
from attnlab.grad import without_gradients
from attnlab.memory.pool import KVView

FP8_MAX = 448.0
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@without_gradients
def store_rows(view: KVView, slots: Int[Tensor, " tokens"], k: Tensor, v: Tensor | None) -> None:
    """Store K `[tokens, kv_heads, qk_dim]` and V `[tokens, kv_heads, v_dim]`; both are checked before either.

    Where the values lie in K, V is None or that view of K.
    """
    check_rows("k", k, slots, view.k)
    if view.v_in_k:
        require(
            v is None or (isinstance(v, Tensor) and v.data_ptr() == k.data_ptr()),
            "v: under MLA the values are the first columns of k; pass None, or that view of k",
        )
        scatter(view.k, slots, quantize(k, view.k_scale, view.k))
        return
    if v is None:
        raise TypeError("v: expected values beside the keys, got None; only MLA keeps its values inside K")
    check_rows("v", v, slots, view.v)
    k_rows, v_rows = quantize(k, view.k_scale, view.k), quantize(v, view.v_scale, view.v)
    scatter(view.k, slots, k_rows)
    scatter(view.v, slots, v_rows)


@without_gradients
def copy_rows(view: KVView, source: Int[Tensor, " tokens"], target: Int[Tensor, " tokens"]) -> None:
    """Copy stored rows, all of which are read before one is written."""
    heads = torch.arange(view.kv_heads, device=view.k.device)
    for x in (view.k,) if view.v_in_k else (view.k, view.v):
        scatter(x, target, view.rows(x, source[:, None], heads))


def read_back(view: KVView, slots: Int[Tensor, " tokens"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the true K `[tokens, kv_heads, qk_dim]` and V at these slots, scales applied, in that dtype."""
    heads = torch.arange(view.kv_heads, device=view.k.device)
    k = (view.rows(view.k, slots[:, None], heads).float() * view.k_scale).to(dtype)
    if view.v_in_k:
        return k, k[..., : view.v.shape[-1]]
    return k, (view.rows(view.v, slots[:, None], heads).float() * view.v_scale).to(dtype)


def check_rows(name: str, x: Tensor | None, slots: Tensor, storage: Tensor) -> None:
    """Raise unless `x` is one floating-point row per slot, of the storage's heads and dim."""
    tensor(
        name,
        x,
        shape=(slots.shape[0], *storage.shape[-2:]),
        dtype=ROW_DTYPES,
        device=storage.device,
        hint="one row per slot, as the layer's attention has it",
    )


def check_slots(name: str, slots: Tensor, num_slots: int, device: torch.device | None) -> None:
    """Raise ValueError unless all slots lie in the pool. Slot 0, the sink, may be written. Reads the slots."""
    tensor(name, slots, shape=["tokens"], dtype=(torch.int32, torch.int64), device=device)
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        require(
            low >= 0 and high < num_slots,
            f"{name}: expected 0 to {num_slots - 1}, got {low if low < 0 else high}; the pool has {num_slots} slots",
        )


def quantize(x: Tensor, scale: float, storage: Tensor) -> Tensor:
    """Return `x / scale` as the storage holds it, saturated at its dtype's largest number, in memory of its own.

    Not every version of torch saturates: some give NaN or infinity, which one outlier would spread over a whole
    request.
    """
    if scale != 1.0:
        x = x.float() / scale
    if x.dtype != storage.dtype and storage.dtype in (torch.float8_e4m3fn, torch.float16):
        limit = torch.finfo(storage.dtype).max
        x = x.float().clamp(-limit, limit)
    rows = x.to(storage.dtype)
    shared = rows.numel() > 0 and rows.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    return rows.clone() if shared else rows


def scatter(storage: Tensor, slots: Int[Tensor, " tokens"], rows: Float[Tensor, "tokens kv_heads dim"]) -> None:
    """Write rows (already in the storage dtype) at their slots, by slot or page-major."""
    if storage.dtype == torch.float8_e4m3fn:
        storage, rows = storage.view(torch.uint8), rows.view(torch.uint8)
    if storage.dim() == 3:
        storage[slots] = rows
    else:
        storage[slots // storage.shape[1], slots % storage.shape[1]] = rows
