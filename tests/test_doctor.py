"""The doctor in sound and in broken environments, JupyterLab on the notebooks, and summaries of saved traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import attnlab
from attnlab import assets, doctor, lab
from attnlab.cli import main
from attnlab.trace import CallTrace, Trace

ROOT = Path(__file__).parent.parent
SETTINGS = ("ATTNLAB_INTERPRET", "TRITON_INTERPRET")
SITES = [Path(place) for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]


# --- Environments -----------------------------------------------------------------------------------------------


def site_without(folder: Path, *packages: str) -> Path:
    """Return a folder that holds, as links, everything that is installed here but these packages."""
    folder.mkdir()
    for entry in (entry for site in reversed(SITES) if site.is_dir() for entry in site.iterdir()):
        absent = any(entry.name == package or entry.name.startswith(f"{package}-") for package in packages)
        if not absent and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    return folder


def attnlab_in(*path: Path, command: str = "doctor", flags: tuple[str, ...] = (), **environ: str) -> tuple[int, str]:
    """Type `attnlab doctor` where Python finds packages in these folders; return the status and what was printed."""
    env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, *flags, "-m", "attnlab", *command.split()],
        env={**env, "PYTHONPATH": os.pathsep.join(map(str, path)), **environ},
        cwd=path[0],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def finding(printed: str, name: str) -> tuple[str, str]:
    """Return the state that a finding was printed with, and its words with what to do."""
    found = re.search(rf"^(ok|note|trouble) +{re.escape(name)}  +(.*(?:\n +->.*)?)", printed, re.MULTILINE)
    assert found is not None, f"nothing is said of {name}:\n{printed}"
    return found[1], " ".join(found[2].split())


def troubles(printed: str) -> list[str]:
    """Return the names in the last line."""
    *_, last = printed.strip().splitlines()
    counted = re.fullmatch(r"Trouble with (\d+): (.*)\.", last)
    assert counted is not None, printed
    names = counted[2].split(", ")
    assert int(counted[1]) == len(re.findall("^trouble", printed, re.MULTILINE))
    return names


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that holds the package as a link, and data and notebooks of its own."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "attnlab").symlink_to(ROOT / "attnlab")
    shutil.copytree(ROOT / "data", folder / "data")
    (folder / "notebooks").mkdir()
    (folder / "notebooks" / "00_map.ipynb").write_text("{}")
    return folder


# --- The doctor -------------------------------------------------------------------------------------------------


def test_a_sound_environment_has_no_trouble() -> None:
    status, printed = attnlab_in(ROOT)
    assert status == 0, printed
    assert printed.endswith("Nothing keeps attnlab from working here.\n")
    for name in ("Python", *doctor.PACKAGES, "engines", "decode, eager", "decode, triton", *assets_names()):
        assert finding(printed, name)[0] == "ok"
    assert "agrees with the oracle: largest error" in finding(printed, "decode, triton")[1]
    if not torch.cuda.is_available():
        assert finding(printed, "GPU") == ("note", finding(printed, "GPU")[1])
        assert "one would add compiled kernels" in finding(printed, "GPU")[1]


def assets_names() -> list[str]:
    return ["models.json", "traffic.json", "sample long", "sample short"]


def test_no_triton(tmp_path: Path) -> None:
    status, printed = attnlab_in(ROOT, site_without(tmp_path / "site", "triton"), flags=("-S",))
    assert status == 1
    assert troubles(printed) == ["triton", "engines"]
    install = "-> python -m pip install 'triton>=3.6'"
    assert finding(printed, "triton") == ("trouble", f"missing (for the kernels) {install}")
    state, words = finding(printed, "engines")
    assert state == "trouble" and words.startswith("eager only: Triton cannot be imported here")
    assert f'{install}, or use engine="eager"' in words
    assert finding(printed, "decode, eager")[0] == "ok" and "decode, triton" not in printed


@pytest.mark.parametrize(("triton_has", "attnlab_wants"), [("0", "1"), ("1", "0")])
def test_triton_imported_early_with_the_other_setting(tmp_path: Path, triton_has: str, attnlab_wants: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("import triton.language")
    wanted = {"TRITON_INTERPRET": triton_has, "ATTNLAB_INTERPRET": attnlab_wants}
    status, printed = attnlab_in(tmp_path, ROOT, **wanted)
    assert status == 1 and "engines" in troubles(printed)
    state, words = finding(printed, "engines")
    assert state == "trouble" and "eager only: triton was imported before attnlab" in words
    assert f"-> import attnlab first, or set TRITON_INTERPRET={attnlab_wants} from the start" in words
    assert f"ATTNLAB_INTERPRET={attnlab_wants}, TRITON_INTERPRET={triton_has}" in finding(printed, "settings")[1]


def test_no_jupyterlab(tmp_path: Path) -> None:
    site = site_without(tmp_path / "site", "jupyterlab")
    status, printed = attnlab_in(ROOT, site, flags=("-S",))
    assert status == 1 and troubles(printed) == ["jupyterlab"]
    words = "missing (for attnlab lab) -> python -m pip install 'jupyterlab>=4.4'"
    assert finding(printed, "jupyterlab") == ("trouble", words)
    status, printed = attnlab_in(ROOT, site, command="lab", flags=("-S",))
    assert status == 2
    assert printed.startswith("attnlab lab: JupyterLab is missing here; install it with: python -m pip install jupyter")
    assert printed.count("\n") == 1


def test_no_matplotlib(tmp_path: Path) -> None:
    site = site_without(tmp_path / "site", "matplotlib")
    status, printed = attnlab_in(ROOT, site, flags=("-S",))
    assert status == 1 and troubles(printed) == ["matplotlib"]
    assert "python -m pip install 'matplotlib>=3.10'" in finding(printed, "matplotlib")[1]
    assert attnlab_in(ROOT, site, command="info", flags=("-S",))[0] == 0
    status, printed = attnlab_in(ROOT, site, command="gallery --out x", flags=("-S",))
    assert status == 2
    assert printed == "attnlab gallery: No module named 'matplotlib'; `attnlab doctor` says what is missing here\n"


def test_a_matplotlib_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise OSError('libpng is not what it was')")
    status, printed = attnlab_in(tmp_path, ROOT)
    assert status == 1 and troubles(printed) == ["fonts"]
    assert "libpng is not what it was" in finding(printed, "fonts")[1]


def test_a_library_of_the_core_is_missing(tmp_path: Path) -> None:
    status, printed = attnlab_in(ROOT, site_without(tmp_path / "site", "safetensors"), flags=("-S",))
    assert status == 1 and "safetensors" in troubles(printed)
    assert "No module named 'safetensors'" in finding(printed, "data")[1]
    assert "-> install what is missing above" in finding(printed, "data")[1]
    assert finding(printed, "engines")[0] == "ok"


def test_damaged_data_files(package: Path) -> None:
    files = {
        "models.json": package / "data" / "models.json",
        "traffic.json": package / "data" / "traffic.json",
        "sample long": package / "data" / "smollm2_135m" / "long_layer18.safetensors",
        "sample short": package / "data" / "smollm2_135m" / "short.safetensors",
    }
    for path in files.values():
        path.write_bytes(path.read_bytes()[:1000])
    status, printed = attnlab_in(package)
    assert status == 1 and troubles(printed) == list(files)
    for name, path in files.items():
        state, words = finding(printed, name)
        assert state == "trouble" and f"data file {path} is damaged" in words and "-> reinstall attnlab" in words
    assert finding(printed, "decode, eager")[0] == "ok"


def test_data_files_that_are_missing_or_folders(package: Path) -> None:
    (package / "data" / "models.json").unlink()
    (package / "data" / "smollm2_135m" / "short.safetensors").unlink()
    (package / "data" / "smollm2_135m" / "short.safetensors").mkdir()
    status, printed = attnlab_in(package)
    assert status == 1 and troubles(printed) == ["models.json", "sample short"]
    assert "data file 'models.json' is neither at" in finding(printed, "models.json")[1]


def test_a_data_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is played."""

    def refuse(path: Path, **how: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    found = {f.name: f for f in doctor._data()}["models.json"]
    path = assets.data_path("models.json")
    assert found.state == "trouble" and "Permission denied" in found.found and str(path) in found.found
    assert found.todo == f"make it readable for you: chmod a+r {path}"


def test_the_notebooks_are_missing(package: Path) -> None:
    assert finding(attnlab_in(package)[1], "notebooks") == ("ok", f"1 in {package / 'notebooks'}")
    (package / "notebooks" / "00_map.ipynb").unlink()
    assert finding(attnlab_in(package)[1], "notebooks")[0] == "trouble"
    shutil.rmtree(package / "notebooks")
    status, printed = attnlab_in(package)
    assert status == 1 and troubles(printed) == ["notebooks"]
    assert "-> reinstall attnlab" in finding(printed, "notebooks")[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for")
def test_compiled_kernels_without_a_gpu() -> None:
    status, printed = attnlab_in(ROOT, ATTNLAB_INTERPRET="0")
    assert status == 1 and troubles(printed) == ["settings"]
    assert "-> unset ATTNLAB_INTERPRET to let the device choose" in finding(printed, "settings")[1]


@pytest.mark.parametrize("variable", SETTINGS)
def test_a_setting_that_means_nothing_is_a_trouble_of_its_own(variable: str) -> None:
    status, printed = attnlab_in(ROOT, **{variable: "maybe"})
    assert status == 1 and troubles(printed) == ["settings"]
    words = f"{variable}: expected 1 (interpret kernels) or 0 (compile them), got 'maybe' -> unset it to let attnlab "
    assert finding(printed, "settings")[1].startswith(words)
    status, printed = attnlab_in(ROOT, command="tour", **{variable: "maybe"})
    assert status == 2 and printed.startswith(f"attnlab tour: {variable}: expected 1") and printed.count("\n") == 1


def test_no_rich(tmp_path: Path) -> None:
    site = site_without(tmp_path / "site", "rich")
    status, printed = attnlab_in(ROOT, site, flags=("-S",))
    assert status == 1 and troubles(printed) == ["rich"]
    assert finding(printed, "rich")[1].endswith("-> python -m pip install 'rich>=14.0'")
    assert finding(printed, "decode, eager")[0] == "ok"
    status, printed = attnlab_in(ROOT, site, command="trace x", flags=("-S",))
    assert status == 2 and printed.endswith("`attnlab doctor` says what is missing here\n")


def test_no_torch(tmp_path: Path) -> None:
    status, printed = attnlab_in(ROOT, site_without(tmp_path / "site", "torch"), flags=("-S",))
    assert status == 1
    assert finding(printed, "torch") == ("trouble", "missing (for tensors) -> python -m pip install 'torch>=2.11'")
    for name in ("GPU", "decode, eager", "data"):
        state, words = finding(printed, name)
        assert state == "trouble" and "No module named 'torch' -> install what is missing above" in words
    assert finding(printed, "settings")[0] == finding(printed, "notebooks")[0] == "ok"


def test_the_doctor_does_not_send_people_to_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ImportError("No module named 'x'")

    monkeypatch.setattr(doctor, "examine", missing)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "attnlab doctor: No module named 'x'\n"


def test_every_trouble_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[doctor.Finding]:
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(doctor, "CHECKS", dict.fromkeys(doctor.CHECKS, broken))
    report = doctor.examine()
    assert [trouble.name for trouble in report.troubles] == list(doctor.CHECKS)
    assert all(trouble.found and trouble.todo for trouble in report.troubles)


def test_an_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.26.4")
    found = doctor._package("numpy", "2.0", "arrays")
    assert found.state == "trouble" and found.found == "1.26.4 is too old: 2.0 or newer is needed (for arrays)"
    assert doctor._package("numpy", "1.26", "arrays").state == "ok"


def test_a_decode_that_is_wrong_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.doctor_probes.decode_error", lambda engine, device: float("nan"))
    (found,) = doctor._eager_decode()
    assert found.state == "trouble" and 'use engine="triton" here' in found.todo


def test_the_doctor_knows_the_packages_that_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    assert {name: oldest for name, (oldest, _) in doctor.PACKAGES.items()} == named


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0 and capsys.readouterr().out == f"attnlab {attnlab.__version__}\n"


def test_an_unknown_trace_of_the_tour_is_answered_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tour", "--out", str(tmp_path), "--trace", "none"]) == 2
    assert "trace: expected one of azure_llm_2023_conv, " in capsys.readouterr().err


# --- The lab ----------------------------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Notebooks inside an installed package, and an empty working folder."""
    inside = tmp_path / "site" / "attnlab" / "notebooks"
    (inside / "gallery").mkdir(parents=True)
    (inside / ".ipynb_checkpoints").mkdir()
    (inside / "00_map.ipynb").write_text("shipped")
    (inside / "gallery" / "a.svg").write_text("<svg/>")
    (inside / ".ipynb_checkpoints" / "00_map.ipynb").write_text("left over")
    monkeypatch.setattr(assets, "_PACKAGE", inside.parent)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return inside


def tree(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def top(folder: Path) -> list[str]:
    """Return what a folder shows, apart from what tools leave behind."""
    return [p.name for p in folder.iterdir() if not p.name.startswith((".", "__"))]


def test_a_checkout_is_opened_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lab.prepare(None) == ROOT / "notebooks"
    assert not list(tmp_path.iterdir())


def test_notebooks_are_copied_out_of_a_wheel(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = lab.prepare(None)
    assert folder == Path("attnlab-notebooks")
    assert tree(folder) == {"00_map.ipynb": "shipped", "gallery/a.svg": "<svg/>"}
    assert capsys.readouterr().out.startswith("Copied 2 files of the notebooks into attnlab-notebooks. They are yours")


def test_what_is_there_is_never_overwritten(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = lab.prepare(Path("mine"))
    (folder / "00_map.ipynb").write_text("my answers")
    (folder / "gallery" / "a.svg").unlink()
    (folder / "gallery" / "a.svg").symlink_to("nowhere")
    (wheel / "01_new.ipynb").write_text("new")
    copied = lab.copy_notebooks(wheel, folder)
    assert (folder / "00_map.ipynb").read_text() == "my answers" and not Path("nowhere").exists()
    assert [p.name for p in copied.written] == ["01_new.ipynb"] and len(copied.kept) == 2
    assert str(copied) == "Copied 1 file of the notebooks into mine; left 2 that were there as they are."


def test_a_folder_is_asked_for_in_a_checkout(tmp_path: Path) -> None:
    assert lab.prepare(tmp_path / "x") == tmp_path / "x"
    assert set(top(tmp_path / "x")) == set(top(ROOT / "notebooks"))


def test_the_command_line_leaves_address_and_token_to_jupyter(tmp_path: Path) -> None:
    root = f"--ServerApp.root_dir={tmp_path}"
    assert lab.arguments(tmp_path, port=None, browser=True) == [root]
    assert lab.arguments(tmp_path, port=9999, browser=False) == [root, "--port=9999", "--no-browser"]
    assert lab.arguments(tmp_path, port=None, browser=True, extra=["--debug"]) == [root, "--debug"]


def test_the_lab_is_given_what_was_typed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[list[str]] = []
    monkeypatch.setattr("jupyterlab.labapp.main", typed.append)
    assert main(["lab", "--folder", "here", "--port", "8899", "--no-browser", "--", "--debug"]) == 0
    places = [f"--ServerApp.root_dir={Path('here').resolve()}", "--LabApp.default_url=/lab/tree/00_map.ipynb"]
    assert typed == [[*places, "--port=8899", "--no-browser", "--debug"]]


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_that_is_none(wheel: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", f"--port={port}"]) == 2
    assert f"--port: expected 1 to 65535, got {port}" in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_a_folder_in_whose_place_a_file_lies(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("")
    assert main(["lab", "--folder", "taken"]) == 2
    assert "taken" in capsys.readouterr().err


def test_a_file_where_a_folder_is_needed_is_named_before_anything_is_copied(
    wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    (Path("mine") / "gallery").write_text("my own")
    assert main(["lab", "--folder", "mine"]) == 2
    assert "--folder: mine/gallery is a file, where a folder is needed" in capsys.readouterr().err
    assert tree(Path("mine")) == {"gallery": "my own"}


def test_a_copy_that_breaks_off_leaves_no_half_file(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr("pathlib.Path.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert main(["lab", "--folder", "mine"]) == 2
    assert tree(Path("mine")) == {}
    lab.prepare(Path("mine"))
    assert tree(Path("mine")) == {"00_map.ipynb": "shipped", "gallery/a.svg": "<svg/>"}


@pytest.mark.slow
def test_the_server_starts_asks_for_its_token_and_stops(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    homes = ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    env = {**os.environ, **{home: str(tmp_path / home) for home in homes}, "PYTHONPATH": str(ROOT)}
    typed = ["lab", "--folder", str(tmp_path / "books"), "--port", str(port), "--no-browser", "--"]
    extra = ["--IdentityProvider.token=secret", "--ServerApp.port_retries=0"]
    extra += ["--allow-root"] if os.geteuid() == 0 else []
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        [sys.executable, "-m", "attnlab", *typed, *extra], env=env, cwd=tmp_path, stdout=log, stderr=log
    ) as server:  # fmt: skip
        try:
            answer = _ask(port, "/api/status", server)
            assert {"started", "kernels"} <= json.loads(answer).keys()
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status", timeout=10)
            names = {row["name"] for row in json.loads(_ask(port, "/api/contents", server))["content"]}
            assert names == set(top(ROOT / "notebooks"))
            _ask(port, "/api/shutdown", server, data=b"")
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()
    assert f"http://localhost:{port}/lab" in (tmp_path / "log").read_text()


def _ask(port: int, what: str, server: subprocess.Popen[bytes], data: bytes | None = None) -> bytes:
    """Return the server's answer; until it is up, wait."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{what}", data, {"Authorization": "token secret"})
    for _ in range(300):
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError:
            raise
        except OSError:  # not listening yet
            assert server.poll() is None, "the server ended by itself"
            time.sleep(0.2)
    raise TimeoutError(what)


# --- Traces -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bench = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="static", engine="eager")
    with attnlab.record(bench.backend, scores=True, budget_bytes=20_000) as trace:
        for layer in (0, 18):
            bench.decode(layer)
    path = tmp_path_factory.mktemp("trace") / "a.safetensors"
    trace.save(path)
    return path


def test_a_trace_is_summarised(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(saved)]) == 0
    printed = capsys.readouterr().out
    trace = Trace.load(saved)
    assert f"{saved}: 2 recorded calls" in printed
    assert trace.left_out and all(words in printed for words in trace.left_out)
    (row,) = re.findall(r"│ +1 │ +18 │ decode │ static.*", printed)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    splits = [len(mine) for mine in trace.call(18).ranges]
    assert cells[4:7] == ["2", "340", f"{sum(splits)} ({min(splits)} to {max(splits)} each)"]
    weights = trace.call(18).weights
    top = max(float(w.max()) for w in weights)
    assert cells[9].startswith(f"{top:.1%}: request ")
    assert "weights of 2 requests" in " ".join(printed.split())


def test_a_trace_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trace().save(tmp_path / "t")
    assert main(["trace", str(tmp_path / "t")]) == 0
    assert "t: 0 recorded calls, 0 bytes of numbers in a file of " in capsys.readouterr().out


def _call(policy: str, **parts: object) -> CallTrace:
    plain = {"layer": 1, "heads": 2, "kv_heads": 1, "scale": 1.0, "page_size": 1, "nominal": (2, 0)}
    plain |= {"softcap": None, "temperature_len": None, "mod": None, "has_sinks": False}
    plain |= {"start": (0, 0), "q_pos": (39, -1), "own": (39, -1), "rows": ((0, 0), (1, 0)), "mode": "decode", **parts}
    lse = torch.tensor([[0.0, 0.0], [float("-inf"), float("-inf")]])
    return CallTrace(policy=policy, ranges=(((0, 32), (32, 40)), ()), lse=lse, **plain)


def test_calls_without_partials_empty_requests_and_odd_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial_lse = (torch.log(torch.tensor([[0.25, 0.5], [0.75, 0.5]])), torch.zeros(0, 2))
    timed = {"times": torch.zeros(1, 1, 3).long(), "segments": torch.zeros(1, 5).int()}
    timed["program_indptr"] = torch.tensor([0, 1], dtype=torch.int32)
    calls = [_call("[red]\x1b[31mx"), _call("plain", partial_lse=partial_lse, **timed)]
    Trace(calls=calls).save(tmp_path / "t")
    assert main(["trace", str(tmp_path / "t")]) == 0
    printed = capsys.readouterr().out
    assert "[red]?[31mx" in printed and "\x1b" not in printed
    assert "not recorded" in printed and "75.0%: request 0, head 0, keys 32 to 39" in printed
    assert "2 (0 to 2 each)" in printed and "log-sum-exps, partial log-sum-exps, times" in printed


def test_a_verify_says_how_many_queries_were_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wb = attnlab.workbench("SmolLM2-135M", lens=[40, 60], layers=[18], policy="seed", engine="eager")
    with wb.record(scores=True, queries=[0, -1]) as trace:
        wb.extend(18, last=4)
    trace.save(tmp_path / "t")
    assert main(["trace", str(tmp_path / "t")]) == 0
    printed = capsys.readouterr().out
    assert "1 recorded call," in printed and "extend" in printed and "kept of decodes alone" in printed
    assert "log-sum-exps of 4 queries, outputs, weights of 4 queries of 2 requests" in printed


@pytest.mark.parametrize("kind", ["missing", "folder", "truncated", "text", "foreign", "damaged"])
def test_what_is_no_trace_is_an_error_in_one_line(
    kind: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    if kind == "folder":
        path.mkdir()
    elif kind == "truncated":
        path.write_bytes(saved.read_bytes()[:-100])
    elif kind == "text":
        path.write_text("Dear diary,\n")
    elif kind == "foreign":
        save_file({"x": torch.zeros(1)}, path)
    elif kind == "damaged":
        save_file({"x": torch.zeros(1)}, path, metadata={"attnlab_trace": '{"format": 1}'})
    assert main(["trace", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("attnlab trace: ") and str(path) in printed.err
    assert printed.err.count("trace: ") == 1
    assert printed.err.count("\n") == 1 and not printed.out


def test_a_hostile_header_does_not_steer_the_terminal(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    save_file({"x": torch.zeros(1)}, path, metadata={"attnlab_trace": json.dumps({"format": "\x1b[2J\n"})})
    assert main(["trace", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed and printed.count("\n") == 1
    Trace().save(tmp_path / "\x1b[31m")
    assert main(["trace", str(tmp_path / "\x1b[31m")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_trace_that_may_not_be_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pathlib.Path.open", lambda *a: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert main(["trace", str(saved)]) == 2
    assert capsys.readouterr().err == f"attnlab trace: {saved} cannot be read: permission denied\n"


def test_a_terminal_of_few_characters_gets_all_lines(tmp_path: Path) -> None:
    Trace(calls=[_call("größe · 8")], left_out=["a “b”", "the last"]).save(tmp_path / "t")
    status, printed = attnlab_in(ROOT, command=f"trace {tmp_path / 't'}", PYTHONIOENCODING="ascii")
    assert status == 0 and "gr??e ? 8" in printed and printed.endswith("the last\n")


def test_pictures_need_no_backend_of_matplotlibs() -> None:
    """MPLBACKEND is pyplot's: one that is none matters to no picture, and one that is some stays chosen."""
    code = "import attnlab.plots, matplotlib as m, os; print(os.environ['MPLBACKEND'], m.rcParams._get('backend'))"
    for backend, chosen in (("broken", "<object"), ("pdf", "pdf")):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": backend}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"{backend} {chosen}")
    status, printed = attnlab_in(ROOT, MPLBACKEND="broken")
    assert finding(printed, "fonts")[0] != "trouble" and status == 0


def test_a_list_of_fonts_that_is_older_than_a_font_is_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.font_manager.get_font_names", lambda: ["DejaVu Sans"])
    (found,) = doctor._fonts()
    assert found.state == "note" and "install Liberation Sans" in found.todo
    assert re.search(r"matplotlib's list of fonts is older: delete \S+/fontlist-\*.json$", found.todo)
