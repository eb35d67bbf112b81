"""The original's own cases, data/golden/original, as arguments of the functions of `attnlab.compat.sglang`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.assets import data_path
from attnlab.compat.sglang import relative_bias_score_mod

DECODE = (
    "decode_gqa_3splits",
    "decode_gqa_sinks_cap",
    "decode_mha_xai_page4_scoremod",
    "decode_gqa_page4_scoremod",
    "decode_empty_rows_sink",
    "decode_empty_rows_nosink",
)
EXTEND = (
    "extend_causal_prefix_scales",
    "extend_noncausal",
    "extend_prefix_custom_mask",
    "extend_skip_extend",
    "extend_skip_prefix",
    "extend_sliding_window",
    "extend_window_mask_offsets_skip",
)
UNIFIED = ("unified_causal", "unified_custom_mask", "unified_xai")

Args = dict[str, Any]


def load(name: str, device: str) -> Args:
    """A file's arrays as tensors, its scalars as Python numbers."""
    with np.load(data_path(f"golden/original/{name}.npz")) as file:
        return {
            key: torch.from_numpy(file[key]).to(device) if file[key].ndim else file[key].item() for key in file.files
        }


def unwritten(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"))


def decode_args(name: str, device: str) -> tuple[Args, Args]:
    """(arguments of `decode_attention_fwd`, the whole file); what it fills is full of NaN."""
    file = load(name, device)
    bias: Args = {"score_mod": relative_bias_score_mod, "aux_tensors": [file["aux0"]]} if "aux0" in file else {}
    given = {key: x for key, x in file.items() if key not in ("out", "aux0")}
    filled = {key: unwritten(file[key]) for key in ("attn_logits", "attn_lse")}
    return {**given, **bias, **filled, "o": unwritten(file["out"])}, file


def extend_args(name: str, device: str) -> tuple[Args, Args]:
    """(arguments of `extend_attention_fwd`, the whole file); output and LSE are full of NaN."""
    file = load(name, device)
    given = {key: x for key, x in file.items() if key not in ("q", "k", "v", "out", "out_extend_attention", "lse")}
    new = {f"{key}_extend": file[key] for key in ("q", "k", "v")}
    absent = {"custom_mask": None, "mask_indptr": None, "is_causal": True}
    out = unwritten(file["out"])
    return {**absent, **given, **new, "o_extend": out, "lse_extend": unwritten(out[..., 0])}, file


def unified_args(name: str, device: str) -> tuple[Args, Args]:
    """(arguments of `extend_attention_fwd_unified`, the whole file); the output is full of NaN."""
    file = load(name, device)
    lists = ("out", "prefix_kv_indptr", "prefix_kv_indices", "extend_start_loc", "extend_seq_lens", "extend_kv_indices")
    given = {key: x for key, x in file.items() if key not in lists and not key.startswith("unified")}
    unified = {"kv_indptr": file["unified_kv_indptr"], "kv_indices": file["unified_kv_indices"]}
    return {**given, **unified, "o": unwritten(file["out"])}, file


def verify_args(device: str) -> tuple[Args, Args]:
    """(arguments of `verify_splitkv_fwd`, the whole file); the output is full of NaN."""
    args, file = extend_args("verify_splitkv", device)
    del args["lse_extend"]
    return args, file
