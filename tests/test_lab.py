"""`attnlab lab` before JupyterLab takes over: which lesson is open, what is said about files, and to root."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlab import lab
from attnlab.cli import main


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What JupyterLab would have been given."""
    lines: list[list[str]] = []
    monkeypatch.setattr("jupyterlab.labapp.main", lines.append)
    return lines


def test_the_first_lesson_is_open(typed: list[list[str]]) -> None:
    assert main(["lab"]) == 0
    assert typed[0][1] == "--LabApp.default_url=/lab/tree/00_map.ipynb"


def test_an_address_of_the_readers_own_is_kept(typed: list[list[str]]) -> None:
    assert main(["lab", "--", "--LabApp.default_url=/lab/tree/03_online_softmax.ipynb"]) == 0
    assert [option for option in typed[0] if "default_url" in option] == typed[0][1:]


def test_a_folder_without_the_lesson_is_opened_as_it_is(tmp_path: Path) -> None:
    assert lab.arguments(tmp_path, port=None, browser=True) == [f"--ServerApp.root_dir={tmp_path}"]


def test_it_is_said_whose_files_are_opened(
    typed: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["lab"])
    assert "the files of the checkout. For copies of your own: attnlab lab --folder" in capsys.readouterr().out
    main(["lab", "--folder", str(tmp_path / "mine")])
    printed = capsys.readouterr().out
    assert printed.startswith("Copied ") and "They are yours to change" in printed


@pytest.mark.parametrize(
    ("user", "extra", "warned"),
    [(0, [], True), (0, ["--allow-root"], False), (0, ["--ServerApp.allow_root=True"], False), (1000, [], False)],
)
def test_root_is_told_what_jupyter_wants(
    user: int,
    extra: list[str],
    warned: bool,
    typed: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert main(["lab", "--", *extra]) == 0
    assert len(typed) == 1  # Jupyter decides: its configuration may allow it
    assert ("attnlab lab -- --allow-root" in capsys.readouterr().err) is warned
