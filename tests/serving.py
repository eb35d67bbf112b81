"""A small server: requests come, grow, are drafted for and leave; graphs and the eager path run the same steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnlab import graphs
from attnlab.backend import AttentionBackend
from attnlab.batch import Batch, DecodeBatch, DraftBatch, ExtendBatch, VerifyBatch
from attnlab.mask import Causal, CustomMask
from attnlab.memory.cache import PagedCache
from attnlab.memory.mapped_pool import MappedPool
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.draft import DraftPlan, draft_room
from attnlab.plan.plans import Plan
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec

CONTEXT, WINDOW, DRAFTS, TOPK = 96, 7, 3, 2
POOLS = ("plain", "window", "unified", "unified sliding", "mla", "unified mla")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the layers are, and how many requests a step has at most."""

    heads: int = 4
    dim: int = 16
    requests: int = 4
    context: int = CONTEXT
    dtype: torch.dtype = torch.float32
    page_size: int = 2
    extra: dict[str, Any] = field(default_factory=dict)


def model_of(pool: str, size: Size) -> ModelSpec:
    """A layer that sees all keys and one with a window; latent rows where the pool keeps such."""
    mla = pool.endswith("mla")
    dims = {"kv_heads": 1, "qk_dim": size.dim + 16, "v_dim": size.dim} if mla else {}
    plain = {"heads": size.heads, "kv_heads": 2, "qk_dim": size.dim, "v_dim": size.dim, "scale": 0.3}
    specs = [AttentionSpec(**{**plain, **dims, **size.extra, "window": window}) for window in (None, WINDOW)]
    layers = tuple(LayerSpec(index=i, attention=spec, pool_layer=i) for i, spec in enumerate(specs))
    return ModelSpec(
        name="toy",
        layers=layers,
        context_len=size.context,
        page_size=size.page_size,
        kv_dtype=size.dtype,
        mla=mla,
    )


def pool_of(name: str, model: ModelSpec, slots: int, device: str) -> KVPool:
    """A pool of that kind, full of NaN."""
    virtual = slots + 4 * model.page_size
    pools: dict[str, Any] = {
        "plain": lambda: MHAPool(model, num_slots=slots, device=device),
        "window": lambda: WindowPool(model, num_slots=slots, sliding_slots=slots, device=device),
        "unified": lambda: UnifiedPool(model, num_slots=slots, virtual_slots=virtual, device=device),
        "unified sliding": lambda: UnifiedPool(
            model, num_slots=slots, virtual_slots=virtual, sliding_slots=slots, device=device
        ),
        "mla": lambda: MLAPool(model, num_slots=slots, device=device),
        "unified mla": lambda: UnifiedPool(model, num_slots=slots, virtual_slots=virtual, device=device),
    }
    pool: KVPool = pools[name]()
    for layer in model.layers:
        view = pool.view(layer.pool_layer)
        view.k.fill_(float("nan"))
        view.v.fill_(float("nan"))
    return pool


class Server:
    """Requests over one pool, a graph for each mode, and the eager path to hold them to."""

    def __init__(
        self,
        pool: str,
        *,
        engine: str,
        policy: Any,
        device: str,
        seed: int = 0,
        size: Size = Size(),  # noqa: B008 (frozen)
        modes: Sequence[str] = ("decode", "verify", "tree", "extend", "draft"),
        deterministic: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        self.size, self.device, self.random = size, device, random.Random(seed)
        self.model = model_of(pool, size)
        slots = size.page_size * (1 + (size.requests + 1) * (size.context // size.page_size + 1))
        self.pool = pool_of(pool, self.model, slots, device)
        table = RequestTable(
            max_requests=size.requests + 2,
            max_context=size.context,
            num_slots=self.pool.num_slots,
            device=device,
            page_size=self.pool.page_size,
        )
        self.cache = PagedCache(table=table, pool=self.pool)
        self.backend = AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=table,
            engine=engine,
            policy=policy,
            max_requests=size.requests * TOPK,
            max_tokens=self.pool.num_slots * TOPK if max_tokens is None else max_tokens,
            max_drafts=DRAFTS,
            multiprocessors=132,
            deterministic=deterministic,
        )
        self.backend.workspace.fill(float("nan"))
        self.lens: dict[int, int] = {}
        self.numbers = torch.Generator(device).manual_seed(seed)
        n = size.requests
        shapes: dict[str, graphs.Shape] = {
            "decode": graphs.DecodeShape(requests=n),
            "verify": graphs.VerifyShape(requests=n, drafts=DRAFTS),
            "tree": graphs.VerifyShape(requests=n, drafts=DRAFTS, masked=True),
            "extend": graphs.ExtendShape(requests=n, new=DRAFTS),
            "draft": graphs.DraftShape(requests=n, topk=TOPK, steps=DRAFTS),
        }
        self.graphs = {mode: self._captured(shapes[mode]) for mode in modes}

    def _captured(self, shape: graphs.Shape) -> graphs.Graph:
        inputs = self.inputs_of(shape, shape.tokens)
        return graphs.capture(self.backend, self.step, shape, inputs=inputs, rerun=self.device == "cpu")

    def inputs_of(self, shape: graphs.Shape, count: int) -> dict[str, Tensor]:
        """Inputs of a step of so many query tokens: of a draft, those of every step but the last."""
        if not isinstance(shape, graphs.DraftShape):
            return self.tokens(count)
        steps = [self.tokens(count) for _ in range(shape.steps - 1)]
        return {f"{name}.{i}": x for i, step in enumerate(steps) for name, x in step.items()}

    def tokens(self, count: int) -> dict[str, Tensor]:
        """Queries, keys and values of so many tokens in every layer."""
        inputs = {}
        for layer in self.model.layers:
            a = layer.attention
            shapes = {"q": (a.heads, a.qk_dim), "k": (a.kv_heads, a.qk_dim), "v": (a.kv_heads, a.v_dim)}
            for name, shape in shapes.items():
                if name == "v" and self.model.mla:
                    continue
                x = torch.randn(count, *shape, generator=self.numbers, device=self.device)
                inputs[f"{name}{layer.index}"] = x.to(self.size.dtype)
        return inputs

    def step(self, plan: Plan | DraftPlan, **inputs: Tensor) -> tuple[Tensor, ...]:
        """All layers of a step, one after the other; of a draft, all steps."""
        if isinstance(plan, DraftPlan):
            own = [
                {name.partition(".")[0]: x for name, x in inputs.items() if name.endswith(f".{i}")} for i in range(9)
            ]
            return tuple(out for i, step in enumerate(plan.steps) for out in self.step(step, **own[i]))
        outs = []
        for layer in self.model.layers:
            q, k, v = (inputs.get(f"{name}{layer.index}") for name in "qkv")
            assert q is not None
            outs.append(self.backend.forward(layer.index, q, k, v, plan))
        return tuple(outs)

    # --- what happens to requests ---------------------------------------------------------------------------------

    def grow(self, row: int, tokens: int) -> None:
        self.cache.append(row, tokens)
        self.lens[row] += tokens

    def admit(self, tokens: int) -> int:
        """A request whose first tokens are written to every layer."""
        row = self.cache.admit()
        slots = self.cache.append(row, tokens).to(self.device)
        self.lens[row] = tokens
        inputs = self.tokens(tokens)
        for layer in self.model.layers:
            self.pool.write(layer.pool_layer, slots, inputs[f"k{layer.index}"], inputs.get(f"v{layer.index}"))
        return row

    def release(self, row: int) -> None:
        self.cache.release(row)
        del self.lens[row]

    def disturb(self) -> None:
        """Let requests come and go, keys slide out, pages move."""
        most = self.size.context - 2 * DRAFTS - TOPK * (DRAFTS + 2 * self.size.page_size)
        for row in list(self.lens):
            if self.lens[row] > most or self.random.random() < 0.1:
                self.release(row)
        while len(self.lens) < self.size.requests and self.random.random() < 0.7:
            self.admit(self.random.randint(1, most))
        if isinstance(self.pool, MappedPool) and self.random.random() < 0.3:
            for row, length in self.lens.items():
                if self.slides:
                    self.cache.slide_out(row, query=length - 1)
        if isinstance(self.pool, UnifiedPool) and self.random.random() < 0.3:
            self.pool.compact()

    @property
    def slides(self) -> bool:
        return any(self.pool.translation(layer.pool_layer).target == "sliding" for layer in self.model.layers)

    def some_rows(self) -> list[int]:
        rows = list(self.lens)
        self.random.shuffle(rows)
        return rows[: self.random.randint(0, len(rows))]

    # --- steps ----------------------------------------------------------------------------------------------------

    def batch(self, mode: str, rows: list[int]) -> Any:
        """A step of that mode for these requests, whose new tokens have their slots."""
        lens = [self.lens[row] for row in rows]
        if mode == "draft":
            for row, n in zip(rows, lens, strict=True):
                self.grow(row, draft_room(n, topk=TOPK, steps=DRAFTS, page_size=self.size.page_size))
            return DraftBatch.of(rows=rows, lens=lens, topk=TOPK, steps=DRAFTS, device=self.device)
        if mode == "decode":
            for row in rows:
                self.grow(row, 1)
            return DecodeBatch.of(rows=rows, lens=[n + 1 for n in lens], device=self.device)
        new = [self.random.randint(1, DRAFTS) if mode == "extend" else DRAFTS for _ in rows]
        for row, n in zip(rows, new, strict=True):
            self.grow(row, n)
        if mode == "extend":
            return ExtendBatch.of(rows=rows, prefix=lens, new=new, device=self.device)
        if mode == "tree" and self.random.random() < 0.8:
            parents = [self.random.choice([[-1, 0, 0], [-1, 0, 1]]) for _ in rows]
            return VerifyBatch.tree(rows=rows, prefix=lens, parents=parents, device=self.device)
        return VerifyBatch.chain(rows=rows, prefix=lens, drafts=DRAFTS, device=self.device)

    def settle(self, mode: str, batch: Any, rows: list[int]) -> None:
        """Accept some of the drafts of a verify, and drop those that nobody verified, as a server would."""
        if isinstance(batch, DraftBatch):
            for row, n in zip(rows, batch.seq.least_each, strict=True):
                self.cache.truncate(row, n)
                self.lens[row] = n
        if not isinstance(batch, VerifyBatch):
            return
        for row in rows:
            path = self.random.choice([[], [0], [0, 1]])
            self.cache.accept(row, prefix=self.lens[row] - DRAFTS, path=path)
            self.lens[row] += len(path) - DRAFTS
            if self.lens[row] == 0:
                self.release(row)

    def run(self, steps: int) -> list[str]:
        """Run steps of all modes; every output of a replay is the eager path's, bit for bit. Return the modes."""
        modes = []
        for _ in range(steps):
            self.disturb()
            mode = self.random.choice(list(self.graphs))
            rows = self.some_rows()
            batch = self.batch(mode, rows)
            inputs = self.inputs_of(self.graphs[mode].shape, self.graphs[mode].shape.live(batch))
            replayed = [x.clone() for x in self.graphs[mode].run(batch, **inputs)]
            wanted = self.eagerly(mode, batch, inputs)
            for got, want in zip(replayed, wanted, strict=True):
                assert got.shape == want.shape and torch.equal(got, want), (mode, rows, self.lens)
                assert bool(torch.isfinite(got).all())
            self.settle(mode, batch, rows)
            modes.append(mode)
        return modes

    def eagerly(self, mode: str, batch: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
        """The same step by a plan of its own, padded to as many requests, so that a policy cuts it the same."""
        graph = self.graphs[mode]
        padded = pad(batch, graph.shape.requests, masked=graph.mask is not None)
        tokens = {
            name: torch.cat([x, x.new_zeros(padded_tokens(padded) - x.shape[0], *x.shape[1:])])
            for name, x in inputs.items()
        }
        outs = self.step(self.backend.plan(padded), **tokens)
        return [out[: next(iter(inputs.values())).shape[0]] for out in outs]


def padded_tokens(batch: Batch | DraftBatch) -> int:
    match batch:
        case DraftBatch():
            return batch.branches
        case DecodeBatch():
            return batch.seq.count
        case ExtendBatch():
            return batch.new.bound_total
        case VerifyBatch():
            return batch.drafts.bound_total


def causal_bits(batch: Batch) -> CustomMask:
    """The mask of a batch without one, bit by bit: other tiles serve a batch with a mask."""
    assert isinstance(batch, ExtendBatch | VerifyBatch)
    new = batch.new if isinstance(batch, ExtendBatch) else batch.drafts
    pairs = zip(batch.prefix.least_each, new.least_each, strict=True)
    bits = CustomMask.of([torch.ones(n, p + n, dtype=torch.bool).tril(p) for p, n in pairs]).bits
    return CustomMask(bits=bits.to(batch.prefix.device.device), cached_visible=isinstance(batch, VerifyBatch))


def pad(batch: Any, requests: int, *, masked: bool) -> Any:
    """The same step with rows of length 0 behind it; where `masked`, with the bits of its mask."""
    rows = [*batch.rows.tolist(), *[0] * (requests - batch.rows.shape[0])]
    device = (batch.seq if isinstance(batch, DecodeBatch | DraftBatch) else batch.prefix).device.device

    def more(lens: Any) -> list[int]:
        return [*lens.values, *[0] * (requests - lens.count)]

    match batch:
        case DraftBatch():
            return DraftBatch.of(rows=rows, lens=more(batch.seq), topk=batch.topk, steps=batch.steps, device=device)
        case DecodeBatch():
            return DecodeBatch.of(rows=rows, lens=more(batch.seq), device=device)
        case ExtendBatch():
            mask = causal_bits(batch) if masked and isinstance(batch.mask, Causal) else batch.mask
            return ExtendBatch.of(rows=rows, prefix=more(batch.prefix), new=more(batch.new), device=device, mask=mask)
        case VerifyBatch():
            mask = causal_bits(batch) if masked and isinstance(batch.mask, Causal) else batch.mask
            chain = VerifyBatch.chain(rows=rows, prefix=more(batch.prefix), drafts=more(batch.drafts), device=device)
            return VerifyBatch(
                rows=chain.rows,
                prefix=chain.prefix,
                drafts=chain.drafts,
                depth=batch.depth,
                mask=mask,
                ordered=batch.ordered and not masked,
            )
