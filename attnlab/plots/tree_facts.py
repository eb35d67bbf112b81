"""What the picture of a tree mask states, the words around it, and which cached keys have a column."""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.inspect.tree_view import Draft, TreeView
from attnlab.plots.token_text import LEGEND, visible
from attnlab.plots.words import among, plural

TAIL, ZONE, SHORT_TAIL = 10, 12, 4
"""So many of the last cached keys have a column each; around the window's edge ZONE, and then only SHORT_TAIL last."""
POOLED, WIDE = 1.7, 9.0
"""The width of a column of several keys, and of one in which the window's edge wanders, in columns of one key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Cached keys `start` up to `stop` in one column, `left` columns from the mask's left edge."""

    start: int
    stop: int
    left: float
    width: float


def columns_of(view: TreeView) -> list[Column]:
    """Return the columns of the cached keys: single ones where something changes and at the end, others together."""
    prefix, wide = view.prefix, (-1, -1)
    singles = set(range(max(0, prefix - TAIL), prefix))
    edges = [min(draft.first, prefix) for draft in view.drafts if draft.first > 0]
    if edges:
        low, high = max(0, min(edges) - 2), min(prefix, max(edges) + 2)
        if prefix - low <= TAIL + 2:
            singles |= set(range(low, prefix))
        elif high - low <= ZONE:
            singles = set(range(low, high)) | set(range(prefix - SHORT_TAIL, prefix))
        else:
            wide, singles = (low, high), set(range(max(high, prefix - SHORT_TAIL), prefix))
    ends = [key for key in wide if key >= 0]
    borders = sorted({0, prefix, *ends, *singles, *(key + 1 for key in singles)})
    columns: list[Column] = []
    for start, stop in zip(borders, borders[1:], strict=False):
        left = columns[-1].left + columns[-1].width if columns else 0.0
        width = WIDE if (start, stop) == wide else 1.0 if stop - start == 1 else POOLED
        columns.append(Column(start=start, stop=stop, left=left, width=width))
    return columns


def statement(view: TreeView) -> str:
    """Return the picture's title: what the drafts see, in numbers; among several requests, whose they are."""
    if not view.drafts:
        return f"Request r{view.request} has no draft to verify"
    return among(view.request, view.requests, _sees(view))


def _sees(view: TreeView) -> str:
    count, prefix = len(view.drafts), view.prefix
    if view.astray:
        return f"The mask is no tree: draft {view.astray[0]} sees others than its path to the root"
    if count == 1:
        (only,) = view.drafts
        return f"The only draft sees {_of_cached(only.cached_keys, prefix)} and itself"
    seen = [draft.cached_keys for draft in view.drafts]
    hidden = any(draft.hidden for draft in view.drafts)
    if min(seen) == prefix and not hidden:
        if view.is_chain:
            return f"A chain of {count:,} drafts: each sees {_of_cached(prefix, prefix)} and every draft before it"
        return f"Each of {count:,} drafts sees {_of_cached(prefix, prefix)} and its own path, no other branch"
    name = f"{view.sight}: " if view.sight.partial else ""
    if not prefix:
        most = max(len(draft.seen) for draft in view.drafts)
        words = f"{name}no key is cached, and each of {count:,} drafts sees up to {most:,} drafts of its path"
        return f"{words[0].upper()}{words[1:]}"
    words = f"{name}drafts see {_range(seen)} of {plural(prefix, 'cached key')}{_step(view)}"
    return f"{words[0].upper()}{words[1:]}"


def _of_cached(keys: int, prefix: int) -> str:
    if not prefix:
        return "no cached key, as there is none,"
    if keys == prefix:
        return "the only cached key" if prefix == 1 else f"all {prefix:,} cached keys"
    return f"{keys:,} of {plural(prefix, 'cached key')}"


def _range(seen: list[int]) -> str:
    low, high = min(seen), max(seen)
    return f"{low:,}" if low == high else f"{high:,} to {low:,}"


def _step(view: TreeView) -> str:
    """Say how the number falls with depth, where it does so for all drafts."""
    root = view.drafts[0].cached_keys
    if not view.depth or any(draft.cached_keys != max(0, root - draft.depth) for draft in view.drafts):
        return ""
    end = " until none is left" if view.depth > root else ""
    return f", one less with every step down{end}"


def caption(view: TreeView) -> str:
    """Return the two lines that say what is seen and how to read it."""
    first = f"Left: the drafts of request r{view.request} by depth, numbered as in the batch."
    first += f" Right: what layer {view.layer} shows them; a row is a query, a column a key."
    second = "A draft stands at cached keys + depth"
    if len(view.drafts) > 1:
        second += ": in a chain one behind the other" if view.is_chain else ", so that siblings share a position"
    if any(draft.first for draft in view.drafts):
        second += (
            "; the window counts positions, not rows"
            if view.sight.chunk is None
            else "; the chunk’s border is a position, not a row"
        )
    return f"{first}\n{second}."


def source(view: TreeView) -> str:
    """Return the line at the foot."""
    words = "Parents are found again in the plan’s mask. Rows are in depth-first order, so that tree and mask line up."
    return f"{words} {LEGEND}" if view.tokens else words


def draft_words(view: TreeView, draft: Draft) -> str:
    """Return what is said of a draft where the mouse rests."""
    text = view.text(draft.number)
    name = f"draft {draft.number}" + (f" “{visible(text)}”" if text is not None else "")
    after = "" if draft.parent is None else f", after {draft.parent}"
    others = ", ".join(map(str, draft.seen[:24])) + (", …" if len(draft.seen) > 24 else "")
    hidden = f"; out of sight {', '.join(map(str, draft.hidden[:24]))}" if draft.hidden else ""
    return f"{name} at {draft.position:,}{after}: sees {draft.cached_keys:,} cached keys and drafts {others}{hidden}"


def in_words(view: TreeView) -> str:
    """Return what the picture shows, for those who cannot see it."""
    if not view.drafts:
        return f"Request r{view.request} has {plural(view.prefix, 'cached key')} and no draft."
    listed = ". ".join(draft_words(view, draft) for draft in view.drafts[:16])
    more = f". {len(view.drafts) - 16:,} other drafts" if len(view.drafts) > 16 else ""
    return f"After {plural(view.prefix, 'cached key')}, by number. {listed}{more}."
