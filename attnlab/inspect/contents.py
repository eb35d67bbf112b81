"""What a workbench puts into its cache: recorded attention where there is some, seeded normal numbers elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attnlab.checks import require
from attnlab.inspect.samples import MODEL, LayerSample, Sample, random_layer
from attnlab.spec import LayerSpec, ModelSpec

QUERY_STEP = 17
"""Requests that are shorter than the text end at different tokens, so many apart."""


def is_recorded(model: ModelSpec, layer: LayerSpec) -> bool:
    """Whether the layer's queries, keys and values were recorded: layers 0, 18 and 23 of SmolLM2-135M."""
    a = layer.attention
    shape = (a.heads, a.kv_heads, a.qk_dim, a.v_dim)
    return model.name == MODEL and layer.index in Sample.load("long").layers and shape == (9, 3, 64, 64)


def layer_contents(model: ModelSpec, layer: LayerSpec, lens: Sequence[int], *, seed: int) -> list[LayerSample]:
    """Return q, k and v of every request, cut to its length; q of its last tokens, as far as the queries go."""
    if is_recorded(model, layer):
        sample = Sample.load("long").layer(layer.index)
        return [_cut(sample, *_span(sample, length, request)) for request, length in enumerate(lens)]
    a = layer.attention
    shape = {"heads": a.heads, "kv_heads": a.kv_heads, "qk_dim": a.qk_dim, "v_dim": a.v_dim}
    seeds = [seed_of(seed, layer.index, request) for request in range(len(lens))]
    drawn = [random_layer(tokens=n, queries=min(n, 1), seed=s, **shape) for n, s in zip(lens, seeds, strict=True)]
    # Under MLA the values are no numbers of their own, but the first columns of the rows.
    return [replace(x, v=x.k[..., : a.v_dim]) for x in drawn] if model.mla else drawn


def last_queries(model: ModelSpec, layer: LayerSpec, content: LayerSample, count: int, *, seed: int) -> Tensor:
    """Return the queries of a request's last tokens, `[count, heads, qk_dim]`; those that were not recorded are drawn.

    Raises ValueError where a recorded text has fewer.
    """
    have = content.q.shape[0]
    if not is_recorded(model, layer):
        a = layer.attention
        shape = {"heads": a.heads, "kv_heads": a.kv_heads, "qk_dim": a.qk_dim, "v_dim": a.v_dim}
        drawn = random_layer(tokens=0, queries=max(0, count - have), seed=seed, **shape)
        return torch.cat([drawn.q, content.q])[max(0, have - count) :]
    require(
        count <= have, f"last: layer {layer.index} has the recorded queries of a request's last {have}, got {count}"
    )
    return content.q[have - count :]


def seed_of(seed: int, *which: int) -> int:
    """Return the seed of one layer's or request's numbers; no two of them share theirs, nor with another `seed`."""
    return int(np.random.SeedSequence(seed, spawn_key=which).generate_state(1, np.uint64)[0])


def token_texts(model: ModelSpec, lens: Sequence[int], request: int) -> tuple[str, ...]:
    """Return the texts of a request's tokens where one of the layers is recorded, else nothing."""
    recorded = [layer for layer in model.layers if is_recorded(model, layer)]
    if not recorded:
        return ()
    sample = Sample.load("long")
    first, end = _span(sample.layer(recorded[0].index), lens[request], request)
    return sample.tokens[first:end]


def _span(sample: LayerSample, length: int, request: int) -> tuple[int, int]:
    """Return `length` consecutive tokens that end at one whose query was recorded, a different one for each request."""
    tokens, queries = sample.k.shape[0], sample.q.shape[0]
    require(
        length <= tokens,
        f"lens: request {request} has {length:,} tokens, the recorded text {tokens:,}; scale the lengths "
        "(attnlab.inspect.traffic.scale_to)",
    )
    end = max(tokens - (QUERY_STEP * request) % queries, length)
    return end - length, end


def _cut(sample: LayerSample, first: int, end: int) -> LayerSample:
    known = sample.first_query
    return LayerSample(
        q=sample.q[max(first - known, 0) : max(end - known, 0)], k=sample.k[first:end], v=sample.v[first:end]
    )
