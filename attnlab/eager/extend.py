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

from attnlab.eager.core import State, join_sink, merge_states, modified, normalised, state_of, visible_keys
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
    k_new, v_new = (
        (listed.new_zeros(new, view.kv_heads, dim) if x is None else x[first:end]).float().transpose(0, 1)
        for x, dim in ((call.k, call.spec.qk_dim), (call.v, call.spec.v_dim))
    )
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
    state = (q.new_full(shape, float("-inf")), q.new_zeros(shape), q.new_zeros(*shape, spec.v_dim))
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
        state = merge_states(state, state_of(scores, v))
    _write(call, tile, rows, state)


def _padded(x: Tensor) -> Tensor:
    """Return keys or values in a tile of full size."""
    return torch.nn.functional.pad(x, (0, 0, 0, KEY_TILE - x.shape[1])).contiguous()


def _visible(
    call: ExtendCall, request: int, first: int, tile: tuple[int, int, int], keys: _Keys, part: slice
) -> Tensor:
    """Return which keys the tile's queries see, `[queries, keys]`: sight, then mask or causality."""
    at, to, _ = tile
    q_number = torch.arange(at - first, to - first, device=keys.position.device)[:, None]
    width = int(keys.column[-1]) + 1
    return visible_keys(
        call.lane.layout.sight,
        call.queries.mask,
        q_pos=call.queries.positions[at:to, None],
        kv_pos=keys.position[part],
        q_number=q_number,
        kv_number=keys.number[part],
        bit=call.queries.mask_indptr[request] + q_number * width + keys.column[part],
    )


def _modified(call: ExtendCall, scores: Tensor, tile: tuple[int, int, int], keys: _Keys, part: slice) -> Tensor:
    """Return scores `[kv_heads, group, queries, keys]` capped, tempered and modified, in this order."""
    spec, (at, to, row) = call.spec, tile
    q_pos = keys.position.new_zeros(QUERY_TILE)
    q_pos[row : row + to - at] = call.queries.positions[at:to]
    # Padded rows take the tile's first query: what they come to is not written.
    token = torch.full((QUERY_TILE,), at, device=q_pos.device)
    token[row : row + to - at] = torch.arange(at, to, device=q_pos.device)
    return modified(
        scores,
        spec,
        q_pos=q_pos[:, None],
        kv_pos=torch.nn.functional.pad(keys.position[part], (0, KEY_TILE - keys.position[part].shape[0])),
        token=token[:, None],
        head=torch.arange(spec.heads, device=q_pos.device).view(spec.kv_heads, spec.group, 1, 1),
        aux=call.aux,
    )


def _write(call: ExtendCall, tile: tuple[int, int, int], rows: slice, state: State) -> None:
    spec, (at, to, _) = call.spec, tile
    if call.sinks is not None:
        state = join_sink(state, call.sinks.float().view(spec.kv_heads, spec.group, 1))
    out, lse = normalised(state)
    call.out[at:to] = out[:, :, rows].permute(2, 0, 1, 3).flatten(1, 2).to(call.out.dtype)
    if call.lse is not None:
        call.lse[at:to] = lse[:, :, rows].permute(2, 0, 1).flatten(1, 2)
