"""Device functions that index kernels share: where a query's sight begins, and what lies behind a page table."""

from __future__ import annotations

from attnlab._triton import jit, tl


@jit
def first_seen(query, window, chunk):
    """First positions that queries see, at least 0; 0 stands for no window, and for no chunk."""
    first = tl.where(window > 0, tl.maximum(query - window + 1, 0), 0)
    return tl.where(chunk > 0, tl.maximum(first, query // tl.maximum(chunk, 1) * chunk), first)


@jit
def storage_ids(ids, live, pages_ptr, num_pages, page_size, stride):
    """Ids behind the page table; 0, the sink, where there is no page."""
    page = ids // page_size
    known = live & (ids >= 0) & (page < num_pages)
    stored = tl.load(pages_ptr + page, mask=known, other=-1)
    return tl.where(stored >= 0, stored * stride + ids % page_size, 0)
