"""The hybrid pool: layers that see all keys keep all, layers with a window or chunk share a smaller storage.

Reference: SWAKVPool.
"""

from __future__ import annotations

import torch

from attnlab.checks import placed, require
from attnlab.memory.buffers import slot_buffers
from attnlab.memory.mapped import MappedAllocator
from attnlab.memory.mapped_pool import MappedPool, homes_of
from attnlab.memory.pages import count_pages
from attnlab.memory.pool import KVView, Translation
from attnlab.spec import ModelSpec


class WindowPool(MappedPool):
    """Keys and values of a model some of whose layers see only part of them.

    A token has a slot of the table ("full"), at which layers that see all keys store their rows, and, while a query
    may still see it, one of `sliding_slots` slots for the other layers ("sliding"). Rows are stored as in an MHAPool.

    >>> from attnlab.spec import ModelSpec
    >>> model = ModelSpec.load("gpt-oss-20b", page_size=16).only((0, 1))     # a window of 128 keys, then all keys
    >>> pool = WindowPool(model, num_slots=512, sliding_slots=256, device="cpu")
    >>> slots = pool.allocator.allocate(0, 200)
    >>> pool.slide_out(0, query=200)                                        # which sees positions 73 to 200
    >>> [pool.kept_from(layer, 0) for layer in (0, 1)], pool.used_pages("sliding")
    ([64, 0], [5, 6, 7, 8, 9, 10, 11, 12, 13])
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        num_slots: int,
        sliding_slots: int,
        device: torch.device | str,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        require(not model.mla, f"model {model.name!r} keeps latent rows; build a UnifiedPool with sliding_slots")
        homes = homes_of(model, sliding=True)
        slots = {"full": num_slots, "sliding": sliding_slots}
        count_pages("sliding_slots", sliding_slots, model.page_size)
        allocator = MappedAllocator(
            num_slots=num_slots,
            page_size=model.page_size,
            space="full",
            storages={"sliding": sliding_slots},
            device=placed(device),
        )
        super().__init__(model, allocator=allocator, homes=homes, device=device)
        pairs = [
            slot_buffers(layer.attention, num_slots=slots[home], dtype=model.kv_dtype, device=self.device)
            for layer, home in zip(model.layers, homes, strict=True)
        ]
        self.views = [KVView(k=k, v=v, k_scale=k_scale, v_scale=v_scale) for k, v in pairs]
        by_home = {
            "full": Translation.same("full", page_size=model.page_size),
            "sliding": self._translation("sliding", target="sliding", stride=model.page_size),
        }
        self.translations = [by_home[home] for home in homes]
