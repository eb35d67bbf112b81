"""One kernel compiled for a GPU that is not there, and what its binary says: registers, spills, memory, texts."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab.checks import require
from attnlab.inspect.resources.shapes import TARGETS
from attnlab.kernels.target import Target

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compilation of a kernel: pointer types by argument, compile-time values, launch options.

    `boxes`: dtype, rows and columns of what descriptors fetch, by argument.
    """

    name: str
    kernel: Any
    pointers: dict[str, torch.dtype]
    constants: dict[str, Any]
    options: dict[str, Any]
    boxes: dict[str, tuple[torch.dtype, int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled variant takes: registers and spilled bytes per thread, shared memory in bytes per block."""

    variant: str
    target: str
    registers: int
    spills: int
    shared: int


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
    return _triton.source_class(variant.kernel)(
        fn=variant.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in variant.constants},
    )


def _argument_type(name: str, variant: Variant) -> str:
    if name in variant.constants:
        return "constexpr"
    if name in variant.boxes:
        dtype, rows, columns = variant.boxes[name]
        return f"tensordesc<{TYPES[dtype]}[{rows},{columns}]>"
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
