"""Nobody pays for a probe that is off: the compiled text is that of a kernel without the probe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import _triton
from attnlab.kernels import decode

pytestmark = pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton")

COMPILE = """
import sys

sys.path.insert(0, sys.argv[1])
import without_probe

from dataclasses import replace

import torch
from attnlab.inspect.resources import TARGETS, ptx, variants

compared = 0
for variant in variants(TARGETS["sm_90"]):
    if not variant.name.startswith("split: "):
        continue
    probed = ptx(variant)
    assert "globaltimer" not in probed, variant.name
    assert probed == ptx(variant, without_probe._decode_split_kernel), variant.name
    noted = replace(variant, constants={**variant.constants, "TIMES": True})
    del noted.constants["times_ptr"]
    noted.pointers["times_ptr"] = torch.int64
    if compared == 0:
        assert "globaltimer" in ptx(noted), "the probe is never on"
    compared += 1
print("compared", compared)
"""


def without_branches(source: str) -> str:
    """Delete every `if TIMES:` with its indented block."""
    return re.sub(r"^( *)if TIMES:\n(?:\1 +.*\n)+", "", source, flags=re.MULTILINE)


def test_a_kernel_with_its_probe_off_is_the_kernel_without_a_probe(compiling: dict[str, str], tmp_path: Path) -> None:
    """sm_90 PTX of every variant, byte for byte; line numbers, which move with the text, are left out."""
    source = Path(decode.__file__).read_text(encoding="utf-8")
    deleted = without_branches(source)
    assert source.count("if TIMES:") == 2 and "if TIMES:" not in deleted and len(deleted) < len(source)
    (tmp_path / "without_probe.py").write_text(deleted, encoding="utf-8")
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    environment = {**compiling, "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compared = int(done.stdout.split()[-1])
    assert compared >= 15
