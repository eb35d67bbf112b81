"""How numbers and names are written in titles, labels and captions: rounded, but never into a lie."""

from __future__ import annotations

from collections.abc import Sequence

MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
"""How what breaks a line, or is wide, is written."""
ROUNDING = 1e-5
"""A share that is so near to 1 is 1: weights are fp32 numbers, and summed."""


def plural(count: int, noun: str) -> str:
    """Return the count with its noun.

    >>> plural(1, "key"), plural(15776, "key"), plural(2, "entry"), plural(4, "branch")
    ('1 key', '15,776 keys', '2 entries', '4 branches')
    """
    if count == 1:
        return f"{count:,} {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def among(request: int, requests: int, words: str) -> str:
    """Return what is said of a request, with its name where it is one of several.

    >>> among(1, 2, "Each draft sees all"), among(0, 1, "Each draft sees all")
    ('Request r1, one of 2. Each draft sees all', 'Each draft sees all')
    """
    return words if requests == 1 else f"Request r{request}, one of {requests:,}. {words}"


def everything(keys: int) -> str:
    """Return words for all of some keys.

    >>> everything(1), everything(640)
    ('the only key', 'all 640 keys')
    """
    return "the only key" if keys == 1 else f"all {plural(keys, 'key')}"


def times(ratio: float) -> str:
    """Return a ratio with about two digits.

    >>> times(1.84), times(61.6)
    ('1.8×', '62×')
    """
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:,.0f}×"


def share(x: float) -> str:
    """Return a share as a percentage. Nothing but all is 100%, nothing but nothing is 0%; more than all is allowed.

    What differs from all by no more than rounding in fp32 is all.

    >>> [share(x) for x in (0.0, 0.0002, 0.002, 0.844, 0.9971, 0.9999, 0.9999993, 1.0000012, 1.53)]
    ['0%', '<0.1%', '0.2%', '84%', '99.7%', '>99.9%', '100%', '100%', '153%']
    """
    if x == 0.0 or abs(x - 1) < ROUNDING:
        return f"{x:.0%}"
    if x < 0.0005:
        return "<0.1%"
    if 0.9995 <= x < 1:
        return ">99.9%"
    return f"{x:.1%}" if x < 0.0095 or 0.995 <= x < 1 else f"{x:.0%}"


def signed(x: float, digits: int = 1) -> str:
    """Return a number with a real minus sign.

    >>> signed(-2.81)
    '−2.8'
    """
    return f"{x:.{digits}f}".replace("-", "−")


def two_digits(x: float) -> str:
    """Return a number with two digits that count.

    >>> [two_digits(x) for x in (0.0603, 4.02, 11.2, 153.0)]
    ['0.060', '4.0', '11', '153']
    """
    return f"{x:,.0f}" if x >= 99.5 else f"{x:#.2g}".rstrip(".")


def marked(text: str) -> str:
    r"""Return a text with a mark for a line break, and for what cannot be printed: half characters, control characters.

    >>> marked("a\nb\x1bc\ud800")
    'a⏎b�c�'
    """
    return "".join(MARKS.get(c) or (c if c.isprintable() else "�") for c in text)


def short(name: str, most: int = 36) -> str:
    """Return a name that someone else chose, cut to `most` characters that can be printed."""
    name = marked(name)
    return name if len(name) <= most else name[: most - 1] + "…"


def key_label(keys: int) -> str:
    """Return a key position for an axis.

    >>> [key_label(k) for k in (0, 250, 4000, 31_552, 1_500_000)]
    ['0', '250', '4k', '31,552', '1.5M']
    """
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if keys >= unit and keys % (unit // 100) == 0:
            return f"{keys / unit:g}{letter}"
    return f"{keys:,}"


def between(values: Sequence[int], noun: str) -> str:
    """Return the range of some counts.

    >>> between([188, 9, 3267], "key"), between([1, 1], "range")
    ('9 to 3,267 keys', '1 range')
    """
    low, high = min(values), max(values)
    return plural(low, noun) if low == high else f"{low:,} to {plural(high, noun)}"
