"""What a plan costs before anything runs: ranges, programs, scratch."""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.plan.plans import Lane
from attnlab.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One layer's decode call under a plan.

    `asked` and `used` are ranges of the whole batch: what the policy named, and what holds keys after rounding.
    `programs` have keys; `launched` includes those that return at once.
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
        tiles = lane.schedule.head_tiles(spec.group)
        used = sum(splits.effective)
        return cls(
            policy=splits.policy,
            asked=sum(splits.nominal),
            used=used,
            programs=lane.schedule.working() * tiles,
            launched=lane.schedule.programs * tiles,
            multiprocessors=multiprocessors,
            scratch_bytes=lane.scratch_bytes(heads=spec.heads, v_dim=spec.v_dim),
        )

    @property
    def per_multiprocessor(self) -> float:
        """Programs with keys per multiprocessor. Several fit one at a time; below 1 some have nothing to do."""
        return self.programs / self.multiprocessors
