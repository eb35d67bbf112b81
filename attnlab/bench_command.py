"""`attnlab bench`: time attnlab and its peers side by side, or hold two runs against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from attnlab.bench.compare import compare_runs
from attnlab.bench.goals import goals, outcomes, summary
from attnlab.bench.host_side import CALLS, measure_host_side
from attnlab.bench.peer import Setting, peers
from attnlab.bench.recording import WORKS, measure_hooks
from attnlab.bench.result import FIRST, NotTimed, Result, load
from attnlab.bench.run import run
from attnlab.bench.timing import GraphTimer
from attnlab.bench.warm import warm
from attnlab.bench.workloads import CURVES, GROUPS, USUAL, chosen, workloads
from attnlab.bench_report import (
    listed,
    not_measured,
    outcomes_table,
    print_comparison,
    report,
    row_lines,
    where,
    wide_console,
)
from attnlab.checks import require
from attnlab.files import place
from attnlab.units import printable


def bench_on_gpu(
    *,
    only: Sequence[str],
    quick: bool,
    curves: bool,
    names: Sequence[str] | None,
    without: Sequence[str],
    seconds: float | None,
    patience: float,
    jobs: int,
    sglang: Path | None,
    out: Path | None,
) -> int:
    """Time the chosen workloads; return 1 where a result of attnlab was wrong, or it raised."""
    works = chosen([*only, *CURVES] if curves else only, quick=quick)
    taking = _peers(names, without)
    _check_numbers(seconds, patience, jobs)
    if out is not None:
        place(out, name="--out")
    require(
        torch.cuda.is_available(),
        "there is no GPU here; attnlab bench --cpu times what runs without one",
    )
    setting, timer, console = (
        Setting(device=torch.device("cuda"), engine="triton", sglang=sglang),
        GraphTimer(),
        wide_console(),
    )
    begin = time.monotonic()
    for name in taking:
        peers.get(name)(setting)  # a folder that is not there is told before anything is compiled
    with _progress(console) as progress:
        if jobs > 1:
            task = progress.add_task("compiling", total=len(works))
            told = lambda name: progress.update(task, description=f"compiled {name}", advance=1)  # noqa: E731
            half = None if seconds is None else seconds / 2
            warm(works, names=taking, setting=setting, jobs=jobs, seconds=half, patience=patience, on_done=told)
        task = progress.add_task("timing", total=len(works))

        def on_row(result: Result) -> None:
            progress.update(task, description=result.rows[-1].name, advance=1)
            progress.console.print(Text("\n".join(row_lines(result, result.rows[-1]))))
            if out is not None:
                result.save(out)

        left = None if seconds is None else seconds - (time.monotonic() - begin)
        result = run(works, names=taking, setting=setting, timer=timer, on_row=on_row, seconds=left, patience=patience)
    if out is not None:
        result.save(out)
    report(result, console)
    return int(bool(faults(result)))


def faults(result: Result) -> list[NotTimed]:
    """Return what attnlab got wrong, or could not run; a peer's faults are its own."""
    others = (other for row in result.rows for other in row.not_timed)
    return [other for other in others if other.reason != "declined" and other.peer.startswith(FIRST)]


def bench_on_cpu(measure: Callable[..., Result], *, out: Path | None, quick: bool) -> int:
    """Time what runs on a host, as `measure` does, beside its goals; return 1 where one is missed."""
    if out is not None:
        place(out, name="--out")
    console = wide_console()
    with _progress(console) as progress:
        task = progress.add_task("timing", total=None)
        result = measure(quick=quick, on_step=lambda name: progress.update(task, description=name, advance=1))
    if out is not None:
        result.save(out)
    report(result, console)
    return int(any(goal.met is False for goal in result.goals))


def bench_hooks(*, out: Path | None) -> int:
    """Time decodes with recordings absent, closed and open; return 1 where an answer or a binary was another one."""
    works = [work for work in workloads() if work.name in WORKS]
    setting = Setting(device=torch.device("cuda"), engine="triton")
    return _row_by_row(partial(measure_hooks, works, setting=setting), "what recording costs", out)


def bench_host_side(*, sglang: Path | None, patience: float, out: Path | None) -> int:
    """Time what calls and plans take of the host; return 1 where a result of attnlab was wrong, or it raised."""
    works = [work for work in workloads() if work.name in CALLS]
    setting = Setting(device=torch.device("cuda"), engine="triton", sglang=sglang)
    measured = partial(measure_host_side, works, setting=setting, patience=patience)
    return _row_by_row(measured, "what a step takes beside a GPU", out)


def _row_by_row(measured: Callable[..., Result], what: str, out: Path | None) -> int:
    """Print each row when it is there, then all."""
    if out is not None:
        place(out, name="--out")
    require(torch.cuda.is_available(), f"there is no GPU here, and {what} is measured on one")
    console = wide_console()

    def on_row(result: Result) -> None:
        console.print(Text("\n".join(row_lines(result, result.rows[-1]))))
        if out is not None:
            result.save(out)

    with torch.no_grad():
        result = measured(on_row=on_row)
    report(result, console)
    return int(bool(faults(result)))


def bench_compare(before: Path, after: Path) -> int:
    """Print how two runs differ; return 1 where something got slower by more than noise."""
    comparison = compare_runs(load(before), load(after))
    print_comparison(comparison, wide_console())
    return int(bool(comparison.slower))


def bench_goals(paths: Sequence[Path]) -> int:
    """Print what runs reached of every goal; return 1 where one is missed."""
    results, console = [load(path) for path in paths], wide_console()
    found = outcomes(results, goals())
    for path, result in zip(paths, results, strict=True):
        console.print(Text(f"{path}: {where(result)}"))
    console.print(outcomes_table(found))
    for line in not_measured(found):
        console.print(Text(printable(line)))
    console.print(Text(summary(found)))
    return int(any(one.met is False for one in found))


def list_workloads(only: Sequence[str], *, quick: bool) -> None:
    """Print the names of workloads, those of the groups, and those of the peers; without words, of everything."""
    for work in chosen(only, quick=quick) if only or quick else workloads():
        print(listed(work))
    usual = ", ".join(USUAL)
    print(f"groups: {', '.join(GROUPS)} ({usual} without --only)")
    for name, words in CURVES.items():
        print(f"  {name}: {words}")
    print(f"peers: {', '.join(peers.names())}")


def _peers(names: Sequence[str] | None, without: Sequence[str]) -> list[str]:
    known = peers.names()
    for option, given in (("--peers", names or ()), ("--without", without)):
        for name in given:
            require(name in known, f"{option}: expected some of {', '.join(known)}, got {name!r}")
    taking = [name for name in known if (names is None or name in names) and name not in without]
    require(len(taking) > 0, "--peers: none is left")
    return taking


def _check_numbers(seconds: float | None, patience: float, jobs: int) -> None:
    require(seconds is None or seconds > 0, f"--seconds: expected more than 0, got {seconds}")
    require(patience > 0, f"--patience: expected more than 0, got {patience}")
    require(jobs >= 1, f"--jobs: expected at least 1, got {jobs}")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
