"""Tiles and launch options as data: the table of data/tuning.json, and the look-up that each kernel's `choose` is.

A row (`rows.py`) names a kernel, the devices and the shapes that it is for, a config, and the measurement behind it or
why there is none. Of the rows of a kernel the first that takes a device and a shape counts, so the most special ones
come first. `file.py` reads and writes the table, `checks.py` refuses one in which a shape has no row, a row no shape,
or a config is known to be wrong. Nothing is tuned at run time: `attnlab tune` measures candidates and rewrites rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnlab.assets import load_json
from attnlab.kernels.target import Target
from attnlab.kernels.tuning.checks import check
from attnlab.kernels.tuning.file import parsed
from attnlab.kernels.tuning.rows import Table

FILE = "tuning.json"
"""Among the shipped data."""
_in_use: list[Table] = []
"""The shipped table, once it was asked for, and those that are used instead, the last one first of all."""


def shipped() -> Table:
    """Return the table that the package brings along, read anew. Raises ValueError where it is damaged or wrong."""
    table = parsed(load_json(FILE), name=f"data/{FILE}")
    check(table, name=f"data/{FILE}")
    return table


def current() -> Table:
    """Return the table that kernels are launched by: the shipped one, unless `using` has put another in its place.

    Whatever keeps a choice over calls must keep it with the table that it is from.
    """
    if not _in_use:
        _in_use.append(shipped())
    return _in_use[-1]


@contextmanager
def using(table: Table) -> Iterator[Table]:
    """Launch kernels by another table inside of the block; one thread at a time, as the table is the process's."""
    current()  # the shipped one stays below
    _in_use.append(table)
    try:
        yield table
    finally:
        _in_use.pop()


def tuned(kernel: str, target: Target, **shape: Any) -> dict[str, Any]:
    """Return the config of a kernel for a shape, which has the words of `rows.KERNELS`, in their order.

    >>> tuned("decode_latent", Target(kind="interpreter"))
    {'block_n': 64, 'num_warps': 8, 'num_stages': 1}
    """
    return dict(current().row(kernel, target, shape).config)
