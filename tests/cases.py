"""Named decode cases, each with one reason to exist, and the stand that runs one and asks the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch
from attnlab.eager import oracle
from attnlab.engines import engine_for
from attnlab.memory.pool import KVPool, KVView
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.mods.registry import score_mods
from attnlab.plan.call import DecodeCall
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.policy import HostPolicy, SplitBounds, SplitPolicy, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import splits_of_sizes
from attnlab.plan.workspace import Workspace
from attnlab.spec import AttentionSpec, ModelSpec, ScoreMod
from tests.tolerances import LSE, output

ENGINES = [("eager", "cpu"), ("triton", "cpu")] if INTERPRETED else [("eager", "cuda"), ("triton", "cuda")]
FP8 = torch.float8_e4m3fn


def device_of(engine: str, device: str, *, deterministic: bool) -> torch.device:
    """Where a backend of this engine lies: deterministic and eager is for the CPU alone."""
    return torch.device("cpu" if engine == "eager" and deterministic else device)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's attention and what keeps its keys: what every kind of case has. `why` says what no other case catches.

    `mod` names a registered modifier, or is one. `paged_table`: the table keeps requests in the pool's pages.
    """

    id: str
    why: str
    heads: int = 8
    kv_heads: int = 2
    qk_dim: int = 32
    v_dim: int = 32
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    temperature_len: int | None = None
    mod: str | ScoreMod | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    k_scale: float = 1.0
    v_scale: float = 1.0
    mla: bool = False
    page_size: int = 1
    paged_table: bool = True
    pool: str = "plain"
    layout: str = "slots"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            scale=self.qk_dim**-0.5 if self.scale is None else self.scale,
            causal=self.causal,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            temperature_len=self.temperature_len,
            mod=score_mods.get(self.mod) if isinstance(self.mod, str) else self.mod,
            has_sinks=self.sinks,
        )

    def model(self, context: int) -> ModelSpec:
        """Two such layers. Where they see part of the keys the first sees all, so that a plan has two lanes."""
        model = ModelSpec.uniform(
            self.spec, layers=2, context_len=context, page_size=self.page_size, kv_dtype=self.kv_dtype, mla=self.mla
        )
        first, second = model.layers
        wide = replace(first.attention, window=None, chunk=None)
        return replace(model, layers=(replace(first, attention=wide), second))

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Case(Layer):
    """A decode call."""

    lens: tuple[int, ...] = (5, 64, 200, 1)
    policy: str | SplitPolicy | HostPolicy = "seed"


CASES = [
    Case(id="toy", why="the batch of the notebooks: uneven lengths, one of a single key"),
    Case(id="empty-rows", why="requests of length 0 beside others", lens=(0, 33, 0, 1, 0)),
    Case(id="one-key", why="a single key is its own softmax", lens=(1,)),
    Case(id="split-borders", why="lengths at the 32-key border", lens=(31, 32, 33, 63, 64, 65), policy="static"),
    Case(id="last-split-of-one", why="257 keys in 8 splits end in a range of one", lens=(257,), policy="static"),
    Case(id="tile-borders", why="lengths at the tile border", lens=(255, 256, 257), policy="tile"),
    Case(id="mha", why="one query head a program", heads=4, kv_heads=4),
    Case(id="mqa", why="one KV head for all", heads=8, kv_heads=1),
    Case(id="group-3", why="a group that is no power of two (SmolLM2)", heads=9, kv_heads=3, qk_dim=64, v_dim=64),
    Case(id="group-5", why="a group of 5 (Llama 4)", heads=10, kv_heads=2),
    Case(id="group-20", why="more than one head tile a group, the last one partly empty", heads=40, kv_heads=2),
    Case(id="group-24", why="as group-20, at another remainder", heads=48, kv_heads=2),
    Case(id="group-32", why="two full head tiles", heads=64, kv_heads=2),
    Case(id="dim-80", why="64 + 16 columns", qk_dim=80, v_dim=80),
    Case(id="dim-96", why="64 + 32 columns", qk_dim=96, v_dim=96),
    Case(id="dim-13", why="padded to 16", qk_dim=13, v_dim=13),
    Case(id="dim-112", why="padded to 128", qk_dim=112, v_dim=112),
    Case(id="qk-192-v-128", why="q and v dims differ", qk_dim=192, v_dim=128),
    Case(id="mha-dim-80", why="two column tiles without a dot", heads=2, kv_heads=2, qk_dim=80, v_dim=80),
    Case(id="pages-4", why="page-major buffer with a page stride of its own", page_size=4, layout="pages"),
    Case(id="pages-16-mha", why="as pages-4, one query head a program", page_size=16, layout="pages", heads=2),
    Case(id="pages-1", why="page-major with one slot a page", page_size=1, layout="pages"),
    Case(id="page-4-by-slot", why="pages in the allocator only", page_size=4),
    Case(id="softcap", why="cap after the scale", softcap=5.0),
    Case(id="temperature", why="scores grow past a length", temperature_len=32),
    Case(id="alibi", why="a modifier without an aux tensor", mod="alibi"),
    Case(id="bias", why="a modifier with its aux tensor", mod="relative_bias"),
    Case(id="bias-mha", why="the same, one query head a program", mod="relative_bias", heads=2, kv_heads=2),
    Case(id="sinks", why="sinks join the denominator once, empty rows included", sinks=True, lens=(0, 300, 7)),
    Case(id="scales", why="K and V scales that differ from 1 and from each other", k_scale=0.5, v_scale=0.25),
    Case(
        id="everything",
        why="the whole pipeline in its order",
        softcap=5.0,
        temperature_len=32,
        mod="relative_bias",
        sinks=True,
        k_scale=0.5,
        v_scale=0.25,
        page_size=4,
        layout="pages",
    ),
    Case(id="mla-576", why="512 + 64 columns, V is the K tile", heads=16, kv_heads=1, qk_dim=576, v_dim=512, mla=True),
    Case(id="mla-288", why="256 + 32 columns", heads=20, kv_heads=1, qk_dim=288, v_dim=256, mla=True),
    Case(id="mla-odd", why="V in K, but not its main tile", heads=4, kv_heads=1, qk_dim=48, v_dim=24, mla=True),
    Case(id="fp16", why="half precision", dtype=torch.float16, kv_dtype=torch.float16),
    Case(
        id="bf16",
        why="bfloat16, which the interpreter cannot compute in",
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
    ),
    Case(id="fp8", why="fp8 cache with scales", dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.05, v_scale=0.2),
    Case(id="fp8-pages", why="fp8, page-major", kv_dtype=FP8, k_scale=0.05, v_scale=0.2, page_size=4, layout="pages"),
    Case(
        id="fp8-mla",
        why="fp8 latent rows",
        heads=16,
        kv_heads=1,
        qk_dim=576,
        v_dim=512,
        mla=True,
        dtype=torch.bfloat16,
        kv_dtype=FP8,
        k_scale=0.05,
        v_scale=0.05,
    ),
    Case(id="window-1", why="a query that sees itself alone", window=1),
    Case(id="window", why="lengths at the window's border, and a long one", window=64, lens=(63, 64, 65, 300, 0, 1)),
    Case(id="window-beyond", why="a window that hides nothing", window=500),
    Case(id="chunk", why="block-local attention at the chunk's border", chunk=64, lens=(63, 64, 65, 128, 129, 300)),
    Case(
        id="window-everything",
        why="positions stay global where a list begins late",
        window=40,
        lens=(39, 200, 41),
        softcap=5.0,
        temperature_len=32,
        mod="relative_bias",
        sinks=True,
        k_scale=0.5,
        v_scale=0.25,
        page_size=4,
    ),
    Case(id="window-alibi", why="a modifier of absolute positions in a window", window=40, lens=(300, 8), mod="alibi"),
    Case(id="window-pool", why="sliding layers in a storage of their own", window=40, page_size=4, pool="window"),
    Case(id="unified", why="virtual slots", page_size=4, pool="unified"),
    Case(id="unified-window", why="virtual slots, two storages", window=40, page_size=4, pool="unified"),
    Case(
        id="unified-mla",
        why="dense ids into an envelope of several layers",
        heads=16,
        kv_heads=1,
        qk_dim=48,
        v_dim=32,
        mla=True,
        page_size=4,
        pool="unified",
    ),
]


class Stand:
    """A case, built: a pool full of NaN in which the live slots alone hold numbers, in shuffled pages."""

    def __init__(self, case: Case, engine: str, device: str) -> None:
        self.case, self.device = case, torch.device(device)
        rng = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
        self.spec = case.spec
        context = max(*case.lens, 1)
        self.model = case.model(context)
        self.pool, self.table, self.rows = storage(case, self.model, case.lens, context + 3, self.device, rng)
        self.backend = AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=self.table,
            engine=engine,
            policy=case.policy,
            max_requests=len(case.lens),
            multiprocessors=132,
        )
        self.backend.workspace.fill(float("nan"))
        self._draw(rng)

    def _draw(self, rng: torch.Generator) -> None:
        case, spec = self.case, self.spec
        reqs = len(case.lens)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng)

        self.q = randn(reqs, spec.heads, spec.qk_dim).to(self.device, case.dtype)
        self.k = [randn(n, spec.kv_heads, spec.qk_dim).to(self.device) for n in case.lens]
        self.v = [
            k[..., : spec.v_dim] if case.mla else randn(k.shape[0], spec.kv_heads, spec.v_dim).to(self.device)
            for k in self.k
        ]
        self.sinks = randn(spec.heads).to(self.device) if case.sinks else None
        needs_aux = spec.mod is not None and spec.mod.needs_aux
        self.aux = randn(reqs, spec.heads, 16).to(self.device) if needs_aux else None
        for layer in range(2):
            for row, k, v in zip(self.rows, self.k, self.v, strict=True):
                self.pool.write(layer, self.table.slots_of(row).long(), k, None if case.mla else v)

    @property
    def batch(self) -> DecodeBatch:
        return DecodeBatch.of(rows=self.rows, lens=self.case.lens, device=self.device)

    def plan(self) -> DecodePlan:
        return self.backend.plan(self.batch)

    def run(self, plan: DecodePlan | None = None, *, keeps: bool = False) -> tuple[Tensor, Tensor]:
        """Decode layer 1; return output and LSE."""
        lse = torch.full((len(self.case.lens), self.spec.heads), float("nan"), device=self.device)
        out = torch.full((*lse.shape, self.spec.v_dim), float("nan"), dtype=self.case.dtype, device=self.device)
        made = self.plan() if plan is None else plan
        args = {"sinks": self.sinks, "aux": self.aux, "save": False, "out": out, "lse": lse, "keeps": keeps}
        self.backend.decode(1, self.q, None, None, made, **args)
        return out, lse

    def stored(self, x: Tensor, scale: float) -> Tensor:
        """What the cache keeps of a row."""
        return kept(x, scale, self.case.kv_dtype)

    def expected(self) -> tuple[Tensor, Tensor]:
        """What the fp64 oracle says, on the same rounded inputs."""
        case = self.case
        v_scale = case.k_scale if case.mla else case.v_scale
        rows = [
            oracle.attention(
                self.q[r],
                self.stored(self.k[r], case.k_scale),
                self.stored(self.v[r], v_scale),
                scale=self.spec.scale,
                softcap=case.softcap,
                temperature_len=case.temperature_len,
                modify=MODIFY[case.mod](r, self.aux),
                sinks=self.sinks,
                window=case.window,
                chunk=case.chunk,
            )
            for r in range(len(case.lens))
        ]
        return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])

    def check(self) -> None:
        """Run and compare with the oracle; name the worst place."""
        (out, lse), (want_out, want_lse) = self.run(), self.expected()
        torch.testing.assert_close(out.double(), want_out, **output(self.case.dtype, self.case.softcap))
        torch.testing.assert_close(lse.double(), want_lse, **LSE)


def storage(
    case: Layer, model: ModelSpec, lens: Sequence[int], columns: int, device: torch.device, rng: torch.Generator
) -> tuple[KVPool, RequestTable, list[int]]:
    """A pool full of NaN, a table whose requests lie in shuffled pages with holes between, and their rows."""
    size = case.page_size
    pages = [-(-n // size) for n in lens]
    num_slots = (2 * sum(pages) + 3) * size
    pool = make_pool(case, model, num_slots, device)
    table = RequestTable(
        max_requests=len(lens) + 2,
        max_context=columns,
        num_slots=num_slots,
        device=device,
        page_size=size if case.paged_table else 1,
    )
    table.admit()  # row 0 stays empty: rows and request numbers differ
    rows = [table.admit() for _ in lens]
    turns = torch.tensor([r for r, n in enumerate(pages) for _ in range(n)])
    span = case.window or case.chunk
    pool.allocator.allocate("gone", size)
    for r in turns[torch.randperm(len(turns), generator=rng)].tolist():
        pool.allocator.allocate("hole", size)
        if span is not None and case.pool != "plain":
            pool.slide_out("hole", query=pool.allocator.tokens_of("hole") + span)
        more = min(size, lens[r] - table.length(rows[r]))
        table.append(rows[r], pool.allocator.allocate(rows[r], more))
    pool.allocator.release("gone")
    if isinstance(pool, UnifiedPool):
        pool.compact()  # now no id space agrees with another
    for layer in range(2):
        for x in (pool.view(layer).k, pool.view(layer).v):
            poison(x)
    return pool, table, rows


def make_pool(case: Layer, model: ModelSpec, num_slots: int, device: torch.device) -> KVPool:
    """The pool that a case names. What lies behind the table's slots is a page smaller."""
    smaller = num_slots - case.page_size
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    if case.pool == "window":
        return WindowPool(model, num_slots=num_slots, sliding_slots=smaller, device=device, **scales)
    if case.pool == "unified":
        sliding = smaller if case.spec.sight.partial else None
        return UnifiedPool(
            model, num_slots=smaller, virtual_slots=num_slots, sliding_slots=sliding, device=device, **scales
        )
    if case.mla:
        return MLAPool(model, num_slots=num_slots, device=device, scale=case.k_scale)
    return MHAPool(model, num_slots=num_slots, device=device, layout=case.layout, **scales)


def kept(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What a cache of that dtype keeps of rows, fp64: rounded by plain torch."""
    scaled = x if scale == 1.0 else x.float() / scale
    scaled = scaled.float().clamp(-448, 448) if dtype == FP8 else scaled
    return scaled.to(dtype).double() * scale


def _no_mod(request: int, aux: Tensor | None) -> None:
    return None


def _alibi(request: int, aux: Tensor | None) -> oracle.Modify:
    return lambda scores, q_pos, kv_pos, head: scores - 0.5 ** (head + 1) * (q_pos - kv_pos)


def _bias(request: int, aux: Tensor) -> oracle.Modify:
    def modify(scores: Tensor, q_pos: int, kv_pos: Tensor, head: int) -> Tensor:
        biased = scores.clone()
        for j, position in enumerate(kv_pos.tolist()):
            if 0 <= q_pos - position < aux.shape[2]:
                biased[j] += aux[request, head, q_pos - position].double()
        return biased

    return modify


# The oracle's own modifiers, by name: written apart from the registered ones.
MODIFY = {None: _no_mod, "alibi": _alibi, "relative_bias": _bias}


def lane_of(slots: Tensor, kv_heads: int, *, splits: int = 8) -> Lane:
    """One request that reads these slots, cut into so many ranges."""
    indptr = torch.tensor([0, slots.shape[0]], dtype=torch.int32, device=slots.device)
    lens = indptr.diff()
    plan = splits_of_sizes(
        SplitSizes.of_counts(lens, torch.full_like(lens, splits)),
        lens,
        policy="static",
        bounds=SplitBounds(max_ranges=splits, min_size=32),
        total=slots.shape[0],
    )
    return Lane(
        layout=KVLayout.full(KVIndex(indptr=indptr, slots=slots, space="pool")),
        splits=plan,
        schedule=Schedule.one_range_a_program(plan, kv_heads=kv_heads),
        write_slots=torch.zeros(1, dtype=torch.int64, device=slots.device),
    )


def decode_one(
    engine: str, spec: AttentionSpec, view: KVView, slots: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Decode one request straight from a view; return q and the output."""
    lane, device = lane_of(slots, spec.kv_heads), slots.device
    work = Workspace(
        max_ranges=lane.splits.capacity, max_drafts=1, heads=spec.heads, v_dims={spec.v_dim}, device=device
    )
    partials = work.partials(count=lane.schedule.partials, group=spec.group, v_dim=spec.v_dim)
    q = torch.randn(1, spec.heads, spec.qk_dim, device=device).to(dtype)
    out = torch.full((1, spec.heads, spec.v_dim), float("nan"), dtype=dtype, device=device)
    call = DecodeCall(layer=0, spec=spec, view=view, lane=lane, partials=partials, q=q, out=out)
    engine_for(engine, device).decode(call)
    return q[0], out[0]


def poison(x: Tensor) -> None:
    """Fill storage with NaN."""
    if x.dtype == FP8:
        x.view(torch.uint8).fill_(0x7F)
    else:
        x.fill_(float("nan"))
