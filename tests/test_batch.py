"""Lengths that the host knows, lengths that only the device knows, and the batch over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlab.batch import MAX_LEN, DecodeBatch, DeviceLens, HostLens
from attnlab.checks import describe
from tests.strategies import DEVICE, lens
from tests.syncs import no_waiting


def on_device(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@given(values=lens())
def test_host_lens_knows_its_bounds_exactly(values: list[int]) -> None:
    made = HostLens.of(values, device=DEVICE)
    assert made.device.dtype == torch.int32 and made.device.tolist() == list(made.values) == values
    assert (made.count, made.bound_max, made.bound_total) == (len(values), max(values, default=0), sum(values))
    made.validate()


@pytest.mark.parametrize("bad", [-1, MAX_LEN + 1, 2.0, True, "5", torch.tensor(5)])
def test_a_length_that_is_none_names_its_request(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="lens: request 1: expected"):
        HostLens.of([3, bad], device=DEVICE)


def test_more_tokens_in_all_than_an_offset_holds_are_refused() -> None:
    assert HostLens.of([MAX_LEN], device=DEVICE).bound_total == MAX_LEN
    with pytest.raises(ValueError, match=f"expected at most {MAX_LEN:,} tokens in all .* got {MAX_LEN + 1:,}"):
        HostLens.of([MAX_LEN, 1], device=DEVICE)


def test_host_lens_made_by_hand_have_one_value_per_request() -> None:
    with pytest.raises(ValueError, match=r"lens: expected \[2\] int32, got \[3\] int32"):
        HostLens(values=(1, 2), device=on_device(1, 2, 3))
    with pytest.raises(TypeError, match=r"lens: expected \[2\] int32, got \[2\] int64"):
        HostLens(values=(1, 2), device=on_device(1, 2).long())


def test_host_lens_that_disagree_with_the_device_are_found_by_validate() -> None:
    with pytest.raises(ValueError, match="lens: request 1 has 2 tokens on the host, 7 on the device"):
        HostLens(values=(1, 2), device=on_device(1, 7)).validate()


@given(values=lens(min_reqs=1), slack=st.integers(0, 5))
def test_device_lens_within_their_promise_are_valid(values: list[int], slack: int) -> None:
    made = DeviceLens(device=on_device(*values), bound_each=max(values) + slack, bound_total=sum(values) + slack)
    made.validate()
    assert (made.count, made.bound_max) == (len(values), max(values) + slack)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((3, 9), "lens: request 1 has 9 tokens, outside 0 to bound_each 8"),
        ((-1, 3), "lens: request 0 has -1 tokens, outside 0 to bound_each 8"),
        ((6, 7), "lens: 13 tokens in all, more than bound_total 12"),
    ],
)
def test_a_broken_promise_is_found_by_validate(values: tuple[int, ...], message: str) -> None:
    broken = DeviceLens(device=on_device(*values), bound_each=8, bound_total=12)
    with pytest.raises(ValueError, match=message):
        broken.validate()


@pytest.mark.parametrize("field", ["bound_each", "bound_total"])
@pytest.mark.parametrize("value", [-1, MAX_LEN + 1, 2.5, None])
def test_a_promise_is_an_int_that_offsets_hold(field: str, value: Any) -> None:
    bounds: dict[str, Any] = {"bound_each": 8, "bound_total": 8, field: value}
    with pytest.raises((TypeError, ValueError), match=f"{field}: expected"):
        DeviceLens(device=on_device(1), **bounds)


@pytest.mark.parametrize("bad", [[1, 2], torch.tensor([1, 2]), torch.tensor([[1, 2]], dtype=torch.int32)])
def test_device_lens_are_an_int32_vector(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"lens: expected \[reqs\] int32, got"):
        DeviceLens(device=bad, bound_each=8, bound_total=8)


def test_a_batch_has_one_row_per_request() -> None:
    seq = HostLens.of([3, 4], device=DEVICE)
    DecodeBatch(rows=torch.tensor([1, 0]), seq=seq)
    with pytest.raises(ValueError, match=r"rows: expected one per request of seq \(2\), got 1"):
        DecodeBatch(rows=torch.tensor([1]), seq=seq)
    with pytest.raises(TypeError, match=r"rows: expected \[reqs\] int32 or int64, got"):
        DecodeBatch(rows=torch.tensor([1.0, 0.0]), seq=seq)


def test_an_idle_step_is_a_batch() -> None:
    batch = DecodeBatch(rows=torch.zeros(0, dtype=torch.int64), seq=HostLens.of([], device=DEVICE))
    assert (batch.seq.count, batch.seq.bound_max, batch.seq.bound_total) == (0, 0, 0)


def test_a_batch_of_lengths_on_the_device_is_described_without_reading_them() -> None:
    lens = DeviceLens(device=torch.tensor([5], dtype=torch.int32), bound_each=9, bound_total=9)
    with no_waiting():
        assert describe(lens) == "DeviceLens"
