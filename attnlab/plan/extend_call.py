"""One extend or verify call: several queries a request, over cached keys and those that come with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnlab.checks import last_axis_contiguous, one_of, own_memory, require, same_device, tensor
from attnlab.memory.pool import KVView
from attnlab.plan.call import FLOATS, check_aux, check_sinks
from attnlab.plan.plans import ExtendLane, Queries
from attnlab.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendCall:
    """A layer's attention for the queries of a plan, checked when it is made: engines need not look again.

    `q` is `[tokens, heads, qk_dim]`, `k` and `v` of the new tokens `[tokens, kv_heads, dim]`, `out` `[tokens, heads,
    v_dim]`, all fp32, fp16 or bf16; `lse` `[tokens, heads]` fp32 or None; `sinks` `[heads]` exactly where the layer has
    them; `aux` `[tokens, heads, width]` exactly where its modifier reads one. Under MLA `v` is `k`'s first columns.
    `one_pass`: the lists hold the new tokens too, which then are read from the pool, and `k` and `v` are not. `parts`
    leaves the cached or the new keys out, for results that are merged by their LSE elsewhere; positions stay the same.
    """

    layer: int
    spec: AttentionSpec
    view: KVView
    lane: ExtendLane
    queries: Queries
    one_pass: bool
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None
    aux: Tensor | None = None
    parts: Literal["all", "cached", "new"] = "all"

    def __post_init__(self) -> None:
        spec, tokens, device = self.spec, self.queries.positions.shape[0], self.view.k.device
        self.view.check_fits(spec)
        there = self.queries.indptr.device
        require(same_device(there, device), f"plan: made on {there}, the pool is on {device}")
        hint = f"the plan has {tokens} query tokens, layer {self.layer} {spec.heads} heads and {spec.kv_heads} KV heads"
        shapes = {
            "q": (self.q, spec.heads, spec.qk_dim),
            "k": (self.k, spec.kv_heads, spec.qk_dim),
            "v": (self.v, spec.kv_heads, spec.v_dim),
            "out": (self.out, spec.heads, spec.v_dim),
        }
        for name, (x, heads, dim) in shapes.items():
            tensor(name, x, shape=(tokens, heads, dim), dtype=FLOATS, device=device, hint=hint)
            last_axis_contiguous(name, x)
        same = self.k.dtype == self.q.dtype == self.v.dtype
        got = f"{self.k.dtype} and {self.v.dtype}"
        require(same, f"k, v: expected the dtype of q, {self.q.dtype}, got {got}", TypeError)
        if self.lse is not None:
            tensor("lse", self.lse, shape=(tokens, spec.heads), dtype=torch.float32, device=device, hint=hint)
        one_of("parts", self.parts, ("all", "cached", "new"))
        require(self.parts == "all" or not self.one_pass, "parts: one pass reads one list, which cannot be told apart")
        read: dict[str, Tensor | None] = {
            "k": self.k,
            "v": self.v,
            "the pool's keys": self.view.k,
            "the pool's values": self.view.v,
        }
        read |= {"q": self.q, "sinks": self.sinks, "aux": self.aux}
        own_memory("out", self.out, read)
        if self.lse is not None:
            own_memory("lse", self.lse, {**read, "out": self.out})
        check_sinks(spec, self.sinks, device)
        check_aux(spec, self.aux, tokens, device, hint)
