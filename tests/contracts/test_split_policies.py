"""What every registered split policy keeps, and the exact numbers of the published ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlab.assets import load_json
from attnlab.plan import policies  # noqa: F401  (registers the policies)
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import HostPolicy, SplitContext, SplitPolicy, resolve_policy, split_policies
from attnlab.plan.splits import HostSplits, splits_of_host, splits_of_sizes
from tests.strategies import DEVICE, contexts, lengths, lens

NAMES = split_policies.names()
ON_DEVICE = [name for name in NAMES if isinstance(resolve_policy(name), SplitPolicy)]
BATCH_INVARIANT = ["static", "tile"]

every_policy = pytest.mark.parametrize("name", NAMES)
halves = pytest.mark.parametrize("half", ["counts", "counts_triton"])


def context(**changes: Any) -> SplitContext:
    """32 query heads, 8 KV heads, 132 multiprocessors: the shape of the published numbers."""
    fields: dict[str, Any] = {
        "heads": 32,
        "kv_heads": 8,
        "v_dim": 128,
        "mla": False,
        "context_len": 1_000_000,
        "multiprocessors": 132,
        **changes,
    }
    return SplitContext(**fields)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def split(policy: SplitPolicy | HostPolicy, batch: list[int], ctx: SplitContext) -> tuple[HostSplits, int]:
    """Return the ranges, and how many the buffers hold."""
    if isinstance(policy, HostPolicy):
        plan = splits_of_host(policy, batch, ctx, torch.device(DEVICE))
    else:
        bounds = policy.bounds(bound_max=max(batch, default=0), ctx=ctx)
        sizes = policy.sizes(ints(batch), ctx)
        plan = splits_of_sizes(sizes, ints(batch), policy=policy.name, bounds=bounds, total=sum(batch))
    return plan.to_host(), plan.capacity


def ranges(policy: SplitPolicy | HostPolicy, batch: list[int], ctx: SplitContext | None = None) -> list[list[Any]]:
    return [list(mine) for mine in split(policy, batch, context() if ctx is None else ctx)[0].ranges]


# --- Every policy -----------------------------------------------------------------------------------------------


def test_the_published_policies_are_registered() -> None:
    assert NAMES[:4] == ["balanced", "seed", "static", "tile"]


@every_policy
@given(batch=lens(), ctx=contexts())
def test_ranges_cover_every_key_once_in_order(name: str, batch: list[int], ctx: SplitContext) -> None:
    host, _ = split(resolve_policy(name), batch, ctx)
    assert len(host.ranges) == len(batch)
    for mine, n in zip(host.ranges, batch, strict=True):
        borders = [0, *(end for _, end in mine)]
        assert [start for start, _ in mine] == borders[:-1]
        assert borders[-1] == n and all(a < b for a, b in zip(borders, borders[1:], strict=False))


@every_policy
@given(batch=lens(), ctx=contexts(), slack=st.integers(0, 5000))
def test_what_is_promised_holds_every_range(name: str, batch: list[int], ctx: SplitContext, slack: int) -> None:
    policy = resolve_policy(name)
    host, held = split(policy, batch, ctx)
    bounds = policy.bounds(bound_max=max(batch, default=0) + slack, ctx=ctx)
    assert all(effective <= bounds.max_ranges for effective in host.effective)
    for mine in host.ranges:
        assert all(end - start >= bounds.min_size for start, end in mine[:-1])
    assert sum(host.effective) <= held
    assert sum(host.effective) <= bounds.capacity(reqs=len(batch), total=sum(batch) + slack)


@every_policy
@given(batch=lens(), ctx=contexts())
def test_a_request_without_keys_has_no_range(name: str, batch: list[int], ctx: SplitContext) -> None:
    """B31, B45: padded rows count as nothing, also where all rows are padding."""
    policy = resolve_policy(name)
    padded = [n for pair in zip(batch, [0] * len(batch), strict=True) for n in pair]
    host, _ = split(policy, padded, ctx)
    assert host.effective[1::2] == host.nominal[1::2] == (0,) * len(batch)
    none, _ = split(policy, [0] * len(batch), ctx)
    assert none.effective == none.nominal == (0,) * len(batch)


@pytest.mark.parametrize("name", ON_DEVICE)
@given(batch=lens(max_reqs=300), ctx=contexts())
def test_the_triton_half_equals_the_torch_half(name: str, batch: list[int], ctx: SplitContext) -> None:
    policy = resolve_policy(name)
    assert isinstance(policy, SplitPolicy)
    meaning, text = policy.sizes(ints(batch), ctx), policy.sizes_triton(ints(batch), ctx)
    assert torch.equal(meaning.size, text.size) and torch.equal(meaning.nominal, text.nominal)


# --- Policies that look at one request alone --------------------------------------------------------------------


@pytest.mark.parametrize("name", BATCH_INVARIANT)
@given(batch=lens(min_reqs=1), ctx=contexts())
def test_neighbours_do_not_move_a_requests_ranges(name: str, batch: list[int], ctx: SplitContext) -> None:
    policy = resolve_policy(name)
    assert ranges(policy, batch, ctx) == [ranges(policy, [n], ctx)[0] for n in batch]


def test_neighbours_do_move_them_under_the_seed_policy() -> None:
    """B40: so that the tests above say something."""
    assert ranges(Seed(), [120, 500])[0] != ranges(Seed(), [120, 5000])[0]


@given(size=st.integers(1, 600), n=lengths(), more=st.integers(0, 5000))
def test_tiles_do_not_move_as_a_request_grows(size: int, n: int, more: int) -> None:
    short, long = (ranges(Tile(tile=size), [m])[0] for m in (n, n + more))
    assert short[:-1] == long[: max(0, len(short) - 1)]
    assert all(start % size == 0 for start, _ in long)


@given(splits=st.integers(1, 64), n=lengths(), more=st.integers(0, 5000))
def test_static_ranges_only_grow_with_the_request(splits: int, n: int, more: int) -> None:
    """Their number may fall: 256 keys make 8 ranges of 32, 257 make 5 of 64. Their size does not."""
    policy = Static(splits=splits)
    short, long = (policy.sizes(ints([m]), context()) for m in (n, n + more))
    assert int(short.size) <= int(long.size) and int(short.nominal) <= int(long.nominal)


@given(size=st.integers(1, 600), n=lengths(), more=st.integers(0, 5000))
def test_tiles_only_become_more(size: int, n: int, more: int) -> None:
    short, long = (split(Tile(tile=size), [m], context())[0] for m in (n, n + more))
    assert short.effective <= long.effective and long.nominal == long.effective == (-(-(n + more) // size),)


# --- Published numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "splits", "size", "effective"),
    [
        (100, 8, 32, 4),
        (257, 8, 64, 5),
        (1000, 7, 160, 7),
        (4097, 8, 544, 8),
        (31, 8, 32, 1),
        (256, 29, 32, 8),
        (33, 3, 32, 2),
        (100, 3, 64, 2),
        (257, 3, 96, 3),
        (4096, 98, 64, 64),
        (1, 3, 32, 1),
    ],
)
def test_a_count_of_ranges_becomes_a_size_rounded_to_32_keys(n: int, splits: int, size: int, effective: int) -> None:
    assert ranges(Static(splits=splits), [n])[0] == [(i * size, min((i + 1) * size, n)) for i in range(effective)]


def test_short_contexts_are_asked_to_split_more_than_they_can() -> None:
    """B02: 29 ranges asked for, 8 that hold keys."""
    host, _ = split(Seed(max_splits=64), [256], context(multiprocessors=114))
    assert host.nominal == (29,)
    assert host.ranges[0] == tuple((32 * i, 32 * i + 32) for i in range(8))


@pytest.mark.parametrize(("n", "splits", "last"), [(100, 8, (96, 100)), (257, 8, (256, 257)), (1000, 7, (960, 1000))])
def test_the_last_range_takes_what_is_left(n: int, splits: int, last: tuple[int, int]) -> None:
    assert ranges(Static(splits=splits), [n])[0][-1] == last


def test_fixed_tiles_cut_where_counted_ones_do_not() -> None:
    """A count of ceil(len / 256), made even, cuts 257 keys at 160; tiles cut at 256."""
    assert ranges(Tile(), [257, 513])[0] == [(0, 256), (256, 257)]
    assert ranges(Static(splits=2), [257])[0] == [(0, 160), (160, 257)]
    assert ranges(Static(splits=3), [513])[0] == [(0, 192), (192, 384), (384, 513)]


CASES: list[dict[str, Any]] = load_json("golden/original/num_kv_splits.json", "cases")


def test_all_36_recorded_cases_are_there() -> None:
    assert len(CASES) == 36 and {case["num_group"] for case in CASES} > {1, 4}


@halves
@pytest.mark.parametrize("case", CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_seed_counts_are_the_originals(case: dict[str, Any], half: str) -> None:
    group = case["num_group"]
    ctx = context(
        heads=case["num_head"], kv_heads=case["num_kv_head"], multiprocessors=case["core_count"], rows_per_seq=group
    )
    policy = Seed(max_splits=case["max_kv_splits"])
    counts = getattr(policy, half)(ints(case["seq_lens"]).repeat_interleave(group), ctx)
    assert torch.equal(counts, ints(case["result"]))


@halves
@pytest.mark.parametrize(
    ("batch", "cap", "changes", "counts"),
    [
        ([256], 8, {}, [8]),
        ([4096], 32, {}, [32]),
        ([131072], 64, {}, [64]),
        ([64] * 4, 8, {}, [5] * 4),
        ([1000, 1100], 8, {}, [8, 8]),
        ([1000, 4000], 8, {}, [2, 8]),
        ([4096] * 64, 8, {}, [2] * 64),
        ([10, 1000], 8, {}, [1, 8]),
        ([1000, 1249], 8, {}, [7, 8]),
        ([1000, 1250], 8, {}, [7, 8]),
        ([300] * 16 + [3000], 8, {}, [1] * 16 + [8]),
        ([1, 4096], 64, {}, [1, 64]),
        ([100, 3000, 4096, 50], 16, {"multiprocessors": 108}, [1, 12, 16, 1]),
        ([512, 1024], 16, {"heads": 20, "kv_heads": 4, "multiprocessors": 108}, [8, 16]),
        ([4096], 256, {"heads": 128, "kv_heads": 1}, [98]),
        ([500] * 4 + [6000] * 4, 16, {"rows_per_seq": 4}, [2] * 4 + [14] * 4),
    ],
)
def test_seed_counts_are_the_published_ones(
    half: str, batch: list[int], cap: int, changes: dict[str, Any], counts: list[int]
) -> None:
    assert getattr(Seed(max_splits=cap), half)(ints(batch), context(**changes)).tolist() == counts


@halves
def test_a_batch_is_uneven_from_a_ratio_of_five_to_four_on(half: str) -> None:
    """64 pairs, so that the device has room for one range each and the ratio alone decides."""
    for longer, counts in ((1249, [1, 1]), (1250, [2, 2])):
        assert getattr(Seed(), half)(ints([1000, longer] * 64), context()).tolist() == counts * 64


@halves
def test_rows_of_no_tokens_take_no_part_in_the_seed_counts(half: str) -> None:
    """The original divides by the shortest length, which then is 0."""
    assert getattr(Seed(), half)(ints([4096] * 64 + [0]), context()).tolist() == [2] * 64 + [0]
    assert getattr(Seed(), half)(ints([4096, 0, 0, 0]), context()).tolist()[1:] == [0, 0, 0]
    assert getattr(Seed(), half)(ints([0, 0]), context()).tolist() == [0, 0]


@halves
@pytest.mark.parametrize("group", [1, 2, 4])
def test_rows_that_share_a_sequence_get_the_same_count(half: str, group: int) -> None:
    batch = ints([500, 6000, 33]).repeat_interleave(group)
    counts = getattr(Seed(max_splits=16), half)(batch, context(rows_per_seq=group)).view(3, group)
    assert torch.equal(counts, counts[:, :1].expand(3, group))


@halves
def test_rows_that_do_not_fill_a_group_are_refused(half: str) -> None:
    with pytest.raises(ValueError, match=r"lens: expected a multiple of rows_per_seq 4, .* got 6"):
        getattr(Seed(), half)(ints([5] * 6), context(rows_per_seq=4))


@halves
def test_an_unknown_device_gets_the_cap(half: str) -> None:
    counts = getattr(Seed(max_splits=5), half)(ints([1, 0, 9000]), context(multiprocessors=None))
    assert counts.tolist() == [5, 0, 5]


@halves
def test_seed_counts_of_4096_requests_and_of_none(half: str) -> None:
    batch = [1 + 7 * i for i in range(4096)]
    counts = getattr(Seed(), half)(ints(batch), context())
    assert counts.shape == (4096,) and counts[-1] == 8 and int(counts.min()) == 1
    assert getattr(Seed(), half)(ints([]), context()).shape == (0,)


@given(batch=lens(), ctx=contexts(), cap=st.integers(1, 64))
def test_seed_counts_lie_between_one_and_the_cap(batch: list[int], ctx: SplitContext, cap: int) -> None:
    policy = Seed(max_splits=cap)
    for n, count in zip(batch, policy.counts(ints(batch), ctx).tolist(), strict=True):
        assert (1 <= count <= policy.cap(ctx)) if n else count == 0


def test_both_halves_round_the_logarithm_alike() -> None:
    """The device's share is log2(longest / 64) in fp32, cut to a whole number: an ulp may move it."""
    for multiprocessors in (78, 108, 114, 132, 304):
        ctx, policy = context(multiprocessors=multiprocessors), Seed(max_splits=4096)
        for n in [*range(64, 4096, 97), *(2**k + d for k in range(7, 20) for d in (-1, 0, 1))]:
            assert torch.equal(policy.counts(ints([n]), ctx), policy.counts_triton(ints([n]), ctx)), (n, ctx)


@pytest.mark.parametrize(
    ("multiprocessors", "context_len", "cap"),
    [(132, 131072, 256), (132, 1024, 32), (304, 131072, 512), (132, 32, 8), (None, 131072, 8)],
)
def test_under_mla_the_cap_fills_the_device(multiprocessors: int | None, context_len: int, cap: int) -> None:
    mla = context(heads=128, kv_heads=1, mla=True, multiprocessors=multiprocessors, context_len=context_len)
    assert Seed().cap(mla) == Seed().bounds(bound_max=1, ctx=mla).max_ranges == cap
    assert Seed(max_splits=1024).cap(mla) == 1024
    assert Seed().cap(context(multiprocessors=multiprocessors, context_len=context_len)) == 8


@pytest.mark.parametrize(
    ("policy", "longest", "max_ranges", "min_size"),
    [(Seed(), 5000, 8, 32), (Static(splits=3), 5000, 3, 32), (Tile(), 5000, 20, 256), (Tile(), 0, 1, 256)],
    ids=str,
)
def test_bounds_are_exact(policy: SplitPolicy, longest: int, max_ranges: int, min_size: int) -> None:
    bounds = policy.bounds(bound_max=longest, ctx=context())
    assert (bounds.max_ranges, bounds.min_size) == (max_ranges, min_size)


@pytest.mark.parametrize(
    ("reqs", "total", "capacity"), [(0, 0, 0), (1, 0, 1), (4, 4096, 32), (4, 100, 7), (512, 512 * 31, 512 + 496)]
)
def test_capacity_follows_the_tokens_and_not_batch_times_context(reqs: int, total: int, capacity: int) -> None:
    bounds = Seed().bounds(bound_max=131072, ctx=context())
    assert bounds.capacity(reqs=reqs, total=total) == capacity


@pytest.mark.parametrize("build", [lambda: Seed(max_splits=0), lambda: Static(splits=-1), lambda: Tile(tile=0)])
def test_a_parameter_is_at_least_one(build: Any) -> None:
    with pytest.raises(ValueError, match="expected at least 1, got"):
        build()


@pytest.mark.parametrize(
    "field", ["heads", "kv_heads", "v_dim", "context_len", "rows_per_seq", "multiprocessors", "drafts"]
)
def test_a_context_is_made_of_positive_numbers(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected at least 1"):
        context(**{field: 0})
