"""A backend from a model and a device: the engine that runs there, the policy that was measured, said in a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnlab import _triton
from attnlab._boot import INTERPRETED
from attnlab.assets import load_json
from attnlab.backend import AttentionBackend
from attnlab.checks import placed, require
from attnlab.engines import ENGINES
from attnlab.kernels.target import Target, multiprocessors_of
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.policy import HostPolicy, SplitPolicy, resolve_policy
from attnlab.spec import ModelSpec

PUBLISHED = "seed"
"""The rule of the server that attnlab contains: what is taken where nobody has measured another."""
INVARIANT = "tile"
"""What a deterministic backend takes: it looks at each request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An engine and a split policy, and why these."""

    engine: str
    policy: str | SplitPolicy | HostPolicy
    why: str


def backend_for(
    model: ModelSpec,
    device: torch.device | str,
    *,
    num_slots: int,
    max_requests: int,
    max_context: int | None = None,
    max_drafts: int = 1,
    engine: str | None = None,
    policy: str | SplitPolicy | HostPolicy | None = None,
    deterministic: bool = False,
    say: Callable[[str], object] = print,
) -> AttentionBackend:
    """Return a backend over an empty pool of `num_slots` slots; engine and policy are chosen unless they are given.

    The engine is that of compiled kernels where there are any; the policy is the one that was measured to be faster
    than the published rule there, or that rule. What is chosen, and the measurement behind it, is said in one line.
    `max_context` is the model's unless it is given. Pool and table are the backend's `pool` and `table`.

    >>> from attnlab import ModelSpec, backend_for
    >>> model = ModelSpec.load("SmolLM2-135M").only((0,))
    >>> backend = backend_for(model, "cpu", num_slots=64, max_requests=2)
    engine eager: there is no GPU here. policy seed: no other was measured for engine eager on a CPU
    >>> backend_for(model, "cpu", num_slots=64, max_requests=2, policy="balanced").policy.name
    engine eager: there is no GPU here. policy balanced: given
    'balanced'
    """
    require(
        isinstance(model, ModelSpec),
        f"model: expected a ModelSpec, got {model!r}; ModelSpec.load(name) makes one",
        TypeError,
    )
    choice = choose(device, engine=engine, policy=policy, deterministic=deterministic)
    pool = (MLAPool if model.mla else MHAPool)(model, num_slots=num_slots, device=device)
    table = RequestTable(
        max_requests=max_requests,
        max_context=model.context_len if max_context is None else max_context,
        num_slots=num_slots,
        device=device,
        page_size=pool.page_size,
    )
    backend = AttentionBackend(
        model=model,
        pool=pool,
        table=table,
        engine=choice.engine,
        policy=choice.policy,
        max_requests=max_requests,
        max_drafts=max_drafts,
        multiprocessors=multiprocessors_of(pool.device),
        deterministic=deterministic,
    )
    say(choice.why)
    return backend


def choose(
    device: torch.device | str,
    *,
    engine: str | None,
    policy: str | SplitPolicy | HostPolicy | None,
    deterministic: bool,
) -> Choice:
    """Return engine and policy for a device: what is given, or else what was measured."""
    device = placed(device)
    require(device.type in ("cpu", "cuda"), f"device: expected a CPU or a GPU, got {str(device)!r}")
    known = list(ENGINES)
    require(engine is None or engine in known, f"engine: expected one of {', '.join(known)} or None, got {engine!r}")
    given = None if policy is None else resolve_policy(policy)
    target = Target.of(device) if device.type == "cuda" else None
    if engine is not None:
        runs_on, because = engine, "given"
    elif target is None or _triton.PROBLEM is not None or INTERPRETED:
        runs_on, because = "eager", "there is no GPU here" if target is None else "no kernel is compiled here"
    else:
        runs_on, because = "triton", "compiled"
    cut: str | SplitPolicy | HostPolicy
    if given is not None:
        cut, measured = given, "given"
    elif deterministic:
        cut, measured = INVARIANT, "it looks at each request alone"
    else:
        cut, measured = measured_policy(runs_on, target)
    name = cut if isinstance(cut, str) else cut.name
    return Choice(engine=runs_on, policy=cut, why=f"engine {runs_on}: {because}. policy {name}: {measured}")


def measured_policy(engine: str, target: Target | None) -> tuple[str, str]:
    """Return the policy that was measured to be faster than the published one for compiled kernels, and the words.

    `target` is None on a CPU. What was measured lies in data/measured_policies.json.
    """
    rows: list[dict[str, Any]] = load_json("measured_policies.json", "rows")
    for row in rows:
        if engine == "triton" and target is not None and (target.kind, target.arch) == (row["kind"], row["arch"]):
            parts = [each["took"] / each["against_took"] for each in row["shapes"]]
            found = f"{min(parts):.2f} to {max(parts):.2f} of its time over {len(parts)} batches"
            return row["policy"], f"faster than {row['against']} ({found}; {row['measured_on']})"
    where = "a CPU" if target is None else f"{target.kind} {target.arch or ''}".strip()
    return PUBLISHED, f"no other was measured for engine {engine} on {where}"
