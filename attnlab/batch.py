"""What a step works on: which requests, and how long they are. One type per mode.

Lengths live on the device, where plans use them. Where the host knows them too they come as `HostLens`; where
only the device does (after drafting, say), as `DeviceLens` with the bounds that allocation needs. No plan reads
a length back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import describe, positive, require, same_device, tensor
from attnlab.mask import CAUSAL, Causal, CustomMask, Mask, depths

MAX_LEN = 2**30
"""Tokens of a request, and of a batch. Offsets are int32; half of their range leaves room for rounding up."""
T = TypeVar("T")


@runtime_checkable
class Lens(Protocol):
    """Lengths of a batch's requests, in tokens."""

    @property
    def device(self) -> Int[Tensor, " reqs"]:
        """The lengths, int32, on the device."""

    @property
    def count(self) -> int:
        """How many requests there are."""

    @property
    def bound_max(self) -> int:
        """No request is longer than this."""

    @property
    def bound_total(self) -> int:
        """All requests together are no longer than this: what plans allocate by."""

    @property
    def least_each(self) -> tuple[int, ...]:
        """Each request is at least so long: all that the host knows of it."""

    def validate(self) -> None:
        """Read the lengths (waits for the device) and raise ValueError where they are not what the host thinks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLens:
    """Lengths that the host knows; `values` is `device` as a tuple of ints.

    >>> HostLens.of([5, 64, 200, 1], device="cpu").bound_total
    270
    """

    values: tuple[int, ...]
    device: Int[Tensor, " reqs"]
    bound_max: int = field(init=False, repr=False)
    """The longest request, exactly."""
    bound_total: int = field(init=False, repr=False)
    """All tokens, exactly."""

    def __post_init__(self) -> None:
        require(set(map(type, self.values)) <= {int}, f"values: expected ints, got {self.values[:8]!r}", TypeError)
        require(min(self.values, default=0) >= 0, f"values: expected no length below 0, got {self.values[:8]}")
        tensor("lens", self.device, shape=[len(self.values)], dtype=torch.int32)
        # Every lane of a step asks for these.
        object.__setattr__(self, "bound_max", max(self.values, default=0))
        object.__setattr__(self, "bound_total", sum(self.values))

    @classmethod
    def of(cls, lens: Sequence[int], *, device: torch.device | str) -> HostLens:
        """Check the lengths and copy them to the device, once."""
        if not isinstance(lens, Iterable):
            raise TypeError(f"lens: expected a list of lengths, one per request, got {lens!r}")
        values = tuple(_tokens(f"lens: request {i}", n) for i, n in enumerate(lens))
        require(
            sum(values) <= MAX_LEN,
            f"lens: expected at most {MAX_LEN:,} tokens in all (offsets are int32), got {sum(values):,}",
        )
        return cls(
            values=values,
            device=torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True),
        )

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self.values)

    @property
    def least_each(self) -> tuple[int, ...]:
        """Each request's length, exactly."""
        return self.values

    def validate(self) -> None:
        """Read the lengths (waits for the device) and raise ValueError where the host has others."""
        for i, (here, there) in enumerate(zip(self.values, self.device.tolist(), strict=True)):
            require(here == there, f"lens: request {i} has {here} tokens on the host, {there} on the device")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceLens:
    """Lengths that only the device knows, with the caller's promise of how long they can be.

    A longer request than `bound_each`, or a larger sum than `bound_total`, breaks the promise: `validate()` reads
    the lengths and says so; plans cannot, since they never wait for the device. `least`, where given, says for each
    request how long it is at least: before keys may slide out of a pool, a plan must know that no query needs them.
    """

    device: Int[Tensor, " reqs"]
    bound_each: int
    bound_total: int
    least: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        tensor("lens", self.device, shape=["reqs"], dtype=torch.int32)
        _tokens("bound_each", self.bound_each)
        _tokens("bound_total", self.bound_total)
        require(
            self.least is None or len(self.least) == self.count,
            f"least: expected one number for each of {self.count} requests, got {len(self.least or ())}",
        )

    @property
    def count(self) -> int:
        """How many requests there are."""
        return self.device.shape[0]

    @property
    def bound_max(self) -> int:
        """No request is longer than this."""
        return self.bound_each

    @property
    def least_each(self) -> tuple[int, ...]:
        """Each request is at least so long."""
        return (0,) * self.count if self.least is None else self.least

    def validate(self) -> None:
        """Read the lengths (waits for the device) and raise ValueError where they break the promised bounds."""
        values = self.device.tolist()
        for i, n in enumerate(values):
            least = 0 if self.least is None else self.least[i]
            require(
                least <= n <= self.bound_each,
                f"lens: request {i} has {n} tokens, outside {least} to bound_each {self.bound_each}",
            )
        require(
            sum(values) <= self.bound_total,
            f"lens: {sum(values)} tokens in all, more than bound_total {self.bound_total}",
        )


LENS = (HostLens, DeviceLens)
"""What lengths come as: a tuple, since a union is made anew each time that it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoder:
    """What the layers of a step that attend to an encoder read: all keys in these rows, one row for each request.

    `rows` are of the request table, where an encoder's tokens have a row of their own; several requests may read one.
    The keys were written when the encoder ran (`pool.write`). Length 0 is a request without an encoder: out is 0 there.

    >>> encoder = Encoder.of(rows=[2, 2, 3], lens=[1500, 1500, 0], device="cpu")
    >>> encoder.lens.count, encoder.lens.bound_max
    (3, 1500)
    """

    rows: Int[Tensor, " reqs"]
    lens: Lens

    @classmethod
    def of(cls, *, rows: Sequence[int], lens: Sequence[int], device: torch.device | str) -> Encoder:
        """Return rows and lengths that the host knows; `device` is the pool's."""
        return cls(rows=_host_rows(rows), lens=HostLens.of(lens, device=device))

    def __post_init__(self) -> None:
        _check_rows(self.rows, "encoder.lens", self.lens, rows_name="encoder.rows")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeBatch:
    """One query token per request. `seq` counts the tokens to read, the one being decoded included.

    `rows` are the requests' rows in the request table, on the host (then they are checked against the table) or on
    the device (then they are not read, and one that the table does not have is padding). A length of 0 is a padded
    row: it reads nothing and writes to the sink. No rows at all is an idle step, and works. `encoder` is there exactly
    where the model has layers that read one.
    """

    rows: Int[Tensor, " reqs"]
    seq: Lens
    encoder: Encoder | None = None

    @classmethod
    def of(
        cls,
        *,
        rows: Sequence[int],
        lens: Sequence[int],
        device: torch.device | str,
        encoder: Encoder | None = None,
    ) -> DecodeBatch:
        """Return a batch whose rows and lengths the host knows; `device` is the pool's."""
        return cls(rows=_host_rows(rows), seq=HostLens.of(lens, device=device), encoder=encoder)

    def __post_init__(self) -> None:
        _check_rows(self.rows, "seq", self.seq)
        _check_encoder(self.encoder, self.seq)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendBatch:
    """Several query tokens per request: prefill, a chunk of one, drafts that extend, or a mix with decodes.

    Of each request `prefix` tokens are cached and `new` ones come with the call; the request table has slots for both.
    A row without new tokens is padding. `mask` says which keys a new token sees, of its request's own; `encoder` is
    there exactly where the model has layers that read one.

    >>> batch = ExtendBatch.of(rows=[0, 1], prefix=[0, 512], new=[300, 1], device="cpu")
    >>> batch.new.bound_total, batch.new.bound_max
    (301, 300)
    """

    rows: Int[Tensor, " reqs"]
    prefix: Lens
    new: Lens
    mask: Mask = CAUSAL
    encoder: Encoder | None = None

    @classmethod
    def of(
        cls,
        *,
        rows: Sequence[int],
        prefix: Sequence[int],
        new: Sequence[int],
        device: torch.device | str,
        mask: Mask = CAUSAL,
        encoder: Encoder | None = None,
    ) -> ExtendBatch:
        """Return a batch whose rows and lengths the host knows; `device` is the pool's."""
        lens = [HostLens.of(n, device=device) for n in (prefix, new)]
        return cls(rows=_host_rows(rows), prefix=lens[0], new=lens[1], mask=mask, encoder=encoder)

    def __post_init__(self) -> None:
        _check_rows(self.rows, "prefix", self.prefix)
        _check_rows(self.rows, "new", self.new)
        _check_together(self.prefix, self.new, "new")
        _check_mask(self.mask, self.prefix, self.new)
        _check_encoder(self.encoder, self.prefix)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyBatch:
    """Draft tokens whose fate the target model decides: `drafts` per request, after `prefix` cached tokens.

    `depth` is int32 `[tokens]`: a draft stands at position `prefix + depth`; in a tree, siblings share one.
    `ordered` says that there are chains alone, whose drafts stand one behind the other. `encoder` is there exactly
    where the model has layers that read one.
    """

    rows: Int[Tensor, " reqs"]
    prefix: Lens
    drafts: Lens
    depth: Int[Tensor, " tokens"]
    mask: Mask
    ordered: bool = False
    encoder: Encoder | None = None

    @classmethod
    def chain(
        cls,
        *,
        rows: Sequence[int],
        prefix: Sequence[int],
        drafts: int | Sequence[int],
        device: torch.device | str,
        encoder: Encoder | None = None,
    ) -> VerifyBatch:
        """Return a batch of chains: each draft follows the one before. `drafts` may be one number for all.

        >>> VerifyBatch.chain(rows=[0, 1], prefix=[7, 9], drafts=3, device="cpu").depth.tolist()
        [0, 1, 2, 0, 1, 2]
        """
        counts = list(drafts) if isinstance(drafts, Sequence) else [drafts] * len(rows)
        new = HostLens.of(counts, device=device)
        return cls(
            rows=_host_rows(rows),
            prefix=HostLens.of(prefix, device=device),
            drafts=new,
            depth=_flat([range(n) for n in new.values], device),
            mask=CAUSAL,
            ordered=True,
            encoder=encoder,
        )

    @classmethod
    def tree(
        cls,
        *,
        rows: Sequence[int],
        prefix: Sequence[int],
        parents: Sequence[Sequence[int]],
        device: torch.device | str,
        encoder: Encoder | None = None,
    ) -> VerifyBatch:
        """Return a batch of draft trees. `parents[r][i]` is draft i's parent; the root comes first and has -1.

        >>> VerifyBatch.tree(rows=[0], prefix=[8], parents=[[-1, 0, 0]], device="cpu").depth.tolist()
        [0, 1, 1]
        """
        cached = HostLens.of(prefix, device=device)
        drafts = HostLens.of([len(tree) for tree in parents], device=device)
        pairs = sum(n * (p + n) for p, n in zip(cached.values, drafts.values, strict=False))
        require(
            pairs <= MAX_LEN,
            f"parents: their mask would have {pairs:,} entries, expected at most {MAX_LEN:,}; verify fewer "
            "drafts at once",
        )
        return cls(
            rows=_host_rows(rows),
            prefix=cached,
            drafts=drafts,
            depth=_flat([depths(tree) for tree in parents], device),
            mask=CustomMask.of_trees(parents, cached=cached.values, device=device),
            encoder=encoder,
        )

    def __post_init__(self) -> None:
        _check_rows(self.rows, "prefix", self.prefix)
        _check_rows(self.rows, "drafts", self.drafts)
        _check_together(self.prefix, self.drafts, "drafts")
        tokens = self.drafts.bound_total
        hint = "one for every draft"
        tensor("depth", self.depth, shape=[tokens], dtype=torch.int32, device=self.drafts.device.device, hint=hint)
        _check_mask(self.mask, self.prefix, self.drafts)
        _check_encoder(self.encoder, self.prefix)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftBatch:
    """Drafting: `topk` branches of `steps` tokens each go on from the `seq` cached tokens of every request.

    Query i of a branch, counted from 0, is its draft i: it stands at position `seq + i`, and sees the cached tokens and
    its own branch up to itself, never a sibling. No query is made of the last draft, so `steps - 1` steps attend.
    Branch t of request r is row `r * topk + t` of each of them. `seq` counts cached tokens alone; the request table has
    slots for the drafts behind them, as many as `attnlab.draft_room` says. A length of 0 is a padded row.

    >>> batch = DraftBatch.of(rows=[0, 1], lens=[7, 300], topk=4, steps=3, device="cpu")
    >>> batch.branches
    8
    """

    rows: Int[Tensor, " reqs"]
    seq: Lens
    topk: int
    steps: int

    @classmethod
    def of(
        cls, *, rows: Sequence[int], lens: Sequence[int], topk: int, steps: int, device: torch.device | str
    ) -> DraftBatch:
        """Return a batch whose rows and lengths the host knows; `device` is the pool's."""
        return cls(rows=_host_rows(rows), seq=HostLens.of(lens, device=device), topk=topk, steps=steps)

    def __post_init__(self) -> None:
        _check_rows(self.rows, "seq", self.seq)
        positive("topk", self.topk)
        positive("steps", self.steps)
        listed = self.topk * (self.seq.bound_total + self.seq.count * self.steps)
        require(
            listed <= MAX_LEN,
            f"topk: {self.topk} branches of {self.steps} drafts over up to {self.seq.bound_total:,} cached tokens are "
            f"lists of up to {listed:,} entries, expected at most {MAX_LEN:,} (offsets are int32); draft for fewer "
            "requests at once",
        )

    @property
    def branches(self) -> int:
        """How many branches there are in all: the rows of a step."""
        return self.seq.count * self.topk


Batch = DecodeBatch | ExtendBatch | VerifyBatch
"""What one step works on; a draft's steps are planned together."""
B = TypeVar("B", DecodeBatch, ExtendBatch, VerifyBatch, DraftBatch)


def _host_rows(rows: Sequence[int]) -> Tensor:
    return torch.tensor([operator.index(row) for row in rows], dtype=torch.int64)


def _flat(numbers: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    return torch.tensor([n for mine in numbers for n in mine], dtype=torch.int32).to(device, non_blocking=True)


def _check_together(prefix: Lens, new: Lens, name: str) -> None:
    """Raise unless cached and new tokens are counted on one device, and are not more than offsets can hold."""
    there, here = new.device.device, prefix.device.device
    require(same_device(there, here), f"{name}: expected on {here} like prefix, got {there}")
    total = prefix.bound_total + new.bound_total
    require(total <= MAX_LEN, f"prefix, {name}: expected at most {MAX_LEN:,} tokens in all, got {total:,}")


def _check_rows(rows: Tensor, name: str, lens: Lens, *, rows_name: str = "rows") -> None:
    tensor(rows_name, rows, shape=["reqs"], dtype=(torch.int32, torch.int64))
    if not isinstance(lens, HostLens | DeviceLens):
        raise TypeError(f"{name}: expected HostLens or DeviceLens, got {describe(lens)}")
    require(
        rows.shape[0] == lens.count,
        f"{rows_name}: expected one per request of {name} ({lens.count}), got {rows.shape[0]}",
    )


def _check_encoder(encoder: Encoder | None, lens: Lens) -> None:
    """Raise unless an encoder, where there is one, has a row for each request, and its lengths where theirs are."""
    if encoder is None:
        return
    if not isinstance(encoder, Encoder):
        raise TypeError(f"encoder: expected an Encoder or None, got {describe(encoder)}")
    require(
        encoder.lens.count == lens.count,
        f"encoder: expected a row for each of the batch's {lens.count} requests, got {encoder.lens.count}; a request "
        "without an encoder has length 0",
    )
    there, here = encoder.lens.device.device, lens.device.device
    require(same_device(there, here), f"encoder.lens: expected on {here} like the batch's lengths, got {there}")


def lens_of(batch: Batch | DraftBatch) -> list[Lens]:
    """Return all lengths of a batch's own rows: the encoder's are of others."""
    values = [getattr(batch, name) for name in names_of(type(batch))]
    return [value for value in values if isinstance(value, LENS)]


def owned(batch: B, copies: Mapping[int, Tensor], of_encoder: Mapping[int, Tensor]) -> B:
    """Return the batch in memory of its own, but for a custom mask: a server counts its lengths on in place.

    `copies` are those that there are already, by the `id` of the tensor that each is of; of its encoder's
    `of_encoder`: one tensor may be the lengths of both, and be padded differently.
    """
    return _copied(batch, copies, of_encoder)


def _copied(parts: T, copies: Mapping[int, Tensor], of_encoder: Mapping[int, Tensor]) -> T:
    """Return a copy of a dataclass with slots whose tensors are copies, also those of lengths and of an encoder in it.

    The parts were checked when they were made, and copies are as they are: nothing is looked at again.
    """
    copy: T = object.__new__(type(parts))
    for name in names_of(type(parts)):
        value = getattr(parts, name)
        if isinstance(value, Tensor):
            copied = copies.get(id(value))
            value = value.clone() if copied is None else copied
        elif isinstance(value, LENS):
            value = _copied(value, copies, of_encoder)
        elif isinstance(value, Encoder):
            value = _copied(value, of_encoder, of_encoder)
        object.__setattr__(copy, name, value)
    return copy


def names_of(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, which `fields` collects anew each time: every step asks."""
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(part.name for part in fields(kind))
    return names


_NAMES: dict[type, tuple[str, ...]] = {}


def _check_mask(mask: Mask, prefix: Lens, new: Lens) -> None:
    """Raise unless a custom mask lies beside the lengths and, where the host knows these, has an entry a pair."""
    if not isinstance(mask, CustomMask):
        require(isinstance(mask, Causal), f"mask: expected Causal() or a CustomMask, got {mask!r}", TypeError)
        return
    there, here = mask.bits.device, prefix.device.device
    require(same_device(there, here), f"mask: expected on {here} like the lengths, got {there}")
    if isinstance(prefix, HostLens) and isinstance(new, HostLens):
        pairs = sum(n * (p + n) for p, n in zip(prefix.values, new.values, strict=True))
        require(
            mask.bits.shape[0] == pairs,
            f"mask: expected {pairs:,} entries, the sum of new x (cached + new) over cached {list(prefix.values[:8])} "
            f"and new {list(new.values[:8])}, got {mask.bits.shape[0]:,}",
        )


def _tokens(name: str, n: int) -> int:
    """Return `n`, a number of tokens, or raise."""
    is_int = isinstance(n, int) and not isinstance(n, bool)
    if is_int and 0 <= n <= MAX_LEN:  # words only where they are needed: this runs for every request of every step
        return n
    require(is_int, f"{name}: expected an int, got {n!r}", TypeError)
    raise ValueError(f"{name}: expected 0 to {MAX_LEN:,} tokens, got {n:,}")
