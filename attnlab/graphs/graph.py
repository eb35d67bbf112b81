"""A captured step: fixed inputs, a plan whose memory is filled for each step, and the step's own kernels.

Reference: the capture and replay hooks of triton_backend.py. Source of the method: CUDA graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import ExtendBatch, VerifyBatch
from attnlab.checks import describe, require, tensor
from attnlab.grad import without_gradients
from attnlab.graphs.memory import AnyBatch, Filled, PlanMemory, check_apart, recorded_in, storage_of, tensors_of
from attnlab.graphs.shapes import Shape
from attnlab.kernels.target import launching_on
from attnlab.mask import CustomMask
from attnlab.plan.draft import DraftPlan
from attnlab.plan.plans import DecodePlan, ExtendPlan, VerifyPlan
from attnlab.plan.signature import differences

Step = Callable[..., Any]
"""(plan, **inputs) -> a tensor with a row per query token, or a tuple, list or dict of such."""


def capture(
    backend: AttentionBackend, step: Step, shape: Shape, *, inputs: Mapping[str, Tensor], rerun: bool = False
) -> Graph:
    """Capture `step(plan, **inputs)` for every batch up to `shape`, and return the graph.

    `step` runs all layers with whatever lies between them, and returns results with a row per query token. `inputs`
    are examples of what it takes, `[tokens, ...]`, for their shapes and dtypes; the graph has memory of its own for
    them. On a CPU, which has no CUDA graphs, pass `rerun=True`: the step then runs again at every replay, over the
    same fixed memory. Raises before anything is captured where the backend was not built for the shape.

    >>> import torch, attnlab
    >>> from attnlab import graphs
    >>> wb = attnlab.workbench("SmolLM2-135M", lens=[20, 7], policy="seed", engine="eager")
    >>> q, k, v = wb.newest(0)
    >>> def step(plan, q, k, v):
    ...     return wb.backend.decode(0, q, k, v, plan)
    >>> graph = graphs.capture(
    ...     wb.backend, step, graphs.DecodeShape(requests=2), inputs={"q": q, "k": k, "v": v}, rerun=True
    ... )
    >>> graph.run(wb.batch, q=q, k=k, v=v).shape
    torch.Size([2, 9, 64])
    """
    _check_arguments(backend, step, shape, inputs)
    device = backend.pool.device
    require(
        rerun or device.type == "cuda",
        f"capture: {device} has no CUDA graphs; pass rerun=True to run the step again over the same fixed memory",
    )
    require(
        rerun or not backend.engine.waits,
        f"capture: the {backend.engine.name!r} engine waits for the device, which a CUDA graph cannot hold; use "
        'engine="triton", or pass rerun=True',
    )
    require(
        backend.tracer is None,
        "capture: a recording is on, and a replay runs no Python that could record; end it first",
        RuntimeError,
    )
    # What an inference tensor is cannot be refilled outside of that mode.
    with torch.inference_mode(False), launching_on(device):
        return Graph(backend=backend, step=step, shape=shape.bounded(backend), inputs=inputs, rerun=rerun)


class Graph:
    """A captured step. `plan(batch)` fills its plan for a step, `replay(plan)` runs it; `run` does both.

    A plan is good until the next one is made: all lie in the same memory. So do results, which are cut to the live
    rows: copy what is to be kept. `inputs`, the fixed tensors by name, `[tokens, ...]`, and `mask` may be filled in
    place: `graph.inputs["q"][: graph.live] = q` after `plan(batch)`, which knows how many rows are live, and before
    `replay(plan)`. All of it belongs to one stream: what is filled on another may be overwritten while a replay still
    reads it.
    """

    def __init__(
        self, *, backend: AttentionBackend, step: Step, shape: Shape, inputs: Mapping[str, Tensor], rerun: bool
    ) -> None:
        self.backend, self.shape, self.rerun = backend, shape, rerun
        self._step = step
        self.inputs = {name: _fixed(name, x, shape.tokens, backend) for name, x in inputs.items()}
        self.batch = shape.memory(device=backend.pool.device, max_tokens=backend.max_tokens)
        self._memory = PlanMemory(
            backend.planner, self.batch, max_ranges=backend.workspace.max_ranges, recorded=not rerun
        )
        self._signature = self._memory.first.signature()
        self._latest, self._live, self.requests = self._memory.first, 0, 0
        self._own = {storage_of(x): path for path, x in self.buffers.items()}
        self._graph = None if rerun else torch.cuda.CUDAGraph()
        self._result: Any = None
        if self._graph is not None:
            self._result = recorded_in(self._graph, lambda: self._checked(self._memory.first))
            self._complete = backend.workspace.complete

    @property
    def mask(self) -> Tensor | None:
        """The entries that the graph reads, uint8, to be filled in place; None where it was captured without a mask."""
        mask = self.batch.mask if isinstance(self.batch, ExtendBatch | VerifyBatch) else None
        return mask.bits if isinstance(mask, CustomMask) else None

    @property
    def live(self) -> int:
        """Query tokens of the latest step; the rows behind them are padding."""
        return self._live

    @property
    def latest(self) -> Filled:
        """The plan of the latest step: what was replayed can be described and shown afterwards."""
        return self._latest

    @property
    def planning_replayed(self) -> bool:
        """Whether a step's plan is filled in by a CUDA graph of the planning; else it is made anew and copied."""
        return self._memory.graph is not None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The fixed memory by path: the batch that steps are copied to, the plan, the inputs; no memory comes twice.

        What lies between layers, and the results, belong to the step.
        """
        paths = [*tensors_of("batch", self.batch), *tensors_of("plan", self._latest)]
        paths += [(f"inputs.{name}", x) for name, x in self.inputs.items()]
        first: dict[int, str] = {}
        return {path: x for path, x in paths if x.numel() and first.setdefault(x.data_ptr(), path) == path}

    @property
    def nbytes(self) -> int:
        """Bytes of the fixed memory."""
        return sum(x.nbytes for x in self.buffers.values())

    @without_gradients
    def plan(self, batch: AnyBatch) -> Filled:
        """Fill the graph's memory with the plan of a step, and return it. All is checked before anything is written.

        Raises as `backend.plan` does, and where the batch is another, or larger, than what was captured.
        """
        self.shape.check(batch)
        self.backend.planner.admission.check(batch)
        plan = self._memory.fill(batch)
        if self.mask is not None and isinstance(batch, ExtendBatch | VerifyBatch):
            self._write_causal(plan, batch)
        self._latest, self._live, self.requests = plan, self.shape.live(batch), batch.rows.shape[0]
        return plan

    def replay(self, plan: Filled) -> Any:
        """Run the captured step for the latest plan, over the inputs as they are; return its results' live rows."""
        if plan is not self._latest:
            self._refuse(plan)
        self.backend.check_current(plan)
        self._check_unrecorded()
        if self._graph is None:
            self._result = self._checked(plan)
        else:
            with launching_on(self.backend.pool.device):
                self._graph.replay()
            self.backend.workspace.complete = self._complete
        return _cut(self._result, self._live)

    @without_gradients
    def run(self, batch: AnyBatch, **inputs: Tensor) -> Any:
        """Plan a step, copy its inputs (a row per query token) to the graph's, and replay it.

        Inputs lie on the graph's device, apart from its own memory or in their own place there. All is checked before
        anything is planned or written.
        """
        self.shape.check(batch)
        self._check_unrecorded()
        given = {name: self._given(name, inputs, self.shape.live(batch)) for name in self.inputs}
        unknown = sorted(inputs.keys() - self.inputs.keys())
        require(not unknown, f"inputs: the graph has {', '.join(self.inputs)}, got {', '.join(unknown)}")
        plan = self.plan(batch)
        for name, x in given.items():
            self.inputs[name][: x.shape[0]].copy_(x, non_blocking=True)
            self.inputs[name][x.shape[0] :].zero_()
        return self.replay(plan)

    def _given(self, name: str, inputs: Mapping[str, Tensor], rows: int) -> Tensor:
        require(name in inputs, f"inputs: the graph has {', '.join(self.inputs)}, {name!r} is missing")
        there = self.inputs[name]
        _check_dense(name, inputs[name])
        shape = [rows, *there.shape[1:]]
        x = tensor(name, inputs[name], shape=shape, dtype=there.dtype, device=there.device)
        check_apart(name, x, there, self._own)
        return x

    def _write_causal(self, plan: Filled, batch: ExtendBatch | VerifyBatch) -> None:
        """Write a causal mask where a step brings none."""
        if isinstance(batch.mask, CustomMask) or not isinstance(plan, ExtendPlan | VerifyPlan) or self.mask is None:
            return
        queries = plan.queries
        new = queries.indptr.diff()
        prefix = plan.batch.prefix.device.clamp(0, plan.batch.prefix.bound_max)
        self.backend.engine.ops.write_causal(self.mask, queries.mask_indptr, new, prefix + new, most=self.shape.each)

    def _check_unrecorded(self) -> None:
        require(
            self.backend.tracer is None,
            "replay: a recording is on, and a replay runs no Python that could record; run the step with the plan",
            RuntimeError,
        )

    def _refuse(self, plan: Filled) -> None:
        """Raise unless a plan that is not the latest object is the latest step's all the same, copied or replaced."""
        given = isinstance(plan, DecodePlan | ExtendPlan | VerifyPlan | DraftPlan)
        require(given, f"plan: expected one that graph.plan(batch) made, got {describe(plan)}", TypeError)
        if plan.turn.over:
            return  # which the backend has the words for
        changed = differences(self._signature, plan.signature())
        if not changed and plan.turn is not self._latest.turn:
            raise ValueError("plan: another graph's; replay it there, or plan with this one")
        require(
            not changed,
            f"plan: not the graph's own; {len(changed)} of its parts are not as they were captured, the first: "
            f"{changed[0] if changed else ''}; run the step with this plan, without the graph",
        )

    def _checked(self, plan: Filled) -> Any:
        """Run the step; raise unless its results have a row per query token."""
        with torch.no_grad():
            result = self._step(plan, **self.inputs)
        for x in _leaves(result):
            rows = f"a row for each of {self.shape.tokens} query tokens"
            require(
                isinstance(x, Tensor) and x.dim() >= 1 and x.shape[0] == self.shape.tokens,
                f"step: expected results with {rows}, got {describe(x)}",
            )
        return result


def _check_arguments(backend: Any, step: Any, shape: Any, inputs: Any) -> None:
    """Raise TypeError where an argument or a name is of another kind, ValueError where an input's name is taken."""
    for name, x, kind in (("backend", backend, AttentionBackend), ("inputs", inputs, Mapping), ("shape", shape, Shape)):
        wanted = "a Shape such as DecodeShape" if kind is Shape else kind.__name__
        require(isinstance(x, kind), f"{name}: expected {wanted}, got {describe(x)}", TypeError)
    require(callable(step), f"step: expected a function of (plan, **inputs), got {describe(step)}", TypeError)
    unnamed = [describe(name) for name in inputs if not isinstance(name, str)]
    require(not unnamed, f"inputs: expected names that run and the step take, got {', '.join(unnamed)}", TypeError)
    taken = sorted({"batch", "plan", "self"} & inputs.keys())
    require(not taken, f"inputs: {', '.join(taken)} is the name of an argument of run, or of the step; choose another")
    _check_inputs(step, inputs)


def _check_inputs(step: Step, inputs: Mapping[str, Tensor]) -> None:
    """Raise TypeError unless `step(plan, **inputs)` is a call that its signature allows."""
    try:
        signature = inspect.signature(step)
    except ValueError:  # of some functions in C none is known: the call itself will tell
        return
    try:
        signature.bind(object(), **inputs)
    except TypeError as error:
        empty = inspect.Parameter.empty
        takes = ", ".join(str(x.replace(annotation=empty)) for x in signature.parameters.values())
        raise TypeError(
            f"inputs: step takes ({takes}), called with the plan and {', '.join(inputs) or 'no input'}: {error}; give "
            "the inputs the names that step has for them"
        ) from None


def _check_dense(name: str, x: object) -> None:
    """Raise ValueError where a tensor is sparse or nested, and so has no rows that could be copied as they are."""
    if isinstance(x, Tensor):
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        require(kind == "strided", f"{name}: expected a dense tensor, got a {kind} one; pass one with a row a token")


def _fixed(name: str, x: Tensor, tokens: int, backend: AttentionBackend) -> Tensor:
    _check_dense(f"inputs: {name}", x)
    require(isinstance(x, Tensor) and x.dim() >= 1, f"inputs: {name}: expected [tokens, ...], got {describe(x)}")
    return torch.zeros(tokens, *x.shape[1:], dtype=x.dtype, device=backend.pool.device)


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [leaf for item in x.values() for leaf in _leaves(item)]
    if isinstance(x, tuple | list):
        return [leaf for item in x for leaf in _leaves(item)]
    return [x]


def _cut(x: Any, rows: int) -> Any:
    """Return the same nest of tensors, each cut to its first rows."""
    if isinstance(x, dict):
        return {key: _cut(item, rows) for key, item in x.items()}
    if isinstance(x, tuple | list):
        kind, parts = type(x), [_cut(item, rows) for item in x]
        is_named = any("_fields" in vars(base) for base in kind.__mro__)  # a named tuple is made of its fields
        return kind(*parts) if is_named else kind(parts)
    return x[:rows]
