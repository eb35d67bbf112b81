"""How scores are pooled: where a request's keys are cut into bins, and how a bin becomes one number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.checks import one_of, require
from attnlab.trace import Reduce

Pool = Literal["key", "page", "split"]

POOLS: tuple[Pool, ...] = ("key", "page", "split")
_REDUCE: dict[Reduce, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(-1),
    "sum": lambda x: x.sum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
}
BY_KEY_UP_TO = 256
"""Requests of so many keys are taken key by key unless a pooling is chosen; longer ones by page."""
PAGE = 16
"""Keys per page where the pool's own pages hold a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """A request's keys, cut: bin i holds keys `edges[i]` to `edges[i + 1]`. `words` say what a bin is."""

    pool: Pool
    edges: tuple[int, ...]
    words: str

    @classmethod
    def of(cls, pool: Pool | None, *, keys: int, ranges: Sequence[tuple[int, int]], page_size: int) -> Bins:
        """Cut by key, page or split; None takes keys up to 256 of them, and pages beyond.

        >>> Bins.of("page", keys=40, ranges=[(0, 32), (32, 40)], page_size=1)
        Bins(pool='page', edges=(0, 16, 32, 40), words='page of 16 keys')
        """
        if pool is None:
            pool = "key" if keys <= BY_KEY_UP_TO else "page"
        one_of("pool", pool, POOLS)
        if pool == "split":
            edges = (0, *(end for _, end in ranges))
            require(edges[-1] == keys, f"ranges: the splits end at key {edges[-1]:,} of {keys:,}")
            return cls(pool=pool, edges=edges, words="split")
        size = 1 if pool == "key" else page_size if page_size > 1 else PAGE
        words = "key" if pool == "key" else f"page of {size} keys"
        return cls(pool=pool, edges=(*range(0, keys, size), keys), words=words)


def pooled(values: Float[Tensor, "heads keys"], edges: Sequence[int], reduce: Reduce) -> Float[Tensor, "heads bins"]:
    """Return one number per bin. Bins of one width are reduced together: a pool has few widths, but many bins."""
    if len(edges) - 1 == values.shape[1]:
        return values
    width, last = edges[1], edges[-2]
    if tuple(edges[:-1]) == tuple(range(0, last + 1, width)):  # pages: all of one width, but perhaps the last
        parts = (values[:, :last].unflatten(1, (last // width, width)), values[:, None, last:])
        return torch.cat([_REDUCE[reduce](part) for part in parts], 1)
    by_width: dict[int, list[int]] = {}
    for i, (start, stop) in enumerate(pairwise(edges)):
        by_width.setdefault(stop - start, []).append(i)
    starts = torch.tensor(edges[:-1], device=values.device)
    out = values.new_empty(values.shape[0], len(edges) - 1)
    for width, bins in by_width.items():
        mine = torch.tensor(bins, device=values.device)
        keys = starts[mine][:, None] + torch.arange(width, device=values.device)
        out[:, mine] = _REDUCE[reduce](values[:, keys])
    return out
