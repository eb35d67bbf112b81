"""What the picture of index lists states, and the words around it."""

from __future__ import annotations

from attnlab.inspect.index_view import IndexView, ListRow
from attnlab.plots.words import between, everything, plural

ALT_ROWS = 12
"""Lists that the words for those who cannot see the picture go through one by one."""


def statement(view: IndexView) -> str:
    """Return the picture's title: how many keys the lists name, in how many pieces, and what they leave out."""
    if not view.rows:
        return "There is no request in the batch, so there is no list"
    if not view.keys:
        lists = "its list is" if len(view.rows) == 1 else f"all {len(view.rows):,} lists are"
        return f"No request has a key to read: {lists} empty"
    if view.sinks:
        entries = "1 entry of the lists names" if view.sinks == 1 else f"{view.sinks:,} entries of the lists name"
        return f"{entries} slot 0, where no key is"
    lists = "One list names" if len(view.rows) == 1 else f"{len(view.rows):,} lists name"
    where = "at one slot" if view.keys == 1 else f"in {plural(view.pieces, 'run')} of neighbouring slots"
    if not view.older:
        return f"{lists} {everything(view.keys)} {where}"
    return (
        f"{lists} {plural(view.keys, 'key')} {where}, and leave{'s' * (len(view.rows) == 1)} out {view.older:,} older"
    )


def in_words(view: IndexView) -> str:
    """Return what the picture shows, for those who cannot see it."""
    if not view.rows:
        return f"Lists in id space {view.space}: none."
    listed = "; ".join(f"r{r}: {row_words(row)}" for r, row in enumerate(view.rows[:ALT_ROWS]))
    more = f"; and {len(view.rows) - ALT_ROWS:,} others" if len(view.rows) > ALT_ROWS else ""
    buffer = f"The buffer has {plural(view.capacity, 'place')}, {view.unread:,} of which no list has"
    return f"Lists in id space {view.space}, {view.sight}. {listed}{more}. {buffer}."


def row_words(row: ListRow) -> str:
    """Return what one list holds."""
    if not row.keys:
        return "no key"
    padding = f", after {row.padding:,} of padding" if row.padding else ""
    keys = f"{plural(row.keys, 'key')}, positions {positions(row)}{padding}"
    return f"{keys}, in {plural(len(row.runs), 'run')}: {run_words(row)}"


def run_words(row: ListRow, most: int = 8) -> str:
    """Return a list's slots, run by run."""
    sizes = (row.runs[:, 1] - row.runs[:, 0]).tolist()
    runs = list(zip(row.slots.tolist(), sizes, strict=True))
    listed = ", ".join(f"{slot:,}" if n == 1 else f"{slot:,}–{slot + n - 1:,}" for slot, n in runs[:most])
    return listed + (", …" if len(runs) > most else "")


def positions(row: ListRow) -> str:
    """Return the positions whose keys a list names."""
    first, last = row.visible, row.visible + row.keys - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def caption(view: IndexView, *, striped: bool = False, folded: bool = False, hatched: bool = False) -> str:
    """Return the two lines that say what the marks are; those that do not occur are not explained."""
    if not view.rows:
        return "A batch with at least one request has a row for each of them here: the slots that its queries read."
    first = f"Each row is a request’s list in position order, each block a run of neighbouring slots ({view.space})."
    marks = []
    if any(row.keys and row.visible for row in view.rows):
        edge = "the window" if view.sight.chunk is None else "the chunk" if view.sight.window is None else "sight"
        marks.append(f"Line in front: older keys are out of {edge}.")
    if view.padding:
        marks.append("Hatched: padding up to a tile’s border.")
    if view.sinks:
        marks.append("Ink: slot 0, the sink.")
    if striped:
        marks.append("Striped: runs too short to be told apart.")
    if hatched:
        marks.append("From r12 on colours repeat, hatched.")
    if folded:
        marks.append("Grey: all other requests, up to the end of their longest list.")
    first = f"{first} Above: the buffer, list after list."
    plain = "A list is read from left to right; where a block ends the next slot lies elsewhere."
    return f"{first}\n{' '.join(marks) or plain}"


def source(view: IndexView) -> str:
    """Return the line at the foot: how the buffer is used."""
    if not view.unread:
        rule = "a list’s offset is where the one before it ends."
        return f"Lists fill all {view.capacity:,} entries of the buffer; {rule}"
    held = f"Lists have {view.used:,} of the buffer’s {view.capacity:,} entries"
    return f"{held}; those behind the last list are never read."


def folded_words(rows: list[ListRow]) -> str:
    """Return what is said of requests that share a row."""
    return f"{between([row.entries for row in rows], 'key')}, {between([len(row.runs) for row in rows], 'run')} each"
