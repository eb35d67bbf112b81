"""Registries: when the home package is imported, what its failing leaves, and who may take which name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlab.registry import Registry

HOME = "home_of_a_test"
ADDS = "from tests.test_registry import sizes\n\nsizes.add({name!r}, {item}, owner=__name__)\n"
sizes: Registry[int] = Registry("size", home=HOME)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home package of two files, each of which adds a size; the second one is asked for names as it is imported."""
    folder = tmp_path / HOME
    folder.mkdir()
    (folder / "__init__.py").write_text("from attnlab.registry import import_all\n\nimport_all(__path__, __name__)\n")
    (folder / "large.py").write_text(ADDS.format(name="large", item=9))
    (folder / "small.py").write_text(ADDS.format(name="small", item=1) + "sizes.names()\n")
    monkeypatch.setattr(f"{__name__}.sizes", Registry("size", home=HOME))
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == HOME]:
        del sys.modules[name]


def test_the_home_is_imported_when_names_are_asked_for(home: Path) -> None:
    assert HOME not in sys.modules
    assert sizes.names() == ["large", "small"] and sizes.get("small") == 1


def test_a_home_that_fails_says_so_each_time_until_it_is_mended(home: Path) -> None:
    broken = home / "middle.py"
    broken.write_text("raise RuntimeError('no middle')\n")
    for ask in (sizes.names, sizes.names, lambda: sizes.get("large")):
        with pytest.raises(RuntimeError, match="no middle"):
            ask()
    broken.unlink()
    assert sizes.names() == ["large", "small"]


def test_a_newcomer_that_takes_a_name_of_the_home_gets_the_error(home: Path) -> None:
    with pytest.raises(ValueError, match=f"size: the name 'small' is taken by {HOME}.small; choose another"):
        sizes.add("small", 2, owner="__main__")
    sizes.add("middle", 5, owner=f"{HOME}s")
    assert sizes.names() == ["large", "small", "middle"]


def test_a_policy_of_a_first_cell_that_is_called_as_a_known_one_is_refused_there() -> None:
    code = "import attnlab\nattnlab.split_policy('seed', needs_host_lens=True, max_ranges=1)(lambda n, ctx: [n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "policy: the name 'seed' is taken by attnlab.plan.policies.seed; choose another" in done.stderr
