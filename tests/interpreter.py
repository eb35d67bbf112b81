"""Triton's interpreter without what it does over and over: a third to a half of a kernel's time.

It patches `triton.language` anew whenever a kernel calls a helper. Once a launch is enough: `_patch_lang` gives the
same attributes the same values every time, and what a launch has changed is put back when it ends.

And it builds a table of all types to look one up, at every operation. What it finds there is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

KNOWN = "3.7."
"""Versions of Triton whose interpreter does so; another is left as it is."""


def hasten() -> None:
    """Let the interpreter of a known Triton patch each module once a launch, and look each type up once."""
    import triton

    if triton.__version__.startswith(KNOWN):
        _patch_once()
        _look_up_once()


def _patch_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

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


def _look_up_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    found = cache(look_up)

    def look_up_once(of: tl.dtype) -> Any:
        scalar = of.scalar
        return look_up(scalar) if isinstance(scalar, tl.pointer_type) else found(scalar)

    interpreter._get_np_dtype = look_up_once
