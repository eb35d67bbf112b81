"""From ids of the table to those of a storage, and who has which page of which storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnlab.memory.mapped import MappedAllocator
from attnlab.memory.pool import KVPool, Translation
from attnlab.memory.slots import OutOfSlots
from tests.pools import (
    PAGE_SIZES,
    bookkeeping,
    built,
)
from tests.strategies import DEVICE

# --- Translation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_translation_sends_what_has_no_page_and_what_is_no_id_to_the_sink(dtype: torch.dtype) -> None:
    pages = torch.tensor([0, 3, -1, 1])
    way = Translation(source="virtual", target="dense", pages=pages, page_size=4, stride=12)
    ids = torch.tensor([[0, 3, 4], [7, 8, 11], [12, 15, 16], [-1, -4, 10**6]], dtype=dtype)
    got = way.apply(ids)
    assert got.dtype == torch.int64
    assert got.tolist() == [[0, 3, 36], [39, 0, 0], [12, 15, 0], [0, 0, 0]]


def test_the_same_ids_need_no_table() -> None:
    way = Translation.same("pool", page_size=4)
    assert (way.source, way.target, way.pages, way.stride) == ("pool", "pool", None, 4)
    assert way.apply(torch.tensor([5, 0], dtype=torch.int32)).tolist() == [5, 0]
    assert way.apply(torch.zeros(0, dtype=torch.int32)).dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 6}, "stride: expected a multiple of page_size 4, got 6"),
        ({"stride": 0}, "stride: expected a multiple of page_size 4, got 0"),
        ({"pages": None, "stride": 8}, "stride: expected page_size 4, got 8"),
        ({"page_size": 0}, "page_size: expected at least 1"),
        ({"target": "a"}, "target: ids of 'a' are the same without `pages`, and others with them, got 'a'"),
        ({"pages": None}, "target: ids of 'a' are the same without `pages`, and others with them, got 'b'"),
        ({"pages": torch.zeros(3)}, r"pages: expected \[table pages\] int64"),
    ],
)
def test_a_translation_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {"source": "a", "target": "b", "pages": torch.zeros(3).long(), "page_size": 4, "stride": 4}
    with pytest.raises((TypeError, ValueError), match=message):
        Translation(**{**args, **change})


NAMES = {
    "mha": ("pool", {"pool"}),
    "mla": ("pool", {"pool"}),
    "window": ("full", {"full", "sliding"}),
    "unified": ("virtual", {"physical"}),
    "unified sliding": ("virtual", {"physical", "sliding physical"}),
    "unified mla": ("virtual", {"dense"}),
    "unified mla sliding": ("virtual", {"dense", "sliding dense"}),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_names_its_spaces(name: str) -> None:
    pool = built(name)
    source, targets = NAMES[name]
    ways = [pool.translation(layer) for layer in range(4)]
    assert pool.table_space == source == pool.allocator.space
    assert {way.source for way in ways} == {source} and {way.target for way in ways} == targets
    assert isinstance(pool, KVPool)
    for layer in (4, -1):
        calls = (lambda layer: pool.kept_from(layer, 0), lambda layer: pool.keeps(layer, [0], first=[0], holding=[0]))
        for call in (pool.translation, pool.view, *calls):
            with pytest.raises(ValueError, match=f"pool_layer: the pool has layers 0 to 3, got {layer}"):
                call(layer)


# --- MappedAllocator --------------------------------------------------------------------------------------------------


def allocator(pages: int = 8, page_size: int = 4, **storages: int) -> MappedAllocator:
    sizes = {name: count * page_size for name, count in (storages or {"sliding": 6}).items()}
    return MappedAllocator(
        num_slots=pages * page_size, page_size=page_size, space="full", storages=sizes, device=DEVICE
    )


def test_new_table_pages_get_the_lowest_free_pages_in_their_order() -> None:
    slots = allocator(8, sliding=6)
    slots.allocate("a", 8)
    slots.allocate("b", 4)
    slots.slide_out("a", first={"sliding": 8})
    slots.allocate("b", 12)  # table pages 4, 5, 6; sliding pages 1, 2 are free again
    assert slots.slots_of("b").tolist() == list(range(12, 28))
    assert slots.storages["sliding"].pages.tolist() == [0, -1, -1, 3, 1, 2, 4, -1]


@pytest.mark.parametrize("short", ["full", "sliding", "other"])
def test_the_space_that_is_short_is_named_and_nothing_changes_anywhere(short: str) -> None:
    pages = {"full": 6, "sliding": 6, "other": 6} | {short: 4}
    slots = allocator(pages.pop("full"), **pages)
    slots.allocate("a", 7)
    before = bookkeeping(slots)
    for owner in ("a", "new"):
        with pytest.raises(OutOfSlots, match=f"{short}: '{owner}' needs . more pages of 4 slots .* 1 are free"):
            slots.allocate(owner, 8)
    assert bookkeeping(slots) == before
    slots.check_integrity(live=["a"])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_whole_pages_slide_out_once(page_size: int) -> None:
    slots = allocator(8, page_size)
    slots.allocate("a", 4 * page_size)
    for first in range(4 * page_size + 1):
        epoch, free = slots.epoch, len(slots.storages["sliding"].free)
        slots.slide_out("a", first={"sliding": first})
        freed = len(slots.storages["sliding"].free) - free
        assert freed == (first > 0 and first % page_size == 0)
        assert (slots.epoch > epoch) == (freed > 0)
        assert slots.kept_from("a", "sliding") == first // page_size * page_size
        again = slots.epoch
        slots.slide_out("a", first={"sliding": first})
        slots.slide_out("a", first={"sliding": 0})
        assert slots.epoch == again
        slots.check_integrity(live=["a"])
    assert slots.tokens_of("a") == 4 * page_size and slots.free_pages == 3


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_one_look_at_many_owners_says_what_each_still_has(page_size: int) -> None:
    slots = allocator(10, page_size, sliding=10)
    for owner, slid in (("a", 0), ("b", 2 * page_size), ("c", 3 * page_size)):
        slots.allocate(owner, 3 * page_size)
        slots.slide_out(owner, first={"sliding": slid})
    owners, held = "abc", 3 * page_size
    for first in ((x, y, z) for x in range(held) for y in range(held) for z in (0, held - 1)):
        there = all(slots.kept_from(owner, "sliding") <= at for owner, at in zip(owners, first, strict=True))
        assert slots.keeps("sliding", owners, first=first, holding=[held] * 3) == there
    assert slots.keeps("sliding", "ab", first=[0, held - 1], holding=[held] * 2)
    assert not slots.keeps("sliding", "ab", first=[0, held - 1], holding=[held + 1, held]), "nobody has so many"
    assert not slots.keeps("sliding", "ax", first=[0, 0], holding=[held, 0]), "nobody of that name"
    assert not slots.keeps("sliding", "a", first=[held + page_size], holding=[held]), "no such position"


def test_each_storage_slides_by_its_own_first() -> None:
    slots = allocator(8, near=6, far=6)
    slots.allocate("a", 16)
    slots.slide_out("a", first={"near": 9, "far": 4})
    assert (slots.kept_from("a", "near"), slots.kept_from("a", "far")) == (8, 4)


def test_after_everything_slid_out_the_next_page_is_kept() -> None:
    slots = allocator()
    slots.allocate("a", 6)
    slots.slide_out("a", first={"sliding": 100})
    assert slots.kept_from("a", "sliding") == 8 and not slots.storages["sliding"].used
    slots.allocate("a", 6)
    assert slots.kept_from("a", "sliding") == 8 and slots.storages["sliding"].used == [1]
    slots.check_integrity()


def test_truncate_gives_back_the_pages_of_every_storage_and_slid_pages_stay_out() -> None:
    slots = allocator(8, sliding=7)
    slots.allocate("a", 20)
    slots.slide_out("a", first={"sliding": 8})
    epoch = slots.epoch
    slots.truncate("a", 13)
    assert slots.storages["sliding"].used == [3, 4] and slots.free_pages == 3 and slots.epoch > epoch
    slots.truncate("a", 3)
    assert slots.storages["sliding"].used == [] and slots.kept_from("a", "sliding") == 4
    slots.truncate("a", 0)
    slots.allocate("a", 5)
    assert slots.kept_from("a", "sliding") == 0
    slots.check_integrity(live=["a"])


def test_release_gives_back_what_is_left_and_happens_once() -> None:
    slots = allocator()
    slots.allocate("a", 12)
    slots.slide_out("a", first={"sliding": 5})
    slots.release("a")
    assert slots.free_pages == 7 and len(slots.storages["sliding"].free) == 5
    with pytest.raises(ValueError, match="owner: 'a' holds no slots"):
        slots.release("a")
    with pytest.raises(ValueError, match="owner: 'a' holds no slots"):
        slots.truncate("a", 0)
    with pytest.raises(ValueError, match="owner: 'a' holds no slots"):
        slots.slide_out("a", first={"sliding": 0})
    assert slots.kept_from("a", "sliding") == 0


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ({"sliding": 4, "slding": 4}, "storage: expected one of sliding, got 'slding'"),
        ({"sliding": -1}, r"first\['sliding'\]: expected an int of at least 0, got -1"),
        ({"sliding": 4.0}, r"first\['sliding'\]: expected an int of at least 0, got 4.0"),
    ],
)
def test_a_slide_that_cannot_be_changes_nothing(first: Any, message: str) -> None:
    slots = allocator()
    slots.allocate("a", 12)
    epoch = slots.epoch
    with pytest.raises(ValueError, match=message):
        slots.slide_out("a", first=first)
    assert slots.epoch == epoch and slots.storages["sliding"].used == [1, 2, 3]
    for call in (slots.compact, lambda name: slots.kept_from("a", name)):
        with pytest.raises(ValueError, match="storage: expected one of sliding, got 'full'"):
            call("full")


def test_compaction_moves_the_highest_page_to_the_lowest_hole_while_that_is_lower() -> None:
    slots = allocator(10, sliding=9)
    for owner in "abcdefg":
        slots.allocate(owner, 4)
    for owner in "acd":
        slots.release(owner)
    epoch = slots.epoch
    assert slots.compact("sliding") == [(7, 1), (6, 3), (5, 4)]
    assert slots.epoch > epoch and slots.storages["sliding"].used == [1, 2, 3, 4]
    slots.check_integrity(live="befg")
    assert slots.storages["sliding"].pages.tolist() == [0, -1, 2, -1, -1, 4, 3, 1, -1, -1]
    epoch = slots.epoch
    assert slots.compact("sliding") == [] and slots.epoch == epoch


FAULTS: dict[str, tuple[Callable[[MappedAllocator], Any], str]] = {
    "stale device": (lambda s: s.storages["sliding"].pages.fill_(-1), "sliding: the device has another page table"),
    "shared": (lambda s: s.storages["sliding"]._page_of.update({3: 1}), "sliding: page 1 is held by .* and by"),
    "lost": (lambda s: s.storages["sliding"]._page_of.pop(3), r"sliding: pages \[3\] are neither free nor owned"),
    "sink": (lambda s: s.storages["sliding"]._page_of.update({3: 0}), "sliding: 'table page 3' holds page 0"),
    "nobody's": (lambda s: s.storages["sliding"].map([7]), r"sliding: backs table pages \[7\], which nobody owns"),
    "hole": (lambda s: s.storages["sliding"].unmap([2]), "sliding: 'a' lost a page behind its front"),
    "table": (lambda s: s._free.take(1), "full: pages .* are neither free nor owned"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_integrity_check_finds(name: str) -> None:
    corrupt, message = FAULTS[name]
    slots = allocator()
    slots.allocate("a", 12)
    slots.check_integrity()
    corrupt(slots)
    with pytest.raises(RuntimeError, match=message):
        slots.check_integrity()
