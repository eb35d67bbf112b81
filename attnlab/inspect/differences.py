"""What two runs' numbers differ by: how many of them, by how much, and where first.

Numbers are compared by their bits. A recording holds all of them as fp32, which every narrower dtype fits into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnlab.inspect.step import runs_of
from attnlab.inspect.words import span, span_words

Part = Literal["raw", "scaled", "capped", "masked", "partial lse", "partial out", "lse", "weights", "out"]
PARTS: dict[Part, str] = {
    "raw": "raw scores",
    "scaled": "scaled scores",
    "capped": "capped scores",
    "masked": "masked scores",
    "partial lse": "partial log-sum-exps",
    "partial out": "partial outputs",
    "lse": "log-sum-exps",
    "weights": "weights",
    "out": "outputs",
}
"""What is compared, in the order of the computation. Weights come late: they are made with the log-sum-exp."""
RATIOS: tuple[Part, ...] = ("partial lse", "lse")
"""Logarithms: their difference is the ratio of two sums, so that it is relative already."""
MOST_STEPS = 1000
"""Numbers that are further apart say nothing of rounding, and words leave their steps out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where two runs differ, and the two numbers there.

    `query` is the number among the request's new tokens, None in a decode, which has one. `keys` are first key and end
    of what the number was made of, as finely as it was recorded: a split, a page, a key; None: of all of them.
    """

    request: int
    query: int | None
    head: int
    split: int | None
    keys: tuple[int, int] | None
    a: float
    b: float

    def __str__(self) -> str:
        query = "" if self.query is None else f", query {self.query}"
        split = "" if self.split is None else f", split {self.split}"
        return f"request {self.request}{query}, head {self.head}{split}{key_words(self.keys)}"


def key_words(keys: tuple[int, int] | None) -> str:
    """Return the keys of a place as the end of a list of words.

    >>> key_words((640, 768)), key_words((7, 8)), key_words(None)
    (', keys 640 to 767', ', key 7', '')
    """
    if keys is None:
        return ""
    return f", {'key' if keys[1] - keys[0] == 1 else 'keys'} {span_words(*keys)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What one part of a call differs by between two runs; `count` of `of` numbers do.

    Numbers differ where their bits do, the sign of a zero included; NaN is NaN, whichever. `absolute` is the largest
    difference. `relative` is the largest in relation to its head: to the largest finite number that either run has of
    the same part, request, query and head; that of log-sum-exps is `absolute`, since it is the ratio of two sums. Both
    are infinite where a number stands against an infinity or NaN. `first` is the first place by request, query, head
    and key; `worst` that of `relative`, NaN before all else. `requests` and `heads` list all that have a difference.

    `steps` is the difference at `worst` in units in the last place: in the spacing of the numbers of `format` around
    the larger of the two. That is float32; of outputs it is the coarsest of bfloat16, float16 and float32 that holds
    all outputs of a run without rounding, the coarser one of both runs.
    """

    call: int
    layer: int
    part: Part
    count: int
    of: int
    absolute: float
    relative: float
    format: str
    first: Place | None
    worst: Place | None
    requests: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether all bits are equal."""
        return self.count == 0

    @property
    def steps(self) -> float:
        """How many steps of `format` the numbers at `worst` are apart."""
        return 0.0 if self.worst is None else steps_between(self.worst.a, self.worst.b, self.format)

    def words(self, names: tuple[str, str]) -> str:
        """Return how much differs, in words; `names` are those of the two runs."""
        if self.worst is None:
            return f"have the same bits ({self.of:,} numbers)"
        return f"differ in {self.count:,} of {self.of:,} numbers, {self._by(names)} ({self.worst})"

    def _by(self, names: tuple[str, str]) -> str:
        worst = self.worst
        if worst is None or not self.absolute:
            return "in the sign of a zero alone"
        if not math.isfinite(self.relative):
            return f"{told(worst.a)} in {names[0]} against {told(worst.b)} in {names[1]}"
        share = "" if self.part in RATIOS else f", {amount(self.relative)} of their head's largest"
        steps = f", {self.steps:.3g} step{'s' * (self.steps != 1)} of {self.format}" * (self.steps < MOST_STEPS)
        # All of it is of the worst place: the largest difference may lie in a head with larger numbers.
        return f"by {amount(abs(worst.a - worst.b))} where it is worst{share}{steps}"


def amount(x: float) -> str:
    """Return a difference with two digits that count.

    >>> [amount(x) for x in (1.92e-6, 0.0513, 0.3, 2.5, 153.2)]
    ['1.9e-06', '0.051', '0.3', '2.5', '153']
    """
    return f"{x:.2g}" if x < 99.5 else f"{x:,.0f}"


def told(x: float) -> str:
    """Return a number, an infinity or NaN in a few letters."""
    return "NaN" if math.isnan(x) else f"{x:.4g}"


def steps_between(a: float, b: float, format: str) -> float:
    """Return how many steps of a format lie between two numbers, as wide as they are at the larger one.

    >>> steps_between(1.0, 1.0 + 2**-10, "float16"), steps_between(1.0, -1.0, "float32")
    (1.0, 16777216.0)
    """
    largest = max(abs(a), abs(b))
    if not math.isfinite(a - b):
        return 0.0 if a == b else math.inf
    if not largest:
        return 0.0
    info = torch.finfo(getattr(torch, format))
    binade = max(math.ldexp(1.0, math.frexp(largest)[1] - 1), info.smallest_normal)
    return abs(a - b) / (binade * info.eps)


def coarsest(x: Tensor) -> str:
    """Return the coarsest format that holds all of some fp32 numbers without rounding.

    >>> coarsest(torch.tensor([0.5, 0.1])), coarsest(torch.tensor([0.5, 0.1]).half().float())
    ('float32', 'float16')
    """
    for dtype in (torch.bfloat16, torch.float16):
        if ((x.to(dtype).float() == x) | x.isnan()).all():
            return str(dtype).removeprefix("torch.")
    return "float32"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One query's numbers of one part, of both runs: `[heads, places, numbers]` fp32 on the CPU.

    `heads` are their numbers. A place is a range of the request's keys, those of `keys`, or all of them; `splits` are
    the ranges in which both runs took them, empty where these differ.
    """

    part: Part
    request: int
    query: int | None
    heads: tuple[int, ...]
    keys: tuple[tuple[int, int] | None, ...]
    splits: tuple[tuple[int, int], ...]
    a: Float[Tensor, "heads places numbers"]
    b: Float[Tensor, "heads places numbers"]

    @property
    def differs(self) -> Bool[Tensor, "heads places numbers"]:
        """Where bits differ, but for those of NaN."""
        bits = self.a.view(torch.int32) != self.b.view(torch.int32)
        return bits & ~(self.a.isnan() & self.b.isnan())

    @property
    def absolute(self) -> Float[Tensor, "heads places numbers"]:
        """How far apart the numbers are, fp64: 0 between equal infinities, infinite where one alone is no number."""
        apart = (self.a.double() - self.b.double()).abs()
        return torch.where(self.differs, apart.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)

    @property
    def relative(self) -> Float[Tensor, "heads places numbers"]:
        """The same in relation to each head's largest finite number; of a log-sum-exp as it is."""
        if self.part in RATIOS or not self.a.numel():
            return self.absolute
        sizes = torch.stack([self.a, self.b]).double().abs()
        size = torch.where(sizes.isfinite(), sizes, 0.0).amax((0, 2, 3))[:, None, None]
        return self.absolute / torch.where(size > 0, size, 1.0)

    def place(self, at: int) -> Place:
        """Return the place of a number, given its number in the order of memory."""
        head, place, number = (int(i) for i in torch.unravel_index(torch.tensor(at), self.a.shape))
        keys = self.keys[place]
        return Place(
            request=self.request,
            query=self.query,
            head=self.heads[head],
            split=_within(keys, self.splits),
            keys=keys,
            a=float(self.a[head, place, number]),
            b=float(self.b[head, place, number]),
        )

    def difference(self, call: int, layer: int, format: str) -> Difference:
        """Return what this piece differs by."""
        # Most pieces are equal: one look at the bits tells.
        equal = torch.equal(self.a.view(torch.int32), self.b.view(torch.int32))
        differs = torch.zeros(self.a.shape, dtype=torch.bool) if equal else self.differs
        count = 0 if equal else int(differs.sum())
        first = worst = None
        absolute = relative = 0.0
        if count:
            ratio = self.relative
            # Where a zero's sign is all, no difference is larger than 0; one NaN is larger than any.
            size = torch.where(differs, ratio, -1.0)
            alone = self.a.isnan() != self.b.isnan()
            order = alone if alone.any() else size
            first = self.place(int(differs.numpy().argmax()))
            worst = self.place(int(order.numpy().argmax()))
            absolute, relative = float(self.absolute.max()), float(ratio.max())
        return Difference(
            call=call,
            layer=layer,
            part=self.part,
            count=count,
            of=differs.numel(),
            absolute=absolute,
            relative=relative,
            format=format,
            first=first,
            worst=worst,
            requests=(self.request,) * bool(count),
            heads=tuple(
                head for head, any_ in zip(self.heads, differs.flatten(1).any(1).tolist(), strict=True) if any_
            ),
        )


def _within(keys: tuple[int, int] | None, splits: tuple[tuple[int, int], ...]) -> int | None:
    """Return the split that some keys lie in."""
    if keys is None:
        return None
    return next((i for i, (first, end) in enumerate(splits) if first <= keys[0] and keys[1] <= end), None)


def joined(differences: Iterable[Difference]) -> Difference:
    """Return the difference of a part, given those of its pieces in order."""
    found = list(differences)
    there = [x for x in found if not x.same]
    return Difference(
        call=found[0].call,
        layer=found[0].layer,
        part=found[0].part,
        count=sum(x.count for x in found),
        of=sum(x.of for x in found),
        absolute=max(x.absolute for x in found),
        relative=max(x.relative for x in found),
        format=found[0].format,
        first=next((x.first for x in there), None),
        worst=max(there, key=_severity).worst if there else None,
        requests=tuple(dict.fromkeys(r for x in there for r in x.requests)),
        heads=tuple(sorted({head for x in there for head in x.heads})),
    )


def _severity(difference: Difference) -> tuple[bool, float]:
    worst = difference.worst
    return worst is not None and (math.isnan(worst.a) or math.isnan(worst.b)), difference.relative


def listed(numbers: Iterable[int], noun: str) -> str:
    """Return numbers of things as runs.

    >>> listed([3, 4, 5, 9], "head"), listed([2], "request")
    ('heads 3–5, 9', 'request 2')
    """
    found = tuple(numbers)
    words = ", ".join(span(first, end, "–") for first, end in runs_of(found))
    return f"{noun}{'s' * (len(found) != 1)} {words}"
