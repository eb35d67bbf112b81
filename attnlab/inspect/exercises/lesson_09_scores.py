"""Lesson 09: scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab.eager import oracle
from attnlab.inspect.bins import Bins
from attnlab.inspect.exercises.registry import Wrong, as_tensor, ask, exercise, near
from attnlab.inspect.exercises.toy import toy
from attnlab.inspect.record import Scores
from attnlab.inspect.workbench import workbench
from attnlab.mods.registry import score_mods
from attnlab.plan.workspace import FLOAT_BYTES
from attnlab.spec import ScoreMod
from attnlab.trace import Stage

TOTAL, SINK = 3.0, 3.0 + math.log(3)
"""The log-sum-exp of a head's scores and its sink logit, in 09-1."""
QUERIES, HEADS, KEYS = 8, 32, 1000
"""What is recorded there."""
HEAD, LAST, BUDGET = 6, 32, 600_000
"""What 09-2 wants to see of layer 18, and in how many bytes."""
WANTED: tuple[Stage, ...] = ("masked", "weights")


@exercise("09-1", Sequence, "a list of three numbers")
def shares_and_bytes(answer: Any) -> str:
    """What a sink leaves to the keys, and what pages take."""
    if len(answer) != 3:
        return f"Expected a list of three numbers, (a), (b) and (c), got {answer!r}."
    if not all(isinstance(x, Real) for x in answer):
        return f"Expected three numbers, got {answer!r}."
    total, one, size = map(float, answer)
    return _all_keys(total) or _one_key(one) or _bytes(size)


def _weights(*, sink: bool = True) -> Tensor:
    """Return the weights of two keys of score TOTAL - ln 2, as the oracle has them."""
    scores = torch.full((2, 1, 1), TOTAL - math.log(2), dtype=torch.float64)
    values = torch.eye(2)[:, None]  # so that the output is the weights
    one = torch.ones(1, 1, dtype=torch.float64)
    sinks = torch.tensor([SINK], dtype=torch.float64) if sink else None
    return oracle.attention(one, scores, values, scale=1.0, sinks=sinks)[0][0]


def _all_keys(got: float) -> str:
    expected = float(_weights().sum())
    if _same(got, expected):
        return ""
    if _same(got, 1 - expected):
        return "(a): that is the sink's share. How much is left to the keys?"
    if _same(got, 1):
        return "(a): they would sum to 1 without the sink. What share does it take?"
    if _same(got, expected / (1 - expected)):
        return "(a): the keys have that much for each part of the sink's. Which share of both together is theirs?"
    return "(a): the keys count exp(3.0) in the denominator, the sink exp(3.0 + ln 3). How many times as much is that?"


def _one_key(got: float) -> str:
    expected = float(_weights()[0])
    if _same(got, expected):
        return ""
    if _same(got, float(_weights(sink=False)[0])):
        return "(b): that is its share of the keys' weight. The denominator has the sink in it as well."
    return "(b): half of what all keys have: exp(-ln 2) is 1/2."


def _bytes(got: float) -> str:
    pages = len(Bins.of("page", keys=KEYS, ranges=(), page_size=1).edges) - 1
    rows = QUERIES * HEADS
    if got == rows * pages * FLOAT_BYTES:
        return ""
    if got == rows * KEYS * FLOAT_BYTES:
        return "(c): that is by key. A page of 16 keys becomes one number."
    if got == rows * pages:
        return "(c): that is how many numbers they are. A number is fp32."
    if got in (rows * (pages - 1) * FLOAT_BYTES, rows * KEYS * FLOAT_BYTES / 16):
        return "(c): the last page holds only 8 keys, but takes a number of its own."
    return f"(c): a number of {FLOAT_BYTES} bytes for each query, head and page. How many pages have 1,000 keys?"


def _same(a: float, b: float) -> bool:
    return abs(a - b) < 1e-3


@exercise("09-2", Scores)
def wish_within_a_budget(answer: Any) -> str:
    """Two stages of one head, key by key, of every query."""
    bench = workbench("SmolLM2-135M", lens=[2048], policy="static", engine="eager", layers=[18])
    with bench.record(scores=answer, queries=range(-LAST, 0), budget_bytes=BUDGET) as trace:
        bench.extend(18, last=LAST)
    scores = trace.call(18).scores
    for stage in WANTED:
        if stage not in answer.stages:
            return f"The stage {stage!r} is wanted, but not asked for: stages={answer.stages}."
    if answer.heads is not None and HEAD not in answer.heads:
        return f"It is head {HEAD} that is studied; heads={answer.heads} leaves it out."
    if answer.pool != "key":
        return f"pool={answer.pool!r} makes bins of many keys here; every single key is wanted."
    if trace.left_out:
        more = [stage for stage in answer.stages if stage not in WANTED]
        heads = bench.model.layer(18).attention.heads if answer.heads is None else len(answer.heads)
        cause = f"Nobody studies {' or '.join(more)}." if more else f"Of {heads} heads one is studied."
        return f"{len(trace.left_out)} rows are left out. {cause}"
    whole = [score for score in scores if score.by_key and HEAD in score.heads and score.stage in WANTED]
    return "" if len(whole) == LAST * len(WANTED) else f"{len(whole)} of {LAST * len(WANTED)} rows are kept by key."


@exercise("09-3", object)
def log_distance(answer: Any) -> str:
    """A modifier of which both halves subtract ln(1 + distance)."""
    mod = answer if isinstance(answer, ScoreMod) else score_mods.get(answer)
    case = "torch, with a query at 39 and 40 keys"
    torch.manual_seed(0)
    scores, q_pos, kv_pos = torch.randn(1, 8, 40), torch.full((1, 1, 1), 39), torch.arange(40)
    token, head = torch.zeros(1, 1, 1, dtype=torch.int64), torch.arange(8)[:, None]
    got = ask(case, mod.torch, scores, q_pos, kv_pos, token, head, None)
    _check_half(case, as_tensor(case, got), scores, q_pos, kv_pos)
    return _check_kernel(mod)


def _check_kernel(mod: ScoreMod) -> str:
    """Run the Triton half in the kernels, on the toy batch; its scores are those of their second computation."""
    plain = toy().model
    (layer,) = plain.layers
    layers = (replace(layer, attention=replace(layer.attention, mod=mod)),)
    device = "cpu" if INTERPRETED else "cuda"
    bench = workbench(replace(plain, layers=layers), lens=[5, 40], policy="static", engine="triton", device=device)
    case = "Triton, with a query at 39 and 40 keys"
    # A tile has places beyond the last key, where a logarithm may be of nothing; numpy, which interprets it, warns.
    with np.errstate(all="ignore"), bench.record(scores=Scores(stages=("scaled", "masked"), pool="key")) as trace:
        try:
            out = bench.decode(0)
        except Exception as error:  # whatever the reader's half raises
            cause = _root(error)
            raise Wrong(f"{case}: it raised {type(cause).__name__}: {str(cause).rstrip('.')}.") from error
    before, after = (score.values[None] for score in trace.call(0).scores if score.request == 1)
    q_pos, kv_pos = torch.full((1, 1, 1), 39), torch.arange(40)
    _check_half(case, after, before, q_pos, kv_pos)
    q, (k, v) = bench.newest(0)[0][1].cpu(), bench.cached(0, 1)
    expected, _ = oracle.attention(
        q, k, v, scale=0.125, modify=lambda s, at, keys, head: s - torch.log1p((at - keys).double())
    )
    off = float((out[1].cpu().double() - expected).abs().max())
    return "" if off < 1e-3 else f"Both halves are right, but the output of a decode is off by {off:.3g}."


def _root(error: BaseException) -> BaseException:
    """Return what an error comes from: the interpreter wraps it once for each function that it leaves."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _check_half(case: str, got: Tensor, scores: Tensor, q_pos: Tensor, kv_pos: Tensor) -> None:
    """Raise unless a half gave what it should; say which of the usual mistakes gives what it did."""
    distance = (q_pos - kv_pos).double()
    expected = scores.double() - torch.log1p(distance)
    if got.shape != expected.shape:
        raise Wrong(f"{case}: expected scores of shape {list(expected.shape)}, got {list(got.shape)}.")
    if not torch.isfinite(got).all():
        raise Wrong(
            f"{case}: the result holds inf or nan. The query's own key has distance 0, whose logarithm is -inf, and a "
            "distance is q_pos - kv_pos, which is never below 0."
        )
    if near(got, expected):
        return
    usual = {
        "The scores come back as they were: this half does nothing yet.": scores.double(),
        "A key far away should lose: subtract the logarithm, do not add it.": scores.double() + torch.log1p(distance),
        "That is the logarithm to base 2, which is larger by a factor of 1.44.": scores.double()
        - torch.log1p(distance) / math.log(2),
        "That is a penalty by distance itself, as ALiBi's. Take the logarithm of 1 + distance.": scores.double()
        - distance,
        "That is by the key's position. The distance is counted from the query.": scores.double()
        - torch.log1p(kv_pos.double()),
    }
    words = next((hint for hint, wrong in usual.items() if near(got, wrong.expand_as(expected))), "")
    key = int((got.double() - expected).abs().amax((0, 1)).argmax())
    raise Wrong(
        f"{case}: the score {float(scores[0, 0, key]):.2f} of key {key} in head 0 became {float(got[0, 0, key]):.2f}; "
        f"expected {float(expected[0, 0, key]):.2f}. {words}".rstrip()
    )
