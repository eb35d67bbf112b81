"""Plain records of the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVWriteLoc:
    """Where new tokens' keys and values go: `loc`, and where known the same in each storage's own slots.

    Built by position, as the original's callers do. What is longer than `loc` is cut to it, as there.
    """

    loc: Tensor
    swa_loc: Tensor | None = None
    full_loc: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("swa_loc", "full_loc"):
            own = getattr(self, name)
            if own is not None:
                object.__setattr__(self, name, own[: self.loc.shape[0]])


WriteLoc = Callable[[Tensor, Tensor | None, Tensor | None], Any]
"""Makes such a record, of whichever class a pool knows, from (loc, swa_loc, full_loc)."""
