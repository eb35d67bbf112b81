"""The two engines: the Triton kernels, and their twin in torch. The only place that knows both.

Which one runs is an argument; there is no automatic choice and no silent fallback.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab.checks import one_of, placed, require
from attnlab.eager import decode as eager_decode
from attnlab.eager import extend as eager_extend
from attnlab.eager import scores as eager_scores
from attnlab.eager import verify as eager_verify
from attnlab.eager.index import EagerPlanOps
from attnlab.kernels import decode as triton_decode
from attnlab.kernels import decode_latent, decode_shares, extend_hopper, verify_shares
from attnlab.kernels import extend as triton_extend
from attnlab.kernels import scores as triton_scores
from attnlab.kernels import verify as triton_verify
from attnlab.kernels.index import TritonPlanOps
from attnlab.kernels.repeat import Repeat
from attnlab.kernels.target import Target, launching_on
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.ops import PlanOps
from attnlab.plan.score_call import ScoreCall
from attnlab.plan.tiles import LARGE_TILE


class Engine(Protocol):
    """Runs attention for plans. A call was checked when it was made."""

    name: str
    ops: PlanOps

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's bits are the same whatever else is in a batch, if the policy lets them."""

    @property
    def large_tiles(self) -> bool:
        """Whether decode over even shares packs more heads of a group than other kernels, as `plan.tiles` says."""

    @property
    def waits(self) -> bool:
        """Whether attention reads numbers back from the device, so that no graph can hold it; planning never does."""

    def check_storage(self, dtype: torch.dtype) -> None:
        """Raise NotImplementedError where this engine cannot read a pool of this dtype."""

    def check_times(self) -> None:
        """Raise NotImplementedError where this engine's programs cannot note when they ran."""

    def decode(self, call: DecodeCall) -> Repeat | None:
        """Attend to every segment of the schedule, leave the states in `call.partials`, merge them into `call.out`.

        Returns what a call like it may be repeated with, where the engine has such.
        """

    def extend(self, call: ExtendCall) -> None:
        """Attend for every query token of an extend or verify step, into `call.out`."""

    def verify(self, call: VerifyCall) -> Repeat | None:
        """Attend for every draft to every segment of the schedule, merge, and attend to the drafts, into `call.out`.

        Returns as `decode` does.
        """

    def scores(self, call: ScoreCall) -> Tensor:
        """Return what the score pipeline makes of some queries, `[rows, heads, keys]` fp32."""


class EagerEngine:
    """The schedule in vectorised torch, on any device."""

    name = "eager"

    def __init__(self, device: torch.device | str) -> None:
        self.device = placed(device)
        self.ops: PlanOps = EagerPlanOps()

    @property
    def batch_invariant(self) -> bool:
        """True on a CPU; a GPU's batched products are summed as the size of the batch suggests."""
        return self.device.type == "cpu"

    @property
    def large_tiles(self) -> bool:
        """True: it follows any schedule, and the plans that it shows are those of a Hopper GPU."""
        return True

    @property
    def waits(self) -> bool:
        """True: loops over requests and tiles are Python's."""
        return True

    def check_storage(self, dtype: torch.dtype) -> None:
        """Accept every storage dtype: torch converts them all."""

    def check_times(self) -> None:
        """Raise NotImplementedError: there are no programs."""
        raise NotImplementedError('times: engine="eager" has no programs to time; use engine="triton" on a GPU')

    def decode(self, call: DecodeCall) -> Repeat | None:
        """Attend and merge in torch."""
        if call.times is not None:
            self.check_times()
        eager_decode.decode_split(call)
        eager_decode.decode_merge(call)
        return None

    def extend(self, call: ExtendCall) -> None:
        """Attend in torch."""
        eager_extend.extend(call)

    def verify(self, call: VerifyCall) -> Repeat | None:
        """Attend and merge in torch."""
        eager_verify.verify_split(call)
        eager_verify.verify_merge(call)
        return None

    def scores(self, call: ScoreCall) -> Tensor:
        """Return scores in torch."""
        return eager_scores.scores(call)


class TritonEngine:
    """The Triton kernels: compiled on a GPU, or interpreted, as the process was started.

    Raises RuntimeError where Triton is missing or was imported with the other setting, and ValueError where kernels are
    compiled but the device is not a GPU.
    """

    name = "triton"

    def __init__(self, device: torch.device | str) -> None:
        self.device = placed(device)
        require(_triton.PROBLEM is None, f'engine="triton": {_triton.PROBLEM}; or use engine="eager"', RuntimeError)
        require(
            INTERPRETED or self.device.type == "cuda",
            f'engine="triton": kernels are compiled in this process, which needs a GPU, but the device is '
            f'{self.device}; start with ATTNLAB_INTERPRET=1 to interpret them, or use engine="eager"',
        )
        self.target = Target.of(self.device)
        self.ops: PlanOps = TritonPlanOps(self.device)

    @property
    def batch_invariant(self) -> bool:
        """True: a program's sums depend on its own range of keys."""
        return True

    @property
    def large_tiles(self) -> bool:
        """Whether this is a Hopper GPU, whose shared memory and tensor cores they were made for, or the interpreter."""
        return self.target.is_hopper or self.target.kind == "interpreter"

    @property
    def waits(self) -> bool:
        """False: kernels read the plan on the device."""
        return False

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

    def decode(self, call: DecodeCall) -> Repeat | None:
        """Launch the split kernel, then the merge kernel, unless all answers were given by the first."""
        with launching_on(self.device):
            if not call.lane.schedule.persistent:
                split = triton_decode.decode_split(call, target=self.target)
            elif call.view.v_in_k and call.head_tile == LARGE_TILE:
                split = decode_latent.decode_latent(call, target=self.target)
            else:
                split = decode_shares.decode_shares(call, target=self.target)
                if call.lane.schedule.uncut:
                    return Repeat.of(call, split)
            return Repeat.of(call, split, triton_decode.decode_merge(call, target=self.target))

    def extend(self, call: ExtendCall) -> None:
        """Launch an extend kernel."""
        with launching_on(self.device):
            if extend_hopper.serves(call, self.target):
                extend_hopper.extend_hopper(call, target=self.target)
            else:
                triton_extend.extend(call, target=self.target)

    def verify(self, call: VerifyCall) -> Repeat | None:
        """Launch the split kernel, then the merge kernel."""
        with launching_on(self.device):
            shared = call.lane.schedule.persistent
            split = verify_shares.verify_shares if shared else triton_verify.verify_split
            return Repeat.of(
                call, split(call, target=self.target), triton_verify.verify_merge(call, target=self.target)
            )

    def scores(self, call: ScoreCall) -> Tensor:
        """Launch the score kernel."""
        with launching_on(self.device):
            return triton_scores.scores(call, target=self.target)


ENGINES: dict[str, type[EagerEngine] | type[TritonEngine]] = {"eager": EagerEngine, "triton": TritonEngine}


def engine_for(engine: str | Engine, device: torch.device | str) -> Engine:
    """Return the engine of that name on a device, or the given one unchanged."""
    if isinstance(engine, str):
        return ENGINES[one_of("engine", engine, list(ENGINES))](device)
    return engine
