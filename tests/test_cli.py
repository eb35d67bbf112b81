"""The command line as a user types it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attnlab
from attnlab.cli import main


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tour")
    assert main(["tour", "--out", str(out)]) == 0
    return out


def test_the_tour_page_holds_its_pictures_and_asks_nobody_for_more(tour: Path) -> None:
    page = (tour / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4  # two pictures, light and dark
    links = set(re.findall(r"""(?:href|src)=["']([^"'#][^"']*)""", page)) | set(re.findall(r"url\(([^#][^)]*)\)", page))
    assert not links
    assert len(page) < 1_000_000
    assert "<code>attnlab lab</code>" in page  # what to do next


def test_the_tour_says_that_lengths_were_scaled(tour: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "scaled" in (tour / "index.html").read_text(encoding="utf-8")


def test_the_tour_table_is_right_and_its_errors_small(tmp_path: Path) -> None:
    from rich.progress import Progress

    from attnlab.tour import POLICIES, run_tour
    from tests.tolerances import TOUR

    with Progress(disable=True) as progress:
        result = run_tour(trace="azure_llm_2023_conv", requests=3, seed=0, progress=progress)
    assert [row.footprint.policy for row in result.rows] == ["seed 8", "static 8", "tile 128"] and len(POLICIES) == 3
    for row in result.rows:
        assert 0 < row.eager_error < TOUR
        assert row.kernel_error is not None and 0 < row.kernel_error < TOUR
        assert row.kernel_ranges >= 3
        assert row.footprint.used <= row.footprint.asked


def test_a_folder_that_cannot_be_made_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["tour", "--out", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def test_a_batch_of_no_requests_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "--out", str(tmp_path), "--requests", "0"]) == 2
    assert "--requests: expected at least 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(["--trace", "nope"], "trace: expected one of"), (["--seed=-1"], "--seed: expected at least")],
)
def test_arguments_are_looked_at_before_anything_is_written(
    wrong: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tour", "--out", str(tmp_path / "t1"), *wrong]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "t1").exists()


def test_info_says_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert capsys.readouterr().out.startswith(f"attnlab {attnlab.__version__} · Python 3.")


def test_the_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of the README, in order, in one namespace."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        exec(compile(block, "README.md", "exec"), namespace)
    assert (tmp_path / "schedule.png").stat().st_size > 10_000
    assert namespace["out"].shape == (3, 9, 64)
