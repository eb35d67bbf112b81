"""Recording: what it keeps is what happened, keeping it changes nothing, and bad input is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import attnlab
from attnlab.inspect import bins
from attnlab.inspect.record import Scores, record
from attnlab.inspect.rows import RequestKeys
from attnlab.plan.score_call import ScoreCall
from attnlab.plan.workspace import Partials
from attnlab.trace import _PLAIN, _SCORE_PLAIN, FORMAT, REDUCTIONS, STAGES, CallTrace, ScoreTrace, Trace
from tests.cases import CASES, ENGINES, FP8, MODIFY, Case, Stand
from tests.tolerances import LSE, OUTPUT

TOY = CASES[0]
engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
SHAPES = ["toy", "empty-rows", "mha", "group-20", "dim-80", "pages-4", "everything", "mla-288", "bf16", "fp8"]
cases = pytest.mark.parametrize("case", [case for case in CASES if case.id in SHAPES], ids=lambda case: case.id)


def recorded(stand: Stand, **wanted: object) -> tuple[torch.Tensor, Trace]:
    with record(stand.backend, **wanted) as trace:
        out, _ = stand.run()
    return out, trace


@engines
@cases
def test_scores_add_up_to_the_log_sum_exp_of_the_kernel(case: Case, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    _, trace = recorded(stand, scores=Scores(stages=("masked",), pool="key"))
    call = trace.call(1)
    for score in call.scores:
        torch.testing.assert_close(score.values.logsumexp(-1), call.lse[score.request], **LSE)


@engines
@cases
def test_weights_give_the_output_when_values_are_weighted(case: Case, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    out, trace = recorded(stand, scores=Scores(stages=("weights",), pool="key"))
    for score in trace.call(1).scores:
        v_scale = case.k_scale if case.mla else case.v_scale
        v = stand.stored(stand.v[score.request], v_scale).cpu().repeat_interleave(stand.spec.group, 1)
        want = torch.einsum("hn,nhd->hd", score.values.double(), v)
        torch.testing.assert_close(out[score.request].cpu().double(), want, **OUTPUT[case.dtype])


@engines
def test_the_weights_of_a_layer_without_sinks_sum_to_one(engine: str, device: str) -> None:
    _, trace = recorded(Stand(TOY.but(lens=(300, 33)), engine, device), scores=True)
    call = trace.call(1)
    for score in call.scores:
        torch.testing.assert_close(score.values.sum(-1), torch.ones(8), **OUTPUT[torch.float32])
    for weights in call.weights:
        torch.testing.assert_close(weights.sum(0), torch.ones(8), **OUTPUT[torch.float32])


def piped(stand: Stand, request: int, raw: torch.Tensor) -> torch.Tensor:
    """Run dot products `[heads, keys]` through the case's pipeline, in fp64 and by the oracle's own modifiers."""
    case, q_pos = stand.case, raw.shape[1] - 1
    scores = case.softcap * torch.tanh(raw * stand.spec.scale / case.softcap)
    if q_pos > case.temperature_len:
        scores = scores * (math.log2(q_pos) / math.log2(case.temperature_len))
    modify, keys = MODIFY[case.mod](request, stand.aux.cpu()), torch.arange(raw.shape[1])
    return torch.stack([modify(row, q_pos, keys, head) for head, row in enumerate(scores)])


@engines
def test_every_stage_is_what_its_name_says(engine: str, device: str) -> None:
    case = next(case for case in CASES if case.id == "everything")
    stand = Stand(case, engine, device)
    _, trace = recorded(stand, scores=Scores(stages=STAGES, requests=(2,), pool="key"))
    stages = {score.stage: score.values for score in trace.call(1).scores}
    k = stand.stored(stand.k[2], case.k_scale).cpu().repeat_interleave(stand.spec.group, 1)
    raw = torch.einsum("hd,nhd->hn", stand.q[2].cpu().double(), k)
    torch.testing.assert_close(stages["raw"].double(), raw, **OUTPUT[torch.float32])
    torch.testing.assert_close(stages["scaled"].double(), raw * stand.spec.scale, **OUTPUT[torch.float32])
    torch.testing.assert_close(stages["capped"].double(), piped(stand, 2, raw), **OUTPUT[torch.float32])
    assert torch.equal(stages["masked"], stages["capped"])
    sunk = torch.logaddexp(stages["masked"].logsumexp(-1), stand.sinks.cpu())
    torch.testing.assert_close(stages["weights"], torch.exp(stages["masked"] - sunk[:, None]), **OUTPUT[torch.float32])


@engines
def test_a_head_whose_every_key_is_hidden_has_no_weights(engine: str, device: str) -> None:
    stand = Stand(TOY.but(mod="relative_bias", lens=(12, 80), policy="static"), engine, device)
    stand.aux[:] = float("-inf")  # hides the last 16 keys: all of request 0, of request 1 a whole range
    out, trace = recorded(stand, scores=Scores(pool="key"))
    hidden, seen = trace.call(1).scores
    assert not hidden.values.any() and not trace.call(1).weights[0].any() and not out[0].any()
    torch.testing.assert_close(seen.values.sum(-1), torch.ones(8), **OUTPUT[torch.float32])
    assert torch.equal(seen.values[:, -16:], torch.zeros(8, 16))
    torch.testing.assert_close(trace.call(1).weights[1].sum(0), torch.ones(8), **OUTPUT[torch.float32])


def test_scores_are_scaled_in_the_order_of_the_decode() -> None:
    """Dot products that fp32 cannot hold, whose scaled scores it can."""
    stand = Stand(TOY.but(scale=1e-37), "eager", "cpu")
    stand.q *= 1e20
    for layer in range(2):
        stand.pool.view(layer).k.mul_(1e19)
    call = recorded(stand, scores=Scores(stages=("masked",), pool="key"))[1].call(1)
    for score in call.scores:
        assert score.values.isfinite().all()
        torch.testing.assert_close(score.values.logsumexp(-1), call.lse[score.request], **LSE)


@pytest.mark.parametrize(("case", "launches"), [("toy", 2), ("softcap", 3), ("everything", 3)])
def test_stages_of_one_pipeline_are_computed_once(case: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(next(c for c in CASES if c.id == case), *ENGINES[0])
    asked: list[object] = []
    scores = stand.backend.engine.scores
    monkeypatch.setattr(stand.backend.engine, "scores", lambda *a, **k: asked.append(a) or scores(*a, **k))
    recorded(stand, scores=Scores(stages=STAGES, requests=(2,)))
    assert len(asked) == launches


def test_where_every_key_is_asked_for_nobody_looks_which_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode's list has no hidden key."""
    monkeypatch.setattr(RequestKeys, "visible", lambda *_: pytest.fail("looked"))
    _, trace = recorded(Stand(TOY, *ENGINES[0]), scores=Scores(stages=STAGES))
    assert len(trace.calls[0].scores) == 4 * len(STAGES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> ScoreCall:
    """What a recording asks of the last three queries of a request."""
    wb = attnlab.workbench("SmolLM2-135M", lens=[40], layers=[18], policy="seed", engine="eager")
    scores, calls = wb.backend.engine.scores, []
    monkeypatch.setattr(wb.backend.engine, "scores", lambda call: calls.append(call) or scores(call))
    with wb.record(scores=True, queries=None):
        wb.extend(18, last=3)
    return calls[0]


@pytest.mark.parametrize("name", ["slots", "kv_pos", "visible", "tokens", "q_pos"])
def test_what_the_score_kernel_reads_as_it_lies_has_no_gaps(asked: ScoreCall, name: str) -> None:
    x = getattr(asked, name)
    strided = x.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(strided, x)
    with pytest.raises(ValueError, match=rf"{name}: expected a contiguous tensor, .*pass {name}.contiguous\(\)"):
        replace(asked, **{name: strided})


def test_a_score_call_of_other_shapes_or_devices_is_refused(asked: ScoreCall) -> None:
    for change, message in (
        ({"kv_pos": asked.kv_pos[1:]}, r"kv_pos: expected \[37\] int32 on cpu, got \[36\]"),
        ({"q_pos": asked.q_pos[1:]}, r"q_pos: expected \[3\] int32"),
        ({"visible": asked.visible.T.contiguous()}, r"visible: expected \[3, 37\] bool"),
        ({"slots": asked.slots[None]}, r"slots: expected \[37\] int64"),
        ({"q": asked.q[:, 1:]}, r"q: expected \[tokens, 9, 64\]"),
        ({"q": asked.q[..., 1:]}, r"q: expected \[tokens, 9, 64\]"),
        ({"aux": torch.zeros(3, 9, 1)}, "aux: expected None, as no modifier of the layer reads it"),
        ({"visible": asked.visible.to("meta")}, "visible: expected .* on cpu, got .* on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(asked, **change)


def test_rows_are_not_searched_for_each_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for every score would be quadratic."""
    _, trace = recorded(Stand(TOY, *ENGINES[0]), scores=True)
    monkeypatch.setattr(CallTrace, "row", lambda *_: pytest.fail("searched"))
    assert len(replace(trace.calls[0]).scores) == 4


def test_outputs_that_nobody_wants_are_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Partials, "output", property(lambda partials: pytest.fail("normalised")))
    _, trace = recorded(Stand(TOY, *ENGINES[0]), partials=False)
    assert trace.call(1).partial_out == () and trace.call(1).lse.isfinite().all()


def test_a_call_knows_its_pipeline_and_where_keys_and_queries_stand() -> None:
    case = next(case for case in CASES if case.id == "everything")
    call = recorded(Stand(case, *ENGINES[0]))[1].call(1)
    assert (call.softcap, call.temperature_len, call.mod, call.has_sinks) == (5.0, 32, "relative_bias", True)
    assert call.start == (0,) * 4 and call.q_pos == tuple(n - 1 for n in case.lens)
    plain = recorded(Stand(TOY.but(lens=(3, 0)), *ENGINES[0]))[1].call(1)
    assert (plain.softcap, plain.temperature_len, plain.mod, plain.has_sinks) == (None, None, None, False)
    assert plain.q_pos == (2, -1)


def test_times_are_kept_with_the_segments_that_they_are_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With an engine that says it has a clock, but whose programs note nothing."""
    stand = Stand(TOY.but(heads=40), "eager", "cpu")
    monkeypatch.setattr(stand.backend.engine, "check_times", lambda: None)
    plan = stand.plan()
    with record(stand.backend, times=True) as trace:
        stand.run(plan)
    schedule = plan.lanes[0].schedule
    assert torch.equal(trace.calls[0].segments, schedule.segments) and trace.calls[0].segments.dtype == torch.int32
    assert torch.equal(trace.calls[0].times, torch.zeros(schedule.segments.shape[0], 2, 3, dtype=torch.int64))
    trace.save(tmp_path / "t")
    again = Trace.load(tmp_path / "t").calls[0]
    assert torch.equal(again.segments, schedule.segments) and torch.equal(again.times, trace.calls[0].times)
    assert again.program_indptr.tolist() == list(range(len(schedule.segments) + 1))
    for change, message in (
        ({"times": again.times[1:]}, "times: .*a row for every program"),
        ({"program_indptr": again.program_indptr + 1}, "program_indptr: expected 0, then rising numbers"),
        ({"program_indptr": None}, "times: they come with the segments that were timed, and those of each program"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(again, **change)


@engines
def test_recording_changes_no_bit_of_an_output(engine: str, device: str) -> None:
    plain = Stand(TOY, engine, device).run()[0]
    assert torch.equal(plain, recorded(Stand(TOY, engine, device), scores=Scores(stages=STAGES))[0])


@engines
def test_partials_are_those_of_every_split(engine: str, device: str) -> None:
    stand = Stand(TOY.but(lens=(300, 0, 40), heads=40, policy="static"), engine, device)
    _, trace = recorded(stand)
    call = trace.call(1)
    out, lse = stand.run()
    for r, length in enumerate((300, 0, 40)):
        assert call.partial_out[r].shape == (len(call.ranges[r]), 40, 32)
        merged = torch.einsum("sh,shd->hd", torch.exp(call.partial_lse[r] - lse[r].cpu()), call.partial_out[r])
        if length:
            torch.testing.assert_close(merged, out[r].cpu(), **OUTPUT[torch.float32])
            torch.testing.assert_close(call.lse[r], lse[r].cpu(), **LSE)
            torch.testing.assert_close(call.weights[r], torch.exp(call.partial_lse[r] - lse[r].cpu()), **LSE)


@pytest.mark.parametrize(("stage", "reduce"), [(stage, reduce) for stage in STAGES for reduce in REDUCTIONS[stage]])
@pytest.mark.parametrize("pool", ["page", "split"])
def test_pooling_is_that_of_the_keys_one_by_one(pool: str, stage: str, reduce: str) -> None:
    stand = Stand(TOY.but(page_size=4, policy="static", lens=(70, 0, 9)), *ENGINES[0])
    fine = recorded(stand, scores=Scores(stages=(stage,), pool="key"))[1].call(1)
    call = recorded(stand, scores=Scores(stages=(stage,), pool=pool, reduce=reduce, heads=[5, 1]))[1].call(1)
    of = {"max": torch.amax, "sum": torch.sum, "logsumexp": torch.logsumexp}[reduce]
    for keys, score in zip(fine.scores, call.scores, strict=True):
        assert score.values.shape == (2, len(score.edges) - 1) and score.heads == (5, 1)
        for i, (a, b) in enumerate(zip(score.edges, score.edges[1:], strict=False)):
            torch.testing.assert_close(score.values[:, i], of(keys.values[[5, 1], a:b], -1), **OUTPUT[torch.float32])
    if pool == "page":
        assert call.scores[0].edges == (*range(0, 70, 4), 70)
    else:
        assert call.scores[0].edges == (0, 32, 64, 70)


@pytest.mark.parametrize("edges", [(0, 16, 32, 40), (0, 7, 8, 30, 40), (0, 40), (0,)])
def test_bins_of_one_width_are_reduced_at_once_to_the_same_bits(edges: tuple[int, ...]) -> None:
    values = torch.randn(3, edges[-1])
    for name, reduce in bins._REDUCE.items():
        alone = [reduce(values[:, a:b]) for a, b in pairwise(edges)]
        assert torch.equal(bins.pooled(values, edges, name), torch.stack(alone, -1) if alone else values)


def test_pooling_takes_as_many_steps_as_there_are_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setitem(bins._REDUCE, "sum", lambda x: steps.append(x.shape[1]) or x.sum(-1))
    bins.pooled(torch.randn(2, 4090), (*range(0, 4090, 16), 4090), "sum")
    assert steps == [255, 1]


def test_long_requests_are_pooled_by_page_unless_asked_otherwise() -> None:
    stand = Stand(TOY.but(lens=(257, 256)), *ENGINES[0])
    long, short = recorded(stand, scores=True)[1].call(1).scores
    assert len(long.edges) - 1 == 17 and not long.by_key and short.by_key


def test_a_budget_leaves_out_and_says_what() -> None:
    stand = Stand(TOY, *ENGINES[0])
    _, whole = recorded(stand, scores=True)
    _, trace = recorded(stand, scores=True, budget_bytes=whole.bytes - 1)
    assert trace.bytes < whole.bytes and len(trace.left_out) == 1
    assert "call 0, layer 1: weights of request 3" in trace.left_out[0] and "the budget is" in trace.left_out[0]


@pytest.mark.parametrize("budget", [1, 127, 128, 1000, 20_000, 40_000])
def test_a_budget_is_held(budget: int) -> None:
    stand = Stand(TOY, *ENGINES[0])
    with record(stand.backend, scores=Scores(stages=STAGES), budget_bytes=budget) as trace:
        for _ in range(3):
            stand.run()
    assert trace.bytes <= budget
    assert bool(trace.calls) == (budget >= 128) and trace.left_out


def test_where_not_even_log_sum_exps_fit_no_call_is_kept_and_that_is_said_once() -> None:
    stand = Stand(TOY, *ENGINES[0])
    with record(stand.backend, scores=True, budget_bytes=1) as trace:
        stand.run()
        stand.run()
    assert trace.calls == []
    assert trace.left_out == ["call 0, layer 1: everything, and all later calls (128 bytes; the budget is 1)"]


def test_what_is_kept_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summing the calls so far for every part of the next would be quadratic."""
    monkeypatch.setattr(CallTrace, "bytes", property(lambda call: pytest.fail("summed again")))
    _, trace = recorded(Stand(TOY, *ENGINES[0]), scores=Scores(stages=STAGES))
    assert len(trace.calls) == 1


def test_only_the_chosen_layers_are_recorded() -> None:
    wb = attnlab.workbench("SmolLM2-135M", lens=[40], policy="seed", engine="eager")
    with attnlab.record(wb.backend, layers=[18]) as trace:
        for layer in (0, 18, 23):
            wb.decode(layer)
    assert [call.layer for call in trace.calls] == [18]
    with pytest.raises(ValueError, match="this trace has calls of layers 18, got 0"):
        trace.call(0)


def test_bad_wishes_are_refused_before_anything_runs() -> None:
    stand = Stand(TOY, *ENGINES[0])
    for wish, message in (
        ({"budget_bytes": 0}, "budget_bytes: expected at least 1, got 0"),
        ({"budget_bytes": True}, "budget_bytes: expected an int, got True"),
        ({"layers": [True]}, r"layers: expected a list of numbers, got \[True\]"),
        ({"layers": [9]}, "layer: model 'uniform' has attention in layers 0, 1, got 9"),
        ({"layers": 18}, "layers: expected a list of numbers, got 18"),
        ({"layers": "18"}, "layers: expected a list of numbers, got '18'"),
        ({"scores": "weights"}, "scores: expected a Scores, True or False, got 'weights'"),
        ({"scores": 1}, "scores: expected a Scores, True or False, got 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message), record(stand.backend, **wish):
            raise AssertionError("the block must not be entered")
    for wish, message in (
        ({"stages": ("hot",)}, "stages: expected one of raw, scaled, capped, masked, weights, got 'hot'"),
        ({"pool": "word"}, "pool: expected one of key, page, split, got 'word'"),
        ({"reduce": "mean"}, r"reduce \(weights\): expected one of sum, max, got 'mean'"),
        ({"reduce": "logsumexp"}, r"reduce \(weights\): expected one of sum, max, got 'logsumexp'"),
        ({"reduce": "sum", "stages": STAGES}, r"reduce \(raw\): expected one of max, logsumexp, got 'sum'"),
        ({"stages": "weights"}, r"stages: expected a list of stages, such as \('weights',\), got 'weights'"),
        ({"stages": ()}, "stages: expected at least one, got none; scores=False keeps none"),
        ({"stages": ("raw", "raw")}, r"stages: expected each one once, got \('raw', 'raw'\)"),
        ({"heads": ()}, "heads: expected at least one, got none; heads=None takes all"),
        ({"heads": (1, 0, 1)}, r"heads: expected each one once, got \(1, 0, 1\)"),
        ({"requests": ()}, "requests: expected at least one, got none; requests=None takes all"),
        ({"requests": (0, 0)}, r"requests: expected each one once, got \(0, 0\)"),
        ({"heads": 3}, "heads: expected a list of numbers, got 3"),
        ({"heads": (True,)}, r"heads: expected a list of numbers, got \(True,\)"),
        ({"requests": ["0"]}, r"requests: expected a list of numbers, got \['0'\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Scores(**wish)
    assert stand.backend.tracer is None


@pytest.mark.parametrize("wrong", [None, "backend", 3])
def test_only_a_backend_is_recorded(wrong: object) -> None:
    with pytest.raises(TypeError, match=f"backend: expected an AttentionBackend, got {type(wrong).__name__}"):
        record(wrong).__enter__()


def test_a_budget_may_be_of_any_size() -> None:
    assert len(recorded(Stand(TOY, *ENGINES[0]), budget_bytes=1 << 40)[1].calls) == 1


def test_a_request_or_head_that_is_not_there_is_named() -> None:
    stand = Stand(TOY, *ENGINES[0])
    with pytest.raises(ValueError, match="requests: expected 0 to 3, got 4"):
        recorded(stand, scores=Scores(requests=(4,)))
    with pytest.raises(ValueError, match="heads: expected 0 to 7, got 8"):
        recorded(stand, scores=Scores(heads=(8,)))
    assert stand.backend.tracer is None


def test_one_backend_is_recorded_once_at_a_time() -> None:
    stand = Stand(TOY, *ENGINES[0])
    with record(stand.backend), pytest.raises(RuntimeError, match="is being recorded already"), record(stand.backend):
        pass
    assert stand.backend.tracer is None


def test_times_need_compiled_programs() -> None:
    stand = Stand(TOY, "eager", ENGINES[0][1])
    with (
        pytest.raises(NotImplementedError, match='engine="eager" has no programs to time'),
        record(stand.backend, times=True),
    ):
        pass


@pytest.mark.gpu
def test_times_tell_when_every_program_ran() -> None:
    stand = Stand(TOY.but(lens=(300, 0, 40), policy="static", heads=40), "triton", "cuda")
    plain = stand.run()[0]
    out, trace = recorded(stand, times=True)
    times, segments = trace.call(1).times, trace.call(1).segments
    assert torch.equal(out, plain)
    assert bool(((times[..., 1] > 0) == (segments[:, 2] < segments[:, 3])[:, None]).all())
    ran = times[times[..., 1] > 0]
    used = sum(len(mine) for mine in trace.call(1).ranges)
    assert len(ran) == used * 2 * 2  # KV heads and head tiles
    there = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert bool((ran[:, 2] >= ran[:, 1]).all()) and len(ran[:, 0].unique()) > 1 and int(ran[:, 0].max()) < there
    assert int(ran[:, 2].max() - ran[:, 1].min()) < 10_000_000


@pytest.mark.gpu
def test_recording_inside_a_graph_capture_is_refused() -> None:
    stand = Stand(TOY, "triton", "cuda")
    plan, out = stand.plan(), torch.empty_like(stand.q)
    stand.run(plan)
    refused = pytest.raises(RuntimeError, match="record: a CUDA graph is being captured")
    with refused, record(stand.backend), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stand.backend.decode(1, stand.q, None, None, plan, save=False, out=out)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Trace, Path]:
    stand = Stand(TOY.but(kv_dtype=FP8, dtype=torch.bfloat16), *ENGINES[0])
    _, trace = recorded(stand, scores=Scores(stages=("scaled", "weights")))
    trace.tokens = (("a", "b"), ("·c",))
    trace.save(tmp_path / "trace.safetensors")
    return trace, tmp_path / "trace.safetensors"


def test_a_saved_trace_is_read_back_whole(saved: tuple[Trace, Path]) -> None:
    trace, path = saved
    again = Trace.load(path)
    assert (again.tokens, again.left_out, again.bytes) == (trace.tokens, trace.left_out, trace.bytes)
    for a, b in zip(trace.calls, again.calls, strict=True):
        assert all(getattr(a, name) == getattr(b, name) for name in _PLAIN)
        pairs = zip(a.scores, b.scores, strict=True)
        assert all(getattr(x, name) == getattr(y, name) for x, y in pairs for name in _SCORE_PLAIN)
        pairs = zip(a._tensors(), b._tensors(), strict=True)
        assert all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


def test_numbers_may_be_numpys_and_a_call_may_be_there_twice(tmp_path: Path) -> None:
    stand = Stand(TOY, *ENGINES[0])
    trace = recorded(stand, scores=Scores(requests=tuple(np.array([1, 2]))))[1]
    (call,) = trace.calls
    trace.calls = [call, replace(call, layer=np.int64(1), start=tuple(np.array(call.start)))]
    trace.save(tmp_path / "t")
    first, second = Trace.load(tmp_path / "t").calls
    assert torch.equal(first.lse, second.lse) and (second.layer, second.start) == (1, call.start)


def test_edges_of_one_width_take_a_few_bytes(tmp_path: Path) -> None:
    keys, call = 131_072, recorded(Stand(TOY.but(lens=(5,)), *ENGINES[0]))[1].call(1)
    edges = {1: tuple(range(keys + 1)), 16: tuple(range(0, keys + 1, 16)), 7: (*range(0, keys, 7), keys)}
    scores = tuple(
        ScoreTrace(
            request=0, query=0, stage="weights", reduce="sum", heads=(0,), edges=e, values=torch.zeros(1, len(e) - 1)
        )
        for e in edges.values()
    )
    long = replace(call, ranges=(((0, keys),),), partial_lse=(), partial_out=(), scores=scores)
    Trace(calls=[long]).save(tmp_path / "t")
    assert [score.edges for score in Trace.load(tmp_path / "t").calls[0].scores] == list(edges.values())
    assert (
        int.from_bytes((tmp_path / "t").read_bytes()[:8], "little") < 2000
    )  # safetensors begin with the header's size


def test_a_header_must_not_ask_for_more_bins_than_there_are(saved: tuple[Trace, Path]) -> None:
    changed(saved[1], (*SCORE, "edges"), {"width": 1, "keys": 1 << 60})
    with pytest.raises(ValueError, match="edges: 1,152,921,504,606,846,976 keys have .* bins of 1, the values 5"):
        Trace.load(saved[1])


def test_a_header_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.trace.MOST_HEADER", 100)
    with pytest.raises(ValueError, match="what is no tensor takes 1,0.. bytes; a file can hold 100 of that"):
        Trace(tokens=(("x" * 990,),)).save(tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_a_trace_is_saved_where_a_file_can_lie(tmp_path: Path) -> None:
    for path, message in (("", "expected a file's name"), (tmp_path, "is a folder"), (tmp_path / "a/b", "no folder")):
        with pytest.raises(OSError, match=f"^path: .*{message}"):
            Trace().save(path)


def test_a_truncated_file_is_no_trace(saved: tuple[Trace, Path]) -> None:
    _, path = saved
    whole = path.read_bytes()
    for keep in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match="is no whole safetensors file"):
            Trace.load(path)


def test_a_hostile_file_is_no_trace(tmp_path: Path, saved: tuple[Trace, Path]) -> None:
    _, path = saved
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Trace.load(tmp_path / "nowhere")
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="no trace of attnlab's"):
        Trace.load(path)
    for header in ("[]", "{}", "not json", json.dumps({"format": "1"}), json.dumps({"format": FORMAT, "calls": [{}]})):
        save_file({"x": torch.zeros(1)}, path, metadata={"attnlab_trace": header})
        with pytest.raises(ValueError, match="is damaged, or disagrees with its tensors"):
            Trace.load(path)
    path.write_bytes(b"\x80\x04\x95" + bytes(100))  # a pickle
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        Trace.load(path)


@pytest.mark.parametrize("format", [FORMAT - 1, FORMAT + 1])
def test_a_trace_of_another_version_is_said_to_be_one(saved: tuple[Trace, Path], format: int) -> None:
    _, path = saved
    changed(path, ("format",), format)
    with pytest.raises(ValueError, match=f"has format {format}, this attnlab reads {FORMAT}; record it again, or read"):
        Trace.load(path)


def changed(path: Path, place: tuple[object, ...], value: object) -> None:
    """Put another value into a saved trace's header."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        document = json.loads(file.metadata()["attnlab_trace"])
    *way, last = place
    inner = document
    for step in way:
        inner = inner[step]
    inner[last] = value
    save_file(tensors, path, metadata={"attnlab_trace": json.dumps(document)})


CALL, SCORE = ("calls", 0), ("calls", 0, "scores", 0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((*CALL, "heads"), "8", "heads: expected an int, got '8'"),
        ((*CALL, "heads"), 6, r"lse: expected \[4, 6\]"),
        ((*CALL, "kv_heads"), 3, "heads: 8 are no multiple of 3 KV heads"),
        ((*CALL, "kv_heads"), 0, "kv_heads: expected at least 1"),
        ((*CALL, "page_size"), -1, "page_size: expected at least 1"),
        ((*CALL, "scale"), "1", "scale: expected a Python number"),
        ((*CALL, "scale"), float("nan"), "scale: expected a number"),
        ((*CALL, "ranges", 0), [[0, 3], [2, 5]], "overlaps the one before"),
        ((*CALL, "ranges", 0), [[1, 5]], "leaves a gap"),
        ((*CALL, "ranges"), 7, "not iterable"),
        ((*CALL, "nominal"), [1], "nominal: expected a number for each of 4 requests, got 1"),
        ((*CALL, "start"), [0.5] * 4, "cannot be interpreted as an integer"),
        ((*CALL, "q_pos"), [], "q_pos: expected a number for each of 4 rows, got 0"),
        ((*CALL, "partials"), [1, 0], "partial_lse: expected those of 4 requests or none, got 1"),
        ((*CALL, "times"), True, "0.segments"),
        ((*SCORE, "stage"), "hot", "stage: expected one of raw"),
        ((*SCORE, "reduce"), "sum", r"reduce \(scaled\): expected one of max, logsumexp"),
        ((*SCORE, "request"), 4, "request: the call of layer 1 has requests 0 to 3, got 4"),
        ((*SCORE, "heads"), [8] * 8, "heads: expected 0 to 7"),
        ((*SCORE, "edges"), [0, 1, 1, 2, 3, 5], "edges: expected 0, then rising key numbers"),
        ((*SCORE, "edges"), [0, 1, 2, 3, 4, 6], "edges: expected the 5 keys of a request, got 6"),
        ((*SCORE, "edges"), [], "edges: expected 0, then"),
    ],
)
def test_a_header_that_cannot_be_true_is_damaged(
    saved: tuple[Trace, Path], place: tuple[object, ...], value: object, message: str
) -> None:
    _, path = saved
    changed(path, place, value)
    with pytest.raises(ValueError, match=f"is damaged, or disagrees with its tensors .*{message}"):
        Trace.load(path)


@pytest.mark.parametrize("name", ["0.lse", "0.partial_lse.0", "0.partial_out.1", "0.scores.0"])
def test_tensors_of_another_dtype_are_damaged(saved: tuple[Trace, Path], name: str) -> None:
    _, path = saved
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file({**tensors, name: tensors[name].double()}, path, metadata=metadata)
    with pytest.raises(ValueError, match="is damaged, .* float32, got .* float64"):
        Trace.load(path)


def test_a_header_that_disagrees_with_its_tensors_is_damaged(saved: tuple[Trace, Path]) -> None:
    trace, path = saved
    call = trace.calls[0]
    object.__setattr__(call, "lse", call.lse[:, :3])
    trace.save(path)
    with pytest.raises(ValueError, match=r"lse: expected \[4, 8\] float32, got \[4, 3\]"):
        Trace.load(path)
