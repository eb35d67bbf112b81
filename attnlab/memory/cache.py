"""A request's tokens, kept twice: the table knows where they are, the allocator who owns the place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import require, same_device
from attnlab.memory.pages import check_count
from attnlab.memory.pool import KVPool
from attnlab.memory.requests import RequestTable


class PagedCache:
    """The request table and the pool's slots, changed together: what one holds the other knows.

    A request is its row in the table, and that is the owner's name in the allocator. Every call is all or nothing.

    Build the table with `page_size=pool.page_size`. One of 1 takes the same slots, but knows of no pages: then no
    kernel may copy them whole, and on Hopper an extend over pages of 64 takes a ninth longer.

    >>> from attnlab.memory.pools.mha import MHAPool
    >>> from attnlab.spec import ModelSpec
    >>> pool = MHAPool(ModelSpec.load("SmolLM2-135M"), num_slots=64, device="cpu")
    >>> table = RequestTable(max_requests=2, max_context=32, num_slots=64, device="cpu")
    >>> cache = PagedCache(table=table, pool=pool)
    >>> row = cache.admit()
    >>> cache.append(row, 3).tolist()
    [1, 2, 3]
    >>> drafts = cache.append(row, 4)                  # a tree: 0 is the root, 1 and 2 follow it, 3 follows 2
    >>> cache.accept(row, prefix=3, path=[0, 2, 3])
    >>> table.slots_of(row).tolist(), pool.allocator.tokens_of(row)
    ([1, 2, 3, 4, 5, 6], 6)
    """

    def __init__(self, *, table: RequestTable, pool: KVPool) -> None:
        require(
            table.num_slots == pool.num_slots,
            f"table: admits slots up to {table.num_slots - 1}, the pool's allocator gives those up to "
            f"{pool.num_slots - 1}",
        )
        require(
            same_device(table.slots.device, pool.device),
            f"table: expected on {pool.device} like the pool, got {table.slots.device}",
        )
        require(
            pool.page_size % table.page_size == 0,
            f"table: keeps requests in pages of {table.page_size}, the pool's allocator gives pages of "
            f"{pool.page_size}; build it with page_size={pool.page_size}",
        )
        self.table, self.pool = table, pool
        _check_owners(table.rows, pool.allocator.owners, ValueError)

    def admit(self) -> int:
        """Return a free row, the lowest. Raises RuntimeError where all are in use."""
        row = self.table.admit()
        if self.pool.allocator.holds(row):
            self.table.release(row)
            raise RuntimeError(
                f"row: {row} is free in the table, but owns slots of the pool: somebody else gave them, or another "
                "cache over the same pool did; one cache a pool"
            )
        self.pool.allocator.allocate(row, 0)
        return row

    def append(self, row: int, tokens: int) -> Int[Tensor, " tokens"]:
        """Return the slots of a request's next tokens, int64 on the CPU, which the table then holds.

        Raises ValueError where the table has too few columns, OutOfSlots where a space has too few free pages.
        """
        self.table.check_room(row, check_count("tokens", tokens))
        slots = self.pool.allocator.allocate(row, tokens)
        self.table.append(row, slots)
        return slots

    def accept(self, row: int, *, prefix: int, path: Sequence[int]) -> None:
        """Keep the drafts of `path`, after a verify of the tokens at positions `prefix` and up, and drop the others.

        It comes after the verify of the last layer. `prefix` is the length before the drafts, as in the batch; `path`
        are numbers of drafts from the root, 0, downwards (they are not checked against a tree, which nobody here
        knows); none rejects all. Their rows move to positions `prefix`, `prefix + 1`, ... in every layer, and the
        request ends there.
        """
        length = self.table.length(row)
        check_count("prefix", prefix)
        require(prefix <= length, f"prefix: expected at most the {length} tokens of request {row}, got {prefix}")
        _check_path(path, drafts=length - prefix)
        slots = self.pool.allocator.slots_of(row)[prefix:]
        moved = [(draft, place) for place, draft in enumerate(path) if draft != place]
        if moved:
            source, target = slots[torch.tensor(moved)].unbind(1)
            self.pool.copy(source, target)
        self.truncate(row, prefix + len(path))

    def truncate(self, row: int, length: int) -> None:
        """Keep a request's first `length` tokens; the pages beyond are free again."""
        self.table.check_held(row, length)
        self.pool.allocator.truncate(row, length)
        self.table.truncate(row, length)

    def slide_out(self, row: int, *, query: int) -> None:
        """Free what no query of this request at position `query` or later sees. ValueError where nothing can slide."""
        self.table.length(row)
        self.pool.slide_out(row, query=query)

    def release(self, row: int) -> None:
        """Free a request's row and all its slots."""
        self.table.length(row)
        self.pool.allocator.release(row)
        self.table.release(row)

    def check_integrity(self) -> None:
        """Raise RuntimeError where a page is lost or shared, or where the table says otherwise than the allocator."""
        self.pool.check_integrity()
        _check_owners(self.table.rows, self.pool.allocator.owners, RuntimeError)
        for row in self.table.rows:
            entered, owned = self.table.slots_of(row).tolist(), self.pool.allocator.slots_of(row).tolist()
            require(entered == owned, f"row {row}: the table holds {entered[:8]}, owned are {owned[:8]}", RuntimeError)


def _check_owners(rows: Sequence[int], owners: Sequence[object], error: type[Exception]) -> None:
    require(
        set(rows) == set(owners),
        f"table: its rows in use are {rows[:8]}, the owners of slots are {owners[:8]}; both change through the cache",
        error,
    )


def _check_path(path: Sequence[int], *, drafts: int) -> None:
    numbers = all(isinstance(draft, int) and 0 <= draft < drafts for draft in path)
    require(
        numbers and all(a < b for a, b in pairwise(path)) and (not path or path[0] == 0),
        f"path: expected rising numbers of the {drafts} drafts that begin with the root, 0, got {list(path)}",
    )
