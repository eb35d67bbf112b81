"""The index lists that planning is made of: torch and Triton, held to plain Python and so to each other.

Integers are compared exactly; whatever lies behind a list's end must not be read, and stays the sink.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlab.assets import data_path
from attnlab.eager.index import EagerPlanOps
from attnlab.kernels.index import TritonPlanOps
from attnlab.memory.pool import Translation
from attnlab.plan.index import KVIndex
from attnlab.plan.ops import PlanOps
from attnlab.spec import Sight
from tests.strategies import DEVICE

OPS: dict[str, PlanOps] = {"eager": EagerPlanOps(), "triton": TritonPlanOps(torch.device(DEVICE))}
both_ops = pytest.mark.parametrize("ops", OPS)
GARBAGE = 10**9
"""What tails are filled with: as an address it would be far outside of everything."""


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def offsets(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


@both_ops
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(requests=st.lists(st.tuples(st.integers(-3, 8), st.integers(0, 99), st.integers(0, 99)), max_size=6))
def test_requests_in_no_row_of_the_table_become_padding(
    ops: str, dtype: torch.dtype, requests: list[tuple[int, int, int]]
) -> None:
    rows, cached, new = (ints([r[i] for r in requests], dtype if i == 0 else torch.int32) for i in range(3))
    before = [x.clone() for x in (rows, cached, new)]
    made = OPS[ops].pad(rows, [cached, new], max_requests=5)
    inside = [0 <= row < 5 for row, *_ in requests]
    assert made[0].tolist() == [row for row, *_ in requests]
    assert made[1].tolist() == [n * live for (_, n, _), live in zip(requests, inside, strict=True)]
    assert made[2].tolist() == [n * live for (*_, n), live in zip(requests, inside, strict=True)]
    alone = OPS[ops].pad(rows, [cached], max_requests=5)
    assert [x.tolist() for x in alone] == [x.tolist() for x in made[:2]]
    wide = torch.stack([cached, new], 1)
    assert OPS[ops].pad(rows, [wide[:, 0], wide[:, 1]], max_requests=5)[1].tolist() == made[1].tolist()
    given = (rows, cached, new)
    for x, was, copy in zip(given, before, made, strict=True):
        assert torch.equal(x, was), "what was given is another's"
        assert copy.dtype == x.dtype
        assert not x.numel() or copy.data_ptr() != x.data_ptr()


spans = st.none() | st.integers(1, 40)


@both_ops
@given(
    requests=st.lists(st.tuples(st.integers(-1, 200), st.integers(0, 40)), max_size=6),
    window=spans,
    chunk=spans,
    align=st.sampled_from([1, 2, 128]),
)
def test_extent_begins_with_what_the_query_sees(
    ops: str, requests: list[tuple[int, int]], window: int | None, chunk: int | None, align: int
) -> None:
    ends = [max(0, query + ahead) for query, ahead in requests]
    extent = OPS[ops].extent(
        query=ints([query for query, _ in requests]),
        end=ints(ends),
        sight=Sight(window=window, chunk=chunk),
        align=align,
        capacity=10_000,
    )
    starts, visible = [], []
    for (query, _), end in zip(requests, ends, strict=True):
        seen = [k for k in range(end) if window is None or k > query - window]
        seen = [k for k in seen if chunk is None or query < 0 or k >= query - query % chunk]
        visible.append(seen[0] if seen else end)
        starts.append(visible[-1] - visible[-1] % align if seen else end)
    assert extent.start_visible.tolist() == (visible if align > 1 else starts)
    assert extent.start.tolist() == starts
    assert extent.indptr.tolist() == offsets([end - start for end, start in zip(ends, starts, strict=True)])
    assert extent.indptr.dtype == extent.start.dtype == torch.int32


@both_ops
@pytest.mark.parametrize("reqs", [0, 1, 511, 512, 513, 2000])
def test_extent_carries_its_sum_over_any_number_of_requests(ops: str, reqs: int) -> None:
    end = torch.arange(reqs, dtype=torch.int32, device=DEVICE)
    extent = OPS[ops].extent(query=end, end=end, sight=Sight(), align=1, capacity=2**31 - 1)
    assert extent.indptr.tolist() == offsets(list(range(reqs)))


@both_ops
def test_extent_is_held_to_its_capacity_also_where_the_sum_leaves_32_bits(ops: str) -> None:
    end = ints([2**30, 2**30, 2**30])
    extent = OPS[ops].extent(query=end, end=end, sight=Sight(), align=1, capacity=2**30 + 5)
    assert extent.indptr.tolist() == [0, 2**30, 2**30 + 5, 2**30 + 5]


@both_ops
def test_gather_repeats_the_first_key_in_front_of_it(ops: str) -> None:
    table = torch.arange(100, 300, dtype=torch.int32, device=DEVICE).view(1, 200)
    ids = OPS[ops].gather(
        table=table, rows=ints([0]), start=ints([128]), first=ints([131]), indptr=ints([0, 5]), capacity=6
    )
    assert ids.tolist() == [231, 231, 231, 231, 232, 0]


@both_ops
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 30), st.integers(0, 2)), max_size=5
    ),
    ranks=st.integers(1, 5),
    data=st.data(),
    tail=st.integers(0, 3),
)
def test_a_shard_holds_its_ranks_positions_and_touches_nothing_else(
    ops: str, requests: list[tuple[int, int, int, int]], ranks: int, data: st.DataObject, tail: int
) -> None:
    """Lists of one rank, with gaps between them: slots of the whole pool become places in the rank's own storage."""
    rank = data.draw(st.integers(0, ranks - 1))
    table = [[(7 * row + 3 * column) * ranks + column % ranks for column in range(70)] for row in range(4)]
    wanted, firsts, lens, starts = [], [], [], []
    for row, start, length, gap in requests:
        mine = [p for p in range(start, start + length) if p % ranks == rank]
        starts.append(len(wanted))
        firsts.append(start + (rank - start) % ranks)
        lens.append(len(mine))
        wanted += [table[row][p] // ranks for p in mine] + [-5] * gap
    ids = ints([-5] * (len(wanted) + tail), torch.int64)
    OPS[ops].gather_shard(
        ids,
        table=ints(table),
        rows=ints([row for row, *_ in requests]),
        first=ints(firsts),
        lens=ints(lens),
        starts=ints(starts),
        ranks=ranks,
    )
    assert ids.tolist() == wanted + [-5] * tail


@both_ops
def test_a_shard_is_read_inside_the_table_and_written_inside_the_list(ops: str) -> None:
    table = torch.arange(100, 110, dtype=torch.int32, device=DEVICE).view(1, 10)
    fenced = ints([-5] * 6, torch.int64)
    OPS[ops].gather_shard(
        fenced[:4], table=table, rows=ints([0]), first=ints([8]), lens=ints([6]), starts=ints([0]), ranks=1
    )
    assert fenced.tolist() == [108, 109, 0, 0, -5, -5]


@both_ops
def test_a_shards_lists_may_lie_in_any_order(ops: str) -> None:
    """Request 1 has nothing, where request 2 begins."""
    table, ids = torch.arange(100, 110, dtype=torch.int32, device=DEVICE).view(1, 10), ints([-5] * 8, torch.int64)
    starts, lens = ints([5, 0, 0, 3]), ints([2, 0, 2, 1])
    OPS[ops].gather_shard(
        ids, table=table, rows=ints([0, 0, 0, 0]), first=ints([0, 1, 2, 3]), lens=lens, starts=starts, ranks=1
    )
    assert ids.tolist() == [102, 103, -5, 103, -5, 100, 101, -5]


@both_ops
def test_a_shard_has_no_entry_in_front_of_its_list(ops: str) -> None:
    table = torch.arange(100, 110, dtype=torch.int32, device=DEVICE).view(1, 10)
    fenced = ints([-5] * 6, torch.int64)
    OPS[ops].gather_shard(
        fenced[3:], table=table, rows=ints([0]), first=ints([-1]), lens=ints([4]), starts=ints([-2]), ranks=1
    )
    assert fenced.tolist() == [-5, -5, -5, 101, 102, -5]


@both_ops
@given(
    lists=st.lists(
        st.tuples(st.lists(st.integers(1, 99), max_size=5), st.lists(st.integers(1, 99), max_size=5)), max_size=5
    ),
    tail=st.integers(0, 3),
)
def test_join_puts_each_requests_lists_together(ops: str, lists: list[tuple[list[int], list[int]]], tail: int) -> None:
    first, second = ([slot for pair in lists for slot in pair[side]] for side in (0, 1))
    joined, indptr = OPS[ops].join(
        first=ints(first + [GARBAGE] * tail, torch.int64),
        first_indptr=ints(offsets([len(a) for a, _ in lists])),
        second=ints(second + [GARBAGE] * tail, torch.int64),
        second_indptr=ints(offsets([len(b) for _, b in lists])),
    )
    assert joined.tolist() == [slot for a, b in lists for slot in a + b] + [0] * (2 * tail)
    assert indptr.tolist() == offsets([len(a) + len(b) for a, b in lists])
    assert (joined.dtype, indptr.dtype) == (torch.int64, torch.int32)


@both_ops
@pytest.mark.parametrize("name", ["unified_causal", "unified_custom_mask", "unified_xai"])
def test_join_gives_the_originals_unified_list(ops: str, name: str) -> None:
    with np.load(data_path(f"golden/original/{name}.npz")) as file:
        golden = {key: torch.from_numpy(file[key]).to(DEVICE) for key in file.files}
    reqs = golden["prefix_lens"].shape[0]
    start, lens = golden["extend_start_loc"][:reqs], golden["extend_seq_lens"][:reqs]
    assert torch.equal(start.long(), torch.nn.functional.pad(lens.long().cumsum(0), (1, 0))[:-1])
    joined, indptr = OPS[ops].join(
        first=golden["prefix_kv_indices"],
        first_indptr=golden["prefix_kv_indptr"][: reqs + 1].int(),
        second=golden["extend_kv_indices"],
        second_indptr=torch.nn.functional.pad(lens.long().cumsum(0), (1, 0)).int(),
    )
    live = int(indptr[-1])
    assert indptr.tolist() == golden["unified_kv_indptr"].tolist()
    assert joined[:live].tolist() == golden["unified_kv_indices"][:live].tolist()


@both_ops
@given(
    page_size=st.sampled_from([1, 2, 16, 64]),
    layers=st.integers(1, 3),
    pages=st.lists(st.integers(-1, 50), max_size=8),
    data=st.data(),
    tail=st.integers(0, 3),
)
def test_translate_follows_the_page_table(
    ops: str, page_size: int, layers: int, pages: list[int], data: st.DataObject, tail: int
) -> None:
    """B33, B35: each live id once, through the table; what has no page is the sink."""
    table = [0, *pages]
    ids = data.draw(st.lists(st.integers(0, len(table) * page_size - 1), max_size=20))
    translation = Translation(
        source="virtual",
        target="dense",
        pages=ints(table, torch.int64),
        page_size=page_size,
        stride=page_size * layers,
    )
    translated = OPS[ops].translate(ints(ids + [GARBAGE] * tail, torch.int64), ints([0, len(ids)]), translation)
    pages_of = [table[i // page_size] for i in ids]
    wanted = [
        0 if page < 0 else page * page_size * layers + i % page_size for i, page in zip(ids, pages_of, strict=True)
    ]
    assert translated.tolist() == wanted + [0] * tail


@both_ops
def test_an_id_that_is_none_of_the_tables_becomes_the_sink(ops: str) -> None:
    translation = Translation(source="full", target="sliding", pages=ints([0, 3], torch.int64), page_size=2, stride=2)
    ids = ints([-1, 3, 4, GARBAGE], torch.int64)
    assert OPS[ops].translate(ids, ints([0, 4]), translation).tolist() == [0, 7, 0, 0]


def test_a_second_translation_is_an_error() -> None:
    translation = Translation(source="full", target="sliding", pages=ints([0, 3], torch.int64), page_size=2, stride=2)
    index = KVIndex(indptr=ints([0, 1]), slots=ints([3], torch.int64), space="full")
    once = index.translated(translation, EagerPlanOps().translate)
    assert (once.slots.tolist(), once.space) == ([7], "sliding")
    with pytest.raises(ValueError, match="1 lists are in id space 'sliding', the translation is from 'full'"):
        once.translated(translation, EagerPlanOps().translate)


@both_ops
@given(rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_mask_offsets_are_sums_of_new_by_keys(ops: str, rows: list[tuple[int, int]]) -> None:
    got = OPS[ops].mask_offsets(ints([n for n, _ in rows]), ints([k for _, k in rows]))
    assert got.tolist() == offsets([n * k for n, k in rows])
    assert got.dtype == torch.int64


@both_ops
def test_mask_offsets_do_not_stop_at_32_bits(ops: str) -> None:
    new, keys = ints([60_000] * 600), ints([60_000] * 600)
    assert OPS[ops].mask_offsets(new, keys)[-1].item() == 600 * 60_000**2


@both_ops
def test_lists_of_other_numbers_of_requests_are_not_joined(ops: str) -> None:
    one, two = ints([0, 1]), ints([0, 1, 2])
    with pytest.raises(
        ValueError, match="second_indptr: expected offsets of 1 requests like first_indptr, got those of 2"
    ):
        OPS[ops].join(first=ints([5]), first_indptr=one, second=ints([6, 7]), second_indptr=two)


@both_ops
def test_offsets_beyond_a_list_are_held_to_it(ops: str) -> None:
    joined, indptr = OPS[ops].join(
        first=ints([5, 6, 7]), first_indptr=ints([0, 5]), second=ints([8]), second_indptr=ints([0, 1])
    )
    assert (joined.tolist(), indptr.tolist()) == ([5, 6, 7, 8], [0, 4])
    joined, indptr = OPS[ops].join(
        first=ints([5, 6, 7]), first_indptr=ints([-4, 2]), second=ints([8]), second_indptr=ints([-1, 9])
    )
    assert (joined.tolist(), indptr.tolist()) == ([5, 6, 8, 0], [0, 3])


@both_ops
def test_joined_lists_need_not_begin_with_the_first_entry(ops: str) -> None:
    joined, indptr = OPS[ops].join(
        first=ints([5, 6, 7]), first_indptr=ints([1, 2, 3]), second=ints([8, 9, 10]), second_indptr=ints([1, 1, 3])
    )
    assert (joined.tolist(), indptr.tolist()) == ([6, 7, 9, 10, 0, 0], [0, 1, 4])


@both_ops
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_are_the_same_are_given_back_up_to_the_lists_end(ops: str, dtype: torch.dtype) -> None:
    same = Translation.same("pool", page_size=2)
    translated = OPS[ops].translate(ints([5, 6, 9, 9], dtype), ints([0, 2]), same)
    assert translated.tolist() == [5, 6, 0, 0] and translated.dtype == torch.int64
