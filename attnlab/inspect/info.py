"""What runs here: versions, device, and how kernels are run."""

from __future__ import annotations

import platform

import torch

import attnlab
from attnlab import _triton
from attnlab._boot import INTERPRETED


def info() -> str:
    """Return one line for the top of a notebook or a bug report."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    if _triton.PROBLEM is not None:
        kernels = f"engine eager only: {_triton.PROBLEM}"
    else:
        how = "interpreted on the CPU" if INTERPRETED else "compiled"
        kernels = f"engines eager and triton {_triton.triton.__version__} (kernels {how})"
    versions = f"attnlab {attnlab.__version__} · Python {platform.python_version()} · torch {torch.__version__}"
    return f"{versions} · {gpu} · {kernels}"
