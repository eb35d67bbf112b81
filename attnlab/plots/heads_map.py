"""Heads: which of them does what? A map of layers and heads for each behaviour; those that are called so are framed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnlab.checks import require
from attnlab.inspect.heads import BEHAVIOURS, FROM, LOCAL, Behaviour, Head, Heads
from attnlab.plots.cells import box, draw_cells, hover, label_step, outline
from attnlab.plots.color_map import draw_bar, share_scale
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import FOOTER, HEADER, SIZE, Theme, canvas, fit, header, inches, text_on, write
from attnlab.plots.words import plural, share

PLOT_LEFT, PLOT_WIDTH, BAR_LEFT = 1.06, 6.7, 8.14
ROW, TALLEST, ABOVE, BELOW = 0.24, 2.6, 0.36, 0.34
"""Inches of a layer's row, of all of them in a panel, above a panel for its name, and below the last one."""
GAP = 0.25
"""Of a head's cell, between those of two KV heads."""
LABEL, NUMBER = 0.125, (0.3, 0.15)
"""Inches that a row's name needs, and that a number in a cell does: width and height."""
MOST_HINTS = 320
WORDS: dict[Behaviour, str] = {
    "induction": "on what followed an earlier copy of its token",
    "previous": "on the token before the query’s own",
    "sink": "on the first token",
    "local": f"on the last {LOCAL} tokens",
    "diffuse": "keys that equal weights would be on, of all",
}


@show.register(Heads)
def heads_map(*all_heads: Heads) -> Picture:
    """Return a picture of what heads do: `heads(trace)`.

    Raises ValueError where layers disagree on the KV head that a query head has.
    """
    require(len(all_heads) == 1, f"show: a picture shows the heads of 1 recording, got {len(all_heads)}")
    (heads,) = all_heads
    title, grid = statement(heads), _Grid.of(heads)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, grid)

    return Picture(draw=draw, title=title, alt=f"{_counts(heads)}.")


def statement(heads: Heads) -> str:
    """Return the picture's title: how many heads have a name, and which one says it most clearly."""
    # A sink first: no behaviour is as clear-cut, and weight that rests on it says nothing of the text. Then the rarest.
    order: tuple[Behaviour, ...] = ("sink", "induction", "previous", "local", "diffuse")
    name: Behaviour = next((each for each in order if heads.named(each)), "sink")
    found = heads.named(name)
    count = sum(bool(head.names) for head in heads)
    if not found:
        return f"None of {plural(len(heads), 'head')} does one thing alone"
    top = found[0]
    number = share(top.number(name) or 0)
    what = f"puts {number} of its weight {WORDS[name]}" if name != "diffuse" else f"spreads over {number} of its keys"
    named = f"{count} of {plural(len(heads), 'head')} {'has' if count == 1 else 'have'} a name"
    return f"{named}; q{top.head} of layer {top.layer} {what}"


def _counts(heads: Heads) -> str:
    """Return how many heads are called what."""
    return ", ".join(f"{len(heads.named(name))} {name}" for name in BEHAVIOURS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Grid:
    """Layers by heads: where cells stand, in inches from a panel's upper left."""

    heads: Heads
    layers: tuple[int, ...]
    columns: int
    groups: dict[int, int]

    @classmethod
    def of(cls, heads: Heads) -> _Grid:
        firsts: dict[int, Head] = {}
        for head in heads:
            first = firsts.setdefault(head.head, head)
            words = (
                f"heads: q{head.head} has KV head {first.kv_head} in layer {first.layer} and {head.kv_head} in layer"
            )
            require(head.kv_head == first.kv_head, f"{words} {head.layer}; show layers that group their heads alike")
        groups = {number: firsts[number].kv_head for number in sorted(firsts)}
        columns = 1 + max(head.head for head in heads)
        return cls(heads=heads, layers=heads.layers, columns=columns, groups=groups)

    @property
    def pitch(self) -> tuple[float, float]:
        """Width and height of a cell."""
        gaps = GAP * max(self.groups.values())
        return PLOT_WIDTH / (self.columns + gaps), min(ROW, TALLEST / len(self.layers))

    @property
    def height(self) -> float:
        """Of a panel."""
        return self.pitch[1] * len(self.layers)

    def left(self, head: int) -> float:
        """Where a head's cells begin."""
        return (head + GAP * self.groups.get(head, 0)) * self.pitch[0]

    def top(self, layer: int) -> float:
        """Where a layer's cells begin."""
        return self.layers.index(layer) * self.pitch[1]

    def values(self, behaviour: Behaviour) -> NDArray[np.float64]:
        """The numbers `[layers, heads]`, NaN where a head's could not be told or a layer has no such head."""
        found = np.full((len(self.layers), self.columns), np.nan)
        for head in self.heads:
            number = head.number(behaviour)
            found[self.layers.index(head.layer), head.head] = np.nan if number is None else number
        return found

    @property
    def greys(self) -> str:
        """What cells without a number stand for; nothing where there is none."""
        untold = any(head.number(behaviour) is None for head in self.heads for behaviour in BEHAVIOURS)
        fewer = len(self.heads) < len(self.layers) * self.columns
        return " or ".join(["not told"] * untold + ["no such head"] * fewer)


def _figure(theme: Theme, title: str, grid: _Grid) -> Figure:
    panel = ABOVE + grid.height
    figure = canvas(HEADER + len(BEHAVIOURS) * panel + BELOW + FOOTER)
    bottom = figure.get_figheight() - HEADER
    for behaviour in BEHAVIOURS:
        bottom -= panel
        ax = inches(figure, PLOT_LEFT, bottom, PLOT_WIDTH, grid.height)
        ax.axis("off")
        ax.set_xlim(0, PLOT_WIDTH)
        ax.set_ylim(grid.height, 0)
        _draw_panel(ax, theme, grid, behaviour)
    _name_heads(figure, theme, grid, bottom)
    least = 1.1
    top = figure.get_figheight() - HEADER - ABOVE
    draw_bar(figure, theme, share_scale(theme, "share"), left=BAR_LEFT, top=top, height=max(least, grid.height))
    header(figure, theme, title, _caption(grid), _source(grid))
    return figure


def _draw_panel(ax: Axes, theme: Theme, grid: _Grid, behaviour: Behaviour) -> None:
    values, scale = grid.values(behaviour), share_scale(theme, "share")
    width, height = grid.pitch
    idle = np.round(np.array(to_rgba(theme.idle)) * 255).astype(np.uint8)
    ax.text(
        0, -0.07, f"{behaviour}: {WORDS[behaviour]}", size=SIZE["note"], weight="bold", color=theme.ink, va="bottom"
    )
    note = f"framed from {FROM[behaviour]:.0%} on"
    if behaviour == "induction" and all(head.induction is None for head in grid.heads):
        note = "no query’s token had an earlier copy in a known text"
    fit(ax.text(PLOT_WIDTH, -0.07, note, size=SIZE["small"], color=theme.soft, ha="right", va="bottom"))
    for kv_head in sorted(set(grid.groups.values())):
        mine = [head for head, group in grid.groups.items() if group == kv_head]
        left, right = grid.left(mine[0]), grid.left(mine[-1]) + width
        shown = values[:, mine[0] : mine[-1] + 1]
        pixels = np.where(np.isnan(shown)[..., None], idle, scale.colors(shown))
        draw_cells(ax, pixels, (left, right, grid.height, 0))
        outline(ax, box(left, right, 0, grid.height), theme.rule, 0.6)
    for head in grid.heads:
        x, y, number = grid.left(head.head), grid.top(head.layer), head.number(behaviour)
        if behaviour in head.names:
            outline(ax, box(x, x + width, y, y + height), theme.accent, 1.3)
        if number is not None and width >= NUMBER[0] and height >= NUMBER[1]:
            fill = "#{:02x}{:02x}{:02x}".format(*scale.colors(number)[:3])
            look: dict[str, Any] = {"size": SIZE["small"], "ha": "center", "va": "center", "color": text_on(fill)}
            ax.text(x + width / 2, y + height / 2, share(number), **look)
        if len(grid.heads) <= MOST_HINTS and number is not None:
            words = f"layer {head.layer}, q{head.head}: {share(number)} {WORDS[behaviour]}"
            hover(ax, box(x, x + width, y, y + height), words, theme)
    every = label_step(LABEL / height)
    for i, layer in enumerate(grid.layers):
        if i % every == 0:
            look = {"size": SIZE["small"], "color": theme.soft, "ha": "right", "va": "center"}
            ax.text(-0.07, (i + 0.5) * height, f"layer {layer}", **look)


def _name_heads(figure: Figure, theme: Theme, grid: _Grid, bottom: float) -> None:
    """Write the numbers of query heads below the last panel."""
    width, _ = grid.pitch
    every = label_step(0.26 / width)
    look: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "ha": "center", "va": "top"}
    for head in sorted(grid.groups):
        if head % every == 0:
            write(figure, PLOT_LEFT + grid.left(head) + width / 2, bottom - 0.05, f"q{head}", **look)
    middle = PLOT_LEFT + PLOT_WIDTH / 2
    write(figure, middle, bottom - 0.19, "query head", size=SIZE["note"], color=theme.soft, ha="center", va="top")


def _caption(grid: _Grid) -> str:
    shared = "" if len(set(grid.groups.values())) == len(grid.groups) else "; those side by side share a KV head"
    colour = "Colour: a mean over the queries that were looked at."
    greys = f" Grey: {grid.greys}." if grid.greys else ""
    return (
        f"A row is a layer, a column a query head{shared}. {colour}{greys}\n"
        "Framed heads are called so; one head may have two names, and one without any does a bit of everything."
    )


def _source(grid: _Grid) -> str:
    queries, repeats = ({getattr(head, name) for head in grid.heads} for name in ("queries", "repeats"))
    asked = plural(max(queries), "query") + (" at most" if len(queries) > 1 else "")
    return f"{asked} a layer, each with 32 keys or more; {max(repeats)} of them repeat a token. {_counts(grid.heads)}."
