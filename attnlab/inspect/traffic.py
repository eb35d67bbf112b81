"""Request lengths as servers meet them: drawn from the statistics of public traces in `data/traffic.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlab.assets import load_json
from attnlab.checks import positive, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request's prompt and answer, in tokens."""

    input_tokens: int
    output_tokens: int


@lru_cache
def _traces() -> dict[str, Any]:
    traces: dict[str, Any] = load_json("traffic.json", "traces")
    return traces


def trace_names() -> list[str]:
    """Return the names of the traces whose statistics are shipped."""
    return list(_traces())


def trace_title(trace: str) -> str:
    """Return a trace's title and how its authors wish to be cited."""
    row = _trace(trace)
    return f"{row['title']} ({row['licence']}; {row['cite']})"


def draw_requests(trace: str, count: int, *, seed: int) -> list[Request]:
    """Return so many requests, drawn with a seed. Prompt and answer of one request are drawn as a correlated pair.

    The pair's ranks come from the trace's joint rank histogram, the lengths from the quantiles at these ranks.
    """
    positive("count", count)
    row, rng = _trace(trace), np.random.default_rng(seed)
    joint = np.asarray(row["joint_rank_histogram_16x16"], dtype=np.float64)
    joint /= joint.sum()
    inputs, outputs = np.unravel_index(rng.choice(joint.size, size=count, p=joint.ravel()), joint.shape)
    in_rank = _rank_within(joint.sum(1), inputs, rng)
    out_rank = _rank_within(joint.sum(0), outputs, rng)
    return [
        Request(input_tokens=_quantile(row, "input", a), output_tokens=_quantile(row, "output", b))
        for a, b in zip(in_rank, out_rank, strict=True)
    ]


def draw_decode_lens(trace: str, count: int, *, seed: int) -> list[int]:
    """Return the lengths that a decode step meets: each prompt, and a uniform part of its answer, at least 1."""
    rng = np.random.default_rng([seed, 1])
    requests = draw_requests(trace, count, seed=seed)
    parts = rng.random(count)
    return [max(1, r.input_tokens + int(part * r.output_tokens)) for r, part in zip(requests, parts, strict=True)]


def scale_to(lens: Sequence[int], longest: int) -> list[int]:
    """Return the lengths, all scaled by one factor, so that none is above `longest`; unchanged where none is.

    A request keeps at least one token, and one without tokens stays without.
    """
    positive("longest", longest)
    top = max(lens, default=0)
    return list(lens) if top <= longest else [max(min(n, 1), n * longest // top) for n in lens]


def _trace(trace: str) -> dict[str, Any]:
    require(trace in _traces(), f"trace: expected one of {', '.join(_traces())}, got {trace!r}")
    row: dict[str, Any] = _traces()[trace]
    return row


def _rank_within(shares: NDArray[np.float64], bins: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return a rank in each drawn bin. Ties make the histogram's bins uneven: a bin is as wide as its share."""
    upper = np.cumsum(shares)
    return upper[bins] - shares[bins] * rng.random(bins.shape[0])


def _quantile(row: dict[str, Any], side: str, rank: float) -> int:
    values = row[f"{side}_tokens_quantiles"]
    return int(np.interp(rank, np.linspace(0, 1, len(values)), values))
