"""Decode at sizes that only a GPU can hold in reasonable time."""

from __future__ import annotations

import pytest
import torch

from attnlab.bench.decode import DecodeShape, measure
from attnlab.eager import oracle
from attnlab.engines import engine_for
from attnlab.memory.pool import KVView
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import SplitBounds, SplitSizes, splits_of_sizes
from attnlab.plan.workspace import Workspace
from attnlab.spec import AttentionSpec
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
    out, q = _decode(spec, KVView(k=k, v=v, v_in_k=mla), far)
    rows = k.view(torch.uint8)[far].view(k.dtype), v.view(torch.uint8)[far].view(k.dtype)
    want, _ = oracle.attention(q[0], *rows, scale=spec.scale)
    torch.testing.assert_close(out[0].double(), want, **OUTPUT[torch.bfloat16])


def _decode(spec: AttentionSpec, view: KVView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indptr = torch.tensor([0, slots.shape[0]], dtype=torch.int32, device="cuda")
    lens = indptr.diff()
    sizes = SplitSizes.of_counts(lens, torch.full_like(lens, 8))
    bounds = SplitBounds(max_ranges=8, min_size=32)
    splits = splits_of_sizes(sizes, lens, policy="static", bounds=bounds, total=slots.shape[0])
    lane = Lane(
        layout=KVLayout.full(KVIndex(indptr=indptr, slots=slots, space="pool")),
        splits=splits,
        schedule=Schedule.one_range_a_program(splits, kv_heads=spec.kv_heads),
        write_slots=torch.zeros(1, dtype=torch.int64, device="cuda"),
    )
    work = Workspace(max_ranges=splits.capacity, heads=spec.heads, v_dims={spec.v_dim}, device="cuda")
    partials = work.partials(programs=lane.schedule.programs, group=spec.group, v_dim=spec.v_dim)
    q = torch.randn(1, spec.heads, spec.qk_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(1, spec.heads, spec.v_dim, dtype=torch.bfloat16, device="cuda")
    call = {"q": q, "view": view, "lane": lane, "spec": spec, "partials": partials, "out": out}
    engine_for("triton", "cuda").decode(**call, lse=None, sinks=None, aux=None)
    return out, q
