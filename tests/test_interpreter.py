"""What the tests change in Triton's interpreter: what it does less often, it still does."""

from __future__ import annotations

import pytest
import torch

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab._triton import jit, tl, triton
from tests.interpreter import KNOWN

pytestmark = [
    pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton"),
    pytest.mark.skipif(not INTERPRETED, reason="about the interpreter"),
    pytest.mark.skipif(
        _triton.PROBLEM is None and not triton.__version__.startswith(KNOWN), reason="this interpreter is left as it is"
    ),
]


@jit
def _twice(x):
    return x + x


@jit
def _sums_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(_twice(_twice(x)), 0))


def test_a_launch_patches_a_module_once_and_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    patched, patch = [], interpreter._patch_lang_core
    monkeypatch.setattr(
        interpreter, "_patch_lang_core", lambda *given: (patched.append(given[0].__name__), patch(*given))
    )
    x, out = torch.arange(8.0), torch.empty(5)
    before = dict(vars(tl))
    for _ in range(2):
        patched.clear()
        _sums_kernel[(5,)](x, out, BLOCK=8)
        assert out.tolist() == [4 * 28.0] * 5
        assert sorted(set(patched)) == ["triton.language", "triton.language.core"]
        assert len(patched) <= 3  # for the kernel, then for the first helper that sees more: Triton's sum
        assert vars(tl) == before


def test_a_type_is_looked_up_by_its_elements() -> None:
    from triton.runtime import interpreter

    for _ in range(2):
        assert interpreter._get_np_dtype(tl.int16) == interpreter._get_np_dtype(tl.block_type(tl.int16, [4])) == "int16"
        pointer = tl.pointer_type(tl.int16)
        assert interpreter._get_np_dtype(pointer) == interpreter._get_np_dtype(tl.block_type(pointer, [4])) == "uint64"
