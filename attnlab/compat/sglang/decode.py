"""`decode_attention_fwd`: one query a request over split lists, with the caller's buffers for the partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.checks import own_memory, positive, require, tensor
from attnlab.compat.sglang.arguments import (
    attention_of,
    engine_on,
    entries,
    kv_index,
    kv_view,
    new_partials,
    output_rows,
    split_lane,
)
from attnlab.engines import Engine
from attnlab.plan.call import DecodeCall
from attnlab.plan.layout import KVLayout


@torch.no_grad()
def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Tensor,
    attn_lse: Tensor,
    num_kv_splits: Tensor,
    max_kv_splits: int,
    sm_scale: float | None,
    k_scale: float | None,
    v_scale: float | None,
    logit_cap: float | None = 0.0,
    sinks: Tensor | None = None,
    xai_temperature_len: int | None = -1,
    has_mla: bool = False,
    use_pdl: bool = False,
    page_size: int = 1,
    score_mod: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    *,
    engine: str | Engine = "triton",
) -> None:
    """Attend with one query for each request, into `o`; leave every split's result in `attn_logits` and `attn_lse`.

    `q` `[reqs, heads, qk_dim]` and `o` `[reqs, heads, v_dim]` are fp32, fp16 or bf16; buffers are by slot or
    page-major, fp8 too; `kv_indptr [>= reqs + 1]`, `kv_indices` and `num_kv_splits [>= reqs]` int32 or int64.
    `attn_logits` `[>= reqs, >= heads, max_kv_splits, v_dim]` and `attn_lse`, its first three axes, are fp32: filled are
    the normalised outputs, without v_scale, and the natural log-sum-exps, without the sink. A split without keys is
    left as it was. `sm_scale` None is one over the root of qk_dim, and 0 is 0 here. Positions are those of the list.

    Differs from the original: a request without keys gives 0, not NaN. A group of query heads of any size reads its own
    KV head (theirs are wrong for groups over 16 that 16 does not divide). Temperature works with grouped heads.
    A count of 0, or over `max_kv_splits`, loses no key: it is held to what there is. fp8 keys are lifted to q's dtype,
    q is not rounded to theirs. A modifier that gives -inf for a whole tile gives no NaN. `attn_lse` is found by its own
    strides. `use_pdl` is unread: the target decides. Offsets are held to `kv_indices`; on a CPU, ValueError where they
    leave it, and where a slot that is read leaves the buffers.
    Raises TypeError or ValueError, naming the argument, before anything is written.
    """
    view = kv_view(k_buffer, v_buffer, k_scale=k_scale, v_scale=v_scale, page_size=page_size, has_mla=has_mla)
    runner, device = engine_on(engine, view.k.device), view.k.device
    spec, aux = attention_of(
        "q",
        q,
        view,
        engine=runner,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        xai_temperature_len=xai_temperature_len,
        sinks=sinks,
        score_mod=score_mod,
        aux_tensors=aux_tensors,
    )
    reqs, most = q.shape[0], positive("max_kv_splits", max_kv_splits)
    logits, lse = _partials_of_caller(attn_logits, attn_lse, reqs, spec.heads, most, spec.v_dim, device)
    beside = {"k_buffer": k_buffer, "v_buffer": v_buffer, "the queries": q, "o": o, "sinks": sinks, "aux_tensors": aux}
    beside |= {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "num_kv_splits": num_kv_splits}
    own_memory("attn_logits", logits, beside)
    own_memory("attn_lse", lse, {**beside, "attn_logits": logits})
    index = kv_index(kv_indptr, kv_indices, reqs=reqs, device=device, view=view)
    counts = entries("num_kv_splits", num_kv_splits, count=reqs, device=device, dtype=torch.int32)
    lane = split_lane(KVLayout.full(index), counts, most=most, kv_heads=spec.kv_heads)
    call = DecodeCall(
        layer=0,
        spec=spec,
        view=view,
        lane=lane,
        partials=new_partials(lane, spec),
        q=q,
        out=output_rows("o", o, q, view),
        sinks=sinks,
        aux=aux,
    )
    runner.decode(call)
    _fill(call, logits, lse)


# The original has a kernel for one query head a KV head and one for groups; here one text serves both.
decode_attention_fwd_normal = decode_attention_fwd
decode_attention_fwd_grouped = decode_attention_fwd


def _partials_of_caller(
    attn_logits: Tensor, attn_lse: Tensor, reqs: int, heads: int, most: int, v_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the caller's buffers as `[reqs, heads, splits, v_dim]` and `[reqs, heads, splits]`."""
    wanted: tuple[int | str, ...] = ("rows", "heads", "splits", v_dim)
    tensor("attn_logits", attn_logits, shape=wanted, dtype=torch.float32, device=device)
    rows, wide, splits, _ = attn_logits.shape
    require(
        splits == most, f"max_kv_splits: expected {splits} as attn_logits {list(attn_logits.shape)} has it, got {most}"
    )
    require(
        rows >= reqs and wide >= heads,
        f"attn_logits: expected room for {reqs} requests and {heads} heads, got {list(attn_logits.shape)}",
    )
    if isinstance(attn_lse, Tensor) and attn_lse.dim() == 4:
        # Some callers allocate it like attn_logits: what is used is its front, packed.
        packed = attn_lse.is_contiguous() and attn_lse.numel() >= rows * wide * splits
        require(packed, f"attn_lse: expected {[rows, wide, splits]}, got strides {attn_lse.stride()}")
        attn_lse = attn_lse.view(-1)[: rows * wide * splits].view(rows, wide, splits)
    wanted = ("rows", "heads", splits)
    tensor("attn_lse", attn_lse, shape=wanted, dtype=torch.float32, device=device, hint="like attn_logits")
    require(
        attn_lse.shape[0] >= reqs and attn_lse.shape[1] >= heads,
        f"attn_lse: expected room for {reqs} requests and {heads} heads, got {list(attn_lse.shape)}",
    )
    return attn_logits, attn_lse


def _fill(call: DecodeCall, attn_logits: Tensor, attn_lse: Tensor) -> None:
    """Write what every split came to, normalised, where the caller looks for it; leave splits without keys alone."""
    schedule, group = call.lane.schedule, call.spec.group
    segments = schedule.segments.long()
    if segments.shape[0] == 0:
        return
    # How many segments have keys is known to the device alone. Those that have none repeat the first, which has keys
    # if any has; if none has, what is there is written back.
    live = segments[:, 2] < segments[:, 3]
    number = torch.where(live, torch.arange(segments.shape[0], device=live.device), 0)
    request, kv_head, _, _, partial = segments[number].unbind(1)
    split = partial - schedule.merge_indptr[request * schedule.kv_heads + kv_head]
    head = kv_head[:, None] * group + torch.arange(group, device=live.device)
    cells = (request[:, None], head, split[:, None])
    for buffer, values in ((attn_logits, call.partials.output), (attn_lse, call.partials.lse)):
        buffer[cells] = torch.where(live[0], values[partial], buffer[cells])
