"""Attention: what does this token read?

Heads are rows, framed with those that share a KV head. Above all keys, pooled; below 48 of them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Polygon

from attnlab.checks import require
from attnlab.inspect.bins import Pool
from attnlab.inspect.score_view import ScoreView
from attnlab.plots.attention_facts import (
    ZOOM,
    Cells,
    first_words,
    heaviest,
    in_words,
    induction,
    induction_words,
    query_words,
    readers,
    source_words,
    statement,
    strongest,
    zoom_of,
    zoom_words,
)
from attnlab.plots.attention_panel import MOST_HINTS, PANEL_LEFT, Panel, Rows, draw_heads, draw_line, draw_margin
from attnlab.plots.cells import box, hover, label_step, outline
from attnlab.plots.color_map import draw_bar, weight_scale
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import HEADER, SIZE, Theme, canvas, fit, header
from attnlab.plots.token_text import LEGEND, visible
from attnlab.trace import CallTrace, Trace

FLOOR = 1e-4
"""Cells of less weight are bare paper."""
PANEL_WIDTH = 6.24
WIDEST_CELL = 0.36
BAR_LEFT, BAR_LEAST = 8.14, 1.1
ABOVE, BETWEEN, TOKENS, POSITIONS, FOOT = 0.50, 0.72, 0.92, 0.42, 0.34
"""Inches above a panel for its axis, between two for what is said of them, below for texts or for numbers of keys, and
for the line of the source."""


@show.register(ScoreView)
def attention(*views: ScoreView, zoom: int | None = None, pool: Pool | None = None) -> Picture:
    """Return a picture of one query's weights over its keys.

    `zoom` is the first of the 48 enlarged keys (by default the last 48 are); `pool` says what a cell of the upper
    panel is, "key", "page" or "split" (by default keys up to 256 of them, and pages beyond). Of weights that were
    recorded in bins there is the upper panel alone.
    """
    require(len(views) == 1, f"show: a picture shows the attention of 1 request, got {len(views)}")
    (view,) = views
    by_key = view.pool == "key"
    require(by_key or zoom is None, f"zoom: the weights were recorded by {view.pool}, and none is known of a key alone")
    require(by_key or pool in (None, view.pool), f"pool: the weights were recorded by {view.pool}, got {pool!r}")
    enlarged = zoom_of(view, zoom) if by_key else None
    cells = Cells.of(view, pool) if view.keys > ZOOM or not by_key else None
    title = statement(view, enlarged)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, view, enlarged, cells)

    return Picture(draw=draw, title=title, alt=in_words(view, enlarged))


@show.register(CallTrace)
def call_attention(*calls: CallTrace, zoom: int | None = None, pool: Pool | None = None) -> Picture:
    """Return the attention of the first request of a recorded call whose weights were recorded."""
    require(len(calls) == 1, f"show: a picture shows the attention of 1 call, got {len(calls)}")
    (call,) = calls
    view = ScoreView.of_call(call, request=next(_weighed(call), 0), by_key=False)
    return attention(view, zoom=zoom, pool=pool)


@show.register(Trace)
def trace_attention(*traces: Trace, zoom: int | None = None, pool: Pool | None = None) -> Picture:
    """Return the attention of the first call of a recording that has weights; `trace.call(layer)` chooses another."""
    require(len(traces) == 1, f"show: a picture shows the attention of 1 recording, got {len(traces)}")
    (trace,) = traces
    found = next((call for call in trace.calls if any(True for _ in _weighed(call))), None)
    if found is None:
        raise ValueError("trace: no call has weights to show; record with scores=True")
    return call_attention(trace.told(found), zoom=zoom, pool=pool)


def _weighed(call: CallTrace) -> Iterator[int]:
    """Yield the requests of a call whose weights were recorded."""
    return (score.request for score in call.scores if score.stage == "weights")


def _figure(theme: Theme, title: str, view: ScoreView, zoom: tuple[int, int] | None, cells: Cells | None) -> Figure:
    caption, source = _caption(view, zoom, cells), source_words(view) + (f" {LEGEND}" if view.tokens else "")
    if not view.keys:
        figure = canvas(HEADER)
        header(figure, theme, title, caption)
        return figure
    rows = Rows.of(view)
    low = FOOT + (TOKENS if view.tokens and zoom else POSITIONS)
    if not (cells and zoom):  # a single panel may be lower than the bar beside it
        low = max(low, BAR_LEAST + FOOT - rows.height)
    high = low + (rows.height + BETWEEN if cells and zoom else 0)
    figure = canvas(high + rows.height + ABOVE + HEADER)
    header(figure, theme, title, caption, source)
    if zoom:
        count = zoom[1] - zoom[0]
        width = PANEL_WIDTH if cells else min(PANEL_WIDTH, WIDEST_CELL * count)
        lower = Panel(figure=figure, theme=theme, view=view, rows=rows, bottom=low, width=width, columns=count)
        _draw_zoom(lower, zoom, alone=cells is None)
    if cells:
        place: dict[str, Any] = {"bottom": high, "width": PANEL_WIDTH, "columns": cells.count}
        upper = Panel(figure=figure, theme=theme, view=view, rows=rows, **place)
        _draw_overview(upper, cells)
        if zoom:
            _draw_wedge(upper, lower, cells, zoom)
    bar, top = max(BAR_LEAST, rows.height), high + rows.height
    draw_bar(figure, theme, weight_scale(theme, FLOOR), left=BAR_LEFT, top=top, height=bar)
    return figure


def _caption(view: ScoreView, zoom: tuple[int, int] | None, cells: Cells | None) -> str:
    if not view.keys:
        return "Every query reads the keys before it and its own; this request has none yet."
    query = f"{query_words(view)}. {_mapping(view)}"
    bare = "Bare cells hold about 0.01% or less; colour is logarithmic."
    texts = ", with their text" if view.tokens else ""
    if cells is None:
        return f"{query}\nColumns are keys{texts}. {bare}"
    if zoom is None:
        return f"{query}\nAll {view.keys:,} keys, recorded as sums by {view.pool}; one cell is {cells.words}. {bare}"
    start, stop = zoom
    below = zoom_words(view, zoom) if start and stop < view.keys else f"{zoom_words(view, zoom)} keys"
    pooled = {"key": "", "page": ", summed by page", "split": ", summed by split"}.get(
        cells.size, f", summed over {cells.size} at a time"
    )
    return f"{query}\nTop: all {view.keys:,} keys{pooled}. Bottom: {below} one by one{texts}. {bare}"


def _mapping(view: ScoreView) -> str:
    """Return which KV head a row reads."""
    if view.heads == 1:
        return "Its one head is one row."
    if view.group == 1:
        return "Rows are query heads, each with a KV head of its own."
    if view.kv_heads == 1:
        return f"Rows are query heads; all {view.heads} read the one KV head."
    return f"Rows are query heads; head q reads KV head q ÷ {view.group}, rounded down: those in a frame share one."


def _draw_overview(panel: Panel, cells: Cells) -> None:
    """Draw all keys, with their positions above, and what lies on token 0, or in the heaviest bin, beside and below."""
    scale, theme, view = weight_scale(panel.theme, FLOOR), panel.theme, panel.view
    ax = draw_heads(panel, scale.colors(cells.weights))
    _draw_positions(panel, cells)
    name, i = ("first\ntoken", 0) if view.pool == "key" else (f"heaviest\n{view.pool}", heaviest(view))
    at = int(cells.at(view.edges[i]))
    outline(ax, box(at, at + 1, -0.06, panel.rows.total + 0.06), theme.accent, 1.2)
    draw_margin(panel, name, view.weights[:, i].tolist())
    fit(panel.write(PANEL_LEFT, panel.bottom - 0.07, first_words(view), color=theme.accent, va="top"))
    if view.heads <= MOST_HINTS:
        for head in range(view.heads):
            y = panel.rows.top(head)
            hover(ax, box(0, panel.columns, y, y + 1), strongest(view, head), theme)


def _draw_positions(panel: Panel, cells: Cells) -> None:
    """Write key positions over the upper panel, at powers of two as pages are."""
    theme, keys, start = panel.theme, panel.view.keys, panel.view.start
    step = label_step(keys / 8)
    for key in range(-(-start // step) * step, start + keys + 1, step):
        x = panel.x(cells.at(key - start))
        draw_line(panel.figure, theme.faint, [(x, panel.top), (x, panel.top + 0.045)])
        side = "right" if panel.right - x < 0.25 else "center"
        panel.write(x, panel.top + 0.07, f"{key:,}", ha=side, va="bottom")
    middle = PANEL_LEFT + panel.width / 2
    words = f"key position (tokens), one cell {cells.words}"
    panel.write(middle, panel.top + 0.25, words, ha="center", va="bottom", size=SIZE["label"])


def _draw_zoom(panel: Panel, zoom: tuple[int, int], *, alone: bool) -> None:
    """Draw some keys one by one, with their texts below, and what lies on them in the margin."""
    view, theme, (start, stop) = panel.view, panel.theme, zoom
    ax = draw_heads(panel, weight_scale(theme, FLOOR).colors(view.weights[:, start:stop].numpy()))
    _name_keys(panel, zoom)
    if alone:
        draw_margin(panel, "first\ntoken", view.share(0, 1).tolist())
    else:
        words = zoom_words(view, zoom).removeprefix("the ").replace("keys", "these 48\n").split("\n")[0]
        draw_margin(panel, words.replace(" ", "\n", 1), view.share(start, stop).tolist())
        draw_line(panel.figure, theme.accent, [(PANEL_LEFT, panel.top + 0.03), (panel.right, panel.top + 0.03)], 1.4)
    for i, key in enumerate(range(start, stop)):
        hover(ax, box(i, i + 1, 0, panel.rows.total), readers(view, key), theme)
    if found := induction(view, zoom):
        _draw_induction(panel, ax, found, start)


def _name_keys(panel: Panel, zoom: tuple[int, int]) -> None:
    """Write every key's text under its column, or the positions of some keys where there are no texts."""
    view, theme = panel.view, panel.theme
    if not view.tokens:
        _name_positions(panel, zoom)
        return
    look: dict[str, Any] = {"size": SIZE["small"], "color": theme.ink, "ha": "center", "va": "top", "rotation": 90}
    for key in range(*zoom):
        x, weight = panel.x(key - zoom[0] + 0.5), "bold" if key == view.own else "normal"
        panel.write(x, panel.bottom - 0.05, visible(view.tokens[key]), weight=weight, **look)


def _name_positions(panel: Panel, zoom: tuple[int, int]) -> None:
    every = label_step(0.45 / (panel.width / panel.columns))
    first, end = (panel.view.start + key for key in zoom)
    for key in range(-(-first // every) * every, end, every):
        x = panel.x(key - first + 0.5)
        draw_line(panel.figure, panel.theme.faint, [(x, panel.bottom), (x, panel.bottom - 0.045)])
        panel.write(x, panel.bottom - 0.07, f"{key:,}", ha="center", va="top")
    x, side = (PANEL_LEFT + panel.width / 2, "center") if panel.width > 2 else (PANEL_LEFT, "left")
    panel.write(x, panel.bottom - 0.24, "key position (tokens)", ha=side, va="top", size=SIZE["label"])


def _draw_wedge(upper: Panel, lower: Panel, cells: Cells, zoom: tuple[int, int]) -> None:
    """Connect the enlarged keys with their place among all."""
    figure, theme = upper.figure, upper.theme
    left, right = (cells.at(key) for key in zoom)
    corners = [
        (upper.x(left), upper.bottom),
        (upper.x(right), upper.bottom),
        (lower.right, lower.top),
        (PANEL_LEFT, lower.top),
    ]
    figure.add_artist(Polygon(corners, closed=True, transform=figure.dpi_scale_trans, fc=theme.panel, lw=0, zorder=-2))
    edge = 0.06 * upper.rows.pitch
    frame = box(upper.x(left), upper.x(right), upper.bottom - edge, upper.top + edge)
    figure.add_artist(PathPatch(frame, transform=figure.dpi_scale_trans, fc="none", ec=theme.accent, lw=1.2, zorder=6))


def _draw_induction(panel: Panel, ax: Axes, found: tuple[int, int], start: int) -> None:
    """Frame the key that followed the query's token before, and say so above the panel."""
    head, key = found
    x, y, theme = key - start, panel.rows.top(head), panel.theme
    outline(ax, box(x, x + 1, y, y + 1), theme.accent, 1.3)
    at = panel.x(x + 0.5)
    marker = [(at - 0.045, panel.top + 0.12), (at + 0.045, panel.top + 0.12), (at, panel.top + 0.045)]
    panel.figure.add_artist(Polygon(marker, closed=True, transform=panel.figure.dpi_scale_trans, fc=theme.accent, lw=0))
    right = at > PANEL_LEFT + panel.width / 2
    look: dict[str, Any] = {"ha": "right" if right else "left", "va": "bottom", "color": theme.accent}
    panel.write(at + (0.05 if right else -0.05), panel.top + 0.13, induction_words(panel.view, head, key), **look)
