"""Which keys of a request are one context-parallel rank's: those whose position leaves its rank as remainder.

Position p belongs to rank p mod R, so that ranks hold equal shares of any request, up to one key. A slot s of such a
position leaves the same remainder, and lies at s // R in the rank's own storage.
Reference: get_dcp_lens, create_triton_kv_indices_for_dcp_triton.
"""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from attnlab.checks import member, positive


def check_rank(ranks: int, rank: int) -> None:
    """Raise unless `rank` is one of so many."""
    member("rank", rank, positive("ranks", ranks), of=f"a group of {ranks}")


def share_of(
    lens: Int[Tensor, " reqs"], *, ranks: int, rank: int, start: Int[Tensor, " reqs"] | None = None
) -> Int[Tensor, " reqs"]:
    """Return how many of the `lens` positions from `start` on (None: from 0) are the rank's, in the dtype of `lens`.

    >>> import torch
    >>> share_of(torch.tensor([0, 1, 4, 10]), ranks=4, rank=1)
    tensor([0, 0, 1, 3])
    """
    check_rank(ranks, rank)
    if start is None:
        return _before(lens, ranks, rank)
    return _before(start + lens, ranks, rank) - _before(start, ranks, rank)


def first_of(start: Int[Tensor, " reqs"], *, ranks: int, rank: int) -> Int[Tensor, " reqs"]:
    """Return the first position from `start` on that is the rank's.

    >>> import torch
    >>> first_of(torch.tensor([0, 1, 2, 5]), ranks=4, rank=1)
    tensor([1, 1, 5, 5])
    """
    check_rank(ranks, rank)
    return start + (rank - start) % ranks


def _before(end: Tensor, ranks: int, rank: int) -> Tensor:
    """Return how many positions before `end` are the rank's."""
    return (end - rank + ranks - 1) // ranks
