"""What heads do is read off their weights: known patterns get their names and numbers, the shipped text's heads too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import attnlab
from attnlab.batch import DecodeBatch
from attnlab.inspect.heads import FROM, LOCAL, Head, Heads, following, heads
from attnlab.inspect.record import Scores
from attnlab.inspect.samples import Sample
from attnlab.inspect.score_view import ScoreView
from attnlab.plots.heads_map import statement
from attnlab.plots.show import show
from attnlab.plots.style import THEMES
from attnlab.spec import AttentionSpec, ModelSpec
from attnlab.trace import CallTrace, ScoreTrace, Trace
from tests.extend_cases import Case as Several
from tests.extend_cases import Stand as SeveralStand
from tests.test_plots import faults
from tests.tolerances import OUTPUT

TEXT = tuple("again" if key in (10, 63) else str(key) for key in range(80))
"""The last of 64 tokens is a copy of token 10."""


def made(weights: torch.Tensor, *, start: int = 0, texts: tuple[str, ...] = TEXT, own: int | None = None) -> Trace:
    """A recording of one query with these weights `[heads, keys]`; the query is the last key."""
    heads, keys = weights.shape
    last = keys - 1
    call = CallTrace(
        layer=3,
        mode="extend",
        policy="none",
        heads=heads,
        kv_heads=1,
        scale=1.0,
        softcap=None,
        temperature_len=None,
        mod=None,
        has_sinks=False,
        page_size=1,
        ranges=(((0, keys),),),
        nominal=(1,),
        start=(start,),
        rows=((0, 4),),
        q_pos=(start + last,),
        own=(last if own is None else own,),
        lse=torch.zeros(1, heads),
        scores=(
            ScoreTrace(
                request=0,
                query=4,
                stage="weights",
                reduce="sum",
                heads=tuple(range(heads)),
                edges=tuple(range(keys + 1)),
                values=weights,
            ),
        ),
    )
    return Trace(calls=[call], tokens=(texts,))


def patterns(keys: int = 64) -> torch.Tensor:
    """A head each: all on the first token, on the previous one, evenly near by, on one that followed, on all."""
    weights = torch.zeros(5, keys)
    weights[0, 0] = 1.0
    weights[1, keys - 2] = 1.0
    weights[2, keys - LOCAL :] = 1 / LOCAL
    weights[3, following(TEXT, keys - 1)[0]] = 1.0
    weights[4] = 1 / keys
    return weights


def test_a_head_that_does_one_thing_is_called_so() -> None:
    found = heads(made(patterns()))
    assert [head.names for head in found] == [
        ("sink",),
        ("previous", "local"),
        ("local",),
        ("induction",),
        ("diffuse",),
    ]
    assert (found.heads[0].sink, found.heads[1].previous, found.heads[2].local) == (1.0, 1.0, 1.0)
    assert found.heads[3].induction == 1.0 and found.heads[4].diffuse == pytest.approx(1.0)
    assert found.heads[0].diffuse == pytest.approx(1 / 64)
    assert [(head.queries, head.repeats, head.layer, head.kv_head) for head in found][0] == (1, 1, 3, 0)


def test_numbers_are_means_over_queries_of_all_requests_and_calls() -> None:
    one, other = made(patterns()), made(patterns().flip(0))
    found = heads(Trace(calls=[one.calls[0], other.calls[0]], tokens=(TEXT,)))
    assert [head.sink for head in found][:: len(found) - 1] == pytest.approx([(1 + 1 / 64) / 2] * 2)
    assert {head.queries for head in found} == {2}


def test_without_texts_nothing_is_said_of_induction() -> None:
    found = heads(made(patterns(), texts=()))
    assert {head.induction for head in found} == {None} and found.named("induction") == ()
    assert "-" in str(found).splitlines()[1]
    again = heads(made(patterns(), texts=()), tokens=[TEXT])
    assert again.heads[3].induction == 1.0


def test_a_token_without_an_earlier_copy_says_nothing_of_induction() -> None:
    found = heads(made(patterns(), texts=tuple(map(str, range(64)))))
    assert found.heads[3].induction is None and found.heads[3].repeats == 0


@pytest.mark.parametrize(
    ("weights", "start"), [(patterns()[:, : 2 * LOCAL - 1], 0), (patterns(), 7)], ids=["few-keys", "a-window"]
)
def test_rows_that_cannot_tell_are_left_out_and_nothing_left_is_refused(weights: torch.Tensor, start: int) -> None:
    with pytest.raises(ValueError, match="trace: it has no weights by key of queries that see the first token"):
        heads(made(weights, start=start))


def uncounted(trace: Trace) -> None:
    """A row that says nothing stands alone, and beside one that does."""
    with pytest.raises(ValueError, match="keys up to their own, the last of their row"):
        heads(trace)
    both = heads(Trace(calls=[*made(patterns()).calls, *trace.calls], tokens=(TEXT,)))
    assert both == heads(made(patterns()))


@pytest.mark.parametrize("own", [0, 40, 62])
def test_rows_that_go_on_beyond_their_own_key_are_left_out(own: int) -> None:
    uncounted(made(patterns(), own=own))


def test_layers_that_are_not_causal_have_no_such_rows_but_the_last() -> None:
    layer = AttentionSpec(heads=2, kv_heads=1, qk_dim=16, v_dim=16, scale=0.25, causal=False)
    model = ModelSpec.uniform(layer, layers=1, context_len=128, page_size=1, kv_dtype=torch.float32)
    wb = attnlab.workbench(model, lens=[64], policy="seed", engine="eager")
    with wb.record(scores=Scores(pool="key"), queries=None) as trace:
        wb.extend(0, last=64)
    assert {head.queries for head in heads(trace)} == {1}


def test_rows_whose_window_begins_after_the_first_token_are_left_out() -> None:
    hidden = patterns()
    hidden[:, 0] = 0.0
    uncounted(made(hidden))


def test_beside_a_sink_logit_weight_is_diffuse_as_the_keys_share_it() -> None:
    weights = patterns()
    weights[4] /= 4
    weights[3] = 0.0
    found = heads(made(weights))
    assert found.heads[4].diffuse == pytest.approx(1.0) and found.heads[4].sink == pytest.approx(1 / 256)
    assert found.heads[3].diffuse == pytest.approx(1 / 64)  # a head of which everything is hidden


def test_tokens_that_came_after_the_texts_say_nothing_of_induction() -> None:
    assert following(["a", "b", "c"], 5) == [] and following(["a", "b", "a"], 3) == []
    wb = attnlab.workbench("SmolLM2-135M", lens=[64], layers=[18], policy="seed", engine="eager", room=2)
    row = wb.batch.rows.tolist()[0]
    wb.cache.append(row, 2)
    longer = DecodeBatch.of(rows=[row], lens=[66], device="cpu")
    with wb.record(scores=Scores(pool="key")) as trace:
        wb.decode(18, wb.backend.plan(longer))
    assert {head.induction for head in heads(trace)} == {None}
    view = ScoreView.of(trace, layer=18, request=0)
    assert (view.keys, view.tokens) == (66, ())
    with pytest.raises(ValueError, match="request 0 has 66 keys, but the texts of only 64 tokens"):
        ScoreView.of_call(trace.call(18), request=0, tokens=wb.tokens(0))


def test_recordings_without_weights_by_key_are_refused() -> None:
    wb = attnlab.workbench("SmolLM2-135M", lens=[300], layers=[18], policy="seed", engine="eager")
    for wanted in (Scores(pool="page"), Scores(stages=("masked",), pool="key"), Scores(heads=(1,), pool="key"), False):
        with wb.record(scores=wanted) as trace:
            wb.decode(18)
        with pytest.raises(ValueError, match="record with scores=Scores"):
            heads(trace)


def test_a_behaviour_that_is_none_is_refused() -> None:
    with pytest.raises(
        ValueError, match="behaviour: expected one of induction, previous, sink, local, diffuse, got 'sinks'"
    ):
        heads(made(patterns())).named("sinks")


@cache
def whole_text() -> Heads:
    wb = attnlab.workbench("SmolLM2-135M", lens=[2048], layers=[0, 18, 23], policy="seed", engine="eager")
    with wb.record(scores=Scores(pool="key"), queries=None, partials=False) as trace:
        for layer in wb.layers:
            wb.extend(layer, last=128)
    return heads(trace)


def test_the_shipped_text_has_two_sink_heads_and_an_induction_head_in_layer_18() -> None:
    found = whole_text()
    assert [(h.layer, h.head, round(h.sink, 2)) for h in found.named("sink")] == [(18, 8, 1.0), (18, 7, 0.94)]
    assert [(h.layer, h.head) for h in found.named("induction")] == [(18, 6)]
    others = [h.induction for h in found if h.layer == 18 and h.head != 6]
    assert found.named("induction")[0].induction > 4 * max(others)
    assert {h.layer for h in found.named("diffuse")} == {0}


def test_numbers_agree_with_a_softmax_by_hand() -> None:
    """Layer 18, 128 queries, from the recorded tensors alone, in fp64."""

    sample, found = Sample.load("long"), {h.head: h for h in whole_text() if h.layer == 18}
    layer = sample.layer(18)
    sink, induction, repeats = torch.zeros(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64), 0
    for i, q in enumerate(layer.q.double()):
        own = layer.first_query + i
        k = layer.k[: own + 1].double().repeat_interleave(3, 1)
        weights = (torch.einsum("hd,nhd->hn", q, k) / 8).softmax(-1)
        sink += weights[:, 0] / 128
        copies = [j + 1 for j in range(own - 1) if sample.tokens[j] == sample.tokens[own]]
        repeats += bool(copies)
        induction += weights[:, copies].sum(1)
    close = OUTPUT[torch.float16]
    for name, wanted in (("sink", sink), ("induction", induction / repeats)):
        got = torch.tensor([found[head].number(name) for head in range(9)], dtype=torch.float64)
        torch.testing.assert_close(got, wanted, **close)


def drawn(layers: int, count: int, group: int) -> Heads:
    torch.manual_seed(1)

    def head(layer: int, number: int) -> Head:
        names = ("sink", "previous", "local", "induction", "diffuse")
        numbers = dict(zip(names, (torch.rand(5) ** 2).tolist(), strict=True))
        return Head(layer=layer, head=number, kv_head=number // group, queries=9, repeats=4, **numbers)

    return Heads(heads=tuple(head(layer, number) for layer in range(layers) for number in range(count)))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("layers", "count", "group"), [(1, 1, 1), (3, 9, 3), (32, 32, 4), (2, 128, 8)])
def test_nothing_collides(layers: int, count: int, group: int, theme: str) -> None:
    assert faults(show(drawn(layers, count, group)).figure(theme)) == []


def test_the_title_follows_the_numbers() -> None:
    assert "q8 of layer 18 puts >99.9% of its weight on the first token" in statement(whole_text())
    quiet = dict.fromkeys(("sink", "previous", "local", "induction", "diffuse"), 0.0)
    head = Head(layer=0, head=0, kv_head=0, queries=1, repeats=0, **quiet)
    assert statement(Heads(heads=(head,))) == "None of 1 head does one thing alone"
    wide = replace(head, diffuse=FROM["diffuse"])
    assert statement(Heads(heads=(wide,))) == "1 of 1 head has a name; q0 of layer 0 spreads over 30% of its keys"


@pytest.mark.parametrize("theme", THEMES)
def test_what_was_not_told_and_heads_that_are_not_there_are_grey_and_no_share_of_0(theme: str) -> None:
    whole = drawn(2, 6, 3)
    told, *rest = whole.heads
    untold = Heads(heads=(replace(told, induction=None), replace(rest[0], induction=0.0), *rest[1:]))
    fewer = Heads(heads=tuple(head for head in whole if (head.layer, head.head) != (1, 2)))
    grey, paper = ([*bytes.fromhex(color[1:]), 255] for color in (THEMES[theme].idle, THEMES[theme].paper))
    for found, words, cell in ((untold, "not told", (0, 0)), (fewer, "no such head", (1, 2))):
        figure = show(found).figure(theme)
        pixels = np.asarray(figure.axes[0].get_images()[0].get_array())  # of induction, KV head 0
        assert [*map(tuple, np.argwhere((pixels == grey).all(-1)))] == [cell]
        assert any(text.get_text().splitlines()[0].endswith(f"looked at. Grey: {words}.") for text in figure.texts)
        assert faults(figure) == []
        if found is untold:
            assert pixels[0, 1].tolist() == paper
    assert not any("Grey" in text.get_text() for text in show(whole).figure(theme).texts)


def test_layers_that_group_their_heads_differently_are_refused_before_anything_is_drawn() -> None:
    coarse = tuple(replace(head, layer=5) for head in drawn(1, 6, 6))
    with pytest.raises(ValueError, match="heads: q3 has KV head 1 in layer 0 and 0 in layer 5; show layers that group"):
        show(Heads(heads=(*drawn(2, 6, 3), *coarse)))


def test_rows_without_the_querys_own_key_say_nothing_of_heads() -> None:
    """The new keys alone begin behind the first token; the cached ones alone end before the query."""
    stand = SeveralStand(Several(id="long", why="", prefix=(60,), new=(40,)), "eager", "cpu")
    q, k, v = stand.new()
    for parts in ("cached", "new"):
        with attnlab.record(stand.backend, queries=None, scores=Scores(pool="key")) as trace:
            stand.backend.extend(1, q, k, v, stand.backend.plan(stand.batch), parts=parts)
        with pytest.raises(ValueError, match="trace: it has no weights by key"):
            heads(trace)


def test_an_encoders_keys_are_nobodys_text() -> None:
    trace = made(patterns())
    with pytest.raises(ValueError, match="trace: it has no weights by key"):
        heads(Trace(calls=[replace(trace.calls[0], cross=True)], tokens=trace.tokens))


@pytest.mark.parametrize("own", [-2, 64])
def test_a_recording_whose_query_is_none_of_its_keys_is_refused(own: int) -> None:
    with pytest.raises(ValueError, match=f"own: expected one of 64 keys, got {own}"):
        made(patterns(), own=own)
