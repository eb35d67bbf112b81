"""What all explorers share: a row of controls, the state in a line of words, and the picture.

The picture is inline SVG in an HTML widget: no script, no canvas, nothing that is fetched. Without a front end the
controls work all the same: set `explorer.controls[...].value`, and `explorer.picture` is the new one.
"""

from __future__ import annotations

import gc
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from attnlab.checks import require
from attnlab.plots.picture import Picture
from attnlab.plots.style import theme_of

Option = tuple[str, Any]
"""What a control shows for a choice, and the value that it stands for."""

MOST_CONTROLS = 4
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# The picture keeps its size where there is room: a control changes marks, never the layout.
_PICTURE = "<style>.attnlab-picture svg {{ display: block; max-width: 100%; height: auto }}</style>{svg}"
_WORDS = '<div role="status" aria-live="polite" style="font-size: .92em; line-height: 1.4">{words}</div>'
_TROUBLE = "<b>{kind}:</b> {message}. The picture is still that of the choice before."


class Explorer(ABC):
    """A picture that controls change. `controls` are the widgets by name, `widget` is all of it.

    `state` are the arguments that make the same explorer again, `picture` is what is to be seen now, `words` says it
    in a line. The last expression of a notebook's cell shows the explorer.
    """

    name: str
    """The function that makes it, as `attnlab` calls it."""

    def __init__(self, controls: Mapping[str, Any]) -> None:
        require(len(controls) <= MOST_CONTROLS, f"controls: at most {MOST_CONTROLS} fit a row, got {len(controls)}")
        self.controls = dict(controls)
        self._text, self._canvas = widgets.HTML(), widgets.HTML()
        self._text.add_class("attnlab-words")
        self._canvas.add_class("attnlab-picture")
        row = widgets.HBox(list(self.controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
        self.widget = widgets.VBox([row, self._text, self._canvas])
        self._quiet = False
        self._redraw()
        for name, control in self.controls.items():
            control.add_class(f"attnlab-{name}")
            control.observe(self._on_change, "value")

    def __repr__(self) -> str:
        return f"Explorer({self.words!r})"

    def code(self) -> str:
        """Return a notebook cell that makes the same explorer again."""
        lines = [f"    {name}={_literal(value)}," for name, value in self.state.items()]
        return "\n".join([f"from attnlab import {self.name}", "", f"explorer = {self.name}(", *lines, ")", "explorer"])

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Return what the controls say now, as arguments."""

    @abstractmethod
    def _look(self, state: dict[str, Any]) -> tuple[Picture, str]:
        """Return the picture of a state, and the state in a line of words."""

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Set controls inside without a picture for each: whoever holds them draws afterwards."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _redraw(self) -> None:
        with _no_collection():
            self._draw()

    def _draw(self) -> None:
        state = self._arguments()
        self.picture, self.words = self._look(state)
        self.state = state
        self._canvas.value = _PICTURE.format(svg=self.picture.to_svg())
        self._text.value = _WORDS.format(words=escape(self.words))

    def _changed(self, change: Any) -> None:
        """Do what a changed control asks for; what this raises is said, and the picture stays."""
        self._redraw()

    def _on_change(self, change: Any) -> None:
        if self._quiet:
            return
        try:
            self._changed(change)
        except Exception as error:
            # A policy from a notebook may raise anything, and what a call-back raises is shown to nobody.
            trouble = _TROUBLE.format(kind=type(error).__name__, message=escape(str(error)))
            self._text.value = _WORDS.format(words=trouble)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Return the live widget, and the picture for those who read the notebook where no widget can live."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {WIDGET_VIEW: view, "image/svg+xml": self.picture.to_svg(), "text/plain": repr(self)}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Put a collection of garbage off until the picture is out: in a large process it takes as long as drawing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def dropdown(label: str, options: Sequence[Option], value: Any, *, width: str) -> Any:
    """Return a list to choose from."""
    return widgets.Dropdown(description=label, options=options, value=value, **_narrow(width))


def slider(label: str, options: Sequence[Option], value: Any, *, width: str) -> Any:
    """Return a slider over some values; the picture waits until it is let go."""
    look = _narrow(width)
    return widgets.SelectionSlider(description=label, options=options, value=value, continuous_update=False, **look)


def steps(around: int, *, least: int, most: int) -> list[Option]:
    """Return a slider's options: the powers of two, and the value that it stands at.

    >>> [value for _, value in steps(6, least=1, most=16)]
    [1, 2, 4, 6, 8, 16]
    """
    powers = {1 << i for i in range(most.bit_length()) if least <= 1 << i <= most}
    return [(f"{value:,}", value) for value in sorted(powers | {around})]


def themed(theme: str) -> str:
    """Return the name of a theme, or raise with those that there are."""
    return theme_of(theme).name


def _literal(value: object) -> str:
    # JSON is Python for ASCII alone: it spells what lies beyond 16 bits in two halves.
    return json.dumps(value) if isinstance(value, str) and value.isascii() else repr(value)


def _narrow(width: str) -> dict[str, Any]:
    return {"layout": widgets.Layout(width=width, margin="2px 1.2em 2px 0"), "style": {"description_width": "initial"}}
