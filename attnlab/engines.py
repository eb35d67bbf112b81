"""The two engines: the Triton kernels, and their twin in torch. The only place that knows both.

Which one runs is an argument; there is no automatic choice and no silent fallback.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab.checks import describe, last_axis_contiguous, one_of, require, same_device, tensor
from attnlab.eager import decode as eager_decode
from attnlab.eager import scores as eager_scores
from attnlab.eager.index import EagerPlanOps
from attnlab.kernels import decode as triton_decode
from attnlab.kernels import scores as triton_scores
from attnlab.kernels.index import TritonPlanOps
from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView
from attnlab.plan.build import PlanOps
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Engine(Protocol):
    """Runs attention for plans. Arguments were checked (`check_decode`) before they arrive here."""

    name: str
    ops: PlanOps

    def check_storage(self, dtype: torch.dtype) -> None:
        """Raise NotImplementedError where this engine cannot read a pool of this dtype."""

    def check_times(self) -> None:
        """Raise NotImplementedError where this engine's programs cannot note when they ran."""

    def decode(
        self,
        *,
        q: Tensor,
        view: KVView,
        lane: Lane,
        spec: AttentionSpec,
        partials: Partials,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        aux: Tensor | None,
        times: Tensor | None = None,
    ) -> None:
        """Attend to every range of the lane's schedule, leave the states in `partials`, merge them into `out`.

        `times [programs, head tiles, 3]` int64, where given, is filled with multiprocessor, start and end (ns).
        """

    def scores(
        self,
        *,
        q: Tensor,
        view: KVView,
        layout: KVLayout,
        spec: AttentionSpec,
        requests: Tensor,
        max_keys: int,
        aux: Tensor | None,
    ) -> Tensor:
        """Return scores `[rows, heads, max_keys]` fp32 of `requests [rows]` int32; -inf beyond a request's keys."""


class EagerEngine:
    """The schedule in vectorised torch, on any device."""

    name = "eager"

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.ops: PlanOps = EagerPlanOps()

    def check_storage(self, dtype: torch.dtype) -> None:
        """Accept every storage dtype: torch converts them all."""

    def check_times(self) -> None:
        """Raise NotImplementedError: there are no programs."""
        raise NotImplementedError('times: engine="eager" has no programs to time; use engine="triton" on a GPU')

    def decode(
        self,
        *,
        q: Tensor,
        view: KVView,
        lane: Lane,
        spec: AttentionSpec,
        partials: Partials,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        aux: Tensor | None,
        times: Tensor | None = None,
    ) -> None:
        """Attend and merge in torch."""
        if times is not None:
            self.check_times()
        eager_decode.decode_split(q=q, view=view, lane=lane, spec=spec, partials=partials, aux=aux)
        eager_decode.decode_merge(view=view, lane=lane, spec=spec, partials=partials, out=out, lse=lse, sinks=sinks)

    def scores(
        self,
        *,
        q: Tensor,
        view: KVView,
        layout: KVLayout,
        spec: AttentionSpec,
        requests: Tensor,
        max_keys: int,
        aux: Tensor | None,
    ) -> Tensor:
        """Return scores in torch."""
        return eager_scores.decode_scores(
            q=q, view=view, layout=layout, spec=spec, requests=requests, max_keys=max_keys, aux=aux
        )


class TritonEngine:
    """The Triton kernels: compiled on a GPU, or interpreted, as the process was started.

    Raises RuntimeError where Triton is missing or was imported with the other setting, and ValueError where kernels are
    compiled but the device is not a GPU.
    """

    name = "triton"

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        require(
            _triton.PROBLEM is None,
            f'engine="triton": {_triton.PROBLEM}; or use engine="eager"',
            RuntimeError,
        )
        require(
            INTERPRETED or self.device.type == "cuda",
            f'engine="triton": kernels are compiled in this process, which needs a GPU, but the device is '
            f'{self.device}; start with ATTNLAB_INTERPRET=1 to interpret them, or use engine="eager"',
        )
        self.target = Target.of(self.device)
        self.ops: PlanOps = TritonPlanOps()

    def check_storage(self, dtype: torch.dtype) -> None:
        """Raise NotImplementedError where kernels cannot read a pool of this dtype here."""
        require(
            self.target.has_fp8 or dtype != torch.float8_e4m3fn,
            f"kv_dtype: {self.target.kind} {self.target.arch or ''} cannot read an fp8-e4m3 pool; store bf16, or use "
            'engine="eager"',
            NotImplementedError,
        )

    def check_times(self) -> None:
        """Raise NotImplementedError unless kernels are compiled for CUDA, whose clock they read."""
        require(
            self.target.kind == "cuda",
            f"times: {self.target.kind} kernels have no clock to read; run compiled on a CUDA device",
            NotImplementedError,
        )

    def decode(
        self,
        *,
        q: Tensor,
        view: KVView,
        lane: Lane,
        spec: AttentionSpec,
        partials: Partials,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        aux: Tensor | None,
        times: Tensor | None = None,
    ) -> None:
        """Launch the split kernel, then the merge kernel."""
        triton_decode.decode_split(
            q=q, view=view, lane=lane, spec=spec, partials=partials, aux=aux, times=times, target=self.target
        )
        triton_decode.decode_merge(
            view=view,
            lane=lane,
            spec=spec,
            partials=partials,
            out=out,
            lse=lse,
            sinks=sinks,
            target=self.target,
        )

    def scores(
        self,
        *,
        q: Tensor,
        view: KVView,
        layout: KVLayout,
        spec: AttentionSpec,
        requests: Tensor,
        max_keys: int,
        aux: Tensor | None,
    ) -> Tensor:
        """Launch the score kernel."""
        return triton_scores.decode_scores(
            q=q,
            view=view,
            layout=layout,
            spec=spec,
            requests=requests,
            max_keys=max_keys,
            aux=aux,
            target=self.target,
        )


ENGINES: dict[str, type[EagerEngine] | type[TritonEngine]] = {
    "eager": EagerEngine,
    "triton": TritonEngine,
}


def engine_for(engine: str | Engine, device: torch.device | str) -> Engine:
    """Return the engine of that name on a device, or the given one unchanged."""
    if isinstance(engine, str):
        return ENGINES[one_of("engine", engine, list(ENGINES))](device)
    return engine


def check_decode(
    *,
    q: Tensor,
    view: KVView,
    lane: Lane,
    spec: AttentionSpec,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    aux: Tensor | None,
) -> None:
    """Raise unless every argument of a decode call has the shape, dtype and device that the layer and plan ask for."""
    reqs, device = lane.splits.reqs, view.k.device
    view.check_fits(spec)
    hint = f"the plan has {reqs} requests, the layer {spec.heads} heads"
    tensor("q", q, shape=[reqs, spec.heads, spec.qk_dim], dtype=FLOATS, device=device, hint=hint)
    last_axis_contiguous("q", q)
    tensor("out", out, shape=[reqs, spec.heads, spec.v_dim], dtype=FLOATS, device=device, hint=hint)
    last_axis_contiguous("out", out)
    if lse is not None:
        tensor("lse", lse, shape=[reqs, spec.heads], dtype=torch.float32, device=device, hint=hint)
    require(
        (sinks is not None) == spec.has_sinks,
        f"sinks: the layer {'has' if spec.has_sinks else 'has no'} sinks, got {describe(sinks)}",
    )
    if sinks is not None:
        tensor("sinks", sinks, shape=[spec.heads], dtype=FLOATS, device=device)
        last_axis_contiguous("sinks", sinks)
    needs_aux = spec.mod is not None and spec.mod.needs_aux
    require(
        (aux is not None) == needs_aux,
        f"aux: the layer's score modifier {'reads an' if needs_aux else 'reads no'} aux tensor, got {describe(aux)}",
    )
    if aux is not None:
        tensor("aux", aux, shape=[reqs, spec.heads, "width"], dtype=FLOATS, device=device, hint=hint)
        last_axis_contiguous("aux", aux)
    require(
        same_device(lane.schedule.segments.device, device),
        "plan: made for another device than the pool's",
    )
