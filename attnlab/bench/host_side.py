"""What a step takes of the host beside a GPU, its plan and an eager call of a layer: `attnlab bench --host`.

The device is idle when the first of a step's calls begins, and never waited for: what is left are Python and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from attnlab.bench import metadata
from attnlab.bench.patience import Patience
from attnlab.bench.peer import Peer, Setting, peers
from attnlab.bench.result import FIRST, Result, Row, Timed
from attnlab.bench.run import machine, measure, release
from attnlab.bench.sglang_metadata import SglangMetadata
from attnlab.bench.timing import HostTimer
from attnlab.bench.workload import Workload

CALLS = ("decode-64x4k", "decode-1x8k", "verify-8x8+16k")
"""Workloads whose calls are timed."""
PEERS = ("attnlab", "attnlab-seed", "flashinfer-fa2", "sglang", "sdpa")
PLANS = ((1, 32_768), (64, 32_768), (512, 32_768), (64, 4_096))
"""Requests and tokens of the steps that are planned."""
WHO = {"attnlab, a graph's plan": FIRST, "attnlab, a plan": f"{FIRST}-anew", "SGLang": "sglang"}
"""Columns of what plans are timed: a graph's plan is the one that a server makes at every step."""


def measure_host_side(
    works: Sequence[Workload],
    *,
    setting: Setting,
    plans: Sequence[tuple[int, int]] = PLANS,
    patience: float | None = None,
    on_row: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Return rows of calls, then those of plans, host and replay; `on_row` is given what there is after each.

    A peer has `patience` seconds to prepare a call.
    """
    timer, waits = HostTimer(setting.device), Patience(patience)
    result = Result(machine=machine(setting, timer))
    made: dict[str, Peer] = {name: peers.get(name)(setting) for name in PEERS}

    def rows() -> Iterator[Row]:
        for work in works:
            row = measure(work, made, setting=setting, timer=timer, patience=waits)
            yield replace(row, name=f"call-{work.name.removeprefix('decode-')}-host", group="host", kv_bytes=0, flops=0)
        kernels = None if setting.sglang is None else SglangMetadata.kernels_of(setting.sglang)
        for requests, tokens in plans:
            times = metadata.measure(requests, tokens, kernels, policy="seed")
            name, shape = f"plan-{requests}x{tokens // 1024}k", f"{requests} requests of {tokens:,} tokens"
            yield _plan(f"{name}-host", shape, {WHO[one.who]: one.host_us for one in times})
            # A plan made anew, or for a graph, is the same work of the device.
            found = {WHO[one.who]: one.replay_us for one in times if WHO[one.who] != f"{FIRST}-anew"}
            yield _plan(f"{name}-replay", shape, found)

    for row in rows():
        result = replace(result, rows=(*result.rows, row))
        on_row(result)
        release(setting.device)
    return result


def _plan(name: str, shape: str, times: dict[str, float]) -> Row:
    return Row(
        name=name,
        mode="plan",
        group="host",
        shape=shape,
        kv_bytes=0,
        flops=0,
        checked="how many slots are listed",
        timed=tuple(Timed(peer=who, median_us=us, low_us=us, high_us=us, error=0.0) for who, us in times.items()),
    )
