"""Index lists in torch: the eager half of PlanOps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnlab import mask
from attnlab.memory.pool import Translation
from attnlab.plan.lanes import LaneWork
from attnlab.plan.layout import DraftLists, Extent
from attnlab.plan.ops import check_joined
from attnlab.plan.parts import lane_of_parts
from attnlab.plan.plans import Lane
from attnlab.plan.policy import SplitContext, SplitPolicy, SplitSizes
from attnlab.plan.splits import offsets_of, owner_of, owners
from attnlab.spec import Sight

MAX_INT64 = torch.iinfo(torch.int64).max


class EagerPlanOps:
    """PlanOps in torch, on any device."""

    def pad(self, rows: Tensor, lens: Sequence[Tensor], *, max_requests: int) -> tuple[Tensor, ...]:
        """Return copies in which requests whose row is none of the table's are padding."""
        inside = (rows >= 0) & (rows < max_requests)
        return rows.clone(), *(mine * inside for mine in lens)

    def lane(self, work: LaneWork) -> Lane:
        """Return a lane, part by part."""
        return lane_of_parts(self, work)

    def extent(self, *, query: Tensor, end: Tensor, sight: Sight, align: int, capacity: int) -> Extent:
        """Return which positions the lists hold."""
        visible = torch.minimum(sight.first(query), end)
        start = torch.where(visible < end, visible // align * align, end)
        ends = (end - start).long().cumsum(0).clamp(max=capacity)
        indptr = torch.nn.functional.pad(ends, (1, 0)).int()
        return Extent(start=start, start_visible=visible, indptr=indptr)

    def gather(
        self, *, table: Tensor, rows: Tensor, start: Tensor, first: Tensor, indptr: Tensor, capacity: int
    ) -> Tensor:
        """Return int64 ids: entry `indptr[r] + j` is `table[rows[r], max(start[r] + j, first[r])]`. The tail is 0."""
        if rows.shape[0] == 0 or capacity == 0:
            return torch.zeros(capacity, dtype=torch.int64, device=table.device)
        found = _copied_by_row if table.device.type == "cpu" else _selected_at_once
        return found(table, rows, start, first, indptr, capacity)

    def gather_shard(
        self,
        ids: Tensor,
        *,
        table: Tensor,
        rows: Tensor,
        first: Tensor,
        lens: Tensor,
        starts: Tensor,
        ranks: int,
    ) -> None:
        """Fill the live entries of `ids` with what one rank reads, and leave the others."""
        if rows.shape[0] == 0 or ids.shape[0] == 0:
            return
        entry = torch.arange(ids.shape[0], dtype=torch.int64, device=ids.device)
        # Lists come in any order. An entry is of the last that begins before it; those of nothing own none.
        begins, order = torch.where(lens > 0, starts.long(), MAX_INT64).sort(stable=True)
        req = order[(torch.searchsorted(begins, entry, right=True) - 1).clamp(min=0)]
        within = entry - starts[req]
        column = first[req] + within * ranks
        live = (within >= 0) & (within < lens[req])
        inside = live & (column >= 0) & (column < table.shape[1])
        slots = table[torch.where(live, rows[req], 0), column.clamp(0, table.shape[1] - 1)].long() // ranks
        found = torch.where(inside, slots, 0)
        ids.copy_(torch.where(live, found, ids))

    def join(
        self, *, first: Tensor, first_indptr: Tensor, second: Tensor, second_indptr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return each request's entries of `first`, then those of `second`, and the offsets."""
        check_joined(first_indptr, second_indptr)
        first_indptr, second_indptr = first_indptr.clamp(0, first.shape[0]), second_indptr.clamp(0, second.shape[0])
        indptr = offsets_of(first_indptr.diff() + second_indptr.diff())
        base = first_indptr[0] + second_indptr[0]  # lists need not begin with the first entry, the joined one does
        joined = torch.zeros(first.shape[0] + second.shape[0], dtype=torch.int64, device=first.device)
        for ids, own, shift in ((first, first_indptr, second_indptr[:-1]), (second, second_indptr, first_indptr[1:])):
            if ids.shape[0] == 0 or indptr.shape[0] == 1:
                continue
            entry = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
            # An entry moves by what lies before it in the other list. Tails add 0 to the first place.
            place = entry + shift[owner_of(entry, own)] - base
            live = (entry >= own[0]) & (entry < own[-1])
            joined.scatter_add_(0, torch.where(live, place, 0).long(), torch.where(live, ids.long(), 0))
        return joined, indptr

    def translate(self, ids: Tensor, indptr: Tensor, translation: Translation) -> Tensor:
        """Return the ids in the translation's target space; from entry `indptr[-1]` on they are 0."""
        live = torch.arange(ids.shape[0], device=ids.device) < indptr[-1]
        return torch.where(live, translation.apply(torch.where(live, ids, 0)), 0)

    def mask_offsets(self, new: Tensor, keys: Tensor) -> Tensor:
        """Return where each request's entries begin, and the end."""
        return mask.mask_offsets(new, keys)

    def write_causal(self, bits: Tensor, offsets: Tensor, new: Tensor, keys: Tensor, *, most: int) -> None:
        """Write the entries of a causal mask, in memory of several times its size."""
        if new.shape[0] == 0 or bits.shape[0] == 0:
            return
        bit = torch.arange(bits.shape[0], dtype=torch.int64, device=bits.device)
        req = owner_of(bit, offsets)
        within, row_bits = bit - offsets[req], keys.long().clamp(min=1)[req]
        query, column = within // row_bits, within % row_bits
        causal = column <= (keys - new)[req] + query
        torch.where(bit < offsets[-1], causal.to(bits.dtype), bits, out=bits)

    def drafts(
        self,
        *,
        table: Tensor,
        rows: Tensor,
        cached: Tensor,
        stride: Tensor,
        topk: int,
        steps: int,
        sight: Sight,
        translation: Translation,
        capacity: int,
    ) -> DraftLists:
        """Return what every branch sees in every step."""
        branches = rows.shape[0] * topk
        lists = DraftLists.zeros(steps=steps, branches=branches, capacity=capacity, device=table.device)
        if not branches or not steps:
            return lists
        number = torch.arange(branches, device=table.device)
        row, length, own = rows[number // topk], cached[number // topk], number % topk * stride[number // topk]
        step = torch.arange(steps, dtype=torch.int32, device=table.device)[:, None]
        end = torch.where(length > 0, length + step + 1, 0)
        start = torch.minimum(sight.first(end - 1), end)
        lists.start.copy_(start)
        lists.indptr[:, 1:] = (end - start).long().cumsum(1).clamp(max=capacity)
        entry = torch.arange(capacity, device=table.device).expand(steps, capacity)
        owner = torch.searchsorted(lists.indptr[:, 1:].contiguous(), entry.int(), right=True).clamp(max=branches - 1)
        position = start.gather(1, owner) + entry - lists.indptr.gather(1, owner)
        column = position + torch.where(position < length[owner], 0, own[owner])
        live = entry < lists.indptr[:, -1:]
        lists.slots.copy_(_stored(table, row[owner], column, live, translation))
        lists.write.copy_(_stored(table, row, length + own + step, length > 0, translation))
        return lists

    def sizes(self, policy: SplitPolicy, lens: Tensor, ctx: SplitContext) -> SplitSizes:
        """Return the policy's range sizes."""
        return policy.sizes(lens, ctx)


def _selected_at_once(
    table: Tensor, rows: Tensor, start: Tensor, first: Tensor, indptr: Tensor, capacity: int
) -> Tensor:
    """Return what `gather` does without waiting for a device."""
    # Lists are long: they are changed in place, and selected along one axis, by 32 bits where these suffice.
    entry = torch.arange(capacity, dtype=torch.int32, device=table.device)
    req, columns = owners(indptr, capacity), table.shape[1]
    column = (start - indptr[:-1]).index_select(0, req).add_(entry)
    torch.maximum(column, first.index_select(0, req), out=column)
    live = (entry < indptr[-1]).logical_and_(column >= 0).logical_and_(column < columns)
    numbers = torch.int32 if table.numel() < 2**31 else torch.int64
    place = (rows.long() * columns).to(numbers).index_select(0, req).add_(column.clamp_(0, columns - 1))
    return table.reshape(-1).index_select(0, place).mul_(live).long()


def _copied_by_row(table: Tensor, rows: Tensor, start: Tensor, first: Tensor, indptr: Tensor, capacity: int) -> Tensor:
    """Return what `gather` does, where nothing waits for a device: a request's entries are a slice of its row."""
    numbers, ids = table.numpy(), np.zeros(capacity, dtype=np.int64)
    lists = zip(*(x.tolist() for x in (rows, start, first, indptr[:-1], indptr[1:])), strict=True)
    for row, begins, seen, at, end in lists:
        if at == end:
            continue  # the row of a padded request may be none of the table's
        column = max(begins, seen)
        again = min(column - begins, end - at)  # entries before the first one seen, which stand for it
        if again > 0 and 0 <= column < numbers.shape[1]:
            ids[at : at + again] = numbers[row, column]
        before = max(0, -column)  # what lies outside of the table is 0
        found = numbers[row, column + before : max(column + end - at - again, 0)]
        ids[at + again + before : at + again + before + found.shape[0]] = found
    return torch.from_numpy(ids)


def _stored(table: Tensor, rows: Tensor, columns: Tensor, live: Tensor, translation: Translation) -> Tensor:
    """Return the storage ids of the table's entries; the sink where they are not live, or beyond the table."""
    live = live & (columns < table.shape[1])
    ids = table[rows, columns.clamp(max=table.shape[1] - 1)]
    return torch.where(live, translation.apply(torch.where(live, ids, 0)), 0)
