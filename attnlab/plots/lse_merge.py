"""LSE merge: which split carries the answer, and when is it there?

Three questions from top to bottom, one column a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from attnlab.checks import require
from attnlab.inspect.merge import MergeSteps
from attnlab.plots.key_axis import tick_step
from attnlab.plots.merge_column import LABEL, Column, thinned
from attnlab.plots.merge_view import MergeView, Numbers, arrival_words, below_words, in_words, off, statement
from attnlab.plots.picture import HINT, Picture
from attnlab.plots.show import show
from attnlab.plots.style import LEFT, RIGHT, SIZE, Theme, boxes, canvas, fit, header, inches, ink_of, write
from attnlab.plots.words import between, plural, share, signed, two_digits

HEIGHT = 6.75
ROWS = ((4.00, 1.00), (2.55, 1.03), (0.80, 0.98))
"""Bottom and height of each question's axes, in inches."""
FIRST_LEFT, COLUMN_GAP = 2.25, 0.40
"""Inches: where the first column begins, and from column to column."""
QUESTIONS = (
    ("1", "How loud is\neach split?", "LSE − total\nLSE = ln Σ exp(score)"),
    ("2", "Its weight in\nthe merge", "exp(LSE − total)"),
    ("3", "How far off\nare we still?", "‖running − final‖\n÷ ‖final‖"),
)
SOURCE = "Merged are the splits in which the query sees a key. Attention sinks without a key are not part of it."
BELOW_DOT, BAR = 0.24, 0.42
"""Inches for the label of the lowest dot, and the greatest width of a bar."""
WEIGHT_TOPS = (0.05, 0.1, 0.25, 0.5, 1.0)
"""The weight axis ends at one of these."""


@show.register(MergeSteps)
def lse_merge(*steps: MergeSteps) -> Picture:
    """Return a picture of one head's merge, or of two side by side on the same scales; three have no room."""
    require(len(steps) <= 2, f"show: a picture compares at most 2 merges, got {len(steps)}")
    views = [MergeView.of(x) for x in steps]
    title = statement(views)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, views)

    return Picture(draw=draw, title=title, alt=in_words(views))


def _figure(theme: Theme, title: str, views: Sequence[MergeView]) -> Figure:
    figure = canvas(HEIGHT)
    header(figure, theme, title, _caption(views), SOURCE)
    _draw_questions(figure, theme)
    for column in _columns(views):
        _draw_heading(figure, theme, column, alone=len(views) == 1)
        _draw_loudness(_axes(figure, column, 0), theme, column)
        _draw_weights(_axes(figure, column, 1), theme, column, first=column.left == FIRST_LEFT)
        _draw_distance(_axes(figure, column, 2), theme, column)
    return figure


def _columns(views: Sequence[MergeView]) -> list[Column]:
    width = (RIGHT - 0.15 - FIRST_LEFT - COLUMN_GAP * (len(views) - 1)) / len(views)
    heaviest = max(float(view.weight.max()) for view in views)
    distances = [float(view.distance.max()) for view in views if view.distance is not None]
    return [
        Column(
            view=view,
            left=FIRST_LEFT + i * (width + COLUMN_GAP),
            width=width,
            # The same span in all columns: else a diffuse head would look as peaked as a sink head.
            lse_span=max(1.0, *(-float(v.below.min()) for v in views)) / (1 - BELOW_DOT / ROWS[0][1]),
            weight_top=next(top for top in WEIGHT_TOPS if top >= heaviest or top == 1),
            distance_top=max(1.0, *distances, 1.0),
        )
        for i, view in enumerate(views)
    ]


def _caption(views: Sequence[MergeView]) -> str:
    sizes = list(dict.fromkeys((sum(view.keys), view.count) for view in views))
    reads = f"A query reads {plural(sizes[0][0], 'key')} in {plural(sizes[0][1], 'split')}"
    if len(sizes) == 2:
        reads += f", the other {sizes[1][0]:,} in {sizes[1][1]:,}"
    low, high = (two_digits(pick(float(pick(view.length)) for view in views)) for pick in (min, max))
    effect = (
        f" Weight is not effect: the partial outputs here have lengths from {low} to {high}." if low != high else ""
    )
    return (
        f"{reads}. Each split returns a partial output and one number, the log-sum-exp (LSE) of its scores;\n"
        f"the merge weighs the partial outputs by exp(LSE − total).{effect}"
    )


def _draw_questions(figure: Figure, theme: Theme) -> None:
    for (number, question, formula), (bottom, height) in zip(QUESTIONS, ROWS, strict=True):
        top = bottom + height
        write(figure, LEFT, top, number, size=SIZE["big"], weight="bold", color=theme.faint, va="top")
        words: dict[str, Any] = {"va": "top", "linespacing": 1.25}
        write(figure, LEFT + 0.28, top - 0.03, question, size=SIZE["label"], weight="bold", **words)
        write(figure, LEFT + 0.28, top - 0.42, formula, size=SIZE["small"], color=theme.soft, **words)


def _draw_heading(figure: Figure, theme: Theme, column: Column, *, alone: bool) -> None:
    """Name the head, and under two of them say when each one's answer is there; alone, the title says it."""
    x, right = column.left, column.left + column.width
    fit(write(figure, x, HEIGHT - 1.06, column.view.title, size=SIZE["head"], weight="bold", va="top"), right)
    if not alone:
        words = f"the answer is {arrival_words(column.view)}"
        fit(write(figure, x, HEIGHT - 1.25, words, size=SIZE["note"], color=theme.soft, va="top"), right)


def _axes(figure: Figure, column: Column, row: int) -> Axes:
    ax = inches(figure, column.left, ROWS[row][0], column.width, ROWS[row][1])
    ax.set_xlim(*column.limits)
    # Ticks without marks are plain text, which is drawn in half the time.
    ax.xaxis.set_visible(False)
    ax.yaxis.set_visible(False)
    ax.spines["left"].set_visible(False)
    return ax


def _write_below(ax: Axes, theme: Theme, row: int, words: dict[int, str], name: str = "", down: float = 0.30) -> None:
    """Write words under splits, and so many inches down the name of the axis."""
    height = ROWS[row][1]
    look: dict[str, Any] = {"ha": "center", "color": theme.soft, "transform": ax.get_xaxis_transform()}
    for i, word in words.items():
        ax.text(i, -0.13 / height, word, size=SIZE["tick"], **look)
    if name:
        ax.text(sum(ax.get_xlim()) / 2, -down / height, name, size=SIZE["label"], **look)


def _draw_loudness(ax: Axes, theme: Theme, column: Column) -> None:
    """Hang each split's LSE from the line of the total: the stem's length is what the weight is made of."""
    view, span, color = column.view, column.lse_span, _color(theme, column.view)
    unit, at = span / ROWS[0][1], np.arange(view.count)
    ax.set_ylim(-span, 0)
    step = tick_step(ceil(span), 4)
    _scale(ax, theme, {-depth: signed(-depth, 0) for depth in range(step, ceil(0.95 * span), step)})
    slim = min(1.0, column.pitch / 0.25)
    stems = np.stack([np.repeat(at, 2), np.stack([np.zeros(view.count), view.below], -1).ravel()], -1)
    codes = np.tile([Path.MOVETO, Path.LINETO], view.count)
    ax.add_patch(PathPatch(Path(stems, codes), fc="none", ec=color, lw=max(0.5, 1.2 * slim), clip_on=False))
    ax.plot(at, view.below, "o", color=color, mew=0, ms=2.2 + 3.8 * slim, clip_on=False, ls="none", zorder=3)
    ax.axhline(0, color=theme.accent, lw=1.1, ls=(0, (3, 2)), clip_on=False)
    _write_below(ax, theme, 0, column.numbers)
    _label_loudness(ax, theme, column, unit)


def _label_loudness(ax: Axes, theme: Theme, column: Column, unit: float) -> None:
    """Write values under dots, where no neighbour hangs lower; the loudest split's at least above the line."""
    view, top, (first, last) = column.view, column.view.heaviest, column.limits
    words = [below_words(below) for below in view.below.tolist()]
    hanging = column.clear(-view.below, column.labelled())
    for i in hanging:
        _write_value(ax, i, view.below[i] - 0.07 * unit, words[i], va="top", weight=_weight(view, i))
    if top not in hanging:
        _write_value(ax, top, 0.04 * unit, words[top], va="bottom", weight="bold")
    at_right = top in hanging or (last - top) * column.pitch > 1.25
    side, x = ("right", last) if at_right else ("left", first)
    name = f"total LSE {signed(view.total_lse, 2)}"
    ax.text(x, 0.04 * unit, name, color=theme.accent, size=SIZE["note"], ha=side, va="bottom")


def _draw_weights(ax: Axes, theme: Theme, column: Column, *, first: bool) -> None:
    """Draw each split's weight as a bar, and under it the length of its partial output."""
    view, top, at = column.view, column.weight_top, np.arange(column.view.count)
    ax.set_ylim(0, top)
    _scale(ax, theme, {top: f"{top:.0%}"})
    half = min(0.38, BAR / 2 / column.pitch)
    bars = boxes(at - half, at + half, 0, view.weight)
    ax.add_patch(PathPatch(bars, fc=_color(theme, view), lw=0, clip_on=False, gid=HINT + _weight_words(view)))
    for i in column.clear(view.weight, column.labelled()):
        weight = float(view.weight[i])
        _write_value(ax, i, weight + 0.03 * top, share(weight), va="bottom", weight=_weight(view, i))
    below = -0.215 * top
    for i in column.numbers:
        ax.text(i, below, two_digits(view.length[i]), ha="center", va="top", size=SIZE["small"])
    if first:
        x = column.limits[0] - 0.1 / column.pitch
        ax.text(x, below, "length of its partial output", ha="right", va="top", size=SIZE["small"], color=theme.soft)
    _write_below(ax, theme, 1, column.numbers, f"split ({_size_words(view)})", 0.48)


def _draw_distance(ax: Axes, theme: Theme, column: Column) -> None:
    """Draw how far the running answer is from the final one, split by split."""
    view, color, top = column.view, _color(theme, column.view), column.distance_top
    ax.set_ylim(0, top)
    last = view.count - 1
    wide = 0.12 + 0.08 * len(_merged_words(view, last))
    ends = thinned([last, *column.regular(wide)], wide / column.pitch)
    _write_below(ax, theme, 2, {i: _merged_words(view, i) for i in ends}, "splits merged so far")
    if view.distance is None:
        ax.text(view.count / 2 - 0.5, top / 2, "the final output is zero: no share of it is defined", ha="center")
        return
    _scale(ax, theme, {1.0: "100%"})
    at = np.arange(view.count)
    ax.plot(at, view.distance, "-", color=color, clip_on=False, zorder=3)
    dots = 2.2 + 2.8 * min(1.0, column.pitch / 0.25)
    ax.plot(at, view.distance, "o", color=color, mew=0, ms=dots, clip_on=False, zorder=3)
    taken: list[tuple[float, float]] = []
    gap = (LABEL if column.pitch > LABEL else 0.6) / column.pitch  # a line is read between its labels, too
    for i in thinned([*_stated(view), int(view.distance.argmax()), 0, *range(view.count - 1)], gap):
        _label_distance(ax, column, view.distance, i, taken)


def _label_distance(ax: Axes, column: Column, distance: Numbers, i: int, taken: list[tuple[float, float]]) -> None:
    """Write a value where neither the line nor another value is: above a peak, beside a slope, below a dip.

    `taken` holds the places of values so far, in splits and inches.
    """
    unit, reach = column.distance_top / ROWS[2][1], ceil(0.3 / column.pitch)
    left = distance[max(0, i - reach) : i].max(initial=0.0) > distance[i] + 0.02 * unit
    right = distance[i + 1 : i + 1 + reach].max(initial=0.0) > distance[i] + 0.02 * unit
    dip, stated = left and right, i in _stated(column.view)
    aside = 0.0 if left == right else 0.16 if left else -0.16
    x = max(i + aside / column.pitch, column.limits[0] + 0.15 / column.pitch)
    y = distance[i] / unit + (-0.12 if dip else 0.12)
    meets = any(abs(x - other) * column.pitch < LABEL and abs(y - height) < 0.15 for other, height in taken)
    if not stated and (meets or y < 0.08):
        return
    taken.append((x, y))
    weight = "bold" if stated else "normal"
    _write_value(ax, x, max(y, 0.08) * unit, off(float(distance[i])), va="center", weight=weight)


def _write_value(ax: Axes, x: float, y: float, value: str, *, va: str, weight: str) -> None:
    """Write a value at a split, smaller where it is long: its neighbour may be LABEL inches away."""
    size = SIZE["note" if len(value) <= 4 else "small"]
    ax.text(x, y, value, ha="center", va=va, size=size, weight=weight)


def _stated(view: MergeView) -> list[int]:
    """Return the step whose distance the title or heading states."""
    if view.arrival is None or view.distance is None or view.count == 1:
        return []
    return [view.arrival - 1 if view.arrival else int(view.distance[:-1].argmax())]


def _scale(ax: Axes, theme: Theme, marks: dict[float, str]) -> None:
    """Draw the lines that a panel's heights are read against."""
    left = ax.get_xlim()[0]
    for value, words in marks.items():
        ax.axhline(value, color=theme.rule, lw=0.7, zorder=0)
        ax.text(left, value, f"{words} ", size=SIZE["small"], color=theme.soft, ha="right", va="center")


def _merged_words(view: MergeView, i: int) -> str:
    return f"{view.number[0]}" if i == 0 else f"{view.number[0]}–{view.number[i]}"


def _size_words(view: MergeView) -> str:
    *full, last = view.keys
    if view.count == 1:
        return plural(last, "key")
    if len(set(view.keys)) == 1:
        each = f"{plural(last, 'key')} each"
    elif len(set(full)) == 1:
        each = f"{plural(full[0], 'key')} each, the last {last:,}"
    else:
        each = between(view.keys, "key")
    return f"{each}, oldest first"


def _weight_words(view: MergeView) -> str:
    listed = zip(view.number, view.weight.tolist(), view.lse.tolist(), strict=True)
    return f"{view.title}: " + ", ".join(f"split {n} {share(weight)} (LSE {signed(lse)})" for n, weight, lse in listed)


def _weight(view: MergeView, i: int) -> str:
    return "bold" if i == view.heaviest else "normal"


def _color(theme: Theme, view: MergeView) -> str:
    # One hue for all heads of a request: colours tell requests apart, heads have a place and a name.
    return ink_of(theme.request(view.request), theme)
