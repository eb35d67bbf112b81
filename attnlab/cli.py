"""The command line: `attnlab tour`, `attnlab gallery`, `attnlab info`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnlab.checks import positive
from attnlab.gallery import draw_gallery
from attnlab.inspect.info import info
from attnlab.inspect.traffic import trace_names
from attnlab.plots.show import show
from attnlab.tour import kernel_words, run_tour
from attnlab.tour_page import COLUMNS, NOTES, cells, page


def main(argv: list[str] | None = None) -> int:
    """Run a command; on bad input print one line that says what to do, and return 2."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        print(f"attnlab {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnlab", description="The attention backend of an LLM server, opened up.")
    commands = parser.add_subparsers(dest="command", required=True)
    tour = commands.add_parser(
        "tour", help="decode a real model's attention under every split policy and write a page about it"
    )
    tour.add_argument(
        "--out", type=Path, default=Path("attnlab-tour"), help="folder for index.html (default: %(default)s)"
    )
    tour.add_argument(
        "--trace",
        default="mooncake_fast25_conversation",
        choices=trace_names(),
        help="request lengths (default: %(default)s)",
    )
    tour.add_argument("--requests", type=int, default=8, help="size of the batch (default: %(default)s)")
    tour.add_argument("--seed", type=int, default=3, help="of the drawn lengths (default: %(default)s)")
    tour.set_defaults(run=_tour)
    gallery = commands.add_parser("gallery", help="draw the README's pictures from the shipped data")
    gallery.add_argument("--out", type=Path, required=True, help="folder for the SVG files")
    gallery.set_defaults(run=lambda args: print(*draw_gallery(args.out), sep="\n"))
    commands.add_parser("info", help="say what runs here").set_defaults(run=lambda args: print(info()))
    return parser


def _tour(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    positive("--requests", args.requests)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        result = run_tour(trace=args.trace, requests=args.requests, seed=args.seed, progress=progress)
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in result.rows:
        table.add_row(*cells(row))
    console.print(result.batch_words)
    console.print(table)
    console.print(f"{NOTES} The kernels were {kernel_words()}.", style="dim")
    seed, _, tile = result.lanes
    pictures = [show(seed, tile), show(*result.merges)]
    path = args.out / "index.html"
    path.write_text(page(result, pictures), encoding="utf-8")
    seconds = time.perf_counter() - started
    console.print(f"Wrote {path} ({path.stat().st_size / 1024:,.0f} KB) in {seconds:.0f} s: open it in a browser.")


if __name__ == "__main__":
    sys.exit(main())
