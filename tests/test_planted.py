"""Each patch in tests/planted/ brings a known fault back; the test that it names must then fail.

A patch begins with two lines, `Fault: ...` and `Found by: <test id>`. Test ids are those of a machine without a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab._boot import INTERPRETED

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "tests/planted").glob("*.patch"))
NOT_RUN = {2: "was interrupted", 3: "broke pytest", 4: "was not found", 5: "was not found"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="the named tests are those of interpreted kernels"),
    pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches"),
]


def test_there_are_patches() -> None:
    assert len(PATCHES) >= 50


def test_every_number_of_a_patch_is_explained() -> None:
    table = (ROOT / "tests/planted/README.md").read_text(encoding="utf-8")
    numbers = {
        patch.stem.split("-")[0].upper() for patch in PATCHES if patch.stem[:1] == "b" and patch.stem[1:3].isdigit()
    }
    assert numbers and not [number for number in numbers if number not in table]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_planted_fault_is_found(patch: Path, tmp_path: Path) -> None:
    fault, found_by = patch.read_text(encoding="utf-8").splitlines()[:2]
    assert fault.startswith("Fault: ") and found_by.startswith("Found by: ")
    for name in ("attnlab", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "data").symlink_to(ROOT / "data")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    test = found_by.removeprefix("Found by: ")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    # Without the fault the test passes here: what fails below fails because of the fault.
    subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    subprocess.run(["git", "apply", "--unsafe-paths", str(patch)], cwd=tmp_path, check=True)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode not in NOT_RUN, f"{test} {NOT_RUN[done.returncode]}:\n{done.stdout[-2000:]}"
    assert done.returncode != 0, f"{test} passes in spite of: {fault}"
