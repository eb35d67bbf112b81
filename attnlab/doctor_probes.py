"""What the doctor tries out: every data file is opened, and a small decode is held to the oracle.

Apart from the doctor, which loads this file only when it gets here: the library's own imports may be what is broken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnlab.assets import load_json
from attnlab.eager import oracle
from attnlab.inspect.samples import MODEL, Sample
from attnlab.inspect.traffic import trace_names
from attnlab.inspect.workbench import workbench
from attnlab.plan.policies.static import Static
from attnlab.spec import AttentionSpec, ModelSpec

TINY = AttentionSpec(heads=4, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25)
LENS = (70, 5)
"""Two requests: one that is split, one that is not."""


def models() -> str:
    """Read the table of models."""
    ModelSpec.load(MODEL)
    return f"{len(load_json('models.json', 'models'))} models"


def traffic() -> str:
    """Read the statistics of traffic."""
    return f"{len(trace_names())} traces"


def sample(text: str) -> str:
    """Read a recorded text: its tokens and every layer's tensors."""
    recorded = Sample.load(text)
    for layer in recorded.layers:
        recorded.layer(layer)
    return f"{len(recorded.tokens):,} tokens, layers {', '.join(map(str, recorded.layers))}"


DATA: dict[str, Callable[[], str]] = {
    "models.json": models,
    "traffic.json": traffic,
    "sample long": lambda: sample("long"),
    "sample short": lambda: sample("short"),
}


def decode_error(engine: str, device: str) -> float:
    """Decode a tiny batch of random numbers, and return the largest error against the fp64 oracle."""
    model = ModelSpec.uniform(TINY, layers=1, context_len=128, page_size=1, kv_dtype=torch.float32)
    bench = workbench(model, lens=LENS, policy=Static(splits=2), engine=engine, device=device)
    q, _, _ = bench.newest(0)
    truth = [oracle.attention(q[r].cpu(), *bench.cached(0, r), scale=TINY.scale)[0] for r in range(len(LENS))]
    return float((bench.decode(0).cpu().double() - torch.stack(truth)).abs().max())
