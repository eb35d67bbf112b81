"""What a call loads of the cache: every program reads the keys of its range, whoever else has read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.kernels.target import Target
from attnlab.kernels.verify import VerifyConfig
from attnlab.kernels.verify_shares import VerifySharesConfig
from attnlab.memory.pool import FP8
from attnlab.plan.plans import DecodePlan, VerifyPlan
from attnlab.spec import ModelSpec

H200 = Target(kind="cuda", arch=90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Bytes that the programs over one layer's cached keys load: keys with their values, and a mask's entries of them.

    A program has room for a tile of queries: of a decode as many heads of a group as the schedule packs, of a verify as
    many rows, drafts x heads of a group, as its kernel takes on `target`. Each tile loads every key of its range once.
    What comes with a verify call, the drafts' own keys, is not of the cache and does not count.
    """

    kv_bytes: int
    mask_bytes: int

    @classmethod
    def of(cls, plan: DecodePlan | VerifyPlan, *, model: ModelSpec, layer: int, target: Target = H200) -> Loads:
        """Count over a plan's schedule (waits for the device); the plan is of a backend that is not deterministic."""
        spec, schedule = model.layer(layer).attention, plan.lane(layer).schedule
        segments = schedule.segments.cpu().long()
        request, keys = segments[:, 0], segments[:, 3] - segments[:, 2]
        width = spec.qk_dim + (0 if model.mla else spec.v_dim)  # under MLA the values are columns of the keys
        masked = isinstance(plan, VerifyPlan) and plan.queries.cached_masked
        queries = _queries(plan)
        tiles = _tiles(plan, queries, model=model, layer=layer, target=target, masked=masked)
        return cls(
            kv_bytes=int((keys * tiles[request]).sum()) * width * model.kv_dtype.itemsize,
            mask_bytes=int((keys * queries[request]).sum()) * masked,
        )


def _queries(plan: DecodePlan | VerifyPlan) -> Tensor:
    """Return how many queries each request has, int64 on the CPU."""
    if isinstance(plan, DecodePlan):
        return torch.ones(plan.batch.seq.count, dtype=torch.int64)
    return plan.queries.indptr.diff().cpu().long()


def _tiles(
    plan: DecodePlan | VerifyPlan,
    queries: Tensor,
    *,
    model: ModelSpec,
    layer: int,
    target: Target,
    masked: bool,
) -> Tensor:
    """Return how many programs share the queries of one request and KV head."""
    spec, kv_dtype = model.layer(layer).attention, model.kv_dtype
    if isinstance(plan, DecodePlan):
        return torch.full_like(queries, plan.lane(layer).schedule.head_tiles(spec.group))
    compute = torch.bfloat16 if kv_dtype == FP8 else kv_dtype  # as where queries come in the cache's dtype
    rows = plan.queries.most * spec.group
    config = VerifySharesConfig if plan.lane(layer).schedule.persistent else VerifyConfig
    chosen = config.choose(spec, target, compute=compute, kv_dtype=kv_dtype, masked=masked, rows=rows)
    return -(-queries * spec.group // chosen.block_m)
