"""A run: every workload through every peer; right first, then timed; each row handed over as soon as it is there."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import attnlab
from attnlab.bench.ceilings import ceilings
from attnlab.bench.inputs import Inputs
from attnlab.bench.patience import Patience
from attnlab.bench.peer import Call, Peer, Setting, one_line, peers
from attnlab.bench.result import Machine, NotTimed, Result, Row, Timed
from attnlab.bench.timing import Held, Named, Timer, Timing, timed
from attnlab.bench.truth import Truth, WrongResult
from attnlab.bench.workload import Workload
from attnlab.checks import require
from attnlab.kernels.target import multiprocessors_of

PACKAGES = ("torch", "triton", "flashinfer-python", "sglang")


def run(
    workloads: Sequence[Workload],
    *,
    names: Sequence[str],
    setting: Setting,
    timer: Timer,
    on_row: Callable[[Result], None] = lambda result: None,
    seconds: float | None = None,
    patience: float | None = None,
) -> Result:
    """Return the result of all workloads; `on_row` is given what there is after each.

    `names` are those of the peers. After `seconds` no further workload is begun; the result names those left out. A
    peer has `patience` seconds to prepare a workload.
    """
    with torch.no_grad():
        begin, waits = time.monotonic(), Patience(patience)
        made: dict[str, Peer] = {name: peers.get(name)(setting) for name in names}
        result = Result(machine=machine(setting, timer), ceilings=ceilings(setting.device, timer))
        with _kept():
            for number, work in enumerate(workloads):
                if seconds is not None and time.monotonic() - begin > seconds:
                    return replace(result, left_out=tuple(other.name for other in workloads[number:]))
                row = measure(work, made, setting=setting, timer=timer, patience=waits)
                result = replace(result, rows=(*result.rows, row))
                on_row(result)
                release(setting.device)
        return result


@contextmanager
def _kept() -> Iterator[None]:
    """Take what there is out of the collector's sight: to look through all of torch takes longer than most rows."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """One way of a peer, right once and ready to be repeated."""

    peer: str
    call: Call
    held: Held
    error: float


def measure(work: Workload, made: Mapping[str, Peer], *, setting: Setting, timer: Timer, patience: Patience) -> Row:
    """Return a workload's row. What a peer raises is an entry of the row, and does not keep others from running."""
    try:
        inputs = Inputs(work, setting.device)
        truth = Truth.of(inputs)
    except Exception as error:  # of whatever type: too little memory, most often
        why = f"the workload could not be built: {one_line(error)}"
        return _row(work, "none", [], [NotTimed(peer=name, reason="failed", why=why) for name in made])
    ready: list[_Ready] = []
    others: list[NotTimed] = []
    for name, peer in made.items():
        try:
            ready += _prepared(name, peer, inputs, truth, timer, patience)
        except _Declined as declined:
            others.append(NotTimed(peer=name, reason="declined", why=str(declined)))
        except WrongResult as wrong:
            others.append(NotTimed(peer=name, reason="wrong", why=str(wrong)))
        except Exception as error:  # of whatever type: a peer's failure is its own
            others.append(NotTimed(peer=name, reason="failed", why=one_line(error)))
    found: list[Timed] = []
    try:
        timings = timed([one.held for one in ready], rounds=timer.rounds, cold=work.cold)
    except Exception as error:  # of whatever type: a fault on the device, most often, which nobody owns up to
        others += [NotTimed(peer=one.peer, reason="failed", why=f"when repeated, {one_line(error)}") for one in ready]
        return _row(work, truth.checked, found, others)
    for one, timing in zip(ready, timings, strict=True):
        try:
            truth.error(one.call.read(timing.answer))
        except WrongResult as wrong:
            others.append(NotTimed(peer=one.peer, reason="wrong", why=f"when repeated, {wrong}"))
        else:
            found.append(_timed(one, timing))
    return _row(work, truth.checked, found, others)


class _Declined(Exception):
    """A peer does not offer a workload."""


def _prepared(name: str, peer: Peer, inputs: Inputs, truth: Truth, timer: Timer, patience: Patience) -> list[_Ready]:
    """Run each way of a peer once, hold its output to the oracle, and make it ready."""
    why = peer.declines(inputs.work)
    if why is not None:
        raise _Declined(why)
    with patience.for_peer(name, inputs.work):
        right = [(call, truth.error(call.read(call.run()))) for call in peer.calls(inputs)]
    return [_Ready(peer=name, call=call, held=timer.hold(call.run), error=error) for call, error in right]


def _timed(one: _Ready, timing: Timing) -> Timed:
    low, high = timing.spread_us
    return Timed(
        peer=one.peer,
        median_us=timing.median_us,
        low_us=low,
        high_us=high,
        error=one.error,
        variant=one.call.variant,
    )


def _row(work: Workload, checked: str, found: Sequence[Timed], others: Sequence[NotTimed]) -> Row:
    """Return a row with the quickest way of each peer; of one that was wrong once, none counts."""
    best: dict[str, Timed] = {}
    wrong = {other.peer for other in others if other.reason == "wrong"}
    for one in found:
        if one.peer in wrong:
            continue
        if one.peer not in best or one.median_us < best[one.peer].median_us:
            best[one.peer] = one
    left = {other.peer: other for other in others if other.peer not in best}
    return Row(
        name=work.name,
        mode=work.mode,
        group=work.group,
        shape=shape_of(work),
        kv_bytes=work.kv_bytes,
        flops=work.flops,
        checked=checked,
        timed=tuple(best.values()),
        not_timed=tuple(left.values()),
        x=work.x,
    )


def shape_of(work: Workload) -> str:
    """Return a workload's attention and storage in words."""
    spec = work.attention
    columns = str(spec.qk_dim) if spec.qk_dim == spec.v_dim else f"{spec.qk_dim}/{spec.v_dim}"
    parts = [f"{spec.heads}/{spec.kv_heads} heads of {columns}", _dtype(work.kv_dtype)]
    parts += [] if spec.window is None else [f"window {spec.window:,}"]
    parts += [] if spec.chunk is None else [f"chunk {spec.chunk:,}"]
    parts += [f"pages of {work.page_size}"] if work.page_size > 1 else []
    return ", ".join(parts)


def _dtype(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}
    require(dtype in names, f"kv_dtype: expected one of {', '.join(names.values())}, got {dtype}")
    return names[dtype]


def release(device: torch.device) -> None:
    """Give a row's memory back. A fault of an earlier call surfaces here, and the device is lost then: it is raised."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def machine(setting: Setting, clock: Named) -> Machine:
    """Return where this process runs; `clock` is what took the times."""
    on_gpu = setting.device.type == "cuda"
    found = {"attnlab": attnlab.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if on_gpu:
        found["CUDA"] = str(torch.version.cuda)
    return Machine(
        device=torch.cuda.get_device_name(setting.device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        multiprocessors=multiprocessors_of(setting.device),
        versions=found,
        commit=_commit(),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        timer=clock.name,
    )


def _commit() -> str | None:
    """Return the checkout's commit; None where the source is in none, or git is missing."""
    checkout = Path(attnlab.__file__).parent.parent
    if not (checkout / ".git").exists():  # an installed package may lie inside of somebody else's
        return None
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
