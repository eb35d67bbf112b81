"""A plan as a table: what every kind of layer reads of every request, and where new tokens go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import overload

from attnlab.checks import positive
from attnlab.graphs.graph import Graph
from attnlab.inspect.draft_lines import DraftDescription
from attnlab.inspect.graph_lines import GraphDescription
from attnlab.inspect.plan_lines import LaneLines, RequestLine, lane_lines
from attnlab.inspect.step import Mode, live_rows, mode_of, prefix_and_new
from attnlab.inspect.words import GAP, aligned, counted, html_cells, lane_words, request_words, slot_words, span_words
from attnlab.mask import CustomMask
from attnlab.plan.draft import DraftPlan
from attnlab.plan.plans import DecodePlan, ExtendPlan, Plan, Queries

MOST_ROWS = 12
"""Requests that have a row of their own, unless told otherwise."""
WORDS = {"decode": "decode step", "extend": "extend step", "verify": "verify step"}
NEW = {"decode": "new", "extend": "new", "verify": "drafts"}
MEANING = {
    "edge": "where the first query’s sight begins",
    "start": "the position of the list’s first entry",
    "unseen": "keys before it, which no query of this step sees",
    "ranges": "asked for → used",
    "new go to": "the storage slots of the step’s own tokens",
}
"""What the columns are whose names do not say it, left to right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A plan in plain numbers. `print` it, or let a notebook show it as a table.

    `requests` and `tokens` count the step; the `padded` rows behind them, which have no token, stand for no request.
    `facts` are the other words of the head line. `most` requests have a row in the tables.
    """

    mode: Mode
    requests: int
    padded: int
    tokens: int
    epoch: int
    facts: tuple[str, ...]
    lanes: tuple[LaneLines, ...]
    most: int

    @property
    def head(self) -> str:
        """Mode, requests, tokens, epoch, policy, in one line."""
        counts = [request_words(self.requests, self.padded), counted(self.tokens, "query token")]
        return " · ".join([f"{WORDS[self.mode]}: {', '.join(counts)}", f"epoch {self.epoch}", *self.facts])

    def __str__(self) -> str:
        blocks = [self.head]
        for lane in self.lanes:
            lines = [*lane_words(lane)]
            if self.requests:
                lines += aligned(self._table(lane))
            lines += [f"{GAP}{words}" for words in self._below(lane)]
            blocks.append("\n".join(lines))
        return "\n\n".join([*blocks, *self._meaning()])

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{escape(self.head)}</b></p>"]
        for lane in self.lanes:
            first, *others = lane_words(lane)
            below = "".join(f"<br/>{escape(words.strip())}" for words in others)
            parts.append(f"<p><b>{escape(first)}</b>{below}</p>")
            if self.requests:
                head, *rows = (html_cells(row, tag) for row, tag in self._tagged(lane))
                parts.append(f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>")
            parts += [f"<p>{escape(words)}</p>" for words in self._below(lane)]
        parts += [f"<p>{escape(words)}</p>" for words in self._meaning()]
        return f"<div>{''.join(parts)}</div>"

    def _tagged(self, lane: LaneLines) -> Iterable[tuple[Sequence[str], str]]:
        return zip(self._table(lane), ["th", *["td"] * self.most], strict=False)

    def _table(self, lane: LaneLines) -> list[list[str]]:
        """Return the head and the rows of a lane's table, columns that say nothing left out."""
        shown = lane.lines[: min(self.most, self.requests)]
        columns = {
            "request": [f"{line.request}" for line in shown],
            "row": [f"{line.row}" for line in shown],
            "len" if self.mode == "decode" else "cached": [f"{self._length(line):,}" for line in shown],
            NEW[self.mode]: [] if self.mode == "decode" else [f"{line.new:,}" for line in shown],
            "edge": [f"{line.edge:,}" for line in shown] if lane.sight.partial else [],
            "start": [f"{line.start:,}" for line in shown],
            "padding": [f"{line.padding:,}" for line in shown] if lane.padded else [],
            "listed": [f"{line.listed:,}" for line in shown],
            "positions": [span_words(line.listed_from, line.end) for line in shown],
            "unseen": [f"{line.unseen:,}" for line in shown] if lane.sight.partial else [],
            "ranges": [f"{line.asked} → {line.used}" for line in shown] if lane.split else [],
            "at slots": [slot_words(line.slots) for line in shown],
            "new go to": [slot_words(line.write) if line.new else "–" for line in shown],
        }
        filled = {name: cells for name, cells in columns.items() if cells}
        marks = [" !" if line.wrong else "" for line in shown]
        rows = [[*cells[:-1], cells[-1] + mark] for *cells, mark in zip(*filled.values(), marks, strict=True)]
        return [list(filled), *rows]

    def _meaning(self) -> list[str]:
        """Return one line about the columns that occur and need words."""
        occurring = {name for lane in self.lanes if self.requests for name in self._table(lane)[0]}
        words = [f"{name}: {meaning}" for name, meaning in MEANING.items() if name in occurring]
        return [" · ".join(words)] if words else []

    def _length(self, line: RequestLine) -> int:
        return line.cached + line.new if self.mode == "decode" else line.cached

    def _below(self, lane: LaneLines) -> list[str]:
        """Return what is said below a table: how many requests have no row, and what is wrong with some."""
        more = self.requests - self.most
        words = [f"... and {counted(more, 'other request')}"] if more > 0 else []
        if self.padded:
            words.append(
                f"+ {counted(self.padded, 'padded row')}, which stand{'s' * (self.padded == 1)} for no request"
            )
        wrong = [f"! request {line.request}: {line.wrong}" for line in lane.lines if line.wrong]
        return words + wrong[: self.most]


@overload
def describe(plan: Plan, *, most: int = ...) -> Description: ...
@overload
def describe(plan: DraftPlan, *, most: int = ...) -> DraftDescription: ...
@overload
def describe(plan: Graph, *, most: int = ...) -> GraphDescription: ...
def describe(
    plan: Plan | DraftPlan | Graph, *, most: int = MOST_ROWS
) -> Description | DraftDescription | GraphDescription:
    """Return a plan as a table that can be checked by hand: of every request, which keys are read, and where they lie.

    It reads the plan's tensors, and so waits for the device. A list that is not what lengths and sight ask for, or
    that reads the sink, is marked. `most` requests have a row. Of a draft every step has one; each step is a plan.
    Of a graph a few lines say what its fixed memory holds, before its latest plan.

    >>> import attnlab
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[40, 3], policy="static", engine="eager", layers=[18])
    >>> for line in str(attnlab.describe(wb.plan())).splitlines()[2:6]:
    ...     print(line)
    layer 18, in 'pool': all keys
      43 keys listed, positions 0 to 39 · 16 ranges asked for, 3 used · 9 programs with keys, 9 launched
      request  row  len  start  listed  positions  ranges     at slots  new go to
            0    0   40      0      40    0 to 39   8 → 2  1–16, 20–43         43
    """
    if isinstance(plan, DraftPlan):
        return DraftDescription.of(plan, most=positive("most", most))
    if isinstance(plan, Graph):
        return GraphDescription.of(plan, step=describe(plan.latest, most=most))
    prefix, new = prefix_and_new(plan)
    requests = live_rows(prefix, new)
    return Description(
        mode=mode_of(plan),
        requests=requests,
        padded=len(prefix) - requests,
        tokens=sum(new),
        epoch=plan.epoch,
        facts=tuple(_facts(plan)),
        lanes=tuple(lane_lines(plan, i, prefix, new) for i in range(len(plan.lanes))),
        most=positive("most", most),
    )


def _facts(plan: Plan) -> list[str]:
    if isinstance(plan, ExtendPlan):
        facts = ["one pass over cached and new keys" if plan.one_pass else "cached keys, then new ones"]
    else:
        policies = dict.fromkeys(lane.splits.policy for lane in plan.lanes)
        facts = [f"policy {' and '.join(policies)}"]
        if plan.multiprocessors is not None:
            facts.append(f"{plan.multiprocessors} multiprocessors")
    if not isinstance(plan, DecodePlan):
        facts.append(_mask_words(plan.queries))
    return facts


def _mask_words(queries: Queries) -> str:
    """Return how many entries decide, and in how much memory they lie where that is more."""
    if not isinstance(queries.mask, CustomMask):
        return "causal"
    live, room = int(queries.mask_indptr[-1]), len(queries.mask.bits)
    scope = " among new tokens" if queries.cached_visible else ""
    return f"a mask of {live:,} entries{scope}" + (f", in memory for {room:,}" if room > live else "")
