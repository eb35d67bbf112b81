"""Which keys one query reads, in which pool, and why: a plan's lists and masks, read back as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnlab.checks import require
from attnlab.mask import CustomMask, Mask
from attnlab.plan.layout import KVLayout
from attnlab.spec import Sight


class Key(NamedTuple):
    """A key that is read: its position in the request, and its slot in the storage of the layers."""

    position: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one query reads in the layers of one lane.

    `keys` are in the order of the list: cached ones first, then new ones. `why` says it in words.
    """

    layers: tuple[int, ...]
    space: str
    position: int
    keys: tuple[Key, ...]
    why: str

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.layers[:6])) + (", ..." if len(self.layers) > 6 else "")
        return f"layer {layers}, in {self.space!r}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query, in plain numbers: where it stands, what is cached before it, and the tokens that came with it.

    `siblings` are the positions of all new tokens of its request, `number` its own place among them; `bits` its row of
    a custom mask, a number for each cached and each new key, None without a mask.
    """

    position: int
    cached: int
    siblings: tuple[int, ...]
    number: int
    bits: Sequence[int] | None = None

    def sees(self, sight: Sight, key: int, *, new: int | None) -> bool:
        """Whether this query sees the key at a position; `new` is its number among the new tokens, if it is one."""
        if sight.cross:
            return True
        last = sight.last(self.position, masked=self.bits is not None)
        if key < sight.first(self.position) or (last is not None and key > last):
            return False
        if self.bits is not None:
            return bool(self.bits[key if new is None else self.cached + new])
        return new is None or new <= self.number or not sight.causal


def mask_row(mask: Mask, offset: int, *, number: int, new: int, cached: int) -> Sequence[int] | None:
    """Return which keys a request's query sees, whose mask begins at `offset`. Waits for the device."""
    if not isinstance(mask, CustomMask):
        return None
    row: list[int] = mask.rows_of(offset, new=new, cached=cached)[number].tolist()
    return row


def reading(
    query: Query,
    layout: KVLayout,
    write_slots: Sequence[int],
    *,
    request: int,
    layers: tuple[int, ...],
) -> Reading:
    """Return what a query of a request reads from one lane. `write_slots` are those of the request's new tokens.

    Waits for the device. Where the list ends before the new tokens, these are read from where they are written to. An
    encoder's keys are all in the list.
    """
    sight = layout.sight
    first, end = layout.index.indptr[request : request + 2].tolist()
    slots = layout.index.slots[first:end].tolist()
    start, visible = int(layout.start[request]), int(layout.start_visible[request])
    listed = [(start + j, slot) for j, slot in enumerate(slots) if start + j >= visible]
    old = [Key(*entry) for entry in listed if sight.cross or entry[0] < query.cached]
    new = [] if sight.cross else [Key(*entry) for entry in zip(query.siblings, write_slots, strict=True)]
    keys = [key for key in old if query.sees(sight, key.position, new=None)]
    keys += [key for i, key in enumerate(new) if query.sees(sight, key.position, new=i)]
    return Reading(
        layers=layers,
        space=layout.index.space,
        position=query.position,
        keys=tuple(keys),
        why=_why(query, sight, keys, skipped=0 if sight.cross else query.cached + len(new) - len(keys)),
    )


def _why(query: Query, sight: Sight, keys: Sequence[Key], *, skipped: int) -> str:
    seen = f"the query at position {query.position} reads {len(keys)} key{'s' * (len(keys) != 1)}"
    if keys:
        seen += f", positions {_spans([key.position for key in keys])}"
    if sight.cross:
        return f"{seen}: they are an encoder's, of which every query sees all"
    first = sight.first(query.position)
    by_chunk = sight.chunk is not None and first == query.position // sight.chunk * sight.chunk
    reasons = []
    if by_chunk:
        reasons.append(f"its chunk of {sight.chunk} began at {first}")
    elif sight.window is not None:
        reasons.append(f"a window of {sight.window} keys goes back to {first}")
    else:
        reasons.append("every key before it is in sight" if sight.causal else "every key is in sight")
    if query.bits is not None:
        reasons.append("the mask decides among those")
    left = f"; {skipped} left out" if skipped else ""
    return f"{seen}: {', and '.join(reasons)}{left}"


def _spans(positions: Sequence[int]) -> str:
    """Return words for positions: `0 to 4, 7`."""
    spans: list[list[int]] = []
    for position in positions:
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    words = [str(a) if a == b else f"{a} to {b}" for a, b in spans]
    return ", ".join(words[:6]) + (", ..." if len(words) > 6 else "")


def check_query(request: int, query: int, counts: Sequence[int]) -> None:
    """Raise ValueError unless the request is one of the plan's, and the query one of its own."""
    for name, number in (("request", request), ("query", query)):
        whole = isinstance(number, int) and not isinstance(number, bool)
        require(whole, f"{name}: expected an int, got {number!r}", TypeError)
    require(0 <= request < len(counts), f"request: expected 0 to {len(counts) - 1}, got {request}")
    require(
        counts[request] > 0,
        f"query: request {request} has none in this step: it is a padded row, or brings no new token",
    )
    require(
        0 <= query < counts[request],
        f"query: request {request} has {counts[request]} of them, counted from 0, got {query}",
    )
