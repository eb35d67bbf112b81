"""The deterministic path: no bit depends on where a prompt is cut, nor on what else is in the batch (B40)."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from attnlab._boot import INTERPRETED
from tests.cases import ENGINES
from tests.extend_cases import CONTEXT, Case, Part, Stand

BATCHES = {"eager": 200, "triton": 12 if INTERPRETED else 200}
"""Random batches of every kind, by engine."""


def served(rng: Random, *, small: bool) -> Case:
    """A deterministic server's layer, and the prompts that it gets, of which nothing is cached."""
    prompts = [rng.randint(1, 150 if small else CONTEXT) for _ in range(rng.randint(2, 3 if small else 5))]
    kv_heads = rng.choice([1, 2])
    dtype = rng.choice([torch.float32, torch.bfloat16])
    return Case(
        id=f"served {rng.random()}",
        why="drawn",
        heads=kv_heads * rng.choice([1, 2] if small else [1, 2, 3, 4, 8]),
        kv_heads=kv_heads,
        qk_dim=(dim := rng.choice([16, 32, 64, 80])),
        v_dim=dim,
        window=rng.choice([None, 1, 40, 128, 200]),
        softcap=rng.choice([None, 5.0, 50.0]),
        sinks=rng.choice([False, True]),
        dtype=dtype,
        kv_dtype=dtype,
        page_size=rng.choice([1, 4]),
        placement=rng.randrange(2**16),
        prefix=(0,) * len(prompts),
        new=tuple(prompts),
        one_pass=True,
    )


def next_chunks(rng: Random, done: list[int], lens: list[int]) -> list[Part]:
    """A chunk of some prompts that are not through, in any order: one token, a few, many, or all the rest."""
    waiting = [r for r, n in enumerate(lens) if done[r] < n]
    some = rng.sample(waiting, rng.randint(1, len(waiting)))
    sizes = [rng.choice([1, rng.randint(1, 64), rng.randint(1, CONTEXT)]) for _ in some]
    return [(r, done[r], min(lens[r], done[r] + size)) for r, size in zip(some, sizes, strict=True)]


def assert_rows(got: tuple[Tensor, Tensor], parts: list[Part], want: list[tuple[Tensor, Tensor]], case: Case) -> None:
    """Each part's rows in the output of a batch have the bits of `want`, part by part."""
    sizes = [last - first for _, first, last in parts]
    for part, (out, lse), alone in zip(parts, zip(*(x.split(sizes) for x in got), strict=True), want, strict=True):
        assert torch.equal(out, alone[0]) and torch.equal(lse, alone[1]), f"(request, first, last) {part} of {case}"


@pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
def test_a_prompt_in_chunks_among_others_has_the_bits_of_the_prompt_alone(engine: str, device: str) -> None:
    rng, batches = Random(0), 0
    while batches < BATCHES[engine]:
        case = served(rng, small=INTERPRETED and engine == "triton")
        quiet = Stand(case, engine, device)
        alone = [quiet.step([part]) for part in quiet.parts]
        busy = Stand(case.but(placement=case.placement + 1), engine, device, quiet.inputs)
        done = [0] * len(case.lens)
        while done != case.lens:
            parts = next_chunks(rng, done, case.lens)
            want = [(alone[r][0][first:last], alone[r][1][first:last]) for r, first, last in parts]
            assert_rows(busy.step(parts), parts, want, case)
            for r, _, last in parts:
                done[r] = last
            batches += 1


@pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
def test_a_decode_among_others_has_the_bits_of_the_request_alone(engine: str, device: str) -> None:
    rng, batches = Random(1), 0
    while batches < BATCHES[engine]:
        case = served(rng, small=INTERPRETED and engine == "triton").but(read_back=True)  # all is cached
        quiet = Stand(case, engine, device)
        busy = Stand(case.but(placement=case.placement + 1), engine, device, quiet.inputs)
        for _ in range(5):
            some = rng.sample(range(len(case.lens)), rng.randint(1, len(case.lens)))
            at = [rng.randint(1, case.lens[r]) for r in some]
            parts = [(r, n - 1, n) for r, n in zip(some, at, strict=True)]
            assert_rows(busy.decode(parts), parts, [quiet.decode([part]) for part in parts], case)
            batches += 1
