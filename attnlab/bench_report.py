"""Runs of the benchmark in words and tables, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnlab.bench.compare import RunComparison
from attnlab.bench.goals import Outcome
from attnlab.bench.result import FIRST, Goal, Result, Row
from attnlab.bench.workload import Workload
from attnlab.units import printable

STYLES = {"slower": "bold red", "faster": "green", "as before": ""}


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
    console.print(Text(where(result)))
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


def print_comparison(comparison: RunComparison, console: Console) -> None:
    """Print how two runs differ."""
    console.print(Text(f"before: {where(comparison.before)}\nafter:  {where(comparison.after)}"))
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


def outcomes_table(found: Sequence[Outcome]) -> Table:
    """Return a table of all goals: a line for each row that was measured, and one for the others of a goal."""
    table = Table()
    for name in ("goal", "what", "workload", "measured", "wanted", "moonshot", ""):
        table.add_column(name, justify="right" if name in ("measured", "wanted", "moonshot") else "left")
    for wanted in dict.fromkeys(one.wanted for one in found):
        mine = [one for one in found if one.wanted is wanted]
        there = [one for one in mine if one.measured is not None]
        limits = ["" if x is None else f"{x:.4g}" for x in (wanted.goal, wanted.moonshot)]
        lines = [((one.row, f"{one.measured:.4g}", *limits, one.verdict), one.met) for one in there]
        if len(there) < len(mine):
            left = f"{len(mine) - len(there)} {'more' if there else 'rows' if len(mine) > 1 else 'row'}"
            lines.append(((left, "", *limits, "not measured"), None))
        for number, (cells, met) in enumerate(lines):
            head = ("", "") if number else (wanted.work, wanted.words)
            style = {True: "green", False: "bold red", None: ""}[met]
            texts = [Text(printable(cell)) for cell in (*head, *cells)]
            texts[-1].stylize(style)
            table.add_row(*texts)
    return table


def not_measured(found: Sequence[Outcome]) -> list[str]:
    """Return a line for each reason why rows were not measured, with their names."""
    reasons: dict[str, dict[str, None]] = {}
    for one in found:
        if one.measured is None:
            reasons.setdefault(one.why, {})[one.row] = None
    return [f"not measured, {why}: {', '.join(rows)}" for why, rows in reasons.items()]


def where(result: Result) -> str:
    """Return in a line where a run was, and what the device did at most."""
    machine, parts = result.machine, []
    parts += [f"{name} {version}" for name, version in machine.versions.items()]
    parts += [f"commit {machine.commit}" if machine.commit else "commit not known", machine.when, machine.timer]
    if result.ceilings is not None:
        most = result.ceilings
        parts.append(f"ceilings: read {most.read_tb_s:.3g} TB/s, copy {most.copy_tb_s:.3g} TB/s")
        parts.append(f"product {most.matmul_tflop_s:.3g} TFLOP/s")
    return printable(" · ".join([machine.device, *parts]))


def listed(work: Workload) -> str:
    """Return a workload's line of a list."""
    quick = ", quick" if work.quick else ""
    longest = max(work.cached)
    return f"{work.name:34} {work.mode:8} {work.requests:4} x {longest:,} + {work.new:,}  ({work.group}{quick})"


def wide_console() -> Console:
    """Return a console as wide as a terminal; into a file or a pipe no line is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)


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


def _rate(row: Row, peer: str) -> str:
    if row.kv_bytes == 0:  # what the host does reads none
        return ""
    if row.mode in ("decode", "verify"):
        return f", {row.tb_s[peer]:.3g} TB/s"
    return f", {row.tflop_s[peer]:.3g} TFLOP/s"
