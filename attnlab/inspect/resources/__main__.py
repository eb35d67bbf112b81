"""Compile everything: `ATTNLAB_INTERPRET=0 python -m attnlab.inspect.resources [--write]`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from attnlab.assets import data_path
from attnlab.inspect.resources.compiling import compile_variant
from attnlab.inspect.resources.shapes import TARGETS
from attnlab.inspect.resources.table import TABLE, table
from attnlab.inspect.resources.variants import variants


def main() -> None:
    """Compile everything, print the table; with --write, put it where it lies in the repository."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite data/{TABLE}")
    write = parser.parse_args().write
    rows = []
    for name, target in TARGETS.items():
        for variant in variants(target):
            rows.append(compile_variant(variant, name))
            print(asdict(rows[-1]), file=sys.stderr)
    text = table(rows)
    print(text)
    if write:
        (data_path("models.json").parent / TABLE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
