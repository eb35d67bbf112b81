"""Extend in torch: several queries a request over one list of cached and new keys, a tile of queries at a time.

The twin of kernels/extend.py. It reads lengths, so on a GPU it waits for the device; its place is the CPU.

Query tiles begin at absolute positions and are padded to one size, keys are summed in tiles that begin where the list
does, all of one size too: a row's bits then depend neither on where its prompt was cut into chunks nor on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.mask import CustomMask
from attnlab.mods.softcap import soft_cap
from attnlab.mods.temperature import temperature
from attnlab.plan.extend_call import ExtendCall

QUERY_TILE, KEY_TILE = 64, 128
"""Queries and keys that are attended at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Keys:
    """One request's keys in list order, fp32 `[kv_heads, keys, dim]`: cached ones first, then new ones.

    `position [keys]`, -1 for a key that nobody sees; `column [keys]` of a mask's row; `number [keys]` among the new
    tokens, -1 for a cached key.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    column: Tensor
    number: Tensor


def extend(call: ExtendCall) -> None:
    """Attend, and write `call.out` and, where given, `call.lse`."""
    offsets = call.queries.indptr.tolist()
    for request, (first, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if first < end:
            keys = _keys(call, request, first, end)
            for tile in _query_tiles(call, first, end):
                _attend(call, request, first, tile, keys)


def _keys(call: ExtendCall, request: int, first: int, end: int) -> _Keys:
    """Return a request's keys. What comes with the call is not scaled; what is cached is, padding in front included."""
    layout, view, device = call.lane.layout, call.view, call.q.device
    at, to = layout.index.indptr[request : request + 2].tolist()
    slots = layout.index.slots[at:to, None]
    heads = torch.arange(view.kv_heads, device=device)
    k = view.rows(view.k, slots, heads).float().transpose(0, 1) * view.k_scale
    v = view.rows(view.v, slots, heads).float().transpose(0, 1) * view.v_scale
    listed = int(layout.start[request]) + torch.arange(to - at, device=device)
    listed_visible = listed >= layout.start_visible[request]
    new = end - first
    if call.one_pass:
        cached = int(layout.start[request]) + to - at - new
        number = torch.where(listed >= cached, listed - cached, -1)
        position = torch.where(listed_visible, listed, -1)
        return _Keys(k=k, v=v, position=position, column=listed, number=number)
    cached = int(layout.start[request]) + to - at
    k_new, v_new = (x[first:end].float().transpose(0, 1) for x in (call.k, call.v))
    count = torch.arange(new, device=device)
    old_position, new_position = torch.where(listed_visible, listed, -1), call.queries.positions[first:end]
    # What is left out may hold anything: 0 times NaN is NaN.
    if call.parts == "new":
        old_position, k, v = torch.full_like(old_position, -1), torch.zeros_like(k), torch.zeros_like(v)
    if call.parts == "cached":
        new_position = torch.full_like(new_position, -1)
        k_new, v_new = torch.zeros_like(k_new), torch.zeros_like(v_new)
    return _Keys(
        k=torch.cat([k, k_new], 1),
        v=torch.cat([v, v_new], 1),
        position=torch.cat([old_position, new_position]),
        column=torch.cat([listed, cached + count]),
        number=torch.cat([torch.full_like(listed, -1), count]),
    )


def _query_tiles(call: ExtendCall, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, last token, row of the first in its tile): tiles begin at multiples of QUERY_TILE."""
    start = int(call.queries.positions[first])
    at = first
    while at < end:
        row = (start + at - first) % QUERY_TILE
        to = min(end, at + QUERY_TILE - row)
        yield at, to, row
        at = to


def _attend(call: ExtendCall, request: int, first: int, tile: tuple[int, int, int], keys: _Keys) -> None:
    """Attend for one tile of a request's queries, over its keys in tiles."""
    spec, (at, to, row) = call.spec, tile
    rows = slice(row, row + to - at)
    q = call.q.new_zeros(QUERY_TILE, spec.heads, spec.qk_dim, dtype=torch.float32)
    q[rows] = call.q[at:to].float()
    q = q.view(QUERY_TILE, spec.kv_heads, spec.group, spec.qk_dim).permute(1, 2, 0, 3).flatten(1, 2)
    shape = (spec.kv_heads, spec.group, QUERY_TILE)
    maximum = q.new_full(shape, float("-inf"))
    total, acc = q.new_zeros(shape), q.new_zeros(*shape, spec.v_dim)
    for n in range(0, keys.position.shape[0], KEY_TILE):
        part = slice(n, n + KEY_TILE)
        visible = q.new_zeros(QUERY_TILE, KEY_TILE, dtype=torch.bool)
        found = _visible(call, request, first, tile, keys, part)
        visible[rows, : found.shape[1]] = found
        if not bool(visible.any()):
            continue
        k, v = (_padded(x[:, part]) for x in (keys.k, keys.v))
        scores = (q @ k.mT * spec.scale).view(*shape, KEY_TILE)
        scores = _modified(call, scores, tile, keys, part)
        scores = torch.where(visible, scores, float("-inf"))
        top = torch.maximum(maximum, scores.amax(-1))
        shift = torch.where(top == float("-inf"), 0.0, top)
        p, fade = torch.exp(scores - shift[..., None]), torch.exp(maximum - shift)
        acc = acc * fade[..., None] + (p.flatten(1, 2) @ v).view(*shape, spec.v_dim)
        total, maximum = total * fade + p.sum(-1), top
    _write(call, tile, rows, maximum, total, acc)


def _padded(x: Tensor) -> Tensor:
    """Return keys or values in a tile of full size."""
    return torch.nn.functional.pad(x, (0, 0, 0, KEY_TILE - x.shape[1])).contiguous()


def _visible(
    call: ExtendCall, request: int, first: int, tile: tuple[int, int, int], keys: _Keys, part: slice
) -> Tensor:
    """Return which keys the tile's queries see, `[queries, keys]`: sight, then mask or causality."""
    sight, (at, to, _) = call.lane.layout.sight, tile
    position, number, column = keys.position[part], keys.number[part], keys.column[part]
    q_pos = call.queries.positions[at:to, None]
    visible = (position >= 0) & (position >= sight.first(q_pos))
    mask = call.queries.mask
    if isinstance(mask, CustomMask):
        width = int(keys.column[-1]) + 1
        row = call.queries.mask_indptr[request] + torch.arange(at - first, to - first, device=q_pos.device) * width
        bit = row[:, None] + column
        visible &= bit < mask.bits.shape[0]  # what a mask lacks is hidden, as in the kernel
        visible &= mask.bits[bit.clamp(max=mask.bits.shape[0] - 1)] != 0 if mask.bits.shape[0] else False
    elif sight.causal:
        visible &= number <= torch.arange(at - first, to - first, device=q_pos.device)[:, None]
    elif sight.window is not None:
        visible &= position - q_pos < sight.window
    if sight.chunk is not None:
        visible &= position // sight.chunk == q_pos // sight.chunk
    return visible


def _modified(call: ExtendCall, scores: Tensor, tile: tuple[int, int, int], keys: _Keys, part: slice) -> Tensor:
    """Return scores `[kv_heads, group, queries, keys]` capped, tempered and modified, in this order."""
    spec, (at, to, row) = call.spec, tile
    if spec.softcap is not None:
        scores = soft_cap(scores, spec.softcap)
    if spec.temperature_len is None and spec.mod is None:
        return scores
    q_pos = keys.position.new_zeros(QUERY_TILE)
    q_pos[row : row + to - at] = call.queries.positions[at:to]
    if spec.temperature_len is not None:
        scores = scores * temperature(q_pos[:, None], spec.temperature_len)
    if spec.mod is not None:
        kv_pos = torch.nn.functional.pad(keys.position[part], (0, KEY_TILE - keys.position[part].shape[0]))
        # Padded rows take the tile's first query: what they come to is not written.
        token = torch.full((QUERY_TILE,), at, device=q_pos.device)
        token[row : row + to - at] = torch.arange(at, to, device=q_pos.device)
        head = torch.arange(spec.heads, device=q_pos.device).view(spec.kv_heads, spec.group, 1, 1)
        scores = spec.mod.torch(scores, q_pos[:, None], kv_pos, token[:, None], head, call.aux)
    return scores


def _write(
    call: ExtendCall, tile: tuple[int, int, int], rows: slice, maximum: Tensor, total: Tensor, acc: Tensor
) -> None:
    spec, (at, to, _) = call.spec, tile
    if call.sinks is not None:
        sink = call.sinks.float().view(spec.kv_heads, spec.group, 1)
        top = torch.maximum(maximum, sink)
        shift = torch.where(top == float("-inf"), 0.0, top)
        endless = sink == float("inf")  # takes everything; exp(inf - inf) would be NaN
        fade = torch.where(endless, 0.0, torch.exp(maximum - shift))
        total = total * fade + torch.where(endless, 1.0, torch.exp(sink - shift))
        acc, maximum = acc * fade[..., None], top
    safe = torch.where(total == 0, 1.0, total)
    out = (acc / safe[..., None])[:, :, rows].permute(2, 0, 1, 3).flatten(1, 2)
    call.out[at:to] = out.to(call.out.dtype)
    if call.lse is not None:
        call.lse[at:to] = (maximum + safe.log())[:, :, rows].permute(2, 0, 1).flatten(1, 2)
