"""The command line: one function per command says what it takes, another runs it.

A command's own modules are imported when it is chosen, so that `attnlab doctor` works where what others need is broken.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import attnlab
from attnlab.units import printable

_HOME = {
    "tour": "attnlab.tour_command",
    "lab": "attnlab.lab",
    "doctor": "attnlab.doctor",
    "bench": "attnlab.bench_command",
    "tune": "attnlab.tune_command",
    "gallery": "attnlab.gallery",
    "trace": "attnlab.trace_command",
    "info": "attnlab.inspect.info",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; on bad input print one line that says what to do, and return 2."""
    _write_to_any_terminal()
    args = _parser().parse_args(argv)
    try:
        status: int | None = args.run(import_module(_HOME[args.command]), args)
    except (ValueError, OSError) as error:
        print(f"attnlab {args.command}: {_one_line(error)}", file=sys.stderr)
        return 2
    except ImportError as error:
        hint = "" if args.command == "doctor" else "; `attnlab doctor` says what is missing here"
        print(f"attnlab {args.command}: {_one_line(error)}{hint}", file=sys.stderr)
        return 2
    return status or 0


def _write_to_any_terminal() -> None:
    """Let a terminal that knows few characters get a ? for the others: half a report would be worse."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnlab", description="The attention backend of an LLM server, opened up.")
    parser.add_argument("--version", action="version", version=f"attnlab {attnlab.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[Any, argparse.Namespace], int | None], words: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        added.set_defaults(run=run)
        return added

    _tour_takes(
        command("tour", _tour, "decode a real model's attention under three split policies and write a page about it")
    )
    _lab_takes(command("lab", _lab, "open JupyterLab on the notebooks"))
    command("doctor", _doctor, "examine this installation, and say what to do about each trouble")
    _bench_takes(command("bench", _bench, "time attnlab and its peers side by side, right results alone"))
    _tune_takes(command("tune", _tune, "time candidates for the tiles, warps and stages of kernels on this GPU"))
    gallery = command("gallery", _gallery, "draw the README's pictures from the shipped data")
    gallery.add_argument("--out", type=Path, required=True, help="folder for the SVG files")
    trace = command("trace", _trace, "summarise a saved trace")
    trace.add_argument("file", type=Path, help="what Trace.save wrote")
    command("info", _info, "say in one line what runs here")
    return parser


def _tour_takes(parser: argparse.ArgumentParser) -> None:
    folder = Path("attnlab-tour")
    parser.add_argument("--out", type=Path, default=folder, help="folder for index.html (default: %(default)s)")
    # No `choices`: they would have to be read from a data file even by commands that do not need it.
    parser.add_argument(
        "--trace",
        default="mooncake_fast25_conversation",
        help="request lengths (default: %(default)s)",
    )
    parser.add_argument("--requests", type=int, default=8, help="size of the batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="of the drawn lengths (default: %(default)s)")


def _lab_takes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="put copies of the notebooks there, and open them")
    parser.add_argument("--port", type=int, help="of the server on this machine (default: Jupyter's)")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    parser.add_argument("jupyter", nargs="*", metavar="-- OPTION", help="what follows -- goes to JupyterLab as it is")


def _bench_takes(parser: argparse.ArgumentParser) -> None:
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cpu", action="store_true", help="time what runs without a GPU, beside its goals")
    kind.add_argument(
        "--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="hold two runs' files together"
    )
    kind.add_argument("--goals", nargs="+", type=Path, metavar="RUN", help="hold runs' files to what is to be reached")
    kind.add_argument("--list", action="store_true", help="print the names of workloads and peers")
    kind.add_argument("--hooks", action="store_true", help="what recording costs a decode, closed and open")
    kind.add_argument("--host", action="store_true", help="what plans and calls take of the host, beside a GPU")
    kind.add_argument("--curves", action="store_true", help="cost as requests, tokens, splits and pages grow")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="modes, groups or names, which may have a *"
    )
    parser.add_argument("--quick", action="store_true", help="the few workloads that say most")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="those that take part (default: all)")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="those that do not")
    parser.add_argument("--seconds", type=float, help="begin no workload later than this; half of it may be compiling")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds for a peer to prepare a workload (default: %(default)g)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compile in so many processes first (default: %(default)s)")
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="SGLang's kernels/ops/attention, as files")
    parser.add_argument("--out", type=Path, help="JSON file, written anew after every workload")


def _tune_takes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="those whose rows are tuned (default: all)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="workloads, as attnlab bench --list names them"
    )
    parser.add_argument("--quick", action="store_true", help="the few workloads that say most")
    parser.add_argument("--near", action="store_true", help="candidates that differ from the table in one field alone")
    parser.add_argument("--list", action="store_true", help="print rows, candidates and workloads; no GPU is needed")
    parser.add_argument("--jobs", type=int, default=1, help="compile in so many processes first (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no row later than this")
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="FILE",
        help="rewrite the table (default: data/tuning.json of a checkout)",
    )


def _tour(home: Any, args: argparse.Namespace) -> None:
    home.take_tour(args.out, trace=args.trace, requests=args.requests, seed=args.seed)


def _lab(home: Any, args: argparse.Namespace) -> None:
    home.open_lab(args.folder, port=args.port, browser=not args.no_browser, extra=args.jupyter)


def _doctor(home: Any, args: argparse.Namespace) -> int:
    report = home.examine()
    home.print_report(report)
    return 1 if report.troubles else 0


_BENCH_TAKES: dict[str, tuple[str, ...]] = {
    "list": ("only", "quick"),
    "compare": (),
    "goals": (),
    "cpu": ("quick", "out"),
    "hooks": ("out",),
    "host": ("sglang", "patience", "out"),
}
"""Options of a benchmark that have a meaning beside --list and the others of its kind."""


def _bench(home: Any, args: argparse.Namespace) -> int:
    plain = vars(_parser().parse_args(["bench"]))
    given = [name for name, value in vars(args).items() if value != plain[name]]
    for kind, takes in _BENCH_TAKES.items():
        more = [f"--{name}" for name in given if name not in (kind, *takes)]
        if kind in given and more:
            raise ValueError(f"--{kind} does not take {', '.join(more)}; leave it away")
    if args.list:
        home.list_workloads(args.only, quick=args.quick)
        return 0
    if args.compare:
        return int(home.bench_compare(*args.compare))
    if args.goals:
        return int(home.bench_goals(args.goals))
    if args.hooks:
        return int(home.bench_hooks(out=args.out))
    if args.host:
        return int(home.bench_host_side(sglang=args.sglang, patience=args.patience, out=args.out))
    if args.cpu:
        measure = import_module("attnlab.bench_host").measure_host  # needs explorers, which a server may lack
        return int(home.bench_on_cpu(measure, out=args.out, quick=args.quick))
    return int(
        home.bench_on_gpu(
            only=args.only,
            quick=args.quick,
            curves=args.curves,
            names=args.peers,
            without=args.without,
            seconds=args.seconds,
            patience=args.patience,
            jobs=args.jobs,
            sglang=args.sglang,
            out=args.out,
        )
    )


def _tune(home: Any, args: argparse.Namespace) -> int:
    rows = {"kernels": args.kernels, "only": args.only, "quick": args.quick, "near": args.near}
    if args.list:
        given = {"--jobs": args.jobs != 1, "--seconds": args.seconds is not None, "--write": args.write is not None}
        more = [name for name, is_given in given.items() if is_given]
        if more:
            raise ValueError(f"--list does not take {', '.join(more)}; leave it away")
        home.list_tunings(**rows)
        return 0
    write = None if args.write is None else home.where_to_write(args.write)
    return int(home.tune_on_gpu(**rows, jobs=args.jobs, seconds=args.seconds, write=write))


def _gallery(home: Any, args: argparse.Namespace) -> None:
    print(*home.draw_gallery(args.out), sep="\n")


def _trace(home: Any, args: argparse.Namespace) -> None:
    home.summarise(args.file)


def _info(home: Any, args: argparse.Namespace) -> None:
    print(home.info())


if __name__ == "__main__":
    sys.exit(main())
