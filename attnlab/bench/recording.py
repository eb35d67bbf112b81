"""What recording costs on a GPU, open and closed: `python -m attnlab.bench.recording`.

Times are medians of eager calls by CUDA events, in alternating rounds, so that clocks drift alike for all.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from attnlab.bench.decode import DecodeShape, build
from attnlab.inspect.record import record
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.plans import Queries

ROUNDS, CALLS = 20, 20


def _time_us(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1000.0 * float(begin.elapsed_time(end)) / CALLS


def main() -> None:
    """Print microseconds per call: never recorded, after a closed recording, and with programs noting times."""
    device = torch.device("cuda")
    shape = DecodeShape(requests=64, tokens=4096, heads=32, kv_heads=8, dim=128)
    never, plan = build(shape, "seed", device)
    after, plan_after = build(shape, "seed", device)
    q = torch.randn(shape.requests, shape.heads, shape.dim, device=device, dtype=shape.dtype)
    out = torch.empty_like(q)
    with record(after, scores=True):
        after.decode(0, q, None, None, plan_after, save=False, out=out)

    def timed() -> None:
        never.decode(0, q, None, None, plan, save=False, out=out)

    def closed() -> None:
        after.decode(0, q, None, None, plan_after, save=False, out=out)

    class Clock:
        """A tracer that wants times and keeps nothing."""

        def times_for(self, call: DecodeCall) -> Tensor:
            return noted

        def decoded(self, call: DecodeCall) -> None:
            """Look away."""

        def check_queries(self, layer: int, queries: Queries) -> None:
            """Look away."""

        def attended(self, call: ExtendCall | VerifyCall) -> None:
            """Look away."""

    noted = torch.zeros(plan.lanes[0].schedule.segments.shape[0], 1, 3, dtype=torch.int64, device=device)

    def noting() -> None:
        never.tracer = Clock()
        timed()
        never.tracer = None

    calls = {"never recorded": timed, "after a closed recording": closed, "programs note times": noting}
    for call in calls.values():
        call()
    rounds = [{name: _time_us(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    for name in calls:
        times = [times[name] for times in rounds]
        print(f"{name:26} {median(times):8.1f} us  (rounds {min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
