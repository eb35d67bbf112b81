"""What the original's functions refuse here: by the caller's name, before anything is written."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlab.checks import require
from attnlab.compat import sglang
from attnlab.engines import EagerEngine
from attnlab.mods.relative_bias import relative_bias
from attnlab.plan.workspace import Partials
from tests.cases import ENGINES, FP8
from tests.originals import Args, decode_args, extend_args, load, unified_args, verify_args
from tests.test_compat_indices import draft_args

ENGINE, DEVICE = ENGINES[0]
Change = Callable[[Args], Args]


def plain(*_: Any) -> None:
    """No device function."""


def room_of(args: Args) -> torch.Tensor:
    """Memory as large as the partial results."""
    return torch.full((args["attn_logits"].numel(),), float("nan"), device=DEVICE)


DECODE: dict[str, tuple[Change, type[Exception], str]] = {
    "q flat": (lambda a: {"q": a["q"].flatten(1)}, ValueError, r"q: expected \[tokens, heads, 16\]"),
    "q dim": (
        lambda a: {"q": a["q"][..., :8]},
        ValueError,
        r"q: expected \[tokens, heads, 16\] .* as the keys have it",
    ),
    "q dtype": (lambda a: {"q": a["q"].double()}, TypeError, "q: expected .* float32 or float16 or bfloat16"),
    "q heads": (lambda a: {"q": a["q"][:, :7]}, ValueError, "q: expected a multiple of the 2 KV heads, got 7 heads"),
    "q strided": (lambda a: {"q": a["q"].mT.contiguous().mT}, ValueError, "q: the last axis must be contiguous"),
    "k flat": (
        lambda a: {"k_buffer": a["k_buffer"].flatten(1)},
        TypeError,
        r"k_buffer: expected \[slots, kv_heads, dim",
    ),
    "k dtype": (lambda a: {"k_buffer": a["k_buffer"].int()}, TypeError, "k_buffer: expected one of float32"),
    "v slots": (
        lambda a: {"v_buffer": a["v_buffer"][:9]},
        ValueError,
        "v_buffer: expected slots, heads, dtype and dev",
    ),
    "v dtype": (lambda a: {"v_buffer": a["v_buffer"].half()}, ValueError, "v_buffer: expected slots, heads, dtype"),
    "v strided": (
        lambda a: {"v_buffer": a["v_buffer"].mT.contiguous().mT},
        ValueError,
        "v_buffer: the last axis must be contiguous",
    ),
    "not MLA": (lambda a: {"has_mla": True}, ValueError, "has_mla: expected v_buffer to be a view of k_buffer's first"),
    "page size": (
        lambda a: (
            {"k_buffer": a["k_buffer"].view(100, 4, 2, 16), "v_buffer": a["v_buffer"].view(100, 4, 2, 16)}
            | {"page_size": 8}
        ),
        ValueError,
        "page_size: expected 4 as k_buffer .* has it, got 8",
    ),
    "no page": (lambda a: {"page_size": 0}, ValueError, "page_size: expected at least 1, got 0"),
    "o shape": (lambda a: {"o": a["o"][:, :4]}, ValueError, r"o: expected \[4, 8, 16\]"),
    "o dtype": (lambda a: {"o": a["o"].double()}, TypeError, "o: expected .* float32 or float16 or bfloat16"),
    "o in q": (lambda a: {"o": a["q"]}, ValueError, "o: shares its memory with the queries"),
    "o in k": (lambda a: {"o": a["k_buffer"][:16].view(4, 8, 16)}, ValueError, "o: shares its memory with k_buffer"),
    "indptr short": (lambda a: {"kv_indptr": a["kv_indptr"][:4]}, ValueError, "kv_indptr: expected at least 5 entries"),
    "indptr dtype": (
        lambda a: {"kv_indptr": a["kv_indptr"].float()},
        TypeError,
        "kv_indptr: expected .* int32 or int64",
    ),
    "slots 2-D": (lambda a: {"kv_indices": a["kv_indices"][None]}, ValueError, r"kv_indices: expected \[slots\]"),
    "counts short": (
        lambda a: {"num_kv_splits": a["num_kv_splits"][:3]},
        ValueError,
        "num_kv_splits: expected at least 4 entries, got 3",
    ),
    "most": (lambda a: {"max_kv_splits": 4}, ValueError, "max_kv_splits: expected 3 as attn_logits .* has it, got 4"),
    "no split": (lambda a: {"max_kv_splits": 0}, ValueError, "max_kv_splits: expected at least 1, got 0"),
    "logits dim": (
        lambda a: {"attn_logits": torch.zeros(4, 8, 3, 32, device=DEVICE)},
        ValueError,
        r"attn_logits: expected \[rows, heads, splits, 16\]",
    ),
    "logits dtype": (lambda a: {"attn_logits": a["attn_logits"].half()}, TypeError, "attn_logits: .* float32"),
    "logits rows": (
        lambda a: {"attn_logits": a["attn_logits"][:3]},
        ValueError,
        "attn_logits: expected room for 4 requests and 8 heads",
    ),
    "lse splits": (
        lambda a: {"attn_lse": a["attn_lse"][..., :2]},
        ValueError,
        r"attn_lse: expected \[rows, heads, 3\]",
    ),
    "lse rows": (lambda a: {"attn_lse": a["attn_lse"][:2]}, ValueError, "attn_lse: expected room for 4 requests"),
    "lse 4-D": (
        lambda a: {"attn_lse": a["attn_logits"].mT},
        ValueError,
        r"attn_lse: expected \[4, 8, 3\], got strides",
    ),
    "logits in o": (
        lambda a: (lambda room: {"attn_logits": room.view(4, 8, 3, 16), "o": room[:512].view(4, 8, 16)})(room_of(a)),
        ValueError,
        "attn_logits: shares its memory with o,",
    ),
    "logits in k": (
        lambda a: {"attn_logits": a["k_buffer"].view(-1)[:1536].view(4, 8, 3, 16)},
        ValueError,
        "attn_logits: shares its memory with k_buffer,",
    ),
    "logits expanded": (
        lambda a: {"attn_logits": a["attn_logits"][:1].expand(4, 8, 3, 16)},
        ValueError,
        "attn_logits: is expanded or overlaps itself",
    ),
    "lse in o": (
        lambda a: {"attn_lse": a["o"].view(-1)[:96].view(4, 8, 3)},
        ValueError,
        "attn_lse: shares its memory with o,",
    ),
    "lse in logits": (
        lambda a: {"attn_lse": a["attn_logits"]},
        ValueError,
        "attn_lse: shares its memory with attn_logits,",
    ),
    "lse in q": (
        lambda a: {"attn_lse": a["q"].view(-1)[:96].view(4, 8, 3)},
        ValueError,
        "attn_lse: shares its memory with the queries,",
    ),
    "no lse": (lambda a: {"attn_lse": None}, TypeError, "attn_lse: expected"),
    "scale": (lambda a: {"sm_scale": "0.1"}, TypeError, "sm_scale: expected a Python number"),
    "k scale": (
        lambda a: {"k_scale": torch.ones(1)},
        TypeError,
        r"k_scale: expected a Python number, .* pass float\(k_scale\)",
    ),
    "v scale": (lambda a: {"v_scale": 0.0}, ValueError, "v_scale: expected a positive number"),
    "cap": (lambda a: {"logit_cap": "tanh"}, TypeError, "logit_cap: expected a Python number"),
    "temperature": (
        lambda a: {"xai_temperature_len": 1},
        ValueError,
        "xai_temperature_len: expected more than 1 or -1",
    ),
    "sinks": (lambda a: {"sinks": torch.zeros(4, device=DEVICE)}, ValueError, r"sinks: expected \[8\]"),
    "no aux": (lambda a: {"score_mod": relative_bias}, TypeError, "aux_tensors: expected"),
    "two aux": (
        lambda a: {"score_mod": sglang.relative_bias_score_mod, "aux_tensors": [a["q"], a["q"]]},
        ValueError,
        "aux_tensors: expected a list of one tensor, which score_mod reads, got 2",
    ),
    "aux rows": (
        lambda a: {"score_mod": relative_bias, "aux_tensors": [a["q"][:3]]},
        ValueError,
        r"aux_tensors: expected \[4, 8, width\], a row for every query",
    ),
    "aux strided": (
        lambda a: {"score_mod": relative_bias, "aux_tensors": [a["q"].mT.contiguous().mT]},
        ValueError,
        "aux_tensors: the last axis must be contiguous",
    ),
    "mod": (
        lambda a: {"score_mod": plain},
        NotImplementedError,
        "score_mod: expected a device function made by triton.jit, or an attnlab.ScoreMod, got function",
    ),
    "engine": (lambda a: {"engine": "cuda"}, ValueError, "engine: expected one of eager, triton, got 'cuda'"),
}


@pytest.mark.parametrize("case", DECODE)
def test_decode_refuses(case: str) -> None:
    change, error, words = DECODE[case]
    args, _ = decode_args("decode_gqa_3splits", DEVICE)
    before = {name: x for name in ("o", "attn_logits", "attn_lse") if (x := args[name]) is not None}
    with pytest.raises(error, match=words):
        sglang.decode_attention_fwd(**{"engine": ENGINE, **args, **change(args)})
    assert all(bool(x.isnan().all()) for x in before.values())


EXTEND: dict[str, tuple[Change, type[Exception], str]] = {
    "q": (lambda a: {"q_extend": a["q_extend"][..., :8]}, ValueError, r"q_extend: expected \[tokens, heads, 16\]"),
    "k rows": (lambda a: {"k_extend": a["k_extend"][:3]}, ValueError, r"k_extend: expected \[12, 2, 16\]"),
    "k dtype": (lambda a: {"k_extend": a["k_extend"].half()}, TypeError, "k_extend: expected .* float32"),
    "v heads": (lambda a: {"v_extend": a["v_extend"][:, :1]}, ValueError, r"v_extend: expected \[12, 2, 16\]"),
    "o": (lambda a: {"o_extend": a["o_extend"][:3]}, ValueError, r"o_extend: expected \[12, 4, 16\]"),
    "lse": (lambda a: {"lse_extend": a["lse_extend"].T}, ValueError, r"lse_extend: expected \[12, 4\]"),
    "lse dtype": (lambda a: {"lse_extend": a["lse_extend"].half()}, TypeError, "lse_extend: expected .* float32"),
    "offsets": (lambda a: {"qo_indptr": a["qo_indptr"][:0]}, ValueError, "qo_indptr: expected at least the entry 0"),
    "offsets dtype": (
        lambda a: {"qo_indptr": a["qo_indptr"].float()},
        TypeError,
        "qo_indptr: expected .* int32 or int64",
    ),
    "lists": (lambda a: {"kv_indptr": a["kv_indptr"][:3]}, ValueError, "kv_indptr: expected at least 4 entries, got 3"),
    "mask dtype": (
        lambda a: {"custom_mask": a["custom_mask"].int()},
        TypeError,
        "custom_mask: expected .* uint8 or bool",
    ),
    "mask 2-D": (lambda a: {"custom_mask": a["custom_mask"][None]}, ValueError, r"custom_mask: expected \[pairs\]"),
    "mask offsets": (lambda a: {"mask_indptr": None}, ValueError, "mask_indptr: expected where each request's bytes"),
    "mask offsets short": (
        lambda a: {"mask_indptr": a["mask_indptr"][:2]},
        ValueError,
        "mask_indptr: expected at least 3 entries, got 2",
    ),
    "window offsets": (
        lambda a: {"window_kv_offsets": None},
        ValueError,
        "window_kv_offsets: with a custom_mask and a w",
    ),
    "window offsets short": (
        lambda a: {"window_kv_offsets": a["window_kv_offsets"][:2]},
        ValueError,
        "window_kv_offsets: expected at least 3 entries, got 2",
    ),
    "window": (lambda a: {"sliding_window_size": 7.5}, TypeError, "sliding_window_size: expected an int, got 7.5"),
    "longest": (lambda a: {"max_len_extend": -1}, ValueError, "max_len_extend: expected the new tokens of the longest"),
    "longest None": (lambda a: {"max_len_extend": None}, TypeError, "max_len_extend: expected an int, got None"),
    "k scale": (lambda a: {"k_scale": -1.0}, ValueError, "k_scale: expected a positive number"),
}


@pytest.mark.parametrize("case", EXTEND)
def test_extend_refuses(case: str) -> None:
    change, error, words = EXTEND[case]
    args, _ = extend_args("extend_window_mask_offsets_skip", DEVICE)
    with pytest.raises(error, match=words):
        sglang.extend_attention_fwd(**{"engine": ENGINE, **args, **change(args)})
    assert bool(args["o_extend"].isnan().all())


UNIFIED: dict[str, tuple[Change, type[Exception], str]] = {
    "q": (lambda a: {"q": a["q"][:, :3]}, ValueError, "q: expected a multiple of the 2 KV heads, got 3"),
    "o": (lambda a: {"o": a["o"][:, :3]}, ValueError, r"o: expected \[12, 4, 16\]"),
    "prefix": (lambda a: {"prefix_lens": a["prefix_lens"][:2]}, ValueError, "prefix_lens: expected at least 3 entries"),
    "start": (
        lambda a: {"sliding_window_size": 7, "window_start_pos": a["prefix_lens"][:2]},
        ValueError,
        "window_start_pos: expected at least 3 entries, got 2",
    ),
    "mask": (lambda a: {"custom_mask": a["custom_mask"].float()}, TypeError, "custom_mask: expected .* uint8 or bool"),
}


@pytest.mark.parametrize("case", UNIFIED)
def test_unified_extend_refuses(case: str) -> None:
    change, error, words = UNIFIED[case]
    args, _ = unified_args("unified_custom_mask", DEVICE)
    with pytest.raises(error, match=words):
        sglang.extend_attention_fwd_unified(**{"engine": ENGINE, **args, **change(args)})
    assert bool(args["o"].isnan().all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k_scale": "much"}, "k_scale: expected a Python number"),
        ({"v_scale": torch.ones(1)}, r"v_scale: expected a Python number, .* pass float\(v_scale\)"),
    ],
)
def test_verify_raises_where_a_scale_is_no_number(change: Args, words: str) -> None:
    """The original takes 1 then, and goes on."""
    args, _ = verify_args(DEVICE)
    with pytest.raises(TypeError, match=words):
        sglang.verify_splitkv_fwd(**{**args, **change}, engine=ENGINE)


def test_a_jitted_function_of_the_callers_is_refused_by_the_eager_engine() -> None:
    from tests.test_compat_kernels import twice_the_distance

    args, file = decode_args("decode_gqa_page4_scoremod", DEVICE)
    with pytest.raises(
        NotImplementedError, match='score_mod: a jitted function runs in kernels alone, .* engine="trit'
    ):
        sglang.decode_attention_fwd(**{**args, "score_mod": twice_the_distance}, engine="eager")
    assert bool(args["o"].isnan().all())


# --- Index builders ---------------------------------------------------------------------------------------------


def gather_args() -> Args:
    return {
        "req_to_token_ptr": torch.ones(3, 8, dtype=torch.int32, device=DEVICE),
        "req_pool_indices_ptr": torch.zeros(2, dtype=torch.int64, device=DEVICE),
        "page_kernel_lens_ptr": torch.ones(2, dtype=torch.int32, device=DEVICE),
        "kv_indptr": torch.arange(3, dtype=torch.int32, device=DEVICE),
        "kv_start_idx": None,
        "kv_indices_ptr": torch.full((4,), -7, dtype=torch.int64, device=DEVICE),
        "req_to_token_ptr_stride": 8,
    }


GATHER: dict[str, tuple[Change, type[Exception], str]] = {
    "table": (
        lambda a: {"req_to_token_ptr": a["req_to_token_ptr"].long()},
        TypeError,
        r"req_to_token_ptr: expected \[pool, width\] int32",
    ),
    "stride": (
        lambda a: {"req_to_token_ptr_stride": 7},
        ValueError,
        r"req_to_token_ptr_stride: expected rows as far apart as in the table, strides \(8, 1\), got 7",
    ),
    "rows": (
        lambda a: {"req_pool_indices_ptr": a["req_pool_indices_ptr"][:1]},
        ValueError,
        "req_pool_indices_ptr: expected at least 2 entries, got 1",
    ),
    "lens": (
        lambda a: {"page_kernel_lens_ptr": a["page_kernel_lens_ptr"].float()},
        TypeError,
        "page_kernel_lens_ptr: expected .* int32 or int64",
    ),
    "indptr": (
        lambda a: {"kv_indptr": a["kv_indptr"][:1]},
        ValueError,
        "kv_indptr: expected at least 2 entries, got 1",
    ),
    "start": (
        lambda a: {"kv_start_idx": a["kv_indptr"][:1]},
        ValueError,
        "kv_start_idx: expected at least 2 entries, got 1",
    ),
    "out": (
        lambda a: {"kv_indices_ptr": a["kv_indices_ptr"][::2]},
        ValueError,
        "kv_indices_ptr: expected a contiguous tensor",
    ),
    "out dtype": (
        lambda a: {"kv_indices_ptr": a["kv_indices_ptr"].float()},
        TypeError,
        "kv_indices_ptr: expected .* int32 or int64",
    ),
}


@pytest.mark.parametrize("case", GATHER)
def test_index_builders_refuse(case: str) -> None:
    change, error, words = GATHER[case]
    args = gather_args()
    with pytest.raises(error, match=words):
        sglang.create_flashinfer_kv_indices_triton[(2,)](**{**args, **change(args)}, engine=ENGINE)
    ranks = {"dcp_size": 2, "dcp_rank": 1}
    with pytest.raises(error, match=words):
        sglang.create_triton_kv_indices_for_dcp_triton[(2,)](**{**args, **change(args)}, **ranks, engine=ENGINE)
    assert bool((args["kv_indices_ptr"] == -7).all())


@pytest.mark.parametrize(
    ("grid", "error", "words"),
    [
        ((2, 3), ValueError, r"create_flashinfer_kv_indices_triton: grid: expected \(requests,\), got \(2, 3\)"),
        ((), ValueError, r"grid: expected \(requests,\), got \(\)"),
        ((-1,), ValueError, r"grid: expected \(requests,\), got \(-1,\)"),
        ((2.0,), TypeError, r"grid: expected \(requests,\), got tuple \(2.0,\)"),
    ],
)
def test_a_grid_of_another_shape_is_refused(grid: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sglang.create_flashinfer_kv_indices_triton[grid]


def test_what_is_launched_is_not_called() -> None:
    with pytest.raises(
        TypeError, match=r"is launched, create_flashinfer_kv_indices_triton\[\(requests,\)\]\(...\), not"
    ):
        sglang.create_flashinfer_kv_indices_triton(**gather_args())


def test_a_rank_that_the_group_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="dcp_rank: a group of 4 has dcp_ranks 0 to 3, got 4"):
        sglang.get_dcp_lens(torch.tensor([3]), 4, 4)
    with pytest.raises(TypeError, match="lens: expected .* int32 or int64"):
        sglang.get_dcp_lens(torch.tensor([3.0]), 4, 1)
    with pytest.raises(ValueError, match="dcp_rank: a group of 2 has dcp_ranks 0 to 1, got 2"):
        sglang.create_triton_kv_indices_for_dcp_triton[(2,)](**gather_args(), dcp_size=2, dcp_rank=2, engine=ENGINE)


SPLITS: dict[str, tuple[Args, type[Exception], str]] = {
    "grid": ({"grid": (2,)}, ValueError, r"get_num_kv_splits_triton: grid: expected \(1,\), got \(2,\)"),
    "lanes": ({"MAX_NUM_SEQ": 1}, ValueError, "MAX_NUM_SEQ: expected at least num_seq 2, got 1"),
    "rows": ({"num_group": 3}, ValueError, "num_kv_splits_ptr: expected 6 rows, 2 x 3, got 4"),
    "sequences": ({"num_seq": 4, "num_group": 1}, ValueError, "seq_lens_ptr: expected at least 4 entries, got 3"),
    "most sequences": ({"MAX_NUM_SEQ": None}, TypeError, "MAX_NUM_SEQ: expected an int, got None"),
    "cores": ({"device_core_count": None}, TypeError, "device_core_count: expected an int, got None"),
    "heads": ({"num_head": 4}, ValueError, "num_head: expected at least num_kv_head 8, got 4"),
    "most": ({"max_kv_splits": 0}, ValueError, "max_kv_splits: expected at least 1, got 0"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_split_counts_refuse(case: str) -> None:
    change, error, words = SPLITS[case]
    given: Args = {
        "num_kv_splits_ptr": torch.full((4,), -7, dtype=torch.int32, device=DEVICE),
        "seq_lens_ptr": torch.tensor([5, 6, 7], device=DEVICE),
        "num_seq": 2,
        "num_group": 2,
        "num_head": 32,
        "num_kv_head": 8,
        "max_kv_splits": 8,
        "device_core_count": 132,
        "MAX_NUM_SEQ": 256,
        **change,
    }
    grid = given.pop("grid", (1,))
    with pytest.raises(error, match=words):
        sglang.get_num_kv_splits_triton[grid](**given, engine=ENGINE)
    assert bool((given["num_kv_splits_ptr"] == -7).all())


WINDOW: dict[str, tuple[Args, type[Exception], str]] = {
    "window": ({"sliding_window_size": 0}, ValueError, "sliding_window_size: expected at least 1, got 0"),
    "requests": ({"bs": -1}, ValueError, "bs: expected at least 0, got -1"),
    "requests None": ({"bs": None}, TypeError, "bs: expected an int, got None"),
    "indptr": ({"bs": 3}, ValueError, "window_kv_indptr: expected at least 4 entries, got 3"),
    "lens": (
        {"seq_lens": torch.ones(1, dtype=torch.int32)},
        ValueError,
        "seq_lens: expected at least 2 entries, got 1",
    ),
    "device": ({"device": "meta"}, ValueError, "device: expected .*, where req_to_token lies, or None, got meta"),
    "out": ({"window_kv_indices": torch.ones(3)}, TypeError, "window_kv_indices: expected .* int32 or int64"),
}


@pytest.mark.parametrize("case", WINDOW)
def test_window_lists_refuse(case: str) -> None:
    change, error, words = WINDOW[case]
    given: Args = {
        "window_kv_indptr": torch.zeros(3, dtype=torch.int32),
        "req_to_token": torch.ones(2, 8, dtype=torch.int32),
        "sliding_window_size": 4,
        "seq_lens": torch.tensor([5, 6]),
        "req_pool_indices": torch.tensor([0, 1]),
        "bs": 2,
    }
    with pytest.raises(error, match=words):
        sglang.update_sliding_window_buffer(**{**given, **change}, engine="eager")


UNITE: dict[str, tuple[Change, type[Exception], str]] = {
    "indptr": (lambda a: {"bs": 4}, ValueError, "prefix_kv_indptr: expected at least 5 entries, got 4"),
    "start": (
        lambda a: {"extend_start_loc": a["extend_start_loc"][:2]},
        ValueError,
        "extend_start_loc: expected at least 3 entries, got 2",
    ),
    "lens": (
        lambda a: {"extend_seq_lens": a["extend_seq_lens"].float()},
        TypeError,
        "extend_seq_lens: expected .* int32 or int64",
    ),
    "requests": (lambda a: {"bs": -1}, ValueError, "bs: expected at least 0, got -1"),
    "requests bool": (lambda a: {"bs": True}, TypeError, "bs: expected an int, got True"),
    "new": (
        lambda a: {"extend_kv_indices": a["extend_kv_indices"].float()},
        TypeError,
        "extend_kv_indices: expected .* int32 or int64",
    ),
}


@pytest.mark.parametrize("case", UNITE)
def test_unified_lists_refuse(case: str) -> None:
    change, error, words = UNITE[case]
    _, file = unified_args("unified_causal", DEVICE)
    names = ("prefix_kv_indptr", "prefix_kv_indices", "extend_start_loc", "extend_seq_lens", "extend_kv_indices")
    args = {name: file[name] for name in names}
    with pytest.raises(error, match=words):
        sglang.build_unified_kv_indices(**{**args, "bs": 3, **change(args)}, engine=ENGINE)


DRAFTS: dict[str, tuple[Args, type[Exception], str]] = {
    "pool": ({"pool_len": 5}, ValueError, "pool_len: expected 222, as req_to_token has it, got 5"),
    "width": ({"kv_indices_stride": 5}, ValueError, "kv_indices_stride: expected 2256, as kv_indices has it, got 5"),
    "offsets": ({"kv_indptr_stride": 5}, ValueError, "kv_indptr_stride: expected 21, as kv_indptr has it, got 5"),
    "sequences": ({"bs_upper": 2}, ValueError, "bs_upper: expected at least 4, as the grid says, got 2"),
    "steps": ({"iter_upper": 2}, ValueError, "iter_upper: expected at least 3, as the grid says, got 2"),
    "branches": (
        {"num_tokens_upper": 8},
        ValueError,
        "num_tokens_upper: expected at least 16, as the grid says",
    ),
    "page": ({"page_size": 0}, ValueError, "page_size: expected at least 1, got 0"),
    "grid": (
        {"grid": (4, 4, 4)},
        ValueError,
        "kv_indices, kv_indptr: expected 4 steps and 17 offsets of 4 x 4",
    ),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_draft_lists_refuse(case: str) -> None:
    change, error, words = DRAFTS[case]
    args, grid = draft_args(load("draft_topk4_steps3_page4", DEVICE))
    grid = change.get("grid", grid)
    change = {name: value for name, value in change.items() if name != "grid"}
    with pytest.raises(error, match=words):
        sglang.generate_draft_decode_kv_indices[grid](**{**args, **change}, engine=ENGINE)
    assert bool((args["kv_indices"] == -7).all())


class _Four:
    world_size, rank_in_group = 4, 0


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="out: expected heads that 4 ranks can share, got 6"):
        sglang.cp_lse_ag_out_rs_mha(torch.zeros(2, 6, 8), torch.zeros(2, 6), _Four())
    with pytest.raises(ValueError, match=r"lse: expected \[2, 8\]"):
        sglang.cp_lse_ag_out_rs_mha(torch.zeros(2, 8, 8), torch.zeros(2, 6), _Four())
    with pytest.raises(TypeError, match=r"out: expected .* float32 or float16 or bfloat16, got .* int32"):
        sglang.cp_lse_ag_out_rs_mha(torch.zeros(2, 8, 8, dtype=torch.int32), torch.zeros(2, 8), _Four())
    with pytest.raises(ValueError, match="out: is expanded or overlaps itself"):
        sglang.cp_lse_ag_out_rs_mha(torch.zeros(2, 1, 8).expand(2, 8, 8), torch.zeros(2, 8), _Four())


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (sglang.draft_kv_indices_buffer_width, (0, 1, 1), "num_seqs: expected at least 1, got 0"),
        (sglang.draft_kv_indices_used_len, (5, 1, 1, -1), "n: expected at least 0, got -1"),
    ],
)
def test_sizes_of_draft_lists_are_positive(function: Callable[..., int], args: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        function(*args)


class _WithoutFp8(EagerEngine):
    def check_storage(self, dtype: torch.dtype) -> None:
        require(dtype != FP8, "kv_dtype: cannot read fp8 here", NotImplementedError)


def test_a_cache_that_the_engine_cannot_read_is_refused() -> None:
    args, _ = decode_args("decode_gqa_3splits", DEVICE)
    cache = {name: args[name].to(FP8) for name in ("k_buffer", "v_buffer")}
    with pytest.raises(NotImplementedError, match="cannot read fp8 here"):
        sglang.decode_attention_fwd(**{**args, **cache}, engine=_WithoutFp8(DEVICE))


WRONG: dict[str, tuple[Callable[[Partials], Partials], type[Exception], str]] = {
    "v_dim": (lambda p: replace(p, acc=p.acc[..., :8].contiguous()), ValueError, r"partials.acc: expected \["),
    "states": (lambda p: replace(p, max=p.max[:, :1].contiguous()), ValueError, r"partials.max: expected \["),
    "count": (lambda p: replace(p, sum=p.sum[1:]), ValueError, r"partials.sum: expected \["),
    "dtype": (lambda p: replace(p, sum=p.sum.double()), TypeError, "partials.sum: expected .* float32"),
    "packed": (lambda p: replace(p, acc=p.acc.mT.contiguous().mT), ValueError, "partials.acc: expected a contiguous"),
}


@pytest.mark.parametrize("name", ["decode", "verify"])
@pytest.mark.parametrize("case", WRONG)
def test_scratch_of_another_layout_is_refused(case: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write states by their number: into scratch of a smaller value dimension they would write behind it."""
    change, error, words = WRONG[case]
    function, made = {
        "decode": (sglang.decode_attention_fwd, lambda: decode_args("decode_gqa_3splits", DEVICE)),
        "verify": (sglang.verify_splitkv_fwd, lambda: verify_args(DEVICE)),
    }[name]
    of = importlib.import_module(function.__module__)
    right = of.new_partials
    monkeypatch.setattr(of, "new_partials", lambda *args, **options: change(right(*args, **options)))
    args, _ = made()
    with pytest.raises(error, match=words):
        function(**args, engine=ENGINE)
    assert bool(args.get("o", args.get("o_extend")).isnan().all())
