"""Recordings of extends and verifies: chosen queries, with the scores that the kernels had over the keys they saw."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab._boot import INTERPRETED
from attnlab.inspect import rows
from attnlab.inspect.record import Scores, record
from attnlab.inspect.rows import chosen_rows
from attnlab.inspect.score_view import ScoreView, StageView
from attnlab.plots.show import show
from attnlab.trace import STAGES, CallTrace, Trace
from tests.cases import ENGINES
from tests.extend_cases import CASES, Case, Stand
from tests.tolerances import LSE, OUTPUT, output

engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
FEW = ["toy", "chunk-window", "mask-new-window", "tree-window", "everything", "mla", "one-pass-mask", "fp8"]
TREE = next(case for case in CASES if case.id == "tree")
TOY = CASES[0]


def recorded(stand: Stand, call: str, **wanted: object) -> tuple[Tensor, Tensor, CallTrace]:
    with record(stand.backend, **wanted) as trace:
        out, lse = stand.run(call)
    return out, lse, trace.call(1)


def ways(case: Case) -> list[str]:
    return ["extend", "verify"] if case.verifies else ["extend"]


def runs() -> list[tuple[Case, str, str, str]]:
    """Every case on the eager engine; few of them where programs are interpreted, one by one."""
    found = []
    for engine, device in ENGINES:
        slow = engine == "triton" and INTERPRETED
        found += [
            pytest.param(case, way, engine, device, id=f"{case.id}-{way}-{engine}")
            for case in CASES
            for way in ways(case)
            if not slow or case.id in FEW
        ]
    return found


every_run = pytest.mark.parametrize(("case", "way", "engine", "device"), runs())


def seen_by_hand(stand: Stand, request: int, query: int) -> list[bool]:
    """Which of a request's keys a query sees: mask or causality, then window and chunk, in Python."""
    case, (q_pos, kv_pos, shown) = stand.case, stand.sight(request, query)
    return [
        see
        and (case.window is None or q_pos - p < case.window)
        and (case.chunk is None or p // case.chunk == q_pos // case.chunk)
        for p, see in zip(kv_pos, shown, strict=True)
    ]


@every_run
def test_scores_are_those_of_the_keys_seen_and_add_up_to_the_kernels_log_sum_exp(
    case: Case, way: str, engine: str, device: str
) -> None:
    stand = Stand(case, engine, device)
    _, lse, call = recorded(stand, way, queries=None, scores=Scores(stages=("masked",), pool="key"))
    assert call.mode == way and len(call.rows) == sum(case.new) == len(call.scores)
    for i, score in enumerate(call.scores):
        assert (score.request, score.query) == call.rows[i]
        seen = seen_by_hand(stand, score.request, score.query)
        first, keys = call.start[score.request], score.edges[-1]
        assert not any(seen[:first]) and not any(seen[first + keys :])
        hidden = score.values == float("-inf")
        assert torch.equal(hidden, ~torch.tensor(seen[first : first + keys])[None].expand_as(hidden))
        total = score.values.logsumexp(-1)
        torch.testing.assert_close(call.lse[i], total, **LSE)
        if stand.inputs.sinks is not None:
            total = torch.logaddexp(total, stand.inputs.sinks.cpu())
        torch.testing.assert_close(total, lse[i].cpu(), **LSE)


@every_run
def test_weights_give_the_output_when_values_are_weighted(case: Case, way: str, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    out, _, call = recorded(stand, way, queries=[0, -1], scores=Scores(pool="key"))
    assert call.rows == tuple((r, q) for r, n in enumerate(case.new) for q in sorted({0, n - 1}) if n)
    offsets = torch.tensor([0, *case.new]).cumsum(0).tolist()
    for i, score in enumerate(call.scores):
        given = stand.inputs.v[score.request]
        scale = case.k_scale if case.mla else case.v_scale
        v = stand.seen(given, scale, case.prefix[score.request]).cpu().repeat_interleave(stand.spec.group, 1)
        first = call.start[score.request]
        want = torch.einsum("hn,nhd->hd", score.values.double(), v[first : first + score.edges[-1]])
        row = out[offsets[score.request] + score.query].cpu()
        torch.testing.assert_close(row.double(), want, **output(case.dtype, case.softcap))
        assert torch.equal(call.out[i], row.float())


@engines
@pytest.mark.parametrize("way", ["extend", "verify"])
def test_recording_changes_no_bit_of_an_output(engine: str, device: str, way: str) -> None:
    plain = Stand(TREE, engine, device).run(way)
    out, lse, _ = recorded(Stand(TREE, engine, device), way, queries=None, scores=Scores(stages=STAGES))
    assert torch.equal(plain[0], out) and torch.equal(plain[1], lse)


@engines
def test_stages_before_the_mask_show_hidden_keys_too(engine: str, device: str) -> None:
    stand = Stand(TREE.but(softcap=5.0), engine, device)
    _, _, call = recorded(stand, "verify", queries=[3], scores=Scores(stages=STAGES, requests=(1,), heads=(2,)))
    raw, scaled, capped, masked, weights = (score.values[0].double() for score in call.scores)
    k = stand.seen(stand.inputs.k[1], 1.0, 200)[:, 2 // stand.spec.group].cpu()
    want = k @ stand.inputs.q[1][3, 2].cpu().double()
    torch.testing.assert_close(raw, want, **OUTPUT[torch.float32])
    torch.testing.assert_close(scaled, want * stand.spec.scale, **OUTPUT[torch.float32])
    torch.testing.assert_close(capped, 5.0 * torch.tanh(scaled / 5.0), **OUTPUT[torch.float32])
    seen = torch.tensor(seen_by_hand(stand, 1, 3))
    assert torch.equal(masked, torch.where(seen, capped, float("-inf"))) and not seen.all()
    torch.testing.assert_close(weights, masked.softmax(-1), **OUTPUT[torch.float32])


@engines
def test_a_modifier_is_asked_for_visible_keys_alone(engine: str, device: str) -> None:
    stand = Stand(TREE.but(mod="alibi"), engine, device)
    _, _, call = recorded(stand, "extend", queries=[2], scores=Scores(stages=("scaled", "capped", "masked")))
    for request in range(3):
        scaled, capped, masked = (score.values for score in call.scores if score.request == request)
        assert scaled.isfinite().all() and torch.equal(capped, masked)


def test_a_long_request_is_looked_at_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(TOY, *ENGINES[0])
    wanted = {"queries": None, "scores": Scores(stages=("masked",), pool="key")}
    _, _, at_once = recorded(stand, "extend", **wanted)
    asked: list[int] = []
    scores = stand.backend.engine.scores
    monkeypatch.setattr(stand.backend.engine, "scores", lambda call: asked.append(call.rows) or scores(call))
    monkeypatch.setattr(rows, "SLICE_BYTES", 4 * 70 * 4 * 8)  # eight rows of the first request
    _, _, sliced = recorded(stand, "extend", **wanted)
    assert max(asked) <= 9 and len(asked) > 20
    torch.testing.assert_close(sliced.lse, at_once.lse, **LSE)
    for one, other in zip(sliced.scores, at_once.scores, strict=True):
        assert (one.request, one.query) == (other.request, other.query)
        torch.testing.assert_close(one.values, other.values, **OUTPUT[torch.float32])


@engines
def test_a_part_of_the_keys_adds_up_to_its_own_log_sum_exp(engine: str, device: str) -> None:
    stand = Stand(TOY, engine, device)
    q, k, v = stand.new()
    for parts in ("cached", "new"):
        lse = torch.full(q.shape[:2], float("nan"), device=stand.device)
        with record(stand.backend, queries=None) as trace:
            stand.backend.extend(1, q, k, v, stand.backend.plan(stand.batch), lse=lse, parts=parts)
        torch.testing.assert_close(trace.call(1).lse, lse.cpu(), **LSE)
        first = trace.call(1).start
        assert first == ((0, 0, 0, 0) if parts == "cached" else TOY.prefix)


# Which queries


def test_a_recording_keeps_the_last_query_of_a_request_unless_told_otherwise() -> None:
    stand = Stand(TOY, *ENGINES[0])
    _, _, call = recorded(stand, "extend", scores=True)
    assert call.rows == ((0, 69), (1, 8), (2, 0)) and call.q_pos == (69, 45, 130) == call.own
    assert call.ranges == (((0, 70),), ((0, 46),), ((0, 131),), ((0, 5),)) and call.nominal == (1, 1, 1, 1)
    assert call.partial_lse == () and call.out is not None and call.out.shape == (3, 4, stand.spec.v_dim)


def test_a_request_with_fewer_tokens_gives_those_that_it_has() -> None:
    assert [(row.request, row.query, row.token) for row in chosen_rows([0, 2, -1], [4, 2, 0, 1])] == [
        *((0, 0, 0), (0, 2, 2), (0, 3, 3)),
        *((1, 0, 4), (1, 1, 5), (3, 0, 6)),
    ]
    assert chosen_rows(None, []) == () == chosen_rows([5], [0, 0])


@pytest.mark.parametrize("number", [70, -71])
def test_a_query_that_no_request_has_is_refused_before_anything_is_stored(number: int) -> None:
    stand = Stand(TOY, *ENGINES[0])
    before = stand.pool.view(1).k.clone()
    with (
        pytest.raises(
            ValueError, match=f"queries: expected numbers of a request's new tokens, -70 to 69, got {number}"
        ),
        record(stand.backend, queries=[number]),
    ):
        stand.run("extend")
    assert same(stand.pool.view(1).k, before)
    assert stand.backend.tracer is None


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("queries", ["12", 3, [1.5]])
def test_queries_are_numbers(queries: object) -> None:
    with (
        pytest.raises(TypeError, match="queries: expected a list of numbers"),
        record(Stand(TOY, *ENGINES[0]).backend, queries=queries),
    ):
        pass


@pytest.mark.parametrize("name", ["requests", "heads"])
def test_a_request_or_head_that_is_not_there_is_refused(name: str) -> None:
    stand = Stand(TOY, *ENGINES[0])
    with (
        pytest.raises(ValueError, match=f"{name}: expected 0 to 3, got 4"),
        record(stand.backend, scores=Scores(**{name: (4,)})),
    ):
        stand.run("extend")


def test_a_budget_leaves_out_and_says_what() -> None:
    stand = Stand(TOY, *ENGINES[0])
    with record(stand.backend, queries=None, scores=True, budget_bytes=80_000) as trace:
        stand.run("extend")
    assert trace.bytes <= 80_000 and len(trace.left_out) == len(set(trace.left_out)) > 1
    assert "call 0, layer 1: weights of request 2, query 0 (" in trace.left_out[-1]


# Ranges, files, views


def test_the_ranges_of_a_verify_are_its_splits_and_then_the_drafts() -> None:
    stand = Stand(TREE.but(policy="static"), *ENGINES[0])
    _, _, call = recorded(stand, "verify", scores=Scores(pool="split"))
    assert call.policy.startswith("static")
    for request, (cached, new) in enumerate(zip(TREE.prefix, TREE.new, strict=True)):
        assert call.ranges[request][-1] == (cached, cached + new)
        score = call.scores[request]
        assert score.edges == (0, *(end for _, end in call.ranges[request]))
        torch.testing.assert_close(score.values.sum(-1), torch.ones(4), **OUTPUT[torch.float32])


def test_a_saved_recording_comes_back_whole(tmp_path: Path) -> None:
    stand = Stand(TREE, *ENGINES[0])
    with record(stand.backend, queries=[0, 2], scores=Scores(stages=STAGES)) as trace:
        stand.run("verify")
        stand.run("extend")
    trace.save(tmp_path / "trace")
    again = Trace.load(tmp_path / "trace")
    for one, other in zip(again.calls, trace.calls, strict=True):
        assert (one.mode, one.rows, one.q_pos, one.own) == (other.mode, other.rows, other.q_pos, other.own)
        assert torch.equal(one.lse, other.lse) and torch.equal(one.out, other.out)
        for a, b in zip(one.scores, other.scores, strict=True):
            assert (a.request, a.query, a.stage) == (b.request, b.query, b.stage) and torch.equal(a.values, b.values)


def test_a_draft_of_a_tree_knows_its_own_key_though_siblings_share_its_position() -> None:
    stand = Stand(TREE, *ENGINES[0])
    stand.inputs.parents[1] = [-1, 0, 0, 0, *range(3, 11)]
    _, _, call = recorded(stand, "verify", queries=None, scores=Scores(pool="key"))
    view = ScoreView.of_call(call, request=1, query=3)
    assert (view.query, view.own, view.keys) == (201, 203, 212)
    assert view.weights[:, [201, 202]].eq(0).all() and view.weights[:, 203].gt(0).all()


def test_views_are_of_one_query_and_are_drawn() -> None:
    wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
    with wb.record(queries=[0, -1], scores=Scores(stages=STAGES, pool="key")) as trace:
        wb.extend(18, last=8)
    with pytest.raises(ValueError, match="of request 1, layer 18 has recorded queries 0, 7, got None; name one"):
        ScoreView.of(trace, layer=18, request=1)
    early, late = (ScoreView.of(trace, layer=18, request=0, query=query) for query in (0, 7))
    assert (early.query, early.keys, late.query, late.keys) == (292, 293, 299, 300)
    assert early.tokens == late.tokens[:293] == wb.tokens(0)[:293]
    torch.testing.assert_close(late.weights, wb.scores(18, request=0).weights, **OUTPUT[torch.float32])
    stages = StageView.of(trace, layer=18, request=1, head=4, query=7)
    torch.testing.assert_close(stages.masked, wb.stages(18, request=1, head=4).masked, **OUTPUT[torch.float32])
    for view in (early, stages):
        assert "<svg" in show(view, theme="light").to_svg()


def test_the_last_tokens_ask_what_decodes_would() -> None:
    wb = attnlab.workbench("SmolLM2-135M", lens=[300, 5], policy="seed", engine="eager", layers=[18, 3])
    for layer in (18, 3):
        out = wb.extend(layer, last=8)
        assert out.shape == (13, 9, 64)
        torch.testing.assert_close(out[[7, 12]], wb.decode(layer), **OUTPUT[torch.float16])
    with pytest.raises(ValueError, match="last: layer 18 has the recorded queries of a request's last 128, got 129"):
        wb.extend(18, last=129)
    assert wb.extend(3, last=129).shape == (134, 9, 64)
    assert torch.equal(wb.extend(3, last=129)[128:], wb.extend(3, last=129)[128:])
