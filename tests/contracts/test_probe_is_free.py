"""Nobody pays for a probe that is off: the compiled text is that of a kernel without the probe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import _triton
from attnlab.kernels import decode, decode_latent, decode_shares

pytestmark = pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton")

COMPILE = """
import sys

sys.path.insert(0, sys.argv[1])
import decode
import decode_latent
import decode_shares

from dataclasses import replace

import torch
from attnlab.inspect.resources import TARGETS, ptx, variants

without_probe = {
    "split": decode._decode_split_kernel,
    "shares": decode_shares._decode_shares_kernel,
    "latent": decode_latent._decode_latent_kernel,
}
compared = dict.fromkeys(without_probe, 0)
for variant in variants(TARGETS["sm_90"]):
    kind = variant.name.split(": ")[0]
    if kind not in without_probe:
        continue
    probed = ptx(variant)
    assert "globaltimer" not in probed, variant.name
    assert probed == ptx(variant, without_probe[kind]), variant.name
    noted = replace(variant, constants={**variant.constants, "TIMES": True})
    del noted.constants["times_ptr"]
    noted.pointers["times_ptr"] = torch.int64
    if compared[kind] == 0:
        assert "globaltimer" in ptx(noted), "the probe is never on"
    compared[kind] += 1
print(*compared.values())
"""


def without_branches(source: str) -> str:
    """Delete every `if TIMES:` with its indented block."""
    return re.sub(r"^( *)if TIMES:\n(?:\1 +.*\n)+", "", source, flags=re.MULTILINE)


def test_a_kernel_with_its_probe_off_is_the_kernel_without_a_probe(compiling: dict[str, str], tmp_path: Path) -> None:
    """sm_90 PTX of every variant, byte for byte; line numbers, which move with the text, are left out."""
    for module in (decode, decode_latent, decode_shares):
        source = Path(module.__file__).read_text(encoding="utf-8")
        deleted = without_branches(source)
        assert source.count("if TIMES:") == 2 and "if TIMES:" not in deleted and len(deleted) < len(source)
        (tmp_path / Path(module.__file__).name).write_text(deleted, encoding="utf-8")
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    environment = {**compiling, "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    split, shares, latent = map(int, done.stdout.split()[-3:])
    assert split >= 15 and shares >= 5 and latent >= 3
