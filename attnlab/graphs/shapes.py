"""The largest step that a graph serves, one type per mode; and the memory that every step's batch is copied to.

Reference: init_cuda_graph_state. Shapes here come from the lengths' bounds, never from requests x context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, DeviceLens, DraftBatch, ExtendBatch, HostLens, Lens, VerifyBatch
from attnlab.checks import describe, positive, require
from attnlab.graphs.memory import AnyBatch
from attnlab.mask import CAUSAL, CustomMask, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(ABC):
    """At most `requests` requests of at most `longest` tokens each, new ones included (None: the backend's longest).

    Together they have at most as many cached tokens as the backend's `max_tokens`, which sizes the lists. Tokens whose
    slots several requests share, such as a common prefix, count for each of them.
    """

    requests: int
    longest: int | None = None

    def __post_init__(self) -> None:
        positive("requests", self.requests)
        if self.longest is not None:
            positive("longest", self.longest)

    @property
    @abstractmethod
    def each(self) -> int:
        """Query tokens of a request, at most."""

    @property
    def tokens(self) -> int:
        """Query tokens of a step, at most: rows of every input and of every result."""
        return self.requests * self.each

    def bounded(self, backend: AttentionBackend) -> Shape:
        """Return the shape with a `longest`. Raises ValueError where the backend was not built for so much."""
        require(
            self.requests <= backend.max_requests,
            f"requests: a graph of {self.requests} requests, but the backend was built for max_requests "
            f"{backend.max_requests}",
        )
        limit = min(backend.table.max_context, backend.model.context_len)
        longest = limit if self.longest is None else self.longest
        require(
            self.each <= longest <= limit,
            f"longest: expected {self.each} to {limit} tokens, as the table and the model hold, got {longest}",
        )
        return replace(self, longest=longest)

    @abstractmethod
    def memory(self, *, device: torch.device, max_tokens: int) -> AnyBatch:
        """Return a batch of padding alone, in memory that each step's batch is copied to.

        Its requests have at most `max_tokens` cached tokens together.
        """

    def check(self, batch: AnyBatch) -> None:
        """Raise unless a step of this batch was captured; the words name what came and what was captured."""
        wanted = type(self).mode()
        if not isinstance(batch, wanted):
            raise TypeError(f"batch: the graph was captured for a {wanted.__name__}, got {describe(batch)}")
        require(
            isinstance(batch, DraftBatch) or batch.encoder is None,
            "batch: encoder lengths are not served by a graph; run a step with an encoder without one",
        )
        count = batch.rows.shape[0]
        if count > self.requests:
            raise ValueError(
                f"batch: a step of {count} requests, the graph was captured for {self.requests}; capture a larger one"
            )
        self._check_lens(batch)

    @classmethod
    @abstractmethod
    def mode(cls) -> type[AnyBatch]:
        """Which batches are served."""

    @abstractmethod
    def _check_lens(self, batch: AnyBatch) -> None:
        """Raise ValueError unless the lengths, and the mask, are within what was captured."""

    @abstractmethod
    def live(self, batch: AnyBatch) -> int:
        """Return the query tokens of a batch; where only the device knows, what they are at most."""

    def _longest(self) -> int:
        if self.longest is None:
            raise ValueError("longest: not known before the shape meets a backend; call bounded() first")
        return self.longest

    def _cached(self, each: int, device: torch.device, max_tokens: int) -> DeviceLens:
        """Return room for lengths of cached tokens."""
        zeros = torch.zeros(self.requests, dtype=torch.int32, device=device)
        return DeviceLens(device=zeros, bound_each=each, bound_total=min(self.requests * each, max_tokens))

    def _new(self, device: torch.device) -> DeviceLens:
        """Return room for lengths of new tokens: each has a row of the inputs, a padded one too."""
        zeros = torch.zeros(self.requests, dtype=torch.int32, device=device)
        return DeviceLens(device=zeros, bound_each=self.each, bound_total=self.tokens)

    def _rows(self, device: torch.device) -> Tensor:
        return torch.zeros(self.requests, dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape(Shape):
    """A decode step: one query token a request, of at most `requests` requests.

    None has more than `longest` tokens, the new one included; None, which is the default, stands for the longest that
    the backend's table and model hold.

    >>> DecodeShape(requests=64, longest=8192).tokens
    64
    """

    @property
    def each(self) -> int:
        """One."""
        return 1

    @classmethod
    def mode(cls) -> type[DecodeBatch]:
        """Decodes."""
        return DecodeBatch

    def memory(self, *, device: torch.device, max_tokens: int) -> DecodeBatch:
        """Return the padding of a decode."""
        return DecodeBatch(rows=self._rows(device), seq=self._cached(self._longest(), device, max_tokens))

    def _check_lens(self, batch: AnyBatch) -> None:
        if isinstance(batch, DecodeBatch):
            check_bound("seq", batch.seq, self._longest())

    def live(self, batch: AnyBatch) -> int:
        """Return the requests."""
        return batch.rows.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendShape(Shape):
    """An extend of up to `new` tokens a request, such as a draft model's pass over the tokens that were accepted.

    `requests` and `longest` are as in a DecodeShape: `longest` counts the new tokens too. `masked`: whether steps bring
    a mask; where one does not, a causal one is written. `cached_visible`: whether masks are of new keys alone, as they
    are of a VerifyShape; where they may hide cached keys, their entries of all of these are read.

    >>> ExtendShape(requests=8, new=4).tokens
    32
    """

    new: int
    masked: bool = False
    cached_visible: bool = True

    def __post_init__(self) -> None:
        Shape.__post_init__(self)
        positive("new", self.new)
        _check_bools(masked=self.masked, cached_visible=self.cached_visible)

    @property
    def each(self) -> int:
        """The new tokens of a request, at most."""
        return self.new

    @classmethod
    def mode(cls) -> type[ExtendBatch]:
        """Extends."""
        return ExtendBatch

    def memory(self, *, device: torch.device, max_tokens: int) -> ExtendBatch:
        """Return the padding of an extend."""
        prefix, new = self._cached(self._longest(), device, max_tokens), self._new(device)
        mask = room_for_mask(prefix, new, cached_visible=self.cached_visible) if self.masked else CAUSAL
        return ExtendBatch(rows=self._rows(device), prefix=prefix, new=new, mask=mask)

    def _check_lens(self, batch: AnyBatch) -> None:
        if isinstance(batch, ExtendBatch):
            check_bound("prefix", batch.prefix, self._longest())
            check_bound("new", batch.new, self.new)
            totals = zip(batch.prefix.least_each, batch.new.least_each, strict=True)
            longest = max((p + n for p, n in totals), default=0)
            require(
                longest <= self._longest(),
                f"prefix, new: a request of {longest:,} tokens, the graph was captured for {self._longest():,}; "
                "capture a larger one",
            )
            check_mask(batch.mask, batch.prefix, batch.new, masked=self.masked, cached_visible=self.cached_visible)

    def live(self, batch: AnyBatch) -> int:
        """Return the new tokens."""
        return min(batch.new.bound_total, self.tokens) if isinstance(batch, ExtendBatch) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyShape(Shape):
    """A verify of exactly `drafts` drafts a request: chains, or with `masked` trees too.

    `requests` and `longest` are as in a DecodeShape: `longest` counts the drafts too. `cached_visible`: whether masks
    are of drafts alone, as trees' are; where they may hide cached keys, their entries of all of these are read.

    >>> VerifyShape(requests=8, drafts=5, masked=True).tokens
    40
    """

    drafts: int
    masked: bool = False
    cached_visible: bool = True

    def __post_init__(self) -> None:
        Shape.__post_init__(self)
        positive("drafts", self.drafts)
        _check_bools(masked=self.masked, cached_visible=self.cached_visible)

    @property
    def each(self) -> int:
        """The drafts of a request."""
        return self.drafts

    @classmethod
    def mode(cls) -> type[VerifyBatch]:
        """Verifies."""
        return VerifyBatch

    def bounded(self, backend: AttentionBackend) -> Shape:
        """Return the shape with a `longest`. Raises ValueError where the backend was not built for so much."""
        bound = backend.workspace.max_drafts
        require(
            self.drafts <= bound,
            f"drafts: a graph of {self.drafts} drafts a request, but the backend was built for max_drafts {bound}",
        )
        return Shape.bounded(self, backend)

    def memory(self, *, device: torch.device, max_tokens: int) -> VerifyBatch:
        """Return the padding of a verify."""
        prefix, drafts = self._cached(self._longest() - self.drafts, device, max_tokens), self._new(device)
        return VerifyBatch(
            rows=self._rows(device),
            prefix=prefix,
            drafts=drafts,
            depth=torch.zeros(self.tokens, dtype=torch.int32, device=device),
            mask=room_for_mask(prefix, drafts, cached_visible=self.cached_visible) if self.masked else CAUSAL,
            ordered=not self.masked,
        )

    def _check_lens(self, batch: AnyBatch) -> None:
        if not isinstance(batch, VerifyBatch):
            return
        check_bound("prefix", batch.prefix, self._longest() - self.drafts)
        given = set(batch.drafts.values) if isinstance(batch.drafts, HostLens) else {batch.drafts.bound_max}
        others = sorted(given - {self.drafts, 0})  # 0: a padded row
        require(
            not others,
            f"drafts: the graph was captured for {self.drafts} drafts a request, got {others[:1]}; capture a graph for "
            "them",
        )
        check_mask(batch.mask, batch.prefix, batch.drafts, masked=self.masked, cached_visible=self.cached_visible)
        require(
            batch.ordered or self.masked,
            "batch: its drafts do not stand one behind the other (`ordered`), but the graph was captured for chains; "
            "capture with masked=True",
        )

    def live(self, batch: AnyBatch) -> int:
        """Return the drafts."""
        return batch.drafts.bound_total if isinstance(batch, VerifyBatch) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape(Shape):
    """All steps of a draft: `topk` branches of `steps` tokens go on from every request.

    The captured step takes a DraftPlan. Its inputs have a row for every branch; what differs from step to step, such as
    the queries of a later one, it makes itself. `requests` and `longest` are as in a DecodeShape: `longest` counts the
    drafts of one branch too.

    >>> DraftShape(requests=8, topk=4, steps=3).tokens
    32
    """

    topk: int
    steps: int

    def __post_init__(self) -> None:
        Shape.__post_init__(self)
        positive("topk", self.topk)
        positive("steps", self.steps)

    @property
    def each(self) -> int:
        """The branches of a request."""
        return self.topk

    @classmethod
    def mode(cls) -> type[DraftBatch]:
        """Drafts."""
        return DraftBatch

    def bounded(self, backend: AttentionBackend) -> Shape:
        """Return the shape with a `longest`. Raises ValueError where the backend was not built for so much."""
        require(
            self.tokens <= backend.max_requests,
            f"requests: a graph of {self.requests} requests x {self.topk} branches, but the backend was built for "
            f"max_requests {backend.max_requests}",
        )
        shape = Shape.bounded(self, backend)
        require(
            self.steps < (shape.longest or 0),
            f"longest: expected more than the {self.steps} drafts of a branch, got {shape.longest}",
        )
        return shape

    def memory(self, *, device: torch.device, max_tokens: int) -> DraftBatch:
        """Return the padding of a draft."""
        cached = self._cached(self._longest() - self.steps, device, max_tokens)
        return DraftBatch(rows=self._rows(device), seq=cached, topk=self.topk, steps=self.steps)

    def _check_lens(self, batch: AnyBatch) -> None:
        if isinstance(batch, DraftBatch):
            check_bound("seq", batch.seq, self._longest() - self.steps)
            got, captured = (batch.topk, batch.steps), (self.topk, self.steps)
            require(
                got == captured,
                f"topk, steps: the graph was captured for {captured[0]} branches of {captured[1]} drafts, got {got[0]} "
                f"of {got[1]}; capture a graph for them",
            )

    def live(self, batch: AnyBatch) -> int:
        """Return the branches."""
        return batch.rows.shape[0] * self.topk


def _check_bools(**given: bool) -> None:
    for name, value in given.items():
        require(isinstance(value, bool), f"{name}: expected a bool, got {value!r}", TypeError)


def check_bound(name: str, lens: Lens, most: int) -> None:
    """Raise ValueError where a request may be longer than was captured."""
    if lens.bound_max > most:
        raise ValueError(
            f"{name}: a request of up to {lens.bound_max:,} tokens, the graph was captured for {most:,}; capture a "
            "larger one"
        )


def check_mask(mask: Mask, prefix: Lens, new: Lens, *, masked: bool, cached_visible: bool) -> None:
    """Raise ValueError where a mask comes to a graph captured without one, is of another kind, or is too short."""
    if not isinstance(mask, CustomMask):
        return
    bits = mask.bits.shape[0]
    least = sum(n * (p + n) for p, n in zip(prefix.least_each, new.least_each, strict=True))
    require(bits >= least, f"mask: expected at least {least:,} entries, as the lengths are known to need, got {bits:,}")
    require(
        masked, f"mask: got {bits:,} entries, the graph was captured for 0, without a mask; capture with masked=True"
    )
    require(
        cached_visible or not mask.cached_visible,
        "mask: speaks of new keys alone (cached_visible), the graph reads its entries of cached keys too; set "
        "these to 1 and cached_visible to False, or capture with cached_visible=True",
    )
    require(
        mask.cached_visible or not cached_visible,
        "mask: may hide cached keys, the graph reads its entries of new keys alone; where it shows every cached key "
        "say so by its cached_visible=True, else capture with cached_visible=False",
    )


def room_for_mask(prefix: Lens, new: Lens, *, cached_visible: bool) -> CustomMask:
    """Return the memory of the largest mask: every request's `new x (prefix + new)` entries, a byte each."""
    bits = new.bound_max * (prefix.bound_total + new.bound_total)
    room = torch.zeros(bits, dtype=torch.uint8, device=prefix.device.device)
    return CustomMask(bits=room, cached_visible=cached_visible)
