"""A server's objects as the original's classes are given them: runner, pools, layers, batches; and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnlab.compat.sglang import TritonAttnBackend
from attnlab.eager import oracle
from tests.strategies import DEVICE
from tests.tolerances import OUTPUT

ENGINE = "eager" if DEVICE == "cpu" else "triton"
SIZE, CONTEXT, SLOTS = 8, 64, 512
HEADS, KV_HEADS, DIM, LATENT, RADIUS = 4, 2, 16, 48, 6


def mode(name: str) -> SimpleNamespace:
    """A forward mode: decode, verify, draft extend, extend."""
    return SimpleNamespace(
        is_decode_or_idle=lambda: name == "decode",
        is_target_verify=lambda: name == "verify",
        is_draft_extend_v2=lambda: name == "draft extend",
    )


def layer(number: int, kind: str = "mha", *, radius: int | None = None, **change: Any) -> SimpleNamespace:
    """An attention layer; `radius` is the original's number of a window."""
    mla = kind.endswith("mla")
    plain = {
        "layer_id": number,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": 1 if mla else KV_HEADS,
        "qk_head_dim": LATENT if mla else DIM,
        "v_head_dim": LATENT - 16 if mla else DIM,
        "scaling": 0.3,
        "k_scale": None,
        "v_scale": None,
        "k_scale_float": None,
        "v_scale_float": None,
        "logit_capping_method": "tanh",
        "logit_cap": 0.0,
        "sliding_window_size": -1 if radius is None else radius,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**{**plain, **change})


@dataclass
class WriteLoc:
    """A record of write slots that is the pool's own: it knows no other."""

    loc: Tensor
    swa_loc: Tensor | None
    full_loc: Tensor | None


class Pool:
    """Two layers, full of NaN. `kind`: mha, mla, sliding (own storage for layer 1), unified (virtual slots)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        heads, dim = (1, LATENT) if kind.endswith("mla") else (KV_HEADS, DIM)
        self.k = [torch.full((SLOTS, heads, dim), float("nan"), device=DEVICE) for _ in range(2)]
        self.v = [x[..., : LATENT - 16] if kind.endswith("mla") else torch.full_like(x, float("nan")) for x in self.k]
        self.given: list[WriteLoc] = []
        place = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(5)) + 1
        self.place = torch.cat([torch.zeros(1, dtype=torch.int64), place]).to(DEVICE)
        if kind == "sliding":
            self.translate_loc_from_full_to_swa = lambda loc: self.place[loc.long()]

    def get_key_buffer(self, number: int) -> Tensor:
        return self.k[number]

    def get_value_buffer(self, number: int) -> Tensor:
        return self.v[number]

    def get_v_head_dim(self) -> int:
        return self.v[0].shape[-1]

    def set_kv_buffer(
        self, layer: Any, loc: WriteLoc | Tensor, k: Tensor, v: Tensor, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        where = loc if isinstance(loc, WriteLoc) else WriteLoc(loc, None, None)
        self.given.append(where)
        number = layer.layer_id
        if self.kind == "sliding" and number == 1:
            assert where.swa_loc is not None
            at = where.swa_loc
        else:
            at = where.loc if where.full_loc is None else where.full_loc
        count = k.shape[0]
        if k_scale is not None:
            k /= k_scale
            v /= v_scale
        self.k[number][at[:count].long()] = k
        if not self.kind.endswith("mla"):
            self.v[number][at[:count].long()] = v

    def at(self, number: int, slots: Tensor) -> Tensor:
        """Where the table's slots lie in a layer's storage."""
        translated = self.kind.startswith("unified") or (self.kind == "sliding" and number == 1)
        return self.place[slots.long()] if translated else slots.long()


def runner(pool: Pool, *, radius: int | None = RADIUS, **change: Any) -> SimpleNamespace:
    """A model runner over a pool."""
    mla = pool.kind.endswith("mla")
    allocator = SimpleNamespace()
    if pool.kind.startswith("unified"):
        allocator.translate_kv_loc = lambda ids, out=None: pool.place[ids.long()]
    table = torch.full((SIZE, CONTEXT), 0, dtype=torch.int32, device=DEVICE)
    config = SimpleNamespace(
        attention_arch=SimpleNamespace(name="MLA" if mla else "MHA"),
        context_len=CONTEXT,
        v_head_dim=pool.v[0].shape[-1],
        swa_v_head_dim=None,
        is_encoder_decoder=False,
        get_max_num_attention_heads=lambda: HEADS,
        get_num_kv_heads=lambda tp: 1 if mla else KV_HEADS,
    )
    args = SimpleNamespace(
        triton_attention_num_kv_splits=8,
        triton_attention_split_tile_size=None,
        enable_deterministic_inference=False,
        chunked_prefill_size=-1,
        page_size=1,
    )
    plain = {
        "req_to_token_pool": SimpleNamespace(size=SIZE, req_to_token=table),
        "token_to_kv_pool": pool,
        "token_to_kv_pool_allocator": allocator,
        "sliding_window_size": radius,
        "page_size": 1,
        "device": DEVICE,
        "gpu_id": 0,
        "is_draft_worker": False,
        "model_config": config,
        "server_args": args,
    }
    return SimpleNamespace(**{**plain, **change})


@dataclass
class World:
    """Requests in the table of a runner, and every token's keys and values by layer, as they were given."""

    kind: str = "mha"
    engine: str = ENGINE
    radius: int | None = RADIUS
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = Pool(self.kind)
        self.runner = runner(self.pool, radius=self.radius, **self.changes)
        self.table = self.runner.req_to_token_pool.req_to_token
        self.layers = [layer(0, self.kind), layer(1, self.kind, radius=self.radius)]
        self.backend = TritonAttnBackend(
            self.runner,
            engine=self.engine,
            **{"device_core_count": 132, "speculative_num_draft_tokens": 3, "write_loc": WriteLoc, **self.options},
        )
        self.order = iter((torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3)) + 1).tolist())
        self.numbers = torch.Generator(DEVICE).manual_seed(1)
        self.lens: list[int] = []
        self.truth: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def drawn(self, tokens: int, heads: int, dim: int) -> Tensor:
        return torch.randn(tokens, heads, dim, generator=self.numbers, device=DEVICE)

    def rows(self, number: int, tokens: int) -> tuple[Tensor, Tensor]:
        """New keys and values of a layer."""
        about = self.layers[number]
        k = self.drawn(tokens, about.tp_k_head_num, about.qk_head_dim)
        v = k[..., : about.v_head_dim] if self.kind.endswith("mla") else self.drawn(tokens, KV_HEADS, about.v_head_dim)
        return k, v

    def slots(self, request: int, tokens: int) -> Tensor:
        """Slots of a request's next tokens, entered in the table."""
        new = torch.tensor([next(self.order) for _ in range(tokens)], dtype=torch.int64, device=DEVICE)
        start = self.lens[request]
        self.table[request, start : start + tokens] = new.int()
        return new

    def request(self, tokens: int) -> int:
        """A request of so many cached tokens."""
        number = len(self.lens)
        self.lens.append(0)
        slots = self.slots(number, tokens)
        for about in self.layers:
            k, v = self.rows(about.layer_id, tokens)
            at = self.pool.at(about.layer_id, slots)
            self.pool.k[about.layer_id][at] = k
            if not self.kind.endswith("mla"):
                self.pool.v[about.layer_id][at] = v
            self.truth[number, about.layer_id] = (k, v)
        self.lens[number] = tokens
        return number

    def batch(self, name: str, requests: Sequence[int], new: Sequence[int], *, known: bool = True, **spec: Any) -> Any:
        """A forward batch: `new` tokens a request, whose slots are entered; lengths are `known` on the host or not."""
        old = [self.lens[r] for r in requests]
        out = [self.slots(r, n) for r, n in zip(requests, new, strict=True)]
        total = [a + b for a, b in zip(old, new, strict=True)]
        seq = old if name == "verify" else total

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        return SimpleNamespace(
            batch_size=len(requests),
            forward_mode=mode(name),
            req_pool_indices=ints(requests).long(),
            seq_lens=ints(seq).long(),
            seq_lens_cpu=torch.tensor(seq) if known else None,
            seq_lens_sum=sum(seq) if known else None,
            extend_prefix_lens=ints(old),
            extend_prefix_lens_cpu=old if known else None,
            extend_seq_lens=ints(new),
            extend_seq_lens_cpu=list(new) if known else None,
            out_cache_loc=torch.cat([*out, torch.zeros(0, dtype=torch.int64, device=DEVICE)]),
            spec_info=SimpleNamespace(**spec) if spec else None,
        )

    def inputs(self, tokens: int, about: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of new tokens."""
        return self.drawn(tokens, HEADS, about.qk_head_dim), *self.rows(about.layer_id, tokens)

    def run(self, batch: Any, tokens: int, **options: Any) -> list[tuple[Any, Tensor, Tensor, Tensor, Tensor]]:
        """Attend in every layer; return (layer, q, k, v, out) of each."""
        results = []
        for about in self.layers:
            q, k, v = self.inputs(tokens, about)
            out = self.backend.forward(q, k.clone(), v.clone(), about, batch, **options)
            results.append((about, q, k, v, out.view(tokens, HEADS, about.v_head_dim)))
        return results

    def check(
        self,
        results: Any,
        requests: Sequence[int],
        new: Sequence[int],
        *,
        paths: Sequence[Sequence[int]] | None = None,
        sinks: Tensor | None = None,
        **spec: Any,
    ) -> None:
        """Hold the outputs to the oracle. `paths[i]`: which of a request's new tokens its i-th sees (trees)."""
        for about, q, k, v, out in results:
            window = None if about.sliding_window_size <= 0 else about.sliding_window_size + 1
            at = 0
            for r, n in zip(requests, new, strict=True):
                cached = self.truth[r, about.layer_id]
                for i in range(n):
                    seen = list(range(i + 1)) if paths is None else list(paths[i])
                    keys = torch.cat([cached[0], k[at : at + n][seen]])
                    values = torch.cat([cached[1], v[at : at + n][seen]])
                    want, _ = oracle.attention(
                        q[at + i], keys, values, scale=about.scaling, window=window, sinks=sinks, **spec
                    )
                    torch.testing.assert_close(out[at + i].double(), want, **OUTPUT[torch.float32])
                at += n

    def settle(self, results: Any, requests: Sequence[int], new: Sequence[int]) -> None:
        """The new tokens are cached from now on."""
        at = 0
        for r, n in zip(requests, new, strict=True):
            for about, _, k, v, _ in results:
                old = self.truth[r, about.layer_id]
                self.truth[r, about.layer_id] = (
                    torch.cat([old[0], k[at : at + n]]),
                    torch.cat([old[1], v[at : at + n]]),
                )
            self.lens[r] += n
            at += n
