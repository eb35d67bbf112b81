"""What the host can tell of a batch before it is planned: its rows, its lengths, and whether its keys are still there.

Nothing here touches the device, so that a step whose plan is replayed in a CUDA graph is checked like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from attnlab.batch import Batch, DecodeBatch, DraftBatch, Encoder, ExtendBatch, HostLens, Lens, VerifyBatch
from attnlab.checks import describe, require, same_device
from attnlab.memory.pool import KVPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.draft import draft_columns, draft_room
from attnlab.spec import LayerSpec, ModelSpec, Sight


class Kind(NamedTuple):
    """What layers that share a lane have in common."""

    kv_heads: int
    sight: Sight
    space: str


class _Asked(NamedTuple):
    """How long requests are in all: each one's length, where the host knows them, and what none exceeds."""

    values: Sequence[int] | None
    bound: int

    @classmethod
    def of(cls, *lens: Lens) -> _Asked:
        if not all(isinstance(each, HostLens) for each in lens):
            return cls(None, sum(each.bound_max for each in lens))
        if len(lens) == 1:  # whose longest is known
            return cls(lens[0].least_each, lens[0].bound_max)
        values = [sum(mine) for mine in zip(*[each.least_each for each in lens], strict=True)]
        return cls(values, max(values, default=0))

    def ahead(self, tokens: int) -> _Asked:
        """Return the lengths of requests that are so many tokens ahead: not those of padded rows."""
        values = None if self.values is None else [n + tokens if n else 0 for n in self.values]
        return _Asked(values, self.bound + tokens)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Raises ValueError, before anything is gathered, where a batch cannot be served from this table and pool."""

    model: ModelSpec
    pool: KVPool
    table: RequestTable
    kinds: Mapping[Kind, Sequence[LayerSpec]]

    def longest(self, sight: Sight) -> int:
        """Return how many tokens a request can have whose keys are seen so: an encoder has a context of its own."""
        columns = self.table.max_context
        return columns if sight.cross else min(columns, self.model.context_len)

    def check(self, batch: Batch | DraftBatch) -> None:
        """Raise ValueError (TypeError where it is no batch) unless the host finds nothing wrong with a batch."""
        match batch:
            case DecodeBatch(seq=seq):
                self._check_rows(batch.rows, _Asked.of(seq), query=seq, behind=1)
            case ExtendBatch(prefix=prefix, new=new) | VerifyBatch(prefix=prefix, drafts=new):
                self._check_rows(batch.rows, _Asked.of(prefix, new), query=prefix, behind=0)
            case DraftBatch():
                self._check_drafts(batch)
                return
            case _:
                kinds = "a DecodeBatch, ExtendBatch, VerifyBatch or DraftBatch"
                raise TypeError(f"batch: expected {kinds}, got {describe(batch)}")
        self._check_encoder(batch.encoder)

    @cached_property
    def cross(self) -> tuple[int, ...]:
        """The numbers of the layers that read an encoder's keys."""
        return self.model.cross

    def _check_encoder(self, encoder: Encoder | None) -> None:
        """Raise ValueError unless the batch has an encoder exactly where the model has layers that read one."""
        cross, name = self.cross, self.model.name
        if encoder is None and cross:
            raise ValueError(
                f"encoder: layer {', '.join(map(str, cross[:4]))} of model {name!r} reads an encoder's keys, the batch "
                "has none; pass encoder=Encoder.of(rows=..., lens=..., device=...), one row a request"
            )
        if encoder is not None:
            require(
                bool(cross),
                f"encoder: no layer of model {name!r} reads an encoder's keys (has `cross`), got one; leave it away",
            )
            lens = encoder.lens
            self._check_rows(encoder.rows, _Asked.of(lens), query=lens, behind=0, cross=True)

    def _check_rows(self, rows: Tensor, asked: _Asked, *, query: Lens, behind: int, cross: bool = False) -> None:
        """Check rows and lengths: an encoder's, or the requests' own.

        The first query of each request stands `behind` before its length in `query`: what it sees must not have slid
        out of a storage.
        """
        self._check_lens(asked, query, cross=cross)
        if rows.device.type != "cpu":
            self._check_nothing_slid(cross)
            return
        numbers = rows.tolist()
        known = query.values if isinstance(query, HostLens) else None
        self.table.check_holds(numbers, known if asked.values is None else asked.values, encoder=cross)
        self._check_kept(numbers, query.least_each, behind, asked, cross)

    def _check_drafts(self, batch: DraftBatch) -> None:
        """Check drafts: what queries see must be there, and the table must hold slots for all branches."""
        cross, table, seq = self.model.cross, self.table, batch.seq
        require(
            not cross,
            f"batch: layer {', '.join(map(str, cross[:4]))} of model {self.model.name!r} reads an encoder's keys, of "
            "which draft steps have no lists; draft with a model without such layers",
        )
        if batch.steps == 1:  # nobody attends: nothing is read, and nothing written
            return
        drafts = {"topk": batch.topk, "steps": batch.steps, "page_size": self.pool.page_size}
        asked = _Asked.of(seq).ahead(batch.steps - 1)
        self._check_lens(asked, seq)
        columns = draft_columns(seq, **drafts)
        require(
            columns <= table.max_context,
            f"seq: a request of up to {seq.bound_max:,} tokens takes up to {columns:,} columns with its drafts "
            f"({batch.topk} branches of {batch.steps}), but the table has {table.max_context:,}",
        )
        if batch.rows.device.type != "cpu":
            self._check_nothing_slid(cross=False)
            return
        numbers = batch.rows.tolist()
        known = seq.values if isinstance(seq, HostLens) else None
        table.check_holds(numbers, known, room=[draft_room(n, **drafts) for n in known or ()])
        self._check_kept(numbers, seq.least_each, 0, asked, cross=False)

    def _check_lens(self, asked: _Asked, lens: Lens, *, cross: bool = False) -> None:
        """Raise ValueError where requests are longer than the table or the model lets them be, or counted elsewhere."""
        name = "encoder.lens" if cross else "seq"
        columns = self.table.max_context
        if asked.bound > (columns if cross else min(columns, self.model.context_len)):
            context = "" if cross else f" and the model a context of {self.model.context_len:,}"
            raise ValueError(
                f"{name}: a request of up to {asked.bound:,} tokens, but the table has {columns:,} columns{context}"
            )
        if not same_device(lens.device.device, self.pool.device):
            raise ValueError(f"{name}: expected lengths on {self.pool.device} like the pool, got {lens.device.device}")

    def _check_kept(self, rows: Sequence[int], least: Sequence[int], behind: int, asked: _Asked, cross: bool) -> None:
        """Raise ValueError where a storage has let go of what a first query sees, or of where a new token goes."""
        lengths = [asked.bound] * len(rows) if asked.values is None else asked.values
        name = "encoder.rows" if cross else "rows"
        for kind, layers in self._kinds(cross):
            place = layers[0].pool_layer
            if not self.pool.lets_go(place):
                continue
            first = kind.sight.firsts([cached - behind for cached in least])
            holding = least if asked.values is None else asked.values
            if self.pool.keeps(place, rows, first=first, holding=holding):
                continue  # most steps: words only where they are needed
            for r, (row, cached, length) in enumerate(zip(rows, least, lengths, strict=True)):
                if length == 0:
                    continue
                held = cached if asked.values is None else length
                kept = self.pool.kept_from(place, row, holding=held)
                query = cached - behind
                seen = kind.sight.first(query)
                if seen < min(kept, length):
                    unknown = " if it is as short as `least` lets it be" if asked.values is None else ""
                    raise ValueError(
                        f"{name}: request {r} (row {row}): its query at position {query}{unknown} sees back to {seen} "
                        f"in layer {layers[0].index} ({kind.sight}), but keys before {kept} have slid out of the pool"
                    )

    def _check_nothing_slid(self, cross: bool) -> None:
        """Raise ValueError where keys slid out of a storage and nobody on the host knows whose are asked for."""
        name = "encoder.rows" if cross else "rows"
        for kind, layers in self._kinds(cross):
            place = layers[0].pool_layer
            gone = [row for row in self.pool.allocator.owners if self.pool.kept_from(place, row, holding=0)]
            require(
                not gone,
                f"{name}: on the device, so that nobody can tell whether layer {layers[0].index} ({kind.sight}) still "
                f"has the keys that are asked for: those of rows {gone[:8]} have slid out; pass rows on the CPU",
            )

    def _kinds(self, cross: bool) -> list[tuple[Kind, Sequence[LayerSpec]]]:
        """Return the kinds whose keys are an encoder's, or those whose keys are not."""
        return [(kind, layers) for kind, layers in self.kinds.items() if kind.sight.cross == cross]
