"""What hypothesis draws from: lengths at the borders where index arithmetic breaks, contexts, filled request tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab.memory.requests import RequestTable
from attnlab.memory.slots import SlotAllocator
from attnlab.plan.policy import SplitContext

DEVICE = "cpu" if INTERPRETED else "cuda"
"""Where Triton kernels of this process run; the eager twins run there too."""

BORDERS = (0, 1, 2, 31, 32, 33, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 131_072, 1_000_000)
"""Empty, one key, and the borders of a block of keys, of a tile, of a copy chunk; long contexts."""

PAGE_SIZES = (1, 2, 16)


def lengths(max_len: int = 1_000_000) -> st.SearchStrategy[int]:
    """One request's length: a border as likely as any other number."""
    return st.one_of(st.sampled_from([n for n in BORDERS if n <= max_len]), st.integers(0, max_len))


def lens(max_len: int = 1_000_000, *, min_reqs: int = 0, max_reqs: int = 8) -> st.SearchStrategy[list[int]]:
    """A batch's lengths."""
    return st.lists(lengths(max_len), min_size=min_reqs, max_size=max_reqs)


@st.composite
def contexts(draw: st.DrawFn) -> SplitContext:
    """What a policy may look at: MHA, GQA with odd groups, MQA, MLA; small and large devices, or none known."""
    mla = draw(st.booleans())
    kv_heads = 1 if mla else draw(st.sampled_from([1, 2, 3, 8]))
    return SplitContext(
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7, 16, 20, 128])),
        kv_heads=kv_heads,
        v_dim=64,
        mla=mla,
        context_len=1_000_000,
        multiprocessors=draw(st.sampled_from([None, 1, 8, 78, 108, 114, 132, 304])),
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """A request table, its requests' rows and lengths, and where their slots are, as plain lists."""

    table: RequestTable
    rows: list[int]
    lens: list[int]
    slots: list[list[int]]

    @property
    def row_tensor(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int64, device=self.table.slots.device)


@st.composite
def tables(draw: st.DrawFn, max_len: int = 1_300, max_reqs: int = 5) -> Held:
    """A table whose requests came in mixed order and lie in permuted pages; what nobody owns is -1."""
    lengths_drawn = draw(lens(max_len, max_reqs=max_reqs))
    page_size = draw(st.sampled_from(PAGE_SIZES))
    shuffle = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    pages = sum(-(-n // page_size) for n in lengths_drawn) + 4
    allocator = SlotAllocator(num_slots=pages * page_size, page_size=page_size)
    # Page 0, the sink, stays where it is.
    place = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(pages - 1, generator=shuffle)])
    table = RequestTable(
        max_requests=len(lengths_drawn) + 2, max_context=max_len, num_slots=pages * page_size, device=DEVICE
    )
    table.slots.fill_(-1)
    rows = [table.admit() for _ in range(table.max_requests)]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=shuffle).tolist()][: len(lengths_drawn)]
    held = []
    for row, n in zip(rows, lengths_drawn, strict=True):
        given = allocator.allocate(row, n)
        slots = place[given // page_size] * page_size + given % page_size
        table.append(row, slots)
        held.append(slots.tolist())
    return Held(table=table, rows=rows, lens=lengths_drawn, slots=held)


@st.composite
def cut_batches(draw: st.DrawFn, max_len: int = 300) -> list[list[tuple[int, int]]]:
    """Requests cut anywhere: for each, consecutive ranges from 0 to its length; none where it is empty."""
    batch = []
    for n in draw(lens(max_len, max_reqs=5)):
        inner = draw(st.sets(st.integers(1, n - 1), max_size=6)) if n > 1 else set()
        borders = sorted({0, n} | inner)
        batch.append(list(zip(borders, borders[1:], strict=False)))
    return batch
