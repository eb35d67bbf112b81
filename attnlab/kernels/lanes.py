"""A lane's integer work in two launches: requests are counted, then everything that there is room for is written.

The first kernel is one program, which carries running sums over all requests: where each one's list, ranges and
partials begin. In the second every program owns a block of slots, of new tokens or of ranges, and looks up whose they
are: work is spread evenly, however long any request is.

Reference: get_num_kv_splits_triton, update_sliding_window_buffer, create_flashinfer_kv_indices_triton and
translate_loc_from_full_to_swa, which the original launches one after the other; its kernels derive ranges themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.kernels.index_core import first_seen, storage_ids
from attnlab.plan.index import KVIndex, check_space
from attnlab.plan.lanes import LaneWork
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.policy import HostPolicy, SharePolicy
from attnlab.plan.schedule import SEGMENT, Schedule
from attnlab.plan.size_rules import SizeRule, parts_of
from attnlab.plan.splits import SplitPlan

REQUESTS, ENTRIES, RANGES = 512, 1024, 256
"""Requests that are counted at once; slots, and ranges or shares, that one program writes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """What the kernels write: int32 views of one allocation, and the slots.

    `unit`: of sizes each request's, of shares where each request's tiles begin in the line of all.
    """

    start: Tensor
    indptr: Tensor
    unit: Tensor
    nominal: Tensor
    range_indptr: Tensor
    merge_indptr: Tensor
    request: Tensor
    range_start: Tensor
    range_end: Tensor
    segments: Tensor
    program_indptr: Tensor
    slots: Tensor
    write: Tensor


def cut_for_kernels(work: LaneWork) -> SharePolicy | SizeRule | None:
    """Return the cut of a lane where kernels know it: even shares, or a policy's rule of sizes; else None."""
    policy = work.policy
    if work.lens.count == 0 or isinstance(policy, HostPolicy):
        return None
    return policy if isinstance(policy, SharePolicy) else policy.size_rule(reqs=work.lens.count, ctx=work.ctx)


def lane_in_two_launches(work: LaneWork, cut: SharePolicy | SizeRule) -> Lane:
    """Computes: the lane of `lane_of_parts`, for at least one request.

    Grids: one program; one for each block of slots, of new tokens, and of ranges and shares.
    Reads/writes: rows and columns are kept inside the table, entries inside their buffers; tails are written.
    """
    check_space(work.source.space, work.source.translation, reqs=work.lens.count)
    shares, tile = (cut.shares(work.ctx), cut.tile) if isinstance(cut, SharePolicy) else (0, 0)
    memory = _allocate(work, shares)
    if isinstance(cut, SizeRule):
        _count_sizes(work, memory, cut)
    else:
        _count_shares(work, memory, shares=shares, tile=tile)
    _write(work, memory, shares=shares, tile=tile)
    kv_heads, translation = work.ctx.kv_heads, work.source.translation
    return Lane(
        layout=KVLayout(
            index=KVIndex(indptr=memory.indptr, slots=memory.slots, space=translation.target),
            start=memory.start,
            start_visible=memory.start,
            sight=work.sight,
        ),
        write_slots=memory.write,
        splits=SplitPlan(
            policy=work.policy.label(work.ctx),
            indptr=memory.range_indptr,
            request=memory.request,
            start=memory.range_start,
            end=memory.range_end,
            nominal=memory.nominal,
        ),
        schedule=Schedule(
            segments=memory.segments.view(-1, len(SEGMENT)),
            program_indptr=memory.program_indptr,
            merge_indptr=memory.merge_indptr,
            kv_heads=kv_heads,
            partials=work.ranges * kv_heads,
            persistent=shares > 0,
        ),
    )


def _allocate(work: LaneWork, shares: int) -> _Memory:
    reqs, ranges, kv_heads, device = work.lens.count, work.ranges, work.ctx.kv_heads, work.rows.device
    sizes = [reqs, reqs + 1, reqs + 1, reqs, reqs + 1, reqs * kv_heads + 1, ranges, ranges, ranges]
    sizes += [ranges * kv_heads * len(SEGMENT), (shares or ranges) * kv_heads + 1]
    # Each begins at 16 bytes, so that one compiled kernel serves all: what is missing to that lies between them.
    lengths = [length for size in sizes for length in (size, -size % 4)]
    views = torch.empty(sum(lengths), dtype=torch.int32, device=device).split_with_sizes(lengths)[::2]
    slots = torch.empty(work.entries, dtype=torch.int64, device=device)
    # Under cross-attention no token is stored: all go to the sink.
    write = (torch.zeros if work.sight.cross else torch.empty)(work.tokens, dtype=torch.int64, device=device)
    tensors = [*views, slots, write]
    return _Memory(*tensors)


def _count_sizes(work: LaneWork, memory: _Memory, rule: SizeRule) -> None:
    _count_sizes_kernel[(1,)](
        work.lens.device,
        memory.start,
        memory.indptr,
        memory.unit,
        memory.nominal,
        memory.range_indptr,
        memory.merge_indptr,
        work.lens.count,
        work.lens.bound_max,
        work.behind,
        work.sight.window or 0,
        work.sight.chunk or 0,
        work.entries,
        work.ctx.kv_heads,
        work.bounds.min_size,
        work.bounds.max_ranges,
        work.bounds.in_all or 0,
        *rule.numbers,
        SIZES=rule.function,
        BLOCK=REQUESTS,
    )


def _count_shares(work: LaneWork, memory: _Memory, *, shares: int, tile: int) -> None:
    _count_shares_kernel[(1,)](
        work.lens.device,
        memory.start,
        memory.indptr,
        memory.unit,
        memory.nominal,
        memory.range_indptr,
        memory.merge_indptr,
        work.lens.count,
        work.lens.bound_max,
        work.behind,
        work.sight.window or 0,
        work.sight.chunk or 0,
        work.entries,
        work.ctx.kv_heads,
        shares,
        tile,
        BLOCK=REQUESTS,
    )


def _write(work: LaneWork, memory: _Memory, *, shares: int, tile: int) -> None:
    table, translation, written = work.source.table, work.source.translation, work.written
    slot_programs = -(-work.entries // ENTRIES)
    token_programs = 0 if work.sight.cross else -(-work.tokens // ENTRIES)
    range_programs = -(-(max(work.ranges, shares) + 1) // RANGES)
    _write_kernel[(slot_programs + token_programs + range_programs,)](
        table,
        work.rows,
        translation.pages,
        memory.start,
        memory.indptr,
        memory.slots,
        work.lens.device if written is None else written.start,
        memory.indptr if written is None else written.indptr,
        memory.write,
        memory.unit,
        memory.range_indptr,
        memory.request,
        memory.range_start,
        memory.range_end,
        memory.segments,
        memory.program_indptr,
        slot_programs,
        token_programs,
        table.stride(0),
        table.shape[0],
        table.shape[1],
        0 if translation.pages is None else translation.pages.shape[0],
        translation.page_size,
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
        TRANSLATED=translation.pages is not None,
        NEWEST=written is None,
        SHARED=shares > 0,
        ENTRIES=ENTRIES,
        RANGES=RANGES,
    )


# The first launch: one program counts.


@jit
def _listed(lens_ptr, req, reqs, before, bound, behind, window, chunk, capacity):
    """Of a block of requests: each list's first position, length and end among all, and how many entries they add.

    `before` entries lie before theirs. What is promised, a length of `bound` and `capacity` entries, cuts off the rest.
    """
    end = tl.minimum(tl.maximum(tl.load(lens_ptr + req, mask=req < reqs, other=0), 0), bound)
    start = tl.minimum(first_seen(end - behind, window, chunk), end)
    own = (end - start).to(tl.int64)
    ends = before + tl.cumsum(own, 0)
    length = tl.minimum(ends, capacity) - tl.minimum(ends - own, capacity)
    return start, length.to(tl.int32), tl.minimum(ends, capacity).to(tl.int32), tl.sum(own, 0)


@jit
def _store_ranges(range_indptr_ptr, merge_indptr_ptr, req, live, counts, before, kv_heads):
    """Where the ranges of a block of requests end, and their partials; those of a KV head are consecutive."""
    end = before + tl.cumsum(counts, 0)
    tl.store(range_indptr_ptr + req + 1, end, mask=live)
    for head in range(kv_heads):
        partials = (end - counts) * kv_heads + (head + 1) * counts
        tl.store(merge_indptr_ptr + req * kv_heads + head + 1, partials, mask=live)


@jit(
    do_not_specialize=(
        "reqs",
        "bound",
        "behind",
        "window",
        "chunk",
        "capacity",
        "min_size",
        "max_ranges",
        "in_all",
        "a",
        "b",
        "c",
    )
)
def _count_sizes_kernel(
    lens_ptr,
    start_ptr,
    indptr_ptr,
    size_ptr,
    nominal_ptr,
    range_indptr_ptr,
    merge_indptr_ptr,
    reqs,
    bound,
    behind,
    window,
    chunk,
    capacity,
    kv_heads,
    min_size,
    max_ranges,
    in_all,
    a,
    b,
    c,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([], tl.int64)
    longest = tl.full([], 1, tl.int32)
    shortest = tl.full([], 2147483647, tl.int32)
    for at in range(0, reqs, BLOCK):
        req = at + tl.arange(0, BLOCK)
        _, lens, _, more = _listed(lens_ptr, req, reqs, total, bound, behind, window, chunk, capacity)
        total += more
        longest = tl.maximum(longest, tl.max(lens, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(lens > 0, lens, 2147483647), 0))
    shortest = tl.minimum(shortest, longest)
    total = tl.minimum(total, capacity)
    # What is promised of all ranges together: sizes below it are raised.
    least_of_all = tl.where(in_all > 0, (total + in_all - 1) // tl.maximum(in_all, 1), 0).to(tl.int32)

    tl.store(indptr_ptr, 0)
    tl.store(range_indptr_ptr, 0)
    tl.store(merge_indptr_ptr, 0)
    entries = tl.zeros([], tl.int64)
    ranges = tl.zeros([], tl.int32)
    for at in range(0, reqs, BLOCK):
        req = at + tl.arange(0, BLOCK)
        live = req < reqs
        start, lens, end, more = _listed(lens_ptr, req, reqs, entries, bound, behind, window, chunk, capacity)
        tl.store(start_ptr + req, start, mask=live)
        tl.store(indptr_ptr + req + 1, end, mask=live)
        size, nominal = SIZES(lens, longest, shortest, a, b, c)
        size = tl.maximum(tl.maximum(size, min_size), tl.maximum(parts_of(lens, max_ranges), least_of_all))
        tl.store(size_ptr + req, size, mask=live)
        tl.store(nominal_ptr + req, nominal, mask=live)
        counts = parts_of(lens, size)
        _store_ranges(range_indptr_ptr, merge_indptr_ptr, req, live, counts, ranges, kv_heads)
        entries += more
        ranges += tl.sum(counts, 0)


@jit(do_not_specialize=("reqs", "bound", "behind", "window", "chunk", "capacity"))
def _count_shares_kernel(
    lens_ptr,
    start_ptr,
    indptr_ptr,
    tile_indptr_ptr,
    nominal_ptr,
    range_indptr_ptr,
    merge_indptr_ptr,
    reqs,
    bound,
    behind,
    window,
    chunk,
    capacity,
    kv_heads,
    shares,
    tile,
    BLOCK: tl.constexpr,
):
    entries = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int32)
    for at in range(0, reqs, BLOCK):
        req = at + tl.arange(0, BLOCK)
        _, lens, _, more = _listed(lens_ptr, req, reqs, entries, bound, behind, window, chunk, capacity)
        entries += more
        total += tl.sum(parts_of(lens, tile), 0)

    tl.store(indptr_ptr, 0)
    tl.store(tile_indptr_ptr, 0)
    tl.store(range_indptr_ptr, 0)
    tl.store(merge_indptr_ptr, 0)
    entries = tl.zeros([], tl.int64)
    tiles = tl.zeros([], tl.int32)
    ranges = tl.zeros([], tl.int32)
    for at in range(0, reqs, BLOCK):
        req = at + tl.arange(0, BLOCK)
        live = req < reqs
        start, lens, end, more = _listed(lens_ptr, req, reqs, entries, bound, behind, window, chunk, capacity)
        tl.store(start_ptr + req, start, mask=live)
        tl.store(indptr_ptr + req + 1, end, mask=live)
        own = parts_of(lens, tile)
        tile_end = tiles + tl.cumsum(own, 0)
        tl.store(tile_indptr_ptr + req + 1, tile_end, mask=live)
        # A range begins with the request, and with every share behind its first tile.
        inside = _begun(tile_end - 1, total, shares) - _begun(tile_end - own, total, shares)
        counts = tl.where(own > 0, inside + 1, 0)
        tl.store(nominal_ptr + req, counts, mask=live)
        _store_ranges(range_indptr_ptr, merge_indptr_ptr, req, live, counts, ranges, kv_heads)
        entries += more
        tiles += tl.sum(own, 0)
        ranges += tl.sum(counts, 0)


# Shares in a line of `total` tiles: share c holds those from c * total // shares on. Where there are fewer tiles than
# shares a share begins at every tile, and some hold nothing. Products pass 2^31.


@jit
def _border(share, total, shares):
    """The first tile of a share; that of share `shares` is the end of the line."""
    return (share.to(tl.int64) * total // shares).to(tl.int32)


@jit
def _last_share(tile, total, shares):
    """The last share that begins at a tile or before it."""
    return (((tile.to(tl.int64) + 1) * shares - 1) // tl.maximum(total, 1)).to(tl.int32)


@jit
def _begun(tile, total, shares):
    """How many of the places where shares begin are a tile or before it; shares that begin together have one place."""
    return tl.where(shares < total, _last_share(tile, total, shares), tile) + 1


@jit
def _place(number, total, shares):
    """The tile of one of those places, counted from 0; behind the last of them the end of the line."""
    return tl.where(shares < total, _border(number, total, shares), number)


# The second launch: every program writes a block.


@jit
def _owner(indptr_ptr, place, reqs, rounds):
    """Whose list each place lies in, by bisection: the last one that begins at the place or before it."""
    low = tl.zeros_like(place)
    high = low + reqs - 1
    for _ in range(rounds):
        middle = (low + high + 1) // 2
        begins = tl.load(indptr_ptr + middle) <= place
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low


@jit
def _store_slots(
    slots_ptr,
    entry,
    capacity,
    live,
    req,
    column,
    table_ptr,
    rows_ptr,
    pages_ptr,
    table_stride,
    table_rows,
    columns,
    num_pages,
    page_size,
    stride,
    TRANSLATED: tl.constexpr,
):
    """Storage ids of columns of the requests' rows; the sink where an entry is not live, or beyond the table."""
    row = tl.load(rows_ptr + req, mask=live, other=0).to(tl.int64)  # rows * columns may pass 2^31
    row = tl.minimum(tl.maximum(row, 0), table_rows - 1)
    inside = live & (column >= 0) & (column < columns)
    id = tl.load(table_ptr + row * table_stride + column, mask=inside, other=0)
    if TRANSLATED:
        id = storage_ids(id, live, pages_ptr, num_pages, page_size, stride)
    tl.store(slots_ptr + entry, id.to(tl.int64), mask=entry < capacity)


@jit
def _store_segment(segments_ptr, row, req, head, first, last, partial, mask):
    at = segments_ptr + row.to(tl.int64) * 5
    tl.store(at, req, mask=mask)
    tl.store(at + 1, head, mask=mask)
    tl.store(at + 2, first, mask=mask)
    tl.store(at + 3, last, mask=mask)
    tl.store(at + 4, partial, mask=mask)


@jit
def _deal_sizes(
    indptr_ptr,
    size_ptr,
    range_indptr_ptr,
    request_ptr,
    start_ptr,
    end_ptr,
    segments_ptr,
    program_indptr_ptr,
    number,
    reqs,
    rounds,
    ranges,
    kv_heads,
):
    """A block of ranges of a size, of which each has a program for each KV head: the original's dealing."""
    total = tl.load(range_indptr_ptr + reqs)
    live = number < total
    held = number < ranges
    req = tl.where(live, _owner(range_indptr_ptr, number, reqs, rounds), 0)
    first_range = tl.load(range_indptr_ptr + req)
    count = tl.load(range_indptr_ptr + req + 1) - first_range
    length = tl.load(indptr_ptr + req + 1) - tl.load(indptr_ptr + req)
    size = tl.load(size_ptr + req)
    start = tl.where(live, (number - first_range) * size, 0)
    end = tl.where(live, start + tl.minimum(size, length - start), 0)
    tl.store(request_ptr + number, req, mask=held)
    tl.store(start_ptr + number, start, mask=held)
    tl.store(end_ptr + number, end, mask=held)
    for head in range(kv_heads):
        row = number * kv_heads + head
        partial = tl.where(live, first_range * (kv_heads - 1) + head * count + number, 0)
        _store_segment(segments_ptr, row, req, head, start, end, partial, held)
        last = (number == ranges) & (head == 0)
        tl.store(program_indptr_ptr + row, tl.minimum(row, total * kv_heads), mask=held | last)


@jit
def _ranges_before(tile_indptr_ptr, range_indptr_ptr, tile, total, shares, reqs, rounds):
    """How many ranges begin before a tile at which a share begins, or before the end of the line."""
    req = _owner(tile_indptr_ptr, tile, reqs, rounds)
    first = tl.load(tile_indptr_ptr + req)
    within = _begun(tile, total, shares) - _begun(first, total, shares)
    return tl.where(tile < total, tl.load(range_indptr_ptr + req) + within, tl.load(range_indptr_ptr + reqs))


@jit
def _deal_shares(
    indptr_ptr,
    tile_indptr_ptr,
    range_indptr_ptr,
    request_ptr,
    start_ptr,
    end_ptr,
    segments_ptr,
    program_indptr_ptr,
    number,
    reqs,
    rounds,
    ranges,
    kv_heads,
    shares,
    tile,
):
    """A block of ranges that lie in shares, and of shares: program `c * kv_heads + h` reads share c for KV head h."""
    total = tl.load(tile_indptr_ptr + reqs)
    live = number < tl.load(range_indptr_ptr + reqs)
    held = number < ranges
    req = tl.where(live, _owner(range_indptr_ptr, number, reqs, rounds), 0)
    first_range = tl.load(range_indptr_ptr + req)
    count = tl.load(range_indptr_ptr + req + 1) - first_range
    first_tile = tl.load(tile_indptr_ptr + req)
    # The request's ranges end, one after the other, at the places of shares behind its first tile.
    place = _begun(first_tile, total, shares) + number - first_range
    begin = tl.maximum(_place(place - 1, total, shares), first_tile)
    until = tl.minimum(_place(place, total, shares), tl.load(tile_indptr_ptr + req + 1))
    length = tl.load(indptr_ptr + req + 1) - tl.load(indptr_ptr + req)
    start = tl.where(live, (begin - first_tile) * tile, 0)
    end = tl.where(live, tl.minimum((until - first_tile) * tile, length), 0)
    tl.store(request_ptr + number, req, mask=held)
    tl.store(start_ptr + number, start, mask=held)
    tl.store(end_ptr + number, end, mask=held)
    # Segments lie in the order of programs: those of a share for one KV head after those for the head before.
    share = tl.minimum(_last_share(begin, total, shares), shares - 1)
    before = _ranges_before(
        tile_indptr_ptr, range_indptr_ptr, _border(share, total, shares), total, shares, reqs, rounds
    )
    after = _ranges_before(
        tile_indptr_ptr, range_indptr_ptr, _border(share + 1, total, shares), total, shares, reqs, rounds
    )
    for head in range(kv_heads):
        row = before * kv_heads + head * (after - before) + number - before
        row = tl.where(live, row, number * kv_heads + head)
        partial = tl.where(live, first_range * (kv_heads - 1) + head * count + number, 0)
        _store_segment(segments_ptr, row, req, tl.where(live, head, 0), start, end, partial, held)

    own = tl.minimum(number, shares)
    before = _ranges_before(tile_indptr_ptr, range_indptr_ptr, _border(own, total, shares), total, shares, reqs, rounds)
    after = _ranges_before(
        tile_indptr_ptr, range_indptr_ptr, _border(own + 1, total, shares), total, shares, reqs, rounds
    )
    for head in range(kv_heads):
        last = (number == shares) & (head == 0)
        program = before * kv_heads + head * (after - before)
        tl.store(program_indptr_ptr + number * kv_heads + head, program, mask=(number < shares) | last)


@jit(
    do_not_specialize=(
        "slot_programs",
        "token_programs",
        "num_pages",
        "stride",
        "reqs",
        "rounds",
        "entries",
        "tokens",
        "bound",
        "behind",
        "ranges",
    )
)
def _write_kernel(
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
    request_ptr,
    range_start_ptr,
    range_end_ptr,
    segments_ptr,
    program_indptr_ptr,
    slot_programs,
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
    ranges,
    kv_heads,
    shares,
    tile,
    TRANSLATED: tl.constexpr,
    NEWEST: tl.constexpr,
    SHARED: tl.constexpr,
    ENTRIES: tl.constexpr,
    RANGES: tl.constexpr,
):
    program = tl.program_id(0)
    if program < slot_programs:
        entry = program * ENTRIES + tl.arange(0, ENTRIES)
        req = _owner(indptr_ptr, entry, reqs, rounds)
        column = tl.load(start_ptr + req) + entry - tl.load(indptr_ptr + req)
        live = entry < tl.load(indptr_ptr + reqs)
        _store_slots(
            slots_ptr,
            entry,
            entries,
            live,
            req,
            column,
            table_ptr,
            rows_ptr,
            pages_ptr,
            table_stride,
            table_rows,
            columns,
            num_pages,
            page_size,
            stride,
            TRANSLATED,
        )
    elif program < slot_programs + token_programs:
        token = (program - slot_programs) * ENTRIES + tl.arange(0, ENTRIES)
        if NEWEST:
            # One a request, its last. That of a padded row lies beyond the table, where only the sink is found.
            req = token
            live = token < tokens
            end = tl.minimum(tl.load(new_ptr + req, mask=live, other=0), bound)
            column = tl.where(end > 0, end - behind, columns)
        else:
            req = _owner(new_indptr_ptr, token, reqs, rounds)
            live = token < tl.load(new_indptr_ptr + reqs)
            column = tl.load(new_ptr + req) + token - tl.load(new_indptr_ptr + req)
        _store_slots(
            write_ptr,
            token,
            tokens,
            live,
            req,
            column,
            table_ptr,
            rows_ptr,
            pages_ptr,
            table_stride,
            table_rows,
            columns,
            num_pages,
            page_size,
            stride,
            TRANSLATED,
        )
    else:
        number = (program - slot_programs - token_programs) * RANGES + tl.arange(0, RANGES)
        if SHARED:
            _deal_shares(
                indptr_ptr,
                unit_ptr,
                range_indptr_ptr,
                request_ptr,
                range_start_ptr,
                range_end_ptr,
                segments_ptr,
                program_indptr_ptr,
                number,
                reqs,
                rounds,
                ranges,
                kv_heads,
                shares,
                tile,
            )
        else:
            _deal_sizes(
                indptr_ptr,
                unit_ptr,
                range_indptr_ptr,
                request_ptr,
                range_start_ptr,
                range_end_ptr,
                segments_ptr,
                program_indptr_ptr,
                number,
                reqs,
                rounds,
                ranges,
                kv_heads,
            )
