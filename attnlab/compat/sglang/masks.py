"""The buffer that a draft stage fills with a tree's mask and verification reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from attnlab.checks import positive, require, whole


class TreeMaskMode(Enum):
    """Which keys a mask has a byte for: cached and draft keys, or draft keys alone."""

    FULL_MASK = "full mask"
    QLEN_ONLY = "drafts only"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyMask:
    """`buffer`, flat, holds a byte for each (draft, key) pair of `max_bs` requests; `is_read`: attention reads it."""

    buffer: Tensor
    mode: TreeMaskMode
    max_bs: int
    is_read: bool

    def fits(self, bs: int) -> bool:
        """Whether a batch of so many requests has room. Raises where that is no number of requests."""
        requests = whole("bs", bs)
        require(requests >= 0, f"bs: expected at least 0 requests, got {requests}")
        return requests <= self.max_bs


def maybe_create_verify_mask(
    *,
    is_draft_runner: bool,
    skip_prefill: bool,
    max_bs: int,
    max_context_len: int,
    num_draft_tokens: int | None,
    device: torch.device | str,
    is_read: bool,
    dtype: torch.dtype = torch.bool,
) -> VerifyMask | None:
    """Return a mask of zeros for the largest batch; None on a draft runner, without prefill, or without drafts.

    Where attention reads it, each of a request's drafts has a byte for `max_context_len` cached keys and for every
    draft; else, and on a CPU, for the drafts alone.
    """
    if is_draft_runner or skip_prefill or not num_draft_tokens:
        return None
    drafts, requests = positive("num_draft_tokens", num_draft_tokens), positive("max_bs", max_bs)
    full = is_read and torch.device(device).type != "cpu"
    keys = positive("max_context_len", max_context_len) + drafts if full else drafts
    return VerifyMask(
        buffer=torch.zeros(requests * drafts * keys, dtype=dtype, device=device),
        mode=TreeMaskMode.FULL_MASK if full else TreeMaskMode.QLEN_ONLY,
        max_bs=requests,
        is_read=is_read,
    )
