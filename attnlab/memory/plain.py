"""What pools with a single id space have in common: the table's slots are the storage's, and nothing slides out."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from attnlab.memory.base import BasePool
from attnlab.memory.pool import Translation
from attnlab.memory.slots import SlotAllocator
from attnlab.spec import ModelSpec


class PlainPool(BasePool):
    """A pool whose storage is addressed by the slots of the request table; subclasses fill `views`."""

    def __init__(self, model: ModelSpec, *, num_slots: int, device: torch.device | str) -> None:
        allocator = SlotAllocator(num_slots=num_slots, page_size=model.page_size)
        super().__init__(model, allocator=allocator, device=device)
        same = Translation.same(allocator.space, page_size=model.page_size)
        self.translations = [same] * len(model.layers)

    def slide_out(self, owner: Hashable, *, query: int) -> None:
        """Refuse: every layer reads its keys at the same slots, which a layer that sees all keys still needs."""
        raise ValueError(
            f"{type(self).__name__}: keeps every key of all layers, so nothing slides out; build a WindowPool or a "
            "UnifiedPool with sliding_slots"
        )
