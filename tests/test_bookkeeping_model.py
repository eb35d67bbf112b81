"""The model of bookkeeping itself, pinned by numbers worked out by hand in the specification or here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bookkeeping import (
    Book,
    Pool,
    Refused,
    Sight,
    SlidOut,
    Storage,
    chain,
    cumulative,
    decode,
    draft_ranges,
    even_range,
    extend,
    mla_max_splits,
    seed_counts,
    seed_ranges,
    static_ranges,
    tile_ranges,
    tree,
)

FULL = Sight()
GOLDEN = Path(__file__).parent.parent / "data/golden/original/num_kv_splits.json"


def book(*layers: Sight, pool: Pool = "plain", page_size: int = 1, table_slots: int = 64, **sizes: Any) -> Book:
    """A small book; sizes that a test does not care about are large enough."""
    limits = {"max_requests": 4, "max_context": 512} | sizes
    return Book(layers=layers or (FULL,), pool=pool, page_size=page_size, table_slots=table_slots, **limits)


def holding(at: Book, *lens: int) -> list[int]:
    """Rows of these lengths."""
    rows = [at.admit() for _ in lens]
    for row, n in zip(rows, lens, strict=True):
        at.append(row, n)
    return rows


def positions(at: Book, batch: Any, request: int, query: int) -> list[list[int]]:
    """What a query reads, by layer: positions alone."""
    return [[read.position for read in reads] for reads in at.explain(batch, request, query)]


def covered(sight: Sight, n: int) -> tuple[int, int, int]:
    """First, last and number of the keys of a decode at length n in a plain pool of page size 1."""
    at = book(sight, table_slots=n + 1, max_context=n)
    rows = holding(at, n)
    lists = at.lists(decode(rows, [n]), 0)
    keys = [read.position for read in at.explain(decode(rows, [n]), 0, 0)[0]]
    assert lists.start == lists.start_visible == keys[:1]
    assert lists.flat == [position + 1 for position in keys]  # slots are 1, 2, ...
    return keys[0], keys[-1], len(keys)


# --- drafts: kernels 6.5 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["topk4_steps3_page1", "topk4_steps3_page4", "topk1_steps3_page4"])
def test_drafts_lie_where_the_original_looks_for_them(name: str) -> None:
    with np.load(GOLDEN.parent / f"draft_{name}.npz") as file:
        golden = {key: file[key].tolist() for key in file.files}
    topk, steps = golden["topk"], golden["num_steps"]
    at = book(page_size=golden["page_size"], table_slots=64 * golden["page_size"])
    for step, (offsets, slots) in enumerate(zip(golden["kv_indptr"], golden["kv_indices"], strict=True)):
        for r, (row, cached) in enumerate(zip(golden["req_pool_indices"], golden["seq_lens"], strict=True)):
            for t in range(topk):
                own = [at.draft_column(cached, t, i, topk=topk, steps=steps) for i in range(step + 1)]
                wanted = [golden["req_to_token"][row][column] for column in [*range(cached), *own]]
                branch = r * topk + t
                assert slots[offsets[branch] : offsets[branch + 1]] == wanted


def test_a_branch_sees_the_window_before_its_draft_and_no_sibling() -> None:
    at = book(FULL, Sight(window=3), page_size=4)
    (row,) = holding(at, 5 + 7)
    # Pages 1 to 3, slots 4 to 15: cached 4 to 8, branch 0 at 9 to 11, branch 1 in a page of its own, at 13 to 15.
    full, sliding = (at.draft_lists([row], [5], layer, topk=2, steps=3) for layer in (0, 1))
    assert at.draft_room(5, topk=2, steps=3) == 7
    assert full[1].ids == [[4, 5, 6, 7, 8, 9, 10], [4, 5, 6, 7, 8, 13, 14]]
    assert sliding[1].ids == [[8, 9, 10], [8, 13, 14]] and sliding[1].start == [4, 4]
    assert [lists.write_ids for lists in full] == [[9, 13], [10, 14]]


def test_ranges_of_drafts_are_those_of_the_cached_tokens_until_there_are_too_many() -> None:
    assert draft_ranges([[33, 5], [34, 6]], [32, 32], 2) == [
        [[(0, 32), (32, 33)], [(0, 5)]],
        [[(0, 32), (32, 34)], [(0, 6)]],
    ]
    assert draft_ranges([[64], [65]], [32], 2) == [[[(0, 64)]], [[(0, 64), (64, 65)]]]


# --- sight: pitfalls B ------------------------------------------------------------------------------------------


def test_b14_decode_keeps_the_oldest_key_in_the_window() -> None:
    assert covered(Sight(window=4096), 5000) == (904, 4999, 4096)
    assert covered(Sight(window=4), 6) == (2, 5, 4)


def test_b15_a_window_of_four_begins_three_before_the_query() -> None:
    at = book(Sight(window=4))
    [row] = holding(at, 6)
    assert positions(at, extend([row], [0], [6]), 0, 5) == [[2, 3, 4, 5]]
    assert positions(at, extend([row], [3], [3]), 0, 2) == [[2, 3, 4, 5]]
    assert at.lists(extend([row], [5], [1]), 0).ids == [[3, 4, 5]]  # the last min(prefix, w - 1) of the prefix


@pytest.mark.parametrize("flip", [False, True])
def test_b16_trees_are_windowed_by_depth(flip: bool) -> None:
    """Root, child A, child B behind a prefix of 8; a long request beside it, in both orders."""
    at = book(Sight(window=4), FULL, table_slots=128)
    rows = holding(at, 11, 90)
    prefix, parents = [8, 89], [[-1, 0, 0], [-1]]
    if flip:
        rows, prefix, parents = rows[::-1], prefix[::-1], parents[::-1]
    batch = tree(rows, prefix, parents)
    small = int(flip)
    assert batch.q_positions[batch.q_indptr[small] :][:3] == [8, 9, 9]
    assert positions(at, batch, small, 0) == [[5, 6, 7, 8], list(range(9))]
    assert positions(at, batch, small, 1) == [[6, 7, 8, 9], [*range(9), 9]]
    assert positions(at, batch, small, 2) == [[6, 7, 8, 9], [*range(9), 9]]
    assert [read.table_id for read in at.explain(batch, small, 2)[0]] == [7, 8, 9, 11]  # the root and B, not A
    lists = at.lists(batch, 0)
    assert (lists.ids[small], lists.start[small]) == ([6, 7, 8], 5)
    assert lists.write_ids[batch.q_indptr[small] :][:3] == [9, 10, 11]
    assert positions(at, batch, 1 - small, 0)[0] == [86, 87, 88, 89]
    assert batch.mask is not None
    assert batch.mask[batch.mask_indptr[small] :][:33] == [1] * 8 + [1, 0, 0] + [1] * 8 + [1, 1, 0] + [1] * 8 + [
        1,
        0,
        1,
    ]
    assert batch.mask_indptr == ([0, 33, 123] if not flip else [0, 90, 123])


def test_b19_window_one_is_self_only_and_a_wide_one_is_full() -> None:
    at = book(FULL, Sight(window=1), Sight(window=9), Sight(window=100))
    rows = holding(at, 9)
    full, one, wide, wider = (at.lists(decode(rows, [9]), layer) for layer in range(4))
    assert one.ids == [[9]] and one.start == [8]
    assert full == wide == wider
    after = at.lists(extend(rows, [4], [5]), 1)
    assert (after.ids, after.start, after.write_ids) == ([[]], [4], [5, 6, 7, 8, 9])
    assert positions(at, extend(rows, [4], [5]), 0, 2) == [list(range(7)), [6], list(range(7)), list(range(7))]
    for size in (0, -1):
        with pytest.raises(ValueError):
            Sight(window=size)


@pytest.mark.parametrize(("n", "first"), [(3, 0), (4, 0), (5, 1)])
def test_window_borders_agree_between_modes(n: int, first: int) -> None:
    """w = 4 at lengths w - 1, w, w + 1: decode, extend and verify of the last token see the same keys."""
    at = book(Sight(window=4))
    rows = holding(at, n)
    for batch in (
        decode(rows, [n]),
        extend(rows, [n - 1], [1]),
        chain(rows, [n - 1], [1]),
        tree(rows, [n - 1], [[-1]]),
    ):
        assert positions(at, batch, 0, 0) == [list(range(first, n))]


def test_chunks_begin_anew() -> None:
    at = book(Sight(chunk=4), Sight(window=3, chunk=4))
    rows = holding(at, 10)
    batch = extend(rows, [6], [4])
    assert [positions(at, batch, 0, query) for query in range(4)] == [
        [[4, 5, 6], [4, 5, 6]],
        [[4, 5, 6, 7], [5, 6, 7]],
        [[8], [8]],
        [[8, 9], [8, 9]],
    ]
    assert [at.lists(batch, layer).start for layer in range(2)] == [[4], [4]]
    assert at.lists(extend(rows, [8], [2]), 0).ids == [[]]
    assert at.lists(decode(rows, [8]), 0).ids == [[5, 6, 7, 8]]


def test_a_mask_alone_decides_but_for_sight() -> None:
    at = book(FULL, Sight(window=2), Sight(chunk=2))
    rows = holding(at, 4)
    batch = extend(rows, [2], [2], mask=[1, 0, 0, 1, 1, 1, 1, 0])
    assert positions(at, batch, 0, 0) == [[0, 3], [3], [3]]
    assert positions(at, batch, 0, 1) == [[0, 1, 2], [2], [2]]
    later = extend(rows, [1], [3], mask=[1, 1, 1, 1] * 3)  # the query at 1 is shown 2 and 3, which are another chunk's
    assert positions(at, later, 0, 0) == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    with pytest.raises(ValueError, match="8"):
        extend(rows, [2], [2], mask=[1] * 7)


# --- lists ------------------------------------------------------------------------------------------------------


def test_decode_of_empty_rows_and_of_none() -> None:
    at = book(FULL, Sight(window=2), page_size=2)
    rows = holding(at, 3, 0, 1)
    batch = decode(rows, [3, 0, 1])
    full, window = at.lists(batch, 0), at.lists(batch, 1)
    assert full.ids == [[2, 3, 4], [], [6]]
    assert (full.indptr, full.flat, full.write_ids) == ([0, 3, 3, 4], [2, 3, 4, 6], [4, 0, 6])
    assert (window.ids, window.start, window.indptr) == ([[3, 4], [], [6]], [1, 0, 0], [0, 2, 2, 3])
    assert at.explain(batch, 1, 0) == [[], []]
    nothing = at.lists(decode([], []), 0)
    assert (nothing.indptr, nothing.flat, nothing.start, nothing.write_ids) == ([0], [], [], [])


def test_extend_and_chain_offsets() -> None:
    batch = chain([0, 1], [5, 0], [2, 3])
    assert batch.q_indptr == [0, 2, 5]
    assert batch.q_positions == [5, 6, 0, 1, 2]
    assert batch.mask is None and batch.mask_indptr == [0, 14, 23]
    deep = tree([0], [0], [[-1, 0, 1, 1, 0]])
    assert deep.q_positions == [0, 1, 2, 2, 1]
    assert deep.mask == [1, 0, 0, 0, 0] + [1, 1, 0, 0, 0] + [1, 1, 1, 0, 0] + [1, 1, 0, 1, 0] + [1, 0, 0, 0, 1]
    for parents in ([0], [-1, 1], [-1, -1]):
        with pytest.raises(ValueError):
            tree([0], [0], [parents])


def test_one_pass_lists_begin_at_a_tile_border() -> None:
    """kernels.md 7.2: lists of 7 and 3 that start at 130 and 0 are padded by 2 and 0."""
    at = book(Sight(window=5), FULL, table_slots=256)
    rows = holding(at, 137, 3)
    batch = extend(rows, [134, 0], [3, 3])
    lists = at.lists(batch, 0, one_pass=True)
    assert lists.start_visible == [130, 0]
    assert lists.start == [128, 0]
    assert lists.ids == [[131, 131, *range(131, 138)], [138, 139, 140]]
    assert lists.indptr == [0, 9, 12]
    full = at.lists(batch, 1, one_pass=True)
    assert full.ids == [list(range(1, 138)), [138, 139, 140]]
    assert full.start == full.start_visible == [0, 0]
    assert at.lists(batch, 0).ids == [[131, 132, 133, 134], []]


# --- splits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "splits", "ranges"),
    [
        (33, 3, [(0, 32), (32, 33)]),
        (100, 3, [(0, 64), (64, 100)]),
        (257, 3, [(0, 96), (96, 192), (192, 257)]),
        (1, 3, [(0, 1)]),
        (0, 3, []),
        (257, 2, [(0, 160), (160, 257)]),
    ],
)
def test_even_ranges(length: int, splits: int, ranges: list[tuple[int, int]]) -> None:
    assert even_range(length, splits) == ranges


@pytest.mark.parametrize(
    ("length", "splits", "size", "effective"),
    [(4096, 98, 64, 64), (100, 8, 32, 4), (1000, 7, 160, 7), (4097, 8, 544, 8), (31, 8, 32, 1), (256, 29, 32, 8)],
)
def test_effective_splits(length: int, splits: int, size: int, effective: int) -> None:
    ranges = even_range(length, splits)
    assert (len(ranges), min(size, length)) == (effective, ranges[0][1])


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "max_splits", "group", "counts"),
    [
        ([256], 32, 8, 8, 1, [8]),
        ([10, 1000], 32, 8, 8, 1, [1, 8]),
        ([1000, 1249], 32, 8, 8, 1, [7, 8]),
        ([1000, 1250], 32, 8, 8, 1, [7, 8]),
        ([300] * 16 + [3000], 32, 8, 8, 1, [1] * 16 + [8]),
        ([500, 6000], 32, 8, 16, 4, [2] * 4 + [14] * 4),
        ([1, 4096], 32, 8, 64, 1, [1, 64]),
        ([4096], 128, 1, 256, 1, [98]),
        ([0, 0], 32, 8, 8, 2, [0] * 4),
        ([], 32, 8, 8, 1, []),
    ],
)
def test_seed_counts(
    lens: list[int], heads: int, kv_heads: int, max_splits: int, group: int, counts: list[int]
) -> None:
    got = seed_counts(lens, heads=heads, kv_heads=kv_heads, multiprocessors=132, max_splits=max_splits, group=group)
    assert got == counts


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["cases"], ids=lambda case: str(case["seq_lens"])[:30])
def test_seed_counts_are_those_of_the_original(case: dict[str, Any]) -> None:
    got = seed_counts(
        case["seq_lens"],
        heads=case["num_head"],
        kv_heads=case["num_kv_head"],
        multiprocessors=case["core_count"],
        max_splits=case["max_kv_splits"],
        group=case["num_group"],
    )
    if all(case["seq_lens"]):
        assert got == case["result"]


def test_a_batch_is_even_below_a_ratio_of_five_to_four() -> None:
    """kernels.md 5, step 2 is strict. One multiprocessor: 2 programs over a grid of 16 ask for one split alone."""
    one = {"heads": 8, "kv_heads": 8, "multiprocessors": 1, "max_splits": 8}
    assert seed_counts([400, 500], **one) == [2, 2]  # 4000 < 4000 is false: 2 splits by length, of 250
    assert seed_counts([401, 501], **one) == [1, 1]  # 4008 < 4010


def test_ranges_by_policy() -> None:
    assert seed_ranges([10, 0, 1000], heads=32, kv_heads=8, multiprocessors=132, max_splits=8) == [
        [(0, 10)],
        [],
        [(i, min(i + 128, 1000)) for i in range(0, 1000, 128)],
    ]
    assert static_ranges([257, 0], 2) == [[(0, 160), (160, 257)], []]
    assert tile_ranges([257, 0, 256]) == [[(0, 256), (256, 257)], [], [(0, 256)]]
    assert seed_counts([3, 0], heads=4, kv_heads=4, multiprocessors=None, max_splits=8) == [8, 0]


@pytest.mark.parametrize(("sms", "context", "most"), [(132, 131072, 256), (132, 1024, 32), (304, 131072, 512)])
def test_mla_raises_the_most_splits(sms: int, context: int, most: int) -> None:
    assert mla_max_splits(8, multiprocessors=sms, context=context) == most
    assert mla_max_splits(8, multiprocessors=None, context=context) == 8


def test_partial_layers_are_split_by_their_own_lengths() -> None:
    at = book(FULL, Sight(window=40), table_slots=512)
    rows = holding(at, 300)
    full, window = (at.lists(decode(rows, [300]), layer).lens for layer in range(2))
    assert static_ranges(full, 8)[0][-1] == (256, 300)
    assert static_ranges(window, 8) == [[(0, 32), (32, 40)]]


# --- slots and rows ---------------------------------------------------------------------------------------------


def test_pages_are_filled_before_the_lowest_free_one_is_taken() -> None:
    at = book(page_size=4, table_slots=24)
    a, b = at.admit(), at.admit()
    assert (a, b) == (0, 1)
    assert at.append(a, 3) == [4, 5, 6]
    assert at.append(b, 5) == [8, 9, 10, 11, 12]
    assert at.append(a, 2) == [7, 16]
    at.release(b)
    assert at.admit() == 1
    assert at.append(a, 4) == [17, 18, 19, 8]
    at.check()


def test_what_is_refused_changes_nothing() -> None:
    at = book(FULL, Sight(window=2), pool="window", page_size=2, table_slots=20, sliding_slots=8, max_context=16)
    [row] = holding(at, 5)
    for tokens, space in ((12, "context"), (2, "sliding")):
        with pytest.raises(Refused) as refused:
            at.append(row, tokens)
        assert (refused.value.space, at.length(row), at.epoch) == (space, 5, 0)
        at.check()
    assert at.append(row, 1) == [7]


def test_truncate_gives_back_whole_pages_in_every_space() -> None:
    at = book(FULL, Sight(window=2), pool="window", page_size=4, table_slots=32, sliding_slots=32)
    [row] = holding(at, 12)
    at.truncate(row, 12)
    assert at.epoch == 0
    at.truncate(row, 11)
    assert (at.epoch, at.free_pages[0], at.storages["sliding"].free[0]) == (1, 4, 4)
    at.truncate(row, 4)
    assert (at.epoch, at.free_pages[0], at.storages["sliding"].free[0]) == (2, 2, 2)
    with pytest.raises(ValueError):
        at.truncate(row, 5)


def test_accept_moves_a_path_to_the_front() -> None:
    """Drafts 0..4 at positions 6..10, slots 10.. of pages of 4; the path 0, 2, 3 ends at positions 6, 7, 8."""
    at = book(page_size=4)
    [row] = holding(at, 11)
    assert at.accept(row, prefix=6, path=[0, 2, 3]) == [(12, 11), (13, 12)]
    assert (at.length(row), at.epoch) == (9, 1)
    assert at.accept(row, prefix=6, path=[0, 1, 2]) == []
    assert at.epoch == 1
    for path in ([1], [0, 0], [0, 2, 1], [0, 3]):
        with pytest.raises(ValueError):
            at.accept(row, prefix=6, path=path)
    assert at.accept(row, prefix=6, path=[]) == []
    assert at.length(row) == 6
    at.check()


# --- storages ---------------------------------------------------------------------------------------------------


def test_b33_every_layer_gets_ids_of_its_own_space() -> None:
    """Full pool 1000, sliding pool 100: new tokens at full slots 700.. lie at sliding slots 10.."""
    at = book(FULL, Sight(window=10), pool="window", table_slots=1000, sliding_slots=100, max_context=1000)
    a = at.admit()
    for _ in range(699):
        at.append(a, 1)
        at.slide_out(a, query=at.length(a))
    at.compact()
    b = at.admit()
    assert at.append(b, 5) == [700, 701, 702, 703, 704]
    assert at.lists(extend([b], [0], [5]), 0).write_ids == [700, 701, 702, 703, 704]
    assert at.lists(extend([b], [0], [5]), 1).write_ids == [10, 11, 12, 13, 14]
    one = at.lists(extend([b], [3], [2]), 1, one_pass=True)
    assert one.ids == [[10, 11, 12, 13, 14]]
    assert [read[1:] for read in at.explain(decode([b], [5]), 0, 0)[1]] == [(700 + i, 10 + i) for i in range(5)]
    assert at.kept_from(a, "sliding") == 690
    at.check()


def test_b35_virtual_ids_outlive_compaction() -> None:
    at = book(pool="unified", table_slots=16, full_slots=16)
    a, b = holding(at, 4, 4)
    assert at.lists(decode([b], [4]), 0).ids == [[5, 6, 7, 8]]
    at.release(a)
    epoch = at.epoch
    assert at.compact() == {"full": [(8, 1), (7, 2), (6, 3), (5, 4)]}
    assert at.epoch == epoch + 1
    assert at.lists(decode([b], [4]), 0).ids == [[4, 3, 2, 1]]
    assert [at.table_id(b, i) for i in range(4)] == [5, 6, 7, 8]
    assert at.storages["full"].pages(at.table_pages) == [0, -1, -1, -1, -1, 4, 3, 2, 1, *[-1] * 7]
    assert at.compact() == {"full": []} and at.epoch == epoch + 1
    assert [at.translate(0, i) for i in (0, 1, 5)] == [0, 0, 4]
    at.check()


def test_compaction_stops_where_pages_meet() -> None:
    storage = Storage(name="s", pages=8, stride=4)
    for page in (1, 2, 3, 4, 5):
        storage.take(page)
    storage.give(2)
    storage.give(4)
    assert storage.compact() == [(5, 2)]
    assert (storage.page_of, storage.free) == ({1: 1, 3: 3, 5: 2}, [4, 5, 6, 7])


def test_dense_ids_step_over_the_pages_of_the_other_layers() -> None:
    """kernels.md 6.8: page x (page size x layers) + offset; three layers, pages of 2, physical pages 2 and 1."""
    at = book(FULL, FULL, FULL, pool="unified mla", page_size=2, table_slots=64, full_slots=16)
    a, b = holding(at, 2, 4)
    at.release(a)
    at.compact()
    assert [at.table_id(b, i) for i in range(4)] == [4, 5, 6, 7]
    assert at.storages["full"].page_of == {2: 2, 3: 1}
    assert at.lists(decode([b], [4]), 1).ids == [[12, 13, 6, 7]]
    lone = book(pool="unified mla", page_size=2, full_slots=16)
    assert lone.lists(decode(holding(lone, 3), [3]), 0).ids == [[2, 3, 4]]


def test_the_composite_gives_each_kind_its_own_pages() -> None:
    sizes = {"table_slots": 64, "full_slots": 16, "sliding_slots": 8}
    at = book(FULL, Sight(window=3), Sight(window=1), pool="unified", page_size=2, **sizes)
    a = holding(at, 6)[0]
    assert at.slide_out(a, query=6) == [1, 2]  # window 3 at 6 sees 4, 5, 6; window 1 alone would let go of page 3
    assert at.storages["sliding"].pages(5) == [0, -1, -1, 3, -1]
    assert at.storages["full"].pages(5) == [0, 1, 2, 3, -1]
    assert at.append(a, 1) == [8]
    batch = decode([a], [7])
    assert [at.lists(batch, layer).ids for layer in range(3)] == [[[2, 3, 4, 5, 6, 7, 8]], [[6, 7, 2]], [[2]]]
    dense = book(FULL, Sight(window=3), Sight(window=2), pool="unified mla", page_size=2, **sizes)
    row = holding(dense, 3)
    assert [dense.lists(decode(row, [3]), layer).ids for layer in range(2)] == [[[2, 3, 4]], [[4, 5, 8]]]


def test_b58_a_page_slides_out_with_its_last_position_and_not_before() -> None:
    """Pages of 2, window 4: at query 6 positions 3.. are in sight, so page 0 goes and page 1 stays; at 7 it goes."""
    at = book(FULL, Sight(window=4), pool="window", page_size=2, table_slots=32, sliding_slots=12)
    [row] = holding(at, 7)
    sliding = at.storages["sliding"]
    assert at.slide_out(row, query=4) == []
    assert at.epoch == 0
    assert at.slide_out(row, query=6) == [1]
    assert at.slide_out(row, query=6) == []
    assert (at.epoch, at.kept_from(row, "sliding"), sliding.free) == (1, 2, [1, 5])
    assert at.slide_out(row, query=7) == [2]
    at.truncate(row, 5)
    assert (at.kept_from(row, "sliding"), sliding.free, len(sliding.page_of)) == (4, [1, 2, 4, 5], 1)
    with pytest.raises(SlidOut):
        at.lists(decode([row], [5]), 1)
    assert at.lists(decode([row], [5]), 0).ids == [[2, 3, 4, 5, 6]]
    at.release(row)
    assert (sliding.free, at.kept_from(row, "sliding")) == ([1, 2, 3, 4, 5], 0)
    at.check()


def test_b58_the_frontier_of_a_long_window() -> None:
    """Window 1024 at query 2047 sees 1024..2047: 1024 slots go, not 1023 and not 1025."""
    sizes = {"table_slots": 2304, "sliding_slots": 2304, "max_context": 2304}
    at = book(FULL, Sight(window=1024), pool="window", **sizes)
    [row] = holding(at, 2047)
    at.slide_out(row, query=2047)
    assert at.kept_from(row, "sliding") == 1024
    assert len(at.storages["sliding"].page_of) == 1023


def test_nothing_slides_out_of_a_plain_pool() -> None:
    at = book(Sight(window=2))
    with pytest.raises(ValueError):
        at.slide_out(at.admit(), query=3)


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("pool", ["plain", "window", "unified", "unified mla"])
def test_pages_are_free_or_held_whatever_happens(pool: Pool, page_size: int) -> None:
    """Pitfalls B58: a walk through all changes; lists read what explain reads, at ids that no two positions share."""
    walk = random.Random(page_size)
    layers = [FULL, Sight(window=5), Sight(chunk=8)]
    sizes: dict[str, int] = {} if pool == "plain" else {"sliding_slots": 20 * page_size}
    sizes |= {"full_slots": 24 * page_size} if pool.startswith("unified") else {}
    at = book(*layers, pool=pool, page_size=page_size, table_slots=32 * page_size, **sizes)
    for _ in range(400):
        rows = list(at.owners)
        action = walk.choice(["admit", "append", "append", "truncate", "accept", "slide", "release", "compact"])
        row = walk.choice(rows) if rows else None
        try:
            if action == "admit":
                at.admit()
            elif action == "compact":
                at.compact()
            elif row is None:
                continue
            elif action == "append":
                at.append(row, walk.randrange(9))
            elif action == "truncate":
                at.truncate(row, max(0, at.length(row) - walk.randrange(3)))
            elif action == "accept" and at.length(row) > 3:
                at.accept(row, prefix=at.length(row) - 3, path=[0, 2])
            elif action == "slide" and pool != "plain":
                at.slide_out(row, query=at.length(row))
            elif action == "release" and walk.random() < 0.3:
                at.release(row)
        except Refused:
            pass
        at.check()
        _lists_agree(at)
    assert at.epoch > 0


def _lists_agree(at: Book) -> None:
    rows, lens = list(at.owners), [owner.length for owner in at.owners.values()]
    batch = decode(rows, lens)
    for layer in range(len(at.layers)):
        try:
            lists = at.lists(batch, layer)
            reads = [at.explain(batch, request, 0)[layer] for request in range(len(rows))]
        except SlidOut:
            continue
        assert lists.ids == [[read.storage_id for read in of] for of in reads]
        assert len(set(lists.flat)) == len(lists.flat) and 0 not in lists.flat
        assert lists.indptr == cumulative(lists.lens)
