"""Looking at a graph: every byte of it is live, padding or left over, and which is told from what the tensors hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import graphs
from attnlab.inspect.graph_contents import Buffer
from attnlab.inspect.graph_view import GraphView
from attnlab.plan.plans import DecodePlan
from attnlab.plots import style
from attnlab.plots.graph_facts import statement
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from tests.serving import TOPK, Server, Size
from tests.strategies import DEVICE
from tests.test_plots import digits, faults

ENGINE = "eager" if DEVICE == "cpu" else "triton"
MODES = ["decode", "verify", "tree", "extend", "draft"]
LENS = (40, 33, 17, 9, 8, 7, 6, 5)


def captured(mode: str, pool: str = "window", **options: object) -> tuple[Server, graphs.Graph]:
    size = Size(**{"requests": 8, **options})  # type: ignore[arg-type]
    server = Server(pool, engine=ENGINE, policy="seed", device=DEVICE, modes=[mode], size=size)
    return server, server.graphs[mode]


def stepped(mode: str, *counts: int, pool: str = "window", **options: object) -> tuple[Server, graphs.Graph]:
    """A graph after steps of the first so many requests."""
    server, graph = captured(mode, pool, **options)
    rows = [server.admit(n) for n in LENS]
    for count in counts:
        run(server, graph, mode, rows[:count])
    return server, graph


def run(server: Server, graph: graphs.Graph, mode: str, rows: list[int]) -> None:
    """One step of these requests. What was drafted is dropped."""
    batch = server.batch(mode, rows)
    graph.run(batch, **server.inputs_of(graph.shape, graph.shape.live(batch)))
    if mode == "draft":
        server.settle(mode, batch, rows)


def buffer(graph: graphs.Graph, name: str, lane: str = "") -> Buffer:
    (found,) = [b for b in GraphView.of(graph).buffers if b.name == name and lane in b.owner]
    return found


# ---------------------------------------------------------------- what is there


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", ["plain", "window", "unified sliding", "mla"])
def test_every_byte_of_a_graph_belongs_to_one_buffer(mode: str, pool: str) -> None:
    _, graph = stepped(mode, 8, 5, pool=pool)
    view = GraphView.of(graph)
    assert view.nbytes == graph.nbytes == sum(x.nbytes for x in graph.buffers.values())
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in graph.buffers.values())
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert all(b.nbytes for b in view.buffers)


def test_buffers_are_named_by_where_they_are() -> None:
    _, graph = captured("tree")
    names = set(graph.buffers)
    assert {"batch.rows", "batch.mask.bits", "plan.lanes[1].layout.index.slots", "inputs.q0"} <= names
    assert "plan.queries.mask.bits" not in names  # the same memory as the batch's
    assert all(x.device.type == DEVICE for x in graph.buffers.values())


def test_buffers_stay_where_they_are() -> None:
    server, graph = captured("decode")
    before = {name: x.data_ptr() for name, x in graph.buffers.items()}
    graph.plan(server.batch("decode", [server.admit(3)]))
    assert {name: x.data_ptr() for name, x in graph.buffers.items()} == before


@pytest.mark.parametrize("mode", MODES)
def test_live_entries_are_those_of_the_latest_step(mode: str) -> None:
    _, graph = stepped(mode, 8, 5)
    view = GraphView.of(graph)
    assert (view.requests, view.most_requests, view.most_tokens) == (5, 8, graph.shape.tokens)
    per_unit = {"request": 5, "token": view.tokens, "row": graph.live}
    for b in view.buffers:
        assert len(b.parts) == 5 and b.live == per_unit.get(b.unit, b.live)
        assert b.live + b.padded + b.left_over == b.capacity


@pytest.mark.parametrize("mode", ["decode", "verify", "extend"])
def test_every_request_has_its_part_of_a_list(mode: str) -> None:
    _, graph = stepped(mode, 8, 5)
    lens = graph.latest.lane(0).layout.index.indptr.diff().tolist()  # type: ignore[union-attr]
    assert buffer(graph, "list", "layer 0").parts == tuple(lens[:5]) and not any(lens[5:])


def test_branches_of_a_draft_are_counted_with_their_request() -> None:
    _, graph = stepped("draft", 8, 5)
    for i, step in enumerate(graph.latest.steps):  # type: ignore[union-attr]
        lens = step.lane(0).layout.index.indptr.diff().tolist()
        parts = buffer(graph, "list", f"step {i}, layer 0").parts
        assert parts == tuple(a + b for a, b in zip(lens[:10:2], lens[1:10:2], strict=True))
        assert buffer(graph, "rows, lengths", f"step {i}").parts == (TOPK,) * 5
    assert not GraphView.of(graph).faults


def test_a_stale_row_of_a_drafts_step_is_found() -> None:
    """B30."""
    _, graph = stepped("draft", 8, 5)
    graph.buffers["plan.steps[1].batch.seq.device"][13] = 9
    (dirty,) = GraphView.of(graph).faults
    assert (dirty.name, dirty.owner, dirty.stale) == ("rows, lengths", "step 1", ((13, 14),))


def test_ranges_segments_and_programs_are_those_of_the_schedule() -> None:
    _, graph = stepped("decode", 8, 3, context=600)
    lane = graph.latest.lane(1)
    used = graph.latest.lane(1).splits.to_host().effective  # type: ignore[union-attr]
    owner = "layer 1"
    assert buffer(graph, "ranges", owner).parts == used[:3]
    assert buffer(graph, "segments", owner).parts == tuple(2 * n for n in used[:3])  # two KV heads
    assert buffer(graph, "programs", owner).parts == tuple(2 * n for n in used[:3])
    assert buffer(graph, "programs", owner).capacity == lane.schedule.programs  # type: ignore[union-attr]


def test_entries_of_a_larger_mask_are_left_over_and_never_read() -> None:
    server, graph = stepped("tree", 8)
    most = buffer(graph, "mask").live
    last = int(graph.mask.nonzero().max()) + 1  # type: ignore[union-attr]
    run(server, graph, "tree", list(server.lens)[:5])
    mask = buffer(graph, "mask")
    assert mask.stale == ((mask.live, last),) and mask.live < last <= most and not mask.read
    assert GraphView.of(graph).faults == ()
    assert mask.nbytes == mask.capacity and f"of {mask.capacity:,} entries" in show(graph).alt  # a byte each


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_before_its_first_step_is_padding(mode: str) -> None:
    _, graph = captured(mode)
    view = GraphView.of(graph)
    assert (view.requests, view.tokens, view.live_share, view.left_over_share) == (0, 0, 0.0, 0.0)


def test_a_step_of_no_request_is_padding() -> None:
    _, graph = stepped("decode", 8, 0)
    view = GraphView.of(graph)
    assert view.requests == 0 and view.live_share == view.left_over_share == 0


def test_a_full_step_has_no_padded_row() -> None:
    _, graph = stepped("verify", 8)
    assert all(b.padded == 0 for b in GraphView.of(graph).buffers if b.unit in ("request", "token"))


@pytest.mark.parametrize(
    ("path", "name", "at", "read"),
    [
        ("batch.rows", "rows", 6, True),
        ("batch.seq.device", "lengths", 7, True),
        ("plan.batch.seq.device", "lengths", 5, True),
        ("plan.lanes[0].write_slots", "write slots", 6, True),
        ("plan.lanes[0].layout.start", "offsets", 6, True),
        ("plan.lanes[0].splits.nominal", "offsets", 5, True),
        ("inputs.k1", "q0, k0, v0, q1, k1, v1", 7, True),
        ("plan.lanes[0].layout.index.slots", "list", -1, False),
        ("plan.lanes[0].splits.end", "ranges", -1, False),
    ],
)
def test_what_an_earlier_step_left_is_found(path: str, name: str, at: int, read: bool) -> None:
    """B28, B30: one number behind the live rows is enough."""
    _, graph = stepped("decode", 8, 5)
    graph.buffers[path][at] = 3
    view = GraphView.of(graph)
    (dirty,) = [b for b in view.buffers if b.stale]
    entry = at % dirty.capacity
    assert (dirty.name, dirty.stale, dirty.read) == (name, ((entry, entry + 1),), read)
    assert view.faults == ((dirty,) if read else ())


@pytest.mark.parametrize("path", ["layout.index.indptr", "splits.indptr", "schedule.merge_indptr"])
def test_an_offset_that_moves_behind_the_live_requests_is_found(path: str) -> None:
    _, graph = stepped("decode", 8, 5)
    graph.buffers[f"plan.lanes[1].{path}"][-1] += 1
    (dirty,) = GraphView.of(graph).faults
    assert (dirty.name, dirty.stale) == ("offsets", ((7, 8),))


def test_a_padded_program_that_has_something_to_read_is_found() -> None:
    """B29."""
    _, graph = stepped("decode", 8, 5)
    schedule = graph.latest.lane(0).schedule  # type: ignore[union-attr]
    schedule.segments[-1, 3] = 4
    (dirty,) = [b for b in GraphView.of(graph).buffers if b.stale]
    assert (dirty.name, dirty.read) == ("segments", False)
    schedule.program_indptr[-1] += 1
    assert [b.name for b in GraphView.of(graph).faults] == ["programs"]


@settings(max_examples=10)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.sampled_from(MODES))
def test_no_step_leaves_anything_that_padding_reads(counts: list[int], mode: str) -> None:
    _, graph = stepped(mode, *counts, context=200)
    view = GraphView.of(graph)
    assert view.faults == () and view.requests == counts[-1]
    assert {b.name for b in view.buffers if b.stale} <= {"mask"}


def test_only_a_graph_has_such_a_view() -> None:
    with pytest.raises(TypeError, match="^graph: expected one that was captured, got DecodePlan"):
        GraphView.of(captured("decode")[1].latest)  # type: ignore[arg-type]


def test_a_graph_says_how_its_plan_is_filled_in() -> None:
    _, graph = captured("decode")
    assert graph.planning_replayed == (DEVICE != "cpu")
    assert GraphView.of(graph).planning_replayed == graph.planning_replayed


# ---------------------------------------------------------------- pictures


def fault() -> Picture:
    _, graph = stepped("decode", 8, 5)
    graph.buffers["batch.rows"][6] = 3
    graph.buffers["plan.lanes[0].write_slots"][5:] = 9
    return show(graph)


def steps(mode: str, *counts: int, **options: object) -> Picture:
    server, graph = captured(mode, **options)  # type: ignore[arg-type]
    rows, views = [server.admit(n) for n in LENS], []
    for count in counts:
        run(server, graph, mode, rows[:count])
        views.append(GraphView.of(graph))
    return show(*views)


def many(requests: int, live: int) -> Picture:
    server, graph = captured("decode", requests=requests, context=40)
    rows = [server.admit(1 + i % 30) for i in range(live)]
    graph.plan(server.batch("decode", rows))
    return show(graph)


PICTURES: dict[str, Callable[[], Picture]] = {
    **{mode: lambda mode=mode: show(stepped(mode, 8, 5)[1]) for mode in MODES},  # type: ignore[misc]
    "full": lambda: show(stepped("decode", 8)[1]),
    "plain": lambda: show(stepped("decode", 8, 1, pool="plain")[1]),
    "mla": lambda: show(stepped("decode", 8, 1, pool="unified mla")[1]),
    "before the first step": lambda: show(captured("tree")[1]),
    "no request": lambda: show(stepped("decode", 4, 0)[1]),
    "left over where it is read": fault,
    "two steps": lambda: steps("tree", 8, 3),
    "three steps": lambda: steps("decode", 8, 2, 0),
    "20 of 24 requests": lambda: many(24, 20),
    "130 of 200 requests": lambda: many(200, 130),
    "long": lambda: show(stepped("tree", 8, 2, context=60_000)[1]),
}
every_picture = pytest.mark.parametrize("name", PICTURES)


@cache
def picture_of(name: str) -> Picture:
    return PICTURES[name]()


@pytest.mark.parametrize(
    ("theme", "fonts"), [("light", style.FONTS), ("dark", style.FONTS[-1:])], ids=["light", "dark, widest font"]
)
@every_picture
def test_no_text_collides_or_leaves_the_canvas(
    name: str, theme: str, fonts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "FONTS", fonts)
    assert not faults(picture_of(name).figure(theme))


@every_picture
def test_a_picture_of_a_graph_is_small_and_has_words(name: str) -> None:
    picture = picture_of(name)
    assert len(picture.to_svg().encode()) < 160_000
    assert picture.alt.endswith(".") and 20 < len(picture.title) < 110
    texts = [text.get_text() for text in picture.figure().texts]
    assert max(text.count("\n") for text in texts) <= 1


@pytest.mark.parametrize("mode", MODES)
def test_the_title_counts_what_is_live(mode: str) -> None:
    _, graph = stepped(mode, 8, 5)
    view, title = GraphView.of(graph), show(graph).title
    live, most, percent = digits(title)[:3]
    assert (live, most) == (5, 8) and percent == round(100 * view.live_share)
    assert ("left over" in title) == (view.left_over_share > 0) == (mode == "tree")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("left over where it is read", "Padded rows read what an earlier step has left in rows and write slots"),
        ("before the first step", r"No request is live: all [\d.]+ KiB of the graph are padding"),
        ("no request", r"No request is live: all [\d.]+ KiB of the graph are padding"),
        ("two steps", r"\d+% and \d+% of the memory are live, step by step; 0% and [\d.]+% are left over"),
        ("three steps", r"\d+%, \d+% and 0% of the memory are live, step by step"),
    ],
)
def test_titles_of_particular_graphs(name: str, title: str) -> None:
    assert re.fullmatch(title, picture_of(name).title)


def test_marks_are_explained_where_they_occur() -> None:
    svg = {name: picture_of(name).to_svg() for name in ("decode", "tree", "full", "left over where it is read")}
    assert "Slanted lines" in svg["tree"] and "Slanted lines" not in svg["decode"]
    assert "Outline: padding" in svg["decode"]
    assert "Line below: left over where padded rows read" in svg["left over where it is read"]
    assert "Striped" in picture_of("130 of 200 requests").to_svg()
    assert "Striped" not in picture_of("no request").to_svg()
    assert "From r12 on colours repeat, hatched" in picture_of("20 of 24 requests").to_svg()
    assert "fill: #c2185b" in svg["left over where it is read"] and "fill: #c2185b" not in svg["tree"]


def test_the_mouse_finds_what_a_buffer_holds() -> None:
    _, graph = stepped("decode", 8, 5)
    listed = buffer(graph, "list", "layer 1")
    words = f"list: {listed.live:,} live, {listed.padded:,} padding of {listed.capacity:,} slots"
    assert words in show(graph).to_svg() and words in show(graph).alt


def test_a_statement_can_be_false() -> None:
    view = GraphView.of(stepped("decode", 8, 5)[1])
    fuller = replace(view, requests=6)
    assert statement([view]).startswith("5 of 8 requests are live")
    assert statement([fuller]).startswith("6 of 8 requests are live")


def test_a_picture_shows_up_to_three_steps() -> None:
    graph = captured("decode")[1]
    with pytest.raises(ValueError, match="up to 3 graphs or steps, got 4"):
        show(graph, graph, graph, graph)


def test_an_earlier_step_stays_as_it_was() -> None:
    """A view is numbers: the memory may be filled again."""
    server, graph = stepped("decode", 8)
    before = GraphView.of(graph)
    assert isinstance(graph.latest, DecodePlan)
    graph.plan(server.batch("decode", list(server.lens)[:1]))
    torch.testing.assert_close(before.live_share, GraphView.of(stepped("decode", 8)[1]).live_share)
    assert before.requests == 8 and GraphView.of(graph).requests == 1
