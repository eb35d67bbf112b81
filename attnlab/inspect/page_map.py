"""Whose is every page of a pool: the state of an allocator as plain numbers, to count and to draw."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnlab.checks import describe, positive, require, whole
from attnlab.memory.slots import SlotAllocator

MOST_PAGES = 1 << 24
"""A map of more pages would take gigabytes to draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMap:
    """Who holds which pages of a pool, at one moment. Lists run over requests.

    `tables[r]` are request r's pages in position order, `lens[r]` its keys: all pages but the last are full.
    `names[r]` is what it is called and `numbers[r]` its place in the batch, which decides its colour. Page 0 is the
    sink. `highlight` is the request to look at, or None.
    """

    pages: int
    page_size: int
    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    lens: tuple[int, ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()
    highlight: int | None = None

    def __post_init__(self) -> None:
        positive("pages", self.pages)
        positive("page_size", self.page_size)
        require(self.pages <= MOST_PAGES, f"pages: expected at most {MOST_PAGES:,} to draw, got {self.pages:,}")
        for name in self.names:
            require(isinstance(name, str), f"names: expected texts, got {describe(name)}", TypeError)
        for field, values in (("numbers", self.numbers), ("lens", self.lens)):
            bad = [value for value in values if whole(field, value) < 0]
            require(not bad, f"{field}: expected ints of at least 0, got {bad[:1]}")
        reqs = len(self.names)
        sizes = [len(self.numbers), len(self.lens), len(self.tables)]
        require(sizes == [reqs] * 3, f"page map: {reqs} names, but numbers, lens and tables of {sizes} requests")
        for name, length, table in zip(self.names, self.lens, self.tables, strict=True):
            need = -(-length // self.page_size)
            require(need == len(table), f"page map: {name} has {len(table)} pages for {length} keys, which need {need}")
        held = [page for table in self.tables for page in table]
        bad = [page for page in held if not 0 < page < self.pages]
        require(not bad, f"page map: expected pages 1 to {self.pages - 1} (page 0 is the sink), got {bad[:4]}")
        require(len(set(held)) == len(held), "page map: a page is held twice")
        require(
            self.highlight is None or 0 <= self.highlight < reqs,
            f"highlight: expected one of {reqs} requests, got {self.highlight!r}",
        )

    @classmethod
    def of(
        cls,
        allocator: SlotAllocator,
        *,
        names: Mapping[Hashable, str] | None = None,
        highlight: Hashable | None = None,
    ) -> PageMap:
        """Look at an allocator as it is now.

        `names` gives every owner a name, in batch order. Without it an owner that is a number is called by it (row 2
        of the request table is r2), and any other by its own words. `highlight` is an owner, by default the one with
        the most keys.

        >>> slots = SlotAllocator(num_slots=24, page_size=4)
        >>> given = [slots.allocate(owner, 5) for owner in ("a", "b")], slots.allocate("a", 4)
        >>> pool = PageMap.of(slots)
        >>> pool.tables, pool.used, pool.tail, pool.free
        (((1, 2, 5), (3, 4)), 14, 6, 0)
        """
        owners = allocator.owners
        lens = tuple(allocator.tokens_of(owner) for owner in owners)
        if highlight is not None:
            require(highlight in owners, f"highlight: {highlight!r} holds no slots; owners are {owners[:12]}")
        longest = max(range(len(owners)), key=lambda r: lens[r], default=None)
        return cls(
            pages=allocator.num_slots // allocator.page_size,
            page_size=allocator.page_size,
            names=_names(owners, names),
            numbers=_numbers(owners, names),
            lens=lens,
            tables=tuple(_table(allocator, owner) for owner in owners),
            highlight=longest if highlight is None else owners.index(highlight),
        )

    @property
    def used(self) -> int:
        """Slots that hold a key."""
        return sum(self.lens)

    @property
    def held(self) -> int:
        """Pages that a request holds."""
        return sum(map(len, self.tables))

    @property
    def tail(self) -> int:
        """Slots at the empty ends of last pages: taken, and of no use to anybody else."""
        return self.held * self.page_size - self.used

    @property
    def free(self) -> int:
        """Slots of the pages that nobody holds."""
        return (self.pages - 1 - self.held) * self.page_size

    @property
    def keys(self) -> NDArray[np.int64]:
        """How many keys lie in each page, `[pages]`: 0 in free ones and in the sink."""
        keys = np.zeros(self.pages, dtype=np.int64)
        for length, table in zip(self.lens, self.tables, strict=True):
            if table:
                keys[list(table)] = self.page_size
                keys[table[-1]] = length - (len(table) - 1) * self.page_size
        return keys

    @property
    def owner(self) -> NDArray[np.int64]:
        """The request that holds each page, `[pages]`: a number of use only where the page has keys."""
        owner = np.zeros(self.pages, dtype=np.int64)
        for r, table in enumerate(self.tables):
            owner[list(table)] = r
        return owner

    def pieces(self, request: int) -> list[tuple[int, int]]:
        """Return a request's pages in position order as runs of neighbours, each from a first to a last page."""
        runs: list[tuple[int, int]] = []
        for page in self.tables[request]:
            if runs and page == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], page)
            else:
                runs.append((page, page))
        return runs


def _table(allocator: SlotAllocator, owner: Hashable) -> tuple[int, ...]:
    size = allocator.page_size
    return tuple((allocator.slots_of(owner)[::size] // size).tolist())


def _names(owners: Sequence[Hashable], names: Mapping[Hashable, str] | None) -> tuple[str, ...]:
    if names is None:
        return tuple(f"r{owner}" if isinstance(owner, int) else str(owner) for owner in owners)
    unnamed = [owner for owner in owners if owner not in names]
    require(not unnamed, f"names: expected a name for every owner, got none for {unnamed[:8]}")
    return tuple(names[owner] for owner in owners)


def _numbers(owners: Sequence[Hashable], names: Mapping[Hashable, str] | None) -> tuple[int, ...]:
    """Return places in the batch that stay the same when others come and go, as far as that can be known."""
    if names is not None:
        place = {owner: i for i, owner in enumerate(names)}
        return tuple(place[owner] for owner in owners)
    rows = [owner for owner in owners if isinstance(owner, int) and owner >= 0]
    return tuple(rows) if len(rows) == len(owners) else tuple(range(len(owners)))
