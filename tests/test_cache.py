"""The table and the pool changed together: all or nothing, step by step, and at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attnlab.memory.cache import PagedCache
from attnlab.memory.mapped import Storage
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.requests import RequestTable
from attnlab.memory.slots import OutOfSlots
from tests.pools import (
    CHUNK,
    POOLS,
    WINDOW,
    assert_holds,
    bookkeeping,
    built,
    cached,
    mapped,
    views,
    write,
)
from tests.strategies import DEVICE

# --- PagedCache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POOLS)
def test_accept_moves_the_rows_of_a_path_in_every_layer_and_drops_the_others(name: str) -> None:
    pool = built(name, 2)
    cache = cached(pool)
    row = cache.admit()
    write(pool, cache.append(row, 3), range(3))
    write(pool, cache.append(row, 6), range(10, 16))  # drafts 0 to 5, across pages
    slots = cache.table.slots_of(row).clone()
    epoch = pool.epoch
    cache.accept(row, prefix=3, path=[0, 2, 5])
    assert cache.table.length(row) == pool.allocator.tokens_of(row) == 6
    assert torch.equal(cache.table.slots_of(row), slots[:6])
    assert not cache.table.slots[row, 6:].any()
    assert pool.epoch > epoch
    for layer in range(len(views(pool))):
        assert_holds(pool, layer, slots[:6], [0, 1, 2, 10, 12, 15])
    cache.check_integrity()


@pytest.mark.parametrize("name", POOLS)
def test_the_next_draft_may_move_to_a_place_that_another_left(name: str) -> None:
    """All rows are read before one is written: 1 -> 0 is none, but 2 -> 1, 3 -> 2, 4 -> 3 overlap."""
    pool = built(name, 1)
    cache = cached(pool)
    row = cache.admit()
    write(pool, cache.append(row, 5), range(5))
    cache.accept(row, prefix=0, path=[0, 2, 3, 4])
    for layer in range(len(views(pool))):
        assert_holds(pool, layer, cache.table.slots_of(row), [0, 2, 3, 4])


@pytest.mark.parametrize(("path", "length", "copies"), [([0, 1, 2], 7, 0), ([0], 5, 0), ([], 4, 0), ([0, 2], 6, 1)])
def test_accept_of_a_chain_is_a_cut(path: list[int], length: int, copies: int, monkeypatch: Any) -> None:
    cache = cached(built("mha"))
    row = cache.admit()
    cache.append(row, 7)
    called: list[int] = []
    monkeypatch.setattr(cache.pool, "copy", lambda source, target: called.append(len(source)))
    epoch = cache.pool.epoch
    cache.accept(row, prefix=4, path=path)
    assert cache.table.length(row) == length and called == [1] * copies
    assert (cache.pool.epoch > epoch) == (length < 7)


def test_a_layer_without_a_page_is_left_alone_by_a_copy() -> None:
    pool = mapped("window", 2)
    cache = cached(pool)
    row = cache.admit()
    ids = cache.append(row, 10)
    write(pool, ids, range(10))
    cache.slide_out(row, query=9)  # sees 4 to 9: pages of 0 to 3 are gone
    before = [view.k.clone() for view in views(pool)]
    pool.copy(ids[[1, 5, 8]], ids[[6, 0, 7]])
    for layer, home in enumerate(pool.homes):
        if home == "full":
            assert_holds(pool, layer, ids, [5, 1, 2, 3, 4, 5, 1, 8, 8, 9])
        else:
            assert_holds(pool, layer, ids[4:], [4, 5, 6, 8, 8, 9])
            assert torch.equal(pool.view(layer).k[0].view(torch.int32), before[layer][0].view(torch.int32))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([1, 2], [3], "target: expected as many ids as source, 2, got 1"),
        ([1, 24], [3, 4], "source: expected 0 to 23, got 24"),
        ([1, 2], [3, -1], "target: expected 0 to 23, got -1"),
        ([1.0], [3], r"source: expected \[tokens\] int32 or int64"),
    ],
)
@pytest.mark.parametrize("name", ["mha", "window", "unified mla"])
def test_a_copy_of_what_is_no_id_changes_nothing(name: str, source: Any, target: Any, message: str) -> None:
    pool = built(name)
    write(pool, pool.allocator.allocate("a", 9), range(9))
    before = [view.k.clone().view(torch.int32) for view in views(pool)]
    with pytest.raises((TypeError, ValueError), match=message):
        pool.copy(torch.tensor(source), torch.tensor(target))
    assert all(torch.equal(a, view.k.view(torch.int32)) for a, view in zip(before, views(pool), strict=True))


BAD_ACCEPTS = {
    "not from the root": ([1, 2], 3, "path: expected rising numbers of the 4 drafts that begin with the root"),
    "falling": ([0, 2, 1], 3, "path: expected rising"),
    "twice": ([0, 1, 1], 3, "path: expected rising"),
    "no draft": ([0, 4], 3, "path: expected rising numbers of the 4 drafts"),
    "negative": ([-1], 3, "path: expected rising"),
    "no number": ([0, 1.0], 3, "path: expected rising"),
    "no drafts": ([0], 7, "path: expected rising numbers of the 0 drafts"),
    "prefix beyond": ([], 8, "prefix: expected at most the 7 tokens of request 0, got 8"),
    "negative prefix": ([], -1, "prefix: expected an int of at least 0, got -1"),
}


@pytest.mark.parametrize("case", BAD_ACCEPTS)
def test_an_accept_that_cannot_be_changes_nothing(case: str) -> None:
    path, prefix, message = BAD_ACCEPTS[case]
    cache = cached(built("window"))
    row = cache.admit()
    write(cache.pool, cache.append(row, 7), range(7))
    before, table = bookkeeping(cache.pool.allocator), cache.table.slots.clone()
    with pytest.raises(ValueError, match=message):
        cache.accept(row, prefix=prefix, path=path)  # type: ignore[arg-type]
    assert bookkeeping(cache.pool.allocator) == before and torch.equal(cache.table.slots, table)
    for layer in range(4):
        assert_holds(cache.pool, layer, cache.table.slots_of(row), range(7))


@pytest.mark.parametrize("name", ["mha", "window", "unified sliding"])
def test_what_does_not_fit_changes_neither_table_nor_pool(name: str) -> None:
    cache = cached(built(name, 2), max_context=13)
    row, other = cache.admit(), cache.admit()
    cache.append(row, 5)
    cache.append(other, 3)
    before, table = bookkeeping(cache.pool.allocator), cache.table.slots.clone()
    with pytest.raises(ValueError, match="request 0 would hold 14 tokens, the table has 13 columns"):
        cache.append(row, 9)
    if name != "mha":
        with pytest.raises(OutOfSlots, match="sliding: 0 needs 1 more pages"):
            cache.append(row, 2)
    with pytest.raises(ValueError, match="tokens: expected an int of at least 0, got -1"):
        cache.append(row, -1)
    with pytest.raises(ValueError, match="length: expected at most the 5 tokens of request 0, got 6"):
        cache.truncate(row, 6)
    assert bookkeeping(cache.pool.allocator) == before and torch.equal(cache.table.slots, table)
    cache.check_integrity()


def test_truncate_keeps_the_front_and_frees_the_rest() -> None:
    cache = cached(built("unified sliding", 4, pages=8))
    row = cache.admit()
    slots = cache.append(row, 11)
    epoch = cache.pool.epoch
    cache.truncate(row, 11)
    assert cache.pool.epoch == epoch
    cache.truncate(row, 10)
    assert cache.pool.epoch > epoch
    cache.truncate(row, 4)
    assert cache.table.slots_of(row).tolist() == slots[:4].tolist()
    assert cache.append(row, 1).tolist() == slots[4:5].tolist()
    cache.check_integrity()


def test_a_row_is_admitted_and_released_in_table_and_pool() -> None:
    cache = cached(built("window"))
    a, b = cache.admit(), cache.admit()
    cache.append(b, 3)
    assert cache.pool.allocator.owners == [a, b]
    cache.release(a)
    cache.release(b)
    assert cache.pool.allocator.owners == cache.table.rows == []
    for call in (cache.release, lambda row: cache.append(row, 1), lambda row: cache.truncate(row, 0)):
        with pytest.raises(ValueError, match="row: 1 is not in use"):
            call(b)
    cache.check_integrity()
    assert cache.pool.allocator.free_pages == 11


def test_integrity_check_finds_where_table_and_pool_disagree() -> None:
    cache = cached(built("mha"))
    row = cache.admit()
    cache.append(row, 3)
    cache.table.slots[row, 1] = 9
    with pytest.raises(RuntimeError, match=r"row 0: the table holds \[2, 9, 4\], owned are \[2, 3, 4\]"):
        cache.check_integrity()
    cache.table.release(row)
    with pytest.raises(RuntimeError, match=r"table: its rows in use are \[\], the owners of slots are \[0\]"):
        cache.check_integrity()


def test_a_table_of_another_pool_is_refused() -> None:
    pool = built("unified")
    for slots in (12, 48):
        table = RequestTable(max_requests=1, max_context=8, num_slots=slots, device=DEVICE)
        with pytest.raises(ValueError, match=f"table: admits slots up to {slots - 1}, the pool's .* up to 23"):
            PagedCache(table=table, pool=pool)
    table = RequestTable(max_requests=1, max_context=8, num_slots=24, device=DEVICE, page_size=4)
    with pytest.raises(ValueError, match="in pages of 4, the pool's allocator gives pages of 2; .* page_size=2"):
        PagedCache(table=table, pool=pool)
    table = RequestTable(max_requests=1, max_context=8, num_slots=24, device=DEVICE)
    pool.allocator.allocate("a", 1)
    with pytest.raises(ValueError, match=r"the owners of slots are \['a'\]"):
        PagedCache(table=table, pool=pool)


# --- Everything at once -----------------------------------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """Random calls beside plain dicts: what each row's tokens are, and how many of its pages slid out."""

    name = "window"
    page_size = 2
    rows_drawn = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.pool = mapped(self.name, self.page_size, pages=14)
        self.cache = cached(self.pool, max_requests=3, max_context=16)
        self.tokens: dict[int, list[int]] = {}
        self.gone: dict[int, int] = {}
        self.count = 0

    def pages(self, row: int) -> int:
        return -(-len(self.tokens[row]) // self.page_size)

    def room(self) -> int:
        """Table pages that may still be taken: each needs a page in every storage."""
        kept = sum(self.pages(row) - self.gone[row] for row in self.tokens)
        held = sum(self.pages(row) for row in self.tokens)
        storages = [(space.free.total, kept if name == "sliding" else held) for name, space in self.storages.items()]
        return min(total - 1 - used for total, used in [(14, held), *storages])

    @property
    def storages(self) -> dict[str, Storage]:
        return self.pool.allocator.storages

    def cut(self, row: int, length: int) -> None:
        del self.tokens[row][length:]
        self.gone[row] = min(self.gone[row], self.pages(row))

    @precondition(lambda self: len(self.tokens) < 3)
    @rule()
    def admit(self) -> None:
        row = self.cache.admit()
        assert row == min({0, 1, 2} - set(self.tokens))
        self.tokens[row], self.gone[row] = [], 0

    @rule(row=rows_drawn, count=st.integers(0, 7))
    def append(self, row: int, count: int) -> None:
        if row not in self.tokens or len(self.tokens[row]) + count > 16:
            with pytest.raises(ValueError):
                self.cache.append(row, count)
            return
        more = -(-(len(self.tokens[row]) + count) // self.page_size) - self.pages(row)
        if more > self.room():
            before = bookkeeping(self.pool.allocator)
            with pytest.raises(OutOfSlots):
                self.cache.append(row, count)
            assert bookkeeping(self.pool.allocator) == before
            return
        numbers = list(range(self.count, self.count + count))
        self.count += count
        write(self.pool, self.cache.append(row, count), numbers)
        self.tokens[row] += numbers

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        held = self.tokens[row]
        prefix = data.draw(st.integers(max(0, len(held) - 5), len(held)))
        rest = data.draw(st.sets(st.integers(1, max(1, len(held) - prefix - 1)), max_size=3))
        path = sorted({0} | rest)
        path = [] if path[-1] >= len(held) - prefix else path
        if self.gone[row] * self.page_size > prefix:
            return  # a verify there would have read what slid out
        kept = [held[prefix + draft] for draft in path]
        self.cache.accept(row, prefix=prefix, path=path)
        self.cut(row, prefix + len(path))
        held[prefix:] = kept

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        length = data.draw(st.integers(0, len(self.tokens[row])))
        epoch = self.pool.epoch
        self.cache.truncate(row, length)
        assert (self.pool.epoch > epoch) == (length < len(self.tokens[row]))
        self.cut(row, length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), ahead=st.integers(-3, 1))
    def slide_out(self, data: st.DataObject, ahead: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        query = max(0, len(self.tokens[row]) + ahead)
        first = min(max(0, query - WINDOW + 1), query // CHUNK * CHUNK)
        whole = max(self.gone[row], min(first // self.page_size, self.pages(row)))
        if "sliding" not in self.storages:
            with pytest.raises(ValueError, match="nothing slides out"):
                self.cache.slide_out(row, query=query)
            return
        epoch = self.pool.epoch
        self.cache.slide_out(row, query=query)
        assert (self.pool.epoch > epoch) == (whole > self.gone[row])
        self.gone[row] = whole

    @rule(row=rows_drawn)
    def release(self, row: int) -> None:
        if row not in self.tokens:
            with pytest.raises(ValueError, match="is not in use"):
                self.cache.release(row)
            return
        self.cache.release(row)
        del self.tokens[row], self.gone[row]

    @rule()
    def compact(self) -> None:
        if isinstance(self.pool, UnifiedPool):
            epoch = self.pool.epoch
            assert (self.pool.compact() > 0) == (self.pool.epoch > epoch)
            for space in self.storages.values():
                assert space.used == list(range(1, len(space.used) + 1))

    @invariant()
    def agrees_with_the_dicts(self) -> None:
        self.cache.check_integrity()
        assert self.cache.table.rows == self.pool.allocator.owners
        assert set(self.cache.table.rows) == set(self.tokens)
        for row, numbers in self.tokens.items():
            slots = self.cache.table.slots_of(row)
            assert self.cache.table.length(row) == len(numbers)
            for layer, home in enumerate(self.pool.homes):
                kept = self.gone[row] * self.page_size if home == "sliding" else 0
                assert self.pool.kept_from(layer, row) == kept
                assert_holds(self.pool, layer, slots[kept:], numbers[kept:])


class UnifiedMachine(CacheMachine):
    name = "unified"


class UnifiedSlidingMachine(CacheMachine):
    name = "unified sliding"
    page_size = 1


class UnifiedLatentMachine(CacheMachine):
    name = "unified mla sliding"


MACHINES = (CacheMachine, UnifiedMachine, UnifiedSlidingMachine, UnifiedLatentMachine)
for _machine in MACHINES:
    _machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
TestWindow, TestUnified, TestUnifiedSliding, TestUnifiedLatent = (machine.TestCase for machine in MACHINES)


@pytest.mark.parametrize("row", [True, 1.0, "1", None])
@pytest.mark.parametrize("call", ["append", "truncate", "release", "slide_out"])
def test_a_row_is_a_whole_number(row: Any, call: str) -> None:
    """True and 1.0 are equal to 1, and would be found in a dict."""
    cache = cached(built("window", pages=20))
    rows = [cache.admit(), cache.admit()]
    for each in rows:
        cache.append(each, 3)
    before = cache.table.slots.clone()
    arguments: dict[str, tuple[Any, ...]] = {"append": (1,), "truncate": (0,), "release": (), "slide_out": ()}
    with pytest.raises(TypeError, match="row: expected an int, got"):
        getattr(cache, call)(row, *arguments[call], **({"query": 1} if call == "slide_out" else {}))
    assert torch.equal(cache.table.slots, before)
    cache.check_integrity()


def test_a_row_whose_slots_somebody_else_gave_is_refused() -> None:
    cache = cached(built("window", pages=20))
    cache.pool.allocator.allocate(0, 3)
    with pytest.raises(RuntimeError, match="row: 0 is free in the table, but owns slots of the pool"):
        cache.admit()
    assert cache.table.rows == []


def test_what_the_allocator_refuses_leaves_the_table_as_it_was() -> None:
    cache = cached(built("window", pages=20))
    row = cache.admit()
    cache.append(row, 12)
    cache.pool.allocator.truncate(row, 5)
    with pytest.raises(ValueError, match="tokens: expected at most the 5"):
        cache.truncate(row, 10)
    assert cache.table.length(row) == 12
    cache.pool.allocator.release(row)
    with pytest.raises(ValueError, match="holds no slots"):
        cache.release(row)
    assert cache.table.rows == [row]
