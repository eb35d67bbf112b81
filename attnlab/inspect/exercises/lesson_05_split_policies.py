"""Lesson 05: what policies do badly."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from attnlab.inspect.exercises.registry import Wrong, ask, exercise
from attnlab.inspect.traffic import draw_decode_lens
from attnlab.inspect.workbench import H200_MULTIPROCESSORS
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import MIN_BLOCK, HostPolicy, SplitContext, SplitPolicy, resolve_policy
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import cut

TRACE = "mooncake_fast25_synthetic"
ALONE, CONTEXT_LEN = 100_000, 131_072
"""The request that 05-1 asks for, and the most that there can be."""
NEAR = 1.1
"""The finish that 05-2 allows, in even shares."""
PIECES = 4
"""Of 05-3: ranges per even share of a KV head. The finish is then within a quarter of one."""


@exercise("05-1", Integral)
def idle_under_seed(answer: Any) -> str:
    """How many multiprocessors one request leaves without a program."""
    ctx = _context()
    (ranges,) = cut(Seed(), [ALONE], ctx).to_host().effective
    programs = ranges * ctx.kv_heads
    expected = H200_MULTIPROCESSORS - programs
    if answer == programs:
        return f"{programs} is how many get a program. How many are left?"
    if answer == H200_MULTIPROCESSORS - ranges:
        return f"{ranges} ranges is right, but each of {ctx.kv_heads} KV heads has a program for every range."
    if answer == 0:
        return "The request is long enough for everybody, but how many ranges does `seed` allow it at most?"
    return (
        "" if answer == expected else "Programs are ranges times KV heads. How many ranges does `seed` allow at most?"
    )


@exercise("05-2", Integral)
def largest_tile(answer: Any) -> str:
    """The largest tile that is good enough for the trace's requests."""
    if answer < 1 or answer & (answer - 1):
        return f"Expected a power of two, such as 256 or 512, got {answer}."
    ctx, lens = _context(), draw_decode_lens(TRACE, 16, seed=0)
    expected = max(1 << i for i in range(5, 18) if _finish(Tile(tile=1 << i), lens, ctx) <= NEAR * _even(lens, ctx))
    if answer > expected:
        shares = _finish(Tile(tile=answer), lens, ctx) / _even(lens, ctx)
        return f"With tile={answer} the finish is {shares:.2f} even shares."
    if answer < expected:
        return f"With tile={answer} the finish is near enough, but a larger tile would do, with fewer partials."
    return ""


@exercise("05-3", object)
def quarter_policy(answer: Any) -> str:
    """A policy that finishes within a quarter of an even share, with few ranges."""
    policy = resolve_policy(answer)
    for ctx in (_context(), _context(multiprocessors=78), _context(heads=64, kv_heads=4)):
        for words, lens in _batches().items():
            case = f"{words}, {ctx.kv_heads} KV heads and {ctx.multiprocessors} multiprocessors"
            ranges = ask(case, cut, policy, lens, ctx).to_host().ranges
            wrong = _too_fine(ranges, ctx) or _too_late(policy, lens, ctx)
            if wrong:
                raise Wrong(f"{case}: {wrong}")
    return ""


def _too_fine(ranges: Sequence[Sequence[tuple[int, int]]], ctx: SplitContext) -> str:
    """Say where there are too many ranges, or too short ones."""
    short = [end - start for mine in ranges for start, end in mine[:-1] if end - start < MIN_BLOCK]
    if short:
        return f"a range that is not its request's last holds {short[0]} keys; at least {MIN_BLOCK} are asked for."
    allowed = PIECES * (ctx.multiprocessors or 1) // ctx.kv_heads + len(ranges)
    used = sum(map(len, ranges))
    if used <= allowed:
        return ""
    return (
        f"{used:,} ranges, and {allowed} should do. Measure a range against the even share, all keys of all KV heads "
        f"divided by the multiprocessors; both numbers stand in ctx."
    )


def _too_late(policy: SplitPolicy | HostPolicy, lens: Sequence[int], ctx: SplitContext) -> str:
    """Say where the step ends later than it may."""
    even, finish = _even(lens, ctx), _finish(policy, lens, ctx)
    slack = max(MIN_BLOCK, even / PIECES + 1)  # a range is a whole number of keys
    if finish <= even + slack:
        return ""
    return (
        f"the finish is {finish:,} keys, {finish / even:.2f} even shares of {even:,.0f}. It is at most the even share "
        f"and the longest range: how long may a range be?"
    )


def _batches() -> dict[str, list[int]]:
    return {
        "One request of 32,000 keys": [32000],
        "63 requests of 1,024 keys and one of 131,072": [1024] * 63 + [131072],
        "16 requests of a trace": draw_decode_lens(TRACE, 16, seed=0),
        "The same in order of length": sorted(draw_decode_lens(TRACE, 16, seed=0)),
        "Four requests of 200 keys": [200] * 4,
        "Requests of 0, 1 and 33 keys": [0, 1, 33],
        "Two requests of 0 keys": [0, 0],
    }


def _even(lens: Sequence[int], ctx: SplitContext) -> float:
    """Keys that each multiprocessor reads where all read alike."""
    return sum(lens) * ctx.kv_heads / (ctx.multiprocessors or 1)


def _finish(policy: SplitPolicy | HostPolicy, lens: Sequence[int], ctx: SplitContext) -> int:
    """Keys of the multiprocessor that is done last; each program goes to the one that is free first."""
    busy = [0] * (ctx.multiprocessors or 1)
    schedule = Schedule.of(policy, cut(policy, lens, ctx), ctx)
    keys = (schedule.segments[:, 3] - schedule.segments[:, 2]).tensor_split(schedule.program_indptr.tolist())
    for mine in keys:
        busy[busy.index(min(busy))] += int(mine.sum())
    return max(busy)


def _context(*, heads: int = 32, kv_heads: int = 8, multiprocessors: int = H200_MULTIPROCESSORS) -> SplitContext:
    return SplitContext(
        heads=heads,
        kv_heads=kv_heads,
        v_dim=128,
        mla=False,
        context_len=CONTEXT_LEN,
        multiprocessors=multiprocessors,
    )
