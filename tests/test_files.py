"""Files are written whole or not at all, where they are meant to lie, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlab.files import write_whole


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(tmp_path: Path, umask: None) -> None:
    write_whole(tmp_path / "new", b"1")
    (tmp_path / "old").write_bytes(b"0")
    (tmp_path / "old").chmod(0o604)
    write_whole(str(tmp_path / "old"), b"2")
    assert (mode(tmp_path / "new"), mode(tmp_path / "old")) == (0o640, 0o604)
    assert (tmp_path / "old").read_bytes() == b"2"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for content in (b"1", b"2"):  # to where no file is yet, and to one
        write_whole(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "file").read_bytes() == content


def test_what_was_there_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"before")
    monkeypatch.setattr("attnlab.files.shutil.copymode", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match=f"^here: cannot write '{path}': No space left$"):
        write_whole(path, b"after", name="here")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_where_no_file_can_lie_is_said_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_bytes(b"before")
    wrong: list[tuple[object, type[OSError], str]] = [
        ("", IsADirectoryError, "path: expected a file's name, got ''"),
        (tmp_path, IsADirectoryError, "is a folder; name a file inside it"),
        (tmp_path / "no" / "x", FileNotFoundError, f"path: there is no folder '{tmp_path}/no'; make it first"),
        ("/dev/null", OSError, "path: '/dev/null' is a device or a pipe"),
    ]
    for path, kind, words in wrong:
        with pytest.raises(kind, match=words):
            write_whole(path, b"after")  # type: ignore[arg-type]
    monkeypatch.setattr("os.access", lambda *a: False)
    with pytest.raises(PermissionError, match="path: '.*taken' is read-only"):
        write_whole(tmp_path / "taken", b"after")
    assert (tmp_path / "taken").read_bytes() == b"before"
