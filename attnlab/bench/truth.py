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


class WrongResult(RuntimeError):
    """An output is not that of the oracle: what gave it is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truth:
    """The oracle's outputs of some queries: of the first, the longest and the last request, the first and last query.

    `rows` are their numbers among the workload's queries, `out` is `[rows, heads, v_dim]` fp64.
    """

    work: Workload
    rows: tuple[int, ...]
    out: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Truth:
        """Ask the oracle about some queries of a workload."""
        work = inputs.work
        longest = max(range(work.requests), key=lambda r: work.lens[r])
        places = [(r, i) for r in sorted({0, longest, work.requests - 1}) for i in sorted({0, work.new - 1})]
        out = torch.stack([_attention(inputs, r, i) for r, i in places])
        return cls(work=work, rows=tuple(r * work.new + i for r, i in places), out=out)

    def error(self, out: Tensor) -> float:
        """Return the largest error of an output `[tokens, heads, v_dim]`. Raises WrongResult where that is too much."""
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
        return float(off.max())


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
