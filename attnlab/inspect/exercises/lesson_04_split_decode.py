"""Lesson 04: splitting."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from attnlab.eager import oracle
from attnlab.inspect.exercises.registry import Wrong, ask, exercise
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, workbench
from attnlab.plan.policies.static import Static
from attnlab.plan.policy import SplitContext, resolve_policy
from attnlab.plan.splits import cut

LONG_LENS = (2048, 96, 700)
"""The batch of recorded keys."""
EVEN_LENS = (0, 1, 96, 97, 200, 1000, *LONG_LENS)
"""What a policy is asked to cut evenly."""
EVEN_KEYS = 96


@exercise("04-1", Integral)
def ranges_of_257(answer: Any) -> str:
    """What rounding leaves of 8."""
    (expected,) = cut(Static(splits=8), [257], _context()).to_host().effective
    if answer == expected:
        return ""
    if answer == 8:
        return "8 is what was asked for. Rounding makes ranges longer, and so fewer: how long is one, in 32s?"
    return "257 / 8 keys, rounded up to a multiple of 32, is the length of a range. How many of them cover 257?"


@exercise("04-2", Integral)
def smallest_static(answer: Any) -> str:
    """The fewest ranges with which none is too long."""
    expected = next(n for n in range(1, LONG_LENS[0]) if _longest(n) <= 128)
    if answer < 1:
        return f"Expected at least one range, got {answer}."
    if answer < expected:
        return f"With splits={answer} the longest range still holds {_longest(int(answer))} keys."
    return "" if answer == expected else f"With splits={answer} no range is above 128 keys, but fewer would do."


@exercise("04-3", object)
def even_policy(answer: Any) -> str:
    """A policy that cuts evenly, and decodes right."""
    policy = resolve_policy(answer)
    case = f"With requests of {', '.join(f'{n:,}' for n in EVEN_LENS[:-1])} and {EVEN_LENS[-1]:,} keys"
    plan = ask(case, cut, policy, EVEN_LENS, _context())
    for length, mine in zip(EVEN_LENS, plan.to_host().ranges, strict=True):
        wrong = _uneven([end - start for start, end in mine], length)
        if wrong:
            raise Wrong(f"{case}: {wrong}")
    bench = workbench("SmolLM2-135M", lens=LONG_LENS, policy=policy, engine="eager", layers=[18])
    out, q = bench.decode(18), bench.newest(18)[0]
    k, v = bench.cached(18, 0)
    expected = oracle.attention(q[0], k, v, scale=bench.model.layer(18).attention.scale)[0]
    off = float((out[0].double() - expected).abs().max())
    return "" if off < 0.01 else f"The ranges are right, but the output is off by {off:.3g}."


def _uneven(sizes: list[int], length: int) -> str:
    """Say what is wrong with the ranges of one request, or nothing."""
    if not sizes:
        return ""
    fewest, low, high = -(-length // EVEN_KEYS), min(sizes), max(sizes)
    if high > EVEN_KEYS:
        return f"the one of {length:,} has a range of {high} keys; at most {EVEN_KEYS} are allowed."
    if len(sizes) > fewest:
        return f"the one of {length:,} is cut into {len(sizes)} ranges; {fewest} would do."
    if high - low > 1:
        return (
            f"the one of {length:,} is cut into {len(sizes)} ranges of {low} to {high} keys; the largest and smallest "
            f"may differ by one. Is the rest spread, or all taken from the last?"
        )
    return ""


def _context() -> SplitContext:
    return SplitContext(
        heads=9, kv_heads=3, v_dim=64, mla=False, context_len=8192, multiprocessors=H200_MULTIPROCESSORS
    )


def _longest(splits: int) -> int:
    ranges = cut(Static(splits=splits), LONG_LENS, _context()).to_host().ranges
    return max(end - start for mine in ranges for start, end in mine)
