"""Recording: what it keeps is what happened, keeping it changes nothing, and bad input is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import attnlab
from attnlab.inspect.record import Scores, record
from attnlab.trace import STAGES, Trace
from tests.cases import CASES, ENGINES, FP8, Case, Stand
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
    assert not torch.allclose(stages["capped"], stages["scaled"])
    assert torch.equal(stages["masked"], stages["capped"])
    sunk = torch.logaddexp(stages["masked"].logsumexp(-1), stand.sinks.cpu())
    torch.testing.assert_close(stages["weights"], torch.exp(stages["masked"] - sunk[:, None]), **OUTPUT[torch.float32])


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
        merged = torch.einsum("sh,shd->hd", call.weights[r], call.partial_out[r])
        if length:
            torch.testing.assert_close(merged, out[r].cpu(), **OUTPUT[torch.float32])
            torch.testing.assert_close(call.lse[r], lse[r].cpu(), **LSE)


@pytest.mark.parametrize("reduce", ["max", "sum", "logsumexp"])
@pytest.mark.parametrize("pool", ["page", "split"])
def test_pooling_is_that_of_the_keys_one_by_one(pool: str, reduce: str) -> None:
    stand = Stand(TOY.but(page_size=4, policy="static", lens=(70, 0, 9)), *ENGINES[0])
    fine = recorded(stand, scores=Scores(stages=("scaled",), pool="key"))[1].call(1)
    call = recorded(stand, scores=Scores(stages=("scaled",), pool=pool, reduce=reduce, heads=(5, 1)))[1].call(1)
    of = {"max": torch.amax, "sum": torch.sum, "logsumexp": torch.logsumexp}[reduce]
    for keys, score in zip(fine.scores, call.scores, strict=True):
        assert score.values.shape == (2, len(score.edges) - 1) and score.heads == (5, 1)
        for i, (a, b) in enumerate(zip(score.edges, score.edges[1:], strict=False)):
            torch.testing.assert_close(score.values[:, i], of(keys.values[[5, 1], a:b], -1), **OUTPUT[torch.float32])
    if pool == "page":
        assert call.scores[0].edges == (*range(0, 70, 4), 70)
    else:
        assert call.scores[0].edges == (0, 32, 64, 70)


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
    _, tiny = recorded(stand, scores=True, budget_bytes=1)
    assert tiny.call(1).partial_out == () and tiny.call(1).scores == () and len(tiny.left_out) == 7


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
        ({"layers": [9]}, "layer: model 'uniform' has attention in layers 0, 1, got 9"),
    ):
        with pytest.raises(ValueError, match=message), record(stand.backend, **wish):
            raise AssertionError("the block must not be entered")
    for wish, message in (
        ({"stages": ("hot",)}, "stages: expected one of raw, scaled, capped, masked, weights, got 'hot'"),
        ({"pool": "word"}, "pool: expected one of key, page, split, got 'word'"),
        ({"reduce": "mean"}, "reduce: expected one of max, sum, logsumexp, got 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            Scores(**wish)
    assert stand.backend.tracer is None


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
    times = trace.call(1).times
    assert torch.equal(out, plain)
    ran = times[times[:, 1] > 0]
    used = sum(len(mine) for mine in trace.call(1).ranges)
    assert len(ran) == used * 2 * 2  # KV heads and head tiles
    assert bool((ran[:, 2] >= ran[:, 1]).all()) and int(ran[:, 0].max()) < 132
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
        assert (a.ranges, a.nominal, a.policy, a.scale, a.lens) == (b.ranges, b.nominal, b.policy, b.scale, b.lens)
        pairs = zip(a._tensors(), b._tensors(), strict=True)
        assert all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


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
    for header in ("[]", "{}", "not json", json.dumps({"format": 2}), json.dumps({"format": 1, "calls": [{}]})):
        save_file({"x": torch.zeros(1)}, path, metadata={"attnlab_trace": header})
        with pytest.raises(ValueError, match="is damaged, or disagrees with its tensors"):
            Trace.load(path)
    path.write_bytes(b"\x80\x04\x95" + bytes(100))  # a pickle
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        Trace.load(path)


def test_a_header_that_disagrees_with_its_tensors_is_damaged(saved: tuple[Trace, Path]) -> None:
    trace, path = saved
    call = trace.calls[0]
    object.__setattr__(call, "lse", call.lse[:, :3])
    trace.save(path)
    with pytest.raises(ValueError, match=r"0.lse: expected \[4, 8\], got \[4, 3\]"):
        Trace.load(path)
