"""Scores of some queries of one request, to be computed again from where the keys lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnlab.checks import contiguous, last_axis_contiguous, tensor
from attnlab.memory.pool import KVView
from attnlab.plan.call import FLOATS, check_aux
from attnlab.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreCall:
    """What the score pipeline of `spec` is run on: some rows of `q` against keys of `view`.

    `tokens[i]` says which of a step's query tokens row i is, `q_pos[i]` where it stands. Key j lies in slot `slots[j]`
    at position `kv_pos[j]`. Where not `visible[i, j]`, the score is -inf, and no modifier is asked. `aux` is that of
    the step, `[tokens, heads, width]`, or None. All lie on one device, and all but `q` and `aux` are contiguous.
    """

    spec: AttentionSpec
    view: KVView
    slots: Int[Tensor, " keys"]
    kv_pos: Int[Tensor, " keys"]
    visible: Bool[Tensor, "rows keys"]
    q: Float[Tensor, "tokens heads qk_dim"]
    tokens: Int[Tensor, " rows"]
    q_pos: Int[Tensor, " rows"]
    aux: Tensor | None

    def __post_init__(self) -> None:
        spec, device = self.spec, self.view.k.device
        q = tensor("q", self.q, shape=["tokens", spec.heads, spec.qk_dim], dtype=FLOATS, device=device)
        last_axis_contiguous("q", q)
        check_aux(spec, self.aux, q.shape[0], device, hint="that of the step")
        keys, rows = self.slots.numel(), self.tokens.numel()
        for name, shape, dtype in (
            ("slots", (keys,), torch.int64),
            ("kv_pos", (keys,), torch.int32),
            ("tokens", (rows,), torch.int64),
            ("q_pos", (rows,), torch.int32),
            ("visible", (rows, keys), torch.bool),
        ):
            hint = f"there are {keys} slots and {rows} tokens"
            contiguous(name, tensor(name, getattr(self, name), shape=shape, dtype=dtype, device=device, hint=hint))

    @property
    def rows(self) -> int:
        """How many queries are asked."""
        return self.tokens.shape[0]

    @property
    def keys(self) -> int:
        """How many keys each of them is held against."""
        return self.slots.shape[0]
