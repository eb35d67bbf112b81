"""Decode at sizes that only a GPU can hold in reasonable time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnlab.bench.decode import DecodeShape, measure
from attnlab.eager import oracle
from attnlab.kernels import launcher
from attnlab.kernels.tuning import current, using
from attnlab.memory.pool import KVView
from attnlab.plan.workspace import Workspace
from attnlab.spec import AttentionSpec
from tests.cases import CASES, Case, Stand, decode_one
from tests.tolerances import OUTPUT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", ["seed", "static", "tile"])
def test_a_serving_batch_is_right(policy: str) -> None:
    shape = DecodeShape(requests=64, tokens=4096, heads=32, kv_heads=8, dim=128)
    assert measure(shape, policy).max_error < OUTPUT[torch.bfloat16]["atol"]


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


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Run a call whose launches Triton makes all by itself."""

    def ran(call: Callable[[], Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "watched", lambda kernel: True)
            return call()

    return ran


@pytest.mark.parametrize("policy", ["seed", "balanced"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_known_variant_gives_the_bits_that_triton_gives(
    case: Case, policy: str, by_triton: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    stand = Stand(replace(case, policy=policy), "triton", "cuda")
    with using(replace(current())):  # under a table of its own nothing is known yet
        first, known = stand.run(), stand.run()
    plain = by_triton(lambda: torch.cat([x.flatten().double() for x in stand.run()]))
    for found in (first, known):
        assert torch.equal(torch.cat([x.flatten().double() for x in found]), plain)


@pytest.mark.parametrize("policy", ["seed", "balanced"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_repeated_call_gives_the_bits_of_one_that_was_checked_in_full(case: Case, policy: str) -> None:
    stand = Stand(replace(case, policy=policy), "triton", "cuda")
    plan, given = stand.plan(), {"save": False, "sinks": stand.sinks, "aux": stand.aux}

    def layers() -> list[Tensor]:
        return [stand.backend.decode(layer, stand.q, None, None, plan, **given) for layer in (0, 1)]

    runs = [layers() for _ in range(3)]  # Triton compiles; known variants; repeats
    assert stand.aux is not None or not any(case.lens) or plan.lane(1).repeats
    for run in runs[1:]:
        for layer in (0, 1):
            assert torch.equal(run[layer], runs[0][layer])


@pytest.mark.parametrize("policy", ["seed", "balanced"])
def test_tensors_that_lie_askew_are_read_and_written_where_they_lie(policy: str) -> None:
    stand = Stand(replace(CASES[0], dtype=torch.bfloat16, kv_dtype=torch.bfloat16, policy=policy), "triton", "cuda")
    plan, q = stand.plan(), stand.q
    even = stand.backend.decode(1, q, None, None, plan, save=False)
    for offset in (1, 8, 3, 0):
        room = torch.full((even.numel() + offset,), float("nan"), dtype=even.dtype, device="cuda")
        askew = torch.empty(q.numel() + offset, dtype=q.dtype, device="cuda")[offset:].view(q.shape).copy_(q)
        out = room[offset:].view(even.shape)
        stand.backend.decode(1, askew, None, None, plan, save=False, out=out)
        torch.testing.assert_close(out, even, **OUTPUT[torch.bfloat16])
        assert room[:offset].isnan().all()


@pytest.mark.parametrize("policy", ["seed", "balanced"])
def test_a_graph_may_hold_the_first_launch_of_a_launcher_and_any_later_one(policy: str) -> None:
    stand = Stand(replace(CASES[0], dtype=torch.bfloat16, kv_dtype=torch.bfloat16, policy=policy), "triton", "cuda")
    plan = stand.plan()
    wanted = stand.backend.decode(1, stand.q, None, None, plan, save=False)
    with using(replace(current())):  # under a table of its own nothing is known yet
        for _ in range(3):  # Triton launches; a known variant; a repeat
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = stand.backend.decode(1, stand.q, None, None, plan, save=False)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, wanted)
