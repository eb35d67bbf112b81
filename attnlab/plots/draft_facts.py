"""What the picture of a draft states, and the words around it."""

from __future__ import annotations

from attnlab.inspect.draft_view import DraftRead, DraftView
from attnlab.plots.words import among, plural


def statement(view: DraftView) -> str:
    """Return the picture's title: what the branches read, in numbers; among several requests, whose they are."""
    if not view.cached:
        return f"Request r{view.request} is a padded row: nothing is drafted for it"
    return among(view.request, view.requests, _reads(view))


def _reads(view: DraftView) -> str:
    astray = next((read for read in view.reads if read.strays), None)
    if astray is not None:
        slots = plural(len(astray.strays), "slot")
        are = "is" if len(astray.strays) == 1 else "are"
        return f"Branch {astray.branch} reads {slots} in step {astray.step} that {are} not its own, nor its request’s"
    who = f"each of {view.topk} branches reads" if view.topk > 1 else "the only branch reads"
    seen, own = [read.cached for read in view.reads], [len(read.drafts) for read in view.reads]
    keys = f"{_span(max(seen), min(seen))} of {plural(view.cached, 'cached key')}"
    if min(seen) == view.cached:
        keys = f"all {view.cached:,} cached keys" if view.cached > 1 else "the only cached key"
    name = f"{view.sight}: " if view.sight.partial else ""
    words = f"{name}{who} {keys} and {_span(min(own), max(own))} of its own drafts"
    return f"{words[0].upper()}{words[1:]}"


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def caption(view: DraftView, *, kept: int, dotted: bool) -> str:
    """Return the two lines that say what is seen and how to read it."""
    pages = ", in pages" if view.page_size > 1 else ""
    first = f"Columns: the slots of request r{view.request} in the order of its table{pages}."
    first += f" Rows: what layer {view.layer} reads for a branch in a step. Shades: drafts."
    marks = ["Dot: the query’s own." if dotted else "", "Outline: written by no step."]
    if view.copied and view.topk > 1:
        marks.append("Tinted: room for a copy of the page where the cached keys end.")
    if view.sight.partial and any(read.first for read in view.reads):
        marks.append(f"Line: where {'the window' if view.sight.chunk is None else 'the chunk'} begins.")
    if others := view.topk - kept:
        marks.append(f"{others} other branch{'es' * (others > 1)} not drawn.")
    return f"{first}\n{' '.join(filter(None, marks))}"


def source(view: DraftView) -> str:
    """Return the line at the foot."""
    steps = plural(view.drafts - 1, "step")
    return (
        f"Slots in ‘{view.space}’, pages of {view.page_size:,}. {plural(view.drafts, 'draft')} a branch need {steps}: "
        "no query is made of the last. One launch lists what all steps read."
    )


def read_words(view: DraftView, read: DraftRead) -> str:
    """Return what a branch reads in a step."""
    cached = "no cached key"
    if read.cached:
        cached = f"{plural(read.cached, 'cached key')} ({_span(read.first, read.first + read.cached - 1)})"
    slots = ", ".join(f"{view.own[read.branch][draft]:,}" for draft in read.drafts)
    strays = f", and slots {', '.join(map(str, read.strays[:8]))}, which are not its own" if read.strays else ""
    return (
        f"branch {read.branch}, step {read.step}: {cached}, drafts in slots {slots}{strays}; stores in {read.write:,}"
    )


def in_words(view: DraftView) -> str:
    """Return what the picture shows, for those who cannot see it."""
    after = (
        f"After {plural(view.cached, 'cached key')} {view.topk} x {plural(view.drafts, 'draft')}, layer {view.layer}"
    )
    if not view.reads:
        return f"{after}: nothing is read."
    listed = "; ".join(read_words(view, read) for read in view.reads[:16])
    more = f"; and {len(view.reads) - 16:,} others" if len(view.reads) > 16 else ""
    return f"{after}. {listed[0].upper()}{listed[1:]}{more}."
