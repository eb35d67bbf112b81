"""Variants of kernels with one query a request: decode's splits, shares and merges, and scores."""

from __future__ import annotations

import torch

from attnlab.inspect.resources.compiling import Variant
from attnlab.inspect.resources.shapes import FOR_HOPPER, Shape
from attnlab.kernels import decode, decode_latent, decode_latent_hopper, decode_shares, scores
from attnlab.kernels.launch import stored
from attnlab.kernels.target import Target
from attnlab.plan.tiles import HEAD_TILE

SCORE_POINTERS = {"out_ptr": torch.float32, "tokens_ptr": torch.int64, "visible_ptr": torch.uint8}


def split_variant(shape: Shape, target: Target, *, timed: bool = False) -> Variant:
    """Return a decode's split kernel, as its launcher would compile it."""
    constants, options = decode.timed_split_constants(
        spec=shape.spec(), view=shape.view(), target=target, q_dtype=shape.dtype, timed=timed
    )
    floats = {"q_ptr": shape.dtype, "k_ptr": shape.kv_dtype, "v_ptr": shape.kv_dtype, "aux_ptr": torch.float32}
    states = dict.fromkeys(("acc_ptr", "max_ptr", "sum_ptr"), torch.float32)
    pointers = {**floats, **states, "slots_ptr": torch.int64, "times_ptr": torch.int64}
    return Variant(
        name=f"split: {shape.name}" + ", timed" * timed,
        kernel=decode._decode_split_kernel,
        pointers=pointers,
        constants=constants if timed else {**constants, "times_ptr": None},
        options=options,
    )


def shares_variant(
    shape: Shape, target: Target, *, held: int = 4, head_tile: int = HEAD_TILE, keeps: bool = False, uncut: bool = False
) -> Variant:
    """Return a decode over even shares, as its launcher would compile it."""
    constants, options = decode_shares.shares_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        q_dtype=shape.dtype,
        has_lse=True,
        held=held,
        head_tile=head_tile,
        keeps=keeps,
        uncut=uncut,
    )
    k, v = stored(shape.view())
    pointers = {**split_variant(shape, target).pointers, "k_ptr": k.dtype, "v_ptr": v.dtype}
    return Variant(
        name=f"shares: {shape.name}"
        + (f", {head_tile} heads a program" if head_tile != HEAD_TILE else "")
        + (f", {held} a multiprocessor" if held != 4 else "")
        + ", states kept" * keeps,
        kernel=decode_shares._decode_shares_kernel,
        pointers={**pointers, "out_ptr": shape.dtype, "lse_ptr": torch.float32, "sinks_ptr": shape.dtype},
        constants={**constants, "TIMES": False, "times_ptr": None},
        options=options,
    )


def latent_variant(shape: Shape, target: Target) -> Variant:
    """Return a decode of latent rows over even shares, as its launcher would compile it."""
    constants, options = decode_latent.latent_constants(
        spec=shape.spec(), view=shape.view(), target=target, q_dtype=shape.dtype, has_lse=True, keeps=False
    )
    shares = shares_variant(shape, target)
    return Variant(
        name=f"latent: {shape.name}",
        kernel=decode_latent._decode_latent_kernel,
        pointers=shares.pointers,
        constants={**constants, "TIMES": False, "times_ptr": None},
        options=options,
    )


def latent_hopper_variant(shape: Shape, target: Target, *, keeps: bool = False) -> Variant:
    """Return the same by groups of warps, which trade the registers that each thread begins with."""
    constants, options = decode_latent_hopper.latent_hopper_constants(
        spec=shape.spec(), view=shape.view(), target=target, q_dtype=shape.dtype, has_lse=True, keeps=keeps
    )
    return Variant(
        name=f"latent{FOR_HOPPER}{shape.name}" + ", states kept" * keeps,
        kernel=decode_latent_hopper._decode_latent_hopper_kernel,
        pointers=shares_variant(shape, target).pointers,
        constants={**constants, "TIMES": False, "times_ptr": None},
        options=options,
    )


def scores_variant(shape: Shape, target: Target) -> Variant:
    """Return scores, as its launcher would compile it."""
    split = split_variant(shape, target)
    shared = {name: split.constants[name] for name in scores.SHARED}
    return Variant(
        name=f"scores: {shape.name}",
        kernel=scores._scores_kernel,
        pointers={**split.pointers, **SCORE_POINTERS},
        constants={**shared, "KV_HEADS": shape.kv_heads},
        options=split.options,
    )


def merge_variant(shape: Shape, target: Target, *, shared_ranges: int | None = None) -> Variant:
    """Return a decode's merge, as its launcher would compile it."""
    shared = shared_ranges is not None
    names = ("acc_ptr", "max_ptr", "sum_ptr", "sinks_ptr", "lse_ptr")
    spec = shape.spec()
    tiles = decode.MergeTiles.choose(spec, target, persistent=shared, ranges=shared_ranges or 1, owners=64)
    constants, options = decode.merge_constants(spec=spec, target=target, has_lse=True, persistent=shared, tiles=tiles)
    return Variant(
        name=f"merge{f' of shares, {shared_ranges} a request' * shared}: {shape.name}",
        kernel=decode._decode_merge_kernel,
        pointers={**dict.fromkeys(names, torch.float32), "out_ptr": shape.dtype},
        constants=constants,
        options=options,
    )
