"""Variants of kernels with several queries a request: extend and verify."""

from __future__ import annotations

import torch

from attnlab.inspect.resources.compiling import Variant
from attnlab.inspect.resources.shapes import FOR_HOPPER, Shape
from attnlab.kernels import extend, extend_hopper, verify, verify_shares, verify_shares_hopper
from attnlab.kernels.launch import stored
from attnlab.kernels.target import Target
from attnlab.memory.pool import compute_dtype

NEW_ALONE = " of new keys alone"
"""Added to the names of variants whose mask leaves cached keys alone."""


def extend_variant(
    shape: Shape, target: Target, *, one_pass: bool = False, most: int | None = None, cached_visible: bool = False
) -> Variant:
    """Return an extend, as its launcher would compile it."""
    dtypes = {"compute": compute_dtype(shape.dtype, shape.kv_dtype), "kv_dtype": shape.kv_dtype}
    constants, options = extend.extend_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        q_dtype=shape.dtype,
        config=extend.ExtendConfig.choose(shape.spec(), target, **dtypes, masked=shape.masked, most=most),
        masked=shape.masked,
        cached_visible=cached_visible,
        ordered=not shape.masked,
        one_pass=one_pass,
        parts="all",
        has_sinks=shape.sinks,
        has_lse=shape.sinks,
    )
    return Variant(
        name=f"extend{' in one pass' * one_pass}: {shape.name}"
        + (f", {most} queries" if most else "")
        + NEW_ALONE * cached_visible,
        kernel=extend._extend_kernel,
        pointers=_several(shape),
        constants=constants,
        options=options,
    )


def extend_hopper_variant(
    shape: Shape, target: Target, *, one_pass: bool = False, run: int = 1, gathered: bool = False
) -> Variant:
    """Return an extend for Hopper, as its launcher would compile it.

    `run`: that of the layout, in pages of so many slots; `gathered`: no box can be laid over the call's own keys.
    """
    constants, options = extend_hopper.hopper_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        q_dtype=shape.dtype,
        one_pass=one_pass,
        parts="all",
        has_sinks=shape.sinks,
        has_lse=shape.sinks,
        all_narrow=True,
    )
    rows = constants["BLOCK_N"]
    of_cached, of_new = extend_hopper.reads_boxes(shape.spec(), run=run, one_pass=one_pass, parts="all", block_n=rows)
    k, v = (shape.kv_dtype, rows, shape.qk_dim), (shape.kv_dtype, rows, shape.v_dim)
    cached = {"k_boxes": k, "v_boxes": v} if of_cached else {}
    new = {"k_new_boxes": k, "v_new_boxes": v} if of_new and not gathered else {}
    boxes = {**cached, **new}
    unused = {name: None for name in ("k_boxes", "v_boxes", "k_new_boxes", "v_new_boxes") if name not in boxes}
    return Variant(
        name=f"extend{' in one pass' * one_pass}{FOR_HOPPER}{shape.name}"
        + f", pages of {run}" * (run > 1)
        + ", gathered" * gathered,
        kernel=extend_hopper._extend_hopper_kernel,
        pointers=_several(shape),
        constants={**constants, **unused},
        options=options,
        boxes=boxes,
    )


def verify_variant(shape: Shape, target: Target, *, rows: int | None = None) -> Variant:
    """Return a verify's split kernel, as its launcher would compile it."""
    constants, options = verify.verify_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        q_dtype=shape.dtype,
        rows=rows,
        masked=shape.masked,
    )
    return Variant(
        name=f"verify: {shape.name}" + (f", {rows} rows" if rows else ""),
        kernel=verify._verify_split_kernel,
        pointers=_several(shape),
        constants=constants,
        options=options,
    )


def verify_shares_variant(shape: Shape, target: Target, *, rows: int) -> Variant:
    """Return a verify over even shares, as its launcher would compile it."""
    constants, options = verify_shares.verify_shares_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        q_dtype=shape.dtype,
        rows=rows,
        masked=shape.masked,
        ordered=not shape.masked,
        new_masked=shape.masked,
        read_new=True,
        has_lse=True,
        keeps=False,
    )
    k, v = stored(shape.view())
    return Variant(
        name=f"verify shares: {shape.name}, {rows} rows",
        kernel=verify_shares._verify_shares_kernel,
        pointers={**_several(shape), "k_ptr": k.dtype, "v_ptr": v.dtype},
        constants=constants,
        options=options,
    )


def verify_shares_hopper_variant(shape: Shape, target: Target, *, keeps: bool = False) -> Variant:
    """Return the same as groups of warps compute it, as its launcher would compile it."""
    constants, options = verify_shares_hopper.verify_shares_hopper_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        new_masked=shape.masked,
        has_lse=True,
        keeps=keeps,
    )
    return Variant(
        name=f"verify shares{FOR_HOPPER}{shape.name}" + ", states kept" * keeps,
        kernel=verify_shares_hopper._verify_shares_hopper_kernel,
        pointers=_several(shape),
        constants=constants,
        options=options,
    )


def verify_merge_variant(shape: Shape, target: Target) -> Variant:
    """Return a verify's merge, as its launcher would compile it."""
    constants, options = verify.verify_merge_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        q_dtype=shape.dtype,
        ordered=not shape.masked,
        masked=shape.masked,
        read_new=True,
        has_lse=shape.sinks,
        skips_alone=False,
    )
    return Variant(
        name=f"verify merge: {shape.name}",
        kernel=verify._verify_merge_kernel,
        pointers=_several(shape),
        constants=constants,
        options=options,
    )


def _several(shape: Shape) -> dict[str, torch.dtype]:
    """Return the pointer types of kernels with several queries a request."""
    stored = dict.fromkeys(("k_ptr", "v_ptr"), shape.kv_dtype)
    given = dict.fromkeys(("q_ptr", "k_new_ptr", "v_new_ptr", "out_ptr"), shape.dtype)
    names = ("lse_ptr", "sinks_ptr", "aux_ptr", "acc_ptr", "max_ptr", "sum_ptr")
    lists = {"slots_ptr": torch.int64, "mask_indptr_ptr": torch.int64, "bits_ptr": torch.uint8}
    return {**stored, **given, **dict.fromkeys(names, torch.float32), **lists}
