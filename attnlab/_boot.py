"""Decides, once and before Triton is imported, whether this process compiles or interprets its kernels.

`TRITON_INTERPRET` is read by Triton when a function is decorated, its own helpers included, so the
choice belongs to the process and must be made first. This is the only file that reads `os.environ`.

The choice: `ATTNLAB_INTERPRET=1` or `=0` where set; else `TRITON_INTERPRET` where set; else compiled
where torch sees a CUDA or ROCm device, interpreted otherwise. This file itself imports under any setting, and without
torch, so that `attnlab doctor` can say what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

_WORDS = {"1": True, "true": True, "0": False, "false": False}
_VARIABLES = ("ATTNLAB_INTERPRET", "TRITON_INTERPRET")


def has_gpu() -> bool:
    """Whether torch sees a GPU. Where torch is missing it sees none; whoever needs torch says so."""
    try:
        return bool(import_module("torch").cuda.is_available())
    except ImportError:
        return False


@contextmanager
def without(variable: str) -> Iterator[str | None]:
    """Hide a variable of the environment inside the block, and say what it is."""
    value = os.environ.pop(variable, None)
    try:
        yield value
    finally:
        if value is not None:
            os.environ[variable] = value


def _choose_interpreted() -> bool:
    for variable in _VARIABLES:
        value = os.environ.get(variable)
        if value is None:
            continue
        if value.lower() not in _WORDS:
            raise ValueError(
                f"{variable}: expected 1 (interpret kernels) or 0 (compile them), got {value!r}; "
                "unset it to let attnlab choose by the device"
            )
        return _WORDS[value.lower()]
    return not has_gpu()


INTERPRETED: bool
"""True where this process runs kernels in Triton's interpreter, False where it compiles them."""
PROBLEM: str | None = None
"""What is wrong with the settings, if anything. No kernel is set up then: importing one raises this."""
try:
    INTERPRETED = _choose_interpreted()
except ValueError as error:
    INTERPRETED, PROBLEM = not has_gpu(), str(error)

AS_FOUND: dict[str, str | None] = {variable: os.environ.get(variable) for variable in _VARIABLES}
"""What the process was started with, in the order of precedence; None where a variable was not set."""

os.environ["TRITON_INTERPRET"] = "1" if INTERPRETED else "0"
# The flag keeps a*b+c fused as every released Triton does by default; newer ones ask for an explicit word.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
