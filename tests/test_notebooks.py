"""The notebooks keep their form, run from top to bottom, and their checks say no to stubs and yes to solutions."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

from attnlab.bench.result import load
from attnlab.inspect.exercises.registry import exercises

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
LESSONS = sorted(FOLDER.glob("[0-9]*.ipynb"))
SECONDS = 60
MAY_IMPORT = {"attnlab", "dataclasses", "torch", "triton", "numpy", "einops", "matplotlib", "ipywidgets", "math"}
HEADINGS = [
    "Setup",
    "The smallest case by hand",
    "The same through attnlab",
    "One picture",
    "Turn one knob",
    "Where in the code",
    "Exercises",
]

each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, 4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def text_of(path: Path) -> str:
    return "\n".join(cell.source for cell in read(path).cells)


def numbers(path: Path) -> list[str]:
    """The exercises of a lesson, by the ids of their cells."""
    return [cell["id"].removeprefix("check-") for cell in code_cells(path) if cell["id"].startswith("check-")]


def solutions() -> dict[str, str]:
    text = (FOLDER / "solutions" / "solutions.py").read_text(encoding="utf-8")
    parts = re.split(r"^# %% (\S+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def preamble() -> str:
    text = (FOLDER / "solutions" / "solutions.py").read_text(encoding="utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith(("import ", "from ")))


# Form


def test_there_are_lessons() -> None:
    assert len(LESSONS) >= 5


@each_lesson
def test_the_title_is_a_question_with_what_to_read_before_and_the_time(path: Path) -> None:
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# .+\?\n", first.source)
    assert "*Read before:*" in first.source
    assert "*Run time:*" in first.source


@each_lesson
def test_the_sections_come_in_the_fixed_order(path: Path) -> None:
    found = re.findall(r"^## (.+)$", text_of(path), re.MULTILINE)
    places = [next(i for i, words in enumerate(found) if words.startswith(heading)) for heading in HEADINGS]
    assert places == sorted(places)
    assert found[-1] == "Exercises"


@each_lesson
def test_cells_are_few_and_short(path: Path) -> None:
    assert len(read(path).cells) <= 30
    too_long = [cell["id"] for cell in code_cells(path) if len(cell.source.splitlines()) > 12]
    assert too_long == []


@each_lesson
def test_every_code_cell_but_for_exercises_has_words_before_it(path: Path) -> None:
    cells = read(path).cells
    pairs = [(a.cell_type, b) for a, b in zip(cells, cells[1:], strict=False) if b.cell_type == "code"]
    bare = [b["id"] for before, b in pairs if before == "code" and not b["id"].startswith("check-")]
    assert len(bare) <= 1


@each_lesson
def test_outputs_are_stripped_and_the_file_is_small(path: Path) -> None:
    assert path.stat().st_size < 60_000
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None
    assert not any(cell.get("attachments") for cell in read(path).cells)
    assert "base64" not in path.read_text(encoding="utf-8")


@each_lesson
def test_nothing_is_installed_and_no_path_is_of_one_machine(path: Path) -> None:
    text = text_of(path)
    assert not re.search(r"\bpip\b|\bsys\.path\b|^[%!]", text, re.MULTILINE)
    assert not re.search(r"(?<![\w/:])/(home|root|tmp|usr|opt|work|Users)/", text)


@each_lesson
def test_imports_are_public(path: Path) -> None:
    modules = []
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules += [f"{node.module}.{alias.name}" for alias in node.names]
    private = [name for name in modules if any(word.startswith("_") for word in name.split("."))]
    assert private == []
    assert {name.split(".")[0] for name in modules} <= MAY_IMPORT


@each_lesson
def test_files_that_the_text_names_exist(path: Path) -> None:
    named = re.findall(r"`(?:attnlab/)?((?:\w+/)*\w+\.py)`", text_of(path))
    assert named
    assert [name for name in named if not (ROOT / "attnlab" / name).is_file()] == []


@each_lesson
def test_functions_that_the_text_names_exist(path: Path) -> None:
    """`attnlab/plan/splits.py`, `cut`: the file defines it."""
    for file, name in re.findall(r"`(attnlab/[\w/]+\.py)`, `([\w.]+)`", text_of(path)):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert set(name.split(".")) <= defined, f"{file} has no {name}"


def test_the_map_lists_every_lesson_with_its_question_and_what_to_read_before() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.ipynb\) \| (.+?) \| (.+?) \| .+ \|$", text_of(LESSONS[0]), re.MULTILINE)
    wanted = []
    for path in LESSONS:
        first = read(path).cells[0].source
        before = re.search(r"\*Read before:\*(.+?)\*Run time:\*", first, re.DOTALL)
        assert before is not None
        numbers = ", ".join(re.findall(r"(\d\d)_\w+", before[1])) or "nothing"
        wanted.append((path.stem, first.splitlines()[0].removeprefix("# "), numbers))
    assert rows == wanted


def test_bounds_that_a_lesson_quotes_are_those_of_the_recorded_runs() -> None:
    decode, extend = (load(ROOT / f"data/h200/{name}.json") for name in ("decode", "extend"))
    prefill, latent = extend.row("extend-1x8k"), decode.row("decode-mla128-32x8k")
    read, multiply = decode.row("decode-64x4k").tb_s["attnlab"], prefill.tflop_s["sdpa"]
    keys, took = 32 * 8192, latent.time_of("attnlab")
    assert took is not None
    quoted = (
        f"at {read:.1f} TB/s",
        f"at {multiply:.0f} TFLOP/s (attnlab's: {prefill.tflop_s['attnlab']:.0f})",
        f"From {multiply / read / (1088 / 576):.0f} heads on",
        f"with 128 heads in {took.median_us:.0f} us",
        f"{keys * 576 * 2 / read / 1e6:.0f} us of reading",
        f"{keys * 2 * 1088 * 128 / multiply / 1e6:.0f} us of arithmetic",
    )
    text = text_of(FOLDER / "13_mla.ipynb")
    assert not [words for words in quoted if words not in text]


def test_times_that_a_lesson_quotes_stand_in_the_log() -> None:
    text, log = text_of(FOLDER / "14_graphs_and_timing.ipynb"), (ROOT / "data/h200/LOG.md").read_text(encoding="utf-8")
    times = re.search(r"times = (\{.+\})", text)
    assert times is not None and "data/h200/LOG.md" in text
    seed, static, tile = ast.literal_eval(times[1]).values()
    assert f"{seed} / {static} / {tile} us" in log
    quoted = re.findall(r"[\d.]+ / [\d.]+ / [\d.]+ us", text_of(FOLDER / "05_split_policies.ipynb"))
    assert quoted and all(words in log for words in quoted)
    assert "256.9 us for the 64 equal requests" in text_of(FOLDER / "05_split_policies.ipynb")
    assert "| 64 x 4,096 | 269.7 | 256.9 |" in log
    fixed = re.search(r"seed and tile\": \(([\d.]+), ([\d.]+)\)", text_of(FOLDER / "10_determinism.ipynb"))
    assert fixed is not None
    assert re.search(rf"\| decode, seed .+ \| {fixed[1]} / [\d.]+ / {fixed[2]} us \|", log)
    assert (
        "it was 775 us" in text_of(FOLDER / "13_mla.ipynb") and "MLA, 128 heads, 32 x 8,192 | 1,748.8 | 774.5 |" in log
    )
    assert "with 64 heads 217" in text_of(FOLDER / "13_mla.ipynb") and "| MLA, 128 heads, 32 x 8,192 | 217 |" in log
    scores = text_of(FOLDER / "09_scores_under_the_hood.ipynb")
    for words in ("10.2 ms", "754 ms", "537.3 MB", "208 ms", "34.1 MB"):
        assert words in scores and words in log


# Exercises


@each_lesson
def test_there_are_three_exercises_with_a_check_and_a_solution(path: Path) -> None:
    lesson = path.stem[:2]
    assert numbers(path) == [f"{lesson}-1", f"{lesson}-2", f"{lesson}-3"]
    ids = [cell["id"] for cell in code_cells(path)]
    for number in numbers(path):
        assert ids.index(f"check-{number}") == ids.index(f"answer-{number}") + 1
        assert number in solutions()


def test_every_check_belongs_to_a_lesson() -> None:
    assert exercises.names() == [number for path in LESSONS for number in numbers(path)]


@each_lesson
def test_an_answer_has_a_name_of_its_own(path: Path) -> None:
    """No check judges what an earlier exercise, or a cell of the lesson, left behind."""
    assigned: list[str] = []
    for cell in code_cells(path):
        names = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
        assert "answer" not in names
        assigned += names if not cell["id"].startswith(("answer-", "check-")) else []
    for number in numbers(path):
        assert f"answer_{number.replace('-', '_')}" not in assigned


@each_lesson
def test_it_ends_with_what_comes_next_and_the_solutions(path: Path) -> None:
    last = read(path).cells[-1]
    assert last.cell_type == "markdown" and "*Next:*" in last.source
    linked = re.findall(r"\]\(([^)]+)\)", last.source)
    assert linked[0] == "solutions/solutions.py" and all((FOLDER / name).is_file() for name in linked)
    following = [other.name for other in LESSONS if other.name > path.name][:1]
    assert linked[1:] == following


# Execution


def execute(path: Path, folder: Path) -> dict[str, str]:
    """Run a notebook in a kernel of its own, then every solution and its check once more; return what checks say."""
    nbclient = pytest.importorskip("nbclient")
    notebook = read(path)
    checks = {cell["id"]: cell.source for cell in notebook.cells}
    for number in numbers(path):
        answer = preamble() + solutions()[number]
        notebook.cells.append(nbformat.v4.new_code_cell(answer, id=f"solution-{number}"))
        notebook.cells.append(nbformat.v4.new_code_cell(checks[f"check-{number}"], id=f"solved-{number}"))
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # A lesson that prints from within a kernel asks for the interpreter, also where there is a GPU.
    interpret = {"ATTNLAB_INTERPRET": "1"} if "ATTNLAB_INTERPRET=1" in text_of(path) else {}
    client.execute(env={**os.environ, "PYTHONPATH": paths, **interpret})
    outputs = [(cell["id"], output) for cell in notebook.cells for output in cell.get("outputs", [])]
    # A picture that cannot be drawn is an error among the outputs, and no failed cell.
    assert [(name, output.evalue) for name, output in outputs if output.output_type == "error"] == []
    return {name: output.data["text/plain"] for name, output in outputs if output.output_type == "execute_result"}


@pytest.mark.slow
@each_lesson
def test_it_runs_and_its_checks_say_no_to_the_stubs_and_yes_to_the_solutions(path: Path, tmp_path: Path) -> None:
    said = execute(path, tmp_path)
    for number in numbers(path):
        assert said[f"check-{number}"].startswith(f"{number}: not yet. ")
        assert said[f"solved-{number}"] == f"{number}: yes, that is right."
