"""Score modifiers, soft cap and temperature: the Triton half against the torch half, and both against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnlab import mods  # noqa: F401  (registers the modifiers)
from attnlab._triton import jit, tl
from attnlab.mods.registry import score_mods
from attnlab.mods.softcap import soft_cap, soft_cap_triton
from attnlab.mods.temperature import temperature, temperature_triton
from attnlab.spec import ScoreMod
from tests.strategies import DEVICE
from tests.tolerances import OUTPUT, output

QUERIES, HEADS, KEYS, WIDTH = 4, 5, 32, 16
Q_POS = torch.tensor([0, 9, 31, 500], dtype=torch.int32)
KV_POS = torch.arange(KEYS, dtype=torch.int32)
KV_POS_FAR = KV_POS * 17  # distances beyond the aux tensor, and negative ones
CLOSE = OUTPUT[torch.float32]


@jit
def _mod_kernel(
    scores_ptr, q_pos_ptr, kv_pos_ptr, aux_ptr, out_ptr, aux_token, aux_head, aux_width, heads, keys,
    MOD: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    # One program a query, as the attention kernels call a modifier: a tile of heads by keys.
    query = tl.program_id(0)
    head, key = tl.arange(0, H)[:, None], tl.arange(0, K)[None, :]
    valid = (head < heads) & (key < keys)
    at = (query * heads + head) * keys + key
    scores = tl.load(scores_ptr + at, mask=valid, other=0.0)
    q_pos, kv_pos = tl.load(q_pos_ptr + query), tl.load(kv_pos_ptr + key, mask=key < keys, other=0)
    scores = MOD(scores, q_pos, kv_pos, query, head, valid, aux_ptr, aux_token, aux_head, aux_width)
    tl.store(out_ptr + at, scores, mask=valid)


@jit
def _soft_cap_kernel(x_ptr, out_ptr, cap, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, soft_cap_triton(tl.load(x_ptr + offs, mask=offs < n), cap), mask=offs < n)


@jit
def _temperature_kernel(q_pos_ptr, out_ptr, n, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    factor = temperature_triton(tl.load(q_pos_ptr + offs, mask=offs < n, other=0), LENGTH)
    tl.store(out_ptr + offs, factor, mask=offs < n)


def scores_and_aux() -> tuple[Tensor, Tensor]:
    """Scores of every query, head and key, and an aux tensor whose rows have a stride of their own."""
    aux = torch.randn(QUERIES, HEADS, WIDTH + 3, device=DEVICE)[..., :WIDTH]
    return torch.randn(QUERIES, HEADS, KEYS, device=DEVICE) * 10, aux


def in_torch(mod: ScoreMod, scores: Tensor, kv_pos: Tensor, aux: Tensor | None) -> Tensor:
    q_pos, query = Q_POS.to(DEVICE)[:, None, None], torch.arange(QUERIES, device=DEVICE)[:, None, None]
    head = torch.arange(HEADS, device=DEVICE)[None, :, None]
    return mod.torch(scores, q_pos, kv_pos.to(DEVICE)[None, None], query, head, aux if mod.needs_aux else None)


def in_triton(mod: ScoreMod, scores: Tensor, kv_pos: Tensor, aux: Tensor) -> Tensor:
    out = torch.full_like(scores, float("nan"))
    _mod_kernel[(QUERIES,)](
        scores, Q_POS.to(DEVICE), kv_pos.to(DEVICE), aux, out, aux.stride(0), aux.stride(1), aux.shape[2], HEADS, KEYS,
        MOD=mod.triton, H=8, K=64,
    )  # fmt: skip
    return out


def in_python(name: str, scores: Tensor, kv_pos: Tensor, aux: Tensor) -> Tensor:
    """The published formulas, one number at a time, without looking at the modifiers."""
    s, bias, out = scores.tolist(), aux.tolist(), torch.empty_like(scores)
    for q, p in enumerate(Q_POS.tolist()):
        for h in range(HEADS):
            for k, j in enumerate(kv_pos.tolist()):
                change = {
                    "alibi": -(0.5 ** (h + 1)) * (p - j),
                    "relative_bias": bias[q][h][p - j] if 0 <= p - j < WIDTH else 0.0,
                }[name]
                out[q, h, k] = s[q][h][k] + change
    return out


every_mod = pytest.mark.parametrize("name", score_mods.names())
grids = pytest.mark.parametrize("kv_pos", [KV_POS, KV_POS_FAR], ids=["near", "far"])


@every_mod
@grids
def test_the_triton_half_agrees_with_the_torch_half(name: str, kv_pos: Tensor) -> None:
    mod, (scores, aux) = score_mods.get(name), scores_and_aux()
    torch.testing.assert_close(in_triton(mod, scores, kv_pos, aux), in_torch(mod, scores, kv_pos, aux), **CLOSE)


@every_mod
def test_a_modifier_keeps_shape_and_dtype_and_does_something(name: str) -> None:
    mod, (scores, aux) = score_mods.get(name), scores_and_aux()
    for dtype in (torch.float32, torch.float64):
        changed = in_torch(mod, scores.to(dtype), KV_POS, aux)
        assert changed.shape == scores.shape and changed.dtype == dtype
        assert not torch.equal(changed, scores.to(dtype))


@pytest.mark.parametrize("name", ["alibi", "relative_bias"])
@grids
def test_a_modifier_is_its_published_formula(name: str, kv_pos: Tensor) -> None:
    mod, (scores, aux) = score_mods.get(name), scores_and_aux()
    torch.testing.assert_close(in_torch(mod, scores, kv_pos, aux), in_python(name, scores, kv_pos, aux), **CLOSE)


@grids
def test_a_relative_bias_of_zero_changes_nothing(kv_pos: Tensor) -> None:
    mod, (scores, aux) = score_mods.get("relative_bias"), scores_and_aux()
    assert torch.equal(in_torch(mod, scores, kv_pos, torch.zeros_like(aux)), scores)
    assert torch.equal(in_triton(mod, scores, kv_pos, torch.zeros_like(aux)), scores)


def test_a_relative_bias_is_read_nowhere_outside_its_width() -> None:
    """What lies beside the aux tensor in memory is NaN."""
    mod, (scores, aux) = score_mods.get("relative_bias"), scores_and_aux()
    fenced = torch.full((QUERIES + 2, HEADS + 2, WIDTH + 2), float("nan"), device=DEVICE)
    inner = fenced[1:-1, 1:-1, 1:-1]
    inner.copy_(aux)
    for kv_pos in (KV_POS, KV_POS_FAR):
        assert in_triton(mod, scores, kv_pos, inner).isfinite().all()
        assert in_torch(mod, scores, kv_pos, inner).isfinite().all()


def test_a_relative_bias_without_its_tensor_says_so() -> None:
    mod, (scores, _) = score_mods.get("relative_bias"), scores_and_aux()
    with pytest.raises(ValueError, match=r"aux: relative_bias needs \[tokens, heads, width\], got None"):
        in_torch(mod, scores, KV_POS, None)


# --- Soft cap ---------------------------------------------------------------------------------------------------


def capped(x: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    out = torch.full_like(x, float("nan"))
    _soft_cap_kernel[(1,)](x, out, cap, x.shape[0], BLOCK=1024)
    return soft_cap(x, cap), out


@pytest.mark.parametrize("half", [0, 1], ids=["torch", "triton"])
def test_a_soft_cap_saturates_at_any_size(half: int) -> None:
    """B12: a quotient of exponentials gives inf and NaN here."""
    scores = torch.tensor([1000.0, 4400.0, 5000.0, -10000.0, 1e30, -1e30, 0.0], device=DEVICE)
    assert capped(scores, 50.0)[half].tolist() == [50.0, 50.0, 50.0, -50.0, 50.0, -50.0, 0.0]


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_a_soft_cap_is_the_published_formula(cap: float) -> None:
    x = torch.cat([torch.linspace(-300, 300, 601), torch.logspace(-6, 0, 200)]).to(DEVICE)
    right = torch.tensor([cap * math.tanh(s / cap) for s in x.tolist()], device=DEVICE)
    for half in capped(x, cap):
        torch.testing.assert_close(half, right, **output(torch.float32, cap))


def test_a_cap_far_above_the_scores_changes_them_by_rounding_alone() -> None:
    x = torch.linspace(-1, 1, 101, device=DEVICE)
    for half in capped(x, 1e4):
        torch.testing.assert_close(half, x, **output(torch.float32, 1e4))


# --- Temperature ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 8, 1024])
def test_a_temperature_grows_with_the_logarithm_past_its_length(length: int) -> None:
    """At position `length` itself the factor is still 1."""
    positions = [0, 1, length - 1, length, length + 1, 2 * length, length**2, 1_000_000]
    right = torch.tensor([math.log2(p) / math.log2(length) if p > length else 1.0 for p in positions], device=DEVICE)
    q_pos = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    text = torch.full_like(right, float("nan"))
    _temperature_kernel[(1,)](q_pos, text, len(positions), LENGTH=length, BLOCK=16)
    for half in (temperature(q_pos, length), text):
        torch.testing.assert_close(half, right, **CLOSE)
        assert half[:4].tolist() == [1.0] * 4 and half[4] > 1
