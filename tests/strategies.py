"""What hypothesis draws from: lengths at the borders where index arithmetic breaks, contexts, tables, extend calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab.memory.requests import RequestTable
from attnlab.memory.slots import SlotAllocator
from attnlab.mods.registry import score_mods
from attnlab.plan.policy import SplitContext
from tests.cases import FP8
from tests.extend_cases import CONTEXT, Case

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
    """What a policy may look at: MHA, GQA with odd groups, MQA, MLA; small and large devices; decodes and verifies."""
    mla = draw(st.booleans())
    kv_heads = 1 if mla else draw(st.sampled_from([1, 2, 3, 8]))
    return SplitContext(
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7, 16, 20, 128])),
        kv_heads=kv_heads,
        v_dim=64,
        mla=mla,
        context_len=1_000_000,
        multiprocessors=draw(st.sampled_from([None, 1, 8, 78, 108, 114, 132, 304])),
        head_tile=draw(st.sampled_from([16, 64] if mla else [16])),
        drafts=draw(st.none() | st.integers(1, 64)),
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
        max_requests=len(lengths_drawn) + 2,
        max_context=max_len,
        num_slots=pages * page_size,
        device=DEVICE,
        page_size=page_size,
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


DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
    (torch.float32, torch.bfloat16),
)
"""Of queries and of the cache."""

NEAR = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
"""Lengths at the borders of extend's tiles of queries and keys."""


def requests(*, small: bool) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Cached and new tokens of one to five requests: a border as likely as any other number. Many requests are short.

    `small` is for kernels that are interpreted.
    """
    most, longest = (2, 200) if small else (5, CONTEXT)
    lengths = st.one_of(st.sampled_from([n for n in NEAR if n <= longest]), st.integers(0, longest))

    def of(count: int) -> st.SearchStrategy[list[tuple[int, int]]]:
        new = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65]), st.integers(0, 140 // count))
        pairs = st.tuples(lengths, new).map(lambda pair: (max(0, pair[0] - pair[1]), min(pair)))
        return st.lists(pairs, min_size=count, max_size=count)

    return st.integers(1, most).flatmap(of)


def spans(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Windows that hold just all of a request, and such as begin at a tile's border for its first new token."""
    whole = [p + n + more for p, n in pairs for more in (-1, 0, 1)]
    from_a_tile = [p - at + more for p, _ in pairs for at in (127, 255) for more in (-1, 0, 1)]
    return [n for n in whole + from_a_tile if n > 0]


@st.composite
def layers(draw: st.DrawFn, *, small: bool, near: Sequence[int] = ()) -> dict[str, Any]:
    """A case's fields: a layer's attention and what keeps its keys, as pools accept it; windows are often `near`."""
    mla = draw(st.sampled_from([False, False, False, True]))
    kv_heads = 1 if mla else draw(st.sampled_from([1, 2] if small else [1, 2, 3]))
    dims = [(32, 24), (48, 32), (16, 16)] if mla else [(16, 16), (32, 32), (13, 13), (24, 40), (40, 24), (80, 80)]
    qk_dim, v_dim = draw(st.sampled_from(dims))
    window = draw(st.sampled_from([None, None, 1, 4, 40, *near]))
    chunk = draw(st.sampled_from([None, None, None, 16, 64, *near]))
    pools = ["plain", "unified"] + ["window"] * (not mla and (window is not None or chunk is not None))
    scales = st.sampled_from([1.0, 0.5, 0.2])
    k_scale = draw(scales)
    dtype, kv_dtype = draw(st.sampled_from(DTYPES))
    pool = draw(st.sampled_from(pools))
    return {
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3] if small else [1, 2, 3, 5, 8])),
        "kv_heads": kv_heads,
        "qk_dim": qk_dim,
        "v_dim": v_dim,
        "causal": draw(st.sampled_from([True, True, False])),
        "window": window,
        "chunk": chunk,
        "softcap": draw(st.sampled_from([None, 5.0, 50.0])),
        "temperature_len": draw(st.sampled_from([None, 16, 100])),
        "mod": draw(st.sampled_from([None, *score_mods.names()])),
        "sinks": draw(st.booleans()),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "k_scale": k_scale,
        "v_scale": k_scale if mla else draw(scales),
        "mla": mla,
        "page_size": draw(st.sampled_from([1, 2, 4, 16])),
        "pool": pool,
        "layout": draw(st.sampled_from(["slots", "pages"])) if pool == "plain" and not mla else "slots",
    }


@st.composite
def extend_cases(draw: st.DrawFn, *, small: bool = False) -> Case:
    """An extend or verify call that the backend accepts; `small` is for kernels that are interpreted."""
    pairs = draw(requests(small=small))
    mask = draw(st.sampled_from([None, None, "random", "some rows hidden", "tree", "chain"]))
    one_pass = draw(st.booleans()) and mask not in ("tree", "chain")
    case = Case(
        id=f"drawn {draw(st.integers(0, 2**16))}",
        why="drawn",
        prefix=tuple(p for p, _ in pairs),
        new=tuple(n for _, n in pairs),
        mask=mask,
        one_pass=one_pass,
        read_back=draw(st.sampled_from([False, False, True])),
        sink_size=draw(st.sampled_from([1.0, 10.0])),
        placement=draw(st.integers(0, 2**16)),
        **draw(layers(small=small, near=spans(pairs))),
    )
    # Ahead of a query ALiBi is a reward that outgrows what fp32 can tell apart; nobody uses it there.
    sees_ahead = not case.causal or mask in ("random", "some rows hidden")
    return case.but(mod=None) if case.mod == "alibi" and sees_ahead else case
