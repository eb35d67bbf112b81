"""Which binaries a call launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnlab._triton import triton


def launched(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Return the compiled kernels that a call launches: names, and handles of the loaded binaries.

    One handle is one binary. Interpreted and eager calls launch none. A hook listens, so that Triton launches by its
    own way meanwhile: binaries are the same, the detour that `kernels.launcher` spares is not what is watched.
    """
    found: list[tuple[str, int]] = []

    def enters(metadata: Any) -> None:
        told = metadata.get()
        found.append((told["name"], told["function"]))

    if triton is None:
        return found
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(enters)
    try:
        call()
    finally:
        hooks.remove(enters)
    return found
