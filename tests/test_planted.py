"""Each patch in tests/planted/ brings a known fault back; the test that it names must then fail.

A patch begins with two lines, `Fault: ...` and `Found by: <test id>`. Test ids are those of a machine without a GPU.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlab._boot import INTERPRETED
from tests.forks import Forks

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "tests/planted").glob("*.patch"))
SECONDS = 120
"""Until a fault counts as one that hangs; machines that run tests are busy."""
FOUND = {pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
"""A fault in a kernel's addresses may also end its process: at once, or when the allocator sees what it wrote."""
NOT_RUN = {
    pytest.ExitCode.INTERRUPTED: "was interrupted",
    pytest.ExitCode.INTERNAL_ERROR: "broke pytest",
    pytest.ExitCode.USAGE_ERROR: "was not found",
    pytest.ExitCode.NO_TESTS_COLLECTED: "was not found",
    -signal.SIGALRM: f"took longer than {SECONDS} seconds",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="the named tests are those of interpreted kernels"),
    pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches"),
]


def described(patch: Path) -> tuple[str, str]:
    """What a patch brings back, and the id of the test that must find it."""
    fault, found_by = patch.read_text(encoding="utf-8").splitlines()[:2]
    assert fault.startswith("Fault: ") and found_by.startswith("Found by: ")
    return fault.removeprefix("Fault: "), found_by.removeprefix("Found by: ")


def copy_to(folder: Path) -> None:
    """Copy what the named tests need."""
    for name in ("attnlab", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "planted"))
    (folder / "data").symlink_to(ROOT / "data")
    shutil.copy(ROOT / "pyproject.toml", folder)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def test_there_are_patches() -> None:
    assert len(PATCHES) >= 50


def test_every_number_of_a_patch_is_explained() -> None:
    table = (ROOT / "tests/planted/README.md").read_text(encoding="utf-8")
    numbers = {
        patch.stem.split("-")[0].upper() for patch in PATCHES if patch.stem[:1] == "b" and patch.stem[1:3].isdigit()
    }
    assert numbers and not [number for number in numbers if number not in table]


def test_without_a_fault_the_named_tests_pass(forks: Forks, tmp_path: Path) -> None:
    """So what fails below fails because of its fault."""
    copy_to(tmp_path)
    tests = sorted({described(patch)[1] for patch in PATCHES})
    code, output = forks.run(tmp_path, tests, seconds=5 * SECONDS)
    assert code == pytest.ExitCode.OK, output[-2000:]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_planted_fault_is_found(patch: Path, forks: Forks, tmp_path: Path) -> None:
    fault, test = described(patch)
    copy_to(tmp_path)
    subprocess.run(["git", "apply", "--unsafe-paths", str(patch)], cwd=tmp_path, check=True)
    code, output = forks.run(tmp_path, [test], seconds=SECONDS)
    assert code != pytest.ExitCode.OK, f"{test} passes in spite of: {fault}"
    assert code in FOUND, f"{test} {NOT_RUN.get(code, f'ended with {code}')}:\n{output[-2000:]}"
