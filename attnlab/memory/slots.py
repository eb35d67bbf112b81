"""Who owns which slot of a pool.

A slot is one token's place in a pool. Slots are handed out in whole pages, so a request's last page may be
partly empty; its next tokens go there. Page 0 is the sink: padded rows write to slot 0, nothing reads it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Hashable

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import positive, require

_epochs = itertools.count()


class OutOfSlots(RuntimeError):
    """The pool has fewer free slots than were asked for. Nothing was allocated."""


class SlotAllocator:
    """Hands out a pool's slots, lowest free page first, and takes them back by owner.

    An owner is whatever names a request: its row in the request table, or an id. `epoch` takes a number never
    used before, in any pool of the process, whenever slots are taken back: a plan remembers it, and so knows
    whether it still speaks of the pool as it is.

    >>> slots = SlotAllocator(num_slots=16, page_size=4)
    >>> slots.allocate("a", 5).tolist()
    [4, 5, 6, 7, 8]
    >>> slots.allocate("a", 2).tolist()
    [9, 10]
    >>> slots.free_pages
    1
    >>> before = slots.epoch
    >>> slots.release("a")
    >>> slots.free_pages, slots.epoch > before
    (3, True)
    """

    def __init__(self, *, num_slots: int, page_size: int) -> None:
        positive("page_size", page_size)
        positive("num_slots", num_slots)
        require(
            num_slots % page_size == 0,
            f"page_size: expected a divisor of num_slots {num_slots}, got {page_size}",
        )
        require(
            num_slots > page_size,
            f"num_slots: expected at least two pages of {page_size} (the first is the sink), got {num_slots}",
        )
        self.num_slots = num_slots
        self.page_size = page_size
        self.epoch = next(_epochs)
        self._free = list(range(1, num_slots // page_size))
        self._pages: dict[Hashable, list[int]] = {}
        self._tokens: dict[Hashable, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def owners(self) -> list[Hashable]:
        """All owners, in the order in which they came."""
        return list(self._pages)

    def tokens_of(self, owner: Hashable) -> int:
        """Slots that this owner uses (its last page may hold more)."""
        return self._tokens.get(owner, 0)

    def allocate(self, owner: Hashable, tokens: int) -> Int[Tensor, " tokens"]:
        """Return `tokens` more slots for `owner`, int64 on the CPU, in position order.

        Raises OutOfSlots, and changes nothing, where the pool cannot give as many.
        """
        require(
            isinstance(tokens, int) and tokens >= 0,
            f"tokens: expected an int of at least 0, got {tokens!r}",
        )
        used = self.tokens_of(owner)
        held = len(self._pages.get(owner, ()))
        more = -(-(used + tokens) // self.page_size) - held
        if more > len(self._free):
            raise OutOfSlots(
                f"{owner!r} needs {more} more pages of {self.page_size} slots for {tokens} tokens, "
                f"{len(self._free)} are free; release a request or build a larger pool"
            )
        pages = self._pages.setdefault(owner, [])
        pages.extend(heapq.heappop(self._free) for _ in range(more))
        self._tokens[owner] = used + tokens
        return self.slots_of(owner)[used:]

    def slots_of(self, owner: Hashable) -> Int[Tensor, " tokens"]:
        """Return all slots that this owner uses, int64 on the CPU, in position order."""
        pages = torch.tensor(self._pages.get(owner, []), dtype=torch.int64)
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        return slots.flatten()[: self.tokens_of(owner)]

    def release(self, owner: Hashable) -> None:
        """Take back all pages of `owner`. Raises ValueError where it holds none: freed twice, or never allocated."""
        require(
            owner in self._pages,
            f"owner: {owner!r} holds no slots; it was released before, or never allocated any",
        )
        for page in self._pages.pop(owner):
            heapq.heappush(self._free, page)
        del self._tokens[owner]
        self.epoch = next(_epochs)

    def check_integrity(self, *, live: Collection[Hashable] | None = None) -> None:
        """Raise RuntimeError unless every page but the sink is free or owned, once.

        `live` names the owners that should exist: one that holds slots and is not among them is a leak.
        """
        total = self.num_slots // self.page_size
        owner_of: dict[int, Hashable] = {}
        for owner, pages in [("the free list", self._free), *self._pages.items()]:
            for page in pages:
                require(
                    0 < page < total,
                    f"{owner!r} holds page {page}; expected 1 to {total - 1}, as page 0 is the sink",
                    RuntimeError,
                )
                require(
                    page not in owner_of,
                    f"page {page} is held by {owner_of.get(page)!r} and by {owner!r}",
                    RuntimeError,
                )
                owner_of[page] = owner
        lost = set(range(1, total)) - set(owner_of)
        require(not lost, f"pages {sorted(lost)[:8]} are neither free nor owned", RuntimeError)
        half_known = self._pages.keys() ^ self._tokens.keys()
        require(not half_known, f"{list(half_known)[:8]} have pages but no token count, or the reverse", RuntimeError)
        for owner, pages in self._pages.items():
            need = -(-self._tokens[owner] // self.page_size)
            require(
                need == len(pages),
                f"{owner!r} holds {len(pages)} pages for {self._tokens[owner]} tokens, which need {need}",
                RuntimeError,
            )
        leaked = [] if live is None else [owner for owner in self._pages if owner not in live]
        require(
            not leaked,
            f"leak: {leaked[:8]} hold {sum(len(self._pages[o]) for o in leaked)} pages but are not live",
            RuntimeError,
        )
