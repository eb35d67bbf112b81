"""What all exercises share: a verdict, how a check is registered, and how the reader's functions are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.checks import whole
from attnlab.registry import Registry

TOY_LENS = (5, 64, 200, 1)
"""The batch of every lesson."""
CLOSE = 1e-4
"""An answer in fp32 is right where it is this near to the fp64 oracle, as a share of one plus the largest value."""
NOTHING = "Your function returns nothing yet."

Check = Callable[[Any], str]
"""Takes an answer; returns what is wrong with it, or an empty string."""


class Wrong(Exception):
    """What is wrong with an answer, said from deep inside a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check says. `wrong` is empty where the answer is right."""

    number: str
    wrong: str

    @property
    def right(self) -> bool:
        """Whether the answer is right."""
        return not self.wrong

    def __repr__(self) -> str:
        return f"{self.number}: yes, that is right." if self.right else f"{self.number}: not yet. {self.wrong}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A check, the type of the answers that it takes, and what an answer of another type is told to be."""

    kind: Any
    words: str
    check: Check


exercises: Registry[Exercise] = Registry("exercise")
"""The exercises by number, in the order of the lessons."""

_WORDS: dict[Any, str] = {Integral: "a whole number", Real: "a number", Callable: "a function", Sequence: "a list"}


def exercise(number: str, kind: Any, words: str = "") -> Callable[[Check], Check]:
    """Register the check of an exercise whose answer is of a kind; `words` name the kind, where it is a special one."""

    def add(check: Check) -> Check:
        named = words or _WORDS.get(kind) or f"a {kind.__name__}"
        exercises.add(number, Exercise(kind=kind, words=named, check=check), owner=check.__module__)
        return check

    return add


def check_exercise(number: str, answer: object) -> Verdict:
    """Say whether an answer is right; where it is not, what is wrong and what to look at.

    An answer that raises is a wrong one: the verdict says on which inputs. A number or a list may be a tensor. Raises
    ValueError where there is no such exercise.

    >>> check_exercise("04-1", 8)
    04-1: not yet. 8 is what was asked for. Rounding makes ranges longer, and so fewer: how long is one, in 32s?
    """
    mine = exercises.get(number)
    if missing(answer):
        return Verdict(number=number, wrong="There is no answer yet: replace the dots in the cell above, and run it.")
    plain = _plain(answer, mine.kind)
    if not isinstance(plain, mine.kind) or isinstance(plain, str) and mine.kind is Sequence:
        return Verdict(number=number, wrong=f"Expected {mine.words}, got {_type_words(plain)}.")
    try:
        return Verdict(number=number, wrong=mine.check(plain))
    except Wrong as wrong:
        return Verdict(number=number, wrong=str(wrong))
    except Exception as error:  # the reader's objects may raise anything, and that is an answer too
        return Verdict(number=number, wrong=f"Looking at your answer raised {type(error).__name__}: {error}.")


def missing(x: object) -> bool:
    """Whether the reader has not answered: nothing, or the dots of the stub."""
    return x is None or x is ...


def ask(case: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the reader's function, and return what it returns; say on which case it raised, or returned nothing."""
    before = _copied(args)
    try:
        got = function(*args)
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise Wrong(f"{case}: it raised {words}. Call it yourself on such inputs to see where.") from error
    if missing(got):
        raise Wrong(NOTHING)
    if not _as_before(args, before):
        raise Wrong(f"{case}: it changes what it is given. Whoever called it still needs that: work on a copy.")
    return got


def _copied(x: Any) -> Any:
    """Return tensors and lists as they are now."""
    if isinstance(x, Tensor):
        return x.clone()
    return [_copied(y) for y in x] if isinstance(x, list | tuple) else x


def _as_before(x: Any, before: Any) -> bool:
    """Whether tensors and lists are still what they were copied from."""
    if isinstance(before, Tensor):
        if not isinstance(x, Tensor) or x.shape != before.shape:
            return False
        return bool(((x == before) | (x.isnan() & before.isnan())).all())  # NaN is not even itself
    if isinstance(before, list):
        return isinstance(x, list | tuple) and len(x) == len(before) and all(map(_as_before, x, before))
    return x is before or bool(x == before)


def whole_numbers(answer: Sequence[Any]) -> list[int]:
    """Return the whole numbers that the reader's list holds."""
    try:
        return [whole("answer", x) for x in answer]
    except TypeError:
        raise Wrong(f"Expected whole numbers, got {answer!r}.") from None


def several(case: str, got: Any, names: Sequence[str]) -> list[Any]:
    """Return what the reader's function returned as a list of so many things."""
    wanted = f"{case}: expected {len(names)} things, ({', '.join(names)})"
    if not isinstance(got, tuple | list):
        raise Wrong(f"{wanted}, got {_type_words(got)}.")
    if len(got) != len(names):
        raise Wrong(f"{wanted}, got {len(got)}.")
    if any(missing(x) for x in got):
        raise Wrong(NOTHING)
    return list(got)


def as_tensor(case: str, got: Any) -> Tensor:
    """Return what the reader's function returned as a tensor."""
    try:
        mine = torch.as_tensor(got)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Wrong(f"{case}: expected a tensor, got {_type_words(got)}.") from error
    if mine.is_complex() or mine.dtype == torch.bool:
        raise Wrong(f"{case}: expected a tensor of numbers, got {str(mine.dtype).removeprefix('torch.')}.")
    return mine


def near(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one shape agree up to the rounding of fp32."""
    return off_by(got, expected) <= CLOSE * (1 + float(expected.abs().max()))


def off_by(got: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((got.double() - expected.double()).abs().max())


def same_tensor(case: str, got: Any, expected: Tensor) -> Tensor:
    """Return what the reader returned as a tensor; raise unless its shape is right and every number finite."""
    mine = as_tensor(case, got)
    if mine.shape != expected.shape:
        raise Wrong(f"{case}: expected shape {list(expected.shape)}, got {list(mine.shape)}.")
    if not torch.isfinite(mine).all():
        raise Wrong(f"{case}: the result holds inf or nan. Is the maximum subtracted before exp?")
    return mine


def _plain(answer: object, kind: Any) -> object:
    """Return a tensor or array as the number or list that it holds, where one is asked for."""
    if not isinstance(answer, Tensor | np.ndarray) or kind not in (Integral, Real, Sequence):
        return answer
    if kind is Sequence:
        return answer.tolist()
    return answer.item() if answer.size == 1 or isinstance(answer, Tensor) and answer.numel() == 1 else answer


def _type_words(x: object) -> str:
    return f"the number {x}" if isinstance(x, int | float) else type(x).__name__
