"""What the fixed memory of a graph holds after its latest step, in plain numbers: live, padding, or left over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnlab.checks import describe, require
from attnlab.graphs.graph import Graph
from attnlab.inspect.graph_contents import Buffer, buffers_of, tokens_of
from attnlab.inspect.step import Mode, mode_of
from attnlab.plan.draft import DraftPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphView:
    """A graph's buffers after a step of `requests` requests with `tokens` query tokens.

    It was captured for `most_requests` of up to `longest` tokens, and `most_tokens` query tokens.
    """

    mode: Mode | Literal["draft"]
    requests: int
    most_requests: int
    tokens: int
    most_tokens: int
    longest: int
    planning_replayed: bool
    buffers: tuple[Buffer, ...]

    @classmethod
    def of(cls, graph: Graph) -> GraphView:
        """Read a graph's memory. Waits for the device.

        >>> import attnlab
        >>> from attnlab import graphs
        >>> wb = attnlab.workbench("SmolLM2-135M", lens=[20, 7], policy="seed", engine="eager")
        >>> shape = graphs.DecodeShape(requests=2)
        >>> graph = graphs.capture(wb.backend, lambda plan: (), shape, inputs={}, rerun=True)
        >>> plan = graph.plan(attnlab.DecodeBatch.of(rows=[1], lens=[7], device="cpu"))
        >>> lists = next(buffer for buffer in GraphView.of(graph).buffers if buffer.name == "list")
        >>> lists.unit, lists.live, lists.padded, lists.left_over
        ('slot', 7, 21, 0)
        """
        require(isinstance(graph, Graph), f"graph: expected one that was captured, got {describe(graph)}", TypeError)
        return cls(
            mode="draft" if isinstance(graph.latest, DraftPlan) else mode_of(graph.latest),
            requests=graph.requests,
            most_requests=graph.shape.requests,
            tokens=sum(tokens_of(graph)),
            most_tokens=graph.shape.tokens,
            longest=graph.shape.longest or graph.shape.each,
            planning_replayed=graph.planning_replayed,
            buffers=tuple(buffers_of(graph)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the fixed memory."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def live_share(self) -> float:
        """The share of the bytes that is of the latest step."""
        return sum(buffer.bytes_of(buffer.live) for buffer in self.buffers) / max(1, self.nbytes)

    @property
    def left_over_share(self) -> float:
        """The share of the bytes that an earlier step has left."""
        return sum(buffer.bytes_of(buffer.left_over) for buffer in self.buffers) / max(1, self.nbytes)

    @property
    def faults(self) -> tuple[Buffer, ...]:
        """Buffers in which padded rows read what an earlier step has left."""
        return tuple(buffer for buffer in self.buffers if buffer.read and buffer.stale)
