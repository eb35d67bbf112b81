"""Lesson 15: pools with more than one storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from attnlab.inspect.exercises.registry import as_tensor, ask, exercise, whole_numbers
from attnlab.memory.mapped import MappedAllocator
from attnlab.memory.pool import Translation
from attnlab.spec import Sight

WINDOW, PAGE, TOKENS, QUERIES = 50, 16, 200, (192, 193)
"""What 15-1 asks for."""
PREFIX, DRAFTS, TREE_WINDOW, TREE_PAGE = 40, 8, 8, 4
"""The verify of 15-2."""


@exercise("15-1", Sequence, "a list of two positions")
def kept_after(answer: Any) -> str:
    """What an allocator keeps."""
    sight = Sight(window=WINDOW)
    expected = [_kept(WINDOW, PAGE, TOKENS, query) for query in QUERIES]
    if len(answer) != len(expected):
        return f"Expected a list of two positions, one for each query, got {answer!r}."
    got = whole_numbers(answer)
    if got == expected:
        return ""
    if got == [sight.first(query) for query in QUERIES]:
        return (
            f"Those are the first keys that the queries see. But a page of {PAGE} is freed as a whole, and only where "
            f"nobody sees any of its keys: at which position does the page begin?"
        )
    if got == [-(-sight.first(query) // PAGE) * PAGE for query in QUERIES]:
        return f"You rounded up: the query at {QUERIES[0]} still sees keys of the page that would be freed."
    if got == [(query - WINDOW) // PAGE * PAGE for query in QUERIES]:
        return (
            f"The window of {WINDOW} counts the query's own key: {QUERIES[1]} sees back to {sight.first(QUERIES[1])}."
        )
    if any(x % PAGE for x in got):
        return f"Pages are freed whole, so both are multiples of {PAGE}."
    return "Which is the first key that each query sees, and at which position does the page begin that holds it?"


@exercise("15-2", Integral)
def free_before_accepting(answer: Any) -> str:
    """The first query that may still come."""
    query = int(answer)
    if query < 0:
        return f"A query stands at a position from 0 on, got {query}."
    needed, best = Sight(window=TREE_WINDOW).first(PREFIX), _kept(TREE_WINDOW, TREE_PAGE, PREFIX + DRAFTS, PREFIX)
    kept = _kept(TREE_WINDOW, TREE_PAGE, PREFIX + DRAFTS, query)
    if kept > needed:
        return (
            f"Keys before {kept} are gone. Where no draft is kept, the next token stands at {PREFIX} and sees back to "
            f"{needed}."
        )
    if kept < best:
        return (
            f"Nothing breaks, but keys from {kept} on are kept, and no query from position {PREFIX} on sees those "
            f"before {needed}: pages that end before it could be free."
        )
    return ""


@exercise("15-3", Callable)
def translate_all(answer: Any) -> str:
    """The translation, through a page table with gaps."""
    generator = torch.Generator().manual_seed(0)
    for page_size in (4, 1, 16):
        pages = torch.tensor([0, 3, -1, 1, 2, -1, 5, 4])
        way = Translation(source="table", target="storage", pages=pages, page_size=page_size, stride=page_size)
        slots = len(pages) * page_size
        mixed = torch.randint(0, slots, (12,), generator=generator)
        for ids in (torch.arange(slots), mixed, mixed.view(3, 4), mixed[:0]):
            case = f"With ids {_few(ids)}, pages {pages.tolist()} and page size {page_size}"
            got, expected = as_tensor(case, ask(case, answer, ids.clone(), pages.clone(), page_size)), way.apply(ids)
            if got.shape != expected.shape:
                return f"{case}: expected shape {list(expected.shape)}, as ids has, got {list(got.shape)}."
            if not torch.equal(got.double(), expected.double()):
                at = int((got != expected).flatten().nonzero()[0])
                slot, mine, wanted = (int(x.flatten()[at]) for x in (ids, got, expected))
                return f"{case}: slot {slot} became {mine}, expected {wanted}. {_why(slot, mine, pages, page_size)}"
    return ""


def _why(slot: int, mine: int, pages: Tensor, page_size: int) -> str:
    page, within = slot // page_size, slot % page_size
    if pages[page] >= 0:
        return f"It is in page {page}, behind which stands page {int(pages[page])}; at which place in it?"
    if mine == within:
        return "All slots of a page without one behind it become 0: one slot, and not the places of page 0."
    if mine == -page_size + within:
        return f"Its page {page} has -1 behind it: that is no page to count with."
    return f"Its page {page} has nothing behind it, so the slot becomes the sink's."


def _few(ids: Tensor, most: int = 8) -> str:
    listed = ids.tolist()
    return str(listed) if ids.numel() <= most else f"of shape {list(ids.shape)}"


def _kept(window: int, page_size: int, tokens: int, query: int) -> int:
    """Return from which position on an allocator keeps a request's keys, once everything before a query slid out."""
    slots = (1 + -(-tokens // page_size)) * page_size
    sizes = {"num_slots": slots, "page_size": page_size}
    allocator = MappedAllocator(**sizes, space="full", storages={"sliding": slots}, device="cpu")
    allocator.allocate("request", tokens)
    allocator.slide_out("request", first={"sliding": Sight(window=window).first(query)})
    return allocator.kept_from("request", "sliding")
