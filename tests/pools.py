"""Pools of every kind, full of NaN, and rows that say which token of which layer they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.memory.cache import PagedCache
from attnlab.memory.mapped import MappedAllocator
from attnlab.memory.mapped_pool import MappedPool
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.memory.slots import SlotAllocator
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec
from tests.strategies import DEVICE

PAGE_SIZES = [1, 2, 16, 64]
WINDOW, CHUNK = 6, 8


def full(**change: Any) -> AttentionSpec:
    return AttentionSpec(**{"heads": 4, "kv_heads": 2, "qk_dim": 24, "v_dim": 20, "scale": 0.2, **change})


def sliding(**change: Any) -> AttentionSpec:
    """A layer of fewer heads and other dims than a full one."""
    return full(**{"kv_heads": 1, "qk_dim": 16, "v_dim": 8, "window": WINDOW, **change})


def latent(**change: Any) -> AttentionSpec:
    return full(**{"kv_heads": 1, "v_dim": 16, **change})


def model(
    *specs: AttentionSpec, page_size: int = 2, dtype: torch.dtype = torch.float32, mla: bool = False
) -> ModelSpec:
    """A model of such layers, whose numbers are not their places in the pool."""
    layers = tuple(LayerSpec(index=3 * i + 1, attention=spec, pool_layer=i) for i, spec in enumerate(specs))
    return ModelSpec(name="toy", layers=layers, context_len=512, page_size=page_size, kv_dtype=dtype, mla=mla)


MIXED = (sliding(), full(), sliding(window=None, chunk=CHUNK, v_dim=12), full(kv_heads=4))
LATENT = (latent(), latent(window=WINDOW, v_dim=12), latent(v_dim=4), latent(chunk=CHUNK))
ALONE = (sliding(),)


def composite(spec: ModelSpec, n: int) -> KVPool:
    """A unified pool with a storage for sliding layers."""
    return UnifiedPool(spec, num_slots=n, virtual_slots=n, sliding_slots=n // 2, device=DEVICE)


def tell_spaces_apart(pool: KVPool) -> Callable[[], None]:
    """Make ids of the table and of storages differ; call what comes back once the pool is filled.

    A pool that was only ever filled gives a token the same number everywhere, and hides a translation that is missing.
    """
    pool.allocator.allocate("decoy", 2 * pool.page_size)
    if isinstance(pool, WindowPool):
        pool.slide_out("decoy", query=10**6)

    def settle() -> None:
        pool.allocator.release("decoy")
        if isinstance(pool, UnifiedPool):
            pool.compact()

    return settle


Build = Callable[[ModelSpec, int], KVPool]

POOLS: dict[str, tuple[tuple[AttentionSpec, ...], Build]] = {
    "mha": (MIXED, lambda m, n: MHAPool(m, num_slots=n, device=DEVICE)),
    "mha pages": (MIXED, lambda m, n: MHAPool(m, num_slots=n, device=DEVICE, layout="pages")),
    "mla": (LATENT, lambda m, n: MLAPool(m, num_slots=n, device=DEVICE)),
    "window": (MIXED, lambda m, n: WindowPool(m, num_slots=n, sliding_slots=n // 2, device=DEVICE)),
    "window alone": (ALONE, lambda m, n: WindowPool(m, num_slots=n, sliding_slots=n // 2, device=DEVICE)),
    "unified": (MIXED, lambda m, n: UnifiedPool(m, num_slots=n // 2, virtual_slots=n, device=DEVICE)),
    "unified sliding": (MIXED, composite),
    "unified mla": (LATENT, lambda m, n: UnifiedPool(m, num_slots=n // 2, virtual_slots=n, device=DEVICE)),
    "unified mla sliding": (LATENT, composite),
}
"""By name: what the layers are, and how the pool is built for so many slots of the table."""

MAPPED = [name for name in POOLS if name.startswith(("window", "unified"))]
SLIDING = ["window", "window alone", "unified sliding", "unified mla sliding"]
UNIFIED = [name for name in POOLS if name.startswith("unified")]


def built(name: str, page_size: int = 2, *, pages: int = 12) -> KVPool:
    """A pool full of NaN; where it has a smaller space beside the table's, that has half the pages."""
    specs, build = POOLS[name]
    pool = build(model(*specs, page_size=page_size, mla=specs is LATENT), pages * page_size)
    for view in views(pool):
        view.k.fill_(float("nan"))
        view.v.fill_(float("nan"))
    return pool


def mapped(name: str, page_size: int = 2, *, pages: int = 12) -> MappedPool:
    pool = built(name, page_size, pages=pages)
    assert isinstance(pool, MappedPool)
    return pool


def unified(name: str, page_size: int = 2, *, pages: int = 12) -> UnifiedPool:
    pool = built(name, page_size, pages=pages)
    assert isinstance(pool, UnifiedPool)
    return pool


def cached(pool: KVPool, *, max_requests: int = 4, max_context: int = 400) -> PagedCache:
    table = RequestTable(
        max_requests=max_requests,
        max_context=max_context,
        num_slots=pool.num_slots,
        device=pool.device,
        page_size=pool.page_size,
    )
    return PagedCache(table=table, pool=pool)


def views(pool: Any) -> list[Any]:
    return list(pool.views)


def rows(pool: KVPool, layer: int, numbers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Keys and values that say which token of which layer they are."""
    view = pool.view(layer)
    token = torch.tensor(numbers, dtype=torch.float32, device=DEVICE)[:, None, None] * 8 + layer

    def filled(x: Tensor, sign: int) -> Tensor:
        heads, dim = x.shape[-2:]
        place = torch.arange(heads * dim, device=DEVICE).view(heads, dim) / 1024
        return sign * token + place

    return filled(view.k, 1), None if view.v_in_k else filled(view.v, -1)


def write(pool: KVPool, ids: Tensor, numbers: Sequence[int]) -> None:
    for layer in range(len(views(pool))):
        pool.write(layer, ids.to(DEVICE), *rows(pool, layer, numbers))


def stored(pool: KVPool, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer's storage has at ids of the table, by way of its translation."""
    view, at = pool.view(layer), pool.translation(layer).apply(ids.to(DEVICE))
    heads = torch.arange(view.kv_heads, device=DEVICE)
    return view.rows(view.k, at[:, None], heads), view.rows(view.v, at[:, None], heads)


def assert_holds(pool: KVPool, layer: int, ids: Tensor, numbers: Sequence[int]) -> None:
    k, v = rows(pool, layer, numbers)
    got_k, got_v = stored(pool, layer, ids)
    assert torch.equal(got_k, k), (layer, ids.tolist())
    assert torch.equal(got_v, k[..., : got_v.shape[-1]] if v is None else v), (layer, ids.tolist())


def bookkeeping(slots: SlotAllocator) -> tuple[Any, ...]:
    """All that an allocator knows, to compare."""
    spaces = [] if not isinstance(slots, MappedAllocator) else list(slots.storages.values())
    return (
        slots.epoch,
        slots.free_pages,
        {owner: slots.slots_of(owner).tolist() for owner in slots.owners},
        [(space.name, sorted(space.free), space.used, space.pages.tolist()) for space in spaces],
    )
