"""Decode at sizes that only a GPU can hold in reasonable time."""

from __future__ import annotations

import pytest
import torch

from attnlab.bench.decode import DecodeShape, measure
from attnlab.eager import oracle
from attnlab.memory.pool import KVView
from attnlab.plan.workspace import Workspace
from attnlab.spec import AttentionSpec
from tests.cases import decode_one
from tests.tolerances import OUTPUT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", ["seed", "static", "tile"])
def test_a_serving_batch_is_right(policy: str) -> None:
    shape = DecodeShape(requests=64, tokens=4096, heads=32, kv_heads=8, dim=128)
    assert measure(shape, policy, checked=4).max_error < OUTPUT[torch.bfloat16]["atol"]


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_the_far_end_of_a_pool_beyond_2_31_elements_is_read(mla: bool) -> None:
    """B24, B25: an offset in 32 bits would wrap to the pool's beginning, which is NaN."""
    heads, kv_heads, qk_dim, v_dim = (16, 1, 576, 512) if mla else (16, 8, 128, 128)
    slots = 2**31 // (kv_heads * qk_dim) + 5000
    k = torch.full((slots, kv_heads, qk_dim), 0x7F, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    v = k[..., :v_dim] if mla else k.view(torch.uint8).clone().view(k.dtype)
    far = torch.randperm(4000, device="cuda")[:1000] + slots - 4000
    for x in (k,) if mla else (k, v):
        fill = torch.randn(1000, kv_heads, x.shape[2], device="cuda").to(x.dtype)
        x.view(torch.uint8)[far] = fill.view(torch.uint8)
    spec = AttentionSpec(heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim, scale=qk_dim**-0.5)
    q, out = decode_one("triton", spec, KVView(k=k, v=v, v_in_k=mla), far, torch.bfloat16)
    rows = k.view(torch.uint8)[far].view(k.dtype), v.view(torch.uint8)[far].view(k.dtype)
    want, _ = oracle.attention(q, *rows, scale=spec.scale)
    torch.testing.assert_close(out.double(), want, **OUTPUT[torch.bfloat16])


def test_scratch_that_does_not_fit_the_device_is_refused_before_it_is_allocated() -> None:
    """B43: the bytes needed are named, and what lowers them."""
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match=r"scratch: 4,311,744,512,000 bytes .* lower max_requests"):
        Workspace(max_ranges=512 * 512 * 1000, max_drafts=1, heads=8, v_dims={512}, device="cuda")
    assert torch.cuda.memory_allocated() == before
