"""A table of tunings that stays as it is when the shipped one is tuned anew: its rows of two kernels are fixed here."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from attnlab.assets import load_json
from attnlab.kernels import tuning
from attnlab.kernels.tuning.file import parsed
from attnlab.kernels.tuning.rows import Table

_RUN = {"device": "A GPU", "versions": "torch 1", "commit": "123", "when": "2029", "file": "elsewhere"}
_MEASURED = {"run": "old", "us": {"decode-64x4k": 9.0}}
_N, _MN = ("block_n", "num_warps", "num_stages"), ("block_m", "block_n", "num_warps", "num_stages")
_ROWS: list[tuple[str, str, str, tuple[int, ...], str | None]] = [
    ("decode_shares", "interpreter", "any", (64, 4, 1), None),
    ("decode_shares", "hip", "any", (32, 4, 1), None),
    ("decode_shares", "cuda", "qk_dim > 256", (32, 4, 3), None),
    ("decode_shares", "cuda", "kv = fp8", (32, 2, 5), "tiles that are converted need registers"),
    ("decode_shares", "cuda", "any", (64, 2, 3), None),
    ("verify_shares", "interpreter", "any", (32, 64, 4, 1), None),
    ("verify_shares", "sm_90", "rows <= 16", (16, 128, 4, 5), "few rows want many keys"),
    ("verify_shares", "cuda, hip", "any", (32, 32, 4, 5), None),
]


def content() -> Any:
    """The table as JSON, to be changed at will."""
    table = deepcopy(load_json(tuning.FILE))
    rows = [row for row in table["rows"] if row["kernel"] not in ("decode_shares", "verify_shares")]
    for kernel, on, when, values, why in _ROWS:
        config = dict(zip(_N if len(values) == 3 else _MN, values, strict=True))
        row = {"kernel": kernel, "on": on, "when": when, "config": config, "measured": deepcopy(_MEASURED)}
        rows.append(row if why is None else {**row, "why": why})
    return {**table, "runs": {**table["runs"], "old": dict(_RUN)}, "rows": rows}


def fixed() -> Table:
    """The table."""
    return parsed(content(), name="a table of a test")
