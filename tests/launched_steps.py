"""Steps of which nothing is launched, in a process that compiles: `python -m tests.launched_steps` counts who is asked.

Printed, as JSON: for every backend, how many launches each step had, and how many of them Triton was asked for.
"""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import torch

import attnlab  # noqa: F401  isort: skip
import triton

from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, VerifyBatch
from attnlab.engines import TritonEngine
from attnlab.kernels.index import TritonPlanOps
from attnlab.kernels.repeat import Repeat
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import current, using
from attnlab.memory.pool import FP8
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.spec import AttentionSpec, ModelSpec
from tests.launches import NoDriver

STEPS = ([140, 190, 7], [141, 191, 8], [130, 30], [142, 192, 9])
SHORT = ([40, 100, 7], [41, 101, 8], [128, 30], [42, 102, 9])
"""No list is longer than a tile of even shares."""
GQA = {"heads": 8, "kv_heads": 2, "qk_dim": 64, "v_dim": 64, "has_sinks": True}
MLA = {"heads": 32, "kv_heads": 1, "qk_dim": 576, "v_dim": 512}


def backend_of(
    policy: str, spec: AttentionSpec, *, mla: bool, kv_dtype: torch.dtype = torch.bfloat16
) -> AttentionBackend:
    """A backend whose pool lies on the CPU and whose kernels are those of an H200."""
    model = ModelSpec.uniform(spec, layers=2, context_len=256, page_size=1, kv_dtype=kv_dtype, mla=mla)
    pool: Any = (MLAPool if mla else MHAPool)(model, num_slots=1024, device="cpu")
    table = RequestTable(max_requests=4, max_context=256, num_slots=1024, device="cpu")
    for row in range(3):
        slots = pool.allocator.allocate(row, 200)
        table.append(table.admit(), slots)
    engine = object.__new__(TritonEngine)
    engine.device, engine.target = torch.device("cpu"), Target(kind="cuda", arch=90)
    engine.ops = object.__new__(TritonPlanOps)
    engine.ops.device, engine.ops.target = engine.device, engine.target
    return AttentionBackend(
        model=model,
        pool=pool,
        table=table,
        engine=engine,
        policy=policy,
        max_requests=4,
        max_drafts=2,
        multiprocessors=132,
    )


def counted(driver: NoDriver, asked: list[object]) -> dict[str, Any]:
    """Of every backend and step, the launches, and those that Triton was asked for."""
    counts: dict[str, Any] = {}
    bf16 = torch.bfloat16
    kinds: tuple[tuple[str, Any, torch.dtype, Any], ...] = (
        ("seed", GQA, bf16, STEPS),
        ("balanced", GQA, bf16, STEPS),
        ("balanced", MLA, bf16, STEPS),
        ("balanced", GQA, FP8, STEPS),
        ("balanced", GQA, bf16, SHORT),
    )
    for policy, shape, dtype, all_lens in kinds:
        spec = AttentionSpec(scale=0.1, **shape)
        backend = backend_of(policy, spec, mla=spec.qk_dim == 576, kv_dtype=dtype)
        name = f"{policy} {spec.qk_dim}{' fp8' * (dtype == FP8)}{' short' * (all_lens is SHORT)}"
        steps = counts[name] = []
        for lens in all_lens:
            before = len(driver.launches), len(asked)
            plan = backend.plan(DecodeBatch.of(rows=list(range(len(lens))), lens=lens, device="cpu"))
            q = torch.zeros(len(lens), spec.heads, spec.qk_dim, dtype=torch.bfloat16)
            sinks = torch.zeros(spec.heads) if spec.has_sinks else None
            for layer in (0, 1):
                backend.decode(layer, q, None, None, plan, save=False, sinks=sinks)
            steps.append((len(driver.launches) - before[0], len(asked) - before[1]))
    return counts


def calls(spec: AttentionSpec, *, drafts: int) -> dict[str, dict[str, Any]]:
    """Calls of layer 1 after one of layer 0; those after the first three bring something of another kind.

    With `drafts` they are verifies, of so many a request; with 0 decodes.
    """
    tokens = 3 * max(1, drafts)
    q = torch.zeros(tokens, spec.heads, spec.qk_dim, dtype=torch.bfloat16)
    sinks = torch.zeros(spec.heads + 1)
    room = torch.zeros(q.numel() + 1, dtype=q.dtype)
    wide = torch.zeros(tokens, spec.heads, 2 * spec.qk_dim, dtype=q.dtype)
    new = wide[:, : spec.kv_heads, : spec.qk_dim].contiguous()
    right: dict[str, Any] = {"q": q, "sinks": sinks[:-1], "k": None, "v": None}
    ones: dict[str, Any] = {"q": torch.ones_like(q), "sinks": torch.ones(spec.heads), "k": None, "v": None}
    if drafts:
        right |= {"k": new, "v": torch.zeros_like(new)}
        ones |= {"k": torch.ones_like(new), "v": torch.ones_like(new)}
    found = {
        "the same": right,
        "other tensors": ones,
        "memory for the answer": {**right, "out": torch.zeros_like(q)},
        "queries askew": {**right, "q": room[1:].view(q.shape)},
        "queries with gaps": {**right, "q": wide[..., : spec.qk_dim]},
        "queries of fp16": {**right, "q": q.half()} | ({"k": new.half(), "v": new.half()} if drafts else {}),
        "sinks askew": {**right, "sinks": sinks[1:]},
        "sinks of bf16": {**right, "sinks": sinks[:-1].bfloat16()},
        "an answer of fp32": {**right, "out": torch.zeros(q.shape)},
        "an answer with gaps": {**right, "out": wide[..., : spec.qk_dim]},
        "an LSE": {**right, "lse": torch.zeros(tokens, spec.heads)},
    }
    if drafts:
        found["new keys askew"] = {**right, "k": room[1 : 1 + new.numel()].view(new.shape)}
        found["new values with gaps"] = {**right, "v": wide[:, : spec.kv_heads, : spec.qk_dim]}
        found["one tensor for both"] = {**right, "v": new}
    return found


def repeated(driver: NoDriver) -> dict[str, Any]:
    """Of every call whether it was a repeat, and whether it sent what a call that is checked in full sends."""
    spec = AttentionSpec(scale=0.1, **GQA)
    repeats: list[object] = []
    launch = Repeat.launch
    Repeat.launch = lambda self, *args: (repeats.append(self), launch(self, *args))[1]
    found = {}
    for policy, drafts in product(("seed", "balanced"), (0, 2)):
        backend = backend_of(policy, spec, mla=False)
        first = calls(spec, drafts=drafts)["the same"]
        for name, given in calls(spec, drafts=drafts).items():
            rows = [0, 1, 2]
            decode = DecodeBatch.of(rows=rows, lens=STEPS[0], device="cpu")
            verify = VerifyBatch.chain(rows=rows, prefix=STEPS[0], drafts=drafts, device="cpu")
            plan: Any = backend.plan(verify if drafts else decode)
            for _ in range(2):
                backend.forward(0, plan=plan, save=False, **first)
            sent = []
            for again in (True, False, False):  # a repeat; then Triton may compile; then in full, with a known variant
                before = len(repeats)
                if not again:
                    plan.lanes[0].repeats.clear()
                out = backend.forward(1, plan=plan, save=False, **given)
                launches = [(x.grid, x.stream, x.function, masked(x.arguments, out)) for x in driver.launches[-2:]]
                sent.append((len(repeats) - before, launches))
            before = len(repeats)
            with using(replace(current())):
                backend.forward(1, plan=plan, save=False, **given)
                assert len(repeats) == before, "what another table chose was repeated"
            if drafts:
                backend.forward(1, plan=replace(plan, queries=replace(plan.queries)), save=False, **given)
                assert len(repeats) == before, "what was launched for other queries was repeated"
            mode = "verify" if drafts else "decode"
            found[f"{mode}, {policy}, {name}"] = sent[0][0], sent[0][0] == 0 or sent[0][1] == sent[2][1]
    return found


def masked(arguments: tuple[Any, ...], out: torch.Tensor) -> list[object]:
    """What was sent, by address, but for where the answer goes, which is new each time."""
    sent = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    return ["out" if x == out.data_ptr() else str(x) for x in sent]


def main() -> None:
    """Run the steps."""
    driver, asked = NoDriver(), []
    triton.runtime.driver.set_active(driver)
    run = triton.JITFunction.run
    triton.JITFunction.run = lambda self, *args, **kwargs: asked.append(self) or run(self, *args, **kwargs)
    print(json.dumps({"asked": counted(driver, asked), "repeated": repeated(driver)}))


if __name__ == "__main__":
    main()
