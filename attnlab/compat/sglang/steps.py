"""How a step is made from a forward batch: the one place, whichever memory its lists lie in.

Reference: init_forward_metadata and the graph's update functions of triton_backend.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.checks import positive, require, tensor
from attnlab.compat.sglang.adapt import Given, Runner
from attnlab.compat.sglang.arguments import INTEGERS, split_lane
from attnlab.compat.sglang.lists import ListMaker, Lists, padded, translate
from attnlab.compat.sglang.memory import Memory
from attnlab.compat.sglang.metadata import Draft, ForwardMetadata, Reads, Step
from attnlab.compat.sglang.splitting import Splitting
from attnlab.engines import Engine
from attnlab.mask import CAUSAL, CustomMask
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout, positions_behind
from attnlab.plan.plans import ExtendLane, Lane, Queries


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMaker:
    """Makes steps. `split_verify`: the cached keys of a verify are split like a decode's."""

    runner: Runner
    engine: Engine
    splitting: Splitting
    num_draft_tokens: int | None
    split_verify: bool

    @property
    def lists(self) -> ListMaker:
        """Makes the slot lists."""
        return ListMaker(runner=self.runner, engine=self.engine)

    def make(
        self, given: Given, memory: Memory, *, reqs: int, draft: Draft | None = None, masked: bool = False
    ) -> Step:
        """Return the step of a batch, with rows of length 0 up to `reqs`.

        `draft`: one step of several whose lists were made at once. `masked`: a verify reads a mask, a causal one where
        the batch brings none.
        """
        self._check_columns(given)
        match given.mode:
            case "decode":
                return self._decode(given, memory, reqs, draft)
            case "verify":
                return self._verify(given, memory, reqs, masked)
            case _:
                return self._extend(given, memory, reqs)

    def _check_columns(self, given: Given) -> None:
        """Raise ValueError where the host knows of a request that is longer than the table is wide."""
        width = self.runner.table.shape[1]
        longest = given.longest or 0
        require(longest <= width, f"seq_lens: a request of {longest:,} tokens, req_to_token has {width:,} columns")

    def each(self, given: Given) -> int:
        """Return the query tokens of a request in a verify, or in a graph's draft-extend."""
        each = given.drafts or self.num_draft_tokens
        if each is None:
            raise ValueError(
                "draft_token_num: neither the batch's spec_info nor speculative_num_draft_tokens says how many drafts "
                "a request has"
            )
        return positive("draft_token_num", each)

    # --- modes ----------------------------------------------------------------------------------------------------

    def _decode(self, given: Given, memory: Memory, reqs: int, draft: Draft | None) -> Step:
        width, lists = self.runner.window + 1, self.lists
        rows, lens = padded(given.rows, given.reqs, reqs), padded(given.lens, given.reqs, reqs)
        counts = out_loc = None
        if draft is not None:
            window = lists.tails(draft.indptr, draft.indices, width, memory)
            translate(draft.indices, draft.indptr[-1], self.runner.physical)
            full = Lists(indptr=draft.indptr, slots=draft.indices, start=torch.zeros_like(draft.indptr[1:]))
            counts = draft.counts
        elif given.lists is not None:  # as they are
            require(
                not self.runner.window or self.runner.physical is None,
                "spec_info.kv_indices: lists of one id space, but layers with a window are read in another one than "
                "those without; draft with TritonMultiStepDraftBackend, which has lists for both",
            )
            indptr, indices = lists.given(*given.lists, memory)
            window = lists.tails(indptr, indices, width, memory)
            full = Lists(indptr=indptr, slots=indices, start=torch.zeros_like(indptr[1:]).int())
        else:
            full = lists.full(rows, lens, given.total, memory)
            window = lists.window(rows, lens, width, memory)
        branches = full.indptr.shape[0] - 1
        if counts is None:
            counts = memory.take("num_kv_splits", branches, torch.int32)
            self.splitting.fill(counts, lens if given.lists is None else given.lens[: given.reqs])
        loc = given.out_loc
        if draft is not None:
            loc = out_loc = None if draft.out_loc is None else memory.take("out_cache_loc", branches, torch.int64)
            if out_loc is not None and draft.out_loc is not None:
                out_loc.copy_(draft.out_loc)
        return self._step(
            given,
            memory,
            full=full,
            window=window,
            counts=counts,
            tokens=branches,
            locations=lists.locations(loc, branches, memory),
            out_loc=out_loc,
        )

    def _verify(self, given: Given, memory: Memory, reqs: int, masked: bool) -> Step:
        each, lists = self.each(given), self.lists
        rows, prefix = padded(given.rows, given.reqs, reqs), padded(given.lens, given.reqs, reqs)
        full = lists.full(rows, prefix, given.total, memory)
        window = lists.window(rows, prefix, self.runner.window, memory)
        indptr = uniform(memory, reqs, each)
        mask_indptr = memory.take("mask_indptr", reqs + 1, torch.int64)
        torch.cumsum(each * (prefix.long() + each), 0, out=mask_indptr[1:])
        bits = self._bits(given, memory, mask_indptr, prefix, each, masked=masked)
        counts = memory.take("num_kv_splits", reqs, torch.int32) if self.split_verify else None
        if counts is not None:
            self.splitting.fill(counts, prefix)
        tokens = reqs * each
        return self._step(
            given,
            memory,
            full=full,
            window=window,
            counts=counts,
            tokens=tokens,
            locations=lists.locations(given.out_loc, tokens, memory),
            queries=Queries(
                indptr=indptr,
                positions=self._positions(given, memory, prefix, indptr, tokens),
                ordered=bits is None,
                most=each,
                mask=CAUSAL if bits is None else CustomMask(bits=bits, cached_visible=True),
                mask_indptr=mask_indptr,
            ),
        )

    def _extend(self, given: Given, memory: Memory, reqs: int) -> Step:
        lists, rows = self.lists, padded(given.rows, given.reqs, reqs)
        if memory.fixed:  # a graph has the draft window's query tokens in every row, however many were accepted
            each, known = self.each(given), given.draft_new if given.draft_new is not None else given.new
            lens = padded(given.lens, given.reqs, reqs)
            new = torch.zeros_like(lens) if known is None else padded(known, given.reqs, reqs).to(lens.dtype)
            prefix, total, tokens = (lens - new).clamp(min=0), None, reqs * each
            indptr = uniform(memory, reqs, each)
        else:
            if given.prefix is None or given.new is None:
                raise ValueError(
                    "extend_prefix_lens, extend_seq_lens: expected the cached and the new tokens of each request, got "
                    "None"
                )
            prefix, new = padded(given.prefix, given.reqs, reqs), padded(given.new, given.reqs, reqs)
            total, tokens = given.prefix_total, _tokens(given)
            each = tokens if given.most_new is None else given.most_new
            indptr = memory.take("qo_indptr", reqs + 1, torch.int32)
            torch.cumsum(new, 0, dtype=torch.int32, out=indptr[1:])
        full = lists.full(rows, prefix, total, memory)
        window = lists.window(rows, prefix, self.runner.window, memory)
        return self._step(
            given,
            memory,
            full=full,
            window=window,
            counts=None,
            tokens=tokens,
            locations=lists.locations(given.out_loc, tokens, memory),
            queries=Queries(
                indptr=indptr,
                positions=positions_behind(prefix.int(), indptr, tokens=tokens),
                ordered=True,
                most=min(each, tokens),
                mask=CAUSAL,
                mask_indptr=torch.zeros(reqs + 1, dtype=torch.int64, device=rows.device),
            ),
        )

    # --- parts ----------------------------------------------------------------------------------------------------

    def _step(
        self,
        given: Given,
        memory: Memory,
        *,
        full: Lists,
        window: Lists | None,
        counts: Tensor | None,
        tokens: int,
        locations: tuple[Tensor | None, Tensor | None],
        queries: Queries | None = None,
        out_loc: Tensor | None = None,
    ) -> Step:
        """Return the record and what engines read; lists with `counts` are split."""
        window_counts = None
        if counts is not None and window is not None:
            window_counts = memory.take("window_num_kv_splits", counts.shape[0], torch.int32)
            self.splitting.fill(window_counts, window.lens)
        one_pass = self.runner.deterministic and queries is not None and given.mode != "verify"
        swa_loc, physical = locations
        loc = given.out_loc if physical is None else physical
        window_loc = loc if swa_loc is None else swa_loc
        reads = Reads(
            full=self._lane(full, counts, queries, loc if one_pass else None),
            sliding=None
            if window is None
            else self._lane(window, window_counts, queries, window_loc if one_pass else None),
            queries=queries,
            one_pass=one_pass,
        )
        split, other_dim = counts is not None, self.runner.v_dim != self.runner.sliding_v_dim
        scratch = memory.scratch(tokens if split else 0, sliding=False)
        sliding = memory.scratch(tokens if split else 0, sliding=True) if other_dim else scratch
        mask = queries.bits if queries is not None else None
        metadata = ForwardMetadata(
            attn_logits=scratch.logits if split else None,
            attn_lse=scratch.lse if split else None,
            max_extend_len=None if queries is None else queries.most,
            num_kv_splits=counts,
            kv_indptr=full.indptr,
            kv_indices=full.slots,
            qo_indptr=None if queries is None else queries.indptr,
            custom_mask=mask,
            mask_indptr=None if mask is None or queries is None else queries.mask_indptr,
            window_kv_indptr=None if window is None else window.indptr,
            window_kv_indices=None if window is None else window.slots,
            window_num_kv_splits=window_counts,
            window_kv_offsets=None if window is None or queries is None else window.start,
            swa_attn_logits=sliding.logits if split and other_dim else None,
            swa_out_cache_loc=swa_loc,
            out_cache_loc_full_physical=physical,
        )
        return Step(
            mode=given.mode,
            metadata=metadata,
            reads=reads,
            scratch=scratch,
            sliding_scratch=sliding,
            out_loc=out_loc,
        )

    def _lane(
        self, lists: Lists, counts: Tensor | None, queries: Queries | None, loc: Tensor | None
    ) -> ExtendLane | Lane:
        """Return lists split as `counts` says; or, with `loc`, ended by the new tokens' slots; or as they are."""
        layout = lists.layout
        if counts is not None:
            return split_lane(layout, counts, most=self.splitting.most, kv_heads=self.runner.kv_heads)
        if loc is not None and queries is not None:
            index = layout.index
            slots, indptr = self.engine.ops.join(
                first=index.slots, first_indptr=index.indptr, second=loc.long(), second_indptr=queries.indptr
            )
            layout = KVLayout(
                index=KVIndex(indptr=indptr, slots=slots, space=index.space),
                start=layout.start,
                start_visible=layout.start_visible,
                sight=layout.sight,
            )
        return ExtendLane(layout=layout, write_slots=layout.index.slots[:0])  # the pool stores, not the plan

    def _bits(
        self, given: Given, memory: Memory, offsets: Tensor, prefix: Tensor, each: int, *, masked: bool
    ) -> Tensor | None:
        """Return the bytes of a verify's mask; in a graph's buffer, where they may lie already."""
        if given.mask is None and not masked:
            return None
        new = torch.full_like(prefix, each, dtype=torch.int32)
        if given.mask is None:
            buffer = memory.slots("custom_mask", prefix.shape[0] * each * each)
            self.engine.ops.write_causal(buffer, offsets, new, prefix.int() + new, most=each)
            return buffer
        tensor("custom_mask", given.mask, shape=["pairs"], dtype=(torch.uint8, torch.bool), device=prefix.device)
        bits = given.mask.contiguous().view(torch.uint8)
        if not memory.fixed:
            # Of lengths that the device alone knows, there are at least the drafts among themselves.
            least = each * ((given.total or 0) + given.reqs * each)
            require(
                bits.shape[0] >= least,
                f"custom_mask: expected at least {least:,} entries, drafts x (cached + drafts) of each request, got "
                f"{bits.shape[0]:,}",
            )
            return bits
        buffer, live = memory.slots("custom_mask", bits.shape[0]), bits.shape[0]
        if bits.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            buffer[:live].copy_(bits)
        else:
            at_front = bits.data_ptr() == buffer.data_ptr()
            require(
                at_front, "custom_mask: lies in verify_mask.buffer, but not at its beginning; fill it from the front"
            )
        return buffer

    def _positions(self, given: Given, memory: Memory, prefix: Tensor, indptr: Tensor, tokens: int) -> Tensor:
        """Return where drafts stand: where the batch says, as in a tree siblings share a position; else in a row."""
        behind = positions_behind(prefix.int(), indptr, tokens=tokens)
        if given.positions is not None:
            known = tensor("positions", given.positions, shape=["tokens"], dtype=INTEGERS)[:tokens]
            behind[: known.shape[0]] = known.int()
        return behind


def uniform(memory: Memory, reqs: int, each: int) -> Tensor:
    """Return the offsets of requests that have `each` query tokens, all of them."""
    indptr = memory.take("qo_indptr", reqs + 1, torch.int32)
    indptr.copy_(torch.arange(0, (reqs + 1) * each, each, dtype=torch.int32, device=indptr.device))
    return indptr


def _tokens(given: Given) -> int:
    """Return the new tokens of an extend, as the host knows them: one write slot each."""
    if given.out_loc is None:
        raise ValueError("out_cache_loc: expected where the new tokens go, got None")
    return given.out_loc.shape[0]
