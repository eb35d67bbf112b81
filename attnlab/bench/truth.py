"""What is timed is right before it is timed: some queries of every row are held to the fp64 oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.bench.inputs import Inputs, tree_mask
from attnlab.bench.workload import Workload
from attnlab.checks import require
from attnlab.eager import oracle

RIGHT: dict[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 6e-2,
}
"""How far an output may be off, as a share of the largest number in its query's row; by the coarser of the dtypes of
queries and keys. Outputs of long requests are small, so that an absolute bound would let zeros pass."""


SPREAD = 16
"""Parts that the queries of a workload are cut into; of each, one query is looked at, whatever else is."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, come back to no place: the queries that are looked at lie in all places of a tile."""


class WrongResult(RuntimeError):
    """An output is not that of the oracle: what gave it is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truth:
    """The oracle's outputs of some queries, those of `looked_at`.

    `rows` are their numbers among the workload's queries, `out` is `[rows, heads, v_dim]` fp64.
    """

    work: Workload
    rows: tuple[int, ...]
    out: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Truth:
        """Ask the oracle about some queries of a workload."""
        rows = looked_at(inputs.work)
        out = torch.stack([_attention(inputs, *divmod(row, inputs.work.new)) for row in rows])
        return cls(work=inputs.work, rows=rows, out=out)

    @property
    def checked(self) -> str:
        """Which outputs are held to the oracle, in words."""
        if len(self.rows) == self.work.queries:
            return f"all {len(self.rows):,} queries"
        return (
            f"{len(self.rows):,} of {self.work.queries:,} queries: of the first, the longest and the last request the "
            "first and last one, the middle of the longest, and others from all parts; every number is finite"
        )

    def error(self, out: Tensor) -> float:
        """Return the largest error of an output `[tokens, heads, v_dim]`.

        Raises WrongResult where that is too much, or some number of any query is not finite: outputs are NaN before.
        """
        spec, work = self.work.attention, self.work
        shape = (work.queries, spec.heads, spec.v_dim)
        require(tuple(out.shape) == shape, f"expected an output of {shape}, got {tuple(out.shape)}", WrongResult)
        got = out[list(self.rows)].double()
        off = (got - self.out).abs().amax(dim=(1, 2))
        bound = max(RIGHT[work.dtype], RIGHT[work.kv_dtype]) * self.out.abs().amax(dim=(1, 2))
        for row, error, most in zip(self.rows, off.tolist(), bound.tolist(), strict=True):
            request, query = divmod(row, work.new)
            words = f"query {query} of request {request} is off by {error:.2e}, more than {most:.2e}"
            require(math.isfinite(error) and error <= most, words, WrongResult)
        lost = (~out.isfinite()).flatten(1).any(1).nonzero().flatten()[:1].tolist()
        for row in lost:
            request, query = divmod(row, work.new)
            raise WrongResult(f"query {query} of request {request} was not written, or is not finite")
        return float(off.max())


def looked_at(work: Workload) -> tuple[int, ...]:
    """Return the numbers of the queries that are held to the oracle, in order.

    Of the first, the longest and the last request the first and the last query; the middle one of the longest; and one
    of each of SPREAD equal parts of all queries, another place of it each time.

    >>> from attnlab.bench.workloads import TABLE
    >>> looked_at(TABLE[1])
    (0,)
    >>> [number % 128 for number in looked_at(next(work for work in TABLE if work.name == "extend-1x8k"))][:6]
    [0, 60, 120, 53, 113, 46]
    """
    longest = max(range(work.requests), key=lambda r: work.lens[r])
    ends = {r * work.new + i for r in (0, longest, work.requests - 1) for i in (0, work.new - 1)}
    middle = longest * work.new + work.new // 2
    spread = {int((part + part * GOLDEN % 1) * work.queries / SPREAD) for part in range(SPREAD)}
    return tuple(sorted({*ends, middle, *spread}))


def _attention(inputs: Inputs, request: int, query: int) -> Tensor:
    """Return one query's output, fp64 `[heads, v_dim]`."""
    work, spec, view = inputs.work, inputs.work.attention, inputs.pool.view(0)
    at, cached = work.position(request, query), work.cached[request]
    first = int(spec.sight.first(at))
    positions, seen = list(range(first, at + 1)), None
    if work.tree:
        positions = [*range(cached), *(work.position(request, i) for i in range(work.new))]
        seen = [True] * cached + tree_mask(work.tree)[query].tolist()
    slots = inputs.slots(request)
    slots = slots[first : at + 1] if seen is None else slots
    out, _ = oracle.attention(
        inputs.q[request * work.new + query],
        view.k[slots],
        view.v[slots],
        scale=spec.scale,
        q_pos=at,
        softcap=spec.softcap,
        temperature_len=spec.temperature_len,
        sinks=inputs.sinks,
        kv_pos=positions,
        visible=seen,
    )
    return out
