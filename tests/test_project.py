"""The package as a whole: what importing it costs, what works without Triton, and what travels in the wheel."""

from __future__ import annotations

import ast
import os
import pydoc
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import attnlab
from attnlab import _boot, assets
from attnlab.inspect import traffic
from attnlab.inspect.samples import Sample
from attnlab.spec import ModelSpec

ROOT = Path(__file__).parent.parent
SETTINGS = ("ATTNLAB_INTERPRET", "TRITON_INTERPRET")


def python(code: str, *, path: Path = ROOT, cwd: Path = ROOT, **environ: str) -> str:
    """Run code in a fresh process that chooses by itself how to run kernels; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "PYTHONPATH": str(path), **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


DECODE = """
import torch, attnlab
wb = attnlab.workbench("SmolLM2-135M", lens=[70, 5], policy="seed", engine="eager", device="cpu")
out = wb.decode(18)
assert out.isfinite().all() and out.any()
print(list(out.shape))
"""

TRITON_REFUSES = """
try:
    attnlab.workbench("SmolLM2-135M", lens=[5], policy="seed", engine="triton", device="cpu")
except RuntimeError as error:
    print(error)
"""


# --- Importing --------------------------------------------------------------------------------------------------


def test_import_prints_nothing_and_loads_nothing_heavy() -> None:
    heavy = ("triton", "matplotlib", "ipywidgets", "IPython", "transformers", "rich", "safetensors", "pandas")
    code = "import sys, torch; before = set(sys.modules)\nimport attnlab\nnew = set(sys.modules) - before\n"
    assert python(code + f"assert not new & set({heavy}), new & set({heavy})") == ""


def test_import_takes_hardly_longer_than_torch() -> None:
    code = "import torch, time; t = time.perf_counter()\nimport attnlab\nprint(time.perf_counter() - t)"
    assert float(python(code)) < 0.5


@pytest.mark.parametrize("name", attnlab.__all__)
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(attnlab, name) is not None
    assert name in dir(attnlab)


def test_type_checkers_see_the_names_where_they_are() -> None:
    tree = ast.parse(Path(attnlab.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    homes = {name: f"attnlab.{home}" for name, home in attnlab._HOME.items()}
    assert seen == homes | dict.fromkeys(attnlab._PACKAGES, "attnlab")


def test_a_package_is_there_after_the_import_of_attnlab_alone() -> None:
    assert python("import attnlab\nprint(attnlab.graphs.DecodeShape(requests=3).tokens)").strip() == "3"


@pytest.mark.parametrize("name", ["graphs", "compat.sglang"])
def test_help_lists_what_a_package_offers(name: str) -> None:
    package = import_module(f"attnlab.{name}")
    tree = ast.parse(Path(package.__file__ or "").read_text(encoding="utf-8"))
    offered = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(package.__all__) == sorted(offered)
    listed = pydoc.render_doc(package, renderer=pydoc.plaintext)
    assert all(key in listed for key in offered)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Backend'; its names are info, workbench, Workbench"):
        attnlab.Backend  # noqa: B018


def test_annotated_axes_hold_when_batches_are_planned_and_decoded() -> None:
    code = """
from jaxtyping import install_import_hook
rooms = ["attnlab.batch", "attnlab.memory", "attnlab.plan", "attnlab.eager"]
with install_import_hook(rooms, "beartype.beartype"):
    import attnlab
    from attnlab.backend import AttentionBackend
for policy in ("seed", "static", "tile"):
    for lens in ([70, 0, 5], [0], [257]):
        wb = attnlab.workbench("SmolLM2-135M", lens=lens, policy=policy, engine="eager", page_size=2)
        plan = wb.plan()
        plan.validate(num_slots=wb.pool.num_slots)
        assert wb.decode(18, plan).shape == (len(lens), 9, 64)
"""
    assert python(code) == ""


def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in SETTINGS:
        monkeypatch.delenv(variable, raising=False)


# --- With and without Triton ------------------------------------------------------------------------------------


def test_everything_but_the_triton_engine_works_without_triton() -> None:
    block = "import sys; sys.modules['triton'] = None\n"
    shape, message = python(block + DECODE + TRITON_REFUSES).splitlines()
    assert shape == "[2, 9, 64]"
    assert message.startswith('engine="triton": Triton cannot be imported here')
    assert message.endswith('or use engine="eager"')


def test_every_module_imports_without_triton() -> None:
    code = """
import sys; sys.modules["triton"] = None
import importlib, pkgutil, attnlab
for module in pkgutil.walk_packages(attnlab.__path__, "attnlab."):
    importlib.import_module(module.name)
"""
    assert python(code) == ""


def test_a_modifier_is_registered_without_triton_and_runs_in_torch() -> None:
    code = """
import sys; sys.modules["triton"] = None
import torch
from dataclasses import replace
import attnlab
from attnlab.mods import jit, tl
from attnlab.mods.registry import register_score_mod
@jit
def kernel(scores, *rest):
    return scores - tl.log(2.0)
mod = attnlab.ScoreMod(name="mine", torch=lambda scores, *rest: scores - 1, triton=kernel, needs_aux=False)
attention = attnlab.AttentionSpec(heads=1, kv_heads=1, qk_dim=4, v_dim=4, scale=1.0, mod=register_score_mod(mod))
model = attnlab.ModelSpec.uniform(attention, layers=1, context_len=8, page_size=1, kv_dtype=torch.float32)
view = attnlab.workbench(model, lens=[5], policy="static", engine="eager").stages(0, request=0, head=0)
print(torch.equal(view.masked, view.scaled - 1))
"""
    assert python(code).strip() == "True"


def test_a_kernel_without_triton_says_which_and_what_to_do() -> None:
    code = """
import sys; sys.modules["triton"] = None
from attnlab.kernels.index import _gather_kernel
try:
    _gather_kernel[(1,)]()
except RuntimeError as error:
    print(error)
"""
    message = python(code)
    assert message.startswith("kernel _gather_kernel cannot be launched: Triton cannot be imported here")
    assert 'use engine="eager"' in message


@pytest.mark.parametrize(
    ("triton_has", "attnlab_wants", "words"),
    [
        ("0", "1", "is set up for compiled kernels, but this process wants them interpreted"),
        ("1", "0", "is set up for interpreted kernels, but this process wants them compiled"),
    ],
)
def test_triton_imported_first_with_the_other_setting(triton_has: str, attnlab_wants: str, words: str) -> None:
    code = "import triton, triton.language\n" + DECODE + TRITON_REFUSES
    shape, message = python(code, TRITON_INTERPRET=triton_has, ATTNLAB_INTERPRET=attnlab_wants).splitlines()
    assert shape == "[2, 9, 64]"
    assert words in message and "import attnlab first" in message and 'use engine="eager"' in message


def test_compiled_kernels_need_a_gpu() -> None:
    code = "import attnlab\n" + TRITON_REFUSES.replace("RuntimeError", "ValueError")
    message = python(code, ATTNLAB_INTERPRET="0")
    assert "needs a GPU, but the device is cpu" in message and "ATTNLAB_INTERPRET=1" in message


@pytest.mark.parametrize("variable", SETTINGS)
@pytest.mark.parametrize(("value", "interpreted"), [("1", True), ("true", True), ("0", False), ("False", False)])
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, interpreted: bool) -> None:
    _unset(monkeypatch)
    monkeypatch.setenv(variable, value)
    assert _boot._choose_interpreted() is interpreted


def test_attnlabs_own_setting_goes_before_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLAB_INTERPRET", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert _boot._choose_interpreted()


@pytest.mark.parametrize("gpu", [True, False])
def test_without_a_setting_the_device_chooses(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    _unset(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert _boot._choose_interpreted() is not gpu


def test_triton_is_told_what_was_chosen() -> None:
    code = "import attnlab, os, triton.language as tl; print(os.environ['TRITON_INTERPRET'], type(tl.cdiv).__name__)"
    assert python(code, ATTNLAB_INTERPRET="1") == "1 InterpretedFunction\n"
    assert python(code, ATTNLAB_INTERPRET="0") == "0 JITFunction\n"


@pytest.mark.parametrize("variable", SETTINGS)
def test_a_setting_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    _unset(monkeypatch)
    monkeypatch.setenv(variable, "maybe")
    with pytest.raises(ValueError, match=rf"{variable}: expected 1 \(interpret kernels\) or 0 .* got 'maybe'"):
        _boot._choose_interpreted()


# --- Data -------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder in place of the shipped one."""
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "attnlab")
    traffic._traces.cache_clear()
    folder = tmp_path / "data"
    (folder / "smollm2_135m").mkdir(parents=True)
    return folder


def test_a_missing_data_file_is_named_with_both_places(data: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"data file 'models.json' is neither at .*attnlab/data/models.json nor"
    ):
        ModelSpec.load("SmolLM2-135M")
    with pytest.raises(FileNotFoundError, match="data file 'traffic.json' is neither at"):
        traffic.trace_names()
    with pytest.raises(FileNotFoundError, match="data file 'smollm2_135m/tokens.json' is neither at"):
        Sample.load("long")


@pytest.mark.parametrize(
    "content", [b"", b'{"models": [{"na', b"\xff\xfe\x00junk", b"[]", b"{}", b"3"],
    ids=["empty", "cut off", "binary", "list", "no key", "number"],
)  # fmt: skip
def test_a_damaged_table_is_named(data: Path, content: bytes) -> None:
    for name in ("models.json", "traffic.json", "smollm2_135m/tokens.json"):
        (data / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"data file .*models.json is damaged .*; reinstall attnlab"):
        ModelSpec.load("SmolLM2-135M")
    with pytest.raises(ValueError, match=r"data file .*traffic.json is damaged .*; reinstall attnlab"):
        traffic.trace_names()
    with pytest.raises(ValueError, match=r"data file .*tokens.json is damaged .*; reinstall attnlab"):
        Sample.load("short")


@pytest.mark.parametrize("keep", [0, 7, 1000, 1_000_000])
def test_damaged_tensors_are_named(data: Path, keep: int) -> None:
    whole = ROOT / "data" / "smollm2_135m"
    (data / "smollm2_135m" / "tokens.json").write_bytes((whole / "tokens.json").read_bytes())
    (data / "smollm2_135m" / "long_layer18.safetensors").write_bytes(
        (whole / "long_layer18.safetensors").read_bytes()[:keep]
    )
    with pytest.raises(ValueError, match=r"data file .*long_layer18.safetensors is damaged .*; reinstall attnlab"):
        Sample.load("long").layer(18)
    with pytest.raises(FileNotFoundError, match="long_layer00.safetensors"):
        Sample.load("long").layer(0)


def test_every_recorded_layer_is_there_and_finite() -> None:
    for text, tokens in (("long", 2048), ("short", 88)):
        sample = Sample.load(text)
        assert len(sample.tokens) == tokens
        for layer in sample.layers:
            rows = sample.layer(layer)
            assert rows.k.shape == rows.v.shape == (tokens, 3, 64) and rows.q.shape[1:] == (9, 64)
            assert rows.q.shape[0] + rows.first_query == tokens
            assert all(x.isfinite().all() and x.any() for x in (rows.q, rows.k, rows.v))


def test_an_unknown_sample_or_layer_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="sample: expected one of long, short, got 'middle'"):
        Sample.load("middle")
    with pytest.raises(ValueError, match="layer: the long sample has layers 0, 18, 23, got 5"):
        Sample.load("long").layer(5)


@pytest.mark.slow
def test_a_wheel_brings_its_data_and_notebooks_along(tmp_path: Path) -> None:
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason=f"builds a wheel with {package}")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir()} == {"attnlab", f"attnlab-{attnlab.__version__}.dist-info"}
    where = (
        "from attnlab.assets import data_path, notebooks_folder\nprint(data_path('models.json'), notebooks_folder())"
    )
    printed = python(DECODE + where, path=site, cwd=elsewhere).splitlines()
    assert printed == ["[2, 9, 64]", f"{site / 'attnlab' / 'data' / 'models.json'} {site / 'attnlab' / 'notebooks'}"]
    python("from attnlab.lab import prepare\nprepare(None)", path=site, cwd=elsewhere)
    copied = {path.name for path in (elsewhere / "attnlab-notebooks").iterdir()}
    assert copied == {path.name for path in (ROOT / "notebooks").iterdir() if not path.name.startswith((".", "__"))}
