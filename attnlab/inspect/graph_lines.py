"""What `describe` says of a graph: what was captured, what its memory holds, and its latest plan."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from attnlab.graphs.graph import Graph
from attnlab.graphs.shapes import DraftShape, ExtendShape, Shape, VerifyShape
from attnlab.inspect.draft_lines import DraftDescription
from attnlab.inspect.graph_view import GraphView
from attnlab.inspect.words import counted
from attnlab.units import size

if TYPE_CHECKING:
    from attnlab.inspect.describe import Description


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDescription:
    """A graph in plain numbers. `print` it, or let a notebook show it.

    `view` says of every buffer what it holds, and `step` is the description of the latest plan.
    """

    shape: Shape
    rerun: bool
    tensors: int
    view: GraphView
    step: Description | DraftDescription

    @classmethod
    def of(cls, graph: Graph, *, step: Description | DraftDescription) -> GraphDescription:
        """Read a graph's memory. Waits for the device."""
        tensors = len(graph.buffers)
        return cls(shape=graph.shape, rerun=graph.rerun, tensors=tensors, view=GraphView.of(graph), step=step)

    @property
    def lines(self) -> list[str]:
        """What was captured, the latest step, the memory, where plans come from; and what is wrong, if anything is."""
        view = self.view
        how = "run again at every replay" if self.rerun else "captured in a CUDA graph"
        left_over = f", {view.left_over_share:.1%} left over from earlier steps" if view.left_over_share else ""
        padded = (view.most_requests - view.requests, view.most_tokens - view.tokens)
        return [
            f"graph of {view.mode} steps: {shape_words(self.shape)} · {how}",
            f"latest step: {counted(view.requests, 'request')} and {counted(padded[0], 'padded row')}, "
            f"{counted(view.tokens, 'query token')} and {padded[1]:,} padded",
            f"fixed memory: {size(view.nbytes)} in {counted(self.tensors, 'tensor')} ({self._by_owner}), "
            f"{view.live_share:.0%} live" + left_over,
            "plan: filled in by a CUDA graph of the planning"
            if view.planning_replayed
            else "plan: made anew for every step, and copied to where the first one lies",
            *(
                f"! padded rows read what an earlier step has left: {counted(buffer.left_over, buffer.unit)} of "
                f"{buffer.name} ({buffer.owner})"
                for buffer in view.faults
            ),
        ]

    @property
    def _by_owner(self) -> str:
        owners = {"batch": 0, "plan": 0, "inputs": 0}
        for buffer in self.view.buffers:
            owners[buffer.owner if buffer.owner in owners else "plan"] += buffer.nbytes
        return ", ".join(f"{owner} {size(nbytes)}" for owner, nbytes in owners.items() if nbytes)

    def __str__(self) -> str:
        return "\n".join([*self.lines, "", str(self.step)])

    def _repr_html_(self) -> str:
        first, *others = map(escape, self.lines)
        return f"<div><p><b>{first}</b><br/>{'<br/>'.join(others)}</p>{self.step._repr_html_()}</div>"


def shape_words(shape: Shape) -> str:
    """Return the largest step of a graph in words.

    >>> shape_words(VerifyShape(requests=8, longest=96, drafts=3, masked=True))
    'up to 8 requests of up to 96 tokens, 3 drafts each, with a mask'
    """
    words = f"up to {counted(shape.requests, 'request')} of up to {counted(shape.longest or shape.each, 'token')}"
    match shape:
        case ExtendShape():
            words += f", up to {counted(shape.new, 'new token')} each"
        case DraftShape():
            words += (
                f", {shape.topk} {'branch' if shape.topk == 1 else 'branches'} of {counted(shape.steps, 'draft')} each"
            )
        case VerifyShape():
            words += f", {counted(shape.drafts, 'draft')} each"
    if isinstance(shape, ExtendShape | VerifyShape):
        words += ", with a mask" if shape.masked else ", without a mask"
    return words
