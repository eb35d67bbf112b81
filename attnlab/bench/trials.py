"""Trials: the candidates of a row, each held to the oracle before it is timed, all of a workload in turns.

What does not fit the device, or is wrong, is an entry of the finding and keeps no other from running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch

from attnlab._triton import spilled
from attnlab.bench.inputs import Inputs
from attnlab.bench.peer import Call, Setting, one_line
from attnlab.bench.peers.own import Own
from attnlab.bench.result import Machine
from attnlab.bench.run import release
from attnlab.bench.timing import Held, Timer, timed
from attnlab.bench.truth import Truth, WrongResult
from attnlab.bench.tune import POLICIES, TEXTS, Config, Task
from attnlab.bench.workloads import Workload
from attnlab.checks import require
from attnlab.kernels.tuning import using
from attnlab.kernels.tuning.checks import check
from attnlab.kernels.tuning.rows import Measured, Row, Run, Table

LEAST_GAIN = 0.01
"""A config takes another's place where it is quicker by more than that, in the mean of the workloads."""
MOST_LOSS = 0.02
"""And slower in none of them by more than that: times of one run, in turns, repeat within less."""
SOURCE = "attnlab tune"
"""What a run says of itself where others name a file."""


class BrokenDevice(RuntimeError):
    """A config left the device unusable: nothing can be timed in this process any more."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """A config, and what became of it: median microseconds by workload, registers spilled, or why it has no times.

    `spills` is None where its kernel was not loaded by this process as a binary: where it is interpreted.
    """

    config: Config
    us: dict[str, float] = field(default_factory=dict)
    spills: int | None = None
    fault: str | None = None

    def ratio(self, to: Trial, work: str | None = None) -> float:
        """Return its time over another's: of a workload, or the geometric mean of all.

        >>> fast, slow = Trial(config={}, us={"a": 1.0, "b": 8.0}), Trial(config={}, us={"a": 2.0, "b": 16.0})
        >>> round(fast.ratio(slow), 6), fast.ratio(slow, "a")
        (0.5, 0.5)
        """
        if work is not None:
            return self.us[work] / to.us[work]
        return math.exp(sum(math.log(self.ratio(to, name)) for name in to.us) / len(to.us))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the trials of a task found; the first is of the config that stands in the table."""

    task: Task
    trials: tuple[Trial, ...]

    @property
    def before(self) -> Trial:
        """The config that stands in the table."""
        return self.trials[0]

    @property
    def best(self) -> Trial:
        """The one to take: the quickest that is quicker by more than LEAST_GAIN, and slow nowhere; else that before."""
        before = self.before
        if before.fault is not None:
            right = [trial for trial in self.trials if trial.fault is None]
            return min(right, key=lambda trial: trial.ratio(right[0]), default=before)
        better = [trial for trial in self.trials if trial.fault is None and _better(trial, before)]
        return min(better, key=lambda trial: trial.ratio(before), default=before)

    @property
    def changes(self) -> bool:
        """Whether another config is to be taken."""
        return self.best is not self.before


def _better(trial: Trial, before: Trial) -> bool:
    loses = any(trial.ratio(before, work) > 1 + MOST_LOSS for work in before.us)
    return trial.ratio(before) < 1 - LEAST_GAIN and not loses


def search(
    task: Task, *, setting: Setting, timer: Timer, on_trial: Callable[[str], None] = lambda words: None
) -> Finding:
    """Return what the configs of a task take. `on_trial` is told each workload and config before it is tried.

    Raises BrokenDevice where nothing can be timed in this process any more.
    """
    trials = tuple(Trial(config=config) for config in task.configs)
    with torch.no_grad():
        for work in task.works:
            _try_all(work, task, trials, setting=setting, timer=timer, on_trial=on_trial)
            release(setting.device)
    return Finding(task=task, trials=trials)


def _try_all(
    work: Workload,
    task: Task,
    trials: Sequence[Trial],
    *,
    setting: Setting,
    timer: Timer,
    on_trial: Callable[[str], None],
) -> None:
    inputs = Inputs(work, setting.device)
    truth = Truth.of(inputs)
    ready: list[tuple[Trial, Call, Held]] = []
    for trial in trials:
        if trial.fault is not None:
            continue
        on_trial(f"{work.name}, {words(trial.config)}")
        seen = spilled(TEXTS[task.row.kernel])
        try:
            call = launching(task, trial.config, inputs, engine=setting.engine)
            truth.error(call.read(call.run()))
            ready.append((trial, call, timer.hold(call.run)))
        except WrongResult as wrong:
            trial.fault = f"wrong: {wrong}"
        except Exception as error:  # of whatever type: what does not fit, most often
            trial.fault = one_line(error)
            _still_works(setting, task, trial)
        loaded = spilled(TEXTS[task.row.kernel])
        new = [spills for key, spills in loaded.items() if key not in seen]
        if new:
            trial.spills = max(*new, trial.spills or 0)
    try:
        timings = timed([held for _, _, held in ready], rounds=timer.rounds, cold=work.cold)
    except Exception as error:  # of whatever type: a fault on the device, which no config owns up to
        raise BrokenDevice(f"{task.row.title}, {work.name}, when repeated: {one_line(error)}") from error
    for (trial, call, _), timing in zip(ready, timings, strict=True):
        try:
            truth.error(call.read(timing.answer))
        except WrongResult as wrong:
            trial.fault = f"when repeated, wrong: {wrong}"
        else:
            trial.us[work.name] = timing.median_us


def _still_works(setting: Setting, task: Task, trial: Trial) -> None:
    try:
        release(setting.device)
    except Exception as error:  # of whatever type: the fault that the config left behind
        raise BrokenDevice(
            f"{task.row.title}, {words(trial.config)}: broke the device ({one_line(error)}); start again, "
            "with this config out of GRIDS in attnlab/bench/tune.py"
        ) from error


def launching(task: Task, config: Config, inputs: Inputs, *, engine: str) -> Call:
    """Return a workload's call, launched by a config in the row's place whenever it runs.

    It raises RuntimeError where the row is not launched by: what was timed would be another's.
    """
    number = task.table.rows.index(task.row)
    table = task.table.trying(task.row, config)
    policy = POLICIES.get(task.row.kernel, "balanced")
    with using(table):
        (call,) = Own(engine=engine, policy=policy, extends=True).calls(inputs)

    def run() -> Any:
        with using(table):
            answer = call.run()
        used = any(row is table.rows[number] for row in table.taken)
        require(used, f"{inputs.work.name} was not launched by the row {task.row.title}", RuntimeError)
        return answer

    return replace(call, run=run)


def words(config: Config) -> str:
    """Return a config as the table has it.

    >>> words({"block_n": 64, "num_warps": 4})
    'block_n 64, num_warps 4'
    """
    return ", ".join(f"{name} {value}" for name, value in config.items())


# --- Compiled ahead ---------------------------------------------------------------------------------------------


def warm(tasks: Sequence[Task], *, setting: Setting, jobs: int, on_done: Callable[[], None] = lambda: None) -> None:
    """Run every config once in `jobs` processes, so that the trials find it in the compiler's cache on disk."""
    parts = [(task, work, part) for task in tasks for work in task.works for part in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_compile, task, work, task.configs[part::jobs], setting) for task, work, part in parts]
        for future in as_completed(waiting):
            if isinstance(future.exception(), BrokenProcessPool):
                return  # the trials compile what is missing
            on_done()


def _compile(task: Task, work: Workload, configs: Sequence[Config], setting: Setting) -> None:
    with torch.no_grad():
        inputs = Inputs(work, setting.device)
        for config in configs:
            try:
                launching(task, config, inputs, engine=setting.engine).run()
            except Exception:  # of whatever type: the trial says it
                continue
        del inputs
        release(setting.device)


# --- What is written --------------------------------------------------------------------------------------------


def retuned(table: Table, findings: Sequence[Finding], machine: Machine) -> Table:
    """Return a table whose tuned rows have the configs that were found best, and what these took.

    Raises ValueError where the result is no right table.
    """
    name, run = _run_of(table, machine)
    for finding in findings:
        best, row = finding.best, finding.task.row
        if best.fault is not None or not best.us:
            continue
        us = {work: round(us, 1) for work, us in best.us.items()}
        why = None if finding.changes else row.why
        new = replace(row, config=best.config, measured=Measured(run=name, us=us), unmeasured=None, why=why)
        table = _with(table, new, {name: run})
    check(table, name="the table to be written")
    return table


def _with(table: Table, new: Row, runs: dict[str, Run]) -> Table:
    """Return a table with a row in the place of the device's own for these shapes, or before that of all devices."""
    same = [row for row in table.rows if (row.kernel, row.when) == (new.kernel, new.when)]
    mine = [row for row in same if row.on == new.on]
    if mine:
        return table.changed(mine[0], new, runs=runs)
    others = [row for row in same if _covers(row, new)]
    return table.changed(others[0], new, others[0], runs=runs)


def _covers(row: Row, new: Row) -> bool:
    (device,) = new.on
    return device in row.on or (device.startswith("sm_") and "cuda" in row.on)


def _run_of(table: Table, machine: Machine) -> tuple[str, Run]:
    run = Run(
        device=machine.device,
        versions=", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        commit=machine.commit,
        when=machine.when,
        file=SOURCE,
    )
    name = f"tune-{machine.when[:16]}"
    return name, run
