"""Scores of some queries of one request, to be computed again from where the keys lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnlab.checks import tensor
from attnlab.memory.pool import KVView
from attnlab.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreCall:
    """What the score pipeline of `spec` is run on: some rows of `q` against keys of `view`.

    `tokens[i]` says which of a step's query tokens row i is, `q_pos[i]` where it stands. Key j lies in slot `slots[j]`
    at position `kv_pos[j]`. Where not `visible[i, j]`, the score is -inf, and no modifier is asked. `aux` is that of
    the step, `[tokens, heads, width]`, or None.
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
        for name, x, dtype in (
            ("slots", self.slots, torch.int64),
            ("kv_pos", self.kv_pos, torch.int32),
            ("tokens", self.tokens, torch.int64),
            ("q_pos", self.q_pos, torch.int32),
        ):
            tensor(name, x, shape=["keys" if name in ("slots", "kv_pos") else "rows"], dtype=dtype)
        tensor("kv_pos", self.kv_pos, shape=[self.keys], hint="one for every slot")
        tensor("q_pos", self.q_pos, shape=[self.rows], hint="one for every row")
        tensor("visible", self.visible, shape=[self.rows, self.keys], dtype=torch.bool)

    @property
    def rows(self) -> int:
        """How many queries are asked."""
        return self.tokens.shape[0]

    @property
    def keys(self) -> int:
        """How many keys each of them is held against."""
        return self.slots.shape[0]
