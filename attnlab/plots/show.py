"""`show(x)` draws whatever it is given: the kind of picture follows from the type of x."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from attnlab.plots.picture import Picture
from attnlab.plots.style import theme_of
from attnlab.registry import Registry

Draw = TypeVar("Draw", bound=Callable[..., Picture])


class Show:
    """Draw a value, or several of one kind to compare them: `show(plan)`, `show(plan_a, plan_b, theme="dark")`.

    The kind of picture follows from the type of the value, and so do its options, beside `theme`:

    - VerifyPlan, DraftPlan: `request` and `layer`, each a number
    - ScoreView, CallTrace, Trace: `zoom`, a key's position, and `pool`, "key", "page" or "split"
    - StageView: `zoom`, a key's position
    - Comparison: `call`, the number of a pair of calls
    - Result: `kind` of what a benchmark measured, "rows" or "curves"

    Others have none. `show.types()` lists all types, `show.options(type)` what a picture of one can be told, and
    `show.register(type)` adds a kind of picture, from a notebook's cell as well.
    """

    def __init__(self) -> None:
        self._draws: Registry[Callable[..., Picture]] = Registry("picture")

    def __call__(self, *xs: object, theme: str = "light", **options: Any) -> Picture:
        """Return a picture of a value, or one picture that compares several of one kind; of merges, at most two.

        `theme` is "light" or "dark": what a notebook displays, and the default of the picture's exports. `options` are
        those of the kind of picture: `zoom=100` of attention. Raises TypeError where the kind has no such option.
        """
        theme_of(theme)
        if not xs:
            raise TypeError(f"show: expected {self._known()}, got nothing")
        draws = {self._draw_of(x): type(x).__name__ for x in xs}
        if len(draws) > 1:
            raise TypeError(f"show: one picture compares values of one kind, got {' and '.join(draws.values())}")
        (draw,) = draws
        self._check_options(draw, draws[draw], options)
        return dataclasses.replace(draw(*xs, **options), theme=theme)

    def register(self, *types: type) -> Callable[[Draw], Draw]:
        """Register a function that makes a Picture of one or more values of these types; subclasses included.

        Its keyword-only arguments are the picture's options.

        >>> from attnlab.plots.style import canvas, header
        >>> class Dice:
        ...     eyes = 6
        >>> @show.register(Dice)
        ... def dice(*all_dice: Dice) -> Picture:
        ...     title = f"The dice show {sum(d.eyes for d in all_dice)}"
        ...     def draw(theme):
        ...         figure = canvas(height=1.2)
        ...         header(figure, theme, title, "Nothing else is to be seen.")
        ...         return figure
        ...     return Picture(draw=draw, title=title, alt=title)
        >>> show(Dice(), Dice())
        Picture('The dice show 12')
        """

        def add(draw: Draw) -> Draw:
            for kind in types:
                self._draws.add(_name(kind), draw, owner=draw.__module__)
            return draw

        return add

    def types(self) -> list[str]:
        """Return the names of the types that can be shown."""
        return [name.rpartition(".")[2] for name in self._draws.names()]

    def options(self, kind: type) -> list[str]:
        """Return the names of the options that a picture of this type has.

        >>> from attnlab import Trace
        >>> show.options(Trace)
        ['zoom', 'pool', 'theme']
        """
        return [*_options_of(self._draw_of_type(kind)), "theme"]

    def _check_options(self, draw: Callable[..., Picture], kind: str, options: dict[str, Any]) -> None:
        known = _options_of(draw)
        unknown = [name for name in options if name not in known]
        if unknown:
            listed = ", ".join([*known, "theme"])
            raise TypeError(f"show: a picture of {kind} has the options {listed}; got {', '.join(unknown)}")

    def _draw_of(self, x: object) -> Callable[..., Picture]:
        return self._draw_of_type(type(x))

    def _draw_of_type(self, kind: type) -> Callable[..., Picture]:
        known = self._draws.names()
        for base in kind.__mro__:
            if _name(base) in known:
                return self._draws.get(_name(base))
        raise TypeError(f"show: expected {self._known()}, got {kind.__name__}")

    def _known(self) -> str:
        return f"one of {', '.join(self.types())}"


def _name(kind: type) -> str:
    # By name, so that a notebook's cell that defines a type and registers it can be run again.
    return f"{kind.__module__}.{kind.__qualname__}"


def _options_of(draw: Callable[..., Picture]) -> list[str]:
    """Return what a function that draws takes beside the values: its keyword-only arguments."""
    parameters = inspect.signature(draw).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


show = Show()
