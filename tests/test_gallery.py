"""The gallery's files are those that the code draws: what they say is compared, not their pixels."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest

from attnlab.gallery import PICTURES
from attnlab.plots.picture import Picture

FOLDER = Path(__file__).parent.parent / "notebooks" / "gallery"


@cache
def picture_of(name: str) -> Picture:
    """Draw a picture, once for both themes."""
    return PICTURES[name]()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PICTURES)
def test_a_committed_picture_says_what_is_drawn(name: str, theme: str) -> None:
    picture = picture_of(name)
    committed = ElementTree.parse(FOLDER / f"{name}_{theme}.svg").getroot()
    drawn = ElementTree.fromstring(picture.to_svg(theme=theme))
    for root in (committed, drawn):
        assert (root[0].text, root[1].text) == (picture.title, picture.alt)
    assert words(committed) == words(drawn)


def words(root: ElementTree.Element) -> list[str]:
    """Return all text of a picture, in the order in which it is drawn."""
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_every_file_has_a_picture() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{n}_{t}.svg" for n in PICTURES for t in ("light", "dark")}
