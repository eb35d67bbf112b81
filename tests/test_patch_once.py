"""What the tests change in Triton's interpreter: one patch a launch, and none of it left behind."""

from __future__ import annotations

import pytest
import torch

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab._triton import jit, tl, triton
from tests import patch_once

pytestmark = [
    pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton"),
    pytest.mark.skipif(not INTERPRETED, reason="about the interpreter"),
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

    if not triton.__version__.startswith(patch_once.KNOWN):
        pytest.skip("this Triton's interpreter is left as it is")
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
