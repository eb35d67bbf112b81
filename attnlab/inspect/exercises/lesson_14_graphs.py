"""Lesson 14: graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.graphs.shapes import VerifyShape
from attnlab.inspect.exercises.registry import Wrong, exercise, whole_numbers
from attnlab.mask import CustomMask

SHAPE = VerifyShape(requests=4, longest=100, drafts=3, masked=True)
CACHED = 20
"""What 14-1 asks for: a step of one request of so many cached tokens."""
MOST = 64
"""Requests of the largest step in 14-2."""
Memory = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows, lengths, offsets and slots of a graph."""
Step = list[tuple[int, list[int]]]
"""Of every request its row, and its slots."""


@exercise("14-1", Sequence, "a list of three numbers")
def entries_and_rows(answer: Any) -> str:
    """The entries of a mask's memory, those that are live, and the padded rows of an input."""
    if len(answer) != 3:
        return f"Expected a list of three numbers, (a), (b) and (c), got {answer!r}."
    room, live, padded = whole_numbers(answer)
    drafts, longest = SHAPE.drafts, SHAPE.longest or 0
    if room == SHAPE.requests * drafts * (longest - drafts):
        return f"(a): a draft has an entry for each of the {drafts} drafts, too."
    if room == drafts * longest:
        return f"(a): that is the memory for one request; the graph was captured for {SHAPE.requests}."
    if room != _mask_entries():
        return f"(a): a request has a row for each of its {drafts} drafts, and in it an entry for each key it may have."
    if live == drafts * CACHED:
        return f"(b): a draft has an entry for each of the {drafts} drafts, too."
    if live != drafts * (CACHED + drafts):
        return f"(b): one request, {drafts} drafts, and {CACHED} cached keys. How many pairs are these?"
    if padded == SHAPE.requests - 1:
        return "(c): an input has a row for each draft, not for each request."
    return (
        "" if padded == SHAPE.tokens - drafts else f"(c): the inputs have {SHAPE.tokens} rows. How many are the step's?"
    )


def _mask_entries() -> int:
    mask = SHAPE.memory(device=torch.device("cpu"), max_tokens=10**6).mask
    return mask.bits.shape[0] if isinstance(mask, CustomMask) else 0


@exercise("14-2", Sequence, "a list of sizes")
def sizes_of_graphs(answer: Any) -> str:
    """As few graphs as possible, none of which is more than half padding."""
    sizes = sorted(set(whole_numbers(answer)))
    if not sizes or sizes[0] < 1:
        return f"A graph is captured for at least 1 request, got {list(answer)}."
    if sizes[-1] < MOST:
        return f"A step of {MOST} requests fits into no graph."
    for n in range(1, MOST + 1):
        size = next(size for size in sizes if size >= n)
        if size - n > n:
            return f"A step of {n} takes the graph for {size}, so that {size - n} rows are padding."
    fewest = _fewest()
    if len(sizes) > fewest:
        return f"No step is too much padding, but {fewest} graphs would do. How large may the next one be?"
    return ""


def _fewest() -> int:
    """Return how many graphs are needed: behind one for s, a step of s + 1 may take one for 2 s + 2."""
    count, size = 0, 0
    while size < MOST:
        count, size = count + 1, 2 * size + 2
    return count


@exercise("14-3", Callable)
def refilled(answer: Any) -> str:
    """A graph's memory after steps that grow and shrink."""
    memory = _memory(requests=4, slots=40)
    for number, step in enumerate(_steps()):
        case = f"Step {number}, of {len(step)} request{'s' * (len(step) != 1)}"
        before = tuple(x.clone() for x in memory)
        given = [(row, list(slots)) for row, slots in step]
        try:
            got = answer(*memory, given)
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise Wrong(f"{case}: it raised {words}. Call it yourself on such inputs to see where.") from error
        if got is not None and got is not ...:
            return f"{case}: expected the tensors to be filled in place and nothing to be returned, got {got!r}."
        wrong = _wrong(memory, step)
        if wrong and all(torch.equal(x, y) for x, y in zip(memory, before, strict=True)):
            return "The memory is as before. Fill the tensors that you are given: `rows[:] = ...`, not `rows = ...`."
        if wrong:
            return f"{case}: {wrong}"
    return ""


def _memory(*, requests: int, slots: int) -> Memory:
    rows, lens = torch.zeros(requests, dtype=torch.int64), torch.zeros(requests, dtype=torch.int64)
    return rows, lens, torch.zeros(requests + 1, dtype=torch.int64), torch.zeros(slots, dtype=torch.int64)


def _steps() -> list[Step]:
    """Return steps of up to four requests, whose slots lie anywhere."""
    drawn = random.Random(14)
    counts = (4, 2, 4, 1, 3, 0, 4)
    return [[(drawn.randint(1, 9), drawn.sample(range(1, 90), drawn.randint(1, 9))) for _ in range(n)] for n in counts]


def _wrong(memory: Memory, step: Step) -> str:
    """Say what is wrong with a graph's memory, or nothing."""
    rows, lens, indptr, slots = (x.tolist() for x in memory)
    live = len(step)
    for name, got, wanted in (
        ("rows", rows, [row for row, _ in step]),
        ("lens", lens, [len(mine) for _, mine in step]),
    ):
        if got[:live] != wanted:
            return f"expected {name} to begin with {wanted}, got {got}."
        if any(got[live:]):
            return f"{name} is {got}: those of the padded rows are left over from an earlier step, and are read."
    offsets = [sum(len(mine) for _, mine in step[:r]) for r in range(live + 1)]
    if indptr[: live + 1] != offsets:
        return f"expected indptr to begin with {offsets}, got {indptr}."
    if any(end != offsets[-1] for end in indptr[live:]):
        return f"indptr is {indptr}: the lists of padded rows are not empty, so the rest must be {offsets[-1]}."
    listed = [slot for _, mine in step for slot in mine]
    return (
        "" if slots[: len(listed)] == listed else f"expected slots to begin with {listed}, got {slots[: len(listed)]}."
    )
