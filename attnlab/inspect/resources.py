"""Compile every kernel for GPUs that are not there: `ATTNLAB_INTERPRET=0 python -m attnlab.inspect.resources`.

Each variant that models of data/models.json launch is compiled as its launcher would compile it, pointers and
strides marked as divisible by 16. Registers, spills and shared memory come out of the binary. The table lies in
data/kernel_resources.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab.assets import data_path
from attnlab.checks import require
from attnlab.kernels import (
    decode,
    decode_latent,
    decode_shares,
    extend,
    extend_hopper,
    index,
    lane_counts,
    lane_lists,
    scores,
    verify,
    verify_shares,
)
from attnlab.kernels.launch import merge_options, stored
from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView
from attnlab.mods.registry import score_mods
from attnlab.plan import size_rules
from attnlab.plan.policies import seed, tile
from attnlab.spec import AttentionSpec

TARGETS = {
    "sm_80": Target(kind="cuda", arch=80, multiprocessors=108),
    "sm_90": Target(kind="cuda", arch=90, multiprocessors=132),
    "sm_100": Target(kind="cuda", arch=100, multiprocessors=148),
    "gfx942": Target(kind="hip"),
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
SCALARS = {"scale": "fp32", "softcap": "fp32", "scale_cached": "fp32", "v_scale": "fp32"}
TABLE = "kernel_resources.md"
SCORE_POINTERS = {"out_ptr": torch.float32, "tokens_ptr": torch.int64, "visible_ptr": torch.uint8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compilation of a kernel: pointer types by argument, compile-time values, launch options."""

    name: str
    kernel: Any
    pointers: dict[str, torch.dtype]
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled variant takes: registers and spilled bytes per thread, shared memory in bytes per block."""

    variant: str
    target: str
    registers: int
    spills: int
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An attention shape to compile, and what its scores undergo. `masked`: extend and verify come with a mask."""

    name: str
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    page_size: int = 1
    mla: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    temperature_len: int | None = None
    mod: str | None = None
    sinks: bool = False
    masked: bool = False

    def spec(self) -> AttentionSpec:
        """Return the attention of this shape."""
        return AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            scale=self.qk_dim**-0.5,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            temperature_len=self.temperature_len,
            mod=None if self.mod is None else score_mods.get(self.mod),
            has_sinks=self.sinks,
        )

    def view(self) -> KVView:
        """Return a view without memory behind it."""
        pages = (2,) if self.page_size == 1 else (2, self.page_size)
        k = torch.empty(*pages, self.kv_heads, self.qk_dim, dtype=self.kv_dtype, device="meta")
        v = k[..., : self.v_dim] if self.mla else torch.empty_like(k[..., : self.v_dim])
        return KVView(k=k, v=v, v_in_k=self.mla)


FP8 = torch.float8_e4m3fn
GQA = Shape(name="gqa 4 x 128 (Llama-3)", heads=32, kv_heads=8, qk_dim=128, v_dim=128)
MHA = Shape(name="mha 128 (OLMo-2)", heads=32, kv_heads=32, qk_dim=128, v_dim=128)
MLA = Shape(name="mla 128 x 576/512 (DeepSeek-V3)", heads=128, kv_heads=1, qk_dim=576, v_dim=512, mla=True)
HALF, FP32 = torch.float16, torch.float32
EVERYTHING: dict[str, Any] = {
    "window": 4096,
    "softcap": 30.0,
    "temperature_len": 1024,
    "mod": "relative_bias",
    "sinks": True,
    "masked": True,
}
WINDOW = replace(GQA, name="gqa 4 x 128, window (Mistral)", window=4096)
TREE = replace(GQA, name="gqa 4 x 128, draft tree", masked=True)
SHAPES = [
    GQA,
    replace(GQA, name="gqa 4 x 128, fp8", kv_dtype=FP8),
    replace(GQA, name="gqa 4 x 128, fp16", dtype=HALF, kv_dtype=HALF),
    replace(GQA, name="gqa 4 x 128, fp32", dtype=FP32, kv_dtype=FP32),
    replace(GQA, name="gqa 4 x 128, pages of 16", page_size=16),
    replace(GQA, name="gqa 8 x 128, every feature", heads=64, **EVERYTHING),
    WINDOW,
    replace(GQA, name="gqa 5 x 128, chunk, temperature (Llama-4)", heads=40, chunk=8192, temperature_len=8192),
    replace(GQA, name="gqa 6 x 128, cap, temperature (Grok)", heads=48, softcap=30.0, temperature_len=1024),
    TREE,
    Shape(
        name="gqa 8 x 64, window, sinks (gpt-oss)", heads=64, kv_heads=8, qk_dim=64, v_dim=64, window=128, sinks=True
    ),
    Shape(name="gqa 3 x 64 (SmolLM2)", heads=9, kv_heads=3, qk_dim=64, v_dim=64, dtype=HALF, kv_dtype=HALF),
    Shape(name="gqa 29 x 64 (Falcon-180B)", heads=232, kv_heads=8, qk_dim=64, v_dim=64),
    Shape(name="gqa 2 x 256 (Gemma)", heads=8, kv_heads=4, qk_dim=256, v_dim=256),
    Shape(
        name="gqa 2 x 256, window, cap (Gemma-2)", heads=8, kv_heads=4, qk_dim=256, v_dim=256, window=4096, softcap=50.0
    ),
    Shape(name="gqa 8 x 192/128", heads=64, kv_heads=8, qk_dim=192, v_dim=128),
    MHA,
    replace(MHA, name="mha 96 (Phi-3)", qk_dim=96, v_dim=96),
    replace(MHA, name="mha 80 (StableLM)", qk_dim=80, v_dim=80),
    replace(MHA, name="mha 128, every feature", **EVERYTHING),
    MLA,
    replace(MLA, name="mla 128 x 576/512, fp8", kv_dtype=FP8),
    replace(MLA, name="mla 128 x 576/512, fp32", dtype=FP32, kv_dtype=FP32),
    Shape(name="mla 20 x 288/256", heads=20, kv_heads=1, qk_dim=288, v_dim=256, mla=True),
    replace(MLA, name="mla 20 x 288/256, fp32", heads=20, qk_dim=288, v_dim=256, dtype=FP32, kv_dtype=FP32),
]
NEW_ALONE = " of new keys alone"
"""Added to the names of variants whose mask leaves cached keys alone."""
FOR_HOPPER = " for Hopper: "
"""Between kind and shape of variants that are chosen, and compiled, for compute capability 9.0 alone."""
SHARED = (
    *("gqa 4 x 128, fp8", "gqa 4 x 128, fp32", "gqa 8 x 128, every feature", "mha 80 (StableLM)", MHA.name),
    GQA.name,
)
"""Shapes whose decode and verify over even shares are compiled: their loops are those of the split kernels."""
LATENT = (
    MLA,
    replace(
        MLA,
        name="mla 128 x 576/512, fp16, pages of 64, cap, temperature, sinks",
        dtype=HALF,
        kv_dtype=HALF,
        page_size=64,
        softcap=30.0,
        temperature_len=1024,
        sinks=True,
    ),
    Shape(name="mla 40 x 288/256 (MiniCPM3)", heads=40, kv_heads=1, qk_dim=288, v_dim=256, mla=True),
)
"""Shapes whose decode over even shares packs more heads, on a Hopper GPU."""
MERGED = ("gqa 4 x 128 (Llama-3)", "gqa 3 x 64 (SmolLM2)", "gqa 2 x 256 (Gemma)", "mha 80 (StableLM)", MLA.name)


def variants(target: Target) -> Iterator[Variant]:
    """Yield every kernel variant that this target can run; a merge for every shape that changes its text."""
    for shape in SHAPES:
        if target.has_fp8 or shape.kv_dtype != FP8:
            yield _split_variant(shape, target)
    for shape in SHAPES:
        if shape.mod is not None or shape.name in MERGED:
            yield _merge_variant(shape, target)
    for shape in SHAPES:
        if (target.has_fp8 or shape.kv_dtype != FP8) and shape.name in SHARED:
            yield _shares_variant(shape, target)
    for shape in LATENT if target.is_hopper else ():
        yield _latent_variant(shape, target)
    for ranges in (1, 66):
        yield _merge_variant(MLA, target, shared_ranges=ranges)
    for shape in (GQA, MHA, MLA):
        yield _scores_variant(shape, target)
    for shape in SHAPES:
        if target.has_fp8 or shape.kv_dtype != FP8:
            yield _extend_variant(shape, target)
            yield _verify_variant(shape, target)
    for shape in (GQA, MLA):
        yield _extend_variant(shape, target, one_pass=True)
    if target.is_hopper:
        for shape in SHAPES:
            if not shape.masked and extend_hopper.has_tiles(shape.spec(), shape.view(), shape.dtype):
                yield _extend_hopper_variant(shape, target)
        yield _extend_hopper_variant(GQA, target, one_pass=True)
    for most in (16, 64):
        yield _extend_variant(GQA, target, most=most)
    for rows in (16, 32):
        yield _verify_variant(GQA, target, rows=rows)
    yield _verify_variant(MLA, target, rows=16)
    yield _extend_variant(TREE, target, cached_visible=True)
    for shape in SHAPES:
        if (target.has_fp8 or shape.kv_dtype != FP8) and shape.name in (*SHARED, *MERGED, WINDOW.name):
            yield _verify_shares_variant(shape, target, rows=64)
    for shape in (GQA, WINDOW, MLA):
        yield _verify_shares_variant(shape, target, rows=16)
    yield _verify_shares_variant(TREE, target, rows=64)
    for shape in SHAPES:
        if shape.mod is not None or shape.name in MERGED:
            yield _verify_merge_variant(shape, target)
    names = (
        "rows_ptr",
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
        constants = {"BLOCK": 512} | ({"TRANSLATED": True} if name == "drafts" else {})
        yield Variant(
            name=name, kernel=kernel, pointers={**long, **lists}, constants=constants, options={"num_warps": 4}
        )
    yield from _lane_variants(long)
    yield Variant(
        name="seed counts",
        kernel=seed._seed_counts_kernel,
        pointers={},
        constants={"BLOCK": 256},
        options={"num_warps": 4},
    )


def _lane_variants(pointers: dict[str, torch.dtype]) -> Iterator[Variant]:
    """Yield what plans a decode's lane: its sums under every rule, and what is written under each kind of cut."""
    options = {"num_warps": 4}
    rules = {"seed": seed._seed_sizes, "static": size_rules.same_count, "tile": tile._tiles}
    for name, rule in rules.items():
        constants = {"SIZES": rule, "BLOCK": lane_counts.REQUESTS}
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
        constants={"BLOCK": lane_counts.REQUESTS},
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
            },
            options=options,
        )


def _split_variant(shape: Shape, target: Target) -> Variant:
    constants, options = decode.split_constants(
        spec=shape.spec(), view=shape.view(), target=target, q_dtype=shape.dtype
    )
    floats = {"q_ptr": shape.dtype, "k_ptr": shape.kv_dtype, "v_ptr": shape.kv_dtype, "aux_ptr": torch.float32}
    states = dict.fromkeys(("acc_ptr", "max_ptr", "sum_ptr"), torch.float32)
    return Variant(
        name=f"split: {shape.name}",
        kernel=decode._decode_split_kernel,
        pointers={**floats, **states, "slots_ptr": torch.int64},
        constants={**constants, "TIMES": False, "times_ptr": None},
        options=options,
    )


def _shares_variant(shape: Shape, target: Target, *, held: int = 4) -> Variant:
    constants, options = decode_shares.shares_constants(
        spec=shape.spec(), view=shape.view(), target=target, q_dtype=shape.dtype, has_lse=True, held=held
    )
    k, v = stored(shape.view())
    pointers = {**_split_variant(shape, target).pointers, "k_ptr": k.dtype, "v_ptr": v.dtype}
    return Variant(
        name=f"shares: {shape.name}" + (f", {held} a multiprocessor" if held < 4 else ""),
        kernel=decode_shares._decode_shares_kernel,
        pointers={**pointers, "out_ptr": shape.dtype, "lse_ptr": torch.float32, "sinks_ptr": shape.dtype},
        constants={**constants, "TIMES": False, "times_ptr": None},
        options=options,
    )


def _latent_variant(shape: Shape, target: Target) -> Variant:
    constants, options = decode_latent.latent_constants(
        spec=shape.spec(), view=shape.view(), target=target, q_dtype=shape.dtype, has_lse=True
    )
    shares = _shares_variant(shape, target)
    return Variant(
        name=f"latent: {shape.name}",
        kernel=decode_latent._decode_latent_kernel,
        pointers=shares.pointers,
        constants={**constants, "TIMES": False, "times_ptr": None},
        options=options,
    )


def _scores_variant(shape: Shape, target: Target) -> Variant:
    split = _split_variant(shape, target)
    shared = {name: split.constants[name] for name in scores.SHARED}
    return Variant(
        name=f"scores: {shape.name}",
        kernel=scores._scores_kernel,
        pointers={**split.pointers, **SCORE_POINTERS},
        constants={**shared, "KV_HEADS": shape.kv_heads},
        options=split.options,
    )


def _extend_variant(
    shape: Shape, target: Target, *, one_pass: bool = False, most: int | None = None, cached_visible: bool = False
) -> Variant:
    constants, options = extend.extend_constants(
        spec=shape.spec(),
        view=shape.view(),
        target=target,
        q_dtype=shape.dtype,
        most=most,
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


def _extend_hopper_variant(shape: Shape, target: Target, *, one_pass: bool = False) -> Variant:
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
    return Variant(
        name=f"extend{' in one pass' * one_pass}{FOR_HOPPER}{shape.name}",
        kernel=extend_hopper._extend_hopper_kernel,
        pointers=_several(shape),
        constants=constants,
        options=options,
    )


def _verify_variant(shape: Shape, target: Target, *, rows: int | None = None) -> Variant:
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


def _verify_shares_variant(shape: Shape, target: Target, *, rows: int) -> Variant:
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
    )
    k, v = stored(shape.view())
    return Variant(
        name=f"verify shares: {shape.name}, {rows} rows",
        kernel=verify_shares._verify_shares_kernel,
        pointers={**_several(shape), "k_ptr": k.dtype, "v_ptr": v.dtype},
        constants=constants,
        options=options,
    )


def _verify_merge_variant(shape: Shape, target: Target) -> Variant:
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


def _merge_variant(shape: Shape, target: Target, *, shared_ranges: int | None = None) -> Variant:
    shared = shared_ranges is not None
    names = ("acc_ptr", "max_ptr", "sum_ptr", "sinks_ptr", "lse_ptr")
    return Variant(
        name=f"merge{f' of shares, {shared_ranges} a request' * shared}: {shape.name}",
        kernel=decode._decode_merge_kernel,
        pointers={**dict.fromkeys(names, torch.float32), "out_ptr": shape.dtype},
        constants=decode.merge_constants(
            spec=shape.spec(), target=target, has_lse=True, persistent=shared, ranges=shared_ranges or 1, owners=64
        ),
        options=merge_options(target, num_warps=4),
    )


def compile_variant(variant: Variant, target_name: str) -> Resources:
    """Compile for a target and read what the binary takes; raise Triton's CompilationError where it fails."""
    require(not INTERPRETED, "kernels are interpreted in this process; start it with ATTNLAB_INTERPRET=0", RuntimeError)
    binary = _triton.triton.compile(
        _source(variant), target=_gpu_target(TARGETS[target_name]), options=dict(variant.options)
    )
    registers, spills = _usage(binary.asm)
    return Resources(
        variant=variant.name, target=target_name, registers=registers, spills=spills, shared=binary.metadata.shared
    )


def ptx(variant: Variant, kernel: Any = None) -> str:
    """Return a variant's text for sm_90; with `kernel`, that of another kernel that takes the same arguments."""
    source = _source(variant if kernel is None else replace(variant, kernel=kernel))
    binary = _triton.triton.compile(source, target=_gpu_target(TARGETS["sm_90"]), options=dict(variant.options))
    return str(binary.asm["ptx"])


def serialized(variant: Variant) -> bool:
    """Whether ptxas, for sm_90, makes each tensor core instruction wait for the one before: it says so in passing."""
    tool = Path(_triton.triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx(variant), encoding="utf-8")
        command = [str(tool), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return "serialized" in said


def ttgir(variant: Variant) -> str:
    """Return a variant's text for sm_90 as Triton's own passes leave it: layouts, buffers, the order of copies."""
    binary = _triton.triton.compile(
        _source(variant), target=_gpu_target(TARGETS["sm_90"]), options=dict(variant.options)
    )
    return str(binary.asm["ttgir"])


def _source(variant: Variant) -> Any:
    """Return the source with the argument types that a launch would give it; a JIT launch marks divisibility itself."""
    names = variant.kernel.arg_names
    signature = {name: _argument_type(name, variant) for name in names}
    aligned = [n for n in names if n.endswith("_ptr") or "_stride_" in n and "aux" not in n]
    return _triton.triton.compiler.ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in variant.constants},
    )


def _argument_type(name: str, variant: Variant) -> str:
    if name in variant.constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return f"*{TYPES[variant.pointers.get(name, torch.int32)]}"
    return SCALARS.get(name, "i32")


def _gpu_target(target: Target) -> Any:
    gpu = _triton.triton.backends.compiler.GPUTarget
    return gpu("hip", "gfx942", 64) if target.kind == "hip" else gpu("cuda", target.arch, 32)


def _usage(asm: dict[str, Any]) -> tuple[int, int]:
    """Return registers and spilled bytes per thread."""
    if "amdgcn" in asm:
        numbers = {key: int(re.search(rf"\.{key}:\s+(\d+)", asm["amdgcn"]).group(1)) for key in _AMD}  # type: ignore[union-attr]
        return numbers["vgpr_count"], 4 * numbers["vgpr_spill_count"]
    tool = Path(_triton.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


_AMD = ("vgpr_count", "vgpr_spill_count")


def table(rows: list[Resources]) -> str:
    """Return the rows as a Markdown table, one line per variant: registers / spilled bytes / shared KB by target."""
    lines = [
        "# What the kernels take",
        "",
        "Registers per thread / spilled bytes per thread / shared memory per block (KB), compiled by Triton "
        f"{_triton.triton.__version__}. A dash: the target cannot read fp8-e4m3, or does not launch the kernel.",
        "Made by `ATTNLAB_INTERPRET=0 python -m attnlab.inspect.resources --write`.",
        "",
        f"| kernel | {' | '.join(TARGETS)} |",
        f"| --- |{' --- |' * len(TARGETS)}",
    ]
    cells = {(row.variant, row.target): row for row in rows}
    for name in dict.fromkeys(row.variant for row in rows):
        found = [cells.get((name, target)) for target in TARGETS]
        words = ["-" if r is None else f"{r.registers} / {r.spills} / {r.shared / 1024:.1f}" for r in found]
        lines.append(f"| {name} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


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
