"""What the original launches as a kernel, `name[grid](...)`, is here a function of ours behind a pair of brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, Generic, ParamSpec

from attnlab.checks import describe, require

P = ParamSpec("P")
Grid = tuple[int, ...]


class Launched(Generic[P]):
    """A function that is called as `name[grid](...)`; it is given the grid first, then the caller's arguments.

    Arguments come by position or by name, as the original has them, compile-time ones too. `axes` names what each axis
    of the grid counts; further axes may only be 1.
    """

    def __init__(self, function: Callable[Concatenate[Grid, P], None], *axes: str) -> None:
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.__name__ = function.__name__
        self.axes = axes

    def __getitem__(self, grid: int | Sequence[int]) -> Callable[P, None]:
        sizes = self._checked((grid,) if isinstance(grid, int) else grid)

        def launch(*args: P.args, **kwargs: P.kwargs) -> None:
            self.__wrapped__(sizes, *args, **kwargs)

        return launch

    def __call__(self, *_: P.args, **__: P.kwargs) -> None:
        """Raise TypeError: the grid is missing."""
        raise TypeError(f"{self.__name__}: is launched, {self.__name__}[({', '.join(self.axes)},)](...), not called")

    def _checked(self, grid: Sequence[int]) -> Grid:
        wanted = f"({', '.join(self.axes)},)"
        name, count = f"{self.__name__}: grid", len(self.axes)
        whole = isinstance(grid, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in grid)
        require(whole, f"{name}: expected {wanted}, got {describe(grid)}", TypeError)
        padded = (*grid, *(1 for _ in self.axes[len(grid) :]))
        fits = len(grid) > 0 and min(padded) >= 0 and all(n == 1 for n in padded[count:])
        require(fits, f"{name}: expected {wanted}, got {tuple(grid)}")
        return padded[:count]


def launched(*axes: str) -> Callable[[Callable[Concatenate[Grid, P], None]], Launched[P]]:
    """Make a function one that is launched over a grid of these axes."""
    return lambda function: Launched(function, *axes)
