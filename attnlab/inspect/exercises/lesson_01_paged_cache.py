"""Lesson 01: the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from attnlab.inspect.exercises.registry import TOY_LENS, ask, exercise, whole_numbers
from attnlab.memory.slots import SlotAllocator


@exercise("01-1", Sequence)
def slots_after_release(answer: Any) -> str:
    """What the allocator hands out."""
    page_size = 4
    slots = SlotAllocator(num_slots=24, page_size=page_size)
    slots.allocate("a", 5)
    slots.allocate("b", 3)
    slots.allocate("a", 4)
    slots.release("b")
    expected = slots.allocate("c", 6).tolist()
    pages = sorted({slot // page_size for slot in expected})
    got = whole_numbers(answer)
    if got == expected:
        return ""
    if got == pages:
        first = pages[0] * page_size
        return f"Those are the right pages. Which slots are in them? Page {pages[0]} holds {first} to {first + 3}."
    if len(got) != len(expected):
        return f"Expected a list of {len(expected)} slots, one for each token, got {len(got)}."
    if sorted(got) == expected:
        return "Those are the slots, in another order: the lowest free page comes first."
    if got[:3] == expected[:3] and got[3] != expected[3]:
        return f"Slot {expected[3]} is left out: b had 3 tokens, but its page has 4 slots, and all are free now."
    if got[:4] != expected[:4]:
        return "b gave its page back, and the lowest free page is handed out first. Which one is that?"
    return "The first four are right. Which page is the next free one? Those of a are taken."


@exercise("01-2", Integral)
def smallest_pool(answer: Any) -> str:
    """The sink's page, and each request's."""
    page_size = 16
    pages = 1 + sum(-(-n // page_size) for n in TOY_LENS)
    expected = page_size * pages
    if answer == expected:
        return ""
    if answer == pages:
        return f"{pages} pages is right. How many slots are they?"
    if answer % page_size:
        return f"{answer} slots are no whole number of pages: expected a multiple of {page_size}."
    if answer == expected - page_size:
        return "One page short: page 0 is the sink, and nobody's."
    return "Too few: not every request fits." if answer < expected else "It fits, but fewer slots would do."


@exercise("01-3", Callable)
def slot_of_position(answer: Any) -> str:
    """The translation, for a request whose pages have neighbours between them."""
    for page_size in (1, 4, 16):
        slots = SlotAllocator(num_slots=64 * page_size, page_size=page_size)
        for _ in range(6):
            slots.allocate("neighbour", page_size)
            slots.allocate("mine", page_size + 1)
        expected = slots.slots_of("mine").tolist()
        pages = [slot // page_size for slot in expected[::page_size]]
        for position, slot in enumerate(expected):
            case = f"With pages {pages[:3]}..., page size {page_size} and position {position}"
            got = ask(case, answer, pages, page_size, position)
            if got != slot:
                return (
                    f"{case}: expected slot {slot}, got {got}. Which entry of pages is it, and which slot within "
                    f"that page?"
                )
    return ""
