"""The door for notebooks: a whole backend, filled and ready, in one line.

It adds no behaviour of its own. Every part is the plain object that a server would build: `wb.backend`, `wb.pool`,
`wb.table`, `wb.cache`, `wb.batch`; step behind the door at any point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, ExtendBatch
from attnlab.checks import positive, require, whole
from attnlab.engines import Engine
from attnlab.inspect.contents import is_recorded, last_queries, layer_contents, seed_of, token_texts
from attnlab.inspect.merge import MergeSteps
from attnlab.inspect.record import BUDGET_BYTES, Scores, record
from attnlab.inspect.samples import LayerSample
from attnlab.inspect.score_view import ScoreView, StageView
from attnlab.kernels.target import multiprocessors_of
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.plans import DecodePlan
from attnlab.plan.policy import HostPolicy, SplitPolicy
from attnlab.spec import AttentionSpec, ModelSpec
from attnlab.trace import STAGES, Trace

H200_MULTIPROCESSORS = 132
FILL_STEP = 16
"""Requests are filled in turns of so many tokens, so that their pages lie mixed in the pool, as in a server."""


class Workbench:
    """A model, a batch of requests whose keys and values are cached, and a backend over them.

    `newest(layer)` gives the query, key and value of every request's last token, and `decode(layer)` runs them;
    `extend(layer, last=n)` asks with the last n tokens at once. Tokens come and go by `cache`; the bench's own batch is
    of the requests as they were filled.
    """

    def __init__(
        self,
        *,
        backend: AttentionBackend,
        cache: PagedCache,
        batch: DecodeBatch,
        lens: Sequence[int],
        contents: dict[int, list[LayerSample]],
        seed: int,
    ) -> None:
        self.backend, self.cache, self.batch = backend, cache, batch
        self.lens, self.seed = tuple(lens), seed
        self.model, self.pool, self.table = backend.model, backend.pool, backend.table
        self._contents = contents

    def __repr__(self) -> str:
        """Say what stands on the bench, the choices included."""
        backend, count = self.backend, len(self.lens)
        shown = [str(n) for n in self.lens[:8]] + ["..."] * (count > 8)
        return (
            f"Workbench({self.model.name}, {_numbered('layer', self.layers)}; {count} request{'s' * (count != 1)} of "
            f"{', '.join(shown)} tokens; engine {backend.engine.name}, policy {backend.policy.name}, "
            f"{backend.planner.multiprocessors} multiprocessors; {self.source})"
        )

    @property
    def source(self) -> str:
        """Where the cached numbers come from."""
        recorded = [layer.index for layer in self.model.layers if is_recorded(self.model, layer)]
        drawn = [number for number in self.layers if number not in recorded]
        parts = [f"recorded q, k, v in {_numbered('layer', recorded)}"] * bool(recorded)
        parts += [f"normal numbers, seed {self.seed}, in {_numbered('layer', drawn)}"] * bool(drawn)
        return "; ".join(parts)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are filled."""
        return tuple(layer.index for layer in self.model.layers)

    def tokens(self, request: int) -> tuple[str, ...]:
        """Return the texts of a request's tokens; empty where the numbers were drawn."""
        return token_texts(self.model, self.lens, request)

    def plan(self) -> DecodePlan:
        """Return the plan of decoding every request's last token."""
        return self.backend.plan(self.batch)

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return every request's last token: q `[reqs, heads, qk_dim]`, k and v `[reqs, kv_heads, dim]`.

        Under MLA v is None. A request without tokens gets zeros.
        """
        spec, device, rows = self._attention(layer), self.pool.device, self._contents[layer]
        q = _last_rows([row.q for row in rows], spec.heads, spec.qk_dim, device)
        k = _last_rows([row.k for row in rows], spec.kv_heads, spec.qk_dim, device)
        if self.model.mla:
            return q, k, None
        return q, k, _last_rows([row.v for row in rows], spec.kv_heads, spec.v_dim, device)

    def sinks(self, layer: int) -> Float[Tensor, " heads"] | None:
        """Return seeded sink logits where the layer has sinks, else None."""
        spec = self._attention(layer)
        if not spec.has_sinks:
            return None
        generator = torch.Generator().manual_seed(seed_of(self.seed, layer))
        return torch.randn(spec.heads, generator=generator).to(self.pool.device)

    def decode(
        self, layer: int, plan: DecodePlan | None = None, *, aux: Tensor | None = None, lse: Tensor | None = None
    ) -> Float[Tensor, "reqs heads v_dim"]:
        """Run one layer's decode call with the newest tokens; without a plan, a new one is made.

        The scratch keeps every range's state, for `backend.partials`.
        """
        q, k, v = self.newest(layer)
        made = self.plan() if plan is None else plan
        return self.backend.decode(layer, q, k, v, made, sinks=self.sinks(layer), aux=aux, lse=lse, keeps=True)

    def extend(self, layer: int, *, last: int, lse: Tensor | None = None) -> Float[Tensor, "tokens heads v_dim"]:
        """Ask with the last tokens of every request at once, `last` each or as many as there are, over the cache.

        That is an extend step whose new tokens are stored already. `lse`, fp32 `[tokens, heads]`, is filled. Raises
        ValueError where a recorded text has fewer queries.
        """
        positive("last", last)
        new = [min(last, length) for length in self.lens]
        prefix = [length - n for length, n in zip(self.lens, new, strict=True)]
        batch = ExtendBatch.of(rows=self.batch.rows.tolist(), prefix=prefix, new=new, device=self.pool.device)
        q, plan = self._last_queries(layer, new), self.backend.plan(batch)
        return self.backend.extend(layer, q, None, None, plan, sinks=self.sinks(layer), save=False, lse=lse)

    def _last_queries(self, layer: int, new: Sequence[int]) -> Tensor:
        """Return the queries of so many last tokens of each request, `[tokens, heads, qk_dim]`."""
        spec = self._attention(layer)
        found = [torch.zeros(0, spec.heads, spec.qk_dim)]
        for request, (count, content) in enumerate(zip(new, self._contents[layer], strict=True)):
            drawn = seed_of(self.seed, layer, request, 1)
            found.append(last_queries(self.model, self.model.layer(layer), content, count, seed=drawn))
        return torch.cat(found[1:] or found).to(self.pool.device)

    def merge(
        self, layer: int, *, request: int, head: int, plan: DecodePlan | None = None, aux: Tensor | None = None
    ) -> MergeSteps:
        """Decode a layer and return one head's partial results, ready to `show`."""
        made = self.plan() if plan is None else plan
        self.decode(layer, made, aux=aux)
        partials = self.backend.partials(layer, made)
        return MergeSteps.of(partials, made.lane(layer), layer=layer, request=request, head=head)

    @contextmanager
    def record(
        self,
        *,
        partials: bool = True,
        scores: Scores | bool = False,
        times: bool = False,
        layers: Sequence[int] | None = None,
        queries: Sequence[int] | None = (-1,),
        budget_bytes: int = BUDGET_BYTES,
    ) -> Iterator[Trace]:
        """Record the calls made inside the block, as `attnlab.record` does; the trace knows the tokens' texts.

        Other batches of the bench's requests may be run inside as well: which is which is told by their slots.
        """
        rows = [(request, row) for request, row in enumerate(self.batch.rows.tolist()) if row in self.table.rows]
        owner = {slot: request for request, row in rows for slot in self.table.slots_of(row).tolist()}
        with record(
            self.backend,
            partials=partials,
            scores=scores,
            times=times,
            layers=layers,
            queries=queries,
            budget_bytes=budget_bytes,
            texts_of=lambda slots: [owner.get(slot) for slot in slots],
        ) as trace:
            trace.tokens = tuple(self.tokens(request) for request in range(len(self.lens)))
            yield trace

    def scores(
        self, layer: int, *, request: int, plan: DecodePlan | None = None, aux: Tensor | None = None
    ) -> ScoreView:
        """Decode a layer and return what each head of a request gives to each of its keys, ready to `show`."""
        wanted = Scores(stages=("weights",), requests=(request,), pool="key")
        with self.record(partials=False, scores=wanted) as trace:
            self.decode(layer, plan, aux=aux)
        return ScoreView.of(trace, layer=layer, request=request)

    def stages(
        self, layer: int, *, request: int, head: int, plan: DecodePlan | None = None, aux: Tensor | None = None
    ) -> StageView:
        """Decode a layer and return what one head's scores go through, stage by stage, ready to `show`."""
        wanted = Scores(stages=STAGES, requests=(request,), heads=(head,), pool="key")
        with self.record(partials=False, scores=wanted) as trace:
            self.decode(layer, plan, aux=aux)
        return StageView.of(trace, layer=layer, request=request, head=head)

    def cached(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """Return the K and V rows that were put into the cache for a request, as given: before any rounding."""
        self._attention(layer)
        content = self._contents[layer][request]
        return content.k, content.v

    def _attention(self, layer: int) -> AttentionSpec:
        if layer not in self.layers:
            filled = _numbered("layer", self.layers)
            raise ValueError(f"layer: the workbench has filled {filled}, got {layer!r}; build it with layers=[{layer}]")
        return self.model.layer(layer).attention


def workbench(
    model: str | ModelSpec,
    *,
    lens: Sequence[int],
    policy: str | SplitPolicy | HostPolicy,
    engine: str | Engine,
    device: torch.device | str = "cpu",
    layers: Sequence[int] | None = None,
    kv_dtype: torch.dtype | None = None,
    page_size: int | None = None,
    context_len: int | None = None,
    multiprocessors: int | None = None,
    max_drafts: int = 1,
    max_requests: int | None = None,
    room: int = 0,
    seed: int = 0,
) -> Workbench:
    """Build a backend over a filled cache: one request for each of `lens`.

    SmolLM2-135M has the recorded queries, keys and values of the trained model in layers 0, 18 and 23, up to 2,048
    tokens. A shorter request is the end of the recorded text: the model had read what comes before, too. Request r
    ends 17 r tokens before the text does (modulo 128), where its length allows. Other layers and models get
    normal numbers of a seed. `layers` are the recorded ones, or one of each kind, unless they are given.
    `multiprocessors` is the device's own, on a CPU an H200's 132. A model by name gets an fp16 cache of pages of one
    slot, and its published context, unless told otherwise; a ModelSpec brings all of these. `room` tokens more may be
    appended to each request by `wb.cache`: the table has columns, and the pool slots, for so many. `max_drafts` is the
    most that a verify step may bring of one request, as of the backend; `max_requests` the most rows of a step, of
    which every branch of a draft is one: as many as `lens` unless it is given.

    >>> wb = workbench("SmolLM2-135M", lens=[2048, 96, 700], policy="seed", engine="eager")
    >>> wb.decode(18).shape
    torch.Size([3, 9, 64])
    >>> wb = workbench("SmolLM2-135M", lens=[96], policy="seed", engine="eager", room=2)
    >>> wb.cache.append(0, 2).tolist()
    [97, 98]
    """
    lens = _lens(lens)
    room, count = whole("room", room), max(1, len(lens))
    require(room >= 0, f"room: expected at least 0 tokens, got {room}")
    requests = count if max_requests is None else positive("max_requests", max_requests)
    require(requests >= count, f"max_requests: expected at least {count}, as there are requests, got {requests}")
    spec = _spec(model, layers, {"kv_dtype": kv_dtype, "page_size": page_size, "context_len": context_len})
    for request, length in enumerate(lens):
        require(
            length <= spec.context_len,
            f"lens: request {request} has {length:,} tokens, beyond the context of {spec.name}, {spec.context_len:,}",
        )
    longest = max([1, *lens]) + room
    require(
        longest <= spec.context_len,
        f"room: with {room:,} tokens more the longest request has {longest:,}, beyond the context of {spec.name}, "
        f"{spec.context_len:,}",
    )
    cache = _storage(spec, [n + room for n in lens], device)
    contents = {layer.index: layer_contents(spec, layer, lens, seed=seed) for layer in spec.layers}
    rows = _fill(spec, cache, contents, lens)
    pool = cache.pool
    there = multiprocessors_of(pool.device) or H200_MULTIPROCESSORS
    backend = AttentionBackend(
        model=spec,
        pool=pool,
        table=cache.table,
        engine=engine,
        policy=policy,
        max_requests=requests,
        # Every row of a draft lists its request's tokens anew.
        max_tokens=None if max_requests is None else max(pool.num_slots, requests * longest),
        multiprocessors=there if multiprocessors is None else multiprocessors,
        max_drafts=max_drafts,
    )
    batch = DecodeBatch.of(rows=rows, lens=lens, device=pool.device)
    return Workbench(backend=backend, cache=cache, batch=batch, lens=lens, contents=contents, seed=seed)


def _lens(lens: Sequence[int]) -> list[int]:
    """Return the lengths as plain ints: numpy's and tensors' are welcome."""
    if not isinstance(lens, Iterable):
        raise TypeError(f"lens: expected a list of lengths, one per request, got {lens!r}")
    return [whole(f"lens: request {request}", length) for request, length in enumerate(lens)]


def _spec(model: str | ModelSpec, layers: Sequence[int] | None, given: dict[str, Any]) -> ModelSpec:
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, ModelSpec):
        require(not given, f"{', '.join(given)}: a ModelSpec brings its own; build it with the value that you want")
        spec = model
    else:
        spec = ModelSpec.load(model, **{"kv_dtype": torch.float16, **given})
    if layers is not None:
        require(not isinstance(layers, int), f"layers: expected a list of layer numbers, got {layers!r}", TypeError)
        return spec.only(tuple(layers))
    if isinstance(model, ModelSpec):
        return spec
    recorded = [layer.index for layer in spec.layers if is_recorded(spec, layer)]
    first_of_kind = {layer.attention: layer.index for layer in reversed(spec.layers)}
    return spec.only(tuple(recorded or sorted(first_of_kind.values())))


def _storage(spec: ModelSpec, lens: Sequence[int], device: torch.device | str) -> PagedCache:
    """Return an empty cache with room for requests of these lengths."""
    pages = 1 + max(1, sum(-(-n // spec.page_size) for n in lens))
    num_slots = pages * spec.page_size
    pool: KVPool = (MLAPool if spec.mla else MHAPool)(spec, num_slots=num_slots, device=device)
    table = RequestTable(
        max_requests=max(1, len(lens)),
        max_context=max([1, *lens]),
        num_slots=num_slots,
        device=device,
        page_size=pool.page_size,
    )
    return PagedCache(table=table, pool=pool)


def _fill(spec: ModelSpec, cache: PagedCache, contents: dict[int, list[LayerSample]], lens: Sequence[int]) -> list[int]:
    """Give every request its slots, store keys and values; return the rows."""
    rows = [cache.admit() for _ in lens]
    for at in range(0, max(lens, default=0), FILL_STEP):
        for row, length in zip(rows, lens, strict=True):
            more = min(FILL_STEP, length - at)
            if more > 0:
                cache.append(row, more)
    pool, table = cache.pool, cache.table
    for layer in spec.layers:
        for row, content in zip(rows, contents[layer.index], strict=True):
            k, v = content.k.to(pool.device), None if spec.mla else content.v.to(pool.device)
            pool.write(layer.pool_layer, table.slots_of(row).long(), k, v)
    return rows


def _last_rows(rows: list[Tensor], heads: int, dim: int, device: torch.device) -> Tensor:
    """Return each request's last row, `[reqs, heads, dim]`; zeros for a request without tokens."""
    nothing = torch.zeros(1, heads, dim)
    return torch.cat([row[-1:] if row.shape[0] else nothing.to(row.dtype) for row in rows] or [nothing[:0]]).to(device)


def _numbered(word: str, numbers: Sequence[int]) -> str:
    """Words for some layers: `layer 5`, `layers 0, 18, 23`."""
    return f"{word}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"
