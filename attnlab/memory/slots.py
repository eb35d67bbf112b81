"""Who owns which slot of a pool.

A slot is one token's place in a pool. Slots are handed out in whole pages, so a request's last page may be
partly empty; its next tokens go there. Page 0 is the sink: padded rows write to slot 0, nothing reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import require
from attnlab.memory.pages import FreePages, check_count, count_pages
from attnlab.memory.pages import OutOfSlots as OutOfSlots

_epochs = itertools.count()


class SlotAllocator:
    """Hands out a pool's slots, lowest free page first, and takes them back by owner.

    An owner is whatever names a request: its row in the request table, or an id. `epoch` takes a number never
    used before, in any pool of the process, whenever slots are taken back: a plan remembers it, and so knows
    whether it still speaks of the pool as it is. `space` names the ids that are handed out.

    >>> slots = SlotAllocator(num_slots=16, page_size=4)
    >>> slots.allocate("a", 5).tolist()
    [4, 5, 6, 7, 8]
    >>> slots.allocate("a", 2).tolist()
    [9, 10]
    >>> before = slots.epoch
    >>> slots.truncate("a", 3)
    >>> slots.slots_of("a").tolist(), slots.free_pages, slots.epoch > before
    ([4, 5, 6], 2, True)
    >>> slots.release("a")
    >>> slots.free_pages
    3
    """

    def __init__(self, *, num_slots: int, page_size: int, space: str = "pool") -> None:
        total = count_pages("num_slots", num_slots, page_size)
        self.num_slots = num_slots
        self.page_size = page_size
        self.space = space
        self.epoch = next(_epochs)
        self._free = FreePages(space, total=total)
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

    def holds(self, owner: Hashable) -> bool:
        """Whether this owner is known: admitted, and not yet released."""
        return owner in self._pages

    def tokens_of(self, owner: Hashable) -> int:
        """Slots that this owner uses (its last page may hold more)."""
        return self._tokens.get(owner, 0)

    def allocate(self, owner: Hashable, tokens: int) -> Int[Tensor, " tokens"]:
        """Return `tokens` more slots for `owner`, int64 on the CPU, in position order.

        Raises OutOfSlots, and changes nothing, where the pool cannot give as many.
        """
        check_count("tokens", tokens)
        used = self.tokens_of(owner)
        held = len(self._pages.get(owner, ()))
        more = self._pages_for(used + tokens) - held
        for free in self._spaces():
            free.check_room(more, owner=owner, tokens=tokens, page_size=self.page_size)
        self._pages.setdefault(owner, []).extend(self._take(more))
        self._tokens[owner] = used + tokens
        return self._slots(self._pages[owner][used // self.page_size :])[used % self.page_size :][:tokens]

    def slots_of(self, owner: Hashable) -> Int[Tensor, " tokens"]:
        """Return all slots that this owner uses, int64 on the CPU, in position order."""
        return self._slots(self._pages.get(owner, []))[: self.tokens_of(owner)]

    def truncate(self, owner: Hashable, tokens: int) -> None:
        """Keep the first `tokens` slots of `owner`; take back the whole pages beyond them.

        The epoch changes where tokens go, even if no page does: what a plan reads there may be written anew.
        """
        pages, held = self._pages_of(owner), self.tokens_of(owner)
        check_count("tokens", tokens)
        require(tokens <= held, f"tokens: expected at most the {held} that {owner!r} holds, got {tokens}")
        if tokens == held:
            return
        kept = self._pages_for(tokens)
        self._give(pages[kept:])
        del pages[kept:]
        self._tokens[owner] = tokens
        self._new_epoch()

    def release(self, owner: Hashable) -> None:
        """Take back all pages of `owner`. Raises ValueError where it holds none: freed twice, or never allocated."""
        self._give(self._pages_of(owner))
        del self._pages[owner], self._tokens[owner]
        self._new_epoch()

    def check_integrity(self, *, live: Collection[Hashable] | None = None) -> None:
        """Raise RuntimeError unless every page but the sink is free or owned, once.

        `live` names the owners that should exist: one that holds slots and is not among them is a leak.
        """
        self._free.check_integrity(self._pages)
        half_known = self._pages.keys() ^ self._tokens.keys()
        require(not half_known, f"{list(half_known)[:8]} have pages but no token count, or the reverse", RuntimeError)
        for owner, pages in self._pages.items():
            need = self._pages_for(self._tokens[owner])
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

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _pages_of(self, owner: Hashable) -> list[int]:
        require(
            owner in self._pages,
            f"owner: {owner!r} holds no slots; it was released before, or never allocated any",
        )
        return self._pages[owner]

    def _spaces(self) -> list[FreePages]:
        """Every space that a new page takes a page of."""
        return [self._free]

    def _take(self, count: int) -> list[int]:
        return self._free.take(count)

    def _give(self, pages: Sequence[int]) -> None:
        self._free.give(pages)

    def _slots(self, pages: Sequence[int]) -> Int[Tensor, " slots"]:
        """Return the slots of pages, all of them."""
        return (
            torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size + torch.arange(self.page_size)
        ).flatten()

    def _new_epoch(self) -> None:
        self.epoch = next(_epochs)
