"""The original's backend class: every mode against the oracle, as it comes and replayed, over every kind of pool."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlab.compat.sglang import TritonAttnBackend
from attnlab.graphs.memory import tensors_of
from attnlab.mask import ancestors
from tests.foreign import DEVICE, DIM, KV_HEADS, SLOTS, Pool, World, WriteLoc, layer, runner
from tests.syncs import nothing_waits

KINDS = ["mha", "mla", "sliding", "unified", "unified mla"]
TREE = [-1, 0, 0]
LENS = (20, 1, 7, 33)


def filled(kind: str = "mha", **options: Any) -> tuple[World, list[int]]:
    world = World(kind, **options)
    return world, [world.request(n) for n in LENS]


def tree_batch(world: World, requests: list[int]) -> Any:
    """Every request has the tree of a root and two siblings, whose mask and positions the batch brings."""
    lens = [world.lens[r] for r in requests]
    bits = [torch.cat([torch.ones(3, n, dtype=torch.bool), ancestors(TREE)], 1).flatten() for n in lens]
    mask = torch.cat([*bits, torch.zeros(0, dtype=torch.bool)]).to(DEVICE)
    batch = world.batch("verify", requests, [3] * len(requests), draft_token_num=3, custom_mask=mask)
    batch.positions = torch.tensor([n + d for n in lens for d in (0, 1, 1)], device=DEVICE, dtype=torch.int64)
    return batch


def paths(parents: list[int]) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in ancestors(parents)]


@pytest.mark.parametrize("known", [True, False], ids=["lengths on the host", "on the device"])
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_that_follow_each_other_are_right(kind: str, known: bool) -> None:
    world, requests = filled(kind)
    for _ in range(3):
        batch = world.batch("decode", requests, [1] * 4, known=known)
        world.backend.init_forward_metadata(batch)
        results = world.run(batch, 4)
        world.check(results, requests, [1] * 4)
        world.settle(results, requests, [1] * 4)


@pytest.mark.parametrize("known", [True, False], ids=["lengths on the host", "on the device"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_extend_is_right_and_so_is_the_decode_after_it(kind: str, known: bool) -> None:
    world, requests = filled(kind)
    new = [3, 9, 1, 12]
    batch = world.batch("extend", requests, new, known=known)
    world.backend.init_forward_metadata(batch)
    results = world.run(batch, sum(new))
    world.check(results, requests, new)
    world.settle(results, requests, new)
    batch = world.batch("decode", requests, [1] * 4)
    world.backend.init_forward_metadata(batch)
    world.check(world.run(batch, 4), requests, [1] * 4)


@pytest.mark.parametrize("split", [True, False], ids=["split", "one program a tile"])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_and_trees_are_verified(kind: str, split: bool) -> None:
    world, requests = filled(kind, options={"split_kv_verify": split})
    batch = world.batch("verify", requests, [3] * 4, draft_token_num=3)
    world.backend.init_forward_metadata(batch)
    world.check(world.run(batch, 12), requests, [3] * 4)
    world, requests = filled(kind, options={"split_kv_verify": split})
    batch = tree_batch(world, requests)
    world.backend.init_forward_metadata(batch)
    world.check(world.run(batch, 12), requests, [3] * 4, paths=paths(TREE))


# --- CUDA graphs --------------------------------------------------------------------------------------------------


def padded(batch: Any, each: int) -> Any:
    """The batch as a server hands it to a graph of four requests: rows of padding behind the live ones.

    Host lists that a graph does not read are left as they are.
    """
    missing = 4 - batch.batch_size
    batch = SimpleNamespace(**vars(batch))
    batch.batch_size = 4
    batch.extend_seq_lens = torch.nn.functional.pad(batch.extend_seq_lens, (0, missing))
    batch.req_pool_indices = torch.nn.functional.pad(batch.req_pool_indices, (0, missing))
    batch.seq_lens = torch.nn.functional.pad(batch.seq_lens, (0, missing), value=1)
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = torch.nn.functional.pad(batch.seq_lens_cpu, (0, missing), value=1)
    batch.seq_lens_sum = None if batch.seq_lens_sum is None else batch.seq_lens_sum + missing
    spec = {} if batch.spec_info is None else vars(batch.spec_info)
    if "extend_seq_lens_tensor" in spec:
        lens = torch.nn.functional.pad(spec["extend_seq_lens_tensor"], (0, missing))
        batch.spec_info = SimpleNamespace(**{**spec, "extend_seq_lens_tensor": lens})
    batch.out_cache_loc = torch.nn.functional.pad(batch.out_cache_loc, (0, missing * each))
    if "positions" in vars(batch):
        batch.positions = torch.nn.functional.pad(batch.positions, (0, missing * each))
    return batch


def captured(kind: str, mode: str, **options: Any) -> tuple[World, list[int]]:
    """A world whose graph of four requests in that mode is captured."""
    world, requests = filled(kind, **options)
    world.backend.init_cuda_graph_state(4, 16)
    each = 1 if mode == "decode" else 3
    spec = {} if mode == "decode" else {"draft_token_num": 3}
    batch = padded(world.batch(mode, [], [], **spec), each)
    world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    world.backend.init_forward_metadata_in_graph(batch)
    return world, requests


def addresses(world: World) -> list[int]:
    """Where everything lies that a graph bakes in."""
    reads = world.backend._planned().reads
    return [x.data_ptr() for _, x in tensors_of("", reads)]


@pytest.mark.parametrize("pad", [True, False], ids=["padded by the server", "as it is"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["decode", "verify", "tree", "draft extend"])
def test_replays_of_changing_batches_are_right(kind: str, mode: str, pad: bool) -> None:
    name = "verify" if mode == "tree" else mode
    world, requests = captured(kind, name)
    each, where = 1 if mode == "decode" else 3, addresses(world)
    for count in (4, 2, 3, 1):
        live = requests[:count]
        new = [each] * count
        if mode == "tree":
            batch = tree_batch(world, live)
        elif mode == "draft extend":
            accepted = torch.tensor(new, dtype=torch.int32, device=DEVICE)
            batch = world.batch(name, live, new, draft_token_num=3, extend_seq_lens_tensor=accepted)
        else:
            batch = world.batch(name, live, new, **({"draft_token_num": 3} if mode == "verify" else {}))
        static = padded(batch, each)  # what the captured layers read
        world.backend.init_forward_metadata_out_graph(static if pad else batch)
        assert addresses(world) == where
        results = [(about, *(x[: count * each] for x in rest)) for about, *rest in world.run(static, 4 * each)]
        world.check(results, live, new, paths=paths(TREE) if mode == "tree" else None)
        if mode != "tree":  # whose siblings lie one behind the other
            world.settle(results, live, new)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["decode", "verify", "draft extend"])
def test_layers_captured_in_a_cuda_graph_are_right_at_every_replay(kind: str, mode: str) -> None:
    world, requests = captured(kind, mode)
    each = 1 if mode == "decode" else 3
    spec: dict[str, Any] = {} if mode == "decode" else {"draft_token_num": 3}
    static = padded(world.batch(mode, [], [], **spec), each)
    tensors = [world.inputs(4 * each, about) for about in world.layers]

    def layers() -> list[Any]:
        return [world.backend.forward(*x, about, static) for x, about in zip(tensors, world.layers, strict=True)]

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for count in (4, 2, 3, 1):
        live, new = requests[:count], [each] * count
        if mode == "draft extend":
            spec["extend_seq_lens_tensor"] = torch.tensor(new, dtype=torch.int32, device=DEVICE)
        batch = padded(world.batch(mode, live, new, **spec), each)
        static.out_cache_loc.copy_(batch.out_cache_loc)
        world.backend.init_forward_metadata_out_graph(batch)
        results = []
        for x, about, out in zip(tensors, world.layers, outs, strict=True):
            given = world.inputs(4 * each, about)
            for mine, its in zip(x, given, strict=True):
                mine.copy_(its)
            results.append((about, *(y[: count * each] for y in given), out))
        graph.replay()
        results = [(*x[:4], x[4].view(4 * each, 4, x[0].v_head_dim)[: count * each].clone()) for x in results]
        world.check(results, live, new)
        world.settle(results, live, new)


# --- what is refused, and what is read back -----------------------------------------------------------------------


def test_a_larger_batch_than_captured_is_refused_with_both_numbers() -> None:
    world, requests = captured("mha", "decode")
    world.request(3)
    with pytest.raises(ValueError, match=r"batch_size: captured were steps of \[4\] requests, got 5"):
        world.backend.init_forward_metadata_out_graph(world.batch("decode", [*requests, 4], [1] * 5))


def test_another_draft_count_than_captured_is_refused_with_both_numbers() -> None:
    world, requests = captured("mha", "verify")
    with pytest.raises(ValueError, match=r"draft_token_num: captured were steps of \[3\] drafts a request, got 2"):
        world.backend.init_forward_metadata_out_graph(world.batch("verify", requests, [2] * 4, draft_token_num=2))


def test_a_mask_where_none_was_captured_is_refused() -> None:
    world, requests = captured("mha", "verify", options={"speculative_num_draft_tokens": None})
    assert world.backend.verify_mask is None
    with pytest.raises(ValueError, match=r"custom_mask: got \[219\] bool on .*, the step was captured without one"):
        world.backend.init_forward_metadata_out_graph(tree_batch(world, requests))


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        ("extend", "forward_mode: a CUDA graph serves decode, target verify and draft-extend, got extend"),
        ("verify", "graph: no step of mode verify was captured; captured were"),
    ],
)
def test_another_mode_is_refused_by_name(mode: str, match: str) -> None:
    world, requests = captured("mha", "decode")
    with pytest.raises(ValueError, match=match):
        world.backend.init_forward_metadata_out_graph(world.batch(mode, requests, [3] * 4, draft_token_num=3))


def test_encoder_lengths_are_refused_in_a_graph() -> None:
    world, requests = captured("mha", "decode")
    batch = world.batch("decode", requests, [1] * 4)
    batch.encoder_lens = torch.ones(4, device=DEVICE)
    with pytest.raises(ValueError, match="encoder_lens: not served in a CUDA graph"):
        world.backend.init_forward_metadata_out_graph(batch)


def test_a_mask_may_be_filled_into_the_very_buffer_that_a_graph_reads() -> None:
    world, requests = captured("mha", "verify")
    batch, mask = tree_batch(world, requests), world.backend.verify_mask
    assert mask is not None and mask.fits(4) and not mask.fits(5)
    bits = batch.spec_info.custom_mask
    mask.buffer.fill_(9)
    mask.buffer[: bits.shape[0]] = bits
    batch.spec_info.custom_mask = mask.buffer[: bits.shape[0]]
    world.backend.init_forward_metadata_out_graph(batch)
    world.check(world.run(batch, 12), requests, [3] * 4, paths=paths(TREE))
    assert mask.buffer[bits.shape[0] :].eq(9).all()
    batch.spec_info.custom_mask = torch.zeros(mask.buffer.shape[0] + 1, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"custom_mask: the graph's buffer has 804 entries, this step needs 805"):
        world.backend.init_forward_metadata_out_graph(batch)


@pytest.mark.parametrize("kind", ["mha", "sliding"])
def test_more_write_slots_than_were_captured_are_refused(kind: str) -> None:
    world, requests = captured(kind, "decode")
    batch = world.batch("decode", requests, [1] * 4)
    batch.out_cache_loc = torch.ones(5, dtype=torch.int64, device=DEVICE)
    with pytest.raises(
        ValueError, match="out_cache_loc: expected at most the 4 write slots of the captured step, got 5"
    ):
        world.backend.init_forward_metadata_out_graph(batch)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "more write slots": (
        "decode",
        lambda b: {"out_cache_loc": torch.ones(13, dtype=torch.int64, device=DEVICE)},
        "out_cache_loc: expected at most the 4 write slots",
    ),
    "a short list of lengths": ("decode", lambda b: {"seq_lens": b.seq_lens[:3]}, "batch_size: 4 requests, but seq_l"),
    "a short list of rows": (
        "decode",
        lambda b: {"req_pool_indices": b.req_pool_indices[:3]},
        "batch_size: 4 requests, but req_pool_indices has 3 entries",
    ),
    "more tokens than slots": ("decode", lambda b: {"seq_lens_sum": 10**6}, "kv_indices: the graph's buffer has"),
    "more lists": (
        "decode",
        lambda b: {"spec_info": SimpleNamespace(kv_indptr=torch.zeros(6, device=DEVICE).int(), kv_indices=b.seq_lens)},
        "spec_info.kv_indptr: 5 lists, the step was captured with 4",
    ),
    "lists of some": (
        "decode",
        lambda b: {"spec_info": SimpleNamespace(kv_indptr=torch.zeros(4, device=DEVICE).int(), kv_indices=b.seq_lens)},
        "spec_info.kv_indptr: expected as many lists for each of 4 requests, got 3",
    ),
    "a short mask": (
        "verify",
        lambda b: {"spec_info": SimpleNamespace(draft_token_num=3, custom_mask=b.spec_info.custom_mask[:-1])},
        "custom_mask: expected at least 219 entries, .* got 218",
    ),
    "a mask of numbers": (
        "verify",
        lambda b: {"spec_info": SimpleNamespace(draft_token_num=3, custom_mask=b.spec_info.custom_mask.float())},
        "custom_mask: expected",
    ),
    "positions of some": (
        "verify",
        lambda b: {"positions": b.positions[:11]},
        "positions: expected one for each of 12 drafts, 4 requests x 3, got 11",
    ),
    "new tokens of some": (
        "draft extend",
        lambda b: {"extend_seq_lens": b.extend_seq_lens[:3]},
        "batch_size: 4 requests, but extend_seq_lens has 3 entries",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_replay_leaves_the_step_before_it_as_it_was(case: str) -> None:
    mode, change, words = REFUSED[case]
    world, requests = captured("sliding", mode)
    new = [1 if mode == "decode" else 3] * 4
    given = {} if mode == "decode" else {"draft_token_num": 3}
    batch = tree_batch(world, requests) if mode == "verify" else world.batch(mode, requests, new, **given)
    world.backend.init_forward_metadata_out_graph(batch)
    assert world.backend._graph is not None
    buffers, metadata = world.backend._graph.buffers, world.backend.forward_metadata
    before = {name: x.clone() for name, x in buffers.items()}
    other = SimpleNamespace(**{**vars(batch), "req_pool_indices": batch.req_pool_indices.flip(0)})
    other = SimpleNamespace(**{**vars(other), **change(batch)})
    with pytest.raises((ValueError, TypeError), match=words):
        world.backend.init_forward_metadata_out_graph(other)
    assert world.backend.forward_metadata is metadata
    assert [name for name, x in buffers.items() if not torch.equal(x, before[name])] == []
    world.check(world.run(batch, sum(new)), requests, new, paths=paths(TREE) if mode == "verify" else None)


def test_a_replay_that_fails_halfway_leaves_no_step_behind() -> None:
    world, requests = captured("sliding", "decode")
    batch = world.batch("decode", requests, [1] * 4)
    world.backend.init_forward_metadata_out_graph(batch)
    world.pool.place = None  # the pool's own translation fails, before it reaches a device
    with pytest.raises(TypeError):
        world.backend.init_forward_metadata_out_graph(batch)
    with pytest.raises(RuntimeError, match="no step was planned yet"):
        world.run(batch, 4)


def test_what_a_graph_has_baked_in_beside_addresses_may_not_change() -> None:
    world, requests = captured("sliding", "decode")
    backend = world.backend
    backend.maker = replace(backend.maker, runner=replace(backend.runner, window=5))
    with pytest.raises(RuntimeError, match=r"sliding.layout.sight.window: captured 7, got 6.* capture the step again"):
        backend.init_forward_metadata_out_graph(world.batch("decode", requests, [1] * 4))


def test_write_slots_of_padding_go_to_the_sink() -> None:
    world, requests = captured("sliding", "decode")
    world.backend.init_forward_metadata_out_graph(world.batch("decode", requests, [1] * 4))
    world.backend.init_forward_metadata_out_graph(world.batch("decode", requests[:2], [1] * 2))
    loc = world.backend.forward_metadata.swa_out_cache_loc
    assert loc is not None and loc[:2].gt(0).all() and loc[2:].tolist() == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_given_slots_or_the_record_that_it_knows(kind: str) -> None:
    world, requests = filled(kind)
    batch = world.batch("decode", requests, [1] * 4)
    world.backend.init_forward_metadata(batch)
    world.run(batch, 4)
    has_own = kind == "sliding" or kind.startswith("unified")
    given = world.pool.given[-1]
    assert type(given) is WriteLoc and torch.equal(given.loc, batch.out_cache_loc)
    assert (given.swa_loc is not None or given.full_loc is not None) == has_own
    batch.out_cache_loc = None
    with pytest.raises(ValueError, match="out_cache_loc: expected where the new tokens go, got None"):
        world.run(batch, 4)


@pytest.mark.parametrize("kind", ["mha", "sliding", "unified", "mla"])
def test_without_keys_the_pools_own_are_read_back(kind: str) -> None:
    world, requests = filled(kind)
    new = [3, 2, 1, 4]
    batch = world.batch("extend", requests, new)
    world.backend.init_forward_metadata(batch)
    results = world.run(batch, 10)
    for about, q, k, _, out in results:
        again = world.backend.forward_extend(q, None, None, about, batch)
        torch.testing.assert_close(again.view_as(out), out)
        with pytest.raises(ValueError, match="k, v: expected both, or None for both"):
            world.backend.forward_extend(q, k, None, about, batch)
        with pytest.raises(ValueError, match="k, v: expected the new tokens' keys and values, got None"):
            world.backend.init_forward_metadata(world.batch("decode", requests, [1] * 4))
            world.backend.forward_decode(q[:4], None, None, about, batch)
        world.backend.init_forward_metadata(batch)


def test_nothing_is_stored_where_saving_is_off() -> None:
    world, requests = filled()
    batch = world.batch("decode", requests, [1] * 4)
    world.backend.init_forward_metadata(batch)
    about = world.layers[0]
    world.pool.given.clear()
    world.backend.forward_decode(world.drawn(4, 4, 16), None, None, about, batch, save_kv_cache=False)
    assert not world.pool.given


def test_scales_divide_what_is_stored_and_multiply_what_is_read() -> None:
    for kind in ("mha", "mla"):
        world, requests = filled(kind)
        for about in world.layers:
            about.k_scale, about.v_scale = (torch.tensor(x, device=DEVICE) for x in (0.5, 0.25))
            about.k_scale_float, about.v_scale_float = 0.5, 0.25 if kind == "mha" else 0.5
            for r in requests:
                k, v = world.truth[r, about.layer_id]
                world.truth[r, about.layer_id] = k * 0.5, v * about.v_scale_float
        batch = world.batch("decode", requests, [1] * 4)
        world.backend.init_forward_metadata(batch)
        world.check(world.run(batch, 4), requests, [1] * 4)


@pytest.mark.parametrize("brings_lists", [True, False])
def test_an_idle_batch_gives_rows_of_zeros(brings_lists: bool) -> None:
    world, requests = filled()
    batch = world.batch("decode", [], [])
    if brings_lists:  # of the step before
        batch.spec_info = with_lists(world, requests).spec_info
    world.backend.init_forward_metadata(batch)
    q = world.drawn(2, 4, 16)
    assert world.backend.forward(q, None, None, world.layers[0], batch).tolist() == [[0.0] * 64] * 2


def test_sinks_caps_and_temperature_of_a_layer_are_its_own() -> None:
    world, requests = filled()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)
    for about in world.layers:
        about.logit_cap, about.xai_temperature_len = 5.0, 16
    for name, new in (("decode", [1] * 4), ("extend", [3, 9, 1, 12])):
        batch = world.batch(name, requests, new)
        world.backend.init_forward_metadata(batch)
        results = world.run(batch, sum(new), sinks=sinks)
        world.check(results, requests, new, sinks=sinks, softcap=5.0, temperature_len=16)
        world.settle(results, requests, new)


def test_a_deterministic_backend_extends_in_one_pass() -> None:
    change = World().runner.server_args
    change.enable_deterministic_inference = True
    for kind in ("mha", "sliding", "unified", "mla"):
        world, requests = filled(kind, changes={"server_args": change})
        assert world.backend.max_kv_splits == 1
        for name, new in (("extend", [3, 9, 1, 12]), ("verify", [3] * 4), ("decode", [1] * 4)):
            batch = world.batch(name, requests, new, **({"draft_token_num": 3} if name == "verify" else {}))
            world.backend.init_forward_metadata(batch)
            results = world.run(batch, sum(new))
            world.check(results, requests, new)
            world.settle(results, requests, new)


def test_what_does_not_go_together_is_refused_at_construction() -> None:
    config = World().runner.model_config
    config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="sliding_window_size, is_encoder_decoder: a window of 6 and an encoder"):
        World(changes={"model_config": config})
    config = World().runner.model_config
    config.get_num_kv_heads = lambda tp: 3
    with pytest.raises(ValueError, match="get_num_kv_heads: expected a divisor of the 4 heads of a rank, got 3"):
        World(changes={"model_config": config})
    with pytest.raises(NotImplementedError, match="dcp_size: expected 1, got 2"):
        World(options={"dcp_size": 2})
    with pytest.raises(ValueError, match="sliding_window_size: expected a radius of at least 1, or None, -1 or 0"):
        World(radius=-2)


NEEDED = [
    "req_to_token_pool.req_to_token",
    "token_to_kv_pool.get_key_buffer",
    "token_to_kv_pool.get_value_buffer",
    "token_to_kv_pool.set_kv_buffer",
    "sliding_window_size",
    "model_config.attention_arch",
    "model_config.context_len",
    "model_config.get_max_num_attention_heads",
    "model_config.get_num_kv_heads",
    "server_args.triton_attention_num_kv_splits",
    "server_args.triton_attention_split_tile_size",
    "server_args.enable_deterministic_inference",
    "server_args.chunked_prefill_size",
]


@pytest.mark.parametrize("path", NEEDED)
def test_a_runner_that_lacks_something_is_refused_by_name(path: str) -> None:
    """And the docstring says that it is needed."""
    *owner, name = path.split(".")
    given = runner(Pool("mha"))
    left = {}
    if owner == ["token_to_kv_pool"]:
        pool = given.token_to_kv_pool
        left = {x: getattr(pool, x) for x in ("get_key_buffer", "get_value_buffer", "set_kv_buffer") if x != name}
    elif owner:
        left = {x: y for x, y in vars(getattr(given, owner[0])).items() if x != name}
    change = SimpleNamespace(**left)
    if owner:
        setattr(given, owner[0], change)
    else:
        delattr(given, name)
    where = ".".join(["model_runner", *owner])
    with pytest.raises(TypeError, match=rf"^{where}: expected an object with '{name}', got SimpleNamespace without"):
        TritonAttnBackend(given)
    [*_, needed] = (TritonAttnBackend.__doc__ or "").partition("| `model_runner`")
    [needed, *_] = needed.partition("| `layer`")
    assert f"`{name}" in needed and f"[{name}" not in needed


@pytest.mark.parametrize("name", ["is_decode_or_idle", "is_target_verify", "is_draft_extend_v2"])
def test_a_mode_that_does_not_say_what_it_is_is_no_extend(name: str) -> None:
    world, requests = filled()
    batch = world.batch("extend", requests, [1] * 4)
    delattr(batch.forward_mode, name)
    with pytest.raises(TypeError, match=f"forward_batch.forward_mode: expected an object with '{name}'"):
        world.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("name", ["batch_size", "req_pool_indices", "seq_lens", "forward_mode"])
def test_a_batch_that_lacks_something_is_refused_by_name(name: str) -> None:
    world, requests = filled()
    batch = world.batch("extend", requests, [1] * 4)
    delattr(batch, name)
    with pytest.raises(TypeError, match=f"^forward_batch: expected an object with '{name}'"):
        world.backend.init_forward_metadata(batch)


def test_a_backend_for_decodes_alone_refuses_the_rest() -> None:
    world, requests = filled(options={"skip_prefill": True})
    with pytest.raises(ValueError, match="built with skip_prefill=True and plans decodes alone, got extend"):
        world.backend.init_forward_metadata(world.batch("extend", requests, [1] * 4))


def test_a_cap_by_another_method_is_refused_by_name() -> None:
    world, requests = filled()
    world.layers[0].logit_capping_method = "sigmoid"
    batch = world.batch("decode", requests, [1] * 4)
    world.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="logit_capping_method: .*'sigmoid'"):
        world.run(batch, 4)


def test_the_hooks_of_the_interface_are_there() -> None:
    backend = World().backend
    assert backend.get_cuda_graph_seq_len_fill_value() == 1 and backend.needs_cpu_seq_lens is False
    backend.update_verify_buffers_to_fill_after_draft(None, None)
    counts, lens = torch.zeros(8, dtype=torch.int32, device=DEVICE), torch.tensor([500, 6000], device=DEVICE)
    backend.get_num_kv_splits(counts, lens)
    assert counts.tolist() == [1] * 4 + [8] * 4
    with pytest.raises(ValueError, match="num_kv_splits: expected a multiple of the 2 sequences, got 7 query tokens"):
        backend.get_num_kv_splits(counts[:7], lens)
    with pytest.raises(RuntimeError, match="no step was planned yet"):
        backend.forward_metadata  # noqa: B018
    with pytest.raises(RuntimeError, match="call init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(World().batch("decode", [], []))


# --- what readers broke -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [3, 10])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_a_layer_of_another_window_than_the_runners_is_refused(mode: str, radius: int) -> None:
    world, requests = filled()
    world.layers[1].sliding_window_size = radius
    batch = world.batch(mode, requests, [1] * 4)
    world.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=f"layer 1: sliding_window_size {radius}, the model runner's is 6"):
        world.run(batch, 4)


def with_lists(world: World, requests: list[int], mode: str = "decode") -> Any:
    """A batch that brings the lists itself, in the table's slots."""
    batch = world.batch(mode, requests, [1] * len(requests))
    lens = [world.lens[r] + 1 for r in requests]
    ids = [world.table[r, :n] for r, n in zip(requests, lens, strict=True)]
    indptr = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
    batch.spec_info = SimpleNamespace(kv_indptr=indptr, kv_indices=torch.cat(ids).long())
    return batch


@pytest.mark.parametrize("kind", ["mha", "mla", "sliding"])
def test_lists_that_a_batch_brings_are_used_as_they_are(kind: str) -> None:
    world, requests = filled(kind)
    batch = with_lists(world, requests)
    world.backend.init_forward_metadata(batch)
    world.check(world.run(batch, 4), requests, [1] * 4)


@pytest.mark.parametrize("kind", ["mha", "sliding"])
def test_lists_of_fewer_requests_than_were_captured_have_write_slots_for_all(kind: str) -> None:
    world, requests = captured(kind, "decode")
    for live in (requests, requests[:2], requests[3:], requests):
        batch, count = with_lists(world, live), len(live)
        world.backend.init_forward_metadata_out_graph(batch)
        results = [(about, *(x[:count] for x in rest)) for about, *rest in world.run(padded(batch, 1), 4)]
        world.check(results, live, [1] * count)
        world.settle(results, live, [1] * count)


@pytest.mark.parametrize("graph", [True, False])
def test_lists_longer_than_the_slots_that_came_with_them_end_there(graph: bool) -> None:
    """Behind them, a graph's buffer has slots of an earlier step."""
    world, requests = captured("sliding", "decode") if graph else filled("sliding")
    plan = world.backend.init_forward_metadata_out_graph if graph else world.backend.init_forward_metadata
    plan(with_lists(world, requests))
    batch = with_lists(world, requests)
    batch.spec_info.kv_indices = batch.spec_info.kv_indices[:22].clone()
    with nothing_waits(batch.seq_lens_cpu):
        plan(batch)
    metadata = world.backend.forward_metadata
    assert metadata.kv_indptr.max() == 22
    assert metadata.window_kv_indptr is not None and metadata.window_kv_indptr.tolist() == [0, 7, 8, 8, 8]


def test_lists_of_one_id_space_do_not_serve_layers_of_two() -> None:
    world, requests = filled("unified")
    with pytest.raises(ValueError, match="spec_info.kv_indices: lists of one id space"):
        world.backend.init_forward_metadata(with_lists(world, requests))


def test_a_graph_copies_lists_that_a_batch_brings_and_leaves_theirs_alone() -> None:
    world, requests = filled()
    world.backend.init_cuda_graph_state(4, 16)
    kept = []
    for step, count in enumerate((4, 4, 2)):
        batch = with_lists(world, requests[:count])
        kept.append((batch.spec_info.kv_indices, batch.spec_info.kv_indices.clone()))
        world.backend.init_forward_metadata_out_graph(batch, in_capture=step == 0)
        results = [(about, *(x[:count] for x in rest)) for about, *rest in world.run(padded(batch, 1), 4)]
        world.check(results, requests[:count], [1] * count)
        world.settle(results, requests[:count], [1] * count)
    assert all(torch.equal(given, before) for given, before in kept)


@pytest.mark.parametrize("known", [True, False])
def test_a_buffer_too_small_for_the_lists_is_refused(known: bool) -> None:
    world, requests = filled()
    world.backend.init_cuda_graph_state(4, 16, kv_indices_buf=torch.zeros(10, dtype=torch.int64, device=DEVICE))
    batch = world.batch("decode", requests, [1] * 4, known=known)
    with pytest.raises(ValueError, match="kv_indices: the graph's buffer has 10 entries, this step needs"):
        world.backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_totals_that_disagree_size_the_lists_by_the_larger() -> None:
    world, requests = filled()
    batch = world.batch("decode", requests, [1] * 4)
    batch.seq_lens_sum = 10
    world.backend.init_forward_metadata(batch)
    world.check(world.run(batch, 4), requests, [1] * 4)
    world, requests = filled()
    batch = world.batch("extend", requests, [3] * 4)
    batch.extend_prefix_lens_cpu = [0] * 4
    world.backend.init_forward_metadata(batch)
    world.check(world.run(batch, 12), requests, [3] * 4)


@pytest.mark.parametrize("name", ["seq_lens_cpu", "extend_prefix_lens_cpu", "extend_seq_lens_cpu"])
def test_lengths_of_some_requests_are_refused(name: str) -> None:
    """Lists would be sized by them, and the last requests lose their keys."""
    world, requests = filled()
    batch = world.batch("extend", requests, [3] * 4)
    setattr(batch, name, getattr(batch, name)[:3])
    batch.seq_lens_sum = None
    with pytest.raises(ValueError, match=f"{name}: expected a length for each of 4 requests, or None, got 3"):
        world.backend.init_forward_metadata(batch)


def test_fewer_requests_than_none_are_refused() -> None:
    world, requests = filled()
    batch = world.batch("decode", requests, [1] * 4)
    batch.batch_size = -1
    with pytest.raises(ValueError, match="batch_size: expected at least 0 requests, got -1"):
        world.backend.init_forward_metadata(batch)


OUTSIDE: dict[str, tuple[str, Any, str]] = {
    "row": (
        "decode",
        {"req_pool_indices": (3, 8)},
        "req_pool_indices: expected 0 to 7, the rows of req_to_token, got 8",
    ),
    "row below 0": ("extend", {"req_pool_indices": (0, -1)}, "req_pool_indices: expected 0 to 7, .* got -1 in entry 0"),
    "length": ("decode", {"seq_lens": (1, 65)}, "seq_lens: expected 0 to 64, the lengths that .* got 65 in entry 1"),
    "length below 0": ("verify", {"seq_lens": (1, -1)}, "seq_lens: expected 0 to 64, .* got -1 in entry 1"),
    "cached": ("extend", {"extend_prefix_lens": (2, 99)}, "extend_prefix_lens: expected 0 to 64, .* got 99 in entry 2"),
    "new": ("extend", {"extend_seq_lens": (2, -3)}, "extend_seq_lens: expected 0 to 64, .* got -3 in entry 2"),
    "write slot": (
        "decode",
        {"out_cache_loc": (1, 512)},
        "out_cache_loc: expected 0 to 511, the slots of layer 0, got",
    ),
    "write slot below 0": ("extend", {"out_cache_loc": (1, -1)}, "out_cache_loc: expected 0 to 511, .* got -1 in entr"),
}
"""Which mode, which entry of which list becomes what, and what is said."""


@pytest.mark.skipif(DEVICE != "cpu", reason="the host would wait for a GPU to look")
@pytest.mark.parametrize("case", OUTSIDE)
def test_numbers_that_are_none_are_refused_on_a_cpu(case: str) -> None:
    mode, change, words = OUTSIDE[case]
    world, requests = filled()
    new = [3] * 4 if mode == "verify" else [1] * 4
    batch = world.batch(mode, requests, new, known=False, **({"draft_token_num": 3} if mode == "verify" else {}))
    for name, (at, value) in change.items():
        getattr(batch, name)[at] = value
    world.pool.given.clear()
    with pytest.raises(ValueError, match=words):
        world.backend.init_forward_metadata(batch)
        world.run(batch, sum(new))
    assert not world.pool.given


@pytest.mark.skipif(DEVICE != "cpu", reason="the host would wait for a GPU to look")
@pytest.mark.parametrize("slot", [SLOTS, -1, 10**8])
@pytest.mark.parametrize("mode", ["decode", "verify", "extend"])
def test_slots_of_the_table_that_the_pool_has_not_are_refused_on_a_cpu(mode: str, slot: int) -> None:
    world, requests = filled()
    new = [3] * 4 if mode == "verify" else [1] * 4
    batch = world.batch(mode, requests, new, **({"draft_token_num": 3} if mode == "verify" else {}))
    world.table[requests[0], 4] = slot
    world.backend.init_forward_metadata(batch)
    world.pool.given.clear()
    with pytest.raises(ValueError, match=f"kv_indices: expected 0 to 511, the slots of layer 0, got {slot} in entry 4"):
        world.run(batch, sum(new))
    assert not world.pool.given


@pytest.mark.skipif(DEVICE != "cpu", reason="the host would wait for a GPU to look")
@pytest.mark.parametrize("graph", [True, False])
def test_lists_that_leave_their_slots_are_refused_on_a_cpu(graph: bool) -> None:
    world, requests = captured("mha", "decode") if graph else filled()
    plan = world.backend.init_forward_metadata_out_graph if graph else world.backend.init_forward_metadata
    batch = with_lists(world, requests)
    batch.spec_info.kv_indices = batch.spec_info.kv_indices[:64]
    with pytest.raises(ValueError, match="spec_info.kv_indptr: expected offsets into the 64 entries of spec_info.kv_i"):
        plan(batch)


def test_a_request_longer_than_the_table_is_refused() -> None:
    world, requests = filled()
    batch = world.batch("decode", requests, [1] * 4)
    batch.seq_lens_cpu = torch.tensor([70, 1, 1, 1])
    with pytest.raises(ValueError, match="seq_lens: a request of 70 tokens, req_to_token has 64 columns"):
        world.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("pad", [True, False])
def test_a_mask_too_short_for_a_graph_is_refused(pad: bool) -> None:
    """Rows of padding need no bytes."""
    world, requests = captured("mha", "verify")
    batch = tree_batch(world, requests[:3])
    least = batch.spec_info.custom_mask.shape[0]
    batch.spec_info.custom_mask = batch.spec_info.custom_mask[:-1]
    with pytest.raises(ValueError, match=f"custom_mask: expected at least {least} entries, .* got {least - 1}"):
        world.backend.init_forward_metadata_out_graph(padded(batch, 3) if pad else batch)


def test_bytes_that_a_mask_lacks_are_none_of_an_earlier_step() -> None:
    world, requests = captured("mha", "verify")
    batch, mask = tree_batch(world, requests), world.backend.verify_mask
    assert mask is not None
    mask.buffer.fill_(1)
    batch.seq_lens_sum = batch.seq_lens_cpu = None  # nobody knows how many it should have
    batch.spec_info.custom_mask = batch.spec_info.custom_mask[:10]
    world.backend.init_forward_metadata_out_graph(batch)
    assert torch.equal(mask.buffer[:10].bool(), batch.spec_info.custom_mask) and not mask.buffer[10:].any()


@pytest.mark.parametrize("known", [True, False])
def test_a_mask_too_short_is_refused(known: bool) -> None:
    world, requests = filled()
    batch = tree_batch(world, requests)
    if not known:
        batch.seq_lens_sum = batch.seq_lens_cpu = None
    least = 3 * (sum(LENS) * known + 4 * 3)
    batch.spec_info.custom_mask = batch.spec_info.custom_mask[: least - 1]
    with pytest.raises(ValueError, match=f"custom_mask: expected at least {least} entries, .* got {least - 1}"):
        world.backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("extend_seq_lens", [3] * 4, r"extend_seq_lens: expected \[reqs\] int32 or int64, got list"),
        ("extend_prefix_lens", torch.ones(4), r"extend_prefix_lens: expected \[reqs\] int32 or int64"),
        ("out_cache_loc", torch.ones(12), r"out_cache_loc: expected \[tokens\] int32 or int64"),
        ("out_cache_loc", torch.ones(12, 1, dtype=torch.int64), r"out_cache_loc: expected \[tokens\] int32 or int64"),
    ],
)
def test_lists_of_another_kind_are_refused_by_name(name: str, value: Any, words: str) -> None:
    world, requests = filled()
    batch = world.batch("extend", requests, [3] * 4)
    setattr(batch, name, value)
    with pytest.raises((TypeError, ValueError), match=words):
        world.backend.init_forward_metadata(batch)


def test_positions_may_lie_in_a_longer_buffer_but_in_one_row() -> None:
    world, requests = filled()
    batch = tree_batch(world, requests)
    batch.positions = torch.cat([batch.positions, torch.full((9,), 77, device=DEVICE)])
    world.backend.init_forward_metadata(batch)
    world.check(world.run(batch, 12), requests, [3] * 4, paths=paths(TREE))
    batch.positions = batch.positions[None]
    with pytest.raises(ValueError, match=r"positions: expected \[tokens\]"):
        world.backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v_head_dim": 8}, "layer 0: v_head_dim 8, the model runner says 16, for which scratch was made"),
        ({"v_head_dim": 32}, "layer 0: v_head_dim 32, the model runner says 16, for which scratch was made"),
        ({"tp_q_head_num": 8}, "layer 0: tp_q_head_num 8, the model runner says at most 4"),
        ({"xai_temperature_len": 1}, "layer 0: xai_temperature_len: expected more than 1 or -1, got 1"),
    ],
)
@pytest.mark.parametrize("mode", ["decode", "verify"])
def test_a_layer_that_the_runner_has_no_scratch_for_is_refused_before_it_is_stored(
    mode: str, change: dict[str, int], words: str
) -> None:
    world, requests = filled()
    about = layer(0, **change)
    world.pool.v[0] = torch.zeros(SLOTS, KV_HEADS, about.v_head_dim, device=DEVICE)
    new = [1 if mode == "decode" else 3] * 4
    batch = world.batch(mode, requests, new, **({} if mode == "decode" else {"draft_token_num": 3}))
    world.backend.init_forward_metadata(batch)
    q = world.drawn(sum(new), about.tp_q_head_num, DIM)
    k, v = world.drawn(sum(new), KV_HEADS, DIM), world.drawn(sum(new), KV_HEADS, about.v_head_dim)
    world.pool.given.clear()
    with pytest.raises(ValueError, match=words):
        world.backend.forward(q, k, v, about, batch)
    assert not world.pool.given


def test_queries_that_are_none_are_refused_by_name() -> None:
    world, requests = filled()
    batch = world.batch("decode", requests, [1] * 4)
    world.backend.init_forward_metadata(batch)
    with pytest.raises(TypeError, match=r"q: expected \[tokens, 64\], got NoneType"):
        world.backend.forward(None, None, None, world.layers[0], batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["q", "k", "v", "v width", "out", "sinks"])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_nothing_is_stored_where_an_argument_does_not_fit(mode: str, bad: str) -> None:
    world, requests = filled()
    batch = world.batch(mode, requests, [1] * 4)
    world.backend.init_forward_metadata(batch)
    q, k, v = world.inputs(4, world.layers[0])
    given = {"q": q, "k": k, "v": v}
    if bad == "sinks":
        given["sinks"] = torch.zeros(3, device=DEVICE)
    elif bad == "v width":
        given["v"] = v[..., :8]
    elif bad == "out":
        batch._attn_output = torch.zeros(5, 64, device=DEVICE)
    else:
        given[bad] = given[bad][:3]
    world.pool.given.clear()
    with pytest.raises((ValueError, TypeError), match=r"^(q|k|v|out|_attn_output|sinks): expected"):
        world.backend.forward(**given, layer=world.layers[0], forward_batch=batch)
    assert not world.pool.given


def test_a_deterministic_extend_reads_what_its_caller_has_stored() -> None:
    change = World().runner.server_args
    change.enable_deterministic_inference = True
    world, requests = filled(changes={"server_args": change})
    batch = world.batch("extend", requests, [2] * 4)
    world.backend.init_forward_metadata(batch)
    results = world.run(batch, 8)
    about, q, k, v, out = results[0]
    again = world.backend.forward_extend(q, k, v, about, batch, save_kv_cache=False)
    assert torch.equal(again.view_as(out), out)


def test_buffers_that_graphs_have_baked_in_are_not_replaced() -> None:
    world, _ = captured("mha", "decode")
    with pytest.raises(RuntimeError, match="init_cuda_graph_state: graphs have baked the buffers in"):
        world.backend.init_cuda_graph_state(8, 8)


def test_a_capture_larger_than_its_memory_is_refused() -> None:
    world, requests = filled()
    world.backend.init_cuda_graph_state(4, 8)
    with pytest.raises(ValueError, match="batch_size: 4 requests x 3 query tokens, .* max_num_tokens 8"):
        world.backend.init_forward_metadata_out_graph(
            world.batch("verify", requests, [3] * 4, draft_token_num=3), in_capture=True
        )
    world, requests = filled()
    world.backend.init_cuda_graph_state(4, 16)
    with pytest.raises(ValueError, match="draft_token_num: 4 drafts a request, the mask's buffer was made for 3"):
        world.backend.init_forward_metadata_out_graph(
            world.batch("verify", requests, [4] * 4, draft_token_num=4), in_capture=True
        )


@pytest.mark.parametrize("in_capture", [True, False])
@pytest.mark.parametrize("kind", ["mha", "sliding"])
def test_a_deterministic_draft_extend_without_write_slots_is_refused(kind: str, in_capture: bool) -> None:
    """Its lists name the new tokens by them."""
    change = World().runner.server_args
    change.enable_deterministic_inference = True
    world, requests = captured(kind, "draft extend", changes={"server_args": change})
    batch = world.batch("draft extend", requests, [3] * 4, draft_token_num=3)
    batch.out_cache_loc = None
    with pytest.raises(ValueError, match="out_cache_loc: expected where the new tokens go, got None"):
        world.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)


def test_a_deterministic_draft_extend_captured_with_few_write_slots_serves_more() -> None:
    change = World().runner.server_args
    change.enable_deterministic_inference = True
    world, requests = filled(changes={"server_args": change})
    world.backend.init_cuda_graph_state(4, 16)
    first = padded(world.batch("draft extend", [], [], draft_token_num=3), 3)
    first.out_cache_loc = first.out_cache_loc[:2]
    world.backend.init_forward_metadata_out_graph(first, in_capture=True)
    accepted = torch.tensor([3] * 4, dtype=torch.int32, device=DEVICE)
    batch = world.batch("draft extend", requests, [3] * 4, draft_token_num=3, extend_seq_lens_tensor=accepted)
    world.backend.init_forward_metadata_out_graph(batch)
    world.check(world.run(batch, 12), requests, [3] * 4)


def test_a_draft_extend_without_its_lengths_is_replayed_never() -> None:
    world, requests = captured("mha", "draft extend")
    batch = world.batch("draft extend", requests, [3] * 4, draft_token_num=3)
    batch.extend_seq_lens = None
    with pytest.raises(ValueError, match="extend_seq_lens: expected how many tokens each request has new, got None"):
        world.backend.init_forward_metadata_out_graph(batch)


def test_a_mask_that_lies_askew_in_the_graphs_own_bytes_is_refused() -> None:
    world, requests = captured("mha", "verify")
    batch, mask = tree_batch(world, requests), world.backend.verify_mask
    assert mask is not None
    bits = batch.spec_info.custom_mask.shape[0]
    batch.spec_info.custom_mask = mask.buffer[5 : bits + 5]
    with pytest.raises(ValueError, match=r"custom_mask: lies in verify_mask.buffer, but not at its beginning"):
        world.backend.init_forward_metadata_out_graph(batch)


def test_a_replay_without_write_slots_finds_none_of_an_earlier_step() -> None:
    world, requests = captured("sliding", "decode")
    world.backend.init_forward_metadata_out_graph(world.batch("decode", requests, [1] * 4))
    batch = world.batch("decode", requests, [1] * 4)
    batch.out_cache_loc = None
    world.backend.init_forward_metadata_out_graph(batch)
    loc = world.backend.forward_metadata.swa_out_cache_loc
    assert loc is not None and not loc.any()


def test_planning_by_forward_batches_does_not_wait() -> None:
    """Lengths live on the device alone; what the host is given, it may read."""
    for mode, new in (("decode", 1), ("verify", 3), ("extend", 2)):
        world = World("sliding", engine="triton")
        requests = [world.request(n) for n in LENS]
        spec = {"draft_token_num": 3} if mode == "verify" else {}
        first, batch = (world.batch(mode, requests, [new] * 4, known=False, **spec) for _ in range(2))
        world.backend.init_forward_metadata(first)
        with nothing_waits(batch.seq_lens.new_zeros(0)):
            world.backend.init_forward_metadata(batch)
