"""Split-KV verify in torch: drafts over ranges of the cached keys, then the merge, with the drafts among themselves.

The twin of kernels/verify.py: same segments, same partials, same merge. It reads lengths, so on a GPU it waits for the
device; its place is the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.eager.core import State, join_sink, merge_states, modified, normalised, state_of, visible_keys
from attnlab.eager.sweep import entries_of, gathered, merged_by_owner, sweep_segments
from attnlab.plan.extend_call import VerifyCall
from attnlab.plan.workspace import Partials

QUERY_TILE = 16
"""Drafts that are attended at once; also where fewer come, if the rest of the batch must not change the bits."""


def verify_split(call: VerifyCall) -> None:
    """Leave the softmax state of every draft over every segment of the schedule in `call.partials`."""
    group, most, partials = call.spec.group, call.queries.most, call.partials
    tile = QUERY_TILE if call.batch_invariant else min(QUERY_TILE, max(1, most))
    for at in range(0, most, tile):
        rows = slice(at * group, min(at + tile, most) * group)
        part = Partials(acc=partials.acc[:, rows], max=partials.max[:, rows], sum=partials.sum[:, rows])
        numbers = torch.arange(at, at + tile, device=call.q.device)

        def attend(segments: Tensor, nth: Tensor, numbers: Tensor = numbers, rows: slice = rows) -> State:
            maximum, total, acc = _attend(call, segments, nth, numbers)
            kept = slice(0, rows.stop - rows.start)
            return maximum[:, kept], total[:, kept], acc[:, kept]

        sweep_segments(call.lane.schedule, part, attend, width=call.spec.qk_dim + tile * group)


def _attend(call: VerifyCall, segments: Tensor, nth: Tensor, numbers: Tensor) -> State:
    """Return the softmax states `[tiles, drafts x group]` of drafts `numbers` over some tiles of segments' keys."""
    spec, view, layout, queries = call.spec, call.view, call.lane.layout, call.queries
    req, kv_head, first, last = segments[:, 0], segments[:, 1], segments[:, 2], segments[:, 3]
    entry, valid = entries_of(first, last, nth)
    k, v = gathered(view, layout, req, kv_head, entry)
    drafts = queries.indptr.diff()[req, None]
    live = numbers < drafts  # (tiles, drafts)
    token = torch.where(live, queries.indptr[req, None] + numbers, 0)
    head = kv_head[:, None] * spec.group + torch.arange(spec.group, device=req.device)
    q = call.q[token[:, :, None], head[:, None, :]].float() * (spec.scale * view.k_scale)
    shape = (*q.shape[:3], entry.shape[1])  # (tiles, drafts, group, keys)
    q_pos, kv_pos = queries.positions[token], layout.start[req, None] + entry
    scores = modified(
        (q.flatten(1, 2) @ k.mT).view(shape),
        spec,
        q_pos=q_pos[:, :, None, None],
        kv_pos=kv_pos[:, None, None, :],
        token=token[:, :, None, None],
        head=head[:, None, :, None],
        aux=call.aux,
    )
    cached = layout.start[req] + layout.index.indptr.diff()[req]
    row = queries.mask_indptr[req, None] + numbers * (cached[:, None] + drafts).long()
    visible = visible_keys(
        layout.sight,
        queries.mask,
        q_pos=q_pos[:, :, None],
        kv_pos=kv_pos[:, None, :],
        q_number=numbers[:, None],
        kv_number=(kv_pos - cached[:, None])[:, None, :],
        bit=row[:, :, None] + kv_pos[:, None, :],
    )
    visible = visible & live[:, :, None] & valid[:, None, :]
    return state_of(torch.where(visible[:, :, None, :], scores, float("-inf")).flatten(1, 2), v)


def verify_merge(call: VerifyCall) -> None:
    """Merge every draft's partials, and what it sees of the drafts, into `call.out` and, where given, `call.lse`."""
    spec, offsets = call.spec, call.queries.indptr.tolist()
    if len(offsets) == 1 or call.queries.most == 0:
        return
    maximum, total, acc = merged_by_owner(call.partials, call.lane.schedule.merge_indptr)
    shape = (len(offsets) - 1, spec.kv_heads, call.queries.most, spec.group)
    maximum, total, acc = maximum.view(shape), total.view(shape), (acc * call.view.v_scale).view(*shape, spec.v_dim)
    for r, (first, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if first == end:
            continue
        mine = slice(0, end - first)
        state = (maximum[r, :, mine], total[r, :, mine], acc[r, :, mine])
        if call.k is not None and call.v is not None:
            state = merge_states(state, _among_drafts(call, call.k, call.v, r, first, end))
        if call.sinks is not None:
            state = join_sink(state, call.sinks.float().view(spec.kv_heads, 1, spec.group))
        out, lse = normalised(state)
        call.out[first:end] = out.transpose(0, 1).flatten(1, 2).to(call.out.dtype)
        if call.lse is not None:
            call.lse[first:end] = lse.transpose(0, 1).flatten(1, 2)


def _among_drafts(call: VerifyCall, k: Tensor, v: Tensor, request: int, first: int, end: int) -> State:
    """Return the states `[kv_heads, drafts, group]` of a request's drafts over its drafts, which are not scaled."""
    spec, queries, layout = call.spec, call.queries, call.lane.layout
    number = torch.arange(end - first, device=call.q.device)
    token, position = first + number, queries.positions[first:end]
    k, v = (x[first:end].float().transpose(0, 1) for x in (k, v))
    q = call.q[first:end].float().view(-1, spec.kv_heads, spec.group, spec.qk_dim).transpose(0, 1) * spec.scale
    shape = (spec.kv_heads, end - first, spec.group, end - first)
    scores = modified(
        (q.flatten(1, 2) @ k.mT).view(shape),
        spec,
        q_pos=position[:, None, None],
        kv_pos=position,
        token=token[:, None, None],
        head=torch.arange(spec.heads, device=token.device).view(spec.kv_heads, 1, spec.group, 1),
        aux=call.aux,
    )
    cached = layout.start[request] + layout.index.indptr[request + 1] - layout.index.indptr[request]
    row = queries.mask_indptr[request] + number * (cached + end - first).long()
    visible = visible_keys(
        layout.sight,
        queries.mask,
        q_pos=position[:, None],
        kv_pos=position,
        q_number=number[:, None],
        kv_number=number,
        bit=row[:, None] + cached + number,
    )
    return state_of(torch.where(visible[:, None, :], scores, float("-inf")), v)
