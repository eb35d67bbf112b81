"""What a pool of keys and values offers, and what an engine gets to see of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.arguments import Arguments, Names
from attnlab.checks import last_axis_contiguous, number, positive, require, tensor
from attnlab.memory.slots import SlotAllocator
from attnlab.spec import AttentionSpec

FP8 = torch.float8_e4m3fn
VIEW = Names(
    pointers=("k_ptr", "v_ptr"),
    numbers=(
        "k_stride_page",
        "k_stride_slot",
        "k_stride_head",
        "v_stride_page",
        "v_stride_slot",
        "v_stride_head",
        "v_scale",
    ),
)
STORAGE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)


@dataclass(frozen=True, kw_only=True, eq=False)
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

    @cached_property
    def page_size(self) -> int:
        """Slots per page of a page-major view; 1 for a view by slot."""
        return self.k.shape[1] if self.k.dim() == 4 else 1

    @cached_property
    def dims(self) -> tuple[int, int, int]:
        """KV heads per slot, elements of a key, elements of a value."""
        return self.kv_heads, self.k.shape[-1], self.v.shape[-1]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements between two pages, slots and heads of `k`, then of `v`; where a page is a slot both are the same."""
        return self._strides(self.k, self.v)

    def _strides(self, *tensors: Tensor) -> tuple[int, ...]:
        slot = 0 if self.page_size == 1 else 1
        return tuple(x.stride(axis) for x in tensors for axis in (0, slot, -2))

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of where it lies."""
        return Arguments(VIEW, (self.k, self.v), (*self.strides, self.v_scale))

    @cached_property
    def paired(self) -> bool:
        """Whether it can be read as pairs of columns, two 8-bit numbers in one of 16 (kernels/pairs.py)."""
        if self.k.dtype != FP8:
            return False
        steps = [step for x in (self.k, self.v) for step in (x.shape[-1], int(x.storage_offset()), *x.stride()[:-1])]
        return all(step % 2 == 0 for step in steps)

    @cached_property
    def pair_arguments(self) -> Arguments:
        """What kernels that read pairs are told of where it lies, as int16 numbers; only where it is `paired`."""
        k, v = self.k.view(torch.int16), self.v.view(torch.int16)
        return Arguments(VIEW, (k, v), (*self._strides(k, v), self.v_scale))

    @cached_property
    def memory(self) -> tuple[int, int]:
        """Where the memory of `k` begins, and that of `v`."""
        return self.k.untyped_storage().data_ptr(), self.v.untyped_storage().data_ptr()

    @cached_property
    def elements(self) -> int:
        """Elements from the first to the last of `k`, or of `v` where that is more."""
        return max(span(self.k), span(self.v))

    @cached_property
    def traits(self) -> tuple[Hashable, ...]:
        """All that kernels could be compiled for, but for where it lies and how large it is."""
        return (
            self.k.dtype,
            self.page_size,
            *self.dims,
            *self.strides,
            self.k_scale,
            self.v_scale,
            self.v_in_k,
            self.paired,
        )

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
        if self.dims != wanted:
            raise ValueError(f"pool: expected (kv_heads, qk_dim, v_dim) {wanted} as the layer has, got {self.dims}")


def span(x: Tensor) -> int:
    """Return the elements from the first to the last of a tensor, those between its rows included."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Translation:
    """From ids of the request table to those of a layer's storage: `pages[id // page_size] * stride + id % page_size`.

    `source` and `target` name the two id spaces. `pages`, int64 `[table pages]` on the pool's device, holds the storage
    page of every table page, -1 where there is none; None: the ids are the same. It is the pool's own tensor, so a
    translation is always that of now. `stride`: storage ids from one page to the next; more than `page_size` where
    several layers share a page.

    >>> pages = torch.tensor([0, 3, -1, 1])
    >>> Translation(source="full", target="sliding", pages=pages, page_size=4, stride=4).apply(torch.tensor([5, 8, 15]))
    tensor([13,  0,  7])
    """

    source: str
    target: str
    pages: Int[Tensor, " pages"] | None
    page_size: int
    stride: int

    def __post_init__(self) -> None:
        positive("page_size", self.page_size)
        fits = self.stride == self.page_size if self.pages is None else self.stride % self.page_size == 0
        wanted = f"page_size {self.page_size}" if self.pages is None else f"a multiple of page_size {self.page_size}"
        require(fits and self.stride > 0, f"stride: expected {wanted}, got {self.stride}")
        require(
            (self.pages is None) == (self.source == self.target),
            f"target: ids of {self.source!r} are the same without `pages`, and others with them, got {self.target!r}",
        )
        if self.pages is not None:
            tensor("pages", self.pages, shape=["table pages"], dtype=torch.int64)

    @classmethod
    def same(cls, space: str, *, page_size: int) -> Translation:
        """Return the translation of a storage that is addressed by the ids of the table."""
        return cls(source=space, target=space, pages=None, page_size=page_size, stride=page_size)

    def apply(self, ids: Tensor) -> Tensor:
        """Return the storage ids, int64, of table ids of any shape; 0, the sink, where a page has no storage page.

        An id that is none of the table's becomes 0 too: nothing outside `pages` is read.
        """
        ids = ids.long()
        if self.pages is None:
            return ids
        page = ids.div(self.page_size, rounding_mode="floor")
        inside = page.clamp(0, self.pages.shape[0] - 1)
        stored = self.pages[inside]
        is_there = (page == inside) & (stored >= 0)
        return torch.where(is_there, stored * self.stride + ids % self.page_size, 0)


def compute_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """Return what tiles are cast to before a dot: q's dtype, or the pool's where wider; fp8 is always lifted."""
    return q_dtype if kv_dtype == FP8 else torch.promote_types(q_dtype, kv_dtype)


@runtime_checkable
class KVPool(Protocol):
    """Stores keys and values of every layer that has them.

    `pool_layer` is a layer's place in the pool, from 0 on, and not its number in the model. `LayerSpec.pool_layer` is
    the place of a model's layer: `pool.view(model.layer(18).pool_layer)`.

    Two kinds of ids: those of the request table, which the allocator hands out and `num_slots` counts, and those that
    a layer's storage is addressed by. `translation` leads from the first to the second.
    """

    num_slots: int
    page_size: int
    device: torch.device

    @property
    def allocator(self) -> SlotAllocator:
        """Who owns which slot of the table's space."""

    @property
    def epoch(self) -> int:
        """Rises when slots are freed or moved: a plan of an older epoch may point at another request's tokens."""

    @property
    def table_space(self) -> str:
        """Name of the id space of the request table."""

    def view(self, pool_layer: int) -> KVView:
        """Return the keys and values, as they are stored, of the layer that has this place in the pool."""

    def translation(self, pool_layer: int) -> Translation:
        """Return the way from ids of the table to those of the layer's storage."""

    def write(self, pool_layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Check ids of the table (this reads them, so on a GPU it waits for the device), translate them, store."""

    def store(self, pool_layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store rows at ids of the layer's storage that a plan proved to lie in it; nothing is read back."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows of all layers from ids of the table to others. A layer without a page for one skips it."""

    def slide_out(self, owner: Hashable, *, query: int) -> None:
        """Free what no query of this owner at position `query` or later sees. ValueError where nothing can slide."""

    def lets_go(self, pool_layer: int) -> bool:
        """Whether keys of this layer can slide out of its storage."""

    def kept_from(self, pool_layer: int, owner: Hashable, *, holding: int = 0) -> int:
        """Return the first position of this owner that the layer's storage still holds; 0 for unknown owners."""

    def keeps(
        self, pool_layer: int, owners: Sequence[Hashable], *, first: Sequence[int], holding: Sequence[int]
    ) -> bool:
        """Whether the layer's storage has all keys of these known owners from `first` on. What `kept_from` says, fast.

        False also where an owner has fewer slots than it is `holding`, or none at `first`: then ask for each of them.
        """

    def check_integrity(self) -> None:
        """Raise RuntimeError where the bookkeeping is broken."""


def check_storage(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless a pool can store this dtype."""
    known = ", ".join(str(d).removeprefix("torch.") for d in STORAGE_DTYPES)
    require(dtype in STORAGE_DTYPES, f"{name}: expected one of {known}, got {dtype!r}", TypeError)
