"""The Triton halves of split policies: range sizes, as functions that planning's kernel calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnlab._triton import jit, tl


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """`function(lens, longest, shortest, *numbers)`, jitted, gives `(size, nominal)`: what the policy's `sizes` are.

    `lens` are those of a block of requests, int32, at least 0; `longest` is that of all requests, at least 1, and
    `shortest` that of those that have a key. `numbers` are three that the host knows.
    """

    function: Any
    numbers: tuple[int, int, int]


@jit
def parts_of(n, size):
    """How many ranges of a size `n` keys are, the last one shorter; whatever the size, nothing passes 2^31."""
    return tl.where(n > 0, (n - 1) // size + 1, 0)


@jit
def sizes_of_counts(lens, counts):
    """Ranges asked for as their size: the length's share, rounded up to 32 keys (MIN_BLOCK)."""
    share = parts_of(lens, tl.maximum(counts, 1))
    return parts_of(share, 32) * 32, counts


@jit
def same_count(lens, longest, shortest, count, b, c):
    """As many ranges for every request that has a key."""
    return sizes_of_counts(lens, tl.where(lens > 0, count, 0))
