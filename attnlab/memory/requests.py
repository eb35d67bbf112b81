"""The request table: row = request, column = position, value = slot."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from itertools import repeat

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import positive, require, tensor
from attnlab.memory.pages import check_count


class RequestTable:
    """Which slot holds which token of which request.

    `slots` is `[max_requests, max_context]` int32 on the device; the host keeps each row's length. Every value
    written here was checked to be a slot of the pool, so whatever is planned from the table stays inside it.
    Requests may share the slots of a common prefix, but not the newest, which a decode writes; and not in a pool that
    lets keys slide out, which counts an owner's pages from its own position 0. A row and its slots are released
    together: the table does not know who owns a slot, the allocator does not know who reads it.

    `page_size`: with more than 1 every request lies page-wise. Its token at a position that is a multiple of
    `page_size` has a slot that is one too, and each token between two such has the slot behind the one before. Kernels
    may then copy pages whole. Requests share whole pages of a prefix.

    >>> table = RequestTable(max_requests=2, max_context=8, num_slots=16, device="cpu")
    >>> row = table.admit()
    >>> table.append(row, torch.tensor([4, 5, 6]))
    >>> table.length(row), table.slots_of(row).tolist()
    (3, [4, 5, 6])
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_context: int,
        num_slots: int,
        device: torch.device | str,
        page_size: int = 1,
    ) -> None:
        positive("max_requests", max_requests)
        positive("max_context", max_context)
        positive("num_slots", num_slots)
        positive("page_size", page_size)
        require(
            page_size == 1 or page_size < num_slots,
            f"page_size: expected less than num_slots {num_slots}, whose first page is the sink's, got {page_size}",
        )
        self.num_slots = num_slots
        self._page_size = page_size
        self.slots: Int[Tensor, "max_requests max_context"] = torch.zeros(
            max_requests, max_context, dtype=torch.int32, device=device
        )
        self._lengths: dict[int, int] = {}
        self._pages: dict[int, list[int]] = {}
        self._free = list(range(max_requests))

    @property
    def page_size(self) -> int:
        """Slots of a page, in which every request lies; 1 where requests lie anywhere."""
        return self._page_size

    @property
    def max_requests(self) -> int:
        """Rows of the table."""
        return self.slots.shape[0]

    @property
    def max_context(self) -> int:
        """Columns of the table: no request is longer."""
        return self.slots.shape[1]

    @property
    def rows(self) -> list[int]:
        """The rows in use, in the order of admission."""
        return list(self._lengths)

    def length(self, row: int) -> int:
        """Tokens of this request. Raises ValueError where the row is free."""
        check_row(row)
        require(row in self._lengths, f"row: {row!r} is not in use; rows in use are {self.rows}")
        return self._lengths[row]

    def admit(self) -> int:
        """Return a free row, the lowest. Raises RuntimeError where all are in use."""
        require(
            len(self._free) > 0,
            f"all {self.max_requests} rows are in use; release a request or build a table with more rows",
            RuntimeError,
        )
        row = heapq.heappop(self._free)
        self._lengths[row] = 0
        self._pages[row] = []
        return row

    def append(self, row: int, slots: Int[Tensor, " tokens"]) -> None:
        """Add the slots of a request's next tokens. They are checked first; on an error nothing is written."""
        tensor("slots", slots, shape=["tokens"], dtype=(torch.int32, torch.int64))
        end = self.check_room(row, slots.shape[0])
        host = slots.cpu()
        bad = host[(host < 1) | (host >= self.num_slots)]
        require(
            bad.numel() == 0,
            f"slots: expected 1 to {self.num_slots - 1} (slot 0 is the sink), got {bad[:4].tolist()} for request {row}",
        )
        pages = self._pages_of(row, host)
        self.slots[row, self.length(row) : end] = host.to(torch.int32).to(self.slots.device, non_blocking=True)
        self._lengths[row] = end
        self._pages[row].extend(pages)

    def _pages_of(self, row: int, slots: Int[Tensor, " tokens"]) -> list[int]:
        """Return the pages that begin among a request's next slots; raise ValueError unless these lie page-wise."""
        size, length = self.page_size, self.length(row)
        if size == 1:
            return []
        begun = (slots[-length % size :: size] // size).tolist()
        unfilled = self._pages[row][length // size :]  # the last one, if it has room
        pages = slots.new_tensor([*unfilled, *begun])
        of_pages = pages[:, None] * size + torch.arange(size, dtype=slots.dtype, device=slots.device)
        wanted = of_pages.flatten()[length % size :][: slots.shape[0]]
        if not torch.equal(slots, wanted):
            self._refuse(row, slots, wanted)
        return begun

    def _refuse(self, row: int, slots: Int[Tensor, " tokens"], wanted: Int[Tensor, " tokens"]) -> None:
        """Raise ValueError for the first slot that is not that of its page."""
        at = int((slots != wanted).nonzero()[0])
        position = self.length(row) + at
        if position % self.page_size == 0:
            expected, hint = f"a multiple of {self.page_size}", "allocate whole pages"
        else:
            expected, hint = f"slot {int(wanted[at])}", "whole ones alone can be shared: copy the rest of a prefix"
        raise ValueError(
            f"slots: expected {expected} at position {position} of request {row}, got {int(slots[at])}; the table "
            f"keeps requests in pages of {self.page_size}, {hint}, or build the table with page_size=1"
        )

    def check_room(self, row: int, tokens: int) -> int:
        """Return the length of a request with `tokens` more; raise ValueError where the table has too few columns."""
        end = self.length(row) + tokens
        require(
            end <= self.max_context,
            f"slots: request {row} would hold {end} tokens, the table has {self.max_context} columns; build it with a "
            "larger max_context (of a workbench: with more room)",
        )
        return end

    def check_holds(
        self,
        rows: Sequence[int],
        lens: Sequence[int] | None,
        *,
        room: Sequence[int] | None = None,
        encoder: bool = False,
    ) -> None:
        """Raise ValueError unless every row exists, is asked for once, and holds at least that many tokens.

        A length of 0 is padding: any row will do, any number of times. `lens` is None where only the device knows
        them; `room` are as many tokens behind them, for drafts. Rows of an `encoder` are only read: requests may share
        one.
        """
        if lens is not None and room is None and not encoder and self._each_holds(rows, lens):
            return  # most steps: words only where they are needed
        rows_name, lens_name = ("encoder.rows", "encoder.lens") if encoder else ("rows", "seq")
        max_requests = self.max_requests
        seen: dict[int, int] = {}
        for i, row in enumerate(rows):
            if not 0 <= row < max_requests:
                raise ValueError(
                    f"{rows_name}: request {i} is in row {row}; the table has rows 0 to {max_requests - 1}"
                )
            if lens is None or lens[i] == 0:
                continue
            if not encoder and seen.setdefault(row, i) != i:
                raise ValueError(
                    f"rows: requests {seen[row]} and {i} are both row {row}; they would write the same slot"
                )
            held, more = self._lengths.get(row, 0), 0 if room is None else room[i]
            if lens[i] + more > held:
                drafts = f" and {more} more for its drafts" if more else ""
                raise ValueError(
                    f"{lens_name}: request {i} asks for {lens[i]} tokens{drafts}, row {row} of the table holds {held}"
                )

    def _each_holds(self, rows: Sequence[int], lens: Sequence[int]) -> bool:
        """Whether these are different rows in use, without padding, each with at least that many tokens."""
        held = map(self._lengths.get, rows, repeat(0))
        return all(lens) and len(set(rows)) == len(rows) and all(map(operator.le, lens, held))

    def slots_of(self, row: int) -> Int[Tensor, " tokens"]:
        """Return the slots of a request's tokens, in position order: a view of the table."""
        return self.slots[row, : self.length(row)]

    def check_held(self, row: int, length: int) -> int:
        """Return how many tokens a request holds; raise ValueError unless these are at least `length`."""
        held = self.length(row)
        check_count("length", length)
        require(length <= held, f"length: expected at most the {held} tokens of request {row}, got {length}")
        return held

    def truncate(self, row: int, length: int) -> None:
        """Keep a request's first `length` tokens; what it held beyond is set back to the sink."""
        held = self.check_held(row, length)
        self.slots[row, length:held] = 0
        self._lengths[row] = length
        del self._pages[row][-(-length // self.page_size) :]

    def release(self, row: int) -> None:
        """Free a row; what it held is set back to the sink, so that a stale read finds no foreign slot."""
        self.truncate(row, 0)
        del self._lengths[row], self._pages[row]
        heapq.heappush(self._free, row)


def check_row(row: int) -> None:
    """Raise TypeError unless `row` is an int (numpy's is one, True and 1.0 are not, though they are equal to 1)."""
    try:
        operator.index(row)
    except TypeError:
        raise TypeError(f"row: expected an int, got {row!r}") from None
    require(not isinstance(row, bool), f"row: expected an int, got {row!r}", TypeError)
