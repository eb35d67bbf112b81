"""Which positions are one context-parallel rank's, against counting them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlab.plan.dcp import first_of, share_of

ranges = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5)


@given(ranges=ranges, ranks=st.integers(1, 6), from_0=st.booleans())
def test_every_position_is_one_ranks(ranges: list[tuple[int, int]], ranks: int, from_0: bool) -> None:
    lens = torch.tensor([n for _, n in ranges])
    start = torch.tensor([0 if from_0 else s for s, _ in ranges])
    shares = []
    for rank in range(ranks):
        shares.append(share_of(lens, ranks=ranks, rank=rank, start=None if from_0 else start))
        first = first_of(start, ranks=ranks, rank=rank)
        for s, n, share, at in zip(start.tolist(), lens.tolist(), shares[-1].tolist(), first.tolist(), strict=True):
            mine = [p for p in range(s, s + n) if p % ranks == rank]
            assert share == len(mine)
            assert at == next(p for p in range(s, s + ranks) if p % ranks == rank)
    assert sum(shares).tolist() == lens.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shares_keep_the_dtype_of_the_lengths(dtype: torch.dtype) -> None:
    lens = torch.tensor([9, 4], dtype=dtype)
    assert share_of(lens, ranks=4, rank=2).dtype == dtype
    assert share_of(lens, ranks=4, rank=2, start=lens).dtype == dtype


@pytest.mark.parametrize(
    ("ranks", "rank", "words"),
    [
        (0, 0, "ranks: expected at least 1, got 0"),
        (4, 4, "rank: a group of 4 has ranks 0 to 3, got 4"),
        (4, -1, "rank: a group of 4 has ranks 0 to 3, got -1"),
    ],
)
def test_a_rank_that_a_group_has_not_is_refused(ranks: int, rank: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        share_of(torch.tensor([3]), ranks=ranks, rank=rank)
