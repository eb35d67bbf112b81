"""Which of a step's new tokens see which: causal, or pair by pair.

A mask speaks of every (new token, key) pair, cached keys included. Windows and chunks apply on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from attnlab.checks import contiguous, require, tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Causal:
    """New tokens see all cached ones, and of the new ones those up to themselves."""


CAUSAL = Causal()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CustomMask:
    """An entry, one byte, a pair, flat: request after request, row-major `new x (cached + new)`; 0 hides the key.

    It alone decides, of cached keys too; `cached_visible`: of new keys alone, every cached one is seen whatever its
    entry says, which then goes unread. Source: the tree attention of SpecInfer (Miao et al., 2024) and EAGLE.

    >>> CustomMask.of_trees([[-1, 0, 0]], cached=[2], device="cpu").bits.view(3, 5).tolist()
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    """

    bits: UInt8[Tensor, " pairs"]
    cached_visible: bool = False

    def __post_init__(self) -> None:
        contiguous("mask", tensor("mask", self.bits, shape=["pairs"], dtype=torch.uint8))

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> CustomMask:
        """Return the mask of one bool (or uint8) matrix `[new, cached + new]` for each request."""
        for r, bits in enumerate(rows):
            tensor(f"mask of request {r}", bits, shape=["new", "keys"], dtype=(torch.bool, torch.uint8))
        flat = [bits.flatten().to(torch.uint8) for bits in rows]
        return cls(bits=torch.cat(flat) if flat else torch.zeros(0, dtype=torch.uint8))

    @classmethod
    def of_trees(
        cls, parents: Sequence[Sequence[int]], *, cached: Sequence[int], device: torch.device | str
    ) -> CustomMask:
        """Return the mask, of drafts alone, under which a draft sees every cached key, its ancestors and itself."""
        require(
            len(parents) == len(cached),
            f"parents: expected one tree for each of {len(cached)} requests, got {len(parents)}",
        )
        rows = [
            torch.cat([torch.ones(len(tree), n, dtype=torch.bool), ancestors(tree)], 1)
            for tree, n in zip(parents, cached, strict=True)
        ]
        return cls(bits=cls.of(rows).bits.to(device, non_blocking=True), cached_visible=True)

    def rows_of(self, at: int, *, new: int, cached: int) -> Bool[Tensor, "new keys"]:
        """Return what a request's new tokens see; its entries begin at `at`."""
        seen = self.bits[at : at + new * (cached + new)].view(new, cached + new) != 0
        if self.cached_visible:
            seen[:, :cached] = True
        return seen


Mask = Causal | CustomMask


def ancestors(parents: Sequence[int]) -> Tensor:
    """Return bool `[drafts, drafts]`: row i is true at i and at every draft on its path to the root.

    `parents[i]` is the draft before i on its path; the root's is -1, and it comes first.
    """
    visible = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in _checked(parents):
        if parent >= 0:
            visible[i] |= visible[parent]
    return visible


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many drafts lie between each draft and the root, itself included and the root not: the root has 0."""
    found: list[int] = []
    for _, parent in _checked(parents):
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def _checked(parents: Sequence[int]) -> list[tuple[int, int]]:
    for i, parent in enumerate(parents):
        is_int = isinstance(parent, int) and not isinstance(parent, bool)
        expected = "-1, the root has no parent" if i == 0 else f"an earlier draft, 0 to {i - 1}"
        in_order = is_int and (parent == -1 if i == 0 else 0 <= parent < i)
        require(in_order, f"parents: draft {i}: expected {expected}, got {parent!r}")
    return list(enumerate(parents))


def mask_offsets(new: Int[Tensor, " reqs"], keys: Int[Tensor, " reqs"]) -> Int[Tensor, " reqs_1"]:
    """Return where each request's entries begin, and the end: int64 `[0, new[0] x keys[0], ...]`, on their device."""
    return torch.nn.functional.pad((new.long() * keys.long()).cumsum(0), (1, 0))
