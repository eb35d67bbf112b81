"""Split-KV decode in torch: the kernels' schedule, vectorised over tiles of keys of all segments at once.

The twin of kernels/decode.py: same segments, same partials, same merge. It runs on any device; its place is the CPU.
To know how much work there is it reads one number of the schedule, which on a GPU waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.memory.pool import KVView
from attnlab.mods.softcap import soft_cap
from attnlab.mods.temperature import temperature
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.splits import offsets_of, owner_of
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

TILE = 128
"""Keys that are attended at once. Segments are cut into tiles, so that all tiles have one shape."""

MAX_GATHERED = 1 << 24
"""Elements of K that are gathered at once, which bounds the memory of long batches."""


def decode_split(
    *,
    q: Tensor,
    view: KVView,
    lane: Lane,
    spec: AttentionSpec,
    partials: Partials,
    aux: Tensor | None,
) -> None:
    """Leave the softmax state of every segment of the schedule in `partials`.

    `q [reqs, heads, qk_dim]`, `aux [reqs, heads, width]` or None. Sums in fp32.
    """
    segments = lane.schedule.segments
    tiles = offsets_of(-(-(segments[:, 3] - segments[:, 2]) // TILE))
    total = int(tiles[-1])
    if total == 0:
        return
    segment = owner_of(torch.arange(total, dtype=torch.int32, device=q.device), tiles)
    nth = torch.arange(total, device=q.device) - tiles[segment]
    per_chunk = max(1, MAX_GATHERED // (TILE * spec.qk_dim))
    states = [
        _attend(q, view, lane, spec, aux, segments[s].long(), n)
        for s, n in zip(segment.split(per_chunk), nth.split(per_chunk), strict=True)
    ]
    maximum, total_exp, acc = (torch.cat(parts) for parts in zip(*states, strict=True))
    _merge_into(partials, segments[segment, 4].long(), maximum, total_exp, acc)


def decode_merge(
    *,
    view: KVView,
    lane: Lane,
    spec: AttentionSpec,
    partials: Partials,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Merge every request's partials into `out [reqs, heads, v_dim]` and, where given, `lse [reqs, heads]`."""
    owners = lane.schedule.merge_indptr
    rows = owners.shape[0] - 1
    if rows == 0:
        return
    live = int(owners[-1])
    row = owner_of(torch.arange(live, dtype=torch.int32, device=out.device), owners)
    merged = Partials(
        acc=torch.zeros(rows, spec.group, spec.v_dim, device=out.device),
        max=torch.full((rows, spec.group), float("-inf"), device=out.device),
        sum=torch.zeros(rows, spec.group, device=out.device),
    )
    _merge_into(merged, row, partials.max[:live], partials.sum[:live], partials.acc[:live])
    maximum, total, acc = merged.max, merged.sum, merged.acc
    if sinks is not None:
        sink = sinks.float().reshape(spec.kv_heads, spec.group).repeat(rows // spec.kv_heads, 1)
        top = torch.maximum(maximum, sink)
        fade = torch.exp(maximum - _finite(top))
        total = total * fade + torch.exp(sink - _finite(top))
        acc, maximum = acc * fade[..., None], top
    safe = torch.where(total == 0, 1.0, total)
    out.copy_((acc / safe[..., None] * view.v_scale).view(out.shape))
    if lse is not None:
        lse.copy_((maximum + safe.log()).view(lse.shape))


def _attend(
    q: Tensor,
    view: KVView,
    lane: Lane,
    spec: AttentionSpec,
    aux: Tensor | None,
    segments: Tensor,
    nth: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax states of some tiles: maximum, sum `[tiles, group]`, accumulator `[tiles, group, v_dim]`."""
    req, kv_head, first, last = segments[:, 0], segments[:, 1], segments[:, 2], segments[:, 3]
    entry = (first + nth * TILE)[:, None] + torch.arange(TILE, device=q.device)  # (tiles, keys)
    valid = entry < last[:, None]
    # Lanes beyond the range read the tile's own first key and weigh nothing: no foreign slot is ever loaded.
    entry = torch.where(valid, entry, entry[:, :1])
    slots = lane.layout.index.slots[lane.layout.index.indptr[req].long()[:, None] + entry]
    k = view.rows(view.k, slots, kv_head[:, None]).float()  # (tiles, keys, qk_dim)
    v = k[..., : spec.v_dim] if view.v_in_k else view.rows(view.v, slots, kv_head[:, None]).float()
    head = kv_head[:, None] * spec.group + torch.arange(spec.group, device=q.device)  # (tiles, group)
    queries = q[req[:, None], head].float()  # (tiles, group, qk_dim)
    scores = queries @ k.mT * (spec.scale * view.k_scale)  # (tiles, group, keys)
    scores = modify_scores(scores, lane.layout, spec, aux, req, head, entry)
    scores = torch.where(valid[:, None, :], scores, float("-inf"))
    maximum = scores.amax(-1)
    p = torch.exp(scores - _finite(maximum)[..., None])
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


def _merge_into(states: Partials, row: Tensor, maximum: Tensor, total: Tensor, acc: Tensor) -> None:
    """Merge states into those at their rows: rows named here are overwritten, the others stay as they are."""
    top = torch.full_like(states.max, float("-inf")).scatter_reduce_(
        0, row[:, None].expand_as(maximum), maximum, "amax"
    )
    fade = torch.exp(maximum - _finite(top)[row])
    sums = _sum_by_row(total * fade, row, states.sum)
    accs = _sum_by_row(acc * fade[..., None], row, states.acc)
    states.max[row], states.sum[row], states.acc[row] = top[row], sums[row], accs[row]


def _sum_by_row(x: Tensor, row: Tensor, like: Tensor) -> Tensor:
    """Return the sums of x's entries that share a row, always added in the same order."""
    sums = torch.zeros_like(like)
    # On a GPU index_add_ adds in any order; index_put_ sorts first.
    return sums.index_put_((row,), x, accumulate=True) if x.is_cuda else sums.index_add_(0, row, x)


def _finite(maximum: Tensor) -> Tensor:
    """Return what to subtract before exp: the maximum, or 0 where nothing was seen."""
    return torch.where(maximum == float("-inf"), 0.0, maximum)
