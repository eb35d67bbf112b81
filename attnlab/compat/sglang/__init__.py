"""SGLang's Triton attention, of version 0.5.23: its public names and call signatures, over our objects.

Code written against them runs by changing its imports: whichever module a name is in there, it is in this one here.

    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend   # there
    from attnlab.compat.sglang import TritonAttnBackend                        # here

SGLang itself is not needed. What the classes read from a server's objects is listed at `TritonAttnBackend`.

Every function takes one more argument, by name: `engine="triton"`, which is what the original runs (interpreted where
there is no GPU), or "eager", vectorised torch. Windows are the original's number, a radius: W earlier keys and the
query itself. Where a value differs from the original's, the function's docstring says so.
"""

from attnlab.compat.sglang.backend import TritonAttnBackend as TritonAttnBackend
from attnlab.compat.sglang.dcp import cp_lse_ag_out_rs_mha as cp_lse_ag_out_rs_mha
from attnlab.compat.sglang.dcp import get_dcp_lens as get_dcp_lens
from attnlab.compat.sglang.decode import decode_attention_fwd as decode_attention_fwd
from attnlab.compat.sglang.decode import decode_attention_fwd_grouped as decode_attention_fwd_grouped
from attnlab.compat.sglang.decode import decode_attention_fwd_normal as decode_attention_fwd_normal
from attnlab.compat.sglang.drafts import draft_kv_indices_buffer_width as draft_kv_indices_buffer_width
from attnlab.compat.sglang.drafts import draft_kv_indices_used_len as draft_kv_indices_used_len
from attnlab.compat.sglang.drafts import generate_draft_decode_kv_indices as generate_draft_decode_kv_indices
from attnlab.compat.sglang.extend import extend_attention_fwd as extend_attention_fwd
from attnlab.compat.sglang.extend import extend_attention_fwd_unified as extend_attention_fwd_unified
from attnlab.compat.sglang.indices import build_unified_kv_indices as build_unified_kv_indices
from attnlab.compat.sglang.indices import create_flashinfer_kv_indices_triton as create_flashinfer_kv_indices_triton
from attnlab.compat.sglang.indices import (
    create_triton_kv_indices_for_dcp_triton as create_triton_kv_indices_for_dcp_triton,
)
from attnlab.compat.sglang.indices import get_num_kv_splits_triton as get_num_kv_splits_triton
from attnlab.compat.sglang.indices import update_sliding_window_buffer as update_sliding_window_buffer
from attnlab.compat.sglang.masks import TreeMaskMode as TreeMaskMode
from attnlab.compat.sglang.masks import VerifyMask as VerifyMask
from attnlab.compat.sglang.masks import maybe_create_verify_mask as maybe_create_verify_mask
from attnlab.compat.sglang.metadata import ForwardMetadata as ForwardMetadata
from attnlab.compat.sglang.mods import relative_bias_score_mod as relative_bias_score_mod
from attnlab.compat.sglang.multistep import TritonMultiStepDraftBackend as TritonMultiStepDraftBackend
from attnlab.compat.sglang.records import KVWriteLoc as KVWriteLoc
from attnlab.compat.sglang.verify import verify_splitkv_fwd as verify_splitkv_fwd

__all__ = [
    "ForwardMetadata",
    "KVWriteLoc",
    "TreeMaskMode",
    "TritonAttnBackend",
    "TritonMultiStepDraftBackend",
    "VerifyMask",
    "build_unified_kv_indices",
    "cp_lse_ag_out_rs_mha",
    "create_flashinfer_kv_indices_triton",
    "create_triton_kv_indices_for_dcp_triton",
    "decode_attention_fwd",
    "decode_attention_fwd_grouped",
    "decode_attention_fwd_normal",
    "draft_kv_indices_buffer_width",
    "draft_kv_indices_used_len",
    "extend_attention_fwd",
    "extend_attention_fwd_unified",
    "generate_draft_decode_kv_indices",
    "get_dcp_lens",
    "get_num_kv_splits_triton",
    "maybe_create_verify_mask",
    "relative_bias_score_mod",
    "update_sliding_window_buffer",
    "verify_splitkv_fwd",
]
