"""What a CUDA graph bakes in of a plan: where its tensors lie, their shapes, and every number that launches take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

NOT_BAKED = frozenset({"batch", "epoch", "turn"})
"""Fields that say which step a plan is of: another step of the same graph has others."""

Signature = Mapping[str, object]
"""Every baked value by its path in the plan: `lanes[0].layout.index.slots`."""


def signature_of(plan: Any) -> Signature:
    """Return the signature of a plan (a dataclass of tensors, numbers, and more such). Reads no tensor.

    Two plans with the same one can be served by one captured graph.
    """
    return {path: _in_words(x) if isinstance(x, Tensor) else x for path, x in _leaves("", plan)}


def numbers_of(plan: Any) -> Signature:
    """Return what is baked in of a plan beside its tensors: windows, counts, names. Reads no tensor.

    Two plans in memory of their own have this in common where one may be copied to the other's.
    """
    return {path: x for path, x in _leaves("", plan) if not isinstance(x, Tensor)}


def differences(captured: Signature, given: Signature) -> list[str]:
    """Return, in words, what is not as it was captured."""
    return [
        f"{path}: captured {captured.get(path, 'nothing')}, got {given.get(path, 'nothing')}"
        for path in {**captured, **given}
        if captured.get(path) != given.get(path)
    ]


def _in_words(x: Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {list(x.shape)} by {list(x.stride())} at {x.data_ptr():#x} on {x.device}"


def _leaves(path: str, x: Any) -> Iterator[tuple[str, object]]:
    if is_dataclass(x):
        for field in fields(x):
            if field.name not in NOT_BAKED:
                yield from _leaves(f"{path}.{field.name}".lstrip("."), getattr(x, field.name))
    elif isinstance(x, Sequence) and not isinstance(x, str):
        for i, item in enumerate(x):
            yield from _leaves(f"{path}[{i}]", item)
    else:
        yield path, x
