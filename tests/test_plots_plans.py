"""Pictures of plans: window layouts, index lists, tree masks. Titles are what `explain` says, and nothing collides."""

from __future__ import annotations

import dataclasses
import random
import re
import time
import xml.etree.ElementTree as ElementTree
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlab.inspect.index_view import IndexView
from attnlab.inspect.samples import Sample
from attnlab.inspect.step import prefix_and_new
from attnlab.inspect.tree_view import TreeView
from attnlab.mask import CustomMask
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plots import style
from attnlab.plots.index_lists import rows_of
from attnlab.plots.narrow import apart
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.tree_facts import columns_of
from attnlab.plots.tree_layout import Panels, ramp_of
from attnlab.plots.window_axis import WindowAxis, spread
from attnlab.plots.window_bars import Bars
from attnlab.plots.window_facts import statement
from attnlab.plots.window_links import links
from attnlab.plots.window_queries import PLOT_WIDTH
from attnlab.spec import Sight
from tests.test_describe import LENS, NEW, PLANS, TREE, Stand, noise, read_by, stand
from tests.test_plots import digits, faults

random.seed(1)
BUSHY = [-1, *(random.randrange(max(0, i - 12), i) for i in range(1, 64))]
MANY = [(37 * i) % 300 + 1 for i in range(40)]
WORDS = (" the", " Work", "\n", " terms", " and", ",", " or", "\n", '"', " and", "\n", "\n", "\n")


def window(plan_of: Any, made: Stand, **where: int) -> Picture:
    return show(made.view(plan_of(made), **where))


def scattered(reqs: int, keys: int, *, spare: int = 0, run: int = 1) -> KVLayout:
    """Lists whose slots lie in runs of so many, in no order."""
    generator = np.random.default_rng(3)
    first = 1 + generator.permutation(reqs * keys // run + 1)[:, None] * run
    slots = torch.from_numpy((first + np.arange(run)).flatten()[: reqs * keys])
    indptr = torch.arange(reqs + 1, dtype=torch.int32) * keys
    padded = torch.cat([slots, torch.zeros(spare, dtype=torch.int64)])
    return KVLayout.full(KVIndex(indptr=indptr, slots=padded, space="pool"))


def sunk() -> KVLayout:
    layout = scattered(2, 24, run=4)
    layout.index.slots[7:9] = 0
    return layout


def tree(parents: list[int], prefix: int, *, layer: int = 0, texts: str = "", **options: Any) -> TreeView:
    made = Stand([prefix], spare=len(parents), **{"page": 4, "window": 8, **options})
    drafts = [WORDS[i % len(WORDS)] for i in range(len(parents))]
    tokens = {"": None, "drafts": drafts, "all": [*Sample.load("long").tokens[:prefix], *drafts]}[texts]
    return TreeView.of(made.tree([parents]), request=0, layer=layer, tokens=tokens)


def chain(drafts: int, prefix: int, **options: Any) -> TreeView:
    made = Stand([prefix], spare=drafts, **{"page": 4, **options})
    return TreeView.of(made.chain(drafts), request=0, layer=0)


def no_tree() -> TreeView:
    made = Stand([4], spare=3, page=1)
    plan = made.tree([[-1, 0, 0]])
    bits = torch.tensor([[1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1, 1]], dtype=torch.uint8)
    batch = dataclasses.replace(plan.batch, mask=CustomMask.of([bits]))
    return TreeView.of(made.planner().build(batch), request=0, layer=1)


def moved() -> Picture:
    made = Stand([40, 40], kind="unified", page=4)
    plan = made.decode()
    made.cache.release(made.rows[0])
    made.pool.compact()
    return show(made.view(plan, request=1))


@cache
def long() -> Stand:
    return Stand([5000, 3000, 100], page=1, spare=300)


PICTURES: dict[str, Any] = {
    "decode": lambda: window(Stand.decode, stand()),
    "decode, all keys": lambda: window(Stand.decode, stand(), layer=1),
    "decode, young": lambda: window(Stand.decode, stand(), request=1),
    "decode, padded": lambda: window(Stand.decode, stand(), request=3),
    "decode, one pool": lambda: window(Stand.decode, stand(kind="plain"), request=4),
    "decode, chunk": lambda: window(Stand.decode, stand(window=None, chunk=64, page=64)),
    "decode, window 1": lambda: window(Stand.decode, Stand([9], window=1, page=1)),
    "decode, one key": lambda: window(Stand.decode, Stand([1], page=1)),
    "decode, 5,000 keys": lambda: window(Stand.decode, long()),
    "decode, 5,000 keys, all": lambda: window(Stand.decode, long(), layer=1),
    "decode, a million": lambda: window(Stand.decode, Stand([1_000_000, 5000], page=64, window=1024)),
    "decode, 40 requests": lambda: window(Stand.decode, Stand(MANY, window=32, page=1), request=35),
    "decode, pages of 64": lambda: window(Stand.decode, stand(page=64, kind="unified"), request=2),
    "decode, moved": moved,
    "extend": lambda: window(lambda s: s.extend(NEW), stand()),
    "extend, all keys": lambda: window(lambda s: s.extend(NEW), stand(), request=5, layer=1),
    "extend, no new": lambda: window(lambda s: s.extend(NEW), stand(), request=2),
    "extend, first": lambda: window(lambda s: s.extend(NEW), stand(), request=3),
    "extend, one": lambda: window(lambda s: s.extend([1, 0, 0]), Stand([20, 30, 1], spare=1)),
    "extend, one pass": lambda: window(lambda s: s.extend(NEW, one_pass=True), stand(), request=4),
    "extend, chunk": lambda: window(lambda s: s.extend([40, 40]), Stand([1000, 99], window=None, chunk=256, spare=40)),
    "extend, both": lambda: window(lambda s: s.extend(NEW), stand(window=24, chunk=32)),
    "extend, both ways": lambda: window(lambda s: s.extend(NEW), stand(window=8, causal=False)),
    "extend, mask": lambda: window(lambda s: s.extend(NEW, mask=noise(LENS, NEW)), stand(window=60)),
    "extend, 300 new": lambda: window(lambda s: s.extend([4, 300, 0]), long(), request=1),
    "extend, 4 after 5,000": lambda: window(lambda s: s.extend([4, 300, 0]), long()),
    "extend, 4 after 5,000, all": lambda: window(lambda s: s.extend([4, 300, 0]), long(), layer=1),
    "verify": lambda: window(lambda s: s.tree([TREE]), Stand([200], window=8, page=4, kind="unified", spare=13)),
    "verify, all keys": lambda: window(
        lambda s: s.tree([TREE]), Stand([200], window=8, page=4, kind="unified", spare=13), layer=1
    ),
    "verify, 64": lambda: window(lambda s: s.tree([BUSHY]), Stand([2000], spare=64)),
    "lists": lambda: show(stand().decode().lane(0).layout),
    "lists, all keys": lambda: show(stand().decode().lane(1).layout),
    "lists, one pass": lambda: show(stand().extend(NEW, one_pass=True).lane(0)),
    "lists, chunk": lambda: show(stand(window=None, chunk=64).decode().lane(0).layout),
    "lists, no request": lambda: show(Stand([]).decode().lane(0).layout),
    "lists, no key": lambda: show(Stand([0, 0]).decode().lane(0).layout),
    "lists, one key": lambda: show(Stand([1], page=1).decode().lane(0).layout),
    "lists, 40 requests": lambda: show(Stand(MANY, page=1).decode().lane(1).layout),
    "lists, 24 requests": lambda: show(Stand(MANY[:24], page=16).decode().lane(1).layout),
    "lists, 5,000 keys": lambda: show(long().decode().lane(1).layout),
    "lists, scattered": lambda: show(scattered(3, 5000, spare=9000)),
    "lists, half scattered": lambda: show(scattered(14, 100, spare=40, run=5)),
    "lists, sunk": lambda: show(sunk()),
    "lists, a million": lambda: show(Stand([1_000_000, 5000], page=64).decode().lane(1).layout),
    "tree": lambda: show(tree(list(TREE), 2047)),
    "tree, all keys": lambda: show(tree(list(TREE), 2047, layer=1, texts="drafts")),
    "tree, texts": lambda: show(tree(list(TREE), 2047, texts="all")),
    "tree, one key": lambda: show(tree(list(TREE), 1, window=3)),
    "tree, nothing cached": lambda: show(tree(list(TREE), 0, window=3)),
    "tree, window beyond": lambda: show(tree(list(TREE), 700, window=128)),
    "tree, chunk": lambda: show(tree(list(TREE), 62, window=None, chunk=64)),
    "tree, page 64": lambda: show(tree(list(TREE), 300, page=64)),
    "tree of 64": lambda: show(tree(BUSHY, 2047, window=128)),
    "tree of 64, texts": lambda: show(tree(BUSHY, 2000, layer=1, texts="all")),
    "tree of 300": lambda: show(tree([-1, *(i // 3 for i in range(299))], 2047, window=128)),
    "star": lambda: show(tree([-1, *[0] * 23], 30)),
    "chain": lambda: show(chain(5, 300)),
    "chain of 64": lambda: show(chain(64, 300, window=32)),
    "chain of 64, wide": lambda: show(chain(64, 3000, window=1000)),
    "chain of 1": lambda: show(chain(1, 3)),
    "chain of 2": lambda: show(chain(2, 1, page=1)),
    "no tree": lambda: show(no_tree()),
    "no draft": lambda: show(tree([], 12)),
    "no draft at all": lambda: show(Stand([12, 3]).tree([[], []])),
    "no request": lambda: show(Stand([]).tree([])),
    "plan": lambda: show(Stand([50, 40], spare=13, window=8).tree([[], TREE])),
}
every_picture = pytest.mark.parametrize("name", PICTURES)


@cache
def picture_of(name: str) -> Picture:
    return PICTURES[name]()


@cache
def svg_of(name: str) -> str:
    return picture_of(name).to_svg()


# ---------------------------------------------------------------- titles


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith("decode")])
def test_the_title_of_a_decode_is_what_the_plan_explains(name, layer):
    made, plan = PLANS[name]()
    for request, length in enumerate(LENS):
        title = show(made.view(plan, request=request, layer=layer)).title
        if not length:
            assert title == f"Request r{request} is a padded row: it has no query and reads nothing"
            continue
        old, new, _ = read_by(plan, request, 0, layer)
        keys = [*old, *new]
        said = digits(title.rpartition(": ")[2].replace("one key", "1 key"))
        if "reads all" in title or "still reads" in title:
            assert said == [length - 1, length] and keys == list(range(length))
        elif "its own" in title:
            assert said == [length - 1, 1] and keys == [length - 1]
        else:
            assert said == [length - 1, len(keys), length, keys[0], keys[-1]] and len(keys) < length
            assert keys == list(range(keys[0], length))
        sight = plan.lane(layer).layout.sight
        assert title.startswith(f"{str(sight).capitalize()}: ") == sight.partial


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", [name for name in PLANS if not name.startswith("decode")])
def test_the_title_of_several_queries_is_what_the_plan_explains(name, layer):
    made, plan = PLANS[name]()
    prefix, new = prefix_and_new(plan)
    for request, count in enumerate(new):
        title = show(made.view(plan, request=request, layer=layer)).title
        if not count:
            assert "has no new token in this step" in title
            continue
        readings = [read_by(plan, request, query, layer) for query in range(count)]
        union = {position for old, _, _ in readings for position in old}
        most = max(len(fresh) for _, fresh, _ in readings)
        words = title.rpartition(": ")[2]
        assert digits(words)[0] == count
        if not prefix[request]:
            assert "no cached key, as there is none" in words
        elif len(union) == prefix[request]:
            assert f"all {prefix[request]:,} cached keys" in words
        else:
            assert f"{len(union) or 'none'} of {prefix[request]:,} cached keys" in words
        assert (f"up to {most} new ones" if most > 1 else "itself") in words


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("decode", "Window 128: the query at 387 reads 128 of 388 keys, 260 to 387"),
        ("decode, young", "Window 128: the query at 39 still reads all 40 keys"),
        ("decode, window 1", "Window 1: the query at 8 reads one key, its own"),
        ("decode, chunk", "Chunk 64: the query at 387 reads 4 of 388 keys, 384 to 387"),
        ("extend", "Window 128: 16 queries read 127 of 388 cached keys and up to 16 new ones each"),
        ("extend, one", "Window 128: 1 query reads all 20 cached keys and itself"),
        ("extend, no new", "Request r2 has no new token in this step, so none of its 700 keys is read"),
        ("verify", "Window 8: 13 drafts read 7 of 200 cached keys and up to 4 new ones each"),
        ("lists, no request", "There is no request in the batch, so there is no list"),
        ("lists, no key", "No request has a key to read: all 2 lists are empty"),
        ("lists, one key", "One list names the only key at one slot"),
        ("lists, sunk", "2 entries of the lists name slot 0, where no key is"),
        ("tree", "Window 8: drafts see 7 to 4 of 2,047 cached keys, one less with every step down"),
        ("tree, all keys", "Each of 13 drafts sees all 2,047 cached keys and its own path, no other branch"),
        ("tree, chunk", "Chunk 64: drafts see 62 to 0 of 62 cached keys"),
        ("tree, nothing cached", "Window 3: no key is cached, and each of 13 drafts sees up to 3 drafts of its path"),
        ("chain of 1", "The only draft sees all 3 cached keys and itself"),
        ("chain of 2", "A chain of 2 drafts: each sees the only cached key and every draft before it"),
        (
            "chain of 64",
            "Window 32: drafts see 31 to 0 of 300 cached keys, one less with every step down until none is left",
        ),
        ("no tree", "The mask is no tree: draft 2 sees others than its path to the root"),
        ("no draft", "Request r0 has no draft to verify"),
        ("no draft at all", "No request of the batch has a draft to verify"),
        ("no request", "No request of the batch has a draft to verify"),
    ],
)
def test_titles_of_particular_plans(name, title):
    assert picture_of(name).title == title


def test_the_title_of_lists_counts_what_is_in_them():
    plan = stand().decode()
    layout = plan.lane(0).layout
    count, keys, runs, older = digits(show(layout).title)
    offsets, slots = layout.index.indptr.tolist(), layout.index.slots.tolist()
    lists = [slots[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
    pieces = sum(1 + sum(b != a + 1 for a, b in zip(mine, mine[1:], strict=False)) for mine in lists if mine)
    assert (count, keys, runs) == (6, offsets[-1], pieces)
    assert older == sum(LENS) - offsets[-1]
    assert "leave" not in show(plan.lane(1).layout).title


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["verify, tree", "verify, chain", "verify, chunk"])
def test_the_title_of_a_tree_is_what_the_plan_explains(name, layer):
    _, plan = PLANS[name]()
    prefix, new = prefix_and_new(plan)
    for request, count in enumerate(new):
        if not count:
            continue
        title = show(TreeView.of(plan, request=request, layer=layer)).title
        seen = [len(read_by(plan, request, query, layer)[0]) for query in range(count)]
        if not prefix[request]:
            assert "no cached key, as there is none" in title or "no key is cached" in title
        elif " to " in title:
            most, least, cached = digits(title.rpartition(": ")[2])[:3]
            assert (most, least, cached) == (max(seen), min(seen), prefix[request])
        else:
            numbers = digits(title.rpartition(": ")[2])
            assert set(seen) <= set(numbers) and prefix[request] in numbers


def test_a_plan_that_the_pool_has_left_behind_says_so():
    picture = picture_of("decode, moved")
    assert re.fullmatch(r"\d+ keys of r1 are not where the plan reads: the pool has moved on", picture.title)
    assert "The plan is of an older epoch than the pool." in svg_of("decode, moved")
    assert "older epoch" not in svg_of("decode")


# ---------------------------------------------------------------- what is drawn


def test_a_plan_shows_its_first_request_with_drafts_in_a_layer_with_a_window():
    assert "the drafts of request r1" in svg_of("plan") and picture_of("plan").title.startswith("Window 8: ")


def test_a_plan_shows_any_request_in_any_layer_and_says_that_there_are_others():
    made = Stand([30, 0, 40], spare=3, page=4, window=8)
    plan = made.tree([[-1, 0, 0], [], [-1, 0, 1]])
    for request, layer in ((0, 0), (2, 0), (2, 1)):
        picture, view = show(plan, request=request, layer=layer), TreeView.of(plan, request=request, layer=layer)
        assert picture.title == show(view).title and view.requests == 2
        assert picture.title.startswith(f"Request r{request}, one of 2. ")
    assert show(plan).title == show(plan, request=0, layer=0).title
    with pytest.raises(ValueError, match="request: "):
        show(plan, request=7)


def test_the_note_follows_a_key_and_counts_what_slid_out():
    made, plan = stand(), stand().decode()
    full = int(made.table.slots[made.rows[0], 260])
    sliding = int(made.pool.translation(0).apply(torch.tensor([full])))
    assert f"Key 260 lies in slot {full:,} (full), that is slot {sliding:,} (sliding)." in svg_of("decode")
    assert "16 pages slid out of the sliding storage: their keys map to 0, the sink." in svg_of("decode")
    assert plan.explain(0)[0].keys[0] == (260, sliding)


def test_links_lead_from_every_page_of_one_bar_to_its_page_in_the_next():
    view = stand().view(stand().decode())
    bars = Bars.of(view, WindowAxis.of(edge=view.edge, cached=view.cached, tokens=view.tokens))
    assert sum(link.pages for link in links(bars, 0)) == len(view.pieces)
    assert sum(link.pages for link in links(bars, 1)) == len(view.pieces) - view.gone
    for level in (0, 1):
        assert all(0 <= end <= PLOT_WIDTH + 1e-9 for link in links(bars, level) for end in (*link.upper, *link.lower))
    assert [state for state in bars.states if state == "gone"] == ["gone"] * view.gone
    parts = [part for stretch in bars.stretches() for part in bars.cut(*stretch)]
    assert sum(b - a for a, b, kind in parts if kind == "read") == 128
    assert sum(b - a for a, b, _ in parts) == 388


@given(st.integers(0, 6000), st.integers(0, 6000), st.integers(0, 600))
def test_the_axis_keeps_order_and_gives_every_part_a_width(edge, seen, new):
    cached, tokens = edge + seen, edge + seen + new
    axis = WindowAxis.of(edge=edge, cached=cached, tokens=tokens)
    ends = axis.x([0, edge, cached, tokens])
    assert ends[0] == 0 and (not tokens or ends[-1] == 1) and (np.diff(ends) >= 0).all()
    for size, width in zip((edge, seen, new), np.diff(ends), strict=True):
        assert (width > 0) == (size > 0)
    assert len(axis.seams()) <= 2
    assert (new < 2 or not tokens > new) or ends[3] - ends[2] > 0.9 * min(0.1, 0.002 * new)


@given(st.lists(st.tuples(st.floats(0, 8), st.floats(0.1, 1)), max_size=12))
def test_labels_that_are_spread_do_not_meet(wanted):
    kept = sorted((m - w / 2, m + w / 2) for (m, w), free in zip(wanted, spread(wanted, 0.05), strict=True) if free)
    assert all(a[1] < b[0] for a, b in zip(kept, kept[1:], strict=False))
    assert bool(kept) == bool(wanted)


def test_seams_are_told_where_they_are():
    assert "from here on a key is 38× wider" in svg_of("decode, 5,000 keys")
    assert "from here on a key is " in svg_of("extend, 4 after 5,000, all")
    assert "from here on" not in svg_of("decode") and "from here on" not in svg_of("extend")


def test_of_many_requests_the_longest_lists_keep_a_row():
    view = IndexView.of(Stand(MANY, page=1).decode().lane(1).layout)
    kept, folded = rows_of(view)
    assert kept == sorted(kept) and len(kept) == 8 and sorted(kept + folded) == list(range(40))
    assert min(MANY[r] for r in kept) >= max(MANY[r] for r in folded)
    assert "32 others" in svg_of("lists, 40 requests")
    assert rows_of(IndexView.of(Stand(MANY[:24], page=16).decode().lane(1).layout)) == (list(range(24)), [])


def test_marks_of_lists_are_explained_where_they_occur():
    assert "Striped: runs too short" in svg_of("lists, scattered") and "Striped" not in svg_of("lists")
    assert "Hatched: padding up to a tile’s border." in svg_of("lists, one pass") and "padding" not in svg_of("lists")
    assert "older keys are out of the window" in svg_of("lists") and "older" not in svg_of("lists, all keys")
    assert "older keys are out of the chunk" in svg_of("lists, chunk")
    assert ">never read<" in svg_of("lists, one pass") and ">never read<" not in svg_of("lists")


@given(st.lists(st.floats(0.001, 0.3), max_size=30))
def test_blocks_are_drawn_by_themselves_or_joined_but_never_lost(widths):
    edges = np.cumsum([0.0, *widths])
    edges = np.stack([edges[:-1], edges[1:]], axis=-1)
    alone, joined = apart(edges)
    shown = sum(edges[alone, 1] - edges[alone, 0]) + sum(joined[:, 1] - joined[:, 0])
    assert shown == pytest.approx(sum(widths))


@given(st.integers(0, 400), st.integers(1, 40), st.integers(1, 200))
def test_columns_of_cached_keys_cover_them_once(prefix, drafts, size):
    view = _chain(prefix, drafts, size)
    columns = columns_of(view)
    covered = [key for column in columns for key in range(column.start, column.stop)]
    assert covered == list(range(prefix))
    assert all(a.left + a.width == b.left for a, b in zip(columns, columns[1:], strict=False))


def _chain(prefix: int, drafts: int, size: int) -> TreeView:
    sight = Sight(window=size)
    view = chain(1, 1)
    made = [
        dataclasses.replace(view.drafts[0], number=i, depth=i, position=prefix + i, first=sight.first(prefix + i))
        for i in range(drafts)
    ]
    return dataclasses.replace(view, sight=sight, prefix=prefix, drafts=tuple(made), order=tuple(range(drafts)))


def test_the_windows_edge_follows_the_position_of_every_draft():
    view = tree(list(TREE), 2047)
    figure = show(view).figure()
    (edge,) = [line for ax in figure.axes for line in ax.lines if line.get_color() == style.LIGHT.accent]
    panels = Panels.of(style.LIGHT, view)
    firsts = [2047 + view.drafts[number].depth - 7 for number in view.order]
    assert edge.get_xdata()[::2] == pytest.approx([panels.x(first) for first in firsts])


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK], ids=lambda theme: theme.name)
def test_depths_have_shades_that_stand_out(theme):
    for depth in (0, 1, 3, 63):
        ramp = ramp_of(theme, depth)
        assert len(ramp) == 1 + max(1, depth)
        assert min(style.contrast(shade, theme.paper) for shade in ramp) > 1.6
        assert min(style.contrast(style.text_on(shade), shade) for shade in ramp) >= 4.4


def test_the_mouse_finds_queries_lists_and_drafts():
    assert "<title>query 3 at 391: 124 cached (264 to 387) + 4 new<" in svg_of("extend")
    assert "<title>r1: 40 keys, positions 0 to 39, in 1 run: 48–87<" in svg_of("lists")
    assert "<title>draft 4 “·and” at 2,049, after 1: sees 5 cached keys and drafts 0, 1, 4<" in svg_of("tree, texts")


def test_a_statement_can_be_false():
    """Another list under the same lengths gives another title."""
    view = stand().view(stand().decode())
    late = dataclasses.replace(view.queries[0], old=((300, 387),))
    changed = dataclasses.replace(view, queries=(late,), read=((300, 387),))
    assert statement(changed) == "Window 128: the query at 387 reads 88 of 388 keys, 300 to 387"
    assert statement(view) != statement(changed)


# ---------------------------------------------------------------- files and text


@every_picture
def test_an_svg_stands_alone(name):
    picture, svg = picture_of(name), svg_of(name)
    root = ElementTree.fromstring(svg)
    assert (root[0].text, root[1].text) == (picture.title, picture.alt)
    assert picture.alt
    plain = re.sub(r"data:image/png;base64,[^\"]+", "", svg)
    assert "<metadata" not in svg and "<style" not in svg
    assert set(re.findall(r'(\S+)="https?://', plain)) <= {"xmlns", "xmlns:xlink"}
    assert set(re.findall(r'(?:href="|url\()([^#"]{0,5})', svg)) <= {"data:", ""}
    ids = re.findall(r' id="([^"]*)"', svg)
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(re.findall(r'(?:href="|url\()#([^")]*)', svg))
    assert len(svg.encode()) < 120_000


@pytest.mark.parametrize("name", ["extend", "verify", "lists", "tree", "chain of 64"])
def test_an_svg_is_the_same_each_time(name):
    assert picture_of(name).to_svg() == svg_of(name)


@pytest.mark.parametrize(
    ("theme", "fonts"), [("light", style.FONTS), ("dark", style.FONTS[-1:])], ids=["light", "dark, widest font"]
)
@every_picture
def test_no_text_collides_or_leaves_the_canvas(name, theme, fonts, monkeypatch):
    monkeypatch.setattr(style, "FONTS", fonts)
    assert not faults(picture_of(name).figure(theme))


@every_picture
def test_captions_are_true_in_both_themes(name):
    texts = [text.get_text() for text in picture_of(name).figure().texts]
    assert not re.search(r"\b(dark|darker|white|black)\b", " ".join(texts).lower())
    assert max(text.count("\n") for text in texts) <= 1


def test_pictures_show_one_thing_each():
    view = stand().view(stand().decode())
    layout, drafts = stand().decode().lane(0).layout, tree([-1], 3)
    with pytest.raises(ValueError, match="the window layout of 1 request, got 2"):
        show(view, view)
    with pytest.raises(ValueError, match="the lists of 1 layout, got 2"):
        show(layout, layout)
    with pytest.raises(ValueError, match="the drafts of 1 request, got 2"):
        show(drafts, drafts)
    assert {"WindowView", "KVLayout", "IndexView", "ExtendLane", "TreeView", "VerifyPlan"} <= set(show.types())


def test_lists_of_a_broken_layout_are_refused():
    layout = scattered(2, 3)
    index = dataclasses.replace(layout.index, indptr=torch.tensor([0, 5, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="layout.validate"):
        show(dataclasses.replace(layout, index=index))


@pytest.mark.parametrize("name", ["extend", "decode, 5,000 keys", "lists, 40 requests", "tree", "tree of 64"])
def test_redraw_time_is_reported(name, record_property):
    picture, start = picture_of(name), time.process_time()
    picture.to_svg()
    record_property("redraw_seconds", round(time.process_time() - start, 3))
    record_property("svg_bytes", len(svg_of(name).encode()))
