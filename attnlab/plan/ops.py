"""The device functions that planning needs. Each engine brings its own; one contract holds them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Int, UInt8
from torch import Tensor

from attnlab.checks import require
from attnlab.memory.pool import Translation
from attnlab.plan.lanes import LaneWork
from attnlab.plan.layout import DraftLists, Extent
from attnlab.plan.plans import Lane
from attnlab.plan.policy import SplitContext, SplitPolicy, SplitSizes
from attnlab.spec import Sight


@runtime_checkable
class PlanOps(Protocol):
    """Index lists, in torch or in Triton. Nothing here waits for the device, and nothing reads a list's tail."""

    def pad(
        self, rows: Int[Tensor, " reqs"], lens: Sequence[Int[Tensor, " reqs"]], *, max_requests: int
    ) -> tuple[Int[Tensor, " reqs"], ...]:
        """Return copies of rows and of their one or two lengths, 0 where the row is none of `max_requests`: padding."""

    def lane(self, work: LaneWork) -> Lane:
        """Return a lane whose lists are split: lists, ranges, schedule, and the slots of new tokens."""

    def extent(
        self,
        *,
        query: Int[Tensor, " reqs"],
        end: Int[Tensor, " reqs"],
        sight: Sight,
        align: int,
        capacity: int,
    ) -> Extent:
        """Return which positions lists hold that end before `end` and begin with what a query at `query` sees.

        `start` is a multiple of `align`; `start_visible` the first position seen, at most `end`. The lists together
        are held to `capacity` entries. All int32.
        """

    def gather(
        self,
        *,
        table: Int[Tensor, "max_requests max_context"],
        rows: Int[Tensor, " reqs"],
        start: Int[Tensor, " reqs"],
        first: Int[Tensor, " reqs"],
        indptr: Int[Tensor, " reqs_1"],
        capacity: int,
    ) -> Int[Tensor, " capacity"]:
        """Return int64 ids: entry `indptr[r] + j` is `table[rows[r], max(start[r] + j, first[r])]`. The tail is 0."""

    def gather_shard(
        self,
        ids: Int[Tensor, " capacity"],
        *,
        table: Int[Tensor, "max_requests max_context"],
        rows: Int[Tensor, " reqs"],
        first: Int[Tensor, " reqs"],
        lens: Int[Tensor, " reqs"],
        starts: Int[Tensor, " reqs"],
        ranks: int,
    ) -> None:
        """Fill `ids[starts[r] + j]` with `table[rows[r], first[r] + j * ranks] // ranks` for j below `lens[r]`.

        Nothing else of `ids` is written: it may be longer than the lists, and lists may lie apart. One of `ranks`
        context-parallel ranks has every so-manieth position, from its first one on, in a storage of its own (see
        `plan.dcp`); with one rank it is a plain copy. Lists may lie in any order, but do not overlap; entries outside
        of `ids` are left out.

        Reference: create_triton_kv_indices_for_dcp_triton, create_flashinfer_kv_indices_triton.
        """

    def join(
        self,
        *,
        first: Int[Tensor, " a"],
        first_indptr: Int[Tensor, " reqs_1"],
        second: Int[Tensor, " b"],
        second_indptr: Int[Tensor, " reqs_1"],
    ) -> tuple[Int[Tensor, " a_b"], Int[Tensor, " reqs_1"]]:
        """Return one list (int64) and its offsets (int32): each request's entries of `first`, then those of `second`.

        Offsets ascend, and are held to their list; they need not begin with 0, those of the result do.

        Reference: build_unified_kv_indices.
        """

    def translate(
        self, ids: Int[Tensor, " capacity"], indptr: Int[Tensor, " reqs_1"], translation: Translation
    ) -> Int[Tensor, " capacity"]:
        """Return the ids (int64) in the translation's target space; from entry `indptr[-1]` on they are 0."""

    def mask_offsets(self, new: Int[Tensor, " reqs"], keys: Int[Tensor, " reqs"]) -> Int[Tensor, " reqs_1"]:
        """Return where each request's `new x keys` entries of a mask begin, and the end; int64."""

    def write_causal(
        self,
        bits: UInt8[Tensor, " pairs"],
        offsets: Int[Tensor, " reqs_1"],
        new: Int[Tensor, " reqs"],
        keys: Int[Tensor, " reqs"],
        *,
        most: int,
    ) -> None:
        """Write a causal mask's entries, `new x keys` from `offsets[r]` on; no request has more than `most` new."""

    def drafts(
        self,
        *,
        table: Int[Tensor, "max_requests max_context"],
        rows: Int[Tensor, " reqs"],
        cached: Int[Tensor, " reqs"],
        stride: Int[Tensor, " reqs"],
        topk: int,
        steps: int,
        sight: Sight,
        translation: Translation,
        capacity: int,
    ) -> DraftLists:
        """Return what every branch sees in every step, in ids of the translation's target space.

        Branch t of request r is number `r * topk + t`. In step i, counted from 0, it sees the last of `cached[r]`
        tokens, as far as sight goes, and its own i + 1 drafts, which are in the columns of row `rows[r]` from
        `cached[r] + t * stride[r]` on. Where `cached` is 0 there are no drafts: nothing is seen, the sink is written.
        The lists of a step together are held to `capacity` entries.

        Reference: generate_draft_decode_kv_indices.
        """

    def sizes(self, policy: SplitPolicy, lens: Int[Tensor, " reqs"], ctx: SplitContext) -> SplitSizes:
        """Return the policy's range sizes."""


def check_joined(first_indptr: Tensor, second_indptr: Tensor) -> None:
    """Raise ValueError unless two lists that are joined are of as many requests."""
    a, b = first_indptr.shape[0] - 1, second_indptr.shape[0] - 1
    require(a == b, f"second_indptr: expected offsets of {a} requests like first_indptr, got those of {b}")
