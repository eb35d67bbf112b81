"""The table of what kernels take, as it lies in data/kernel_resources.md."""

from __future__ import annotations

from attnlab import _triton
from attnlab.inspect.resources.compiling import Resources
from attnlab.inspect.resources.shapes import TARGETS

TABLE = "kernel_resources.md"


def table(rows: list[Resources]) -> str:
    """Return the rows as a Markdown table, one line per variant: registers / spilled bytes / shared KB by target."""
    lines = [
        "# What the kernels take",
        "",
        "Registers per thread / spilled bytes per thread / shared memory per block (KB), compiled by Triton "
        f"{_triton.triton.__version__}. A dash: the target cannot read fp8-e4m3, or does not launch the kernel.",
        "Made by `ATTNLAB_INTERPRET=0 python -m attnlab.inspect.resources --write`.",
        "",
        f"| kernel | {' | '.join(TARGETS)} |",
        f"| --- |{' --- |' * len(TARGETS)}",
    ]
    cells = {(row.variant, row.target): row for row in rows}
    for name in dict.fromkeys(row.variant for row in rows):
        found = [cells.get((name, target)) for target in TARGETS]
        words = ["-" if r is None else f"{r.registers} / {r.spills} / {r.shared / 1024:.1f}" for r in found]
        lines.append(f"| {name} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"
