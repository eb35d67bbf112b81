"""Pictures of scores and of pools: views are exact, titles true, text legible, files stand alone."""

import base64
import dataclasses
import io
import math
import random
import re
import time
import xml.etree.ElementTree as ElementTree
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import attnlab
from attnlab.eager import oracle
from attnlab.inspect.page_map import PageMap
from attnlab.inspect.record import Scores
from attnlab.inspect.samples import Sample
from attnlab.inspect.score_view import ScoreView, StageView
from attnlab.memory.slots import SlotAllocator
from attnlab.plots import style
from attnlab.plots.attention import attention
from attnlab.plots.attention_facts import Cells, induction, strongest, zoom_of
from attnlab.plots.color_map import score_scale, weight_scale
from attnlab.plots.page_grid import Grid, cell_owner, pixels_of
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.stage_facts import columns_of, score_limit, stated
from attnlab.plots.stages import rows_of, stages
from attnlab.trace import STAGES, CallTrace, Trace
from tests.test_plots import digits, faults
from tests.tolerances import OUTPUT

LENS = (2048, 40, 300)
GROUP = 3


@cache
def trace() -> Trace:
    """Return the recorded model's scores at every stage, with the texts of three requests."""
    wb = attnlab.workbench("SmolLM2-135M", lens=list(LENS), policy="seed", engine="eager")
    with wb.record(scores=Scores(stages=STAGES, pool="key")) as made:
        for layer in wb.layers:
            wb.decode(layer)
    return made


def text(request: int) -> tuple[str, ...]:
    """Return the texts of a workbench's request: it ends 17 tokens earlier than the one before."""
    tokens = Sample.load("long").tokens
    end = len(tokens) - 17 * request
    return tokens[end - LENS[request] : end]


def scores(layer: int = 18, request: int = 0) -> ScoreView:
    return ScoreView.of(trace(), layer=layer, request=request)


def head_stages(layer: int = 18, request: int = 0, head: int = 3) -> StageView:
    return StageView.of(trace(), layer=layer, request=request, head=head)


def drawn(
    heads: int, kv_heads: int, keys: int, *, tokens: bool = False, sink: bool = False, page: int = 1
) -> ScoreView:
    """Return a view of seeded scores, loud on some first and on the last keys."""
    generator = torch.Generator().manual_seed(heads + keys)
    loud = torch.randn(heads, keys, generator=generator) * 2
    loud[:, :1] += 8 * torch.rand(heads, 1, generator=generator)
    loud[:, -20:] += 3
    weights = torch.softmax(loud, 1) * (torch.rand(heads, 1, generator=generator) if sink else 1)
    step = max(1, keys // 7)
    words = Sample.load("long").tokens
    return ScoreView(
        layer=3,
        request=1,
        query=keys - 1,
        kv_heads=kv_heads,
        page_size=page,
        weights=weights,
        ranges=tuple((a, min(keys, a + step)) for a in range(0, keys, step)),
        tokens=tuple(words[i % len(words)] for i in range(keys)) if tokens else (),
    )


def paged(heads: int, kv_heads: int, keys: int) -> ScoreView:
    """Return the same, as recorded by page."""
    view = drawn(heads, kv_heads, keys, page=16)
    sums = np.add.reduceat(view.weights.numpy(), range(0, keys, 16), axis=1)
    return dataclasses.replace(view, weights=torch.from_numpy(sums), pool="page")


def weighing(rows: list[list[float]]) -> ScoreView:
    """Return a view of these weights, under one KV head."""
    return dataclasses.replace(drawn(len(rows), 1, len(rows[0])), weights=torch.tensor(rows))


def made_stages(
    raw: list[float], *, scale: float = 0.5, hidden: tuple[int, ...] = (), cap: float | None = None
) -> StageView:
    """Return a view of these dot products, run through the stages."""
    x = torch.tensor(raw)
    capped = None if cap is None else cap * torch.tanh(x * scale / cap)
    masked = (x * scale if capped is None else capped).clone()
    masked[list(hidden)] = -math.inf
    weights = torch.softmax(masked, 0) if masked.isfinite().any() else torch.zeros(len(raw))
    return StageView(
        layer=2,
        request=0,
        query=len(raw) - 1,
        head=1,
        kv_head=0,
        scale=scale,
        raw=x,
        scaled=x * scale,
        capped=capped,
        masked=masked,
        weights=weights,
    )


def windowed(view: StageView, window: int, cap: float | None = None) -> StageView:
    """Return the stages as they would be with a cap, and with all keys but the last `window` masked."""
    capped = None if cap is None else cap * torch.tanh(view.scaled / cap)
    masked = (view.scaled if capped is None else capped).clone()
    masked[:-window] = -math.inf
    return dataclasses.replace(view, capped=capped, masked=masked, weights=torch.softmax(masked, 0))


def pool(pages: int, size: int, *, owners: int, seed: int = 1) -> SlotAllocator:
    """Return an allocator after many requests have come, grown and gone."""
    rng, slots = random.Random(seed), SlotAllocator(num_slots=pages * size, page_size=size)
    for _ in range(40 * owners):
        owner = rng.randrange(owners)
        if owner in slots.owners and rng.random() < 0.15:
            slots.release(owner)
        elif slots.free_pages > pages // 6:
            slots.allocate(owner, rng.randint(1, max(1, pages * size // (6 * owners))))
    return slots


def odd_names() -> PageMap:
    names = {i: f"chat {i} of $somebody$ & <others>" for i in range(4)}
    return PageMap.of(pool(64, 16, owners=4), names=names, highlight=2)


PICTURES = {
    "sink layer": lambda: show(scores()),
    "diffuse layer": lambda: show(scores(0)),
    "40 real keys": lambda: show(scores(18, 1)),
    "300 real keys": lambda: show(scores(23, 2)),
    "enlarged elsewhere": lambda: attention(scores(0), zoom=1000),
    "enlarged at the start": lambda: attention(scores(), zoom=0),
    "by split": lambda: attention(scores(), pool="split"),
    "recorded by page": lambda: show(wished()),
    "recorded by split": lambda: show(wished(pool="split").call(18)),
    "pages of 131,072 keys": lambda: show(paged(32, 8, 131_072)),
    "a page": lambda: show(paged(2, 1, 9)),
    "by key": lambda: attention(scores(18, 2), pool="key"),
    "no key": lambda: show(drawn(9, 3, 0)),
    "one key": lambda: show(drawn(9, 3, 1, tokens=True)),
    "one key, one head": lambda: show(drawn(1, 1, 1)),
    "49 keys": lambda: show(drawn(9, 3, 49, tokens=True)),
    "one head": lambda: show(drawn(1, 1, 700, tokens=True)),
    "131,072 keys": lambda: show(drawn(32, 8, 131_072)),
    "128 heads": lambda: show(drawn(128, 128, 1000)),
    "128 heads, 8 KV heads": lambda: show(drawn(128, 8, 5000, tokens=True)),
    "128 heads, one KV head": lambda: show(drawn(128, 1, 3000)),
    "20 KV heads": lambda: show(drawn(40, 20, 333, tokens=True)),
    "sinks without a key": lambda: show(drawn(8, 2, 257, sink=True, page=16)),
    "stages": lambda: show(head_stages()),
    "diffuse stages": lambda: show(head_stages(0, 0, 5)),
    "stages elsewhere": lambda: stages(head_stages(0, 0, 5), zoom=700),
    "stages at the start": lambda: stages(head_stages(), zoom=0),
    "stages in a window": lambda: show(windowed(head_stages(), 32)),
    "stages with a cap": lambda: show(windowed(head_stages(), 64, cap=5.0)),
    "stages without texts": lambda: show(dataclasses.replace(head_stages(18, 2, 2), tokens=())),
    "stages of 40 keys": lambda: show(head_stages(18, 1, 0)),
    "stages of 3 keys": lambda: show(made_stages([1.0, 2.0, -3.0], cap=2.0)),
    "stages of one key": lambda: show(made_stages([0.0])),
    "stages of no key": lambda: show(made_stages([])),
    "everything masked": lambda: show(made_stages([0.5] * 60, hidden=tuple(range(60)))),
    "pool": lambda: show(pool(128, 16, owners=9)),
    "pool of 256 pages": lambda: show(pool(256, 16, owners=30)),
    "pool of 257 pages": lambda: show(pool(257, 16, owners=30)),
    "pool of 4,096 pages": lambda: show(pool(4096, 16, owners=40)),
    "pool of 20,000 pages": lambda: show(pool(20_000, 16, owners=12)),
    "pool of 121 slots": lambda: show(pool(121, 1, owners=3)),
    "pool of 3,000 slots": lambda: show(pool(3000, 1, owners=3)),
    "empty pool": lambda: show(SlotAllocator(num_slots=512, page_size=16)),
    "smallest pool": lambda: show(SlotAllocator(num_slots=2, page_size=1)),
    "empty pool of 100,000 slots": lambda: show(SlotAllocator(num_slots=100_000, page_size=1)),
    "odd names": lambda: show(odd_names()),
}
every_picture = pytest.mark.parametrize("name", PICTURES)


@cache
def picture_of(name: str) -> Picture:
    return PICTURES[name]()


@cache
def svg_of(name: str) -> str:
    return picture_of(name).to_svg()


# ---------------------------------------------------------------- views are exact


@pytest.mark.parametrize("layer", [0, 18, 23])
@pytest.mark.parametrize("request_", range(3))
def test_weights_are_those_of_dense_attention(layer, request_):
    view, sample = scores(layer, request_), Sample.load("long").layer(layer)
    end = 2048 - 17 * request_
    q, k = sample.q[end - 1 - sample.first_query], sample.k[end - LENS[request_] : end]
    _, lse = oracle.attention(q, k, k, scale=0.125)
    dots = torch.einsum("hd,nhd->hn", q.double(), k.double().repeat_interleave(GROUP, 1))
    want = torch.exp(dots * 0.125 - lse[:, None])
    torch.testing.assert_close(view.weights.double(), want, **OUTPUT[torch.float32])
    assert (view.heads, view.kv_heads, view.group, view.keys) == (9, 3, 3, LENS[request_])
    assert (view.query, view.tokens) == (LENS[request_] - 1, text(request_))
    torch.testing.assert_close(view.share(0, 20), want[:, :20].sum(1), **OUTPUT[torch.float32])


def test_stages_are_those_of_one_head():
    view, sample = head_stages(18, 2, 7), Sample.load("long").layer(18)
    q, k = sample.q[2048 - 34 - 1 - sample.first_query], sample.k[2048 - 34 - 300 : 2048 - 34]
    raw = k[:, 7 // GROUP].double() @ q[7].double()
    torch.testing.assert_close(view.raw.double(), raw, **OUTPUT[torch.float16])
    torch.testing.assert_close(view.scaled, view.raw / 8, **OUTPUT[torch.float32])
    torch.testing.assert_close(view.weights, torch.softmax(view.masked, 0), **OUTPUT[torch.float32])
    assert torch.equal(view.masked, view.scaled) and view.capped is None
    assert (view.kv_head, view.head, view.scale, view.keys) == (2, 7, 0.125, 300)


def test_a_cap_is_a_stage_of_its_own():
    spec = attnlab.ModelSpec.load("SmolLM2-135M", page_size=1, kv_dtype=torch.float16).only((3,))
    layer = dataclasses.replace(spec.layers[0], attention=dataclasses.replace(spec.layers[0].attention, softcap=2.0))
    wb = attnlab.workbench(dataclasses.replace(spec, layers=(layer,)), lens=[30], policy="seed", engine="eager")
    with wb.record(scores=Scores(stages=STAGES)) as made:
        wb.decode(3)
    view = StageView.of(made, layer=3, request=0, head=0)
    torch.testing.assert_close(view.capped, 2 * torch.tanh(view.scaled / 2), **OUTPUT[torch.float32])
    assert [row.name for row in rows_of(view, columns_of(view, None))] == ["scaled score", "capped", "masked", "weight"]


def test_a_head_stands_on_its_own_kv_head():
    spec = attnlab.AttentionSpec(heads=8, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25)
    model = attnlab.ModelSpec.uniform(spec, layers=1, context_len=64, page_size=1, kv_dtype=torch.float32)
    wb = attnlab.workbench(model, lens=[30], policy="seed", engine="eager")
    assert [wb.stages(0, request=0, head=head).kv_head for head in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_heads_are_put_in_order():
    wb = attnlab.workbench("SmolLM2-135M", lens=[20], policy="seed", engine="eager")
    order = (8, 0, 3, 1, 2, 4, 5, 6, 7)
    with wb.record(scores=Scores(heads=order)) as made:
        wb.decode(18)
    torch.testing.assert_close(
        ScoreView.of(made, layer=18, request=0).weights[list(order)], made.calls[0].scores[0].values
    )


def wished(**wanted: object) -> Trace:
    wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
    with wb.record(scores=Scores(**wanted)) as made:
        wb.decode(18)
    return made


def test_what_was_not_recorded_is_named_with_what_to_record():
    by_page, some = wished(), wished(pool="key", heads=(1, 2), requests=(1,))
    wish = re.escape("record with scores=Scores(stages=('weights',), pool='key')")
    for made, where, message in (
        (by_page, {"layer": 0, "request": 0}, "layer: this trace has calls of layers 18, got 0"),
        (by_page, {"layer": 18, "request": 2}, "request: the call of layer 18 has requests 0 to 1, got 2"),
        (by_page, {"layer": 18, "request": 0}, f"pool: .* in bins of up to 16 keys, .*; {wish}"),
        (some, {"layer": 18, "request": 0}, f"stage: of request 0, layer 18 has recorded nothing, not weights; {wish}"),
        (some, {"layer": 18, "request": 1}, f"heads: .* of heads 1, 2, not of 0, 3, 4, 5, 6, 7, 8; {wish}"),
    ):
        with pytest.raises(ValueError, match=message):
            ScoreView.of(made, **where)
    with pytest.raises(ValueError, match="has recorded weights, not raw; record with .*'raw', 'scaled', 'capped'"):
        StageView.of(by_page, layer=18, request=1, head=0)
    with pytest.raises(ValueError, match="head: the layer has heads 0 to 8, got 9"):
        StageView.of(trace(), layer=18, request=0, head=9)
    with pytest.raises(ValueError, match="head: .* raw scores of heads 4, not of 3"):
        StageView.of(wished(stages=STAGES, heads=(4,), pool="key"), layer=18, request=0, head=3)


def test_views_refuse_what_does_not_fit():
    view = drawn(4, 2, 10)
    for change, message in (
        ({"kv_heads": 3}, "kv_heads: expected a divisor of the 4 heads, got 3"),
        ({"tokens": ("a",)}, "tokens: expected a text for each of the 10 keys of request 1, or none, got 1"),
        ({"weights": torch.zeros(3)}, r"weights: expected \[heads, keys\], got \[3\]"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(view, **change)
    with pytest.raises(ValueError, match=r"stages: expected \[keys\] each"):
        dataclasses.replace(made_stages([1.0, 2.0]), weights=torch.zeros(3))
    with pytest.raises(ValueError, match="request 1 has 40 keys, but the texts of only 2 tokens"):
        ScoreView.of_call(trace().call(18), request=1, tokens=("a", "b"))


def test_texts_may_go_on_after_the_query():
    call, words = trace().call(18), text(1)
    assert ScoreView.of_call(call, request=1, tokens=(*words, "more")).tokens == words


def test_a_recorded_call_can_be_shown():
    assert show(trace().call(18)).title == show(ScoreView.of_call(trace().call(18), request=0)).title
    assert "of request 1: " in show(wished(pool="key", requests=(1,)).call(18)).alt
    with pytest.raises(ValueError, match="in bins of up to 16 keys, by max; those do not add up"):
        show(wished(requests=(0,), reduce="max").call(18))
    with pytest.raises(ValueError, match="has recorded nothing, not weights"):
        show(Trace(calls=[dataclasses.replace(trace().call(18), scores=())]).call(18))


def test_a_recording_is_its_first_call_with_weights():
    made = trace()
    bare = Trace(calls=[dataclasses.replace(made.calls[0], scores=()), *made.calls], tokens=made.tokens)
    assert show(bare).to_svg() == show(made.call(0)).to_svg() == show(scores(0)).to_svg()
    assert show(made, zoom=100).title == attention(scores(0), zoom=100).title
    with pytest.raises(ValueError, match="no call has weights to show; record with scores=True"):
        show(Trace(calls=[dataclasses.replace(made.calls[0], scores=())]))


def test_a_call_of_a_recording_has_its_texts():
    assert "“·the” at position 2,047" in show(trace().call(18)).alt
    assert "The query is at position 2,047" in show(trace().calls[0]).alt


@pytest.mark.parametrize("pool", ["page", "split"])
def test_pooled_weights_are_shown_by_bin(pool):
    call = wished(pool=pool).call(18)
    view, whole = ScoreView.of_call(call, request=0, by_key=False), ScoreView.of_call(fine_call(), request=0)
    assert (view.pool, view.keys, view.query) == (pool, 300, 299)
    assert view.edges[:2] == ((0, 16) if pool == "page" else (0, view.ranges[0][1]))
    first = view.edges[1]
    torch.testing.assert_close(view.share(0, first), whole.share(0, first), **OUTPUT[torch.float32])
    torch.testing.assert_close(view.share(0, 300), whole.share(0, 300), **OUTPUT[torch.float32])
    picture = show(call)
    low, high, start, end, of = digits(picture.title.split("layer 18")[1])
    shares = whole.share(int(start), int(end) + 1)
    assert (low, high) == pytest.approx([100 * float(x) for x in shares.aminmax()], abs=0.5)
    assert of == 300 and all(shares.sum() >= whole.share(a, b).sum() for a, b in pairwise(view.edges))
    assert f"All 300 keys, recorded as sums by {pool}; one cell is a {pool}" in picture.to_svg()
    assert "<title>q3 (KV 1): keys " in picture.to_svg()
    for option, said in (({"zoom": 3}, "none is known of a key alone"), ({"pool": "key"}, f"recorded by {pool}, got")):
        with pytest.raises(ValueError, match=said):
            show(call, **option)


def fine_call() -> CallTrace:
    return wished(pool="key").call(18)


def test_a_view_knows_positions_from_places_in_its_list():
    """A window's list begins at a later token than 0."""
    moved = dataclasses.replace(fine_call(), start=(7, 0), q_pos=(306, 39))
    words = tuple(f"w{i}" for i in range(400))
    view = ScoreView.of_call(moved, request=0, tokens=words)
    assert (view.query, view.own, view.tokens) == (306, 299, words[7:307])
    assert "The query is “w306” at position 306 of request 0" in show(view).alt
    moved = dataclasses.replace(trace().calls[0], start=(7, 0, 0), q_pos=(2054, 39, 299))
    head = StageView.of_call(moved, request=0, head=0)
    assert (head.query, head.own) == (2054, 2047)


def test_keys_of_a_window_are_called_by_their_positions():
    """A layer that sees 64 of 300 keys: the list begins at 236."""
    spec = attnlab.AttentionSpec(heads=4, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25, window=64)
    model = attnlab.ModelSpec.uniform(spec, layers=1, context_len=512, page_size=1, kv_dtype=torch.float32)
    wb = attnlab.workbench(model, lens=[300], policy="seed", engine="eager")
    view, head = wb.scores(0, request=0), wb.stages(0, request=0, head=3)
    assert (
        (view.start, view.query, view.keys, view.own)
        == (236, 299, 64, 63)
        == (head.start, head.query, head.keys, head.own)
    )
    svg = show(view).to_svg()
    assert "token 236" in show(view).alt and "token 0" not in svg + show(view).alt and ">256</text>" in svg
    assert "<title>key 299: " in svg and "<title>key 299: " in show(head).to_svg()
    assert show(view, zoom=240).alt.endswith("on keys 240 to 287.") and show(head, zoom=240)
    for x in (view, head):
        with pytest.raises(ValueError, match="zoom: expected a key, 236 to 299, .* got 3"):
            show(x, zoom=3)
    torch.testing.assert_close(view.weights.sum(1), torch.ones(4), **OUTPUT[torch.float32])
    assert not faults(show(view).figure()) and not faults(show(head).figure())


# ---------------------------------------------------------------- titles are true


@pytest.mark.parametrize("layer", [0, 18, 23])
@pytest.mark.parametrize("zoom", [None, 0, 700])
def test_the_title_of_attention_is_true(layer, zoom):
    view = scores(layer)
    start = 2000 if zoom is None else zoom
    title = attention(view, zoom=zoom).title
    near = view.weights[:, start : start + 48].double().sum(1) + (view.weights[:, 0].double() if start else 0)
    where = {2000: "token 0 and the last 48", 0: "the first 48 keys", 700: "token 0 and keys 700 to 747"}[start]
    assert title.startswith(f"One query, layer {layer}: ") and title.endswith(where)
    if "at least" in title:
        least = digits(title)[1]
        assert near.min() >= 0.8 and least <= 100 * near.min() < least + 1
    else:
        beyond = 100 * (view.weights.double().sum(1) - near)
        assert near.min() < 0.8
        if low := re.search(r"([\d.]+) to [\d.]+% of a head", title):
            assert float(low[1]) == pytest.approx(float(beyond.min()), abs=0.5)
        else:
            assert "up to" in title and beyond.min() < 0.05
        high = float(re.search(r"([\d.]+)% of a head", title)[1])
        assert high == pytest.approx(float(beyond.max()), abs=0.5)


@pytest.mark.parametrize(
    ("view", "title"),
    [
        (drawn(9, 3, 0), "the request has no key, so there is nothing to read"),
        (drawn(9, 3, 1), "the only key takes all the weight"),
        (weighing([[0.25], [0.5]]), "as little as 25% of the weight"),
        (weighing([[0.75, 0.25]] * 2), "every head gives at least 75%"),
        (weighing([[0.75, 0.25], [0.5, 0.5]]), "every head gives"),
        (weighing([[0.75, 0.25], [0.25, 0.75]]), "1 of 2 heads gives"),
        (weighing([[0.25, 0.75]] * 2), "lies on 2 of 2 keys"),
        (weighing([[0.25, 0.75]]), "the head gives 25% of its weight"),
    ],
)
def test_titles_of_short_requests(view, title):
    assert title in show(view).title


def test_the_title_of_a_short_request_without_a_sink_counts_keys():
    view = scores(18, 1)
    low, high, keys = digits(show(view).title.split("90%")[1])
    weights = view.weights.double().sort(dim=1, descending=True).values.cumsum(1)
    counts = (weights < 0.9).sum(1) + 1
    assert (low, high, keys) == (counts.min(), counts.max(), 40)
    sunk = dataclasses.replace(view, weights=view.weights / 4)
    assert "90% of a head’s weight on keys lies on" in show(sunk).title


@given(st.integers(1, 6), st.integers(1, 400), st.integers(0, 99), st.booleans())
def test_at_least_is_never_too_much(heads, keys, seed, sink):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.softmax(torch.randn(heads, keys, generator=generator) * (1 + seed % 7), 1)
    view = dataclasses.replace(drawn(heads, 1, keys), weights=weights * (0.5 if sink else 1))
    title = show(view).title
    if "at least" in title and "half" not in title:
        near = view.share(0, 1) + (view.share(keys - 48, keys) if keys > 48 else 0)
        assert digits(title)[1] <= 100 * float(near.min()) + 1e-4


def test_weight_on_a_sink_without_a_key_is_not_said_to_be_elsewhere():
    view = dataclasses.replace(drawn(2, 1, 100), weights=torch.full((2, 100), 0.004))
    assert show(view).title.endswith("20% of a head’s weight lies beyond token 0 and the last 48")
    assert "60% goes to its sink, which is no key" in show(view).to_svg()


def test_an_induction_is_pointed_out_only_where_the_rule_holds():
    view = scores()
    head, key = induction(view, zoom_of(view, None))
    assert view.tokens[key - 1] == view.tokens[view.query] and view.weights[head, key] > 0.3
    said = f"q{head}: 76% on “·Apache”, which followed “·the” before (induction)"
    assert said in show(view).to_svg()
    assert induction(view, zoom_of(view, 0)) is None
    assert induction(dataclasses.replace(view, tokens=()), zoom_of(view, None)) is None
    assert induction(dataclasses.replace(view, weights=view.weights / 3), zoom_of(view, None)) is None
    assert induction(scores(0), zoom_of(view, None)) is None


@pytest.mark.parametrize("head", range(9))
@pytest.mark.parametrize("layer", [0, 18, 23])
def test_the_title_of_stages_is_true(layer, head):
    view = head_stages(layer, 0, head)
    title = show(view).title
    weights, order = view.weights.double(), view.scaled.double().sort(descending=True)
    if weights.max() >= 0.5:
        share, lead, factor = re.search(r"gives ([>\d.]+)% .* leads by ([\d.]+), .* of ([\d,.]+|over)", title).groups()
        assert float(share.strip(">")) == pytest.approx(100 * float(weights.max()), abs=0.5)
        assert float(lead) == pytest.approx(float(order.values[0] - order.values[1]), abs=0.051)
        if factor != "over":
            ratio = float(weights.topk(2).values[0] / weights.topk(2).values[1])
            assert float(factor.replace(",", "")) == pytest.approx(ratio, rel=0.05)
    else:
        count, keys, reach = digits(title.split("90%")[1])
        assert keys == 2048
        heaviest = weights.sort(descending=True).values
        assert heaviest[: int(count)].sum() >= 0.9 > heaviest[: int(count) - 1].sum()
        assert (order.values[0] - order.values[: int(count)] <= reach).all()
        assert order.values[0] - order.values[int(count) - 1] > reach - 0.1
    assert title.startswith(f"Head {head} of layer {layer} gives")


def test_titles_of_particular_stages():
    assert show(made_stages([])).title == "Head 1 of layer 2 has no key to score"
    assert show(made_stages([3.0])).title.endswith("gives its only key all of its weight, whatever its score")
    masked = made_stages([3.0, 1.0], hidden=(0, 1))
    assert show(masked).title == "Head 1 of layer 2 has every key masked, so that none has any weight"
    two = made_stages([0.0, 1.0, 1.0, 9.0], hidden=(3,))
    assert "90% of its weight to 3 of 3 unmasked keys, with scores within 0.5 of" in show(two).title
    sunk = dataclasses.replace(two, weights=two.weights / 2)
    rest = "gives its sink 50% of its weight, and 90% of the rest to 3 of 3 unmasked keys"
    assert show(sunk).title == f"Head 1 of layer 2 {rest}"
    alone = dataclasses.replace(made_stages([3.0]), weights=torch.tensor([0.4]))
    assert show(alone).title == "Head 1 of layer 2 gives its only key 40% of its weight, its sink the rest"
    assert "the weight by a factor of over a million" in show(made_stages([100.0, 0.0])).title


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=80))
def test_the_keys_of_the_title_hold_what_it_says(raw):
    view = made_stages(raw)
    weights, said = view.weights.double(), stated(view)
    assert said[0] == int(weights.argmax()) or weights[said[0]] == weights.max()
    if len(said) > 1:
        assert weights[said].sum() >= 0.9 * weights.sum() * (1 - 1e-9)
        assert weights[said[:-1]].sum() < 0.9 * weights.sum()
    else:
        assert weights[said[0]] >= 0.5


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_title_of_a_pool_is_true(size):
    slots = pool(100, size, owners=5)
    pages = {owner: len(set((slots.slots_of(owner) // size).tolist())) for owner in slots.owners}
    owners, taken, row, freed, held = digits(show(slots).title)
    assert (owners, held) == (len(pages), sum(pages.values()))
    assert taken == pytest.approx(100 * held / 99, abs=0.5)
    longest = max(pages, key=slots.tokens_of)
    assert (row, freed) == (longest, pages[longest])


def test_titles_of_particular_pools():
    slots = SlotAllocator(num_slots=12, page_size=4)
    assert show(slots).title == "All 2 pages of the pool are free"
    slots.allocate("mine", 0)
    assert show(slots).title == "All 2 pages of the pool are free"
    slots.allocate("mine", 5)
    assert show(slots).title == "1 request holds 100% of the pool’s pages"
    assert show(SlotAllocator(num_slots=2, page_size=1)).title == "The pool’s only page is free"


# ---------------------------------------------------------------- pools


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=30)


@given(STEPS, st.sampled_from([1, 4, 16]))
def test_a_page_map_is_the_state_of_the_allocator(steps, size):
    slots = SlotAllocator(num_slots=64 * size, page_size=size)
    for owner, tokens, leaves in steps:
        if leaves and owner in slots.owners:
            slots.release(owner)
        elif -(-tokens // size) < slots.free_pages:
            slots.allocate(owner, tokens)
    found = PageMap.of(slots)
    keys = np.zeros(64)
    for owner in slots.owners:
        np.add.at(keys, slots.slots_of(owner).numpy() // size, 1)
    assert (found.keys == keys).all()
    assert (found.used, found.free) == (sum(map(slots.tokens_of, slots.owners)), slots.free_pages * size)
    assert found.used + found.tail + found.free + size == slots.num_slots
    for r, owner in enumerate(slots.owners):
        assert list(found.tables[r]) == list(dict.fromkeys((slots.slots_of(owner) // size).tolist()))
        assert [p for a, b in found.pieces(r) for p in range(a, b + 1)] == list(found.tables[r])
        assert (found.owner[list(found.tables[r])] == r).all() and found.names[r] == f"r{owner}"
    assert found.numbers == tuple(slots.owners)


def test_names_decide_order_and_colour():
    slots = SlotAllocator(num_slots=64, page_size=4)
    for owner in ("b", "a"):
        slots.allocate(owner, 6)
    plain = PageMap.of(slots)
    assert (plain.names, plain.numbers, plain.highlight) == (("b", "a"), (0, 1), 0)
    named = PageMap.of(slots, names={"a": "first", "b": "second"}, highlight="a")
    assert (named.names, named.numbers, named.highlight) == (("second", "first"), (1, 0), 1)
    with pytest.raises(ValueError, match="names: expected a name for every owner, got none for \\['b'\\]"):
        PageMap.of(slots, names={"a": "first"})
    with pytest.raises(ValueError, match="highlight: 'c' holds no slots; owners are \\['b', 'a'\\]"):
        PageMap.of(slots, highlight="c")


def test_a_page_map_refuses_what_no_allocator_is():
    owners = {"names": ("a", "b"), "numbers": (0, 1), "lens": (5, 4), "tables": ((1, 2), (3,))}
    good = {"pages": 8, "page_size": 4, **owners}
    PageMap(**good)
    for change, message in (
        ({"lens": (9, 4)}, "a has 2 pages for 9 keys, which need 3"),
        ({"tables": ((1, 8), (3,))}, r"expected pages 1 to 7 \(page 0 is the sink\), got \[8\]"),
        ({"tables": ((1, 3), (3,))}, "a page is held twice"),
        ({"numbers": (0,)}, "2 names, but numbers, lens and tables of"),
        ({"highlight": 2}, "highlight: expected one of 2 requests, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            PageMap(**good | change)


def test_every_page_is_drawn_once_and_filled_as_far_as_it_has_keys():
    slots = pool(128, 16, owners=9)
    found = PageMap.of(slots)
    grid_axes = show(slots).figure().axes[0]
    boxes = 0
    filled = 0.0
    for patch in grid_axes.patches:
        if str(patch.get_gid()).startswith("hint:r"):
            sides = patch.get_path().vertices.reshape(-1, 5, 2)
            boxes += len(sides)
            filled += float((sides[:, 1, 0] - sides[:, 0, 0]).sum())
    assert boxes == found.held
    width = max(float(v[1, 0] - v[0, 0]) for v in [grid_axes.patches[1].get_path().vertices])
    assert filled / width == pytest.approx(found.used / 16, rel=1e-6)
    svg = show(slots).to_svg()
    assert all(f"  {count:,}<" in svg for count in (found.used, found.tail, found.free))


@pytest.mark.parametrize("pages", [300, 2000, 9001])
def test_pooled_cells_have_the_owner_of_most_keys(pages):
    found = PageMap.of(pool(pages, 8, owners=7))
    grid = Grid.of(found)
    keys, owner = cell_owner(found, grid)
    assert grid.cells * grid.together >= pages > (grid.cells - 1) * grid.together and grid.cells <= 4096
    for cell in range(0, grid.cells, 37):
        mine = slice(cell * grid.together, (cell + 1) * grid.together)
        by_owner = np.bincount(found.owner[mine], weights=found.keys[mine], minlength=len(found.names))
        assert keys[cell] == by_owner.sum()
        assert owner[cell] == (by_owner.argmax() if 2 * by_owner.max() > keys[cell] else -1)


def test_pixels_have_the_colours_of_requests_and_free_cells_none():
    found = PageMap.of(pool(400, 4, owners=5))
    grid = Grid.of(found)
    pixels = pixels_of(style.LIGHT, found, grid)
    middle = pixels[6::14, 3::40].reshape(-1, 4)[: grid.cells]
    colors = ["#{:02X}{:02X}{:02X}".format(*rgba[:3]) for rgba in middle.tolist()]
    full = found.keys == 4
    assert colors[0] == style.LIGHT.ink
    assert {colors[p] for p in np.flatnonzero(found.keys[1:] == 0) + 1} <= {style.LIGHT.paper}
    assert all(colors[p] == style.LIGHT.request(found.numbers[found.owner[p]]) for p in np.flatnonzero(full))


# ---------------------------------------------------------------- what is drawn


def test_cells_sum_their_keys():
    view = drawn(4, 2, 1000)
    for kind, edges in (
        (None, (*range(0, 1000, 16), 1000)),
        ("split", (*range(0, 1000, 142), 1000)),
        ("key", (*range(0, 1000, 4), 1000)),
    ):
        cells = Cells.of(view, kind)
        assert cells.edges == edges
        for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
            torch.testing.assert_close(torch.from_numpy(cells.weights[:, i]), view.share(a, b))
        assert cells.at(0) == 0 and cells.at(1000) == cells.count
    assert Cells.of(drawn(4, 2, 256), None).size == "key"
    assert (Cells.of(drawn(4, 2, 131_072), None).count, Cells.of(drawn(4, 2, 131_072), None).size) == (256, "32 pages")
    with pytest.raises(ValueError, match="pool: expected one of key, page, split, got 'word'"):
        attention(view, pool="word")


@pytest.mark.parametrize("zoom", [-1, 1000, 5000])
def test_a_zoom_that_is_not_there_is_refused(zoom):
    with pytest.raises(ValueError, match=f"zoom: expected a key, 0 to 999, .* got {zoom}"):
        attention(drawn(4, 2, 1000), zoom=zoom)
    with pytest.raises(ValueError, match="zoom: expected a key, 0 to 1, .* got"):
        stages(made_stages([1.0, 2.0]), zoom=zoom)


def test_a_zoom_near_the_end_shows_as_many_keys():
    view = drawn(4, 2, 1000)
    assert zoom_of(view, 990) == zoom_of(view, None) == (952, 1000)
    assert zoom_of(view, 5) == (5, 53) and zoom_of(drawn(4, 2, 7), 3) == (0, 7)


@pytest.mark.parametrize("zoom", [None, 0, 1, 1000, 2047])
def test_columns_hold_every_key_once_and_do_not_move(zoom):
    view = head_stages()
    columns = columns_of(view, zoom)
    assert [key for c in columns for key in range(c.start, c.stop)] == list(range(2048))
    assert all(a.left + a.width <= b.left + 1e-9 for a, b in zip(columns, columns[1:], strict=False))
    single = [c for c in columns if c.keys == 1 and c.left > 2]
    assert single[0].left == columns_of(view, None)[2].left and len(single) >= 48


def test_the_colours_of_a_cell_are_those_of_its_weight():
    scale = weight_scale(style.LIGHT, 1e-4)
    nothing, little, half, everything = scale.colors([0.0, 1e-4, 1e-2, 1.0])[:, :3].tolist()
    assert nothing == little == [255, 255, 255]
    assert sum(everything) < sum(half) < sum(nothing)
    assert scale.ticks[0] == (1.0, "100%") and scale.ticks[-1] == (1e-4, "0.01%")
    plus, zero, minus = score_scale(style.DARK, 4.0).colors([4.0, 0.0, -9.0])[:, :3].tolist()
    assert "#{:02X}{:02X}{:02X}".format(*zero) == style.DARK.paper and plus != minus


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=60))
def test_no_score_lies_above_the_scale(raw):
    view = made_stages(raw)
    limit, lower = score_limit(view)
    assert limit >= float(view.scaled.max()) and limit > 0
    assert lower == bool(view.scaled.min() < -limit)


def test_masked_cells_are_hatched_and_others_are_not():
    def hatched(picture: Picture) -> int:
        patches = [patch for ax in picture.figure().axes for patch in ax.patches if patch.get_hatch()]
        return sum(int((patch.get_path().codes == patch.get_path().MOVETO).sum()) for patch in patches)

    view = head_stages()
    assert hatched(show(view)) == 0
    assert hatched(show(windowed(view, 32))) == 2 * (2 + 16)  # two rows: token 0, the keys between, 16 of the last 48
    assert "no key: the query is its request’s last token" in show(view).to_svg()
    assert "2,016 keys set to −∞" in show(windowed(view, 32)).to_svg()


def test_the_cells_of_an_svg_are_an_image_of_a_few_pixels_each():
    images = re.findall(r"data:image/png;base64,\s*([^\"]+)", svg_of("sink layer"))
    sizes = sorted(Image.open(io.BytesIO(base64.b64decode(data))).size for data in images)
    assert sizes == [(1, 128), (48, 9 * 2 + 2), (128, 9 * 2 + 2)]
    assert "image-rendering:crisp-edges;image-rendering:pixelated" in svg_of("sink layer")


def test_the_mouse_finds_heads_and_keys():
    svg = svg_of("sink layer")
    assert "<title>q3 (KV 1): 0 “Ap” 83%, " in svg and strongest(scores(), 3).startswith("q3 (KV 1): 0 “Ap” 83%, ")
    assert "<title>key 2,037 “·Apache”: q6 76%, " in svg
    assert "<title>keys 1 to 1,999: highest score " in svg_of("stages")
    assert "<title>pages 0 to 31: " in svg_of("pool of 257 pages")


# ---------------------------------------------------------------- files and text


@every_picture
def test_an_svg_stands_alone(name):
    picture, svg = picture_of(name), svg_of(name)
    root = ElementTree.fromstring(svg)
    assert (root[0].text, root[1].text) == (picture.title, picture.alt)
    plain = re.sub(r"data:image/png;base64,[^\"]+", "", svg)
    assert "<metadata" not in svg and "<style" not in svg
    assert set(re.findall(r'(\S+)="https?://', plain)) <= {"xmlns", "xmlns:xlink"}
    assert not re.findall(r"(?<!\")https?:", plain)
    assert set(re.findall(r'(?:href="|url\()([^#"]{0,5})', svg)) <= {"data:", ""}
    ids = re.findall(r' id="([^"]*)"', svg)
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(re.findall(r'(?:href="|url\()#([^")]*)', svg))
    assert len(svg.encode()) < 120_000


@pytest.mark.parametrize("name", ["sink layer", "stages in a window", "pool", "pool of 4,096 pages"])
def test_an_svg_is_the_same_each_time(name):
    assert PICTURES[name]().to_svg() == svg_of(name)


@pytest.mark.parametrize(
    ("theme", "fonts"), [("light", style.FONTS), ("dark", style.FONTS[-1:])], ids=["light", "dark, widest font"]
)
@every_picture
def test_no_text_collides_or_leaves_the_canvas(name, theme, fonts, monkeypatch):
    monkeypatch.setattr(style, "FONTS", fonts)
    assert not faults(picture_of(name).figure(theme))


@every_picture
def test_captions_are_true_in_both_themes(name):
    words = " ".join(text.get_text() for text in picture_of(name).figure().texts).lower()
    assert not re.search(r"\b(dark|darker|white|black)\b", words)


def test_pictures_show_one_thing_each():
    with pytest.raises(ValueError, match="the attention of 1 request, got 2"):
        show(drawn(2, 1, 5), drawn(2, 1, 5))
    with pytest.raises(ValueError, match="the attention of 1 call, got 2"):
        show(trace().call(18), trace().call(0))
    with pytest.raises(ValueError, match="the stages of 1 head, got 2"):
        show(made_stages([1.0]), made_stages([1.0]))
    with pytest.raises(ValueError, match="a picture shows 1 pool, got 2"):
        show(odd_names(), odd_names())
    assert {"ScoreView", "StageView", "PageMap", "SlotAllocator", "CallTrace"} <= set(show.types())


@pytest.mark.parametrize("name", ["sink layer", "128 heads, 8 KV heads", "stages", "pool", "pool of 4,096 pages"])
def test_a_picture_is_redrawn_in_no_time(name, record_property):
    """CPU time, so that a busy machine does not matter; the bound is several times what it takes."""
    picture, start = PICTURES[name](), time.process_time()
    picture.to_svg()
    seconds = time.process_time() - start
    record_property("redraw_seconds", round(seconds, 3))
    record_property("svg_bytes", len(svg_of(name).encode()))
    assert seconds < 3.0


# ---------------------------------------------------------------- what cannot be drawn


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused_where_the_view_is_made(bad):
    view, rows = drawn(4, 2, 30), drawn(4, 2, 30).weights.clone()
    rows[2, 7] = bad
    with pytest.raises(ValueError, match=f"weights: expected finite .*, got {bad} in head 2 of request 1, column 7"):
        dataclasses.replace(view, weights=rows)
    made = made_stages([1.0, 2.0, 3.0], hidden=(1,))
    for stage in ("scaled", "masked", "weights"):
        row = getattr(made, stage).clone()
        row[0] = math.nan if stage != "weights" else bad
        with pytest.raises(ValueError, match=f"{stage}: expected finite numbers, got .* in head 1 of request 0"):
            dataclasses.replace(made, **{stage: row})


def test_nan_in_the_cache_is_named_with_request_and_head():
    wb = attnlab.workbench("SmolLM2-135M", lens=[40, 5], policy="seed", engine="eager", layers=[18])
    wb.pool.view(0).k[wb.table.slots_of(wb.table.rows[0])[3].long(), 1] = math.nan
    with pytest.raises(ValueError, match="weights: .* nan in head 3 of request 0"):
        wb.scores(18, request=0)
    with pytest.raises(ValueError, match="scaled: .* nan in head 4 of request 0, column 3; look for NaN"):
        wb.stages(18, request=0, head=4)
    assert wb.scores(18, request=1).keys == 5


@pytest.mark.parametrize("query", [-1, 30, 99])
def test_a_query_is_one_of_the_keys(query):
    with pytest.raises(ValueError, match=f"query: expected the position of one of the keys, 0 to 29, got {query}"):
        dataclasses.replace(drawn(4, 2, 30), query=query)
    with pytest.raises(ValueError, match="query: expected the position of one of the keys, 0 to 1"):
        dataclasses.replace(made_stages([1.0, 2.0]), query=query)


@pytest.mark.parametrize("zoom", [1.5, True, "a"])
def test_a_place_to_zoom_to_is_an_int(zoom):
    for view in (scores(), head_stages()):
        with pytest.raises(TypeError, match=f"zoom: expected an int, got {zoom!r}"):
            show(view, zoom=zoom)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": (1, 2)}, "names: expected texts, got int 1"),
        ({"lens": (-1, 1)}, r"lens: expected ints of at least 0, got \[-1\]"),
        ({"lens": (0.5, 1)}, "lens: expected an int, got 0.5"),
        ({"numbers": (0, -1)}, r"numbers: expected ints of at least 0, got \[-1\]"),
        ({"numbers": (0, True)}, "numbers: expected an int, got True"),
        ({"pages": 2**31 - 1}, "pages: expected at most 16,777,216 to draw, got 2,147,483,647"),
    ],
)
def test_a_pool_that_is_none_is_refused(changes, message):
    plain = {"pages": 4, "page_size": 1, "names": ("a", "b"), "numbers": (0, 1), "lens": (1, 1), "tables": ((1,), (2,))}
    with pytest.raises((TypeError, ValueError), match=message):
        PageMap(**{**plain, **changes})


@pytest.mark.parametrize(("scale", "words"), [(0.0, "q·k × 0"), (-0.125, "q·k × −0.125")])
def test_a_scale_that_is_no_root_is_written_as_it_is(scale, words):
    view = made_stages([1.0, 2.0, 3.0], scale=scale)
    assert words in show(view).to_svg()
