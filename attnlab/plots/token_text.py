"""Texts of tokens, made visible: a leading space, a line break and what cannot be printed have a mark."""

from __future__ import annotations

from attnlab.plots.words import short

LEGEND = "In texts · is a leading space, ⏎ a line break."
MOST = 12
"""No token is written with more characters."""


def visible(text: str, most: int = MOST) -> str:
    r"""Return a token's text as it is written in pictures.

    >>> [visible(text) for text in (" the", "\n\n", "a b", "    x", "\x00", "", "internationalisation")]
    ['·the', '⏎⏎', 'a b', '····x', '�', '∅', 'internation…']
    """
    body = text.lstrip(" ")
    return short("·" * (len(text) - len(body)) + body, most) or "∅"
