"""Extend and verify compiled: every choice of tiles over the shapes of models, long requests, large pools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, ExtendBatch, VerifyBatch
from attnlab.eager import oracle
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.spec import AttentionSpec, ModelSpec
from tests.cases import FP8
from tests.extend_cases import Case, Stand
from tests.test_balanced import Few
from tests.tolerances import LSE, OUTPUT, output

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
BASE = Case(id="", why="", heads=4, kv_heads=1, dtype=BF16, kv_dtype=BF16, policy="static")
DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (96, 128), (128, 64), (64, 32), (40, 24)]
SHAPES: dict[str, dict[str, Any]] = {
    **{f"{qk}-{v}": {"qk_dim": qk, "v_dim": v} for qk, v in DIMS},
    "64-fp8": {"qk_dim": 64, "v_dim": 64, "kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.2},
    "128-fp8": {"qk_dim": 128, "v_dim": 128, "kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.2},
    "128-fp16": {"qk_dim": 128, "v_dim": 128, "dtype": torch.float16, "kv_dtype": torch.float16},
    "128-fp32": {"qk_dim": 128, "v_dim": 128, "dtype": torch.float32, "kv_dtype": torch.float32},
    "128-pages": {"qk_dim": 128, "v_dim": 128, "page_size": 16, "pool": "unified"},
    "mla-576": {"qk_dim": 576, "v_dim": 512, "mla": True},
    "mla-288": {"qk_dim": 288, "v_dim": 256, "mla": True, "heads": 20},
    "mla-576-fp8": {"qk_dim": 576, "v_dim": 512, "mla": True, "kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.05},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40, "sinks": True},
    "cap": {"softcap": 5.0, "temperature_len": 32},
    "chunk": {"chunk": 64},
    "bias": {"mod": "relative_bias"},
    "everything": {
        "window": 40,
        "softcap": 5.0,
        "temperature_len": 32,
        "mod": "relative_bias",
        "sinks": True,
    },
}
FEW, MORE, MANY = (9, 16, 1), (40, 3, 64), (150, 65, 7)


MASKED = [*((features, None) for features in FEATURES), ("plain", "random"), ("everything", "random")]


@pytest.mark.parametrize("new", [FEW, MORE, MANY], ids=["few", "more", "many"])
@pytest.mark.parametrize(("features", "mask"), MASKED)
@pytest.mark.parametrize("shape", SHAPES)
def test_extend_is_right(shape: str, features: str, mask: str | None, new: tuple[int, ...]) -> None:
    case = BASE.but(id=f"{shape} {features} {new}", prefix=(37, 0, 200), new=new, mask=mask)
    Stand(case.but(**SHAPES[shape], **FEATURES[features]), "triton", "cuda").check()


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", ["chain", "tree"])
@pytest.mark.parametrize("new", [(4, 3, 1), (8, 2, 5), (16, 9, 30)], ids=["16 rows", "32 rows", "more"])
def test_verify_is_right(shape: str, features: str, mask: str, new: tuple[int, ...]) -> None:
    case = BASE.but(id=f"{shape} {features} {new}", prefix=(137, 0, 300), new=new, mask=mask)
    Stand(case.but(**SHAPES[shape], **FEATURES[features]), "triton", "cuda").check("verify")


FULL = (16, 9, 30)
SHARED = [
    *((shape, "plain", new, "chain") for shape in SHAPES for new in ((4, 3, 1), (8, 2, 5), FULL)),
    *((shape, "plain", FULL, "random") for shape in SHAPES),
    *(
        (shape, features, FULL, mask)
        for shape in ("128-128", "64-64", "256-256")
        for features in FEATURES
        for mask in ("chain", "random")
        if features != "plain"
    ),
    *((shape, "everything", (4, 3, 1), "chain") for shape in ("128-128", "128-fp8", "mla-576")),
    *(("128-128", "plain", new, "tree") for new in ((4, 3, 1), FULL)),
]


@pytest.mark.parametrize(("shape", "features", "new", "mask"), SHARED)
def test_verify_over_even_shares_is_right(shape: str, features: str, new: tuple[int, ...], mask: str) -> None:
    """Two shares a KV head, so that programs go on to other requests, through more tiles than are on their way."""
    case = BASE.but(id=f"{shape} {features} {new}", prefix=(437, 0, 450), new=new, mask=mask, policy=Few(count=2))
    stand = Stand(case.but(**SHAPES[shape], **FEATURES[features]), "triton", "cuda")
    if mask != "random":
        stand.check("verify")
        return
    lse = torch.full((sum(new), stand.spec.heads), float("nan"), device="cuda")
    drafts = VerifyBatch.chain(rows=stand.rows, prefix=case.prefix, drafts=list(new), device="cuda")
    q, k, v = stand.new()
    v_given = None if stand.case.mla else v
    options = {"sinks": stand.inputs.sinks, "aux": stand.aux(stand.parts), "lse": lse}
    plan = stand.backend.plan(replace(drafts, mask=stand.batch.mask))
    out = stand.backend.verify(1, q, k, v_given, plan, **options)
    want_out, want_lse = stand.expected()
    torch.testing.assert_close(out.double(), want_out, **output(stand.case.dtype, stand.case.softcap))
    torch.testing.assert_close(lse.double(), want_lse, **LSE)


LONE = (1, 15, 16, 17, 33)


@pytest.mark.parametrize("mask", ["chain", "tree"])
@pytest.mark.parametrize("features", ["plain", "window", "cap", "chunk"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.startswith("mla")])
def test_drafts_that_are_answered_at_once_are_right(shape: str, features: str, mask: str) -> None:
    """One share a KV head, so that no request is cut; of drafts one tile is loaded ahead, others follow."""
    case = BASE.but(
        id=f"{shape} {features} {mask}", prefix=(437, 64, 450, 20, 300), new=LONE, mask=mask, policy=Few(count=1)
    )
    Stand(case.but(**SHAPES[shape], **FEATURES[features]), "triton", "cuda").check("verify")


@pytest.mark.parametrize("features", ["plain", "window", "cap"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_pass_is_right(shape: str, features: str) -> None:
    case = BASE.but(id=f"{shape} {features}", prefix=(37, 0, 200), new=MANY, one_pass=True, policy="tile")
    Stand(case.but(**SHAPES[shape], **FEATURES[features]), "triton", "cuda").check()


@pytest.mark.parametrize("call", ["verify", "extend"])
@pytest.mark.parametrize("shape", ["64-64", "128-128", "256-256", "mla-576"])
def test_a_request_has_the_same_bits_alone_and_among_longer_ones(shape: str, call: str) -> None:
    """B40: how many queries others have must not choose the instruction that sums a request's."""
    base = BASE.but(id=f"bits {shape}", mask="chain", one_pass=True, policy="tile", **SHAPES[shape])
    among = Stand(base.but(prefix=(300, 40, 0), new=(3, 150, 20)), "triton", "cuda")
    out, lse = among.run(call)
    for r, at in ((0, 0), (2, 153)):
        p, n = among.case.prefix[r], among.case.new[r]
        alone = Stand(base.but(prefix=(p,), new=(n,)), "triton", "cuda", among.inputs.pick([r]))
        mine, its_lse = alone.run(call)
        assert torch.equal(mine, out[at : at + n]) and torch.equal(its_lse, lse[at : at + n])


@pytest.mark.parametrize("features", ["plain", "window", "chunk"])
@pytest.mark.parametrize("shape", ["64-64", "128-128", "128-pages", "256-256"])
def test_one_pass_gives_the_same_bits_however_a_prompt_is_cut(shape: str, features: str) -> None:
    """B40: a tile of keys that all queries of one cut see whole is seen in part after another."""
    case = BASE.but(id=f"cut {shape} {features}", prefix=(0,), new=(400,), one_pass=True, policy="tile")
    whole = Stand(case.but(**SHAPES[shape], **FEATURES[features]), "triton", "cuda")
    want, want_lse = whole.run()
    for first, last in ((0, 70), (70, 133), (133, 333), (333, 400)):
        part = Stand(whole.case.but(prefix=(first,), new=(last - first,)), "triton", "cuda")
        mine, uncut = part.inputs, whole.inputs
        mine.k[0], mine.v[0], mine.q[0] = uncut.k[0][:last], uncut.v[0][:last], uncut.q[0][first:last]
        part.inputs = replace(mine, sinks=uncut.sinks)
        part.cache(0, first)
        out, lse = part.run()
        assert torch.equal(out, want[first:last]) and torch.equal(lse, want_lse[first:last])


@dataclass(frozen=True)
class Long:
    """One request in a large pool: its last slots lie at the pool's end. What it does not own is NaN."""

    backend: AttentionBackend
    row: int
    slots: Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, *, tokens: int, num_slots: int, kv_dtype: torch.dtype, mla: bool = False) -> Long:
        model = ModelSpec.uniform(spec, layers=1, context_len=tokens, page_size=1, kv_dtype=kv_dtype, mla=mla)
        pool: KVPool = (MLAPool if mla else MHAPool)(model, num_slots=num_slots, device="cuda")
        view = pool.view(0)
        for x in (view.k,) if mla else (view.k, view.v):
            x.view(torch.uint8).fill_(0xFF if kv_dtype != FP8 else 0x7F)
        table = RequestTable(max_requests=1, max_context=tokens, num_slots=num_slots, device="cuda")
        row, slots = table.admit(), torch.arange(num_slots - tokens, num_slots, device="cuda").flip(0)
        table.append(row, slots.cpu())
        step = 1 << 16
        for at in range(0, tokens, step):
            mine = slots[at : at + step]
            k = torch.randn(mine.shape[0], spec.kv_heads, spec.qk_dim, device="cuda", dtype=BF16)
            v = None if mla else torch.randn(mine.shape[0], spec.kv_heads, spec.v_dim, device="cuda", dtype=BF16)
            pool.write(0, mine, k, v)
        backend = AttentionBackend(
            model=model,
            pool=pool,
            table=table,
            engine="triton",
            policy="static",
            max_requests=1,
            max_drafts=16,
            multiprocessors=132,
        )
        return cls(backend, row, slots)

    def check(self, out: Tensor, lse: Tensor, q: Tensor, positions: list[int], first: int) -> None:
        """Compare some rows with the oracle: the query at `positions[i]` is row `positions[i] - first`."""
        view, spec = self.backend.pool.view(0), self.backend.model.layer(0).attention
        for position in positions:
            seen = self.slots[: position + 1]
            want, want_lse = oracle.attention(
                q[position - first], view.k[seen], view.v[seen], scale=spec.scale, q_pos=position
            )
            torch.testing.assert_close(out[position - first].double(), want, **OUTPUT[BF16])
            torch.testing.assert_close(lse[position - first].double(), want_lse, **LSE)


KINDS: dict[str, dict[str, Any]] = {
    "gqa": {"spec": AttentionSpec(heads=8, kv_heads=2, qk_dim=128, v_dim=128, scale=128**-0.5)},
    "mla": {"spec": AttentionSpec(heads=16, kv_heads=1, qk_dim=576, v_dim=512, scale=192**-0.5), "mla": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["extend", "verify", "decode", "prefill"])
def test_a_request_of_128k_tokens(kind: str, mode: str) -> None:
    tokens = 1 << 17
    _long(mode, Long.of(tokens=tokens, num_slots=tokens + 8, kv_dtype=BF16, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["extend", "verify", "decode"])
def test_the_far_end_of_a_pool_beyond_2_31_elements(kind: str, mode: str) -> None:
    """B24, B25: an offset in 32 bits would wrap to the pool's beginning, which is NaN."""
    spec = KINDS[kind]["spec"]
    slots = 2**31 // (spec.kv_heads * spec.qk_dim) + 5_000
    _long(mode, Long.of(tokens=4_096, num_slots=slots, kv_dtype=FP8, **KINDS[kind]))


def _long(mode: str, long: Long) -> None:
    spec, tokens = long.backend.model.layer(0).attention, long.slots.shape[0]
    new = {"decode": 1, "verify": 12, "extend": 100, "prefill": tokens}[mode]
    first = tokens - new
    q = torch.randn(new, spec.heads, spec.qk_dim, device="cuda", dtype=BF16)
    lse = torch.full((new, spec.heads), float("nan"), device="cuda")
    if mode == "decode":
        batch: Any = DecodeBatch.of(rows=[long.row], lens=[tokens], device="cuda")
        out = long.backend.decode(0, q, None, None, long.backend.plan(batch), save=False, lse=lse)
    elif mode == "verify":
        batch = VerifyBatch.chain(rows=[long.row], prefix=[first], drafts=new, device="cuda")
        out = long.backend.verify(0, q, None, None, long.backend.plan(batch), lse=lse)
    else:
        batch = ExtendBatch.of(rows=[long.row], prefix=[first], new=[new], device="cuda")
        out = long.backend.extend(0, q, None, None, long.backend.plan(batch), lse=lse)
    long.check(out, lse, q, sorted({first, (first + tokens) // 2, tokens - 1}), first)
