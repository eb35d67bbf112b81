"""What a graph takes: steps for which its lists have room, and inputs that lie apart from what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlab import graphs
from attnlab.batch import DecodeBatch, DeviceLens, DraftBatch, VerifyBatch
from attnlab.mask import CustomMask
from attnlab.plan.policy import HostPolicy, SplitContext
from tests.serving import DRAFTS, Server
from tests.strategies import DEVICE

ENGINE = "eager" if DEVICE == "cpu" else "triton"
MODES = ["decode", "verify", "tree", "extend", "draft"]
LENS = (20, 17, 9, 25)


def whole(lens: Sequence[int], ctx: SplitContext) -> list[list[tuple[int, int]]]:
    return [[(0, n)] * (n > 0) for n in lens]


WHOLE = HostPolicy(name="whole requests", rule=whole, max_ranges=1)


def captured(mode: str, *, max_tokens: int | None = None, policy: Any = "tile") -> tuple[Server, graphs.Graph]:
    server = Server("plain", engine=ENGINE, policy=policy, device=DEVICE, modes=[mode], max_tokens=max_tokens)
    return server, server.graphs[mode]


def cached(batch: Any) -> tuple[str, Any]:
    """The name of a batch's lengths of cached tokens, and these."""
    name = "seq" if isinstance(batch, DecodeBatch | DraftBatch) else "prefix"
    return name, getattr(batch, name)


def promised(batch: Any, *, each: int, total: int) -> Any:
    """The same batch, of whose cached tokens the host knows bounds alone."""
    name, known = cached(batch)
    lens = DeviceLens(device=known.device, bound_each=each, bound_total=total, least=known.values)
    return replace(batch, **{name: lens})


def held(graph: graphs.Graph) -> dict[str, torch.Tensor]:
    """What a graph's memory holds now."""
    return {path: x.clone() for path, x in graph.buffers.items()}


def unchanged(graph: graphs.Graph, plan: object, before: dict[str, torch.Tensor]) -> bool:
    """Whether a graph's memory is as it was, and the plan before still the latest, and good to be replayed."""
    same = all(torch.equal(x, before[path]) for path, x in graph.buffers.items())
    graph.replay(plan)  # type: ignore[arg-type]
    return same and graph.latest is plan


# --- tokens in all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["tile", WHOLE], ids=["on the device", "on the host"])
@pytest.mark.parametrize("mode", MODES)
def test_more_tokens_in_all_than_lists_have_room_for_are_refused(mode: str, policy: Any) -> None:
    """Two requests that share slots are more tokens than the pool holds: their lists must not be cut off."""
    server, graph = captured(mode, max_tokens=30, policy=policy)
    rows = [server.admit(n) for n in LENS]
    old = graph.plan(server.batch(mode, rows[:1]))
    before, batch = held(graph), server.batch(mode, rows)
    inputs = server.inputs_of(graph.shape, graph.shape.live(batch))
    name, lens = cached(batch)
    total = lens.bound_total
    words = "{}: {} tokens in all, the graph was captured for 30, the backend's max_tokens; .* of at least {}"
    with pytest.raises(ValueError, match=words.format(name, total, total)):
        graph.run(batch, **inputs)
    for bound, most in ((999, 160), (31, 31)):  # what is promised, and what four requests of 40 can be
        with pytest.raises(ValueError, match=words.format(name, f"up to {most}", most)):
            graph.run(promised(batch, each=40, total=bound), **inputs)
    assert unchanged(graph, old, before)


@pytest.mark.parametrize("mode", ["decode", "verify", "tree", "extend"])
def test_as_many_tokens_as_lists_have_room_for_are_served(mode: str) -> None:
    server, graph = captured(mode, max_tokens=sum(LENS) + 4 * (mode == "decode"))
    rows = [server.admit(n) for n in LENS]
    batch = server.batch(mode, rows)
    assert cached(batch)[1].bound_total == server.backend.max_tokens
    inputs = server.inputs_of(graph.shape, graph.shape.live(batch))
    for got, want in zip(graph.run(batch, **inputs), server.eagerly(mode, batch, inputs), strict=True):
        assert torch.equal(got, want)


def test_a_prefix_that_requests_share_is_listed_for_each_of_them() -> None:
    server, graph = captured("decode", max_tokens=2 * 41)
    table, first = server.backend.table, server.admit(40)
    second = table.admit()
    table.append(second, table.slots_of(first))
    for row in (first, second):
        table.append(row, server.pool.allocator.allocate(row, 1))
    batch = DecodeBatch.of(rows=[first, second], lens=[41, 41], device=DEVICE)
    inputs = server.tokens(2)
    for got, want in zip(graph.run(batch, **inputs), server.eagerly("decode", batch, inputs), strict=True):
        assert torch.equal(got, want)


# --- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [18, 50])
def test_bits_that_a_mask_lacks_hide_the_key_whatever_an_earlier_step_left(kept: int) -> None:
    """Where the device alone knows the lengths a mask may turn out to be short: eagerly what it lacks is hidden."""
    server, graph = captured("tree")
    rows, trees = [server.admit(11), server.admit(4)], [[-1, 0, 0]] * 2
    for row in rows:
        server.grow(row, DRAFTS)
    batch = VerifyBatch.tree(rows=rows, prefix=[11, 4], parents=trees, device=DEVICE)
    inputs = server.tokens(2 * DRAFTS)
    graph.run(batch, **inputs)  # a step of which the graph holds all bits
    assert isinstance(batch.mask, CustomMask) and graph.mask is not None
    loose = DeviceLens(device=batch.prefix.device, bound_each=20, bound_total=40)
    short = replace(batch, prefix=loose, mask=CustomMask(bits=batch.mask.bits[:kept].clone()))
    filled = torch.nn.functional.pad(short.mask.bits, (0, batch.mask.bits.shape[0] - kept))  # type: ignore[union-attr]
    wanted = server.eagerly("tree", replace(batch, mask=CustomMask(bits=filled)), inputs)
    for got, want in zip(graph.run(short, **inputs), wanted, strict=True):
        assert torch.equal(got, want)
    assert not graph.mask[kept:].any()
