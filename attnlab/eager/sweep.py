"""What decode and verify share in torch: tiles of keys of all segments at once, partials, and whose they are.

The twin of kernels/sweep.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnlab.eager.core import State, merged
from attnlab.memory.pool import KVView
from attnlab.plan.layout import KVLayout
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import owner_of
from attnlab.plan.workspace import Partials

TILE = 128
"""Keys that are attended at once. Segments are cut into tiles, so that all tiles have one shape."""

MAX_GATHERED = 1 << 24
"""Elements of K that are gathered at once, which bounds the memory of long batches."""


def sweep_segments(
    schedule: Schedule, partials: Partials, attend: Callable[[Tensor, Tensor], State], *, width: int
) -> None:
    """Leave the softmax state of every segment in `partials`.

    `attend(segments, nth)` returns those of some tiles, tile i being the `nth[i]`-th of `segments[i]`; it takes memory
    for about `width` elements a key.
    """
    segments = schedule.segments
    segments = segments[segments[:, 2] < segments[:, 3]].long()
    counts = (-(-(segments[:, 3] - segments[:, 2]) // TILE)).tolist()
    for first, last, tiles in _chunks(counts, max(1, MAX_GATHERED // (TILE * width))):
        of_segment = torch.tensor(counts[first:last], device=segments.device)
        row = torch.repeat_interleave(torch.arange(last - first, device=segments.device), of_segment)
        nth = torch.arange(row.shape[0], device=row.device) - (of_segment.cumsum(0) - of_segment)[row]
        row, nth = row[tiles], nth[tiles]
        state = merged(attend(segments[first:last][row], nth), row, last - first)
        _fold(partials, segments[first:last, 4], state, keep=tiles.start > 0)


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


def entries_of(first: Tensor, last: Tensor, nth: Tensor) -> tuple[Tensor, Tensor]:
    """Return the list entries of the `nth` tile of every range, `[tiles, TILE]`, and which lie in the range."""
    entry = (first + nth * TILE)[:, None] + torch.arange(TILE, device=first.device)
    valid = entry < last[:, None]
    # Lanes beyond the range read the tile's own first key and weigh nothing: no foreign slot is ever loaded.
    return torch.where(valid, entry, entry[:, :1]), valid


def gathered(view: KVView, layout: KVLayout, req: Tensor, kv_head: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at some entries of every tile's list, fp32 `[tiles, TILE, dim]`, unscaled."""
    slots = layout.index.slots[layout.index.indptr[req].long()[:, None] + entry]
    k = view.rows(view.k, slots, kv_head[:, None]).float()
    v = k[..., : view.v.shape[-1]] if view.v_in_k else view.rows(view.v, slots, kv_head[:, None]).float()
    return k, v


def merged_by_owner(partials: Partials, owners: Tensor) -> State:
    """Return the states of every (request, KV head), whose partials are numbers `owners[i]` to `owners[i + 1]`."""
    live = int(owners[-1])
    row = owner_of(torch.arange(live, dtype=torch.int32, device=owners.device), owners)
    return merged((partials.max[:live], partials.sum[:live], partials.acc[:live]), row, owners.shape[0] - 1)


def _fold(partials: Partials, rows: Tensor, state: State, *, keep: bool) -> None:
    """Put states into the partials at these rows; with `keep`, merge them with what an earlier chunk left there."""
    maximum, total, acc = state
    if keep:
        before = (partials.max[rows], partials.sum[rows], partials.acc[rows])
        pairs = [torch.cat([old, new]) for old, new in zip(before, state, strict=True)]
        twice = torch.arange(rows.shape[0], device=rows.device).repeat(2)
        maximum, total, acc = merged((pairs[0], pairs[1], pairs[2]), twice, rows.shape[0])
    partials.max[rows], partials.sum[rows], partials.acc[rows] = maximum, total, acc
