"""Files that appear whole or not at all: whatever goes wrong, what was there before stays as it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from uuid import uuid4

from attnlab.checks import require


def place(path: str | Path, *, name: str = "path") -> Path:
    """Return where a file of that path is to lie, links followed; raise OSError that begins with `name` where none can.

    What lies there already must be a file that may be written.
    """
    require(str(path) not in ("", "."), f"{name}: expected a file's name, got {str(path)!r}", IsADirectoryError)
    target = Path(os.path.realpath(path))
    folder = target.parent
    require(folder.is_dir(), f"{name}: there is no folder {str(Path(path).parent)!r}; make it first", FileNotFoundError)
    require(not target.is_dir(), f"{name}: {str(path)!r} is a folder; name a file inside it", IsADirectoryError)
    if target.exists():
        require(target.is_file(), f"{name}: {str(path)!r} is a device or a pipe; name a file", OSError)
        may_write = os.access(target, os.W_OK)
        require(may_write, f"{name}: {str(path)!r} is read-only; name another file, or chmod u+w it", PermissionError)
    return target


def write_whole(path: str | Path, content: bytes, *, name: str = "path") -> None:
    """Put a content in the place of a file at once, or raise OSError that begins with `name`.

    It is written beside first. A new file gets the mode that the umask leaves, one that is there keeps its own.
    """
    target = place(path, name=name)
    beside = target.with_name(f".{uuid4().hex}.part")
    try:
        with beside.open("xb") as file:
            file.write(content)
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except OSError as error:
        raise type(error)(f"{name}: cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)
