"""Decode context parallelism: how much of a request is one rank's, and how the ranks' results become one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from attnlab.checks import own_memory, require, tensor
from attnlab.compat.sglang.arguments import INTEGERS, check_rank
from attnlab.plan.call import FLOATS
from attnlab.plan.dcp import share_of


class Group(Protocol):
    """Ranks that share their requests' keys."""

    world_size: int
    rank_in_group: int

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return every rank's `x`, one behind the other along `dim`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`."""


def get_dcp_lens(lens: Tensor, dcp_size: int, dcp_rank: int, start: Tensor | None = None) -> Tensor:
    """Return how many of the `lens` positions from `start` on (None: from 0) are the rank's: p mod R = rank.

    Integers in, the same dtype out; with one rank `lens` itself. The ranks' shares add up to `lens`.
    """
    tensor("lens", lens, shape=["reqs"], dtype=INTEGERS)
    check_rank(dcp_size, dcp_rank)
    if start is not None:
        tensor("start", start, shape=[lens.shape[0]], dtype=INTEGERS, device=lens.device)
    if dcp_size == 1:
        return lens
    return share_of(lens, ranks=dcp_size, rank=dcp_rank, start=start).to(lens.dtype)


@torch.no_grad()
def cp_lse_ag_out_rs_mha(out: Tensor, lse: Tensor, group: Group, return_lse: bool = False) -> Any:
    """Return this rank's heads of the ranks' merged outputs, `[tokens, heads / R, v_dim]`; and their LSE, if asked for.

    `out` `[tokens, heads, v_dim]` is what this rank's keys gave, normalised, and is overwritten; `lse` `[tokens,
    heads]` its natural log-sum-exp, -inf where the rank holds no key: such a part weighs nothing, whatever its output
    holds. No key on any rank: 0 and -inf. With one rank the arguments come back as they are.

    All ranks must call this, also those that hold no key: it gathers and reduces.
    """
    ranks, rank = group.world_size, group.rank_in_group
    if ranks == 1:
        return (out, lse) if return_lse else out
    tensor("out", out, shape=("tokens", "heads", "v_dim"), dtype=FLOATS)
    tokens, heads, _ = out.shape
    tensor("lse", lse, shape=(tokens, heads), dtype=FLOATS, device=out.device)
    own_memory("out", out, {"lse": lse})
    require(heads % ranks == 0, f"out: expected heads that {ranks} ranks can share, got {heads}")
    gathered = group.all_gather(lse.contiguous(), dim=0).view(ranks, tokens, heads)
    whole = gathered.logsumexp(0)
    weight = torch.exp(lse - whole).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    out.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).mul_(weight[..., None])
    mine = slice(heads // ranks * rank, heads // ranks * (rank + 1))
    merged = group.all_reduce(out)[:, mine].contiguous()
    return (merged, whole[:, mine].contiguous()) if return_lse else merged
