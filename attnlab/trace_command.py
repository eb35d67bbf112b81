"""`attnlab trace`: what a saved trace holds."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnlab.trace import CallTrace, Trace
from attnlab.units import printable, size

COLUMNS = ("call", "layer", "step", "policy", "requests", "keys", "splits", "recorded", "size", "heaviest split")


def summarise(path: Path) -> None:
    """Print a saved trace's calls, what of each was recorded, and what did not fit the budget."""
    trace = _loaded(path)
    console = _console()
    texts = f", with the tokens' texts of {_counted(len(trace.tokens), 'request')}" if trace.tokens else ""
    calls = _counted(len(trace.calls), "recorded call")
    file = size(path.stat().st_size)
    console.print(Text(f"{printable(str(path))}: {calls}, {size(trace.bytes)} of numbers in a file of {file}{texts}"))
    if trace.calls:
        table = Table()
        for name in COLUMNS:
            table.add_column(
                name, justify="left" if name in ("step", "policy", "recorded", "heaviest split") else "right"
            )
        for number, call in enumerate(trace.calls):
            table.add_row(*(Text(printable(cell)) for cell in cells(number, call)))
        console.print(table)
    if trace.left_out:
        console.print(Text("Left out, as it did not fit the budget:"))
        console.print(*(Text(f"  {printable(words)}") for words in trace.left_out), sep="\n")


def cells(number: int, call: CallTrace) -> tuple[str, ...]:
    """Return a call's row, in the order of COLUMNS."""
    splits = [len(mine) for mine in call.ranges]
    return (
        str(number),
        str(call.layer),
        call.mode,
        call.policy,
        str(len(call.ranges)),
        f"{sum(call.lens):,}",
        f"{sum(splits)} ({spread(splits)} each)" if splits else "0",
        recorded(call),
        size(call.bytes),
        heaviest(call),
    )


def recorded(call: CallTrace) -> str:
    """Say which parts of a call were kept."""
    parts = ["log-sum-exps"] if call.mode == "decode" else [f"log-sum-exps of {_queries(len(call.rows))}"]
    parts += ["outputs"] if call.out is not None else []
    parts += ["partial log-sum-exps"] if call.partial_lse else []
    parts += ["partial outputs"] if call.partial_out else []
    for stage in dict.fromkeys(score.stage for score in call.scores):
        rows = {(score.request, score.query) for score in call.scores if score.stage == stage}
        queries = "" if call.mode == "decode" else f"{_queries(len(rows))} of "
        parts.append(f"{stage} of {queries}{_counted(len({request for request, _ in rows}), 'request')}")
    parts += ["times"] if call.times is not None else []
    return ", ".join(parts)


def heaviest(call: CallTrace) -> str:
    """Say which split has the largest merge weight of all that share a softmax with another."""
    missing = "not recorded" if call.mode == "decode" else "kept of decodes alone"
    best, words = 0.0, "nothing was split" if call.partial_lse else missing
    for request, lse in enumerate(call.partial_lse):
        if lse.shape[0] < 2 or not lse.shape[1]:
            continue
        # In double: a file may hold any dtype. A head without a visible key has no weights: NaN, taken as none.
        weights = torch.exp(lse.double() - call.lse[request].double()).nan_to_num(0.0)
        top = float(weights.max())
        if top > best:
            split, head = divmod(int(weights.argmax()), weights.shape[1])
            start, end = call.ranges[request][split]
            best, words = top, f"{top:.1%}: request {request}, head {head}, keys {start:,} to {end - 1:,}"
    return words


def spread(counts: list[int]) -> str:
    """Return `3`, or `1 to 8`."""
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _queries(count: int) -> str:
    return f"{count} quer{'y' if count == 1 else 'ies'}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _loaded(path: Path) -> Trace:
    """Load a trace; its errors begin with the word `trace`, which the command line says already."""
    try:
        return Trace.load(path)
    except (OSError, ValueError) as error:
        raise type(error)(str(error).removeprefix("trace: ")) from error


def _console() -> Console:
    """Return a console as wide as a terminal; into a file or a pipe no line is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)
