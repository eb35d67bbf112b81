"""The door for notebooks: a whole backend, filled and ready, in one line.

It adds no behaviour of its own. Every part is the plain object that a server would build: `wb.backend`, `wb.pool`,
`wb.table`, `wb.batch`; step behind the door at any point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch
from attnlab.checks import require
from attnlab.engines import Engine
from attnlab.inspect.merge import MergeSteps
from attnlab.inspect.samples import MODEL, LayerSample, Sample, random_layer
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.plans import DecodePlan
from attnlab.plan.policy import HostPolicy, SplitPolicy
from attnlab.spec import ModelSpec

H200_MULTIPROCESSORS = 132
FILL_STEP = 16
"""Requests are filled in turns of so many tokens, so that their pages lie mixed in the pool, as in a server."""


class Workbench:
    """A model, a batch of requests whose keys and values are cached, and a backend over them.

    `newest(layer)` gives the query, key and value of every request's last token, and `decode(layer)` runs them.
    """

    def __init__(
        self,
        *,
        backend: AttentionBackend,
        batch: DecodeBatch,
        lens: Sequence[int],
        contents: dict[int, list[LayerSample]],
        source: str,
    ) -> None:
        self.backend, self.batch, self.source = backend, batch, source
        self.lens = tuple(lens)
        self.model, self.pool, self.table = backend.model, backend.pool, backend.table
        self._contents = contents

    def __repr__(self) -> str:
        """Say what stands on the bench, the choices included."""
        backend = self.backend
        lens = self.lens if len(self.lens) <= 8 else (*self.lens[:8], "...")
        return (
            f"Workbench({self.model.name}, layers {', '.join(map(str, self.layers))}; {len(self.lens)} requests of "
            f"{', '.join(map(str, lens))} tokens; engine {backend.engine.name}, policy {backend.policy.name}, "
            f"{backend.planner.multiprocessors} multiprocessors; {self.source})"
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are filled."""
        return tuple(layer.index for layer in self.model.layers)

    def plan(self) -> DecodePlan:
        """Return the plan of decoding every request's last token."""
        return self.backend.plan(self.batch)

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return every request's last token: q `[reqs, heads, qk_dim]`, k and v `[reqs, kv_heads, dim]`.

        Under MLA v is None. A request without tokens gets zeros.
        """
        spec, device = self.model.layer(layer).attention, self.pool.device
        rows = self._contents[layer]
        q = _last_rows([row.q for row in rows], spec.heads, spec.qk_dim, device)
        k = _last_rows([row.k for row in rows], spec.kv_heads, spec.qk_dim, device)
        if self.model.mla:
            return q, k, None
        return q, k, _last_rows([row.v for row in rows], spec.kv_heads, spec.v_dim, device)

    def decode(
        self, layer: int, plan: DecodePlan | None = None, *, lse: Tensor | None = None
    ) -> Float[Tensor, "reqs heads v_dim"]:
        """Run one layer's decode call with the newest tokens; without a plan, a new one is made."""
        q, k, v = self.newest(layer)
        return self.backend.decode(layer, q, k, v, self.plan() if plan is None else plan, lse=lse)

    def merge(self, layer: int, *, request: int, head: int, plan: DecodePlan | None = None) -> MergeSteps:
        """Decode a layer and return one head's partial results, ready to `show`."""
        made = self.plan() if plan is None else plan
        self.decode(layer, made)
        title = f"layer {layer}, head {head}, request {request}"
        partials = self.backend.partials(layer, made)
        return MergeSteps.of(partials, made.lane(layer), request=request, head=head, title=title)

    def cached(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """Return the K and V rows that were put into the cache for a request, as given: before any storage rounding."""
        content = self._contents[layer][request]
        return content.k, content.v


def workbench(
    model: str | ModelSpec,
    *,
    lens: Sequence[int],
    policy: str | SplitPolicy | HostPolicy,
    engine: str | Engine,
    device: torch.device | str = "cpu",
    layers: Sequence[int] | None = None,
    kv_dtype: torch.dtype = torch.float16,
    page_size: int = 1,
    multiprocessors: int | None = None,
    seed: int = 0,
) -> Workbench:
    """Build a backend over a filled cache: one request for each of `lens`.

    SmolLM2-135M gets the recorded keys and values of the trained model (layers 0, 18 and 23; up to 2,048 tokens; a
    shorter request is the end of the text, up to one of its last 128 tokens). Any other model, and any other layer
    of this one, gets seeded normal numbers; by default in one layer of each kind. `multiprocessors` defaults to the
    device's own, on a CPU to an H200's 132. A ModelSpec brings its own `page_size` and `kv_dtype`.

    >>> wb = workbench("SmolLM2-135M", lens=[2048, 96, 700], policy="seed", engine="eager")
    >>> wb.decode(18).shape
    torch.Size([3, 9, 64])
    """
    recorded = (
        model == MODEL and layers is None or (model == MODEL and set(layers or ()) <= set(Sample.load("long").layers))
    )
    spec = _spec(model, layers, kv_dtype, page_size, recorded)
    pool, table = _storage(spec, lens, device)
    contents = _contents(spec, lens, recorded, seed)
    rows = _fill(spec, pool, table, contents, lens)
    backend = AttentionBackend(
        model=spec,
        pool=pool,
        table=table,
        engine=engine,
        policy=policy,
        max_requests=max(1, len(lens)),
        multiprocessors=_multiprocessors(pool.device) if multiprocessors is None else multiprocessors,
    )
    batch = DecodeBatch.of(rows=rows, lens=lens, device=pool.device)
    source = "recorded q, k, v of the trained model" if recorded else f"normal numbers, seed {seed}"
    return Workbench(backend=backend, batch=batch, lens=lens, contents=contents, source=source)


def _spec(
    model: str | ModelSpec,
    layers: Sequence[int] | None,
    kv_dtype: torch.dtype,
    page_size: int,
    recorded: bool,
) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model if layers is None else model.only(tuple(layers))
    spec = ModelSpec.load(model, page_size=page_size, kv_dtype=kv_dtype)
    if layers is not None:
        return spec.only(tuple(layers))
    if recorded:
        return spec.only(Sample.load("long").layers)
    first_of_kind = {layer.attention: layer.index for layer in reversed(spec.layers)}
    return spec.only(tuple(sorted(first_of_kind.values())))


def _storage(spec: ModelSpec, lens: Sequence[int], device: torch.device | str) -> tuple[KVPool, RequestTable]:
    pages = 1 + sum(-(-n // spec.page_size) for n in lens)
    num_slots = max(2, pages) * spec.page_size
    pool: KVPool = (MLAPool if spec.mla else MHAPool)(spec, num_slots=num_slots, device=device)
    table = RequestTable(
        max_requests=max(1, len(lens)),
        max_context=max(1, *lens, 1),
        num_slots=num_slots,
        device=device,
    )
    return pool, table


def _contents(spec: ModelSpec, lens: Sequence[int], recorded: bool, seed: int) -> dict[int, list[LayerSample]]:
    """Return every layer's q, k and v of every request, cut to its length; its last token is the one to decode."""
    contents = {}
    for layer in spec.layers:
        attention = layer.attention
        if recorded:
            sample = Sample.load("long").layer(layer.index)
            contents[layer.index] = [_cut(sample, n, request) for request, n in enumerate(lens)]
        else:
            contents[layer.index] = [
                random_layer(
                    tokens=n,
                    heads=attention.heads,
                    kv_heads=attention.kv_heads,
                    qk_dim=attention.qk_dim,
                    v_dim=attention.v_dim,
                    seed=seed + 1000 * layer.index + request,
                )
                for request, n in enumerate(lens)
            ]
    return contents


def _cut(sample: LayerSample, length: int, request: int) -> LayerSample:
    """Return `length` consecutive tokens that end at one whose query was recorded, a different one for each request."""
    tokens, queries = sample.k.shape[0], sample.q.shape[0]
    require(
        length <= tokens,
        f"lens: request {request} has {length:,} tokens, the recorded text {tokens:,}; scale the lengths "
        "(attnlab.inspect.traffic.scale_to)",
    )
    last = max(tokens - 1 - (17 * request) % queries, length - 1)
    keep = slice(last + 1 - length, last + 1)
    at = last - sample.first_query
    return LayerSample(q=sample.q[at : at + min(1, length)], k=sample.k[keep], v=sample.v[keep])


def _fill(
    spec: ModelSpec,
    pool: KVPool,
    table: RequestTable,
    contents: dict[int, list[LayerSample]],
    lens: Sequence[int],
) -> list[int]:
    """Allocate every request's slots, enter them in the table, store keys and values; return the rows."""
    rows = [table.admit() for _ in lens]
    for at in range(0, max(lens, default=0), FILL_STEP):
        for row, length in zip(rows, lens, strict=True):
            more = min(FILL_STEP, length - at)
            if more > 0:
                table.append(row, pool.allocator.allocate(row, more))
    for layer in spec.layers:
        for row, content in zip(rows, contents[layer.index], strict=True):
            k, v = content.k.to(pool.device), None if spec.mla else content.v.to(pool.device)
            pool.write(layer.pool_layer, table.slots_of(row).long(), k, v)
    return rows


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return H200_MULTIPROCESSORS


def _last_rows(rows: list[Tensor], heads: int, dim: int, device: torch.device) -> Tensor:
    """Return each request's last row, `[reqs, heads, dim]`; zeros for a request without tokens."""
    nothing = torch.zeros(1, heads, dim)
    return torch.cat([row[-1:] if row.shape[0] else nothing.to(row.dtype) for row in rows] or [nothing[:0]]).to(device)
