"""What a picture of two runs says in words, and which of their calls, requests and parts it shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnlab.inspect.compare import CallComparison, Comparison
from attnlab.inspect.differences import PARTS, RATIOS, Difference, Part, Piece, amount, told
from attnlab.inspect.words import counted
from attnlab.plots.words import short

BY_KEY: tuple[Part, ...] = ("raw", "scaled", "capped", "masked", "partial lse", "partial out", "weights")
"""Parts that have a place among the keys, in the order of the computation."""
Query = tuple[int, int | None]
"""A request, and its query's number where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """One call of a comparison, and what of it is drawn.

    Above, `part` of every request by head. Below, where there is anything to see there, the keys of `row`, and `piece`:
    the first part with a place among the keys in which that row differs, None where none does.
    """

    comparison: Comparison
    call: CallComparison
    part: Part
    row: Query | None
    piece: Piece | None

    @classmethod
    def of(cls, comparison: Comparison, number: int) -> Shown:
        """Take a call by its number."""
        call = comparison.calls[number]
        part: Part = "out" if call.of("out") else "lse"
        row = _row(call, part)
        pieces = (call.piece(name, *row) for name in BY_KEY) if row else ()
        piece = next((x for x in pieces if x is not None and x.differs.any()), None)
        return cls(comparison=comparison, call=call, part=part, row=row, piece=piece)

    @property
    def names(self) -> tuple[str, str]:
        """The two runs' names, short enough for a title."""
        a, b = self.comparison.names
        return short(a, 20), short(b, 20)

    @property
    def keys(self) -> int:
        """How many keys the request below has; 0 where there is none."""
        return 0 if self.row is None else self.call.a.lens[self.row[0]]

    @property
    def compared(self) -> int:
        """How many of these `piece` has, all where there is no such part: a query of a step sees no later key."""
        spans = [] if self.piece is None else [span for span in self.piece.keys if span is not None]
        return spans[-1][1] if spans else self.keys

    @property
    def difference(self) -> Difference | None:
        """What the part above differs by; None where the call has no row."""
        return self.call.of(self.part)


def _row(call: CallComparison, part: Part) -> Query | None:
    """Return the row to look at below: where `part` differs most, else where anything does first, else another cut."""
    for difference in (call.of(part), call.first):
        if difference is not None and difference.worst is not None:
            return difference.worst.request, difference.worst.query
    return None if call.cut is None else (call.cut.request, None)


def statement(shown: Shown) -> str:
    """Return the title."""
    found, call, (a, b) = shown.difference, shown.call, shown.names
    if not shown.comparison.numbers:
        return f"{a} and {b} have no number to compare"
    where = f"layer {call.a.layer}" if len(shown.comparison.calls) > 1 else ""
    if call.first is None:
        numbers = f"{sum(x.of for x in call.differences):,} numbers"
        if shown.comparison.same:
            extent = shown.comparison.extent
            return f"{a} and {b} have the same bits {extent}: {numbers}" + (f" in {where} alone" if where else "")
        return f"{a} and {b} have the same bits in {where}: {numbers}"
    name = PARTS[shown.part][0].upper() + PARTS[shown.part][1:] + (f" of {where}" if where else "")
    if found is None or found.worst is None:
        other = call.first.worst
        return f"{name} have the same bits, though {PARTS[call.first.part]} differ: {_short(other)}"
    return f"{name} {_how_much(found, shown.names)}: {_short(found.worst)}"


def _how_much(found: Difference, names: tuple[str, str]) -> str:
    worst = found.worst
    if worst is None or not found.absolute:
        return "differ in the sign of a zero alone"
    if not math.isfinite(found.relative):
        a, b = (told(x).replace("-", "−") for x in (worst.a, worst.b))
        return f"are {a} in {names[0]}, {b} in {names[1]}"
    share = "" if found.part in RATIOS else " of a head’s largest number"
    return f"differ by up to {amount(found.relative)}{share}"


def _short(place: object) -> str:
    """Return a place up to its head: `request 2, head 5`."""
    words = str(place).split(", ")
    return ", ".join(word for word in words if word.split()[0] in ("request", "query", "head"))


def caption(shown: Shown) -> str:
    """Return the two lines that say what marks are, and how to read them."""
    a, b = shown.names
    group = shown.call.a.heads // shown.call.a.kv_heads
    frames = "; heads in a frame share a KV head" if group > 1 and shown.call.a.kv_heads > 1 else ""
    relation = "" if shown.part in RATIOS else ", in relation to the largest"
    first = f"A row is a request, a column a head{frames}. Ink: how much its {PARTS[shown.part]} differ{relation}."
    if shown.row is None:
        return f"{first}\nBare cells have the same bits in both runs."
    below = f"Below: the keys of {row_words(shown.row)} as {a} and {b} cut them"
    strip = "" if shown.piece is None else f", and what differs in {PARTS[shown.piece.part]}"
    grey = " Grey: not compared." if shown.compared < shown.keys else ""
    return f"{first}\n{below}{strip}. Bare: the same bits.{grey} Framed: the largest."


def row_words(row: Query) -> str:
    """Return a row in words.

    >>> row_words((2, None)), row_words((0, 3))
    ('request 2', 'request 0, query 3')
    """
    return f"request {row[0]}" + ("" if row[1] is None else f", query {row[1]}")


def source_words(shown: Shown) -> str:
    """Return the last line: what differs first, and what could not be compared."""
    facts = [shown.comparison.summary, *shown.call.facts(shown.comparison.names)]
    return ". ".join(fact[0].upper() + fact[1:] if i else fact for i, fact in enumerate(facts)) + "."


def in_words(shown: Shown) -> str:
    """Return what is to be seen for those who cannot see it."""
    call, names = shown.call, shown.comparison.names
    lines = [f"Two runs of layer {call.a.layer}, {call.a.mode} of {counted(len(call.a.ranges), 'request')}"]
    lines += [f"{PARTS[x.part]} {x.words(names)}" for x in call.differences]
    return ". ".join([*lines, *call.facts(names)]) + "."
