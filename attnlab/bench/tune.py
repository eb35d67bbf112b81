"""What is tuned: the rows of the tuning table that this device's kernels are launched by, and what is tried for each.

A row is tuned on the workloads that its kernel is launched for by it. Which these are is found by asking the kernel's
own `choose`; `trials.py` times them, and makes sure that the row was launched indeed. How many programs share the work
is the plan's affair (`plan/policies/balanced.py`), and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from attnlab.bench.workloads import Workload
from attnlab.checks import one_of
from attnlab.kernels import (
    decode,
    decode_latent,
    decode_latent_hopper,
    decode_shares,
    extend,
    extend_hopper,
    verify,
    verify_shares,
    verify_shares_hopper,
)
from attnlab.kernels.launch import padded
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import using
from attnlab.kernels.tuning.checks import refused, served
from attnlab.kernels.tuning.rows import INTERPRETER, KERNELS, Row, Table, names_of
from attnlab.memory.pool import KVView, compute_dtype
from attnlab.plan.layout import values_seen
from attnlab.plan.policies.balanced import Balanced
from attnlab.plan.policy import SplitContext
from attnlab.plan.tiles import HEAD_TILE, LARGE_TILE, head_tiles, shares_tile

Config = dict[str, int | None]

GRIDS: dict[str, dict[str, tuple[int | None, ...]]] = {
    "decode_split": {"block_n": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "decode_shares": {"block_n": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8), "num_stages": (1, 3, 5)},
    "decode_groups": {"block_n": (16, 32, 64), "num_warps": (4, 8), "num_stages": (3, 5, 7)},
    "decode_latent": {"block_n": (16, 32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    "verify_split": {
        "block_m": (16, 32, 64),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
    },
    "verify_shares": {
        "block_m": (16, 32, 64),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (3, 5, 7),
    },
    "extend": {
        "block_m": (16, 32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
    },
    "extend_hopper": {
        "block_m": (64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
        "registers": (None, 128),
    },
}
"""What is tried of each kernel's fields, all with all; of stages those that compile to different texts."""
POLICIES = {"decode_split": "seed", "verify_split": "seed"}
"""The split policy under which a kernel is launched; of the others it is "balanced"."""
TEXTS = {
    "decode_split": decode._decode_split_kernel,
    "decode_shares": decode_shares._decode_shares_kernel,
    "decode_groups": decode_shares._decode_shares_kernel,
    "decode_latent": decode_latent._decode_latent_kernel,
    "verify_split": verify._verify_split_kernel,
    "verify_shares": verify_shares._verify_shares_kernel,
    "extend": extend._extend_kernel,
    "extend_hopper": extend_hopper._extend_hopper_kernel,
}
"""The kernels themselves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A row to be tuned: the workloads that are launched by it, and what is tried; its own config comes first.

    `standing` is the row that they are launched by now. `row` has its config and shapes, for the tuned device alone:
    one that holds for others too is left to them. `table` has them both, or the one that both are.
    """

    table: Table
    standing: Row
    row: Row
    works: tuple[Workload, ...]
    configs: tuple[Config, ...]


def tasks(
    table: Table, target: Target, works: Sequence[Workload], *, kernels: Sequence[str] = (), near: bool = False
) -> list[Task]:
    """Return a task for each row that a workload is launched by on a target; `kernels` are those to be tuned, or all.

    `near`: what is tried differs from a row's own config in one field alone.
    """
    for kernel in kernels:
        one_of("kernel", kernel, list(KERNELS))
    found: dict[int, list[Workload]] = {}
    for work in works:
        for kernel, choose in launched(work, target).items():
            if not kernels or kernel in kernels:
                found.setdefault(table.rows.index(asked(table, choose)), []).append(work)
    made = []
    for number in sorted(found):
        standing = table.rows[number]
        mine, row = own(table, standing, target)
        configs = [config for config in candidates(mine, row, near=near) if _differs(row, config, found[number])]
        works_of = tuple(found[number])
        made.append(Task(table=mine, standing=standing, row=row, works=works_of, configs=tuple(configs)))
    return made


def _differs(row: Row, config: Config, works: Sequence[Workload]) -> bool:
    """Whether a config is not cut to another's: `verify_split` has no tile larger than all rows of a request."""
    most = padded(max(work.new * work.attention.group for work in works))
    return row.kernel != "verify_split" or config == row.config or (config["block_m"] or 0) <= most


def idle(table: Table, target: Target, busy: Sequence[Task], *, kernel: str) -> list[Row]:
    """Return the rows that a kernel may be launched by on a target, but is by none of the tasks' workloads."""
    name, busy_rows = names_of(target)[0], [task.standing for task in busy]
    rows = [row for row in table.rows if row.kernel == kernel and not any(row is other for other in busy_rows)]
    return [row for row in rows if any(names[0] == name for names, _ in served(table, row))]


def launched(work: Workload, target: Target) -> dict[str, Callable[[], object]]:
    """Return the kernels that a workload is launched by, under one policy or another, and how each asks for its config.

    One that says its number of splits is of no policy, and launches none here.
    """
    if work.splits is not None:
        return {}
    spec, rows = work.attention, work.new * work.attention.group
    dtypes: dict[str, Any] = {"compute": compute_dtype(work.dtype, work.kv_dtype), "kv_dtype": work.kv_dtype}
    if work.mode == "decode":
        packs = target.is_hopper or target.kind == INTERPRETER
        tile = shares_tile([spec], mla=work.mla, kv_dtype=work.kv_dtype) if packs else HEAD_TILE
        fp32 = dtypes["compute"] == torch.float32
        split: dict[str, Callable[[], object]] = {
            "decode_split": lambda: decode.SplitConfig.choose(spec, target, fp32=fp32)
        }
        if work.mla and tile == LARGE_TILE:
            if target.is_hopper and decode_latent_hopper.is_for(spec, _view(work)):
                return split  # that kernel has one tile and one way to be launched: there is nothing to choose
            return {**split, "decode_latent": lambda: decode_latent.LatentConfig.choose(target)}
        how: dict[str, Any] = {**dtypes, "held": _held(work, target, tile), "head_tile": tile}
        name = "decode_groups" if tile == LARGE_TILE else "decode_shares"
        return {**split, name: lambda: decode_shares.SharesConfig.choose(spec, target, **how)}
    if work.mode == "verify":
        how = {**dtypes, "masked": False, "rows": rows}  # masks of drafts leave cached keys alone
        split = {"verify_split": lambda: verify.VerifyConfig.choose(spec, target, **how)}
        if target.is_hopper and verify_shares_hopper.is_for(spec, _view(work), q_dtype=work.dtype, rows=rows):
            return split  # nor is what this one is launched with
        return {**split, "verify_shares": lambda: verify_shares.VerifySharesConfig.choose(spec, target, **how)}
    one_pass = work.mode == "unified"
    many = one_pass or work.new > extend_hopper.FEW_QUERIES
    if target.is_hopper and many and extend_hopper.has_tiles(spec, _view(work), work.dtype):
        return {"extend_hopper": lambda: extend_hopper.HopperConfig.choose(spec, target)}
    most = None if one_pass else work.new
    return {"extend": lambda: extend.ExtendConfig.choose(spec, target, **dtypes, masked=False, most=most)}


def _held(work: Workload, target: Target, tile: int) -> int:
    """Return how many programs of even shares a multiprocessor holds of a decode, `tile` heads a program."""
    spec = work.attention
    ctx = SplitContext(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        v_dim=spec.v_dim,
        mla=work.mla,
        context_len=max(work.lens),
        multiprocessors=target.multiprocessors,
        head_tile=tile,
        requests=work.requests,
        longest=max(values_seen(work.lens, spec.sight, behind=1)),
        kv_itemsize=work.kv_dtype.itemsize,
    )
    return target.held(Balanced().shares(ctx) * spec.kv_heads * head_tiles(spec.group, tile))


def _view(work: Workload) -> KVView:
    """Return a view as a workload's pool has them, without memory behind it."""
    spec = work.attention
    k, v = (torch.empty(2, spec.kv_heads, n, dtype=work.kv_dtype, device="meta") for n in (spec.qk_dim, spec.v_dim))
    return KVView(k=k, v=k[..., : spec.v_dim] if work.mla else v, v_in_k=work.mla)


def asked(table: Table, choose: Callable[[], object]) -> Row:
    """Return the row of a table that a kernel is given when it chooses."""
    with using(replace(table)) as watched:
        choose()
    (row,) = watched.taken
    return row


def own(table: Table, row: Row, target: Target) -> tuple[Table, Row]:
    """Return a table in which a row's shapes have a row for this target alone, and that row.

    Where the row is for other devices too, a copy of it goes before it.
    """
    name = names_of(target)[0]
    if row.on == (name,):
        return table, row
    mine = replace(row, on=(name,), measured=None, unmeasured=f"as on {', '.join(row.on)}")
    return table.changed(row, mine, row), mine


def candidates(table: Table, row: Row, *, near: bool) -> list[Config]:
    """Return a row's config and what is tried instead: of its kernel's grid all that the table's checks let pass."""
    grid, shapes = GRIDS[row.kernel], list(served(table, row))
    if near:
        tried = [row.config | {field: value} for field in row.config for value in grid[field]]
    else:
        tried = [dict(zip(row.config, values, strict=True)) for values in product(*(grid[x] for x in row.config))]
    others = [replace(row, config=config) for config in tried if config != row.config]
    right = [one for one in others if all(refused(one, names, shape) is None for names, shape in shapes)]
    return [row.config, *(one.config for one in right)]
