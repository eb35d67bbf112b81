"""What a plan costs before anything runs: ranges, programs, waves, scratch."""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.kernels.decode import HEAD_TILE
from attnlab.plan.plans import Lane
from attnlab.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One layer's decode call under a plan.

    `asked` and `used` are ranges of the whole batch: what the policy named, and what holds keys after rounding.
    `programs` have keys; `launched` includes those that return at once. `waves` is programs over multiprocessors:
    below 1 some have nothing to do, and every started wave lasts as long as its longest program.
    """

    policy: str
    asked: int
    used: int
    programs: int
    launched: int
    multiprocessors: int
    scratch_bytes: int

    @classmethod
    def of(cls, lane: Lane, spec: AttentionSpec, *, multiprocessors: int) -> Footprint:
        """Read a lane (waits for the device) and count."""
        splits = lane.splits.to_host()
        tiles = -(-spec.group // HEAD_TILE)
        used = sum(splits.effective)
        return cls(
            policy=splits.policy,
            asked=sum(splits.nominal),
            used=used,
            programs=used * spec.kv_heads * tiles,
            launched=lane.schedule.programs * tiles,
            multiprocessors=multiprocessors,
            scratch_bytes=lane.scratch_bytes(heads=spec.heads, v_dim=spec.v_dim),
        )

    @property
    def waves(self) -> float:
        """Programs with keys per multiprocessor."""
        return self.programs / self.multiprocessors
