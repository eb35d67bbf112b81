"""The first of a lane's two launches: one program counts what requests have, and where their parts begin.

Reference: update_sliding_window_buffer and get_num_kv_splits_triton, which the original launches one after the other.
"""

from __future__ import annotations

from typing import Any

from attnlab._triton import jit, release_dependents, tl, wait_for_earlier
from attnlab.arguments import Arguments, Names
from attnlab.kernels.index_core import first_seen
from attnlab.kernels.lane_memory import LaneMemory
from attnlab.kernels.launch import early_launch
from attnlab.kernels.launcher import Launcher
from attnlab.kernels.shares import begun
from attnlab.kernels.target import Target
from attnlab.plan.lanes import LaneWork
from attnlab.plan.policy import SharePolicy
from attnlab.plan.size_rules import SizeRule, parts_of

REQUESTS = 512
"""Requests that are counted at once."""
LISTED = ("reqs", "bound", "behind", "window", "chunk", "capacity")
OF_SIZES = Names(
    pointers=("lens_ptr", "start_ptr", "indptr_ptr", "size_ptr", "nominal_ptr", "range_indptr_ptr"),
    free=(*LISTED, "min_size", "max_ranges", "in_all", "a", "b", "c"),
)
OF_SHARES = Names(
    pointers=("lens_ptr", "start_ptr", "indptr_ptr", "tile_indptr_ptr", "nominal_ptr", "range_indptr_ptr"),
    free=(*LISTED, "shares", "tile"),
)


def count_lane(work: LaneWork, cut: SharePolicy | SizeRule, memory: LaneMemory, target: Target) -> None:
    """Computes: of all requests the first positions, the offsets of lists and of ranges, and the range sizes.

    Under even shares there are no sizes, but offsets of tiles in the line of all. Grid: one program, which goes over
    all requests twice: for what a rule weighs, or a share is a share of, and for the running sums.
    Reads/writes: lengths are held to their bound, lists to `work.entries`.
    """
    pointers = (
        work.lens.device,
        memory.start,
        memory.indptr,
        memory.unit,
        memory.nominal,
        memory.range_indptr,
    )
    lists = (
        work.lens.count,
        work.lens.bound_max,
        work.behind,
        work.sight.window or 0,
        work.sight.chunk or 0,
        work.entries,
    )
    if isinstance(cut, SharePolicy):
        counted = Arguments(OF_SHARES, pointers, free=(*lists, cut.shares(work.ctx), cut.tile))
        COUNT_SHARES.launch(target, (1, 1, 1), (counted,), target=target)
        return
    bounds = work.bounds
    promised = (bounds.min_size, bounds.max_ranges, bounds.in_all or 0)
    counted = Arguments(OF_SIZES, pointers, free=(*lists, *promised, *cut.numbers))
    COUNT_SIZES.launch(target, (1, 1, 1), (counted,), rule=cut.function, target=target)


@jit
def _listed(lens_ptr, req, reqs, before, bound, behind, window, chunk, capacity):
    """Of a block of requests: each list's first position, length and end among all; and how many entries they add.

    `before` entries lie before theirs. What was promised, `bound` of each and `capacity` of all, cuts off the rest.
    """
    end = tl.minimum(tl.maximum(tl.load(lens_ptr + req, mask=req < reqs, other=0), 0), bound)
    start = tl.minimum(first_seen(end - behind, window, chunk), end)
    own = (end - start).to(tl.int64)
    ends = before + tl.cumsum(own, 0)
    length = tl.minimum(ends, capacity) - tl.minimum(ends - own, capacity)
    return start, length.to(tl.int32), tl.minimum(ends, capacity).to(tl.int32), tl.sum(own, 0)


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
def count_sizes_kernel(
    lens_ptr,
    start_ptr,
    indptr_ptr,
    size_ptr,
    nominal_ptr,
    range_indptr_ptr,
    reqs,
    bound,
    behind,
    window,
    chunk,
    capacity,
    min_size,
    max_ranges,
    in_all,
    a,
    b,
    c,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_earlier()
        release_dependents()  # what is launched behind it waits until all is written
    entries = tl.zeros([], tl.int64)
    longest = tl.full([], 1, tl.int32)
    shortest = tl.full([], 2147483647, tl.int32)
    for at in range(0, reqs, BLOCK):
        req = at + tl.arange(0, BLOCK)
        _, lens, _, more = _listed(lens_ptr, req, reqs, entries, bound, behind, window, chunk, capacity)
        entries += more
        longest = tl.maximum(longest, tl.max(lens, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(lens > 0, lens, 2147483647), 0))
    shortest = tl.minimum(shortest, longest)
    # Sizes that would break what is promised of all ranges together are raised.
    total = tl.minimum(entries, capacity)
    least_of_all = tl.where(in_all > 0, (total + in_all - 1) // tl.maximum(in_all, 1), 0).to(tl.int32)

    tl.store(indptr_ptr, 0)
    tl.store(range_indptr_ptr, 0)
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
        tl.store(range_indptr_ptr + req + 1, ranges + tl.cumsum(counts, 0), mask=live)
        entries += more
        ranges += tl.sum(counts, 0)


@jit(do_not_specialize=("reqs", "bound", "behind", "window", "chunk", "capacity", "shares", "tile"))
def count_shares_kernel(
    lens_ptr,
    start_ptr,
    indptr_ptr,
    tile_indptr_ptr,
    nominal_ptr,
    range_indptr_ptr,
    reqs,
    bound,
    behind,
    window,
    chunk,
    capacity,
    shares,
    tile,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_earlier()
        release_dependents()
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
        # A range begins with the request, and wherever shares begin behind its first tile.
        inside = begun(tile_end - 1, total, shares) - begun(tile_end - own, total, shares)
        counts = tl.where(own > 0, inside + 1, 0)
        tl.store(nominal_ptr + req, counts, mask=live)
        tl.store(range_indptr_ptr + req + 1, ranges + tl.cumsum(counts, 0), mask=live)
        entries += more
        tiles += tl.sum(own, 0)
        ranges += tl.sum(counts, 0)


def _sizes_constants(*, rule: Any, target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    constants, options = _shares_constants(target=target)
    return {"SIZES": rule, **constants}, options


def _shares_constants(*, target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"BLOCK": REQUESTS, "PDL": target.has_pdl}, {**early_launch(target)}


COUNT_SIZES = Launcher(count_sizes_kernel, _sizes_constants)
COUNT_SHARES = Launcher(count_shares_kernel, _shares_constants)
