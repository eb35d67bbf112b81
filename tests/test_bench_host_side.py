"""What a step takes of the host: rows of calls and of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attnlab
from attnlab import bench
from attnlab.bench import metadata
from attnlab.bench.host_side import PLANS, measure_host_side
from attnlab.bench.metadata import MetadataTime
from attnlab.bench.peer import Setting
from attnlab.bench.result import Result
from attnlab.bench.workload import Workload, heads
from attnlab.bench_report import row_lines

WORK = Workload(name="decode-small", mode="decode", cached=(30, 7), attention=heads(4, 2, 16), dtype=torch.float32)


def planned(requests: int, tokens: int, kernels: object, *, policy: str) -> list[MetadataTime]:
    assert policy == "seed"
    who = {"attnlab, a plan": (300.0, 20.0), "attnlab, a graph's plan": (100.0, 20.0), "SGLang": (60.0, 30.0)}
    return [
        MetadataTime(who=name, requests=requests, host_us=host, replay_us=replay)
        for name, (host, replay) in who.items()
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(metadata, "measure", planned)
    work = replace(WORK, kv_dtype=torch.float32)
    return measure_host_side([work], setting=Setting(device=torch.device("cpu"), engine="eager"))


def test_calls_and_plans_are_rows_without_rates(measured: Result, tmp_path_factory: pytest.TempPathFactory) -> None:
    plans = [f"plan-{n}x{k // 1024}k-{part}" for n, k in PLANS for part in ("host", "replay")]
    assert [row.name for row in measured.rows] == ["call-small-host", *plans]
    call = measured.row("call-small-host")
    assert [one.peer for one in call.timed] == ["attnlab", "attnlab-seed", "sdpa"]
    assert "TB/s" not in "".join(row_lines(measured, call)) and "queries" in call.checked
    path = tmp_path_factory.mktemp("host") / "host.json"
    measured.save(path)
    assert bench.load(path) == measured


def test_rows_of_a_host_are_shown(measured: Result) -> None:
    picture = attnlab.show(measured)
    assert picture.title.startswith("attnlab timed on 9 workloads") and "call-small-host" in picture.alt


def test_a_graphs_plan_is_attnlabs(measured: Result) -> None:
    host, replay = measured.row("plan-64x32k-host"), measured.row("plan-64x32k-replay")
    assert {one.peer: one.median_us for one in host.timed} == {"attnlab-anew": 300.0, "attnlab": 100.0, "sglang": 60.0}
    assert {one.peer: one.median_us for one in replay.timed} == {"attnlab": 20.0, "sglang": 30.0}


@pytest.mark.gpu
def test_calls_and_plans_are_timed_beside_a_gpu() -> None:
    work = replace(WORK, dtype=torch.bfloat16)
    setting = Setting(device=torch.device("cuda"), engine="triton")
    for row in measure_host_side([work], setting=setting, plans=[(2, 4096)]).rows:
        first = row.time_of("attnlab")
        assert first is not None and 0 < first.median_us < 100_000
