"""One query head's merge, step by step: what each range says, how much it weighs, when the answer is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.checks import require
from attnlab.plan.plans import Lane
from attnlab.plan.workspace import Partials


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeSteps:
    """The partial results of one request and query head, in key order, fp64 on the CPU. Sinks are not part of it.

    `lse` is each range's natural log-sum-exp, `outputs` its own softmax output; `title` says whose they are.
    """

    title: str
    ranges: tuple[tuple[int, int], ...]
    lse: Float[Tensor, " splits"]
    outputs: Float[Tensor, "splits v_dim"]

    def __post_init__(self) -> None:
        require(len(self.ranges) > 0, f"merge: {self.title} has no keys, so there is nothing to merge")

    @classmethod
    def of(cls, partials: Partials, lane: Lane, *, request: int, head: int, title: str) -> MergeSteps:
        """Copy them out of the scratch of a decode call that has just run."""
        kv_heads, group = lane.schedule.kv_heads, partials.max.shape[1]
        reqs = lane.splits.reqs
        require(0 <= request < reqs, f"request: the plan has requests 0 to {reqs - 1}, got {request}")
        require(
            0 <= head < kv_heads * group,
            f"head: the layer has heads 0 to {kv_heads * group - 1}, got {head}",
        )
        owner = request * kv_heads + head // group
        first, last = lane.schedule.merge_indptr[owner : owner + 2].tolist()
        member = head % group
        return cls(
            title=title,
            ranges=lane.splits.to_host().ranges[request],
            lse=partials.lse[first:last, member].double().cpu(),
            outputs=partials.output[first:last, member].double().cpu(),
        )

    @property
    def total_lse(self) -> float:
        """The natural log-sum-exp over all keys."""
        return float(torch.logsumexp(self.lse, 0))

    @property
    def weights(self) -> Float[Tensor, " splits"]:
        """Each range's share of the answer: exp(lse - total). They sum to 1."""
        return torch.exp(self.lse - self.total_lse)

    @property
    def running(self) -> Float[Tensor, "splits v_dim"]:
        """The answer after each range has been merged, in key order; the last row is the final output."""
        weights = torch.exp(self.lse - self.lse.max())
        return (weights[:, None] * self.outputs).cumsum(0) / weights.cumsum(0)[:, None]

    @property
    def distance(self) -> Float[Tensor, " splits"]:
        """How far the running answer is from the final one, as a share of the final one's length."""
        running = self.running
        off: Tensor = torch.linalg.vector_norm(running - running[-1], dim=1)
        length: Tensor = torch.linalg.vector_norm(running[-1])
        return off / length
