"""Functions that no gradient is taken of: attention over a cache is served, never trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.no_grad` around a function, for those who have gradients on; servers do not, and pay nothing."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return guarded
