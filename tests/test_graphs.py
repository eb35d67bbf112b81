"""Graphs: one captured step serves all smaller ones, and its results are the eager path's, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attnlab import graphs
from attnlab.batch import DecodeBatch, DeviceLens, DraftBatch, Encoder, ExtendBatch, VerifyBatch
from attnlab.graphs.memory import tensors_of
from attnlab.inspect.record import record
from attnlab.mask import CAUSAL, CustomMask
from attnlab.plan.plans import DecodePlan
from attnlab.plan.policy import split_policy
from tests.serving import DRAFTS, POOLS, Server, Size
from tests.strategies import DEVICE

ENGINE = "eager" if DEVICE == "cpu" else "triton"
MODES = ["decode", "verify", "tree", "extend", "draft"]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("policy", ["seed", "tile", "balanced"])
def test_replays_give_the_bits_of_the_eager_path(pool: str, policy: str) -> None:
    """B27, B28, B30: lengths, rows and modes change from step to step, pages move in between."""
    modes = Server(pool, engine=ENGINE, policy=policy, device=DEVICE).run(40)
    assert set(modes) == set(MODES)


@pytest.mark.parametrize("policy", ["seed", "balanced"])
@pytest.mark.parametrize("pool", ["window", "unified mla"])
def test_replays_of_kernels_give_the_bits_of_the_eager_path(pool: str, policy: str) -> None:
    steps = 8 if DEVICE == "cpu" else 100
    Server(pool, engine="triton", policy=policy, device=DEVICE, size=Size(context=40)).run(steps)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", POOLS)
def test_ten_thousand_replays_give_the_bits_of_the_eager_path(pool: str) -> None:
    """1,700 in each of six pools, in bf16, at dims of models, while requests come and go and pages move."""
    size = Size(heads=8, dim=64, requests=12, context=1500, dtype=torch.bfloat16, page_size=4)
    modes = Server(pool, engine="triton", policy="seed", device=DEVICE, seed=1, size=size).run(1700)
    assert len(modes) == 1700 and set(modes) == set(MODES)


@pytest.mark.gpu
def test_a_graph_may_be_forgotten_while_another_is_captured() -> None:
    """Freeing one is not allowed during a capture: its memory is collected before, or after."""
    for _ in range(4):
        Server("plain", engine="triton", policy="seed", device=DEVICE, modes=["decode"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_graph_is_captured_on_its_pools_device_whichever_is_current() -> None:
    server = Server("window", engine="triton", policy="seed", device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert set(server.run(40)) == set(MODES)


@pytest.mark.gpu
def test_a_replay_leaves_states_out_if_its_capture_did() -> None:
    server = Server("plain", engine="triton", policy="balanced", device=DEVICE, modes=["decode"])
    server.run(5)
    graph, workspace = server.graphs["decode"], server.backend.workspace
    workspace.complete = True
    graph.replay(graph.latest)
    assert not workspace.complete


def captured(mode: str = "decode", pool: str = "plain", **options: object) -> tuple[Server, graphs.Graph]:
    server = Server(pool, engine=ENGINE, policy="seed", device=DEVICE, modes=[mode], **options)  # type: ignore[arg-type]
    return server, server.graphs[mode]


def replayed(server: Server, mode: str, rows: list[int]) -> tuple[Tensor, ...]:
    """One step of the mode's graph, with new tokens of the server's."""
    graph, batch = server.graphs[mode], server.batch(mode, rows)
    outs: tuple[Tensor, ...] = graph.run(batch, **server.tokens(graph.shape.live(batch)))
    return outs


# --- what is fixed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", ["plain", "unified sliding"])
def test_addresses_shapes_and_choices_never_change(mode: str, pool: str) -> None:
    server, graph = captured(mode, pool)
    signature = graph.latest.signature()
    rows = [server.admit(n) for n in (40, 1, 17, 9)]
    for count in (4, 1, 3, 0):
        batch = server.batch(mode, rows[:count])
        plan = graph.plan(batch)
        assert plan.signature() == signature and plan is graph.latest
        assert (graph.requests, graph.live) == (count, graph.shape.live(batch))


def test_eager_plans_share_no_memory_with_a_graphs() -> None:
    server, graph = captured()
    rows = [server.admit(n) for n in (40, 17)]
    batch = server.batch("decode", rows)
    mine, its = server.backend.plan(batch), graph.plan(batch)
    addresses = [{x.untyped_storage().data_ptr() for _, x in tensors_of("", p) if x.numel()} for p in (mine, its)]
    assert not addresses[0] & addresses[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_filled_plan_is_valid(mode: str) -> None:
    server, graph = captured(mode, "window")
    rows = [server.admit(n) for n in (40, 1, 17, 9)]
    for count in (4, 2, 0):
        graph.plan(server.batch(mode, rows[:count])).validate(num_slots=server.pool.num_slots)


def test_a_smaller_batch_after_a_larger_one_leaves_nothing_behind() -> None:
    """B28, B30: rows, lengths, write slots and inputs of the padded rows are those of no request."""
    server, graph = captured(size=Size(requests=8))
    rows = [server.admit(n) for n in (40, 33, 17, 9, 8, 7, 6, 5)]
    replayed(server, "decode", rows)
    replayed(server, "decode", rows[:5])
    plan = graph.latest
    assert isinstance(plan, DecodePlan)
    assert plan.batch.seq.device[5:].tolist() == plan.batch.rows[5:].tolist() == [0, 0, 0]
    for lane in plan.lanes:
        assert lane.write_slots[5:].tolist() == [0, 0, 0]
        assert lane.layout.index.indptr.diff()[5:].tolist() == [0, 0, 0]
        assert not lane.layout.index.slots[int(lane.layout.index.indptr[-1]) :].any()
        beyond = lane.schedule.segments[int(lane.schedule.merge_indptr[-1]) :]
        assert torch.equal(beyond[:, 2], beyond[:, 3])  # B29: a padded program has nothing to read
    assert all(not x[5:].any() for x in graph.inputs.values())


def test_splits_are_counted_again_at_every_replay() -> None:
    """B27: captured with short requests, replayed with long ones."""
    server, graph = captured(size=Size(context=600))
    short = [server.admit(1) for _ in range(4)]
    graph.plan(server.batch("decode", short))
    for row in short:
        server.release(row)
    rows = [server.admit(n) for n in (590, 1, 300, 33)]
    graph.plan(batch := server.batch("decode", rows))
    wanted = server.backend.plan(batch)
    for mine, its in zip(graph.latest.lanes, wanted.lanes, strict=True):  # type: ignore[union-attr]
        assert mine.splits.to_host() == its.splits.to_host()  # type: ignore[union-attr]
    assert max(wanted.lane(0).splits.to_host().effective) > 1


def test_no_request_at_all_is_a_step() -> None:
    server, graph = captured()
    assert [list(x.shape) for x in replayed(server, "decode", [])] == [[0, 4, 16]] * 2
    assert graph.live == 0


def test_a_policy_in_plain_python_plans_again_before_every_replay() -> None:
    @split_policy("thirds of a graph", needs_host_lens=True, max_ranges=3)
    def thirds(lens: list[int], ctx: object) -> list[list[tuple[int, int]]]:
        cuts = [sorted({0, n // 3, 2 * n // 3, n}) for n in lens]
        return [list(pairwise(cut)) for cut in cuts]

    Server("window", engine=ENGINE, policy=thirds, device=DEVICE).run(30)


def test_a_policy_in_plain_python_needs_lengths_of_the_host() -> None:
    @split_policy("halves of a graph", needs_host_lens=True, max_ranges=2)
    def halves(lens: list[int], ctx: object) -> list[list[tuple[int, int]]]:
        return [[(0, n)] * (n > 0) for n in lens]

    server = Server("plain", engine=ENGINE, policy=halves, device=DEVICE, modes=["decode"])
    lens = torch.ones(1, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(
        rows=torch.tensor([server.admit(1)]), seq=DeviceLens(device=lens, bound_each=4, bound_total=4, least=(1,))
    )
    with pytest.raises(TypeError, match="halves of a graph.*needs lengths that the host knows"):
        server.graphs["decode"].plan(batch)


def test_a_deterministic_backend_is_captured_too() -> None:
    server = Server("plain", engine=ENGINE, policy="tile", device=DEVICE, deterministic=True)
    assert set(server.run(40)) == set(MODES)


# --- masks --------------------------------------------------------------------------------------------------------


def tree_batch(server: Server, rows: list[int]) -> VerifyBatch:
    lens = [server.lens[row] for row in rows]
    for row in rows:
        server.grow(row, DRAFTS)
    return VerifyBatch.tree(rows=rows, prefix=lens, parents=[[-1, 0, 0]] * len(rows), device=DEVICE)


def test_a_mask_may_be_filled_in_place() -> None:
    server, graph = captured("tree")
    batch = tree_batch(server, [server.admit(n) for n in (11, 4)])
    inputs = server.tokens(2 * DRAFTS)
    wanted = [x.clone() for x in graph.run(batch, **inputs)]
    assert isinstance(batch.mask, CustomMask) and graph.mask is not None
    bits = batch.mask.bits.shape[0]
    graph.mask.fill_(7)
    graph.mask[:bits] = batch.mask.bits
    in_place = replace(batch, mask=replace(batch.mask, bits=graph.mask[:bits]))
    for got, want in zip(graph.run(in_place, **inputs), wanted, strict=True):
        assert torch.equal(got, want)
    assert graph.mask[bits:].eq(7).all()  # nobody wrote behind the bits, nobody read them
    with pytest.raises(ValueError, match="mask: lies in the graph's own memory, but not at their beginning"):
        graph.plan(replace(batch, mask=replace(batch.mask, bits=graph.mask[1 : bits + 1])))


def test_a_chain_in_a_graph_with_a_mask_gets_a_causal_one() -> None:
    server, graph = captured("tree")
    rows = [server.admit(n) for n in (11, 4)]
    replayed(server, "tree", rows)
    lens = [server.lens[row] for row in rows]
    for row in rows:
        server.grow(row, DRAFTS)
    batch = VerifyBatch.chain(rows=rows, prefix=lens, drafts=DRAFTS, device=DEVICE)
    inputs = server.tokens(2 * DRAFTS)
    for got, want in zip(graph.run(batch, **inputs), server.eagerly("tree", batch, inputs), strict=True):
        assert torch.equal(got, want)


# --- what is refused ----------------------------------------------------------------------------------------------


def two(server: Server) -> list[int]:
    return [server.admit(5), server.admit(3)]


def test_more_requests_than_captured_are_refused() -> None:
    server, graph = captured()
    batch = DecodeBatch.of(rows=[0] * 5, lens=[0] * 5, device=DEVICE)
    with pytest.raises(ValueError, match="batch: a step of 5 requests, the graph was captured for 4"):
        graph.plan(batch)
    with pytest.raises(ValueError, match="a step of 5 requests"):
        graph.run(batch, **server.tokens(5))


def test_longer_requests_than_captured_are_refused() -> None:
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])
    shape = graphs.DecodeShape(requests=2, longest=5)
    graph = graphs.capture(server.backend, server.step, shape, inputs=server.tokens(2), rerun=DEVICE == "cpu")
    with pytest.raises(ValueError, match="seq: a request of up to 6 tokens, the graph was captured for 5"):
        graph.plan(server.batch("decode", two(server)))


@pytest.mark.parametrize("drafts", [2, 4])
def test_another_number_of_drafts_is_refused(drafts: int) -> None:
    server, graph = captured("verify")
    rows = two(server)
    for row in rows:
        server.grow(row, drafts)
    batch = VerifyBatch.chain(rows=rows, prefix=[5, 3], drafts=drafts, device=DEVICE)
    with pytest.raises(ValueError, match=rf"drafts: the graph was captured for 3 drafts a request, got \[{drafts}\]"):
        graph.plan(batch)


def test_another_draft_than_captured_is_refused() -> None:
    server, graph = captured("draft")
    with pytest.raises(ValueError, match="topk, steps: the graph was captured for 2 branches of 3 drafts, got 4 of 3"):
        graph.plan(DraftBatch.of(rows=two(server), lens=[5, 3], topk=4, steps=3, device=DEVICE))


def test_more_new_tokens_than_captured_are_refused() -> None:
    server, graph = captured("extend")
    rows = two(server)
    for row in rows:
        server.grow(row, 4)
    with pytest.raises(ValueError, match="new: a request of up to 4 tokens, the graph was captured for 3"):
        graph.plan(ExtendBatch.of(rows=rows, prefix=[5, 3], new=[4, 4], device=DEVICE))


def test_a_mask_where_none_was_captured_is_refused() -> None:
    server, graph = captured("verify")
    batch = tree_batch(server, two(server))
    with pytest.raises(ValueError, match="mask: got 42 entries, the graph was captured for 0, without a mask"):
        graph.plan(batch)
    with pytest.raises(ValueError, match="its drafts do not stand one behind the other"):
        graph.plan(replace(batch, mask=CAUSAL))


def masked_graph(*, cached_visible: bool) -> tuple[Server, graphs.Graph]:
    """A graph of drafts under masks, of drafts alone or of cached keys too."""
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])
    shape = graphs.VerifyShape(requests=2, drafts=DRAFTS, masked=True, cached_visible=cached_visible)
    inputs = server.tokens(2 * DRAFTS)
    graph = graphs.capture(server.backend, server.step, shape, inputs=inputs, rerun=DEVICE == "cpu")
    server.graphs["tree"] = graph
    return server, graph


@pytest.mark.parametrize("cached_visible", [True, False])
def test_entries_of_cached_keys_count_where_a_graph_was_captured_so(cached_visible: bool) -> None:
    server, graph = masked_graph(cached_visible=cached_visible)
    batch = tree_batch(server, two(server))
    hidden = batch.mask.bits.clone()
    hidden[:DRAFTS] = 0  # the first draft's, of the first cached keys
    batch = replace(batch, mask=CustomMask(bits=hidden, cached_visible=cached_visible))
    inputs = server.tokens(2 * DRAFTS)
    for got, want in zip(graph.run(batch, **inputs), server.eagerly("tree", batch, inputs), strict=True):
        assert torch.equal(got, want)


def test_a_mask_of_another_kind_than_captured_is_refused() -> None:
    server, graph = masked_graph(cached_visible=False)
    with pytest.raises(ValueError, match="mask: speaks of new keys alone .* the graph reads its entries of cached"):
        graph.plan(tree_batch(server, two(server)))
    server, graph = masked_graph(cached_visible=True)
    batch = tree_batch(server, two(server))
    with pytest.raises(ValueError, match="mask: may hide cached keys, the graph reads its entries of new keys alone"):
        graph.plan(replace(batch, mask=replace(batch.mask, cached_visible=False)))


def test_another_mode_is_refused_by_name() -> None:
    server, graph = captured()
    rows = two(server)
    for row in rows:
        server.grow(row, 1)
    with pytest.raises(TypeError, match="batch: the graph was captured for a DecodeBatch, got ExtendBatch"):
        graph.plan(ExtendBatch.of(rows=rows, prefix=[5, 3], new=[1, 1], device=DEVICE))


def test_an_encoder_is_refused() -> None:
    _, graph = captured()
    encoder = Encoder.of(rows=[0], lens=[0], device=DEVICE)
    with pytest.raises(ValueError, match="batch: encoder lengths are not served by a graph"):
        graph.plan(DecodeBatch.of(rows=[0], lens=[0], device=DEVICE, encoder=encoder))


def test_a_refused_step_changes_nothing() -> None:
    server, graph = captured()
    rows = two(server)
    plan = graph.plan(server.batch("decode", rows))
    before = plan.batch.rows.clone(), plan.lane(0).layout.index.slots.clone()
    with pytest.raises(ValueError, match="row 0 of the table holds 6"):
        graph.plan(DecodeBatch.of(rows=[rows[0]], lens=[50], device=DEVICE))
    assert torch.equal(plan.batch.rows, before[0]) and torch.equal(plan.lane(0).layout.index.slots, before[1])
    graph.replay(plan)  # still the latest


def test_a_plan_is_good_until_the_next_is_made() -> None:
    server, graph = captured()
    rows = two(server)
    first = graph.plan(server.batch("decode", rows))
    graph.plan(server.batch("decode", rows[:1]))
    with pytest.raises(ValueError, match="plan: it lies in a graph's memory, which was filled for a later step since"):
        graph.replay(first)
    with pytest.raises(ValueError, match="filled for a later step"):
        server.step(first, **server.tokens(4))


def test_a_plan_of_another_epoch_is_refused() -> None:
    server, graph = captured(pool="unified")
    rows = two(server)
    plan = graph.plan(server.batch("decode", rows[1:]))
    server.release(rows[0])
    with pytest.raises(ValueError, match="plan: made for another state of the pool"):
        graph.replay(plan)


def test_a_plan_that_is_not_the_graphs_is_refused_with_what_differs() -> None:
    server, graph = captured()
    batch = server.batch("decode", two(server))
    plan = graph.plan(batch)
    with pytest.raises(ValueError, match=r"plan: not the graph's own; \d+ of its parts .*lanes\[0\]"):
        graph.replay(server.backend.plan(batch))
    with pytest.raises(ValueError, match="the first: multiprocessors: captured 132, got 7"):
        graph.replay(replace(plan, multiprocessors=7))
    graph.replay(replace(plan))  # the same memory


def test_inputs_are_checked_before_anything_is_written() -> None:
    server, graph = captured()
    batch = server.batch("decode", two(server))
    inputs = server.tokens(2)
    with pytest.raises(ValueError, match="inputs: the graph has q0, k0, v0, q1, k1, v1, 'v1' is missing"):
        graph.run(batch, **{name: x for name, x in inputs.items() if name != "v1"})
    with pytest.raises(ValueError, match="inputs: the graph has q0, k0, v0, q1, k1, v1, got w"):
        graph.run(batch, **inputs, w=inputs["q0"])
    with pytest.raises(ValueError, match=r"q0: expected \[2, 4, 16\] float32 on \S+, got \[3, 4, 16\]"):
        graph.run(batch, **{**inputs, "q0": server.tokens(3)["q0"]})
    assert graph.requests == 0 and not graph.inputs["q0"].any()


@pytest.mark.parametrize("result", [torch.zeros(3), 1.0, None, (torch.zeros(4), torch.zeros(()))])
def test_a_step_returns_a_row_for_every_query_token(result: object) -> None:
    server = Server("plain", engine="eager", policy="seed", device="cpu", modes=[])
    with pytest.raises(ValueError, match="step: expected results with a row for each of 4 query tokens, got"):
        graph = graphs.capture(
            server.backend, lambda plan: result, graphs.DecodeShape(requests=4), inputs={}, rerun=True
        )
        graph.run(DecodeBatch.of(rows=[], lens=[], device="cpu"))


def test_a_backend_too_small_for_the_shape_is_refused() -> None:
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])

    def capture(shape: graphs.Shape) -> None:
        graphs.capture(server.backend, server.step, shape, inputs={}, rerun=True)

    with pytest.raises(ValueError, match="a graph of 9 requests, but the backend was built for max_requests 8"):
        capture(graphs.DecodeShape(requests=9))
    with pytest.raises(ValueError, match="a graph of 3 requests x 3 branches, but the backend was built for max_requ"):
        capture(graphs.DraftShape(requests=3, topk=3, steps=2))
    with pytest.raises(ValueError, match="longest: expected more than the 5 drafts of a branch, got 5"):
        capture(graphs.DraftShape(requests=1, topk=1, steps=5, longest=5))
    with pytest.raises(ValueError, match="a graph of 4 drafts a request, but the backend was built for max_drafts 3"):
        capture(graphs.VerifyShape(requests=1, drafts=4))
    with pytest.raises(ValueError, match="longest: expected 1 to 96 tokens, as the table and the model hold, got 97"):
        capture(graphs.DecodeShape(requests=1, longest=97))
    with pytest.raises(TypeError, match="shape: expected a Shape such as DecodeShape, got int 3"):
        capture(3)  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has CUDA graphs")
def test_a_cpu_says_that_it_has_no_graphs() -> None:
    server = Server("plain", engine="eager", policy="seed", device="cpu", modes=[])
    with pytest.raises(ValueError, match="capture: cpu has no CUDA graphs; pass rerun=True"):
        graphs.capture(server.backend, server.step, graphs.DecodeShape(requests=1), inputs={})


def test_a_recording_sees_no_replay_and_says_so() -> None:
    server, graph = captured()
    plan = graph.plan(server.batch("decode", two(server)))
    with record(server.backend), pytest.raises(RuntimeError, match="replay: a recording is on"):
        graph.replay(plan)
    with record(server.backend), pytest.raises(RuntimeError, match="capture: a recording is on"):
        graphs.capture(server.backend, server.step, graphs.DecodeShape(requests=1), inputs={}, rerun=True)


# --- what readers broke -------------------------------------------------------------------------------------------


def unchanged(graph: graphs.Graph, plan: object) -> bool:
    """Whether a plan is still the latest, and good to be replayed."""
    graph.replay(plan)  # type: ignore[arg-type]
    return graph.latest is plan


def test_a_refused_mask_leaves_the_plan_before_it_as_it_was() -> None:
    server, graph = captured("tree")
    rows = two(server)
    old = graph.plan(tree_batch(server, rows))
    before = {path: x.clone() for path, x in graph.buffers.items()}
    assert graph.mask is not None
    lens = [server.lens[row] for row in rows]
    for row in rows:
        server.grow(row, DRAFTS)
    batch = VerifyBatch.tree(rows=rows, prefix=lens, parents=[[-1, 0, 0]] * 2, device=DEVICE)
    assert isinstance(batch.mask, CustomMask)
    bits = batch.mask.bits.shape[0]
    with pytest.raises(ValueError, match="not at their beginning"):
        graph.plan(replace(batch, mask=replace(batch.mask, bits=graph.mask[1 : bits + 1])))
    loose = replace(batch.prefix, device=batch.prefix.device)
    loose = DeviceLens(device=loose.device, bound_each=80, bound_total=160, least=tuple(lens))
    with pytest.raises(ValueError, match="mask: expected at most the .* entries that were captured, got"):
        graph.plan(
            replace(
                batch, prefix=loose, mask=replace(batch.mask, bits=torch.ones(10**5, dtype=torch.uint8, device=DEVICE))
            )
        )
    with pytest.raises(
        ValueError, match=f"mask: expected at least {bits} entries, as the lengths are known to need, got 5"
    ):
        graph.plan(replace(batch, prefix=loose, mask=replace(batch.mask, bits=batch.mask.bits[:5])))
    assert all(torch.equal(x, before[path]) for path, x in graph.buffers.items()) and unchanged(graph, old)


def test_a_policy_in_plain_python_that_answers_nonsense_leaves_the_plan_before_it_as_it_was() -> None:
    answers = [True]

    @split_policy("wrong in a graph", needs_host_lens=True, max_ranges=1)
    def wrong(lens: list[int], ctx: object) -> list[list[tuple[int, int]]]:
        return [[(0, n)] * (n > 0) if answers[0] else [] for n in lens]

    server = Server("plain", engine=ENGINE, policy=wrong, device=DEVICE, modes=["decode"])
    graph, rows = server.graphs["decode"], two(server)
    old = graph.plan(server.batch("decode", rows))
    lens = old.batch.seq.device.tolist()  # type: ignore[union-attr]
    answers[0] = False
    with pytest.raises(ValueError, match="are in no range"):
        graph.plan(server.batch("decode", rows))
    assert graph.batch.seq.device.tolist() == lens and unchanged(graph, old)  # type: ignore[union-attr]


def test_a_chain_under_a_policy_in_plain_python_gets_its_mask_too() -> None:
    @split_policy("one of a masked graph", needs_host_lens=True, max_ranges=1)
    def one(lens: list[int], ctx: object) -> list[list[tuple[int, int]]]:
        return [[(0, n)] * (n > 0) for n in lens]

    server = Server("plain", engine=ENGINE, policy=one, device=DEVICE, modes=["tree"])
    rows = two(server)
    for row in rows:
        server.grow(row, DRAFTS)
    batch = VerifyBatch.chain(rows=rows, prefix=[5, 3], drafts=DRAFTS, device=DEVICE)
    inputs = server.tokens(2 * DRAFTS)
    outs = server.graphs["tree"].run(batch, **inputs)
    for got, want in zip(outs, server.eagerly("tree", batch, inputs), strict=True):
        assert torch.equal(got, want)


def test_inputs_that_want_gradients_leave_no_history_behind() -> None:
    server, graph = captured()
    batch = server.batch("decode", two(server))
    inputs = {name: x.requires_grad_() for name, x in server.tokens(2).items()}
    for _ in range(3):
        graph.run(batch, **inputs)
    assert not any(x.requires_grad for x in graph.inputs.values())


def test_a_graph_captured_for_inference_runs_outside_of_it() -> None:
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])
    shape, inputs = graphs.DecodeShape(requests=4), server.tokens(4)
    with torch.inference_mode():
        graph = graphs.capture(server.backend, server.step, shape, inputs=inputs, rerun=DEVICE == "cpu")
    batch = server.batch("decode", two(server))
    assert [x.shape[0] for x in graph.run(batch, **server.tokens(2))] == [2, 2]


class Named(NamedTuple):
    one: Tensor
    two: list[Tensor]


def test_results_may_be_any_nest_of_tensors_named_tuples_too() -> None:
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])

    def step(plan: object, x: Tensor) -> dict[str, Named]:
        return {"out": Named(x + 1, [x + 2])}

    inputs = {"x": torch.zeros(4, 2, device=DEVICE)}
    shape = graphs.DecodeShape(requests=4)
    graph = graphs.capture(server.backend, step, shape, inputs=inputs, rerun=DEVICE == "cpu")
    out = graph.run(server.batch("decode", two(server)), x=torch.ones(2, 2, device=DEVICE))["out"]
    assert isinstance(out, Named) and out.one.tolist() == [[2.0, 2.0]] * 2 and out.two[0].shape == (2, 2)


def test_a_draft_without_steps_belongs_to_its_own_graph_too() -> None:
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])
    shape = graphs.DraftShape(requests=2, topk=2, steps=1)
    inputs = {"x": torch.zeros(4, 3, device=DEVICE)}
    mine, other = (
        graphs.capture(server.backend, lambda plan, x: x + 1, shape, inputs=inputs, rerun=DEVICE == "cpu")
        for _ in range(2)
    )
    row = server.admit(5)
    server.grow(row, 4)
    plan = mine.plan(DraftBatch.of(rows=[row], lens=[5], topk=2, steps=1, device=DEVICE))
    assert mine.replay(plan).shape == (2, 3)
    with pytest.raises(ValueError, match="plan: another graph's"):
        other.replay(plan)


def test_arguments_of_another_kind_are_named() -> None:
    server, graph = captured()
    good = {"shape": graphs.DecodeShape(requests=1), "inputs": {}, "backend": server.backend, "step": server.step}
    for name, bad, match in (
        ("backend", None, "backend: expected AttentionBackend, got NoneType None"),
        ("inputs", [], "inputs: expected Mapping, got list"),
        ("step", 5, r"step: expected a function of \(plan, \*\*inputs\), got int 5"),
    ):
        with pytest.raises(TypeError, match=match):
            graphs.capture(rerun=True, **{**good, name: bad})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs: batch is the name of an argument of run"):
        graphs.capture(rerun=True, **{**good, "inputs": {"batch": torch.zeros(1)}})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plan: expected one that graph.plan\(batch\) made, got NoneType"):
        graph.replay(None)  # type: ignore[arg-type]


class Twice:
    def __call__(self, plan: object, q: Tensor, *, scale: float = 2.0) -> Tensor:
        return q * scale


@pytest.mark.parametrize(
    "step", [lambda plan, q: q, Twice(), Twice().__call__, partial(lambda scale, plan, q: scale * q, 2.0)]
)
def test_inputs_that_a_step_does_not_take_are_found_at_capture(step: graphs.Step) -> None:
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])
    for names, match in (
        ("k", r"inputs: step takes \(plan, q.*\), called with the plan and k: "),
        (
            "qk",
            r"called with the plan and q, k: got an unexpected keyword argument 'k'; give the inputs the names that",
        ),
        ("", "called with the plan and no input: missing a required argument: 'q'"),
    ):
        inputs = {name: torch.zeros(1, 2, device=DEVICE) for name in names}
        with pytest.raises(TypeError, match=match):
            graphs.capture(server.backend, step, graphs.DecodeShape(requests=1), inputs=inputs, rerun=True)
    graphs.capture(server.backend, step, graphs.DecodeShape(requests=1), inputs={"q": torch.zeros(1, 2)}, rerun=True)


def test_a_shapes_longest_counts_new_tokens() -> None:
    server = Server("plain", engine=ENGINE, policy="seed", device=DEVICE, modes=[])
    shape = graphs.ExtendShape(requests=2, new=3, longest=20)
    graph = graphs.capture(server.backend, server.step, shape, inputs=server.tokens(6), rerun=DEVICE == "cpu")
    row = server.admit(23)
    with pytest.raises(ValueError, match="prefix, new: a request of 23 tokens, the graph was captured for 20"):
        graph.plan(ExtendBatch.of(rows=[row], prefix=[20], new=[3], device=DEVICE))
    graph.plan(ExtendBatch.of(rows=[row], prefix=[17], new=[3], device=DEVICE))


def test_padded_rows_of_a_verify_have_no_drafts() -> None:
    server, graph = captured("verify")
    rows = two(server)
    server.grow(rows[0], DRAFTS)
    batch = VerifyBatch.chain(rows=[rows[0], 0], prefix=[5, 0], drafts=[DRAFTS, 0], device=DEVICE)
    inputs = server.tokens(DRAFTS)
    for got, want in zip(graph.run(batch, **inputs), server.eagerly("verify", batch, inputs), strict=True):
        assert torch.equal(got, want)
