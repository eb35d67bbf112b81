"""What a picture of a merge shows, as plain numbers, and the sentence that it states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attnlab.checks import require
from attnlab.inspect.merge import MergeSteps
from attnlab.plots.words import everything, plural, share, short, signed

Numbers = NDArray[np.float64]

NEAR = 0.10
"""The answer counts as being there from the split on after which it stays within this share of the final one."""
HEAVY = 0.5
"""A split with at least so much of the weight is expected to carry the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeView:
    """One head's merge: for each split that has seen a key its number (from 1), keys, LSE, weight and length of output.

    `masked` counts the splits that are left out, as every score in them is masked.
    `distance` is how far the running answer is from the final one, as a share of it; None where that is all zeros.
    """

    title: str
    request: int
    number: tuple[int, ...]
    keys: tuple[int, ...]
    lse: Numbers
    total_lse: float
    weight: Numbers
    length: Numbers
    distance: Numbers | None
    masked: int

    @classmethod
    def of(cls, steps: MergeSteps) -> MergeView:
        """Take over what has been seen; a split whose every score is masked has nothing to say and is left out."""
        seen = steps.lse != float("-inf")
        broken = [i for i, lse in enumerate(steps.lse.tolist()) if lse != lse or lse == float("inf")]
        broken += [i for i, out in enumerate(steps.outputs) if not bool(torch.isfinite(out).all())]
        require(not broken, f"merge: in {steps.title} split {[i + 1 for i in broken[:1]]} is NaN or infinite")
        require(bool(seen.any()), f"merge: in {steps.title} every score is masked, so there is nothing to merge")
        at = [i for i, found in enumerate(seen.tolist()) if found]
        has_length = bool(steps.running[-1].norm() > 0)
        return cls(
            title=short(steps.title, 44),
            request=steps.request,
            number=tuple(i + 1 for i in at),
            keys=tuple(steps.ranges[i][1] - steps.ranges[i][0] for i in at),
            lse=steps.lse[seen].numpy(),
            total_lse=steps.total_lse,
            weight=steps.weights[seen].numpy(),
            length=steps.outputs[seen].norm(dim=1).numpy(),
            distance=steps.distance[seen].numpy() if has_length else None,
            masked=len(steps.ranges) - len(at),
        )

    @property
    def count(self) -> int:
        """How many splits have seen a key."""
        return len(self.number)

    @property
    def below(self) -> Numbers:
        """How far each split's LSE lies below the total, at most 0; the weight is exp of it."""
        return np.minimum(self.lse - self.total_lse, 0.0)

    @property
    def heaviest(self) -> int:
        """The index of the split with the largest weight."""
        return int(self.weight.argmax())

    @property
    def arrival(self) -> int | None:
        """The index of the split from which on the answer stays within NEAR of the final one."""
        if self.distance is None:
            return None
        far = np.flatnonzero(self.distance > NEAR)
        return 0 if not len(far) else int(far[-1]) + 1


def statement(views: Sequence[MergeView]) -> str:
    """Return the picture's title: what is true of these merges, with the numbers that prove it."""
    if len(views) == 1:
        return _alone(views[0])
    for side, view in zip(("Left", "Right"), views, strict=True):
        if _surprising(view):
            return f"{side}: s{_alone(view)[1:]}"
    left, right = (share(float(view.weight.max())) for view in views)
    if left == right:
        return f"The heaviest split holds {left} of the weight on the left and on the right"
    return f"The heaviest split holds {left} of the weight on the left, {right} on the right"


def _surprising(view: MergeView) -> bool:
    """Whether one split has most of the weight, and it is not the one that brings the answer."""
    return view.weight[view.heaviest] >= HEAVY and view.arrival not in (None, view.heaviest)


def _alone(view: MergeView) -> str:
    if view.count == 1 and view.masked:
        which = f"split {view.number[0]} of {view.masked + 1}"
        return f"Only {which} has a key that is not masked, so there is nothing to merge"
    if view.count == 1:
        return f"One split holds {everything(view.keys[0])}, so there is nothing to merge"
    top = view.heaviest
    weight = f"{share(float(view.weight[top]))} of the weight"
    if view.weight[top] < HEAVY:
        splits = f"{view.count} splits" + (" that see a key" if view.masked else "")
        return f"The heaviest of {splits} holds {weight}; the answer is {arrival_words(view)}"
    link = "yet" if _surprising(view) else "and"
    return f"Split {view.number[top]} holds {weight}, {link} the answer is {arrival_words(view)}"


def arrival_words(view: MergeView) -> str:
    """Return how far off the answer is, and until when."""
    if view.arrival is None or view.distance is None:
        return "zero"
    if view.count == 1:
        return "there with the only split"
    if view.arrival == 0:
        return f"never more than {off(float(view.distance.max()))} off"
    return f"{off(float(view.distance[view.arrival - 1]))} off until split {view.number[view.arrival]} joins"


def off(distance: float) -> str:
    """Return a distance as a percentage; 100% is nothing special there."""
    return share(distance) if distance < 0.0095 else f"{distance:.0%}"


def below_words(x: float) -> str:
    """Return a difference to the total.

    >>> [below_words(x) for x in (0.0, -0.0002, -0.02, -0.2, -12.41)]
    ['0', '>−0.01', '−0.02', '−0.2', '−12.4']
    """
    if -0.005 < x < 0:
        return ">−0.01"
    return "0" if x == 0 else signed(x, 2 if x > -0.095 else 1)


def in_words(views: Sequence[MergeView]) -> str:
    """Return what the picture shows, for those who cannot see it."""
    return " ".join(
        f"{view.title}: {plural(sum(view.keys), 'key')} in {plural(view.count, 'split')}"
        f"{f', {view.masked:,} more masked' if view.masked else ''}; split "
        f"{view.number[view.heaviest]} weighs most, {share(float(view.weight.max()))}; "
        f"the answer is {arrival_words(view)}."
        for view in views
    )
