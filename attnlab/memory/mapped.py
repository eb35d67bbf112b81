"""Slots whose pages are backed by storages: each kind of layer keeps a page of its own behind a page of the table.

The table's ids stay what they are while pages behind them are freed (a window has moved on) or moved (compaction).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import one_of, require
from attnlab.memory.pages import FreePages, check_count, count_pages
from attnlab.memory.slots import SlotAllocator


class Storage:
    """The pages of one kind of layer, and which of them is behind each page of the table.

    `pages`, int64 `[table pages]` on the device, is what a Translation reads: -1 where there is no page. The host
    keeps the same numbers, so that nothing here waits for the device. Page 0, the sink, is behind the table's own.

    >>> storage = Storage("sliding", num_slots=16, page_size=4, table_pages=6, device="cpu")
    >>> storage.map([2, 5, 1])
    >>> storage.unmap([2])
    1
    >>> storage.compact(), storage.pages.tolist(), storage.used
    ([(3, 1)], [0, 1, -1, -1, -1, 2], [1, 2])
    """

    def __init__(
        self, name: str, *, num_slots: int, page_size: int, table_pages: int, device: torch.device | str
    ) -> None:
        self.name = name
        self.num_slots = num_slots
        self.free = FreePages(name, total=count_pages(f"{name} slots", num_slots, page_size))
        self._page_of: dict[int, int] = {}
        self.pages: Int[Tensor, " table_pages"] = torch.full((table_pages,), -1, dtype=torch.int64, device=device)
        self.pages[0] = 0

    @property
    def used(self) -> list[int]:
        """Pages in use, in ascending order."""
        return sorted(self._page_of.values())

    @property
    def table_pages(self) -> Collection[int]:
        """Pages of the table behind which there is a page here."""
        return self._page_of.keys()

    def gone(self, table_pages: Sequence[int]) -> int:
        """Return how many of an owner's pages slid out: they do so from the front, so that the rest are all there."""
        return bisect_left(table_pages, True, key=self._page_of.__contains__)

    def map(self, table_pages: Sequence[int]) -> None:
        """Put the lowest free pages behind these, in their order."""
        self._page_of.update(zip(table_pages, self.free.take(len(table_pages)), strict=True))
        self._show(table_pages)

    def unmap(self, table_pages: Sequence[int]) -> int:
        """Free the pages behind these, where there are any; return how many."""
        mapped = [page for page in table_pages if page in self._page_of]
        self.free.give(self._page_of.pop(page) for page in mapped)
        self._show(mapped)
        return len(mapped)

    def compact(self) -> list[tuple[int, int]]:
        """Give the lowest pages to those who have the highest; return the moves (from, to) of what lies in them.

        The highest used page goes to the lowest free one while that is the lower. So no page is moved twice, and
        none is moved to where another comes from.
        """
        highest = sorted(((page, table_page) for table_page, page in self._page_of.items()), reverse=True)
        pairs = zip(highest, sorted(self.free), strict=False)
        moves = [(page, target, table_page) for (page, table_page), target in pairs if target < page]
        self._page_of.update((table_page, target) for _, target, table_page in moves)
        self.free.take(len(moves))
        self.free.give(page for page, _, _ in moves)
        self._show([table_page for _, _, table_page in moves])
        return [(page, target) for page, target, _ in moves]

    def check_integrity(self, owners: Mapping[Hashable, Sequence[int]]) -> None:
        """Raise RuntimeError unless every page is free or behind one owned page of the table, as the device has it."""
        self.free.check_integrity({f"table page {page}": [stored] for page, stored in self._page_of.items()})
        stray = self._page_of.keys() - {page for pages in owners.values() for page in pages}
        require(not stray, f"{self.name}: backs table pages {sorted(stray)[:8]}, which nobody owns", RuntimeError)
        for owner, pages in owners.items():
            there = [page in self._page_of for page in pages]
            require(there == sorted(there), f"{self.name}: {owner!r} lost a page behind its front", RuntimeError)
        expected = [0] + [self._page_of.get(page, -1) for page in range(1, self.pages.shape[0])]
        require(self.pages.tolist() == expected, f"{self.name}: the device has another page table", RuntimeError)

    def _show(self, table_pages: Sequence[int]) -> None:
        """Bring these entries of the device's page table up to date."""
        entries = [(page, self._page_of.get(page, -1)) for page in table_pages]
        if entries:
            where, stored = torch.tensor(entries).to(self.pages.device, non_blocking=True).unbind(1)
            self.pages[where] = stored


class MappedAllocator(SlotAllocator):
    """A SlotAllocator of the table's ids, whose pages are backed by a page in every storage.

    `storages` gives each storage's name and slots. Owners are rows of the request table.

    >>> slots = MappedAllocator(num_slots=32, page_size=4, space="full", storages={"sliding": 16}, device="cpu")
    >>> slots.allocate(0, 10).tolist()
    [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    >>> slots.slide_out(0, first={"sliding": 9})     # positions 0 to 7 fill two pages that no query sees any more
    >>> slots.storages["sliding"].pages[:4].tolist(), slots.kept_from(0, "sliding")
    ([0, -1, -1, 3], 8)
    """

    def __init__(
        self, *, num_slots: int, page_size: int, space: str, storages: Mapping[str, int], device: torch.device | str
    ) -> None:
        super().__init__(num_slots=num_slots, page_size=page_size, space=space)
        sizes = {"page_size": page_size, "table_pages": num_slots // page_size}
        self.storages = {
            name: Storage(name, num_slots=slots, device=device, **sizes) for name, slots in storages.items()
        }

    def storage(self, name: str) -> Storage:
        """Return the storage of that name; raise ValueError with the names that exist."""
        found = self.storages.get(name)
        return found or self.storages[one_of("storage", name, tuple(self.storages))]

    def slide_out(self, owner: Hashable, *, first: Mapping[str, int]) -> None:
        """Free the pages of this owner all of whose positions lie before `first`, given for each storage.

        The table's ids stay. The epoch changes where a page is freed. What slid out does not come back: `kept_from`
        says what is left.
        """
        pages = self._pages_of(owner)
        for name, position in first.items():
            self.storage(name)
            check_count(f"first[{name!r}]", position)
        freed = 0
        for name, position in first.items():
            storage = self.storages[name]
            freed += storage.unmap(pages[storage.gone(pages) : position // self.page_size])
        if freed:
            self._new_epoch()

    def kept_from(self, owner: Hashable, name: str) -> int:
        """Return the first position of this owner that a storage still has a page for; 0 for unknown owners."""
        return self.storage(name).gone(self._pages.get(owner, [])) * self.page_size

    def keeps(self, name: str, owners: Sequence[Hashable], *, first: Sequence[int], holding: Sequence[int]) -> bool:
        """Whether a storage has a page for each of these owners' position `first`, and so for all behind it.

        False also where one of them is unknown, has fewer tokens than it is `holding`, or no such position.
        """
        there, size = self.storage(name).table_pages, self.page_size
        for owner, position, tokens in zip(owners, first, holding, strict=True):
            pages, at = self._pages.get(owner), position // size
            if pages is None or at >= len(pages) or pages[at] not in there or self.tokens_of(owner) < tokens:
                return False
        return True

    def compact(self, name: str) -> list[tuple[int, int]]:
        """Move a storage's highest pages to its lowest free ones; return the moves (from, to), which the pool copies.

        The epoch changes where something moved.
        """
        moves = self.storage(name).compact()
        if moves:
            self._new_epoch()
        return moves

    def check_integrity(self, *, live: Collection[Hashable] | None = None) -> None:
        """As a SlotAllocator's, and so for every storage: each page is free or behind one owned page of the table."""
        super().check_integrity(live=live)
        for storage in self.storages.values():
            storage.check_integrity(self._pages)

    def _spaces(self) -> list[FreePages]:
        return [*super()._spaces(), *(storage.free for storage in self.storages.values())]

    def _take(self, count: int) -> list[int]:
        pages = super()._take(count)
        for storage in self.storages.values():
            storage.map(pages)
        return pages

    def _give(self, pages: Sequence[int]) -> None:
        for storage in self.storages.values():
            storage.unmap(pages)
        super()._give(pages)
