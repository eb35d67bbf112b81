"""Words and tables that descriptions of plans share."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from attnlab.inspect.plan_lines import LaneLines
from attnlab.inspect.step import runs_of
from attnlab.spec import Sight

GAP = "  "
STYLE = "text-align: right; padding: 0 0.7em; white-space: nowrap"


def lane_title(lane: LaneLines) -> str:
    """Return which layers take a lane, where their keys lie, and what they see."""
    return lane_name(lane.layers, lane.space, lane.sight)


def lane_name(layers: Sequence[int], space: str, sight: Sight) -> str:
    """Return the name of a lane: its layers, the id space of its keys, its sight.

    >>> lane_name([0, 1, 2, 5], "pool", Sight(window=128))
    "layers 0–2, 5, in 'pool': window 128"
    """
    numbers = ", ".join(span(first, end, "–") for first, end in runs_of(layers))
    return f"layer{'s' * (len(layers) != 1)} {numbers}, in '{space}': {sight}"


def lane_words(lane: LaneLines) -> tuple[str, str]:
    """Return the two lines above a lane's table: which layers see what, and what that comes to."""
    positions = [(line.listed_from, line.end) for line in lane.lines if line.listed]
    keys = counted(sum(line.listed for line in lane.lines), "key")
    facts = [f"{keys} listed"]
    if positions:
        facts[0] += f", positions {min(a for a, _ in positions):,} to {max(b for _, b in positions) - 1:,}"
    if lane.split is not None:
        split = lane.split
        facts.append(f"{counted(split.asked, 'range')} asked for, {split.used:,} used")
        facts.append(f"{counted(split.working, 'program')} with keys, {split.launched:,} launched")
    return lane_title(lane), GAP + " · ".join(facts)


def slot_words(slots: Sequence[int], most: int = 2) -> str:
    """Return slots in list order as runs of neighbours; beyond `most` runs only how many there are.

    >>> slot_words([4, 5, 6, 12]), slot_words([9, 2, 7, 5, 6]), slot_words([0]), slot_words([])
    ('4–6, 12', '9, 2 + 2 runs', 'the sink', '–')
    """
    if not len(slots):
        return "–"
    if not any(slots):
        return "the sink"
    runs = runs_of(slots)
    words = ", ".join(span(first, end, "–") for first, end in runs[:most])
    more = len(runs) - most
    return f"{words} + {counted(more, 'run')}" if more > 0 else words


def span_words(first: int, end: int) -> str:
    """Return the positions from `first` up to `end` in words.

    >>> span_words(260, 388), span_words(7, 8), span_words(3, 3)
    ('260 to 387', '7', '–')
    """
    return span(first, end, " to ") if first < end else "–"


def span(first: int, end: int, to: str) -> str:
    """Return the numbers from `first` up to `end`, of which there is one at least, with `to` between the two ends."""
    return f"{first:,}" if end - first == 1 else f"{first:,}{to}{end - 1:,}"


def counted(count: int, noun: str) -> str:
    """Return a number of things in words: `1 key`, `2 keys`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def request_words(requests: int, padded: int) -> str:
    """Return how many rows of a batch are requests, and how many stand for none.

    >>> request_words(5, 3), request_words(1, 0)
    ('5 requests and 3 padded rows', '1 request')
    """
    return counted(requests, "request") + (f" and {counted(padded, 'padded row')}" if padded else "")


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines, every column as wide as its widest cell, and right-aligned."""
    marked = [any(row[-1].endswith(" !") for row in table)]
    padded = [[*row[:-1], row[-1] + ("" if row[-1].endswith(" !") or not marked[0] else GAP)] for row in table]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    lines = (GAP.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in padded)
    return [(GAP + line).rstrip() for line in lines]


def html_cells(row: Sequence[str], tag: str) -> str:
    """Return a row of an HTML table, whose cells are of that tag."""
    cells = "".join(f"<{tag} style='{STYLE}'>{escape(cell)}</{tag}>" for cell in row)
    return f"<tr>{cells}</tr>"
