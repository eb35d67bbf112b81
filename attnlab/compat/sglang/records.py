"""Plain records of the original."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVWriteLoc:
    """Where new tokens' keys and values go: `loc`, and where known the same in each storage's own slots.

    Built by position, as the original's callers do.
    """

    loc: Tensor
    swa_loc: Tensor | None = None
    full_loc: Tensor | None = None
