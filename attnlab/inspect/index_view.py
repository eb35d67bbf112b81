"""Index lists as plain numbers: of every request, which slots its list names, in runs of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnlab.checks import require
from attnlab.plan.layout import KVLayout
from attnlab.spec import Sight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListRow:
    """One request's list: the entries of the buffer from `offset` on, of which the first is at position `start`.

    The first `padding` entries are copies that no query sees; the others are the keys from position `visible` on.
    `runs` are entries `(first, end)` whose slots are neighbours, and `slots` the slot that each run begins with.
    """

    offset: int
    start: int
    visible: int
    padding: int
    runs: NDArray[np.int64]
    slots: NDArray[np.int64]

    @classmethod
    def of(cls, slots: NDArray[np.int64], *, offset: int, start: int, visible: int) -> ListRow:
        """Cut a list into runs. Slots that are the sink's are a run of their own, each."""
        padding = min(max(visible - start, 0), len(slots))
        mine = slots[padding:]
        breaks = (np.diff(mine) != 1) | (mine[:-1] == 0)
        first = padding + np.concatenate([[0] if len(mine) else [], np.flatnonzero(breaks) + 1]).astype(np.int64)
        end = np.append(first[1:], len(slots))[: len(first)]
        return cls(
            offset=offset,
            start=start,
            visible=visible,
            padding=padding,
            runs=np.stack([first, end], axis=-1),
            slots=slots[first],
        )

    @property
    def entries(self) -> int:
        """Entries of the list, padding included."""
        return int(self.runs[-1, 1]) if len(self.runs) else self.padding

    @property
    def keys(self) -> int:
        """Keys that the list names."""
        return self.entries - self.padding

    @property
    def sinks(self) -> int:
        """Entries that name slot 0, where no key is."""
        return int((self.slots == 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexView:
    """The lists of a layout: id space, sight, a row for every request, and the entries that the buffer has."""

    space: str
    sight: Sight
    capacity: int
    rows: tuple[ListRow, ...]

    @classmethod
    def of(cls, layout: KVLayout) -> IndexView:
        """Read a layout. Waits for the device.

        >>> import torch
        >>> from attnlab.plan.index import KVIndex
        >>> indptr, slots = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([6, 7, 3, 4, 0])
        >>> view = IndexView.of(KVLayout.full(KVIndex(indptr=indptr, slots=slots, space="pool")))
        >>> view.rows[0].runs.tolist(), view.rows[0].slots.tolist(), view.unread
        ([[0, 2], [2, 4]], [6, 3], 1)
        """
        index = layout.index
        offsets, slots = index.indptr.tolist(), index.slots.cpu().numpy().astype(np.int64)
        require(
            offsets == sorted(offsets) and offsets[-1] <= len(slots),
            f"layout: offsets {offsets[:8]} are none of lists in a buffer of {len(slots)}; layout.validate() says more",
        )
        starts, visible = layout.start.tolist(), layout.start_visible.tolist()
        rows = [
            ListRow.of(slots[a:b], offset=a, start=start, visible=shown)
            for a, b, start, shown in zip(offsets, offsets[1:], starts, visible, strict=False)
        ]
        return cls(space=index.space, sight=layout.sight, capacity=len(slots), rows=tuple(rows))

    @property
    def used(self) -> int:
        """Entries of the buffer that lists have."""
        return sum(row.entries for row in self.rows)

    @property
    def unread(self) -> int:
        """Entries behind the last list."""
        return self.capacity - self.used

    @property
    def keys(self) -> int:
        """Keys that all lists name."""
        return sum(row.keys for row in self.rows)

    @property
    def padding(self) -> int:
        """Entries that no query sees."""
        return sum(row.padding for row in self.rows)

    @property
    def older(self) -> int:
        """Keys before the first listed one of their request: no query of the step sees them."""
        return sum(row.visible for row in self.rows if row.keys)

    @property
    def pieces(self) -> int:
        """Runs of neighbouring slots."""
        return sum(len(row.runs) for row in self.rows)

    @property
    def sinks(self) -> int:
        """Entries that name slot 0."""
        return sum(row.sinks for row in self.rows)

    def longest(self, most: int) -> Sequence[int]:
        """Return the requests with the longest lists, in batch order."""
        return sorted(sorted(range(len(self.rows)), key=lambda r: (-self.rows[r].entries, r))[:most])
