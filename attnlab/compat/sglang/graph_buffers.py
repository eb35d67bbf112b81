"""What all captured steps of a backend share: buffers for the largest batch; and the lists that graphs baked in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.checks import describe, positive, require, tensor
from attnlab.compat.sglang.adapt import Given, Runner
from attnlab.compat.sglang.masks import TreeMaskMode, VerifyMask
from attnlab.compat.sglang.memory import Fixed
from attnlab.compat.sglang.metadata import Draft, Scratch, Step
from attnlab.compat.sglang.splitting import Splitting
from attnlab.compat.sglang.steps import StepMaker
from attnlab.graphs.memory import copy_plan
from attnlab.plan.signature import differences, numbers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """What a captured step is found by."""

    mode: str
    reqs: int
    each: int
    masked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step goes: as which captured one, and how many lists that has."""

    captured: _Captured
    lists: int


class GraphBuffers:
    """Reference: init_cuda_graph_state. A captured step's lists keep their addresses; each replay fills them again."""

    def __init__(
        self,
        *,
        runner: Runner,
        splitting: Splitting,
        max_bs: int,
        max_num_tokens: int,
        drafts: int | None,
        kv_indices: Tensor | None,
        counts: Tensor | None,
    ) -> None:
        bs, tokens = positive("max_bs", max_bs), positive("max_num_tokens", max_num_tokens)
        require(tokens >= bs, f"max_num_tokens: expected at least max_bs {bs}, got {tokens}")
        self.runner, device = runner, runner.device
        context, columns = runner.context_len, runner.table.shape[1]
        entries = {"kv_indices": 0 if kv_indices is not None else tokens * columns, "window_kv_indices": 0}
        if runner.window:
            entries["window_kv_indices"] = tokens * min(runner.window + 1, columns)
        self.drafts = None if runner.is_draft or not drafts else drafts
        bits = 0 if self.drafts is None else bs * self.drafts * (context + self.drafts)
        dims = (runner.v_dim, runner.sliding_v_dim)
        self._check_fits(sum(entries.values()) * 8 + bits, tokens, splitting.most, dims)

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.buffers = {
            "kv_indptr": zeros(tokens + 1),
            "kv_indices": zeros(entries["kv_indices"], torch.int64) if kv_indices is None else _slots(kv_indices),
            "window_kv_indptr": zeros(tokens + 1),
            "window_kv_indices": zeros(entries["window_kv_indices"], torch.int64),
            "window_kv_offsets": zeros(tokens),
            "num_kv_splits": torch.full((tokens,), splitting.most, dtype=torch.int32, device=device),
            "window_num_kv_splits": torch.full((tokens,), splitting.most, dtype=torch.int32, device=device),
            "qo_indptr": zeros(bs + 1),
            "mask_indptr": zeros(bs + 1, torch.int64),
            "custom_mask": zeros(bits, torch.uint8),
            "out_cache_loc": zeros(tokens, torch.int64),
            "swa_out_cache_loc": zeros(tokens, torch.int64),
            "out_cache_loc_full_physical": zeros(tokens, torch.int64),
        }
        if counts is not None:
            self.buffers["num_kv_splits"] = tensor("cuda_graph_num_kv_splits_buf", counts, shape=["tokens"])
        first = Scratch.of(tokens=tokens, heads=runner.heads, splits=splitting.most, v_dim=dims[0], device=device)
        second = (
            first
            if dims[0] == dims[1]
            else Scratch.of(tokens=tokens, heads=runner.heads, splits=splitting.most, v_dim=dims[1], device=device)
        )
        self.memory = Fixed(buffers=self.buffers, scratches=(first, second))
        self.verify_mask = (
            None
            if self.drafts is None
            else VerifyMask(buffer=self.buffers["custom_mask"], mode=TreeMaskMode.FULL_MASK, max_bs=bs, is_read=True)
        )
        self._captured: dict[_Captured, Step] = {}

    def place(self, maker: StepMaker, given: Given, *, branches: int | None, in_capture: bool) -> Place:
        """Return where the step of a batch goes, or raise; nothing is written. `branches`: the lists of a draft."""
        require(not given.encoder, "encoder_lens: not served in a CUDA graph; run a batch with an encoder without one")
        require(
            given.mode != "extend",
            "forward_mode: a CUDA graph serves decode, target verify and draft-extend, got extend",
        )
        each = 1 if given.mode == "decode" else maker.each(given)
        known = in_capture or given.draft_new is not None or given.new is not None
        require(
            given.mode != "draft extend" or known,
            "extend_seq_lens: expected how many tokens each request has new, got None, which a capture alone may have",
        )
        if in_capture:
            self._check_captured(given, each)
            key = _Captured(mode=given.mode, reqs=given.reqs, each=each, masked=self._reads_mask(given))
        else:
            key = self._found(given, each)
        first = self._captured.get(key)
        mine = given.own_lists if branches is None else branches
        lists = mine if first is None else first.metadata.kv_indptr.shape[0] - 1
        maker.check(given, self.memory, reqs=lists, is_draft=branches is not None)
        return Place(captured=key, lists=lists)

    def step(self, maker: StepMaker, given: Given, place: Place, *, draft: Draft | None) -> Step:
        """Return the step of a batch, in memory that its graph has baked in, and that is filled from now on."""
        made = maker.make(given, self.memory, reqs=place.lists, draft=draft, masked=place.captured.masked)
        first = self._captured.setdefault(place.captured, made)
        if first is made:
            return made
        changed = differences(numbers_of(first.reads), numbers_of(made.reads))
        require(not changed, f"graph: {changed[:1]} is baked in; capture the step again", RuntimeError)
        copy_plan(first.reads, made.reads)
        return replace(made, reads=first.reads)

    @property
    def is_captured(self) -> bool:
        """Whether a graph has baked these buffers in."""
        return bool(self._captured)

    def _check_captured(self, given: Given, each: int) -> None:
        """Raise ValueError where a step to be captured has more query tokens, or drafts, than there is memory for."""
        room, drafts = self.buffers["num_kv_splits"].shape[0], self.drafts
        require(
            given.reqs * each <= room,
            f"batch_size: {given.reqs} requests x {each} query tokens, init_cuda_graph_state was given max_num_tokens "
            f"{room}",
        )
        require(
            given.mode != "verify" or drafts is None or each <= drafts,
            f"draft_token_num: {each} drafts a request, the mask's buffer was made for {drafts}, "
            "speculative_num_draft_tokens",
        )

    def _reads_mask(self, given: Given) -> bool:
        """Whether a captured verify reads a mask: where there is memory for one, so that trees can come later."""
        return given.mode == "verify" and self.drafts is not None

    def _found(self, given: Given, each: int) -> _Captured:
        """Return the smallest capture that has room for a batch."""
        mine = [key for key in self._captured if key.mode == given.mode]
        require(
            bool(mine),
            f"graph: no step of mode {given.mode} was captured; captured were {[key.mode for key in self._captured]}",
        )
        alike = [key for key in mine if key.each == each]
        require(
            bool(alike),
            f"draft_token_num: captured were steps of {sorted({key.each for key in mine})} drafts a request, got "
            f"{each}",
        )
        large = [key for key in alike if key.reqs >= given.reqs]
        require(
            bool(large),
            f"batch_size: captured were steps of {sorted({key.reqs for key in alike})} requests, got {given.reqs}",
        )
        found = min(large, key=lambda key: key.reqs)
        require(
            found.masked or given.mask is None,
            f"custom_mask: got {describe(given.mask)}, the step was captured without one; build the backend with "
            "speculative_num_draft_tokens",
        )
        return found

    def _check_fits(self, other: int, tokens: int, splits: int, dims: tuple[int, int]) -> None:
        if self.runner.device.type != "cuda":
            return
        floats = tokens * self.runner.heads * splits * (sum(set(dims)) + 2 * len(set(dims)))
        wanted, free = 4 * floats + other, torch.cuda.mem_get_info(self.runner.device)[0]
        require(
            wanted <= free,
            f"init_cuda_graph_state: {wanted:,} bytes for {tokens} query tokens x {splits} splits do not fit the "
            f"{free:,} free; lower max_num_tokens, triton_attention_num_kv_splits, or the context length",
        )


def _slots(given: Tensor) -> Tensor:
    return tensor("kv_indices_buf", given, shape=["slots"], dtype=torch.int64)
