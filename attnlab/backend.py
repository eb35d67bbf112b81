"""The attention backend of a server: `plan` once per step, `decode` once per layer.

Reference: triton_backend.py. Nothing is kept between calls but what outlives a step: model, pool, request table,
engine, policy, scratch, and a tracer while somebody records. The plan is an argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.batch import DecodeBatch
from attnlab.checks import describe, positive, require, same_device, tensor
from attnlab.engines import FLOATS, Engine, check_decode, engine_for
from attnlab.memory.pool import KVPool
from attnlab.memory.requests import RequestTable
from attnlab.plan import policies  # noqa: F401  (registers the policies)
from attnlab.plan.build import Planner
from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.policy import HostPolicy, SplitPolicy, resolve_policy
from attnlab.plan.workspace import Partials, Workspace
from attnlab.spec import LayerSpec, ModelSpec
from attnlab.trace import DecodeCall, Tracer


class AttentionBackend:
    """Plans and runs attention over a paged cache.

    `policy` and `engine` are names or objects; neither has a default. `multiprocessors` is what policies count
    with; on a CPU it may be that of the GPU one studies, or None where unknown. Scratch for `max_requests` is
    allocated here.

    >>> import attnlab
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
    >>> plan = wb.backend.plan(wb.batch)
    >>> q, k, v = wb.newest(18)
    >>> wb.backend.decode(18, q, k, v, plan).shape
    torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        pool: KVPool,
        table: RequestTable,
        engine: str | Engine,
        policy: str | SplitPolicy | HostPolicy,
        max_requests: int,
        multiprocessors: int | None,
    ) -> None:
        positive("max_requests", max_requests)
        _check_parts(model, pool, table, max_requests)
        self.model, self.pool, self.table = model, pool, table
        self.engine = engine_for(engine, pool.device)
        self.engine.check_storage(model.kv_dtype)
        self.policy = resolve_policy(policy)
        self.tracer: Tracer | None = None
        self.planner = Planner(
            model=model,
            pool=pool,
            table=table,
            policy=self.policy,
            ops=self.engine.ops,
            multiprocessors=multiprocessors,
        )
        self.workspace = Workspace(
            max_ranges=self._max_ranges(max_requests),
            heads=max(layer.attention.heads for layer in model.layers),
            v_dims={layer.attention.v_dim for layer in model.layers},
            device=pool.device,
        )

    def plan(self, batch: DecodeBatch) -> DecodePlan:
        """Return the plan of a step; raise before anything is written where the batch cannot be served."""
        plan = self.planner.build(batch)
        for lane in plan.lanes:
            have = self.workspace.max_ranges
            require(
                lane.splits.capacity <= have,
                f"batch: may need {lane.splits.capacity:,} ranges, the scratch holds {have:,}; "
                "build the backend with a larger max_requests",
            )
        return plan

    def decode(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        plan: DecodePlan,
        *,
        sinks: Tensor | None = None,
        aux: Tensor | None = None,
        save: bool = True,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Store the new token's K and V, then attend to all keys of the plan; return `[reqs, heads, v_dim]`.

        `q` is `[reqs, heads, qk_dim]` (or 2-D, heads and dim in one), `k` and `v` `[reqs, kv_heads, dim]`, in fp32,
        fp16 or bf16; under MLA `v` is None. With `save=False` the cache is read as it is, and `k` and `v` are None.
        `out` and `lse` (natural log, fp32 `[reqs, heads]`, the sink included) are filled where given. Everything is
        checked first: on an error nothing was stored.
        """
        spec = self.model.layer(layer)
        lane = self._lane(layer, plan)
        view = self.pool.view(spec.pool_layer)
        q = _split_heads(q, spec)
        if out is None:
            out = torch.empty(
                lane.splits.reqs,
                spec.attention.heads,
                spec.attention.v_dim,
                dtype=q.dtype,
                device=q.device,
            )
        check_decode(q=q, view=view, lane=lane, spec=spec.attention, out=out, lse=lse, sinks=sinks, aux=aux)
        partials = self.partials(layer, plan)
        if save:
            keys = tensor(
                "k",
                k,
                shape=["reqs", "kv_heads", "qk_dim"],
                dtype=FLOATS,
                hint="or pass save=False",
            )
            self.pool.store(spec.pool_layer, lane.write_slots, keys, v)
        else:
            require(
                k is None and v is None,
                "k, v: with save=False nothing is stored; pass None for both",
            )
        times = None if self.tracer is None else self.tracer.times_for(layer, lane)
        self.engine.decode(
            q=q,
            view=view,
            lane=lane,
            spec=spec.attention,
            partials=partials,
            out=out,
            lse=lse,
            sinks=sinks,
            aux=aux,
            times=times,
        )
        if self.tracer is not None:
            self.tracer.decoded(
                DecodeCall(
                    layer=layer,
                    spec=spec.attention,
                    view=view,
                    lane=lane,
                    q=q,
                    partials=partials,
                    sinks=sinks,
                    aux=aux,
                    times=times,
                )
            )
        return out

    def partials(self, layer: int, plan: DecodePlan) -> Partials:
        """Return the scratch of this layer and plan: after its decode call, and until the next, every range's state."""
        lane, spec = plan.lane(layer), self.model.layer(layer).attention
        return self.workspace.partials(programs=lane.schedule.programs, group=spec.group, v_dim=spec.v_dim)

    def _lane(self, layer: int, plan: DecodePlan) -> Lane:
        require(
            plan.epoch == self.pool.epoch,
            f"plan: made for another state of the pool (epoch {plan.epoch}, now {self.pool.epoch}): slots were freed "
            "since, or the plan belongs to another backend; plan again",
        )
        return plan.lane(layer)

    def _max_ranges(self, max_requests: int) -> int:
        bound = min(self.model.context_len, self.table.max_context)
        # Requests may share slots, so that together they can be longer than the pool.
        total = min(max_requests * bound, 2**31 - 1)
        kinds = {layer.attention for layer in self.model.layers}
        bounds = [self.policy.bounds(bound_max=bound, ctx=self.planner.context(kind)) for kind in kinds]
        return max(b.capacity(reqs=max_requests, total=total) for b in bounds)


def _check_parts(model: ModelSpec, pool: KVPool, table: RequestTable, max_requests: int) -> None:
    for layer in model.layers:
        pool.view(layer.pool_layer).check_fits(layer.attention)
    require(
        same_device(table.slots.device, pool.device),
        f"table: expected on {pool.device} like the pool, got {table.slots.device}",
    )
    require(
        table.num_slots <= pool.num_slots,
        f"table: admits slots up to {table.num_slots - 1}, the pool has {pool.num_slots}",
    )
    require(
        max_requests <= table.max_requests,
        f"max_requests: expected at most the table's {table.max_requests} rows, got {max_requests}",
    )


def _split_heads(q: Tensor, layer: LayerSpec) -> Tensor:
    """Return q as `[tokens, heads, qk_dim]`; servers pass heads and dimension in one axis too."""
    spec = layer.attention
    if not isinstance(q, Tensor):
        raise TypeError(f"q: expected [tokens, {spec.heads}, {spec.qk_dim}], got {describe(q)}")
    if q.dim() == 2 and q.shape[1] == spec.heads * spec.qk_dim:
        return q.view(-1, spec.heads, spec.qk_dim)
    return q
