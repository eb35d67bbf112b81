"""What a kernel is built for: a GPU, or the interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from attnlab._boot import INTERPRETED


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`arch` is the compute capability times ten on CUDA (90 for an H200), 0 elsewhere; `multiprocessors` a GPU's."""

    kind: Literal["cuda", "hip", "interpreter"]
    arch: int = 0
    multiprocessors: int = 1

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """Return the target of kernels that this process launches on a device."""
        if INTERPRETED:
            return cls(kind="interpreter")
        count = multiprocessors_of(device) or 1
        if torch.version.hip is not None:
            return cls(kind="hip", multiprocessors=count)
        major, minor = torch.cuda.get_device_capability(device)
        return cls(kind="cuda", arch=10 * major + minor, multiprocessors=count)

    @property
    def has_fp8(self) -> bool:
        """Whether kernels can read fp8-e4m3 here (CUDA from compute capability 8.9 on, and the interpreter)."""
        return self.kind == "interpreter" or (self.kind == "cuda" and self.arch >= 89)

    @property
    def is_hopper(self) -> bool:
        """Whether this is compute capability 9.0: the one that tiles were timed on."""
        return self.kind == "cuda" and self.arch == 90

    def held(self, programs: int) -> int:
        """Return how many programs of a grid each multiprocessor must hold for all to run at a time."""
        return -(-programs // self.multiprocessors)

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may be launched before the one that it depends on has ended (CUDA from 9.0 on)."""
        return self.kind == "cuda" and self.arch >= 90


def multiprocessors_of(device: torch.device) -> int | None:
    """Return how many multiprocessors a device has; None of a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on this device: it takes the current one, whatever the tensors say."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = nullcontext()
