"""Split-KV decode in torch: the kernels' schedule, vectorised over tiles of keys of all segments at once.

The twin of kernels/decode.py: same segments, same partials, same merge. It runs on any device; its place is the CPU.
To know how much work there is it reads the schedule, which on a GPU waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnlab.mods.softcap import soft_cap
from attnlab.mods.temperature import temperature
from attnlab.plan.call import DecodeCall
from attnlab.plan.layout import KVLayout
from attnlab.plan.splits import owner_of
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

TILE = 128
"""Keys that are attended at once. Segments are cut into tiles, so that all tiles have one shape."""

MAX_GATHERED = 1 << 24
"""Elements of K that are gathered at once, which bounds the memory of long batches."""


def decode_split(call: DecodeCall) -> None:
    """Leave the softmax state of every segment of the schedule in `call.partials`. Sums in fp32."""
    segments = call.lane.schedule.segments
    segments = segments[segments[:, 2] < segments[:, 3]].long()
    counts = (-(-(segments[:, 3] - segments[:, 2]) // TILE)).tolist()
    for first, last, tiles in _chunks(counts, max(1, MAX_GATHERED // (TILE * call.spec.qk_dim))):
        of_segment = torch.tensor(counts[first:last], device=segments.device)
        row = torch.repeat_interleave(torch.arange(last - first, device=segments.device), of_segment)
        nth = torch.arange(row.shape[0], device=row.device) - (of_segment.cumsum(0) - of_segment)[row]
        row, nth = row[tiles], nth[tiles]
        state = _merged(_attend(call, segments[first:last][row], nth), row, last - first)
        _fold(call.partials, segments[first:last, 4], state, keep=tiles.start > 0)


def decode_merge(call: DecodeCall) -> None:
    """Merge every request's partials into `call.out` and, where given, `call.lse`."""
    spec, partials, owners = call.spec, call.partials, call.lane.schedule.merge_indptr
    rows = owners.shape[0] - 1
    if rows == 0:
        return
    live = int(owners[-1])
    row = owner_of(torch.arange(live, dtype=torch.int32, device=owners.device), owners)
    maximum, total, acc = _merged((partials.max[:live], partials.sum[:live], partials.acc[:live]), row, rows)
    if call.sinks is not None:
        sink = call.sinks.float().reshape(spec.kv_heads, spec.group).repeat(rows // spec.kv_heads, 1)
        top = torch.maximum(maximum, sink)
        endless = sink == float("inf")  # takes everything; exp(inf - inf) would be NaN
        fade = torch.where(endless, 0.0, torch.exp(maximum - _finite(top)))
        total = total * fade + torch.where(endless, 1.0, torch.exp(sink - _finite(top)))
        acc, maximum = acc * fade[..., None], top
    safe = torch.where(total == 0, 1.0, total)
    call.out.copy_((acc / safe[..., None] * call.view.v_scale).view(call.out.shape))
    if call.lse is not None:
        call.lse.copy_((maximum + safe.log()).view(call.lse.shape))


def _chunks(counts: list[int], limit: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (first segment, last segment, their tiles) so that no chunk has more tiles than the limit.

    Only a segment that is longer than the limit alone is cut, always at the same tiles: what else is in the batch must
    not change the order in which its keys are summed.
    """
    first = held = 0
    for i, count in enumerate(counts):
        if held and held + count > limit:
            yield first, i, slice(0, held)
            first, held = i, 0
        held += count
        if held > limit:  # this segment alone
            yield from ((i, i + 1, slice(at, min(at + limit, count))) for at in range(0, count, limit))
            first, held = i + 1, 0
    if held:
        yield first, len(counts), slice(0, held)


State = tuple[Tensor, Tensor, Tensor]
"""Maximum and sum `[rows, group]`, accumulator `[rows, group, v_dim]`."""


def _attend(call: DecodeCall, segments: Tensor, nth: Tensor) -> State:
    """Return the softmax states of some tiles: tile i is the `nth[i]`-th of segment `segments[i]`."""
    q, view, spec, layout = call.q, call.view, call.spec, call.lane.layout
    req, kv_head, first, last = segments[:, 0], segments[:, 1], segments[:, 2], segments[:, 3]
    entry = (first + nth * TILE)[:, None] + torch.arange(TILE, device=q.device)  # (tiles, keys)
    valid = entry < last[:, None]
    # Lanes beyond the range read the tile's own first key and weigh nothing: no foreign slot is ever loaded.
    entry = torch.where(valid, entry, entry[:, :1])
    slots = layout.index.slots[layout.index.indptr[req].long()[:, None] + entry]
    k = view.rows(view.k, slots, kv_head[:, None]).float()  # (tiles, keys, qk_dim)
    v = k[..., : spec.v_dim] if view.v_in_k else view.rows(view.v, slots, kv_head[:, None]).float()
    head = kv_head[:, None] * spec.group + torch.arange(spec.group, device=q.device)  # (tiles, group)
    queries = q[req[:, None], head].float() * (spec.scale * view.k_scale)  # (tiles, group, qk_dim)
    scores = modify_scores(queries @ k.mT, layout, spec, call.aux, req, head, entry)  # (tiles, group, keys)
    scores.masked_fill_(~valid[:, None, :], float("-inf"))
    maximum = scores.amax(-1)
    p = scores.sub_(_finite(maximum)[..., None]).exp_()
    return maximum, p.sum(-1), p @ v


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
    if spec.softcap is not None:
        scores = soft_cap(scores, spec.softcap)
    if spec.temperature_len is None and spec.mod is None:
        return scores
    start, indptr = layout.start[req], layout.index.indptr
    q_pos = (start + indptr[req + 1] - indptr[req] - 1)[:, None, None]
    if spec.temperature_len is not None:
        scores = scores * temperature(q_pos, spec.temperature_len)
    if spec.mod is not None:
        kv_pos = (start[:, None] + entry)[:, None, :]
        scores = spec.mod.torch(scores, q_pos, kv_pos, req[:, None, None], head[:, :, None], aux)
    return scores


def _merged(states: State, row: Tensor, rows: int) -> State:
    """Return the states merged by row: -inf, 0 and 0 where a row has none."""
    maximum, total, acc = states
    top = maximum.new_full((rows, *maximum.shape[1:]), float("-inf"))
    top.scatter_reduce_(0, row[:, None].expand_as(maximum), maximum, "amax")
    fade = torch.exp(maximum - _finite(top)[row])
    return top, _sum_by_row(total * fade, row, rows), _sum_by_row(acc * fade[..., None], row, rows)


def _fold(partials: Partials, rows: Tensor, state: State, *, keep: bool) -> None:
    """Put states into the partials at these rows; with `keep`, merge them with what an earlier chunk left there."""
    maximum, total, acc = state
    if keep:
        before = (partials.max[rows], partials.sum[rows], partials.acc[rows])
        pairs = [torch.cat([old, new]) for old, new in zip(before, state, strict=True)]
        twice = torch.arange(rows.shape[0], device=rows.device).repeat(2)
        maximum, total, acc = _merged((pairs[0], pairs[1], pairs[2]), twice, rows.shape[0])
    partials.max[rows], partials.sum[rows], partials.acc[rows] = maximum, total, acc


def _sum_by_row(x: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the sums of x's entries that share a row, always added in the same order."""
    sums = x.new_zeros((rows, *x.shape[1:]))
    # On a GPU index_add_ adds in any order; index_put_ sorts first.
    return sums.index_put_((row,), x, accumulate=True) if x.is_cuda else sums.index_add_(0, row, x)


def _finite(maximum: Tensor) -> Tensor:
    """Return what to subtract before exp: the maximum, or 0 where nothing was seen."""
    return torch.where(maximum == float("-inf"), 0.0, maximum)
