"""Goals as data, and what recorded runs reached of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from attnlab import bench
from attnlab.bench.goals import Outcome, Wanted, goals, outcomes, summary
from attnlab.bench.host_side import CALLS, PLANS
from attnlab.bench.peer import peers
from attnlab.bench.recording import CLOSED, PARTIALS, POLICIES, TIMES, WORKS
from attnlab.bench.result import Ceilings, Machine, NotTimed, Result, Row, Timed
from attnlab.bench.workloads import workloads
from attnlab.cli import main

RUNS = Path(__file__).parent.parent / "data" / "h200"
HOST = {f"plan-{requests}x{tokens // 1024}k-{part}" for requests, tokens in PLANS for part in ("host", "replay")} | {
    f"call-{name.removeprefix('decode-')}-host" for name in CALLS
}


def test_every_goal_speaks_of_workloads_and_peers_that_there_are() -> None:
    hooks = {f"hooks-{name.removeprefix('decode-')}-{policy}" for name in WORKS for policy in POLICIES}
    rows = {work.name for work in workloads()} | hooks | HOST
    who = {*peers.names(), CLOSED, PARTIALS, TIMES}
    for one in goals():
        assert set(one.rows) <= rows, one.work
        assert one.of in who
        assert set(one.over) <= (rows if one.measure == "rate over" else who), one.work
    assert len({(one.work, one.measure, one.of, one.over) for one in goals()}) == len(goals())


def found_in(*names: str) -> dict[tuple[str, str], Outcome]:
    results = [bench.load(RUNS / f"{name}.json") for name in names]
    return {(one.row, one.wanted.words): one for one in outcomes(results, goals())}


def test_recorded_runs_are_held_to_the_goals() -> None:
    found = found_in("decode", "verify", "extend")
    assert found["decode-64x4k", "time over sglang"].verdict == "met by 10.8%"
    assert found["decode-64x4k", "TB/s"].verdict == "met by 1.5%"
    assert found["decode-1x8k", "time over sglang"].verdict == "met by 11.0%"
    assert found["extend-1x8k", "TFLOP/s"].verdict == "met by 14.9%"
    twin = found["decode-64x4k-fp8", "token rate over the row beside it"]
    assert (twin.met, round(twin.measured or 0, 3)) == (True, 1.868)
    one_pass = found["unified-1x8k", "token rate over the row beside it"]
    assert (one_pass.met, one_pass.verdict, round(one_pass.measured or 0, 3)) == (None, "not the moonshot", 0.938)
    alone = found["decode-64x4k-192-128", "time over flashinfer-fa2 or flashinfer-fa3"]
    assert alone.verdict.startswith("not measured: ")
    assert found["decode-random", "time over sglang"].beyond and not found["decode-1x8k", "time over sglang"].beyond
    best = found["verify-64x4+4k", "time over sglang-best"]
    assert best.beyond and best.verdict == "missed by 23.8%, by the ceiling too (0.2548)"
    assert found["verify-64x8+4k-tree", "TB/s"].verdict == "met by 6.0%"
    assert found["hooks-64x4k-seed", f"{TIMES}'s time over attnlab"].measured is None


def run(name: str, times: dict[str, float], **parts: object) -> Result:
    """A run of one row, by hand."""
    timed = tuple(Timed(peer=peer, median_us=us, low_us=us, high_us=us, error=0.0) for peer, us in times.items())
    row = Row(
        name=name, mode="decode", group="", shape="", kv_bytes=4_000_000, flops=8_000_000, checked="", timed=timed
    )
    machine = Machine(device="a GPU", multiprocessors=4, versions={}, commit=None, when="now", timer="once")
    return Result(machine=machine, rows=(replace(row, **parts),))  # type: ignore[arg-type]


OVER = Wanted(work="w", rows=("a",), measure="time over", of="attnlab", over=("x", "y"), goal=0.5, moonshot=0.3)


def test_the_quickest_of_several_peers_counts_and_all_of_one_run() -> None:
    (one,) = outcomes([run("a", {"attnlab": 1.0, "x": 4.0, "y": 2.5})], [OVER])
    assert (one.measured, one.verdict) == (0.4, "met by 20.0%")
    (one,) = outcomes([run("a", {"attnlab": 1.0, "x": 10.0})], [OVER])
    assert one.verdict == "met by 80.0%, the moonshot"
    apart = [run("a", {"attnlab": 1.0}), run("a", {"x": 4.0})]
    (one,) = outcomes(apart, [OVER])
    assert one.measured is None  # a ratio of two runs is none


def test_the_last_run_that_measured_a_row_counts() -> None:
    early, late = run("a", {"attnlab": 1.0, "x": 4.0}), run("a", {"attnlab": 1.0, "x": 2.0})
    assert outcomes([early, late], [OVER])[0].measured == 0.5
    assert outcomes([early, late, run("a", {"attnlab": 1.0})], [OVER])[0].measured == 0.5


def test_who_has_no_time_says_why() -> None:
    why = (NotTimed(peer="x", reason="declined", why="not installed"),)
    assert outcomes([run("a", {"attnlab": 1.0}, not_timed=why)], [OVER])[0].why == "no time of x or y (not installed)"
    assert outcomes([run("a", {"x": 1.0})], [OVER])[0].why == "no time of attnlab"
    beside = Wanted(work="w", rows=("a",), measure="rate over", of="attnlab", over=("b",), goal=1.85, moonshot=None)
    assert outcomes([run("a", {"attnlab": 1.0})], [beside])[0].why == "the run has no time of b"


@pytest.mark.parametrize(
    ("measure", "measured", "verdict"),
    [
        ("TB/s", 4.0, "met by 100.0%"),
        ("TFLOP/s", 8.0, "met by 300.0%"),
        ("us", 1.0, "met by 50.0%"),
    ],
)
def test_a_rate_is_to_be_more_and_a_time_less(measure: str, measured: float, verdict: str) -> None:
    wanted = replace(OVER, measure=measure, over=(), goal=2.0, moonshot=None)
    (one,) = outcomes([run("a", {"attnlab": 1.0})], [wanted])
    assert (one.measured, one.verdict) == (measured, verdict)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"measure": "speed"}, "measure: "),
        ({"rows": ()}, "rows: goal 'w' has none"),
        ({"over": ()}, "over: goal 'w' is 'time over', got ()"),
        ({"measure": "us"}, "over: goal 'w' is 'us', got ('x', 'y')"),
        ({"measure": "rate over"}, "over: goal 'w' has 1 rows, got 2 beside them"),
        ({"goal": 0.0}, "goal: expected numbers above 0"),
        ({"goal": None, "moonshot": None}, "goal: expected numbers above 0"),
    ],
)
def test_a_goal_that_means_nothing_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        replace(OVER, **wrong)  # type: ignore[arg-type]
    assert str(raised.value).startswith(words)


def test_a_goal_without_a_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.bench.goals.load_json", lambda *path: [{"work": "w"}])
    with pytest.raises(ValueError, match=r"goals.json: expected \['goal', .* of each goal, got \['work'\]"):
        goals()


def test_the_command_prints_met_missed_and_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--goals", *(str(RUNS / f"{name}.json") for name in ("decode", "verify"))]) == 1
    said = capsys.readouterr().out
    row = bench.load(RUNS / "decode.json").row("decode-1x8k")
    mine, other = row.time_of("attnlab"), row.time_of("sglang")
    assert mine is not None and other is not None
    assert f"met by {(0.22 - mine.median_us / other.median_us) / 0.22:.1%}" in said  # 0.22 is asked for
    assert re.search(r"missed by \d+\.\d%", said) and re.search(r"\d more", said)
    assert re.search(r"not measured, no time of [^:]+: [a-z]+-", said)
    assert "goals of rows are met; " in said
    good = run("verify-64x4+4k", {"attnlab": 1.0, "sglang": 100.0})
    good.save(tmp_path / "good.json")
    assert main(["bench", "--goals", str(tmp_path / "good.json")]) == 0
    (tmp_path / "bad.json").write_text(json.dumps({}))
    assert main(["bench", "--goals", str(tmp_path / "bad.json")]) == 2
    assert main(["bench", "--goals", str(tmp_path / "good.json"), "--quick"]) == 2


def test_what_is_not_measured_is_not_counted_as_missed() -> None:
    found = outcomes([run("a", {"attnlab": 1.0, "x": 4.0})], [OVER, replace(OVER, rows=("b", "c"))])
    assert summary(found) == "1 of 1 goals of rows are met; 2 were not measured"


def test_a_goal_that_asks_for_more_than_the_ceiling_says_so() -> None:
    """4 TB/s read 40 MB in 10 us: 0.5 of the peer's 16 us is not to be had, 0.7 of them is."""
    ceilings = Ceilings(read_tb_s=4.0, copy_tb_s=3.0, matmul_tflop_s=700.0)
    result = replace(run("a", {"attnlab": 12.0, "x": 16.0}), ceilings=ceilings)
    result = replace(result, rows=tuple(replace(row, kv_bytes=40_000_000, flops=0) for row in result.rows))
    out_of_reach, missed, met = outcomes(
        [result], [replace(OVER, goal=goal, moonshot=None) for goal in (0.5, 0.7, 0.8)]
    )
    assert (out_of_reach.ceiling, out_of_reach.beyond) == (0.625, True)
    assert out_of_reach.verdict == "missed by 50.0%, by the ceiling too (0.625)"
    assert (missed.beyond, missed.verdict) == (False, "missed by 7.1%") and met.met and not met.beyond
    rate = replace(OVER, measure="TB/s", over=(), goal=4.2, moonshot=None)
    (one,) = outcomes([result], [rate])
    assert one.beyond and one.ceiling == pytest.approx(4.0)
    said = summary([out_of_reach, missed, met, one])
    assert said == "1 of 4 goals of rows are met; beyond the device's ceiling in their run: 2; 0 were not measured"


def test_of_runs_that_have_a_row_the_newest_counts_in_whatever_order_they_come() -> None:
    older, newer = (
        replace(one, machine=replace(one.machine, when=when))
        for one, when in (
            (run("a", {"attnlab": 1.0, "x": 1.0}), "2026-11-30T18:25:00+00:00"),
            (run("a", {"attnlab": 1.0, "x": 4.0}), "2026-11-30T22:44:00+00:00"),
        )
    )
    for order in ([older, newer], [newer, older]):
        (one,) = outcomes(order, [OVER])
        assert one.measured == 0.25
