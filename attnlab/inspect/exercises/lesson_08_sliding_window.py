"""Lesson 08: windows and chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnlab.batch import VerifyBatch
from attnlab.inspect.exercises.registry import as_tensor, ask, exercise, several, whole_numbers
from attnlab.inspect.exercises.toy import two_kinds
from attnlab.inspect.workbench import workbench
from attnlab.mask import depths
from attnlab.spec import Sight

WINDOW, CACHED, NEW = 16, 100, 20
"""The layer and the request that 08-1 asks for."""
DRAFTS, PREFIX, TREE_WINDOW = 5, 8, 4
"""Those of 08-2."""


@exercise("08-1", Sequence, "a list of three positions")
def first_keys(answer: Any) -> str:
    """Where the lists of a decode and of an extend begin, and what the last query sees."""
    sight, last = Sight(window=WINDOW), CACHED + NEW - 1
    expected = [sight.first(CACHED), sight.first(CACHED), sight.first(last)]
    if len(answer) != 3:
        return f"Expected a list of three positions, (a), (b) and (c), got {answer!r}."
    decode, extend, of_last = (int(x) for x in answer)
    if decode == expected[0] - 1:
        return (
            f"(a) is one too early. The {CACHED} cached tokens stand at 0 to {CACHED - 1}, the new one at {CACHED}; "
            f"and the window of {WINDOW} counts its own key."
        )
    if decode != expected[0]:
        return f"(a): the query stands at {CACHED}, and sees {WINDOW} keys with its own. Count back."
    if extend == expected[2]:
        return "(b): one list serves all queries of the extend, so it begins where the first of them looks back to."
    if extend != expected[1]:
        return f"(b): the list begins where the first new query looks back to, and that one stands at {CACHED}."
    if of_last == expected[1]:
        return f"(c): the window moves along. The last of {NEW} queries stands at {last}."
    if of_last in (expected[2] - 1, expected[2] + 1):
        return f"(c) is off by one: the last of {NEW} queries stands at {last}, and sees {WINDOW} keys with its own."
    return "" if of_last == expected[2] else f"(c): the last query stands at {last}. Count back from there."


@exercise("08-2", Sequence, "a list of parents")
def tree_that_sees_cached_keys(answer: Any) -> str:
    """A tree that is as deep as the window lets it be."""
    parents = whole_numbers(answer)
    if len(parents) != DRAFTS:
        return f"There should be {DRAFTS} drafts, got {len(parents)} parents."
    depth = depths(parents)
    model = two_kinds(window=TREE_WINDOW)
    bench = workbench(model, lens=[PREFIX + DRAFTS], policy="static", engine="eager")
    tree = VerifyBatch.tree(rows=bench.table.rows, prefix=[PREFIX], parents=[parents], device=bench.pool.device)
    plan = bench.backend.plan(tree)
    for draft in range(DRAFTS):
        reading = plan.explain(0, draft)[1]
        if all(key.position >= PREFIX for key in reading.keys):
            return (
                f"Draft {draft} has depth {depth[draft]}, so it stands at position {reading.position} and sees back to "
                f"{Sight(window=TREE_WINDOW).first(reading.position)}: no cached key. Give it an earlier parent."
            )
    deepest = TREE_WINDOW - 2  # of the keys in its window, depth + 1 are drafts on its path, and one is cached
    if max(depth) < deepest:
        return (
            f"Every draft reads a cached key, but the deepest has depth {max(depth)} only. How deep may one stand, at "
            f"position {PREFIX} + depth, and still see key {PREFIX - 1}?"
        )
    return ""


@exercise("08-3", Callable)
def visible(answer: Any) -> str:
    """The list of one request, out of a row of the table."""
    row = [(17 * p + 5) % 101 for p in range(40)]
    limits = ((4, None), (None, None), (1, None), (None, 8), (6, 8), (12, 8))
    for window, chunk in limits:
        for position in (0, 2, 5, 7, 8, 21, 23):
            case = f"With window {window}, chunk {chunk} and a query at {position}"
            got = several(case, ask(case, answer, list(row), position, window, chunk), ("start", "slots"))
            start, slots = (as_tensor(case, x).tolist() for x in got)
            if isinstance(start, list):
                return f"{case}: start should be one position, got {start}. It comes first, then the slots."
            first = Sight(window=window, chunk=chunk).first(position)
            if start != first:
                return f"{case}: expected start {first}, got {start}. {_why(start, position, window, chunk)}".rstrip()
            expected = row[first : position + 1]
            if slots != expected:
                return f"{case}: start is right. Expected slots {expected}, got {slots}. {_ends(slots, expected)}"
    return ""


def _why(start: float, position: int, window: int | None, chunk: int | None) -> str:
    """Say what a wrong first position looks like."""
    by_window = None if window is None else Sight(window=window).first(position)
    by_chunk = None if chunk is None else Sight(chunk=chunk).first(position)
    if start < 0:
        return "A request shorter than its window begins at 0, and a slice from a negative number counts from its end."
    if by_window is not None and by_chunk is not None and start == min(by_window, by_chunk):
        return "A key must be within both limits, so the later of the two beginnings counts."
    if window is not None and start == position - window:
        return f"A window of {window} counts the query's own key: {window - 1} come before it."
    if by_chunk is not None and chunk is not None and start == max(0, position - chunk + 1):
        return f"That is a window of {chunk}. A chunk begins at a multiple of {chunk}, wherever in it the query stands."
    if window is None and start == 0:
        return f"The chunk hides keys, too: it begins at a multiple of {chunk}."
    return ""


def _ends(slots: Any, expected: list[int]) -> str:
    if slots == expected[:-1]:
        return "The query's own key is one of those that it sees."
    if slots[: len(expected)] == expected:
        return "What stands behind the query is not seen."
    return "The slot of position p is slots[p]."
