"""What pools with a single id space have in common: slots, views by layer, no translation."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from attnlab.checks import placed, require, tensor
from attnlab.memory.pool import KVView, check_slots, check_storage
from attnlab.memory.slots import SlotAllocator
from attnlab.spec import ModelSpec


class PlainPool(ABC):
    """A pool whose storage is addressed by the slots of the request table; subclasses fill `views` and store rows."""

    views: list[KVView]

    def __init__(self, model: ModelSpec, *, num_slots: int, device: torch.device | str) -> None:
        check_storage("kv_dtype", model.kv_dtype)
        self.allocator = SlotAllocator(num_slots=num_slots, page_size=model.page_size)
        self.num_slots, self.page_size = num_slots, model.page_size
        self.device = placed(device)

    @property
    def epoch(self) -> int:
        """Rises when slots are freed."""
        return self.allocator.epoch

    def view(self, layer: int) -> KVView:
        """Return the layer's keys and values as they are stored."""
        require(
            0 <= layer < len(self.views),
            f"layer: the pool has layers 0 to {len(self.views) - 1}, got {layer}",
        )
        return self.views[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Check the slots (this reads them), then store the rows."""
        check_slots(slots, self.num_slots, self.device)
        self.store(layer, slots, k, v)

    @abstractmethod
    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store rows at slots that a plan proved to lie in the pool."""

    def space(self, layer: int) -> str:
        """Return the one id space of a plain pool."""
        return "pool"

    def slots_for(self, layer: int, slots: Tensor) -> Tensor:
        """Return the slots unchanged: there is one id space."""
        return slots

    def check_integrity(self) -> None:
        """Raise RuntimeError where a page is lost, shared or the sink's."""
        self.allocator.check_integrity()


def check_rows(name: str, x: Tensor | None, slots: Tensor, heads: int, dim: int, device: torch.device) -> None:
    """Raise unless `x` is one floating-point row per slot."""
    tensor(
        name,
        x,
        shape=(slots.shape[0], heads, dim),
        dtype=(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        device=device,
        hint="one row per slot, as the layer's attention has it",
    )
