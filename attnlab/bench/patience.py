"""How long a peer may take to prepare a workload: some compile for minutes, and others should not wait for them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnlab.bench.workload import Workload
from attnlab.checks import require

MOST_SECONDS = 1e6
"""More than clocks of a system need take."""


class TookTooLong(RuntimeError):
    """A peer was cut off before it was ready."""


class Patience:
    """So many `seconds` for each peer and workload, None: as long as it takes.

    A peer that was cut off once sits out the other workloads of the same mode, whose kernels would take as long.
    Cutting off needs signals: on a system without them, and outside of the main thread, everybody has all the time.

    >>> from attnlab.bench.workloads import TABLE
    >>> patience = Patience(0.01)
    >>> try:
    ...     with patience.for_peer("slow", TABLE[0]):
    ...         while True:
    ...             pass
    ... except TookTooLong as error:
    ...     print(error)
    not ready after 0.01 s, compiling most likely; --patience gives it longer
    >>> with patience.for_peer("slow", TABLE[1]):
    ...     pass
    Traceback (most recent call last):
    attnlab.bench.patience.TookTooLong: was not ready for decode-64x4k after 0.01 s, and is not asked for a decode again
    """

    def __init__(self, seconds: float | None) -> None:
        require(
            seconds is None or 0 < seconds <= MOST_SECONDS,
            f"patience: expected more than 0 and at most {MOST_SECONDS:g} seconds, got {seconds}",
        )
        self.seconds = seconds
        self._cut_off: dict[tuple[str, str, bool], str] = {}

    @contextmanager
    def for_peer(self, peer: str, work: Workload) -> Iterator[None]:
        """Give a peer its time for a workload. Raises TookTooLong in the block when it is over, or was over before."""
        kind = (peer, work.mode, work.mla)
        if kind in self._cut_off:
            before, what = self._cut_off[kind], "an MLA" if work.mla else "a"
            raise TookTooLong(
                f"was not ready for {before} after {self.seconds:g} s, and is not asked for {what} {work.mode} again"
            )
        try:
            with _alarm(self.seconds):
                yield
        except TookTooLong:
            self._cut_off[kind] = work.name
            raise


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Raise TookTooLong in the block after so many seconds; an alarm that was set before goes on after it."""
    heard = os.name == "posix" and threading.current_thread() is threading.main_thread()
    if seconds is None or not heard:
        yield
        return

    def rings(number: int, frame: Any) -> None:
        raise TookTooLong(f"not ready after {seconds:g} s, compiling most likely; --patience gives it longer")

    before, since, theirs = signal.signal(signal.SIGALRM, rings), time.monotonic(), 0.0
    try:
        theirs, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if theirs > 0:
            signal.setitimer(signal.ITIMER_REAL, max(theirs - (time.monotonic() - since), 1e-3))
