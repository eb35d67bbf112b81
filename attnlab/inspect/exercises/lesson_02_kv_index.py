"""Lesson 02: the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlab.inspect.exercises.registry import as_tensor, ask, exercise, several, whole_numbers
from attnlab.inspect.exercises.toy import toy
from attnlab.plan.index import KVIndex

ENTRY = 100
"""The entry that 02-1 asks for."""


@exercise("02-1", Sequence, "a pair (request, position)")
def owner_of_entry(answer: Any) -> str:
    """The request whose list the entry is in, and where in that list."""
    indptr = toy().plan().lane(0).layout.index.indptr.tolist()
    request = max(r for r, start in enumerate(indptr[:-1]) if start <= ENTRY)
    expected = [request, ENTRY - indptr[request]]
    if len(answer) != 2:
        return f"Expected a pair (request, position), got {answer!r}."
    got = whole_numbers(answer)
    if got == expected[::-1]:
        return "Both are right, but the request comes first."
    if got[0] != expected[0]:
        return "Not that request. The lists begin at the sums of the lengths before: 0, 5, ..."
    return "" if got[1] == expected[1] else "The request is right. Count the position from where its list begins."


@exercise("02-2", KVIndex)
def index_of_two(answer: Any) -> str:
    """The index of requests 2 and 0."""
    bench = toy()
    lists = [bench.table.slots_of(bench.table.rows[r]).tolist() for r in (2, 0)]
    if answer.reqs != 2:
        return f"It holds {answer.reqs} requests; two need an indptr of three entries."
    expected = [0, len(lists[0]), len(lists[0]) + len(lists[1])]
    indptr = answer.indptr.tolist()
    if indptr == [0, len(lists[1]), expected[-1]]:
        return "Request 2 comes first, then request 0: it is the other way round."
    if indptr != expected:
        return f"indptr is {indptr}. Request 2 comes first, with {expected[1]} slots."
    got = answer.slots[: expected[-1]].tolist()
    return "" if got == lists[0] + lists[1] else "indptr is right, the slots are not: are they those of 2, then of 0?"


@exercise("02-3", Callable)
def gather(answer: Any) -> str:
    """The lists of a batch, out of a table of random slots."""
    generator = torch.Generator().manual_seed(0)
    for rows, lens in (([0, 1], [3, 2]), ([2, 0, 1], [4, 0, 7]), ([1], [8]), ([0, 2], [0, 0])):
        table = torch.randint(1, 500, (3, 8), generator=generator, dtype=torch.int32)
        case = f"With rows {rows} and lens {lens}"
        got = several(case, ask(case, answer, table, torch.tensor(rows), torch.tensor(lens)), ("indptr", "slots"))
        indptr, slots = (as_tensor(case, x).tolist() for x in got)
        offsets = torch.tensor([0, *lens]).cumsum(0).tolist()
        if indptr != offsets:
            first = (
                " It begins with 0, and has one entry more than there are requests." if indptr == offsets[1:] else ""
            )
            return f"{case}: expected indptr {offsets}, got {indptr}.{first}"
        expected = [slot for row, n in zip(rows, lens, strict=True) for slot in table[row, :n].tolist()]
        if slots == expected:
            continue
        in_order = [slot for row, n in enumerate(lens) for slot in table[row, :n].tolist()]
        hint = " Those are rows 0, 1, ... of the table: request i is in row rows[i]." if slots == in_order else ""
        return f"{case}: indptr is right. Expected slots {expected}, got {slots}.{hint}"
    return ""
