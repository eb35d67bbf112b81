"""Where a step's lists lie: in memory of its own, or at the front of buffers that a CUDA graph has baked in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnlab.checks import require
from attnlab.compat.sglang.metadata import Scratch


class Memory(Protocol):
    """Hands out memory by name. `fixed`: at the same addresses for every step."""

    @property
    def fixed(self) -> bool:
        """Whether all steps share it."""

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` entries, all 0."""

    def slots(self, name: str, count: int) -> Tensor:
        """Return room for a list of `count` slots, int64; a fixed one is longer, and keeps what lies behind."""

    def scratch(self, tokens: int, *, sliding: bool) -> Scratch:
        """Return scratch for the partial states of as many query tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Every step has memory of its own."""

    device: torch.device
    heads: int
    splits: int
    v_dims: tuple[int, int]

    @property
    def fixed(self) -> bool:
        """False."""
        return False

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate."""
        return torch.zeros(count, dtype=dtype, device=self.device)

    def slots(self, name: str, count: int) -> Tensor:
        """Allocate."""
        return self.take(name, count, torch.int64)

    def scratch(self, tokens: int, *, sliding: bool) -> Scratch:
        """Allocate."""
        v_dim = self.v_dims[sliding]
        return Scratch.of(tokens=tokens, heads=self.heads, splits=self.splits, v_dim=v_dim, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """All steps share buffers that were made once, at the largest batch."""

    buffers: dict[str, Tensor]
    scratches: tuple[Scratch, Scratch]

    @property
    def fixed(self) -> bool:
        """True."""
        return True

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return the front of a buffer, all of which is 0 from now on. ValueError where it is too short."""
        buffer = self._long_enough(name, count)
        buffer.zero_()
        return buffer[:count]

    def slots(self, name: str, count: int) -> Tensor:
        """Return a whole buffer, as it is. ValueError where it is too short for `count`, the most a list may have."""
        return self._long_enough(name, count)

    def scratch(self, tokens: int, *, sliding: bool) -> Scratch:
        """Return the one scratch of that value dimension."""
        return self.scratches[sliding]

    def _long_enough(self, name: str, count: int) -> Tensor:
        buffer = self.buffers[name]
        require(
            count <= buffer.shape[0],
            f"{name}: the graph's buffer has {buffer.shape[0]:,} entries, this step needs {count:,}; call "
            "init_cuda_graph_state with more",
        )
        return buffer
