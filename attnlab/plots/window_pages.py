"""The lower half of a window layout: every page of a request, from its place in the text to its place in each space."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from attnlab.inspect.step import runs_of
from attnlab.inspect.window_view import Space, WindowView
from attnlab.plots.cells import box, fill, outline
from attnlab.plots.page_boxes import CHARACTER, write_inside
from attnlab.plots.style import SIZE, Theme, boxes, mix
from attnlab.plots.window_axis import WindowAxis, spread
from attnlab.plots.window_bars import BAR, CELL, LEAST, Bars, State
from attnlab.plots.window_links import draw_links
from attnlab.plots.window_queries import PLOT_WIDTH, Look
from attnlab.plots.words import plural

GAP = 0.012
"""Inches that a page of the text is narrower on each side, where pages are told apart."""
GRAIN = 160
"""Of pages without cells, an inch shows so many steps: a step is grey where others have most of it."""


def draw_pages(ax: Axes, theme: Theme, view: WindowView, axis: WindowAxis) -> None:
    """Draw links first, bars over their ends, and labels. `ax` counts inches, downwards."""
    bars, look = Bars.of(view, axis), Look.of(theme, view.request)
    for level in range(len(view.spaces)):
        draw_links(ax, theme, look, bars, level)
    count = len({piece.first // view.page_size for piece in view.pieces})
    _name(ax, theme, bars, 0, "in the text", f"{plural(count, 'page')} of {view.page_size}")
    _draw_text(ax, theme, look, bars)
    for level, space in enumerate(view.spaces):
        _draw_space(ax, theme, look, bars, level)
        _name(ax, theme, bars, level + 1, space.name.replace(" ", "\n"), plural(space.pages, "page"))
    _label_pages(ax, theme, bars)


def _name(ax: Axes, theme: Theme, bars: Bars, bar: int, name: str, small: str) -> None:
    middle = bars.tops[bar] + BAR / 2
    look: dict[str, Any] = {"ha": "right", "linespacing": 1.05}
    ax.text(-0.12, middle - 0.005, name, va="bottom", size=SIZE["label"], weight="bold", **look)
    ax.text(-0.12, middle + 0.02, small, va="top", size=SIZE["small"], color=theme.soft, **look)


def _draw_text(ax: Axes, theme: Theme, look: Look, bars: Bars) -> None:
    """Draw the request's pages in text order: solid as far as they are read."""
    top, low, gap = bars.tops[0], bars.tops[0] + BAR, GAP if bars.apart else 0.0
    parts: dict[State, list[tuple[float, float]]] = {}
    for first, end, state in bars.stretches():
        for a, b, kind in bars.cut(first, end, state):
            left, right = bars.axis.x([a, b]) * PLOT_WIDTH
            parts.setdefault(kind, []).append((left + gap * (a == first), right - gap * (b == end)))
    for kind, edges in parts.items():
        left, right = np.array(edges).T
        path = boxes(left, np.maximum(right, left + 0.008), top, low)
        hatch = {"hatch": "/////", "edge": _gone_edge(theme, look)} if kind == "gone" else {}
        fill(ax, path, look.of_state(kind), **hatch)
    if bars.apart:
        _number_pages(ax, look, bars, top + BAR / 2)
    if bars.view.strays:
        at = bars.axis.x(runs_of(sorted(bars.view.strays))) * PLOT_WIDTH
        right = np.maximum(at[:, 1], at[:, 0] + LEAST)
        outline(ax, boxes(at[:, 0], right, top - 0.03, low + 0.03), theme.accent, 1.3)


def _gone_edge(theme: Theme, look: Look) -> str:
    return mix(look.read, theme.paper, 0.3)


def _number_pages(ax: Axes, look: Look, bars: Bars, y: float) -> None:
    """Write pages' numbers into the longest part of them that has one colour; of one state all are numbered, or none.

    Else the first ten alone would be.
    """
    size = bars.view.page_size
    widest = {state: len(f"{piece.first // size}") for piece, state in zip(bars.view.pieces, bars.states, strict=True)}
    for piece, state in zip(bars.view.pieces, bars.states, strict=True):
        first, end, kind = max(bars.cut(piece.first, piece.end, state), key=lambda part: part[1] - part[0])
        left, right = bars.axis.x([first, end]) * PLOT_WIDTH
        if right - left > CHARACTER * widest[state] + 0.05:
            words = f"{piece.first // size}"
            write_inside(ax, (left + right) / 2, y, words, look.of_state(kind), plain=kind != "gone")


def _draw_space(ax: Axes, theme: Theme, look: Look, bars: Bars, level: int) -> None:
    """Draw all pages of a space: the sink, the request's, those of others, free ones."""
    space = bars.view.spaces[level]
    width = PLOT_WIDTH / space.pages
    mine: dict[State, list[int]] = {}
    for piece, state in zip(bars.view.pieces, bars.states, strict=True):
        page = piece.pages[level]
        if page is not None:
            mine.setdefault("kept" if state == "gone" else state, []).append(page)
    top = bars.tops[level + 1]
    if width >= CELL:
        taken = {0, *space.others, *(page for pages in mine.values() for page in pages)}
        free = np.array([page for page in range(space.pages) if page not in taken], dtype=np.int64)
        _fill_cells(ax, free, width, top, theme.rule, hollow=True)
        _fill_cells(ax, np.array(space.others, dtype=np.int64), width, top, look.others)
    else:
        outline(ax, box(0, PLOT_WIDTH, top, top + BAR), theme.rule)
        _fill_coarse(ax, look, space, top)
    states: tuple[State, ...] = ("kept", "new", "read")
    for state in states:
        pages = np.array(sorted(set(mine.get(state, []))), dtype=np.int64)
        _fill_cells(ax, pages, width, top, look.of_state(state))
    _fill_cells(ax, np.zeros(1, dtype=np.int64), width, top, theme.ink)


def _fill_cells(ax: Axes, pages: np.ndarray, width: float, top: float, color: str, *, hollow: bool = False) -> None:
    """Fill pages, or outline them. Without room for cells runs of them are as wide as they are, but never unseen."""
    if not len(pages):
        return
    runs = np.stack([pages, pages + 1], -1) if width >= CELL else np.array(runs_of(pages))
    gap = 0.07 * width if width >= CELL else 0.0
    left, right = runs[:, 0] * width + gap, runs[:, 1] * width - gap
    short = np.maximum(0, LEAST - (right - left)) / 2 if width < CELL else 0.0
    left, right = np.clip(left - short, 0, PLOT_WIDTH - LEAST), np.clip(right + short, LEAST, PLOT_WIDTH)
    path = boxes(left, right, top, top + BAR)
    if hollow:
        outline(ax, path, color, 0.7)
    else:
        fill(ax, path, color)


def _fill_coarse(ax: Axes, look: Look, space: Space, top: float) -> None:
    """Fill where others have most of the pages, in steps that can be seen."""
    steps = round(PLOT_WIDTH * GRAIN)
    held = np.zeros(space.pages + 1)
    held[1:][list(space.others)] = 1
    ends = np.interp(np.linspace(0, space.pages, steps + 1), np.arange(space.pages + 1), held.cumsum())
    grey = np.diff(ends) * steps / space.pages > 0.5
    runs = np.array(runs_of(np.flatnonzero(grey)), dtype=np.float64).reshape(-1, 2) / GRAIN
    if len(runs):
        fill(ax, boxes(runs[:, 0], runs[:, 1], top, top + BAR), look.others)


def _label_pages(ax: Axes, theme: Theme, bars: Bars) -> None:
    """Number the request's pages below the last bar, those that are read first, where there is room."""
    level = len(bars.view.spaces) - 1
    pages: dict[bool, list[int]] = {True: [], False: []}
    for piece, state in zip(bars.view.pieces, bars.states, strict=True):
        page = piece.pages[level]
        if page is not None:
            pages[state in ("read", "new")].append(page)
    labels = []
    for is_live, mine in pages.items():
        for first, end in runs_of(sorted(set(mine))):
            words = f"{first:,}" if end - first == 1 else f"{first:,}–{end - 1:,}"
            half = CHARACTER * len(words) / 2
            middle = sum(bars.cells(first, end - 1, level)) / 2
            labels.append((min(max(middle, half), PLOT_WIDTH - half), 2 * half, words, is_live))
    shown = spread([(middle, width) for middle, width, *_ in labels], 0.06)
    for (middle, _, words, is_live), free in zip(labels, shown, strict=True):
        if free:
            color = theme.ink if is_live else theme.soft
            ax.text(middle, bars.tops[-1] + BAR + 0.045, words, ha="center", va="top", size=SIZE["small"], color=color)


def legend_marks(view: WindowView, theme: Theme) -> list[tuple[str, dict[str, Any]]]:
    """Return the marks that occur, with their words."""
    look, states = Look.of(theme, view.request), set(Bars.of(view, WindowAxis(knots=(0, 1), at=(0, 1))).states)
    cut = bool(view.live) and view.live[0][0] % view.page_size > 0
    gone = {"fc": look.gone, "hatch": "/////", "ec": _gone_edge(theme, look)}
    marks: list[tuple[str, dict[str, Any], bool]] = [
        ("read", {"fc": look.read}, bool(view.live)),
        ("new", {"fc": look.new}, view.new > 0 and view.mode != "decode"),
        ("the query’s own", {"fc": theme.accent}, view.new > 0),
        ("kept, not read", {"fc": look.kept}, "kept" in states or "gone" in states or cut),
        ("slid out", gone, "gone" in states),
        ("other requests", {"fc": look.others}, any(space.others for space in view.spaces)),
        ("free", {"fc": "none", "ec": theme.rule, "lw": 0.8}, True),
        ("sink", {"fc": theme.ink}, True),
    ]
    return [(words, mark) for words, mark, occurs in marks if occurs]
