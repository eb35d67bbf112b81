"""Decides, once and before Triton is imported, whether this process compiles or interprets its kernels.

`TRITON_INTERPRET` is read by Triton when a function is decorated, its own helpers included, so the
choice belongs to the process and must be made first. This is the only file that reads `os.environ`.

The choice: `ATTNLAB_INTERPRET=1` or `=0` where set; else `TRITON_INTERPRET` where set; else compiled
where torch sees a CUDA or ROCm device, interpreted otherwise.
"""

from __future__ import annotations

import os

import torch

_WORDS = {"1": True, "true": True, "0": False, "false": False}
_VARIABLES = ("ATTNLAB_INTERPRET", "TRITON_INTERPRET")


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
    return not torch.cuda.is_available()


INTERPRETED: bool = _choose_interpreted()
"""True where this process runs kernels in Triton's interpreter, False where it compiles them."""

AS_FOUND: dict[str, str | None] = {variable: os.environ.get(variable) for variable in _VARIABLES}
"""What the process was started with, in the order of precedence; None where a variable was not set."""

os.environ["TRITON_INTERPRET"] = "1" if INTERPRETED else "0"
# The flag keeps a*b+c fused as every released Triton does by default; newer ones ask for an explicit word.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
