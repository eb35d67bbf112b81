"""What all pools do alike: rows are checked, translated and stored through each layer's view."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from attnlab.checks import placed, require
from attnlab.memory.pool import KVView, Translation, check_storage
from attnlab.memory.rows import check_slots, copy_rows, store_rows
from attnlab.memory.slots import SlotAllocator
from attnlab.spec import ModelSpec

T = TypeVar("T")


class BasePool:
    """A KVPool but for `slide_out`; subclasses bring that, and one of `views` and `translations` a layer."""

    views: list[KVView]
    translations: list[Translation]

    def __init__(self, model: ModelSpec, *, allocator: SlotAllocator, device: torch.device | str) -> None:
        check_storage("kv_dtype", model.kv_dtype)
        self.allocator = allocator
        self.num_slots, self.page_size = allocator.num_slots, allocator.page_size
        self.device = placed(device)

    @property
    def epoch(self) -> int:
        """Rises when slots are freed or moved."""
        return self.allocator.epoch

    @property
    def table_space(self) -> str:
        """Name of the id space of the request table."""
        return self.allocator.space

    def view(self, pool_layer: int) -> KVView:
        """Return the keys and values, as they are stored, of the layer that has this place in the pool."""
        return of_layer(self.views, pool_layer)

    def translation(self, pool_layer: int) -> Translation:
        """Return the way from ids of the table to those of the layer's storage."""
        return of_layer(self.translations, pool_layer)

    def write(self, pool_layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Check the table's ids (this reads them), translate and store; what has no page goes to the sink."""
        check_slots("slots", slots, self.num_slots, self.device)
        self.store(pool_layer, self.translation(pool_layer).apply(slots), k, v)

    def store(self, pool_layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store rows at ids of the layer's storage that a plan proved to lie in it; nothing is read back."""
        store_rows(self.view(pool_layer), slots, k, v)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows of all layers from the table's ids `source` to `target`, `[tokens]` each.

        All are read before one is written. The ids are checked where they are: on the CPU nothing waits for the
        device. A layer that has no page for one of the two leaves that row as it is.
        """
        for name, ids in (("source", source), ("target", target)):
            check_slots(name, ids, self.num_slots, None)
        require(
            source.shape == target.shape,
            f"target: expected as many ids as source, {source.shape[0]}, got {target.shape[0]}",
        )
        source, target = (ids.to(self.device, non_blocking=True) for ids in (source, target))
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        for view, translation in zip(self.views, self.translations, strict=True):
            if translation.target not in rows:
                a, b = translation.apply(source), translation.apply(target)
                both = (a != 0) & (b != 0)
                rows[translation.target] = torch.where(both, a, 0), torch.where(both, b, 0)
            copy_rows(view, *rows[translation.target])  # the sink to itself where one has no page: no wait to drop it

    def lets_go(self, pool_layer: int) -> bool:
        """Return False: what is stored stays until its owner leaves."""
        self.view(pool_layer)
        return False

    def kept_from(self, pool_layer: int, owner: Hashable, *, holding: int = 0) -> int:
        """Return the first position of this owner that the layer's storage still holds; 0 for unknown owners."""
        self.view(pool_layer)
        return 0

    def keeps(
        self, pool_layer: int, owners: Sequence[Hashable], *, first: Sequence[int], holding: Sequence[int]
    ) -> bool:
        """Return True: what is stored stays."""
        return not self.lets_go(pool_layer)

    def check_integrity(self) -> None:
        """Raise RuntimeError where a page is lost, shared or the sink's."""
        self.allocator.check_integrity()


def of_layer(items: Sequence[T], pool_layer: int) -> T:
    """Return what a pool has for a layer, or raise ValueError with the places that exist."""
    if 0 <= pool_layer < len(items):  # every step asks, for every request: words only where they are needed
        return items[pool_layer]
    raise ValueError(
        f"pool_layer: the pool has layers 0 to {len(items) - 1}, got {pool_layer}; a model's layer has its number "
        "there in LayerSpec.pool_layer"
    )
