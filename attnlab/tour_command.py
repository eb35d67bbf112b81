"""`attnlab tour`: runs the tour, prints its table, writes its page."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnlab.checks import positive, require
from attnlab.files import write_whole
from attnlab.inspect.traffic import trace_title
from attnlab.plots.show import show
from attnlab.tour import TourResult, kernel_words, run_tour
from attnlab.tour_page import COLUMNS, NOTES, cells, page
from attnlab.units import size

NEXT = "Then the lessons: attnlab lab opens them, and begins with 00_map."


def take_tour(out: Path, *, trace: str, requests: int, seed: int) -> Path:
    """Decode, print what came out, and return the page that was written into the folder."""
    started = time.perf_counter()
    positive("--requests", requests)
    require(seed >= 0, f"--seed: expected at least 0, got {seed}")
    trace_title(trace)  # raises where there is no such trace
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        result = run_tour(trace=trace, requests=requests, seed=seed, progress=progress)
    console.print(result.batch_words)
    console.print(_table(result))
    console.print(f"{NOTES} The kernels were {kernel_words()}.", style="dim")
    pictures = [show(*result.lanes), show(*result.merges)]
    path = out / "index.html"
    write_whole(path, page(result, pictures).encode(), name="--out")
    seconds = time.perf_counter() - started
    console.print(f"Wrote {path} ({size(path.stat().st_size)}) in {seconds:.0f} s: open it in a browser.")
    console.print(NEXT)
    return path


def _table(result: TourResult) -> Table:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in result.rows:
        table.add_row(*cells(row))
    return table
