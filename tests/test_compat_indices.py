"""The original's index builders by their names: its own results, plain Python, and what they leave alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab.assets import load_json
from attnlab.compat import sglang
from tests.cases import ENGINES
from tests.originals import UNIFIED, Args, load
from tests.syncs import no_waiting
from tests.tolerances import LSE, OUTPUT

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
integers = st.sampled_from([torch.int32, torch.int64])
OLD = -7
"""What buffers hold before."""

COUNTS: list[dict[str, Any]] = load_json("golden/original/num_kv_splits.json", "cases")


# --- The original's results -------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("kind", ["nostart", "start"])
def test_flashinfer_lists_are_the_originals(kind: str, engine: str, device: str) -> None:
    file = load("flashinfer_kv_indices", device)
    want, table = file[f"{kind}_kv_indices"], file["req_to_token"]
    live = int(file["lens"].sum())
    out = torch.full_like(want, OLD)
    sglang.create_flashinfer_kv_indices_triton[(3,)](
        table,
        file["req_pool_indices"],
        file["lens"],
        file[f"{kind}_kv_indptr"],
        file["kv_start_idx"] if kind == "start" else None,
        out,
        table.stride(0),
        engine=engine,
    )
    assert torch.equal(out[:live], want[:live])
    assert bool((out[live:] == OLD).all())


@engines
@pytest.mark.parametrize("kind", ["nostart", "start"])
@pytest.mark.parametrize("rank", range(4))
def test_lists_of_a_rank_are_the_originals(kind: str, rank: int, engine: str, device: str) -> None:
    file = load("dcp_kv_indices_size4", device)
    start = file["kv_start_idx"] if kind == "start" else None
    lens = sglang.get_dcp_lens(file["seq_lens"], 4, rank, start)
    assert torch.equal(lens, file[f"{kind}_rank{rank}_lens"])
    want = file[f"{kind}_rank{rank}_kv_indices"]
    live, out = int(lens.sum()), torch.full_like(want, OLD)
    sglang.create_triton_kv_indices_for_dcp_triton[(9,)](
        file["req_to_token"],
        file["req_pool_indices"],
        lens,
        file[f"{kind}_rank{rank}_kv_indptr"],
        start,
        out,
        req_to_token_ptr_stride=file["req_to_token"].stride(0),
        dcp_size=4,
        dcp_rank=rank,
        engine=engine,
    )
    assert torch.equal(out[:live], want[:live])
    assert bool((out[live:] == OLD).all())


@engines
@pytest.mark.parametrize("name", UNIFIED)
def test_unified_lists_are_the_originals(name: str, engine: str, device: str) -> None:
    file = load(name, device)
    lists = ("prefix_kv_indptr", "prefix_kv_indices", "extend_start_loc", "extend_seq_lens", "extend_kv_indices")
    indptr, indices, lens = sglang.build_unified_kv_indices(*(file[x] for x in lists), 3, engine=engine)
    assert indptr.tolist() == file["unified_kv_indptr"].tolist()
    assert torch.equal(indices[: indptr[-1]], file["unified_kv_indices"][: indptr[-1]])
    assert torch.equal(lens, file["prefix_lens"]) and lens.dtype == torch.int32


@engines
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_split_counts_are_the_originals(dtype: torch.dtype, engine: str, device: str) -> None:
    for case in COUNTS:
        seqs, group = len(case["seq_lens"]), case["num_group"]
        out = torch.full((seqs * group + 2,), OLD, dtype=torch.int32, device=device)
        lens = torch.tensor([*case["seq_lens"], 10**6], dtype=dtype, device=device)
        shape = (case["num_head"], case["num_kv_head"], case["max_kv_splits"], case["core_count"])
        sglang.get_num_kv_splits_triton[(1,)](out, lens, seqs, group, *shape, MAX_NUM_SEQ=512, engine=engine)
        assert out.tolist() == [*case["result"], OLD, OLD]


DRAFTS = ["draft_topk1_steps3_page4", "draft_topk4_steps3_page1", "draft_topk4_steps3_page4"]


@engines
@pytest.mark.parametrize("name", DRAFTS)
def test_draft_lists_are_the_originals(name: str, engine: str, device: str) -> None:
    file = load(name, device)
    args, grid = draft_args(file)
    sglang.generate_draft_decode_kv_indices[grid](**args, engine=engine)
    assert torch.equal(args["kv_indptr"], file["kv_indptr"])
    for got, want, used in zip(args["kv_indices"], file["kv_indices"], file["used_len"].tolist(), strict=True):
        assert torch.equal(got[:used], want[:used])
        assert bool((got[used:] == OLD).all())


def draft_args(file: Args) -> tuple[Args, tuple[int, int, int]]:
    """Arguments and grid of a draft case; buffers hold what they held when the file was made."""
    seqs, branches = len(file["seq_lens"]), len(file["positions"])
    indptr = torch.full_like(file["kv_indptr"], OLD)
    indptr[:, 0] = 0
    args = {name: file[name] for name in ("req_pool_indices", "req_to_token", "positions", "page_size")}
    return {
        **args,
        "paged_kernel_lens": file["seq_lens"],
        "kv_indices": torch.full_like(file["kv_indices"], OLD),
        "kv_indptr": indptr,
        "pool_len": file["req_to_token"].stride(0),
        "kv_indices_stride": file["kv_indices"].stride(0),
        "kv_indptr_stride": indptr.stride(0),
        "bs_upper": 4,
        "iter_upper": 4,
        "num_tokens_upper": 16,
    }, (file["num_steps"], seqs, branches // seqs)


# --- Against plain Python ---------------------------------------------------------------------------------------

requests = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=5)


def ints(values: list[Any], dtype: torch.dtype, device: str) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@engines
def test_lists_are_what_plain_python_gathers(engine: str, device: str) -> None:
    @given(given=requests, ranks=st.integers(1, 4), dtype=integers, out_dtype=integers, from_0=st.booleans())
    def drawn(
        given: list[tuple[int, int, int]], ranks: int, dtype: torch.dtype, out_dtype: torch.dtype, from_0: bool
    ) -> None:
        table = torch.randint(1, 500, (4, 64), dtype=torch.int32, device=device)
        rows = table.tolist()
        start = None if from_0 else ints([s for _, s, _ in given], dtype, device)
        lens = ints([n for *_, n in given], dtype, device)
        places = ints([row for row, *_ in given], dtype, device)
        for rank in range(ranks):
            wanted: list[list[int]] = []
            for row, s, n in given:
                first = 0 if from_0 else s
                wanted.append([rows[row][p] // ranks for p in range(first, first + n) if p % ranks == rank])
            shares = sglang.get_dcp_lens(lens, ranks, rank, start)
            assert shares.tolist() == [len(mine) for mine in wanted] and shares.dtype == dtype
            indptr = torch.nn.functional.pad(shares.cumsum(0), (1, 0)).to(dtype)
            outs = [ints([OLD] * 250, out_dtype, device) for _ in range(2)]
            shared = (table, places, shares, indptr, start)
            build = sglang.create_triton_kv_indices_for_dcp_triton[(len(given),)]
            build(*shared, outs[0], 64, ranks, rank, engine=engine)
            flat = [slot for mine in wanted for slot in mine]
            assert outs[0].tolist() == flat + [OLD] * (250 - len(flat))
            if ranks == 1:
                sglang.create_flashinfer_kv_indices_triton[len(given), 1](*shared, outs[1], 64, engine=engine)
                assert torch.equal(*outs)

    drawn()


@engines
def test_unified_lists_are_what_plain_python_joins(engine: str, device: str) -> None:
    slots = st.lists(st.integers(1, 99), max_size=6)

    @given(lists=st.lists(st.tuples(slots, slots), max_size=5), swapped=st.booleans(), dtype=integers)
    def drawn(lists: list[tuple[list[int], list[int]]], swapped: bool, dtype: torch.dtype) -> None:
        """Where the new tokens of requests begin need not be in the order of the requests."""
        order = range(len(lists))[::-1] if swapped else range(len(lists))
        new, start = [], {}
        for r in order:
            start[r] = len(new)
            new += lists[r][1]
        cached = [slot for a, _ in lists for slot in a]
        indptr = [sum(len(a) for a, _ in lists[:r]) for r in range(len(lists) + 1)]
        got, slots, lens = sglang.build_unified_kv_indices(
            ints([*indptr, 10**6], torch.int32, device),
            ints([*cached, OLD], dtype, device),
            ints([*(start[r] for r in range(len(lists))), 3], dtype, device),
            ints([*(len(b) for _, b in lists), 9], dtype, device),
            ints([*new, OLD, OLD], dtype, device),
            len(lists),
            engine=engine,
        )
        wanted = [slot for a, b in lists for slot in a + b]
        assert slots.tolist() == wanted + [0, 0, 0] and slots.dtype == torch.int64
        assert got.tolist() == [sum(len(a) + len(b) for a, b in lists[:r]) for r in range(len(lists) + 1)]
        assert lens.tolist() == [len(a) for a, _ in lists]

    drawn()


# --- Nothing waits ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="guards interpreted kernels")
@engines
def test_no_length_is_read_back(engine: str, device: str) -> None:
    file, unified = load("dcp_kv_indices_size4", device), load("unified_causal", device)
    table, rows, lens = file["req_to_token"], file["req_pool_indices"], file["seq_lens"]
    indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    out = torch.zeros(int(lens.sum()), dtype=torch.int64, device=device)
    lists = ("prefix_kv_indptr", "prefix_kv_indices", "extend_start_loc", "extend_seq_lens", "extend_kv_indices")
    splits = torch.zeros(18, dtype=torch.int32, device=device)
    pool = SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: slots + 1)
    group = Ranks([torch.zeros(2, 4)] * 2, [torch.zeros(2, 4, 8)] * 2, 0)
    drafts, grid = draft_args(load(DRAFTS[2], device))
    with no_waiting():
        mine = sglang.get_dcp_lens(lens, 4, 1, lens)
        shared = (table, rows, mine, indptr, lens, out, table.stride(0))
        sglang.create_triton_kv_indices_for_dcp_triton[(9,)](*shared, 4, 1, engine=engine)
        sglang.create_flashinfer_kv_indices_triton[(9,)](*shared, engine=engine)
        sglang.build_unified_kv_indices(*(unified[x] for x in lists), 3, engine=engine)
        sglang.update_sliding_window_buffer(
            indptr.clone(), table, 5, lens, rows, 9, token_to_kv_pool=pool, engine=engine
        )
        sglang.generate_draft_decode_kv_indices[grid](**drafts, engine=engine)
        sglang.get_num_kv_splits_triton[(1,)](splits, lens, 9, 2, 32, 8, 8, 132, 256, engine=engine)
        sglang.cp_lse_ag_out_rs_mha(torch.zeros(2, 4, 8), torch.zeros(2, 4), group)


# --- Windows ----------------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("given_buffer", [False, True])
def test_window_lists_hold_the_last_tokens(given_buffer: bool, engine: str, device: str) -> None:
    """min(len, W) of them, as the original has it: W earlier keys before an extend's queries."""
    table = torch.arange(1, 4 * 50 + 1, dtype=torch.int32, device=device).view(4, 50)
    lens, rows = ints([0, 6, 7, 8, 50], torch.int64, device), ints([0, 3, 1, 2, 0], torch.int64, device)
    buffer = ints([OLD] * 40, torch.int64, device) if given_buffer else None
    indptr = torch.zeros(9, dtype=torch.int32, device=device)
    got, slots, counts, start = sglang.update_sliding_window_buffer(
        indptr, table, 7, lens, rows, 5, device, window_kv_indices=buffer, engine=engine
    )
    wanted = [table[row, max(0, n - 7) : n].tolist() for row, n in zip(rows.tolist(), lens.tolist(), strict=True)]
    flat = [slot for mine in wanted for slot in mine]
    assert slots.tolist() == flat + ([OLD] * 13 if given_buffer else [0] * 8)
    assert buffer is None or slots is buffer
    assert got.tolist() == [0, 0, 6, 13, 20, 27] and got.data_ptr() == indptr.data_ptr()
    assert counts.tolist() == [0, 6, 7, 7, 7] and start.tolist() == [0, 0, 0, 1, 43]
    assert indptr[6:].tolist() == [0, 0, 0]


@engines
@pytest.mark.parametrize("skipped", [False, True])
def test_live_window_slots_alone_are_translated_once(skipped: bool, engine: str, device: str) -> None:
    """A tail of stale numbers must not be looked up: the mapping knows none of them."""
    mapping = torch.arange(201, device=device) + 1000

    def translate(slots: Tensor) -> Tensor:
        assert int(slots.min()) >= 0 and int(slots.max()) < 201
        return mapping[slots]

    table = torch.arange(1, 201, dtype=torch.int32, device=device).view(4, 50)
    buffer = ints([10**9] * 9, torch.int64, device)
    sglang.update_sliding_window_buffer(
        torch.zeros(3, dtype=torch.int32, device=device),
        table,
        4,
        ints([3, 9], torch.int32, device),
        ints([0, 1], torch.int64, device),
        2,
        token_to_kv_pool=SimpleNamespace(translate_loc_from_full_to_swa=translate),
        window_kv_indices=buffer,
        skip_full_to_swa_translation=skipped,
        engine=engine,
    )
    moved = 0 if skipped else 1000
    assert buffer.tolist() == [moved + slot for slot in (1, 2, 3, 56, 57, 58, 59)] + [10**9] * 2


def test_a_pool_without_a_sliding_storage_keeps_its_slots() -> None:
    engine, device = ENGINES[0]
    table = torch.arange(1, 11, dtype=torch.int32, device=device).view(1, 10)
    _, slots, *_ = sglang.update_sliding_window_buffer(
        torch.zeros(2, dtype=torch.int32, device=device),
        table,
        4,
        ints([9], torch.int32, device),
        ints([0], torch.int64, device),
        1,
        token_to_kv_pool=SimpleNamespace(),
        engine=engine,
    )
    assert slots.tolist() == [6, 7, 8, 9]


# --- Split counts -----------------------------------------------------------------------------------------------


def counts(lens: list[int], engine: str, device: str, *, cores: int = 132) -> list[int]:
    out = torch.full((len(lens),), OLD, dtype=torch.int32, device=device)
    seq_lens = ints(lens, torch.int32, device)
    sglang.get_num_kv_splits_triton[(1, 1, 1)](out, seq_lens, len(lens), 1, 32, 8, 8, cores, 256, engine=engine)
    return out.tolist()


@engines
def test_sequences_of_no_token_take_no_part_and_get_no_split(engine: str, device: str) -> None:
    """The original divides by zero where all are empty, and takes the length 0 for the shortest."""
    assert counts([0, 10, 0, 1000], engine, device) == [0, 1, 0, 8]
    assert counts([0, 0], engine, device) == [0, 0]


@engines
def test_an_unknown_device_gets_the_most_splits(engine: str, device: str) -> None:
    assert counts([5, 0, 4096], engine, device, cores=0) == [8, 0, 8]


# --- Merging ranks ----------------------------------------------------------------------------------------------


class Ranks:
    """All ranks of a group in one process: each says what it would send, and gets what it would be given."""

    def __init__(self, lses: list[Tensor], outs: list[Tensor], rank: int) -> None:
        self.world_size, self.rank_in_group = len(lses), rank
        self.lses, self.outs = lses, outs

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        assert dim == 0
        return torch.cat([x if rank == self.rank_in_group else lse for rank, lse in enumerate(self.lses)])

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what each rank weighs its output by, as the rank itself computes it."""
        whole = torch.stack(self.lses).logsumexp(0)
        others = [
            out.nan_to_num(0, 0, 0) * (lse - whole).exp().nan_to_num(0)[..., None]
            for rank, (out, lse) in enumerate(zip(self.outs, self.lses, strict=True))
            if rank != self.rank_in_group
        ]
        return x + sum(others)


@pytest.mark.parametrize("ranks", [2, 4])
def test_merged_ranks_give_attention_over_all_keys(ranks: int) -> None:
    """Keys are dealt by position; request 0 has one key, so that most ranks hold none of it and leave garbage."""
    scores, values = torch.randn(3, 4, 10), torch.randn(3, 10, 16)
    scores[0, :, 1:] = -float("inf")
    lses, outs = [], []
    for rank in range(ranks):
        mine, v = scores[..., rank::ranks], values[:, rank::ranks]
        lses.append(mine.logsumexp(-1))
        outs.append(mine.softmax(-1) @ v)  # NaN where nothing is seen
    assert bool(outs[1][0].isnan().all())
    want, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    for rank in range(ranks):
        given = outs[rank].clone()
        group = Ranks(lses, outs, rank)
        out, got = sglang.cp_lse_ag_out_rs_mha(given, lses[rank], group, return_lse=True)
        heads = slice(4 // ranks * rank, 4 // ranks * (rank + 1))
        torch.testing.assert_close(out, want[:, heads], **OUTPUT[torch.float32])
        torch.testing.assert_close(got, lse[:, heads], **LSE)
        assert out.is_contiguous() and bool(given.isfinite().all())  # in place
        alone = sglang.cp_lse_ag_out_rs_mha(outs[rank].clone(), lses[rank], group)
        assert torch.equal(alone, out)


def test_what_no_rank_holds_is_0() -> None:
    lses = [torch.full((2, 4), -float("inf"))] * 2
    outs = [torch.full((2, 4, 8), float("nan"))] * 2
    out, lse = sglang.cp_lse_ag_out_rs_mha(outs[0].clone(), lses[0], Ranks(lses, outs, 0), return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -float("inf")).all())


def test_one_rank_gets_its_arguments_back() -> None:
    out, lse = torch.randn(2, 4, 8), torch.randn(2, 4)
    group = Ranks([lse], [out], 0)
    assert sglang.cp_lse_ag_out_rs_mha(out, lse, group) is out
    got = sglang.cp_lse_ag_out_rs_mha(out, lse, group, True)
    assert got[0] is out and got[1] is lse
    lens = torch.tensor([3, 4])
    assert sglang.get_dcp_lens(lens, 1, 0) is lens


# --- Small ones -------------------------------------------------------------------------------------------------


def test_widths_of_draft_lists() -> None:
    assert sglang.draft_kv_indices_buffer_width(64, 4, 4096) == 64 * 4 * 4096
    with pytest.raises(ValueError, match=r"expected a product below 2\^31, got 1024 x 8 x 262144"):
        sglang.draft_kv_indices_buffer_width(1024, 8, 262144)
    for name in DRAFTS:
        file = load(name, "cpu")
        used = [
            sglang.draft_kv_indices_used_len(int(file["seq_lens"].sum()), file["topk"], len(file["positions"]), n)
            for n in range(1, file["num_steps"] + 1)
        ]
        assert used == file["used_len"].tolist()


MASK = {
    "is_draft_runner": False,
    "skip_prefill": False,
    "max_bs": 3,
    "max_context_len": 100,
    "num_draft_tokens": 4,
    "is_read": True,
}


@pytest.mark.parametrize(
    ("device", "is_read", "mode", "numel"),
    [("meta", True, "FULL_MASK", 3 * 4 * 104), ("meta", False, "QLEN_ONLY", 48), ("cpu", True, "QLEN_ONLY", 48)],
)
def test_a_verify_mask_has_a_byte_for_what_is_read(device: str, is_read: bool, mode: str, numel: int) -> None:
    mask = sglang.maybe_create_verify_mask(**{**MASK, "is_read": is_read}, device=device, dtype=torch.uint8)
    assert mask is not None and mask.mode is sglang.TreeMaskMode[mode]
    assert mask.buffer.shape == (numel,) and mask.buffer.dtype == torch.uint8
    assert (mask.max_bs, mask.is_read) == (3, is_read)
    assert mask.fits(3) and mask.fits(0) and not mask.fits(4)
    with pytest.raises(ValueError, match="bs: expected at least 0 requests, got -1"):
        mask.fits(-1)


def test_a_verify_mask_begins_with_zeros_of_bool() -> None:
    mask = sglang.maybe_create_verify_mask(**MASK, device="cpu")
    assert mask is not None and mask.buffer.dtype == torch.bool and not bool(mask.buffer.any())


@pytest.mark.parametrize("change", [{"is_draft_runner": True}, {"skip_prefill": True}, {"num_draft_tokens": 0}])
def test_no_verify_mask_where_nothing_is_verified(change: dict[str, Any]) -> None:
    assert sglang.maybe_create_verify_mask(**{**MASK, **change}, device="cpu") is None


def test_a_write_location_is_built_by_position() -> None:
    loc, swa = torch.tensor([3]), torch.tensor([1])
    where = sglang.KVWriteLoc(loc, swa)
    assert (where.loc, where.full_loc) == (loc, None) and torch.equal(where.swa_loc, swa)
    where = sglang.KVWriteLoc(loc, torch.tensor([1, 2]), torch.tensor([4, 0]))
    assert where.swa_loc.tolist() == [1] and where.full_loc.tolist() == [4]  # type: ignore[union-attr]
