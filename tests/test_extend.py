"""Extend and verify on every engine against the fp64 oracle: named cases, and what must not matter."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, DeviceLens, ExtendBatch, VerifyBatch
from attnlab.eager import oracle
from attnlab.mask import CAUSAL, CustomMask
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.mods.registry import score_mods
from attnlab.plan.extend_call import ExtendCall
from attnlab.spec import AttentionSpec, ModelSpec
from tests.cases import ENGINES, FP8, MODIFY, poison
from tests.tolerances import LSE, output

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


@dataclass(frozen=True, kw_only=True)
class Case:
    """An extend or verify call. `why` says what it would catch that no other case does."""

    id: str
    why: str
    prefix: tuple[int, ...] = (0, 37, 130, 5)
    new: tuple[int, ...] = (70, 9, 1, 0)
    heads: int = 4
    kv_heads: int = 2
    qk_dim: int = 32
    v_dim: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    page_size: int = 1
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    temperature_len: int | None = None
    mod: str | None = None
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    mla: bool = False
    pool: str = "plain"
    mask: str | None = None
    one_pass: bool = False
    read_back: bool = False

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


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
    Case(id="softcap", why="cap after the scale", softcap=5.0),
    Case(id="temperature", why="positions are global", temperature_len=32, window=40),
    Case(id="alibi", why="a modifier of positions", mod="alibi"),
    Case(id="bias", why="a modifier with a row for each query token", mod="relative_bias"),
    Case(id="sinks", why="sinks join the denominator once", sinks=True),
    Case(id="scales", why="scales of the cached part alone", k_scale=0.5, v_scale=0.25),
    Case(id="mask", why="a mask decides, in the prefix too, and beyond the query's own tile", mask="random"),
    Case(id="mask-far", why="a mask shows keys beyond the query's own tile", mask="random", prefix=(5,), new=(150,)),
    Case(id="mask-window", why="a mask within a window that was clipped", mask="random", window=40),
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
    Case(id="one-pass-not-causal", why="one list, no causality", one_pass=True, causal=False),
    Case(id="one-pass-mask", why="one list, a mask", one_pass=True, mask="random", window=100),
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


class Stand:
    """A case, built: a pool full of NaN in which cached tokens alone hold numbers."""

    def __init__(self, case: Case, engine: str, device: str) -> None:
        self.case, self.device = case, torch.device(device)
        self.rng = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
        self.spec = AttentionSpec(
            heads=case.heads,
            kv_heads=case.kv_heads,
            qk_dim=case.qk_dim,
            v_dim=case.v_dim,
            scale=case.qk_dim**-0.5,
            causal=case.causal,
            window=case.window,
            chunk=case.chunk,
            softcap=case.softcap,
            temperature_len=case.temperature_len,
            mod=None if case.mod is None else score_mods.get(case.mod),
            has_sinks=case.sinks,
        )
        self.model = ModelSpec.uniform(
            self.spec, layers=2, context_len=512, page_size=case.page_size, kv_dtype=case.kv_dtype, mla=case.mla
        )
        if self.spec.sight.partial:
            first, second = self.model.layers
            wide = replace(first.attention, window=None, chunk=None)
            self.model = replace(self.model, layers=(replace(first, attention=wide), second))
        self.pool = self._pool()
        for layer in range(2):
            for x in (self.pool.view(layer).k, self.pool.view(layer).v):
                poison(x)
        table = RequestTable(max_requests=8, max_context=512, num_slots=self.pool.num_slots, device=self.device)
        self.cache = PagedCache(table=table, pool=self.pool)
        self.lens = [p + n for p, n in zip(case.prefix, case.new, strict=True)]
        self.cache.admit()  # row 0 stays empty: rows and request numbers differ
        self.rows = [self.cache.admit() for _ in self.lens]
        for at in range(0, max(self.lens), 24):
            for row, n in zip(self.rows, self.lens, strict=True):
                self.cache.append(row, min(24, max(0, n - at)))
        self.backend = AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=table,
            engine=engine,
            policy="tile",
            max_requests=8,
            multiprocessors=132,
            max_drafts=max(1, *case.new),
            deterministic=case.one_pass,
        )
        self._draw()

    def _pool(self) -> KVPool:
        case, slots = self.case, 1024
        scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
        if case.pool == "window":
            return WindowPool(self.model, num_slots=slots, sliding_slots=slots - 64, device=self.device, **scales)
        if case.pool == "unified":
            sliding = slots - 64 if self.spec.sight.partial else None
            return UnifiedPool(
                self.model, num_slots=slots, virtual_slots=slots, sliding_slots=sliding, device=self.device, **scales
            )
        if case.mla:
            return MLAPool(self.model, num_slots=slots, device=self.device, scale=case.k_scale)
        return MHAPool(self.model, num_slots=slots, device=self.device, **scales)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def _draw(self) -> None:
        case, spec = self.case, self.spec
        self.k = [self.randn(n, spec.kv_heads, spec.qk_dim).to(self.device, case.dtype) for n in self.lens]
        self.v = [
            k[..., : spec.v_dim] if case.mla else self.randn(k.shape[0], spec.kv_heads, spec.v_dim).to(k)
            for k in self.k
        ]
        self.q = [self.randn(n, spec.heads, spec.qk_dim).to(self.device, case.dtype) for n in case.new]
        self.sinks = self.randn(spec.heads).to(self.device) if case.sinks else None
        needs_aux = spec.mod is not None and spec.mod.needs_aux
        self.aux = self.randn(sum(case.new), spec.heads, 16).to(self.device) if needs_aux else None
        for layer in range(2):
            for row, p, n, k, v in zip(self.rows, case.prefix, self.lens, self.k, self.v, strict=True):
                held = n if case.read_back else p
                slots = self.backend.table.slots_of(row)[:held].long()
                self.pool.write(layer, slots, k[:held], None if case.mla else v[:held])
        self.parents = [
            [-1, *(int(torch.randint(i, (), generator=self.rng)) for i in range(1, n))][:n] for n in case.new
        ]
        self.bits = [torch.rand(n, p + n, generator=self.rng) < 0.6 for p, n in zip(case.prefix, case.new, strict=True)]
        if case.mask == "some rows hidden":
            self.bits = [bits & (torch.arange(bits.shape[0]) % 3 > 0)[:, None] for bits in self.bits]

    @property
    def batch(self) -> ExtendBatch | VerifyBatch:
        case = self.case
        common: dict[str, Any] = {"rows": self.rows, "prefix": case.prefix, "device": self.device}
        if case.mask == "tree":
            return VerifyBatch.tree(parents=self.parents, **common)
        if case.mask == "chain":
            return VerifyBatch.chain(drafts=list(case.new), **common)
        mask = CAUSAL if case.mask is None else CustomMask(bits=CustomMask.of(self.bits).bits.to(self.device))
        return ExtendBatch.of(new=case.new, mask=mask, **common)

    def run(self) -> tuple[Tensor, Tensor]:
        """Extend layer 1; return output and LSE."""
        tokens = sum(self.case.new)
        lse = torch.full((tokens, self.spec.heads), float("nan"), device=self.device)
        out = torch.full((*lse.shape, self.spec.v_dim), float("nan"), dtype=self.case.dtype, device=self.device)
        new = [(k[p:], v[p:]) for k, v, p in zip(self.k, self.v, self.case.prefix, strict=True)]
        k, v = (torch.cat([pair[side] for pair in new]) for side in (0, 1))
        plan = self.backend.plan(self.batch)
        given = (None, None) if self.case.read_back else (k, None if self.case.mla else v)
        self.backend.extend(1, torch.cat(self.q), *given, plan, sinks=self.sinks, aux=self.aux, out=out, lse=lse)
        return out, lse

    def stored(self, x: Tensor, scale: float, held: int) -> Tensor:
        """What attention sees of a row: of the first `held` what the cache keeps, of the others what came."""
        x = x.float()
        scaled = (x if scale == 1.0 else x / scale)[:held]
        scaled = scaled.clamp(-448, 448) if self.case.kv_dtype == FP8 else scaled
        kept = scaled.to(self.case.kv_dtype).double() * scale
        return torch.cat([kept, x[held:].double()])

    def expected(self) -> tuple[Tensor, Tensor]:
        """What the fp64 oracle says, query by query, on the same rounded inputs."""
        case, outs, lses = self.case, [], []
        token = 0
        for r, (p, n) in enumerate(zip(case.prefix, case.new, strict=True)):
            held = p + n if case.one_pass or case.read_back else p
            k = self.stored(self.k[r], case.k_scale, held)
            v = self.stored(self.v[r], case.k_scale if case.mla else case.v_scale, held)
            for i in range(n):
                q_pos, kv_pos, visible = self.sight(r, i)
                out, lse = oracle.attention(
                    self.q[r][i],
                    k,
                    v,
                    scale=self.spec.scale,
                    q_pos=q_pos,
                    kv_pos=kv_pos,
                    visible=visible,
                    softcap=case.softcap,
                    temperature_len=case.temperature_len,
                    modify=MODIFY[case.mod](token, self.aux),
                    sinks=self.sinks,
                    window=case.window,
                    chunk=case.chunk,
                )
                outs.append(out)
                lses.append(lse)
                token += 1
        return torch.stack(outs), torch.stack(lses)

    def sight(self, r: int, i: int) -> tuple[int, list[int], list[bool]]:
        """Where query i stands, where its keys do, and what mask or causality show it: by hand."""
        case, p, n = self.case, self.case.prefix[r], self.case.new[r]
        if case.mask == "tree":
            depth, lines = [], []
            for j, parent in enumerate(self.parents[r]):
                depth.append(0 if parent < 0 else depth[parent] + 1)
                lines.append({j} | (lines[parent] if parent >= 0 else set()))
            shown = [True] * p + [j in lines[i] for j in range(n)]
            return p + depth[i], [*range(p), *(p + d for d in depth)], shown
        if case.mask in ("random", "some rows hidden"):
            return p + i, list(range(p + n)), self.bits[r][i].tolist()
        behind = [j <= i or (not case.causal and (case.window is None or j < i + case.window)) for j in range(n)]
        return p + i, list(range(p + n)), [True] * p + behind

    def check(self) -> None:
        """Run and compare with the oracle."""
        (out, lse), (want_out, want_lse) = self.run(), self.expected()
        torch.testing.assert_close(out.double(), want_out, **output(self.case.dtype, self.case.softcap))
        torch.testing.assert_close(lse.double(), want_lse, **LSE)


@engines
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_extend_agrees_with_the_oracle(case: Case, engine: str, device: str) -> None:
    Stand(case, engine, device).check()


TOY = CASES[0]


@engines
@pytest.mark.parametrize("window", [None, 40])
def test_one_pass_gives_the_same_bits_however_a_prompt_is_cut(engine: str, device: str, window: int | None) -> None:
    """B40: whatever was cached before, and whatever else is in the batch."""
    length = 300
    whole = Stand(
        TOY.but(id="cut", prefix=(0,), new=(length,), window=window, one_pass=True, sinks=True), engine, device
    )
    want, want_lse = whole.run()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3 if engine == "triton" else 10):
        cuts = sorted(torch.randint(1, length, (2,), generator=generator).tolist())
        for first, last in zip([0, *cuts], [*cuts, length], strict=True):
            if first == last:
                continue
            # The chunk beside a neighbour of another length; tokens are those of the whole.
            case = whole.case.but(
                prefix=(int(torch.randint(60, (), generator=generator)), first), new=(7, last - first)
            )
            part = Stand(case, engine, device)
            part.k[1], part.v[1], part.q[1] = whole.k[0][:last], whole.v[0][:last], whole.q[0][first:last]
            part.sinks = whole.sinks
            slots = part.backend.table.slots_of(part.rows[1])[:first].long()
            part.pool.write(1, slots, part.k[1][:first], part.v[1][:first])
            out, lse = part.run()
            assert torch.equal(out[7:], want[first:last])
            assert torch.equal(lse[7:], want_lse[first:last])


@engines
def test_a_query_of_zeros_gives_the_mean_of_the_values(engine: str, device: str) -> None:
    """B21: uniform attention exposes a lane beyond the end that is counted."""
    stand = Stand(TOY.but(prefix=(90, 3), new=(5, 70)), engine, device)
    for q in stand.q:
        q.zero_()
    stand.check()


@engines
@pytest.mark.parametrize("dim", [13, 16, 64, 80, 96, 128, 192, 256, 288, 320, 576])
def test_the_last_column_counts(engine: str, device: str, dim: int) -> None:
    """B37: all signal in the last column of q, k and v."""
    case = TOY.but(id=f"last-{dim}", heads=2, kv_heads=1, qk_dim=dim, v_dim=dim, prefix=(20,), new=(9,))
    stand = Stand(case, engine, device)
    for x in (stand.q[0], stand.k[0], stand.v[0]):
        x[..., :-1] = 0
    slots = stand.backend.table.slots_of(stand.rows[0])[:20].long()
    stand.pool.write(1, slots, stand.k[0][:20], stand.v[0][:20])
    stand.check()


@engines
def test_what_is_extended_is_what_later_steps_read(engine: str, device: str) -> None:
    """The new tokens' keys are stored, scaled, before attention runs; only they are."""
    stand = Stand(TOY.but(k_scale=0.5, v_scale=0.25), engine, device)
    stand.run()
    view = stand.pool.view(1)
    for row, k, v in zip(stand.rows, stand.k, stand.v, strict=True):
        slots = stand.backend.table.slots_of(row).long()
        torch.testing.assert_close(view.k[slots], k / 0.5)
        torch.testing.assert_close(view.v[slots], v / 0.25)


@engines
def test_nothing_is_launched_for_nobody(engine: str, device: str) -> None:
    stand = Stand(TOY.but(prefix=(5, 9), new=(0, 0)), engine, device)
    out, lse = stand.backend.extend(1, *_new(stand), stand.backend.plan(stand.batch)), None
    assert out.shape == (0, 4, 32) and lse is None


def _new(stand: Stand) -> tuple[Tensor, Tensor, Tensor]:
    parts = [(k[p:], v[p:]) for k, v, p in zip(stand.k, stand.v, stand.case.prefix, strict=True)]
    return torch.cat(stand.q), torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a row too few": ({"q": lambda q: q[1:]}, ValueError, r"q: expected \[80, 4, 32\].*the plan has 80 query tokens"),
    "another dtype": ({"k": lambda k: k.half()}, TypeError, "k, v: expected the dtype of q"),
    "keys alone": ({"v": lambda v: None}, ValueError, "v: expected values beside the keys, got None"),
    "values alone": ({"k": lambda k: None}, ValueError, "k: expected keys beside the values, got None"),
    "wrong heads": ({"k": lambda k: k[:, :1]}, ValueError, r"k: expected \[80, 2, 32\]"),
    "sinks": ({"sinks": torch.zeros(4)}, ValueError, "sinks: expected None, as the layer has no sinks"),
    "aux": ({"aux": torch.zeros(80, 4, 3)}, ValueError, "aux: expected None"),
    "lse": ({"lse": torch.zeros(80, 3)}, ValueError, r"lse: expected \[80, 4\] float32"),
    "out": ({"out": torch.zeros(80, 4, 31)}, ValueError, r"out: expected \[80, 4, 32\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_and_nothing_is_stored(what: str) -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY, engine, device)
    changes, error, message = BAD[what]
    given: dict[str, Any] = dict(zip("qkv", _new(stand), strict=True))
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change.to(device)
    before = stand.pool.view(1).k.clone()
    with pytest.raises(error, match=message):
        stand.backend.extend(
            1, given.pop("q"), given.pop("k"), given.pop("v"), stand.backend.plan(stand.batch), **given
        )
    assert torch.equal(stand.pool.view(1).k.nan_to_num(7), before.nan_to_num(7))


def test_one_pass_cannot_read_what_is_not_stored() -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY.but(one_pass=True), engine, device)
    plan = stand.backend.plan(stand.batch)
    with pytest.raises(ValueError, match="save: a plan in one pass reads the new tokens from the pool"):
        stand.backend.extend(1, *_new(stand), plan, save=False)


def test_extend_takes_the_plan_of_several_queries() -> None:
    engine, device = ENGINES[0]
    stand = Stand(TOY, engine, device)
    decode = stand.backend.plan(DecodeBatch.of(rows=stand.rows, lens=stand.lens, device=stand.device))
    for plan in (decode, None):
        with pytest.raises(TypeError, match="plan: expected an ExtendPlan or VerifyPlan, got (DecodePlan|NoneType)"):
            stand.backend.extend(1, *_new(stand), plan)  # type: ignore[arg-type]


@engines
def test_values_of_their_own_are_refused_under_mla(engine: str, device: str) -> None:
    stand = Stand(next(case for case in CASES if case.id == "mla"), engine, device)
    q, k, v = _new(stand)
    with pytest.raises(ValueError, match="v: under MLA the values are the first columns of k"):
        stand.backend.extend(1, q, k, v.clone(), stand.backend.plan(stand.batch))


@engines
def test_what_a_mask_lacks_is_hidden_and_not_read(engine: str, device: str) -> None:
    """Where only the device knows the lengths, nobody could check a mask's size beforehand."""
    stand = Stand(TOY.but(prefix=(9,), new=(4,)), engine, device)
    lens = [
        DeviceLens(device=torch.tensor([n], dtype=torch.int32, device=device), bound_each=n, bound_total=n)
        for n in (9, 4)
    ]
    bits = torch.ones(30, dtype=torch.uint8, device=device)  # of 52: rows 0 and 1, and 4 bits of row 2
    batch = ExtendBatch(rows=torch.tensor(stand.rows), prefix=lens[0], new=lens[1], mask=CustomMask(bits=bits))
    lse = torch.zeros(4, 4, device=device)
    stand.backend.extend(1, *_new(stand), stand.backend.plan(batch), lse=lse)
    assert bool(lse[:3].isfinite().all()) and bool((lse[3] == float("-inf")).all())


@engines
@pytest.mark.parametrize("parts", ["cached", "new"])
def test_what_a_call_leaves_out_is_not_read(engine: str, device: str, parts: Any) -> None:
    stand = Stand(TOY, engine, device)
    plan = stand.backend.plan(stand.batch)
    q, k, v = _new(stand)
    view = stand.pool.view(1)
    for x in (k, v) if parts == "cached" else (view.k, view.v):
        x.fill_(float("nan"))
    out = torch.full_like(q, 7.0)
    call = ExtendCall(
        layer=1,
        spec=stand.spec,
        view=view,
        lane=plan.lane(1),
        queries=plan.queries,
        one_pass=False,
        q=q,
        k=k,
        v=v,
        out=out,
        parts=parts,
    )
    stand.backend.engine.extend(call)
    assert bool(out.isfinite().all())
