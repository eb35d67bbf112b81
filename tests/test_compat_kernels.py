"""The original's attention functions by their names: its own results, its buffers, and where ours differ on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab._triton import jit, tl
from attnlab.assets import data_path
from attnlab.compat import sglang
from attnlab.eager import oracle
from attnlab.mods.alibi import alibi
from tests.cases import ENGINES, FP8
from tests.originals import (
    DECODE,
    EXTEND,
    UNIFIED,
    Args,
    decode_args,
    extend_args,
    load,
    unified_args,
    unwritten,
    verify_args,
)
from tests.syncs import no_waiting, unread
from tests.tolerances import GOLDEN, LSE, OUTPUT

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
NAN = float("nan")


def near(got: Tensor, want: Tensor, tolerance: dict[str, float] = GOLDEN) -> None:
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)


# --- The original's results -------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("name", DECODE)
def test_decode_gives_the_original_results_and_partials(name: str, engine: str, device: str) -> None:
    args, file = decode_args(name, device)
    sglang.decode_attention_fwd(**args, engine=engine)
    # The one intended difference: a request without keys and without a sink is NaN in the file.
    near(args["o"], file["out"].nan_to_num(0.0))
    near(args["attn_logits"], file["attn_logits"])  # NaN there: an empty split, never written
    near(args["attn_lse"], file["attn_lse"])


@engines
@pytest.mark.parametrize("name", EXTEND)
def test_extend_gives_the_original_results(name: str, engine: str, device: str) -> None:
    args, file = extend_args(name, device)
    sglang.extend_attention_fwd(**args, engine=engine)
    near(args["o_extend"], file["out"])
    near(args["lse_extend"], file["lse"])


@engines
@pytest.mark.parametrize("name", UNIFIED[:2])
def test_unified_extend_gives_the_original_results(name: str, engine: str, device: str) -> None:
    args, file = unified_args(name, device)
    sglang.extend_attention_fwd_unified(**args, engine=engine)
    near(args["o"], file["out"])


@engines
def test_verify_gives_what_extend_gives_also_without_a_cached_key(engine: str, device: str) -> None:
    """The original's own result is NaN in the rows of request 0, which has no cached key."""
    args, file = verify_args(device)
    assert sglang.verify_splitkv_fwd(**args, engine=engine) is True
    near(args["o_extend"], file["out_extend_attention"])
    near(args["o_extend"][3:], file["out"][3:])


@engines
def test_unified_extend_has_the_temperature_of_the_other_kernels(engine: str, device: str) -> None:
    """The original has another formula in this kernel alone; its two-stage kernel says what is right."""
    args, file = unified_args("unified_xai", device)
    sglang.extend_attention_fwd_unified(**args, engine=engine)
    rows = file["extend_kv_indices"]
    starts = {"mask_indptr": None, "custom_mask": None, "q_extend": args["q"], "o_extend": unwritten(args["o"])}
    shared = ("k_buffer", "v_buffer", "qo_indptr", "k_scale", "v_scale", "sm_scale", "is_causal", "max_len_extend")
    sglang.extend_attention_fwd(
        k_extend=args["k_buffer"][rows],
        v_extend=args["v_buffer"][rows],
        kv_indptr=file["prefix_kv_indptr"],
        kv_indices=file["prefix_kv_indices"],
        xai_temperature_len=8,
        **starts,
        **{name: args[name] for name in shared},
        engine=engine,
    )
    near(args["o"], starts["o_extend"])
    assert not torch.allclose(args["o"], file["out"], **GOLDEN)


# --- The caller's buffers ---------------------------------------------------------------------------------------


@engines
def test_buffers_may_be_larger_than_the_batch(engine: str, device: str) -> None:
    """As they are under a CUDA graph, or where another layer has more heads: what lies beyond is left alone."""
    args, file = decode_args("decode_gqa_3splits", device)
    reqs, heads, splits, v_dim = file["attn_logits"].shape
    logits = torch.full((reqs + 2, heads + 3, splits, v_dim), 7.0, device=device)
    lse = torch.full((reqs + 1, heads + 3, splits), 7.0, device=device)
    longer = {
        "kv_indptr": torch.cat([args["kv_indptr"], args["kv_indptr"].new_full((2,), 10**9)]),
        "kv_indices": torch.cat([args["kv_indices"], args["kv_indices"].new_full((50,), 10**9)]),
        "num_kv_splits": torch.cat([args["num_kv_splits"], args["num_kv_splits"].new_full((2,), 10**9)]),
    }
    sglang.decode_attention_fwd(**{**args, **longer, "attn_logits": logits, "attn_lse": lse}, engine=engine)
    near(args["o"], file["out"])
    near(logits[:reqs, :heads], torch.where(file["attn_logits"].isnan(), 7.0, file["attn_logits"]))
    near(lse[:reqs, :heads], torch.where(file["attn_lse"].isnan(), 7.0, file["attn_lse"]))
    for beyond in (logits[reqs:], logits[:, heads:], lse[reqs:], lse[:, heads:]):
        assert bool((beyond == 7.0).all())


@engines
def test_an_lse_buffer_of_four_axes_is_filled_from_its_front(engine: str, device: str) -> None:
    args, file = decode_args("decode_gqa_3splits", device)
    packed = torch.full_like(file["attn_logits"], NAN)
    sglang.decode_attention_fwd(**{**args, "attn_lse": packed}, engine=engine)
    lse = file["attn_lse"]
    near(packed.flatten()[: lse.numel()].view(lse.shape), lse)
    assert bool(packed.flatten()[lse.numel() :].isnan().all())


@engines
def test_nothing_is_written_where_no_request_has_a_key(engine: str, device: str) -> None:
    args, _ = decode_args("decode_empty_rows_nosink", device)
    empty = {"kv_indptr": torch.zeros_like(args["kv_indptr"]), "kv_indices": args["kv_indices"][:0]}
    for filled in (args["attn_logits"], args["attn_lse"]):
        filled.fill_(7.0)
    sglang.decode_attention_fwd(**{**args, **empty}, engine=engine)
    assert bool((args["o"] == 0).all())
    assert bool((args["attn_logits"] == 7.0).all()) and bool((args["attn_lse"] == 7.0).all())


@engines
def test_a_batch_of_no_request_works(engine: str, device: str) -> None:
    args, _ = decode_args("decode_gqa_3splits", device)
    none = {name: args[name][:0] for name in ("q", "o", "num_kv_splits", "kv_indices")}
    sglang.decode_attention_fwd(**{**args, **none, "kv_indptr": args["kv_indptr"][:1]}, engine=engine)
    extended, _ = extend_args("extend_noncausal", device)
    rows = ("q_extend", "k_extend", "v_extend", "o_extend", "lse_extend", "kv_indices")
    none = {**{name: extended[name][:0] for name in rows}, "max_len_extend": 0}
    first = {name: extended[name][:1] for name in ("qo_indptr", "kv_indptr")}
    sglang.extend_attention_fwd(**{**extended, **none, **first}, engine=engine)


@engines
@pytest.mark.parametrize("count", [0, -1, 4, 2**31 - 1])
def test_a_number_of_splits_out_of_bounds_loses_no_key(count: int, engine: str, device: str) -> None:
    args, file = decode_args("decode_gqa_3splits", device)
    args["num_kv_splits"].fill_(count)
    fenced = torch.full((6, 8, 3, 16), 7.0, device=device)
    sglang.decode_attention_fwd(**{**args, "attn_logits": fenced[1:5]}, engine=engine)
    near(args["o"], file["out"])
    assert bool((fenced[0] == 7.0).all()) and bool((fenced[5] == 7.0).all())


@engines
def test_offsets_beyond_the_slots_read_nothing_behind_them(engine: str, device: str) -> None:
    args, _ = decode_args("decode_gqa_3splits", device)
    far = args["kv_indptr"].clone()
    far[-1] = 2**31 - 1
    held, right = args["o"].clone(), args["o"].clone()
    with unread():
        sglang.decode_attention_fwd(**{**args, "kv_indptr": far, "o": held}, engine=engine)
    sglang.decode_attention_fwd(**{**args, "o": right}, engine=engine)
    assert torch.equal(held, right)


# --- Layouts and dtypes -----------------------------------------------------------------------------------------


def paged(x: Tensor, size: int, gap: int) -> Tensor:
    """The same slots page-major, `gap` elements between pages."""
    pages = x.shape[0] // size
    room = torch.full((pages, size * x.shape[1] * x.shape[2] + gap), NAN, dtype=x.dtype, device=x.device)
    view = room[:, : size * x.shape[1] * x.shape[2]].unflatten(1, (size, *x.shape[1:]))
    view.copy_(x[: pages * size].view(view.shape))
    return view


@engines
@pytest.mark.parametrize("page_size", [1, 4])
def test_page_major_buffers_are_read_by_their_own_strides(page_size: int, engine: str, device: str) -> None:
    """A page_size of 1 beside a page-major buffer, where the original reads one slot over and over, too."""
    args, file = decode_args("decode_gqa_page4_scoremod", device)
    buffers = {name: paged(args[name], 4, 5) for name in ("k_buffer", "v_buffer")}
    sglang.decode_attention_fwd(**{**args, **buffers, "page_size": page_size}, engine=engine)
    near(args["o"], file["out"])


@engines
def test_extend_reads_page_major_buffers(engine: str, device: str) -> None:
    args, file = extend_args("extend_causal_prefix_scales", device)
    slots = torch.cat([args["k_buffer"], args["k_buffer"].new_full((2, 2, 24), NAN)])
    values = torch.cat([args["v_buffer"], args["v_buffer"].new_full((2, 2, 16), NAN)])
    buffers = {"k_buffer": paged(slots, 4, 5), "v_buffer": paged(values, 4, 5), "page_size": 4}
    sglang.extend_attention_fwd(**{**args, **buffers}, engine=engine)
    near(args["o_extend"], file["out"])


@engines
@pytest.mark.parametrize("has_mla", [False, True])
def test_values_in_the_keys_first_columns_are_read_once_or_twice(has_mla: bool, engine: str, device: str) -> None:
    args, file = decode_args("decode_gqa_3splits", device)
    k = torch.randn(400, 1, 48, device=device)
    q, out = torch.randn(4, 8, 48, device=device), torch.full((4, 8, 32), NAN, device=device)
    logits = torch.full((4, 8, 3, 32), NAN, device=device)
    shared: Args = {"q": q, "k_buffer": k, "v_buffer": k[..., :32], "o": out, "attn_logits": logits}
    sglang.decode_attention_fwd(**{**args, **shared, "has_mla": has_mla}, engine=engine)
    for r, slots in enumerate(lists(file)):
        want, _ = oracle.attention(q[r], k.double()[slots], k.double()[slots, :, :32], scale=0.25)
        near(out[r].double(), want, OUTPUT[torch.float32])


def lists(file: Args) -> list[Tensor]:
    return list(file["kv_indices"].tensor_split(file["kv_indptr"][1:-1].long().cpu()))


@engines
def test_an_fp8_cache_is_lifted_not_the_query_rounded(engine: str, device: str) -> None:
    args, file = decode_args("decode_gqa_3splits", device)
    k, v = (args[name].to(FP8) for name in ("k_buffer", "v_buffer"))
    q = args["q"].bfloat16()
    out = torch.full_like(q, NAN)
    scales = {"k_scale": 0.5, "v_scale": 0.25}
    sglang.decode_attention_fwd(**{**args, **scales, "q": q, "k_buffer": k, "v_buffer": v, "o": out}, engine=engine)
    for r, slots in enumerate(lists(file)):
        want, _ = oracle.attention(q[r], k.double()[slots] * 0.5, v.double()[slots] * 0.25, scale=0.25)
        near(out[r].double(), want, OUTPUT[torch.bfloat16])


@engines
@pytest.mark.parametrize("name", ["decode_attention_fwd_normal", "decode_attention_fwd_grouped"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (40, 2)], ids=["group-1", "group-20"])
def test_every_decode_reads_its_own_kv_head(name: str, heads: int, kv_heads: int, engine: str, device: str) -> None:
    """The original's grouped kernel reads the wrong head in groups over 16 that 16 does not divide."""
    args, file = decode_args("decode_gqa_3splits", device)
    k, v = torch.randn(2, 400, kv_heads, 16, device=device).unbind(0)
    q, out = torch.randn(4, heads, 16, device=device), torch.full((4, heads, 16), NAN, device=device)
    logits = torch.full((4, heads, 3, 16), NAN, device=device)
    given = {"q": q, "k_buffer": k, "v_buffer": v, "o": out, "attn_logits": logits, "attn_lse": logits[..., 0].clone()}
    getattr(sglang, name)(**{**args, **given}, engine=engine)
    for r, slots in enumerate(lists(file)):
        want, _ = oracle.attention(q[r], k.double()[slots], v.double()[slots], scale=0.25)
        near(out[r].double(), want, OUTPUT[torch.float32])


@engines
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_may_be_of_either_integer_dtype(dtype: torch.dtype, engine: str, device: str) -> None:
    names = ("kv_indptr", "kv_indices", "num_kv_splits", "qo_indptr", "mask_indptr", "window_kv_offsets")
    for made, function, out in (
        (decode_args("decode_gqa_3splits", device), sglang.decode_attention_fwd, "o"),
        (extend_args("extend_window_mask_offsets_skip", device), sglang.extend_attention_fwd, "o_extend"),
    ):
        args, file = made
        function(**{key: x.to(dtype) if key in names else x for key, x in args.items()}, engine=engine)
        near(args[out], file["out"])


# --- Extend -----------------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("sm_scale", [None, 0, 0.0])
def test_no_scale_is_one_over_the_root_of_the_dim(sm_scale: Any, engine: str, device: str) -> None:
    args, file = extend_args("extend_noncausal", device)
    sglang.extend_attention_fwd(**{**args, "sm_scale": sm_scale}, engine=engine)
    near(args["o_extend"], file["out"])


@engines
@pytest.mark.parametrize("radius", [None, -1, 0])
def test_these_windows_see_all(radius: int | None, engine: str, device: str) -> None:
    args, file = extend_args("extend_causal_prefix_scales", device)
    sglang.extend_attention_fwd(**{**args, "sliding_window_size": radius}, engine=engine)
    near(args["o_extend"], file["out"])


@engines
def test_a_prefixs_part_of_the_mask_is_read_where_it_is_not_skipped(engine: str, device: str) -> None:
    args, file = extend_args("extend_prefix_custom_mask", device)
    whole = {**args, "skip_prefix_custom_mask": False}
    sglang.extend_attention_fwd(**whole, engine=engine)
    assert not torch.allclose(args["o_extend"], file["out"], **GOLDEN)
    unified, same = unified_args("unified_custom_mask", device)
    q, new = same["q"], same["extend_kv_indices"]
    out = unwritten(same["out"])
    lists_of = {"kv_indptr": same["prefix_kv_indptr"], "kv_indices": same["prefix_kv_indices"]}
    shared = ("k_buffer", "v_buffer", "qo_indptr", "custom_mask", "mask_indptr", "sm_scale", "max_len_extend")
    sglang.extend_attention_fwd(
        q_extend=q,
        k_extend=same["k_buffer"][new],
        v_extend=same["v_buffer"][new],
        o_extend=out,
        is_causal=True,
        k_scale=1.0,
        v_scale=None,
        skip_prefix_custom_mask=False,
        **lists_of,
        **{name: unified[name] for name in shared},
        engine=engine,
    )
    near(out, same["out"])


@engines
def test_a_bool_mask_is_one(engine: str, device: str) -> None:
    args, file = extend_args("extend_prefix_custom_mask", device)
    sglang.extend_attention_fwd(**{**args, "custom_mask": args["custom_mask"].bool()}, engine=engine)
    near(args["o_extend"], file["out"])


@engines
def test_a_mask_shows_keys_behind_the_tile_of_queries_though_causal(engine: str, device: str) -> None:
    """The original stops at the end of the tile of queries."""
    args, file = extend_args("extend_causal_prefix_scales", device)
    new, cached = file["qo_indptr"].diff().long(), file["kv_indptr"].diff().long()
    pairs = int((new * (new + cached)).sum())
    mask = {
        "custom_mask": torch.ones(pairs, dtype=torch.uint8, device=device),
        "mask_indptr": torch.nn.functional.pad((new * (new + cached)).cumsum(0), (1, 0)),
    }
    outs = [unwritten(args["o_extend"]) for _ in range(2)]
    sglang.extend_attention_fwd(**{**args, **mask, "o_extend": outs[0]}, engine=engine)
    sglang.extend_attention_fwd(**{**args, "is_causal": False, "o_extend": outs[1]}, engine=engine)
    near(outs[0], outs[1])


@engines
@pytest.mark.parametrize("skipped", ["skip_prefix", "skip_extend"])
def test_what_is_skipped_is_not_read(skipped: str, engine: str, device: str) -> None:
    args, file = extend_args(f"extend_{skipped}", device)
    if skipped == "skip_prefix":
        unread = {"k_buffer": args["k_buffer"][:0, :1], "v_buffer": args["v_buffer"][:0]}
        unread["kv_indices"] = args["kv_indices"][:0]
    else:
        unread = {"k_extend": args["k_extend"][:0], "v_extend": args["v_extend"][:0]}
    sglang.extend_attention_fwd(**{**args, **unread}, engine=engine)
    near(args["o_extend"], file["out"])
    near(args["lse_extend"], file["lse"])


@engines
def test_nothing_to_see_gives_0_and_the_sink_as_lse(engine: str, device: str) -> None:
    args, _ = extend_args("extend_skip_extend", device)
    nothing = {**args, "skip_prefix": True}
    sglang.extend_attention_fwd(**nothing, engine=engine)
    assert bool((args["o_extend"] == 0).all()) and bool((args["lse_extend"] == -float("inf")).all())
    sinks = torch.tensor([0.5, -3.0, 2.0, 9.0], device=device)
    sglang.extend_attention_fwd(**nothing, sinks=sinks, engine=engine)
    assert bool((args["o_extend"] == 0).all())
    near(args["lse_extend"], sinks.expand(10, 4), LSE)


@engines
@pytest.mark.parametrize("skipped", ["skip_prefix", "skip_extend"])
def test_a_sink_joins_a_part_that_it_is_given_to(skipped: str, engine: str, device: str) -> None:
    args, file = extend_args(f"extend_{skipped}", device)
    sinks = torch.randn(4, device=device)
    sglang.extend_attention_fwd(**args, sinks=sinks, engine=engine)
    lse = torch.logaddexp(file["lse"], sinks)
    near(args["lse_extend"], lse, LSE)
    near(args["o_extend"], file["out"] * torch.exp(file["lse"] - lse)[..., None])


@engines
def test_a_temperature_counts_positions_before_the_window(engine: str, device: str) -> None:
    """With offsets a clipped list gives what the whole one gives."""
    args, _ = extend_args("extend_sliding_window", device)
    outs = [unwritten(args["o_extend"]) for _ in range(2)]
    sglang.extend_attention_fwd(**{**args, "xai_temperature_len": 4, "o_extend": outs[0]}, engine=engine)
    kept = [slots[-7:] for slots in lists(args)]
    counts = torch.tensor([0, *(len(slots) for slots in kept)], device=device)
    clipped = {
        "kv_indices": torch.cat(kept),
        "kv_indptr": counts.cumsum(0).int(),
        "window_kv_offsets": args["kv_indptr"].diff() - counts[1:].int(),
    }
    sglang.extend_attention_fwd(**{**args, **clipped, "xai_temperature_len": 4, "o_extend": outs[1]}, engine=engine)
    near(outs[0], outs[1], OUTPUT[torch.float32])


@engines
def test_a_unified_list_of_a_window_reads_the_masks_own_columns(engine: str, device: str) -> None:
    """Rows of the mask hold the keys before the window too; the original reads them as if they did not."""
    args, file = extend_args("extend_window_mask_offsets_skip", device)
    sglang.extend_attention_fwd(**{**args, "skip_prefix_custom_mask": False}, engine=engine)
    new = torch.arange(file["q"].shape[0], device=device) + file["k_buffer"].shape[0]
    start, lens = file["qo_indptr"][:-1], file["qo_indptr"].diff()
    indptr, indices, prefix_lens = sglang.build_unified_kv_indices(
        file["kv_indptr"], file["kv_indices"], start, lens, new, 3, engine=engine
    )
    out = unwritten(file["out"])
    shared = ("qo_indptr", "max_len_extend", "custom_mask", "mask_indptr", "sm_scale", "sliding_window_size")
    sglang.extend_attention_fwd_unified(
        q=file["q"],
        o=out,
        k_buffer=torch.cat([file["k_buffer"], file["k"]]),
        v_buffer=torch.cat([file["v_buffer"], file["v"]]),
        k_scale=1.0,
        v_scale=1.0,
        kv_indptr=indptr,
        kv_indices=indices,
        prefix_lens=prefix_lens,
        window_start_pos=file["window_kv_offsets"],
        **{name: args[name] for name in shared},
        engine=engine,
    )
    near(out, args["o_extend"], OUTPUT[torch.float32])


@engines
def test_a_unified_query_that_sees_nothing_gives_0(engine: str, device: str) -> None:
    args, _ = unified_args("unified_custom_mask", device)
    args["custom_mask"].zero_()
    sglang.extend_attention_fwd_unified(**args, engine=engine)
    assert bool((args["o"] == 0).all())


# --- Verify -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "sinks": lambda a: {"sinks": torch.zeros(4, device=a["q_extend"].device)},
    "window": lambda a: {"sliding_window_size": 7},
    "cap": lambda a: {"logit_cap": 5.0},
    "temperature": lambda a: {"xai_temperature_len": 8},
    "not causal": lambda a: {"is_causal": False},
    "a query in 2-D": lambda a: {"q_extend": a["q_extend"].flatten(1)},
    "other KV heads in the buffers": lambda a: {"k_buffer": a["k_buffer"][:, :1]},
    "heads that do not divide": lambda a: {"q_extend": a["q_extend"][:, :3]},
    "MLA": lambda a: {"v_extend": a["v_extend"][..., :16], "v_buffer": a["v_buffer"][..., :16]},
    "pages": lambda a: {"k_buffer": a["k_buffer"][None], "v_buffer": a["v_buffer"][None]},
    "other counts": lambda a: {"max_len_extend": 2},
    "no count": lambda a: {"max_len_extend": None},
    "no request": lambda a: {"qo_indptr": a["qo_indptr"][:1], "q_extend": a["q_extend"][:0]},
}


@pytest.mark.parametrize("why", REFUSED)
def test_verify_refuses_and_touches_nothing(why: str) -> None:
    engine, device = ENGINES[0]
    args, _ = verify_args(device)
    assert sglang.verify_splitkv_fwd(**{**args, **REFUSED[why](args)}, engine=engine) is False
    assert bool(args["o_extend"].isnan().all())


@engines
def test_verify_does_not_look_at_a_mask(engine: str, device: str) -> None:
    args, file = verify_args(device)
    hidden = {"custom_mask": torch.zeros(600, dtype=torch.uint8, device=device), "mask_indptr": args["qo_indptr"] * 0}
    assert sglang.verify_splitkv_fwd(**{**args, **hidden}, engine=engine)
    near(args["o_extend"], file["out_extend_attention"])


# --- Modifiers --------------------------------------------------------------------------------------------------


@jit
def twice_the_distance(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, aux0_stride_t, aux0_stride_h, aux0_len):
    distance = q_pos - kv_pos
    row = Aux0 + q_idx * aux0_stride_t + head * aux0_stride_h + distance * 0
    return qk - 2.0 * tl.load(row, mask=mask, other=0.0) * distance.to(tl.float32)


@pytest.mark.skipif(tl is None, reason="needs Triton")
def test_a_jitted_function_of_the_callers_modifies_scores() -> None:
    device = ENGINES[0][1]
    args, file = decode_args("decode_gqa_page4_scoremod", device)
    weights = torch.rand(3, 4, 1, device=device)
    sglang.decode_attention_fwd(**{**args, "score_mod": twice_the_distance, "aux_tensors": [weights]})
    for r, slots in enumerate(lists(file)):
        q_pos = len(slots) - 1

        def modify(scores: Tensor, _: int, kv_pos: Tensor, head: int, r: int = r, q_pos: int = q_pos) -> Tensor:
            return scores - 2.0 * weights[r, head, 0] * (q_pos - kv_pos)

        k, v = (args[name].double()[slots] for name in ("k_buffer", "v_buffer"))
        want, _ = oracle.attention(args["q"][r], k, v, scale=0.25, modify=modify)
        near(args["o"][r].double(), want, OUTPUT[torch.float32])


@engines
def test_a_modifier_of_ours_runs_in_both_engines(engine: str, device: str) -> None:
    args, _ = decode_args("decode_gqa_3splits", device)
    plain = unwritten(args["o"])
    sglang.decode_attention_fwd(**{**args, "o": plain}, engine=engine)
    sglang.decode_attention_fwd(**args, score_mod=alibi, engine=engine)
    near(args["o"][0], plain[0])  # one key: no distance, and one weight
    assert not torch.allclose(args["o"][3], plain[3], **GOLDEN)


def test_a_modifier_that_gives_minus_inf_for_a_whole_tile_gives_no_nan() -> None:
    """The original's decode gives NaN there. Keys far from the query are hidden, so the first split sees nothing."""
    engine, device = ("triton", ENGINES[1][1])
    args, file = decode_args("decode_gqa_3splits", device)
    aux = torch.zeros(4, 8, 1, device=device)
    sglang.decode_attention_fwd(**args, score_mod=only_the_last_key, aux_tensors=[aux], engine=engine)
    last = torch.stack([args["v_buffer"][slots[-1]] for slots in lists(file)]).repeat_interleave(4, 1)
    near(args["o"], last)


@jit
def only_the_last_key(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, aux0_stride_t, aux0_stride_h, aux0_len):
    return tl.where(q_pos == kv_pos, qk, float("-inf"))


# --- Nothing waits ----------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Args, Args]]]] = {
    "decode": (sglang.decode_attention_fwd, decode_args),
    "extend": (sglang.extend_attention_fwd, extend_args),
    "unified": (sglang.extend_attention_fwd_unified, unified_args),
    "verify": (sglang.verify_splitkv_fwd, lambda _, device: verify_args(device)),
}
CASES = [*DECODE, *EXTEND, *UNIFIED[:2], "verify_splitkv"]


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the device itself says so, below")
@pytest.mark.parametrize("name", CASES)
def test_no_number_is_read_back(name: str) -> None:
    function, made = CALLS[name.split("_")[0]]
    args, _ = made(name, "cpu")
    with no_waiting():
        function(**args)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_give_the_original_results_without_waiting_for_the_device(name: str) -> None:
    kind = name.split("_")[0]
    function, made = CALLS[kind]
    args, file = made(name, "cuda")
    function(**args)  # compiles
    out = args["o"] if "o" in args else args["o_extend"]
    out.fill_(NAN)
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    near(out, file["out_extend_attention" if kind == "verify" else "out"].nan_to_num(0.0))


def test_every_original_case_is_here() -> None:
    kinds = ("decode", "extend", "unified", "verify")
    files = {
        path.stem
        for path in data_path("golden/original/num_kv_splits.json").parent.glob("*.npz")
        if path.stem.split("_")[0] in kinds
    }
    assert files == {*DECODE, *EXTEND, *UNIFIED, "verify_splitkv"}
    assert all(load(name, "cpu") for name in files)
