"""A driver of Triton's that compiles for an H200 and launches nothing: what would be launched is written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from triton.backends.compiler import GPUTarget

SHARED = 232448
"""Bytes of shared memory that a program of an H200 may have."""


@dataclass
class Launch:
    """One launch: of what, on which stream, and with which arguments in the kernel's order."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    function: int
    hooks: tuple[Any, Any, Any]
    arguments: tuple[Any, ...]


@dataclass
class Utils:
    """Every kernel is loaded as another function, also on another device."""

    loaded: int = 0

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        self.loaded += 1
        return (1, self.loaded, 32, 0, 1024)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED}


@dataclass
class NoDriver:
    """Stands where Triton's driver of a GPU would."""

    device: int = 0
    launches: list[Launch] = field(default_factory=list)
    utils: Utils = field(default_factory=Utils)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            told, enter, leave, *arguments = rest
            if enter is not None:
                enter(told)
            self.launches.append(
                Launch(metadata.name, (x, y, z), stream, function, (told, enter, leave), tuple(arguments))
            )
            if leave is not None:
                leave(told)

        return launch

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
