"""The second of a lane's two launches: slots, ranges and segments are written, a block of them by each program.

Programs look up whose their block is, so that work is spread evenly however long any request is. Where the device can,
they are launched while the first kernel still counts, and wait for it.

Reference: create_flashinfer_kv_indices_triton, with a program for each request, and translate_loc_from_full_to_swa.
"""

from __future__ import annotations

from typing import Any

from attnlab._boot import INTERPRETED
from attnlab._triton import jit, tl, wait_for_earlier
from attnlab.arguments import Arguments, Names
from attnlab.kernels.index_core import storage_ids
from attnlab.kernels.lane_memory import LaneMemory
from attnlab.kernels.launch import early_launch
from attnlab.kernels.launcher import Launcher
from attnlab.kernels.shares import begun, border, last_share, place
from attnlab.kernels.target import Target
from attnlab.plan.lanes import LaneWork
from attnlab.plan.policy import SharePolicy
from attnlab.plan.size_rules import SizeRule

ENTRIES, SEGMENTS = 1024, 8192 if INTERPRETED else 256
"""Slots, and segments, that one program writes. The interpreter takes as long for a block of any size; compiled, more
segments take registers that keep programs of slots from running side by side."""

LISTS = Names(
    pointers=(
        "table_ptr",
        "rows_ptr",
        "pages_ptr",
        "start_ptr",
        "indptr_ptr",
        "slots_ptr",
        "new_ptr",
        "new_indptr_ptr",
        "write_ptr",
        "unit_ptr",
        "range_indptr_ptr",
        "merge_indptr_ptr",
        "request_ptr",
        "range_start_ptr",
        "range_end_ptr",
        "segments_ptr",
        "program_indptr_ptr",
    ),
    numbers=("table_stride", "table_rows", "columns", "page_size"),
    free=(
        "range_programs",
        "token_programs",
        "num_pages",
        "stride",
        "reqs",
        "rounds",
        "entries",
        "tokens",
        "bound",
        "behind",
        "capacity",
        "kv_heads",
        "shares",
        "tile",
    ),
)


def range_constants(kv_heads: int) -> dict[str, int]:
    """Return how many KV heads a block of segments has, a power of two, and of how many ranges it is."""
    return {"HEADS": heads_at_once(kv_heads), "RANGES": ranges_at_once(kv_heads)}


def heads_at_once(kv_heads: int) -> int:
    """Return how many KV heads a block of segments has."""
    return 1 << (kv_heads - 1).bit_length()


def ranges_at_once(kv_heads: int) -> int:
    """Return of how many ranges a block of segments is."""
    return max(1, SEGMENTS // heads_at_once(kv_heads))


def write_lane(work: LaneWork, cut: SharePolicy | SizeRule, memory: LaneMemory, target: Target) -> None:
    """Computes: storage ids of what the lists hold and of where new tokens go; ranges, segments, programs' offsets.

    Grid: programs for blocks of ranges and shares, then for blocks of new tokens, then for blocks of slots.
    Reads/writes: rows and columns are kept inside the table; buffers are written whole, their tails with 0.
    """
    table, translation, written = work.source.table, work.source.translation, work.written
    shares, tile = (cut.shares(work.ctx), cut.tile) if isinstance(cut, SharePolicy) else (0, 0)
    # A block of numbers stands for ranges, for shares and for requests.
    range_programs = -(-(max(work.ranges, shares, work.lens.count) + 1) // ranges_at_once(work.ctx.kv_heads))
    token_programs = 0 if work.sight.cross else -(-work.tokens // ENTRIES)
    slot_programs = -(-work.entries // ENTRIES)
    lists = Arguments(
        LISTS,
        (
            table,
            work.rows,
            translation.pages,
            memory.start,
            memory.indptr,
            memory.slots,
            work.lens.device if written is None else written.start,
            None if written is None else written.indptr,
            memory.write,
            memory.unit,
            memory.range_indptr,
            memory.merge_indptr,
            memory.request,
            memory.range_start,
            memory.range_end,
            memory.segments,
            memory.program_indptr,
        ),
        (table.stride(0), *table.shape, translation.page_size),
        (
            range_programs,
            token_programs,
            0 if translation.pages is None else translation.pages.shape[0],
            translation.stride,
            work.lens.count,
            work.lens.count.bit_length(),
            work.entries,
            work.tokens,
            work.lens.bound_max,
            work.behind,
            work.ranges,
            work.ctx.kv_heads,
            shares,
            tile,
        ),
    )
    grid = (range_programs + token_programs + slot_programs, 1, 1)
    WRITE_LANE.launch(target, grid, (lists,), kv_heads=work.ctx.kv_heads, shared=shares > 0, target=target)


@jit
def _owner(indptr_ptr, at, reqs, rounds):
    """Whose list each place lies in, by bisection: the last one that begins there or before."""
    low = at * 0
    high = low + reqs - 1
    for _ in range(rounds):
        middle = (low + high + 1) // 2
        begins = tl.load(indptr_ptr + middle) <= at
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low


@jit
def _store_slots(slots_ptr, entry, capacity, live, req, column, table):
    """Storage ids of columns in the rows of `req`; the sink where an entry is not live, or beyond the table."""
    table_ptr, rows_ptr, pages_ptr, table_stride, table_rows, columns, num_pages, page_size, stride = table
    row = tl.minimum(tl.maximum(tl.load(rows_ptr + req), 0), table_rows - 1).to(tl.int64)  # times columns: past 2^31
    inside = live & (column >= 0) & (column < columns)
    id = tl.load(table_ptr + row * table_stride + column, mask=inside, other=0)
    if pages_ptr is not None:
        id = storage_ids(id, live, pages_ptr, num_pages, page_size, stride)
    tl.store(slots_ptr + entry, id.to(tl.int64), mask=entry < capacity)


@jit
def _store_list(slots_ptr, entry, capacity, req, start_ptr, indptr_ptr, reqs, table):
    """The slots of entries of lists. These are those of `req`: of one request, or of one for each entry."""
    column = tl.load(start_ptr + req) + entry - tl.load(indptr_ptr + req)
    _store_slots(slots_ptr, entry, capacity, entry < tl.load(indptr_ptr + reqs), req, column, table)


@jit
def _range_of(number, requests):
    """Of a block of ranges: which there are; of each the request, its keys, its first range, and how many it has."""
    indptr_ptr, _, range_indptr_ptr, reqs, rounds = requests
    live = number < tl.load(range_indptr_ptr + reqs)
    req = tl.where(live, _owner(range_indptr_ptr, number, reqs, rounds), 0)
    length = tl.load(indptr_ptr + req + 1) - tl.load(indptr_ptr + req)
    first = tl.load(range_indptr_ptr + req)
    return live, req, length, first, tl.load(range_indptr_ptr + req + 1) - first


@jit
def _store_ranges(number, req, start, end, ranges):
    request_ptr, start_ptr, end_ptr, _, capacity = ranges
    tl.store(request_ptr + number, req, mask=number < capacity)
    tl.store(start_ptr + number, start, mask=number < capacity)
    tl.store(end_ptr + number, end, mask=number < capacity)


@jit
def _store_segments(row, number, live, req, head, start, end, first, count, ranges, heads):
    """Segments of ranges, `[ranges, heads]`; the partials of a request are consecutive for each KV head."""
    _, _, _, segments_ptr, capacity = ranges
    each, kv_heads = heads
    partial = first[:, None] * kv_heads + each * count[:, None] + (number - first)[:, None]
    mask = (number < capacity)[:, None] & (each < kv_heads)
    at = segments_ptr + row.to(tl.int64) * 5
    tl.store(at, req[:, None], mask=mask)
    tl.store(at + 1, head, mask=mask)
    tl.store(at + 2, start[:, None], mask=mask)
    tl.store(at + 3, end[:, None], mask=mask)
    tl.store(at + 4, tl.where(live[:, None], partial, 0), mask=mask)


@jit
def _store_offsets(indptr_ptr, number, first, count, items, heads):
    """Where the parts of (item, KV head) begin, and the end, which is that of an item number `items`.

    An item has `count` parts for each head, and there are `first` for each head before it.
    """
    each, kv_heads = heads
    begin = first[:, None] * kv_heads + each * count[:, None]
    inside = (number < items)[:, None] & (each < kv_heads)
    end = (number == items)[:, None] & (each == 0)
    tl.store(indptr_ptr + number[:, None] * kv_heads + each, begin, mask=inside | end)


@jit
def _store_merged(merge_indptr_ptr, number, requests, heads):
    """Where the partials of a block of requests begin: those of their ranges."""
    _, _, range_indptr_ptr, reqs, _ = requests
    first = tl.load(range_indptr_ptr + tl.minimum(number, reqs))
    count = tl.load(range_indptr_ptr + tl.minimum(number + 1, reqs)) - first
    _store_offsets(merge_indptr_ptr, number, first, count, reqs, heads)


@jit
def _deal_sizes(program_indptr_ptr, number, requests, ranges, heads):
    """A block of ranges of a size; each has a program for every KV head, whose segments lie side by side."""
    _, size_ptr, range_indptr_ptr, reqs, _ = requests
    _, _, _, _, capacity = ranges
    each, kv_heads = heads
    live, req, length, first, count = _range_of(number, requests)
    size = tl.load(size_ptr + req)
    start = tl.where(live, (number - first) * size, 0)
    end = tl.where(live, start + tl.minimum(size, length - start), 0)
    _store_ranges(number, req, start, end, ranges)
    row = number[:, None] * kv_heads + each
    _store_segments(row, number, live, req, each, start, end, first, count, ranges, heads)
    before = tl.minimum(number, tl.load(range_indptr_ptr + reqs))
    _store_offsets(program_indptr_ptr, number, before, live.to(tl.int32), capacity, heads)


@jit
def _ranges_before(tile, requests, total, shares):
    """How many ranges begin before a tile at which a share begins; all of them, where the line ends before it."""
    _, tile_indptr_ptr, range_indptr_ptr, reqs, rounds = requests
    req = _owner(tile_indptr_ptr, tile, reqs, rounds)
    within = begun(tile, total, shares) - begun(tl.load(tile_indptr_ptr + req), total, shares)
    return tl.where(tile < total, tl.load(range_indptr_ptr + req) + within, tl.load(range_indptr_ptr + reqs))


@jit
def _ranges_of(share, requests, total, shares):
    """How many ranges begin before a share, and how many in it."""
    before = _ranges_before(border(share, total, shares), requests, total, shares)
    return before, _ranges_before(border(share + 1, total, shares), requests, total, shares) - before


@jit
def _deal_shares(program_indptr_ptr, number, requests, ranges, heads, shares, tile):
    """A block of ranges that lie in shares, and of shares: program `c * kv_heads + h` reads share c for KV head h."""
    _, tile_indptr_ptr, _, reqs, _ = requests
    each, kv_heads = heads
    total = tl.load(tile_indptr_ptr + reqs)
    live, req, length, first, count = _range_of(number, requests)
    # A request's ranges end, one after the other, where shares begin behind its first tile.
    first_tile = tl.load(tile_indptr_ptr + req)
    until_place = begun(first_tile, total, shares) + number - first
    begin = tl.maximum(place(until_place - 1, total, shares), first_tile)
    until = tl.minimum(place(until_place, total, shares), tl.load(tile_indptr_ptr + req + 1))
    start = tl.where(live, (begin - first_tile) * tile, 0)
    end = tl.where(live, tl.minimum((until - first_tile) * tile, length), 0)
    _store_ranges(number, req, start, end, ranges)
    # Segments lie in the order of programs: those of a share for one KV head behind those for the head before.
    before, own = _ranges_of(tl.minimum(last_share(begin, total, shares), shares - 1), requests, total, shares)
    row = before[:, None] * kv_heads + each * own[:, None] + (number - before)[:, None]
    row = tl.where(live[:, None], row, number[:, None] * kv_heads + each)
    head = tl.where(live[:, None], each, 0)
    _store_segments(row, number, live, req, head, start, end, first, count, ranges, heads)
    before, own = _ranges_of(tl.minimum(number, shares), requests, total, shares)
    _store_offsets(program_indptr_ptr, number, before, own, shares, heads)


@jit(
    do_not_specialize=(
        "range_programs",
        "token_programs",
        "num_pages",
        "stride",
        "reqs",
        "rounds",
        "entries",
        "tokens",
        "bound",
        "behind",
        "capacity",
        "kv_heads",
        "shares",
        "tile",
    )
)
def write_lane_kernel(
    table_ptr,
    rows_ptr,
    pages_ptr,
    start_ptr,
    indptr_ptr,
    slots_ptr,
    new_ptr,
    new_indptr_ptr,
    write_ptr,
    unit_ptr,
    range_indptr_ptr,
    merge_indptr_ptr,
    request_ptr,
    range_start_ptr,
    range_end_ptr,
    segments_ptr,
    program_indptr_ptr,
    range_programs,
    token_programs,
    table_stride,
    table_rows,
    columns,
    num_pages,
    page_size,
    stride,
    reqs,
    rounds,
    entries,
    tokens,
    bound,
    behind,
    capacity,
    kv_heads,
    shares,
    tile,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
    RANGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_earlier()
    table = (table_ptr, rows_ptr, pages_ptr, table_stride, table_rows, columns, num_pages, page_size, stride)
    requests = (indptr_ptr, unit_ptr, range_indptr_ptr, reqs, rounds)
    ranges = (request_ptr, range_start_ptr, range_end_ptr, segments_ptr, capacity)
    heads = (tl.arange(0, HEADS)[None, :], kv_heads)
    program = tl.program_id(0)
    if program < range_programs:  # the first to run, as looking up whose ranges are takes longest
        number = program * RANGES + tl.arange(0, RANGES)
        _store_merged(merge_indptr_ptr, number, requests, heads)
        if SHARED:
            _deal_shares(program_indptr_ptr, number, requests, ranges, heads, shares, tile)
        else:
            _deal_sizes(program_indptr_ptr, number, requests, ranges, heads)
    elif program < range_programs + token_programs:
        token = (program - range_programs) * ENTRIES + tl.arange(0, ENTRIES)
        if new_indptr_ptr is None:
            # One a request, its newest. That of a padded row lies beyond the table, where only the sink is found.
            own = tl.minimum(token, reqs - 1)
            end = tl.minimum(tl.load(new_ptr + own), bound)
            column = tl.where(end > 0, end - behind, columns)
            _store_slots(write_ptr, token, tokens, token < reqs, own, column, table)
        else:
            own = _owner(new_indptr_ptr, token, reqs, rounds)
            _store_list(write_ptr, token, tokens, own, new_ptr, new_indptr_ptr, reqs, table)
    else:
        begin = (program - range_programs - token_programs) * ENTRIES
        entry = begin + tl.arange(0, ENTRIES)
        first = _owner(indptr_ptr, begin, reqs, rounds)
        if begin + ENTRIES <= tl.load(indptr_ptr + first + 1):  # most blocks lie in one list
            _store_list(slots_ptr, entry, entries, first, start_ptr, indptr_ptr, reqs, table)
        else:
            owners = _owner(indptr_ptr, entry, reqs, rounds)
            _store_list(slots_ptr, entry, entries, owners, start_ptr, indptr_ptr, reqs, table)


def _constants(*, kv_heads: int, shared: bool, target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    constants = {"SHARED": shared, "ENTRIES": ENTRIES, **range_constants(kv_heads), "PDL": target.has_pdl}
    return constants, {**early_launch(target)}


WRITE_LANE = Launcher(write_lane_kernel, _constants)
