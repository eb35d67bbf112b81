"""Index lists on the device: the Triton half of PlanOps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlab._triton import jit, release_dependents, tl
from attnlab.kernels.drafts import drafts_kernel, fill_drafts
from attnlab.kernels.index_core import first_seen, storage_ids
from attnlab.kernels.lanes import cut_for_kernels, lane_in_two_launches
from attnlab.kernels.target import Target, launching_on
from attnlab.memory.pool import Translation
from attnlab.plan.lanes import LaneWork
from attnlab.plan.layout import DraftLists, Extent
from attnlab.plan.ops import check_joined
from attnlab.plan.parts import lane_of_parts
from attnlab.plan.plans import Lane
from attnlab.plan.policy import SplitContext, SplitPolicy, SplitSizes
from attnlab.spec import Sight

_BLOCK = 512


class TritonPlanOps:
    """PlanOps in Triton kernels, launched on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.target = device, Target.of(device)

    def pad(self, rows: Tensor, lens: Sequence[Tensor], *, max_requests: int) -> tuple[Tensor, ...]:
        """Computes: copies of rows and lengths, which are 0 where the row is not one of 0 to `max_requests` - 1.

        Shapes: `rows` `[reqs]` integers, `lens` one or two of `[reqs]` int32. Grid: a program per 512 requests.
        Reads/writes: nothing else. One launch, as a copy of each would take as long.
        """
        given = [x.contiguous() for x in (rows, *lens)]
        made = [torch.empty_like(x) for x in given]
        if rows.shape[0]:
            with launching_on(self.device):
                _pad_kernel[(-(-rows.shape[0] // _BLOCK),)](
                    *(given[0], given[1], given[-1]),
                    *(made[0], made[1], made[-1]),
                    rows.shape[0],
                    max_requests,
                    BLOCK=_BLOCK,
                    PDL=self.target.has_pdl,
                )
        return tuple(made)

    def lane(self, work: LaneWork) -> Lane:
        """Return a lane: in two launches where kernels know the policy's cut, else part by part."""
        cut = cut_for_kernels(work)
        if cut is None:
            return lane_of_parts(self, work)
        with launching_on(self.device):
            return lane_in_two_launches(work, cut, self.target)

    def extent(self, *, query: Tensor, end: Tensor, sight: Sight, align: int, capacity: int) -> Extent:
        """Computes: start_visible = min(first position seen from query, end), start = that rounded down to `align`
        (`end` where the list is empty), indptr = their running sum, held to `capacity`.

        Shapes: `query`, `end` `[reqs]` int32. Grid: one program, which carries the running sum over all requests.
        """
        reqs = end.shape[0]
        start, visible = torch.empty_like(end), torch.empty_like(end)
        indptr = torch.zeros(reqs + 1, dtype=torch.int32, device=end.device)
        if reqs:
            with launching_on(self.device):
                _extent_kernel[(1,)](
                    query,
                    end,
                    start,
                    visible,
                    indptr,
                    reqs,
                    sight.window or 0,
                    sight.chunk or 0,
                    align,
                    capacity,
                    BLOCK=_BLOCK,
                )
        return Extent(start=start, start_visible=visible, indptr=indptr)

    def gather(
        self, *, table: Tensor, rows: Tensor, start: Tensor, first: Tensor, indptr: Tensor, capacity: int
    ) -> Tensor:
        """Computes: entry `indptr[r] + j` of the result = `table[rows[r], max(start[r] + j, first[r])]`, int64; the
        tail is 0.

        Shapes: `table [max_requests, max_context]` int32; `rows`, `start`, `first` `[reqs]`; `indptr [reqs + 1]` int32.
        Grid: one program per request, which copies its row in chunks.
        Reads/writes: nothing else; columns are kept inside the table, beyond which ids are 0.
        """
        ids = torch.zeros(capacity, dtype=torch.int64, device=table.device)
        if rows.shape[0] and capacity:
            with launching_on(self.device):
                _gather_kernel[(rows.shape[0],)](
                    table, rows, start, first, indptr, ids, table.stride(0), table.shape[1], BLOCK=_BLOCK
                )
        return ids

    def gather_shard(
        self,
        ids: Tensor,
        *,
        table: Tensor,
        rows: Tensor,
        first: Tensor,
        lens: Tensor,
        starts: Tensor,
        ranks: int,
    ) -> None:
        """Computes: `ids[starts[r] + j]` = `table[rows[r], first[r] + j * ranks] // ranks` for j below `lens[r]`.

        Shapes: `table [max_requests, max_context]` int32; `rows`, `first`, `lens`, `starts` `[reqs]` integers; `ids`
        of any length. Grid: one program per request, which fills its list in chunks.
        Reads/writes: nothing else; columns are kept inside the table, entries inside `ids`.
        """
        if rows.shape[0] and ids.shape[0]:
            with launching_on(self.device):
                _gather_shard_kernel[(rows.shape[0],)](
                    table,
                    rows,
                    first,
                    lens,
                    starts,
                    ids,
                    ids.shape[0],
                    table.stride(0),
                    table.shape[1],
                    ranks,
                    BLOCK=_BLOCK,
                )

    def join(
        self, *, first: Tensor, first_indptr: Tensor, second: Tensor, second_indptr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes: each request's entries of `first`, then those of `second`, int64, and the offsets, int32.

        Shapes: lists of any length, offsets `[reqs + 1]`, which ascend. Grid: one program per request.
        Reads/writes: live entries alone; the tail of the result is 0.
        """
        check_joined(first_indptr, second_indptr)
        joined = torch.zeros(first.shape[0] + second.shape[0], dtype=torch.int64, device=first.device)
        reqs = first_indptr.shape[0] - 1
        indptr = torch.zeros(reqs + 1, dtype=torch.int32, device=first.device)
        if reqs:
            with launching_on(self.device):
                _join_kernel[(reqs,)](
                    first,
                    first_indptr,
                    second,
                    second_indptr,
                    joined,
                    indptr,
                    first.shape[0],
                    second.shape[0],
                    BLOCK=_BLOCK,
                )
        return joined, indptr

    def translate(self, ids: Tensor, indptr: Tensor, translation: Translation) -> Tensor:
        """Computes: `pages[id // page_size] * stride + id % page_size` for the live entries, 0 where there is no page.

        Shapes: `ids [capacity]` int64, `indptr [reqs + 1]` int32 (its last entry says how many are live).
        Grid: one program per 512 entries.
        """
        pages = translation.pages
        if pages is None:
            live = torch.arange(ids.shape[0], device=ids.device) < indptr[-1]
            return torch.where(live, ids.long(), 0)
        translated = torch.zeros_like(ids, dtype=torch.int64)
        if ids.shape[0]:
            with launching_on(self.device):
                _translate_kernel[(-(-ids.shape[0] // _BLOCK),)](
                    ids,
                    indptr[-1:],
                    pages,
                    translated,
                    pages.shape[0],
                    translation.page_size,
                    translation.stride,
                    BLOCK=_BLOCK,
                )
        return translated

    def mask_offsets(self, new: Tensor, keys: Tensor) -> Tensor:
        """Computes: the running sum of `new x keys`, int64, from 0. Grid: one program, which carries it."""
        reqs = new.shape[0]
        offsets = torch.zeros(reqs + 1, dtype=torch.int64, device=new.device)
        if reqs:
            with launching_on(self.device):
                _mask_offsets_kernel[(1,)](new, keys, offsets, reqs, BLOCK=_BLOCK)
        return offsets

    def write_causal(self, bits: Tensor, offsets: Tensor, new: Tensor, keys: Tensor, *, most: int) -> None:
        """Computes: entry (i, j) of request r = j <= keys[r] - new[r] + i.

        Shapes: `bits [pairs]` uint8, `offsets [reqs + 1]` int64, `new` and `keys` `[reqs]` int32.
        Grid: (requests, most): a program owns the row of one new token.
        Reads/writes: of `bits`, live rows alone, and none beyond its end.
        """
        if new.shape[0] and most and bits.shape[0]:
            with launching_on(self.device):
                _causal_kernel[(new.shape[0], most)](bits, offsets, new, keys, bits.shape[0], BLOCK=_BLOCK)

    def drafts(
        self,
        *,
        table: Tensor,
        rows: Tensor,
        cached: Tensor,
        stride: Tensor,
        topk: int,
        steps: int,
        sight: Sight,
        translation: Translation,
        capacity: int,
    ) -> DraftLists:
        """Return what every branch sees in every step: see `attnlab.kernels.drafts`."""
        branches = rows.shape[0] * topk
        lists = DraftLists.zeros(steps=steps, branches=branches, capacity=capacity, device=table.device)
        if branches and steps:
            with launching_on(self.device):
                fill_drafts(lists, table, rows, cached, stride, topk=topk, sight=sight, translation=translation)
        return lists

    def sizes(self, policy: SplitPolicy, lens: Tensor, ctx: SplitContext) -> SplitSizes:
        """Return the policy's range sizes, from its Triton half where it has one."""
        with launching_on(self.device):
            return policy.sizes_triton(lens, ctx)


@jit(do_not_specialize=("reqs",))
def _pad_kernel(
    rows_ptr,
    lens_ptr,
    more_lens_ptr,
    own_rows_ptr,
    own_lens_ptr,
    own_more_lens_ptr,
    reqs,
    max_requests,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        release_dependents()  # a lane's first kernel is launched by now, and waits
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = req < reqs
    row = tl.load(rows_ptr + req, mask=live, other=0)
    inside = live & (row >= 0) & (row < max_requests)
    tl.store(own_rows_ptr + req, row, mask=live)
    tl.store(own_lens_ptr + req, tl.load(lens_ptr + req, mask=inside, other=0), mask=live)
    tl.store(own_more_lens_ptr + req, tl.load(more_lens_ptr + req, mask=inside, other=0), mask=live)


@jit(do_not_specialize=("reqs", "window", "chunk", "align", "capacity"))
def _extent_kernel(
    query_ptr,
    end_ptr,
    start_ptr,
    visible_ptr,
    indptr_ptr,
    reqs,
    window,
    chunk,
    align,
    capacity,
    BLOCK: tl.constexpr,
):
    # Reference: update_sliding_window_buffer, but for its decode window, which is one key short.
    total = tl.zeros([], tl.int64)
    for at in range(0, reqs, BLOCK):
        req = at + tl.arange(0, BLOCK)
        live = req < reqs
        query = tl.load(query_ptr + req, mask=live, other=0)
        end = tl.load(end_ptr + req, mask=live, other=0)
        first = tl.minimum(first_seen(query, window, chunk), end)
        start = tl.where(first < end, first // align * align, end)
        ends = total + tl.cumsum((end - start).to(tl.int64), 0)
        total += tl.sum((end - start).to(tl.int64), 0)
        tl.store(visible_ptr + req, first, mask=live)
        tl.store(start_ptr + req, start, mask=live)
        tl.store(indptr_ptr + req + 1, tl.minimum(ends, capacity).to(tl.int32), mask=live)


@jit
def _gather_kernel(
    table_ptr,
    rows_ptr,
    start_ptr,
    first_ptr,
    indptr_ptr,
    ids_ptr,
    table_stride,
    columns,
    BLOCK: tl.constexpr,
):
    # Reference: create_flashinfer_kv_indices_triton.
    req = tl.program_id(0)
    row = tl.load(rows_ptr + req).to(tl.int64)  # rows * columns may pass 2^31
    start = tl.load(start_ptr + req)
    first = tl.load(first_ptr + req)
    list_start = tl.load(indptr_ptr + req)
    list_end = tl.load(indptr_ptr + req + 1)
    for at in range(list_start, list_end, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        column = tl.maximum(start + entry - list_start, first)
        live = entry < list_end
        inside = live & (column >= 0) & (column < columns)
        id = tl.load(table_ptr + row * table_stride + column, mask=inside, other=0)
        tl.store(ids_ptr + entry, id.to(tl.int64), mask=live)


@jit(do_not_specialize=("capacity", "ranks"))
def _gather_shard_kernel(
    table_ptr,
    rows_ptr,
    first_ptr,
    lens_ptr,
    starts_ptr,
    ids_ptr,
    capacity,
    table_stride,
    columns,
    ranks,
    BLOCK: tl.constexpr,
):
    # Reference: create_triton_kv_indices_for_dcp_triton.
    req = tl.program_id(0)
    row = tl.load(rows_ptr + req).to(tl.int64)  # rows * columns may pass 2^31
    first = tl.load(first_ptr + req).to(tl.int64)
    list_start = tl.load(starts_ptr + req).to(tl.int64)
    # Entries in front of the buffer or behind it are nobody's.
    begin = tl.maximum(-list_start, 0)
    end = tl.minimum(tl.load(lens_ptr + req).to(tl.int64), capacity - list_start)
    for at in range(begin, end, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        column = first + entry * ranks
        live = entry < end
        inside = live & (column >= 0) & (column < columns)
        id = tl.load(table_ptr + row * table_stride + column, mask=inside, other=0)
        tl.store(ids_ptr + list_start + entry, (id // ranks).to(tl.int64), mask=live)


@jit
def _held(offset, length):
    """An offset that lies in a list of that length, whatever was given."""
    return tl.maximum(tl.minimum(offset, length), 0)


@jit(do_not_specialize=("first_length", "second_length"))
def _join_kernel(
    first_ptr,
    first_indptr_ptr,
    second_ptr,
    second_indptr_ptr,
    joined_ptr,
    indptr_ptr,
    first_length,
    second_length,
    BLOCK: tl.constexpr,
):
    # Reference: build_unified_kv_indices. Offsets beyond a list would be read and written beyond it: they are held.
    req = tl.program_id(0)
    first_start = _held(tl.load(first_indptr_ptr + req), first_length)
    first_end = _held(tl.load(first_indptr_ptr + req + 1), first_length)
    second_start = _held(tl.load(second_indptr_ptr + req), second_length)
    second_end = _held(tl.load(second_indptr_ptr + req + 1), second_length)
    # Lists need not begin with the first entry, the joined one does.
    base = _held(tl.load(first_indptr_ptr), first_length) + _held(tl.load(second_indptr_ptr), second_length)
    tl.store(indptr_ptr + req + 1, (first_end + second_end - base).to(tl.int32))
    for at in range(first_start, first_end, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        id = tl.load(first_ptr + entry, mask=entry < first_end)
        tl.store(joined_ptr + entry + second_start - base, id.to(tl.int64), mask=entry < first_end)
    for at in range(second_start, second_end, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        id = tl.load(second_ptr + entry, mask=entry < second_end)
        tl.store(joined_ptr + entry + first_end - base, id.to(tl.int64), mask=entry < second_end)


@jit(do_not_specialize=("num_pages", "stride"))
def _translate_kernel(ids_ptr, total_ptr, pages_ptr, translated_ptr, num_pages, page_size, stride, BLOCK: tl.constexpr):
    # Reference: translate_kv_loc, translate_kv_loc_dense, translate_loc_from_full_to_swa.
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = entry < tl.load(total_ptr)
    id = tl.load(ids_ptr + entry, mask=live, other=0)
    tl.store(translated_ptr + entry, storage_ids(id, live, pages_ptr, num_pages, page_size, stride), mask=live)


@jit(do_not_specialize=("reqs",))
def _mask_offsets_kernel(new_ptr, keys_ptr, offsets_ptr, reqs, BLOCK: tl.constexpr):
    total = tl.zeros([], tl.int64)
    for at in range(0, reqs, BLOCK):
        req = at + tl.arange(0, BLOCK)
        new = tl.load(new_ptr + req, mask=req < reqs, other=0).to(tl.int64)
        pairs = new * tl.load(keys_ptr + req, mask=req < reqs, other=0).to(tl.int64)
        tl.store(offsets_ptr + req + 1, total + tl.cumsum(pairs, 0), mask=req < reqs)
        total += tl.sum(pairs, 0)


@jit(do_not_specialize=("pairs",))
def _causal_kernel(bits_ptr, offsets_ptr, new_ptr, keys_ptr, pairs, BLOCK: tl.constexpr):
    req, query = tl.program_id(0), tl.program_id(1)
    new, keys = tl.load(new_ptr + req), tl.load(keys_ptr + req)
    if query >= new:
        return
    row = tl.load(offsets_ptr + req) + query.to(tl.int64) * keys
    for at in range(0, keys, BLOCK):
        column = at + tl.arange(0, BLOCK)
        visible = column <= keys - new + query
        tl.store(bits_ptr + row + column, visible.to(tl.uint8), mask=(column < keys) & (row + column < pairs))


KERNELS = {
    "pad": _pad_kernel,
    "gather": _gather_kernel,
    "gather shard": _gather_shard_kernel,
    "extent": _extent_kernel,
    "join": _join_kernel,
    "translate": _translate_kernel,
    "drafts": drafts_kernel,
    "mask offsets": _mask_offsets_kernel,
    "write causal": _causal_kernel,
}
"""By the name of the function of PlanOps that launches each."""
