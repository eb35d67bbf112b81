"""How sizes, and words from elsewhere, are written in tables and reports alike."""

from __future__ import annotations


def size(count: int) -> str:
    """Return bytes in the unit that leaves the number short.

    >>> [size(n) for n in (1, 900, 2560, 3 << 20, 80 << 30)]
    ['1 byte', '900 bytes', '2.5 KiB', '3.0 MiB', '80.0 GiB']
    """
    if count < 1024:
        return f"{count} byte{'s' * (count != 1)}"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def printable(text: str) -> str:
    r"""Return text without control characters: a file from elsewhere must not steer the terminal.

    >>> printable("a\x1b[31mb")
    'a?[31mb'
    """
    return "".join(c if c.isprintable() else "?" for c in text)
