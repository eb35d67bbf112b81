"""Looking at drafts: what is read in every step is what the plan explains, and pages are the table's."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.inspect.draft_view import DraftView
from attnlab.plots import style
from attnlab.plots.draft_layout import DraftColumns
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from tests.test_draft_plan import Bench
from tests.test_plots import digits, faults

LAYERS = [0, 1]


def bench(lens: tuple[int, ...] = (13, 30, 0, 1), **options: Any) -> Bench:
    return Bench(lens, **{"topk": 3, "steps": 4, "page": 4, "window": 8, **options})


# ---------------------------------------------------------------- what is there


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("options", [{}, {"page": 1}, {"page": 16, "sliding": True}, {"topk": 1}, {"steps": 2}])
def test_reads_are_what_the_plan_explains(layer: int, options: dict[str, Any]) -> None:
    made = bench(**options)
    plan = made.plan()
    for request, cached in enumerate(made.lens):
        view = DraftView.of(plan, request=request, layer=layer)
        assert len(view.reads) == (made.topk * (made.steps - 1) if cached else 0)
        for read in view.reads:
            (told,) = (
                reading
                for reading in plan.explain(read.step, request * made.topk + read.branch)
                if layer in reading.layers
            )
            old = [key for key in told.keys if key.position < cached]
            new = [key for key in told.keys if key.position >= cached]
            assert (read.first, read.cached) == (old[0].position if old else cached, len(old))
            assert [key.position - cached for key in new] == list(read.drafts)
            assert [key.slot for key in new] == [view.own[read.branch][draft] for draft in read.drafts]
            assert [key.slot for key in old] == [view.slot_of(key.position) for key in old]
            assert read.strays == () and read.write == view.own[read.branch][read.step]


@pytest.mark.parametrize("options", [{}, {"page": 1}, {"page": 16}])
def test_slots_and_pages_are_those_of_the_request_table(options: dict[str, Any]) -> None:
    made = bench(**options)
    for request, cached in enumerate(made.lens):
        view = DraftView.of(made.plan(), request=request, layer=0)
        row = made.table.slots[made.rows[request]].tolist()
        for branch in range(made.topk if cached else 0):
            for draft in range(made.steps - 1):
                column = view.column_of(branch, draft)
                assert view.slot_of(column) == row[column] == view.own[branch][draft]
                assert view.page_of(column) == row[column] // made.page
            first = view.column_of(branch, 0) - view.copied
            if made.page > 1:
                assert first % made.page == 0 and view.page_of(first) == row[first] // made.page


def test_a_branch_has_room_for_a_copy_of_the_last_page() -> None:
    view = DraftView.of(bench().plan(), request=0, layer=0)
    assert (view.copied, view.stride) == (1, 8)
    assert [view.column_of(branch, 0) for branch in range(3)] == [13, 21, 29]


def test_what_no_list_says_is_not_known() -> None:
    view = DraftView.of(bench().plan(), request=0, layer=1)
    assert view.listed_from == 6 and view.slot_of(5) == 0 and view.slot_of(6) > 0
    assert view.slot_of(view.column_of(0, 3)) == 0  # the last draft
    assert view.slot_of(view.column_of(3, 0)) == 0  # no branch
    assert view.page_of(0) is None


def test_a_slot_of_a_sibling_is_found_out() -> None:
    plan = bench().plan()
    index = plan.steps[1].lane(0).layout.index
    end = int(index.indptr[2])
    index.slots[end - 1] = int(plan.steps[1].lane(0).write_slots[0])
    view = DraftView.of(plan, request=0, layer=0)
    strange = [read for read in view.reads if read.strays]
    assert [(read.branch, read.step, read.drafts) for read in strange] == [(1, 1, (0,))]
    picture = show(view)
    assert picture.title.endswith("Branch 1 reads 1 slot in step 1 that is not its own, nor its request’s")
    assert "13 + 1 + 1" in picture.to_svg() and not faults(picture.figure())


def test_a_cached_key_from_elsewhere_is_found_out() -> None:
    plan = bench().plan()
    plan.steps[2].lane(1).layout.index.slots[1] = 1
    assert [len(read.strays) for read in DraftView.of(plan, request=0, layer=1).reads if read.strays] == [1]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"request": 4, "layer": 0}, "^request: expected 0 to 3, got 4"),
        ({"request": 0, "layer": 7}, "^layer: this plan has layers 0, 1, got 7"),
    ],
)
def test_a_request_or_layer_that_is_none_is_named(where: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DraftView.of(bench().plan(), **where)


def test_no_request_and_no_step_are_named() -> None:
    with pytest.raises(ValueError, match="^request: the plan has no request, got 0"):
        DraftView.of(bench(()).plan(), request=0, layer=0)
    with pytest.raises(ValueError, match="^plan: branches of one draft need no step"):
        DraftView.of(bench(steps=1).plan(), request=0, layer=0)


# ---------------------------------------------------------------- pictures


PICTURES: dict[str, Callable[[], Picture]] = {
    "plan": lambda: show(bench().plan()),
    "all keys": lambda: show(bench().plan(), layer=0),
    "another request": lambda: show(bench().plan(), request=1),
    "one key": lambda: show(bench().plan(), request=3, layer=0),
    "padded": lambda: show(bench().plan(), request=2),
    "first is padded": lambda: show(bench((0, 9)).plan()),
    "pages of one": lambda: show(bench(page=1).plan()),
    "one branch": lambda: show(bench(topk=1).plan(), layer=0),
    "two drafts": lambda: show(bench(steps=2).plan()),
    "one draft": lambda: show(bench(steps=1).plan()),
    "no request": lambda: show(bench(()).plan()),
    "window of 1": lambda: show(bench(window=1).plan()),
    "window of 2": lambda: show(bench(window=2).plan()),
    "wide window": lambda: show(bench((1000, 5), topk=8, steps=6, page=16, window=128).plan()),
    "pages of 64": lambda: show(bench((1000,), topk=4, steps=5, page=64, window=None).plan()),
    "many branches": lambda: show(bench((300,), topk=40, steps=3, page=1, window=None).plan()),
    "many steps": lambda: show(bench((30,), topk=4, steps=24, page=1, window=None).plan()),
    "sliding storage": lambda: show(bench((100, 40), page=16, sliding=True).plan()),
    "whole pages": lambda: show(bench((16,)).plan(), layer=0),
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
def test_a_picture_of_a_draft_stands_alone(name: str) -> None:
    picture = picture_of(name)
    svg = picture.to_svg()
    root = ElementTree.fromstring(svg)
    assert (root[0].text, root[1].text) == (picture.title, picture.alt)
    assert picture.alt.endswith(".") and len(svg.encode()) < 120_000
    texts = [text.get_text() for text in picture.figure().texts]
    assert max(text.count("\n") for text in texts) <= 1
    assert not re.search(r"\b(dark|darker|white|black)\b", " ".join(texts).lower())


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("plan", "Window 8: each of 3 branches reads 7 to 5 of 13 cached keys and 1 to 3 of its own drafts"),
        ("all keys", "Each of 3 branches reads all 13 cached keys and 1 to 3 of its own drafts"),
        ("one key", "Each of 3 branches reads the only cached key and 1 to 3 of its own drafts"),
        ("padded", "Request r2 is a padded row: nothing is drafted for it"),
        ("one branch", "The only branch reads all 13 cached keys and 1 to 3 of its own drafts"),
        ("two drafts", "Window 8: each of 3 branches reads 7 of 13 cached keys and 1 of its own drafts"),
        ("one draft", "Branches of one draft need no step"),
        ("no request", "There is no request to draft for"),
        ("window of 1", "Window 1: each of 3 branches reads 0 of 13 cached keys and 1 of its own drafts"),
        ("window of 2", "Window 2: each of 3 branches reads 1 to 0 of 13 cached keys and 1 to 2 of its own drafts"),
    ],
)
def test_titles_of_particular_drafts(name: str, title: str) -> None:
    lead = "" if name in ("padded", "one draft", "no request") else "Request r0, one of 3. "
    assert picture_of(name).title == (lead.replace("r0", "r3") if name == "one key" else lead) + title


@settings(max_examples=20)
@given(st.integers(1, 70), st.integers(1, 4), st.integers(2, 6), st.sampled_from([1, 4, 16]), st.integers(1, 80))
def test_the_title_counts_what_is_read(cached: int, topk: int, steps: int, page: int, window: int) -> None:
    made = Bench((cached,), topk=topk, steps=steps, page=page, window=window)
    view = DraftView.of(made.plan(), request=0, layer=1)
    seen = [min(cached, max(0, window - 1 - read.step)) for read in view.reads]
    assert [read.cached for read in view.reads] == seen
    numbers = digits(show(view).title.rpartition(": ")[2])
    if min(seen) < cached:
        assert max(seen) in numbers and min(seen) in numbers and cached in numbers


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(1, 12), st.integers(2, 9), st.sampled_from([1, 4, 16, 64]), st.integers(1, 90))
def test_columns_are_laid_out_once_and_in_order(cached: int, topk: int, steps: int, page: int, window: int) -> None:
    made = Bench((cached,), topk=topk, steps=steps, page=page, window=window)
    view = DraftView.of(made.plan(), request=0, layer=1)
    columns = DraftColumns.of(view)
    parts = columns.stretches
    assert all(a.end <= b.first and a.left + a.width <= b.left + 1e-9 for a, b in zip(parts, parts[1:], strict=False))
    assert parts[0].first == 0 and 1 <= columns.kept <= topk and columns.width < 5.8
    for branch in range(columns.kept):
        for draft in range(steps):
            column = view.column_of(branch, draft)
            assert len(columns.spans(column, column + 1)) == 1
    assert columns.spans(0, cached)[-1][1] == pytest.approx(columns.frame(-1)[1])
    pages = range(max(0, parts[0].end // page * page), parts[-1].end, page)
    assert all(len(columns.spans(first, first + page)) <= 1 for first in pages)  # no gap that looks like a slot


@pytest.mark.parametrize(("topk", "row"), [(3, "branch of a draft"), (1, "request")])
def test_the_schedule_of_a_step_has_a_row_for_every_branch(topk: int, row: str) -> None:
    picture = show(bench(topk=topk).plan().steps[1])
    assert f"Each row is one {row}, each block" in picture.to_svg()
    assert ("12 branches of " if topk > 1 else "4 requests of ") in picture.alt


def test_a_plan_is_shown_for_its_first_request_in_a_layer_with_a_window() -> None:
    assert "request r1 in the order of its table" in picture_of("first is padded").to_svg()
    assert picture_of("plan").title.startswith("Request r0, one of 3. Window 8: ")


def test_marks_are_explained_where_they_occur() -> None:
    svg = {name: picture_of(name).to_svg() for name in ("plan", "all keys", "pages of one", "whole pages")}
    assert "Line: where the window begins" in svg["plan"] and "Line:" not in svg["all keys"]
    assert "Tinted: room for a copy" in svg["plan"] and "Tinted" not in svg["pages of one"] + svg["whole pages"]
    assert ", in pages" in svg["plan"] and ", in pages" not in svg["pages of one"]
    assert "28 other branches not drawn." in picture_of("many branches").to_svg() and "not drawn" not in svg["plan"]


def test_the_mouse_finds_what_a_branch_reads() -> None:
    view = DraftView.of(bench().plan(), request=0, layer=1)
    a, b = view.own[1][:2]
    words = f"branch 1, step 1: 6 cached keys (7 to 12), drafts in slots {a}, {b}; stores in {b}"
    assert f"<title>{words}<" in picture_of("plan").to_svg() and words in picture_of("plan").alt


def test_a_picture_shows_one_request() -> None:
    view = DraftView.of(bench().plan(), request=0, layer=1)
    with pytest.raises(ValueError, match="the branches of 1 request, got 2"):
        show(view, view)
    with pytest.raises(TypeError, match="a picture of DraftView has the options theme; got layer"):
        show(view, layer=0)
