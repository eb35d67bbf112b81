"""attnlab itself: its balanced policy where keys are split, and the seed's heuristic beside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.bench.inputs import Inputs
from attnlab.bench.peer import Call, Peer, Setting, peer
from attnlab.bench.workload import Workload
from attnlab.plan.policies.static import Static

WHOLE = "tile"
"""The policy of extends, which no policy cuts; it goes with one pass, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """attnlab's backend under a policy, planned once and called as a layer would call it; nothing is stored."""

    engine: str
    policy: str
    extends: bool

    def declines(self, work: Workload) -> str | None:
        """Decline extends under a second policy: they are not split."""
        if work.mode in ("extend", "unified") and not self.extends:
            return "no policy cuts an extend: it would be attnlab's time again"
        return "the count is given: attnlab's column" if work.splits is not None and not self.extends else None

    def calls(self, inputs: Inputs) -> list[Call]:
        """Return the one call, into an output that is NaN before."""
        work = inputs.work
        split = work.mode in ("decode", "verify")
        cut = self.policy if work.splits is None else Static(splits=work.splits)
        backend = inputs.backend(engine=self.engine, policy=cut if split else WHOLE)
        plan = backend.plan(inputs.batch())
        out = inputs.output()

        def run() -> Tensor:
            return backend.forward(0, inputs.q, inputs.k, inputs.v, plan, save=False, out=out, sinks=inputs.sinks)

        return [Call(run=run)]


@peer("attnlab")
def attnlab(setting: Setting) -> Peer:
    """Return attnlab at its best: balanced programs."""
    return Own(engine=setting.engine, policy="balanced", extends=True)


@peer("attnlab-seed")
def attnlab_seed(setting: Setting) -> Peer:
    """Return attnlab under the heuristic of the original."""
    return Own(engine=setting.engine, policy="seed", extends=False)
