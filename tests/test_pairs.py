"""Pools of 8-bit floats, read two columns at a time: every number, every range of queries, and pools that cannot be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlab._boot import INTERPRETED
from attnlab._triton import jit, tl, triton
from attnlab.kernels.launch import pair_constants, plain_scores, stored
from attnlab.kernels.pairs import POWERS, unpacked
from attnlab.memory.pool import FP8, KVView
from attnlab.plan.policies.balanced import Balanced
from attnlab.spec import AttentionSpec
from tests.cases import CASES, ENGINES, Stand
from tests.tolerances import LSE, OUTPUT

TOY = CASES[0].but(kv_dtype=FP8, policy=Balanced(tile=16, programs=1), k_scale=0.5, v_scale=0.25)
DEVICE = "cpu" if INTERPRETED else "cuda"
KINDS = [torch.float32] if INTERPRETED else [torch.float32, torch.float16]
engines = pytest.mark.parametrize(("engine", "device"), ENGINES)


@jit
def _unpack_kernel(pairs_ptr, even_ptr, odd_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    even, odd = unpacked(tl.load(pairs_ptr + offsets), even_ptr.dtype.element_ty)
    tl.store(even_ptr + offsets, even)
    tl.store(odd_ptr + offsets, odd)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_pair_of_numbers_is_unpacked_as_torch_converts_them(dtype: torch.dtype) -> None:
    pairs = torch.arange(1 << 16, dtype=torch.int32, device=DEVICE).to(torch.int16)
    even, odd = (torch.full((1 << 16,), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    _unpack_kernel[(triton.cdiv(1 << 16, 1 << 13),)](pairs, even, odd, BLOCK=1 << 13)
    numbers = pairs.view(FP8).view(-1, 2).float()
    for got, want in ((even, numbers[:, 0]), (odd, numbers[:, 1])):
        assert torch.equal(got.float().nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2.0**-120, 2.0**-58, 2.0**-20, 1.0, 2.0**20, 2.0**60])
def test_queries_of_any_size_are_multiplied(engine: str, device: str, dtype: torch.dtype, size: float) -> None:
    """fp16 ends at 65,504 and at 2^-24: rows of queries are scaled before, and back behind."""
    stand = Stand(TOY.but(dtype=dtype, scale=min(0.2, 1.0 / size)), engine, device)
    stand.q = (stand.q.float() * size).to(dtype)
    stand.check()


@engines
def test_a_row_of_zeros_beside_others_is_no_special_case(engine: str, device: str) -> None:
    stand = Stand(TOY.but(dtype=torch.bfloat16), engine, device)
    stand.q[:, ::2] = 0.0
    stand.check()


@engines
@pytest.mark.parametrize(
    "heads", [{"heads": 8, "kv_heads": 2}, {"heads": 40, "kv_heads": 2}, {"heads": 4, "kv_heads": 4}]
)
@pytest.mark.parametrize(
    "dims", [(32, 32), (13, 13), (14, 14), (16, 32), (80, 80), (96, 96), (192, 128), (64, 13), (13, 64), (112, 48)]
)
def test_all_dims_agree_with_the_oracle(engine: str, device: str, heads: dict[str, int], dims: tuple[int, int]) -> None:
    stand = Stand(TOY.but(qk_dim=dims[0], v_dim=dims[1], dtype=torch.bfloat16, **heads), engine, device)
    stand.check()
    assert stand.pool.view(0).paired == (dims[0] % 2 == 0 and dims[1] % 2 == 0)


@engines
@pytest.mark.parametrize(
    "scores", [{"softcap": 5.0}, {"temperature_len": 32}, {"mod": "relative_bias"}, {"sinks": True}]
)
def test_scores_that_are_more_than_products(engine: str, device: str, scores: dict[str, object]) -> None:
    Stand(TOY.but(dtype=torch.bfloat16, **scores), engine, device).check()


@engines
def test_a_stored_nan_reaches_its_own_request_alone(engine: str, device: str) -> None:
    """The one bit pattern of e4m3 that is no number must not be read as 480."""
    stand = Stand(TOY.but(dtype=torch.bfloat16, lens=(200, 70)), engine, device)
    want, _ = stand.run()
    slot = stand.table.slots_of(stand.rows[0]).long()[3]
    stand.pool.view(1).k.view(torch.uint8)[slot, 0, 5] = 0x7F
    out, _ = stand.run()
    assert out[0, :4].isnan().all() and torch.equal(out[0, 4:], want[0, 4:])
    assert torch.equal(out[1], want[1])


@engines
def test_small_weights_are_not_lost(engine: str, device: str) -> None:
    """One key draws nearly all weight; 4,095 others have 2^-20 of it each, which fp16 would round to 16 steps."""
    stand = Stand(TOY.but(dtype=torch.bfloat16, lens=(4096,), scale=1.0, k_scale=1.0, v_scale=1.0), engine, device)
    stand.q.zero_()
    stand.q[..., 0] = 1.0
    view, slots = stand.pool.view(1), stand.table.slots_of(stand.rows[0]).long()
    keys = torch.zeros(4096, 2, 32)
    keys[0, :, 0] = 13.0
    values = torch.ones(4096, 2, 32)
    values[0] = 0.0
    view.k[slots], view.v[slots] = keys.to(device, FP8), values.to(device, FP8)
    out, lse = stand.run()
    others = 4095 * torch.exp(torch.tensor(-13.0, dtype=torch.float64))
    want = (others / (1 + others)).float().to(device)
    torch.testing.assert_close(out.float() / want, torch.ones_like(out.float()), **OUTPUT[torch.bfloat16])
    torch.testing.assert_close(lse, (13 + torch.log1p(others)).float().expand_as(lse).to(device), **LSE)


def _view(k: torch.Tensor, v: torch.Tensor) -> KVView:
    return KVView(k=k, v=v)


def test_pools_with_odd_steps_are_read_number_by_number() -> None:
    row = torch.zeros(4 * 2 * 32 + 1, dtype=torch.uint8).view(FP8)
    even = row[:-1].view(4, 2, 32)
    assert _view(even, even).paired and stored(_view(even, even))[0].dtype == torch.int16
    odd = row[1:].view(4, 2, 32)
    for k, v in ((odd, even), (even, odd), (even[..., :31], even), (even, even[..., :31])):
        assert not _view(k, v).paired and stored(_view(k, v))[0].dtype == FP8
    half = torch.zeros(4, 2, 32, dtype=torch.bfloat16)
    assert not _view(half, half).paired and pair_constants(spec=_spec(0.1), view=_view(half, half), compute=None) == {}


def _spec(scale: float) -> AttentionSpec:
    return AttentionSpec(heads=4, kv_heads=2, qk_dim=32, v_dim=32, scale=scale)


@given(power=st.integers(-125, 125))
def test_scales_that_a_power_would_take_out_of_range_are_applied_one_by_one(power: int) -> None:
    """Products times a factor that is rounded to 0, or to infinity, would make NaN of hidden keys."""
    pool = torch.zeros(4, 2, 32, dtype=torch.uint8).view(FP8)
    least, most = (2.0**power * x * 1.4427 for x in POWERS)
    in_range = least >= 2.0**-126 and most < 2.0**127
    assert plain_scores(_spec(2.0**power), _view(pool, pool)) <= in_range
