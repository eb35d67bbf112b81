"""Draft pages: where do the branches of a draft lie, and what does each read in every step?

Columns are the slots of one request, in pages; a row is a branch's query in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.checks import require
from attnlab.inspect.draft_view import DraftRead, DraftView
from attnlab.plan.draft import DraftPlan
from attnlab.plots.cells import box, fill, hover, label_step, outline
from attnlab.plots.draft_facts import caption, in_words, read_words, source, statement
from attnlab.plots.draft_layout import DraftColumns
from attnlab.plots.page_boxes import CHARACTER
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.style import FOOTER, HEADER, LEFT, RIGHT, SIZE, Theme, canvas, header, mix, text_on
from attnlab.plots.tree_layout import inch_axes, ramp_of
from attnlab.plots.tree_panel import cached_color

PLOT_LEFT = 1.52
PAGES, ABOVE, GAP = 0.2, 0.42, 0.14
"""Inches of the bar of pages, above it for their names, and below it."""
ROW, BRANCH = 0.19, 0.07
"""Inches of a step's row, and between two branches."""
LEAST_DOT, LEAST_FRAME = 0.07, 0.06
"""Columns narrower than so many inches have no dot, or, as pages of one slot, no frame."""


@show.register(DraftPlan)
def plan_pages(*plans: DraftPlan, request: int | None = None, layer: int | None = None) -> Picture:
    """Return a picture of one request's branches, at one layer.

    `request` is the first that is no padded row, and `layer` one with a window or chunk where there is one, unless they
    are given.
    """
    require(len(plans) == 1, f"show: a picture shows the branches of 1 request, got {len(plans)} plans")
    (plan,) = plans
    seq: list[int] = plan.batch.seq.device.tolist()
    if not plan.steps or not any(seq):
        return _nothing("There is no request to draft for" if plan.steps else "Branches of one draft need no step")
    number = next(r for r, tokens in enumerate(seq) if tokens) if request is None else request
    return draft_pages(DraftView.of(plan, request=number, layer=_partial_layer(plan) if layer is None else layer))


def _partial_layer(plan: DraftPlan) -> int:
    """Return a layer that sees part of its keys, or else the first."""
    step = plan.steps[0]
    return next((i for i in step.lane_of_layer if step.lane(i).layout.sight.partial), next(iter(step.lane_of_layer)))


def _nothing(title: str) -> Picture:
    def draw(theme: Theme) -> Figure:
        figure = canvas(HEADER)
        header(figure, theme, title, "A draft of several tokens a branch has its branches and its steps here.")
        return figure

    return Picture(draw=draw, title=title, alt=f"{title}: no branch reads anything.")


@show.register(DraftView)
def draft_pages(*views: DraftView) -> Picture:
    """Return a picture of one request's branches."""
    require(len(views) == 1, f"show: a picture shows the branches of 1 request, got {len(views)}")
    (view,) = views
    title = statement(view)
    if not view.cached:
        return _nothing(title)

    def draw(theme: Theme) -> Figure:
        return _Drawing(theme=theme, view=view, columns=DraftColumns.of(view)).figure(title)

    return Picture(draw=draw, title=title, alt=in_words(view))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """A view, laid out, on one paper. Inches count to the right and downwards from the first row's upper left."""

    theme: Theme
    view: DraftView
    columns: DraftColumns

    @property
    def ramp(self) -> tuple[str, ...]:
        """A shade for every draft of a branch."""
        return ramp_of(self.theme, self.view.drafts)[1:]

    @property
    def height(self) -> float:
        """Inches of all rows."""
        return self.top(self.columns.kept, 0) - BRANCH

    def top(self, branch: int, step: int) -> float:
        """Return where a row begins."""
        return branch * ((self.view.drafts - 1) * ROW + BRANCH) + step * ROW

    @property
    def dotted(self) -> bool:
        """Whether a query's own column is large enough for a dot."""
        return self.columns.unit > LEAST_DOT

    @property
    def below(self) -> float:
        """Inches that the slots' numbers need below the rows."""
        longest = max(len(f"{slot:,}") for mine in (*self.view.own, self.view.cached_slots) for slot in mine)
        return 0.2 + CHARACTER * longest

    def figure(self, title: str) -> Figure:
        """Draw everything."""
        theme, view = self.theme, self.view
        figure = canvas(HEADER + ABOVE + PAGES + GAP + self.height + self.below + FOOTER)
        header(figure, theme, title, caption(view, kept=self.columns.kept, dotted=self.dotted), source(view))
        ax = inch_axes(figure, PLOT_LEFT, FOOTER + self.below, self.columns.width, self.height)
        self.draw_pages(ax)
        self.draw_frames(ax)
        for read in view.reads:
            if read.branch < self.columns.kept:
                self.draw_read(ax, read)
        self.draw_edge(ax)
        self.name_rows(ax)
        self.name_slots(ax)
        return figure

    def draw_pages(self, ax: Axes) -> None:
        """Draw the request's slots once: what each is for, and in which page."""
        theme, low = self.theme, -GAP
        for s in self.columns.stretches:
            x0, x1 = self.columns.span(s)
            if s.kind == "draft":
                unit = (x1 - x0) / self.view.drafts
                for draft, shade in enumerate(self.ramp[:-1]):
                    fill(ax, box(x0 + draft * unit, x0 + (draft + 1) * unit, low - PAGES, low), shade)
            elif s.kind != "rest":
                color = mix(theme.faint, theme.paper, 0.86) if s.kind == "copy" else cached_color(theme)
                fill(ax, box(x0, x1, low - PAGES, low), color)
        named = self.view.page_size > 1
        head: dict[str, Any] = {"size": SIZE["small"], "color": theme.soft, "ha": "left"}
        if named:
            ax.text(LEFT - PLOT_LEFT, low - PAGES - 0.04, "page", va="bottom", **head)
        ax.text(LEFT - PLOT_LEFT, low - PAGES / 2, "slots for", va="center_baseline", **head)
        self.frame_pages(ax, low, named=named)
        self.name_owners(ax, low - PAGES - (0.2 if named else 0.04))

    def frame_pages(self, ax: Axes, low: float, *, named: bool) -> None:
        """Frame every page that has columns of its own, and name it where there is room."""
        size, free = self.view.page_size, -1.0
        if not named and self.columns.unit < LEAST_FRAME:
            return
        shown = (s for s in self.columns.stretches if s.kind != "earlier")
        for first in sorted({column // size * size for s in shown for column in range(s.first, s.end)}):
            pieces = self.columns.spans(first, first + size)
            left, right = pieces[0][0], pieces[-1][1]
            outline(ax, box(left, right, low - PAGES, low), self.theme.faint, 0.8)
            page, middle = self.view.page_of(first), (left + right) / 2
            half = CHARACTER * len(f"{page:,}") / 2 if page is not None else 0.0
            if named and page is not None and middle - half > free:
                ax.text(middle, low - PAGES - 0.04, f"{page:,}", size=SIZE["small"], ha="center", va="bottom")
                free = middle + half + 0.04

    def name_owners(self, ax: Axes, y: float) -> None:
        """Say which columns are cached keys, and which are each branch's."""
        look: dict[str, Any] = {"size": SIZE["small"], "color": self.theme.soft, "va": "bottom", "ha": "left"}
        names = {-1: f"{self.view.cached:,} cached", **{t: f"branch {t}" for t in range(self.columns.kept)}}
        free = -1.0
        for owner, words in names.items():
            left = self.columns.frame(owner)[0]
            if left >= free:
                ax.text(left, y, words, **look)
                free = left + CHARACTER * len(words) + 0.04

    def draw_frames(self, ax: Axes) -> None:
        """Frame the columns of every owner, through all rows."""
        for owner in range(-1, self.columns.kept):
            outline(ax, box(*self.columns.frame(owner), 0, self.height), self.theme.rule, 0.7)

    def draw_read(self, ax: Axes, read: DraftRead) -> None:
        """Draw what a branch reads in a step, and count it at the right."""
        theme, view = self.theme, self.view
        top, low = self.top(read.branch, read.step) + 0.02, self.top(read.branch, read.step) + ROW - 0.02
        for x0, x1 in self.columns.spans(read.first, read.first + read.cached):
            fill(ax, box(x0, x1, top, low), cached_color(theme))
        for draft in read.drafts:
            column = view.column_of(read.branch, draft)
            ((x0, x1),) = self.columns.spans(column, column + 1)
            fill(ax, box(x0, x1, top, low), self.ramp[draft])
            if draft == read.step and self.dotted:
                color = text_on(self.ramp[draft])
                dot = min(0.3 * (x1 - x0), 0.04) * 72
                ax.scatter([(x0 + x1) / 2], [(top + low) / 2], s=dot**2, c=[color], linewidths=0, zorder=4)
        look: dict[str, Any] = {"size": SIZE["small"], "ha": "right", "va": "center_baseline"}
        middle = (top + low) / 2
        color = theme.accent if read.strays else theme.ink
        counts = f"{read.cached:,} + {len(read.drafts):,}" + (f" + {len(read.strays):,}" if read.strays else "")
        ax.text(RIGHT - 0.75 - PLOT_LEFT, middle, counts, color=color, **look)
        ax.text(RIGHT - PLOT_LEFT, middle, f"{read.write:,}", **look)
        hover(ax, box(0, self.columns.width, top, low), read_words(view, read), theme)

    def draw_edge(self, ax: Axes) -> None:
        """Draw where sight begins, as a staircase for each branch."""
        if not self.view.sight.partial:
            return
        for branch in range(self.columns.kept):
            reads = [read for read in self.view.reads if read.branch == branch and read.first > 0]
            xs, ys = [], []
            for read in sorted(reads, key=lambda read: read.step):
                at = self.columns.spans(read.first, read.first + 1) or [(0.0, 0.0)]
                xs += [at[0][0]] * 2
                ys += [self.top(branch, read.step), self.top(branch, read.step) + ROW]
            ax.plot(xs, ys, color=self.theme.accent, lw=1.6, clip_on=False, solid_joinstyle="miter", zorder=5)

    def name_rows(self, ax: Axes) -> None:
        """Name branches and steps at the left, and the margins' numbers."""
        look: dict[str, Any] = {"size": SIZE["tick"], "va": "center_baseline"}
        for branch in range(self.columns.kept):
            for step in range(self.view.drafts - 1):
                y = self.top(branch, step) + ROW / 2
                if step == 0:
                    ax.text(LEFT - PLOT_LEFT, y, f"branch {branch}", ha="left", weight="bold", **look)
                ax.text(-0.08, y, f"step {step}", ha="right", color=self.theme.soft, **look)
        head: dict[str, Any] = {"size": SIZE["small"], "color": self.theme.soft, "va": "bottom", "ha": "right"}
        ax.text(RIGHT - 0.75 - PLOT_LEFT, -0.05, "cached\n+ drafts", linespacing=1.15, **head)
        ax.text(RIGHT - PLOT_LEFT, -0.05, "stored in\nslot", linespacing=1.15, **head)

    def name_slots(self, ax: Axes) -> None:
        """Write below the columns which slots they are."""
        every = label_step(0.125 / self.columns.unit)
        look: dict[str, Any] = {"size": SIZE["small"], "va": "top", "ha": "center", "rotation": 90}
        for s in self.columns.stretches:
            if s.kind not in ("cached", "draft"):
                continue
            for number, column in enumerate(range(s.first, s.end)):
                slot = self.view.slot_of(column)
                if slot and number % every == 0:
                    ((x0, x1),) = self.columns.spans(column, column + 1)
                    ax.text((x0 + x1) / 2, self.height + 0.06, f"{slot:,}", color=self.theme.soft, **look)
        ax.text(
            LEFT - PLOT_LEFT, self.height + 0.06, "slot", ha="left", va="top", size=SIZE["small"], color=self.theme.soft
        )
