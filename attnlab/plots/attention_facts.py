"""What a picture of attention says: which keys it enlarges, how it pools the others, and the sentences it states."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attnlab.checks import require, whole
from attnlab.inspect.bins import Bins, Pool
from attnlab.inspect.score_view import ScoreView
from attnlab.plots.token_text import visible
from attnlab.plots.words import plural, share

Numbers = NDArray[np.float64]

ZOOM = 48
"""Keys that are enlarged."""
MOST_CELLS, MOST_IN_ALL = 256, 16_384
"""Finer cells would be hard to see, more of them, over all heads, a large file: several are put together."""
NEARLY_ALL = 0.8
"""From this share on a title says where the weight is, below it how much is elsewhere."""
MOST = 0.9
"""A title counts the keys that hold this share of a head's weight."""
SINK = 0.3
"""Token 0 is called a sink where a head gives it this share."""
INDUCTION = 0.3
"""A key after an earlier copy of the query's token is pointed out from this weight on."""
ROUNDING = 1e-3
"""A row that sums to 1 up to this has no sink beside its keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """Weights `[heads, cells]` summed by cell: cell i holds keys `edges[i]` to `edges[i + 1]`.

    `size` is what keys were summed by ("page", "4 pages"), `words` say it in full ("a page of 16 keys").

    Cells are drawn equally wide, the last one too, which may hold fewer keys.
    """

    edges: tuple[int, ...]
    weights: Numbers
    size: str
    words: str

    @classmethod
    def of(cls, view: ScoreView, pool: Pool | None) -> Cells:
        """Pool by key, page or split, None as recordings do; what was recorded in bins keeps these."""
        chosen = pool if view.pool == "key" else view.pool
        bins = Bins.of(chosen, keys=view.keys, ranges=view.ranges, page_size=view.page_size)
        count, together = len(bins.edges) - 1, 1
        while count > together * min(MOST_CELLS, max(1, MOST_IN_ALL // view.heads)):
            together *= 2
        starts = bins.edges[:-1:together]
        columns = starts if view.pool == "key" else range(0, count, together)
        weights = np.add.reduceat(view.weights.double().numpy(), columns, axis=1)
        several = f"{together} {bins.pool}s"
        return cls(
            edges=(*starts, view.keys),
            weights=weights,
            size=bins.pool if together == 1 else several,
            words=f"a {bins.words}" if together == 1 else bins.words.replace(bins.pool, several, 1),
        )

    @property
    def count(self) -> int:
        """How many cells there are."""
        return len(self.edges) - 1

    def at(self, key: int) -> float:
        """Return where a key begins, in cells from the left."""
        return float(np.interp(key, self.edges, np.arange(self.count + 1)))


def zoom_of(view: ScoreView, zoom: int | None) -> tuple[int, int]:
    """Return the first enlarged key and the end: the last 48 keys, or 48 from `zoom` on (the last ones at the end)."""
    last = max(0, view.keys - ZOOM)
    if zoom is None:
        return last, view.keys
    zoom = whole("zoom", zoom)
    require(
        0 <= zoom - view.start < max(1, view.keys),
        f"zoom: expected a key, {view.start} to {view.start + max(0, view.keys - 1)}, to enlarge {ZOOM} keys from, "
        f"got {zoom!r}",
    )
    start = min(zoom - view.start, last)
    return start, min(view.keys, start + ZOOM)


def zoom_words(view: ScoreView, zoom: tuple[int, int]) -> str:
    """Return what the enlarged keys are called."""
    start, stop = zoom
    if view.keys <= ZOOM:
        return f"all {view.keys}" if view.keys > 1 else "the key"
    if stop == view.keys:
        return f"the last {stop - start}"
    return f"the first {stop}" if start == 0 else f"keys {view.start + start:,} to {view.start + stop - 1:,}"


def statement(view: ScoreView, zoom: tuple[int, int] | None) -> str:
    """Return the picture's title: where the weight of all heads is, or how much of it is elsewhere.

    Without enlarged keys, as of weights that were recorded in bins, it is about the heaviest of these.
    """
    who = f"One query, layer {view.layer}"
    if zoom is None:
        top = heaviest(view)
        return (
            f"{who}: {_span(view.weights[:, top])} of {_whose(view)} weight lies on {_key(view, top)} of {view.keys:,}"
        )
    if view.keys == 0:
        return f"{who}: the request has no key, so there is nothing to read"
    if view.keys == 1:
        return f"{who}: {_only_key(view)}"
    if view.keys <= ZOOM:
        return f"{who}: {_first_token(view)}"
    near = view.share(*zoom) + (view.share(0, 1) if zoom[0] else 0)
    where = f"{_first(view)} and {zoom_words(view, zoom)}" if zoom[0] else f"{zoom_words(view, zoom)} keys"
    if near.min() >= NEARLY_ALL:
        return f"{who}: {_everybody_gives(view, near)} to {where}"
    beyond = _span(view.share(0, view.keys) - near)
    return f"{who}: {beyond} of {_whose(view)} weight lies beyond {where}"


def _first(view: ScoreView) -> str:
    """Return what the first key is called."""
    return f"token {view.start:,}"


def heaviest(view: ScoreView) -> int:
    """Return the bin with the most weight, over all heads."""
    return int(view.weights.sum(0).argmax())


def _only_key(view: ScoreView) -> str:
    least = float(view.weights.min())
    if least >= 1 - ROUNDING:
        return "the only key takes all the weight"
    return f"the only key takes as little as {share(least)} of the weight, a sink the rest"


def _first_token(view: ScoreView) -> str:
    """Return how many heads rest on token 0, or else on how few keys."""
    first = view.share(0, 1)
    heavy = int((first >= 0.5).sum())
    if heavy == view.heads or view.heads == 1:
        return f"{_everybody_gives(view, first)} to {_first(view)}"
    if heavy:
        give = "gives at least half of its" if heavy == 1 else "give at least half of their"
        return f"{heavy} of {view.heads} heads {give} weight to {_first(view)}"
    # Nobody rests on token 0, so that the number of keys says more.
    weights = view.weights.double().sort(dim=1, descending=True).values
    total = weights.sum(1, keepdim=True)
    counts = ((weights.cumsum(1) < MOST * total * (1 - 1e-12)).sum(1) + 1).tolist()
    some = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{min(counts)}"
    what = "weight" if float(total.min()) >= 1 - ROUNDING else "weight on keys"
    return f"90% of a head’s {what} lies on {some} of {view.keys} keys"


def _everybody_gives(view: ScoreView, shares: Tensor) -> str:
    least = float(shares.min())
    if view.heads == 1:
        return f"the head gives {share(least)} of its weight"
    # Rounded down, not to the nearest: "at least" must stay true.
    return f"every head gives at least {floor(100 * min(least, 1.0))}% of its weight"


def _span(shares: Tensor) -> str:
    """Return the range of the heads' shares."""
    low, high = (share(max(0.0, float(x))) for x in shares.aminmax())
    if low == high:
        return high
    if low in ("0%", "<0.1%"):
        return f"up to {high}"
    return f"{low.removesuffix('%')} to {high}" if high[0].isdigit() else f"{low} to {high}"


def _whose(view: ScoreView) -> str:
    return "a head’s" if view.heads > 1 else "the head’s"


def induction(view: ScoreView, zoom: tuple[int, int]) -> tuple[int, int] | None:
    """Return head and key that continue an earlier copy of the query's token, the strongest, if enlarged and strong."""
    if not view.tokens:
        return None
    token = view.tokens[view.own]
    keys = [key for key in range(1, view.own) if view.tokens[key - 1] == token]
    if not keys:
        return None
    weights = view.weights[:, keys].numpy()
    head, i = np.unravel_index(int(weights.argmax()), weights.shape)
    strong = weights[head, i] > INDUCTION and zoom[0] <= keys[i] < zoom[1]
    return (int(head), keys[i]) if strong else None


def induction_words(view: ScoreView, head: int, key: int) -> str:
    """Return what was found: the head repeats what followed the query's token before."""
    weight = share(float(view.weights[head, key]))
    copy, query = visible(view.tokens[key]), visible(view.tokens[view.own])
    return f"q{head}: {weight} on “{copy}”, which followed “{query}” before (induction)"


def first_words(view: ScoreView) -> str:
    """Return what is said of token 0, or of the heaviest bin."""
    if view.pool != "key":
        top = heaviest(view)
        return f"{_key(view, top)}: {_span(view.weights[:, top])} of {_whose(view)} weight"
    first = view.share(0, 1)
    sink = ", the sink" if view.start == 0 and float(first.max()) >= SINK else ""
    return f"{_first(view)}{sink}: {_span(first)} of {_whose(view)} weight"


def source_words(view: ScoreView) -> str:
    """Return what the numbers are, and what is missing from a row that does not sum to 1."""
    missing = 1 - view.share(0, view.keys)
    if not view.keys:
        return ""
    if float(missing.max()) > ROUNDING:
        return f"Recorded weights. Of {_whose(view)} weight {_span(missing)} goes to its sink, which is no key."
    return "Recorded weights: what each key’s value is multiplied with. A row sums to 100%."


def query_words(view: ScoreView) -> str:
    """Return which query it is."""
    name = f"“{visible(view.tokens[view.own])}” at" if view.tokens else "at"
    return f"The query is {name} position {view.query:,} of request {view.request}"


def strongest(view: ScoreView, head: int, most: int = 5) -> str:
    """Return a head's strongest keys, in words."""
    weights = view.weights[head]
    keys = weights.topk(min(most, weights.shape[0])).indices.tolist()
    return f"q{head} (KV {head // view.group}): " + ", ".join(
        f"{_key(view, k)} {share(float(weights[k]))}" for k in keys
    )


def readers(view: ScoreView, key: int, most: int = 9) -> str:
    """Return the heads that read a key most, in words."""
    weights = view.weights[:, key]
    heads = weights.topk(min(most, view.heads)).indices.tolist()
    return f"key {_key(view, key)}: " + ", ".join(f"q{h} {share(float(weights[h]))}" for h in heads)


def _key(view: ScoreView, key: int) -> str:
    if view.pool != "key":
        start, stop = view.edges[key : key + 2]
        return f"keys {view.start + start:,} to {view.start + stop - 1:,}"
    return f"{view.start + key:,}" + (f" “{visible(view.tokens[key])}”" if view.tokens else "")


def in_words(view: ScoreView, zoom: tuple[int, int] | None) -> str:
    """Return what the picture shows, for those who cannot see it."""
    what = f"{plural(view.heads, 'query head')} on {plural(view.kv_heads, 'KV head')}, {plural(view.keys, 'key')}"
    if view.keys == 0:
        return f"Layer {view.layer}, request {view.request}: {what}."
    if zoom is None:
        return f"Layer {view.layer}. {query_words(view)}: {what}. Heaviest {view.pool}, {first_words(view)}."
    near = f", {_span(view.share(*zoom))} on {zoom_words(view, zoom)}" if view.keys > ZOOM else ""
    first = f"Of {_whose(view)} weight {_span(view.share(0, 1))} is on {_first(view)}"
    return f"Layer {view.layer}. {query_words(view)}: {what}. {first}{near}."
