"""The workbench, footprints, and merges step by step."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

import attnlab
from attnlab.batch import DecodeBatch, VerifyBatch
from attnlab.eager import oracle
from attnlab.inspect.contents import seed_of
from attnlab.inspect.footprint import Footprint
from attnlab.inspect.samples import Sample
from attnlab.inspect.score_view import ScoreView
from attnlab.mods.registry import score_mods
from attnlab.plan.policies.static import Static
from attnlab.spec import AttentionSpec, ModelSpec
from attnlab.trace import Trace
from tests.tolerances import LSE, OUTPUT


def bench(lens: list[int], **changes: object) -> attnlab.Workbench:
    return attnlab.workbench("SmolLM2-135M", **{"lens": lens, "policy": "static", "engine": "eager", **changes})


def test_a_footprint_tells_what_was_asked_from_what_is_used() -> None:
    """B02: 257 keys in 8 splits are 5 ranges of 64."""
    wb = bench([257, 0])
    footprint = Footprint.of(wb.plan().lane(18), wb.model.layer(18).attention, multiprocessors=10)
    assert (footprint.asked, footprint.used) == (8, 5)
    assert footprint.programs == 5 * 3 and footprint.per_multiprocessor == 1.5
    assert footprint.launched == 3 * min(2 * 8, 257 // 32 + 2)
    assert footprint.scratch_bytes == footprint.launched * 3 * (64 + 2) * 4


def test_a_group_larger_than_a_head_tile_needs_more_programs() -> None:
    wb = attnlab.workbench("falcon-180B", lens=[64], policy=Static(splits=1), engine="eager")
    footprint = Footprint.of(wb.plan().lane(0), wb.model.layer(0).attention, multiprocessors=132)
    assert footprint.programs == 8 * 2


@pytest.mark.parametrize("layer", [0, 18, 23])
def test_the_recorded_attention_is_decoded_right(layer: int) -> None:
    wb = bench([2048, 96, 700, 0, 1])
    lse = torch.empty(5, 9)
    out = wb.decode(layer, lse=lse)
    q, _, _ = wb.newest(layer)
    for r in range(5):
        want, want_lse = oracle.attention(q[r], *wb.cached(layer, r), scale=0.125)
        torch.testing.assert_close(out[r].double(), want, **OUTPUT[torch.float16])
        torch.testing.assert_close(lse[r].double(), want_lse, **LSE)


def test_layer_18_has_the_sink_heads_that_the_data_promise() -> None:
    """data/README.md: mean weight on the first token over the 128 recorded queries, by head."""
    sample = Sample.load("long").layer(18)
    scores = torch.einsum("qhd,khd->hqk", sample.q.float(), sample.k.float().repeat_interleave(3, 1)) / 8
    later = torch.arange(2048) > torch.arange(1920, 2048)[:, None]
    first = scores.masked_fill(later, float("-inf")).softmax(-1)[:, :, 0].mean(1)
    assert [round(w, 2) for w in first.tolist()] == [0.43, 0.35, 0.39, 0.62, 0.74, 0.34, 0.72, 0.94, 1.00]


def test_a_merge_ends_in_the_output_and_its_weights_sum_to_one() -> None:
    wb = bench([700, 40])
    merge = wb.merge(18, request=0, head=4)
    q, _, _ = wb.newest(18)
    want, want_lse = oracle.attention(q[0], *wb.cached(18, 0), scale=0.125)
    assert merge.ranges == wb.plan().lane(18).splits.to_host().ranges[0]
    torch.testing.assert_close(merge.running[-1], want[4], **OUTPUT[torch.float32])
    torch.testing.assert_close(torch.tensor(merge.total_lse).double(), want_lse[4], **LSE)
    torch.testing.assert_close(merge.weights.sum(), torch.tensor(1.0).double(), **LSE)
    assert float(merge.distance[-1]) == 0.0


def test_a_merge_of_nothing_or_of_a_head_that_is_not_there_is_refused() -> None:
    wb = bench([40, 0])
    with pytest.raises(ValueError, match="request 1 has no keys, so there is nothing to merge"):
        wb.merge(18, request=1, head=0)
    with pytest.raises(ValueError, match="head: the layer has heads 0 to 8, got 9"):
        wb.merge(18, request=0, head=9)
    with pytest.raises(ValueError, match="request: the plan has requests 0 to 1, got -1"):
        wb.merge(18, request=-1, head=0)


def test_short_requests_are_different_ends_of_the_text() -> None:
    wb = bench([100, 100, 2048])
    assert not torch.equal(wb.cached(18, 0)[0], wb.cached(18, 1)[0])
    assert wb.cached(18, 2)[0].shape == (2048, 3, 64)


def test_any_model_of_the_table_stands_on_the_bench() -> None:
    for name in ("Llama-3.2-1B", "DeepSeek-V3", "falcon-7b"):
        wb = attnlab.workbench(name, lens=[40, 3], policy="seed", engine="eager", page_size=4)
        (layer,) = wb.layers
        spec = wb.model.layer(layer).attention
        assert wb.decode(layer).shape == (2, spec.heads, spec.v_dim)


def test_under_mla_what_was_cached_is_what_is_decoded() -> None:
    wb = attnlab.workbench("Kimi-K2-Instruct", lens=[70, 9], kv_dtype=torch.float32, policy="static", engine="eager")
    out, (q, _, v) = wb.decode(0), wb.newest(0)
    assert v is None
    for r in range(2):
        want, _ = oracle.attention(q[r], *wb.cached(0, r), scale=wb.model.layer(0).attention.scale)
        torch.testing.assert_close(out[r].double(), want, **OUTPUT[torch.float32])


def test_tokens_come_and_go_by_the_cache_of_the_bench() -> None:
    wb = bench([40, 3, 0])
    row = wb.table.rows[0]
    wb.cache.truncate(row, 30)
    wb.cache.append(row, 2)
    wb.cache.check_integrity()
    assert wb.table.length(row) == wb.pool.allocator.tokens_of(row) == 32
    with pytest.raises(ValueError, match="request 0 asks for 40 tokens, row 0 of the table holds 32"):
        wb.plan()


@pytest.mark.parametrize("page_size", [1, 4])
def test_requests_grow_by_the_room_of_the_bench_and_no_further(page_size: int) -> None:
    wb = bench([30, 7, 0], room=9, page_size=page_size, layers=[18])
    for row in range(3):
        wb.cache.append(row, 9)
    lens = [39, 16, 9]
    assert wb.table.max_context == 39 and wb.backend.max_tokens >= sum(lens)
    wb.decode(18, wb.backend.plan(DecodeBatch.of(rows=[0, 1, 2], lens=lens, device="cpu")))
    wb.cache.check_integrity()
    with pytest.raises(ValueError, match=r"would hold 40 tokens, the table has 39 columns; .*: with more room\)"):
        wb.cache.append(0, 1)


def test_a_bench_for_more_rows_than_requests_runs_the_branches_of_a_draft() -> None:
    room = attnlab.draft_room(30, topk=2, steps=3, page_size=1)
    batch = attnlab.DraftBatch.of(rows=[0, 1], lens=[30, 30], topk=2, steps=3, device="cpu")
    for more, words in (
        ({}, "build the backend with max_requests of at least 4 and max_tokens of at least 128, as every"),
        ({"max_requests": 4}, None),
    ):
        wb = bench([30, 30], room=room, layers=[18], **more)
        for row in (0, 1):
            wb.cache.append(row, room)
        if words:
            with pytest.raises(ValueError, match=words):
                wb.backend.plan(batch)
        else:
            assert len(wb.backend.plan(batch).steps) == 2


def test_the_bench_verifies_as_many_drafts_as_it_was_built_for() -> None:
    wb = bench([40], max_drafts=3, layers=[18])
    batch = VerifyBatch.chain(rows=wb.table.rows, prefix=[36], drafts=4, device="cpu")
    with pytest.raises(ValueError, match="a request of up to 4 drafts, the scratch is for 3"):
        wb.backend.partials(18, wb.backend.plan(batch))


def test_the_bench_says_what_stands_on_it() -> None:
    text = repr(bench([40, 3]))
    for word in ("SmolLM2-135M", "2 requests of 40, 3 tokens", "engine eager", "policy static", "132", "recorded"):
        assert word in text


def test_a_policy_of_ones_own_in_a_few_lines() -> None:
    @attnlab.split_policy("test-halves", needs_host_lens=True, max_ranges=2)
    def halves(lens, ctx):
        return [[(0, n // 2), (n // 2, n)] if n > 1 else [(0, n)] * n for n in lens]

    wb = bench([301, 1, 0], policy="test-halves")
    assert wb.plan().lane(18).splits.to_host().effective == (2, 1, 0)
    torch.testing.assert_close(wb.decode(18), bench([301, 1, 0]).decode(18), **OUTPUT[torch.float16])


def test_drawn_numbers_are_of_one_layer_request_and_seed() -> None:
    """Seeds that were added up met: (seed 1000, layer 0) was (seed 0, layer 1)."""
    benches = [bench([3] * 3, layers=[1, 2], seed=seed) for seed in (0, 1, 1000, 2000)]
    drawn = [b.cached(layer, r)[0] for b in benches for layer in (1, 2) for r in range(3)]
    assert not any(torch.equal(a, b) for a, b in combinations(drawn, 2))
    assert torch.equal(benches[0].cached(1, 0)[0], bench([3], layers=[1]).cached(1, 0)[0])
    seeds = [seed_of(s, *which) for s in range(3) for which in ((0,), (1,), (0, 0), (0, 1), (1, 0))]
    assert len(set(seeds)) == len(seeds)


def test_calls_on_the_bench_take_a_plan_and_what_a_modifier_reads() -> None:
    spec = AttentionSpec(heads=4, kv_heads=2, qk_dim=16, v_dim=16, scale=0.25, mod=score_mods.get("relative_bias"))
    model = ModelSpec.uniform(spec, layers=1, context_len=256, page_size=1, kv_dtype=torch.float32)
    wb = attnlab.workbench(model, lens=[90, 40], policy="static", engine="eager")
    aux = torch.zeros(2, 4, 16)
    aux[..., 0] = 100.0  # the query's own key takes all
    plan = wb.backend.plan(wb.batch)
    assert torch.equal(wb.scores(0, request=1, plan=plan, aux=aux).weights[:, -1], torch.ones(4))
    assert float(wb.stages(0, request=1, head=2, plan=plan, aux=aux).weights[-1]) == 1.0
    assert float(wb.merge(0, request=0, head=1, plan=plan, aux=aux).weights[-1]) == 1.0
    assert torch.equal(wb.decode(0, plan, aux=aux)[0, 0], wb.cached(0, 0)[1][-1, 0])
    with pytest.raises(ValueError, match="aux: expected"):
        wb.scores(0, request=0)


def test_a_recording_on_the_bench_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'score'"), bench([3]).record(score=True):
        pass


def test_only_the_recorded_layers_are_recorded() -> None:
    mixed = bench([200], layers=[18, 5])
    plain = bench([200], layers=[18])
    assert torch.equal(mixed.decode(18), plain.decode(18))
    assert mixed.source == "recorded q, k, v in layer 18; normal numbers, seed 0, in layer 5"
    assert mixed.tokens(0) == plain.tokens(0) and len(mixed.tokens(0)) == 200
    assert bench([200], layers=[5]).tokens(0) == ()


def test_a_layer_with_sinks_gets_some() -> None:
    wb = attnlab.workbench("gpt-oss-20b", lens=[40], policy="seed", engine="eager", layers=[1])
    q, _, _ = wb.newest(1)
    want, _ = oracle.attention(q[0], *wb.cached(1, 0), scale=0.125, sinks=wb.sinks(1))
    torch.testing.assert_close(wb.decode(1)[0].double(), want, **OUTPUT[torch.float16])


def test_a_recording_on_the_bench_knows_the_tokens() -> None:
    wb = bench([40, 3])
    with wb.record(scores=True) as trace:
        wb.decode(18)
    assert trace.tokens == (wb.tokens(0), wb.tokens(1)) and len(trace.tokens[1]) == 3
    assert [score.values.shape[1] for score in trace.call(18).scores] == [40, 3]


def test_other_batches_on_the_bench_have_the_texts_of_their_own_requests(tmp_path: Path) -> None:
    wb = bench([40, 3, 0, 25])
    with wb.record(scores=True) as trace:
        for chosen in ([3, 0], [0, 1, 2, 3], [1]):
            rows = [wb.table.rows[r] for r in chosen]
            plan = wb.backend.plan(DecodeBatch.of(rows=rows, lens=[wb.lens[r] for r in chosen], device="cpu"))
            q, k, v = (x[chosen] for x in wb.newest(18))
            wb.backend.decode(18, q, k, v, plan)
    trace.save(tmp_path / "t")
    for made in (trace, Trace.load(tmp_path / "t")):
        texts = [made.told(call).tokens for call in made.calls]
        want = [(wb.tokens(3), wb.tokens(0)), (wb.tokens(0), wb.tokens(1), (), wb.tokens(3)), (wb.tokens(1),)]
        assert texts == want
        assert ScoreView.of(made, layer=18, request=0).tokens == wb.tokens(3)


def test_what_is_none_of_the_benchs_requests_has_no_texts() -> None:
    wb = bench([40, 3])
    padded = wb.backend.plan(DecodeBatch.of(rows=[wb.table.rows[1], wb.table.rows[0]], lens=[0, 40], device="cpu"))
    with wb.record() as trace:
        wb.decode(18, padded)
    assert trace.calls[0].texts == (None, 0)
    assert trace.call(18).tokens == ((), wb.tokens(0))


@pytest.mark.parametrize("wrong", [{"request": True}, {"head": True}, {"request": 0.0}])
def test_a_bool_is_no_number(wrong: dict[str, object]) -> None:
    wb = bench([40, 3])
    given = {"request": 0, "head": 0, **wrong}
    with pytest.raises(TypeError, match=f"{next(iter(wrong))}: expected an int, got "):
        wb.merge(18, **given)
    with pytest.raises(TypeError, match=f"{next(iter(wrong))}s: expected a list of numbers, got "):
        wb.stages(18, **given)
    with pytest.raises(ValueError, match="layer: .* got False"):
        bench([40], layers=[0]).decode(False)


def test_lengths_may_be_numpys_or_a_tensors() -> None:
    import numpy as np

    assert bench(np.array([5, 3])).lens == bench(torch.tensor([5, 3])).lens == (5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lens": 5}, "lens: expected a list of lengths, one per request, got 5"),
        ({"lens": [3.5]}, "lens: request 0: expected an int, got 3.5"),
        ({"layers": 18}, "layers: expected a list of layer numbers, got 18"),
        ({"kv_dtype": "float16"}, "kv_dtype: expected one of float32, .*, got .float16."),
        (
            {"model": "Llama-3-8B", "lens": [9000]},
            "request 0 has 9,000 tokens, beyond the context of Llama-3-8B, 8,192",
        ),
        ({"model": "Gemma-3-1b-it"}, "context: not verified for model 'Gemma-3-1b-it' .*pass context_len"),
        ({"model": "llama"}, "did you mean .*"),
        ({"room": -1}, "room: expected at least 0 tokens, got -1"),
        (
            {"room": 8189},
            "room: with 8,189 tokens more the longest request has 8,193, beyond the context of SmolLM2-135M",
        ),
        ({"lens": [4, 4], "max_requests": 1}, "max_requests: expected at least 2, as there are requests, got 1"),
    ],
)
def test_a_bench_that_cannot_be_built_says_why(changes: dict[str, object], message: str) -> None:
    given = {"model": "SmolLM2-135M", "lens": [4], "policy": "seed", "engine": "eager", **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        attnlab.workbench(**given)


def test_a_model_spec_brings_its_own_cache() -> None:
    model = attnlab.ModelSpec.load("Llama-3.2-1B").only((0,))
    with pytest.raises(ValueError, match="page_size: a ModelSpec brings its own"):
        attnlab.workbench(model, lens=[4], policy="seed", engine="eager", page_size=16)


def test_a_layer_that_is_not_filled_is_told_how_to_fill_it() -> None:
    with pytest.raises(
        ValueError, match=r"the workbench has filled layers 0, 18, 23, got 5; build it with layers=\[5\]"
    ):
        bench([4]).decode(5)
