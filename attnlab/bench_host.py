"""What attnlab takes on a laptop-class CPU, beside what it is to take: `attnlab bench --cpu`.

Medians of wall-clock times. Whatever begins with a new Python is run in one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import attnlab
from attnlab._boot import INTERPRETED
from attnlab.batch import DecodeBatch
from attnlab.bench.inputs import Inputs
from attnlab.bench.peer import Setting
from attnlab.bench.result import Goal, Result
from attnlab.bench.run import machine
from attnlab.bench.timing import Timing, WallTimer, timed
from attnlab.bench.workload import Workload, heads
from attnlab.checks import require
from attnlab.explore.merge import explore_merge
from attnlab.explore.splits import explore_splits
from attnlab.inspect.traffic import draw_decode_lens
from attnlab.inspect.workbench import workbench

Step = Callable[[str], None]

STARTS, PLANNED = 3, 512


def measure_host(*, quick: bool = False, on_step: Step = lambda name: None) -> Result:
    """Return every goal with what was measured; `quick` leaves out what starts a new Python."""
    goals: list[Goal] = []
    with torch.no_grad():
        for measured in (*(() if quick else (_imports, _tour)), _redraws, _plans, _decode, _interpreted):
            for goal in measured():
                goals.append(goal)
                on_step(goal.name)
    setting = Setting(device=torch.device("cpu"), engine="eager")
    return Result(machine=machine(setting, WallTimer()), goals=tuple(goals))


def _imports() -> Iterator[Goal]:
    for what in ("attnlab", "attnlab.backend"):
        times = [_started("-c", f"import {what}") for _ in range(STARTS)]
        yield _goal(f"import {what}", times, 2.0, "s")


def _tour() -> Iterator[Goal]:
    with tempfile.TemporaryDirectory() as folder:
        seconds = _started("-m", "attnlab", "tour", "--out", folder)
    yield Goal(name="attnlab tour", measured=seconds, goal=60.0, unit="s")


def _redraws() -> Iterator[Goal]:
    splits = explore_splits(policy="tile", compare="seed")
    yield _goal("redraw of explore_splits", _changed(splits, "parameter", (128, 256, 512) * 3), 0.3, "s")
    merge = explore_merge()
    yield _goal("redraw of explore_merge", _changed(merge, "head", (1, 2, 3) * 3), 0.3, "s")


def _changed(explorer: Any, control: str, values: tuple[int, ...]) -> list[float]:
    times = []
    for value in values:
        begin = time.perf_counter()
        explorer.controls[control].value = value
        times.append(time.perf_counter() - begin)
    return times


def _plans() -> Iterator[Goal]:
    lens = tuple(draw_decode_lens("azure_llm_2023_conv", PLANNED, seed=0))
    work = Workload(name="plan", mode="decode", cached=lens, attention=heads(2, 1, 16), dtype=torch.float16)
    inputs = Inputs(work, "cpu")
    for policy in ("seed", "balanced"):
        backend = inputs.backend(engine="eager", policy=policy)

        def plan(backend: Any = backend) -> object:
            return backend.plan(DecodeBatch.of(rows=list(range(PLANNED)), lens=lens, device="cpu"))

        yield _goal(f"plan of {PLANNED} requests, {policy}", _milliseconds(plan), 5.0, "ms")


def _decode() -> Iterator[Goal]:
    for policy in ("seed", "balanced"):
        bench = workbench("SmolLM2-135M", lens=[2048] * 8, policy=policy, engine="eager", layers=[18])
        made = bench.plan()
        q = bench.newest(18)[0].float()

        def decode(bench: Any = bench, made: Any = made, q: Any = q) -> object:
            return bench.backend.decode(18, q, None, None, made, save=False)

        yield _goal(f"eager decode of 8 x 2,048 tokens, {policy}", _milliseconds(decode), 30.0, "ms")


def _interpreted() -> Iterator[Goal]:
    if not INTERPRETED:
        return
    for policy in ("seed", "balanced"):
        bench = workbench("SmolLM2-135M", lens=[512], policy=policy, engine="triton", layers=[18])
        made = bench.plan()
        q = bench.newest(18)[0].float()

        def decode(bench: Any = bench, made: Any = made, q: Any = q) -> object:
            return bench.backend.decode(18, q, None, None, made, save=False)

        yield _goal(f"interpreted decode of 512 tokens, {policy}", _milliseconds(decode), None, "ms")


def _milliseconds(call: Callable[[], object]) -> list[float]:
    call()
    (timing,) = timed([WallTimer().hold(call)], rounds=WallTimer.rounds)
    return [us / 1e3 for us in timing.samples_us]


def _started(*arguments: str) -> float:
    """Return the seconds that a new Python takes for something with this very attnlab."""
    begin = time.perf_counter()
    home = Path(attnlab.__file__).parent.parent
    done = subprocess.run([sys.executable, *arguments], cwd=home, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    last = (done.stderr.strip().splitlines() or [""])[-1]
    require(done.returncode == 0, f"python {' '.join(arguments)}: {last}", RuntimeError)
    return seconds


def _goal(name: str, times: list[float], goal: float | None, unit: str) -> Goal:
    timing = Timing(samples_us=tuple(times), answer=None)
    low, high = timing.spread_us
    middle = float(median(times))
    return Goal(name=name, measured=middle, goal=goal, unit=unit, noise=(high - low) / middle)
