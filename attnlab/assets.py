"""The shipped data: one function finds it, in a checkout and in an installed wheel alike."""

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


def load_json(name: str) -> Any:
    """Return the contents of a shipped JSON file; raise ValueError naming the file where it is unreadable."""
    path = data_path(name)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"data file {path} is damaged ({error}); reinstall attnlab") from error
