"""Named extend and verify cases, each with one reason to exist, and the stand that runs one and asks the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, ExtendBatch, VerifyBatch
from attnlab.eager import oracle
from attnlab.kernels import extend_hopper
from attnlab.mask import CustomMask
from attnlab.plan.extend_call import ExtendCall
from tests.cases import FP8, MODIFY, Layer, device_of, kept, poison, storage
from tests.tolerances import LSE, output

CONTEXT = 512
"""Positions of a request's longest context."""


Part = tuple[int, int, int]
"""A request's number, and its first and last position (not included) that are computed."""


@dataclass(frozen=True, kw_only=True)
class Case(Layer):
    """An extend call, or with a mask "tree" or "chain" a verify call.

    `sinks` are drawn `sink_size` wide, requests lie in the pool as the seed `placement` has it. `one_pass`: the
    backend is deterministic. `read_back`: the new tokens' keys come from the pool, not with the call.
    """

    heads: int = 4
    prefix: tuple[int, ...] = (0, 37, 130, 5)
    new: tuple[int, ...] = (70, 9, 1, 0)
    mask: str | None = None
    cached_visible: bool = False
    policy: str = "tile"
    one_pass: bool = False
    read_back: bool = False
    sink_size: float = 1.0
    placement: int = 0

    @property
    def verifies(self) -> bool:
        return self.mask in ("tree", "chain")

    @property
    def lens(self) -> list[int]:
        return [p + n for p, n in zip(self.prefix, self.new, strict=True)]


CASES = [
    Case(id="toy", why="a prefill, a chunk, a decode and a padded row in one batch"),
    Case(id="prefill", why="nothing cached", prefix=(0, 0), new=(65, 3)),
    Case(id="query-tiles", why="queries at the border of a tile", prefix=(3, 3, 3), new=(63, 64, 65)),
    Case(id="key-tiles", why="cached keys at the border of a tile", prefix=(127, 128, 129), new=(2, 2, 2)),
    Case(id="not-causal", why="new tokens see those behind them", causal=False),
    Case(id="mha", why="one query head a KV head", heads=4, kv_heads=4),
    Case(id="group-5", why="a group that is no power of two", heads=10, kv_heads=2),
    Case(id="dim-80", why="64 + 16 columns", qk_dim=80, v_dim=80),
    Case(id="dim-13", why="padded to 16", qk_dim=13, v_dim=13),
    Case(id="qk-192-v-128", why="128 + 64 columns, q and v dims differ", qk_dim=192, v_dim=128, prefix=(9,), new=(5,)),
    Case(id="pages", why="page-major, virtual slots", page_size=4, pool="unified"),
    Case(id="window-1", why="a query that sees itself alone", window=1),
    Case(id="window", why="windows that end in the prefix and in the new tokens", window=40),
    Case(id="window-not-causal", why="a window to both sides (B53)", window=20, causal=False),
    Case(id="window-endless", why="positions plus window do not fit 32 bits", window=2**31 - 1, causal=False),
    Case(id="window-pool", why="sliding layers in a storage of their own", window=40, page_size=4, pool="window"),
    Case(id="chunk", why="a prompt that crosses a chunk's border", chunk=32),
    Case(id="chunk-mask", why="a mask within a chunk", chunk=32, mask="random"),
    Case(id="chunk-window", why="the nearer of two bounds", chunk=32, window=20),
    Case(id="softcap", why="cap after the scale", softcap=5.0),
    Case(id="temperature", why="positions are global", temperature_len=32, window=40),
    Case(id="alibi", why="a modifier of positions", mod="alibi"),
    Case(id="bias", why="a modifier with a row for each query token", mod="relative_bias"),
    Case(id="sinks", why="sinks join the denominator once", sinks=True),
    Case(id="scales", why="scales of the cached part alone", k_scale=0.5, v_scale=0.25),
    Case(id="mask", why="a mask decides, in the prefix too, and beyond the query's own tile", mask="random"),
    Case(id="mask-far", why="a mask shows keys beyond the query's own tile", mask="random", prefix=(5,), new=(150,)),
    Case(id="mask-window", why="a mask within a window that was clipped", mask="random", window=40),
    Case(id="mask-new", why="a mask of new keys alone", mask="random", cached_visible=True),
    Case(id="mask-new-window", why="a mask of new keys in a window", mask="random", cached_visible=True, window=40),
    Case(id="mask-nothing", why="queries that see no key", mask="some rows hidden"),
    Case(id="mask-nothing-sinks", why="queries that see no key, beside a sink", mask="some rows hidden", sinks=True),
    Case(id="tree", why="drafts see their ancestors", mask="tree", prefix=(8, 200, 0), new=(7, 12, 3)),
    Case(id="tree-window", why="a window by depth", mask="tree", prefix=(8, 200), new=(7, 12), window=6),
    Case(id="chain", why="drafts of a chain", mask="chain", prefix=(8, 200, 0), new=(4, 4, 4)),
    Case(
        id="everything",
        why="the whole pipeline in its order",
        window=40,
        softcap=5.0,
        temperature_len=32,
        mod="relative_bias",
        sinks=True,
        k_scale=0.5,
        v_scale=0.25,
        page_size=4,
        pool="unified",
    ),
    Case(id="read-back", why="keys of the new tokens out of the pool", read_back=True, k_scale=0.5, v_scale=0.25),
    Case(id="mla", why="latent rows: V in K", heads=4, kv_heads=1, qk_dim=48, v_dim=32, mla=True),
    Case(
        id="mla-dense", why="dense ids", heads=4, kv_heads=1, qk_dim=48, v_dim=32, mla=True, pool="unified", page_size=4
    ),
    Case(id="one-pass", why="one list of cached and new keys", one_pass=True),
    Case(id="one-pass-window", why="padding in front of a list is not seen", one_pass=True, window=40),
    Case(
        id="one-pass-window-from-a-tiles-end",
        why="a window that begins with the last key of a tile, or beside it",
        one_pass=True,
        window=4,
        prefix=(129, 130, 131, 258),
        new=(2, 2, 2, 2),
    ),
    Case(id="one-pass-not-causal", why="one list, no causality", one_pass=True, causal=False),
    Case(id="one-pass-chunk", why="tiles before a chunk's border", one_pass=True, chunk=32),
    Case(id="one-pass-mask", why="one list, a mask", one_pass=True, mask="random", window=100),
    Case(id="one-pass-mask-new", why="one list, a mask of new keys", one_pass=True, mask="random", cached_visible=True),
    Case(id="one-pass-scales", why="all keys are scaled", one_pass=True, k_scale=0.5, v_scale=0.25, sinks=True),
    Case(id="fp16", why="half precision", dtype=torch.float16, kv_dtype=torch.float16),
    Case(
        id="bf16",
        why="bfloat16, which the interpreter cannot compute in",
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
    ),
    Case(id="fp8", why="an fp8 cache with scales", dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.05, v_scale=0.2),
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a call computes on, request by request: q and aux of its new tokens, k and v of all, and who sees whom."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    aux: list[Tensor] | None
    sinks: Tensor | None
    parents: list[list[int]]
    bits: list[Tensor]

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Inputs:
        """What the case's id, as a seed, makes of it."""
        spec, rng = case.spec, torch.Generator().manual_seed(zlib.crc32(case.id.encode()))

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(device)

        k = [randn(n, spec.kv_heads, spec.qk_dim).to(case.dtype) for n in case.lens]
        v = [
            x[..., : spec.v_dim] if case.mla else randn(x.shape[0], spec.kv_heads, spec.v_dim).to(case.dtype) for x in k
        ]
        q = [randn(n, spec.heads, spec.qk_dim).to(case.dtype) for n in case.new]
        sinks = randn(spec.heads) * case.sink_size if case.sinks else None
        needs_aux = spec.mod is not None and spec.mod.needs_aux
        aux = list(randn(sum(case.new), spec.heads, 16).split(case.new)) if needs_aux else None
        parents = [[-1, *(int(torch.randint(i, (), generator=rng)) for i in range(1, n))][:n] for n in case.new]
        bits = [torch.rand(n, p + n, generator=rng) < 0.6 for p, n in zip(case.prefix, case.new, strict=True)]
        if case.mask == "some rows hidden":
            bits = [each & (torch.arange(each.shape[0]) % 3 > 0)[:, None] for each in bits]
        return cls(q=q, k=k, v=v, aux=aux, sinks=sinks, parents=parents, bits=bits)

    def pick(self, requests: Sequence[int]) -> Inputs:
        """Those of some requests, in this order."""
        q, k, v, parents, bits = (
            [each[r] for r in requests] for each in (self.q, self.k, self.v, self.parents, self.bits)
        )
        aux = None if self.aux is None else [self.aux[r] for r in requests]
        return Inputs(q=q, k=k, v=v, aux=aux, sinks=self.sinks, parents=parents, bits=bits)


class Stand:
    """A case, built: a pool full of NaN in which cached tokens alone hold numbers."""

    def __init__(self, case: Case, engine: str, device: str, inputs: Inputs | None = None) -> None:
        self.case, self.device = case, device_of(engine, device, deterministic=case.one_pass)
        self.spec, self.model = case.spec, case.model(CONTEXT)
        placement = torch.Generator().manual_seed(case.placement)
        self.pool, table, self.rows = storage(case, self.model, case.lens, CONTEXT, self.device, placement)
        self.backend = AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=table,
            engine=engine,
            policy=case.policy,
            max_requests=len(case.lens),
            max_drafts=max(16, *case.new),
            multiprocessors=132,
            deterministic=case.one_pass,
        )
        self.backend.workspace.fill(float("nan"))
        self._store(Inputs.of(case, self.device) if inputs is None else inputs)

    def restart(self, case: Case) -> None:
        """Go on with a case of other lengths: its rows have room in the table, all else is as it was."""
        self.case = case
        for layer in range(2):
            for x in (self.pool.view(layer).k, self.pool.view(layer).v):
                poison(x)
        self._store(Inputs.of(case, self.device))

    def _store(self, inputs: Inputs) -> None:
        """Take these inputs, and store those that are cached."""
        self.inputs, case = inputs, self.case
        for r, held in enumerate(case.lens if case.read_back else case.prefix):
            self.cache(r, held)

    def cache(self, request: int, held: int) -> None:
        """Store the first `held` tokens of a request, in both layers."""
        slots = self.backend.table.slots_of(self.rows[request])[:held].long()
        k, v = self.inputs.k[request][:held], self.inputs.v[request][:held]
        for layer in range(2):
            self.pool.write(layer, slots, k, None if self.case.mla else v)

    def share(self, tokens: int) -> None:
        """Let request 1 begin with the first `tokens` of request 0: the same slots, in whole pages, hold them."""
        table, (first, second) = self.backend.table, self.rows[:2]
        own = table.slots_of(second).clone()
        table.truncate(second, 0)
        table.append(second, torch.cat([table.slots_of(first)[:tokens], own[tokens:]]))
        for x in (self.inputs.k, self.inputs.v):
            x[1][:tokens] = x[0][:tokens]
        for layer in range(2):
            for name in ("k", "v"):
                x = getattr(self.pool.view(layer), name)
                x.view(-1, *x.shape[-2:])[own[:tokens].long()] = float("nan")

    @property
    def batch(self) -> ExtendBatch | VerifyBatch:
        case = self.case
        common: dict[str, Any] = {"rows": self.rows, "prefix": case.prefix, "device": self.device}
        if case.mask == "tree":
            return VerifyBatch.tree(parents=self.inputs.parents, **common)
        if case.mask == "chain":
            return VerifyBatch.chain(drafts=list(case.new), **common)
        if case.mask is None:
            return ExtendBatch.of(new=case.new, **common)
        bits = CustomMask.of(self.inputs.bits).bits.to(self.device)
        mask = CustomMask(bits=bits, cached_visible=case.cached_visible)
        return ExtendBatch.of(new=case.new, mask=mask, **common)

    @property
    def parts(self) -> list[Part]:
        """What the case computes: the new tokens of every request."""
        return [(r, p, p + n) for r, (p, n) in enumerate(zip(self.case.prefix, self.case.new, strict=True))]

    def new(self, parts: Sequence[Part] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of these tokens, as a call takes them; by default of all new ones."""
        given, prefix = self.parts if parts is None else parts, self.case.prefix
        q = [self.inputs.q[r][first - prefix[r] : last - prefix[r]] for r, first, last in given]
        k = [self.inputs.k[r][first:last] for r, first, last in given]
        v = [self.inputs.v[r][first:last] for r, first, last in given]
        return torch.cat(q), torch.cat(k), torch.cat(v)

    def aux(self, parts: Sequence[Part]) -> Tensor | None:
        """What the modifier reads of these tokens."""
        aux, prefix = self.inputs.aux, self.case.prefix
        if aux is None:
            return None
        return torch.cat([aux[r][first - prefix[r] : last - prefix[r]] for r, first, last in parts])

    def run(self, call: str = "extend") -> tuple[Tensor, Tensor]:
        """Run the case in layer 1 by the backend's method of that name; return output and LSE."""
        return self._attend(call, self.batch, self.parts)

    def step(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Extend by these tokens alone, in one causal batch; what stands before them must be cached."""
        batch = ExtendBatch.of(
            rows=[self.rows[r] for r, _, _ in parts],
            prefix=[first for _, first, _ in parts],
            new=[last - first for _, first, last in parts],
            device=self.device,
        )
        return self._attend("extend", batch, parts)

    def _attend(self, call: str, batch: ExtendBatch | VerifyBatch, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        q, k, v = self.new(parts)
        out, lse = self._room(q)
        given = (None, None) if self.case.read_back else (k, None if self.case.mla else v)
        attend, plan = getattr(self.backend, call), self.backend.plan(batch)
        attend(1, q, *given, plan, sinks=self.inputs.sinks, aux=self.aux(parts), out=out, lse=lse)
        return out, lse

    def decode(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Decode one token of each of these requests; those before it must be cached."""
        rows, lens = [self.rows[r] for r, _, _ in parts], [last for _, _, last in parts]
        q, k, v = self.new(parts)
        out, lse = self._room(q)
        plan = self.backend.plan(DecodeBatch.of(rows=rows, lens=lens, device=self.device))
        options = {"sinks": self.inputs.sinks, "aux": self.aux(parts), "out": out, "lse": lse}
        self.backend.decode(1, q, k, None if self.case.mla else v, plan, **options)
        return out, lse

    def _room(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for output and LSE, full of NaN."""
        lse = torch.full(q.shape[:2], float("nan"), device=self.device)
        return torch.full((*lse.shape, self.spec.v_dim), float("nan"), dtype=q.dtype, device=self.device), lse

    def seen(self, x: Tensor, scale: float, prefix: int) -> Tensor:
        """What attention sees of a request's rows: of cached ones what the cache keeps, of the others what came."""
        cached = kept(x, scale, self.case.kv_dtype)
        if self.case.one_pass and not self.case.verifies:
            return cached
        q, kv = self.case.dtype, self.case.kv_dtype
        came = cached.to(q if kv == FP8 else torch.promote_types(q, kv)) if self.case.read_back else x
        return torch.cat([cached[:prefix], came[prefix:].double()])

    def expected(self) -> tuple[Tensor, Tensor]:
        """What the fp64 oracle says, query by query, on the same rounded inputs."""
        case, given, token = self.case, self.inputs, 0
        aux = self.aux(self.parts)
        lse = torch.zeros(sum(case.new), self.spec.heads, dtype=torch.float64, device=self.device)
        out = lse.new_zeros(*lse.shape, self.spec.v_dim)
        for r, (p, n) in enumerate(zip(case.prefix, case.new, strict=True)):
            k = self.seen(given.k[r], case.k_scale, p)
            v = self.seen(given.v[r], case.k_scale if case.mla else case.v_scale, p)
            for i in range(n):
                q_pos, kv_pos, visible = self.sight(r, i)
                out[token], lse[token] = oracle.attention(
                    given.q[r][i],
                    k,
                    v,
                    scale=self.spec.scale,
                    q_pos=q_pos,
                    kv_pos=kv_pos,
                    visible=visible,
                    softcap=case.softcap,
                    temperature_len=case.temperature_len,
                    modify=MODIFY[case.mod](token, aux),
                    sinks=given.sinks,
                    window=case.window,
                    chunk=case.chunk,
                )
                token += 1
        return out, lse

    def sight(self, r: int, i: int) -> tuple[int, list[int], list[bool]]:
        """Where query i stands, where its keys do, and what mask or causality show it: by hand."""
        case, p, n = self.case, self.case.prefix[r], self.case.new[r]
        if case.mask == "tree":
            depth, lines = [], []
            for j, parent in enumerate(self.inputs.parents[r]):
                depth.append(0 if parent < 0 else depth[parent] + 1)
                lines.append({j} | (lines[parent] if parent >= 0 else set()))
            shown = [True] * p + [j in lines[i] for j in range(n)]
            return p + depth[i], [*range(p), *(p + d for d in depth)], shown
        if case.mask in ("random", "some rows hidden"):
            bits = self.inputs.bits[r][i].tolist()
            return p + i, list(range(p + n)), [True] * p + bits[p:] if case.cached_visible else bits
        behind = [j <= i or (not case.causal and (case.window is None or j < i + case.window)) for j in range(n)]
        return p + i, list(range(p + n)), [True] * p + behind

    def check(self, call: str = "extend") -> None:
        """Run and compare with the oracle."""
        (out, lse), (want_out, want_lse) = self.run(call), self.expected()
        torch.testing.assert_close(out.double(), want_out, **output(self.case.dtype, self.case.softcap))
        torch.testing.assert_close(lse.double(), want_lse, **LSE)


@pytest.fixture
def noted_boxes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Note of every launch for Hopper whether cached keys are read in boxes, and new ones. Values are as keys are."""
    noted: list[tuple[bool, bool]] = []
    made = extend_hopper.boxes_of_call

    def noting(call: ExtendCall, k_new: Tensor, v_new: Tensor, *, block_n: int) -> tuple[Any, Any, Any, Any]:
        k, v, its_k, its_v = made(call, k_new, v_new, block_n=block_n)
        assert (k is None, its_k is None) == (v is None, its_v is None)
        noted.append((k is not None, its_k is not None))
        return k, v, its_k, its_v

    monkeypatch.setattr(extend_hopper, "boxes_of_call", noting)
    return noted
