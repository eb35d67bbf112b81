"""The slot lists of a step: which cached keys layers read, and where new tokens go. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.compat.sglang.adapt import Runner, Translate
from attnlab.compat.sglang.arguments import kv_index
from attnlab.compat.sglang.indices import create_flashinfer_kv_indices_triton, update_sliding_window_buffer
from attnlab.compat.sglang.memory import Memory
from attnlab.engines import Engine
from attnlab.plan.layout import KVLayout
from attnlab.plan.splits import offsets_of
from attnlab.spec import Sight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lists:
    """Row r reads `slots[indptr[r]:indptr[r + 1]]`: its keys from position `start[r]` on, of a `window` or all."""

    indptr: Tensor
    slots: Tensor
    start: Tensor
    window: int | None = None

    @property
    def lens(self) -> Tensor:
        """Keys of each row."""
        return self.indptr.diff()

    @property
    def layout(self) -> KVLayout:
        """The lists as engines read them."""
        index = kv_index(self.indptr, self.slots, reqs=self.indptr.shape[0] - 1, device=self.indptr.device)
        return KVLayout(index=index, start=self.start, start_visible=self.start, sight=Sight(window=self.window))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListMaker:
    """Makes lists from a runner's table, in the id spaces that its storages are read by: each is translated once."""

    runner: Runner
    engine: Engine

    def full(self, rows: Tensor, lens: Tensor, total: int | None, memory: Memory) -> Lists:
        """Return the lists of each row's first `lens` tokens; `total` of them, where the host knows."""
        table, reqs = self.runner.table, rows.shape[0]
        indptr = memory.take("kv_indptr", reqs + 1, torch.int32)
        torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
        slots = memory.slots("kv_indices", reqs * table.shape[1] if total is None else total)
        create_flashinfer_kv_indices_triton[(reqs,)](
            table, rows, lens, indptr, None, slots, table.stride(0), engine=self.engine
        )
        translate(slots, indptr[-1], self.runner.physical)
        return Lists(indptr=indptr, slots=slots, start=torch.zeros(reqs, dtype=torch.int32, device=rows.device))

    def window(self, rows: Tensor, lens: Tensor, width: int, memory: Memory) -> Lists | None:
        """Return the lists of each row's last `width` tokens; None where no layer has a window."""
        if not self.runner.window:
            return None
        table, reqs = self.runner.table, rows.shape[0]
        indptr = memory.take("window_kv_indptr", reqs + 1, torch.int32)
        slots = memory.slots("window_kv_indices", reqs * min(width, table.shape[1]))
        update_sliding_window_buffer(
            indptr,
            table,
            width,
            lens,
            rows,
            reqs,
            window_kv_indices=slots,
            skip_full_to_swa_translation=True,
            engine=self.engine,
        )
        translate(slots, indptr[-1], self._to_sliding)
        start = memory.take("window_kv_offsets", reqs, torch.int32)
        start.copy_(lens - lens.clamp(max=width))
        return Lists(indptr=indptr, slots=slots, start=start, window=self.runner.window + 1)

    def given(self, indptr: Tensor, slots: Tensor, rows: int, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return lists as a batch brings them, held to the slots that came with them.

        For a graph they are in its own buffers, as theirs are the caller's, with empty ones up to `rows`.
        """
        ends = indptr.clamp(min=0, max=slots.shape[0])
        if not memory.fixed:
            return ends, slots
        offsets, live = memory.take("kv_indptr", rows + 1, torch.int32), ends.shape[0]
        offsets[:live] = ends
        offsets[live:] = ends[-1:]
        own = memory.slots("kv_indices", slots.shape[0])
        own[: slots.shape[0]].copy_(slots)
        return offsets, own

    def tails(self, indptr: Tensor, slots: Tensor, width: int, memory: Memory) -> Lists | None:
        """Return the last `width` entries of lists that are given in the table's slots; None without a window."""
        if not self.runner.window:
            return None
        reqs, lens = indptr.shape[0] - 1, indptr.diff()
        start = memory.take("window_kv_offsets", reqs, torch.int32)
        start.copy_(lens - lens.clamp(max=width))
        own = memory.take("window_kv_indptr", reqs + 1, torch.int32)
        own.copy_(offsets_of((lens - start).int()))
        ids = memory.slots("window_kv_indices", reqs * min(width, self.runner.table.shape[1]))
        gathered = self.engine.ops.gather(
            table=slots[None],
            rows=torch.zeros(reqs, dtype=torch.int64, device=slots.device),
            start=(indptr[:-1] + start).int(),
            first=(indptr[:-1] + start).int(),
            indptr=own,
            capacity=ids.shape[0],
        )
        ids.copy_(gathered)
        translate(ids, own[-1], self._to_sliding)
        return Lists(indptr=own, slots=ids, start=start, window=self.runner.window + 1)

    def locations(self, loc: Tensor | None, tokens: int, memory: Memory) -> tuple[Tensor | None, Tensor | None]:
        """Return where new tokens go in the sliding and in the physical storage; None where that is `loc` itself.

        A fixed buffer holds `tokens` of them: those that a smaller step does not have go to slot 0, the sink.
        """
        found: list[Tensor | None] = []
        for name, way in (
            ("swa_out_cache_loc", self.runner.sliding),
            ("out_cache_loc_full_physical", self.runner.physical),
        ):
            if way is None or (loc is None and not memory.fixed):
                found.append(None)
                continue
            if loc is None:  # a graph must not find an earlier step's slots
                found.append(memory.take(name, tokens, torch.int64))
                continue
            there = memory.take(name, max(tokens, loc.shape[0]), torch.int64)
            there[: loc.shape[0]] = way(loc)
            found.append(there)
        return found[0], found[1]

    @property
    def _to_sliding(self) -> Translate | None:
        """The way to where sliding layers live: their own storage, or the one that all layers share."""
        return self.runner.physical if self.runner.sliding is None else self.runner.sliding


def translate(slots: Tensor, live: Tensor, way: Translate | None) -> None:
    """Translate the first `live` slots (the device's number) in place; what lies behind is neither read nor written."""
    if way is not None:
        is_live = torch.arange(slots.shape[0], device=slots.device) < live
        slots.copy_(torch.where(is_live, way(torch.where(is_live, slots, 0)), slots))


def padded(x: Tensor, reqs: int, to: int) -> Tensor:
    """Return the first `reqs` entries, with zeros up to `to`."""
    return torch.nn.functional.pad(x[:reqs], (0, to - reqs))
