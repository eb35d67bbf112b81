"""The bookkeeping of a paged attention backend in dicts and lists: what planners, tables and pools are held to.

Written from the specification alone and sharing no code with the package, so that a mistake there is none here.
Whole pages are taken lowest first; page 0 of every space is the sink and belongs to nobody.
"""

from __future__ import annotations

import math
import struct
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Pool = Literal["plain", "window", "unified", "unified mla"]
TILE_BORDER = 128
TABLE_SPACES: dict[Pool, str] = {"plain": "pool", "window": "full", "unified": "virtual", "unified mla": "virtual"}


class Refused(Exception):
    """A change that asks for more than `space` has; nothing was changed."""

    def __init__(self, space: str, why: str) -> None:
        super().__init__(f"{space}: {why}")
        self.space = space


class SlidOut(Exception):
    """A list or a query would need a key whose page has been given back."""


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def cumulative(counts: Sequence[int]) -> list[int]:
    """CSR offsets: 0, then running sums (backend.md 1)."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How far back a layer's query sees (backend.md 5, pitfalls B14, B15, B19): the kind of a layer.

    A window counts the query's own key; absent is None, there are no sentinels.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if any(size is not None and size < 1 for size in (self.window, self.chunk)):
            raise ValueError(f"{self}: sizes are at least 1")

    @property
    def partial(self) -> bool:
        """Whether some key is out of sight for a query far enough behind."""
        return self.window is not None or self.chunk is not None

    def first(self, position: int) -> int:
        """First position that a query at `position` sees."""
        by_window = 0 if self.window is None else position - self.window + 1
        by_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, by_window, by_chunk)

    def sees(self, query: int, key: int) -> bool:
        """Whether a key is in sight, if the mask shows it: not before the first one, not in another chunk."""
        return key >= self.first(query) and (self.chunk is None or key // self.chunk == query // self.chunk)


# --- batches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests with `prefix` cached and `new` tokens each; made by `decode`, `extend`, `chain` or `tree`.

    `depth`: every new token's distance behind the prefix. `mask`: flat bits, request after request, row-major
    new x (prefix + new) (backend.md 1 and 4), or None for causal. In a decode batch the new token is the last of the
    row; a row of length 0 has none.
    """

    mode: Literal["decode", "extend", "verify"]
    rows: list[int]
    prefix: list[int]
    new: list[int]
    depth: list[list[int]]
    mask: list[int] | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and len(self.mask) != self.mask_indptr[-1]:
            raise ValueError(f"mask: {len(self.mask)} bits, expected {self.mask_indptr[-1]}")

    @property
    def q_indptr(self) -> list[int]:
        """Offsets of the requests' new tokens, which are its queries (backend.md 4)."""
        return cumulative(self.new)

    @property
    def q_positions(self) -> list[int]:
        """Logical position of every query: prefix + depth (backend.md 5, pitfalls B16)."""
        return [prefix + d for prefix, depth in zip(self.prefix, self.depth, strict=True) for d in depth]

    @property
    def mask_indptr(self) -> list[int]:
        """Offsets of the requests' bits: sums of new x (prefix + new) (backend.md 4)."""
        return cumulative([new * (prefix + new) for prefix, new in zip(self.prefix, self.new, strict=True)])

    def shows(self, request: int, query: int, column: int) -> bool:
        """Whether the mask lets `query` see a column: a prefix position, then prefix + number of a new token."""
        prefix, new = self.prefix[request], self.new[request]
        if self.mask is None:
            return column <= prefix + query
        return bool(self.mask[self.mask_indptr[request] + query * (prefix + new) + column])


def decode(rows: Sequence[int], lens: Sequence[int]) -> Batch:
    """One query a row, at the last of its `lens` tokens; rows of length 0 and no rows are fine (backend.md 3, 4)."""
    new = [min(n, 1) for n in lens]
    prefix = [n - one for n, one in zip(lens, new, strict=True)]
    return Batch(mode="decode", rows=list(rows), prefix=prefix, new=new, depth=[[0] * one for one in new])


def extend(rows: Sequence[int], prefix: Sequence[int], new: Sequence[int], mask: Sequence[int] | None = None) -> Batch:
    """Tokens that follow the cached ones; the mask, where given, alone decides before sight does (backend.md 4)."""
    bits = None if mask is None else list(mask)
    depth = [list(range(n)) for n in new]
    return Batch(mode="extend", rows=list(rows), prefix=list(prefix), new=list(new), depth=depth, mask=bits)


def chain(rows: Sequence[int], prefix: Sequence[int], drafts: Sequence[int]) -> Batch:
    """Verify chains: causal among the drafts, the whole prefix visible (backend.md 4)."""
    depth = [list(range(n)) for n in drafts]
    return Batch(mode="verify", rows=list(rows), prefix=list(prefix), new=list(drafts), depth=depth)


def tree(rows: Sequence[int], prefix: Sequence[int], parents: Sequence[Sequence[int]]) -> Batch:
    """Verify trees: a draft sees the prefix, its ancestors and itself (backend.md 4 and 5, pitfalls B16)."""
    lines = [[ancestors(of, i) for i in range(len(of))] for of in parents]
    bits: list[int] = []
    for n, line in zip(prefix, lines, strict=True):
        bits += [bit for i in line for bit in [1] * n + [int(j in i) for j in range(len(line))]]
    depth = [[len(i) - 1 for i in line] for line in lines]
    new = [len(of) for of in parents]
    return Batch(mode="verify", rows=list(rows), prefix=list(prefix), new=new, depth=depth, mask=bits)


def ancestors(parents: Sequence[int], draft: int) -> list[int]:
    """A draft and what it follows, back to draft 0, the one root, whose parent is -1."""
    line = [draft]
    while line[-1] != 0:
        parent = parents[line[-1]]
        if not 0 <= parent < line[-1]:
            raise ValueError(f"parents[{line[-1]}] = {parent}: a draft follows an earlier one")
        line.append(parent)
    if parents[0] != -1:
        raise ValueError(f"parents[0] = {parents[0]}: the root has parent -1")
    return line


# --- splits -----------------------------------------------------------------------------------------------------

Ranges = list[list[tuple[int, int]]]


def f32(x: float) -> float:
    """`x` rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def even_range(length: int, splits: int) -> list[tuple[int, int]]:
    """Ranges of one list cut in `splits`, their size rounded up to 32 keys; empty ones left out (kernels.md 1.2)."""
    if length == 0:
        return []
    size = cdiv(cdiv(length, splits), 32) * 32
    return [(at, min(at + size, length)) for at in range(0, length, size)]


def seed_counts(
    lens: Sequence[int], *, heads: int, kv_heads: int, multiprocessors: int | None, max_splits: int, group: int = 1
) -> list[int]:
    """Nominal split counts of the seed heuristic, `group` entries a list (kernels.md 5, backend.md 3, policies H01).

    Empty lists take no part and get 0; without a multiprocessor count every other list gets the most.
    """
    live = [n for n in lens if n]
    if not live:
        return [0] * (len(lens) * group)
    if not multiprocessors:
        return [max_splits if n else 0 for n in lens for _ in range(group)]
    longest, shortest = max(live), min(live)
    if longest * 8 < shortest * 10:
        shortest = longest
    by_length = cdiv(longest, min(cdiv(longest, shortest), max_splits))
    cores = int(f32(multiprocessors * max(f32(math.log2(f32(f32(longest) / 64))), 1.0)))
    share = heads // kv_heads
    tiles = heads if share == 1 else cdiv(heads, min(16, share))
    by_cores = cdiv(longest, min(cdiv(cores, len(lens) * group * tiles), max_splits))
    return [max(cdiv(n, by_length), cdiv(n, by_cores)) for n in lens for _ in range(group)]


def seed_ranges(
    lens: Sequence[int], *, heads: int, kv_heads: int, multiprocessors: int | None, max_splits: int
) -> Ranges:
    """The seed policy: counts from the lists' own lengths, then even ranges (backend.md 3 and 5)."""
    counts = seed_counts(lens, heads=heads, kv_heads=kv_heads, multiprocessors=multiprocessors, max_splits=max_splits)
    return [even_range(n, count) for n, count in zip(lens, counts, strict=True)]


def static_ranges(lens: Sequence[int], splits: int) -> Ranges:
    """The static policy: every list is cut in `splits` (backend.md 3, policies H02)."""
    return [even_range(n, splits) for n in lens]


def tile_ranges(lens: Sequence[int], tile: int = 256) -> Ranges:
    """The tile policy: cuts at multiples of `tile`, whatever the length (policies H04, the fixed-size variant)."""
    return [[(at, min(at + tile, n)) for at in range(0, n, tile)] for n in lens]


def draft_ranges(steps: Sequence[Sequence[int]], sizes: Sequence[int], most: int) -> list[Ranges]:
    """Ranges of every step's lists (their lengths), in the sizes that the cached tokens have (backend.md 10).

    A list that would need more than `most` at its longest is cut in even ones of whole blocks of 32 keys instead.
    """
    longest = [max(mine) for mine in zip(*steps, strict=True)]
    kept = [
        size if cdiv(n, size) <= most else cdiv(cdiv(n, most), 32) * 32 for n, size in zip(longest, sizes, strict=True)
    ]
    return [
        [[(at, min(at + size, n)) for at in range(0, n, size)] for n, size in zip(lens, kept, strict=True)]
        for lens in steps
    ]


def mla_max_splits(option: int, *, multiprocessors: int | None, context: int) -> int:
    """The most splits under MLA, which raises the option (backend.md 2, policies H03)."""
    if not multiprocessors:
        return option
    pow2 = [1 << (n - 1).bit_length() for n in (multiprocessors, cdiv(context, 32))]
    return max(option, min(pow2))


# --- slots, rows, storages --------------------------------------------------------------------------------------


class Storage:
    """Pages of one kind of layer and the page that each table page has in it (kernels.md 6.7 and 6.8)."""

    def __init__(self, *, name: str, pages: int, stride: int) -> None:
        """`stride`: storage ids from one page to the next."""
        self.name, self.stride, self.total = name, stride, pages
        self.free = list(range(1, pages))
        self.page_of: dict[int, int] = {}

    def take(self, table_page: int) -> None:
        """Back a table page by the lowest free page."""
        self.page_of[table_page] = self.free.pop(0)

    def give(self, table_page: int) -> bool:
        """Free the page behind a table page; whether there was one."""
        page = self.page_of.pop(table_page, None)
        if page is not None:
            insort(self.free, page)
        return page is not None

    def compact(self) -> list[tuple[int, int]]:
        """Move the highest used page to the lowest free one while that lies below; the moves in order."""
        moves = []
        while self.free and self.page_of and self.free[0] < max(self.page_of.values()):
            table_page, page = max(self.page_of.items(), key=lambda pair: pair[1])
            self.take(table_page)
            insort(self.free, page)
            moves.append((page, self.page_of[table_page]))
        return moves

    def pages(self, table_pages: int) -> list[int]:
        """The page table: entry 0 is the sink's 0, -1 is unmapped."""
        return [0] + [self.page_of.get(page, -1) for page in range(1, table_pages)]


@dataclass(kw_only=True)
class Owner:
    """A row's pages in the table space, in order of positions, and its length."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class Read(NamedTuple):
    """A key that a query reads: its logical position, its id in the table, its id in the layer's storage."""

    position: int
    table_id: int
    storage_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """What a layer's lane holds for a batch: entry j of request r is the key at table position start[r] + j.

    `start_visible` differs from `start` where a one-pass list is padded in front. `write_ids`: where the new tokens
    go; in decode one for each row, the sink for a row of length 0.
    """

    ids: list[list[int]]
    start: list[int]
    start_visible: list[int]
    write_ids: list[int]

    @property
    def lens(self) -> list[int]:
        """Length of each list: what split policies go by."""
        return [len(ids) for ids in self.ids]

    @property
    def indptr(self) -> list[int]:
        """Offsets of the lists in `flat`."""
        return cumulative(self.lens)

    @property
    def flat(self) -> list[int]:
        """All lists, one behind the other."""
        return [i for ids in self.ids for i in ids]


class Book:
    """Rows, slots and storages of one pool, changed together; the owner of slots is the row (backend.md 1 and 2).

    Pools: "plain": table ids are storage ids. "window": so they are for layers that see all; partial ones live in
    storage "sliding" (kernels.md 6.7). "unified": table ids are virtual, storage "full" backs them; with
    `sliding_slots` partial layers live in "sliding" (6.8). "unified mla": likewise, and the layers of a storage share
    its pages, so that its ids are dense: page x (page_size x layers) + offset (6.8).
    `table_slots` is the size of the table space; `full_slots` that of storage "full", unified pools only.
    """

    def __init__(
        self,
        *,
        layers: Sequence[Sight],
        pool: Pool,
        page_size: int,
        table_slots: int,
        full_slots: int | None = None,
        sliding_slots: int | None = None,
        max_requests: int,
        max_context: int,
    ) -> None:
        if pool.startswith("unified") != (full_slots is not None):
            raise ValueError(f"{pool}: full_slots {full_slots}, which unified pools have and no other")
        if (sliding_slots is None and pool == "window") or (sliding_slots is not None and pool == "plain"):
            raise ValueError(f"{pool}: sliding_slots {sliding_slots}, which window pools need and plain ones lack")
        if any(slots is not None and slots % page_size for slots in (table_slots, full_slots, sliding_slots)):
            raise ValueError(f"pages of {page_size} do not divide the pool")
        self.layers, self.pool, self.page_size = list(layers), pool, page_size
        self.table_space, self.table_pages = TABLE_SPACES[pool], table_slots // page_size
        self.max_requests, self.max_context = max_requests, max_context
        self.free_pages = list(range(1, self.table_pages))
        self.owners: dict[int, Owner] = {}
        self.epoch = 0
        homes = ["sliding" if s.partial and sliding_slots is not None else "full" for s in self.layers]
        sizes = {"full": full_slots, "sliding": sliding_slots}
        self.storages = {
            name: Storage(
                name=name,
                pages=slots // page_size,
                stride=page_size * (homes.count(name) if pool == "unified mla" else 1),
            )
            for name, slots in sizes.items()
            if slots is not None
        }
        self.homes = [self.storages.get(home) for home in homes]

    # rows and slots

    def length(self, row: int) -> int:
        """Tokens that a row holds."""
        return self.owners[row].length

    def admit(self) -> int:
        """Open the lowest free row."""
        row = next((row for row in range(self.max_requests) if row not in self.owners), None)
        if row is None:
            raise Refused("rows", f"all {self.max_requests} are in use")
        self.owners[row] = Owner()
        return row

    def append(self, row: int, tokens: int) -> list[int]:
        """Table ids for the next tokens, all or nothing: the last page is filled, then the lowest free ones taken.

        Each new table page gets the lowest free page of each storage, in order of the table pages.
        """
        owner = self.owners[row]
        start, end = owner.length, owner.length + tokens
        if end > self.max_context:
            raise Refused("context", f"row {row} would hold {end} of {self.max_context}")
        pages = cdiv(end, self.page_size) - len(owner.pages)
        spaces = [(self.table_space, self.free_pages), *((s.name, s.free) for s in self.storages.values())]
        for space, free in spaces:
            if pages > len(free):
                raise Refused(space, f"{pages} pages wanted, {len(free)} free")
        for _ in range(pages):
            page = self.free_pages.pop(0)
            owner.pages.append(page)
            for storage in self.storages.values():
                storage.take(page)
        owner.length = end
        return [self.table_id(row, position) for position in range(start, end)]

    def truncate(self, row: int, length: int) -> None:
        """Keep the first `length` tokens; whole pages beyond go back in every space. New epoch iff tokens go."""
        owner = self.owners[row]
        if not 0 <= length <= owner.length:
            raise ValueError(f"length {length}: row {row} holds {owner.length}")
        kept = cdiv(length, self.page_size)
        for page in owner.pages[kept:]:
            insort(self.free_pages, page)
            for storage in self.storages.values():
                storage.give(page)
        self.epoch += length < owner.length
        owner.pages, owner.length = owner.pages[:kept], length

    def accept(self, row: int, *, prefix: int, path: Sequence[int]) -> list[tuple[int, int]]:
        """Keep the drafts of `path` behind the prefix and drop the rest; the table ids copied, (from, to), in order.

        A draft that stays in its place is not copied.
        """
        drafts = self.owners[row].length - prefix
        rising = all(a < b for a, b in zip(path, path[1:], strict=False))
        if prefix < 0 or drafts < 0 or not rising or (path and (path[0] != 0 or path[-1] >= drafts)):
            raise ValueError(f"path {list(path)}: rising draft numbers from 0 on, below {drafts}")
        moves = [(self.table_id(row, prefix + d), self.table_id(row, prefix + i)) for i, d in enumerate(path) if d != i]
        self.truncate(row, prefix + len(path))
        return moves

    def release(self, row: int) -> None:
        """Close a row; all its pages go back."""
        self.truncate(row, 0)
        del self.owners[row]

    # storages

    def slide_out(self, row: int, *, query: int) -> list[int]:
        """Free the sliding pages that no query at `query` or later sees; the table pages that lost theirs.

        A page goes only when all of its positions are before the first visible one of every sliding layer
        (backend.md 5, pitfalls B58). The table keeps its ids. New epoch iff a page is freed.
        """
        if "sliding" not in self.storages:
            raise ValueError(f"{self.pool}: nothing slides out of this pool")
        sliding = self.storages["sliding"]
        seen = [sight.first(query) for sight, home in zip(self.layers, self.homes, strict=True) if home is sliding]
        whole = min(seen, default=0) // self.page_size
        freed = [page for page in self.owners[row].pages[:whole] if sliding.give(page)]
        self.epoch += bool(freed)
        return freed

    def kept_from(self, row: int, storage: str) -> int:
        """First position of a row that still has a page in a storage, the next page's where none has; 0: no row."""
        pages = self.owners[row].pages if row in self.owners else []
        page_of = self.storages[storage].page_of
        gone = next((i for i, page in enumerate(pages) if page in page_of), len(pages))
        return gone * self.page_size

    def compact(self) -> dict[str, list[tuple[int, int]]]:
        """Compact every storage; table ids stay (kernels.md 6.8, pitfalls B35). New epoch iff a page moves."""
        moves = {name: storage.compact() for name, storage in self.storages.items()}
        self.epoch += any(moves.values())
        return moves

    def check(self) -> None:
        """Every page of every space is free or held, exactly once (pitfalls B58)."""
        held = [page for owner in self.owners.values() for page in owner.pages]
        assert sorted(self.free_pages + held) == list(range(1, self.table_pages))
        assert all(len(o.pages) == cdiv(o.length, self.page_size) for o in self.owners.values())
        for storage in self.storages.values():
            assert sorted(storage.free + list(storage.page_of.values())) == list(range(1, storage.total))
            assert set(storage.page_of) <= set(held)
            assert storage.free == sorted(storage.free)

    # ids

    def table_id(self, row: int, position: int) -> int:
        """What the request table holds for a position (backend.md 1)."""
        owner = self.owners[row]
        if not 0 <= position < owner.length:
            raise IndexError(f"row {row} holds {owner.length} tokens, position {position} is not one")
        return owner.pages[position // self.page_size] * self.page_size + position % self.page_size

    def translate(self, layer: int, table_id: int) -> int:
        """A table id in a layer's storage; unmapped ones are the sink (kernels.md 6.7 and 6.8, pitfalls B33)."""
        storage = self.homes[layer]
        if storage is None or table_id < self.page_size:
            return table_id
        page = storage.page_of.get(table_id // self.page_size)
        return 0 if page is None else page * storage.stride + table_id % self.page_size

    def storage_id(self, layer: int, row: int, position: int) -> int:
        """A position's id in a layer's storage, which must still be there."""
        table_id, storage = self.table_id(row, position), self.homes[layer]
        if storage is not None and table_id // self.page_size not in storage.page_of:
            raise SlidOut(f"row {row}, position {position} has no page in {storage.name!r}")
        return self.translate(layer, table_id)

    # lists

    def lists(self, batch: Batch, layer: int, *, one_pass: bool = False) -> Lists:
        """The keys that a layer's lane lists, in order of positions (kernels.md 6.1, backend.md 4 and 5).

        Decode: first(len - 1) .. len - 1. Extend and verify: first(prefix) .. prefix - 1; with `one_pass` the new
        tokens too (kernels.md 3.1), and where sight is partial copies of the first entry in front, back to a
        multiple of 128 positions (kernels.md 7.2).
        """
        sight, whole = self.layers[layer], one_pass or batch.mode == "decode"
        ids, start, visible, writes = [], [], [], []
        for row, prefix, new in zip(batch.rows, batch.prefix, batch.new, strict=True):
            first, end = sight.first(prefix), prefix + (new if whole else 0)
            keys = [self.storage_id(layer, row, position) for position in range(first, end)]
            pad = first % TILE_BORDER if one_pass and sight.partial and keys else 0
            ids.append(keys[:1] * pad + keys)
            start.append(first - pad)
            visible.append(first)
            writes += [self.storage_id(layer, row, prefix + i) for i in range(new)]
            writes += [0] * (batch.mode == "decode" and new == 0)
        return Lists(ids=ids, start=start, start_visible=visible, write_ids=writes)

    # drafts

    def draft_column(self, cached: int, branch: int, draft: int, *, topk: int, steps: int) -> int:
        """Column of the request table that holds a branch's draft (kernels.md 6.5)."""
        if self.page_size == 1 or topk == 1:
            return cached + branch * steps + draft
        inside = cached % self.page_size
        pages = cdiv(inside + steps, self.page_size)
        return cached // self.page_size * self.page_size + branch * pages * self.page_size + inside + draft

    def draft_room(self, cached: int, *, topk: int, steps: int) -> int:
        """Tokens behind the cached ones that have to have slots: up to the last draft of the last branch."""
        return self.draft_column(cached, topk - 1, steps - 1, topk=topk, steps=steps) + 1 - cached

    def draft_lists(self, rows: Sequence[int], seq: Sequence[int], layer: int, *, topk: int, steps: int) -> list[Lists]:
        """What every branch sees in each step but the last, and where its draft goes (backend.md 5 and 10)."""
        sight, made = self.layers[layer], []
        for step in range(steps - 1):
            ids, start, writes = [], [], []
            for row, cached in zip(rows, seq, strict=True):
                for branch in range(topk):
                    own = [self.draft_column(cached, branch, i, topk=topk, steps=steps) for i in range(step + 1)]
                    columns = [*range(cached), *own] if cached else []
                    first = sight.first(len(columns) - 1) if columns else 0
                    ids.append([self.storage_id(layer, row, column) for column in columns[first:]])
                    start.append(first)
                    writes.append(ids[-1][-1] if columns else 0)
            made.append(Lists(ids=ids, start=start, start_visible=start, write_ids=writes))
        return made

    # queries

    def explain(self, batch: Batch, request: int, query: int) -> list[list[Read]]:
        """For every layer, the keys that one query of one request reads: of the prefix, then of the new tokens.

        Sight goes by logical positions, prefix + depth for new tokens (backend.md 5, pitfalls B16).
        """
        return [self._reads(batch, request, query, layer) for layer in range(len(self.layers))]

    def _reads(self, batch: Batch, request: int, query: int, layer: int) -> list[Read]:
        row, prefix, depth = batch.rows[request], batch.prefix[request], batch.depth[request]
        if batch.mode == "decode" and not depth:
            return []
        at, sight = prefix + depth[query], self.layers[layer]
        columns = list(range(prefix)) + [prefix + d for d in depth]
        return [
            Read(position, self.table_id(row, column), self.storage_id(layer, row, column))
            for column, position in enumerate(columns)
            if batch.shows(request, query, column) and sight.sees(at, position)
        ]
