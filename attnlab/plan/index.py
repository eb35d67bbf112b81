"""Which slots each request reads: a ragged list without padding (CSR)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import contiguous, require, tensor
from attnlab.memory.pool import Translation

Translate = Callable[[Tensor, Tensor, Translation], Tensor]
"""(ids, indptr, translation) -> ids: the engine's `PlanOps.translate`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVIndex:
    """Request r reads `slots[indptr[r]:indptr[r + 1]]`, in position order.

    `indptr` is int32 `[reqs + 1]`, `slots` int64. The slots buffer may be longer than the list; its tail is never
    read. `space` names the id space that the slots are in, so that no list is translated twice.

    >>> index = KVIndex(indptr=torch.tensor([0, 2, 3], dtype=torch.int32), slots=torch.tensor([7, 9, 4]), space="pool")
    >>> index.reqs
    2
    """

    indptr: Int[Tensor, " reqs_1"]
    slots: Int[Tensor, " capacity"]
    space: str

    def __post_init__(self) -> None:
        tensor("indptr", self.indptr, shape=["reqs + 1"], dtype=torch.int32)
        tensor("slots", self.slots, shape=["capacity"], dtype=torch.int64, device=self.indptr.device)
        contiguous("indptr", self.indptr)
        contiguous("slots", self.slots)
        require(self.indptr.shape[0] >= 1, "indptr: expected at least the entry 0, got none")

    @property
    def reqs(self) -> int:
        """How many requests there are."""
        return self.indptr.shape[0] - 1

    def translated(self, translation: Translation, by: Translate) -> KVIndex:
        """Return the list in the target space; raise ValueError where it is not in the source space (any more)."""
        check_space(self.space, translation, reqs=self.reqs)
        if translation.pages is None:
            return self
        slots = by(self.slots, self.indptr, translation)
        return KVIndex(indptr=self.indptr, slots=slots, space=translation.target)

    def validate(self, *, num_slots: int) -> None:
        """Read the list (waits for the device); raise ValueError where an offset or a slot is out of bounds."""
        offsets = self.indptr.tolist()
        require(offsets[0] == 0, f"indptr: expected to begin with 0, got {offsets[0]}")
        for r, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
            require(a <= b, f"indptr: request {r} has {b - a} slots (from {a} to {b})")
        total = offsets[-1]
        require(
            total <= self.slots.shape[0],
            f"slots: expected at least {total}, got {self.slots.shape[0]}",
        )
        live = self.slots[:total]
        bad = ((live < 1) | (live >= num_slots)).nonzero().flatten()
        if bad.numel():
            at = int(bad[0])
            r = next(r for r in range(len(offsets)) if offsets[r + 1] > at)
            raise ValueError(
                f"slots: request {r}, position {at - offsets[r]} reads slot {int(live[at])}; "
                f"expected 1 to {num_slots - 1}"
            )


def check_space(space: str, translation: Translation, *, reqs: int) -> None:
    """Raise ValueError unless lists that are in this id space are what a translation is from."""
    if space != translation.source:
        raise ValueError(
            f"index: {reqs} lists are in id space {space!r}, the translation is from {translation.source!r} "
            f"to {translation.target!r}; a list is translated once"
        )
