"""What a graph takes: steps for which its lists have room, and inputs that lie apart from what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlab import graphs
from attnlab.batch import DecodeBatch, DeviceLens, DraftBatch, VerifyBatch
from attnlab.inspect.record import record
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
    short = replace(batch, prefix=loose, mask=replace(batch.mask, bits=batch.mask.bits[:kept].clone()))
    filled = torch.nn.functional.pad(short.mask.bits, (0, batch.mask.bits.shape[0] - kept))  # type: ignore[union-attr]
    wanted = server.eagerly("tree", replace(batch, mask=replace(batch.mask, bits=filled)), inputs)
    for got, want in zip(graph.run(short, **inputs), wanted, strict=True):
        assert torch.equal(got, want)
    assert not graph.mask[kept:].any()


# --- memory of the graph's own ------------------------------------------------------------------------------------


def with_inputs(**inputs: torch.Tensor) -> tuple[Server, graphs.Graph]:
    """A graph whose step hands its inputs back."""
    server = Server("plain", engine=ENGINE, policy="tile", device=DEVICE, modes=[])
    shape = graphs.DecodeShape(requests=4)
    examples = {name: x.to(DEVICE) for name, x in inputs.items()}

    def step(plan: object, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: x.clone() for name, x in given.items()}

    return server, graphs.capture(server.backend, step, shape, inputs=examples, rerun=DEVICE == "cpu")


@pytest.mark.parametrize(
    ("views", "words"),
    [
        (lambda a, b: {"a": b[:3], "b": a[:3]}, r"a: lies in the graph's own memory \(inputs.b\), elsewhere"),
        (lambda a, b: {"a": a[1:], "b": b[:3]}, r"a: lies in the graph's own memory \(inputs.a\), elsewhere"),
        (lambda a, b: {"a": a[:3], "b": b.view(-1)[:6:2].view(3, 1).expand(3, 2)}, r"b: lies in .* pass b.clone\(\)"),
    ],
    ids=["exchanged", "shifted", "of other strides"],
)
def test_inputs_that_are_views_of_the_graphs_own_are_refused(views: Any, words: str) -> None:
    server, graph = with_inputs(a=torch.zeros(4, 2), b=torch.zeros(4, 2))
    batch = server.batch("decode", [server.admit(3) for _ in range(3)])
    a, b = graph.inputs["a"], graph.inputs["b"]
    a[:], b[:] = torch.arange(8).view(4, 2), -torch.arange(8).view(4, 2)
    old, before = graph.latest, held(graph)
    with pytest.raises(ValueError, match=words):
        graph.run(batch, **views(a, b))
    assert unchanged(graph, old, before)
    assert graph.run(batch, a=a[:3], b=b[:3].clone())["a"].tolist() == [[0, 1], [2, 3], [4, 5]]  # where it belongs


def test_a_plans_tensor_is_no_input_of_the_next_step() -> None:
    server, graph = with_inputs(slots=torch.zeros(4, dtype=torch.int64))
    rows = [server.admit(3) for _ in range(3)]
    old = graph.plan(server.batch("decode", rows))
    before = held(graph)
    with pytest.raises(ValueError, match=r"slots: lies in the graph's own memory \(plan.lanes\[0\].write_slots\)"):
        graph.run(server.batch("decode", rows), slots=old.lanes[0].write_slots[:3])  # type: ignore[union-attr]
    assert unchanged(graph, old, before)


def test_a_batch_that_is_a_view_of_the_graphs_own_is_refused() -> None:
    server, graph = captured("decode")
    old = graph.plan(server.batch("decode", [server.admit(3) for _ in range(3)]))
    before, mine = held(graph), graph.batch
    assert isinstance(mine, DecodeBatch)
    seq = DeviceLens(device=mine.seq.device[1:3], bound_each=9, bound_total=18)
    with pytest.raises(ValueError, match=r"seq: lies in the graph's own memory \(batch.seq\), elsewhere"):
        graph.plan(DecodeBatch(rows=torch.tensor([1, 2]), seq=seq))
    assert unchanged(graph, old, before)
    same = replace(mine, rows=mine.rows[:2], seq=replace(seq, device=mine.seq.device[:2]))
    assert graph.plan(same).batch.seq.device.tolist() == [4, 4, 0, 0]  # type: ignore[union-attr]


# --- what is checked before a plan is made ------------------------------------------------------------------------

BAD_INPUTS = {
    "on no device": (lambda x: x.to("meta"), r"a: expected \[2, 3\] float32 on \S+, got \[2, 3\] float32 on meta"),
    "sparse": (lambda x: x.to_sparse(), "a: expected a dense tensor, got a sparse_coo one"),
    "compressed": (lambda x: x.to_sparse_csr(), "a: expected a dense tensor, got a sparse_csr one"),
    "nested": (lambda x: torch.nested.as_nested_tensor(list(x)), "a: expected a dense tensor, got a nested one"),
}


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR)")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_cannot_be_copied_are_refused_before_a_plan_is_made(name: str) -> None:
    change, words = BAD_INPUTS[name]
    server, graph = with_inputs(a=torch.zeros(4, 3))
    rows = [server.admit(3), server.admit(5)]
    old = graph.plan(server.batch("decode", rows))
    before, batch = held(graph), server.batch("decode", rows)
    with pytest.raises(ValueError, match=words):
        graph.run(batch, a=change(torch.ones(2, 3, device=DEVICE)))
    assert unchanged(graph, old, before)


@pytest.mark.gpu
def test_an_input_on_the_host_is_refused_before_a_plan_is_made() -> None:
    server, graph = with_inputs(a=torch.zeros(4, 3))
    old, before = graph.latest, held(graph)
    with pytest.raises(ValueError, match=r"a: expected \[1, 3\] float32 on cuda:\d, got \[1, 3\] float32 on cpu"):
        graph.run(server.batch("decode", [server.admit(3)]), a=torch.ones(1, 3))
    assert unchanged(graph, old, before)


def test_a_recording_is_noticed_before_a_plan_is_made() -> None:
    server, graph = with_inputs(a=torch.zeros(4, 3))
    batch, old, before = server.batch("decode", [server.admit(3)]), graph.latest, held(graph)
    with record(server.backend), pytest.raises(RuntimeError, match="replay: a recording is on"):
        graph.run(batch, a=torch.ones(1, 3, device=DEVICE))
    assert unchanged(graph, old, before)


def test_examples_that_no_memory_can_be_made_like_are_named() -> None:
    server = Server("plain", engine=ENGINE, policy="tile", device=DEVICE, modes=[])

    def capture(inputs: Any) -> None:
        graphs.capture(
            server.backend, lambda plan, **given: (), graphs.DecodeShape(requests=4), inputs=inputs, rerun=True
        )

    with pytest.raises(ValueError, match="inputs: x: expected a dense tensor, got a sparse_coo one"):
        capture({"x": torch.eye(4).to_sparse()})
    with pytest.raises(TypeError, match="inputs: expected names that run and the step take, got int 1"):
        capture({1: torch.zeros(4)})


@pytest.mark.parametrize("shape", [graphs.ExtendShape, graphs.VerifyShape])
def test_a_shape_is_masked_or_not(shape: Any) -> None:
    size = {"new" if shape is graphs.ExtendShape else "drafts": 3}
    for name in ("masked", "cached_visible"):
        with pytest.raises(TypeError, match=f"{name}: expected a bool, got 1"):
            shape(requests=1, **{name: 1}, **size)


def test_masks_are_of_new_keys_alone_unless_a_shape_is_told_otherwise() -> None:
    """One default for drafts and extends: what a mask says of cached keys goes unread in both, or is asked for."""
    for shape in (
        graphs.ExtendShape(requests=1, new=3, masked=True),
        graphs.VerifyShape(requests=1, drafts=3, masked=True),
    ):
        assert shape.cached_visible
