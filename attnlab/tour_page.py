"""The tour's page: one HTML file with its pictures inside, readable on light and dark, with the network off."""

from __future__ import annotations

from html import escape

from attnlab.inspect.info import info
from attnlab.plots.picture import Picture
from attnlab.tour import KERNEL_LAYER, KERNEL_TOKENS, PolicyResult, TourResult, kernel_words
from attnlab.units import size

COLUMNS = ("policy", "ranges", "programs / multiprocessor", "scratch", "error, eager", "error, kernels")

NOTES = (
    "Ranges: how many runs of keys the policy asked for / how many hold keys after rounding, over the whole batch. "
    "Programs: those with keys, counted for an H200's 132 multiprocessors, each of which holds several at a time; "
    "below 1 some have nothing to do. "
    "Scratch: partial results of one layer. Errors: largest absolute difference to an fp64 oracle that shares no code "
    "with either engine; outputs are fp32, whose rounding alone gives about 1e-6. "
    f"Eager: all requests, three layers. Kernels: one request of {KERNEL_TOKENS} keys, layer {KERNEL_LAYER}."
)

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #57606a; --rule: #d5dbe1; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e8ecf0; --soft: #a9b3be; --rule: #333a43; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 Arial, 'Liberation Sans', Helvetica, sans-serif;
  max-width: 900px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
p.note, footer { color: var(--soft); font-size: .88rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { white-space: nowrap; text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: normal; } th:first-child, td:first-child { text-align: left; }
.table, .picture { overflow-x: auto; } .picture svg { width: 100%; min-width: 640px; height: auto; }
code { font-size: .92em; }
.dark { display: none; }
@media (prefers-color-scheme: dark) { .light { display: none; } .dark { display: block; } }
"""


def cells(row: PolicyResult) -> tuple[str, ...]:
    """Return a table row's words, one for each of COLUMNS."""
    f = row.footprint
    kernel = "not run" if row.kernel_error is None else f"{row.kernel_error:.1e} ({row.kernel_ranges} ranges)"
    return (
        f.policy,
        f"{f.asked} / {f.used}",
        f"{f.per_multiprocessor:.2f}",
        size(f.scratch_bytes),
        f"{row.eager_error:.1e}",
        kernel,
    )


def page(result: TourResult, pictures: list[Picture]) -> str:
    """Return the whole page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells(row))}</tr>" for row in result.rows)
    drawn = "".join(f'<div class="picture">{_both(picture)}</div>' for picture in pictures)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>attnlab tour</title>
<style>{_STYLE}</style></head>
<body>
<h1>A real model’s attention, cut, merged and checked</h1>
<p>While a language model writes one token, each of its heads reads all earlier keys. To keep a whole GPU busy, the keys
are split into ranges that are read side by side, and the partial answers are merged. A split policy decides where to
cut.</p>
<p>{escape(result.batch_words)} Queries, keys and values are those of SmolLM2-135M reading the Apache License 2.0, in
layers 0, 18 and 23. A request that is shorter than the text is the end of it.</p>
<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p class="note">{escape(NOTES)} The kernels were {escape(kernel_words())}.</p>
<h2>Where each policy cuts</h2>
{drawn}
<h2>Next</h2>
<p>The lessons: <code>attnlab lab</code> opens them in JupyterLab, and begins with <code>00_map</code>.</p>
<p>In a notebook of your own:
<code>wb = attnlab.workbench("SmolLM2-135M", lens=[2048, 96, 700], policy="seed", engine="eager")</code>,
then <code>attnlab.show(wb.plan())</code>.</p>
<footer>{escape(info())}</footer>
</body></html>
"""


def _both(picture: Picture) -> str:
    return "".join(f'<div class="{theme}">{picture.to_svg(theme=theme)}</div>' for theme in ("light", "dark"))
