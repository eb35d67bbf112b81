"""The plan types: everything integer that a step's attention needs, made once, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from attnlab.batch import DecodeBatch
from attnlab.checks import require
from attnlab.plan.layout import KVLayout
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import SplitPlan
from attnlab.plan.workspace import scratch_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """What layers of one kind share: the keys they see, how these are cut, who reads what, where new tokens go.

    `write_slots` are int64 `[tokens]`, in the id space of the layers' storage; padded rows write to slot 0.
    """

    layout: KVLayout
    splits: SplitPlan
    schedule: Schedule
    write_slots: Int[Tensor, " tokens"]

    def __post_init__(self) -> None:
        reqs = self.splits.reqs
        require(
            self.layout.index.reqs == reqs == self.write_slots.shape[0],
            f"lane: the layout is of {self.layout.index.reqs} requests, the splits of {reqs}, the write slots of "
            f"{self.write_slots.shape[0]}",
        )
        expected = reqs * self.schedule.kv_heads + 1
        got = self.schedule.merge_indptr.shape[0]
        require(got == expected, f"merge_indptr: expected {expected} entries (requests x KV heads + 1), got {got}")

    def scratch_bytes(self, *, heads: int, v_dim: int) -> int:
        """Return the bytes of partials that a layer with so many heads leaves."""
        group = heads // self.schedule.kv_heads
        return scratch_bytes(partials=self.schedule.partials, group=group, v_dim=v_dim)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePlan:
    """A decode step: `lanes`, and for every layer number which lane it takes.

    `epoch` is the pool's at the time of planning; attention refuses a plan of another one. `multiprocessors` is
    what the policy counted with, None where unknown.
    """

    batch: DecodeBatch
    lanes: tuple[Lane, ...]
    lane_of_layer: dict[int, int]
    epoch: int
    multiprocessors: int | None

    def lane(self, layer: int) -> Lane:
        """Return what this layer reads. Raises ValueError where the plan has no such layer."""
        if layer not in self.lane_of_layer:
            known = ", ".join(map(str, self.lane_of_layer))
            raise ValueError(f"layer: this plan has layers {known}, got {layer!r}")
        return self.lanes[self.lane_of_layer[layer]]

    def validate(self, *, num_slots: int) -> None:
        """Read all tensors (waits for the device); raise ValueError where any of them is inconsistent."""
        self.batch.seq.validate()
        for lane in self.lanes:
            lane.layout.validate(num_slots=num_slots)
            lane.splits.validate(lane.layout.index.indptr.diff().tolist())
            lane.schedule.validate(lane.splits)
            written = [slot for slot in lane.write_slots.tolist() if slot != 0]
            require(len(set(written)) == len(written), f"write_slots: requests share their newest slot, {written[:8]}")
