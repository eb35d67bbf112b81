"""Lesson 03: merging softmax states."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlab.inspect.exercises.registry import (
    CLOSE,
    Wrong,
    as_tensor,
    ask,
    exercise,
    near,
    off_by,
    same_tensor,
    several,
)

State = tuple[Tensor, Tensor, Tensor]
"""max, sum, acc."""
NEED_ALL = {
    *("softmax", "log_softmax", "logsumexp", "exp", "max", "amax", "argmax", "maximum", "cummax", "sort"),
    *("sum", "cumsum", "matmul", "rmatmul", "mm", "mv", "dot", "einsum"),
}
"""Names of torch functions that compute with all keys, where their input holds all keys."""


@exercise("03-1", Real)
def weight_of_b(answer: Any) -> str:
    """The LSEs alone decide."""
    lse = torch.tensor([2.0, 2.0 + math.log(3)], dtype=torch.float64)
    expected = float(torch.softmax(lse, 0)[1])
    if abs(float(answer) - expected) < 1e-3:
        return ""
    if abs(float(answer) - (1 - expected)) < 1e-3:
        return "That is the weight of A."
    if abs(float(answer) - 3) < 1e-3:
        return "B weighs 3 times as much as A. The weights of both sum to 1."
    if abs(float(answer) - 100 * expected) < 1e-1:
        return "As a share, please: a weight lies between 0 and 1."
    return "The number of keys does not matter, the LSEs do: B's is larger by ln 3. What is exp of that?"


@exercise("03-2", Callable)
def merge_with_nothing(answer: Any) -> str:
    """Merging where one side, or both, have seen no key."""
    empty = (torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(3))
    torch.manual_seed(0)
    some, other = _state(torch.randn(4), torch.randn(4, 3)), _state(torch.randn(2) + 90, torch.randn(2, 3))
    cases = {
        "Two states with keys": (some, other, _merged(some, other)),
        "Nothing on the right": (some, empty, some),
        "Nothing on the left": (empty, some, some),
        "Nothing on both sides": (empty, empty, empty),
    }
    for case, (a, b, expected) in cases.items():
        got = several(case, ask(case, answer, a, b), ("max", "sum", "acc"))
        for name, x, theirs in zip(("max", "sum", "acc"), got, expected, strict=True):
            mine = as_tensor(case, x)
            if torch.isnan(mine).any():
                return f"{case}: {name} is nan. -inf minus -inf is nan; what may be subtracted instead?"
            if mine.shape != theirs.shape:
                return f"{case}: {name} should have shape {list(theirs.shape)}, got {list(mine.shape)}."
            if not torch.allclose(mine.double(), theirs.double(), atol=CLOSE):
                hint = " Subtract another number, but return the maximum itself." if math.isinf(theirs.max()) else ""
                return f"{case}: {name} should be {theirs.tolist()}, got {mine.tolist()}.{hint}"
    return ""


@exercise("03-3", Callable)
def in_blocks(answer: Any) -> str:
    """A single pass; wrong results are compared with the usual mistakes'."""
    torch.manual_seed(0)
    for keys, block, scale in ((5, 2, 1.0), (64, 16, 1.0), (200, 32, 1.0), (200, 32, 500.0), (1, 8, 1.0)):
        scores, values = torch.randn(keys) * scale, torch.randn(keys, 8)
        expected = torch.softmax(scores.double(), 0) @ values.double()
        case = f"With scores [{keys}] up to {scores.max():.0f}, values [{keys}, 8] and block {block}"
        with _Watch(keys) as watch:
            returned = ask(case, answer, scores, values, block)
        got = same_tensor(case, returned, expected)
        if not near(got, expected):
            raise Wrong(
                f"{case}: off by up to {off_by(got, expected):.3g}. {_hint(got, scores, values, block)}".rstrip()
            )
        if watch.seen and keys > block:
            return (
                f"The result is right, but {watch.seen[0]} was given all {keys} keys at once. Take `block` of them at "
                f"a time, and keep max, sum and acc of what was read so far."
            )
    return ""


class _Watch(TorchFunctionMode):
    """Notes which functions compute with as many rows as there are keys; a slice of them is no computation."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self._keys = keys
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, rows = func.__name__.strip("_"), [x.shape[0] for x in args if isinstance(x, Tensor) and x.dim()]
        if name in NEED_ALL and self._keys in rows:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _state(scores: Tensor, values: Tensor) -> State:
    p = torch.exp(scores - scores.max())
    return scores.max(), p.sum(), p @ values


def _merged(a: State, b: State, *, fade_sum: bool = True, fade_acc: bool = True) -> State:
    """Merge two states; a mistake is to leave out that the sum, or acc, is brought to the larger maximum."""
    top = torch.maximum(a[0], b[0])
    fade_a, fade_b = torch.exp(a[0] - top), torch.exp(b[0] - top)
    total = a[1] * fade_a + b[1] * fade_b if fade_sum else a[1] + b[1] * fade_b
    return top, total, a[2] * fade_a + b[2] * fade_b if fade_acc else a[2] + b[2] * fade_b


def _hint(got: Tensor, scores: Tensor, values: Tensor, block: int) -> str:
    """Say which of the usual mistakes gives this result, if one does."""
    whole = len(scores) // block * block
    _, total, acc = _pass(scores, values, block)
    *_, unfaded, right_acc = _pass(scores, values, block, fade_sum=False)
    mistakes = {
        "The sum is not brought to the new maximum: when it rises, multiply both acc and the sum.": right_acc / unfaded,
        "acc is not brought to the new maximum: when it rises, multiply both acc and the sum.": (
            _pass(scores, values, block, fade_acc=False)[2] / total
        ),
        "Neither acc nor the sum is brought to the new maximum: when it rises, multiply both.": (
            _pass(scores, values, block, fade_acc=False)[2] / unfaded
        ),
        "The result is acc / sum: divide once, at the end.": acc,
    }
    if 0 < whole < len(scores):
        _, some_total, some_acc = _pass(scores[:whole], values[:whole], block)
        mistakes[f"The last block is left out: it holds {len(scores) - whole} of the keys."] = some_acc / some_total
    return next((words for words, wrong in mistakes.items() if near(got, wrong)), "")


def _pass(scores: Tensor, values: Tensor, block: int, **mistake: bool) -> State:
    blocks = zip(scores.split(block), values.split(block), strict=True)
    state = _state(*next(blocks))
    for s, v in blocks:
        # As it is usually written: the block's own numbers are measured from the new maximum at once.
        top = torch.maximum(state[0], s.max())
        p = torch.exp(s - top)
        state = _merged(state, (top, p.sum(), p @ v), **mistake)
    return state
