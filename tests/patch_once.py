"""Triton's interpreter patches `triton.language` anew whenever a kernel calls a helper: a third of a kernel's time.

Once a launch is enough: `_patch_lang` gives the same attributes the same values every time, and what a launch has
changed is put back when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KNOWN = "3.7."
"""Versions of Triton whose interpreter does so; another is left as it is."""


def install() -> None:
    """Let the interpreter patch each module once a launch."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith(KNOWN):
        return
    patch, patched = interpreter._patch_lang, set[str]()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:  # when a launch ends
            super().restore()
            patched.clear()

    def modules(function: Callable[..., Any]) -> set[str]:
        """Return the names of what is patched for a function: the modules of Triton's that it sees."""
        return {seen.__name__ for seen in function.__globals__.values() if seen is tl or seen is tl.core}

    def patch_once(function: Callable[..., Any]) -> Scope:
        scope = Scope() if modules(function) <= patched else patch(function)
        patched.update(modules(function))
        return scope

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_once
