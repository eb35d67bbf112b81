"""`attnlab bench`: time attnlab and its peers side by side, or hold two runs against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attnlab.bench.compare import RunComparison, compare_runs
from attnlab.bench.peer import Setting, peers
from attnlab.bench.recording import WORKS, measure_hooks
from attnlab.bench.result import FIRST, Goal, NotTimed, Result, Row, load
from attnlab.bench.run import run
from attnlab.bench.timing import GraphTimer
from attnlab.bench.warm import warm
from attnlab.bench.workload import Workload
from attnlab.bench.workloads import CURVES, GROUPS, USUAL, chosen, workloads
from attnlab.checks import require
from attnlab.files import place
from attnlab.units import printable

STYLES = {"slower": "bold red", "faster": "green", "as before": ""}


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
        _console(),
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
    console = _console()
    with _progress(console) as progress:
        task = progress.add_task("timing", total=None)
        result = measure(quick=quick, on_step=lambda name: progress.update(task, description=name, advance=1))
    if out is not None:
        result.save(out)
    report(result, console)
    return int(any(goal.met is False for goal in result.goals))


def bench_hooks(*, out: Path | None) -> int:
    """Time decodes with recordings absent, closed and open; return 1 where an answer or a binary was another one."""
    if out is not None:
        place(out, name="--out")
    require(torch.cuda.is_available(), "there is no GPU here, and what recording costs is measured on one")
    setting, console = Setting(device=torch.device("cuda"), engine="triton"), _console()

    def on_row(result: Result) -> None:
        console.print(Text("\n".join(row_lines(result, result.rows[-1]))))
        if out is not None:
            result.save(out)

    works = [work for work in workloads() if work.name in WORKS]
    with torch.no_grad():
        result = measure_hooks(works, setting=setting, on_row=on_row)
    report(result, console)
    return int(bool(faults(result)))


def bench_compare(before: Path, after: Path) -> int:
    """Print how two runs differ; return 1 where something got slower by more than noise."""
    comparison = compare_runs(load(before), load(after))
    _print_comparison(comparison, _console())
    return int(bool(comparison.slower))


def list_workloads(only: Sequence[str], *, quick: bool) -> None:
    """Print the names of workloads, those of the groups, and those of the peers; without words, of everything."""
    for work in chosen(only, quick=quick) if only or quick else workloads():
        print(_listed(work))
    usual = ", ".join(USUAL)
    print(f"groups: {', '.join(GROUPS)} ({usual} without --only)")
    for name, words in CURVES.items():
        print(f"  {name}: {words}")
    print(f"peers: {', '.join(peers.names())}")


def row_lines(result: Result, row: Row) -> list[str]:
    """Return a row in words: each peer's time, rate, share of the ceiling, and attnlab's time over its own.

    What a peer declines is left to the end of the report; what went wrong follows.
    """
    first = row.time_of(FIRST)
    cells = []
    for one in row.timed:
        share = result.ceiling_share(row, one.peer)
        ratio = "" if first is None or one.peer == FIRST else f", attnlab {first.median_us / one.median_us:.2f} of it"
        reached = "" if share is None else f", {share:.0%} of the ceiling"
        what = f" ({one.variant})" if one.variant else ""
        cells.append(f"  {one.peer:14} {one.median_us:10.1f} us{reached}{_rate(row, one.peer)}{ratio}{what}")
    wrong = [f"  {other.peer:14} {other.reason}: {other.why}" for other in row.not_timed if other.reason != "declined"]
    return [f"{row.name}: {row.shape}", *cells, *wrong]


def report(result: Result, console: Console) -> None:
    """Print a run's table, what was declined, and what is left out."""
    console.print(Text(_where(result)))
    if result.rows:
        console.print(_table(result))
        fullest = max(result.rows, key=lambda row: len(row.checked))
        console.print(
            Text(
                "Microseconds; behind a peer's, attnlab's time over it. Held to the oracle before and after, of "
                f"{fullest.name} as of the others: {fullest.checked}."
            )
        )
        for line in declined(result):
            console.print(Text(line))
    if result.goals:
        console.print(_goals(result.goals))
    if result.left_out:
        console.print(Text(f"Left out, as the seconds were over: {', '.join(result.left_out)}"))


def declined(result: Result) -> list[str]:
    """Return a line for each peer and reason, with the rows that it does not run."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in result.rows:
        for other in row.not_timed:
            found.setdefault((other.peer, other.reason, other.why), []).append(row.name)
    lines = []
    for (peer, reason, why), names in found.items():
        where = "all rows" if len(names) == len(result.rows) else ", ".join(names)
        lines.append(printable(f"{peer} {reason} {where}: {why}"))
    return lines


def _table(result: Result) -> Table:
    table = Table()
    columns = ["workload", "ceiling", *result.peers]
    for name in columns:
        table.add_column(name, justify="left" if name == "workload" else "right")
    for row in result.rows:
        bound = (
            ""
            if result.ceilings is None
            else f"{result.ceilings.bound_us(kv_bytes=row.kv_bytes, flops=row.flops):,.1f}"
        )
        first = row.time_of(FIRST)
        cells = []
        for peer in result.peers:
            one = row.time_of(peer)
            words = "" if one is None else f"{one.median_us:,.1f}"
            if one is not None and first is not None and peer != FIRST:
                words += f" {first.median_us / one.median_us:.2f}"
            cells.append(words)
        table.add_row(*(Text(printable(cell)) for cell in (row.name, bound, *cells)))
    return table


def _goals(goals: Sequence[Goal]) -> Table:
    table = Table()
    for name in ("what", "measured", "goal", "met"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for goal in goals:
        met = {True: "yes", False: "NO", None: ""}[goal.met]
        wanted = "" if goal.goal is None else f"{goal.goal:,.4g} {goal.unit}"
        cells = (goal.name, f"{goal.measured:,.4g} {goal.unit}", wanted)
        table.add_row(*(Text(printable(cell)) for cell in cells), Text(met, style="bold red" if met == "NO" else ""))
    return table


def _print_comparison(comparison: RunComparison, console: Console) -> None:
    console.print(Text(f"before: {_where(comparison.before)}\nafter:  {_where(comparison.after)}"))
    table = Table()
    for name in ("workload", "peer", "before", "after", "ratio", "noise", ""):
        table.add_column(name, justify="left" if name in ("workload", "peer", "") else "right")
    for change in comparison.changes:
        numbers = (f"{change.before:,.4g} {change.unit}", f"{change.after:,.4g} {change.unit}", f"{change.ratio:.3f}")
        words = "" if change.verdict == "as before" else change.verdict
        cells = (change.name, change.peer, *numbers, f"{change.noise:.1%}")
        table.add_row(*(Text(printable(cell)) for cell in cells), Text(words, style=STYLES[change.verdict]))
    console.print(table)
    for when, alone in (("before", comparison.only_before), ("after", comparison.only_after)):
        if alone:
            console.print(Text(printable(f"{when} alone: {', '.join(' '.join(key).strip() for key in alone)}")))
    count = len(comparison.slower)
    console.print(Text(f"{count} of {len(comparison.changes)} times are slower by more than noise"))


def _where(result: Result) -> str:
    machine, parts = result.machine, []
    parts += [f"{name} {version}" for name, version in machine.versions.items()]
    parts += [f"commit {machine.commit}" if machine.commit else "commit not known", machine.when, machine.timer]
    if result.ceilings is not None:
        most = result.ceilings
        parts.append(f"ceilings: read {most.read_tb_s:.3g} TB/s, copy {most.copy_tb_s:.3g} TB/s")
        parts.append(f"product {most.matmul_tflop_s:.3g} TFLOP/s")
    return printable(" · ".join([machine.device, *parts]))


def _rate(row: Row, peer: str) -> str:
    if row.mode in ("decode", "verify"):
        return f", {row.tb_s[peer]:.3g} TB/s"
    return f", {row.tflop_s[peer]:.3g} TFLOP/s"


def _listed(work: Workload) -> str:
    quick = ", quick" if work.quick else ""
    longest = max(work.cached)
    return f"{work.name:34} {work.mode:8} {work.requests:4} x {longest:,} + {work.new:,}  ({work.group}{quick})"


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


def _console() -> Console:
    """Return a console as wide as a terminal; into a file or a pipe no line is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)
