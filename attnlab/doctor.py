"""`attnlab doctor`: what is installed, which engine runs, whether data, kernels and pictures work, and what to do.

Nothing that may be broken is imported at the top. Each check stands alone: whatever it raises is a finding.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from attnlab import _boot
from attnlab._boot import AS_FOUND, INTERPRETED, has_gpu
from attnlab.assets import notebooks_folder
from attnlab.units import size

State = Literal["ok", "note", "trouble"]
STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "trouble": "bold red"}

PACKAGES: dict[str, tuple[str, str]] = {
    # distribution: (oldest version that does, what it is for)
    "torch": ("2.11", "tensors"),
    "triton": ("3.6", "the kernels"),
    "einops": ("0.8", "axes by name"),
    "ipywidgets": ("8.1", "explorers in notebooks"),
    "jaxtyping": ("0.3", "axes in annotations"),
    "jupyterlab": ("4.4", "attnlab lab"),
    "matplotlib": ("3.10", "pictures"),
    "numpy": ("2.0", "drawn lengths and pictures"),
    "rich": ("14.0", "tables in the terminal"),
    "safetensors": ("0.5", "recorded samples and traces"),
}
AGREES = 1e-5
"""The largest error of a tiny fp32 decode that still is rounding."""
REINSTALL = "reinstall attnlab (in a checkout: git checkout -- data notebooks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: `found` says what was seen, `todo` what to do about it, if anything."""

    name: str
    state: State
    found: str
    todo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings, in the order in which they were made."""

    findings: tuple[Finding, ...]

    @property
    def troubles(self) -> tuple[Finding, ...]:
        """Findings that keep something from working."""
        return tuple(finding for finding in self.findings if finding.state == "trouble")


def examine() -> Report:
    """Run every check. A check that raises is a trouble, and does not keep the others from running."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings += check()
        except Exception as error:  # of whatever type: finding out is what the doctor is for
            if str(error) == _boot.PROBLEM:  # `settings` says it
                continue
            findings.append(Finding(name=name, state="trouble", found=_words(error), todo=_way_out(error)))
    return Report(findings=tuple(findings))


def print_report(report: Report) -> None:
    """Print a line for each finding, with what to do below it, and a last line that sums up."""
    try:
        rich = [import_module(f"rich.{name}") for name in ("console", "table", "text")]
    except Exception:  # of whatever type: rich may be what is broken
        _print_plainly(report)
    else:
        _print_table(report, *rich)
    count = len(report.troubles)
    names = ", ".join(finding.name for finding in report.troubles)
    print(f"Trouble with {count}: {names}." if count else "Nothing keeps attnlab from working here.")


def _print_table(report: Report, console: Any, table: Any, text: Any) -> None:
    out = console.Console()
    if not out.is_terminal:
        out = console.Console(width=1000)  # into a file or a pipe, no line is broken
    rows = table.Table.grid(padding=(0, 2))
    for finding in report.findings:
        words = text.Text(finding.found)
        if finding.todo:
            words.append(f"\n-> {finding.todo}", style="bold")
        rows.add_row(text.Text(finding.state, style=STYLES[finding.state]), text.Text(finding.name), words)
    out.print(rows)


def _print_plainly(report: Report) -> None:
    width = max(len(finding.name) for finding in report.findings)
    for finding in report.findings:
        print(f"{finding.state:7}  {finding.name:{width}}  {finding.found}")
        if finding.todo:
            print(f"{'':{width + 11}}-> {finding.todo}")


# --- What is installed --------------------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    yield Finding(name="Python", state="ok", found=f"{platform.python_version()}, {sys.executable}")


def _itself() -> Iterator[Finding]:
    place = Path(__file__).parent
    try:
        yield Finding(name="attnlab", state="ok", found=f"{metadata.version('attnlab')}, {place}")
    except metadata.PackageNotFoundError:
        todo = f"python -m pip install -e {place.parent}, so that notebooks can import it from any folder"
        yield Finding(name="attnlab", state="note", found=f"runs from {place} without being installed", todo=todo)


def _packages() -> Iterator[Finding]:
    return (_package(name, *facts) for name, facts in PACKAGES.items())


def _package(name: str, oldest: str, purpose: str) -> Finding:
    install = f"python -m pip install '{name}>={oldest}'"
    try:
        version = metadata.version(name)
        found = "" if find_spec(name) is not None else f"{version} is listed as installed, but its files are missing"
    except metadata.PackageNotFoundError:
        version, found = "", "missing"
    if found and name == "triton" and platform.system() != "Linux":
        todo = 'use engine="eager", which needs none; kernels run on Linux, WSL included'
        return Finding(name=name, state="note", found="missing: it has wheels for Linux only", todo=todo)
    if found:
        return Finding(name=name, state="trouble", found=f"{found} (for {purpose})", todo=install)
    if _numbers(version) < _numbers(oldest):
        found = f"{version} is too old: {oldest} or newer is needed (for {purpose})"
        return Finding(name=name, state="trouble", found=found, todo=install)
    return Finding(name=name, state="ok", found=version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


# --- What runs ----------------------------------------------------------------------------------------------------


def _gpu() -> Iterator[Finding]:
    torch = import_module("torch")
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found = f"{facts.name}, {facts.multi_processor_count} multiprocessors, {size(facts.total_memory)}"
        yield Finding(name="GPU", state="ok", found=found)
        return
    adds = "one would add compiled kernels (milliseconds, not seconds), times of programs and arithmetic in bf16"
    if not Path("/proc/driver/nvidia/version").exists():
        yield Finding(name="GPU", state="note", found=f"none; {adds}")
        return
    todo = "look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    if torch.version.cuda is None:
        todo = "install a CUDA build of torch: pytorch.org says which one"
    found = f"this machine has NVIDIA's driver, but torch {torch.__version__} sees no GPU; {adds}"
    yield Finding(name="GPU", state="note", found=found, todo=todo)


def _settings() -> Iterator[Finding]:
    """Say who chose how kernels run."""
    if _boot.PROBLEM is not None:
        found, _, todo = _boot.PROBLEM.partition("; ")
        yield Finding(name="settings", state="trouble", found=found, todo=todo)
        return
    chosen = {name: value for name, value in AS_FOUND.items() if value is not None}
    how = "interpreted on the CPU" if INTERPRETED else "compiled"
    words = ", ".join(f"{name}={value}" if value is not None else f"{name} unset" for name, value in AS_FOUND.items())
    found, gpu = f"{words}: kernels are {how}", has_gpu()
    unset = f"unset {' and '.join(chosen)} to let the device choose"
    if not INTERPRETED and not gpu:
        found += ", for which there is no GPU"
        yield Finding(name="settings", state="trouble", found=found, todo=f"{unset}, or set ATTNLAB_INTERPRET=1")
    elif INTERPRETED and gpu:
        yield Finding(name="settings", state="note", found=f"{found}, although there is a GPU", todo=unset)
    else:
        yield Finding(name="settings", state="ok", found=found)


def _engines() -> Iterator[Finding]:
    triton = import_module("attnlab._triton")
    if triton.PROBLEM is None:
        how = "interpreted" if INTERPRETED else "compiled"
        yield Finding(name="engines", state="ok", found=f"eager, and triton {triton.triton.__version__} ({how})")
    elif triton.triton is None:
        oldest, _ = PACKAGES["triton"]
        linux = platform.system() == "Linux"
        install = f"python -m pip install 'triton>={oldest}', or " if linux else ""
        todo = f'{install}use engine="eager": everything but the kernels themselves runs on it'
        state: State = "trouble" if linux else "note"
        yield Finding(name="engines", state=state, found=f"eager only: {triton.PROBLEM}", todo=todo)
    else:
        found, _, todo = triton.PROBLEM.partition("; ")
        yield Finding(name="engines", state="trouble", found=f"eager only: {found}", todo=todo)


def _eager_decode() -> Iterator[Finding]:
    yield _decode("eager", "cuda" if has_gpu() else "cpu")


def _triton_decode() -> Iterator[Finding]:
    """Run the kernels where they can run; why they cannot is said by `engines` and `settings`."""
    if import_module("attnlab._triton").PROBLEM is None and (INTERPRETED or has_gpu()):
        yield _decode("triton", "cpu" if INTERPRETED else "cuda")


def _choice() -> Iterator[Finding]:
    """Say what a backend would run on here, and why, unless something above is broken."""
    if import_module("attnlab._triton").PROBLEM is None:
        device = "cuda" if has_gpu() else "cpu"
        choice = import_module("attnlab.choice").choose(device, engine=None, policy=None, deterministic=False)
        yield Finding(name="backend_for", state="ok", found=choice.why)


def _decode(engine: str, device: str) -> Finding:
    started = time.perf_counter()
    error = _probes().decode_error(engine, device)
    seconds, name = time.perf_counter() - started, f"decode, {engine}"
    if error <= AGREES:
        found = f"agrees with the oracle: largest error {error:.1e}, in {seconds:.1f} s on {device}"
        return Finding(name=name, state="ok", found=found)
    other = "eager" if engine == "triton" else "triton"
    found = f"differs from the oracle by {error:.1e}, more than the {AGREES:.0e} of rounding"
    todo = f'use engine="{other}" here, and report this with the line of attnlab info'
    return Finding(name=name, state="trouble", found=found, todo=todo)


# --- What is shipped, and what draws it ---------------------------------------------------------------------------


def _data() -> Iterator[Finding]:
    for name, read in _probes().DATA.items():
        try:
            yield Finding(name=name, state="ok", found=read())
        except Exception as error:  # a damaged file may fail in many ways; each one is named
            found = _words(error).removesuffix("; reinstall attnlab")
            denied = error.filename if isinstance(error, PermissionError) else None
            todo = REINSTALL if denied is None else f"make it readable for you: chmod a+r {denied}"
            yield Finding(name=name, state="trouble", found=found, todo=todo)


def _notebooks() -> Iterator[Finding]:
    try:
        folder = notebooks_folder()
    except FileNotFoundError as error:
        yield Finding(name="notebooks", state="trouble", found=str(error), todo=REINSTALL)
        return
    count = len([path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts])
    todo = "" if count else REINSTALL
    yield Finding(name="notebooks", state="ok" if count else "trouble", found=f"{count} in {folder}", todo=todo)


def _fonts() -> Iterator[Finding]:
    """Say which font pictures are drawn with. A matplotlib that is missing was named before."""
    if find_spec("matplotlib") is None:
        return
    fonts = import_module("attnlab.plots.style").FONTS
    installed = set(import_module("matplotlib.font_manager").get_font_names())
    used = next(font for font in fonts if font in installed)
    if used != fonts[-1]:
        yield Finding(name="fonts", state="ok", found=f"pictures are set in {used}")
        return
    found = f"pictures are set in {used}, wider than {', '.join(fonts[:-1])}: long lines are set smaller"
    cache = Path(import_module("matplotlib").get_cachedir()) / "fontlist-*.json"
    todo = f"install Liberation Sans (fonts-liberation); if it is, matplotlib's list of fonts is older: delete {cache}"
    yield Finding(name="fonts", state="note", found=found, todo=todo)


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": _python,
    "attnlab": _itself,
    "packages": _packages,
    "GPU": _gpu,
    "settings": _settings,
    "engines": _engines,
    "decode, eager": _eager_decode,
    "decode, triton": _triton_decode,
    "backend_for": _choice,
    "data": _data,
    "notebooks": _notebooks,
    "fonts": _fonts,
}


def _probes() -> Any:
    return import_module("attnlab.doctor_probes")


def _words(error: Exception) -> str:
    """Return an error in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {words}"


def _way_out(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install what is missing above; if nothing is, reinstall the package that the error names"
    return "report this with the line of attnlab info"
