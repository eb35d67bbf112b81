"""`attnlab tune` without a GPU: interpreted kernels, workloads of a few tokens, a clock that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab import tune_command
from attnlab._triton import PROBLEM
from attnlab.assets import data_path
from attnlab.bench import trials, tune
from attnlab.bench.inputs import Inputs
from attnlab.bench.peer import Setting
from attnlab.bench.peers.own import Own
from attnlab.bench.timing import Held
from attnlab.bench.trials import Finding, Trial, launching, retuned, search
from attnlab.bench.tune import GRIDS, TEXTS, Config, Task, asked, launched, tasks
from attnlab.bench.workloads import BINARY, TABLE, Workload, chosen, heads, latent
from attnlab.cli import main
from attnlab.engines import TritonEngine
from attnlab.kernels import decode_shares, extend_hopper, tuning, verify_shares_hopper
from attnlab.kernels.target import Target
from attnlab.kernels.tuning.checks import check
from attnlab.kernels.tuning.file import parsed
from attnlab.kernels.tuning.rows import KERNELS, Table
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from tests.tunings import fixed

pytestmark = pytest.mark.skipif(PROBLEM is not None, reason="needs Triton")

CPU = Setting(device=torch.device("cpu"), engine="triton")
INTERPRETER, H200, A100 = (
    Target(kind="interpreter"),
    Target(kind="cuda", arch=90, multiprocessors=132),
    Target(kind="cuda", arch=80),
)
FP32 = {"dtype": torch.float32, "kv_dtype": torch.float32}
DECODE = Workload(name="decode-small", mode="decode", cached=(70, 20), attention=heads(2, 1, 16), **FP32)
SMALL = [
    DECODE,
    Workload(name="latent", mode="decode", cached=(70,), attention=latent(32), mla=True),
    Workload(name="verify", mode="verify", cached=(40, 9), new=3, attention=heads(4, 2, 16), **FP32),
    Workload(name="tree", mode="verify", cached=(40,), new=3, tree=(-1, 0, 0), attention=heads(4, 2, 16), **FP32),
    Workload(name="extend", mode="extend", cached=(0, 7), new=9, attention=heads(4, 2, 16), **FP32),
    Workload(name="unified", mode="unified", cached=(0, 7), new=9, attention=heads(4, 2, 16), **FP32),
]


class Clock:
    """Says what it is told of each call that it holds, in their order; every call is run once."""

    name, rounds = "told", 1

    def __init__(self, *told: float) -> None:
        self.told = list(told)

    def hold(self, call: Callable[[], Any]) -> Held:
        return _Held(call, self.told.pop(0))


class _Held:
    def __init__(self, call: Callable[[], Any], us: float) -> None:
        self.call, self.us, self.answer = call, us, None

    def repeat(self, *, cold: bool) -> list[float]:
        self.answer = self.call()
        return [self.us]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four candidates."""
    monkeypatch.setitem(GRIDS, "decode_shares", {"block_n": (16, 32), "num_warps": (4, 8), "num_stages": (1,)})


def task(*works: Workload, target: Target = INTERPRETER, kernel: str = "decode_shares", near: bool = False) -> Task:
    (made,) = tasks(fixed(), target, works or (DECODE,), kernels=[kernel], near=near)
    return made


def found(*us: float, of: Task | None = None) -> Finding:
    return search(of or task(), setting=CPU, timer=Clock(*us))


# --- Which row is launched --------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", SMALL, ids=lambda work: work.name)
def test_a_workload_is_launched_by_the_rows_that_are_said(work: Workload) -> None:
    """Found by asking `choose`, and by running it: they must not differ."""
    table, inputs = fixed(), Inputs(work, "cpu")
    for kernel, choose in launched(work, INTERPRETER).items():
        own = Own(engine="triton", policy=tune.POLICIES.get(kernel, "balanced"), extends=True)
        with tuning.using(replace(table)) as watched, torch.no_grad():
            (call,) = own.calls(inputs)
            call.run()
        assert asked(table, choose) in watched.taken
        assert {row.kernel for row in watched.taken} == {kernel}


LONG = ("extend-1x8k", "extend-1x8k-d64", "extend-1x8k-d256", "extend-1x4k-192-128", "unified-1x8k")


@pytest.mark.parametrize("new", [None, 64, 65])
@pytest.mark.parametrize("name", LONG)
def test_on_hopper_extends_are_launched_by_the_kernel_that_serves_them(
    name: str, new: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work,) = chosen([name])
    work = replace(work, new=min(work.new, 300) if new is None else new, dtype=torch.bfloat16)
    calls: list[ExtendCall] = []
    monkeypatch.setattr(TritonEngine, "extend", lambda self, call: calls.append(call))
    inputs = Inputs(work, "cpu")
    with torch.no_grad():
        Own(engine="triton", policy="balanced", extends=True).calls(inputs)[0].run()
    served = extend_hopper.serves(calls[0], H200)
    assert list(launched(work, H200)) == ["extend_hopper" if served else "extend"]
    assert served == (new != 64 or work.mode == "unified")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("decode-mla128-32x8k", ["decode_split"]),
        ("decode-mla16-32x8k", ["decode_split"]),
        ("decode-mla8-32x8k", ["decode_split", "decode_shares"]),
        ("decode-mla40-32x8k-288", ["decode_split", "decode_latent"]),
    ],
)
def test_on_hopper_latent_rows_of_deepseeks_columns_have_a_kernel_without_choices(
    name: str, kernels: list[str]
) -> None:
    (work,) = chosen([name])
    assert list(launched(work, H200)) == kernels


VERIFIES: dict[str, tuple[bool, dict[str, Any]]] = {
    "16 drafts of 4 heads": (True, {}),
    "17": (False, {"new": 17}),
    "a tree": (True, {"tree": BINARY}),
    "64 columns": (True, {"attention": heads(6, 2, 64)}),
    "80 columns": (False, {"attention": heads(4, 2, 80)}),
    "256 columns": (False, {"attention": heads(4, 2, 256)}),
    "192 and 128 columns": (False, {"attention": heads(4, 2, 192, 128)}),
    "a window": (False, {"attention": heads(window=99)}),
    "latent rows": (False, {"attention": latent(4), "mla": True}),
    "fp8": (False, {"kv_dtype": torch.float8_e4m3fn}),
    "fp16": (True, {"dtype": torch.float16, "kv_dtype": torch.float16}),
    "fp32": (False, FP32),
    "pages": (True, {"page_size": 64}),
}


@pytest.mark.parametrize("name", VERIFIES)
def test_on_hopper_verifies_are_launched_by_the_kernel_that_serves_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody chooses a config for has no row: `launched` must say so where the launcher does."""
    alone, changed = VERIFIES[name]
    (work,) = chosen(["verify-64x16+4k"])
    work = replace(work, **{"cached": (40, 9), **changed})
    calls: list[VerifyCall] = []
    monkeypatch.setattr(TritonEngine, "verify", lambda self, call: calls.append(call))
    inputs = Inputs(work, "cpu")
    with torch.no_grad():
        Own(engine="triton", policy="balanced", extends=True).calls(inputs)[0].run()
    assert verify_shares_hopper.serves(calls[0], H200) == alone
    assert set(launched(work, H200)) == {"verify_split"} | (set() if alone else {"verify_shares"})
    assert set(launched(work, A100)) == {"verify_split", "verify_shares"}


def test_all_workloads_of_the_table_are_launched_by_a_row_of_every_kernel_that_may() -> None:
    for target in (H200, A100, Target(kind="hip")):
        made = tasks(tuning.shipped(), target, TABLE)
        kernels = {one.row.kernel for one in made}
        runs = {"decode_groups", "decode_latent", "extend_hopper"} if target == H200 else {"extend"}
        assert kernels == {"decode_split", "decode_shares", "verify_split", "verify_shares", *runs}
        assert TEXTS.keys() == GRIDS.keys() == KERNELS.keys()


def test_what_was_measured_is_launched_by_the_row_that_says_so() -> None:
    """Figures of the log are of kernels as they were; those of runs are of rows as they are."""
    table = tuning.shipped()
    for row in table.rows:
        if row.measured is None or table.runs[row.measured.run].file.startswith("data/h200/LOG.md"):
            continue
        target = replace(H200, arch=int(row.on[0][3:])) if row.on[0].startswith("sm_") else H200
        for work in chosen(list(row.measured.us)):
            assert asked(table, launched(work, target)[row.kernel]) == row, f"{row.title}: {work.name}"


def test_a_workload_that_says_its_splits_is_launched_by_no_row() -> None:
    assert launched(replace(DECODE, splits=3), H200) == {}


# --- What is tried ----------------------------------------------------------------------------------------------


def test_the_config_of_the_table_comes_first_and_near_ones_differ_in_one_field() -> None:
    own = {"block_n": 64, "num_warps": 4, "num_stages": 1}
    assert task().configs[0] == own and len(task().configs) == 5
    assert list(task(near=True).configs) == [own, own | {"block_n": 16}, own | {"block_n": 32}, own | {"num_warps": 8}]


def test_what_the_checks_of_the_table_refuse_is_not_tried() -> None:
    (work,) = chosen(["extend-1x8k"])
    made = task(work, target=H200, kernel="extend_hopper")
    assert {config["block_n"] for config in made.configs} == {32, 64}  # values of 64 columns are served by it too
    (work,) = chosen(["verify-mla16-16x4+4k"])
    assert {config["block_m"] for config in task(work, target=H200, kernel="verify_shares").configs} == {16, 32}


def test_tiles_that_are_cut_to_the_rows_are_tried_once() -> None:
    (work,) = chosen(["verify-64x4+4k"])
    assert {config["block_m"] for config in task(work, target=H200, kernel="verify_split").configs} == {16}


# --- The search -------------------------------------------------------------------------------------------------


def test_the_quickest_right_config_is_found() -> None:
    finding = found(100.0, 99.5, 80.0, 70.0, 90.0)
    assert finding.before.config["block_n"] == 64 and finding.before.us == {"decode-small": 100.0}
    assert finding.best.config == {"block_n": 32, "num_warps": 4, "num_stages": 1} and finding.changes
    assert finding.best.ratio(finding.before) == pytest.approx(0.7)


def test_a_config_that_gains_less_than_noise_is_left_alone() -> None:
    assert not found(100.0, 99.5, 99.1, 120.0, 100.0).changes


def test_a_config_that_loses_anywhere_is_left_alone() -> None:
    other = replace(DECODE, name="decode-other", cached=(17,))
    finding = found(100.0, 50.0, 100.0, 100.0, 100.0, 10.0, 10.5, 10.0, 10.0, 10.0, of=task(DECODE, other))
    assert not finding.changes and finding.trials[1].us == {"decode-small": 50.0, "decode-other": 10.5}
    finding.trials[1].us["decode-other"] = 10.1
    assert finding.best is finding.trials[1]


def launching_with(monkeypatch: pytest.MonkeyPatch, run: Callable[[Config, Callable[[], Any]], Any]) -> None:
    """Let launches be what `run` makes of a config and the launch itself."""

    def launch(task: Task, config: Config, inputs: Inputs, *, engine: str) -> Any:
        call = launching(task, config, inputs, engine=engine)
        return replace(call, run=lambda: run(config, call.run))

    monkeypatch.setattr(trials, "launching", launch)


def test_what_does_not_fit_is_an_entry_and_keeps_no_other_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []

    def run(config: Config, launch: Callable[[], Any]) -> Any:
        if config["block_n"] != 16:
            return launch()
        needed.append(300_000 + len(needed))
        raise RuntimeError(f"out of resource: shared memory, Required: {needed[-1]}, Hardware limit: 232448")

    launching_with(monkeypatch, run)
    finding = found(100.0, 70.0, 90.0)
    assert [trial.fault is None for trial in finding.trials] == [True, False, False, True, True]
    assert finding.best.config["block_n"] == 32
    lines = tune_command.finding_lines(finding)
    assert lines[0].startswith("decode_shares on interpreter: any: 5 configs on decode-small")
    assert lines[2].startswith("  0.700 of its time block_n 32, num_warps 4") and lines[2].endswith("<- better")
    assert "2 not timed, such as block_n 16" in lines[-1] and "out of resource: shared memory" in lines[-1]


def test_what_is_wrong_is_not_taken_however_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    launching_with(monkeypatch, lambda config, launch: launch() * (1 + (config["block_n"] == 16)))
    finding = found(100.0, 70.0, 100.0)
    assert [(trial.fault or "")[:6] for trial in finding.trials] == ["", "wrong:", "wrong:", "", ""]
    assert finding.best.config["block_n"] == 32


def test_what_is_wrong_when_repeated_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def run(config: Config, launch: Callable[[], Any]) -> Any:
        begun.append(str(config))
        return launch() * (1 + (config["block_n"] == 16 and begun.count(str(config)) > 1))

    launching_with(monkeypatch, run)
    finding = found(100.0, 1.0, 1.0, 70.0, 100.0)
    assert (finding.trials[1].fault or "").startswith("when repeated, wrong: query 0 of request 0 is off by")
    assert finding.best.config["block_n"] == 32


def test_a_choice_that_is_kept_over_tables_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a candidate would be timed that was never launched."""
    kept = decode_shares.SharesConfig(block_n=64, num_warps=4, num_stages=1)
    monkeypatch.setattr(decode_shares.SharesConfig, "choose", classmethod(lambda cls, *given, **named: kept))
    standing = next(row for row in fixed().rows if row.kernel == "decode_shares")
    made = Task(table=fixed(), standing=standing, row=standing, works=(DECODE,), configs=(standing.config,))
    fault = found(1.0, of=made).before.fault or ""
    assert "decode-small was not launched by the row decode_shares on interpreter: any" in fault


def test_a_device_that_is_broken_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config, launch: Callable[[], Any]) -> Any:
        raise RuntimeError("an illegal memory access")

    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    launching_with(monkeypatch, run)
    monkeypatch.setattr(trials, "release", lost)
    with pytest.raises(trials.BrokenDevice, match=r"block_n 64, num_warps 4, .*: broke the device .* out of GRIDS in"):
        found(100.0)


class Fails(Clock):
    """A clock whose device is lost while calls are repeated."""

    def hold(self, call: Callable[[], Any]) -> Held:
        held = super().hold(call)

        def repeat(*, cold: bool) -> list[float]:
            raise RuntimeError("an illegal memory access")

        held.repeat = repeat  # type: ignore[method-assign]
        return held


def test_what_was_found_before_a_device_broke_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = tmp_path / "t.json"
    clocks = iter([Clock(100.0, 99.5, 80.0, 70.0, 90.0), Fails(*[1.0] * 5)])

    class Both:
        name, rounds = "both", 1

        def __init__(self) -> None:
            self.count = 0

        def hold(self, call: Callable[[], Any]) -> Held:
            if self.count % 5 == 0:
                self.clock = next(clocks)
            self.count += 1
            return self.clock.hold(call)

    tasks = [task(), task()]
    got = tune_command.tune(tasks, table=fixed(), setting=CPU, timer=Both(), jobs=1, seconds=None, write=write)
    said = capsys.readouterr().out
    assert got == 1 and "The search ends here." in said and "when repeated: RuntimeError: an illegal memory" in said
    assert "1 rows measured anew, 1 with another config" in said and "kernel_resources.md" in said
    assert '"block_n": 32' in write.read_text()


# --- What is written --------------------------------------------------------------------------------------------


MACHINE: Any = trials.Machine(
    device="A GPU",
    multiprocessors=4,
    versions={"torch": "2", "triton": "3"},
    commit="abc",
    when="2030-01-02T03:04:05+00:00",
    timer="told",
)


def finding(made: Task, us: dict[str, float], *, changes: bool = True) -> Finding:
    """What a search on a GPU might have found."""
    before = Trial(config=made.configs[0], us={name: 2 * time if changes else time for name, time in us.items()})
    return Finding(task=made, trials=(before, Trial(config=made.configs[1], us=us)))


def rows_of(table: Table, kernel: str) -> list[tuple[str, str, Config]]:
    return [(", ".join(row.on), row.shapes, row.config) for row in table.rows if row.kernel == kernel]


def test_a_row_of_its_own_goes_before_that_of_all_devices() -> None:
    table, made = fixed(), task(*chosen(["decode-64x4k-fp8"]), target=H200)
    new = retuned(table, [finding(made, {"decode-64x4k-fp8": 140.04})], MACHINE)
    at = next(i for i, row in enumerate(rows_of(new, "decode_shares")) if row[0] == "sm_90")
    own, shared = rows_of(new, "decode_shares")[at : at + 2]
    assert own == ("sm_90", "kv = fp8", made.configs[1]) and shared[:2] == ("cuda", "kv = fp8")
    (row,) = [row for row in new.rows if row.kernel == "decode_shares" and row.on == ("sm_90",)]
    assert row.measured is not None and row.measured.us == {"decode-64x4k-fp8": 140.0}
    run = new.runs[row.measured.run]
    assert (run.device, run.versions, run.commit, run.file) == ("A GPU", "torch 2, triton 3", "abc", "attnlab tune")
    assert len(new.rows) == len(table.rows) + 1
    again = tasks(new, H200, chosen(["decode-64x4k-fp8"]), kernels=["decode_shares"])[0]
    assert again.standing == again.row == row
    newer = retuned(new, [finding(again, {"decode-64x4k-fp8": 130.0})], replace(MACHINE, when="2030-01-03T03:04"))
    assert len(newer.rows) == len(new.rows) and list(newer.runs)[-1] == "tune-2030-01-03T03:04"
    assert row.measured.run not in newer.runs


def test_others_are_served_as_before() -> None:
    table, made = fixed(), task(*chosen(["decode-64x4k-fp8"]), target=H200)
    new = retuned(table, [finding(made, {"decode-64x4k-fp8": 1.0})], MACHINE)
    choose = launched(chosen(["decode-64x4k-fp8"])[0], A100)["decode_shares"]
    assert asked(new, choose) == asked(table, choose)
    choose = launched(chosen(["decode-64x4k"])[0], H200)["decode_shares"]
    assert asked(new, choose) == asked(table, choose)


def test_a_config_that_stays_is_measured_anew_and_keeps_its_reason() -> None:
    (work,) = chosen(["verify-64x4+4k"])
    work = replace(work, attention=heads(window=4096))  # without one no row is asked for
    table, made = fixed(), task(work, target=H200, kernel="verify_shares")
    assert made.standing is made.row and made.row.why is not None
    new = retuned(table, [finding(made, {"verify-64x4+4k": 263.0}, changes=False)], MACHINE)
    (row,) = [row for row in new.rows if row.measured is not None and row.measured.run == "tune-2030-01-02T03:04"]
    assert (row.config, row.why) == (made.row.config, made.row.why)


def test_a_row_without_a_right_config_is_left_as_it_is() -> None:
    table, made = fixed(), task()
    wrong = Finding(task=made, trials=tuple(Trial(config=config, fault="wrong") for config in made.configs))
    assert retuned(table, [wrong], MACHINE).rows == table.rows


def test_a_table_that_would_be_wrong_is_not_made() -> None:
    made = task(*chosen(["extend-1x8k"]), target=H200, kernel="extend_hopper")
    wide = Trial(config=made.configs[0] | {"block_n": 256}, us={"extend-1x8k": 1.0})
    slow = Trial(config=made.configs[0], us={"extend-1x8k": 2.0})
    with pytest.raises(ValueError, match="the table to be written: extend_hopper on sm_90: any: values of 33 columns"):
        retuned(fixed(), [Finding(task=made, trials=(slow, wide))], MACHINE)


def run_tune(write: Path | None, *us: float) -> int:
    return tune_command.tune([task()], table=fixed(), setting=CPU, timer=Clock(*us), jobs=1, seconds=None, write=write)


def test_the_command_writes_where_it_is_told_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = data_path(tuning.FILE).read_text()
    assert run_tune(None, 100.0, 99.5, 80.0, 70.0, 90.0) == 0
    said = capsys.readouterr().out
    assert "0.700" in said and "decode-small 100.0 -> 70.0" in said and "Nothing was written" in said
    assert run_tune(tmp_path / "t.json", 100.0, 99.5, 80.0, 70.0, 90.0) == 0
    assert "1 rows measured anew, 1 with another config" in capsys.readouterr().out
    new = parsed(json.loads((tmp_path / "t.json").read_text()), name="t")
    check(new, name="t")
    assert rows_of(new, "decode_shares")[0] == ("interpreter", "any", {"block_n": 32, "num_warps": 4, "num_stages": 1})
    assert data_path(tuning.FILE).read_text() == before


def test_rows_that_seconds_do_not_allow_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    tune_command.tune(
        [task(), task()], table=fixed(), setting=CPU, timer=Clock(*[1.0] * 5), jobs=1, seconds=1e-9, write=None
    )
    assert "Left out, as the seconds were over: decode_shares on interpreter: any" in capsys.readouterr().out


# --- The command ------------------------------------------------------------------------------------------------


def test_rows_candidates_and_workloads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "decode_shares", "--list", "--only", "decode-64x4k*"]) == 0
    said = capsys.readouterr().out
    assert "decode_shares tries block_n 16 32, num_warps 4 8, num_stages 1\n" in said
    choose = launched(chosen(["decode-64x4k-fp8"])[0], H200)["decode_shares"]
    row = asked(tuning.shipped(), choose)
    assert f"  {row.shapes}: {trials.words(row.config)}\n" in said and "others on decode-64x4k-fp8\n" in said
    assert "  modifier: block_n " in said and "no chosen workload is launched by it" in said
    assert "decode_split" not in said and "hip" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no GPU here; attnlab tune --list shows what would be tried"),
        (["decode"], "kernel: expected one of decode_split, decode_shares"),
        (["--only", "nothing"], "only: 'nothing' names no workload"),
        (["--jobs", "0"], "--jobs: expected at least 1, got 0"),
        (["--seconds", "-1"], "--seconds: expected more than 0, got -1"),
        (["--write", "no/such/folder/x.json"], "--write: there is no folder"),
        (["--list", "--write", "x.json", "--jobs", "2"], "--list does not take --jobs, --write; leave it away"),
        (["--list", "decode"], "kernel: expected one of decode_split"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after `pip install`, where the data lies inside of the package."""
    monkeypatch.setattr(tune_command, "in_wheel", lambda path: True)
    yield


def test_an_installed_package_is_not_written_to(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--write"]) == 2
    said = capsys.readouterr().err
    assert "belongs to an installed package; run in a checkout, or name a file: --write tuning.json" in said


@pytest.mark.slow
def test_configs_are_compiled_ahead_in_processes_of_their_own() -> None:
    done: list[int] = []
    trials.warm([task()], setting=CPU, jobs=2, on_done=lambda: done.append(1))
    assert len(done) == 2
