"""How a step is made from a forward batch: the one place, whichever memory its lists lie in.

Reference: init_forward_metadata and the graph's update functions of triton_backend.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.checks import positive, require, tensor
from attnlab.compat.sglang.adapt import Given, Runner, check_known
from attnlab.compat.sglang.arguments import INTEGERS, split_lane
from attnlab.compat.sglang.lists import ListMaker, Lists, padded, translate
from attnlab.compat.sglang.memory import Memory
from attnlab.compat.sglang.metadata import Draft, ForwardMetadata, Reads, Step
from attnlab.compat.sglang.splitting import Splitting
from attnlab.compat.sglang.values import check_members, check_offsets
from attnlab.engines import Engine
from attnlab.mask import CAUSAL, CustomMask
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout, positions_behind
from attnlab.plan.plans import ExtendLane, Lane, Queries

SEQ_LEN_FILL = 1
"""The length that a server gives padded rows, the original's."""


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
        """Return the step of a batch that was checked, with lists of length 0 up to `reqs`.

        `draft`: one step of several whose lists were made at once. `masked`: a verify reads a mask, a causal one where
        the batch brings none.
        """
        match given.mode:
            case "decode":
                return self._decode(given, memory, reqs, draft)
            case "verify":
                return self._verify(given, memory, reqs, masked)
            case _:
                return self._extend(given, memory, reqs)

    def check(self, given: Given, memory: Memory, *, reqs: int, is_draft: bool = False) -> None:
        """Raise for all that `make` cannot serve, by name; nothing is written.

        What memory a graph reads holds the step before until then. `is_draft`: lists and write slots are made, and
        checked, by who plans several steps at once.
        """
        self._check_columns(given)
        _check_count("req_pool_indices", given.rows, given.reqs)
        _check_count("seq_lens", given.lens, given.reqs)
        self._check_numbers(given)
        if is_draft:
            return
        tokens = reqs
        match given.mode:
            case "decode":
                self._check_lists(given, reqs)
            case "verify":
                each = self.each(given)
                tokens = reqs * each
                self._check_mask(given, memory, each)
                self._check_positions(given, each)
            case _:
                tokens = self._check_extend(given, memory, reqs)
        if memory.fixed:
            self._check_room(given, memory, reqs, tokens)

    def _check_columns(self, given: Given) -> None:
        """Raise ValueError where the host knows of a request that is longer than the table is wide."""
        width = self.runner.table.shape[1]
        longest = max(given.known_lens or (), default=0)
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

    def _check_numbers(self, given: Given) -> None:
        """Raise ValueError, on a CPU, where rows or lengths are none of the table's."""
        table, lens = self.runner.table, given.lens[: given.reqs]
        rows, columns = given.rows[: given.reqs], table.shape[1]
        check_members("req_pool_indices", rows, count=table.shape[0], of="rows of req_to_token", live=lens > 0)
        check_members("seq_lens", lens, count=columns + 1, of="lengths that req_to_token has columns for")

    def _check_lists(self, given: Given, reqs: int) -> None:
        """Raise ValueError where lists that a batch brings cannot be read, or are more than were captured."""
        if given.lists is None:
            return
        require(
            not self.runner.window or self.runner.physical is None,
            "spec_info.kv_indices: lists of one id space, but layers with a window are read in another one than "
            "those without; draft with TritonMultiStepDraftBackend, which has lists for both",
        )
        count = given.own_lists
        require(count <= reqs, f"spec_info.kv_indptr: {count} lists, the step was captured with {reqs}")
        require(
            given.reqs == 0 or (count > 0 and count % given.reqs == 0),
            f"spec_info.kv_indptr: expected as many lists for each of {given.reqs} requests, got {count}",
        )
        indptr, slots = given.lists
        check_offsets("spec_info.kv_indptr", indptr, end=slots.shape[0], of="spec_info.kv_indices")

    def _check_mask(self, given: Given, memory: Memory, each: int) -> None:
        """Raise ValueError where a mask has fewer entries than its requests are known to need."""
        if given.mask is None:
            return
        shape, dtype = ["pairs"], (torch.uint8, torch.bool)
        bits = tensor("custom_mask", given.mask, shape=shape, dtype=dtype, device=given.lens.device)
        least = _least_bits(given, each, is_padded=memory.fixed)
        require(
            bits.shape[0] >= least,
            f"custom_mask: expected at least {least:,} entries, drafts x (cached + drafts) of each request, got "
            f"{bits.shape[0]:,}",
        )
        if memory.fixed:
            buffer = memory.slots("custom_mask", bits.shape[0])
            require(
                not _shares(bits, buffer) or bits.data_ptr() == buffer.data_ptr(),
                "custom_mask: lies in verify_mask.buffer, but not at its beginning; fill it from the front",
            )

    def _check_positions(self, given: Given, each: int) -> None:
        """Raise where positions are none, or not those of every draft."""
        if given.positions is not None:
            known, drafts = tensor("positions", given.positions, shape=["tokens"], dtype=INTEGERS), given.reqs * each
            require(
                known.shape[0] >= drafts,
                f"positions: expected one for each of {drafts} drafts, {given.reqs} requests x {each}, got "
                f"{known.shape[0]}",
            )

    def _check_extend(self, given: Given, memory: Memory, reqs: int) -> int:
        """Return the query tokens of an extend; raise where lengths are missing, or write slots that lists name."""
        if given.out_loc is None and (self.runner.deterministic or not memory.fixed):
            raise ValueError("out_cache_loc: expected where the new tokens go, got None")
        if memory.fixed:
            known = given.new if given.draft_new is None else given.draft_new
            if known is not None:
                _check_count("extend_seq_lens", known, given.reqs)
            return reqs * self.each(given)
        columns = self.runner.table.shape[1]
        for name, lens in zip(("extend_prefix_lens", "extend_seq_lens"), _cached_and_new(given), strict=True):
            _check_count(name, lens, given.reqs)
            check_members(name, lens[: given.reqs], count=columns + 1, of="lengths that req_to_token has columns for")
        check_known("extend_prefix_lens_cpu", given.known_prefix, given.reqs)
        check_known("extend_seq_lens_cpu", given.known_new, given.reqs)
        return _tokens(given)

    def _check_room(self, given: Given, memory: Memory, reqs: int, tokens: int) -> None:
        """Raise ValueError where a graph's memory is too small for a step."""
        loc, columns = given.out_loc, self.runner.table.shape[1]
        require(
            loc is None or loc.shape[0] <= tokens,
            f"out_cache_loc: expected at most the {tokens} write slots of the captured step, got "
            f"{0 if loc is None else loc.shape[0]}",
        )
        total = reqs * columns if given.total is None or given.mode == "draft extend" else given.total
        if given.lists is not None and given.mode == "decode":
            total = given.lists[1].shape[0]
        wanted = {"kv_indptr": reqs + 1, "kv_indices": total, "num_kv_splits": tokens, "out_cache_loc": tokens}
        if given.mode != "decode":
            wanted |= {"qo_indptr": reqs + 1}
        if self.runner.window:
            wanted |= {"window_kv_indices": reqs * min(self.runner.window + (given.mode == "decode"), columns)}
        for name, count in wanted.items():
            memory.slots(name, count)

    # --- modes ----------------------------------------------------------------------------------------------------

    def _decode(self, given: Given, memory: Memory, reqs: int, draft: Draft | None) -> Step:
        width, lists = self.runner.window + 1, self.lists
        counts = out_loc = None
        if draft is not None:
            window = lists.tails(draft.indptr, draft.indices, width, memory)
            translate(draft.indices, draft.indptr[-1], self.runner.physical)
            full = Lists(indptr=draft.indptr, slots=draft.indices, start=torch.zeros_like(draft.indptr[1:]))
            counts = draft.counts
        elif given.lists is not None:  # as they are
            indptr, indices = lists.given(*given.lists, reqs, memory)
            window = lists.tails(indptr, indices, width, memory)
            full = Lists(indptr=indptr, slots=indices, start=torch.zeros_like(indptr[1:]).int())
        else:
            rows, lens = padded(given.rows, given.reqs, reqs), padded(given.lens, given.reqs, reqs)
            full = lists.full(rows, lens, given.total, memory)
            window = lists.window(rows, lens, width, memory)
        if counts is None:
            counts = memory.take("num_kv_splits", reqs, torch.int32)
            self.splitting.fill(counts[: given.own_lists], given.lens[: given.reqs])
        loc = given.out_loc
        if draft is not None:
            loc = out_loc = None if draft.out_loc is None else memory.take("out_cache_loc", reqs, torch.int64)
            if out_loc is not None and draft.out_loc is not None:
                out_loc.copy_(draft.out_loc)
        return self._step(
            given,
            memory,
            full=full,
            window=window,
            counts=counts,
            tokens=reqs,
            locations=lists.locations(loc, reqs, memory),
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
            prefix, new = (padded(lens, given.reqs, reqs) for lens in _cached_and_new(given))
            total, tokens = given.prefix_total, _tokens(given)
            each = tokens if given.known_new is None else max(given.known_new, default=0)
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
        if one_pass and memory.fixed and loc is not None:  # lists of the captured step's lengths, whatever came
            loc = padded(loc, loc.shape[0], tokens)
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
        bits = given.mask.contiguous().view(torch.uint8)
        if not memory.fixed:
            return bits
        buffer, live = memory.slots("custom_mask", bits.shape[0]), bits.shape[0]
        if not _shares(bits, buffer):  # else they were filled in place
            buffer[:live].copy_(bits)
            buffer[live:].zero_()  # what an earlier step left there
        return buffer

    def _positions(self, given: Given, memory: Memory, prefix: Tensor, indptr: Tensor, tokens: int) -> Tensor:
        """Return where drafts stand: where the batch says, as in a tree siblings share a position; else in a row."""
        behind = positions_behind(prefix.int(), indptr, tokens=tokens)
        if given.positions is not None:
            known = given.positions[:tokens]
            behind[: known.shape[0]] = known.int()
        return behind


def uniform(memory: Memory, reqs: int, each: int) -> Tensor:
    """Return the offsets of requests that have `each` query tokens, all of them."""
    indptr = memory.take("qo_indptr", reqs + 1, torch.int32)
    indptr.copy_(torch.arange(0, (reqs + 1) * each, each, dtype=torch.int32, device=indptr.device))
    return indptr


def _check_count(name: str, x: Tensor, reqs: int) -> None:
    require(x.shape[0] >= reqs, f"batch_size: {reqs} requests, but {name} has {x.shape[0]} entries")


def _cached_and_new(given: Given) -> tuple[Tensor, Tensor]:
    """Return how many tokens of each request are cached, and how many are new."""
    if given.prefix is None or given.new is None:
        raise ValueError(
            "extend_prefix_lens, extend_seq_lens: expected the cached and the new tokens of each request, got None"
        )
    return given.prefix, given.new


def _least_bits(given: Given, each: int, *, is_padded: bool) -> int:
    """Return how many bytes a mask has at least, by what the host was told of the lengths.

    Requests may be padded, with the fill value as their length, and then need not have any.
    """
    if given.known_lens is None:
        live = 0 if is_padded else given.reqs * each
        return each * max(0, (given.total or 0) - given.reqs * SEQ_LEN_FILL * is_padded + live)
    lens = list(given.known_lens)
    while is_padded and lens and lens[-1] <= SEQ_LEN_FILL:
        lens.pop()
    return each * sum(cached + each for cached in lens)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _tokens(given: Given) -> int:
    """Return the new tokens of an extend, as the host knows them: one write slot each."""
    if given.out_loc is None:
        raise ValueError("out_cache_loc: expected where the new tokens go, got None")
    return given.out_loc.shape[0]
