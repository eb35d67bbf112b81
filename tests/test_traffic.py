"""Request lengths drawn from traces: seeded, with the trace's marginals and the trace's correlation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnlab.assets import load_json
from attnlab.inspect.traffic import Request, draw_decode_lens, draw_requests, scale_to, trace_names, trace_title

TRACES = trace_names()
ROWS = load_json("traffic.json", "traces")
COUNT = 4000
NEAR = 2.0 / COUNT**0.5
"""Two distribution functions of so many draws differ by less, with a chance of error below one in a thousand."""

every_trace = pytest.mark.parametrize("trace", TRACES)


def columns(requests: list[Request]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return tuple(np.array([getattr(r, f"{side}_tokens") for r in requests], float) for side in ("input", "output"))  # type: ignore[return-value]


def ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean ranks: ties share theirs."""
    _, where, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[where]


def spearman(requests: list[Request]) -> float:
    a, b = (ranks(x) for x in columns(requests))
    return float(np.corrcoef(a, b)[0, 1])


@every_trace
def test_a_seed_gives_the_same_requests_again_and_another_seed_others(trace: str) -> None:
    first = draw_requests(trace, 50, seed=3)
    assert len(first) == 50
    assert first == draw_requests(trace, 50, seed=3) != draw_requests(trace, 50, seed=4)
    assert (
        draw_decode_lens(trace, 50, seed=3)
        == draw_decode_lens(trace, 50, seed=3)
        != draw_decode_lens(trace, 50, seed=4)
    )


@every_trace
@pytest.mark.parametrize("side", [0, 1], ids=["input", "output"])
def test_lengths_follow_the_traces_quantiles(trace: str, side: int) -> None:
    """The largest distance between the two distribution functions. Ties make steps: both sides of each are compared."""
    drawn = np.sort(columns(draw_requests(trace, COUNT, seed=0))[side])
    quantiles = np.array(ROWS[trace][f"{('input', 'output')[side]}_tokens_quantiles"], float)
    share = np.linspace(0, 1, len(quantiles))
    for q in np.unique(quantiles):
        low, high = share[quantiles == q][[0, -1]]
        below, upto = np.searchsorted(drawn, q, "left") / COUNT, np.searchsorted(drawn, q, "right") / COUNT
        step = 1 / (len(quantiles) - 1)  # quantiles are known in steps of so much
        assert below <= low + step + NEAR and upto >= high - step - NEAR, (q, below, upto, low, high)
    assert quantiles[0] <= drawn[0] and drawn[-1] <= quantiles[-1]


@pytest.mark.parametrize("trace", [t for t in TRACES if abs(ROWS[t]["spearman_input_output"]) > 0.3])
def test_prompt_and_answer_are_as_correlated_as_in_the_trace(trace: str) -> None:
    wanted = ROWS[trace]["spearman_input_output"]
    assert abs(spearman(draw_requests(trace, COUNT, seed=0)) - wanted) < 0.05


def test_some_trace_is_correlated_and_some_is_not() -> None:
    sizes = [abs(ROWS[trace]["spearman_input_output"]) for trace in TRACES]
    assert max(sizes) > 0.3 > 0.1 > min(sizes)
    for trace, size in zip(TRACES, sizes, strict=True):
        assert abs(spearman(draw_requests(trace, COUNT, seed=1))) < size + 0.1


@every_trace
def test_the_joint_histogram_is_drawn_the_right_way_round(trace: str) -> None:
    """Rows are input ranks, columns output ranks: shares of the drawn cells are the trace's, not their transpose's."""
    joint = np.array(ROWS[trace]["joint_rank_histogram_16x16"], float)
    joint /= joint.sum()
    a, b = (
        np.minimum((ranks(x) - 0.5) / COUNT * 16, 15.999).astype(int)
        for x in columns(draw_requests(trace, COUNT, seed=0))
    )
    drawn = np.zeros_like(joint)
    np.add.at(drawn, (a, b), 1 / COUNT)
    assert np.abs(drawn - joint).sum() < np.abs(drawn - joint.T).sum()


@every_trace
def test_a_decode_step_meets_a_prompt_and_part_of_its_answer(trace: str) -> None:
    requests, lens = draw_requests(trace, 500, seed=7), draw_decode_lens(trace, 500, seed=7)
    for r, n in zip(requests, lens, strict=True):
        assert max(1, r.input_tokens) <= n <= r.input_tokens + r.output_tokens
    assert len({n - r.input_tokens for r, n in zip(requests, lens, strict=True)}) > 20


@every_trace
def test_a_title_names_licence_and_source(trace: str) -> None:
    assert ROWS[trace]["licence"] in trace_title(trace) and ROWS[trace]["cite"] in trace_title(trace)


def test_an_unknown_trace_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="trace: expected one of azure_llm_2023_conv, .*, got 'sharegpt'"):
        draw_requests("sharegpt", 3, seed=0)
    with pytest.raises(ValueError, match="count: expected at least 1, got 0"):
        draw_requests(TRACES[0], 0, seed=0)


@given(lens=st.lists(st.integers(0, 200_000), max_size=20), longest=st.integers(1, 50_000))
def test_scaling_keeps_order_and_zeros_and_reaches_the_longest(lens: list[int], longest: int) -> None:
    scaled = scale_to(lens, longest)
    if max(lens, default=0) <= longest:
        assert scaled == lens
        return
    assert max(scaled) == longest
    for before, after in zip(lens, scaled, strict=True):
        assert (after == 0) == (before == 0)
        assert after == max(min(before, 1), int(before * longest / max(lens) + 1e-9))
