"""What the picture of a window layout states, and the words around it."""

from __future__ import annotations

from collections.abc import Sequence

from attnlab.inspect.step import total
from attnlab.inspect.window_view import WindowView
from attnlab.plots.words import plural, times
from attnlab.spec import Sight


def statement(view: WindowView) -> str:
    """Return the picture's title: what the queries read, in numbers."""
    name = f"r{view.request}"
    if not view.new:
        if view.mode == "decode":
            return f"Request {name} is a padded row: it has no query and reads nothing"
        return f"Request {name} has no new token in this step, so none of its {plural(view.cached, 'key')} is read"
    if view.strays:
        does = "is" if len(view.strays) == 1 else "are"
        return f"{plural(len(view.strays), 'key')} of {name} {does} not where the plan reads: the pool has moved on"
    return _decode(view) if view.mode == "decode" else _several(view)


def _decode(view: WindowView) -> str:
    (query,) = view.queries
    keys = query.old_keys + query.new_keys
    who = f"{sight_name(view.sight)}the query at {query.position:,}"
    if keys == 1:
        return _sentence(f"{who} reads one key, its own")
    if keys == view.tokens:
        return _sentence(f"{who} {'still ' if view.sight.partial else ''}reads all {keys:,} keys")
    return _sentence(f"{who} reads {keys:,} of {view.tokens:,} keys, {view.edge:,} to {query.position:,}")


def _several(view: WindowView) -> str:
    who = f"{sight_name(view.sight)}{queries(view)}"
    does = "reads" if view.new == 1 else "read"
    own = "itself" if view.most_new == 1 else f"up to {view.most_new:,} new ones"
    each = " each" if view.new > 1 else ""
    read = total(view.read)
    if not view.cached:
        return _sentence(f"{who} {does} no cached key, as there is none, and {own}{each}")
    if read == view.cached:
        keys = "the only cached key" if read == 1 else f"all {read:,} cached keys"
    else:
        keys = f"{read:,} of {view.cached:,} cached keys" if read else f"none of {plural(view.cached, 'cached key')}"
    return _sentence(f"{who} {does} {keys} and {own}{each}")


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def queries(view: WindowView) -> str:
    """Return how many queries, or drafts, there are."""
    if view.mode == "verify":
        return plural(view.new, "draft")
    return "1 query" if view.new == 1 else f"{view.new:,} queries"


def sight_name(sight: Sight) -> str:
    """Return the sight as the beginning of a sentence; nothing where all keys are seen."""
    return f"{sight}: " if sight.partial else ""


def rule(view: WindowView) -> str:
    """Return in words which keys a query sees."""
    sight = view.sight
    last = "q" if sight.causal or sight.window is None else f"q + {sight.window - 1:,}"
    to = "the last one" if not sight.causal and sight.window is None else last
    if sight.window == 1 and sight.causal:
        words = "a query sees its own key alone"
    elif sight.window is not None:
        count = f": {sight.window:,} with its own" if sight.causal else ""
        words = f"a query at q sees keys from q − {sight.window - 1:,} to {to}{count}"
        words += f", and none before its chunk of {sight.chunk:,}" if sight.chunk is not None else ""
    elif sight.chunk is not None:
        words = f"a query at q sees back to where its chunk of {sight.chunk:,} begins, and up to {to}"
    else:
        words = f"a query at q sees keys from 0 to {to}"
    return words + ("; of these the mask takes some away" if view.masked else "")


def caption(view: WindowView) -> str:
    """Return the two lines above the picture: the rule, and how to read the lower half."""
    pages = f"pages of {view.page_size:,} keys" if view.page_size > 1 else "pages of one key"
    first, *more = (space.name for space in view.spaces)
    where = (
        f"in the table’s ids ({first}), and in the layer’s storage ({more[0]})" if more else f"and in {named(first)}"
    )
    order = " New tokens stand in batch order." if view.mode == "verify" and view.masked else ""
    head = f"Layer {view.layer} of request r{view.request}: {rule(view)}."
    return f"{head}\nBelow: its {pages} in text order, {where}.{order}"


def named(space: str) -> str:
    """Return the storage of an id space as it is spoken of.

    >>> named("pool"), named("sliding")
    ('the pool', 'the sliding storage')
    """
    return "the pool" if space == "pool" else f"the {space} storage"


def seam_words(ratio: float) -> str:
    """Return what is said where the axis changes its scale.

    >>> seam_words(6.1), seam_words(0.5)
    ('from here on a key is 6.1× wider', 'from here on a key is 2.0× narrower')
    """
    change = f"{times(ratio)} wider" if ratio > 1 else f"{times(1 / ratio)} narrower"
    return f"from here on a key is {change}"


def note(view: WindowView) -> str:
    """Return the line below the pages: a key followed through all spaces, and what slid out."""
    parts = []
    if view.example is not None:
        position, slots = view.example
        places = [f"slot {slot:,} ({space.name})" for slot, space in zip(slots, view.spaces, strict=True)]
        parts.append(f"Key {position:,} lies in {', that is '.join(places)}.")
    if view.gone:
        does = "page slid" if view.gone == 1 else "pages slid"
        their = "its" if view.gone == 1 else "their"
        parts.append(f"{view.gone:,} {does} out of {named(view.spaces[-1].name)}: {their} keys map to 0, the sink.")
    return " ".join(parts)


def source(view: WindowView) -> str:
    """Return the line at the foot."""
    words = "Keys and their order are the plan’s, pages are the pool’s as it is now; page 0 of every space is its sink."
    return f"{words} The plan is of an older epoch than the pool." if view.stale else words


def in_words(view: WindowView) -> str:
    """Return what the picture shows, for those who cannot see it."""
    parts = [f"Request r{view.request} at layer {view.layer}, {view.mode}: {rule(view)}"]
    if view.queries:
        listed = "; ".join(
            f"at {query.position:,} {query.old_keys:,} cached and {query.new_keys:,} new" for query in view.queries
        )
        parts.append(f"Keys read by the query {listed}")
    for level, space in enumerate(view.spaces):
        held = [piece.pages[level] for piece in view.pieces if piece.pages[level] is not None]
        parts.append(f"Of {plural(space.pages, 'page')} of {space.name} it has {_pages(held)}")
    return ". ".join(parts) + (f". {note(view)}" if note(view) else ".")


def _pages(pages: Sequence[int | None], most: int = 16) -> str:
    if not pages:
        return "none"
    return ", ".join(map(str, pages[:most])) + (f" and {len(pages) - most:,} more" if len(pages) > most else "")
