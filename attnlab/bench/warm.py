"""Compile ahead, in processes of their own: kernels that were compiled once come from the caches on disk.

Triton's, Inductor's and FlashInfer's compilers keep what they made on disk, where the run that is timed finds it.
Nothing is timed here, and nothing is believed: what fails here fails again in the run, which says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context

import torch

from attnlab.bench.inputs import Inputs
from attnlab.bench.patience import Patience
from attnlab.bench.peer import Setting, peers
from attnlab.bench.run import release
from attnlab.bench.workload import Workload


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
    """Run every workload once through every peer in `jobs` processes; `on_done` is told the name of each.

    After `seconds` none is begun: the run compiles what is missing, as it does where a process died. A peer has
    `patience` seconds to prepare a workload, as it has in the run.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(compile_for, work, tuple(names), setting, patience): work.name for work in workloads}
        try:
            for future in as_completed(waiting, timeout=seconds):
                if isinstance(future.exception(), BrokenProcessPool):
                    return
                on_done(waiting[future])
        except TimeoutError:
            pool.shutdown(cancel_futures=True)  # those that were begun are waited for: nothing else runs while we time


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
