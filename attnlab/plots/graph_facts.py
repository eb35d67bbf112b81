"""What the picture of a graph's memory states, and the words around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attnlab.inspect.graph_contents import Buffer
from attnlab.inspect.graph_view import GraphView
from attnlab.plots.words import plural, share, short
from attnlab.units import size


def statement(views: Sequence[GraphView]) -> str:
    """Return the picture's title: what part of the memory is live, and what is left over in it."""
    if len(views) > 1:
        shares = [share(view.live_share) for view in views]
        left = "" if not any(view.left_over_share for view in views) else _left_over(views)
        return f"{_listed(shares)} of the memory {'is' if len(shares) == 1 else 'are'} live, step by step{left}"
    (view,) = views
    if view.faults:
        where = _listed(list(dict.fromkeys(short(buffer.name, 24) for buffer in view.faults[:3])))
        return f"Padded rows read what an earlier step has left in {where}"
    if not view.requests:
        return f"No request is live: all {size(view.nbytes)} of the graph are padding{_left_over(views)}"
    live = f"{view.requests:,} of {plural(view.most_requests, 'request')} {'is' if view.requests == 1 else 'are'} live"
    return f"{live}, and {share(view.live_share)} of the graph’s {size(view.nbytes)}{_left_over(views)}"


def _left_over(views: Sequence[GraphView]) -> str:
    shares = [share(view.left_over_share) for view in views]
    if not any(view.left_over_share for view in views):
        return ""
    return f"; {_listed(shares)} {'is' if len(shares) == 1 else 'are'} left over"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def caption(views: Sequence[GraphView], drawn: Collection[str]) -> str:
    """Return the two lines that say what the marks are; those that do not occur are not explained.

    `drawn` says what was: requests that are `striped` together, or `hatched`.
    """
    buffers = [buffer for view in views for buffer in view.buffers]
    first = "Each row is memory of the graph, as wide as what it was captured for."
    if any(buffer.live for buffer in buffers):
        first += " Filled: live, in the colours of the step’s requests."
    marks = []
    if any(buffer.padded for buffer in buffers):
        marks.append("Outline: padding, which stands for no request.")
    if any(buffer.stale and not buffer.read for buffer in buffers):
        marks.append("Slanted lines: left over from an earlier step, never read.")
    if any(view.faults for view in views):
        marks.append("Line below: left over where padded rows read.")
    if "striped" in drawn:
        marks.append("Striped: requests too narrow to be told apart.")
    if "hatched" in drawn:
        marks.append("From r12 on colours repeat, hatched.")
    return f"{first}\n{' '.join(marks) or 'All of it is live: the step is as large as the graph allows.'}"


def heading(view: GraphView) -> str:
    """Return what a panel is of: what was captured, and the latest step."""
    most = f"{plural(view.most_requests, 'request')} of up to {plural(view.longest, 'token')}"
    step = f"{plural(view.requests, 'request')}, {plural(view.tokens, 'query token')}"
    return f"{view.mode}, captured for {most}; latest step: {step}"


def source(views: Sequence[GraphView]) -> str:
    """Return the line at the foot."""
    how = {
        True: "A step’s plan is filled in by a CUDA graph of the planning.",
        False: "A step’s plan is made anew and copied here.",
    }
    said = [how[replayed] for replayed in dict.fromkeys(view.planning_replayed for view in views)]
    return f"Told from what the tensors hold. Addresses and shapes are those of the capture. {' '.join(said)}"


def buffer_words(buffer: Buffer) -> str:
    """Return what is said of a buffer where the mouse rests."""
    parts = [f"{buffer.live:,} live", f"{buffer.padded:,} padding"]
    if buffer.left_over:
        parts.append(f"{buffer.left_over:,} left over{', where padded rows read' if buffer.read else ''}")
    return f"{buffer.name}: {', '.join(parts)} of {plural(buffer.capacity, buffer.unit)}, {size(buffer.nbytes)}"


def in_words(views: Sequence[GraphView]) -> str:
    """Return what the picture shows, for those who cannot see it."""
    panels = []
    for view in views:
        owners = dict.fromkeys(buffer.owner for buffer in view.buffers)
        groups = [
            f"{owner}: " + "; ".join(buffer_words(buffer) for buffer in view.buffers if buffer.owner == owner)
            for owner in owners
        ]
        panels.append(f"{heading(view)}; {size(view.nbytes)}. {'. '.join(groups)}.")
    return " ".join(panels)
