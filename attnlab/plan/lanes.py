"""What a lane is to be made of: data that the planner hands to an engine, with all that the host can bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from attnlab.batch import Lens
from attnlab.memory.pool import Translation
from attnlab.plan.layout import Extent, most_seen, values_seen
from attnlab.plan.policy import HostPolicy, SharePolicy, SplitBounds, SplitContext, SplitPolicy
from attnlab.plan.splits import Ranges, known_lens, ranges_of_host
from attnlab.spec import Sight


class Source(NamedTuple):
    """Where slots come from: a request table, whose ids are of `space`, and the way from there to a storage."""

    table: Int[Tensor, "max_requests max_context"]
    space: str
    translation: Translation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneWork:
    """Lists of the first `lens` tokens of these rows, as far as sight goes; how they are cut; where new tokens go.

    `rows` (int64) lie on the device; one that the table does not have is taken for the nearest. The first query of a
    request stands `behind` before its length: 1 in a decode, whose newest token is listed, else 0. `written` says where
    `tokens` new ones stand; None: each request's newest. Lists have at most `total` entries together by the bounds of
    all lengths, at most `entries` by those of each too, and are cut in at most `ranges`. `asked`: the ranges of a
    policy in plain Python.
    """

    source: Source
    rows: Int[Tensor, " reqs"]
    lens: Lens
    behind: int
    sight: Sight
    tokens: int
    written: Extent | None
    policy: SplitPolicy | HostPolicy
    ctx: SplitContext
    bounds: SplitBounds
    total: int
    entries: int
    ranges: int
    asked: Ranges | None

    @classmethod
    def of(
        cls,
        policy: SplitPolicy | HostPolicy,
        ctx: SplitContext,
        *,
        source: Source,
        rows: Tensor,
        lens: Lens,
        behind: int,
        sight: Sight,
        tokens: int,
        written: Extent | None,
    ) -> LaneWork:
        """Bound the work by what the host knows; a policy in plain Python is asked here.

        Raises TypeError where such a policy gets lengths that only the device knows.
        """
        each, total = most_seen(lens, sight, behind=behind)
        ctx = replace(ctx, longest=max(1, each))
        policy = policy.dealt(ctx) if isinstance(policy, SharePolicy) else policy
        bounds = policy.bounds(bound_max=each, ctx=ctx)
        if isinstance(policy, HostPolicy):
            asked = ranges_of_host(policy, values_seen(known_lens(policy, lens), sight, behind=behind), ctx)
            ranges = sum(len(mine) for mine in asked)
        else:
            asked, ranges = None, bounds.capacity(reqs=lens.count, total=total)
        return cls(
            source=source,
            rows=rows,
            lens=lens,
            behind=behind,
            sight=sight,
            tokens=tokens,
            written=written,
            policy=policy,
            ctx=ctx,
            bounds=bounds,
            total=total,
            entries=min(total, each * lens.count),
            ranges=ranges,
            asked=asked,
        )

    @property
    def uncut(self) -> bool:
        """Whether no list can be cut: all are short."""
        return self.asked is None and self.bounds.max_ranges == 1

    def new_tokens(self) -> Extent:
        """Return where new tokens stand. That of a padded row is beyond the table, where only the sink is found."""
        if self.written is not None:
            return self.written
        end = held(self.lens)
        newest = torch.where(end > 0, end - self.behind, self.source.table.shape[1])
        one_each = torch.arange(self.tokens + 1, dtype=torch.int32, device=end.device)
        return Extent(start=newest, start_visible=newest, indptr=one_each)


def held(lens: Lens) -> Int[Tensor, " reqs"]:
    """Return the lengths, held to what the host was told of them, so that no buffer is overrun."""
    return lens.device.clamp(0, lens.bound_max)
