"""Bytes that programs load of the cache, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attnlab
from attnlab.inspect.loads import Loads
from attnlab.kernels.target import Target
from attnlab.mask import CustomMask

TOKEN = 3 * (64 + 64) * 2
"""Bytes of a token of SmolLM2-135M in a layer: KV heads, key and value, fp16."""


def bench(lens: list[int], **changes: object) -> attnlab.Workbench:
    given = {"lens": lens, "policy": "static", "engine": "eager", "layers": [18], **changes}
    return attnlab.workbench("SmolLM2-135M", **given)  # type: ignore[arg-type]


def verify_loads(
    wb: attnlab.Workbench, prefix: list[int], drafts: list[int], *, cached_visible: bool = True, **target: Target
) -> Loads:
    parents = [[-1, *[0] * (n - 1)] for n in drafts]
    batch = attnlab.VerifyBatch.tree(rows=wb.table.rows, prefix=prefix, parents=parents, device="cpu")
    assert isinstance(batch.mask, CustomMask)
    batch = replace(batch, mask=replace(batch.mask, cached_visible=cached_visible))
    return Loads.of(wb.backend.plan(batch), model=wb.model, layer=18, **target)


def test_a_decode_loads_every_key_once() -> None:
    wb = bench([700, 40])
    assert Loads.of(wb.plan(), model=wb.model, layer=18) == Loads(kv_bytes=740 * TOKEN, mask_bytes=0)


def test_a_group_larger_than_a_tile_loads_them_again() -> None:
    spec = attnlab.AttentionSpec(heads=34, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25)
    model = attnlab.ModelSpec.uniform(spec, layers=1, context_len=64, page_size=1, kv_dtype=torch.float32)
    wb = attnlab.workbench(model, lens=[10], policy="static", engine="eager")
    assert Loads.of(wb.plan(), model=model, layer=0).kv_bytes == 2 * 10 * 2 * (16 + 16) * 4


@pytest.mark.parametrize(("drafts", "times"), [(1, 1), (21, 1), (22, 2), (42, 2), (43, 3)])
def test_drafts_share_what_is_loaded_in_tiles_of_rows(drafts: int, times: int) -> None:
    """On an H200 a verify of this shape takes tiles of 64 rows, a draft has 3 of them; a tree's mask goes unread."""
    loads = verify_loads(bench([300]), [200], [drafts])
    assert loads == Loads(kv_bytes=times * 200 * TOKEN, mask_bytes=0)


@pytest.mark.parametrize(("drafts", "times"), [(10, 1), (11, 2)])
def test_a_mask_that_may_hide_cached_keys_is_loaded(drafts: int, times: int) -> None:
    """Tiles are of 32 rows then."""
    loads = verify_loads(bench([300]), [200], [drafts], cached_visible=False)
    assert loads == Loads(kv_bytes=times * 200 * TOKEN, mask_bytes=drafts * 200 * 3)


def test_each_request_has_tiles_for_its_own_drafts() -> None:
    loads = verify_loads(bench([100, 300]), [80, 200], [2, 22])
    assert loads.kv_bytes == (80 + 2 * 200) * TOKEN


def test_the_target_has_the_tiles() -> None:
    loads = verify_loads(bench([300]), [200], [22], target=Target(kind="interpreter"))
    assert loads.kv_bytes == 2 * 200 * TOKEN


@pytest.mark.parametrize(("policy", "times"), [("static", 1), ("balanced", 2)])
def test_even_shares_are_read_by_a_kernel_with_tiles_of_its_own(policy: str, times: int) -> None:
    loads = verify_loads(bench([300], policy=policy), [200], [21], target=Target(kind="cuda", arch=80))
    assert loads.kv_bytes == times * 200 * TOKEN


def test_a_chain_has_no_mask_to_load() -> None:
    wb = bench([300])
    batch = attnlab.VerifyBatch.chain(rows=wb.table.rows, prefix=[200], drafts=4, device="cpu")
    assert Loads.of(wb.backend.plan(batch), model=wb.model, layer=18) == Loads(kv_bytes=200 * TOKEN, mask_bytes=0)


def test_under_mla_the_values_are_columns_of_the_keys() -> None:
    wb = attnlab.workbench("DeepSeek-V2-Lite", lens=[50], context_len=64, policy="static", engine="eager")
    loads = Loads.of(wb.plan(), model=wb.model, layer=wb.layers[0])
    assert loads.kv_bytes == 50 * 576 * 2
