"""Every type that can be shown: its picture draws in both themes, stands alone and says what it shows.

A new kind of picture comes in by an example here; without one, these tests fail.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import cache
from typing import Any

import pytest
import torch

import attnlab
from attnlab import graphs
from attnlab.inspect.draft_view import DraftView
from attnlab.inspect.graph_view import GraphView
from attnlab.inspect.index_view import IndexView
from attnlab.inspect.page_map import PageMap
from attnlab.inspect.record import Scores
from attnlab.inspect.tree_view import TreeView
from attnlab.inspect.window_view import WindowView
from attnlab.plots.picture import Picture
from attnlab.plots.schedule_view import schedule_views
from attnlab.plots.show import show
from attnlab.plots.style import THEMES
from tests.test_bench import result as bench_result
from tests.test_plots import faults


@cache
def examples() -> dict[str, Any]:
    """Return a value of every type, by the name that it is registered under."""
    wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="static", engine="eager")
    with wb.record(scores=Scores(pool="key")) as trace:
        wb.decode(18)
    narrow = attnlab.workbench(
        "SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager", kv_dtype=torch.float8_e4m3fn
    )
    with narrow.record(scores=True) as small:
        narrow.decode(18)
    plan, table = wb.plan(), wb.table
    lane = plan.lane(18)
    extended = wb.backend.plan(attnlab.ExtendBatch.of(rows=table.rows[:2], prefix=[290, 40], new=[10, 0], device="cpu"))
    drafts = {"rows": table.rows[:1], "prefix": [290], "parents": [[-1, 0, 0, 2]], "device": "cpu"}
    verified = wb.backend.plan(attnlab.VerifyBatch.tree(**drafts))
    shape = graphs.DecodeShape(requests=2)
    graph = graphs.capture(wb.backend, lambda plan: (), shape, inputs={}, rerun=True)
    graph.plan(attnlab.DecodeBatch.of(rows=table.rows[1:2], lens=[40], device="cpu"))
    drafted = wb.backend.plan(attnlab.DraftBatch.of(rows=table.rows[1:2], lens=[33], topk=2, steps=3, device="cpu"))
    values = [
        *(wb, plan, lane, lane.splits, lane.splits.to_host(), schedule_views(wb)[0]),
        *(wb.merge(18, request=0, head=3), wb.scores(18, request=0), wb.stages(18, request=1, head=3)),
        *(trace, trace.call(18), attnlab.compare(trace, small), attnlab.heads(trace)),
        *(wb.pool.allocator, PageMap.of(wb.pool.allocator)),
        *(lane.layout, IndexView.of(lane.layout), extended.lane(18)),
        *(verified, TreeView.of(verified, request=0, layer=18)),
        *(graph, GraphView.of(graph)),
        *(drafted, DraftView.of(drafted, request=0, layer=18)),
        bench_result({"decode-64x4k": 12.0, "decode-1x8k": 3.0}),
        WindowView.of(pool=wb.pool, table=table, model=wb.model, plan=plan, request=0, layer=18),
    ]
    return {f"{type(value).__module__}.{type(value).__qualname__}": value for value in values}


def registered() -> list[str]:
    """Return the types of the package; tests and docstrings register their own."""
    owners = show._draws._owners
    return sorted(name for name, owner in owners.items() if owner.startswith("attnlab.") and owner != show.__module__)


TYPES = registered()
every_type = pytest.mark.parametrize("name", TYPES)


@cache
def picture_of(name: str) -> Picture:
    assert name in examples(), f"{name} can be shown, but has no example in {__file__}"
    return show(examples()[name])


def test_every_example_is_of_a_type_that_can_be_shown() -> None:
    assert set(examples()) == set(TYPES)


@every_type
def test_a_picture_says_what_it_shows(name: str) -> None:
    picture = picture_of(name)
    assert 20 < len(picture.title) < 110 and not picture.title.endswith(".")
    assert len(picture.alt) > 40 and picture.alt.endswith(".")


@every_type
@pytest.mark.parametrize("theme", THEMES)
def test_a_picture_is_legible_and_stands_alone(name: str, theme: str) -> None:
    picture = picture_of(name)
    assert not faults(picture.figure(theme))
    svg = picture.to_svg(theme=theme)
    root = ElementTree.fromstring(svg)
    assert (root[0].text, root[1].text) == (picture.title, picture.alt)
    assert "<script" not in svg and len(svg) < 250_000


@every_type
def test_a_picture_is_the_same_each_time(name: str) -> None:
    assert show(examples()[name]).to_svg() == picture_of(name).to_svg()


@every_type
def test_an_option_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        show(examples()[name], nonsense=1)
