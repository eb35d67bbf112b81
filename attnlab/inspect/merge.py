"""One query head's merge, step by step: what each range says, how much it weighs, when the answer is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.checks import member, require, tensor
from attnlab.plan.plans import Lane
from attnlab.plan.workspace import Partials


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestPartials:
    """What a call left of one request, by query head, splits in key order. Numbers are made when they are asked for."""

    rows: Partials
    kv_heads: int

    @classmethod
    def of(cls, partials: Partials, request: int, *, owners: Sequence[int], kv_heads: int) -> RequestPartials:
        """Look at a request's rows of the scratch; `owners` is the schedule's `merge_indptr`, on the host."""
        mine = slice(owners[request * kv_heads], owners[(request + 1) * kv_heads])
        rows = Partials(acc=partials.acc[mine], max=partials.max[mine], sum=partials.sum[mine])
        return cls(rows=rows, kv_heads=kv_heads)

    @property
    def lse(self) -> Float[Tensor, "splits heads"]:
        """Natural log-sum-exps."""
        return self._by_head(self.rows.lse)

    @property
    def output(self) -> Float[Tensor, "splits heads v_dim"]:
        """Normalised outputs."""
        return self._by_head(self.rows.output)

    def _by_head(self, x: Tensor) -> Tensor:
        by_kv_head = x.unflatten(0, (self.kv_heads, x.shape[0] // self.kv_heads))
        by_head: Tensor = by_kv_head.transpose(0, 1).flatten(1, 2)
        return by_head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeSteps:
    """The partial results of one request and query head, in key order, fp64 on the CPU. Sinks are not part of it.

    `lse` is each range's natural log-sum-exp, `outputs` its own softmax output. `about`, where given, stands for the
    request in the title.
    """

    layer: int
    request: int
    head: int
    ranges: tuple[tuple[int, int], ...]
    lse: Float[Tensor, " splits"]
    outputs: Float[Tensor, "splits v_dim"]
    about: str = ""

    def __post_init__(self) -> None:
        require(len(self.ranges) > 0, f"merge: {self.title} has no keys, so there is nothing to merge")
        splits = len(self.ranges)
        empty = [(start, end) for start, end in self.ranges if start >= end]
        require(not empty, f"ranges: expected some keys in each, got {empty[:1]}")
        floats = (torch.float64, torch.float32)
        tensor("lse", self.lse, shape=[splits], dtype=floats)
        tensor("outputs", self.outputs, shape=[splits, "v_dim"], dtype=floats)

    @classmethod
    def of(cls, partials: Partials, lane: Lane, *, layer: int, request: int, head: int) -> MergeSteps:
        """Copy them out of the scratch of a decode call that has just run."""
        kv_heads, reqs = lane.schedule.kv_heads, lane.splits.reqs
        heads = kv_heads * partials.max.shape[1]
        request, head = member("request", request, reqs, of="the plan"), member("head", head, heads, of="the layer")
        owners = lane.schedule.merge_indptr.tolist()
        mine = RequestPartials.of(partials, request, owners=owners, kv_heads=kv_heads)
        return cls(
            layer=layer,
            request=request,
            head=head,
            ranges=lane.splits.to_host().ranges[request],
            lse=mine.lse[:, head].double().cpu(),
            outputs=mine.output[:, head].double().cpu(),
        )

    @property
    def title(self) -> str:
        """Whose they are."""
        return f"layer {self.layer}, head {self.head}, {self.about or f'request {self.request}'}"

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
