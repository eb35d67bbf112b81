"""What is timed is right, before it is timed: small shapes of every kind on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnlab.bench.several import SHAPES, Call, Shape
from tests.tolerances import OUTPUT


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.name} {shape.new} {shape.policy}")
def test_what_is_timed_agrees_with_the_oracle(shape: Shape) -> None:
    small = replace(shape, requests=2, cached=min(shape.cached, 60), new=min(shape.new, 9), dtype=torch.float32)
    small = replace(small, window=None if shape.window is None else 7)
    call = Call.of(small, engine="eager", device="cpu", multiprocessors=132)
    call.run()
    assert call.error() < 10 * OUTPUT[torch.float32]["atol"]


def test_flops_and_bytes_are_counted() -> None:
    shape = Shape(name="", requests=2, cached=10, new=3, heads=4, kv_heads=2, qk_dim=8, v_dim=4)
    pairs = 11 + 12 + 13
    assert shape.flops == 2 * pairs * (8 + 4) * 2 * 4
    assert shape.kv_bytes == 2 * 10 * 2 * (8 + 4) * 2
    assert replace(shape, window=11).flops == 2 * 33 * (8 + 4) * 2 * 4
