"""The right panel of a tree mask: what every draft sees, of cached keys and of drafts."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.plots.cells import box, draw_cells, fill, hover, label_step, outline
from attnlab.plots.page_boxes import CHARACTER
from attnlab.plots.style import SIZE, Theme, mix, text_on
from attnlab.plots.token_text import visible
from attnlab.plots.tree_facts import draft_words
from attnlab.plots.tree_layout import Panels, inch_axes
from attnlab.plots.tree_marks import Marks, path_of, pixels_of
from attnlab.plots.words import plural

MOST_HINTS = 128
"""More drafts do not have what they see listed for the mouse."""
NARROW = 0.068
"""Columns of cached keys narrower than so many inches have no numbers: the last would meet the first draft's."""


def draw_mask(figure: Figure, panels: Panels, bottom: float) -> None:
    """Draw what every draft sees: cached keys, then drafts in the order of the rows."""
    theme, view = panels.theme, panels.view
    ax = inch_axes(figure, panels.mask_left, bottom, panels.mask_width, panels.height)
    inset = (0.05 * panels.unit, 0.06 * panels.pitch) if panels.apart else (0.0, 0.0)
    marks = Marks.of(panels)
    if marks.out:
        edge = mix(theme.faint, theme.paper, 0.45)
        fill(ax, path_of(marks.out, inset), theme.paper, hatch="/////", edge=edge)
    if panels.apart:
        for some in (marks.out, marks.empty):
            if some:
                outline(ax, path_of(some, inset), theme.rule, 0.7)
    else:
        for left, right in ((0.0, panels.x(view.prefix)), (panels.drafts_left, panels.mask_width)):
            if right > left:
                outline(ax, box(left, right, 0, panels.height), theme.rule, 0.7)
    if marks.seen:
        fill(ax, path_of(marks.seen, inset), cached_color(theme))
    if panels.apart:
        for depth, cells in marks.drafts.items():
            fill(ax, path_of(cells, inset), panels.ramp[depth])
    else:
        left = panels.drafts_left
        draw_cells(ax, pixels_of(panels), (left, panels.mask_width, panels.height, 0))
    _dot_own(ax, panels)
    _draw_edge(ax, panels)
    _write_margin(ax, panels)
    _name_columns(ax, panels)
    for draft in view.drafts if panels.rows <= MOST_HINTS else ():
        row = panels.row_of[draft.number]
        reach = box(0, panels.mask_width, row * panels.pitch, (row + 1) * panels.pitch)
        hover(ax, reach, draft_words(view, draft), theme)


def cached_color(theme: Theme) -> str:
    """Return the colour of cached keys that are seen: they are nobody's in particular."""
    return mix(theme.faint, theme.paper, 0.55)


def _dot_own(ax: Axes, panels: Panels) -> None:
    """Put a dot where a row's draft is its own column, where cells are large enough."""
    side = min(panels.unit, panels.pitch)
    if side < 0.09:
        return
    own = [draft for draft in panels.view.drafts if draft.number in draft.seen]
    if own:
        xs = [panels.draft_x(draft.number) + panels.unit / 2 for draft in own]
        ys = [(panels.row_of[draft.number] + 0.5) * panels.pitch for draft in own]
        colors = [text_on(panels.color(draft)) for draft in own]
        ax.scatter(xs, ys, s=min(3.6, 0.3 * side * 72) ** 2, c=colors, linewidths=0, zorder=4, clip_on=False)


def _draw_edge(ax: Axes, panels: Panels) -> None:
    """Draw where every row's sight begins, as one staircase."""
    view = panels.view
    firsts = [view.drafts[number].first for number in view.order]
    if not view.sight.partial or not any(firsts) or not view.prefix:
        return
    xs = [panels.x(min(first, view.prefix)) for first in firsts for _ in (0, 1)]
    ys = [y * panels.pitch for row in range(panels.rows) for y in (row, row + 1)]
    ax.plot(xs, ys, color=panels.theme.accent, lw=1.6, clip_on=False, solid_joinstyle="miter", zorder=5)


def _write_margin(ax: Axes, panels: Panels) -> None:
    """Count what each draft sees, at the right of its row."""
    theme, view = panels.theme, panels.view
    x = panels.margin
    head: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "va": "bottom", "ha": "left"}
    ax.text(x, -0.06, "cached\n+ drafts", linespacing=1.15, **head)
    for row, number in enumerate(view.order):
        if row % panels.every == 0:
            draft = view.drafts[number]
            words = f"{draft.cached_keys:,} + {len(draft.seen):,}"
            y = (row + 0.5) * panels.pitch
            ax.text(x, y, words, ha="left", va="center_baseline", size=SIZE["small"])


def _name_columns(ax: Axes, panels: Panels) -> None:
    """Say above what the columns are, and below which key each is."""
    theme, view, low = panels.theme, panels.view, panels.height + 0.06
    head: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "va": "bottom"}
    drafts = panels.drafts_left
    ax.text(drafts, -0.06, panels.drafts_name, ha="left", **head)
    if panels.columns:
        words = plural(view.prefix, "cached key")
        # Where columns are few their name stands higher, so as not to meet the next one.
        ax.text(0, -0.2 if CHARACTER * len(words) > drafts - 0.1 else -0.06, words, ha="left", **head)
    look: dict[str, Any] = {"size": SIZE["small"], "va": "top", "ha": "center", "rotation": 90}
    singles = [column.start for column in panels.columns if column.stop - column.start == 1]
    every, cached_every = label_step(0.125 / panels.unit), label_step(0.125 / max(panels.cached_unit, 1e-3))
    for column, words in zip(panels.columns, panels.names, strict=True):
        single = column.stop - column.start == 1
        in_turn = single and (singles[-1] - column.start) % cached_every == 0 and panels.cached_unit > NARROW
        shown = in_turn or (not single and column.width * panels.cached_unit > 0.1)
        if shown:
            x = (column.left + column.width / 2) * panels.cached_unit
            ax.text(x, low, words, color=theme.soft, **look)
    for row, number in enumerate(view.order):
        if row % every:
            continue
        text = view.text(number)
        x = panels.draft_x(number) + panels.unit / 2
        upright = look | (
            {"rotation": 0}
            if text is None and panels.unit * every > CHARACTER * len(f"{panels.rows - 1}") + 0.05
            else {}
        )
        ax.text(x, low, f"{number}" if text is None else visible(text), color=theme.ink, **upright)
