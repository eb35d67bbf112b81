"""What is compiled, for which GPUs: attention shapes of published models, and what their scores undergo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView
from attnlab.mods.registry import score_mods
from attnlab.spec import AttentionSpec

TARGETS = {
    "sm_80": Target(kind="cuda", arch=80, multiprocessors=108),
    "sm_90": Target(kind="cuda", arch=90, multiprocessors=132),
    "sm_100": Target(kind="cuda", arch=100, multiprocessors=148),
    "gfx942": Target(kind="hip"),
}
FOR_HOPPER = " for Hopper: "
"""Between kind and shape of variants that are chosen, and compiled, for compute capability 9.0 alone."""


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
BYTES = replace(GQA, name="gqa 4 x 128, fp8", kv_dtype=FP8)
WINDOW = replace(GQA, name="gqa 4 x 128, window (Mistral)", window=4096)
SHORT = Shape(
    name="gqa 8 x 64, window, sinks (gpt-oss)", heads=64, kv_heads=8, qk_dim=64, v_dim=64, window=128, sinks=True
)
TREE = replace(GQA, name="gqa 4 x 128, draft tree", masked=True)
MQA = Shape(name="mqa 48 x 128 (StarCoder)", heads=48, kv_heads=1, qk_dim=128, v_dim=128)
TREE_SINKS = replace(TREE, name="gqa 4 x 128, draft tree, sinks", sinks=True)
NARROW = Shape(name="gqa 3 x 64 (SmolLM2)", heads=9, kv_heads=3, qk_dim=64, v_dim=64, dtype=HALF, kv_dtype=HALF)
PAGES = replace(GQA, name="gqa 4 x 128, pages of 16", page_size=16)
SHAPES = [
    GQA,
    BYTES,
    replace(GQA, name="gqa 4 x 128, fp16", dtype=HALF, kv_dtype=HALF),
    replace(GQA, name="gqa 4 x 128, fp32", dtype=FP32, kv_dtype=FP32),
    PAGES,
    replace(GQA, name="gqa 8 x 128, every feature", heads=64, **EVERYTHING),
    WINDOW,
    replace(GQA, name="gqa 5 x 128, chunk, temperature (Llama-4)", heads=40, chunk=8192, temperature_len=8192),
    replace(GQA, name="gqa 6 x 128, cap, temperature (Grok)", heads=48, softcap=30.0, temperature_len=1024),
    TREE,
    SHORT,
    NARROW,
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
SHARED = (
    *("gqa 4 x 128, fp8", "gqa 4 x 128, fp32", "gqa 8 x 128, every feature", "mha 80 (StableLM)", MHA.name),
    GQA.name,
)
"""Shapes whose decode and verify over even shares are compiled: their loops are those of the split kernels."""
MLA_PAGES = replace(
    MLA,
    name="mla 128 x 576/512, fp16, pages of 64, sinks",
    dtype=HALF,
    kv_dtype=HALF,
    page_size=64,
    sinks=True,
)
LATENT = (
    MLA,
    replace(
        MLA_PAGES,
        name="mla 128 x 576/512, fp16, pages of 64, cap, temperature, sinks",
        softcap=30.0,
        temperature_len=1024,
    ),
    Shape(name="mla 40 x 288/256 (MiniCPM3)", heads=40, kv_heads=1, qk_dim=288, v_dim=256, mla=True),
)
"""Shapes of latent rows whose decode over even shares packs more heads, on a Hopper GPU."""
LARGE = (
    MQA,
    replace(MQA, name="mqa 48 x 128, cap, temperature, sinks", softcap=30.0, temperature_len=1024, sinks=True),
    replace(MQA, name="mqa 71 x 64, pages of 16 (Falcon-7B)", heads=71, qk_dim=64, v_dim=64, page_size=16),
)
"""Other shapes of which it does."""
MERGED = ("gqa 4 x 128 (Llama-3)", "gqa 3 x 64 (SmolLM2)", "gqa 2 x 256 (Gemma)", "mha 80 (StableLM)", MLA.name)
