"""What pools with storages have in common: layers live in one of them, and what no query sees any more slides out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from attnlab.checks import require
from attnlab.memory.base import BasePool, of_layer
from attnlab.memory.mapped import MappedAllocator
from attnlab.memory.pages import check_count
from attnlab.memory.pool import Translation
from attnlab.spec import ModelSpec


class MappedPool(BasePool):
    """A pool whose layers have their home in a storage of the allocator, or, without one, at the table's own slots."""

    allocator: MappedAllocator

    def __init__(
        self, model: ModelSpec, *, allocator: MappedAllocator, homes: Sequence[str], device: torch.device | str
    ) -> None:
        super().__init__(model, allocator=allocator, device=device)
        self.homes = tuple(homes)
        self._sights = {
            name: [layer.attention.sight for layer, home in zip(model.layers, homes, strict=True) if home == name]
            for name in allocator.storages
        }

    def slide_out(self, owner: Hashable, *, query: int) -> None:
        """Free the whole pages that no query of this owner at position `query` or later sees.

        In storages whose layers all see only part of the keys; others keep every key. The table keeps its slots.
        """
        check_count("query", query)
        sliding = {name: sights for name, sights in self._sights.items() if all(sight.partial for sight in sights)}
        require(
            len(sliding) > 0,
            f"{type(self).__name__}: every storage has a layer that sees all keys, so nothing slides out; give layers "
            "with a window or chunk a storage of their own (sliding_slots)",
        )
        first = {name: min(sight.first(query) for sight in sights) for name, sights in sliding.items()}
        self.allocator.slide_out(owner, first=first)

    def lets_go(self, pool_layer: int) -> bool:
        """Return whether pages of the layer's storage are backed one by one, so that they can be freed early."""
        return of_layer(self.homes, pool_layer) in self.allocator.storages

    def kept_from(self, pool_layer: int, owner: Hashable, *, holding: int = 0) -> int:
        """Return the first position of this owner that the layer's storage still holds.

        Raises ValueError where nobody of that name holds so many slots: plans ask by row of the request table, and a
        page of the storage belongs to one owner, so that requests cannot share a prefix here.
        """
        home = of_layer(self.homes, pool_layer)
        if home not in self.allocator.storages:
            return 0
        held = self.allocator.tokens_of(owner)
        if self.allocator.holds(owner) and held >= holding:
            return self.allocator.kept_from(owner, home)
        raise ValueError(
            f"owner: {holding} slots are asked for under {owner!r}, who owns {held}; in a {type(self).__name__} the "
            "owner of slots is the request's row in the table, and prefixes are not shared (PagedCache sees to both)"
        )

    def keeps(
        self, pool_layer: int, owners: Sequence[Hashable], *, first: Sequence[int], holding: Sequence[int]
    ) -> bool:
        """Whether the layer's storage has all keys of these known owners from `first` on: a look at one page each."""
        home = of_layer(self.homes, pool_layer)
        return home not in self.allocator.storages or self.allocator.keeps(home, owners, first=first, holding=holding)

    def used_pages(self, storage: str) -> list[int]:
        """Return the pages of a storage that are in use, in ascending order."""
        return self.allocator.storage(storage).used

    def _translation(self, home: str, *, target: str, stride: int) -> Translation:
        pages = self.allocator.storage(home).pages
        return Translation(source=self.table_space, target=target, pages=pages, page_size=self.page_size, stride=stride)


def homes_of(model: ModelSpec, *, sliding: bool) -> list[str]:
    """Return the storage of each layer: "sliding" for those that see part of their keys, where there is one."""
    partial = [layer.attention.sight.partial for layer in model.layers]
    require(
        any(partial) or not sliding,
        f"sliding_slots: every layer of model {model.name!r} sees all keys, so that nothing slides out; leave it away "
        "(UnifiedPool), or build an MHAPool",
    )
    return ["sliding" if each and sliding else "full" for each in partial]
