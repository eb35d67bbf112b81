"""The one place that imports Triton: `triton`, `tl`, `jit`, Gluon's `gl`, and what is wrong with them, if anything.

Files that hold a torch half and a Triton half import from here, so that they also load where Triton has
no wheel (macOS, Windows): there `jit` leaves a stand-in that raises when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnlab import _boot
from attnlab._boot import INTERPRETED

__all__ = [
    "PROBLEM",
    "TensorDescriptor",
    "device_clock",
    "gl",
    "gluon_jit",
    "hopper",
    "is_jitted",
    "source_class",
    "spilled",
    "jit",
    "multiprocessor",
    "release_dependents",
    "tl",
    "triton",
    "wait_for_earlier",
]

if _boot.PROBLEM is not None:
    raise ValueError(_boot.PROBLEM)

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents as release_dependents
    from triton.language.extra.cuda import gdc_wait as wait_for_earlier
    from triton.language.extra.cuda import globaltimer as device_clock
    from triton.language.extra.cuda import smid as multiprocessor
    from triton.runtime.interpreter import InterpretedFunction
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    triton = tl = device_clock = multiprocessor = release_dependents = wait_for_earlier = None
    TensorDescriptor = None
    PROBLEM: str | None = f"Triton cannot be imported here ({error}); it has wheels for Linux only"
else:
    # Triton decorates its own helpers at import. They must have been decorated with our setting.
    helpers_interpreted = isinstance(tl.cdiv, InterpretedFunction)
    PROBLEM = None
    if helpers_interpreted != INTERPRETED:
        was, wanted = ("interpreted", "compiled") if helpers_interpreted else ("compiled", "interpreted")
        PROBLEM = (
            f"triton was imported before attnlab and is set up for {was} kernels, but this process wants "
            f"them {wanted}; import attnlab first, or set TRITON_INTERPRET={int(INTERPRETED)} from the start"
        )

if PROBLEM is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
else:  # it decorates the same helpers again, and refuses those that were decorated with another setting
    gluon = gl = hopper = None


class _CannotLaunch:
    """Stands where a kernel would be when Triton is missing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self.name = function.__name__

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        raise RuntimeError(f'kernel {self.name} cannot be launched: {PROBLEM}; use engine="eager"')


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """`triton.jit`, or a stand-in that raises on launch where Triton is missing.

    `do_not_specialize` names the integers that change from step to step: a kernel is otherwise compiled again for each
    that is 1, or divisible by 16.
    """
    if function is None:
        return lambda decorated: jit(decorated, do_not_specialize=do_not_specialize)
    if triton is None:
        return _CannotLaunch(function)
    return triton.jit(function, do_not_specialize=list(do_not_specialize))


def gluon_jit(function: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """`gluon.jit`, or a stand-in that raises on launch where Triton has a PROBLEM. Gluon has no interpreter.

    `do_not_specialize` as in `jit`.
    """
    if function is None:
        return lambda decorated: gluon_jit(decorated, do_not_specialize=do_not_specialize)
    if gluon is None:
        return _CannotLaunch(function)
    return gluon.jit(function, do_not_specialize=list(do_not_specialize))


def source_class(kernel: Any) -> Any:
    """Return the class of the source that Triton compiles ahead of a launch: Gluon's kernels have one of their own."""
    return gluon._runtime.GluonASTSource if kernel.is_gluon() else triton.compiler.ASTSource


def is_jitted(function: object) -> bool:
    """Whether this is what `triton.jit` makes of a function, compiled or interpreted."""
    return triton is not None and isinstance(function, triton.JITFunction | InterpretedFunction)


def spilled(kernel: Any) -> dict[str, int]:
    """Return how many registers a thread spills, for each binary of a kernel that this process has loaded, by its hash.

    Nothing of an interpreted one.
    """
    if not isinstance(kernel, triton.JITFunction):
        return {}
    loaded = (binary for cache in kernel.device_caches.values() for binary in cache[0].values())
    return {binary.hash: binary.n_spills for binary in loaded if binary.module is not None}
