"""The unified pool: the table holds virtual slots, and pages behind them may move while requests live.

Reference: the unified memory pool's virtual-to-physical page table, in its two forms, physical and dense.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnlab.checks import placed, require
from attnlab.memory.buffers import Envelope, Memory, Pair, dense_buffers, paged_buffers
from attnlab.memory.mapped import MappedAllocator
from attnlab.memory.mapped_pool import MappedPool, homes_of
from attnlab.memory.pages import count_pages
from attnlab.memory.pool import KVView, Translation
from attnlab.spec import ModelSpec

MOVED_AT_ONCE = 64
"""Pages that a compaction copies at once."""


class UnifiedPool(MappedPool):
    """Keys and values of every layer in pages that hold that page of all layers, behind `virtual_slots` slots.

    `num_slots` of the pool, once built, are the table's: `virtual_slots`. Storage "full" has the `num_slots` physical
    slots given here; with `sliding_slots`, layers that see part of their keys live in a storage "sliding". Each
    storage is one tensor `[pages, page_width]`, so that `compact` moves a page as one piece. Views are page-major;
    under MLA they are by slot, dense: the layers of a storage share its pages, and one id is right in the view of
    each of them (`dense_buffers`). There `k_scale`, which then must be `v_scale`, serves both.

    >>> from attnlab.spec import ModelSpec
    >>> model = ModelSpec.load("SmolLM2-135M", page_size=4)
    >>> pool = UnifiedPool(model, num_slots=64, virtual_slots=128, device="cpu")
    >>> a, b = pool.allocator.allocate(0, 8), pool.allocator.allocate(1, 8)
    >>> pool.allocator.release(0)
    >>> pool.used_pages("full"), pool.compact(), pool.used_pages("full")
    ([3, 4], 2, [1, 2])
    >>> b.tolist()[:3], pool.translation(0).apply(b).tolist()[:3]
    ([12, 13, 14], [8, 9, 10])
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        num_slots: int,
        virtual_slots: int,
        device: torch.device | str,
        sliding_slots: int | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        homes = homes_of(model, sliding=sliding_slots is not None)
        require(
            "full" in homes,
            f"sliding_slots: no layer of model {model.name!r} sees all keys; leave it away, and num_slots slide",
        )
        require(
            not model.mla or k_scale == v_scale,
            f"v_scale: under MLA one stored row is key and value, expected k_scale {k_scale}, got {v_scale}",
        )
        count_pages("num_slots", num_slots, model.page_size)
        count_pages("virtual_slots", virtual_slots, model.page_size)
        slots = {"full": num_slots}
        if sliding_slots is not None:
            count_pages("sliding_slots", sliding_slots, model.page_size)
            slots["sliding"] = sliding_slots
        allocator = MappedAllocator(
            num_slots=virtual_slots,
            page_size=model.page_size,
            space="virtual",
            storages=slots,
            device=placed(device),
        )
        super().__init__(model, allocator=allocator, homes=homes, device=device)
        self._envelopes: dict[str, Envelope] = {}
        made = {home: self._lay_out(model, home, num_slots=size) for home, size in slots.items()}
        layers = [next(made[home]) for home in homes]
        self.views = [KVView(k=k, v=v, k_scale=k_scale, v_scale=v_scale, v_in_k=model.mla) for (k, v), _ in layers]
        self.translations = [translation for _, translation in layers]

    def compact(self) -> int:
        """Move pages so that every storage uses its lowest ones; return how many moved.

        The table's slots stay, the epoch changes where a page moved.
        """
        moved = 0
        for home, envelope in self._envelopes.items():
            moves = self.allocator.compact(home)
            if moves:
                bits = envelope.view(torch.uint8)
                # No page is a target and a source, so they may be copied in turns, and little memory is needed for it.
                for some in torch.tensor(moves).to(self.device, non_blocking=True).split(MOVED_AT_ONCE):
                    bits[some[:, 1]] = bits[some[:, 0]]
            moved += len(moves)
        return moved

    def _lay_out(self, model: ModelSpec, home: str, *, num_slots: int) -> Iterator[tuple[Pair, Translation]]:
        """Allocate a storage's memory; return keys and values of each of its layers, and the way there."""
        specs = [layer.attention for layer, at in zip(model.layers, self.homes, strict=True) if at == home]
        build, form = (dense_buffers, "dense") if model.mla else (paged_buffers, "physical")
        memory: Memory = {"num_slots": num_slots, "dtype": model.kv_dtype, "device": self.device}
        self._envelopes[home], pairs = build(specs, page_size=self.page_size, **memory)
        translation = self._translation(
            home,
            target=form if home == "full" else f"{home} {form}",
            stride=self.page_size * (len(specs) if model.mla else 1),
        )
        return iter([(pair, translation) for pair in pairs])
