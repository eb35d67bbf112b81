"""Which keys a kind of layer sees: an index, and where its entries stand in the request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.checks import contiguous, require, tensor
from attnlab.plan.index import KVIndex


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVLayout:
    """The keys that layers of one kind read. Entry j of request r is the key at position `start[r] + j`.

    Temperature and modifiers use positions, never list entries. `window` counts visible keys, the query's own
    included; None sees all: then every `start` is 0.
    """

    index: KVIndex
    start: Int[Tensor, " reqs"]
    window: int | None

    def __post_init__(self) -> None:
        tensor(
            "start",
            self.start,
            shape=[self.index.reqs],
            dtype=torch.int32,
            device=self.index.indptr.device,
        )
        contiguous("start", self.start)

    @classmethod
    def full(cls, index: KVIndex) -> KVLayout:
        """Return the layout of layers that see every key."""
        start = torch.zeros(index.reqs, dtype=torch.int32, device=index.indptr.device)
        return cls(index=index, start=start, window=None)

    def validate(self, *, num_slots: int) -> None:
        """Read the layout (waits for the device); raise ValueError where it is broken."""
        self.index.validate(num_slots=num_slots)
        require(bool((self.start >= 0).all()), "start: expected no negative position")
        require(
            self.window is not None or bool((self.start == 0).all()),
            "start: a full layout begins at position 0",
        )
