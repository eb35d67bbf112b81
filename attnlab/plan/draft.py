"""Multi-step drafting: where drafts lie in the request table.

Reference: TritonMultiStepDraftBackend.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from attnlab.checks import positive, require, whole

T = TypeVar("T", int, Tensor)


def branch_stride(cached: T, *, steps: int, page_size: int) -> T:
    """Return how many columns of the request table lie between the drafts of one branch and those of the next.

    Draft i of branch t, both counted from 0, is in column `cached + t * branch_stride + i`. A branch has whole pages:
    its own copy of the page in which the cached tokens end, and those that its `steps` drafts fill from there.

    >>> branch_stride(130, steps=3, page_size=1), branch_stride(130, steps=3, page_size=4)
    (3, 8)
    """
    return -(-(cached % page_size + steps) // page_size) * page_size


def draft_room(cached: int, *, topk: int, steps: int, page_size: int) -> int:
    """Return how many tokens a request appends behind its `cached` ones, so that all branches' drafts have slots.

    >>> draft_room(130, topk=4, steps=3, page_size=1), draft_room(130, topk=4, steps=3, page_size=4)
    (12, 27)
    """
    for name, value in (("topk", topk), ("steps", steps), ("page_size", page_size)):
        positive(name, value)
    require(whole("cached", cached) >= 0, f"cached: expected at least 0 tokens, got {cached}")
    return (topk - 1) * branch_stride(cached, steps=steps, page_size=page_size) + steps
