"""Pools with storages: what is stored where, what slides out and what moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.slots import OutOfSlots
from tests.pools import (
    CHUNK,
    LATENT,
    MAPPED,
    MIXED,
    PAGE_SIZES,
    POOLS,
    SLIDING,
    UNIFIED,
    WINDOW,
    assert_holds,
    bookkeeping,
    built,
    cached,
    full,
    latent,
    mapped,
    model,
    rows,
    sliding,
    stored,
    unified,
    views,
    write,
)
from tests.strategies import DEVICE

# --- Round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", POOLS)
def test_what_is_written_is_read_back_and_nothing_else_changes(name: str, page_size: int) -> None:
    pool = built(name, page_size, pages=10)
    pool.allocator.allocate("gone", page_size)  # so that ids of table and storage differ
    pool.allocator.allocate("before", 1)
    pool.allocator.release("gone")
    ids = pool.allocator.allocate("mine", 2 * page_size + 1)
    order = torch.randperm(ids.shape[0])
    write(pool, ids[order], order.tolist())
    for layer, view in enumerate(views(pool)):
        assert_holds(pool, layer, ids, range(ids.shape[0]))
        if not view.v_in_k:
            assert int((~view.k.isnan()).sum()) == ids.shape[0] * view.kv_heads * view.k.shape[-1]
            assert int((~view.v.isnan()).sum()) == ids.shape[0] * view.kv_heads * view.v.shape[-1]
    if isinstance(pool, UnifiedPool):  # every stored number lies in one of the envelopes, once
        per_token = sum(v.kv_heads * (v.k.shape[-1] + (not v.v_in_k) * v.v.shape[-1]) for v in views(pool))
        kept = sum(int((~x.isnan()).sum()) for x in pool._envelopes.values())
        assert kept == ids.shape[0] * per_token


@pytest.mark.parametrize("name", ["window", "unified sliding"])
def test_layers_keep_heads_and_dims_of_their_own(name: str) -> None:
    pool = built(name, 4)
    for layer, spec in enumerate(MIXED):
        pool.view(layer).check_fits(spec)
    wrong = torch.zeros(1, 2, 24, device=DEVICE)
    with pytest.raises(ValueError, match=r"k: expected \[1, 1, 16\] .* got \[1, 2, 24\]"):
        pool.write(0, torch.tensor([5], device=DEVICE), wrong, None)


@pytest.mark.parametrize("name", MAPPED)
def test_rows_without_a_page_go_to_the_sink(name: str) -> None:
    pool = mapped(name)
    ids = torch.tensor([7], device=DEVICE)  # nobody has it
    pool.write(0, ids, *rows(pool, 0, [1]))
    at = pool.translation(0).apply(ids)
    assert at.tolist() == [0]
    written = ~pool.view(0).k.isnan().flatten(1).all(1)
    assert written.nonzero().flatten().tolist() == [0]


def test_scales_and_fp8_are_those_of_a_plain_pool() -> None:
    spec = model(*MIXED, page_size=4, dtype=torch.float8_e4m3fn)
    scales: dict[str, Any] = {"k_scale": 0.05, "v_scale": 0.2, "device": DEVICE}
    plain = MHAPool(spec, num_slots=32, **scales)
    others: list[KVPool] = [
        WindowPool(spec, num_slots=32, sliding_slots=32, **scales),
        UnifiedPool(spec, num_slots=32, virtual_slots=32, sliding_slots=32, **scales),
    ]
    for pool in (plain, *others):
        pool.allocator.allocate("hole", 4)
        ids = pool.allocator.allocate("a", 7)
        for layer in range(4):
            k, v = rows(pool, layer, range(7))
            pool.write(layer, ids.to(DEVICE), k / 9, None if v is None else v / 9)
    for pool in others:
        for layer in range(4):
            view = pool.view(layer)
            assert (view.k_scale, view.v_scale) == (0.05, 0.2)
            for a, b in zip(stored(plain, layer, ids), stored(pool, layer, ids), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", ["unified mla", "unified mla sliding"])
def test_a_dense_id_is_the_layers_own_row_of_the_envelope(name: str, page_size: int) -> None:
    pool = unified(name, page_size, pages=10)
    pool.allocator.allocate("hole", page_size)
    ids = pool.allocator.allocate("a", 2 * page_size)
    for home, envelope in pool._envelopes.items():
        places = [layer for layer, at in enumerate(pool.homes) if at == home]
        rows_of = envelope.view(-1, page_size, pool.view(places[0]).k.shape[-1])  # page x layer, slot, dim
        physical = pool.allocator.storages[home].pages[ids.to(DEVICE) // page_size]
        for place, layer in enumerate(places):
            way, view = pool.translation(layer), pool.view(layer)
            assert way.stride == page_size * len(places)
            dense = way.apply(ids.to(DEVICE))
            assert int(dense.max()) < view.num_slots
            for at, page, slot in zip(dense.tolist(), physical.tolist(), (ids % page_size).tolist(), strict=True):
                expected = rows_of[page * len(places) + place, slot]
                assert view.k[at, 0].data_ptr() == expected.data_ptr()
        sizes = {pool.view(layer).num_slots for layer in places}
        assert sizes == {((envelope.shape[0] - 1) * len(places) + 1) * page_size}


def test_the_last_slot_of_the_last_page_is_in_reach_of_every_dense_layer() -> None:
    pool = unified("unified mla", 4, pages=6)  # two pages beside the sink
    ids = pool.allocator.allocate("a", 8)
    write(pool, ids, range(8))
    for layer in range(4):
        assert_holds(pool, layer, ids, range(8))


# --- Sliding out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", SLIDING)
def test_a_slide_keeps_what_the_query_sees_and_no_whole_page_more(name: str, page_size: int) -> None:
    borders = {WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, CHUNK - 1, CHUNK, CHUNK + 1}
    borders |= {page * page_size + off for page in (1, 2, 3) for off in (-1, 0, 1, WINDOW - 2, WINDOW - 1, WINDOW)}
    pool = mapped(name, page_size, pages=64 if page_size < 16 else 16)
    cache = cached(pool)
    row = cache.admit()
    held = 4 * page_size + CHUNK
    write(pool, cache.append(row, held), range(held))
    specs = [layer.attention.sight for layer in model(*(MIXED if "mla" not in name else LATENT)).layers]
    sights = [sight for sight in specs if sight.partial] if name != "window alone" else [sliding().sight]
    for query in sorted(at for at in borders if 0 <= at <= held):
        cache.slide_out(row, query=query)
        first = min(sight.first(query) for sight in sights)
        slots = cache.table.slots_of(row)
        for layer, home in enumerate(pool.homes):
            kept = pool.kept_from(layer, row)
            assert kept == (first // page_size * page_size if home == "sliding" else 0)
            assert_holds(pool, layer, slots[kept:], range(kept, held))
            assert not pool.translation(layer).apply(slots[:kept]).any()
        before = bookkeeping(pool.allocator)
        cache.slide_out(row, query=query)
        assert bookkeeping(pool.allocator) == before
        cache.check_integrity()


def test_another_request_gets_the_pages_that_slid_out() -> None:
    pool = mapped("window", 2, pages=12)  # five sliding pages
    cache = cached(pool)
    a, b = cache.admit(), cache.admit()
    write(pool, cache.append(a, 10), range(10))
    with pytest.raises(OutOfSlots, match="sliding: 1 needs 1 more pages of 2 slots for 1 tokens, 0 are free"):
        cache.append(b, 1)
    cache.slide_out(a, query=9)
    write(pool, cache.append(b, 4), range(100, 104))
    for layer in range(4):
        assert_holds(pool, layer, cache.table.slots_of(b), range(100, 104))
        assert_holds(pool, layer, cache.table.slots_of(a)[4:], range(4, 10))


def test_a_unified_pool_of_sliding_layers_alone_slides_in_its_one_storage() -> None:
    pool = UnifiedPool(model(sliding()), num_slots=16, virtual_slots=32, device=DEVICE)
    cache = cached(pool)
    row = cache.admit()
    cache.append(row, 12)
    cache.slide_out(row, query=12)
    assert pool.kept_from(0, row) == 6 and pool.used_pages("full") == [4, 5, 6]


@pytest.mark.parametrize("name", ["mha", "mla", "unified", "unified mla"])
def test_where_nothing_can_slide_the_pool_says_so(name: str) -> None:
    cache = cached(built(name))
    row = cache.admit()
    cache.append(row, 10)
    with pytest.raises(ValueError, match="nothing slides out"):
        cache.slide_out(row, query=9)
    assert cache.pool.kept_from(1, row) == 0


def test_a_query_that_is_no_position_is_refused() -> None:
    cache = cached(built("window"))
    row = cache.admit()
    cache.append(row, 10)
    with pytest.raises(ValueError, match="query: expected an int of at least 0, got -1"):
        cache.slide_out(row, query=-1)
    with pytest.raises(ValueError, match="row: 3 is not in use"):
        cache.slide_out(3, query=1)


# --- Compaction -------------------------------------------------------------------------------------------------------


def crowded(name: str, page_size: int) -> tuple[UnifiedPool, PagedCache, dict[int, list[int]]]:
    """A pool from which requests have gone, so that those that live lie between holes, and what each row holds."""
    pool = unified(name, page_size, pages=28)
    cache = cached(pool, max_requests=8)
    live: dict[int, list[int]] = {}
    for number in range(6):
        row = cache.admit()
        count = min(page_size + 1, 20)
        live[row] = list(range(100 * number, 100 * number + count))
        write(pool, cache.append(row, count), live[row])
    for row in (0, 2, 3):
        cache.release(row)
        del live[row]
    return pool, cache, live


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", UNIFIED)
def test_compaction_keeps_every_row_bitwise_and_uses_the_lowest_pages(name: str, page_size: int) -> None:
    pool, cache, live = crowded(name, page_size)
    before = {row: cache.table.slots_of(row).clone() for row in live}
    held = {row: [stored(pool, layer, ids) for layer in range(4)] for row, ids in before.items()}
    counts = {home: len(pool.used_pages(home)) for home in pool.allocator.storages}
    epoch = pool.epoch
    moved = pool.compact()
    assert moved > 0 and pool.epoch > epoch
    cache.check_integrity()
    for home, count in counts.items():
        assert pool.used_pages(home) == list(range(1, count + 1))
    for row, ids in before.items():
        assert torch.equal(cache.table.slots_of(row), ids)
        for layer in range(4):
            assert_holds(pool, layer, ids, live[row])
            for was, now in zip(held[row][layer], stored(pool, layer, ids), strict=True):
                assert torch.equal(was.view(torch.int32), now.view(torch.int32))
    epoch = pool.epoch
    assert pool.compact() == 0 and pool.epoch == epoch


@pytest.mark.parametrize("name", UNIFIED)
def test_compaction_is_the_same_every_time(name: str) -> None:
    tables = []
    for _ in range(2):
        pool, _, _ = crowded(name, 2)
        pool.compact()
        tables.append([(x.used, x.pages.tolist(), sorted(x.free)) for x in pool.allocator.storages.values()])
    assert tables[0] == tables[1]


def test_requests_grow_on_after_compaction() -> None:
    pool, cache, live = crowded("unified sliding", 2)
    pool.compact()
    for row, numbers in live.items():
        write(pool, cache.append(row, 2), [row + 700, row + 800])
        numbers += [row + 700, row + 800]
    for row, numbers in live.items():
        for layer in range(4):
            assert_holds(pool, layer, cache.table.slots_of(row), numbers)
    cache.check_integrity()


def test_fp8_pages_move_too() -> None:
    spec = model(*MIXED, page_size=2, dtype=torch.float8_e4m3fn)
    pool = UnifiedPool(spec, num_slots=16, virtual_slots=16, device=DEVICE)
    pool.allocator.allocate("gone", 4)
    ids = pool.allocator.allocate("a", 3)
    write(pool, ids, range(3))
    before = [stored(pool, layer, ids) for layer in range(4)]
    pool.allocator.release("gone")
    assert pool.compact() == 2
    for layer, rows_of in enumerate(before):
        for was, now in zip(rows_of, stored(pool, layer, ids), strict=True):
            assert torch.equal(was.view(torch.uint8), now.view(torch.uint8))


# --- What cannot be built ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "window, mla": (
        lambda: WindowPool(model(*LATENT, mla=True), num_slots=8, sliding_slots=8, device=DEVICE),
        "'toy' keeps latent rows; build a UnifiedPool",
    ),
    "window, all full": (
        lambda: WindowPool(model(full()), num_slots=8, sliding_slots=8, device=DEVICE),
        "sliding_slots: every layer of model 'toy' sees all keys",
    ),
    "window, pages": (
        lambda: WindowPool(model(*MIXED, page_size=4), num_slots=8, sliding_slots=10, device=DEVICE),
        "page_size: expected a divisor of sliding_slots 10, got 4",
    ),
    "window, table pages": (
        lambda: WindowPool(model(*MIXED, page_size=4), num_slots=10, sliding_slots=8, device=DEVICE),
        "page_size: expected a divisor of num_slots 10, got 4",
    ),
    "window, sink alone": (
        lambda: WindowPool(model(*MIXED, page_size=4), num_slots=8, sliding_slots=4, device=DEVICE),
        "sliding_slots: expected at least two pages of 4",
    ),
    "unified, all full": (
        lambda: UnifiedPool(model(full()), num_slots=8, virtual_slots=8, sliding_slots=8, device=DEVICE),
        "sliding_slots: every layer of model 'toy' sees all keys",
    ),
    "unified, all sliding": (
        lambda: UnifiedPool(model(sliding()), num_slots=8, virtual_slots=8, sliding_slots=8, device=DEVICE),
        "sliding_slots: no layer of model 'toy' sees all keys",
    ),
    "unified, virtual": (
        lambda: UnifiedPool(model(*MIXED, page_size=4), num_slots=8, virtual_slots=9, device=DEVICE),
        "page_size: expected a divisor of virtual_slots 9, got 4",
    ),
    "unified, physical": (
        lambda: UnifiedPool(model(*MIXED, page_size=4), num_slots=4, virtual_slots=8, device=DEVICE),
        "num_slots: expected at least two pages of 4",
    ),
    "unified, scales": (
        lambda: UnifiedPool(model(*LATENT, mla=True), num_slots=8, virtual_slots=8, device=DEVICE, k_scale=0.5),
        "v_scale: under MLA .* expected k_scale 0.5, got 1.0",
    ),
    "unified, rows": (
        lambda: UnifiedPool(model(latent(), latent(qk_dim=32), mla=True), num_slots=8, virtual_slots=8, device=DEVICE),
        r"model: layers that share a page need rows of one shape, got .* \[\(1, 24\), \(1, 32\)\]; build an MLAPool",
    ),
    "dtype": (
        lambda: UnifiedPool(model(*MIXED, dtype=torch.float64), num_slots=8, virtual_slots=8, device=DEVICE),
        "kv_dtype: expected one of float32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_pool_that_makes_no_sense_is_refused(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        build()
