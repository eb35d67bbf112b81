"""LSE merge: which split carries the answer, and when is it there?

Three questions from top to bottom, one column a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from attnlab.checks import require
from attnlab.inspect.merge import MergeSteps
from attnlab.plots.merge_view import MergeView, Numbers, arrival_words, in_words, off, statement
from attnlab.plots.picture import HINT, Picture
from attnlab.plots.show import show
from attnlab.plots.style import LEFT, RIGHT, SIZE, Theme, boxes, canvas, fit, header, inches, ink_of, mix, write
from attnlab.plots.words import between, plural, share, signed, two_digits

HEIGHT = 6.75
ROWS = ((4.00, 1.00), (2.55, 1.03), (0.80, 0.98))
"""Bottom and height of each question's axes, in inches."""
FIRST_LEFT, COLUMN_GAP, SIDE = 2.25, 0.40, 0.22
"""Inches: where the first column begins, from column to column, and from a column's edge to its first split."""
QUESTIONS = (
    ("1", "How loud is\neach split?", "LSE = ln Σ exp(score)"),
    ("2", "Its weight in\nthe merge", "exp(LSE − total)"),
    ("3", "How far off\nare we still?", "‖running − final‖\n÷ ‖final‖"),
)
SOURCE = "Partials of empty splits do not exist and are not merged. Attention sinks without a key are not part of it."
LABEL = 0.36
"""Inches from one value to the next, so that they do not meet."""
BAR, WIDEST_PITCH = 0.42, 0.9
"""No bar is wider, and no two splits are further apart, in inches."""
NEAR_LINE = 0.19
"""A dot so few inches below the line of the total has its label above the line."""
WEIGHT_TOPS = (0.05, 0.1, 0.25, 0.5, 1.0)
"""The weight axis ends at one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Where one head's axes stand, in inches, and what all columns share: the span of LSE and the largest weight."""

    view: MergeView
    left: float
    width: float
    lse_span: float
    weight_top: float
    distance_top: float

    @property
    def pitch(self) -> float:
        """Inches from split to split; a few do not spread over the whole width."""
        return min(WIDEST_PITCH, (self.width - 2 * SIDE) / max(1, self.view.count - 1))

    @property
    def limits(self) -> tuple[float, float]:
        """What the axes' left and right edge stand for, in splits."""
        last = self.view.count - 1
        side = (self.width / self.pitch - last) / 2
        return -side, last + side


@show.register(MergeSteps)
def lse_merge(*steps: MergeSteps) -> Picture:
    """Return a picture of one head's merge, or of two side by side on the same scales."""
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
            lse_span=max(float(v.total_lse - v.lse.min()) for v in views) + 1.0,
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
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="x", length=0)
    return ax


def _draw_loudness(ax: Axes, theme: Theme, column: Column) -> None:
    """Draw each split's LSE as a dot on a stem, and the total as a line."""
    view, color, unit = column.view, _color(theme), column.lse_span / ROWS[0][1]
    floor, at = view.total_lse - column.lse_span, np.arange(view.count)
    ax.set_ylim(floor, view.total_lse)
    slim = min(1.0, column.pitch / 0.25)
    stems = np.stack([np.repeat(at, 2), np.stack([np.full(view.count, floor), view.lse], -1).ravel()], -1)
    codes = np.tile([Path.MOVETO, Path.LINETO], view.count)
    ax.add_patch(PathPatch(Path(stems, codes), fc="none", ec=mix(color, theme.paper, 0.55), lw=1.2 * slim))
    ax.plot(at, view.lse, "o", color=color, mew=0, ms=2.2 + 3.8 * slim, clip_on=False, ls="none")
    ax.axhline(view.total_lse, color=theme.accent, lw=1.1, ls=(0, (3, 2)), clip_on=False, zorder=1)
    shown = _labelled(column)
    _number_splits(ax, view, shown)
    above = [i for i in _on_top(column, shown) if view.total_lse - view.lse[i] < NEAR_LINE * unit]
    for i in _on_top(column, shown):
        y = view.total_lse + 0.04 * unit if i in above else view.lse[i] + 0.06 * unit
        _write_value(ax, i, y, signed(float(view.lse[i])), va="bottom", weight=_weight(view, i))
    # The name of the line stands on it where no label is in the way, else higher.
    last = column.limits[1]
    free = not any((last - i) * column.pitch < 1.25 for i in above)
    y = view.total_lse + (0.04 if free else 0.19) * unit
    name = f"total LSE {signed(view.total_lse, 2)}"
    ax.text(last, y, name, color=theme.accent, size=SIZE["note"], ha="right", va="bottom")


def _draw_weights(ax: Axes, theme: Theme, column: Column, *, first: bool) -> None:
    """Draw each split's weight as a bar, and under it the length of its partial output."""
    view, top, at = column.view, column.weight_top, np.arange(column.view.count)
    ax.set_ylim(0, top)
    _reference(ax, theme, top)
    half = min(0.38, BAR / 2 / column.pitch)
    bars = boxes(at - half, at + half, 0, view.weight)
    ax.add_patch(PathPatch(bars, fc=_color(theme), lw=0, clip_on=False, gid=HINT + _weight_words(view)))
    shown = _labelled(column)
    for i in _on_top(column, shown):
        weight = float(view.weight[i])
        _write_value(ax, i, weight + 0.03 * top, share(weight), va="bottom", weight=_weight(view, i))
    _number_splits(ax, view, shown)
    below = -0.215 * top
    for i in shown:
        ax.text(i, below, two_digits(view.length[i]), ha="center", va="top", size=SIZE["small"])
    if first:
        x = column.limits[0] - 0.1 / column.pitch
        ax.text(x, below, "length of its partial output", ha="right", va="top", size=SIZE["small"], color=theme.soft)
    ax.set_xlabel(f"split ({_size_words(view)})", labelpad=16)


def _draw_distance(ax: Axes, theme: Theme, column: Column) -> None:
    """Draw how far the running answer is from the final one, split by split."""
    view, color, top = column.view, _color(theme), column.distance_top
    ax.set_ylim(0, top)
    ax.set_xlabel("splits merged so far")
    words = [_merged_words(view, i) for i in range(view.count)]
    wide = 0.12 + 0.08 * len(words[-1])
    ticks = _thinned([view.count - 1, *range(view.count)], wide / column.pitch)
    ax.set_xticks(ticks, [words[i] for i in ticks])
    if view.distance is None:
        ax.text(view.count / 2 - 0.5, top / 2, "the final output is zero: no share of it is defined", ha="center")
        return
    _reference(ax, theme, 1.0)
    at = np.arange(view.count)
    ax.fill_between(at, view.distance, color=mix(color, theme.paper, 0.87), lw=0, zorder=0.5)
    ax.plot(at, view.distance, "-", color=color, clip_on=False, zorder=3)
    dots = 2.2 + 2.8 * min(1.0, column.pitch / 0.25)
    ax.plot(at, view.distance, "o", color=color, mew=0, ms=dots, clip_on=False, zorder=3)
    taken: list[tuple[float, float]] = []
    gap = (LABEL if column.pitch > LABEL else 0.6) / column.pitch  # a line is read between its labels, too
    for i in _thinned([*_stated(view), int(view.distance.argmax()), 0, *range(view.count - 1)], gap):
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
    x, y = i + aside / column.pitch, distance[i] / unit + (-0.12 if dip else 0.12)
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


def _labelled(column: Column) -> list[int]:
    """Return the splits that have room for a label: the heaviest first."""
    return _thinned((int(i) for i in np.argsort(-column.view.weight, kind="stable")), LABEL / column.pitch)


def _thinned(wanted: Iterable[int], gap: float) -> list[int]:
    """Return those positions that keep a gap from the ones before them in the list."""
    kept: list[int] = []
    for i in wanted:
        if all(abs(i - other) >= gap for other in kept):
            kept.append(i)
    return kept


def _on_top(column: Column, shown: Sequence[int]) -> list[int]:
    """Return those above which there is room for a value: no neighbour under the label is higher."""
    reach, weight = int(0.5 * LABEL / column.pitch + 0.5), column.view.weight
    return [i for i in shown if weight[i] >= weight[max(0, i - reach) : i + reach + 1].max()]


def _number_splits(ax: Axes, view: MergeView, shown: Sequence[int]) -> None:
    ax.set_xticks(shown, [str(view.number[i]) for i in shown])


def _reference(ax: Axes, theme: Theme, value: float) -> None:
    """Draw the one line that a panel's heights are read against."""
    ax.axhline(value, color=theme.rule, lw=0.7, zorder=0)
    ax.set_yticks([value], [f"{value:.0%}"])
    ax.tick_params(axis="y", length=0, labelsize=SIZE["small"], labelcolor=theme.soft)


def _merged_words(view: MergeView, i: int) -> str:
    return f"{view.number[0]}" if i == 0 else f"{view.number[0]}–{view.number[i]}"


def _size_words(view: MergeView) -> str:
    *full, last = view.keys
    if len(set(view.keys)) == 1:
        each = f"{plural(last, 'key')} each"
    elif len(set(full)) == 1:
        each = f"{plural(full[0], 'key')} each, the last {last:,}"
    else:
        each = between(view.keys, "key")
    return each if view.count == 1 else f"{each}, oldest first"


def _weight_words(view: MergeView) -> str:
    listed = zip(view.number, view.weight.tolist(), strict=True)
    return f"{view.title}: " + ", ".join(f"split {number} {share(weight)}" for number, weight in listed)


def _weight(view: MergeView, i: int) -> str:
    return "bold" if i == view.heaviest else "normal"


def _color(theme: Theme) -> str:
    # One hue for all columns: colours tell requests apart, heads have a place and a name.
    return ink_of(theme.request(0), theme)
