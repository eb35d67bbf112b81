"""No step waits for the device where its lengths live there: neither planning, nor attention, nor a replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlab.batch import DecodeBatch, DeviceLens, DraftBatch, ExtendBatch, VerifyBatch
from tests.serving import DRAFTS, POOLS, Server
from tests.strategies import DEVICE
from tests.syncs import Waited, no_waiting, nothing_waits

MODES = ["decode", "verify", "tree", "extend", "draft"]


def on_device(server: Server, batch: Any) -> Any:
    """The same batch, of which the host knows bounds alone."""
    rows = batch.rows.to(DEVICE)

    def lens(given: Any, each: int) -> DeviceLens:
        return DeviceLens(device=given.device, bound_each=each, bound_total=given.bound_total, least=given.values)

    match batch:
        case DraftBatch():
            return replace(batch, rows=rows, seq=lens(batch.seq, 60))
        case DecodeBatch():
            return DecodeBatch(rows=rows, seq=lens(batch.seq, server.size.context))
        case ExtendBatch():
            prefix = lens(batch.prefix, server.size.context - DRAFTS)
            return ExtendBatch(rows=rows, prefix=prefix, new=lens(batch.new, DRAFTS), mask=batch.mask)
        case VerifyBatch():
            return VerifyBatch(
                rows=rows,
                prefix=lens(batch.prefix, server.size.context - DRAFTS),
                drafts=lens(batch.drafts, DRAFTS),
                depth=batch.depth,
                mask=batch.mask,
                ordered=batch.ordered,
            )


def served(pool: str, mode: str, engine: str = "triton", **options: Any) -> tuple[Server, Any, dict[str, torch.Tensor]]:
    """A server with three requests, a step of that mode, and its inputs; one such step was taken before."""
    server = Server(pool, engine=engine, policy="seed", device=DEVICE, modes=[mode], **options)
    rows = [server.admit(n) for n in (40, 3, 17)]
    first = server.batch(mode, rows)
    server.graphs[mode].run(first, **server.inputs_of(server.graphs[mode].shape, server.graphs[mode].shape.live(first)))
    if mode == "draft":  # whose slots are given back when it is over
        server.settle(mode, first, rows)
    batch = on_device(server, server.batch(mode, rows))
    shape = server.graphs[mode].shape
    return server, batch, server.inputs_of(shape, shape.live(batch))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("mode", MODES)
def test_planning_and_attention_do_not_wait(pool: str, mode: str) -> None:
    server, batch, inputs = served(pool, mode)
    with nothing_waits(batch.rows):
        server.step(server.backend.plan(batch), **inputs)


@pytest.mark.parametrize("mode", MODES)
def test_planning_in_torch_does_not_wait(mode: str) -> None:
    server = Server("unified sliding", engine="eager", policy="seed", device=DEVICE, modes=[])
    batch = on_device(server, server.batch(mode, [server.admit(n) for n in (40, 3, 17)]))
    with nothing_waits(batch.rows):
        server.backend.plan(batch)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_replay_does_not_wait(pool: str, mode: str) -> None:
    server, batch, inputs = served(pool, mode)
    with nothing_waits(batch.rows):
        server.graphs[mode].run(batch, **inputs)


@pytest.mark.parametrize("mode", ["extend"])
def test_a_step_in_one_pass_does_not_wait(mode: str) -> None:
    server = Server("plain", engine="triton", policy="tile", device=DEVICE, modes=[mode], deterministic=True)
    rows = [server.admit(n) for n in (40, 3, 17)]
    host = server.batch(mode, rows)
    batch, inputs = on_device(server, host), server.tokens(server.graphs[mode].shape.live(host))
    server.step(server.backend.plan(batch), **inputs)
    with nothing_waits(batch.rows):
        server.step(server.backend.plan(batch), **inputs)


@pytest.mark.skipif(DEVICE != "cpu", reason="torch watches there")
@pytest.mark.parametrize(
    "read", ["item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero", "mask", "repeat", "put"]
)
def test_the_guard_catches_what_would_wait(read: str) -> None:
    x = torch.ones(1, dtype=torch.int64)
    reads = {"nonzero": x.nonzero, "mask": lambda: x[x > 0], "repeat": lambda: x.repeat_interleave(x)}
    reads["put"] = lambda: x.__setitem__(0, 0)
    with pytest.raises(Waited), no_waiting():
        (reads.get(read) or getattr(x, read))()
    with no_waiting(on_host=[x]):
        assert x.tolist() == [1]
