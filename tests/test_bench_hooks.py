"""What recording costs: four ways of a call, on a CPU without binaries and on a GPU with them."""

from __future__ import annotations

from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch

import attnlab
from attnlab import bench
from attnlab.bench import recording
from attnlab.bench.inputs import Inputs
from attnlab.bench.launches import launched
from attnlab.bench.peer import Setting
from attnlab.bench.recording import CLOSED, PARTIALS, TIMES, WORKS, measure_hooks
from attnlab.bench.watch import HostWatch, Watched
from attnlab.bench.workload import Workload, heads
from attnlab.bench.workloads import TABLE
from attnlab.inspect.recorder import Recorder

CPU = Setting(device=torch.device("cpu"), engine="eager")
SMALL = Workload(
    name="decode-small", mode="decode", cached=(300, 40, 7), attention=heads(4, 2, 16), dtype=torch.float32
)
WORK = replace(SMALL, kv_dtype=torch.float32)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "ROUNDS", 2)
    monkeypatch.setattr(recording, "CALLS", 2)


def test_a_row_for_each_policy_has_every_way_that_runs_here(tmp_path: Any) -> None:
    seen: list[int] = []
    result = measure_hooks([WORK], setting=CPU, on_row=lambda result: seen.append(len(result.rows)))
    assert [row.name for row in result.rows] == ["hooks-small-balanced", "hooks-small-seed"] and seen == [1, 2]
    for row in result.rows:
        assert [one.peer for one in row.timed] == ["attnlab", CLOSED, PARTIALS]
        (other,) = row.not_timed
        assert other.peer == TIMES and other.reason == "declined" and "has no programs to time" in other.why
        assert all(one.median_us > 0 and one.error < 1e-4 for one in row.timed)
        assert all(one.variant.endswith(" us with all of the host's part") for one in row.timed)
    picture = attnlab.show(result)
    assert picture.title.startswith("Recording costs a decode at most ") and "hooks-small-seed" in picture.alt
    result.save(tmp_path / "hooks.json")
    assert bench.load(tmp_path / "hooks.json") == result


def test_a_recording_that_changes_an_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Recorder.decoded

    def meddles(self: Recorder, call: Any) -> None:
        looks(self, call)
        call.out[0] += 1e-6

    monkeypatch.setattr(Recorder, "decoded", meddles)
    row = measure_hooks([WORK], policies=["balanced"], setting=CPU).rows[0]
    assert [other.why for other in row.not_timed if other.peer == PARTIALS] == [
        "its answer has other bits than without a recording"
    ]


def test_another_binary_after_a_closed_recording_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = iter([[("decode", 1)], [("decode", 2)]])
    monkeypatch.setattr(recording, "launched", lambda call: next(handles))
    row = measure_hooks([WORK], policies=["balanced"], setting=CPU).rows[0]
    (other,) = [other for other in row.not_timed if other.peer == CLOSED]
    assert other.reason == "wrong" and other.why == "it launches [('decode', 1)], without a recording [('decode', 2)]"
    assert row.time_of(PARTIALS) is not None


def test_what_a_recorder_does_after_a_call_is_not_in_its_time() -> None:
    class Slow:
        def decoded(self, call: Any) -> None:
            sleep(0.05)

    watch = HostWatch()
    watch.begin()
    Watched(inner=Slow(), watch=watch).decoded(None)  # type: ignore[arg-type]
    assert watch.us() < 40_000


def test_a_recording_without_room_for_all_calls_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "BUDGET_BYTES", 100)
    with pytest.raises(RuntimeError, match="hooks: the recording had no room for all calls"):
        measure_hooks([WORK], policies=["balanced"], setting=CPU)


def test_only_decodes_are_recorded_so() -> None:
    verify = next(work for work in TABLE if work.mode == "verify")
    with pytest.raises(ValueError, match="hooks: expected a decode, got verify-64x16"):
        measure_hooks([verify], setting=CPU)
    assert set(WORKS) <= {work.name for work in TABLE if work.mode == "decode"}


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["balanced", "seed"])
def test_a_closed_recording_leaves_the_same_binaries(policy: str) -> None:
    """Tracer absent, `record` closed: one binary each. Recording partials: another one where states are kept for it.

    Recording times: another one.
    """
    inputs = Inputs(replace(WORK, dtype=torch.bfloat16, kv_dtype=torch.bfloat16), "cuda")
    ways = {way.name: way for way in recording._ways(inputs, "triton", policy)}
    found = {}
    for name, way in ways.items():
        with way.open():
            way.call()
            found[name] = launched(way.call)
    assert len(found["attnlab"]) >= 1
    assert found["attnlab"] == found[CLOSED]
    assert (found["attnlab"] == found[PARTIALS]) == (policy == "seed"), "even shares leave states of answers out"
    assert found["attnlab"] != found[TIMES]


@pytest.mark.gpu
def test_all_four_ways_are_timed_on_a_gpu() -> None:
    work = replace(WORK, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    setting = Setting(device=torch.device("cuda"), engine="triton")
    for row in measure_hooks([work], setting=setting).rows:
        assert row.not_timed == () and [one.peer for one in row.timed] == ["attnlab", CLOSED, PARTIALS, TIMES]
        closed = row.time_of(CLOSED)
        assert closed is not None and closed.variant.startswith("the binaries of attnlab; ")
