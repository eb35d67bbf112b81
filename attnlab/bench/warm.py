"""Compile ahead, in processes of their own: kernels that were compiled once come from the caches on disk.

Triton's, Inductor's and FlashInfer's compilers keep what they made on disk, where the run that is timed finds it.
Nothing is timed here, and nothing is believed: what fails here fails again in the run, which says so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty

import torch

from attnlab.bench.inputs import Inputs
from attnlab.bench.patience import Patience
from attnlab.bench.peer import Setting, peers
from attnlab.bench.run import release
from attnlab.bench.workload import Workload

LOOKS_EVERY = 0.2
"""Seconds between two looks at the clock."""


def warm(
    workloads: Sequence[Workload],
    *,
    names: Sequence[str],
    setting: Setting,
    jobs: int,
    seconds: float | None = None,
    patience: float | None = None,
    on_done: Callable[[str], None] = lambda name: None,
) -> None:
    """Run every workload once through every peer, dealt to `jobs` processes; `on_done` is told the name of each.

    After `seconds` what still compiles is killed, with whatever it started: the run compiles what is missing, as it
    does where a process died. A peer has `patience` seconds to prepare a workload, as it has in the run.
    """
    context = get_context("spawn")
    done = context.Queue()
    deals = [workloads[number::jobs] for number in range(jobs)]
    workers = [
        context.Process(target=_compile_all, args=(deal, tuple(names), setting, patience, done), daemon=False)
        for deal in deals
        if deal
    ]
    for worker in workers:
        worker.start()
    until = None if seconds is None else time.monotonic() + seconds
    try:
        while (until is None or time.monotonic() < until) and any(worker.is_alive() for worker in workers):
            with suppress(Empty):
                on_done(done.get(timeout=LOOKS_EVERY))
        while not done.empty():
            on_done(done.get())
    finally:
        for worker in workers:
            _kill(worker)


def _compile_all(
    workloads: Sequence[Workload], names: Sequence[str], setting: Setting, patience: float | None, done: Queue[str]
) -> None:
    if os.name == "posix":
        os.setsid()  # compilers that are started here end with this process
    for work in workloads:
        compile_for(work, names, setting, patience)
        done.put(work.name)


def _kill(worker: BaseProcess) -> None:
    """End a process and, where it leads a group, all that it started."""
    if worker.is_alive() and os.name == "posix" and worker.pid is not None:
        with suppress(ProcessLookupError):  # it has no group yet, or has ended meanwhile
            os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()
    worker.join()


_patience = cache(Patience)
"""One for each process, which remembers who took too long."""


def compile_for(work: Workload, names: Sequence[str], setting: Setting, patience: float | None = None) -> None:
    """Run a workload once through each peer, whatever happens to the others."""
    with torch.no_grad():
        try:
            inputs = Inputs(work, setting.device)
        except Exception:  # of whatever type: the run says it
            return
        for name in names:
            try:
                peer = peers.get(name)(setting)
                if peer.declines(work) is None:
                    with _patience(patience).for_peer(name, work):
                        for call in peer.calls(inputs):
                            call.run()
            except Exception:  # of whatever type: the run says it
                continue
        del inputs
        release(setting.device)
