"""Offsets, lengths and slots that lie outside: refused where looking costs nothing, held where it would wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.compat import sglang
from attnlab.compat.sglang.values import held
from tests.cases import ENGINES
from tests.originals import Args, decode_args, extend_args, load, unified_args, verify_args
from tests.syncs import unread
from tests.test_compat_indices import OLD, draft_args, ints

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
Made = Callable[[str], tuple[Args, Args]]
ATTENTION: dict[str, tuple[Callable[..., Any], Made]] = {
    "decode": (sglang.decode_attention_fwd, lambda device: decode_args("decode_gqa_3splits", device)),
    "extend": (sglang.extend_attention_fwd, lambda device: extend_args("extend_window_mask_offsets_skip", device)),
    "unified": (sglang.extend_attention_fwd_unified, lambda device: unified_args("unified_custom_mask", device)),
    "verify": (sglang.verify_splitkv_fwd, verify_args),
}
WRITTEN = ("o", "o_extend", "lse_extend", "attn_logits", "attn_lse")
"""What attention fills."""


def changed(x: Tensor, entry: int, value: int) -> Tensor:
    other = x.clone()
    other[entry] = value
    return other


# --- Refused on a CPU -------------------------------------------------------------------------------------------

LISTS = [*ATTENTION]
QUERIES = ["extend", "unified", "verify"]
MASKED = ["extend", "unified"]
REFUSED = [
    *((name, "kv_indptr", 0, -3, r"kv_indptr: expected offsets into the .* that ascend, got -3 to") for name in LISTS),
    *((name, "kv_indptr", 1, -5, r"kv_indptr: expected offsets .* that ascend, got -5 behind 0") for name in LISTS),
    *(
        (name, "kv_indptr", -1, 2**31 - 1, "kv_indptr: expected offsets .* of kv_indices .*, got 0 to")
        for name in LISTS
    ),
    *((name, "kv_indices", 1, 10**8, "kv_indices: expected 0 to .*, got 100000000 in entry 1") for name in LISTS),
    *((name, "kv_indices", -1, -1, "kv_indices: expected 0 to .*, the slots of k_buffer, got -1") for name in LISTS),
    *((name, "qo_indptr", 0, -3, "qo_indptr: expected offsets into the .* entries of q.*, got -3") for name in QUERIES),
    *((name, "qo_indptr", 1, 99, "qo_indptr: expected offsets .* that ascend, got .* behind 99") for name in QUERIES),
    *((name, "mask_indptr", 0, -1, "mask_indptr: expected at least 0, got -1 in entry 0") for name in MASKED),
    ("extend", "window_kv_offsets", 1, -2, "window_kv_offsets: expected at least 0, got -2 in entry 1"),
]


@pytest.mark.parametrize(("name", "argument", "entry", "value", "words"), REFUSED)
def test_attention_refuses_what_lies_outside(name: str, argument: str, entry: int, value: int, words: str) -> None:
    function, made = ATTENTION[name]
    args, _ = made("cpu")
    with pytest.raises(ValueError, match=words):
        function(**{**args, argument: changed(args[argument], entry, value)}, engine="eager")
    assert all(bool(args[x].isnan().all()) for x in WRITTEN if x in args)


@pytest.mark.parametrize("name", ATTENTION)
def test_what_lies_outside_of_the_lists_is_not_looked_at(name: str) -> None:
    function, made = ATTENTION[name]
    (args, _), (same, _) = made("cpu"), made("cpu")
    function(**{**args, "kv_indices": torch.nn.functional.pad(args["kv_indices"], (0, 3), value=10**8)}, engine="eager")
    function(**same, engine="eager")
    assert all(torch.equal(args[x].nan_to_num(7), same[x].nan_to_num(7)) for x in WRITTEN if x in args)


def gather(engine: str, device: str, out: Tensor, **change: Tensor) -> None:
    """The lists of rows 1 and 2 of a table of 4: 3 and 4 entries."""
    table = torch.arange(1, 65, dtype=torch.int32, device=device).view(4, 16)
    given = {
        "req_pool_indices_ptr": ints([1, 2], torch.int64, device),
        "page_kernel_lens_ptr": ints([3, 4], torch.int64, device),
        "kv_indptr": ints([0, 3, 7], torch.int32, device),
        "kv_start_idx": None,
        **change,
    }
    build = sglang.create_flashinfer_kv_indices_triton[(2,)]
    build(req_to_token_ptr=table, kv_indices_ptr=out, req_to_token_ptr_stride=16, **given, engine=engine)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"req_pool_indices_ptr": [0, 4]},
            "req_pool_indices_ptr: expected 0 to 3, the rows of req_to_token_ptr, got 4",
        ),
        ({"req_pool_indices_ptr": [-1, 1]}, "req_pool_indices_ptr: expected 0 to 3, .* got -1 in entry 0"),
        ({"page_kernel_lens_ptr": [3, -4]}, "page_kernel_lens_ptr: expected at least 0, got -4 in entry 1"),
        ({"kv_indptr": [-2, 3]}, "kv_indptr: expected at least 0, got -2 in entry 0"),
        ({"kv_start_idx": [0, -9]}, "kv_start_idx: expected at least 0, got -9 in entry 1"),
    ],
)
def test_index_lists_refuse_what_lies_outside(change: dict[str, list[int]], words: str) -> None:
    out = ints([OLD] * 9, torch.int64, "cpu")
    with pytest.raises(ValueError, match=words):
        gather("eager", "cpu", out, **{name: ints(x, torch.int64, "cpu") for name, x in change.items()})
    assert out.tolist() == [OLD] * 9


@engines
def test_a_row_of_nothing_may_be_any(engine: str, device: str) -> None:
    """Padding has no length; its row is not looked up, nor refused."""
    out = ints([OLD] * 9, torch.int64, device)
    rows, lens = ints([1, 10**7], torch.int64, device), ints([3, 0], torch.int64, device)
    gather(engine, device, out, req_pool_indices_ptr=rows, page_kernel_lens_ptr=lens)
    assert out.tolist() == [17, 18, 19] + [OLD] * 6


def test_other_lists_refuse_what_lies_outside() -> None:
    def refused(words: str, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=words):
            call()

    table, rows = torch.ones(4, 16, dtype=torch.int32), torch.tensor([1, 2])
    refused("seq_lens: expected at least 0, got -4", lambda: window(table, rows, torch.tensor([-4, 5])))
    refused("req_pool_indices: expected 0 to 3", lambda: window(table, rows + 2, torch.tensor([4, 5])))
    refused("prefix_kv_indptr: expected offsets .* got -1", lambda: unite(prefix_kv_indptr=[-1, 2, 5]))
    refused("extend_start_loc: expected at least 0, got -2", lambda: unite(extend_start_loc=[-2, 0]))
    refused("extend_seq_lens: expected at least 0, got -1", lambda: unite(extend_seq_lens=[-1, 3]))
    refused("seq_lens_ptr: expected at least 0, got -5", lambda: splits([-5, 600]))
    args, grid = draft_args(load("draft_topk4_steps3_page4", "cpu"))
    draft = sglang.generate_draft_decode_kv_indices[grid]
    many, lens = args["req_to_token"].shape[0], args["paged_kernel_lens"]
    far, less = changed(args["req_pool_indices"], 0, many), changed(lens, 1, -1)
    refused("req_pool_indices: expected 0 to", lambda: draft(**{**args, "req_pool_indices": far}, engine="eager"))
    refused(
        "paged_kernel_lens: expected at least 0", lambda: draft(**{**args, "paged_kernel_lens": less}, engine="eager")
    )


# --- Held where the host would wait -----------------------------------------------------------------------------


def test_offsets_are_held_to_their_list() -> None:
    assert held(torch.tensor([-3, 5, 2, 99]), 9).tolist() == [0, 5, 5, 9]
    assert held(torch.tensor([-(2**31)], dtype=torch.int32), 0).tolist() == [0]


def fenced(like: Tensor) -> tuple[Tensor, Tensor]:
    """(a buffer with as much room in front of `like` and behind it, its middle)."""
    around = torch.full((3 * like.shape[0], *like.shape[1:]), 7.0, dtype=like.dtype, device=like.device)
    return around, around[like.shape[0] : 2 * like.shape[0]]


HELD = [
    *((name, "kv_indptr", [0, -5, 12, 19], [0, 0, 12, 19]) for name in MASKED),
    *((name, "kv_indptr", [-3, 7, 4, 19], [0, 7, 7, 19]) for name in MASKED),
    ("decode", "kv_indptr", [0, -5, 34, 20, 391], [0, 0, 34, 34, 391]),
    ("decode", "kv_indptr", [-9, 40, 2**31 + 5, 2**40, 2**40], [0, 40, 391, 391, 391]),
    ("verify", "kv_indptr", [-70, 40, -1, 2**40], [0, 40, 40, 169]),
    ("extend", "qo_indptr", [-3, 4, 2, 99], [0, 4, 4, 12]),
    ("unified", "qo_indptr", [-3, 6, 11, 99], [0, 6, 11, 12]),
    ("verify", "qo_indptr", [-3, 3, 6, 99], [0, 3, 6, 9]),
    *((name, "mask_indptr", [-96, -(2**40), 132, 0], [0, 0, 132, 0]) for name in MASKED),
    ("extend", "window_kv_offsets", [-13, -1, 26], [0, 0, 26]),
]


@engines
@pytest.mark.parametrize(("name", "argument", "given", "same"), HELD)
def test_attention_stays_inside(
    name: str, argument: str, given: list[int], same: list[int], engine: str, device: str
) -> None:
    """What is given out of bounds reads as what it is held to, and nothing is written beside the output."""
    function, made = ATTENTION[name]
    args, _ = made(device)
    out = "o" if "o" in args else "o_extend"
    results = []
    for values in (given, same):
        around, middle = fenced(args[out])
        with unread():
            function(**{**args, argument: ints(values, torch.int64, device), out: middle}, engine=engine)
        assert bool((around[: len(middle)] == 7.0).all()) and bool((around[2 * len(middle) :] == 7.0).all())
        results.append(middle)
    assert torch.equal(*results) and bool(results[0].isfinite().all())


@engines
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"kv_indptr": [-2, 3]}, [19, OLD, OLD, 33, 34, 35, 36, OLD, OLD]),
        ({"kv_indptr": [-(2**40), 3]}, [OLD, OLD, OLD, 33, 34, 35, 36, OLD, OLD]),
        ({"kv_indptr": [8, 2**40]}, [OLD] * 8 + [17]),
        ({"page_kernel_lens_ptr": [-3, 2**40]}, [OLD, OLD, OLD, *range(33, 39)]),
        ({"kv_start_idx": [-2, 0]}, [0, 0, 17, 33, 34, 35, 36, OLD, OLD]),
    ],
)
def test_index_lists_stay_inside(change: dict[str, list[int]], wanted: list[int], engine: str, device: str) -> None:
    around = ints([OLD] * 29, torch.int64, device)
    with unread():
        gather(engine, device, around[10:19], **{name: ints(x, torch.int64, device) for name, x in change.items()})
    assert around.tolist() == [OLD] * 10 + wanted + [OLD] * 10


def window(table: Tensor, rows: Tensor, lens: Tensor, engine: str = "eager", out: Tensor | None = None) -> Any:
    indptr = torch.full((3,), 5, dtype=torch.int32, device=table.device)
    update = sglang.update_sliding_window_buffer
    return update(indptr, table, 3, lens, rows, 2, window_kv_indices=out, engine=engine)


@engines
def test_window_lists_stay_inside(engine: str, device: str) -> None:
    """Their offsets begin with 0, whatever the buffer held."""
    table = torch.arange(1, 65, dtype=torch.int32, device=device).view(4, 16)
    around = ints([OLD] * 26, torch.int64, device)
    with unread():
        rows, lens = ints([1, 2], torch.int64, device), ints([-4, 5], torch.int64, device)
        indptr, _, counts, start = window(table, rows, lens, engine, around[10:16])
    assert around.tolist() == [OLD] * 10 + [35, 36, 37] + [OLD] * 13
    assert (indptr.tolist(), counts.tolist(), start.tolist()) == ([0, 0, 3], [0, 3], [0, 2])


def unite(engine: str = "eager", device: str = "cpu", **change: list[int]) -> tuple[list[int], list[int], list[int]]:
    given = {
        "prefix_kv_indptr": [0, 2, 5],
        "prefix_kv_indices": [1, 2, 3, 4, 5],
        "extend_start_loc": [0, 3],
        "extend_seq_lens": [3, 1],
        "extend_kv_indices": [10, 11, 12, 13],
        **change,
    }
    lists = {name: ints(x, torch.int64, device) for name, x in given.items()}
    indptr, slots, cached = sglang.build_unified_kv_indices(**lists, bs=2, engine=engine)
    return indptr.tolist(), slots.tolist(), cached.tolist()


@engines
@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"extend_seq_lens": [-1, 3]}, {"extend_seq_lens": [0, 3]}),
        ({"extend_start_loc": [-2, 3]}, {"extend_start_loc": [0, 3]}),
        ({"prefix_kv_indptr": [-7, 2, 99]}, {"prefix_kv_indptr": [0, 2, 5]}),
        ({"prefix_kv_indptr": [0, 4, 2]}, {"prefix_kv_indptr": [0, 4, 4]}),
    ],
)
def test_unified_lists_stay_inside(
    change: dict[str, list[int]], same: dict[str, list[int]], engine: str, device: str
) -> None:
    with unread():
        assert unite(engine, device, **change) == unite(engine, device, **same)


@engines
def test_cached_lists_need_not_begin_with_the_first_slot(engine: str, device: str) -> None:
    wanted = [2, 10, 11, 12, 3, 4, 5, 13, 0]
    assert unite(engine, device, prefix_kv_indptr=[1, 2, 5]) == ([0, 4, 8], wanted, [1, 3])


def splits(lens: list[int], engine: str = "eager", device: str = "cpu") -> list[int]:
    out = torch.full((len(lens),), OLD, dtype=torch.int32, device=device)
    given = ints(lens, torch.int64, device)
    sglang.get_num_kv_splits_triton[(1,)](out, given, len(lens), 1, 8, 2, 8, 132, 256, engine=engine)
    return out.tolist()


@engines
def test_lengths_beyond_32_bits_are_long_not_negative(engine: str, device: str) -> None:
    with unread():
        assert splits([2**31 + 5, 1], engine, device) == splits([2**31 - 1, 1], engine, device) == [8, 1]
        assert splits([-5, 600], engine, device) == splits([0, 600], engine, device)


@engines
@pytest.mark.parametrize("order", [[6, 0], [0, 0], [5, 2]])
def test_lists_may_lie_in_any_order(order: list[int], engine: str, device: str) -> None:
    """A list of nothing owns no entry, also where another begins."""
    lens = [3, 4] if order[0] != order[1] else [3, 0]
    lens = [3, 3] if order == [5, 2] else lens
    out, wanted = ints([OLD] * 12, torch.int64, device), [OLD] * 12
    for row, start, count in zip((1, 2), order, lens, strict=True):
        wanted[start : start + count] = range(16 * row + 1, 16 * row + 1 + count)
    places, counts = ints(order, torch.int32, device), ints(lens, torch.int32, device)
    gather(engine, device, out, kv_indptr=places, page_kernel_lens_ptr=counts)
    assert out.tolist() == wanted
