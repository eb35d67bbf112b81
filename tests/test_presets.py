"""Every model of data/models.json: it builds a ModelSpec, has a pool, and plans a batch of every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlab.assets import load_json
from attnlab.backend import AttentionBackend
from attnlab.batch import Batch, DecodeBatch, ExtendBatch, VerifyBatch
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.spec import FACTS, ModelSpec
from tests.strategies import DEVICE

ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in load_json("models.json", "models")}
FILL = {
    "layers": 8,
    "q_heads": 8,
    "kv_heads": 2,
    "qk_dim": 64,
    "v_dim": 64,
    "sm_scale": 0.125,
    "window": 64,
    "chunk": 64,
}
"""What fills a gap in the data; any number will do to plan with."""


def gaps(row: dict[str, Any]) -> list[str]:
    """The facts that this model needs and the data leave open."""
    needed = set(FACTS) - {"window", "chunk"}
    needed |= {"window"} if "S" in (row["pattern"] or "") else set()
    needed |= {"chunk"} if "C" in (row["pattern"] or "") else set()
    return sorted(field for field in needed if row[field] is None)


def load(name: str, page_size: int = 16) -> ModelSpec:
    """The model with its gaps filled, cut down to one layer of each kind."""
    row = ROWS[name]
    facts = {field: FILL[field] for field in gaps(row)}
    context = None if row["context"] is not None else 4096
    model = ModelSpec.load(name, page_size=page_size, kv_dtype=torch.float16, context_len=context, **facts)
    kinds = {layer.attention: layer.index for layer in reversed(model.layers)}
    return model.only(tuple(sorted(kinds.values())))


def pool_of(model: ModelSpec) -> KVPool:
    partial = [layer.attention.sight.partial for layer in model.layers]
    if model.mla:
        return MLAPool(model, num_slots=128, device=DEVICE)
    if any(partial):
        return WindowPool(model, num_slots=128, sliding_slots=128, device=DEVICE)
    return MHAPool(model, num_slots=128, device=DEVICE)


@pytest.mark.parametrize("name", ROWS)
def test_a_model_plans_a_batch_of_every_mode(name: str) -> None:
    model = load(name)
    pool = pool_of(model)
    table = RequestTable(max_requests=3, max_context=64, num_slots=pool.num_slots, device=DEVICE)
    cache = PagedCache(table=table, pool=pool)
    rows = [cache.admit() for _ in range(3)]
    for row, tokens in zip(rows, (40, 7, 1), strict=True):
        cache.append(row, tokens)
    backend = AttentionBackend(
        model=model, pool=pool, table=table, engine="eager", policy="seed", max_requests=3, multiprocessors=132
    )
    batches: list[Batch] = [
        DecodeBatch.of(rows=[], lens=[], device=DEVICE),
        DecodeBatch.of(rows=rows, lens=[40, 0, 1], device=DEVICE),
        ExtendBatch.of(rows=rows, prefix=[0, 6, 1], new=[40, 1, 0], device=DEVICE),
        VerifyBatch.chain(rows=rows[:2], prefix=[36, 3], drafts=4, device=DEVICE),
        VerifyBatch.tree(rows=rows[:2], prefix=[37, 4], parents=[[-1, 0, 0], [-1, 0, 1]], device=DEVICE),
    ]
    for batch in batches:
        plan = backend.plan(batch)
        plan.validate(num_slots=pool.num_slots)
        assert set(plan.lane_of_layer) == {layer.index for layer in model.layers}
        spaces = {layer.index: pool.translation(layer.pool_layer).target for layer in model.layers}
        assert all(plan.lane(index).layout.index.space == space for index, space in spaces.items())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if gaps(row) or row["context"] is None])
def test_a_gap_is_named_and_an_argument_fills_it(name: str) -> None:
    facts: dict[str, Any] = {}
    wanted = (["context_len"] if ROWS[name]["context"] is None else []) + gaps(ROWS[name])
    named = []
    while len(named) < len(wanted):
        with pytest.raises(ValueError, match="not verified for model .* in data/models.json; pass ") as caught:
            ModelSpec.load(name, **facts)
        field = str(caught.value).rsplit("pass ", 1)[1].removesuffix("=...").strip()
        named.append(field)
        facts[field] = 4096 if field == "context_len" else FILL[field]
    assert sorted(named) == sorted(wanted)
    assert ModelSpec.load(name, **facts).context_len == (ROWS[name]["context"] or 4096)


def test_an_argument_that_contradicts_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"window: data/models.json has 4096 for model 'Gemma-2-2b', got 512"):
        ModelSpec.load("Gemma-2-2b", window=512)
    assert ModelSpec.load("Gemma-2-2b", window=4096).layer(0).attention.window == 4096


def test_an_argument_that_is_no_fact_is_refused() -> None:
    with pytest.raises(ValueError, match="windows: no fact of a model that could be filled; these can: layers, "):
        ModelSpec.load("Gemma-2-2b", windows=512)
