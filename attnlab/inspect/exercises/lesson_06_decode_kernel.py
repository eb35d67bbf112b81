"""Lesson 06: the decode kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab._triton import is_jitted
from attnlab.inspect.exercises.registry import ask, exercise, near, off_by, whole_numbers
from attnlab.inspect.loads import H200
from attnlab.kernels.decode import SplitConfig
from attnlab.plan.tiles import HEAD_TILE, head_tiles
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

LAYER = AttentionSpec(heads=24, kv_heads=4, qk_dim=64, v_dim=64, scale=0.125)
KEYS = range(256, 300)
"""What the program of the first exercise owns."""
GROUPS = (1, 4, 15, 16, 17, 20, 24, 32, 40)
DIM = 16
"""Numbers of a value in the third exercise."""


@exercise("06-1", Sequence, "a list of two numbers")
def scores_of_a_program(answer: Any) -> str:
    """The scores that a program computes, and those that are of a head and a key."""
    block = SplitConfig.choose(LAYER, H200, fp32=False).block_n
    tiles = -(-len(KEYS) // block)
    computed, useful = HEAD_TILE * block * tiles, LAYER.group * len(KEYS)
    numbers = whole_numbers(answer)
    if len(numbers) != 2:
        return f"Expected a list of two numbers, (a) and (b), got {answer!r}."
    a, b = numbers
    if (a, b) == (useful, computed):
        return "The other way round: (a) is what is computed, and idle rows and columns are computed as well."
    if a == LAYER.group * block * tiles:
        return "(a): a tile has 16 rows, whether or not there is a head for each."
    if a == HEAD_TILE * len(KEYS):
        return (
            f"(a): the last tile has all its columns, whether or not there is a key for each. A tile is {block} keys."
        )
    if a == HEAD_TILE * block:
        return f"(a): that is one tile. How many does a range of {len(KEYS)} keys take?"
    if a == LAYER.heads * block * tiles or a == 2 * computed:
        return "(a): a program serves one KV head, and so the query heads of one group."
    if a != computed:
        return f"(a): {HEAD_TILE} rows, {block} columns a tile, and how many tiles?"
    if b == LAYER.heads * len(KEYS):
        return "(b): those are the heads of the layer. A program serves one KV head: how many query heads share it?"
    if b == LAYER.group * (len(KEYS) - 1):
        return "(b): keys 256 to 299, both included, are one more."
    return "" if b == useful else f"(b): {len(KEYS)} keys, and how many query heads share a KV head?"


@exercise("06-2", Callable)
def head_in_a_row(answer: Any) -> str:
    """Every query head in one row of its own KV head's tiles."""
    for group in GROUPS:
        for kv_head in range(3):
            for tile in range(head_tiles(group)):
                for row in range(HEAD_TILE):
                    case = f"KV head {kv_head}, tile {tile}, row {row}, of a group of {group}"
                    (got,) = whole_numbers([ask(case, answer, kv_head, tile, row, group)])
                    member = tile * HEAD_TILE + row
                    expected = kv_head * group + member if member < group else -1
                    if got != expected:
                        return f"{case}: expected {expected}, got {got}. {_why_not(got, kv_head, member, group)}"
    return ""


def _why_not(got: int, kv_head: int, member: int, group: int) -> str:
    """Say what a wrong head looks like."""
    if member >= group:
        return f"The group has no member {member}, counted from 0: its last tile is not full."
    if got == -1:
        return f"The group has a member {member}: this row is in use."
    if got // group != kv_head:
        return f"Head {got} reads KV head {got // group}. Where does the first query head of KV head {kv_head} stand?"
    return f"The heads of KV head {kv_head} begin at {kv_head * group}, and this is member {member} of them."


@exercise("06-3", object)
def merge_kernel(answer: Any) -> str:
    """The merge, as a kernel; a wrong result is compared with the usual mistakes'."""
    if not is_jitted(answer):
        return f"Expected a kernel, a function below @triton.jit, got {type(answer).__name__}."
    indptr, partials, expected = _scratch()
    device, rows = "cpu" if INTERPRETED else "cuda", len(expected)
    out = torch.full((rows, DIM), torch.nan, device=device)
    inputs = [x.to(device) for x in (indptr, partials.max, partials.sum, partials.acc)]

    def launch() -> bool:
        answer[(rows,)](*inputs, out)
        return True

    ask(f"With {rows} programs", launch)
    for row, (got, wanted) in enumerate(zip(out.cpu(), expected, strict=True)):
        mine = slice(int(indptr[row]), int(indptr[row + 1]))
        case = f"Row {row}, of partials {mine.start} to {mine.stop} (without the last)"
        if torch.isnan(got).any():
            return f"{case}: the output holds nan. {_why_nan(partials.max[mine])}"
        if not near(got, wanted):
            hint = _mistake(got, partials.max[mine], partials.sum[mine], partials.acc[mine])
            return f"{case}: off by up to {off_by(got, wanted):.3g}. {hint}".rstrip()
    return ""


def _scratch() -> tuple[Tensor, Partials, list[Tensor]]:
    """Return offsets, partials of some rows of the output, with rows that nobody owns behind, and the right output."""
    torch.manual_seed(0)
    ranges: list[list[tuple[int, float]]]  # of each row, the keys of its partials, and what is added to their scores
    ranges = [[(7, 0.0), (32, 3.0), (5, -2.0)], [], [(9, 0.0)], [(0, 0.0), (8, 1.0), (0, 0.0)], [(4, -90.0), (4, 90.0)]]
    maxima, sums, accs, expected = [], [], [], []
    for row in ranges:
        scores = [torch.randn(keys, dtype=torch.float64) + shift for keys, shift in row]
        values = [torch.randn(keys, DIM, dtype=torch.float64) for keys, _ in row]
        top = [s.max() if len(s) else torch.tensor(-torch.inf, dtype=torch.float64) for s in scores]
        p = [torch.exp(s - m) for s, m in zip(scores, top, strict=True)]
        maxima += top
        sums += [x.sum() for x in p]
        accs += [x @ v for x, v in zip(p, values, strict=True)]
        nothing = torch.zeros(DIM, dtype=torch.float64)
        expected.append(torch.softmax(torch.cat(scores), 0) @ torch.cat(values) if row else nothing)
    unowned = torch.full((2, DIM), torch.nan)
    partials = Partials(
        max=torch.cat([torch.stack(maxima).float(), unowned[:, 0]]),
        sum=torch.cat([torch.stack(sums).float(), unowned[:, 0]]),
        acc=torch.cat([torch.stack(accs).float(), unowned]),
    )
    return torch.tensor([0, *map(len, ranges)], dtype=torch.int32).cumsum(0).int(), partials, expected


def _why_nan(maxima: Tensor) -> str:
    """Say where nan may come from in a row whose partials have these maxima."""
    if not len(maxima):
        return "It has no partial: 0 divided by 0 is nan, and its output should be 0."
    if torch.isinf(maxima).any():
        return "One of them has seen nothing: -inf minus -inf is nan. `finite_or_zero` says what to subtract instead."
    return "Is it stored at all? Or does it read a partial that nobody owns? The last one is indptr[p + 1] - 1."


def _mistake(got: Tensor, maxima: Tensor, sums: Tensor, accs: Tensor) -> str:
    """Say which of the usual mistakes gives this result, if one does."""
    if not len(maxima):
        return "It has no partial: its output should be 0."
    seen = sums > 0
    fade = torch.exp(maxima - maxima.max())
    total, acc = (sums * fade).sum(), (accs * fade[:, None]).sum(0)
    mistakes = {
        "These are zeros: nothing is added up yet.": torch.zeros(DIM),
        "That is acc: divide by the sum, once, at the end.": acc,
        "Partials are measured from their own maxima: bring sum and acc to the largest one before adding.": (
            accs.sum(0) / sums.sum()
        ),
        "acc is brought to the largest maximum, the sum is not.": acc / sums.sum(),
        "The sum is brought to the largest maximum, acc is not.": accs.sum(0) / total,
        "That is the mean of the partials' own outputs; they weigh exp(max - largest) * sum.": (
            (accs[seen] / sums[seen, None]).mean(0)
        ),
        "That is the first partial alone.": accs[0] / sums[0],
        "That is the last partial alone.": accs[-1] / sums[-1],
        "The last partial is left out: it is number indptr[p + 1] - 1.": (
            (accs * fade[:, None])[:-1].sum(0) / (sums * fade)[:-1].sum()
        ),
    }
    return next((words for words, wrong in mistakes.items() if near(got, wrong)), "")
