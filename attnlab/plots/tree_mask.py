"""Tree mask: which drafts follow which, and what may each of them look at?

The drafts on the left, by depth; on the right their mask. Both share their rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.checks import require
from attnlab.inspect.step import prefix_and_new
from attnlab.inspect.tree_view import TreeView
from attnlab.plan.plans import VerifyPlan
from attnlab.plots.cells import box, fill, outline
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import DPI, FOOTER, HEADER, LEFT, RIGHT, SIZE, Theme, boxes, canvas, header, inches, mix
from attnlab.plots.tree_drafts import draw_tree
from attnlab.plots.tree_facts import caption, in_words, source, statement
from attnlab.plots.tree_layout import Panels
from attnlab.plots.tree_panel import cached_color, draw_mask
from attnlab.plots.words import plural

ABOVE, LEGEND = 0.46, 0.32
"""Inches above the rows for what columns are, and below their names for the marks."""


@show.register(VerifyPlan)
def plan_tree(*plans: VerifyPlan, request: int | None = None, layer: int | None = None) -> Picture:
    """Return a picture of one request's drafts, at one layer.

    `request` is the first that has some, and `layer` one with a window or chunk where there is one, unless they are
    given. `TreeView.of(plan, request=..., layer=..., tokens=...)` brings texts, too.
    """
    require(len(plans) == 1, f"show: a picture shows the drafts of 1 request, got {len(plans)} plans")
    (plan,) = plans
    _, drafts = prefix_and_new(plan)
    number = next((r for r, count in enumerate(drafts) if count), None) if request is None else request
    if number is None:
        return _nothing()
    return tree_mask(TreeView.of(plan, request=number, layer=_partial_layer(plan) if layer is None else layer))


def _partial_layer(plan: VerifyPlan) -> int:
    """Return a layer that sees part of its keys, or else the first."""
    own = [layer for layer in plan.lane_of_layer if not plan.lane(layer).cross] or list(plan.lane_of_layer)
    return next((layer for layer in own if plan.lane(layer).layout.sight.partial), own[0])


@show.register(TreeView)
def tree_mask(*views: TreeView) -> Picture:
    """Return a picture of one request's drafts."""
    require(len(views) == 1, f"show: a picture shows the drafts of 1 request, got {len(views)}")
    (view,) = views
    title = statement(view)

    def draw(theme: Theme) -> Figure:
        return _figure(theme, title, view)

    return Picture(draw=draw, title=title, alt=in_words(view))


def _nothing() -> Picture:
    title = "No request of the batch has a draft to verify"

    def draw(theme: Theme) -> Figure:
        figure = canvas(HEADER)
        header(figure, theme, title, "A request with at least one draft has its tree and its mask here.")
        return figure

    return Picture(draw=draw, title=title, alt=title)


def _figure(theme: Theme, title: str, view: TreeView) -> Figure:
    if not view.drafts:
        figure = canvas(HEADER)
        words = f"It has {plural(view.prefix, 'cached key')}; a request with drafts has its tree and its mask here."
        header(figure, theme, title, words)
        return figure
    panels = Panels.of(theme, view)
    figure = canvas(HEADER + ABOVE + panels.height + panels.below + LEGEND + FOOTER)
    header(figure, theme, title, caption(view), source(view))
    bottom = figure.get_figheight() - HEADER - ABOVE - panels.height
    draw_tree(figure, panels, bottom)
    draw_mask(figure, panels, bottom)
    _draw_legend(figure, panels)
    return figure


def _draw_legend(figure: Figure, panels: Panels) -> None:
    """Draw the marks that occur, with words."""
    theme, view = panels.theme, panels.view
    width = RIGHT - LEFT
    ax = inches(figure, LEFT, FOOTER + 0.1, width, 0.17)
    ax.axis("off")
    ax.set_xlim(0, width)
    ax.set_ylim(0, 0.17)
    blocked = mix(theme.faint, theme.paper, 0.45)
    x = 0.0
    if any(draft.cached for draft in view.drafts):
        fill(ax, box(x, x + 0.19, 0.02, 0.15), cached_color(theme))
        x = _write_on(ax, theme, x + 0.25, "cached key, seen")
    shades = sorted({0, min(1, view.depth), view.depth // 2, view.depth})
    left = x + 0.17 * np.arange(len(shades))
    for at, depth in zip(left.tolist(), shades, strict=True):
        fill(ax, box(at, at + 0.15, 0.02, 0.15), panels.ramp[depth])
    words = "draft on the path, shade = its depth" if view.depth else "the draft itself"
    x = _write_on(ax, theme, float(left[-1]) + 0.21, words)
    if any(len(draft.seen) + len(draft.hidden) < len(view.drafts) for draft in view.drafts):
        outline(ax, box(x, x + 0.19, 0.02, 0.15), theme.rule, 0.8)
        x = _write_on(ax, theme, x + 0.25, "behind it" if view.is_chain else "not on its path")
    if any(draft.hidden or draft.cached_keys < view.prefix for draft in view.drafts):
        fill(ax, box(x, x + 0.19, 0.02, 0.15), theme.paper, hatch="/////", edge=blocked)
        outline(ax, box(x, x + 0.19, 0.02, 0.15), theme.rule, 0.8)
        x = _write_on(ax, theme, x + 0.25, "out of sight" if view.sight.partial else "masked")
    if view.sight.partial and view.prefix and any(draft.first for draft in view.drafts):
        fill(ax, boxes([x + 0.05], [x + 0.075], [0.0], [0.17]), theme.accent)
        _write_on(ax, theme, x + 0.13, "window’s edge" if view.sight.chunk is None else "chunk’s border")


def _write_on(ax: Axes, theme: Theme, x: float, words: str) -> float:
    """Write words and return where the next mark begins, in inches."""
    look: dict[str, Any] = {"size": SIZE["note"], "va": "center_baseline", "color": theme.soft}
    text = ax.text(x, 0.085, words, **look)
    return float(text.get_window_extent().x1) / DPI - LEFT + 0.2
