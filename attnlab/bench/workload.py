"""One workload: a batch of requests and the attention of one layer. `workloads.py` lists those that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from attnlab.checks import positive, require
from attnlab.mask import depths
from attnlab.spec import AttentionSpec

Mode = Literal["decode", "extend", "unified", "verify"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call: a batch of requests, and the attention of one layer.

    `cached` are tokens of each request whose keys lie in the pool before the call; a decode's own token is counted. The
    other modes bring `new` tokens a request; `unified` extends in one pass over the pool, and verify's new tokens are
    drafts: a chain, or the `tree` whose parents are given. `cold`: caches are swept before every replay. `group`:
    what it is chosen by, beside its name and mode; `quick`: one of the few that say most. A workload of a curve has its
    place `x` there; `splits`: attnlab cuts every request in so many ranges.

    >>> work = Workload(name="two", mode="decode", cached=(100, 28), attention=heads(4, 2, 16))
    >>> work.kv_bytes, work.flops
    (16384, 32768)
    """

    name: str
    mode: Mode
    cached: tuple[int, ...]
    attention: AttentionSpec
    new: int = 1
    tree: tuple[int, ...] = ()
    page_size: int = 1
    mla: bool = False
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    cold: bool = False
    splits: int | None = None
    group: str = "table"
    x: float | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        require(self.mode in MODES, f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        require(len(self.cached) > 0, f"cached: workload {self.name!r} has no request")
        require(min(self.cached) >= (self.mode == "decode"), f"cached: workload {self.name!r} has a request of nothing")
        require(self.mode != "decode" or self.new == 1, f"new: a decode has one query a request, got {self.new}")
        require(self.attention.mod is None, f"attention: workload {self.name!r} has a modifier, which no peer knows")
        require(len(self.tree) in (0, self.new), f"tree: expected {self.new} parents, got {len(self.tree)}")
        chain = not self.tree or (self.mode == "verify" and not self.attention.sight.partial)
        require(chain, f"tree: workload {self.name!r} is no verify without windows and chunks, which alone has trees")
        cuts = self.splits is None or self.mode in ("decode", "verify")
        require(cuts, f"splits: of a decode or verify alone, workload {self.name!r} is of mode {self.mode}")
        positive("new", self.new)
        positive("page_size", self.page_size)

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.cached)

    @property
    def queries(self) -> int:
        """Query tokens of the call."""
        return self.requests * self.new

    @property
    def lens(self) -> tuple[int, ...]:
        """Tokens of each request, the new ones included."""
        return self.cached if self.mode == "decode" else tuple(n + self.new for n in self.cached)

    def position(self, request: int, query: int) -> int:
        """Return where a query of a request stands."""
        if self.mode == "decode":
            return self.cached[request] - 1
        return self.cached[request] + (depths(self.tree)[query] if self.tree else query)

    @cached_property
    def pairs(self) -> int:
        """How many (query, key) pairs are seen, of one head."""
        if self.tree:  # a draft sees the cached tokens, its ancestors and itself; trees have no windows here
            deep = sum(depths(self.tree))
            return sum(self.new * (n + 1) + deep for n in self.cached)
        first = self.attention.sight.first
        count = 0
        for cached in set(self.cached):
            at = torch.arange(self.new) + (cached - 1 if self.mode == "decode" else cached)
            count += int((at - first(at) + 1).sum()) * self.cached.count(cached)
        return count

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over all pairs that are seen."""
        spec = self.attention
        return 2 * (spec.qk_dim + spec.v_dim) * spec.heads * self.pairs

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that some query sees, each read once."""
        spec, first = self.attention, self.attention.sight.first
        oldest = [first(self.position(r, 0)) for r in range(self.requests)]
        keys = sum(n - start for n, start in zip(self.lens, oldest, strict=True))
        width = spec.qk_dim + (0 if self.mla else spec.v_dim)
        return keys * spec.kv_heads * width * self.kv_dtype.itemsize


def heads(
    heads: int = 32, kv_heads: int = 8, qk_dim: int = 128, v_dim: int | None = None, *, window: int | None = None
) -> AttentionSpec:
    """Return the attention of so many heads, scaled by the root of its columns."""
    v_dim = qk_dim if v_dim is None else v_dim
    return AttentionSpec(heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim, scale=qk_dim**-0.5, window=window)


def latent(count: int) -> AttentionSpec:
    """Return the absorbed MLA of DeepSeek-V3's widths with so many query heads, as a rank of a server has them."""
    return AttentionSpec(heads=count, kv_heads=1, qk_dim=576, v_dim=512, scale=192**-0.5)
