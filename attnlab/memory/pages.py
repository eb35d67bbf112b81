"""The pages of one id space that nobody has: what slots are handed out of, and what backs them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping

from attnlab.checks import positive, require


class OutOfSlots(RuntimeError):
    """A space has fewer free slots than were asked for. Nothing was allocated."""


class FreePages:
    """Pages that nobody has, handed out lowest first. Page 0 is the sink and belongs to nobody.

    >>> free = FreePages("sliding", total=4)
    >>> free.take(2), len(free)
    ([1, 2], 1)
    >>> free.give([1])
    >>> sorted(free)
    [1, 3]
    """

    def __init__(self, space: str, *, total: int) -> None:
        self.space, self.total = space, total
        self._heap = list(range(1, total))

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[int]:
        return iter(self._heap)

    def check_room(self, more: int, *, owner: Hashable, tokens: int, page_size: int) -> None:
        """Raise OutOfSlots where fewer than `more` pages are free."""
        if more > len(self):
            raise OutOfSlots(
                f"{self.space}: {owner!r} needs {more} more pages of {page_size} slots for {tokens} tokens, "
                f"{len(self)} are free; release a request or build a larger pool"
            )

    def take(self, count: int) -> list[int]:
        """Return that many pages, the lowest in ascending order."""
        return [heapq.heappop(self._heap) for _ in range(count)]

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back."""
        for page in pages:
            heapq.heappush(self._heap, page)

    def check_integrity(self, held: Mapping[Hashable, Iterable[int]]) -> None:
        """Raise RuntimeError unless every page but the sink is free or held, once."""
        holder_of: dict[int, Hashable] = {}
        for holder, pages in [("the free list", self._heap), *held.items()]:
            for page in pages:
                require(
                    0 < page < self.total,
                    f"{self.space}: {holder!r} holds page {page}; expected 1 to {self.total - 1} (page 0 is the sink)",
                    RuntimeError,
                )
                require(
                    page not in holder_of,
                    f"{self.space}: page {page} is held by {holder_of.get(page)!r} and by {holder!r}",
                    RuntimeError,
                )
                holder_of[page] = holder
        lost = set(range(1, self.total)) - set(holder_of)
        require(not lost, f"{self.space}: pages {sorted(lost)[:8]} are neither free nor owned", RuntimeError)


def count_pages(name: str, num_slots: int, page_size: int) -> int:
    """Return how many pages the slots make, at least the sink and one more, or raise; `name` is the argument's."""
    positive("page_size", page_size)
    positive(name, num_slots)
    require(
        num_slots % page_size == 0,
        f"page_size: expected a divisor of {name} {num_slots}, got {page_size}",
    )
    require(
        num_slots > page_size,
        f"{name}: expected at least two pages of {page_size} (the first is the sink), got {num_slots}",
    )
    return num_slots // page_size


def check_count(name: str, count: int) -> int:
    """Return `count`, an int of at least 0, or raise."""
    is_int = isinstance(count, int) and not isinstance(count, bool)
    require(is_int and count >= 0, f"{name}: expected an int of at least 0, got {count!r}")
    return count
