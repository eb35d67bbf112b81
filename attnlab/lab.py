"""`attnlab lab`: JupyterLab on the notebooks.

A checkout's notebooks are opened where they lie: after `pip install -e .`, and by `python -m attnlab` in a checkout.
Those of a wheel lie in site-packages, where nobody should work: after `pip install .` they are copied into a folder of
the user's first. Address and token stay as Jupyter sets them: this machine only, with one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from attnlab.assets import in_wheel, notebooks_folder
from attnlab.checks import require
from attnlab.files import write_whole

COPIES = Path("attnlab-notebooks")
"""Where the notebooks of a wheel are copied to, in the working folder, unless another one is given."""
FIRST = "00_map.ipynb"
"""The lesson that is open when JupyterLab is."""
ROOT_WORDS = "You are root, and JupyterLab does not run as root unless it is told to: attnlab lab -- --allow-root"
_SKIPPED = {".ipynb_checkpoints", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What copying did: files by their path inside the folder. `kept` were there before and were left alone."""

    folder: Path
    written: tuple[Path, ...]
    kept: tuple[Path, ...]

    def __str__(self) -> str:
        """Say it."""
        words = f"Copied {len(self.written)} file{'s' * (len(self.written) != 1)} of the notebooks into {self.folder}"
        return words + (f"; left {len(self.kept)} that were there as they are." if self.kept else ".")


def open_lab(folder: Path | None, *, port: int | None, browser: bool, extra: Sequence[str] = ()) -> None:
    """Serve the notebooks until JupyterLab is stopped. `folder` asks for copies there; `extra` goes to JupyterLab."""
    require(
        find_spec("jupyterlab") is not None,
        "JupyterLab is missing here; install it with: python -m pip install jupyterlab",
        ModuleNotFoundError,
    )
    require(port is None or 1 <= port <= 65535, f"--port: expected 1 to 65535, got {port}")
    opened = prepare(folder)
    if _is_root() and not any("allow" in option and "root" in option for option in extra):
        print(ROOT_WORDS, file=sys.stderr)  # no error: a configuration file of Jupyter's may allow it
    # In this process, not below it: signals and Ctrl-C then reach the server, and none is left behind.
    import_module("jupyterlab.labapp").main(arguments(opened, port=port, browser=browser, extra=extra))


def prepare(folder: Path | None) -> Path:
    """Return the folder to open, with the notebooks in it; print what was copied."""
    source = notebooks_folder()
    if folder is None and not in_wheel(source):
        print(f"Opening {source}, the files of the checkout. For copies of your own: attnlab lab --folder FOLDER")
        return source
    copied = copy_notebooks(source, COPIES if folder is None else folder)
    print(f"{copied} They are yours to change: no file there is ever written over.")
    return copied.folder


def copy_notebooks(source: Path, folder: Path) -> Copied:
    """Copy every file that is not there yet, whole or not at all. A file that is there is never written to."""
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if not path.is_dir()]
    files = [inside for inside in files if not _SKIPPED & set(inside.parts)]
    for needed in sorted({(folder / inside).parent for inside in files}):
        _check_folder(needed)
    written, kept = [], []
    for inside in files:
        target = folder / inside
        if os.path.lexists(target):  # a link that leads nowhere included
            kept.append(inside)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, (source / inside).read_bytes(), name="--folder")
        written.append(inside)
    return Copied(folder=folder, written=tuple(written), kept=tuple(kept))


def _check_folder(needed: Path) -> None:
    """Raise where a file lies in the place of a folder, or of one above it."""
    for place in (needed, *needed.parents):
        if place.is_dir():
            return
        free = not os.path.lexists(place)
        require(free, f"--folder: {place} is a file, where a folder is needed; choose another folder", FileExistsError)


def arguments(folder: Path, *, port: int | None, browser: bool, extra: Sequence[str] = ()) -> list[str]:
    """Return JupyterLab's command line, without its name. It opens the first lesson, or what `extra` says."""
    first = (folder / FIRST).is_file() and not any("default_url" in option for option in extra)
    return [
        f"--ServerApp.root_dir={folder.resolve()}",
        *([f"--LabApp.default_url=/lab/tree/{FIRST}"] if first else []),
        *([] if port is None else [f"--port={port}"]),
        *([] if browser else ["--no-browser"]),
        *extra,
    ]


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0
