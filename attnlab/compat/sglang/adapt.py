"""What foreign objects offer: the one file that looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def to_sliding(token_to_kv_pool: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a pool's way from full to sliding slots; None where there is no pool, or it has no sliding storage."""
    translate: Callable[[Tensor], Tensor] | None = getattr(token_to_kv_pool, "translate_loc_from_full_to_swa", None)
    return translate
