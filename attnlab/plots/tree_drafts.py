"""The left panel of a tree mask: the drafts by depth, every one in its row."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from attnlab.inspect.tree_view import Draft
from attnlab.plots.cells import label_step
from attnlab.plots.page_boxes import CHARACTER
from attnlab.plots.style import SIZE, text_on
from attnlab.plots.token_text import visible
from attnlab.plots.tree_layout import LABELLED, TREE_LEFT, Panels, inch_axes


def draw_tree(figure: Figure, panels: Panels, bottom: float) -> None:
    """Draw the drafts by depth, every one in its row, with its number, its text and its position."""
    theme, view, pitch = panels.theme, panels.view, panels.pitch
    width = panels.tree_right - TREE_LEFT
    ax = inch_axes(figure, TREE_LEFT, bottom, width, panels.height)
    _join(ax, panels)
    big = pitch >= LABELLED
    xs, ys, colors = zip(*(_node(panels, draft) for draft in view.drafts), strict=True)
    side = min(0.145, 0.8 * pitch) * 72
    ax.scatter(xs, ys, s=side**2, c=colors, linewidths=0, zorder=2, clip_on=False)
    look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "size": 6.6, "zorder": 3}
    for draft, x, y, color in zip(view.drafts if big else (), xs, ys, colors, strict=False):
        ax.text(x, y, f"{draft.number}", color=text_on(color), **look)
    for row, number in enumerate(view.order):
        if row % panels.every == 0:
            _label(ax, panels, view.drafts[number], width, big=big)
    small: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "va": "bottom"}
    ax.text(width, -0.06, "position", ha="right", **small)
    _name_depths(ax, panels, small)


def _node(panels: Panels, draft: Draft) -> tuple[float, float, str]:
    return draft.depth * panels.deep, (panels.row_of[draft.number] + 0.5) * panels.pitch, panels.color(draft)


def _join(ax: Axes, panels: Panels) -> None:
    """Draw the way from every draft down and right to those that follow it, as one path."""
    points: list[tuple[float, float]] = []
    for draft in panels.view.drafts:
        if draft.parent is not None:
            (x0, y0, _), (x1, y1, _) = _node(panels, panels.view.drafts[draft.parent]), _node(panels, draft)
            points += [(x0, y0), (x0, y1), (x1, y1)]
    if points:
        path = Path(points, [Path.MOVETO, Path.LINETO, Path.LINETO] * (len(points) // 3))
        width = 1.1 if panels.pitch >= 0.1 else 0.7
        ax.add_patch(PathPatch(path, fc="none", ec=panels.theme.faint, lw=width, zorder=1, clip_on=False))


def _label(ax: Axes, panels: Panels, draft: Draft, width: float, *, big: bool) -> None:
    """Write a draft's position, and beside its dot its text; its number, where that has no room inside."""
    theme = panels.theme
    x, y, _ = _node(panels, draft)
    ax.text(width, y, f"{draft.position:,}", ha="right", va="center_baseline", size=SIZE["small"], color=theme.soft)
    text = panels.view.text(draft.number)
    words = [] if big else [f"{draft.number}"]
    room = width - x - 0.12 - CHARACTER * (len(f"{draft.position:,}") + 1)
    size = SIZE["label"] if big else SIZE["small"]
    if text is not None:
        most = int(room / (CHARACTER * size / SIZE["small"])) - 3 * (not big)
        words += [visible(text, most)] if most >= 2 else []
    if words:
        weight = "bold" if draft.parent is None and big else "normal"
        look: dict[str, Any] = {"ha": "left", "va": "center_baseline", "size": size, "weight": weight, "zorder": 3}
        written = ax.text(x + (0.13 if big else 0.07), y, " ".join(words), **look)
        written.set_bbox({"fc": theme.paper, "ec": "none", "pad": 0.6})


def _name_depths(ax: Axes, panels: Panels, look: dict[str, Any]) -> None:
    """Write depths over their columns: in words where there is room."""
    if panels.deep >= 0.62 or panels.view.depth == 0:
        for depth in range(panels.view.depth + 1):
            words = f"depth {depth}" if depth else "root"
            ax.text(depth * panels.deep, -0.06, words, ha="center", **look)
        return
    step = label_step(0.3 / panels.deep)
    ax.text(-0.12, -0.2, "depth", ha="left", **look)
    for depth in range(0, panels.view.depth + 1, step):
        ax.text(depth * panels.deep, -0.06, f"{depth}", ha="center", **look)
