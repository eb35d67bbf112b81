"""The attention backend of a server: `plan` once per step, `decode`, `extend` or `verify` once per layer.

Reference: triton_backend.py. Nothing is kept between calls but what outlives a step: model, pool, request table,
engine, policy, scratch, and a tracer while somebody records. The plan is an argument.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from attnlab.batch import Batch, DecodeBatch, DraftBatch, ExtendBatch, HostLens, VerifyBatch
from attnlab.checks import describe, one_of, positive, require, same_device, tensor
from attnlab.engines import Engine, engine_for
from attnlab.grad import without_gradients
from attnlab.kernels.target import launching_on
from attnlab.memory.pool import KVPool, KVView, compute_dtype
from attnlab.memory.requests import RequestTable
from attnlab.memory.rows import read_back
from attnlab.plan.build import Planner
from attnlab.plan.call import FLOATS, DecodeCall
from attnlab.plan.draft import DraftPlan
from attnlab.plan.extend_call import ExtendCall, Parts, VerifyCall
from attnlab.plan.plans import DecodePlan, ExtendLane, ExtendPlan, Lane, Plan, Queries, VerifyPlan
from attnlab.plan.policy import HostPolicy, SplitPolicy, resolve_policy
from attnlab.plan.workspace import Partials, Workspace
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec
from attnlab.trace import Tracer


class AttentionBackend:
    """Plans and runs attention over a paged cache.

    `policy` and `engine` are names or objects; neither has a default. `multiprocessors` is what policies count
    with; on a CPU it may be that of the GPU one studies, or None where unknown. Scratch for batches of up to
    `max_requests` requests and `max_tokens` tokens is allocated here, once; calls share it, so one thread (and
    stream) at a time. Without shared slots no batch has more tokens than the pool has slots, which is what
    `max_tokens` is unless it is given; in a draft every branch is a request, and has its request's tokens.
    `max_drafts` is the most that a request has in a verify step.
    `deterministic`: bits do not change with the rest of the batch, nor with where a prompt is cut into chunks; it takes
    a policy that looks at each request alone.

    The parts by hand, for one request of five tokens (`attnlab.workbench` does the same in a line):

    >>> import torch
    >>> from attnlab import AttentionBackend, AttentionSpec, DecodeBatch, MHAPool, ModelSpec, RequestTable
    >>> attention = AttentionSpec(heads=4, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25)
    >>> model = ModelSpec.uniform(attention, layers=1, context_len=64, page_size=1, kv_dtype=torch.float32)
    >>> pool = MHAPool(model, num_slots=32, device="cpu")
    >>> table = RequestTable(max_requests=2, max_context=64, num_slots=32, device="cpu")
    >>> backend = AttentionBackend(
    ...     model=model, pool=pool, table=table, engine="eager", policy="seed", max_requests=2, multiprocessors=132
    ... )
    >>> row = table.admit()
    >>> slots = pool.allocator.allocate(row, 4)                              # four tokens are cached
    >>> table.append(row, slots)
    >>> pool.write(0, slots, torch.randn(4, 2, 16), torch.randn(4, 2, 16))
    >>> table.append(row, pool.allocator.allocate(row, 1))                   # the fifth gets its slot before planning
    >>> plan = backend.plan(DecodeBatch.of(rows=[row], lens=[5], device="cpu"))
    >>> q, k, v = torch.randn(1, 4, 16), torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    >>> backend.decode(0, q, k, v, plan).shape                               # stores k and v, then attends
    torch.Size([1, 4, 16])
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
        max_tokens: int | None = None,
        max_drafts: int = 1,
        deterministic: bool = False,
    ) -> None:
        positive("max_requests", max_requests)
        positive("max_drafts", max_drafts)
        _flag("deterministic", deterministic)
        max_tokens = pool.num_slots if max_tokens is None else positive("max_tokens", max_tokens)
        _check_parts(model, pool, table)
        self.model, self.pool, self.table = model, pool, table
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.engine = engine_for(engine, pool.device)
        self.engine.check_storage(model.kv_dtype)
        self.policy = resolve_policy(policy)
        self.deterministic = deterministic
        self.tracer: Tracer | None = None
        self.planner = Planner(
            model=model,
            pool=pool,
            table=table,
            policy=self.policy,
            ops=self.engine.ops,
            multiprocessors=multiprocessors,
            one_pass=deterministic,
            large_tiles=self.engine.large_tiles,
            max_requests=max_requests,
            max_tokens=max_tokens,
        )
        require(
            not deterministic or self.policy.batch_invariant,
            f"deterministic: policy {self.policy.name!r} cuts a request by what else is in the batch; use one that "
            "looks at the request alone, such as 'tile'",
        )
        require(
            not deterministic or self.engine.batch_invariant,
            f"deterministic, engine: {self.engine.name!r} on {pool.device} adds in an order that the batch decides; "
            'use engine="triton" there, or the CPU',
        )
        self.workspace = Workspace(
            max_ranges=self._max_ranges(max_requests, max_tokens, max_drafts),
            max_drafts=max_drafts,
            heads=max(layer.attention.heads for layer in model.layers),
            v_dims={layer.attention.v_dim for layer in model.layers},
            device=pool.device,
        )
        self._labels = {self.policy.label(self.planner.context(layers)) for layers in self.planner.kinds.values()}
        views = [pool.view(layer.pool_layer) for layer in model.layers]
        self._memory = {
            x.untyped_storage().data_ptr(): "the pool" for view in views for x in (view.k, view.v) if x.numel()
        }
        self._memory |= {
            x.untyped_storage().data_ptr(): "the backend's scratch" for x in self.workspace.buffers if x.numel()
        }

    @overload
    def plan(self, batch: DecodeBatch) -> DecodePlan: ...
    @overload
    def plan(self, batch: ExtendBatch) -> ExtendPlan: ...
    @overload
    def plan(self, batch: VerifyBatch) -> VerifyPlan: ...
    @overload
    def plan(self, batch: DraftBatch) -> DraftPlan: ...
    def plan(self, batch: Batch | DraftBatch) -> Plan | DraftPlan:
        """Return the plan of a step; raise before any list is gathered where the batch cannot be served.

        It is of that step alone: after tokens were appended, plan again. Of a draft all steps are planned at once, and
        decoded one by one: `plan.steps[i]`.
        """
        return self.planner.build(batch, max_ranges=self.workspace.max_ranges)

    @without_gradients
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
        keeps: bool = False,
    ) -> Tensor:
        """Store the new token's K and V, then attend to all keys of the plan; return `[reqs, heads, v_dim]`.

        `q` is `[reqs, heads, qk_dim]` (or 2-D, heads and dim in one), `k` and `v` `[reqs, kv_heads, dim]`, in fp32,
        fp16 or bf16; under MLA `v` is None. With `save=False` the cache is read as it is, and `k` and `v` are None, as
        they are in layers that read an encoder's keys. `out` and `lse` (natural log, fp32 `[reqs, heads]`, the sink
        included) are filled where given. `keeps`: every range's state is left in the scratch, for `partials`; where
        not, those that need no merge may be left out, which is less to write. Everything is checked first: on an error
        nothing was stored.
        """
        spec = self.model.layer(layer)
        lane, view = self._lane(layer, plan), self.pool.view(spec.pool_layer)
        self._check_apart(q=q, k=k, v=v, out=out, lse=lse)
        q, attention = _split_heads(q, spec), spec.attention
        if out is None:
            out = q.new_empty(lane.splits.reqs, attention.heads, attention.v_dim)
        keeps = _flag("keeps", keeps) or self.tracer is not None
        complete = keeps or not lane.schedule.persistent
        repeat = None if keeps else lane.repeats.get((self.workspace, attention))
        if repeat is not None and aux is lse is None and repeat.fits(view, q, out, sinks):
            self._store(spec, lane, k, v, save=save)
            self.workspace.complete = complete
            with launching_on(self.pool.device):
                repeat.launch(view, q, out, sinks)
            return out
        call = DecodeCall(
            layer=layer,
            spec=attention,
            view=view,
            lane=lane,
            partials=self._scratch(layer, plan),
            q=q,
            out=out,
            lse=lse,
            sinks=sinks,
            aux=aux,
            keeps=keeps,
        )
        if self.tracer is not None:
            call = replace(call, times=self.tracer.times_for(call))
        self._store(spec, lane, k, v, save=save)
        self.workspace.complete = complete
        repeat = self.engine.decode(call)
        if repeat is not None:
            lane.repeats[self.workspace, attention] = repeat
        if self.tracer is not None:
            self.tracer.decoded(call)
        return out

    def _store(self, layer: LayerSpec, lane: Lane, k: Tensor | None, v: Tensor | None, *, save: bool) -> None:
        """Store what a decode call brings; on an error nothing is."""
        if layer.attention.cross:
            _check_stored(layer.index, k, v)
        elif save:
            keys = tensor("k", k, shape=("reqs", "kv_heads", "qk_dim"), dtype=FLOATS, hint="or pass save=False")
            self.pool.store(layer.pool_layer, lane.write_slots, keys, v)
        elif k is not None or v is not None:
            raise ValueError("k, v: with save=False nothing is stored; pass None for both")

    @without_gradients
    def extend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        plan: ExtendPlan | VerifyPlan,
        *,
        sinks: Tensor | None = None,
        aux: Tensor | None = None,
        save: bool = True,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        parts: Parts = "all",
    ) -> Tensor:
        """Store the new tokens' K and V, then attend with each of them; return `[tokens, heads, v_dim]`.

        `q` is `[tokens, heads, qk_dim]` (or 2-D, heads and dim in one), `k` and `v` `[tokens, kv_heads, dim]`, all of
        one dtype, and finite, which alone is not checked; under MLA `v` is None. With `k` and `v` both None what the
        pool holds for the new tokens is read back; layers that read an encoder's keys take none, and the plan's mask
        does not speak of these. With `save=False` nothing is stored, which a plan in one pass, that reads everything
        from the pool, refuses where `k` is given. `out` and `lse` (natural log, fp32 `[tokens, heads]`, the sink
        included) are filled where given. `parts` attends to the "cached" or the "new" keys alone, without the sink, to
        be merged by LSE elsewhere. Rows beyond the live tokens of a plan whose lengths only the device knows are left
        as they are. A VerifyPlan is served too, without splits. Everything is checked first: on an error nothing was
        stored.
        """
        several = isinstance(plan, ExtendPlan | VerifyPlan)
        require(several, f"plan: expected an ExtendPlan or VerifyPlan, got {type(plan).__name__}", TypeError)
        self.check_current(plan)
        spec, lane = self.model.layer(layer), plan.lane(layer)
        view, cross = self.pool.view(spec.pool_layer), spec.attention.cross
        self._check_apart(q=q, k=k, v=v, out=out, lse=lse)
        one_of("parts", parts, ("all", "cached", "new"))
        require(
            parts == "all" or cross or sinks is None,
            f"parts, sinks: {parts!r} keys alone have no sink; pass None, and join it once after the merge",
        )
        one_pass = isinstance(plan, ExtendPlan) and plan.one_pass
        if isinstance(plan, ExtendPlan) and one_pass != self.deterministic:
            made = "in one pass, for a deterministic backend" if one_pass else "for a backend that is not deterministic"
            raise ValueError(f"plan: made {made}; this one is {'' if self.deterministic else 'not '}deterministic")
        if cross:
            require(parts != "new", f"parts: layer {layer} reads an encoder's keys alone, there are no new ones")
            parts, one_pass = "cached", False
        require(
            save or k is None or not one_pass,
            "save: a plan in one pass reads the new tokens from the pool; pass save=True, or None for k and v",
        )
        q = _split_heads(q, spec)
        keys, values = _new_tokens(view, lane, q, k, v, spec, read=not one_pass and parts != "cached")
        call = ExtendCall(
            layer=layer,
            spec=spec.attention,
            view=view,
            lane=lane,
            queries=_asked(plan, spec),
            one_pass=one_pass,
            q=q,
            k=keys,
            v=values,
            out=_rows_for(q, spec.attention, plan) if out is None else out,
            lse=lse,
            sinks=sinks,
            aux=aux,
            parts=parts,
            batch_invariant=self.deterministic,
        )
        if self.tracer is not None:
            self.tracer.check_queries(layer, call.queries)
        if save and k is not None:
            self.pool.store(spec.pool_layer, lane.write_slots, k, None if view.v_in_k else v)
        self.engine.extend(call)
        if self.tracer is not None:
            self.tracer.attended(call)
        return call.out

    @without_gradients
    def verify(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        plan: VerifyPlan,
        *,
        sinks: Tensor | None = None,
        aux: Tensor | None = None,
        save: bool = True,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        keeps: bool = False,
    ) -> Tensor:
        """Store the drafts' K and V, then attend with each of them over splits; return `[tokens, heads, v_dim]`.

        Arguments are those of `extend`, which gives the same result without splits, and `keeps` of `decode`. The cached
        keys are cut as the policy says, and loaded once for as many rows (drafts x heads of a group) as a program has
        room for. Of a deterministic backend the bits depend on the request alone; they are those of this path, not of
        the extend that stores a token later.
        """
        require(isinstance(plan, VerifyPlan), f"plan: expected a VerifyPlan, got {type(plan).__name__}", TypeError)
        self.check_current(plan)
        spec, lane = self.model.layer(layer), plan.lane(layer)
        view = self.pool.view(spec.pool_layer)
        self._check_apart(q=q, k=k, v=v, out=out, lse=lse)
        self._check_policy(lane)
        q, attention = _split_heads(q, spec), spec.attention
        keys, values = _new_tokens(view, lane, q, k, v, spec, read=True)
        out = _rows_for(q, attention, plan) if out is None else out
        keeps = _flag("keeps", keeps) or self.tracer is not None
        complete, queries = keeps or not lane.schedule.persistent, _asked(plan, spec)
        repeat = None if keeps else lane.repeats.get((self.workspace, attention))
        if repeat is not None and aux is lse is None and repeat.fits(view, q, out, sinks, keys, values, queries):
            if save and k is not None:
                self.pool.store(spec.pool_layer, lane.write_slots, k, None if view.v_in_k else v)
            self.workspace.complete = complete
            with launching_on(self.pool.device):
                repeat.launch(view, q, out, sinks, keys, values)
            return out
        call = VerifyCall(
            layer=layer,
            spec=attention,
            view=view,
            lane=lane,
            queries=queries,
            partials=self._scratch(layer, plan),
            q=q,
            k=keys,
            v=values,
            out=out,
            lse=lse,
            sinks=sinks,
            aux=aux,
            batch_invariant=self.deterministic,
            keeps=keeps,
        )
        if self.tracer is not None:
            self.tracer.check_queries(layer, call.queries)
        if save and k is not None:
            self.pool.store(spec.pool_layer, lane.write_slots, k, None if view.v_in_k else v)
        self.workspace.complete = complete
        repeat = self.engine.verify(call)
        if repeat is not None:
            lane.repeats[self.workspace, attention] = repeat
        if self.tracer is not None:
            self.tracer.attended(call)
        return out

    def forward(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, plan: Plan, **options: Any) -> Tensor:
        """Attend as the plan says: the one place where a path is chosen.

        `options` are those of the method that serves the plan: `decode`, `verify` (which needs `max_drafts`), `extend`.
        """
        match plan:
            case DecodePlan():  # one query a request: splits, then a merge
                return self.decode(layer, q, k, v, plan, **options)
            case VerifyPlan():  # few queries over long caches: splits, then a merge with the drafts
                return self.verify(layer, q, k, v, plan, **options)
            case ExtendPlan():  # cached keys, then the new ones as they came; in one pass both out of the pool
                return self.extend(layer, q, k, v, plan, **options)
            case _:
                raise TypeError(f"plan: expected a DecodePlan, ExtendPlan or VerifyPlan, got {describe(plan)}")

    def partials(self, layer: int, plan: DecodePlan | VerifyPlan) -> Partials:
        """Return the scratch of this layer and plan: after a call that keeps states, and until the next, every range's.

        Whose call was the last is not asked. Raises RuntimeError where it did not keep all states: on every engine, so
        that what works on one does on the others.
        """
        right = isinstance(plan, DecodePlan | VerifyPlan)
        require(right, f"plan: expected a DecodePlan or VerifyPlan, got {describe(plan)}", TypeError)
        require(
            self.workspace.complete,
            "partials: the last call left the states of some ranges out, whose answers needed no merge; pass "
            "keeps=True to decode or verify",
            RuntimeError,
        )
        return self._scratch(layer, plan)

    def _scratch(self, layer: int, plan: DecodePlan | VerifyPlan) -> Partials:
        lane, spec = plan.lane(layer), self.model.layer(layer).attention
        most, bound = plan.queries.most if isinstance(plan, VerifyPlan) else 1, self.workspace.max_drafts
        if most > bound:
            raise ValueError(
                f"plan: a request of up to {most} drafts, the scratch is for {bound}; build the backend with a larger "
                "max_drafts, or call extend, which needs none"
            )
        rows = spec.group * most
        return self.workspace.partials(count=lane.schedule.partials, group=rows, v_dim=spec.v_dim)

    def _lane(self, layer: int, plan: DecodePlan) -> Lane:
        if not isinstance(plan, DecodePlan):
            hint = "; decode its steps, one after the other" if isinstance(plan, DraftPlan) else ""
            raise TypeError(f"plan: expected a DecodePlan, got {type(plan).__name__}{hint}")
        self.check_current(plan)
        lane = plan.lane(layer)
        self._check_policy(lane)
        return lane

    def check_current(self, plan: Plan | DraftPlan) -> None:
        """Raise ValueError where a plan is of another state of the pool, or its memory holds the next step's by now."""
        if plan.epoch != self.pool.epoch:  # every layer asks: words only where they are needed
            raise ValueError(
                f"plan: made for another state of the pool (epoch {plan.epoch}, now {self.pool.epoch}): slots were "
                "freed or moved since, or the plan belongs to another backend; plan again"
            )
        if plan.turn.over:
            raise ValueError("plan: it lies in a graph's memory, which was filled for a later step since; plan again")

    def _check_policy(self, lane: Lane) -> None:
        """Raise ValueError where a deterministic backend is given ranges that another policy cut."""
        if self.deterministic and lane.splits.policy not in self._labels:
            raise ValueError(
                f"plan: cut by policy {lane.splits.policy!r}, this deterministic backend's is {self.policy.name!r}; "
                "the plan belongs to another backend"
            )

    def _check_apart(self, **tensors: Tensor | None) -> None:
        """Raise ValueError where an argument lies in memory that a call writes: the pool, or the scratch."""
        for name, x in tensors.items():
            if x is not None and isinstance(x, Tensor) and x.layout == torch.strided:
                there = self._memory.get(x.untyped_storage().data_ptr())
                if there is not None and x.numel():
                    raise ValueError(f"{name}: shares its memory with {there}, which calls write; pass a copy")

    def _max_ranges(self, max_requests: int, max_tokens: int, max_drafts: int) -> int:
        """Return the most ranges that a batch of so many requests and tokens can be cut into, in any lane and mode."""
        most = 1
        for kind, layers in self.planner.kinds.items():
            longest = self.planner.admission.longest(kind.sight)
            bound = min(longest, kind.sight.span or longest)
            total = min(max_requests * bound, max_tokens)
            for drafts in (None, *range(1, max_drafts + 1)):
                bounds = self.policy.bounds(bound_max=bound, ctx=self.planner.context(layers, drafts=drafts))
                most = max(most, bounds.capacity(reqs=max_requests, total=total))
        return most


def _check_parts(model: ModelSpec, pool: KVPool, table: RequestTable) -> None:
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


def _rows_for(q: Tensor, spec: AttentionSpec, plan: ExtendPlan | VerifyPlan) -> Tensor:
    """Return memory for the output. Where only the device knows rows or lengths no query may come for the last ones."""
    new = plan.batch.new if isinstance(plan, ExtendPlan) else plan.batch.drafts
    known = isinstance(new, HostLens) and plan.batch.rows.device.type == "cpu"
    make = q.new_empty if known else q.new_zeros
    return make(q.shape[0], spec.heads, spec.v_dim)


def _asked(plan: ExtendPlan | VerifyPlan, layer: LayerSpec) -> Queries:
    """Return a layer's queries: a mask speaks of the request's own keys, not of an encoder's."""
    return plan.queries.unmasked if layer.attention.cross else plan.queries


def _new_tokens(
    view: KVView,
    lane: ExtendLane,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: LayerSpec,
    *,
    read: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the new tokens' K and V as a call reads them: those given, or what the pool holds; None unless `read`."""
    if layer.attention.cross:
        _check_stored(layer.index, k, v)
        return None, None
    together = "pass both, or None for both"
    require(k is not None or v is None, f"k: expected keys beside the values, got None; {together}")
    if view.v_in_k:
        same = v is None or (isinstance(v, Tensor) and isinstance(k, Tensor) and v.data_ptr() == k.data_ptr())
        require(same, "v: under MLA the values are the first columns of k; pass None, or that view of k")
    else:
        require(k is None or v is not None, f"v: expected values beside the keys, got None; {together}")
    if not read:
        return None, None
    if k is None:
        return read_back(view, lane.write_slots, compute_dtype(q.dtype, view.k.dtype))
    if not view.v_in_k:
        return k, v
    keys = tensor("k", k, shape=("tokens", "kv_heads", "qk_dim"), dtype=FLOATS)
    return keys, keys[..., : layer.attention.v_dim]


def _check_stored(layer: int, k: Tensor | None, v: Tensor | None) -> None:
    """Raise ValueError where a layer that reads an encoder's keys is given some."""
    require(
        k is None and v is None,
        f"k, v: layer {layer} reads an encoder's keys, which were stored when the encoder ran; pass None for both",
    )


def _flag(name: str, value: bool) -> bool:
    if value is not True and value is not False:
        raise TypeError(f"{name}: expected a bool, got {value!r}")
    return value


def _split_heads(q: Tensor, layer: LayerSpec) -> Tensor:
    """Return q as `[tokens, heads, qk_dim]`; servers pass heads and dimension in one axis too."""
    dims = q.dim() if isinstance(q, Tensor) else 0
    if dims == 3:
        return q
    spec = layer.attention
    if dims != 2:
        raise TypeError(f"q: expected [tokens, {spec.heads}, {spec.qk_dim}], got {describe(q)}")
    if q.shape[1] == spec.heads * spec.qk_dim:
        return q.view(-1, spec.heads, spec.qk_dim)
    return q
