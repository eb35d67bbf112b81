"""Recording: what exists only inside a call, copied out while it happens.

Partial results lie in the scratch after every decode, so keeping them needs no hook in a kernel. Scores are computed
again right after the call, from the paged cache. Times alone are noted by the programs themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attnlab.backend import AttentionBackend
from attnlab.checks import require, whole
from attnlab.inspect.recorder import Budget, Recorder, Scores, TextsOf, numbers, refuse_capture
from attnlab.trace import Trace

__all__ = ["BUDGET_BYTES", "Scores", "record"]

BUDGET_BYTES = 256 << 20
"""What a recording keeps at most, unless it is told otherwise."""


@contextmanager
def record(
    backend: AttentionBackend,
    *,
    partials: bool = True,
    scores: Scores | bool = False,
    times: bool = False,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = (-1,),
    budget_bytes: int = BUDGET_BYTES,
    texts_of: TextsOf | None = None,
) -> Iterator[Trace]:
    """Record the calls made inside the block; the trace fills as they happen.

    `partials` keeps every output and, of decodes, every split's output and log-sum-exp; `scores` what a `Scores` asks
    for (True: all weights); `times` when each program of a decode ran (compiled kernels only). Of extends and verifies
    `queries` says which of each request's new tokens are looked at: numbers, below 0 from the last; None: all. What
    would not fit the budget is left out, and the trace says so. Outputs are the same bits as without a recording.
    Of extends and verifies the log-sum-exp is computed again, from the scores of the chosen queries: that costs a pass
    over them for each call, also where no scores are kept; choose few queries.
    `texts_of` says which of the texts that one puts into `trace.tokens` are those of a call's requests, given the slot
    of each one's first new token; without it they are taken to be in the batch's order.

    Raises TypeError for a backend, a wish or a list that is none; ValueError for a budget below 1 or a layer that the
    model lacks; RuntimeError where the backend is being recorded already, or a CUDA graph is being captured; and
    NotImplementedError for times of programs that have no clock. Calls inside of the block raise ValueError, before
    anything is stored, where the batch has no such request or query, or the layer no such head.

    >>> import attnlab
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[300, 40], policy="seed", engine="eager")
    >>> with attnlab.record(wb.backend, scores=True) as trace:
    ...     out = wb.decode(18)
    >>> [score.values.shape for score in trace.call(18).scores]
    [torch.Size([9, 19]), torch.Size([9, 40])]

    Of a step of several queries a request, here the last three tokens of each:

    >>> with attnlab.record(wb.backend, scores=True, queries=[0, -1]) as trace:
    ...     out = wb.extend(18, last=3)
    >>> trace.call(18).rows, trace.call(18).q_pos
    (((0, 0), (0, 2), (1, 0), (1, 2)), (297, 299, 37, 39))
    """
    if not isinstance(backend, AttentionBackend):
        raise TypeError(
            f"backend: expected an AttentionBackend, got {type(backend).__name__}; a workbench has its own: wb.record()"
        )
    require(whole("budget_bytes", budget_bytes) >= 1, f"budget_bytes: expected at least 1, got {budget_bytes}")
    wanted = _wished(scores)
    looked_at = None if layers is None else frozenset(numbers("layers", layers))
    for layer in looked_at or ():
        backend.model.layer(layer)
    require(
        backend.tracer is None,
        "record: this backend is being recorded already; end the other block first",
        RuntimeError,
    )
    refuse_capture()
    if times:
        backend.engine.check_times()
    trace = Trace()
    backend.tracer = Recorder(
        backend=backend,
        trace=trace,
        partials=partials,
        scores=wanted,
        times=times,
        layers=looked_at,
        queries=None if queries is None else numbers("queries", queries),
        budget=Budget(trace=trace, limit=budget_bytes),
        texts_of=texts_of,
    )
    try:
        yield trace
    finally:
        backend.tracer = None


def _wished(scores: object) -> Scores | None:
    """Return what `record` was asked to keep of scores."""
    if isinstance(scores, Scores) or scores is None or scores is False:
        return scores or None
    if scores is True:
        return Scores()
    raise TypeError(f"scores: expected a Scores, True or False, got {scores!r}; see attnlab.Scores")
