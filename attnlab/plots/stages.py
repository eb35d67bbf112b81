"""Score stages: what becomes of one head's scores on their way from dot products to weights?

Stages from top to bottom, keys from left to right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from attnlab.checks import require
from attnlab.inspect.score_view import StageView
from attnlab.plots.cells import box, draw_cells, fill, hover, outline
from attnlab.plots.color_map import Scale, draw_bar, score_scale, weight_scale
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.stage_facts import (
    POOLED_WIDTH,
    SPACE,
    ZOOM,
    Column,
    columns_of,
    in_words,
    key_words,
    pooled_scores,
    pooled_weights,
    scale_words,
    score_limit,
    stated,
    statement,
)
from attnlab.plots.style import HEADER, SIZE, Theme, boxes, canvas, header, inches, mix, write
from attnlab.plots.token_text import LEGEND, visible
from attnlab.plots.words import plural, signed

FLOOR = 1e-3
"""Cells of less weight are bare paper."""
PANEL_LEFT, PANEL_WIDTH = 1.62, 6.42
WIDEST_KEY = 0.36
ABOVE, CELL, PITCH, SAID, BELOW = 0.44, 0.42, 0.80, 0.44, 1.34
"""Inches above the first row, of a row's cells, from row to row, of a stage told in words alone, below the last row."""
BAR_LEFT, BAR_HEIGHT = 8.24, 1.05
LABELLED = 0.0145
"""Weights from here on have a number."""
NUMBER = 6.6
"""Type size of numbers over cells: they must not meet."""
DETAIL = 5
"""Pixels of a key's width: columns begin and end at multiples of a fifth."""
FULL_WIDTH = 1 + 3 * SPACE + 2 * POOLED_WIDTH + ZOOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stage: its values by column, -inf where masked; without values it is told in words alone."""

    name: str
    formula: str
    values: Sequence[float] = ()
    is_weight: bool = False


@show.register(StageView)
def stages(*views: StageView, zoom: int | None = None) -> Picture:
    """Return a picture of one head's scores, stage by stage.

    `zoom` is the first of 48 keys that have a column each, by default the last 48 do; the others are pooled.
    """
    require(len(views) == 1, f"show: a picture shows the stages of 1 head, got {len(views)}")
    (view,) = views
    columns = columns_of(view, zoom)
    title = statement(view)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, view, columns)

    return Picture(draw=draw, title=title, alt=in_words(view))


def rows_of(view: StageView, columns: list[Column]) -> list[Row]:
    """Return the stages that differ from the one before; raw and scaled differ by a factor, and are one row."""
    rows = [Row(name="scaled score", formula=scale_words(view.scale), values=pooled_scores(view.scaled, columns))]
    if view.capped is not None:
        capped = pooled_scores(view.capped, columns)
        rows.append(Row(name="capped", formula="cap or modifier", values=capped))
    hidden = int((~np.isfinite(view.masked.numpy())).sum())
    if hidden:
        words = f"{plural(hidden, 'key')} set to −∞"
        rows.append(Row(name="masked", formula=words, values=pooled_scores(view.masked, columns)))
    else:
        rows.append(Row(name="masked", formula="no key: the query is its request’s last token and may see them all"))
    return [*rows, Row(name="weight", formula="softmax", values=pooled_weights(view, columns), is_weight=True)]


def _figure(theme: Theme, title: str, view: StageView, columns: list[Column]) -> Figure:
    if not columns:
        figure = canvas(HEADER + 0.1)
        header(figure, theme, title, "Every query scores the keys before it and its own; this request has none yet.")
        return figure
    rows = rows_of(view, columns)
    body = sum(PITCH if row.values else SAID for row in rows) - (PITCH - CELL)
    figure = canvas(HEADER + ABOVE + body + BELOW)
    header(figure, theme, title, _caption(view, columns), _source(view))
    panel = _Panel.of(figure, theme, view, columns, BELOW, body)
    top = body
    for row in rows:
        top = _draw_row(panel, row, top)
    _draw_stated(panel)
    _name_keys(panel)
    for column in columns:
        reach = box(column.left, column.left + column.width, 0, body)
        hover(panel.ax, reach, key_words(view, column), theme)
    _draw_bars(panel, body)
    return figure


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Panel:
    """The axes of all rows: across in widths of a key, upwards in inches from the last row's lower edge."""

    figure: Figure
    theme: Theme
    view: StageView
    columns: list[Column]
    ax: Axes
    unit: float
    scores: Scale
    weights: Scale

    @classmethod
    def of(
        cls, figure: Figure, theme: Theme, view: StageView, columns: list[Column], bottom: float, height: float
    ) -> _Panel:
        full = FULL_WIDTH if view.keys > ZOOM + 2 else max(view.keys, PANEL_WIDTH / WIDEST_KEY)
        ax = inches(figure, PANEL_LEFT, bottom, PANEL_WIDTH, height)
        ax.axis("off")
        ax.set_xlim(0, full)
        ax.set_ylim(0, height)
        limit, lower = score_limit(view)
        return cls(
            figure=figure,
            theme=theme,
            view=view,
            columns=columns,
            ax=ax,
            unit=PANEL_WIDTH / full,
            scores=score_scale(theme, limit, lower=lower),
            weights=weight_scale(theme, FLOOR),
        )


def _caption(view: StageView, columns: list[Column]) -> str:
    query = f"“{visible(view.tokens[view.own])}” at" if view.tokens else "at"
    head = f"query head {view.head} on KV head {view.kv_head}"
    first = f"Query {query} position {view.query:,} of request {view.request}, {head}; read downwards."
    pooled = any(column.keys > 1 for column in columns)
    parts = ["A wide cell stands for many keys: their highest score, the sum of their weights."] if pooled else []
    if not np.isfinite(view.masked.numpy()).all():
        parts.append("Hatched: masked.")
    if said := _underlined(view):
        count = "the key" if len(said) == 1 else f"the {len(said)} keys"
        parts.append(f"Underlined: {count} of the title.")
    return f"{first} Numbers over weights are %.\n{' '.join(parts)}"


def _source(view: StageView) -> str:
    bare = "Recorded scores. Bare weights are about 0.1% or less; their colour is logarithmic, that of scores linear."
    return f"{bare} {LEGEND}" if view.tokens else bare


def _draw_row(panel: _Panel, row: Row, top: float) -> float:
    """Draw a stage whose upper edge is at `top`; return that of the next."""
    theme, low = panel.theme, top - CELL
    words: dict[str, Any] = {"ha": "right", "va": "center"}
    x = -0.12 / panel.unit
    if not row.values:
        panel.ax.text(x, top, row.name, size=SIZE["label"], weight="bold", color=theme.soft, **words)
        panel.ax.text(0, top, row.formula, size=SIZE["note"], color=theme.soft, ha="left", va="center")
        return top - SAID
    panel.ax.text(x, top - 0.12, row.name, size=SIZE["label"], weight="bold", **words)
    panel.ax.text(x, top - 0.32, row.formula, size=SIZE["small"], color=theme.soft, **words)
    _draw_values(panel, row, low, top)
    if row.is_weight:
        _number_weights(panel, row, top)
    else:
        _number_scores(panel, row, top)
    return top - PITCH


def _draw_values(panel: _Panel, row: Row, low: float, top: float) -> None:
    """Draw the cells of a row: coloured ones as an image, masked ones hatched, and a hair-line around all."""
    theme, values = panel.theme, np.array(row.values)
    left = np.array([column.left for column in panel.columns])
    right = left + [column.width for column in panel.columns]
    shown = np.isfinite(values)
    scale = panel.weights if row.is_weight else panel.scores
    pixels = np.zeros((1, round(right[-1] * DETAIL), 4), dtype=np.uint8)
    for start, stop, color in zip(left[shown], right[shown], scale.colors(values[shown]), strict=True):
        pixels[0, round(start * DETAIL) : round(stop * DETAIL)] = color
    draw_cells(panel.ax, pixels, (0, pixels.shape[1] / DETAIL, low, top))
    hidden = ~_seen(panel) if row.is_weight else ~shown
    if hidden.any():
        edge = mix(theme.faint, theme.paper, 0.45)
        fill(panel.ax, boxes(left[hidden], right[hidden], low, top), theme.paper, hatch="/////", edge=edge)
    outline(panel.ax, boxes(left, right, low, top), theme.rule, 0.6)


def _seen(panel: _Panel) -> np.ndarray:
    """Return which columns have a key that is not masked: the weight of the others is 0 for that reason."""
    return np.isfinite(pooled_scores(panel.view.masked, panel.columns))


def _number_weights(panel: _Panel, row: Row, top: float) -> None:
    """Write weights in percent over their cells; of neighbours with two digits every other one stands higher."""
    raised, before = False, Column(start=0, stop=0, left=-9)
    for column, weight in zip(panel.columns, row.values, strict=True):
        if weight < LABELLED:
            continue
        words = f"{100 * weight:.0f}"
        meets = len(words) > 1 and column.left - before.left == 1
        raised = meets and not raised
        x, y = column.left + column.width / 2, top + (0.12 if raised else 0.03)
        panel.ax.text(x, y, words, size=NUMBER, ha="center", va="bottom")
        before = column if len(words) > 1 else before


def _number_scores(panel: _Panel, row: Row, top: float) -> None:
    """Write the highest and the lowest score over their cells, where these are not too near to each other."""
    values = np.where(np.isfinite(row.values), row.values, np.nan)
    if np.isnan(values).all():
        return
    high, low = int(np.nanargmax(values)), int(np.nanargmin(values))
    near = abs(panel.columns[high].left - panel.columns[low].left) * panel.unit < 0.45
    for i in (high,) if near else (high, low):
        column = panel.columns[i]
        x, value = column.left + column.width / 2, float(values[i])
        words = f"+{value:.1f}" if value >= 0.05 else signed(value).replace("−0.0", "0.0")
        panel.ax.text(x, top + 0.03, words, size=SIZE["small"], ha="center", va="bottom")


def _underlined(view: StageView) -> list[int]:
    """Return the keys that the title is about, unless they are so many that lines under them would say nothing."""
    said = stated(view)
    return said if len(said) <= ZOOM else []


def _draw_stated(panel: _Panel) -> None:
    """Underline the keys that the title is about."""
    said = set(_underlined(panel.view))
    some = [column for column in panel.columns if not said.isdisjoint(range(column.start, column.stop))]
    if some:
        left = np.array([column.left for column in some])
        path = boxes(left, left + [column.width for column in some], -0.065, -0.035)
        panel.ax.add_patch(PathPatch(path, fc=panel.theme.accent, lw=0, clip_on=False))


def _name_keys(panel: _Panel) -> None:
    """Write texts or positions under the columns, and how many keys are pooled."""
    view, theme = panel.view, panel.theme
    every = 1 if view.tokens else max(1, round(0.5 / panel.unit))
    for column in panel.columns:
        key, x = column.start, column.left + column.width / 2
        look: dict[str, Any] = {"size": SIZE["small"], "ha": "center", "va": "top"}
        if column.keys > 1:
            words = f"{column.keys:,}\nkeys"
            panel.ax.text(x, -0.11, words, color=theme.soft, rotation=90, linespacing=1.1, **look)
        elif view.tokens:
            weight = "bold" if key == view.own else "normal"
            panel.ax.text(x, -0.11, visible(view.tokens[key]), rotation=90, weight=weight, **look)
        elif (view.start + key) % every == 0:
            panel.ax.text(x, -0.11, f"{view.start + key:,}", color=theme.soft, **look)
    if not view.tokens:
        write(panel.figure, PANEL_LEFT, BELOW - 0.55, "key position (tokens)", size=SIZE["label"], color=theme.soft)


def _draw_bars(panel: _Panel, body: float) -> None:
    """Draw the scale of scores from the first row down, and below it that of weights, if possible at its row."""
    top = BELOW + body
    draw_bar(panel.figure, panel.theme, panel.scores, left=BAR_LEFT, top=top, height=BAR_HEIGHT)
    top = min(BELOW + BAR_HEIGHT, top - BAR_HEIGHT - 0.38)
    draw_bar(panel.figure, panel.theme, panel.weights, left=BAR_LEFT, top=top, height=BAR_HEIGHT)
