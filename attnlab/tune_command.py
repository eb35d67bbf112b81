"""`attnlab tune`: time candidates for the tiles, warps and stages of kernels on this GPU, and rewrite their table."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Printed
from rich.text import Text

from attnlab._boot import INTERPRETED
from attnlab.assets import data_path, in_wheel
from attnlab.bench.peer import Setting
from attnlab.bench.run import machine
from attnlab.bench.timing import GraphTimer, Timer
from attnlab.bench.trials import BrokenDevice, Finding, Trial, retuned, search, warm, words
from attnlab.bench.tune import GRIDS, Task, idle, tasks
from attnlab.bench.workloads import chosen
from attnlab.checks import require
from attnlab.files import place, write_whole
from attnlab.inspect.workbench import H200_MULTIPROCESSORS
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import FILE, shipped
from attnlab.kernels.tuning.file import written
from attnlab.kernels.tuning.rows import KERNELS, Row, Table
from attnlab.units import printable

SHOWN = 5
"""How many of a row's candidates are printed, beside the one that stands in the table: the quickest."""
REMAKE = "ATTNLAB_INTERPRET=0 python -m attnlab.inspect.resources --write"
H200 = Target(kind="cuda", arch=90, multiprocessors=H200_MULTIPROCESSORS)
"""What is listed where there is no GPU."""


def tune_on_gpu(
    *,
    kernels: Sequence[str],
    only: Sequence[str],
    quick: bool,
    near: bool,
    jobs: int,
    seconds: float | None,
    write: Path | None,
) -> int:
    """Time the candidates of rows that the chosen workloads are launched by; return 1 where a row could not be tuned.

    `write` is where the table is to lie; None: nothing is written.
    """
    require(jobs >= 1, f"--jobs: expected at least 1, got {jobs}")
    require(seconds is None or seconds > 0, f"--seconds: expected more than 0, got {seconds}")
    works, table = chosen(only, quick=quick), shipped()
    tasks(table, H200, (), kernels=kernels)  # an unknown kernel is told first
    if write is not None:
        place(write, name="--write")
    require(
        torch.cuda.is_available(),
        "there is no GPU here; attnlab tune --list shows what would be tried, attnlab doctor what is missing",
    )
    require(not INTERPRETED, "kernels are interpreted in this process; start it with ATTNLAB_INTERPRET=0")
    setting = Setting(device=torch.device("cuda"), engine="triton")
    todo = tasks(table, Target.of(setting.device), works, kernels=kernels, near=near)
    require(
        len(todo) > 0, "--only: none of the workloads is launched by these kernels; attnlab tune --list shows which"
    )
    return tune(todo, table=table, setting=setting, timer=GraphTimer(), jobs=jobs, seconds=seconds, write=write)


def tune(
    todo: Sequence[Task],
    *,
    table: Table,
    setting: Setting,
    timer: Timer,
    jobs: int,
    seconds: float | None,
    write: Path | None,
) -> int:
    """Run tasks, print what each found and what would change; after each write the table, where `write` says."""
    console, begin, where = _console(), time.monotonic(), machine(setting, timer)
    findings: list[Finding] = []
    broken = False
    with _progress(console) as progress:
        if jobs > 1:
            step = progress.add_task("compiling", total=sum(len(task.works) for task in todo) * jobs)
            warm(todo, setting=setting, jobs=jobs, on_done=lambda: progress.advance(step))
        for number, task in enumerate(todo):
            if seconds is not None and time.monotonic() - begin > seconds:
                left = ", ".join(other.row.title for other in todo[number:])
                console.print(Text(printable(f"Left out, as the seconds were over: {left}")))
                break
            step = progress.add_task(task.row.title, total=len(task.works) * len(task.configs))
            told = lambda said, step=step: progress.update(step, description=said, advance=1)  # noqa: E731
            try:
                findings.append(search(task, setting=setting, timer=timer, on_trial=told))
            except BrokenDevice as error:
                console.print(Text(printable(f"The search ends here. {error}"), style="bold red"))
                broken = True
                break
            progress.remove_task(step)
            for line in finding_lines(findings[-1]):
                console.print(Text(printable(line)))
            if write is not None:
                write_whole(write, written(retuned(table, findings, where)).encode(), name="--write")
    console.print(changes(findings))
    console.print(Text(printable(_what_was_written(findings, write))))
    return int(broken or any(finding.best.fault is not None for finding in findings))


def _what_was_written(findings: Sequence[Finding], write: Path | None) -> str:
    if write is None:
        return "Nothing was written; --write puts these measurements, and what changes, into the table."
    right = [finding for finding in findings if finding.best.fault is None]
    changed = sum(finding.changes for finding in right)
    said = f"{write}: {len(right)} rows measured anew, {changed} with another config."
    return said + (f" What kernels take has changed: {REMAKE} makes data/kernel_resources.md anew." if changed else "")


def where_to_write(given: str) -> Path:
    """Return the file that --write means: the checkout's own table where it names none.

    Raises ValueError in an installed package, whose files are no place for new ones.
    """
    if given:
        return Path(given)
    own = data_path(FILE)
    require(
        not in_wheel(own),
        f"--write: the table at {own} belongs to an installed package; run in a checkout, or name a file: "
        f"--write {FILE}, which goes into a checkout's data/",
    )
    return own


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding in words: the config of the table, the quickest others, and what has no times."""
    before, row = finding.before, finding.task.row
    lines = [f"{row.title}: {len(finding.trials)} configs on {', '.join(work.name for work in finding.task.works)}"]
    if before.fault is not None:
        lines.append(f"  in the table  {words(before.config)}: {before.fault}")
        return [*lines, *_faults(finding.trials[1:])]
    lines.append(f"  in the table  {words(before.config)}: {_times(before)}{_spills(before)}")
    right = sorted((t for t in finding.trials[1:] if t.fault is None), key=lambda trial: trial.ratio(before))
    for trial in right[:SHOWN]:
        mark = "  <- better" if trial is finding.best else ""
        ratio = f"{trial.ratio(before):.3f} of its time"
        lines.append(f"  {ratio:13} {words(trial.config)}: {_times(trial)}{_spills(trial)}{mark}")
    return [*lines, *_faults(finding.trials[1:])]


def _times(trial: Trial) -> str:
    return ", ".join(f"{name} {us:,.1f} us" for name, us in trial.us.items())


def _spills(trial: Trial) -> str:
    return f", spills {trial.spills} registers" if trial.spills else ""


def _faults(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each kind of fault, with the first config that has it; numbers make no kind of their own."""
    kinds: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.fault is not None:
            kinds.setdefault(re.sub(r"\d+", "", trial.fault), []).append(trial)
    return [f"  {len(alike)} not timed, such as {words(alike[0].config)}: {alike[0].fault}" for alike in kinds.values()]


def changes(findings: Sequence[Finding]) -> Printed:
    """Return a table of what is tuned: the config before and after, old and new times, their ratio."""
    table = Printed()
    for name in ("row", "in the table", "best", "ratio", "us, before and after"):
        table.add_column(name, justify="right" if name == "ratio" else "left")
    for finding in findings:
        before, best = finding.before, finding.best
        if best.fault is not None:
            cells = (finding.task.row.title, words(before.config), "nothing is right", "", best.fault)
        else:
            new = words(best.config) if finding.changes else "the same"
            old = {name: f"{us:,.1f}" for name, us in before.us.items()}
            times = ", ".join(f"{name} {old.get(name, 'wrong')} -> {us:,.1f}" for name, us in best.us.items())
            ratio = "" if before.fault is not None else f"{best.ratio(before):.3f}"
            cells = (finding.task.row.title, words(before.config), new, ratio, times)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


# --- Listed -----------------------------------------------------------------------------------------------------


def list_tunings(*, kernels: Sequence[str], only: Sequence[str], quick: bool, near: bool) -> None:
    """Print the rows for this GPU, or for an H200 where there is none: config, measurement, what would be tried."""
    gpu = torch.cuda.is_available()
    target, table = Target.of(torch.device("cuda")) if gpu else H200, shipped()
    todo = tasks(table, target, chosen(only, quick=quick), kernels=kernels, near=near)
    if not gpu:
        print("There is no GPU here: these are the rows for an H200 (sm_90).")
    for kernel in kernels or KERNELS:
        print()
        print(f"{kernel} tries {_grid(kernel)}")
        for task in todo:
            if task.row.kernel == kernel:
                print(*map(printable, _listed(task, table)), sep="\n")
        for row in idle(table, target, todo, kernel=kernel):
            print(printable(f"  {row.shapes}: {words(row.config)}; no chosen workload is launched by it"))


def _grid(kernel: str) -> str:
    return ", ".join(f"{name} {' '.join(str(value) for value in values)}" for name, values in GRIDS[kernel].items())


def _listed(task: Task, table: Table) -> list[str]:
    row = task.standing
    return [
        f"  {row.shapes}: {words(row.config)}",
        f"    {_source(row, table)}",
        f"    {len(task.configs) - 1} others on {', '.join(work.name for work in task.works)}",
    ]


def _source(row: Row, table: Table) -> str:
    if row.measured is None:
        return f"unmeasured: {row.unmeasured}"
    run = table.runs[row.measured.run]
    times = ", ".join(f"{name} {us:,.1f} us" for name, us in row.measured.us.items())
    return f"{times} ({run.device}, {run.file}" + (f", commit {run.commit})" if run.commit else ")")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _console() -> Console:
    """Return a console as wide as a terminal; into a file or a pipe no line is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)
