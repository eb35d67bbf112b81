"""Looks at what lists hold where that costs nothing, on a CPU. On a GPU the host would wait: there lists are held."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.checks import require


def readable(x: Tensor) -> bool:
    """Whether the host can look into a tensor without waiting for a device."""
    return x.device.type == "cpu"


def check_offsets(name: str, offsets: Tensor, *, end: int, of: str) -> None:
    """Raise ValueError, where offsets can be read, unless they ascend from 0 or more to at most `end`.

    >>> check_offsets("kv_indptr", torch.tensor([0, 5, 2]), end=9, of="kv_indices")
    Traceback (most recent call last):
    ValueError: kv_indptr: expected offsets into the 9 entries of kv_indices that ascend, got 2 behind 5
    """
    if not readable(offsets) or offsets.shape[0] == 0:
        return
    wanted = f"{name}: expected offsets into the {end:,} entries of {of} that ascend"
    down = (offsets.diff() < 0).nonzero().flatten()
    if down.numel():
        at = int(down[0])
        raise ValueError(f"{wanted}, got {int(offsets[at + 1])} behind {int(offsets[at])}")
    first, last = int(offsets[0]), int(offsets[-1])
    require(first >= 0 and last <= end, f"{wanted}, got {first} to {last}")


def check_members(name: str, numbers: Tensor, *, count: int, of: str, live: Tensor | None = None) -> None:
    """Raise ValueError, where numbers can be read, unless all (those that are `live`) are of the `count` of something.

    >>> check_members("kv_indices", torch.tensor([1, 400]), count=400, of="slots of k_buffer")
    Traceback (most recent call last):
    ValueError: kv_indices: expected 0 to 399, the slots of k_buffer, got 400 in entry 1
    """
    if not readable(numbers):
        return
    outside = (numbers < 0) | (numbers >= count)
    found = (outside if live is None else outside & live).nonzero().flatten()
    if found.numel():
        at = int(found[0])
        wanted = f"expected 0 to {count - 1:,}, the {of}" if count else f"expected none, as there are no {of}"
        raise ValueError(f"{name}: {wanted}, got {int(numbers[at])} in entry {at}")


def check_listed(name: str, slots: Tensor, offsets: Tensor, *, count: int, of: str) -> None:
    """Raise ValueError, where slots can be read, unless those that lists hold are of the `count` of something."""
    if readable(slots) and offsets.shape[0]:
        entry = torch.arange(slots.shape[0])
        live = (entry >= offsets[0]) & (entry < offsets[-1])
        check_members(name, slots, count=count, of=of, live=live)


def check_lengths(name: str, lengths: Tensor) -> None:
    """Raise ValueError, where numbers can be read, if one is below 0."""
    if readable(lengths) and bool((lengths < 0).any()):
        at = int((lengths < 0).nonzero()[0])
        raise ValueError(f"{name}: expected at least 0, got {int(lengths[at])} in entry {at}")


def held(offsets: Tensor, end: int) -> Tensor:
    """Return offsets that lie in a list of `end` entries and ascend, whatever was given. Nothing waits.

    >>> held(torch.tensor([0, -5, 5, 99]), 9).tolist()
    [0, 0, 5, 9]
    """
    return torch.cummax(offsets.clamp(min=0, max=end), 0).values
