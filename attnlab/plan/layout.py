"""Which keys a kind of layer sees: an index, and where its entries stand in the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.batch import DeviceLens, HostLens, Lens
from attnlab.checks import contiguous, positive, require, tensor
from attnlab.plan.index import KVIndex
from attnlab.plan.splits import owner_of
from attnlab.spec import Sight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVLayout:
    """The keys that layers of one kind read. Entry j of request r is the key at position `start[r] + j`.

    Masks, windows, temperature and modifiers use positions, never list entries. Entries before position
    `start_visible[r]` are copies of the first key that a query may see: padding, so that a list begins at a tile's
    border, which every query's sight hides. Both are int32 `[reqs]`; they differ only where `align`, the positions
    between such borders, is more than 1.

    `run`: entries from a multiple of `run` on, up to the next, are consecutive slots of the storage, so that a tile of
    them can be copied whole. Multiples are counted from the list's first entry; padding before `start_visible` is
    exempt. 1 where nothing is known.
    """

    index: KVIndex
    start: Int[Tensor, " reqs"]
    start_visible: Int[Tensor, " reqs"]
    sight: Sight
    align: int = 1
    run: int = 1

    def __post_init__(self) -> None:
        positive("run", self.run)
        for name, x in (("start", self.start), ("start_visible", self.start_visible)):
            tensor(name, x, shape=[self.index.reqs], dtype=torch.int32, device=self.index.indptr.device)
            contiguous(name, x)

    @classmethod
    def full(cls, index: KVIndex) -> KVLayout:
        """Return the layout of layers that see every key."""
        start = torch.zeros(index.reqs, dtype=torch.int32, device=index.indptr.device)
        return cls(index=index, start=start, start_visible=start, sight=Sight())

    def validate(self, *, num_slots: int) -> None:
        """Read the layout (waits for the device); raise ValueError where it is broken."""
        self.index.validate(num_slots=num_slots)
        require(bool((self.start >= 0).all()), "start: expected no negative position")
        require(
            self.sight.partial or bool((self.start == 0).all()),
            "start: a full layout begins at position 0",
        )
        padding = self.start_visible - self.start
        require(
            bool(((padding >= 0) & (padding < self.align)).all()),
            f"start_visible: expected start, or up to {self.align - 1} positions behind it",
        )
        if self.run > 1:
            self._validate_runs()

    def _validate_runs(self) -> None:
        offsets, hidden = self.index.indptr.tolist(), (self.start_visible - self.start).tolist()
        for r, (a, b, first) in enumerate(zip(offsets, offsets[1:], hidden, strict=False)):
            slots, entry = self.index.slots[a:b].cpu(), torch.arange(b - a)
            follows = (entry % self.run > 0) & (entry > first)
            broken = (follows & (slots != slots.roll(1) + 1)).nonzero().flatten()
            if broken.numel():
                j = int(broken[0])
                raise ValueError(
                    f"run: request {r}, entry {j} reads slot {int(slots[j])} after {int(slots[j - 1])}; expected "
                    f"consecutive slots up to each multiple of {self.run}"
                )

    def validate_sight(self, *, first_queries: Sequence[int], ends: Sequence[int]) -> None:
        """Read the layout (waits for the device); raise ValueError unless each request's list is what it must be.

        It begins with what the query at `first_queries[r]` sees, and ends before position `ends[r]`.
        """
        counts, starts, visible = (x.tolist() for x in (self.index.indptr.diff(), self.start, self.start_visible))
        for r, (query, end) in enumerate(zip(first_queries, ends, strict=True)):
            first = min(self.sight.first(query), end)
            require(
                visible[r] == first and starts[r] + counts[r] == end,
                f"layout: request {r} lists positions {visible[r]} to {starts[r] + counts[r] - 1}, expected {first} to "
                f"{end - 1}",
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extent:
    """Which positions each request's list holds: `start[r]` up to `start[r]` plus its share of `indptr`.

    `start_visible` as in KVLayout. All int32 on the device.
    """

    start: Int[Tensor, " reqs"]
    start_visible: Int[Tensor, " reqs"]
    indptr: Int[Tensor, " reqs_1"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLists:
    """The lists of several draft steps, a row a step: what each of their branches sees.

    Row i of `indptr` (int32 `[steps, branches + 1]`) and of `slots` (int64 `[steps, capacity]`, whose tail is 0) is an
    index, row i of `start` (int32 `[steps, branches]`) says at which position each list begins. `write` (int64
    `[steps, branches]`) is where each branch's draft of that step goes.
    """

    start: Int[Tensor, "steps branches"]
    indptr: Int[Tensor, "steps branches_1"]
    slots: Int[Tensor, "steps capacity"]
    write: Int[Tensor, "steps branches"]

    @classmethod
    def zeros(cls, *, steps: int, branches: int, capacity: int, device: torch.device) -> DraftLists:
        """Return lists of nothing. Every row begins at 16 bytes, so that one compiled kernel serves all steps."""

        def block(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(steps, -(-columns // 4) * 4, dtype=dtype, device=device)[:, :columns]

        return cls(
            start=block(branches, torch.int32),
            indptr=block(branches + 1, torch.int32),
            slots=block(capacity, torch.int64),
            write=block(branches, torch.int64),
        )


def most_seen(lens: Lens, sight: Sight, *, behind: int) -> tuple[int, int]:
    """Return how many of `lens` tokens queries at position `lens - behind` see: the most of each, and of all together.

    A decode's query is the last token, `behind` 1; that of an extend comes after the cached ones, `behind` 0. Bounds
    shrink with the sight, so that lists of a window are allocated as such.

    >>> most_seen(HostLens.of([3, 100], device="cpu"), Sight(window=8), behind=1)
    (8, 11)
    """
    if not sight.partial:
        return lens.bound_max, lens.bound_total
    if isinstance(lens, HostLens):
        counts = values_seen(lens.values, sight, behind=behind)
        return max(counts, default=0), sum(counts)
    each = min(lens.bound_max, (sight.span or 0) - (behind == 0))
    return each, min(lens.bound_total, each * lens.count)


def values_seen(lens: Sequence[int], sight: Sight, *, behind: int) -> list[int]:
    """Return the same of lengths that the host knows: how long each list is."""
    if not sight.partial:
        return list(lens)
    if sight.chunk is None:  # every step asks, for every request
        most = (sight.window or 0) - 1 + behind
        return [min(n, most) for n in lens]
    return [n - min(n, sight.first(n - behind)) for n in lens]


def together(a: Lens, b: Lens) -> Lens:
    """Return the sums of two lengths of the same requests: cached and new tokens."""
    if isinstance(a, HostLens) and isinstance(b, HostLens):
        values = tuple(x + y for x, y in zip(a.values, b.values, strict=True))
        return HostLens(values=values, device=a.device + b.device)
    return DeviceLens(
        least=tuple(x + y for x, y in zip(a.least_each, b.least_each, strict=True)),
        device=a.device + b.device,
        bound_each=a.bound_max + b.bound_max,
        bound_total=a.bound_total + b.bound_total,
    )


def positions_behind(
    cached: Int[Tensor, " reqs"],
    indptr: Int[Tensor, " reqs_1"],
    *,
    tokens: int,
    depth: Int[Tensor, " tokens"] | None = None,
) -> Int[Tensor, " tokens"]:
    """Return where new tokens stand, int32: one behind the other after the cached ones, or at `depth` among the new.

    Those of request r are `indptr[r]` up to the next entry; tokens that are nobody's get 0.
    """
    if tokens == 0 or cached.shape[0] == 0:
        return torch.zeros(tokens, dtype=torch.int32, device=indptr.device)
    number = torch.arange(tokens, dtype=torch.int32, device=indptr.device)
    request = owner_of(number, indptr)
    within = number - indptr[request] if depth is None else depth
    return torch.where(number < indptr[-1], cached[request] + within, 0)
