"""What a picture of score stages says: its columns, and the sentence on what the softmax makes of the scores."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

import numpy as np
import torch
from torch import Tensor

from attnlab.checks import require, whole
from attnlab.inspect.score_view import StageView
from attnlab.plots.token_text import visible
from attnlab.plots.words import plural, share, signed, times

ZOOM = 48
"""Keys that have a column each, beside token 0."""
MOST = 0.9
"""The title counts the keys that hold this share of the weight."""
HALF = 0.5
"""From this share on the title is about a single key."""
NEARLY_ALL = 0.98
"""The scale of scores shows so many of them by their own colour."""
ROUNDING = 1e-3
"""Weights that sum to 1 up to this leave nothing to a sink."""
POOLED_WIDTH, SPACE = 2.6, 0.8
"""A column of pooled keys, and the space between columns that are not neighbours, in widths of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Keys `start` to `stop` - 1 in one column; left edge and width in widths of a key."""

    start: int
    stop: int
    left: float
    width: float = 1.0

    @property
    def keys(self) -> int:
        """How many keys share it."""
        return self.stop - self.start


def columns_of(view: StageView, zoom: int | None) -> list[Column]:
    """Return token 0, the keys between pooled, 48 keys one by one, and the keys after them pooled.

    The 48 are the last ones, or begin at `zoom`. Columns stand where they stand for any `zoom`.
    """
    keys, zoom = view.keys, None if zoom is None else whole("zoom", zoom)
    require(
        zoom is None or 0 <= zoom - view.start < max(1, keys),
        f"zoom: expected a key, {view.start} to {view.start + max(0, keys - 1)}, to show {ZOOM} keys from, "
        f"got {zoom!r}",
    )
    if keys <= ZOOM + 2:
        return [Column(start=key, stop=key + 1, left=key) for key in range(keys)]
    start = keys - ZOOM if zoom is None else min(zoom - view.start, keys - ZOOM)
    between, first = 1 + SPACE, 1 + 2 * SPACE + POOLED_WIDTH
    made = [Column(start=0, stop=min(1, start), left=0), Column(start=1, stop=start, left=between, width=POOLED_WIDTH)]
    made += [Column(start=start + i, stop=start + i + 1, left=first + i) for i in range(ZOOM)]
    made += [Column(start=start + ZOOM, stop=keys, left=first + ZOOM + SPACE, width=POOLED_WIDTH)]
    return [column for column in made if column.keys > 0]


def pooled_scores(scores: Tensor, columns: list[Column]) -> list[float]:
    """Return each column's highest score, -inf where all of it is masked."""
    return [float(scores[c.start : c.stop].max()) for c in columns]


def pooled_weights(view: StageView, columns: list[Column]) -> list[float]:
    """Return each column's summed weight."""
    return [float(view.weights[c.start : c.stop].double().sum()) for c in columns]


def stated(view: StageView) -> list[int]:
    """Return the keys that the title is about, the heaviest first: one with half of the weight, or those with 90%."""
    weights = view.weights.double()
    order = weights.argsort(descending=True, stable=True)
    total = float(weights.sum())
    if total == 0:
        return []
    if float(weights.max()) >= HALF:
        return order[:1].tolist()
    reached = weights[order].cumsum(0) >= MOST * total * (1 - 1e-12)
    return order[: int(reached.int().argmax()) + 1].tolist()


def statement(view: StageView) -> str:
    """Return the picture's title: what the softmax makes of the scores."""
    who = f"Head {view.head} of layer {view.layer}"
    unmasked = int(torch.isfinite(view.masked).sum())
    if view.keys == 0:
        return f"{who} has no key to score"
    if unmasked == 0:
        return f"{who} has every key masked, so that none has any weight"
    total = float(view.weights.double().sum())
    top, *others = stated(view)
    weight = float(view.weights[top])
    if unmasked == 1:
        rest = "whatever its score" if total >= 1 - ROUNDING else "its sink the rest"
        return f"{who} gives its only key {_all(weight)} of its weight, {rest}"
    if weight >= HALF:
        return f"{who} gives {share(weight)} of its weight to {_key(view, top)}: {_lead(view)}"
    reach = ceil(10 * float(view.masked[top] - view.masked[others[-1]]) - 1e-6) / 10
    some = f"{len(others) + 1:,} of {unmasked:,} {'keys' if unmasked == view.keys else 'unmasked keys'}"
    scores = f"with scores within {reach:.1f} of the highest"
    if total < 1 - ROUNDING:
        return f"{who} gives its sink {share(1 - total)} of its weight, and 90% of the rest to {some}"
    return f"{who} gives 90% of its weight to {some}, {scores}"


def _all(weight: float) -> str:
    return "all" if weight >= 1 - ROUNDING else share(weight)


def _lead(view: StageView) -> str:
    """Return by how much a key leads the next, in score and in weight."""
    scores = view.masked.double().sort(descending=True).values
    lead = float(scores[0] - scores[1])
    factor = float(torch.exp(scores[0] - scores[1]))
    by = f"a factor of {times(factor).removesuffix('×')}" if factor < 1e6 else "a factor of over a million"
    return f"the score leads by {lead:.1f}, the weight by {by}"


def _key(view: StageView, key: int) -> str:
    if key == 0:
        return f"token {view.start:,}"
    return f"“{visible(view.tokens[key])}”" if view.tokens else f"key {view.start + key:,}"


def score_limit(view: StageView) -> tuple[float, bool]:
    """Return where the scale of scores ends, a round number, and whether some scores lie below its lower end.

    None lies above the upper end. A few that are far below zero may: they have no weight, and would pale the others.
    """
    rows = [view.scaled, view.masked, *([] if view.capped is None else [view.capped])]
    finite = torch.cat([row[torch.isfinite(row)] for row in rows]).double()
    if not finite.any():
        return 1.0, False
    most = max(float(finite.max()), float(np.quantile(finite.abs().numpy(), NEARLY_ALL)))
    if most == 0:
        return 1.0, False
    step = 10.0 ** floor(log10(most)) if most < 1 else 1.0
    limit = ceil(most / step - 1e-9) * step
    return limit, bool(finite.min() < -limit)


def scale_words(scale: float) -> str:
    """Return what the dot product is multiplied with, as it is written in papers where it is a square root.

    >>> scale_words(0.125), scale_words(576 ** -0.5), scale_words(0.3), scale_words(1.0), scale_words(-0.125)
    ('q·k ÷ √64', 'q·k ÷ √576', 'q·k × 0.3', 'q·k', 'q·k × −0.125')
    """
    if scale == 1:
        return "q·k"
    dims = scale**-2 if scale > 1e-9 else 0.0
    if dims > 1 and abs(dims - round(dims)) < 1e-4 * dims:
        return f"q·k ÷ √{round(dims)}"
    return f"q·k × {scale:.3g}".replace("-", "−")


def key_words(view: StageView, column: Column) -> str:
    """Return what one finds under the mouse."""
    some, first = slice(column.start, column.stop), view.start + column.start
    score, weight = float(view.masked[some].max()), float(view.weights[some].double().sum())
    said = f"score {signed(score, 2)}" if score > float("-inf") else "masked"
    if column.keys > 1:
        return f"keys {first:,} to {view.start + column.stop - 1:,}: highest {said}, {share(weight)} of the weight"
    text = f" “{visible(view.tokens[column.start])}”" if view.tokens else ""
    return f"key {first:,}{text}: {said}, weight {share(weight)}"


def in_words(view: StageView) -> str:
    """Return what the picture shows, for those who cannot see it."""
    if view.keys == 0:
        return f"Head {view.head} of layer {view.layer}, request {view.request}, without keys."
    masked = int((~torch.isfinite(view.masked)).sum())
    scores = view.scaled
    low, high = (signed(float(x)) for x in scores.aminmax())
    return (
        f"Scores of query head {view.head} in layer {view.layer} over {plural(view.keys, 'key')} of request "
        f"{view.request}: {low} to {high} when scaled; {'capped or modified; ' if view.capped is not None else ''}"
        f"{masked:,} masked; the largest weight is {share(float(view.weights.max()))}."
    )
