"""Scratch for partial results: allocated once, sliced, never grown."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.arguments import Arguments, Names
from attnlab.checks import require

FLOAT_BYTES = 4
STATES = Names(pointers=("acc_ptr", "max_ptr", "sum_ptr"))
VIEWS = 64
"""Views of the scratch that a workspace keeps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partials:
    """What the programs of one call leave behind, fp32: unnormalised softmax states, one row per partial.

    `acc` is the sum of exp(score - max) * value, without the value scale; `max` and `sum` are the softmax state.
    `group` is the query heads of a KV head; where a request has several query tokens, their number times it. Rows
    that no program owns hold whatever was there.
    """

    acc: Float[Tensor, "partials group v_dim"]
    max: Float[Tensor, "partials group"]
    sum: Float[Tensor, "partials group"]

    @cached_property
    def arguments(self) -> Arguments:
        """What kernels are told of where they lie."""
        return Arguments(STATES, (self.acc, self.max, self.sum))

    @cached_property
    def packed(self) -> bool:
        """Whether states lie one behind the other, as kernels find each by its number, in fp32."""
        states = (self.acc, self.max, self.sum)
        shape, device = self.acc.shape[:2], self.acc.device
        return (
            self.acc.dim() == 3
            and all(
                x.dtype == torch.float32 and x.device == device and x.shape[:2] == shape and x.is_contiguous()
                for x in states
            )
            and self.max.dim() == self.sum.dim() == 2
        )

    @property
    def lse(self) -> Float[Tensor, "partials group"]:
        """Natural log of the sum of exp(score): how much a partial weighs. -inf where nothing was seen."""
        return self.max + self.sum.log()

    @property
    def output(self) -> Float[Tensor, "partials group v_dim"]:
        """Each partial's own softmax output; 0 where nothing was seen."""
        return torch.where(self.sum[..., None] > 0, self.acc / self.sum[..., None], 0.0)


def scratch_bytes(*, partials: int, group: int, v_dim: int) -> int:
    """Return the bytes of so many partials: accumulator, maximum and sum, fp32."""
    return partials * group * (v_dim + 2) * FLOAT_BYTES


class Workspace:
    """Partials for the largest plan, in flat buffers; one accumulator buffer per distinct value dimension.

    It holds `max_ranges` ranges, of up to `max_drafts` query tokens each (a decode has one), of `heads` query heads.
    `complete`: whether the last call left the state of every range here.
    Raises ValueError, with the bytes needed, where a GPU has not that much memory free.
    """

    def __init__(
        self, *, max_ranges: int, max_drafts: int, heads: int, v_dims: Collection[int], device: torch.device | str
    ) -> None:
        self.max_ranges, self.max_drafts, self.heads = max_ranges, max_drafts, heads
        self.complete = True
        self.rows = rows = max_ranges * max_drafts * heads
        self.bytes = sum(scratch_bytes(partials=rows, group=1, v_dim=d) for d in sorted(set(v_dims)))
        device = torch.device(device)
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            require(
                self.bytes <= free,
                f"scratch: {self.bytes:,} bytes for {max_ranges:,} ranges x {max_drafts} query tokens x {heads} heads "
                f"do not fit the {free:,} free on {device}; lower max_requests or max_drafts, or the policy's ranges "
                "per request",
            )
        self._acc = {d: torch.empty(rows * d, dtype=torch.float32, device=device) for d in set(v_dims)}
        self._views: dict[tuple[int, int, int], Partials] = {}  # all layers of a step, and most steps, ask for the same
        self._state = {d: torch.empty(2, rows, dtype=torch.float32, device=device) for d in set(v_dims)}

    def partials(self, *, count: int, group: int, v_dim: int) -> Partials:
        """Return views for so many partials. Raises ValueError where the plan needs more than was allocated."""
        views = self._views.get((count, group, v_dim))
        return self._made(count, group, v_dim) if views is None else views

    def _made(self, count: int, group: int, v_dim: int) -> Partials:
        rows = count * group
        require(
            rows <= self.rows,
            f"plan: needs scratch for {count:,} partials of {group} rows, the workspace holds {self.rows:,} rows "
            f"({self.max_ranges:,} ranges x {self.max_drafts} query tokens x {self.heads} heads); build the backend "
            "with a larger max_requests or, for drafts, max_drafts",
        )
        state = self._state[v_dim]
        views = Partials(
            acc=self._acc[v_dim][: rows * v_dim].view(count, group, v_dim),
            max=state[0, :rows].view(count, group),
            sum=state[1, :rows].view(count, group),
        )
        if len(self._views) >= VIEWS:
            self._views.clear()
        self._views[count, group, v_dim] = views
        return views

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All that was allocated."""
        return (*self._acc.values(), *self._state.values())

    def fill(self, value: float) -> None:
        """Fill all scratch with a value; tests use NaN."""
        for buffer in self.buffers:
            buffer.fill_(value)
