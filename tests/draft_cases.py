"""Named drafts, each with one reason to exist, and the stand that runs all steps and asks the oracle."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import DeviceLens, DraftBatch
from attnlab.eager import oracle
from attnlab.plan.draft import DraftPlan, draft_columns, draft_room
from attnlab.plan.policies.static import Static
from attnlab.plan.policy import HostPolicy, SplitPolicy
from tests.cases import MODIFY, Layer, kept, storage
from tests.tolerances import LSE, output


@dataclass(frozen=True, kw_only=True)
class Case(Layer):
    """A draft: `topk` branches of `steps` tokens ahead of requests of `lens` cached ones."""

    heads: int = 4
    qk_dim: int = 16
    v_dim: int = 16
    lens: tuple[int, ...] = (5, 70, 1)
    topk: int = 3
    steps: int = 3
    policy: str | SplitPolicy | HostPolicy = "static"


ACROSS_PAGES = (5, 8, 66, 3)
CASES = [
    Case(id="toy", why="uneven lengths, three branches, two steps"),
    Case(id="chain", why="one branch: its drafts follow the cached tokens in whatever page", topk=1, page_size=4),
    Case(id="pages-4", why="a branch fills two pages, and copies none of the prefix", page_size=4, lens=ACROSS_PAGES),
    Case(id="long-branch", why="a branch of three pages", page_size=2, topk=2, steps=4, lens=(5, 8)),
    Case(id="pages-16", why="page-major storage", page_size=16, topk=4, steps=2, layout="pages", lens=(31, 32, 33)),
    Case(id="padding", why="a row of length 0 has no drafts", lens=(0, 33, 0), page_size=4),
    Case(id="border", why="drafts make one range too many", lens=(63, 64, 65), policy=Static(splits=2), topk=2),
    Case(id="seed", why="counts of the heuristic, which knows of branches", lens=(5, 300), policy="seed", topk=4),
    Case(id="tile", why="cuts that do not move", lens=(255, 256, 257), policy="tile", topk=1),
    Case(id="mha", why="one query head a program", kv_heads=4, topk=2),
    Case(id="mla", why="values in the keys", heads=8, kv_heads=1, qk_dim=48, v_dim=32, mla=True, page_size=4),
    Case(id="window-1", why="a draft that sees itself alone", window=1, topk=2),
    Case(id="window-2", why="fewer keys than drafts: no cached token is seen in the last step", window=2, steps=4),
    Case(id="window", why="lengths at the window's border", window=40, lens=(37, 38, 39, 40, 41, 66), topk=2),
    Case(id="chunk", why="a chunk that ends among the drafts", chunk=16, lens=(14, 15, 16, 33), steps=4, topk=2),
    Case(id="window-pool", why="sliding layers in a storage of their own", window=40, page_size=4, pool="window"),
    Case(id="unified", why="virtual slots", page_size=4, pool="unified", topk=2),
    Case(id="unified-window", why="virtual slots, two storages", window=10, page_size=4, pool="unified", topk=2),
    Case(
        id="unified-mla",
        why="dense ids into an envelope of several layers",
        kv_heads=1,
        qk_dim=48,
        v_dim=32,
        mla=True,
        page_size=4,
        pool="unified",
        topk=2,
    ),
    Case(
        id="everything",
        why="positions are those of the branch, not of the columns",
        window=30,
        lens=(29, 50),
        softcap=5.0,
        temperature_len=32,
        mod="alibi",
        sinks=True,
        k_scale=0.5,
        v_scale=0.25,
        page_size=4,
        topk=2,
    ),
]


class Stand:
    """A case, built: a pool full of NaN in which the cached tokens alone hold numbers, in shuffled pages."""

    def __init__(self, case: Case, engine: str, device: str) -> None:
        self.case, self.spec, self.device = case, case.spec, torch.device(device)
        self.rng = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
        drafts = {"topk": case.topk, "steps": case.steps, "page_size": case.page_size}
        held = [n + draft_room(n, **drafts) if n else 0 for n in case.lens]
        self.model = case.model(max(case.lens) + case.steps)
        self.pool, self.table, self.rows = storage(case, self.model, held, max(held), self.device, self.rng)
        self.backend = AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=self.table,
            engine=engine,
            policy=case.policy,
            max_requests=len(case.lens) * case.topk,
            max_tokens=len(case.lens) * case.topk * (max(case.lens) + case.steps),
            multiprocessors=132,
        )
        self.backend.workspace.fill(float("nan"))
        assert max(held) <= draft_columns(self.batch.seq, **drafts)
        self.cached = [self._keys(n) for n in case.lens]
        self.sinks = self._randn(self.spec.heads) if case.sinks else None
        for row, n, (k, v) in zip(self.rows, case.lens, self.cached, strict=True):
            for layer in range(2):
                self.pool.write(layer, self.table.slots_of(row)[:n].long(), k, None if case.mla else v)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng).to(self.device)

    def _keys(self, n: int) -> tuple[Tensor, Tensor]:
        k = self._randn(n, self.spec.kv_heads, self.spec.qk_dim)
        if self.case.mla:
            return k, k[..., : self.spec.v_dim]
        return k, self._randn(n, self.spec.kv_heads, self.spec.v_dim)

    @property
    def branches(self) -> int:
        return len(self.case.lens) * self.case.topk

    @property
    def batch(self) -> DraftBatch:
        case = self.case
        return DraftBatch.of(rows=self.rows, lens=case.lens, topk=case.topk, steps=case.steps, device=self.device)

    def unknown(self) -> DraftBatch:
        """The same batch, with lengths that only the device knows."""
        known = self.batch
        most = max(self.case.lens)
        seq = DeviceLens(device=known.seq.device, bound_each=most, bound_total=most * len(self.case.lens))
        return DraftBatch(rows=known.rows, seq=seq, topk=known.topk, steps=known.steps)

    def check(self, plan: DraftPlan | None = None) -> None:
        """Run every step of the layer that sees least, and compare each branch with the oracle."""
        made = self.backend.plan(self.batch) if plan is None else plan
        drafts: list[tuple[Tensor, Tensor]] = []
        for step in made.steps:
            q = self._randn(self.branches, self.spec.heads, self.spec.qk_dim)
            drafts.append(self._keys(self.branches))
            k, v = drafts[-1]
            lse = torch.full((self.branches, self.spec.heads), float("nan"), device=self.device)
            out = self.backend.decode(1, q, k, None if self.case.mla else v, step, sinks=self.sinks, lse=lse)
            want = [self._expected(z, q[z], drafts) for z in range(self.branches)]
            tolerance = output(self.case.dtype, self.case.softcap)
            torch.testing.assert_close(out.double(), torch.stack([o for o, _ in want]), **tolerance)
            torch.testing.assert_close(lse.double(), torch.stack([x for _, x in want]), **LSE)

    def _expected(self, branch: int, q: Tensor, drafts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What the fp64 oracle says of a branch that has so many drafts, on the same rounded inputs."""
        case, (k, v) = self.case, self.cached[branch // self.case.topk]
        if k.shape[0]:
            k = torch.cat([k, *(mine[branch : branch + 1] for mine, _ in drafts)])
            v = torch.cat([v, *(mine[branch : branch + 1] for _, mine in drafts)])
        return oracle.attention(
            q,
            kept(k, case.k_scale, case.kv_dtype),
            kept(v, case.k_scale if case.mla else case.v_scale, case.kv_dtype),
            scale=self.spec.scale,
            softcap=case.softcap,
            temperature_len=case.temperature_len,
            modify=MODIFY[case.mod](branch, None),
            sinks=self.sinks,
            window=case.window,
            chunk=case.chunk,
        )
