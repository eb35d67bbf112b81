"""What a table must be: every shape has a row, every row a shape, and no config is one that is known to be wrong.

Shapes are tried one by one. Between two numbers that conditions name, all shapes are alike, so that one of each kind is
enough: the check is exact, and takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from attnlab.kernels.launch import padded
from attnlab.kernels.tuning.rows import (
    CUDA,
    DTYPES,
    FLAGS,
    INTERPRETER,
    KERNELS,
    NUMBERS,
    OF_DTYPE,
    Condition,
    Row,
    Table,
    completed,
    conditions,
)
from attnlab.plan.tiles import LARGE_TILE, NARROW_DIM, row_tile

READ_PAIRS = ("decode_shares", "verify_shares")
"""Kernels that read 8-bit numbers two columns at a time (kernels/pairs.py)."""
ONE_PASS = 128
"""One-pass lists begin at multiples of so many positions."""


def check(table: Table, *, name: str) -> None:
    """Raise ValueError that begins with `name` where a shape has no row, a row takes no shape, or a config is wrong."""
    for kernel in KERNELS:
        rows = [row for row in table.rows if row.kernel == kernel]
        if not rows:
            raise ValueError(f"{name}: kernel {kernel} has no row")
        taking: set[int] = set()
        for names in _devices(kernel, rows):
            for shape in _shapes(kernel, rows):
                number = next((i for i, row in enumerate(rows) if row.takes(names, shape)), None)
                if number is None:
                    raise ValueError(
                        f"{name}: kernel {kernel} has no row for {names[0]} with {_words(shape)}; "
                        'add one, such as the last for that device, when "any"'
                    )
                wrong = refused(rows[number], names, shape)
                if wrong is not None:
                    raise ValueError(f"{name}: {rows[number].title}: {wrong}")
                taking.add(number)
        for number, row in enumerate(rows):
            if number not in taking:
                raise ValueError(
                    f"{name}: {row.title}: no shape is left for it; the rows before it take them all, or its "
                    "conditions exclude each other, or the kernel does not run there; move it up, or take it out"
                )


def served(table: Table, row: Row) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the names of a device, and a shape, for each kind that a row of a table takes."""
    rows = [other for other in table.rows if other.kernel == row.kernel]
    for names in _devices(row.kernel, rows):
        for shape in _shapes(row.kernel, rows):
            if next((other for other in rows if other.takes(names, shape)), None) is row:
                yield names, shape


def refused(row: Row, names: tuple[str, ...], shape: Mapping[str, Any]) -> str | None:
    """Return why a row's config must not serve a shape; None: it may."""
    config, on_gpu = row.config, INTERPRETER not in names
    for field in ("block_m", "block_n"):
        size = config.get(field)
        if size is not None and (size < 16 or size & (size - 1)):
            return f"{field}: expected a power of two from 16 on, got {size}"
    if config["num_warps"] not in (1, 2, 4, 8, 16, 32):
        return f"num_warps: expected a power of two up to 32, got {config['num_warps']}"
    block_m, block_n = config.get("block_m") or 0, config["block_n"] or 0
    rows = LARGE_TILE if row.kernel == "decode_groups" else block_m
    if "sm_90" in names and rows >= 64 and _value_columns(row.kernel, shape) < block_n:
        return (
            f"values of {shape['v_dim']} columns and 64 rows or more with tiles of {block_n} keys: ptxas 12.8, which "
            "comes with Triton 3.6 and 3.7, compiles dots of warp groups to wrong results where the values are "
            "narrower than the tile of keys; give narrow values a smaller tile"
        )
    if row.kernel == "verify_shares" and block_m > row_tile(shape["v_dim"]):
        return f"block_m: plans count tiles of at most {row_tile(shape['v_dim'])} rows (plan/tiles.py), got {block_m}"
    if row.kernel in ("extend", "extend_hopper") and on_gpu and ONE_PASS % block_n:
        return f"block_n: one-pass lists begin at multiples of {ONE_PASS} positions, which {block_n} does not divide"
    return None


def _value_columns(kernel: str, shape: Mapping[str, Any]) -> int:
    """Return how many columns a tile of values has: of a pool that is read as pairs half of them, even or odd ones."""
    pairs = kernel in READ_PAIRS and shape["kv"] == torch.float8_e4m3fn
    return padded(-(-shape["v_dim"] // 2) if pairs else shape["v_dim"])


def _devices(kernel: str, rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the names of one device of each kind that the kernel runs on and its rows tell apart."""
    named = {name for row in rows for name in row.on if name.startswith("sm_")} | {"sm_90"}
    found: list[tuple[str, ...]] = []
    for name in KERNELS[kernel].runs_on:
        if name == CUDA:
            found += [(CUDA,), *((arch, CUDA) for arch in sorted(named))]
        else:
            found.append((name, CUDA) if name.startswith("sm_") else (name,))
    return found


def _shapes(kernel: str, rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Yield a shape of each kind that the kernel's rows tell apart, among those that it serves."""
    known = KERNELS[kernel]
    serves = conditions(known.serves)
    named = [one for row in rows for one in row.when] + list(serves)
    kinds = [_values(word, named) for word in known.words]
    for values in product(*kinds):
        shape = completed(dict(zip(known.words, values, strict=True)))
        if all(one.holds(shape) for one in serves):
            yield shape


def _values(word: str, named: list[Condition]) -> list[Any]:
    if word in FLAGS:
        return [False, True]
    if word in OF_DTYPE:
        told_apart = [torch.float8_e4m3fn] if word == "kv" else []  # by `refused`, whatever rows say
        mine = dict.fromkeys([*told_apart, *(one.value for one in named if one.word == word)])
        return [*mine, next(dtype for dtype in (torch.bfloat16, torch.float32, *DTYPES.values()) if dtype not in mine)]
    dims = ("qk_dim", "v_dim")
    words = (word, "widest") if word in dims else (word,)
    ends = {NARROW_DIM} if word == "v_dim" else set()
    for one in named:
        if one.word in words and one.word in NUMBERS:
            ends |= {one.value, one.value - 1} if one.compares == "=" else {one.value}
    return sorted({1} | {end + 1 for end in ends if end >= 0})


def _words(shape: Mapping[str, Any]) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return ", ".join(f"{word} {names.get(value, value)}" for word, value in shape.items()) or "any shape"
