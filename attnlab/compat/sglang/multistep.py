"""`TritonMultiStepDraftBackend`: the steps of top-k drafting, whose lists are made in one launch."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from attnlab.checks import positive, require
from attnlab.compat.sglang import values
from attnlab.compat.sglang.adapt import Given, read
from attnlab.compat.sglang.backend import TritonAttnBackend
from attnlab.compat.sglang.drafts import (
    draft_kv_indices_buffer_width,
    draft_kv_indices_used_len,
    generate_draft_decode_kv_indices,
)
from attnlab.compat.sglang.lists import padded
from attnlab.compat.sglang.metadata import Draft
from attnlab.plan.draft import draft_room


class TritonMultiStepDraftBackend:
    """One backend for each draft step but the last, which drafts no further: `attn_backends`.

    Branch t of sequence s is row s * topk + t of a step. `kv_indptr` `[steps, max_requests * topk + 1]` has a row for
    each step, its first column 0. Splits are counted once, from the sequences' `seq_lens`. Options are those of
    `TritonAttnBackend`.

    Differs from the original: draft models may have windows; the write slots `out_cache_loc`, `[branches, steps]`, are
    translated for every step.
    """

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int, **options: Any) -> None:
        self.topk = positive("topk", topk)
        self.speculative_num_steps = positive("speculative_num_steps", speculative_num_steps)
        self.req_to_token = read(model_runner, "model_runner.req_to_token_pool.req_to_token")
        self.page_size = positive("page_size", read(model_runner, "model_runner.page_size"))
        size = positive("req_to_token_pool.size", read(model_runner, "model_runner.req_to_token_pool.size"))
        rows = size * topk
        self.kv_indptr = torch.zeros(
            speculative_num_steps, rows + 1, dtype=torch.int32, device=self.req_to_token.device
        )
        signature(TritonAttnBackend).bind(model_runner, **options)  # also where no step needs a backend
        self.attn_backends = [
            TritonAttnBackend(model_runner, skip_prefill=True, kv_indptr_buf=self.kv_indptr[i], **options)
            for i in range(speculative_num_steps - 1)
        ]
        self._graph: tuple[Tensor, Tensor] | None = None
        self._max_reqs = 0
        self._captured: dict[int, bool] = {}  # by requests: whether the batch brought write slots

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan all steps of a draft that runs as it comes: each has lists of its own."""
        if self.attn_backends:
            given, device = self._given(forward_batch), self.req_to_token.device
            branches = given.reqs * self.topk
            total = given.reqs * self.req_to_token.shape[1] if given.total is None else given.total
            width = total * self.topk + branches * self.speculative_num_steps
            slots = torch.zeros(self.speculative_num_steps, width, dtype=torch.int64, device=device)
            indptr = torch.zeros_like(self.kv_indptr[:, : branches + 1])
            counts = torch.zeros(branches, dtype=torch.int32, device=device)
            self._plan(given, slots, indptr, counts, graph=False, in_capture=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what all steps of captured drafts share: a block of slots with a row a step, and the counts.

        `max_num_tokens` counts branches, max_bs x topk of them.
        """
        if not self.attn_backends:
            return
        device, steps = self.req_to_token.device, self.speculative_num_steps
        branches = positive("max_bs", max_bs) * self.topk
        require(
            max_num_tokens >= branches,
            f"max_num_tokens: expected at least {branches} branches, {max_bs} x {self.topk}, got {max_num_tokens}",
        )
        require(
            not self._captured,
            "init_cuda_graph_state: graphs have baked the buffers in that were made before; build a new backend",
            RuntimeError,
        )
        # Drafts may lie behind the longest context, so that the table's columns say how long a list gets.
        width = draft_kv_indices_buffer_width(max_bs, self.topk, self.req_to_token.shape[1])
        slots = torch.zeros(steps, width, dtype=torch.int64, device=device)
        self._max_reqs = max_bs
        counts = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._graph = slots, counts
        for backend, row in zip(self.attn_backends, slots, strict=False):
            backend.init_cuda_graph_state(
                max_bs, max_num_tokens, kv_indices_buf=row, cuda_graph_num_kv_splits_buf=counts
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the shared buffers for all steps: before they are captured, and before every replay."""
        if not self.attn_backends:
            return
        if self._graph is None:
            raise RuntimeError("graph: there are no buffers yet; call init_cuda_graph_state(max_bs, max_num_tokens)")
        slots, counts = self._graph
        given = self._given(forward_batch)
        require(
            not in_capture or given.reqs <= self._max_reqs,
            f"batch_size: {given.reqs} requests, init_cuda_graph_state was given max_bs {self._max_reqs}",
        )
        if not in_capture:
            given = self._padded(given)
        self._plan(given, slots, self.kv_indptr, counts, graph=True, in_capture=in_capture)
        if in_capture:
            self._captured[given.reqs] = given.out_loc is not None

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Pass the hook on to every step's backend."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def _given(self, forward_batch: Any) -> Given:
        given = Given.of(forward_batch)
        require(given.mode == "decode", f"forward_mode: draft steps are decodes, got {given.mode}")
        return given

    def _padded(self, given: Given) -> Given:
        """Return the batch with rows of length 0 up to the next larger capture."""
        large = [reqs for reqs in self._captured if reqs >= given.reqs]
        require(
            bool(large),
            f"batch_size: captured were drafts of {sorted(self._captured)} requests, got {given.reqs}",
        )
        reqs = min(large)
        came, baked = given.out_loc is not None, self._captured[reqs]
        require(
            came == baked,
            f"out_cache_loc: the step was captured {'with' if baked else 'without'} write slots, this batch comes "
            f"{'with' if came else 'without'}; both must be alike",
        )
        locations = None
        if given.out_loc is not None:
            full = reqs * self.topk * self.speculative_num_steps
            live = self._checked_slots(given.out_loc, given.reqs, full)
            locations = torch.nn.functional.pad(live, (0, full - live.shape[0]))
        return replace(
            given,
            reqs=reqs,
            rows=padded(given.rows, given.reqs, reqs),
            lens=padded(given.lens, given.reqs, reqs),
            out_loc=locations,
        )

    def _plan(
        self, given: Given, slots: Tensor, indptr: Tensor, counts: Tensor, *, graph: bool, in_capture: bool
    ) -> None:
        seqs, steps, topk = given.reqs, self.speculative_num_steps, self.topk
        branches = seqs * topk
        require(
            branches < indptr.shape[1],
            f"batch_size: {seqs} requests x {topk} branches, the buffers have room for {indptr.shape[1] - 1} branches",
        )
        self._check_columns(given)
        if given.total is not None:
            used = draft_kv_indices_used_len(given.total, topk, branches, steps - 1)
            require(
                used <= slots.shape[1],
                f"seq_lens: {given.total:,} tokens x {topk} branches and their drafts take {used:,} slots a step, the "
                f"buffers have {slots.shape[1]:,}; call init_cuda_graph_state with a larger max_bs",
            )
        locations = self._write_slots(given, branches)
        for backend in self.attn_backends:
            backend.check_draft_step(given, branches, graph=graph, in_capture=in_capture)
        for backend in self.attn_backends if graph else ():
            backend.drop_step()  # what fails from here on has overwritten it
        lens = given.lens[:seqs]
        if seqs:
            generate_draft_decode_kv_indices[(steps, seqs, topk)](
                given.rows,
                self.req_to_token,
                given.lens,
                slots,
                indptr,
                lens.repeat_interleave(topk),
                self.req_to_token.stride(0),
                slots.stride(0),
                indptr.stride(0),
                _power_of_2(seqs),
                _power_of_2(steps),
                _power_of_2(branches),
                self.page_size,
                engine=self.attn_backends[0].engine,
            )
            self.attn_backends[0].get_num_kv_splits(counts[:branches], lens)
        for i, backend in enumerate(self.attn_backends):
            draft = Draft(
                indptr=indptr[i, : branches + 1],
                indices=slots[i],
                counts=counts[:branches],
                out_loc=None if locations is None else locations[:, i].contiguous(),
            )
            backend.init_draft_step(given, draft, graph=graph, in_capture=in_capture)

    def _check_columns(self, given: Given) -> None:
        """Raise ValueError where the host knows, or sees, of drafts that would lie beyond the table's columns.

        Of two requests the shorter one may end further out: with pages, room grows with what a page's last has left.
        """
        width, room = self.req_to_token.shape[1], {"topk": self.topk, "steps": self.speculative_num_steps}
        lens = given.lens[: given.reqs]
        seen = lens.tolist() if values.readable(lens) else ()
        for cached in {n for n in (*(given.known_lens or ()), *seen) if n > 0}:
            ends = cached + draft_room(cached, **room, page_size=self.page_size)
            require(
                ends <= width,
                f"seq_lens: a request of {cached:,} tokens, whose drafts end at column {ends:,}, req_to_token has "
                f"{width:,} columns",
            )

    def _write_slots(self, given: Given, branches: int) -> Tensor | None:
        """Return the slots that drafts are written to, `[branches, steps]`; None where the batch brings none yet.

        Each step's own then come with the batch of that step.
        """
        if given.out_loc is None:
            return None
        loc = self._checked_slots(given.out_loc, given.reqs, branches * self.speculative_num_steps)
        return loc.view(branches, self.speculative_num_steps)

    def _checked_slots(self, loc: Tensor, reqs: int, padded_to: int) -> Tensor:
        """Return write slots if they are those of `reqs` requests, or of as many as were captured."""
        live = reqs * self.topk * self.speculative_num_steps
        require(
            loc.dim() == 1 and loc.shape[0] in (live, padded_to),
            f"out_cache_loc: expected {live} write slots, {reqs} requests x {self.topk} branches x "
            f"{self.speculative_num_steps} steps, got {list(loc.shape)}; or None, where each step brings its own",
        )
        return loc


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
