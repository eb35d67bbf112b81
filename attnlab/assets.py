"""The shipped data and notebooks: one function finds each, in a checkout and in an installed wheel alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent


def data_path(name: str) -> Path:
    """Return the path of a shipped data file, such as `models.json`.

    In a wheel the data lies inside the package, in a checkout beside it. Raises FileNotFoundError, with both
    places, where it is in neither.
    """
    places = [_PACKAGE / "data" / name, _PACKAGE.parent / "data" / name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"data file {name!r} is neither at {places[0]} nor at {places[1]}; reinstall attnlab, its data travels with it"
    )


def notebooks_folder() -> Path:
    """Return the folder of the shipped notebooks: inside the package in a wheel, beside it in a checkout.

    Raises FileNotFoundError, with both places, where it is in neither.
    """
    places = [_PACKAGE / "notebooks", _PACKAGE.parent / "notebooks"]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"notebooks: there is no folder {places[0]}, nor {places[1]}; reinstall attnlab, its notebooks travel with it"
    )


def in_wheel(path: Path) -> bool:
    """Whether a shipped file or folder lies inside the installed package, where nobody should write."""
    return path.is_relative_to(_PACKAGE)


def load_json(name: str, *keys: str) -> Any:
    """Return what a shipped JSON file holds under these keys, one inside the other.

    Raises ValueError, naming the file, where it is unreadable or has no such key.
    """
    path = data_path(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            content = content[key]
        return content
    except (ValueError, LookupError, TypeError) as error:  # no text, no JSON; no such key; nothing that has keys
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"data file {path} is damaged ({reason}); reinstall attnlab") from error
