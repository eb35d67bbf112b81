"""What a pool of keys and values offers, and what an engine gets to see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnlab.checks import last_axis_contiguous, number, require, tensor
from attnlab.memory.slots import SlotAllocator
from attnlab.spec import AttentionSpec

STORAGE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVView:
    """One layer's keys and values as they are stored.

    `k` is `[slots, kv_heads, qk_dim]`, `v` is `[slots, kv_heads, v_dim]`; or both are page-major,
    `[pages, page_size, kv_heads, dim]`, with any stride between pages. The last axis is contiguous. The true key is
    `k * k_scale`, the true value `v * v_scale`. `v_in_k`: the values are the first columns of the keys (MLA).
    """

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    v_in_k: bool = False

    def __post_init__(self) -> None:
        for name, x in (("k", self.k), ("v", self.v)):
            require(
                x.dim() in (3, 4),
                f"{name}: expected [slots, kv_heads, dim] or [pages, page_size, kv_heads, dim], got {list(x.shape)}",
            )
            check_storage(name, x.dtype)
            last_axis_contiguous(name, x)
        require(
            self.k.shape[:-1] == self.v.shape[:-1] and self.k.dtype == self.v.dtype and self.k.device == self.v.device,
            f"v: expected slots, heads, dtype and device of k {list(self.k.shape)} {self.k.dtype} {self.k.device}, "
            f"got {list(self.v.shape)} {self.v.dtype} {self.v.device}",
        )
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            number(name, scale, positive=True)
        is_view = self.v.data_ptr() == self.k.data_ptr() and self.v.stride() == self.k.stride()
        require(
            not self.v_in_k or (is_view and self.v.shape[-1] <= self.k.shape[-1]),
            "v_in_k: expected v to be a view of the first columns of k",
        )

    @property
    def page_size(self) -> int:
        """Slots per page of a page-major view; 1 for a view by slot."""
        return self.k.shape[1] if self.k.dim() == 4 else 1

    @property
    def num_slots(self) -> int:
        """Slots that can be addressed."""
        return self.k.shape[0] * self.page_size

    @property
    def kv_heads(self) -> int:
        """KV heads per slot."""
        return self.k.shape[-2]

    def rows(self, x: Tensor, slots: Tensor, heads: Tensor) -> Tensor:
        """Return the rows of `x` (this view's `k` or `v`) at `slots` and KV `heads`, `[*slots, dim]`, as stored."""
        bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x  # torch indexes no fp8
        if x.dim() == 3:
            return bits[slots, heads].view(x.dtype)
        return bits[slots // self.page_size, slots % self.page_size, heads].view(x.dtype)

    def check_fits(self, spec: AttentionSpec) -> None:
        """Raise ValueError unless the view has the heads and dims of this attention."""
        wanted = (spec.kv_heads, spec.qk_dim, spec.v_dim)
        got = (self.kv_heads, self.k.shape[-1], self.v.shape[-1])
        require(
            got == wanted,
            f"pool: expected (kv_heads, qk_dim, v_dim) {wanted} as the layer has, got {got}",
        )


@runtime_checkable
class KVPool(Protocol):
    """Stores keys and values of every layer that has them. Layers are counted by their place in the pool."""

    allocator: SlotAllocator
    num_slots: int
    page_size: int
    device: torch.device

    @property
    def epoch(self) -> int:
        """Rises when slots are freed or moved: a plan of an older epoch may point at another request's tokens."""

    def view(self, layer: int) -> KVView:
        """Return the layer's keys and values as they are stored."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Check the slots (this reads them, so on a GPU it waits for the device), then store."""

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store rows at slots that a plan proved to lie in the pool; nothing is read back."""

    def space(self, layer: int) -> str:
        """Return the name of the id space that the layer's storage is addressed in."""

    def slots_for(self, layer: int, slots: Tensor) -> Tensor:
        """Translate slots of the request table into those of the layer's storage; the identity in a plain pool."""

    def check_integrity(self) -> None:
        """Raise RuntimeError where the bookkeeping is broken."""


def check_storage(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless a pool can store this dtype."""
    known = ", ".join(str(d).removeprefix("torch.") for d in STORAGE_DTYPES)
    require(dtype in STORAGE_DTYPES, f"{name}: expected one of {known}, got {dtype!r}", TypeError)


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


def check_slots(slots: Tensor, num_slots: int, device: torch.device) -> None:
    """Raise ValueError unless all slots lie in the pool. Slot 0, the sink, may be written. Reads the slots."""
    tensor("slots", slots, shape=["tokens"], dtype=(torch.int32, torch.int64), device=device)
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        require(
            low >= 0 and high < num_slots,
            f"slots: expected 0 to {num_slots - 1}, got {low if low < 0 else high}; the pool has {num_slots} slots",
        )
