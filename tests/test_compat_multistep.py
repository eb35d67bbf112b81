"""The original's multi-step draft backend: every branch of every step against the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.compat.sglang import TritonMultiStepDraftBackend
from attnlab.eager import oracle
from attnlab.plan.draft import branch_stride, draft_room
from tests.foreign import CONTEXT, DEVICE, ENGINE, HEADS, World, WriteLoc
from tests.tolerances import OUTPUT

KINDS = ["mha", "mla", "sliding", "unified"]


class Drafting:
    """Requests of a world that branch, the backend over them, and what each branch has drafted so far."""

    def __init__(
        self, kind: str, *, topk: int, steps: int, page_size: int = 1, context_len: int = CONTEXT, **options: Any
    ) -> None:
        self.world = World(kind, changes={"page_size": page_size})
        self.world.runner.model_config.context_len = context_len
        self.topk, self.steps, self.page_size = topk, steps, page_size
        self.backend = TritonMultiStepDraftBackend(
            self.world.runner, topk, steps, engine=ENGINE, device_core_count=132, write_loc=WriteLoc, **options
        )

    def batch(self, requests: list[int]) -> Any:
        """A draft of these requests: their drafts' slots are entered in the table, and come with the batch."""
        world, locs = self.world, []
        for r in requests:
            length = world.lens[r]
            room = draft_room(length, topk=self.topk, steps=self.steps, page_size=self.page_size)
            world.slots(r, room)
            for t in range(self.topk):
                stride = branch_stride(length, steps=self.steps, page_size=self.page_size)
                first = length + t * stride
                locs.append(world.table[r, first : first + self.steps].long())
        lens = [world.lens[r] for r in requests]
        return SimpleNamespace(
            batch_size=len(requests),
            forward_mode=SimpleNamespace(
                is_decode_or_idle=lambda: True, is_target_verify=lambda: False, is_draft_extend_v2=lambda: False
            ),
            req_pool_indices=torch.tensor(requests, dtype=torch.int64, device=DEVICE),
            seq_lens=torch.tensor(lens, dtype=torch.int64, device=DEVICE),
            seq_lens_cpu=torch.tensor(lens),
            seq_lens_sum=sum(lens),
            out_cache_loc=torch.cat([*locs, torch.zeros(0, dtype=torch.int64, device=DEVICE)]),
            spec_info=None,
        )

    def check(self, requests: list[int], batch: Any, rows: int | None = None) -> None:
        """Attend in every step and layer; each branch sees its request's tokens and its own drafts."""
        branches = len(requests) * self.topk
        rows = branches if rows is None else rows
        own: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for step, backend in enumerate(self.backend.attn_backends):
            for about in self.world.layers:
                q, k, v = self.world.inputs(rows, about)
                out = backend.forward_decode(q, k.clone(), v.clone(), about, batch)
                out = out.view(rows, HEADS, about.v_head_dim)
                window = None if about.sliding_window_size <= 0 else about.sliding_window_size + 1
                for z in range(branches):
                    drafts = own.setdefault((z, about.layer_id), [])
                    drafts.append((k[z : z + 1], v[z : z + 1]))
                    cached = self.world.truth[requests[z // self.topk], about.layer_id]
                    keys = torch.cat([cached[0], *(a for a, _ in drafts)])
                    values = torch.cat([cached[1], *(b for _, b in drafts)])
                    want, _ = oracle.attention(q[z], keys, values, scale=about.scaling, window=window)
                    torch.testing.assert_close(out[z].double(), want, **OUTPUT[torch.float32])
                assert not branches or len(own[0, about.layer_id]) == step + 1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("topk", "steps"), [(1, 2), (1, 4), (3, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_branch_sees_its_request_and_its_own_drafts(kind: str, topk: int, steps: int, page_size: int) -> None:
    drafting = Drafting(kind, topk=topk, steps=steps, page_size=page_size)
    requests = [drafting.world.request(n) for n in (20, 1, 7)]
    batch = drafting.batch(requests)
    drafting.backend.init_forward_metadata(batch)
    assert len(drafting.backend.attn_backends) == steps - 1
    drafting.check(requests, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_drafts_are_filled_for_every_batch(kind: str) -> None:
    drafting = Drafting(kind, topk=2, steps=3)
    requests = [drafting.world.request(n) for n in (20, 1, 7)]
    backend = drafting.backend
    backend.init_cuda_graph_state(3, 6)
    backend.init_forward_metadata_out_graph(drafting.batch(requests), in_capture=True)
    backend.init_forward_metadata_in_graph(None)
    for live in (requests, requests[:1], requests[1:]):
        batch = drafting.batch(live)
        backend.init_forward_metadata_out_graph(batch)
        drafting.check(live, batch, rows=6)
        for own in backend.attn_backends:
            loc = own.forward_metadata.swa_out_cache_loc
            assert loc is None or not loc[len(live) * 2 :].any()
    drafting.world.request(2)
    with pytest.raises(ValueError, match=r"batch_size: captured were drafts of \[3\] requests, got 4"):
        backend.init_forward_metadata_out_graph(drafting.batch([*requests, 3]))


def test_one_step_needs_no_backend_and_is_no_error() -> None:
    drafting = Drafting("mha", topk=4, steps=1)
    batch = drafting.batch([drafting.world.request(5)])
    backend = drafting.backend
    assert backend.attn_backends == [] and list(backend.kv_indptr.shape) == [1, 33]
    backend.init_forward_metadata(batch)
    backend.init_cuda_graph_state(1, 4)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)


def test_no_request_drafts_nothing() -> None:
    drafting = Drafting("mha", topk=2, steps=3)
    drafting.backend.init_forward_metadata(drafting.batch([]))
    drafting.check([], drafting.batch([]))


def test_all_steps_share_their_counts_which_come_from_the_cached_tokens() -> None:
    drafting = Drafting("mha", topk=2, steps=3)
    requests = [drafting.world.request(n) for n in (33, 1)]
    drafting.backend.init_forward_metadata(drafting.batch(requests))
    counts = [backend.forward_metadata.num_kv_splits for backend in drafting.backend.attn_backends]
    assert counts[0] is not None and counts[1] is not None and counts[0].data_ptr() == counts[1].data_ptr()
    wanted = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    drafting.backend.attn_backends[0].get_num_kv_splits(wanted, torch.tensor([33, 1], device=DEVICE))
    assert counts[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("count", [4, 8, 14])
def test_write_slots_of_another_number_are_refused(count: int) -> None:
    drafting = Drafting("mha", topk=2, steps=3)
    batch = drafting.batch([drafting.world.request(20), drafting.world.request(7)])
    batch.out_cache_loc = torch.ones(count, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=rf"out_cache_loc: expected 12 write slots, 2 requests .* got \[{count}\]"):
        drafting.backend.init_forward_metadata(batch)


def test_each_step_may_bring_its_own_write_slots() -> None:
    drafting = Drafting("sliding", topk=2, steps=2)
    requests = [drafting.world.request(20), drafting.world.request(7)]
    batch = drafting.batch(requests)
    whole, batch.out_cache_loc = batch.out_cache_loc, None
    drafting.backend.init_forward_metadata(batch)
    [step] = drafting.backend.attn_backends
    assert step.forward_metadata.swa_out_cache_loc is None
    batch.out_cache_loc = whole.view(4, 2)[:, 0].contiguous()
    about = drafting.world.layers[0]
    q, k, v = drafting.world.inputs(4, about)
    step.forward_decode(q, k, v, about, batch)
    assert torch.equal(drafting.world.pool.k[0][batch.out_cache_loc], k)


def test_captured_drafts_are_served_by_slots_that_the_server_padded_and_by_none_that_it_did_not_bring() -> None:
    drafting = Drafting("sliding", topk=2, steps=3)
    requests = [drafting.world.request(n) for n in (20, 1, 7)]
    backend = drafting.backend
    backend.init_cuda_graph_state(3, 6)
    backend.init_forward_metadata_out_graph(drafting.batch(requests), in_capture=True)
    batch = drafting.batch(requests[:1])
    batch.out_cache_loc = torch.nn.functional.pad(batch.out_cache_loc, (0, 12))
    backend.init_forward_metadata_out_graph(batch)
    drafting.check(requests[:1], batch, rows=6)
    batch.out_cache_loc = None
    with pytest.raises(
        ValueError, match="out_cache_loc: the step was captured with write slots, this batch comes with"
    ):
        backend.init_forward_metadata_out_graph(batch)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state: graphs have baked the buffers in"):
        backend.init_cuda_graph_state(3, 6)


def test_drafts_beyond_the_tables_columns_are_refused() -> None:
    drafting = Drafting("mha", topk=2, steps=3)
    batch = drafting.batch([drafting.world.request(40)])
    batch.seq_lens_cpu = torch.tensor([62])
    with pytest.raises(
        ValueError, match="seq_lens: a request of 62 tokens, whose drafts end at column 68, req_to_token"
    ):
        drafting.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("lens", [[43, 44], [44, 43]])
def test_a_shorter_request_whose_drafts_end_further_out_is_refused(lens: list[int]) -> None:
    """With pages of 4, drafts behind 43 tokens end at column 70, those behind 44 at 59."""
    drafting = Drafting("mha", topk=4, steps=3, page_size=4)
    batch = drafting.batch([])
    batch.batch_size, batch.seq_lens_cpu, batch.seq_lens_sum = 2, torch.tensor(lens), sum(lens)
    batch.req_pool_indices = torch.tensor([0, 1], device=DEVICE)
    batch.seq_lens = torch.tensor(lens, device=DEVICE)
    with pytest.raises(ValueError, match="seq_lens: a request of 43 tokens, whose drafts end at column 70"):
        drafting.backend.init_forward_metadata(batch)
    batch.seq_lens_cpu = batch.seq_lens_sum = None
    if DEVICE == "cpu":  # where the lengths themselves are seen
        with pytest.raises(ValueError, match="seq_lens: a request of 43 tokens, whose drafts end at column 70"):
            drafting.backend.init_forward_metadata(batch)


def test_drafts_behind_the_longest_context_are_kept_in_a_graph() -> None:
    """The table has columns for them; so must the buffers have slots."""
    drafting = Drafting("mha", topk=2, steps=4, context_len=32)
    requests = [drafting.world.request(31)]
    batch = drafting.batch(requests)
    drafting.backend.init_cuda_graph_state(1, 2)
    for in_capture in (True, False):
        drafting.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)
    drafting.check(requests, batch)


def test_more_than_the_buffers_hold_is_refused() -> None:
    drafting = Drafting("mha", topk=2, steps=3)
    batch = drafting.batch([drafting.world.request(n) for n in (20, 1)])
    drafting.backend.init_cuda_graph_state(1, 16)
    with pytest.raises(ValueError, match="batch_size: 2 requests, init_cuda_graph_state was given max_bs 1"):
        drafting.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    batch.batch_size, batch.seq_lens_cpu, batch.seq_lens_sum = 1, None, 100
    with pytest.raises(ValueError, match="seq_lens: 100 tokens x 2 branches .* take 204 slots a step, .* have 128"):
        drafting.backend.init_forward_metadata_out_graph(batch, in_capture=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer write slots": (
        {"out_cache_loc": torch.ones(17, dtype=torch.int64, device=DEVICE)},
        "out_cache_loc: expected 18 write slots",
    ),
    "too long": ({"seq_lens_cpu": torch.tensor([20, 1, 62])}, "seq_lens: a request of 62 tokens, whose drafts end at"),
    "an encoder": ({"encoder_lens": torch.ones(3, device=DEVICE)}, "encoder_lens: not served in a CUDA graph"),
    "rows of some": ({"req_pool_indices": torch.zeros(2, dtype=torch.int64, device=DEVICE)}, "batch_size: 3 requests"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_replay_leaves_the_drafts_before_it_as_they_were(case: str) -> None:
    change, words = REFUSED[case]
    drafting = Drafting("sliding", topk=2, steps=3)
    requests = [drafting.world.request(n) for n in (20, 1, 7)]
    backend = drafting.backend
    backend.init_cuda_graph_state(3, 6)
    batch = drafting.batch(requests)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    other = SimpleNamespace(**{**vars(batch), "req_pool_indices": batch.req_pool_indices.flip(0), **change})
    with pytest.raises(ValueError, match=words):
        backend.init_forward_metadata_out_graph(other)
    drafting.check(requests, batch)


def test_an_unknown_option_is_refused_even_where_no_step_needs_a_backend() -> None:
    with pytest.raises(TypeError, match="foo"):
        Drafting("mha", topk=2, steps=1, foo=3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_captured_in_a_cuda_graph_are_right_at_every_replay(kind: str) -> None:
    drafting = Drafting(kind, topk=2, steps=3)
    world, backend = drafting.world, drafting.backend
    requests = [world.request(n) for n in (20, 1, 7)]
    backend.init_cuda_graph_state(3, 6)
    static = drafting.batch(requests)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    tensors = {(i, about.layer_id): world.inputs(6, about) for i in range(2) for about in world.layers}

    def layers() -> dict[tuple[int, int], Tensor]:
        return {
            (i, about.layer_id): step.forward_decode(*tensors[i, about.layer_id], about, static)
            for i, step in enumerate(backend.attn_backends)
            for about in world.layers
        }

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for live in (requests, requests[:1], requests[1:]):
        backend.init_forward_metadata_out_graph(drafting.batch(live))
        graph.replay()
        for (i, number), out in outs.items():
            about = world.layers[number]
            window = None if about.sliding_window_size <= 0 else about.sliding_window_size + 1
            for z in range(2 * len(live)):
                cached = world.truth[live[z // 2], number]
                own = [tensors[step, number] for step in range(i + 1)]
                keys = torch.cat([cached[0], *(k[z : z + 1] for _, k, _ in own)])
                values = torch.cat([cached[1], *(v[z : z + 1] for _, _, v in own)])
                want, _ = oracle.attention(own[i][0][z], keys, values, scale=about.scaling, window=window)
                got = out.view(6, HEADS, about.v_head_dim)[z].double()
                torch.testing.assert_close(got, want, **OUTPUT[torch.float32])
