"""What `describe` says of a draft: a line for every step of every kind of layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from attnlab.inspect.plan_lines import LaneLines, lane_lines
from attnlab.inspect.step import live_rows, prefix_and_new
from attnlab.inspect.words import GAP, aligned, counted, html_cells, lane_title, request_words, slot_words
from attnlab.plan.draft import DraftPlan

MEANING = "ranges: asked for → used · drafts go to: storage slots, branch by branch · plan.steps[i] is described alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDescription:
    """A draft in plain numbers. `print` it, or let a notebook show it as a table.

    `lanes` holds, for each kind of layer, what every step's plan says of it. `drafts` counts those of a branch. The
    `padded` rows behind the requests, which have no token, stand for none.
    """

    requests: int
    padded: int
    topk: int
    drafts: int
    epoch: int
    policies: tuple[str, ...]
    lanes: tuple[tuple[LaneLines, ...], ...]
    most: int

    @classmethod
    def of(cls, plan: DraftPlan, *, most: int) -> DraftDescription:
        """Read all steps of a plan. Waits for the device."""
        steps = [[lane_lines(step, i, *prefix_and_new(step)) for i in range(len(step.lanes))] for step in plan.steps]
        seq = plan.batch.seq.device.tolist()
        requests = live_rows(seq, seq)
        return cls(
            requests=requests,
            padded=len(seq) - requests,
            topk=plan.batch.topk,
            drafts=plan.batch.steps,
            epoch=plan.epoch,
            policies=tuple(dict.fromkeys(lane.splits.policy for step in plan.steps for lane in step.lanes)),
            lanes=tuple(zip(*steps, strict=True)),
            most=most,
        )

    @property
    def head(self) -> str:
        """Requests, branches, drafts, steps, epoch, policy, in one line."""
        counts = [request_words(self.requests, self.padded), f"{self.topk} x {counted(self.drafts, 'draft')} each"]
        words = [f"draft: {', '.join(counts)}", counted(self.drafts - 1, "decode step"), f"epoch {self.epoch}"]
        return " · ".join([*words, *(f"policy {policy}" for policy in self.policies)])

    def __str__(self) -> str:
        blocks = [self.head]
        for steps in self.lanes:
            lines = [lane_title(steps[0]), *aligned(self._table(steps)), *(GAP + words for words in self._wrong(steps))]
            blocks.append("\n".join(lines))
        return "\n\n".join([*blocks, *([MEANING] if self.lanes else [])])

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{escape(self.head)}</b></p>"]
        for steps in self.lanes:
            head, *rows = (html_cells(row, tag) for row, tag in self._tagged(steps))
            parts.append(f"<p><b>{escape(lane_title(steps[0]))}</b></p>")
            parts.append(f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>")
            parts += [f"<p>{escape(words)}</p>" for words in self._wrong(steps)]
        parts += [f"<p>{escape(MEANING)}</p>"] if self.lanes else []
        return f"<div>{''.join(parts)}</div>"

    def _tagged(self, steps: Sequence[LaneLines]) -> Iterable[tuple[Sequence[str], str]]:
        table = self._table(steps)
        return zip(table, ["th", *["td"] * (len(table) - 1)], strict=True)

    def _table(self, steps: Sequence[LaneLines]) -> list[list[str]]:
        """Return the head and a row for each step: its lists, their ranges, and where its drafts go."""
        rows = [["step", "rows", "keys listed", "longest list", "ranges", "drafts go to"]]
        for number, lane in enumerate(steps):
            listed = [line.listed for line in lane.lines[: self.requests * self.topk]]
            asked, used = sum(line.asked for line in lane.lines), sum(line.used for line in lane.lines)
            written = [slot for line in lane.lines for slot in line.write]
            cells = [f"{number}", f"{len(listed):,}", f"{sum(listed):,}", f"{max(listed, default=0):,}"]
            wrong = " !" if any(line.wrong for line in lane.lines) else ""
            rows.append([*cells, f"{asked:,} → {used:,}", slot_words(written, self.most) + wrong])
        return rows

    def _wrong(self, steps: Sequence[LaneLines]) -> list[str]:
        """Return what is wrong with some of the lists."""
        wrong = [
            f"! step {number}, row {line.request}: {line.wrong}"
            for number, lane in enumerate(steps)
            for line in lane.lines
            if line.wrong
        ]
        return wrong[: self.most]
