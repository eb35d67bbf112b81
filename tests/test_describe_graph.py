"""What is said of a graph and of its latest plan: numbers of the memory, and padded rows by their name."""

from __future__ import annotations

import re

import pytest

import attnlab
from attnlab.inspect.graph_lines import GraphDescription
from attnlab.inspect.graph_view import GraphView
from attnlab.plots.show import show
from attnlab.units import size
from tests.strategies import DEVICE
from tests.test_graph_view import MODES, captured, stepped

PLANNED_ALONE = [mode for mode in MODES if mode != "draft"]


def said(mode: str, *counts: int, **options: object) -> list[str]:
    return str(attnlab.describe(stepped(mode, *counts, **options)[1])).splitlines()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("decode", "graph of decode steps: up to 8 requests of up to 96 tokens"),
        ("verify", "graph of verify steps: up to 8 requests of up to 96 tokens, 3 drafts each, without a mask"),
        ("tree", "graph of verify steps: up to 8 requests of up to 96 tokens, 3 drafts each, with a mask"),
        (
            "extend",
            "graph of extend steps: up to 8 requests of up to 96 tokens, up to 3 new tokens each, without a mask",
        ),
    ],
)
def test_a_graph_says_what_was_captured(mode: str, words: str) -> None:
    how = "run again at every replay" if DEVICE == "cpu" else "captured in a CUDA graph"
    assert said(mode)[0] == f"{words} · {how}"


def test_a_graph_of_a_draft_names_its_padded_rows() -> None:
    _, graph = stepped("draft", 8, 5)
    lines = str(attnlab.describe(graph)).splitlines()
    assert lines[0].startswith("graph of draft steps: up to 8 requests of up to 96 tokens, 2 branches of 3 drafts each")
    assert lines[1] == "latest step: 5 requests and 3 padded rows, 10 query tokens and 6 padded"
    assert lines[5].startswith("draft: 5 requests and 3 padded rows, 2 x 3 drafts each · 2 decode steps")
    assert [line.split()[:2] for line in lines[9:11]] == [["0", "10"], ["1", "10"]]  # steps, and rows of requests
    with pytest.raises(ValueError, match="12 has none in this step: it is a padded row"):
        graph.latest.explain(0, 12)


def test_a_graph_says_what_the_latest_step_was() -> None:
    assert said("verify", 8, 5)[1] == "latest step: 5 requests and 3 padded rows, 15 query tokens and 9 padded"
    assert said("decode", 8, 1)[1] == "latest step: 1 request and 7 padded rows, 1 query token and 7 padded"


def test_a_graph_counts_its_fixed_memory() -> None:
    _, graph = stepped("tree", 8, 5)
    memory = str(attnlab.describe(graph)).splitlines()[2]
    view = GraphView.of(graph)
    sums = {owner: sum(b.nbytes for b in view.buffers if b.owner == owner) for owner in ("batch", "inputs")}
    sums["plan"] = graph.nbytes - sum(sums.values())
    assert memory.startswith(f"fixed memory: {size(graph.nbytes)} in {len(graph.buffers)} tensors (batch ")
    assert all(f"{owner} {size(nbytes)}" in memory for owner, nbytes in sums.items())
    assert f"{view.live_share:.0%} live, {view.left_over_share:.1%} left over from earlier steps" in memory
    assert said("decode", 8, 5)[2].endswith("% live")


def test_a_graph_says_how_its_plan_is_filled_in() -> None:
    copied = "plan: made anew for every step, and copied to where the first one lies"
    assert said("decode")[3] == (copied if DEVICE == "cpu" else "plan: filled in by a CUDA graph of the planning")


def test_stale_rows_that_padding_reads_are_marked() -> None:
    _, graph = stepped("decode", 8, 5)
    graph.buffers["plan.lanes[0].write_slots"][5:] = 9
    lines = str(attnlab.describe(graph)).splitlines()
    assert lines[4] == (
        "! padded rows read what an earlier step has left: 3 tokens of write slots (layer 0, in 'full': all keys)"
    )


@pytest.mark.parametrize("mode", PLANNED_ALONE)
def test_the_latest_plan_names_its_padded_rows(mode: str) -> None:
    _, graph = stepped(mode, 8, 5)
    described = attnlab.describe(graph.latest)
    assert (described.requests, described.padded, described.tokens) == (5, 3, GraphView.of(graph).tokens)
    lines = str(described).splitlines()
    assert f"step: 5 requests and 3 padded rows, {described.tokens} query tokens" in lines[0]
    assert lines.count("  + 3 padded rows, which stand for no request") == 2
    assert str(described) in str(attnlab.describe(graph))


def test_of_a_mask_the_entries_that_are_read_are_counted() -> None:
    _, graph = stepped("tree", 8, 5)
    live = int(graph.latest.queries.mask_indptr[-1])  # type: ignore[union-attr]
    assert f"a mask of {live:,} entries among new tokens, in memory for {graph.mask.numel():,}" in str(
        attnlab.describe(graph.latest)
    )  # type: ignore[union-attr]


def test_one_padded_row_stands_for_no_request() -> None:
    assert "  + 1 padded row, which stands for no request" in said("decode", 7)


def test_a_step_of_padding_alone_has_no_table() -> None:
    lines = said("tree", 8, 0)
    assert lines[5].startswith("verify step: 0 requests and 8 padded rows, 0 query tokens")
    assert not [line for line in lines if line.split()[:2] == ["request", "row"]]
    described = attnlab.describe(stepped("decode", 4, 0)[1])
    assert isinstance(described, GraphDescription) and "<table>" not in described._repr_html_()


def test_requests_beyond_the_limit_are_counted_without_padding() -> None:
    _, graph = stepped("decode", 8, 5)
    words = str(attnlab.describe(graph, most=2))
    assert words.count("... and 3 other requests") == words.count("+ 3 padded rows") == 2


def test_notebooks_get_the_same_words() -> None:
    described = attnlab.describe(stepped("decode", 8, 5)[1])
    html = described._repr_html_()
    text = re.sub(r"<[^>]+>", " ", html)
    assert all(line in text.replace("&#x27;", "'") for line in described.lines)
    assert html.count("<table>") == 2 and "3 padded rows" in html


@pytest.mark.parametrize("mode", PLANNED_ALONE)
def test_live_rows_are_explained_and_a_padded_one_is_named(mode: str) -> None:
    _, graph = stepped(mode, 8, 5)
    assert [reading.keys for reading in graph.latest.explain(4, 0)][0]
    with pytest.raises(ValueError, match="^query: request 5 has none in this step: it is a padded row"):
        graph.latest.explain(5, 0)


def test_a_picture_of_the_latest_plan_leaves_padded_rows_out() -> None:
    _, graph = stepped("decode", 8, 5)
    picture = show(graph.latest)
    svg = picture.to_svg()
    assert "3 padded rows left out" in svg and ">r4<" in svg and ">r5<" not in svg
    assert picture.alt.count("and 3 padded rows") == 2
    assert "padded" not in show(stepped("decode", 8)[1].latest).alt


def test_a_padded_row_that_has_ranges_all_the_same_is_shown() -> None:
    """B27, B28: a length that was not set back."""
    server, graph = stepped("decode", 8, 5)
    plan = server.backend.plan(server.batch("decode", list(server.lens)))
    plan.batch.seq.device[5:] = 0
    assert ">r7<" in show(plan).to_svg()


def test_a_graph_that_was_never_replayed_is_described() -> None:
    assert (
        str(attnlab.describe(captured("extend")[1])).splitlines()[1].startswith("latest step: 0 requests and 8 padded")
    )
