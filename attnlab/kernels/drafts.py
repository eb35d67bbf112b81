"""The lists of all steps of a draft, in one launch: the Triton half of `PlanOps.drafts`.

Reference: generate_draft_decode_kv_indices, which knows neither windows nor other id spaces.
"""

from __future__ import annotations

from torch import Tensor

from attnlab._triton import jit, tl
from attnlab.kernels.index_core import first_seen, storage_ids
from attnlab.memory.pool import Translation
from attnlab.plan.layout import DraftLists
from attnlab.spec import Sight

BLOCK = 512


def fill_drafts(
    lists: DraftLists,
    table: Tensor,
    rows: Tensor,
    cached: Tensor,
    stride: Tensor,
    *,
    topk: int,
    sight: Sight,
    translation: Translation,
) -> None:
    """Computes: in row i, for branch `z = r * topk + t`, storage ids of the tokens from the first in sight of position
    `cached[r] + i` up to `cached[r]`, then those of its own i + 1 drafts, whose columns begin at
    `cached[r] + t * stride[r]`; and their offsets, first positions and newest ids.

    Shapes: `table [max_requests, max_context]` int32; `rows`, `cached`, `stride` `[reqs]`; at least one of each.
    Grid: one program per branch and step, which adds up what lies before its list and copies it in chunks.
    Reads/writes: columns are kept inside the table, entries inside the lists; offset 0 and the tails stay 0.
    """
    steps, branches = lists.start.shape
    drafts_kernel[(branches, steps)](
        table,
        rows,
        cached,
        stride,
        translation.pages,
        lists.start,
        lists.indptr,
        lists.slots,
        lists.write,
        table.stride(0),
        table.shape[1],
        lists.start.stride(0),
        lists.indptr.stride(0),
        lists.slots.stride(0),
        lists.write.stride(0),
        topk,
        sight.window or 0,
        sight.chunk or 0,
        0 if translation.pages is None else translation.pages.shape[0],
        translation.page_size,
        translation.stride,
        lists.slots.shape[1],
        TRANSLATED=translation.pages is not None,
        BLOCK=BLOCK,
    )


@jit
def _drafted(cached, step, window, chunk):
    """First position and end of the lists of a step; both 0 where nothing is cached."""
    end = tl.where(cached > 0, cached + step + 1, 0)
    return tl.minimum(first_seen(end - 1, window, chunk), end), end


@jit(
    do_not_specialize=(
        "start_stride",
        "indptr_stride",
        "slots_stride",
        "write_stride",
        "window",
        "chunk",
        "num_pages",
        "stride",
        "capacity",
    )
)
def drafts_kernel(
    table_ptr,
    rows_ptr,
    cached_ptr,
    branch_stride_ptr,
    pages_ptr,
    start_ptr,
    indptr_ptr,
    slots_ptr,
    write_ptr,
    table_stride,
    columns,
    start_stride,
    indptr_stride,
    slots_stride,
    write_stride,
    topk,
    window,
    chunk,
    num_pages,
    page_size,
    stride,
    capacity,
    TRANSLATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    branch, step = tl.program_id(0), tl.program_id(1)
    req = branch // topk
    before = tl.zeros([], tl.int64)
    for at in range(0, req, BLOCK):
        other = at + tl.arange(0, BLOCK)
        first, end = _drafted(tl.load(cached_ptr + other, mask=other < req, other=0), step, window, chunk)
        before += tl.sum((end - first).to(tl.int64), 0)
    cached = tl.load(cached_ptr + req)
    first, end = _drafted(cached, step, window, chunk)
    before = before * topk + (branch % topk).to(tl.int64) * (end - first)
    list_start = tl.minimum(before, capacity).to(tl.int32)
    list_end = tl.minimum(before + (end - first), capacity).to(tl.int32)
    line = step.to(tl.int64)  # steps * capacity may pass 2^31
    tl.store(start_ptr + line * start_stride + branch, first)
    tl.store(indptr_ptr + line * indptr_stride + branch + 1, list_end)

    row = table_ptr + tl.load(rows_ptr + req).to(tl.int64) * table_stride
    drafts = branch % topk * tl.load(branch_stride_ptr + req)  # how far behind its position a draft's column lies
    for at in range(list_start, list_end, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        position = first + entry - list_start
        column = tl.where(position < cached, position, position + drafts)
        live = (entry < list_end) & (column < columns)
        id = tl.load(row + column, mask=live, other=0)
        if TRANSLATED:
            id = storage_ids(id, live, pages_ptr, num_pages, page_size, stride)
        tl.store(slots_ptr + line * slots_stride + entry, id.to(tl.int64), mask=entry < list_end)

    newest = cached + step + drafts
    live = (cached > 0) & (newest < columns)
    id = tl.load(row + newest, mask=live, other=0)
    if TRANSLATED:
        id = storage_ids(id, live, pages_ptr, num_pages, page_size, stride)
    tl.store(write_ptr + line * write_stride + branch, id.to(tl.int64))
