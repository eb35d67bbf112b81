"""What is measured: one small value a workload, in one table. Adding one is one line.

A name says mode, requests and tokens: `decode-64x4k` decodes 64 requests of 4,096 tokens, `extend-4x2k+8k` extends 4
requests of 8,192 cached tokens by 2,048 each. Heads are 32 over 8 of 128 columns and storage bf16 in pages of one slot,
unless the name says otherwise: `d64` columns, `64q4kv` heads, `w128` a window, `p64` pages, `fp8` keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import torch

from attnlab.bench.workload import Workload as Workload
from attnlab.bench.workload import heads as heads
from attnlab.bench.workload import latent as latent
from attnlab.checks import require
from attnlab.inspect.traffic import draw_decode_lens, trace_names
from attnlab.spec import ModelSpec

K = 1024


def _random(count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(int(n) for n in np.random.default_rng(0).integers(low, high, count))


BINARY = (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7)
"""A tree of 16 drafts: each has two children, as far as they go."""
GQA, MLA128, MLA16 = heads(), latent(128), latent(16)
MLA40 = replace(latent(40), qk_dim=288, v_dim=256)
"""MiniCPM3's: latent rows of other columns than DeepSeek's."""
FP8 = torch.float8_e4m3fn

MLA_TABLE: tuple[Workload, ...] = (
    Workload(name="decode-mla128-32x8k", mode="decode", cached=(8 * K,) * 32, attention=MLA128, mla=True, quick=True),
    Workload(name="decode-mla128-1x32k", mode="decode", cached=(32 * K,), attention=MLA128, mla=True),
    Workload(name="decode-mla128-128x4k", mode="decode", cached=(4 * K,) * 128, attention=MLA128, mla=True),
)
"""All latent heads; in TABLE in pages of one slot and of 64."""

TABLE: tuple[Workload, ...] = (
    # Those that say most come first: a run that is cut off keeps what it has.
    Workload(name="decode-64x4k", mode="decode", cached=(4 * K,) * 64, attention=GQA, quick=True),
    Workload(name="decode-1x8k", mode="decode", cached=(8 * K,), attention=GQA, quick=True),
    Workload(name="decode-1x128k", mode="decode", cached=(128 * K,), attention=GQA, quick=True),
    Workload(name="decode-skew", mode="decode", cached=(128 * K, *(K,) * 63), attention=GQA, quick=True),
    Workload(name="verify-64x16+4k", mode="verify", cached=(4 * K,) * 64, new=16, attention=GQA, quick=True),
    Workload(name="extend-1x8k", mode="extend", cached=(0,), new=8 * K, attention=GQA, quick=True),
    Workload(name="extend-4x2k+8k", mode="extend", cached=(8 * K,) * 4, new=2 * K, attention=GQA, quick=True),
    MLA_TABLE[0],
    Workload(name="decode-mla16-32x8k", mode="decode", cached=(8 * K,) * 32, attention=MLA16, mla=True, quick=True),
    Workload(name="decode-8x8k", mode="decode", cached=(8 * K,) * 8, attention=GQA),
    Workload(name="decode-128x8k", mode="decode", cached=(8 * K,) * 128, attention=GQA),
    Workload(name="decode-256x2k", mode="decode", cached=(2 * K,) * 256, attention=GQA),
    Workload(name="decode-64x8k-8q1kv", mode="decode", cached=(8 * K,) * 64, attention=heads(8, 1)),
    Workload(name="decode-8x4k-mha", mode="decode", cached=(4 * K,) * 8, attention=heads(32, 32)),
    Workload(name="decode-64x4k-mha", mode="decode", cached=(4 * K,) * 64, attention=heads(32, 32)),
    Workload(name="decode-random", mode="decode", cached=_random(64, 100, 16_000), attention=GQA),
    Workload(name="decode-64x4k-fp8", mode="decode", cached=(4 * K,) * 64, attention=GQA, kv_dtype=FP8, quick=True),
    Workload(name="decode-1x128k-fp8", mode="decode", cached=(128 * K,), attention=GQA, kv_dtype=FP8),
    Workload(name="decode-skew-fp8", mode="decode", cached=(128 * K, *(K,) * 63), attention=GQA, kv_dtype=FP8),
    Workload(name="decode-128x8k-fp8", mode="decode", cached=(8 * K,) * 128, attention=GQA, kv_dtype=FP8),
    Workload(name="decode-256x2k-fp8", mode="decode", cached=(2 * K,) * 256, attention=GQA, kv_dtype=FP8),
    Workload(name="decode-8x8k-fp8", mode="decode", cached=(8 * K,) * 8, attention=GQA, kv_dtype=FP8),
    Workload(name="decode-1x8k-cold", mode="decode", cached=(8 * K,), attention=GQA, cold=True),
    Workload(name="decode-64x4k-d64", mode="decode", cached=(4 * K,) * 64, attention=heads(64, 8, 64)),
    Workload(name="decode-256x2k-d64", mode="decode", cached=(2 * K,) * 256, attention=heads(64, 8, 64)),
    Workload(name="decode-16x4k-d80", mode="decode", cached=(4 * K,) * 16, attention=heads(32, 32, 80)),
    Workload(name="decode-64x4k-d80", mode="decode", cached=(4 * K,) * 64, attention=heads(32, 32, 80)),
    Workload(name="decode-64x4k-192-128", mode="decode", cached=(4 * K,) * 64, attention=heads(64, 8, 192, 128)),
    Workload(name="decode-64x4k-d256", mode="decode", cached=(4 * K,) * 64, attention=heads(16, 8, 256)),
    Workload(name="decode-64x4k-64q4kv", mode="decode", cached=(4 * K,) * 64, attention=heads(64, 4)),
    Workload(name="decode-64x4k-64q8kv", mode="decode", cached=(4 * K,) * 64, attention=heads(64, 8)),
    Workload(name="decode-64x4k-32q16kv", mode="decode", cached=(4 * K,) * 64, attention=heads(32, 16)),
    Workload(name="decode-64x8k-32q1kv", mode="decode", cached=(8 * K,) * 64, attention=heads(32, 1)),
    Workload(name="decode-64x4k-w128", mode="decode", cached=(4 * K,) * 64, attention=heads(64, 8, 64, window=128)),
    Workload(name="decode-128x4k-w128", mode="decode", cached=(4 * K,) * 128, attention=heads(64, 8, 64, window=128)),
    Workload(name="decode-256x4k-w128", mode="decode", cached=(4 * K,) * 256, attention=heads(64, 8, 64, window=128)),
    *MLA_TABLE[1:],
    *(replace(work, name=f"{work.name}-p64", page_size=64, quick=False) for work in MLA_TABLE),
    Workload(name="decode-mla8-32x8k", mode="decode", cached=(8 * K,) * 32, attention=latent(8), mla=True),
    Workload(name="decode-mla40-32x8k-288", mode="decode", cached=(8 * K,) * 32, attention=MLA40, mla=True),
    Workload(name="decode-mla16-128x4k", mode="decode", cached=(4 * K,) * 128, attention=MLA16, mla=True),
    Workload(name="verify-64x4+4k", mode="verify", cached=(4 * K,) * 64, new=4, attention=GQA),
    Workload(name="verify-64x8+4k", mode="verify", cached=(4 * K,) * 64, new=8, attention=GQA),
    Workload(name="verify-8x8+16k", mode="verify", cached=(16 * K,) * 8, new=8, attention=GQA, quick=True),
    Workload(name="verify-64x16+4k-tree", mode="verify", cached=(4 * K,) * 64, new=16, tree=BINARY, attention=GQA),
    Workload(name="verify-64x8+4k-tree", mode="verify", cached=(4 * K,) * 64, new=8, tree=BINARY[:8], attention=GQA),
    Workload(name="verify-64x4+4k-tree", mode="verify", cached=(4 * K,) * 64, new=4, tree=BINARY[:4], attention=GQA),
    Workload(name="verify-8x8+16k-tree", mode="verify", cached=(16 * K,) * 8, new=8, tree=BINARY[:8], attention=GQA),
    Workload(name="verify-mla16-16x4+4k", mode="verify", cached=(4 * K,) * 16, new=4, attention=MLA16, mla=True),
    Workload(name="extend-16x512+4k", mode="extend", cached=(4 * K,) * 16, new=512, attention=GQA),
    Workload(name="extend-1x8k-p64", mode="extend", cached=(0,), new=8 * K, attention=GQA, page_size=64),
    Workload(name="extend-4x2k+8k-p64", mode="extend", cached=(8 * K,) * 4, new=2 * K, attention=GQA, page_size=64),
    Workload(name="extend-16x512+4k-p64", mode="extend", cached=(4 * K,) * 16, new=512, attention=GQA, page_size=64),
    Workload(name="extend-1x16k-w4k", mode="extend", cached=(0,), new=16 * K, attention=heads(window=4 * K)),
    Workload(name="extend-1x8k-d64", mode="extend", cached=(0,), new=8 * K, attention=heads(9, 3, 64)),
    Workload(name="extend-1x8k-d256", mode="extend", cached=(0,), new=8 * K, attention=heads(8, 4, 256)),
    Workload(name="extend-1x4k-192-128", mode="extend", cached=(0,), new=4 * K, attention=heads(64, 8, 192, 128)),
    Workload(name="unified-1x8k", mode="unified", cached=(0,), new=8 * K, attention=GQA, quick=True),
    Workload(name="unified-4x2k+8k", mode="unified", cached=(8 * K,) * 4, new=2 * K, attention=GQA),
    Workload(name="unified-16x512+4k", mode="unified", cached=(4 * K,) * 16, new=512, attention=GQA),
)


def traffic() -> list[Workload]:
    """Return a decode of 64 requests, drawn from each trace of public serving traffic."""
    return [
        Workload(
            name=f"decode-64-{trace.replace('_', '-')}",
            mode="decode",
            cached=tuple(draw_decode_lens(trace, 64, seed=0)),
            attention=GQA,
            group="traffic",
        )
        for trace in trace_names()
    ]


def models() -> list[Workload]:
    """Return a decode of 16 requests of 4,096 tokens for each kind of layer of each published model.

    A model with a gap in its data where a shape needs a fact has no row: a test names them.
    """
    made = []
    for name in ModelSpec.names():
        try:
            model = ModelSpec.load(name, context_len=4 * K)
        except ValueError:
            continue
        kinds = {layer.attention: layer for layer in reversed(model.layers)}
        for attention in reversed(kinds):
            sight = attention.sight.span
            part = "" if len(kinds) == 1 else "-sliding" if sight else "-full"
            made.append(
                Workload(
                    name=f"model-{name}{part}",
                    mode="decode",
                    cached=(4 * K,) * 16,
                    attention=attention,
                    mla=model.mla,
                    group="models",
                )
            )
    return made


CURVES = {
    "curve-batch": "requests of 4,096 tokens",
    "curve-context": "tokens of one request",
    "curve-splits": "ranges of each of 8 requests of 16,384 tokens",
    "curve-pages": "slots a page, 64 requests of 4,096 tokens",
}
"""The groups of workloads that are curves, and what grows along each."""
USUAL = ("table", "traffic")
"""The groups that are run where none is named, and of which a mode's name speaks."""
GROUPS = (*USUAL, "models", *CURVES)


def curves() -> list[Workload]:
    """Return decodes along which one thing grows: requests, tokens, ranges of a request, slots of a page."""
    batch, context, splits, pages = CURVES
    made = [(batch, 2**i, Workload(name="", mode="decode", cached=(4 * K,) * 2**i, attention=GQA)) for i in range(10)]
    made += [
        (context, K * 2**i, Workload(name="", mode="decode", cached=(K * 2**i,), attention=GQA)) for i in range(11)
    ]
    long = Workload(name="", mode="decode", cached=(16 * K,) * 8, attention=GQA)
    made += [(splits, 2**i, replace(long, splits=2**i)) for i in range(8)]
    usual = Workload(name="", mode="decode", cached=(4 * K,) * 64, attention=GQA)
    made += [(pages, n, replace(usual, page_size=n)) for n in (1, 4, 16, 64, 256)]
    return [replace(work, name=f"{group}-{x}", group=group, x=float(x)) for group, x, work in made]


def workloads() -> list[Workload]:
    """Return all, in the order in which they are run: those of the table, traffic, models, curves.

    >>> [work.name for work in chosen(["decode-1x8k*"])]
    ['decode-1x8k', 'decode-1x8k-cold']
    """
    return [*TABLE, *traffic(), *models(), *curves()]


def chosen(words: Sequence[str] = (), *, quick: bool = False) -> list[Workload]:
    """Return the workloads that one of the words names: a mode, a group, a name, or a pattern of names with * in it.

    Without words, those of the table and of traffic. `quick` leaves those that say most. Raises ValueError where a word
    names none, or none is left.
    """
    everything = workloads()
    known = {work.mode for work in everything} | {work.group for work in everything}
    for word in words:
        named = word in known or any(fnmatchcase(work.name, word) for work in everything)
        require(
            named, f"only: {word!r} names no workload; say {', '.join(sorted(known))}, or a name: {_some(everything)}"
        )
    found = [work for work in everything if _named(work, words) and (work.quick or not quick)]
    require(len(found) > 0, f"only: none of the quick workloads is named by {', '.join(words)}; leave quick out")
    return found


def _named(work: Workload, words: Sequence[str]) -> bool:
    usual = work.group in USUAL  # curves and models are asked for by their own names
    if not words:
        return usual
    return any((word == work.mode and usual) or word == work.group or fnmatchcase(work.name, word) for word in words)


def _some(works: Iterable[Workload]) -> str:
    return ", ".join([work.name for work in works][:3]) + ", ..."
