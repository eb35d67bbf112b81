"""Every kernel variant that a target can run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnlab.inspect.resources.compiling import Variant
from attnlab.inspect.resources.one_query import (
    latent_hopper_variant,
    latent_variant,
    merge_variant,
    scores_variant,
    shares_variant,
    split_variant,
)
from attnlab.inspect.resources.several_queries import (
    extend_hopper_variant,
    extend_variant,
    verify_merge_variant,
    verify_shares_hopper_variant,
    verify_shares_variant,
    verify_variant,
)
from attnlab.inspect.resources.shapes import (
    BYTES,
    FP8,
    GQA,
    LARGE,
    LATENT,
    MERGED,
    MHA,
    MLA,
    MLA_PAGES,
    NARROW,
    PAGES,
    SHAPES,
    SHARED,
    SHORT,
    TREE,
    TREE_SINKS,
    WINDOW,
)
from attnlab.kernels import extend_hopper, index, lane_counts, lane_lists
from attnlab.kernels.target import Target
from attnlab.plan import size_rules
from attnlab.plan.policies import seed, tile
from attnlab.plan.tiles import LARGE_TILE


def variants(target: Target) -> Iterator[Variant]:
    """Yield every kernel variant that this target can run; a merge for every shape that changes its text."""
    for shape in SHAPES:
        if target.has_fp8 or shape.kv_dtype != FP8:
            yield split_variant(shape, target)
    for shape in SHAPES:
        if shape.mod is not None or shape.name in MERGED:
            yield merge_variant(shape, target)
    for shape in SHAPES:
        if (target.has_fp8 or shape.kv_dtype != FP8) and shape.name in SHARED:
            yield shares_variant(shape, target)
    if target.is_hopper:
        for shape, held in ((GQA, 1), (BYTES, 2), (MLA, 1)):
            yield shares_variant(shape, target, held=held)
        for shape in LARGE:
            yield shares_variant(shape, target, head_tile=LARGE_TILE)
        yield shares_variant(SHORT, target, held=8, uncut=True)
        yield shares_variant(GQA, target, keeps=True)
        for shape in LATENT:
            yield latent_variant(shape, target)
        for shape in (MLA, MLA_PAGES):
            yield latent_hopper_variant(shape, target)
        yield latent_hopper_variant(MLA, target, keeps=True)
    for ranges in (1, 66):
        yield merge_variant(MLA, target, shared_ranges=ranges)
    for shape in (GQA, MHA, MLA):
        yield scores_variant(shape, target)
    for shape in SHAPES:
        if target.has_fp8 or shape.kv_dtype != FP8:
            yield extend_variant(shape, target)
            yield verify_variant(shape, target)
    for shape in (GQA, MLA):
        yield extend_variant(shape, target, one_pass=True)
    if target.is_hopper:
        for shape in SHAPES:
            if not shape.masked and extend_hopper.has_tiles(shape.spec(), shape.view(), shape.dtype):
                yield extend_hopper_variant(shape, target)
        yield extend_hopper_variant(GQA, target, run=64)
        yield extend_hopper_variant(GQA, target, gathered=True)
        yield extend_hopper_variant(GQA, target, one_pass=True)
        yield extend_hopper_variant(GQA, target, one_pass=True, run=64)
    for most in (16, 64):
        yield extend_variant(GQA, target, most=most)
    for rows in (16, 32):
        yield verify_variant(GQA, target, rows=rows)
    yield verify_variant(MLA, target, rows=16)
    yield extend_variant(TREE, target, cached_visible=True)
    for shape in SHAPES:
        if (target.has_fp8 or shape.kv_dtype != FP8) and shape.name in (*SHARED, *MERGED, WINDOW.name):
            yield verify_shares_variant(shape, target, rows=64)
    for shape in (GQA, WINDOW, MLA):
        yield verify_shares_variant(shape, target, rows=16)
    yield verify_shares_variant(GQA, target, rows=32)
    yield verify_shares_variant(TREE, target, rows=64)
    if target.is_hopper:
        for shape in (GQA, TREE_SINKS, NARROW, PAGES):
            yield verify_shares_hopper_variant(shape, target)
        yield verify_shares_hopper_variant(GQA, target, keeps=True)
    for shape in SHAPES:
        if shape.mod is not None or shape.name in MERGED:
            yield verify_merge_variant(shape, target)
    names = (
        "rows_ptr",
        "own_rows_ptr",
        "ids_ptr",
        "pages_ptr",
        "translated_ptr",
        "joined_ptr",
        "offsets_ptr",
        "slots_ptr",
        "write_ptr",
    )
    long = dict.fromkeys(names, torch.int64)
    for name, kernel in index.KERNELS.items():
        lists = dict.fromkeys(("first_ptr", "second_ptr"), torch.int64) if name == "join" else {}
        more = {"drafts": {"TRANSLATED": True}, "pad": {"PDL": target.has_pdl}}
        constants = {"BLOCK": 512, **more.get(name, {})}
        yield Variant(
            name=name, kernel=kernel, pointers={**long, **lists}, constants=constants, options={"num_warps": 4}
        )
    yield from _lane_variants(long, target)
    yield Variant(
        name="seed counts",
        kernel=seed._seed_counts_kernel,
        pointers={},
        constants={"BLOCK": 256},
        options={"num_warps": 4},
    )


def _lane_variants(pointers: dict[str, torch.dtype], target: Target) -> Iterator[Variant]:
    """Yield what plans a decode's lane: its sums under every rule, and what is written under each kind of cut."""
    options = {"num_warps": 4}
    rules = {"seed": seed._seed_sizes, "static": size_rules.same_count, "tile": tile._tiles}
    for name, rule in rules.items():
        constants = {"SIZES": rule, "BLOCK": lane_counts.REQUESTS, "PDL": target.has_pdl}
        yield Variant(
            name=f"count sizes: {name}",
            kernel=lane_counts.count_sizes_kernel,
            pointers=pointers,
            constants=constants,
            options=options,
        )
    yield Variant(
        name="count shares",
        kernel=lane_counts.count_shares_kernel,
        pointers=pointers,
        constants={"BLOCK": lane_counts.REQUESTS, "PDL": target.has_pdl},
        options=options,
    )
    for shared in (False, True):
        yield Variant(
            name=f"write lane: {'shares' if shared else 'sizes'}",
            kernel=lane_lists.write_lane_kernel,
            pointers=pointers,
            constants={
                "new_indptr_ptr": None,
                "SHARED": shared,
                "ENTRIES": lane_lists.ENTRIES,
                **lane_lists.range_constants(GQA.kv_heads),
                "PDL": target.has_pdl,
            },
            options=options,
        )
