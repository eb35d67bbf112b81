"""Window layout: which keys does a step read of a request, and where do they lie?

One axis of key positions for queries and pages; below, every page is followed through the id spaces of the pool.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from attnlab.checks import require
from attnlab.inspect.window_view import WindowView
from attnlab.plots.cells import box
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import DPI, FOOTER, HEADER, LEFT, SIZE, Theme, canvas, fit, header, inches, write
from attnlab.plots.window_axis import WindowAxis
from attnlab.plots.window_bars import BAR, LINK
from attnlab.plots.window_facts import caption, in_words, note, source, statement
from attnlab.plots.window_pages import draw_pages, legend_marks
from attnlab.plots.window_queries import PLOT_LEFT, PLOT_WIDTH, draw_queries, panel_height

ABOVE, BELOW, GAP = 0.38, 0.30, 0.30
"""Inches above the queries for the margins' names, below them for the ticks, and then before the pages."""
LABELS, NOTE, LEGEND = 0.24, 0.26, 0.28
"""Inches for the numbers of pages, for the sentence below them, and for the marks."""


@show.register(WindowView)
def window_layout(*views: WindowView) -> Picture:
    """Return a picture of one request of a step; `WindowView.of(pool=..., table=..., ...)` says of which."""
    require(len(views) == 1, f"show: a picture shows the window layout of 1 request, got {len(views)}")
    (view,) = views
    title = statement(view)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, view)

    return Picture(draw=draw, title=title, alt=in_words(view))


def _figure(theme: Theme, title: str, view: WindowView) -> Figure:
    if not view.tokens:
        figure = canvas(HEADER)
        header(
            figure, theme, title, "A request with at least one key has its queries here, and the places of its pages."
        )
        return figure
    axis = WindowAxis.of(edge=view.edge, cached=view.cached, tokens=view.tokens)
    queries, bars = panel_height(view), BAR + len(view.spaces) * (BAR + LINK)
    figure = canvas(HEADER + ABOVE + queries + BELOW + GAP + bars + LABELS + NOTE + LEGEND + FOOTER)
    header(figure, theme, title, caption(view), source(view))
    at = figure.get_figheight() - HEADER - ABOVE - queries
    draw_queries(_axes(figure, at, queries), theme, view, axis)
    at -= BELOW + GAP + bars
    draw_pages(_axes(figure, at, bars), theme, view, axis)
    at -= LABELS + NOTE
    fit(write(figure, PLOT_LEFT, at + 0.08, note(view), size=SIZE["note"], va="bottom"))
    _draw_legend(_axes(figure, at - LEGEND + 0.09, 0.16), theme, view)
    return figure


def _axes(figure: Figure, bottom: float, height: float) -> Axes:
    """Return axes that count inches, to the right and downwards."""
    ax = inches(figure, PLOT_LEFT, bottom, PLOT_WIDTH, height)
    ax.axis("off")
    ax.set_xlim(0, PLOT_WIDTH)
    ax.set_ylim(height, 0)
    return ax


def _draw_legend(ax: Axes, theme: Theme, view: WindowView) -> None:
    """Draw the marks that occur, with words, from the left edge of all text."""
    x = LEFT - PLOT_LEFT
    for words, look in legend_marks(view, theme):
        mark = box(x, x + 0.19, 0.02, 0.15)
        ax.add_patch(PathPatch(mark, **{"ec": "none", "lw": 0, "clip_on": False, **look}))
        text = ax.text(x + 0.25, 0.09, words, size=SIZE["note"], va="center_baseline", color=theme.soft)
        x = float(text.get_window_extent().x1) / DPI - PLOT_LEFT + 0.2
