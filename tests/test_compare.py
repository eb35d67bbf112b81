"""Two recordings held against each other: planted differences are found where they were planted, and nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnlab
from attnlab.batch import DecodeBatch
from attnlab.inspect.compare import Comparison, compare
from attnlab.inspect.differences import PARTS, Difference, Place, coarsest, steps_between
from attnlab.inspect.record import Scores, record
from attnlab.plots.show import show
from attnlab.plots.style import THEMES
from attnlab.trace import STAGES, CallTrace, ScoreTrace, Trace
from tests.cases import CASES, ENGINES, FP8, Case, Stand
from tests.extend_cases import CASES as EXTENDS
from tests.extend_cases import Stand as ExtendStand
from tests.test_plots import faults
from tests.tolerances import LSE, OUTPUT

TOY = CASES[0].but(lens=(5, 64, 300, 1), policy="static")
ENGINE = ENGINES[0]
ALL = Scores(stages=STAGES, pool="key")
REQUEST, KEY, KV_HEAD = 2, 100, 1


def recorded(stand: Stand, **wanted: Any) -> tuple[Tensor, Trace]:
    with record(stand.backend, **{"scores": ALL, **wanted}) as trace:
        out, _ = stand.run()
    return out, trace


def of_case(case: Case = TOY, engine: tuple[str, str] = ENGINE, **wanted: Any) -> Trace:
    return recorded(Stand(case, *engine), **wanted)[1]


def planted(what: str, value: float = 1.0) -> tuple[Comparison, Tensor, Tensor]:
    """Change one row of K or V between two runs; return their comparison, and the oracle's outputs of both."""
    stand = Stand(TOY, *ENGINE)
    before, wanted = recorded(stand)[1], stand.expected()[0]
    getattr(stand, what)[REQUEST][KEY, KV_HEAD] += value
    slots = stand.table.slots_of(stand.rows[REQUEST]).long()
    stand.pool.write(1, slots, stand.k[REQUEST], stand.v[REQUEST])
    after = recorded(stand)[1]
    return compare(before, after), wanted, stand.expected()[0]


def parts(comparison: Comparison, *, same: bool) -> list[str]:
    return [x.part for x in comparison.differences if x.same == same]


# ---------------------------------------------------------------- where


def test_a_changed_value_is_found_in_the_partial_output_of_its_split_under_its_kv_head() -> None:
    comparison, before, after = planted("v")
    assert parts(comparison, same=False) == ["partial out", "out"]
    first = comparison.first
    (split,) = (i for i, (a, b) in enumerate(comparison.calls[0].a.ranges[REQUEST]) if a <= KEY < b)
    assert first.part == "partial out" and (first.requests, first.heads) == ((REQUEST,), (4, 5, 6, 7))
    keys = comparison.calls[0].a.ranges[REQUEST][split]
    place = first.first
    assert (place.request, place.query, place.head, place.split, place.keys) == (REQUEST, None, 4, split, keys)
    assert first.count == 4 * 32 and first.of == sum(map(len, comparison.calls[0].a.ranges)) * 8 * 32
    elsewhere = comparison.calls[0].piece("partial out", REQUEST, None).differs.any(-1)
    elsewhere[4:, split] = False
    assert not elsewhere.any()
    out = comparison.calls[0].of("out")
    assert (out.requests, out.heads) == ((REQUEST,), (4, 5, 6, 7))
    apart = float((after - before).abs().max())
    torch.testing.assert_close(
        torch.tensor(out.absolute), torch.tensor(apart), check_dtype=False, **OUTPUT[torch.float32]
    )


def test_a_changed_key_is_found_in_its_score() -> None:
    comparison, before, after = planted("k")
    first = comparison.first
    assert first.part == "raw" and first.heads == (4, 5, 6, 7) and first.count == 4
    assert str(first.first).startswith(f"request {REQUEST}, head 4, split ") and first.first.keys == (KEY, KEY + 1)
    assert parts(comparison, same=True) == []
    by_oracle = (after - before).abs().amax((0, 2)) > 0
    assert comparison.calls[0].of("out").heads == tuple(by_oracle.nonzero().flatten().tolist())


def test_a_bin_is_as_much_as_is_known_of_a_key() -> None:
    pooled = Scores(stages=("masked",), pool="page", reduce="logsumexp")
    stand = Stand(TOY, *ENGINE)
    before = recorded(stand, scores=pooled)[1]
    stand.pool.view(1).k[stand.table.slots_of(stand.rows[REQUEST])[KEY], KV_HEAD] += 9
    first = compare(before, recorded(stand, scores=pooled)[1]).first
    assert (first.part, first.first.keys, first.first.head) == ("masked", (96, 112), 4)


def test_parts_come_in_the_order_of_the_computation() -> None:
    comparison = planted("k")[0]
    assert [x.part for x in comparison.differences] == list(PARTS)
    assert comparison.first is comparison.differences[0] and comparison.calls[0].first is comparison.first


# ---------------------------------------------------------------- real runs


def test_the_same_run_twice_is_the_same() -> None:
    comparison = compare(of_case(), of_case())
    assert comparison.same and comparison.first is None and comparison.calls[0].cut is None
    numbers = sum(x.numel() for _, x in comparison.calls[0].a._tensors())
    assert comparison.numbers == numbers
    assert str(comparison).startswith(f"a and b have the same bits everywhere: {numbers:,} numbers of 1 call\n")
    assert repr(comparison).startswith("Comparison(1 call; a and b have the same bits everywhere")


@pytest.mark.parametrize("case", [TOY, TOY.but(dtype=torch.float16)], ids=["fp32", "fp16"])
def test_engines_differ_by_rounding_alone(case: Case) -> None:
    runs = (of_case(case, engine) for engine in ENGINES)
    comparison = compare(*runs, names=("eager", "triton"))
    call = comparison.calls[0]
    assert call.cut is None and not call.not_compared and [x.part for x in call.differences] == list(PARTS)
    assert call.of("lse").absolute <= LSE["atol"] + LSE["rtol"] * float(call.a.lse.abs().max())
    for part in ("partial out", "weights"):
        assert call.of(part).relative <= 2 * OUTPUT[torch.float32]["rtol"]
    assert call.of("out").format == str(case.dtype).removeprefix("torch.")
    assert call.of("out").relative <= 2 * OUTPUT[case.dtype]["rtol"]


def test_policies_cut_differently_and_give_the_same_within_rounding() -> None:
    comparison = compare(of_case(TOY.but(policy="static")), of_case(TOY.but(policy="tile")), names=("static", "tile"))
    call = comparison.calls[0]
    differ = tuple(r for r in range(4) if call.a.ranges[r] != call.b.ranges[r])
    assert differ and call.cut.requests == differ and call.cut.request == differ[0]
    pairs = zip(call.a.ranges[differ[0]], call.b.ranges[differ[0]], strict=False)
    number, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    assert (call.cut.number, call.cut.a, call.cut.b) == (number, a, b)
    assert all(call.of(stage).same for stage in STAGES[:4])
    alike = sum(len(call.a.ranges[r]) for r in range(4) if r not in differ)
    assert call.of("partial lse").of == alike * 8 and call.of("partial lse").same
    assert call.of("out").relative <= 2 * OUTPUT[torch.float32]["rtol"]
    assert f"first split {number} of request {differ[0]}" in str(comparison) and "in static" in str(comparison)


def decoded_alone(stand: Stand, request: int) -> Trace:
    mine = slice(request, request + 1)
    batch = DecodeBatch.of(rows=stand.rows[mine], lens=stand.case.lens[mine], device=stand.device)
    with record(stand.backend, scores=ALL) as trace:
        stand.backend.decode(1, stand.q[mine], None, None, stand.backend.plan(batch), save=False)
    return trace


def test_a_request_of_a_batch_is_held_against_the_same_request_alone() -> None:
    tile = Stand(TOY.but(policy="tile"), *ENGINE)
    whole = recorded(tile)[1].call(1)
    for request, mine in enumerate(map(whole.only, range(4))):
        comparison = compare(decoded_alone(tile, request), mine)
        assert comparison.same and comparison.calls[0].cut is None
        assert comparison.numbers == sum(x.numel() for _, x in mine._tensors())
    seed = Stand(TOY.but(policy="seed", lens=(5, 64, 300, 1500)), *ENGINE)
    among = recorded(seed)[1].call(1).only(REQUEST)
    comparison = compare(decoded_alone(seed, REQUEST), among, names=("alone", "among others"))
    assert comparison.calls[0].cut.a != comparison.calls[0].cut.b and not comparison.same
    assert comparison.first.part == "lse"


def test_one_request_of_several_queries_keeps_its_rows_texts_and_no_times() -> None:
    stand = ExtendStand(next(case for case in EXTENDS if len(case.new) > 2), *ENGINE)
    with record(stand.backend, scores=ALL, queries=None) as trace:
        trace.tokens = tuple((f"of {r}",) for r in range(len(stand.case.new)))
        stand.run()
    call = trace.call(1)
    mine = [i for i, (r, _) in enumerate(call.rows) if r == REQUEST]
    one = call.only(REQUEST)
    assert one.rows == tuple((0, call.rows[i][1]) for i in mine) and one.q_pos == tuple(call.q_pos[i] for i in mine)
    assert torch.equal(one.out, call.out[mine]) and torch.equal(one.lse, call.lse[mine])
    assert len(one.scores) == len(mine) * len(STAGES) and one.tokens == ((f"of {REQUEST}",),)
    assert trace.told(trace.calls[0].only(REQUEST)).tokens == one.tokens
    with pytest.raises(ValueError, match=r"request: the call of layer 1 has requests 0 to \d+, got 9"):
        call.only(9)
    clock = {"program_indptr": torch.tensor([0, 1]).int(), "times": torch.zeros(1, 1, 3).long()}
    timed = replace(of_case().calls[0], segments=torch.zeros(1, 5).int(), **clock).only(0)
    assert (timed.times, timed.segments, timed.program_indptr) == (None, None, None)


def test_partial_results_of_as_many_but_other_ranges_are_not_compared() -> None:
    call = of_case(scores=False).calls[0]
    (start, border), (_, end), *rest = call.ranges[REQUEST]
    moved = ((start, border - 1), (border - 1, end), *rest)
    comparison = compare(call, replace(call, ranges=(*call.ranges[:REQUEST], moved, *call.ranges[REQUEST + 1 :])))
    assert comparison.calls[0].cut.requests == (REQUEST,) and comparison.calls[0].cut.b == (start, border - 1)
    everyone = compare(call, call).calls[0].of("partial lse").of
    assert comparison.calls[0].of("partial lse").of == everyone - len(moved) * 8


def test_a_run_with_more_ranges_is_cut_differently_where_the_other_has_none() -> None:
    call = of_case().calls[0]
    first, *rest = call.ranges[REQUEST]
    end = rest[-1][1]
    fewer = replace(
        call, ranges=(*call.ranges[:2], (first, (first[1], end)), call.ranges[3]), partial_lse=(), partial_out=()
    )
    fewer = replace(fewer, scores=())
    cut = compare(replace(call, scores=()), fewer).calls[0].cut
    assert (cut.request, cut.number, cut.a, cut.b) == (REQUEST, 1, rest[0], (first[1], end))
    short = replace(call, ranges=(*call.ranges[:3], ()), scores=(), partial_lse=(), partial_out=())
    with pytest.raises(ValueError, match="keys of each request"):
        compare(call, short)


def test_an_fp8_cache_differs_from_the_scores_on() -> None:
    comparison = compare(of_case(), of_case(TOY.but(kv_dtype=FP8)), names=("fp32", "fp8"))
    assert comparison.first.part == "raw" and not comparison.calls[0].of("out").same
    assert str(comparison).startswith(
        "fp32 and fp8 differ first in the raw scores of layer 1: request 0, head 0, split 0"
    )


def test_queries_of_an_extend_are_told_apart() -> None:
    case = EXTENDS[0]
    stand = ExtendStand(case, *ENGINE)

    def run() -> Trace:
        with record(stand.backend, queries=None, scores=ALL) as trace:
            stand.run("extend")
        return trace

    before = run()
    request = max(range(len(case.new)), key=lambda r: case.new[r])
    query = case.new[request] - 1
    row = sum(case.new[:request]) + query
    stand.inputs.q[request][query, 3] *= 1.5
    after = run()
    comparison = compare(before, after)
    place = comparison.first.first
    assert (place.request, place.query, place.head) == (request, query, 3), row
    assert all(x.requests == (request,) and x.heads == (3,) for x in comparison.differences)
    assert f"request {request}, query {query}, head 3" in comparison.summary
    assert f"query {query}" in show(comparison).title


def test_saved_traces_are_compared_as_recorded_ones(tmp_path: Path) -> None:
    comparison = planted("v")[0]
    runs = [Trace(calls=[run]) for run in (comparison.calls[0].a, comparison.calls[0].b)]
    for i, run in enumerate(runs):
        run.save(tmp_path / str(i))
    loaded = [Trace.load(tmp_path / str(i)) for i in range(2)]
    assert compare(*loaded).differences == comparison.differences
    assert compare(runs[0], loaded[0]).same
    assert compare(runs[0].calls[0], loaded[1]).differences == comparison.differences


def test_calls_are_paired_in_order() -> None:
    before, after = (of_case() for _ in range(2))
    before.calls *= 3
    lse = after.calls[0].lse.clone()
    lse[REQUEST, 5] += 1
    changed = replace(after.calls[0], lse=lse)
    after.calls = [after.calls[0], changed, changed]
    comparison = compare(before, after)
    assert (comparison.first.call, comparison.first.part) == (1, "lse")
    words = str(comparison)
    assert "the same bits: 1 other call" in words and words.count("layer 1, decode of 4 requests:") == 2
    assert (
        show(comparison).title == "Outputs of layer 1 have the same bits, though log-sum-exps differ: request 2, head 5"
    )
    assert "in layer 1" in show(comparison, call=0).title
    with pytest.raises(ValueError, match="call: the comparison has calls 0 to 2, got 3"):
        show(comparison, call=3)


def test_many_calls_that_differ_are_counted() -> None:
    a, b = (of_case(scores=False).calls[0] for _ in range(2))
    b = replace(b, lse=b.lse + 1)
    words = str(compare(Trace(calls=[a] * 20), Trace(calls=[b] * 20)))
    assert words.endswith("... and 12 other calls") and len(words.splitlines()) < 50


def test_what_one_run_alone_kept_is_named() -> None:
    kept, bare = of_case(), of_case(partials=False, scores=Scores(stages=("weights",), pool="page"))
    comparison = compare(kept, bare)
    # Of a request with a single key, pages are keys.
    assert [x.part for x in comparison.differences] == ["lse", "weights"] and comparison.same
    assert comparison.calls[0].of("weights").of == 8
    left = comparison.calls[0].not_compared
    assert "partial outputs, kept by one run alone" in left and "outputs, kept by one run alone" in left
    assert "raw scores of 4 rows, kept by one run alone, in other bins or of other heads" in left
    assert "not compared: weights of 3 rows" in str(comparison)
    assert compare(bare, bare).calls[0].not_compared == ()


def test_heads_that_both_recorded_are_compared() -> None:
    some, others = (of_case(scores=Scores(stages=("raw",), heads=heads)) for heads in ((5, 2), (1, 2, 5)))
    raw = compare(some, others).calls[0].of("raw")
    assert raw.same and raw.of == compare(some, some).calls[0].of("raw").of
    apart = of_case(scores=Scores(stages=("raw",), heads=(0,)))
    assert compare(some, apart).calls[0].of("raw") is None


@pytest.mark.parametrize("others", [(2, 3), (1, 2), None], ids=["apart", "in-part", "all"])
def test_scores_of_other_heads_are_said_not_to_be_compared(others: tuple[int, ...] | None) -> None:
    some, more = (of_case(scores=Scores(stages=("raw",), heads=heads)) for heads in ((0, 1), others))
    for pair in ((some, more), (more, some)):
        comparison = compare(*pair)
        assert comparison.same and "the same bits in all that was compared" in comparison.summary
        assert "the same bits in all that was compared" in show(comparison).title
        (left,) = comparison.calls[0].not_compared
        assert left == "raw scores of 4 rows, kept by one run alone, in other bins or of other heads"


def test_heads_in_another_order_are_all_compared() -> None:
    some, turned = (of_case(scores=Scores(stages=("raw",), heads=heads)) for heads in ((5, 2), (2, 5)))
    comparison = compare(some, turned)
    assert comparison.calls[0].not_compared == () and "the same bits everywhere" in comparison.summary


# ---------------------------------------------------------------- how much


def made(*, lse: list[list[float]] | None = None, out: list[list[list[float]]] | None = None) -> CallTrace:
    """Return a decode of one request for each row, of 4 keys each."""
    rows = lse if lse is not None else [[0.0] * len(row) for row in out or []]
    values = torch.tensor(rows) if rows else torch.zeros(0, 1)
    return CallTrace(
        layer=3,
        mode="decode",
        policy="none",
        heads=values.shape[1],
        kv_heads=1,
        scale=1.0,
        softcap=None,
        temperature_len=None,
        mod=None,
        has_sinks=False,
        page_size=1,
        ranges=(((0, 4),),) * len(values),
        nominal=(1,) * len(values),
        start=(0,) * len(values),
        rows=tuple((r, 0) for r in range(len(values))),
        q_pos=(3,) * len(values),
        own=(3,) * len(values),
        lse=values,
        out=None if out is None else torch.tensor(out),
    )


def of_out(a: list[float], b: list[float]) -> Difference:
    return compare(made(out=[[a]]), made(out=[[b]])).calls[0].of("out")


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "count", "absolute", "relative"),
    [
        ([1.0, 4.0], [1.0, 4.0], 0, 0.0, 0.0),
        ([1.0, 4.0], [1.5, 4.0], 1, 0.5, 0.125),
        ([0.0, 0.0], [0.0, 0.0], 0, 0.0, 0.0),
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0, 0.0),
        ([0.0, 0.0], [0.25, 0.0], 1, 0.25, 1.0),
        ([INF, -INF, NAN], [INF, -INF, NAN], 0, 0.0, 0.0),
        ([INF, 1.0], [-INF, 1.0], 1, INF, INF),
        ([INF, 1.0], [2.0, 1.0], 1, INF, INF),
        ([NAN, 1.0], [2.0, 1.0], 1, INF, INF),
        ([INF, 8.0], [INF, 4.0], 1, 4.0, 0.5),
        ([3e38, 1.0], [-3e38, 1.0], 1, 2 * float(torch.tensor(3e38)), 2.0),
    ],
)
def test_differences_are_what_they_are_by_hand(
    a: list[float], b: list[float], count: int, absolute: float, relative: float
) -> None:
    found = of_out(a, b)
    assert (found.count, found.of, found.absolute, found.relative) == (count, len(a), absolute, relative)
    assert found.same == (found.first is None) == (found.worst is None) == (count == 0)


def test_a_differing_log_sum_exp_is_relative_as_it_is() -> None:
    found = compare(made(lse=[[100.0, 1.0]]), made(lse=[[100.5, 1.0]])).first
    assert (found.part, found.absolute, found.relative, found.heads) == ("lse", 0.5, 0.5, (0,))
    assert "of their head's largest" not in found.words(("a", "b"))
    assert compare(made(lse=[[-INF]]), made(lse=[[-INF]])).same


def test_nan_is_worse_than_all_and_said_in_words() -> None:
    found = compare(made(out=[[[1.0, INF]], [[NAN, 2.0]]]), made(out=[[[9.0, 0.0]], [[0.5, 2.0]]])).first
    assert (found.worst.request, found.count) == (1, 3) and found.first.request == 0
    assert (
        found.words(("fp16", "fp8")) == "differ in 3 of 4 numbers, NaN in fp16 against 0.5 in fp8 (request 1, head 0)"
    )
    title = show(compare(made(out=[[[NAN]]]), made(out=[[[-0.5]]]), names=("x", "y"))).title
    assert title == "Outputs are NaN in x, −0.5 in y: request 0, head 0"


def test_the_sign_of_a_zero_is_a_bit_too() -> None:
    comparison = compare(made(out=[[[0.0, 1.0]]]), made(out=[[[-0.0, 1.0]]]))
    assert not comparison.same and "in the sign of a zero alone" in str(comparison)
    assert "in the sign of a zero alone" in show(comparison).title
    _, largest, differs = comparison.calls[0].by_head("out")
    assert differs.all() and not largest.any()


def test_the_worst_place_is_worst_for_its_head() -> None:
    a, b = made(out=[[[100.0], [1.0]]]), made(out=[[[101.0], [1.5]]])
    found = compare(a, b).first
    assert (found.absolute, found.worst.head, found.worst.a, found.worst.b) == (1.0, 1, 1.0, 1.5)
    assert found.relative == pytest.approx(1 / 3) and found.first.head == 0
    # 0.5 is that difference; the largest, 1, is in the other head.
    words = found.words(("a", "b"))
    assert "by 0.5 where it is worst, 0.33 of their head's largest" in words and words.endswith("(request 0, head 1)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_steps_are_those_of_the_format(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, generator=generator).to(dtype)
    after = torch.nextafter(x.double().to(dtype), torch.tensor(math.inf, dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    for a, b in zip(x.tolist(), after.tolist(), strict=True):
        # At a power of two the step to the smaller side is half as wide.
        assert steps_between(a, b, name) in (1.0, 0.5)
    assert coarsest(x.float()) == name
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert steps_between(0.0, least, name) == 1.0 and steps_between(0.0, -0.0, name) == 0.0
    assert steps_between(INF, 1.0, name) == INF and steps_between(INF, INF, name) == 0.0


def test_outputs_are_counted_in_steps_of_the_coarser_run() -> None:
    wide, narrow = of_case(), of_case(TOY.but(dtype=torch.float16))
    for pair in ((wide, narrow), (narrow, wide)):
        assert compare(*pair).calls[0].of("out").format == "float16"
    assert compare(wide, wide).calls[0].of("out").format == "float32"
    assert compare(wide, narrow).calls[0].of("lse").format == "float32"


# ---------------------------------------------------------------- what is refused


def test_another_batch_is_refused_and_both_are_named() -> None:
    call = of_case().calls[0]
    permuted = of_case(TOY.but(lens=(64, 5, 300, 1))).calls[0]
    with pytest.raises(ValueError, match=r"keys of each request: \(5, 64, 300, 1\) .*in a, \(64, 5, 300, 1\) .* in b"):
        compare(call, permuted)
    for name, change, words in (
        ("layer", {"layer": 4}, "layer: 1 .* in a, 4"),
        ("heads", {"heads": 16, "scores": (), "lse": torch.zeros(4, 16), "out": None}, "heads: 8 .* in a, 16"),
        ("q_pos", {"q_pos": (4, 63, 298, 0)}, "positions of the queries: .*299.* in a, .*298.* in b"),
        ("v_dim", {"out": call.out[..., :16]}, "v_dim: 32 in a, 16 in b"),
    ):
        partials = {"partial_lse": (), "partial_out": ()}
        with pytest.raises(ValueError, match=f"b: call 0 is no other run of a's; {words}"):
            compare(replace(call, **partials), replace(call, **{**partials, **change}))
        assert name


def test_another_mode_or_other_queries_are_refused() -> None:
    stand = ExtendStand(EXTENDS[0], *ENGINE)

    def run(queries: list[int] | None) -> CallTrace:
        with record(stand.backend, queries=queries) as trace:
            stand.run("extend")
        return trace.calls[0]

    last, first = run([-1]), run([0])
    with pytest.raises(ValueError, match=r"rows \(request, query\): .* in a, .* in b"):
        compare(last, first)
    decode = made(lse=[[0.0]])
    with pytest.raises(ValueError, match="mode: extend .* in a, decode .* in b"):
        compare(last, replace(decode, layer=last.layer))


def test_bad_arguments_are_refused() -> None:
    trace = of_case()
    for wrong in (None, "trace", trace.calls, Comparison):
        with pytest.raises(TypeError, match="b: expected a Trace or a CallTrace, got"):
            compare(trace, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a: the recording has no call"):
        compare(Trace(), trace)
    with pytest.raises(ValueError, match="got 1 call and 2 calls; what a recording left out"):
        compare(trace, Trace(calls=trace.calls * 2))
    for names in (("a",), "ab", ("a", 3), ("a", " ")):
        with pytest.raises(TypeError, match="names: expected"):
            compare(trace, trace, names=names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names: expected two that differ"):
        compare(trace, trace, names=("a", "a"))


# ---------------------------------------------------------------- properties

BASE = of_case(TOY.but(lens=(5, 70), heads=4), scores=Scores(stages=("raw", "weights"), pool="key")).calls[0]
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.0 + 2**-20, -3.5, 1e30, INF, -INF, NAN])


@st.composite
def changes(draw: st.DrawFn) -> CallTrace:
    """Return the recording with a few numbers changed, anywhere."""
    call = replace(
        BASE,
        lse=BASE.lse.clone(),
        out=BASE.out.clone(),
        partial_lse=tuple(x.clone() for x in BASE.partial_lse),
        partial_out=tuple(x.clone() for x in BASE.partial_out),
        scores=tuple(replace(s, values=s.values.clone()) for s in BASE.scores),
    )
    tensors = [x for _, x in call._tensors()]
    for _ in range(draw(st.integers(0, 4))):
        x = draw(st.sampled_from(tensors))
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(NUMBERS)
    return call


def swapped(found: Difference) -> str:
    """Return a difference in words with the runs exchanged: NaN does not equal itself."""

    def turn(place: Place | None) -> Place | None:
        return place and replace(place, a=place.b, b=place.a)

    return repr(replace(found, first=turn(found.first), worst=turn(found.worst)))


@given(changes(), changes())
def test_a_comparison_is_the_same_from_both_sides(a: CallTrace, b: CallTrace) -> None:
    ours, theirs = compare(a, b), compare(b, a)
    assert [repr(x) for x in ours.differences] == [swapped(x) for x in theirs.differences]


@given(changes(), changes())
def test_what_is_counted_is_what_differs(a: CallTrace, b: CallTrace) -> None:
    """By plain loops over the numbers."""
    comparison = compare(a, b)
    pairs = zip(a._tensors(), b._tensors(), strict=True)
    flat = [(x, y) for (_, s), (_, t) in pairs for x, y in zip(s.flatten().tolist(), t.flatten().tolist(), strict=True)]
    differ = [(x, y) for x, y in flat if x.hex() != y.hex()]
    assert comparison.numbers == len(flat)
    assert sum(x.count for x in comparison.differences) == len(differ)
    assert comparison.same == (not differ)
    apart = [abs(x - y) if math.isfinite(x - y) else INF for x, y in differ]
    assert max((x.absolute for x in comparison.differences), default=0.0) == max(apart, default=0.0)


@given(st.integers(0, 1), st.integers(0, 3), st.data())
def test_one_number_is_found_where_it_lies(request: int, head: int, data: st.DataObject) -> None:
    ranges = BASE.ranges[request]
    split = data.draw(st.integers(0, len(ranges) - 1))
    partial = [x.clone() for x in BASE.partial_out]
    partial[request][split, head, data.draw(st.integers(0, 31))] += 1
    (found,) = (x for x in compare(BASE, replace(BASE, partial_out=tuple(partial))).differences if not x.same)
    place = found.first
    assert (place.request, place.head, place.split, place.keys) == (request, head, split, ranges[split])
    assert found.count == 1 and found.worst == place and found.heads == (head,)


# ---------------------------------------------------------------- pictures


def with_scores(keys: int, *, touched: int, heads: int = 4) -> CallTrace:
    """Return a decode of one request whose raw scores are zeros, but for one key's."""
    call = made(lse=[[0.0] * heads])
    values = torch.ones(heads, keys)
    values[-1, touched] += 1
    score = ScoreTrace(
        request=0,
        query=0,
        stage="raw",
        reduce="max",
        heads=tuple(range(heads)),
        edges=tuple(range(keys + 1)),
        values=values,
    )
    return replace(call, ranges=(((0, keys),),), q_pos=(keys - 1,), own=(keys - 1,), scores=(score,))


def many(requests: int, heads: int) -> Comparison:
    generator = torch.Generator().manual_seed(requests)
    out = torch.randn(requests, heads, 8, generator=generator)
    apart = out + 10.0 ** torch.randint(-9, 0, (requests, heads, 1), generator=generator) * out
    a, b = (made(out=x.tolist()) for x in (out, apart))
    return compare(a, b, names=("a run with a long name", "another one, as long"))


PICTURES = {
    "value": lambda: planted("v")[0],
    "key": lambda: planted("k")[0],
    "no number": lambda: planted("k", NAN)[0],
    "same": lambda: compare(of_case(), of_case()),
    "cut": lambda: compare(of_case(scores=False), of_case(TOY.but(policy="tile"), scores=False)),
    "one request": lambda: many(1, 1),
    "64 requests": lambda: many(64, 32),
    "200 requests": lambda: many(200, 128),
    "no request": lambda: compare(made(lse=[]), made(lse=[])),
    "no key": lambda: compare(of_case(TOY.but(lens=(0, 3))), of_case(TOY.but(lens=(0, 3)))),
    "one key of many": lambda: compare(with_scores(40_000, touched=7), with_scores(40_000, touched=31_313)),
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_legible(name: str, theme: str) -> None:
    picture = show(PICTURES[name]())
    assert not faults(picture.figure(theme))
    assert 20 < len(picture.title) < 110 and len(picture.to_svg(theme=theme)) < 250_000


def test_a_title_says_what_differs_most_of_what_is_drawn() -> None:
    comparison = planted("v")[0]
    found = comparison.calls[0].of("out")
    assert show(comparison).title == (
        f"Outputs differ by up to {found.relative:.2g} of a head’s largest number: request 2, head {found.worst.head}"
    )
    requests, largest, differs = comparison.calls[0].by_head("out")
    assert requests == (0, 1, 2, 3) and float(largest.max()) == found.relative
    assert differs.nonzero().tolist() == [[REQUEST, head] for head in found.heads]
    assert int(largest[REQUEST].argmax()) == found.worst.head


def test_a_title_of_the_same_bits_counts_them() -> None:
    comparison = compare(of_case(), of_case(), names=("one", "two"))
    assert show(comparison).title == f"one and two have the same bits everywhere: {comparison.numbers:,} numbers"


def test_a_single_key_of_many_is_not_lost_between_columns() -> None:
    """More keys than columns: every key is in one."""
    from_plots = attnlab.plots.comparison._columns
    for keys in (7, 481, 5000):
        for key in range(0, keys, 97):
            values = torch.zeros(1, keys)
            values[0, key] = 1
            assert from_plots(values.double().numpy(), range(keys), keys).max() == 1
    uneven = torch.tensor([[0.0, 0.0, 1.0, 0.0]]).double().numpy()
    assert from_plots(uneven, [0, 900, 901, 902], 5000).max() == 1


def test_a_picture_shows_one_comparison() -> None:
    comparison = compare(made(lse=[[0.0]]), made(lse=[[0.0]]))
    with pytest.raises(ValueError, match="a picture shows 1 comparison of two runs, got 2"):
        show(comparison, comparison)
