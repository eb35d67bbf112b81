"""`TritonAttnBackend`: the original's class over our engines. It plans by forward batch and attends by layer.

Reference: triton_backend.py. A step's lists are made in one place (`StepMaker`), whether it runs as it comes or is
replayed in a CUDA graph; which memory they lie in is the only difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.checks import describe, one_of, positive, require, tensor
from attnlab.compat.sglang.adapt import (
    Given,
    Runner,
    is_sliding,
    mode_of,
    output_of,
    radius_of,
    scales_of,
    spec_of_layer,
    write_mask_of,
)
from attnlab.compat.sglang.arguments import kv_view
from attnlab.compat.sglang.graph_buffers import GraphBuffers
from attnlab.compat.sglang.masks import VerifyMask
from attnlab.compat.sglang.memory import Fresh
from attnlab.compat.sglang.metadata import Draft, ForwardMetadata, Reads, Scratch, Step
from attnlab.compat.sglang.mods import modifier
from attnlab.compat.sglang.records import KVWriteLoc, WriteLoc
from attnlab.compat.sglang.splitting import Splitting
from attnlab.compat.sglang.steps import SEQ_LEN_FILL, StepMaker
from attnlab.compat.sglang.values import check_listed, check_members
from attnlab.engines import Engine, engine_for
from attnlab.mask import CAUSAL
from attnlab.memory.pool import KVView
from attnlab.memory.rows import read_back
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, Parts, VerifyCall
from attnlab.plan.plans import ExtendLane, Lane
from attnlab.spec import AttentionSpec


class TritonAttnBackend:
    """The original's attention backend: metadata once a step, attention once a layer.

    What the original reads from process-wide settings are arguments here, with its defaults. `device_core_count`: the
    multiprocessors that splits are counted with; None asks the device (0, as on a CPU: static splits). `engine` as in
    the package's functions. `kv_indptr_buf` is unread: a step has offsets of its own, or a graph's. `write_loc`: the
    class of the record `(loc, swa_loc, full_loc)` that the pool looks for where a token has slots in storages of its
    own (sliding and unified pools): with SGLang's pools its own `KVWriteLoc`. Other pools are given `loc`, a tensor.

    Differs from the original: windows hold W + 1 keys in every mode (its decode holds W); sliding layers are split by
    their own lengths; a verify is split over its cached keys on every device, with a mask too, unless
    `split_kv_verify` is off; draft models may have windows; the metadata's lists share no memory between steps that
    run as they come. Context parallelism (`dcp_size` > 1) raises NotImplementedError.
    Raises ValueError, naming both settings, where they do not go together; TypeError, naming it, where one lacks.
    On a CPU, where looking costs nothing, rows, lengths and slots that are none raise ValueError.

    What is read from the caller's objects, by SGLang 0.5.23's names. Those in brackets may lack, or be None.

    | object | attributes |
    | --- | --- |
    | `model_runner` | `req_to_token_pool`, `token_to_kv_pool`, `[token_to_kv_pool_allocator]`, `model_config`, |
    | | `server_args`, `sliding_window_size` (a radius; None, -1 or 0: no window), `[gpu_id]`, `[is_draft_worker]`; |
    | | `page_size` for drafting in several steps |
    | `.req_to_token_pool` | `req_to_token` int32 `[size, context]`; `size` for drafting in several steps |
    | `.model_config` | `attention_arch` (its name, MLA or another), `context_len`, `get_max_num_attention_heads()`, |
    | | `get_num_kv_heads(tp_size)`, `[is_encoder_decoder]`, `[swa_v_head_dim]`, with it `v_head_dim` |
    | `.server_args` | `triton_attention_num_kv_splits`, `triton_attention_split_tile_size` (None: unset), |
    | | `enable_deterministic_inference`, `chunked_prefill_size` (None or -1: off) |
    | `.token_to_kv_pool` | `get_key_buffer(layer_id)`, `get_value_buffer(layer_id)`, |
    | | `set_kv_buffer(layer, loc, k, v[, k_scale, v_scale][, dcp_kv_mask=])`, `[start_layer]`, |
    | | `[translate_loc_from_full_to_swa(loc)]`; `get_v_head_dim()` where `hybrid_linear` |
    | `.token_to_kv_pool_allocator` | `[translate_kv_loc_dense(loc)]`, else `[translate_kv_loc(loc)]` |
    | `layer` | `layer_id`, `tp_q_head_num`, `tp_k_head_num`, `qk_head_dim`, `v_head_dim`, `scaling`, `attn_type`, |
    | | `is_cross_attention`, `[sliding_window_size]`, `[logit_cap]`, `[logit_capping_method]`, |
    | | `[xai_temperature_len]`, `[k_scale]`, `[v_scale]`, with them `k_scale_float`, `v_scale_float` |
    | `forward_batch` | `batch_size`, `forward_mode`, `req_pool_indices`, `seq_lens`, `[seq_lens_cpu]`, |
    | | `[seq_lens_sum]`, `[out_cache_loc]`, `[spec_info]`, `[encoder_lens]`, `[positions]`, `[_attn_output]`, |
    | | `[dcp_kv_mask]`; in an extend `extend_prefix_lens`, `extend_seq_lens`, and `[..._cpu]` of both |
    | `.forward_mode` | `is_decode_or_idle()`, `is_target_verify()`, `is_draft_extend_v2()`; else an extend |
    | `.spec_info` | `[kv_indptr]`, `[kv_indices]`, `[custom_mask]`, `[draft_token_num]`, |
    | | `[extend_seq_lens_tensor]` |
    """

    needs_cpu_seq_lens = False

    def __init__(
        self,
        model_runner: Any,
        skip_prefill: bool = False,
        kv_indptr_buf: Tensor | None = None,
        *,
        engine: str | Engine = "triton",
        tp_size: int = 1,
        dcp_size: int = 1,
        speculative_num_draft_tokens: int | None = None,
        static_kv_splits: bool = False,
        deterministic_split_tile_size: int = 256,
        split_kv_verify: bool = True,
        prefill_graph: Literal["off", "whole", "split"] = "off",
        hybrid_linear: bool = False,
        device_kind: Literal["cuda", "hip", "xpu", "cpu"] = "cuda",
        device_core_count: int | None = None,
        write_loc: WriteLoc = KVWriteLoc,
    ) -> None:
        require(
            positive("dcp_size", dcp_size) == 1,
            f"dcp_size: expected 1, got {dcp_size}; get_dcp_lens, create_triton_kv_indices_for_dcp_triton and "
            "cp_lse_ag_out_rs_mha are there for a rank of one's own",
            NotImplementedError,
        )
        one_of("prefill_graph", prefill_graph, ("off", "whole", "split"))
        one_of("device_kind", device_kind, ("cuda", "hip", "xpu", "cpu"))
        self.runner = runner = Runner.of(
            model_runner, tp_size=tp_size, hybrid_linear=hybrid_linear, write_loc=write_loc
        )
        self.engine = engine_for(engine, runner.device)
        self.skip_prefill = skip_prefill
        self.num_draft_tokens = speculative_num_draft_tokens
        self.split_kv_verify = split_kv_verify
        self.bidirectional = not runner.chunked_prefill and prefill_graph in ("off", "whole")
        self.splitting = Splitting.of(
            runner,
            engine=self.engine,
            static=static_kv_splits,
            deterministic_tile=deterministic_split_tile_size,
            cores=device_core_count,
            kind=device_kind,
        )
        self.max_kv_splits = self.splitting.most
        self.maker = StepMaker(
            runner=runner,
            engine=self.engine,
            splitting=self.splitting,
            num_draft_tokens=speculative_num_draft_tokens,
            split_verify=split_kv_verify,
        )
        self._graph: GraphBuffers | None = None
        self._step: Step | None = None

    # --- once a step ----------------------------------------------------------------------------------------------

    @property
    def forward_metadata(self) -> ForwardMetadata:
        """The metadata of the step that was planned last. Raises RuntimeError before the first."""
        return self._planned().metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step that runs as it comes. Raises ValueError where the mode is none of this backend's."""
        given = Given.of(forward_batch)
        self._check_mode(given)
        self.maker.check(given, self._fresh, reqs=given.own_lists)
        self._step = self.maker.make(given, self._fresh, reqs=given.own_lists)

    def check_draft_step(self, given: Given, branches: int, *, graph: bool, in_capture: bool = False) -> None:
        """Raise where a step of so many branches cannot be planned; nothing is written."""
        if graph:
            self._graph_state().place(self.maker, given, branches=branches, in_capture=in_capture)
        else:
            self.maker.check(given, self._fresh, reqs=branches, is_draft=True)

    def init_draft_step(self, given: Given, draft: Draft, *, graph: bool, in_capture: bool = False) -> None:
        """Plan one step of multi-step drafting, whose lists were made together with those of the other steps."""
        branches = draft.indptr.shape[0] - 1
        if graph:
            self._fill(given, draft, branches=branches, in_capture=in_capture)
        else:
            self._step = self.maker.make(given, self._fresh, reqs=branches, draft=draft)

    def drop_step(self) -> None:
        """Forget the step that was planned last: the memory that it lies in is filled with another."""
        self._step = None

    def get_num_kv_splits(self, num_kv_splits: Tensor, seq_lens: Tensor) -> None:
        """Fill `num_kv_splits` int32 `[tokens]` with how many splits each query token's list gets.

        `seq_lens` `[sequences]`; consecutive tokens share a sequence. Raises ValueError unless tokens are a multiple of
        the sequences. A sequence of length 0 gets 0 where lengths are looked at.
        """
        self.splitting.fill(num_kv_splits, seq_lens)

    # --- CUDA graphs ----------------------------------------------------------------------------------------------

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: Tensor | None = None,
        cuda_graph_num_kv_splits_buf: Tensor | None = None,
    ) -> None:
        """Allocate what all captured steps share, for the largest batch; buffers may be handed in.

        Raises ValueError, with the bytes and what lowers them, where a GPU has not that much memory free.
        """
        require(
            self._graph is None or not self._graph.is_captured,
            "init_cuda_graph_state: graphs have baked the buffers in that were made before; build a new backend",
            RuntimeError,
        )
        self._graph = GraphBuffers(
            runner=self.runner,
            splitting=self.splitting,
            max_bs=max_bs,
            max_num_tokens=max_num_tokens,
            drafts=None if self.skip_prefill else self.num_draft_tokens,
            kv_indices=kv_indices_buf,
            counts=cuda_graph_num_kv_splits_buf,
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the shared buffers for a step: before it is captured, and before every replay.

        A replay of fewer requests than were captured is padded to the next larger capture. Raises ValueError, with both
        numbers, where there is none; where the draft count is another; where a mask comes to a step captured without.
        """
        given = Given.of(forward_batch)
        self._check_mode(given)
        self._fill(given, None, branches=None, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing: everything is filled outside of the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length that padded rows may have, the original's.

        A 0 is served too, and is better: rows of 1 count as the shortest, by which the heuristic splits all others.
        """
        return SEQ_LEN_FILL

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The very bytes that a captured verify reads; None before `init_cuda_graph_state`, or without drafts."""
        return None if self._graph is None else self._graph.verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: a verify's buffers are filled when it is planned."""

    # --- once a layer ---------------------------------------------------------------------------------------------

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """Attend as the batch's mode says; an idle batch gives zeros `[tokens, heads * v_dim]`."""
        if forward_batch.batch_size == 0:
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if mode_of(forward_batch) == "decode" else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)

    @torch.no_grad()
    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Tensor:
        """Store the new tokens' K and V, then attend with one query a row; return `[tokens, heads * v_dim]`.

        `q`, `k`, `v` are `[tokens, heads * dim]` or `[tokens, heads, dim]`.
        """
        step = self._planned()
        q = _heads("q", q, layer.tp_q_head_num, layer.qk_head_dim)
        spec, aux = self._attention(layer, q, sinks, score_mod, aux_tensors)
        view = self._view(layer)
        lane = self._lane(step.reads, layer, spec, view)
        if not isinstance(lane, Lane) or step.mode != "decode":
            raise ValueError(f"forward_decode: the step was planned for {step.mode}; call forward_extend")
        out = _output(forward_batch, q, spec)
        call = DecodeCall(
            layer=layer.layer_id,
            spec=spec,
            view=view,
            lane=lane,
            partials=self._scratch(step, layer).partials(lane, spec, queries=1, layer=layer.layer_id),
            q=q,
            out=out,
            sinks=sinks,
            aux=aux,
        )
        if save_kv_cache:
            self._store(step, layer, forward_batch, view, *self._rows(layer, q, k, v))
        self.engine.decode(call)
        return out.view(out.shape[0], spec.heads * spec.v_dim)

    @torch.no_grad()
    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Tensor:
        """Store the new tokens' K and V, then attend with each of them; return `[tokens, heads * v_dim]`.

        With `k` and `v` both None what the pool holds for the new tokens is read back; one of them alone is an error.
        A verify is split over its cached keys; a deterministic extend reads one list of cached and new keys.
        """
        step = self._planned()
        queries = step.reads.queries
        if queries is None:
            raise ValueError(f"forward_extend: the step was planned for {step.mode}; call forward_decode")
        q = _heads("q", q, layer.tp_q_head_num, layer.qk_head_dim)
        spec, aux = self._attention(layer, q, sinks, score_mod, aux_tensors)
        view = self._view(layer)
        lane = self._lane(step.reads, layer, spec, view)
        cross = bool(layer.is_cross_attention)
        require(
            (k is None) == (v is None),
            f"k, v: expected both, or None for both, got {describe(k)} and {describe(v)}",
        )
        new = None if k is None else self._rows(layer, q, k, v)
        keys: Tensor | None = None
        values: Tensor | None = None
        if not cross and not step.reads.one_pass:  # whose lists hold all keys
            if new is None:
                keys, values = self._read(step, layer, forward_batch, q, view)
            else:
                keys, values = new[0], new[1][..., : spec.v_dim]
        out = _output(forward_batch, q, spec)
        queries = replace(queries, mask=CAUSAL) if cross else queries
        common: dict[str, Any] = {
            "layer": layer.layer_id,
            "spec": spec,
            "view": view,
            "lane": lane,
            "queries": queries,
            "q": q,
            "out": out,
            "sinks": sinks,
            "aux": aux,
            "batch_invariant": self.runner.deterministic,
        }
        call: VerifyCall | ExtendCall
        if isinstance(lane, Lane) and not cross:
            scratch = self._scratch(step, layer)
            partials = scratch.partials(lane, spec, queries=queries.most, layer=layer.layer_id)
            call = VerifyCall(**common, partials=partials, k=keys, v=values)
        else:
            # In one pass the new tokens are read from the pool: from where they are stored here, or were by the caller.
            parts: Parts = "cached" if cross else "all"
            one_pass = step.reads.one_pass and not cross
            call = ExtendCall(**common, one_pass=one_pass, k=keys, v=values, parts=parts)
        if new is not None and save_kv_cache:
            self._store(step, layer, forward_batch, view, *new)
        if isinstance(call, VerifyCall):
            self.engine.verify(call)
        else:
            self.engine.extend(call)
        return out.view(out.shape[0], spec.heads * spec.v_dim)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _fresh(self) -> Fresh:
        runner = self.runner
        v_dims = (runner.v_dim, runner.sliding_v_dim)
        return Fresh(device=runner.device, heads=runner.heads, splits=self.max_kv_splits, v_dims=v_dims)

    def _planned(self) -> Step:
        if self._step is None:
            raise RuntimeError("forward_metadata: no step was planned yet; call init_forward_metadata(forward_batch)")
        return self._step

    def _fill(self, given: Given, draft: Draft | None, *, branches: int | None, in_capture: bool) -> None:
        """Plan a step in the memory of a graph. One that is refused leaves the step before it as it was."""
        state = self._graph_state()
        place = state.place(self.maker, given, branches=branches, in_capture=in_capture)
        self.drop_step()  # what fails from here on has overwritten it
        self._step = state.step(self.maker, given, place, draft=draft)

    def _graph_state(self) -> GraphBuffers:
        if self._graph is None:
            raise RuntimeError("graph: there are no buffers yet; call init_cuda_graph_state(max_bs, max_num_tokens)")
        return self._graph

    def _check_mode(self, given: Given) -> None:
        require(
            given.mode == "decode" or not self.skip_prefill,
            f"forward_mode: this backend was built with skip_prefill=True and plans decodes alone, got {given.mode}",
        )

    def _attention(
        self, layer: Any, q: Tensor, sinks: Tensor | None, score_mod: Any, aux_tensors: Any
    ) -> tuple[AttentionSpec, Tensor | None]:
        mod, aux = modifier(score_mod, aux_tensors, q=q, engine=self.engine)
        spec = spec_of_layer(layer, bidirectional=self.bidirectional, has_sinks=sinks is not None, mod=mod)
        return spec, aux

    def _view(self, layer: Any) -> KVView:
        k, v = self.runner.buffers(layer)
        k_scale, v_scale = scales_of(layer)
        shared = self.runner.mla and k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
        return kv_view(k, v, k_scale=k_scale, v_scale=v_scale, has_mla=shared)

    def _lane(self, reads: Reads, layer: Any, spec: AttentionSpec, view: KVView) -> ExtendLane | Lane:
        """Return the lists that a layer reads, said to be of its sight.

        Raises ValueError, on a CPU, where they hold slots that its storage has not.
        """
        lane = reads.full
        if is_sliding(layer):
            require(
                reads.sliding is not None,
                f"layer {layer.layer_id}: has a window, but the model runner's sliding_window_size is none",
            )
            radius, listed = radius_of(layer), self.runner.window
            require(
                radius == listed,
                f"layer {layer.layer_id}: sliding_window_size {radius}, the model runner's is {listed}, by which lists "
                "are cut; a backend serves layers of one window",
            )
            lane = reads.sliding if reads.sliding is not None else lane
        index = lane.layout.index
        check_listed(
            "kv_indices", index.slots, index.indptr, count=view.num_slots, of=f"slots of layer {layer.layer_id}"
        )
        if lane.layout.sight == spec.sight:
            return lane
        return replace(lane, layout=replace(lane.layout, sight=spec.sight))

    def _scratch(self, step: Step, layer: Any) -> Scratch:
        return step.sliding_scratch if is_sliding(layer) else step.scratch

    def _loc(self, step: Step, forward_batch: Any) -> KVWriteLoc:
        metadata = step.metadata
        loc = forward_batch.out_cache_loc if step.out_loc is None else step.out_loc
        if loc is None:
            raise ValueError("out_cache_loc: expected where the new tokens go, got None")
        return KVWriteLoc(loc, metadata.swa_out_cache_loc, metadata.out_cache_loc_full_physical)

    def _store(self, step: Step, layer: Any, forward_batch: Any, view: KVView, k: Tensor, v: Tensor) -> None:
        loc = self._loc(step, forward_batch)
        count = loc.loc.shape[0]
        require(
            count >= k.shape[0], f"out_cache_loc: expected a write slot for each of {k.shape[0]} tokens, got {count}"
        )
        _check_own(_own_slots(layer, loc), view, layer)
        self.runner.store(layer, loc, k, v, mask=write_mask_of(forward_batch))

    def _rows(self, layer: Any, q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the new tokens' keys and values as `[tokens, heads, dim]`, one for every query; raise unless they fit.

        What MLA passes as values may be as wide as its keys.
        """
        if k is None or v is None:
            raise ValueError("k, v: expected the new tokens' keys and values, got None; pass save_kv_cache=False")
        heads = layer.tp_k_head_num
        width = v.shape[-1] // (heads if v.dim() == 2 else 1)
        rows = _heads("k", k, heads, layer.qk_head_dim), _heads("v", v, heads, width)
        fits = width == layer.v_head_dim or (self.runner.mla and width > layer.v_head_dim)
        require(fits, f"v: expected values of {layer.v_head_dim} columns, as layer {layer.layer_id} has, got {width}")
        for name, x in zip("kv", rows, strict=True):
            if layer.is_cross_attention:  # whose keys are an encoder's tokens
                continue
            require(
                x.shape[0] == q.shape[0], f"{name}: expected a row for each of {q.shape[0]} queries, got {x.shape[0]}"
            )
        return rows

    def _read(self, step: Step, layer: Any, forward_batch: Any, q: Tensor, view: KVView) -> tuple[Tensor, Tensor]:
        """Return what the pool holds for the new tokens."""
        own = _own_slots(layer, self._loc(step, forward_batch))
        _check_own(own, view, layer)
        return read_back(view, own.long(), q.dtype)


def _own_slots(layer: Any, loc: KVWriteLoc) -> Tensor:
    """Return the slots of new tokens in a layer's own storage."""
    own = loc.swa_loc if is_sliding(layer) and loc.swa_loc is not None else loc.full_loc
    return loc.loc if own is None else own


def _check_own(slots: Tensor, view: KVView, layer: Any) -> None:
    """Raise ValueError, on a CPU, where new tokens have slots that a layer's storage has not."""
    check_members("out_cache_loc", slots, count=view.num_slots, of=f"slots of layer {layer.layer_id}")


def _heads(name: str, x: Tensor, heads: int, dim: int) -> Tensor:
    """Return `[tokens, heads, dim]` of a tensor that has heads and dimension in one axis, or in two."""
    has_both = isinstance(x, Tensor) and x.dim() == 3
    tensor(name, x, shape=["tokens", heads, dim] if has_both else ["tokens", heads * dim])
    return x if x.dim() == 3 else x.view(x.shape[0], heads, dim)


def _output(forward_batch: Any, q: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the batch's own buffer for the output, or a new one; rows that no query has come out as 0."""
    given = output_of(forward_batch)
    shape = (q.shape[0], spec.heads, spec.v_dim)
    if given is None:
        return q.new_zeros(shape)
    wanted = shape[0] * shape[1] * shape[2]
    require(given.numel() == wanted, f"_attn_output: expected {list(shape)}, got {describe(given)}")
    return given.view(shape)
