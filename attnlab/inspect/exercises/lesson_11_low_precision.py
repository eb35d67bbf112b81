"""Lesson 11: caches of few bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.eager import oracle
from attnlab.inspect.exercises.registry import Wrong, ask, exercise, near, off_by, same_tensor
from attnlab.memory.pool import FP8, KVView
from attnlab.memory.rows import FP8_MAX, read_back, store_rows

STORED = (17.5, 1000.0, 0.3, 0.0005)
"""What 11-1 puts into a cache."""
KEYS_NEAR, VALUES_NEAR, ROWS, KV_HEADS, DIM = 800.0, 2e-4, 500, 3, 64
"""The rows of 11-2, normal numbers of these sizes."""
MOST_OFF = 0.03
K_SCALE, V_SCALE = 0.05, 0.2
"""Those of 11-3."""
LIFT = "torch multiplies no matrix of fp32 by one of fp8: lift k and v with .float() first."


@exercise("11-1", Sequence, "a list of four numbers")
def held_in_e4m3(answer: Any) -> str:
    """What the storage holds of some numbers."""
    rows = torch.tensor(STORED).view(1, 1, len(STORED))
    view = _view(slots=1, kv_heads=1, dim=len(STORED))
    store_rows(view, torch.tensor([0]), rows, rows)
    expected = view.k.float().flatten().tolist()
    if len(answer) != len(STORED):
        return f"Expected a list of {len(STORED)} numbers, one for each, got {answer!r}."
    for x, wanted, got in zip(STORED, expected, (float(y) for y in answer), strict=True):
        if got != wanted:
            return f"Of {x:g} it does not hold {got:g}. {_why(x, got, wanted)}"
    return ""


def _why(x: float, got: float, wanted: float) -> str:
    if x > FP8_MAX:
        return "That is more than the largest number of the format; there is no infinity, and what is above saturates."
    if not wanted:
        return "Below 2⁻⁶ the numbers are 2⁻⁹ = 0.00195 apart, down to 0. Which of them is nearest?"
    power = 2.0 ** math.floor(math.log2(x))
    step = power / 8
    if got % step == 0 and abs(got - x) < 2 * step:
        return f"Both are numbers of the format, {step:g} apart there. Which one is nearer?"
    return f"From {power:g} to {2 * power:g} there are 8 numbers, {step:g} apart."


@exercise("11-2", Sequence, "a pair (k_scale, v_scale)")
def two_scales(answer: Any) -> str:
    """Scales with which neither end of the format is met."""
    if len(answer) != 2:
        return f"Expected a pair (k_scale, v_scale), got {answer!r}."
    scales = [float(x) for x in answer]
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if not 0 < scale < math.inf:
            return f"{name}: expected a number above 0, got {scale:g}."
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(ROWS, KV_HEADS, DIM, generator=generator) * size for size in (KEYS_NEAR, VALUES_NEAR))
    view, slots = (
        _view(slots=ROWS, kv_heads=KV_HEADS, dim=DIM, k_scale=scales[0], v_scale=scales[1]),
        torch.arange(ROWS),
    )
    store_rows(view, slots, large, small)
    for name, rows, stored, scale in zip(
        "KV", (large, small), read_back(view, slots, torch.float32), scales, strict=True
    ):
        off = float((stored - rows).norm() / rows.norm())
        if off < MOST_OFF:
            continue
        most = float(rows.abs().max()) / scale
        if most > FP8_MAX:
            return (
                f"{name} saturates: divided by its scale, the largest number is {most:,.0f}, and the format ends at "
                f"{FP8_MAX:.0f}. A larger scale makes what is stored smaller. It is off by {off:.1%}."
            )
        return (
            f"{name} underflows: divided by its scale, the largest number is only {most:.2g}, and most are so small "
            f"that they lose their digits. A smaller scale makes what is stored larger. It is off by {off:.1%}."
        )
    return ""


@exercise("11-3", Callable)
def attend_fp8(answer: Any) -> str:
    """One KV head's decode over stored rows."""
    generator = torch.Generator().manual_seed(0)
    for heads, keys, dim, v_dim in ((1, 3, 8, 8), (3, 200, 64, 64), (4, 70, 32, 16)):
        case = f"With q [{heads}, {dim}], k [{keys}, {dim}] and v [{keys}, {v_dim}]"
        q = torch.randn(heads, dim, generator=generator)
        k = (torch.randn(keys, dim, generator=generator) / K_SCALE).to(FP8)
        v = (torch.randn(keys, v_dim, generator=generator) / V_SCALE).to(FP8)
        scale = dim**-0.5
        expected = _attention(q, k, v, scale=scale, k_scale=K_SCALE, v_scale=V_SCALE)
        try:
            got = same_tensor(case, ask(case, answer, q, k, v, scale, K_SCALE, V_SCALE), expected)
        except Wrong as wrong:
            if "Float8" in str(wrong):  # what torch says of two dtypes in one product
                raise Wrong(f"{case}: {LIFT}") from wrong
            raise
        if not near(got, expected):
            return f"{case}: the output is off by {off_by(got, expected):.3g}. {_mistake(got, q, k, v, scale)}".rstrip()
    return ""


def _mistake(got: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> str:
    """Say which scales would give what the reader got."""
    usual = {
        "v_scale is missing: the mean of stored values is not that of true ones.": (scale, K_SCALE, 1.0),
        "k_scale is missing: scores of stored keys are not those of true ones.": (scale, 1.0, V_SCALE),
        "Neither k_scale nor v_scale is applied.": (scale, 1.0, 1.0),
        "The scales are exchanged: k_scale belongs to the scores, v_scale to the output.": (scale, V_SCALE, K_SCALE),
        "Rows were stored divided by their scale, so the way back multiplies.": (scale, 1 / K_SCALE, 1 / V_SCALE),
        "k_scale comes on top of the layer's own scale, and does not replace it.": (1.0, K_SCALE, V_SCALE),
        "k_scale belongs to the scores: multiply before the softmax.": (scale, 1.0, V_SCALE * K_SCALE),
        "v_scale is applied twice.": (scale, K_SCALE, V_SCALE**2),
    }
    for words, (of_scores, of_k, of_v) in usual.items():
        if near(got, _attention(q, k, v, scale=of_scores, k_scale=of_k, v_scale=of_v)):
            return words
    return ""


def _attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, k_scale: float, v_scale: float) -> Tensor:
    """Return what the oracle gives for rows that are stored with such scales."""
    return oracle.attention(q, k.float()[:, None] * k_scale, v.float()[:, None] * v_scale, scale=scale)[0]


def _view(*, slots: int, kv_heads: int, dim: int, k_scale: float = 1.0, v_scale: float = 1.0) -> KVView:
    """Return an fp8 storage of rows."""
    k, v = (torch.zeros(slots, kv_heads, dim, dtype=FP8) for _ in range(2))
    return KVView(k=k, v=v, k_scale=k_scale, v_scale=v_scale)
