"""The benchmark's whole path on a CPU: tiny workloads, eager; wrong results caught, JSON, comparisons."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab import bench
from attnlab.bench import timing
from attnlab.bench.compare import compare_runs
from attnlab.bench.inputs import Inputs, tree_mask
from attnlab.bench.patience import Patience
from attnlab.bench.peer import Call, Peer, Setting, peer, peers
from attnlab.bench.peers.flashinfer import FlashInfer, _paged
from attnlab.bench.peers.sglang import FILES, Kernels, Sglang
from attnlab.bench.recording import TIMES
from attnlab.bench.result import Ceilings, Goal, Machine, NotTimed, Result, Row, Timed
from attnlab.bench.run import run
from attnlab.bench.timing import LAYERS, Held, HostTimer, WallTimer
from attnlab.bench.truth import SPREAD, looked_at
from attnlab.bench.warm import compile_for, warm
from attnlab.bench.workload import Workload
from attnlab.bench.workloads import GQA, TABLE, chosen, curves, models, traffic, workloads
from attnlab.bench_command import faults as command_faults
from attnlab.bench_report import declined, row_lines
from attnlab.cli import main
from attnlab.compat import sglang as sglang_names
from attnlab.plots.picture import Picture
from attnlab.plots.style import THEMES
from attnlab.spec import ModelSpec
from tests.test_plots import faults

CPU = Setting(device=torch.device("cpu"), engine="eager")
RIGHT = ("attnlab", "attnlab-seed", "sdpa", "flex")


class Once:
    """A clock that runs a call once, and says that it took as many microseconds as it was held before."""

    name, rounds = "once", 1

    def __init__(self) -> None:
        self.count = 0

    def hold(self, call: Callable[[], Any]) -> Held:
        self.count += 1
        return _Held(call, float(self.count))


class _Held:
    def __init__(self, call: Callable[[], Any], time_us: float) -> None:
        self.call, self.time_us, self.answer = call, time_us, None

    def repeat(self, *, cold: bool) -> list[float]:
        self.answer = self.call()
        return [self.time_us]


def small(work: Workload) -> Workload:
    """The same kind of work, in milliseconds: two requests of a few tokens, two heads a group."""
    spec = work.attention
    kv_heads = min(spec.kv_heads, 2)
    mine = replace(spec, kv_heads=kv_heads, heads=kv_heads * min(spec.group, 2))
    mine = replace(mine, window=None if spec.window is None else 7)
    cached = tuple(min(n, 9 + 20 * (n == max(work.cached))) for n in work.cached[:2])
    kv_dtype = work.kv_dtype if work.kv_dtype.itemsize == 1 else torch.float32
    new = work.new if work.tree else min(work.new, 5)
    return replace(work, attention=mine, cached=cached, new=new, dtype=torch.float32, kv_dtype=kv_dtype)


def timed_by(name: str, work: Workload | None = None, **settings: Any) -> Result:
    works = [small(TABLE[1]) if work is None else work]
    return run(works, names=[name], setting=replace(CPU, **settings), timer=Once())


@pytest.fixture
def lone() -> Iterator[Callable[[Peer], str]]:
    """Registers a peer for one test."""
    before = dict(peers._items), dict(peers._owners)

    def add(made: Peer) -> str:
        peer("of-a-test")(lambda setting: made)
        return "of-a-test"

    yield add
    peers._items, peers._owners = before


class Answers:
    """A peer that gives these answers, one after the other."""

    def __init__(self, *answers: Callable[[Inputs], Tensor]) -> None:
        self.answers = list(answers)

    def declines(self, work: Workload) -> str | None:
        return None

    def calls(self, inputs: Inputs) -> list[Call]:
        return [Call(run=lambda: self.answers.pop(0)(inputs))]


def right(inputs: Inputs) -> Tensor:
    (call,) = peers.get("attnlab")(CPU).calls(inputs)
    out = call.run()
    assert isinstance(out, Tensor)
    return out


def zeros(inputs: Inputs) -> Tensor:
    return torch.zeros_like(right(inputs))


def raises(inputs: Inputs) -> Tensor:
    raise RuntimeError("no\nluck")


@pytest.fixture(scope="module", autouse=True)
def little_work() -> Iterator[None]:
    """On one thread; and FlexAttention goes not even through Dynamo, which takes seconds a shape."""
    with pytest.MonkeyPatch.context() as patch:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so little work is done sooner alone
        patch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny() -> Result:
    """Every workload of the table, small, through all peers that run here."""
    return run([small(work) for work in TABLE], names=peers.names(), setting=CPU, timer=Once())


def test_all_peers_that_run_here_are_right_on_every_workload(tiny: Result) -> None:
    assert [row.name for row in tiny.rows] == [work.name for work in TABLE]
    for row in tiny.rows:
        assert [other for other in row.not_timed if other.reason != "declined"] == [], row.name
        assert row.time_of("attnlab") is not None, row.name
        assert {one.peer for one in row.timed} | {other.peer for other in row.not_timed} == set(peers.names())
        assert all(one.error < 1e-3 for one in row.timed)


def test_who_does_not_run_a_row_says_why(tiny: Result) -> None:
    lines = declined(tiny)
    assert "flashinfer-fa2 declined all rows: runs on a GPU alone" in lines
    fp8 = ", ".join(work.name for work in TABLE if work.kv_dtype.itemsize == 1)
    assert f"sdpa declined {fp8}: torch's function has no fp8 keys" in lines


def test_kernels_are_timed_as_well_where_they_are_interpreted() -> None:
    work = replace(small(TABLE[0]), cached=(40, 9))
    assert timed_by("attnlab", work, engine="triton").rows[0].time_of("attnlab") is not None


def test_a_wall_clock_times_calls_in_turns() -> None:
    row = run([small(TABLE[1])], names=["attnlab", "sdpa"], setting=CPU, timer=WallTimer()).rows[0]
    for one in row.timed:
        assert 0 < one.low_us <= one.median_us <= one.high_us


@pytest.mark.parametrize(
    ("answers", "reason", "why"),
    [
        ((zeros,), "wrong", "query 0 of request 0 is off by"),
        ((lambda inputs: right(inputs)[:, :1],), "wrong", "expected an output of (1, 4, 128), got (1, 1, 128)"),
        ((lambda inputs: right(inputs) * float("nan"),), "wrong", "is off by nan"),
        ((right, *(zeros,) * 9), "wrong", "when repeated, query 0 of request 0 is off by"),
        ((raises,), "failed", "RuntimeError: no luck"),
        ((right, raises), "failed", "when repeated, RuntimeError: no luck"),
    ],
    ids=["zeros", "another shape", "nan", "wrong when repeated", "raises", "raises when repeated"],
)
def test_what_is_not_right_is_not_timed(
    answers: tuple[Callable[[Inputs], Tensor], ...], reason: str, why: str, lone: Callable[[Peer], str]
) -> None:
    row = timed_by(lone(Answers(*answers))).rows[0]
    assert row.timed == ()
    (other,) = row.not_timed
    assert other.reason == reason and why in other.why


def test_a_missing_key_is_a_wrong_result(lone: Callable[[Peer], str]) -> None:
    """The bound is a share of the output, which is small where many keys are: nothing absolute would see it."""

    def without_the_first(inputs: Inputs) -> Tensor:
        slots, spec = inputs.slots(0)[1:], inputs.work.attention
        k, v = inputs.pool.view(0).k[slots], inputs.pool.view(0).v[slots]
        k, v = (x.repeat_interleave(spec.group, dim=1) for x in (k, v))
        weights = torch.softmax(torch.einsum("qhd,khd->qhk", inputs.q, k) * spec.scale, dim=-1)
        return torch.einsum("qhk,khd->qhd", weights, v)

    work = replace(small(TABLE[1]), cached=(3000,))
    row = timed_by(lone(Answers(*(without_the_first,) * 2)), work).rows[0]
    assert [other.reason for other in row.not_timed] == ["wrong"]


@pytest.mark.parametrize("work", [*TABLE, *curves()], ids=lambda work: work.name)
def test_queries_of_all_parts_of_a_workload_are_held_to_the_oracle(work: Workload) -> None:
    rows = looked_at(work)
    longest = max(range(work.requests), key=lambda r: work.lens[r])
    assert {0, work.queries - 1, longest * work.new + work.new // 2} <= set(rows)
    assert {row * SPREAD // work.queries for row in rows} == {n * SPREAD // work.queries for n in range(work.queries)}
    assert len(rows) <= SPREAD + 7 and rows == tuple(sorted(set(rows)))


def test_a_request_between_the_first_and_the_last_that_is_wrong_is_a_wrong_result(
    lone: Callable[[Peer], str],
) -> None:
    def but_one(inputs: Inputs) -> Tensor:
        out = right(inputs)
        out[5] = out[6]
        return out

    work = replace(small(TABLE[0]), cached=(20,) * 12)
    row = timed_by(lone(Answers(*(but_one,) * 2)), work).rows[0]
    assert row.not_timed[0].why.startswith("query 0 of request 5 is off by")


def test_a_query_that_nobody_wrote_is_a_wrong_result(lone: Callable[[Peer], str]) -> None:
    def but_one(inputs: Inputs) -> Tensor:
        out = right(inputs)
        out[2 * 50 + 21, 1, 3] = float("nan")
        return out

    work = replace(small(TABLE[0]), mode="extend", new=50, cached=(20,) * 4)
    assert 2 * 50 + 21 not in looked_at(work)
    row = timed_by(lone(Answers(*(but_one,) * 2)), work).rows[0]
    assert row.not_timed[0].why == "query 21 of request 2 was not written, or is not finite"


def test_zeros_are_wrong_where_outputs_are_small(lone: Callable[[Peer], str]) -> None:
    work = next(work for work in TABLE if work.name == "decode-64x4k-fp8")
    row = timed_by(lone(Answers(*(zeros,) * 2)), replace(small(work), cached=(30_000,))).rows[0]
    assert [other.reason for other in row.not_timed] == ["wrong"]


def test_a_workload_that_cannot_be_built_is_a_row_without_times() -> None:
    work = replace(small(TABLE[1]), mla=True)  # whose values would be columns of a key, of which it has too few
    work = replace(work, attention=replace(work.attention, v_dim=256))
    (other,) = timed_by("attnlab", work).rows[0].not_timed
    assert other.reason == "failed" and other.why.startswith("the workload could not be built: ValueError")


def test_the_quickest_of_several_ways_counts(lone: Callable[[Peer], str]) -> None:
    class Ways:
        def declines(self, work: Workload) -> str | None:
            return None

        def calls(self, inputs: Inputs) -> list[Call]:
            return [Call(run=lambda: right(inputs), variant=name) for name in ("first", "second")]

    (one,) = timed_by(lone(Ways())).rows[0].timed
    assert one.variant == "first"  # `Once` says that it takes less


def test_of_a_peer_with_one_wrong_way_none_counts(lone: Callable[[Peer], str]) -> None:
    class Ways:
        def declines(self, work: Workload) -> str | None:
            return None

        def calls(self, inputs: Inputs) -> list[Call]:
            answers = [right(inputs), zeros(inputs)]
            return [
                Call(run=lambda: right(inputs)),
                Call(run=lambda: answers.pop(0) if len(answers) > 1 else answers[0]),
            ]

    row = timed_by(lone(Ways())).rows[0]
    assert row.timed == () and row.not_timed[0].reason == "wrong"


def test_no_workload_is_begun_after_the_seconds_and_what_there_is_comes_after_each_row() -> None:
    seen: list[int] = []
    works = [small(TABLE[1]), small(TABLE[2])]
    result = run(
        works,
        names=["attnlab"],
        setting=CPU,
        timer=Once(),
        seconds=1e-9,
        on_row=lambda result: seen.append(len(result.rows)),
    )
    assert (result.left_out, seen) == ((TABLE[1].name, TABLE[2].name), [])
    run(works, names=["attnlab"], setting=CPU, timer=Once(), on_row=lambda result: seen.append(len(result.rows)))
    assert seen == [1, 2]


@pytest.mark.parametrize("work", [small(work) for work in TABLE], ids=lambda work: work.name)
def test_pairs_and_bytes_are_those_that_a_mask_shows(work: Workload) -> None:
    sight, pairs, keys = work.attention.sight, 0, 0
    for r, cached in enumerate(work.cached):
        mask = torch.zeros(work.new, work.lens[r], dtype=torch.bool)
        for i in range(work.new):
            at = work.position(r, i)
            mask[i, int(sight.first(at)) : at + 1] = True
            if work.tree:
                mask[i, cached:] = tree_mask(work.tree)[i]
        pairs, keys = pairs + int(mask.sum()), keys + int(mask.any(0).sum())
    spec = work.attention
    width = spec.qk_dim + (0 if work.mla else spec.v_dim)
    assert work.pairs == pairs
    assert work.flops == 2 * (spec.qk_dim + spec.v_dim) * spec.heads * pairs
    assert work.kv_bytes == keys * width * spec.kv_heads * work.kv_dtype.itemsize


def test_workloads_have_names_of_their_own_and_words_choose_them() -> None:
    names = [work.name for work in workloads()]
    assert len(set(names)) == len(names)
    assert {work.mode for work in chosen(quick=True)} == {"decode", "extend", "unified", "verify"}
    assert [work.name for work in chosen(["verify-8x8*"])] == ["verify-8x8+16k", "verify-8x8+16k-tree"]
    assert {work.group for work in chosen(["decode"])} == {"table", "traffic"}
    assert {work.group for work in chosen(["curve-batch", "models"])} == {"curve-batch", "models"}
    with pytest.raises(ValueError, match="only: 'decoed' names no workload; say curve-batch"):
        chosen(["decoed"])
    with pytest.raises(ValueError, match="none of the quick workloads is named by models"):
        chosen(["models"], quick=True)


def test_every_model_with_whole_data_has_a_workload() -> None:
    found = {work.name.removeprefix("model-").removesuffix("-full").removesuffix("-sliding") for work in models()}
    assert set(ModelSpec.names()) - found == {"Command-R7B-class (Cohere2 defaults)"}
    assert sum(work.attention.has_sinks for work in models()) == 4  # both kinds of layer of both gpt-oss


def test_what_only_models_have_is_timed_too() -> None:
    kinds = {work.name: small(work) for work in models()}
    names = ("model-gpt-oss-20b-sliding", "model-Gemma-2-2b-full", "model-Grok-2")
    works = [replace(kinds[name], cached=(3000 if "Grok" in name else 40, 9)) for name in names]
    for row in run(works, names=RIGHT, setting=CPU, timer=Once()).rows:
        assert [other.why for other in row.not_timed if other.reason != "declined"] == []
        assert row.time_of("attnlab") is not None


def test_along_a_curve_one_thing_grows() -> None:
    groups = {work.group for work in curves()}
    assert groups == {"curve-batch", "curve-context", "curve-splits", "curve-pages"}
    for group in groups:
        xs = [work.x for work in curves() if work.group == group]
        assert xs == sorted(xs, key=lambda x: x or 0.0) and None not in xs
    for work in curves():
        assert chosen([work.name]) == [work]  # each runs alone
    ends = {group: [work.x for work in curves() if work.group == group] for group in groups}
    assert (ends["curve-batch"][0], ends["curve-batch"][-1]) == (1, 512)
    assert (ends["curve-context"][0], ends["curve-context"][-1]) == (1024, 2**20)
    work = next(work for work in curves() if work.splits == 4)
    row = timed_by("attnlab", replace(small(work), cached=(200,))).rows[0]
    assert row.time_of("attnlab") is not None and row.x == 4.0


def test_pages_hold_a_requests_slots() -> None:
    work = replace(small(TABLE[0]), page_size=4, cached=(9, 8))
    inputs = Inputs(work, "cpu")
    indptr, pages, last = _paged(inputs)
    assert (indptr.tolist(), last.tolist()) == ([0, 3, 5], [1, 4])
    for r in range(2):
        slots = (pages[indptr[r] : indptr[r + 1], None].long() * 4 + torch.arange(4)).flatten()
        assert torch.equal(slots[: work.lens[r]], inputs.slots(r))


def test_files_of_sglang_are_imported_without_the_rest_of_it(tmp_path: Path) -> None:
    text = (
        "from sglang.srt.environ import envs\nfrom sglang.srt.utils import is_hip\n"
        "def decode_attention_fwd():\n    return is_hip(), envs.ANYTHING.get()\n"
    )
    for file in FILES:
        (tmp_path / f"{file}.py").write_text(text if file == "decode_attention" else "")
    setting = Setting(device=torch.device("cuda"), engine="triton", sglang=tmp_path)
    kernels = Kernels(setting)
    assert kernels.problem == "" and kernels["decode_attention_fwd"]() == (False, False)
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]
    (tmp_path / "extend_attention.py").write_text("import nowhere_to_be_found")
    assert "nowhere_to_be_found" in Kernels(setting).problem
    (tmp_path / "extend_attention.py").unlink()
    with pytest.raises(ValueError, match="sglang: expected extend_attention.py in"):
        Kernels(setting)


def test_a_package_that_is_not_there_is_a_reason() -> None:
    setting = replace(CPU, device=torch.device("cuda"))
    why = peers.get("flashinfer-fa2")(setting).declines(TABLE[0])
    assert why == "not installed" or why is None
    assert peers.get("sglang")(CPU).declines(TABLE[0]) == "runs on a GPU alone"


def result(times: dict[str, float], *, noise: float = 0.0, goals: tuple[Goal, ...] = ()) -> Result:
    """A result of one peer, by hand."""
    rows = tuple(
        Row(
            name=name,
            mode="decode",
            group="table",
            shape="",
            kv_bytes=4_000_000,
            flops=8,
            checked="some",
            timed=(Timed(peer="attnlab", median_us=time, low_us=time, high_us=time * (1 + noise), error=0.0),),
            not_timed=(NotTimed(peer="flex", reason="declined", why="no"),),
        )
        for name, time in times.items()
    )
    machine = Machine(device="a GPU", multiprocessors=4, versions={}, commit=None, when="now", timer="once")
    most = Ceilings(copy_tb_s=4.0, read_tb_s=4.0, matmul_tflop_s=800.0)
    return Result(machine=machine, ceilings=most, rows=rows, goals=goals)


def test_a_result_is_read_back_as_it_was(tmp_path: Path, tiny: Result) -> None:
    for number, one in enumerate((tiny, result({"a": 2.0}, goals=(Goal(name="g", measured=1, goal=None, unit="s"),)))):
        one.save(tmp_path / f"{number}.json")
        assert bench.load(tmp_path / f"{number}.json") == one


def test_a_result_knows_rates_and_shares_of_the_ceiling() -> None:
    one = result({"a": 2.0})
    assert one.ceiling_share(one.row("a"), "attnlab") == 0.5
    assert one.ceiling_share(one.row("a"), "flex") is None
    assert one.row("a").tb_s == {"attnlab": 2.0}
    with pytest.raises(ValueError, match="row: the result has a, got 'b'"):
        one.row("b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: "{", "is no JSON file"),
        (lambda content: "[]", "expected format 'attnlab bench 1', got None"),
        (lambda content: json.dumps({**content, "format": "x"}), "got 'x'; attnlab bench --out writes one"),
        (lambda content: json.dumps({**content, "rows": [{}]}), "is damaged: it has no 'timed'"),
        (lambda content: json.dumps({**content, "machine": {}}), "is damaged: "),
        (lambda content: json.dumps({**content, "more": 1, "rows": 3}), "is damaged: "),
        (lambda content: json.dumps(content).replace("2.0", '"2.0"', 1), "a number from 0 on, got '2.0'"),
        (lambda content: json.dumps(content).replace("2.0", "NaN", 1), "NaN is no number"),
        (lambda content: json.dumps(content).replace('"median_us": 2.0', '"median_us": 0', 1), "more than 0, got 0"),
        (lambda content: json.dumps(content).replace('"median_us": 2.0', '"median_us": null', 1), "got None"),
        (lambda content: json.dumps(content).replace('"median_us": 2.0', '"median_us": -1', 1), "a number from 0 on"),
        (lambda content: json.dumps(content).replace('"median_us": 2.0', '"median_us": 1' + "0" * 400, 1), "a number"),
        (lambda content: "[" * 100_000, "is no JSON file"),
        (lambda content: json.dumps({**content, "left_out": "abc"}), "left_out: expected a list of names"),
        (lambda content: json.dumps({**content, "machine": {**content["machine"], "versions": []}}), "versions: "),
        (lambda content: json.dumps(content).replace("declined", "asleep"), "reason: expected one of"),
    ],
)
def test_a_file_that_is_no_result_is_an_error(
    change: Callable[[dict[str, Any]], str], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    result({"a": 2.0}).save(path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match="result: ") as raised:
        bench.load(path)
    assert words in str(raised.value)


def test_runs_that_have_nothing_in_common_are_not_compared() -> None:
    with pytest.raises(ValueError, match="no workload and peer in common: the one timed a, the other b"):
        compare_runs(result({"a": 1.0}), result({"b": 1.0}))


def test_runs_of_two_clocks_are_not_compared() -> None:
    before = result({"a": 1.0})
    after = replace(before, machine=replace(before.machine, timer="another"))
    with pytest.raises(ValueError, match="compare: the runs have two clocks, 'once' and 'another'"):
        compare_runs(before, after)


def test_a_goal_is_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="goal: expected more than 0 or None, got 0"):
        Goal(name="plan", measured=1.0, goal=0.0, unit="ms")


def test_two_runs_are_compared_by_more_than_noise() -> None:
    before = result({"same": 100.0, "slower": 100.0, "faster": 100.0, "gone": 1.0})
    after = result({"same": 102.0, "slower": 104.0, "faster": 90.0, "new": 1.0})
    comparison = compare_runs(before, after)
    assert [(c.name, c.verdict) for c in comparison.changes] == [
        ("same", "as before"),
        ("slower", "slower"),
        ("faster", "faster"),
    ]
    assert comparison.only_before == (("gone", "attnlab"),) and comparison.only_after == (("new", "attnlab"),)
    noisy = compare_runs(before, result({"slower": 104.0}, noise=0.1))
    assert noisy.slower == ()


def test_the_command_compares_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, time in (("a", 100.0), ("b", 120.0)):
        result({"row": time}, goals=(Goal(name="import", measured=time, goal=2.0, unit="s"),)).save(tmp_path / name)
    assert main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert "1.200" in said and "2 of 2 times are slower by more than noise" in said
    assert main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "none")]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no GPU here; attnlab bench --cpu times what runs without one"),
        (["--only", "nothing"], "only: 'nothing' names no workload"),
        (["--peers", "nobody"], "--peers: expected some of attnlab"),
        (["--jobs", "0"], "--jobs: expected at least 1, got 0"),
        (["--seconds", "0"], "--seconds: expected more than 0, got 0"),
        (["--hooks"], "there is no GPU here, and what recording costs is measured on one"),
        (["--host"], "there is no GPU here, and what a step takes beside a GPU is measured on one"),
        (["--patience", "0"], "--patience: expected more than 0, got 0"),
        (["--out", "no/such/folder/x.json"], "--out: there is no folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_workloads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--only", "verify"]) == 0
    said = capsys.readouterr().out
    assert "verify-8x8+16k" in said and "decode-1x8k" not in said and "peers: attnlab, attnlab-seed" in said
    assert main(["bench", "--list"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[: len(workloads())]] == [work.name for work in workloads()]
    assert "groups: table, traffic, models, curve-batch" in said and "curve-context: tokens of one request" in said


def test_every_row_of_the_goals_of_performance_has_a_workload() -> None:
    """Decodes of all columns, groups and windows; fp8 beside its twin; latent rows by page; chains and trees."""
    decodes = [work for work in TABLE if work.mode == "decode"]
    assert {work.attention.qk_dim for work in decodes} == {64, 80, 128, 192, 256, 288, 576}
    assert {work.attention.group for work in decodes if not work.mla} == {1, 2, 4, 8, 16, 32}
    assert {work.requests for work in decodes if work.attention.window == 128} == {64, 128, 256}
    by_name = {work.name: work for work in TABLE}
    twins = [work for work in TABLE if work.kv_dtype.itemsize == 1]
    assert {work.name for work in twins} >= {f"decode-{of}-fp8" for of in ("64x4k", "1x128k", "skew", "128x8k")}
    for work in twins:
        twin = by_name[work.name.removesuffix("-fp8")]
        assert replace(work, kv_dtype=torch.bfloat16, name=twin.name, quick=twin.quick) == twin
    for paged in (work for work in TABLE if work.page_size == 64):
        assert by_name[paged.name.removesuffix("-p64")].cached == paged.cached
    assert {work.name for work in TABLE if work.mla and work.page_size == 64} == {
        f"decode-mla128-{of}-p64" for of in ("1x32k", "32x8k", "128x4k")
    }
    for work in (work for work in TABLE if work.tree):
        assert by_name[work.name.removesuffix("-tree")].new == work.new
    assert {work.new for work in TABLE if work.mode == "verify" and work.tree} == {4, 8, 16}
    assert [work.requests for work in traffic()] == [64] * 4


def test_the_usual_attention_has_grouped_heads() -> None:
    assert (GQA.heads, GQA.kv_heads, GQA.qk_dim) == (32, 8, 128)


def on_curves() -> Result:
    """Rows of two curves, by hand: twice the work takes twice the time."""
    flat = result({f"{group}-{x}": 2.0 * x for group in ("curve-batch", "curve-context") for x in (1, 2, 4)})
    rows = [replace(row, group=row.name.rpartition("-")[0], x=float(row.name.rpartition("-")[2])) for row in flat.rows]
    return replace(flat, rows=tuple(rows))


GOALS = (Goal(name="import", measured=1.0, goal=2.0, unit="s"), Goal(name="tour", measured=90.0, goal=60.0, unit="s"))


@pytest.mark.parametrize(
    ("shown", "title"),
    [
        (result({"a": 2.0, "b": 1.0}), "attnlab reaches up to 100% of the ceiling"),
        (on_curves(), "4.0× the requests, 4.0× the time: how the cost of a decode grows"),
        (replace(result({}), goals=GOALS), "1 of 2 goals are met; tour is not"),
    ],
    ids=["rows", "curves", "goals"],
)
@pytest.mark.parametrize("theme", THEMES)
def test_a_result_is_shown(shown: Result, title: str, theme: str) -> None:
    picture = attnlab.show(shown)
    assert picture.title == title and picture.alt.endswith(".")
    assert not faults(picture.figure(theme))


def test_a_curve_that_hardly_rises_has_an_axis_to_read_it_by() -> None:
    flat = result({f"curve-pages-{x}": 1.3 for x in (1, 4, 16)})
    rows = tuple(replace(row, group="curve-pages", x=float(row.name.rpartition("-")[2])) for row in flat.rows)
    (ax,) = (ax for ax in attnlab.show(replace(flat, rows=rows)).figure("light").axes if ax.get_xlabel())
    assert ax.get_yticks().tolist() == [0.5, 1.0, 2.0]


def test_a_call_of_the_host_is_timed_in_the_mean_of_a_steps() -> None:
    calls: list[None] = []
    samples = HostTimer(torch.device("cpu")).hold(lambda: calls.append(sleep(1e-3))).repeat(cold=False)
    assert len(calls) == LAYERS * len(samples)
    assert 1_000 <= median(samples) < 10_000


def test_what_recording_costs_has_an_axis_to_read_it_by() -> None:
    one = result({"a": 2.0, "b": 2.0})

    def shown(us: float) -> Picture:
        times = (Timed(peer=TIMES, median_us=x, low_us=x, high_us=x, error=0.0) for x in (1.99, us))
        rows = [
            replace(row, group="hooks", timed=(*row.timed, recorded), not_timed=())
            for row, recorded in zip(one.rows, times, strict=True)
        ]
        return attnlab.show(replace(one, rows=tuple(rows)))

    for us, title, ends in (
        (2.03, "Recording costs a decode at most 1.5%, closed or open", (0.9, 1.1)),
        (3.0, "Recording costs a decode at most 50.0%, closed or open", (1 / 32, 4)),
    ):
        picture = shown(us)
        assert picture.title == title
        (ax,) = (ax for ax in picture.figure("light").axes if ax.get_xlabel() == "attnlab's time over the peer's")
        assert tuple(ax.get_xticks()[[0, -1]]) == ends
    declined = NotTimed(peer="attnlab-partials", reason="declined", why="no room")
    rows = [
        replace(row, group="hooks", not_timed=(declined,), timed=(*row.timed, replace(row.timed[0], peer=TIMES)))
        for row in one.rows
    ]
    assert (
        attnlab.show(replace(one, rows=tuple(rows))).title == "Recording costs a decode at most 0.0%, of what was timed"
    )
    attnlab_alone = attnlab.show(replace(one, rows=tuple(replace(row, group="hooks") for row in one.rows)))
    assert attnlab_alone.title.startswith("attnlab reaches up to")


def test_a_picture_of_rows_says_on_how_many_attnlab_is_the_fastest() -> None:
    one = result({"a": 2.0, "b": 2.0})
    slow, quick = (Timed(peer="sdpa", median_us=us, low_us=us, high_us=us, error=0.0) for us in (4.0, 1.0))
    rows = [replace(row, timed=(*row.timed, other)) for row, other in zip(one.rows, (slow, quick), strict=True)]
    picture = attnlab.show(replace(one, rows=tuple(rows)))
    assert picture.title.endswith("on 1 of 2 workloads")
    assert "a: 2.0 us, 50% of the ceiling, 0.50 of sdpa's time." in picture.alt
    assert not faults(picture.figure("dark"))


def test_what_a_result_does_not_have_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="kind: the result has no curves"):
        attnlab.show(result({"a": 2.0}), kind="curves")
    with pytest.raises(ValueError, match="the result has no rows"):
        attnlab.show(result({}))
    with pytest.raises(ValueError, match="a picture shows 1 result, got 2"):
        attnlab.show(result({"a": 2.0}), result({"a": 2.0}))


class Ours(Kernels):
    """SGLang's names and calls, over attnlab's eager engine."""

    def __init__(self) -> None:
        self.problem = ""

    def __getitem__(self, name: str) -> Any:
        return partial(vars(sglang_names)[name], engine="eager")


@pytest.mark.parametrize("best", [False, True])
def test_sglang_is_called_as_its_functions_are_meant(best: bool, lone: Callable[[Peer], str]) -> None:
    name = lone(Sglang(Ours(), best=best))
    more = [work for work in models() if "gpt-oss-20b" in work.name or work.name in ("model-Gemma-2-2b-full",)]
    works = [replace(small(work), kv_dtype=torch.float32) for work in (*TABLE, *more)]
    for row in run(works, names=[name], setting=CPU, timer=Once()).rows:
        assert [other.why for other in row.not_timed if other.reason != "declined"] == [], row.name
        assert row.timed or best


class FakeFlashInfer:
    """FlashInfer's wrappers as their documentation has them, in torch: one request and one query at a time."""

    class Wrapper:
        def __init__(self, scratch: Tensor, layout: str = "NHD", **options: Any) -> None:
            assert layout == "NHD" and scratch.dtype == torch.uint8

        def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            """k and v are `[pages, page_size, kv_heads, dim]`."""
            asked, indptr, pages = self.asked.tolist(), self.indptr.tolist(), self.pages
            masked = 0
            for r in range(len(indptr) - 1):
                own = pages[indptr[r] : indptr[r + 1]].long()
                keys, values = (x[own].flatten(0, 1)[: int(self.lens[r])].double() for x in (k, v))
                new = asked[r + 1] - asked[r]
                for i in range(new):
                    at = len(keys) - (new - i if self.causal else 1)
                    seen = torch.arange(len(keys)) <= at
                    if self.window >= 0:
                        seen &= torch.arange(len(keys)) >= at - self.window
                    if self.mask is not None:
                        seen = self.mask[masked : masked + len(keys)]
                        masked += len(keys)
                    row = asked[r] + i
                    group = q.shape[1] // keys.shape[1]
                    scores = torch.einsum("hd,khd->hk", q[row].double(), keys.repeat_interleave(group, 1)) * self.scale
                    if self.cap:
                        scores = self.cap * torch.tanh(scores / self.cap)
                    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
                    out[row] = torch.einsum("hk,khd->hd", weights, values.repeat_interleave(group, 1)).to(out.dtype)
            return out

        def run(self, q: Tensor, paged: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
            return self.attend(q, *paged, out)

        def keep(self, asked: Tensor, indptr: Tensor, pages: Tensor, lens: Tensor, scale: float, causal: bool) -> None:
            assert all(x.dtype == torch.int32 for x in (asked, indptr, pages, lens))
            self.asked, self.indptr, self.pages, self.lens = asked, indptr, pages, lens
            self.scale, self.causal, self.window, self.cap, self.mask = scale, causal, -1, 0.0, None

        def keep_pages(self, asked: Tensor, args: tuple[Any, ...], causal: bool, options: dict[str, Any]) -> None:
            indptr, pages, last, heads, kv_heads, dim, size = args
            lens = (indptr.diff() - 1) * size + last
            self.keep(asked, indptr, pages, lens, options["sm_scale"], causal)
            self.window, self.cap = options["window_left"], options["logits_soft_cap"] or 0.0
            self.mask = options.get("custom_mask")

    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            self.keep_pages(torch.arange(len(args[0]), dtype=torch.int32), args, False, options)

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        def plan(self, asked: Tensor, *args: Any, **options: Any) -> None:
            self.keep_pages(asked, args, options["causal"], options)

    class mla:  # noqa: N801
        class BatchMLAPagedAttentionWrapper:
            def __init__(self, scratch: Tensor, *, backend: str) -> None:
                self.inner = FakeFlashInfer.Wrapper(scratch)

            def plan(self, *args: Any) -> None:
                asked, indptr, pages, lens, heads, kept, turned, size, causal, scale, _, _ = args
                self.inner.keep(asked, indptr, pages, lens, scale, causal)

            def run(self, q: Tensor, q_turned: Tensor, kept: Tensor, turned: Tensor, *, out: Tensor) -> Tensor:
                k = torch.cat([kept, turned], -1)[:, :, None]
                return self.inner.attend(torch.cat([q, q_turned], -1), k, kept[:, :, None], out)


@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_flashinfer_is_called_as_its_wrappers_are_meant(family: str, lone: Callable[[Peer], str]) -> None:
    name = lone(FlashInfer(FakeFlashInfer, family=family, device=CPU.device))
    names = ("decode-64x4k", "decode-16x4k-d80", "decode-256x4k-w128", "decode-mla16-32x8k", "decode-mla128-128x4k-p64")
    names += ("verify-8x8+16k", "verify-64x16+4k-tree", "verify-mla16-16x4+4k", "extend-1x8k", "extend-4x2k+8k")
    names += (
        "extend-1x16k-w4k",
        "unified-4x2k+8k",
        "model-Gemma-2-2b-full",
        "decode-64x4k-192-128",
        "decode-64x8k-32q1kv",
    )
    works = [replace(small(work), kv_dtype=torch.float32) for work in (*TABLE, *models()) if work.name in names]
    windowed = next(work for work in TABLE if work.attention.window == 128)
    works += [replace(small(work), page_size=4, name=f"pages of {work.name}") for work in (TABLE[0], windowed)]
    works += [replace(small(windowed), mode="verify", new=3, cached=(40, 9), name="a windowed verify")]
    rows = run(works, names=[name], setting=CPU, timer=Once()).rows
    assert [(row.name, other.why) for row in rows for other in row.not_timed if other.reason != "declined"] == []
    declines = {row.name for row in rows if not row.timed}
    if family == "fa2":
        assert declines == {"decode-16x4k-d80", "decode-64x4k-192-128"}
    else:
        assert "extend-1x8k" not in declines and "verify-8x8+16k" not in declines and "decode-64x4k" in declines


def test_who_takes_long_to_compile_is_left_out_and_the_others_are_not(lone: Callable[[Peer], str]) -> None:
    def slow(inputs: Inputs) -> Tensor:
        sleep(30)
        raise AssertionError("nobody waits for this")

    name = lone(Answers(slow, right, right))
    other_mode = next(work for work in TABLE if work.mode == "verify")
    works = [small(TABLE[0]), small(TABLE[1]), small(other_mode)]
    rows = run(works, names=["attnlab", name], setting=CPU, timer=Once(), patience=0.2).rows
    assert [row.time_of("attnlab") is not None for row in rows] == [True] * 3
    assert [other.why for row in rows for other in row.not_timed] == [
        "TookTooLong: not ready after 0.2 s, compiling most likely; --patience gives it longer",
        "TookTooLong: was not ready for decode-64x4k after 0.2 s, and is not asked for a decode again",
    ]
    assert rows[2].time_of(name) is not None


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_alarm_that_was_set_before_goes_on_after_a_peers() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with Patience(30).for_peer("quick", TABLE[0]):
            pass
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 50 < left <= 60 and signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung == []


def test_what_is_compiled_ahead_runs_whatever_fails_beside_it(lone: Callable[[Peer], str]) -> None:
    ran: list[str] = []

    def seen(inputs: Inputs) -> Tensor:
        ran.append(inputs.work.name)
        return right(inputs)

    name, work = lone(Answers(raises, seen)), small(TABLE[1])
    compile_for(work, (name, name, "sdpa"), CPU)
    assert ran == [work.name]
    compile_for(replace(work, cached=(2**31,)), (name,), CPU)  # cannot be built: the run will say so
    compile_for(work, (lone(Answers(lambda inputs: sleep(30) or right(inputs))),), CPU, 0.1)  # who is slow, is cut off


def test_a_row_is_told_by_peer() -> None:
    one = result({"a": 2.0})
    peers_of = (*one.rows[0].timed, Timed(peer="sdpa", median_us=8.0, low_us=8.0, high_us=8.0, error=0.0, variant="v"))
    wrong = (NotTimed(peer="flex", reason="wrong", why="off"), NotTimed(peer="attnlab-seed", reason="failed", why="x"))
    row = replace(one.rows[0], timed=peers_of, not_timed=wrong)
    assert row_lines(one, row) == [
        "a: ",
        "  attnlab               2.0 us, 50% of the ceiling, 2 TB/s",
        "  sdpa                  8.0 us, 12% of the ceiling, 0.5 TB/s, attnlab 0.25 of it (v)",
        "  flex           wrong: off",
        "  attnlab-seed   failed: x",
    ]
    assert [other.peer for other in command_faults(replace(one, rows=(row,)))] == ["attnlab-seed"]


@pytest.mark.parametrize("cold", [False, True])
def test_a_graph_that_holds_nothing_is_a_wrong_result(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ran where the capture does not see it leaves an empty graph, which would be quick."""
    replays: list[int] = []

    class Graph:
        def replay(self) -> None:
            replays.append(1)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = float(len(replays))

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_sweep", lambda: torch.zeros(4))
    held = timing.GraphTimer().hold(lambda: torch.ones(2))
    assert held.answer.isnan().all()
    assert held.repeat(cold=cold) == [1000.0] * 10  # a turn of 10 ms, for replays of 1 ms each
    row = run([replace(small(TABLE[1]), cold=cold)], names=["sdpa"], setting=CPU, timer=timing.GraphTimer()).rows[0]
    assert [other.why.startswith("when repeated, query 0 of request 0 is off by nan") for other in row.not_timed] == [
        True
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cpu", "--only", "decode", "--seconds", "3"], "--cpu does not take --only, --seconds"),
        (["--list", "--out", "x.json"], "--list does not take --out"),
        (["--hooks", "--only", "decode"], "--hooks does not take --only"),
        (["--compare", "a.json", "b.json", "--quick"], "--compare does not take --quick"),
    ],
)
def test_options_without_a_meaning_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_server_without_explorers_can_time_kernels() -> None:
    """Found on a GPU machine that had no ipywidgets."""
    script = "import sys; sys.modules['ipywidgets'] = None; from attnlab.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", script, "bench", "--list"], capture_output=True, text=True)
    assert done.returncode == 0 and "decode-64x4k" in done.stdout, done.stderr


def test_what_compiles_for_longer_than_it_may_is_ended() -> None:
    """A run that waited for it would time nothing in the seconds that it has."""
    done: list[str] = []
    begin = monotonic()
    warm([small(TABLE[0])], names=["attnlab"], setting=CPU, jobs=2, seconds=0.3, on_done=done.append)
    assert monotonic() - begin < 5 and not done
    assert not multiprocessing.active_children()


def test_what_is_compiled_ahead_is_told_by_name() -> None:
    works = [small(TABLE[0]), small(TABLE[1])]
    done: list[str] = []
    warm(works, names=["attnlab"], setting=CPU, jobs=2, on_done=done.append)
    assert sorted(done) == sorted(work.name for work in works)
