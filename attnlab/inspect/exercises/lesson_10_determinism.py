"""Lesson 10: determinism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch
from attnlab.eager import oracle
from attnlab.inspect.exercises.registry import CLOSE, Wrong, ask, exercise, off_by
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, workbench
from attnlab.plan.policy import HostPolicy, SplitContext, SplitPolicy, resolve_policy
from attnlab.plan.splits import cut

TERMS = (1.0, 2.0**24, 1.0, -(2.0**24))
"""What 10-1 sums."""
LONGEST, MOST_KEYS, MOST_RANGES = 2000, 300, 8
"""The request of 10-2 at its end, and what its ranges are held to."""
CROWD = (96, 700) * 30
"""Neighbours on either side, among which 10-2 tries a policy of the reader's own."""
FIRST_CUT = 64
DOUBLING_LENS = (0, 1, 63, 64, 65, 128, 129, 300, 2048, 100_000)
"""Requests that 10-3 cuts in one batch."""
DECODED = (700, 96, 2048)
"""Those that it decodes."""

Ranges = Sequence[tuple[int, int]]


@exercise("10-1", Sequence, "a list of two numbers")
def two_sums(answer: Any) -> str:
    """Sums of the same numbers in two orders."""
    terms = torch.tensor(TERMS)
    expected = [float(_total(terms)), float(_total(torch.stack([_total(part) for part in terms.split(2)])))]
    if len(answer) != 2:
        return f"Expected a list of two numbers, (a) and (b), got {answer!r}."
    got = [float(x) for x in answer]
    if got == expected:
        return ""
    if got == expected[::-1]:
        return "The two are in the wrong order: (a) is one range, (b) is two."
    if got[0] == sum(TERMS):
        return "(a): 1 + 2²⁴ lies between two numbers that fp32 has, and is rounded to 2²⁴. And the other 1?"
    if got[0] != expected[0]:
        return "(a): add one number after the other, and round to a number that fp32 has after each."
    if got[1] == sum(TERMS):
        return "(b): the first range is 1 + 2²⁴, which is rounded. Only the second keeps its 1."
    if got[1] == expected[0]:
        return "(b): the second range is 1 - 2²⁴, and below 2²⁴ fp32 has every whole number: this 1 is kept."
    return "(b): sum each range by itself, rounding after each step; then add the two."


@exercise("10-2", SplitPolicy | HostPolicy | str, "a split policy")
def policy_that_never_moves(answer: Any) -> str:
    """Ranges that stay while a request grows."""
    policy, ctx = resolve_policy(answer), _context()
    before: Ranges = ()
    for length in range(1, LONGEST + 1):
        mine = ask(f"With {length:,} tokens", cut, policy, [length], ctx).to_host().ranges[0]
        longest = max(end - first for first, end in mine)
        if longest > MOST_KEYS:
            return f"With {length:,} tokens a range holds {longest} keys; at most {MOST_KEYS} are allowed."
        moved = next((keys for keys in before[:-1] if keys not in mine), None)
        if moved is not None:
            now = next(keys for keys in mine if keys[0] <= moved[0] < keys[1])
            return (
                f"With {length - 1:,} tokens a full range holds keys {moved[0]} to {moved[1] - 1}; one token later "
                f"they are cut anew, from {now[0]} to {now[1] - 1}. Which policy cuts at fixed places?"
            )
        before = mine
    if len(before) > MOST_RANGES:
        return f"No range moves, but {LONGEST:,} tokens have {len(before)} ranges. Longer ones are allowed."
    if _looks_around(policy, before):
        return (
            "Alone no range moves, but this policy looks at the neighbours: in another batch they would. Which policy "
            "cuts at fixed places, whoever else is there?"
        )
    return ""


def _looks_around(policy: SplitPolicy | HostPolicy, alone: Ranges) -> bool:
    """Whether a policy may cut a request otherwise among others; a reader's own, which says nothing, is tried."""
    if isinstance(policy, SplitPolicy):
        return not policy.batch_invariant
    found = ask("In a batch", cut, policy, [*CROWD, LONGEST, *CROWD], _context()).to_host().ranges[len(CROWD)]
    return list(found) != list(alone)


@exercise("10-3", SplitPolicy | HostPolicy | str, "a split policy")
def doubling(answer: Any) -> str:
    """A policy with cuts at powers of two, which then runs on a deterministic backend."""
    policy = resolve_policy(answer)
    for lens in ((300,), (128,), DOUBLING_LENS):
        case = f"With {', '.join(f'{n:,}' for n in lens)} keys"
        found = ask(case, cut, policy, list(lens), _context()).to_host().ranges
        for length, mine in zip(lens, found, strict=True):
            expected = list(_doubled(length))
            if list(mine) != expected:
                raise Wrong(f"{case}: expected {_told(expected)}, got {_told(mine)}. {_why(mine)}".rstrip())
    return _decoded(policy)


def _decoded(policy: SplitPolicy | HostPolicy) -> str:
    """Say what is wrong with a decode under a policy, or nothing."""
    bench = workbench("SmolLM2-135M", lens=DECODED, layers=[18], policy=policy, engine="eager")
    invariant = replace(policy, batch_invariant=True) if isinstance(policy, HostPolicy) else policy
    backend = AttentionBackend(
        model=bench.model,
        pool=bench.pool,
        table=bench.table,
        engine="eager",
        policy=invariant,
        max_requests=len(DECODED),
        multiprocessors=H200_MULTIPROCESSORS,
        deterministic=True,
    )
    q, outs = bench.newest(18)[0], []
    for count in (1, len(DECODED)):
        batch = DecodeBatch.of(rows=bench.batch.rows.tolist()[:count], lens=DECODED[:count], device="cpu")
        plan = backend.plan(batch)
        outs.append(backend.decode(18, q[:count].float(), None, None, plan, save=False)[0])
    if not torch.equal(*outs):
        return "The ranges are right, but a request alone has other bits than among others."
    expected = oracle.attention(q[0], *bench.cached(18, 0), scale=bench.model.layer(18).attention.scale)[0]
    off = off_by(outs[0], expected)
    return "" if off <= CLOSE * (1 + float(expected.abs().max())) else f"The output is off by {off:.3g}."


def _total(terms: torch.Tensor) -> torch.Tensor:
    """Add from left to right, in fp32."""
    result = torch.tensor(0.0)
    for term in terms:
        result = result + term
    return result


def _doubled(length: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a request."""
    first, end = 0, FIRST_CUT
    while first < length:
        yield first, min(end, length)
        first, end = end, 2 * end


def _why(mine: Ranges) -> str:
    """Say what wrong ranges look like. (Empty ones, and those that leave keys out, are refused before.)"""
    sizes = [end - first for first, end in mine]
    if sizes[:2] == [FIRST_CUT, 2 * FIRST_CUT]:
        return "The places of the cuts are doubled, not the sizes: the second range is as long as the first."
    return ""


def _told(ranges: Ranges) -> str:
    return ", ".join(f"({first}, {end})" for first, end in ranges) or "no range"


def _context() -> SplitContext:
    return SplitContext(
        heads=9, kv_heads=3, v_dim=64, mla=False, context_len=131072, multiprocessors=H200_MULTIPROCESSORS
    )
