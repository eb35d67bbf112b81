"""PyTorch's FlexAttention, compiled for each shape, over contiguous copies of the keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnlab.bench.inputs import Dense, Inputs
from attnlab.bench.peer import Call, Setting, peer, unusual
from attnlab.bench.peers.torch_sdpa import together
from attnlab.bench.workload import Workload
from attnlab.spec import AttentionSpec

MOST_LENGTHS = 2
"""Each length is compiled anew, which takes seconds."""


@dataclass(frozen=True, slots=True)
class Flex:
    """One call for all requests of a length; on a CPU it is not compiled, which is its definition in torch."""

    setting: Setting

    def declines(self, work: Workload) -> str | None:
        """Decline sinks and fp8, which it has no argument for, and many lengths."""
        what = unusual(work, but=("window", "chunk", "tree", "soft cap", "temperature", "MLA"))
        if what is not None:
            return f"FlexAttention has no {what}"
        lengths = len(set(work.cached))
        return f"{lengths} lengths would be compiled one by one" if lengths > MOST_LENGTHS else None

    def calls(self, inputs: Inputs) -> list[Call]:
        """Return the one way."""
        run: Callable[..., Any] = flex_attention
        if self.setting.device.type == "cuda":
            torch._dynamo.reset()  # it gives up compiling after some shapes, and would go on without saying so
            # A shape is a kernel or two: a pool of processes to compile them would cost more than it brings.
            inductor: Any = import_module("torch._inductor.config")
            inductor.compile_threads = 1
            run = torch.compile(flex_attention, dynamic=False)
        parts = [_part(inputs, dense, run) for dense in inputs.dense]
        return [
            Call(
                run=lambda: [part() for part in parts],
                read=lambda answers: together(inputs, answers),
            )
        ]


def _part(inputs: Inputs, dense: Dense, attention: Callable[..., Any]) -> Callable[[], Tensor]:
    work, spec = inputs.work, inputs.work.attention
    mask = None
    if work.new > 1:
        seen = inputs.seen(dense) if work.tree else None
        mask = create_block_mask(
            _sees(spec, dense.cached) if seen is None else _told(seen),
            None,
            None,
            work.new,
            dense.k.shape[2],
            device=str(inputs.device),
        )
    score = _score(spec, dense.cached - (work.mode == "decode"))

    def run() -> Tensor:
        out = attention(
            dense.q,
            dense.k,
            dense.v,
            score_mod=score,
            block_mask=mask,
            scale=spec.scale,
            enable_gqa=spec.group > 1,
        )
        if not isinstance(out, Tensor):
            raise TypeError(f"flex_attention gave a {type(out).__name__}")
        return out

    return run


def _sees(spec: AttentionSpec, cached: int) -> Callable[..., Tensor]:
    sight = spec.sight

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        position = q + cached
        seen = k <= position
        if sight.window is not None:
            seen &= k > position - sight.window
        if sight.chunk is not None:
            seen &= k // sight.chunk == position // sight.chunk
        return seen

    return sees


def _told(seen: Tensor) -> Callable[..., Tensor]:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[q, k]

    return sees


def _score(spec: AttentionSpec, first: int) -> Callable[..., Tensor] | None:
    """Return what scores undergo beside the scale; the first query stands at `first`."""
    cap, start = spec.softcap, spec.temperature_len
    if cap is None and start is None:
        return None

    def score(x: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            x = cap * torch.tanh(x / cap)
        if start is not None:
            position = (q + first).to(torch.float32)
            x = torch.where(position > start, x * torch.log2(position.clamp(min=2.0)) / math.log2(start), x)
        return x

    return score


peer("flex")(Flex)
