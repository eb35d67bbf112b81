"""What recording costs a decode: `attnlab bench --hooks`.

Four ways of one call take turns: never recorded; after a recording was closed; while partials are recorded; while times
are. What is timed is the call on the device, from its begin to the end of its last kernel: recorders copy to the host
after that, which is told beside it. Before any time counts, answers are right and the same bits in all four, and what
is launched after a closed recording are the very binaries that are launched without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.bench.ceilings import ceilings
from attnlab.bench.inputs import Inputs
from attnlab.bench.launches import launched
from attnlab.bench.peer import Setting, one_line
from attnlab.bench.result import FIRST, RECORDINGS, NotTimed, Result, Row, Timed
from attnlab.bench.run import machine, release, shape_of
from attnlab.bench.timing import GraphTimer, Timing, WallTimer
from attnlab.bench.truth import Truth, WrongResult
from attnlab.bench.watch import DeviceWatch, HostWatch, Watch, Watched
from attnlab.bench.workload import Workload
from attnlab.checks import require
from attnlab.inspect.record import record
from attnlab.plan.plans import Plan
from attnlab.trace import Trace

WORKS = ("decode-64x4k", "decode-skew")
POLICIES = ("balanced", "seed")
CLOSED, PARTIALS, TIMES = (f"{FIRST}-{name}" for name in ("closed", "partials", "times"))
ROUNDS, CALLS = 5, 10
BUDGET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of the same call; `opened` is what is open around it."""

    name: str
    inputs: Inputs
    backend: AttentionBackend
    plan: Plan
    out: Tensor
    opened: Callable[[], AbstractContextManager[Trace | None]] = nullcontext
    samples: list[float] = field(default_factory=list)

    def call(self) -> Tensor:
        """Decode."""
        inputs = self.inputs
        return self.backend.forward(0, inputs.q, None, None, self.plan, save=False, out=self.out, sinks=inputs.sinks)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open what is open around the calls; raise RuntimeError where a recording was full before its end."""
        with self.opened() as trace:
            yield
        require(trace is None or not trace.left_out, "hooks: the recording had no room for all calls", RuntimeError)

    def turn(self, watch: Watch) -> None:
        """Time some calls on the device."""
        with self.open():
            tracer = self.backend.tracer
            if tracer is not None:
                self.backend.tracer = Watched(inner=tracer, watch=watch)
            for _ in range(CALLS):
                watch.begin()
                self.call()
                if tracer is None:
                    watch.end()
                self.samples.append(watch.us())

    def whole_us(self) -> float:
        """Return the microseconds of a call with all that is done for it on the host."""
        with self.open():
            begin = time.perf_counter()
            for _ in range(CALLS):
                self.call()
            if self.inputs.device.type == "cuda":
                torch.cuda.synchronize()
            return 1e6 * (time.perf_counter() - begin) / CALLS


def measure_hooks(
    works: Sequence[Workload],
    *,
    policies: Sequence[str] = POLICIES,
    setting: Setting,
    on_row: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Return a row for each decode and policy, whose name it has; `on_row` is given what there is after each."""
    on_gpu = setting.device.type == "cuda"
    watch: Watch = DeviceWatch() if on_gpu else HostWatch()
    most = ceilings(setting.device, GraphTimer() if on_gpu else WallTimer())
    result = Result(machine=machine(setting, watch), ceilings=most)
    for work in works:
        for policy in policies:
            result = replace(result, rows=(*result.rows, _row(work, policy, setting, watch)))
            on_row(result)
            release(setting.device)
    return result


def _row(work: Workload, policy: str, setting: Setting, watch: Watch) -> Row:
    require(work.mode == "decode", f"hooks: expected a decode, got {work.name}, of mode {work.mode}")
    inputs = Inputs(work, setting.device)
    truth, others = Truth.of(inputs), list[NotTimed]()
    ways, errors = list[Way](), dict[str, float]()
    for way in _ways(inputs, setting.engine, policy):
        try:
            errors[way.name] = _checked(way, ways[:1], truth)
            ways.append(way)
        except NotImplementedError as error:  # an engine without a clock
            others.append(NotTimed(peer=way.name, reason="declined", why=one_line(error)))
        except WrongResult as error:
            others.append(NotTimed(peer=way.name, reason="wrong", why=str(error)))
    for _ in range(ROUNDS):
        for way in ways:
            way.turn(watch)
    return Row(
        name=f"hooks-{work.name.removeprefix('decode-')}-{policy}",
        mode="decode",
        group=RECORDINGS,
        shape=shape_of(work),
        kv_bytes=work.kv_bytes,
        flops=work.flops,
        checked=truth.checked,
        timed=tuple(_timed(way, errors[way.name], setting) for way in ways),
        not_timed=tuple(others),
    )


def _ways(inputs: Inputs, engine: str, policy: str) -> list[Way]:
    never, later = (inputs.backend(engine=engine, policy=policy) for _ in range(2))
    plans = {backend: backend.plan(inputs.batch()) for backend in (never, later)}
    recorded = partial(record, never, budget_bytes=BUDGET_BYTES)

    def way(name: str, backend: AttentionBackend, opened: Callable[[], AbstractContextManager[Trace | None]]) -> Way:
        out, plan = inputs.output(), plans[backend]
        return Way(name=name, inputs=inputs, backend=backend, plan=plan, out=out, opened=opened)

    closed = way(CLOSED, later, nullcontext)
    with record(later, scores=True):
        closed.call()
    closed.out.fill_(float("nan"))
    return [
        way(FIRST, never, nullcontext),
        closed,
        way(PARTIALS, never, partial(recorded, partials=True)),
        way(TIMES, never, partial(recorded, partials=False, times=True)),
    ]


def _checked(way: Way, first: Sequence[Way], truth: Truth) -> float:
    """Return a way's error; raise WrongResult unless it is right, with the first's bits and, closed, its binaries."""
    with way.open():
        out = way.call()
    error = truth.error(out)
    for other in first:
        require(torch.equal(out, other.call()), "its answer has other bits than without a recording", WrongResult)
        if way.name == CLOSED:
            mine, theirs = launched(way.call), launched(other.call)
            require(mine == theirs, f"it launches {mine}, without a recording {theirs}", WrongResult)
            compiled = truth.out.device.type == "cuda"
            require(len(mine) > 0 or not compiled, "no launch was seen, so that no binary could be told", WrongResult)
    return error


def _timed(way: Way, error: float, setting: Setting) -> Timed:
    timing = Timing(samples_us=tuple(way.samples), answer=None)
    low, high = timing.spread_us
    words = f"{way.whole_us():,.0f} us with all of the host's part"
    if way.name == CLOSED and setting.device.type == "cuda":
        words = f"the binaries of {FIRST}; {words}"
    return Timed(peer=way.name, median_us=timing.median_us, low_us=low, high_us=high, error=error, variant=words)
