"""Split-KV decode in torch: the kernels' schedule, vectorised over tiles of keys of all segments at once.

The twin of kernels/decode.py: same segments, same partials, same merge. It runs on any device; its place is the CPU.
To know how much work there is it reads the schedule, which on a GPU waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.eager.core import State, join_sink, modified, normalised, state_of
from attnlab.eager.sweep import entries_of, gathered, merged_by_owner, sweep_segments
from attnlab.plan.call import DecodeCall
from attnlab.plan.layout import KVLayout
from attnlab.spec import AttentionSpec


def decode_split(call: DecodeCall) -> None:
    """Leave the softmax state of every segment of the schedule in `call.partials`. Sums in fp32."""
    sweep_segments(call.lane.schedule, call.partials, lambda *tiles: _attend(call, *tiles), width=call.spec.qk_dim)


def decode_merge(call: DecodeCall) -> None:
    """Merge every request's partials into `call.out` and, where given, `call.lse`."""
    spec, partials, owners = call.spec, call.partials, call.lane.schedule.merge_indptr
    rows = owners.shape[0] - 1
    if rows == 0:
        return
    state = merged_by_owner(partials, owners)
    if call.sinks is not None:
        sink = call.sinks.float().reshape(spec.kv_heads, spec.group).repeat(rows // spec.kv_heads, 1)
        state = join_sink(state, sink)
    out, lse = normalised(state)
    call.out.copy_((out * call.view.v_scale).view(call.out.shape))
    if call.lse is not None:
        call.lse.copy_(lse.view(call.lse.shape))


def _attend(call: DecodeCall, segments: Tensor, nth: Tensor) -> State:
    """Return the softmax states of some tiles: tile i is the `nth[i]`-th of segment `segments[i]`."""
    q, view, spec, layout = call.q, call.view, call.spec, call.lane.layout
    req, kv_head, first, last = segments[:, 0], segments[:, 1], segments[:, 2], segments[:, 3]
    entry, valid = entries_of(first, last, nth)
    k, v = gathered(view, layout, req, kv_head, entry)
    head = kv_head[:, None] * spec.group + torch.arange(spec.group, device=q.device)  # (tiles, group)
    queries = q[req[:, None], head].float() * (spec.scale * view.k_scale)  # (tiles, group, qk_dim)
    scores = modify_scores(queries @ k.mT, layout, spec, call.aux, req, head, entry)  # (tiles, group, keys)
    scores.masked_fill_(~valid[:, None, :], float("-inf"))
    return state_of(scores, v)


def modify_scores(
    scores: Tensor,
    layout: KVLayout,
    spec: AttentionSpec,
    aux: Tensor | None,
    req: Tensor,
    head: Tensor,
    entry: Tensor,
) -> Tensor:
    """Return scores `[tiles, group, keys]` capped, tempered and modified, in this order.

    A tile belongs to request `req[tile]`, its rows to query heads `head[tile]`, its columns to list entries
    `entry[tile]`.
    """
    start, indptr = layout.start[req], layout.index.indptr
    return modified(
        scores,
        spec,
        q_pos=(start + indptr[req + 1] - indptr[req] - 1)[:, None, None],
        kv_pos=(start[:, None] + entry)[:, None, :],
        token=req[:, None, None],
        head=head[:, :, None],
        aux=aux,
    )
