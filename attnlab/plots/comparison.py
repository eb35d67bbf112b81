"""Two runs of one batch: which requests and heads differ, by how much, and at which of their keys it begins.

Above a map of all requests by head; below the keys of the request that differs most, as both runs cut them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from numpy.typing import NDArray
from torch import Tensor

from attnlab.checks import member, require
from attnlab.inspect.compare import Comparison
from attnlab.inspect.differences import PARTS, Piece, amount
from attnlab.plots.cells import box, draw_cells, hover, label_step, outline
from attnlab.plots.color_map import difference_scale, draw_bar
from attnlab.plots.comparison_facts import Shown, caption, in_words, row_words, source_words, statement
from attnlab.plots.key_axis import tick_step
from attnlab.plots.narrow import apart
from attnlab.plots.picture import HINT, Picture
from attnlab.plots.show import show
from attnlab.plots.style import HEADER, SIZE, Theme, boxes, canvas, fit, header, inches, write
from attnlab.plots.words import key_label, short

PANEL_LEFT, PANEL_WIDTH, WIDEST_CELL = 1.30, 6.00, 0.40
MARGIN = 0.62
"""Inches from the map's right edge to where its numbers end."""
BAR_LEFT, BAR_LEAST = 8.14, 1.25
ROW, TALLEST = 0.20, 2.20
"""Inches of a request's row, and of all of them: many requests have thinner ones."""
CUT, CUT_GAP = 0.17, 0.05
"""Inches of a row of ranges, and below both."""
HEAD_ROW, TALLEST_HEADS = 0.13, 1.60
LABEL = 0.13
"""Inches that a label needs: of thinner rows only some have one."""
ABOVE, BETWEEN, AXIS, FOOT = 0.46, 0.22, 0.48, 0.34
"""Inches above a panel for its name, between two, for the axis of keys, and for the line of the source."""
MOST_HINTS, MOST_COLUMNS = 400, 480
LEAST_FRAME = 0.05
"""Inches: what is framed may be a single key."""
TINY = float(np.finfo(np.float64).tiny)
"""Stands for what differs by nothing but the sign of a zero: it is not the paper."""


@show.register(Comparison)
def comparison(*comparisons: Comparison, call: int | None = None) -> Picture:
    """Return a picture of what two runs differ by in one call: the first that differs, or that of number `call`."""
    require(len(comparisons) == 1, f"show: a picture shows 1 comparison of two runs, got {len(comparisons)}")
    (found,) = comparisons
    first = 0 if found.first is None else found.first.call
    number = first if call is None else member("call", call, len(found.calls), of="the comparison")
    shown = Shown.of(found, number)
    title = statement(shown)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, shown)

    return Picture(draw=draw, title=title, alt=in_words(shown))


def _figure(theme: Theme, title: str, shown: Shown) -> Figure:
    requests, largest, differs = shown.call.by_head(shown.part)
    if not requests:
        figure = canvas(HEADER)
        header(figure, theme, title, "A row would be a request, a column a head; no query was recorded.")
        return figure
    pitch = min(ROW, TALLEST / len(requests))
    body = max(pitch * len(requests), BAR_LEAST if shown.row is None else 0.0)
    below = 0.0 if shown.row is None else BETWEEN + ABOVE + 2 * CUT + CUT_GAP + _heads_height(shown.piece) + AXIS
    bottom = FOOT + below + body - pitch * len(requests)
    figure = canvas(FOOT + below + body + ABOVE + HEADER)
    header(figure, theme, title, caption(shown), source_words(shown))
    values = _cells(largest, differs)
    _draw_map(figure, theme, shown, requests, values, bottom=bottom, pitch=pitch)
    top = bottom + pitch * len(requests)
    draw_bar(figure, theme, difference_scale(theme), left=BAR_LEFT, top=top, height=BAR_LEAST)
    if shown.row is not None:
        _draw_keys(figure, theme, shown, top=FOOT + below - BETWEEN - ABOVE)
    return figure


def _heads_height(piece: Piece | None) -> float:
    return 0.0 if piece is None else min(HEAD_ROW * len(piece.heads), TALLEST_HEADS)


def _draw_map(
    figure: Figure,
    theme: Theme,
    shown: Shown,
    requests: Sequence[int],
    values: NDArray[np.float64],
    *,
    bottom: float,
    pitch: float,
) -> None:
    """Draw requests by heads, with the largest difference of each request in the margin."""
    rows, heads = values.shape
    height, width = pitch * rows, min(PANEL_WIDTH, WIDEST_CELL * heads)
    ax = _axes(figure, bottom, width, height, (heads, rows))
    draw_cells(ax, difference_scale(theme).colors(values), (0, heads, rows, 0))
    call = shown.call.a
    group = call.heads // call.kv_heads
    step = group if group > 1 else heads
    left = np.arange(0, heads, step)
    outline(ax, boxes(left, left + step, 0, rows), theme.faint, 0.6)
    top = bottom + height
    name = f"{PARTS[shown.part]} of layer {call.layer}, {call.mode}"
    write(figure, PANEL_LEFT, top + 0.24, name, size=SIZE["head"], weight="bold", va="bottom")
    small: dict[str, Any] = {"size": SIZE["tick"], "color": theme.soft}
    for head in range(0, heads, label_step(0.30 / (width / heads))):
        x = PANEL_LEFT + (head + 0.5) * width / heads
        write(figure, x, top + 0.05, f"q{head}", ha="center", va="bottom", **small)
    _name_rows(figure, theme, [f"r{r}" for r in requests], bottom, pitch)
    end = PANEL_LEFT + width + MARGIN
    write(figure, end, top + 0.05, "largest", ha="right", va="bottom", **{**small, "size": SIZE["small"]})
    for i in range(0, rows, label_step(LABEL / pitch)):
        y = top - (i + 0.5) * pitch
        write(figure, end, y, cell_words(values[i].max()), ha="right", va="center", size=SIZE["tick"])
    _mark_worst(ax, theme, shown, requests, values)


def _mark_worst(ax: Axes, theme: Theme, shown: Shown, requests: Sequence[int], values: NDArray[np.float64]) -> None:
    """Frame the largest cell; give all of them words for the mouse where they are not too many."""
    found = shown.difference
    if found is not None and found.worst is not None:
        y, x = requests.index(found.worst.request), found.worst.head
        outline(ax, box(x, x + 1, y, y + 1), theme.accent, 1.3)
    if values.size <= MOST_HINTS:
        for (i, head), value in np.ndenumerate(values):
            words = f"request {requests[i]}, head {head}: {cell_words(value)}"
            hover(ax, box(head, head + 1, i, i + 1), words, theme)


def cell_words(value: float) -> str:
    """Return a cell's difference in a few letters.

    >>> cell_words(0.0), cell_words(3.14e-6), cell_words(float("inf")), cell_words(TINY)
    ('same', '3.1e-06', 'no number', 'sign')
    """
    if not value:
        return "same"
    if value <= TINY:
        return "sign"
    return amount(value) if np.isfinite(value) else "no number"


def _draw_keys(figure: Figure, theme: Theme, shown: Shown, *, top: float) -> None:
    """Draw the ranges of one request in both runs, and beneath what differs along its keys."""
    if shown.row is None:
        return
    request, piece = shown.row[0], shown.piece
    keys = max(1, shown.keys)
    name = f"keys of {row_words(shown.row)}"
    name += f": {PARTS[piece.part]}" if piece else ": no part that could be compared along them differs"
    write(figure, PANEL_LEFT, top + 0.07, name, size=SIZE["head"], weight="bold", va="bottom")
    for i, (run, words) in enumerate(zip((shown.call.a, shown.call.b), shown.names, strict=True)):
        bottom = top - (i + 1) * CUT
        ax = _axes(figure, bottom, PANEL_WIDTH, CUT, (keys, 1))
        _draw_ranges(ax, theme, request, run.ranges[request], keys)
        look: dict[str, Any] = {"size": SIZE["tick"], "color": theme.soft, "ha": "right", "va": "center"}
        write(figure, PANEL_LEFT - 0.07, bottom + CUT / 2, short(words, 13), **look)
    height = _heads_height(piece)
    bottom = top - 2 * CUT - CUT_GAP - height
    if piece is not None:
        _draw_strip(figure, theme, piece, keys, bottom=bottom, height=height)
    _draw_axis(figure, theme, keys, bottom)


def _draw_ranges(ax: Axes, theme: Theme, request: int, ranges: Sequence[tuple[int, int]], keys: int) -> None:
    """Draw ranges in two shades of the request's colour in turn; those too narrow for that as one block."""
    if not ranges:
        return
    edges = np.asarray(ranges, dtype=np.float64)
    drawn, joined = apart(edges * PANEL_WIDTH / keys)
    shades = (theme.request(request), theme.shade(request))
    numbers = np.arange(len(ranges))
    groups = [(edges[drawn & (numbers % 2 == parity)], color) for parity, color in enumerate(shades)]
    groups.append((joined * keys / PANEL_WIDTH, shades[0]))
    words = ", ".join(f"{first:,}–{end - 1:,}" for first, end in ranges[:24]) + ", …" * (len(ranges) > 24)
    for some, color in groups:
        if len(some):
            path = boxes(some[:, 0], some[:, 1], 0.1, 0.9)
            look: dict[str, Any] = {"ec": theme.paper, "lw": 0.7, "hatch": theme.hatch(request), "clip_on": False}
            ax.add_patch(PathPatch(path, fc=color, gid=HINT + words, **look))


def _draw_strip(figure: Figure, theme: Theme, piece: Piece, keys: int, *, bottom: float, height: float) -> None:
    """Draw heads by keys; keys that the part does not have are grey."""
    spans = [span for span in piece.keys if span is not None]
    end, rows = spans[-1][1], len(piece.heads)
    ax = _axes(figure, bottom, PANEL_WIDTH, height, (keys, rows))
    largest = _cells(piece.relative.amax(-1), piece.differs.any(-1))
    columns = _columns(largest, [first for first, _ in spans], end)
    draw_cells(ax, difference_scale(theme).colors(columns), (0, end, rows, 0))
    if end < keys:
        ax.add_patch(PathPatch(box(end, keys, 0, rows), fc=theme.idle, lw=0, clip_on=False))
    outline(ax, box(0, keys, 0, rows), theme.faint, 0.6)
    _name_rows(figure, theme, [f"q{head}" for head in piece.heads], bottom, height / rows)
    worst = piece.difference(0, 0, "float32").worst
    if worst is not None and worst.keys is not None:
        y, (first, last) = piece.heads.index(worst.head), worst.keys
        spare = max(0.0, LEAST_FRAME * keys / PANEL_WIDTH - (last - first)) / 2
        outline(ax, box(max(0, first - spare), min(keys, last + spare), y, y + 1), theme.accent, 1.3)


def _cells(largest: Tensor, differs: Tensor) -> NDArray[np.float64]:
    """Return what cells show: 0 where bits are equal, and there alone."""
    return np.where(differs.numpy(), np.fmax(largest.numpy(), TINY), 0.0)


def _columns(values: NDArray[np.float64], starts: Sequence[int], end: int) -> NDArray[np.float64]:
    """Return bins that begin at `starts` as columns of one width: the largest of the bins that begin in one.

    >>> _columns(np.array([[1.0, 2.0, 3.0]]), [0, 2, 3], 4).tolist()
    [[1.0, 1.0, 2.0, 3.0]]
    """
    places = np.linspace(0, end, min(end, MOST_COLUMNS), endpoint=False)
    at = np.searchsorted(np.asarray(starts), places, side="right") - 1
    return np.asarray(np.maximum.reduceat(values, at, axis=1))


def _name_rows(figure: Figure, theme: Theme, names: Sequence[str], bottom: float, pitch: float) -> None:
    top = bottom + pitch * len(names)
    look: dict[str, Any] = {"size": SIZE["tick"], "color": theme.soft, "ha": "right", "va": "center"}
    for i in range(0, len(names), label_step(LABEL / pitch)):
        write(figure, PANEL_LEFT - 0.07, top - (i + 0.5) * pitch, names[i], **look)


def _axes(figure: Figure, bottom: float, width: float, height: float, size: tuple[int, int]) -> Axes:
    """Return axes that count columns from the left and rows from the top."""
    ax = inches(figure, PANEL_LEFT, bottom, width, height)
    ax.axis("off")
    ax.set_xlim(0, size[0])
    ax.set_ylim(size[1], 0)
    return ax


def _draw_axis(figure: Figure, theme: Theme, keys: int, bottom: float) -> None:
    ax = inches(figure, PANEL_LEFT, bottom - 0.03, PANEL_WIDTH, 0.001)
    ax.set_xlim(0, keys)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ticks = list(range(0, keys + 1, tick_step(keys, 8)))
    ax.set_xticks(ticks, [key_label(k) for k in ticks])
    words = "key in the request’s list (tokens)"
    look: dict[str, Any] = {"size": SIZE["label"], "color": theme.soft, "ha": "center", "va": "top"}
    fit(write(figure, PANEL_LEFT + PANEL_WIDTH / 2, bottom - 0.27, words, **look))
