"""The lists of multi-step drafting: torch and Triton, held to plain Python, to the original, and so to each other.

Integers are compared exactly; whatever lies behind a list's end must not be read, and stays the sink.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.assets import data_path
from attnlab.memory.pool import Translation
from attnlab.plan.draft import branch_stride
from attnlab.plan.layout import DraftLists
from attnlab.spec import Sight
from tests.contracts.test_plan_ops import OPS, both_ops, ints, spans
from tests.strategies import DEVICE, lengths

COLUMNS = 700
ALL = Sight()
SAME = Translation.same("pool", page_size=1)


def offsets(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


def drafted(
    ops: str,
    cached: list[int],
    stride: list[int],
    *,
    topk: int,
    steps: int,
    sight: Sight = ALL,
    translation: Translation = SAME,
    capacity: int | None = None,
) -> DraftLists:
    """The lists of requests in reverse order of rows, where row r of the table holds `1000 r + 1`, `1000 r + 2`, ..."""
    reqs = len(cached)
    table = torch.arange(COLUMNS, dtype=torch.int32, device=DEVICE) + 1000 * torch.arange(
        reqs, dtype=torch.int32, device=DEVICE
    ).view(-1, 1)
    return OPS[ops].drafts(
        table=table + 1,
        rows=ints(list(reversed(range(reqs))), torch.int64),
        cached=ints(cached),
        stride=ints(stride),
        topk=topk,
        steps=steps,
        sight=sight,
        translation=translation,
        capacity=sum(cached) * topk + len(cached) * topk * steps if capacity is None else capacity,
    )


@both_ops
@given(
    requests=st.lists(st.tuples(lengths(513), st.integers(2, 9)), max_size=4),
    topk=st.integers(1, 3),
    steps=st.integers(0, 3),
    window=spans,
    chunk=spans,
)
@settings(max_examples=20)
def test_each_branch_sees_the_cached_tokens_and_its_own_drafts(
    ops: str, requests: list[tuple[int, int]], topk: int, steps: int, window: int | None, chunk: int | None
) -> None:
    cached, stride = [n for n, _ in requests], [steps * s for _, s in requests]
    lists = drafted(ops, cached, stride, topk=topk, steps=steps, sight=Sight(window=window, chunk=chunk))
    assert (lists.indptr.dtype, lists.start.dtype) == (torch.int32, torch.int32)
    assert (lists.slots.dtype, lists.write.dtype) == (torch.int64, torch.int64)
    for step in range(steps):
        wanted: list[list[int]] = []
        starts, newest = [], []
        for r, (n, gap) in enumerate(zip(cached, stride, strict=True)):
            row = 1000 * (len(cached) - 1 - r) + 1
            for t in range(topk):
                columns = list(range(n)) + [n + t * gap + j for j in range(step + 1)] if n else []
                seen = [p for p in range(len(columns)) if window is None or p > len(columns) - 1 - window]
                seen = [p for p in seen if chunk is None or p // chunk == (len(columns) - 1) // chunk]
                wanted.append([row + columns[p] for p in seen])
                starts.append(seen[0] if seen else 0)
                newest.append(row + columns[-1] if n else 0)
        ends = offsets([len(mine) for mine in wanted])
        assert lists.indptr[step].tolist() == ends
        assert lists.slots[step, : ends[-1]].tolist() == [slot for mine in wanted for slot in mine]
        assert not lists.slots[step, ends[-1] :].any()
        assert lists.start[step].tolist() == starts
        assert lists.write[step].tolist() == newest


@both_ops
@pytest.mark.parametrize("name", ["topk4_steps3_page1", "topk4_steps3_page4", "topk1_steps3_page4"])
def test_the_originals_lists_come_out(ops: str, name: str) -> None:
    with np.load(data_path(f"golden/original/draft_{name}.npz")) as file:
        golden = {key: torch.from_numpy(file[key]).to(DEVICE) for key in file.files}
    topk, steps, page = (int(golden[key]) for key in ("topk", "num_steps", "page_size"))
    seq = golden["seq_lens"].int()
    lists = OPS[ops].drafts(
        table=golden["req_to_token"],
        rows=golden["req_pool_indices"],
        cached=seq,
        stride=branch_stride(seq, steps=steps, page_size=page),
        topk=topk,
        steps=steps,
        sight=Sight(),
        translation=Translation.same("pool", page_size=page),
        capacity=golden["kv_indices"].shape[1],
    )
    assert torch.equal(lists.indptr, golden["kv_indptr"][:, : seq.shape[0] * topk + 1])
    for mine, theirs, used in zip(lists.slots, golden["kv_indices"], golden["used_len"].tolist(), strict=True):
        assert torch.equal(mine[:used], theirs[:used]) and not mine[used:].any()


@both_ops
def test_a_draft_list_is_translated_once(ops: str) -> None:
    """B33: ids of the storage, cached tokens and drafts alike; what has no page is the sink."""
    pages = ints([0, 5, -1, 2, 7, 1], torch.int64)
    translation = Translation(source="full", target="sliding", pages=pages, page_size=2, stride=6)
    lists = drafted(ops, [4], [4], topk=2, steps=2, translation=translation)
    # The row holds ids 1, 2, 3, ...; page 2, ids 4 and 5, has gone, pages from 6 on were never there.
    assert lists.slots[0, :10].tolist() == [1, 30, 31, 0, 0, 1, 30, 31, 0, 43]
    assert lists.slots[1, :12].tolist() == [1, 30, 31, 0, 0, 12, 1, 30, 31, 0, 43, 6]
    assert lists.write.tolist() == [[0, 43], [12, 6]]


@both_ops
def test_no_branch_sees_a_siblings_drafts(ops: str) -> None:
    lists = drafted(ops, [3], [10], topk=3, steps=4)
    for step in range(4):
        for branch, (a, b) in enumerate(zip(lists.indptr[step, :-1], lists.indptr[step, 1:], strict=True)):
            drafts = lists.slots[step, a:b].tolist()[3:]
            assert drafts == [4 + 10 * branch + i for i in range(step + 1)]


@both_ops
def test_lists_are_held_to_their_capacity_and_writes_are_not(ops: str) -> None:
    lists = drafted(ops, [9, 3], [2, 2], topk=2, steps=2, capacity=13)
    assert lists.indptr.tolist() == [[0, 10, 13, 13, 13], [0, 11, 13, 13, 13]]
    assert lists.slots.shape == (2, 13)
    assert lists.write.tolist() == [[1010, 1012, 4, 6], [1011, 1013, 5, 7]]


@both_ops
def test_columns_beyond_the_table_are_the_sink(ops: str) -> None:
    lists = drafted(ops, [COLUMNS - 1], [1], topk=2, steps=2)
    assert lists.slots[0, COLUMNS - 2 : COLUMNS].tolist() == [COLUMNS - 1, COLUMNS]
    assert lists.write.tolist() == [[COLUMNS, 0], [0, 0]]


@both_ops
def test_offsets_do_not_stop_at_32_bits(ops: str) -> None:
    """The sum before a list may pass 2^31 where lengths break their promise; no entry is written then."""
    none = torch.zeros(1, COLUMNS, dtype=torch.int32, device=DEVICE)
    cached = ints([2**30] * 3)
    lists = OPS[ops].drafts(
        table=none,
        rows=ints([0, 0, 0], torch.int64),
        cached=cached,
        stride=ints([1, 1, 1]),
        topk=2,
        steps=1,
        sight=Sight(),
        translation=SAME,
        capacity=5,
    )
    assert lists.indptr.tolist() == [[0, 5, 5, 5, 5, 5, 5]]


@both_ops
@pytest.mark.parametrize("reqs", [511, 512, 513, 1100])
def test_offsets_are_carried_over_any_number_of_requests(ops: str, reqs: int) -> None:
    if ops == "triton":
        reqs = min(reqs, 513)  # a program a branch: the interpreter takes a while
    none = torch.zeros(1, COLUMNS, dtype=torch.int32, device=DEVICE)
    cached = torch.arange(reqs, dtype=torch.int32, device=DEVICE) % 3
    lists = OPS[ops].drafts(
        table=none,
        rows=torch.zeros(reqs, dtype=torch.int64, device=DEVICE),
        cached=cached,
        stride=torch.ones_like(cached),
        topk=1,
        steps=1,
        sight=Sight(),
        translation=SAME,
        capacity=3 * reqs,
    )
    assert lists.indptr[0].tolist() == offsets([n + 1 if n else 0 for n in cached.tolist()])


@both_ops
@pytest.mark.parametrize(("branches", "capacity"), [(1, 1), (3, 5), (4, 8), (7, 13)])
def test_every_steps_row_begins_at_16_bytes(ops: str, branches: int, capacity: int) -> None:
    lists = DraftLists.zeros(steps=3, branches=branches, capacity=capacity, device=torch.device(DEVICE))
    for block in (lists.start, lists.indptr, lists.slots, lists.write):
        assert all(row.data_ptr() % 16 == 0 and row.is_contiguous() for row in block)
