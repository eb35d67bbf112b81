"""A step's metadata: the original's record of sixteen fields, and what engines read, made from it once a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.checks import require
from attnlab.plan.plans import ExtendLane, Lane, Queries
from attnlab.plan.workspace import Partials
from attnlab.spec import AttentionSpec


@dataclass(slots=True, eq=False)
class ForwardMetadata:
    """The original's record, its fields in their order. Which of them are None depends on the mode, as there.

    Differs from the original: `attn_logits` and `attn_lse` are the memory of the partial states (see `Partials`), in
    the schedule's order and not normalised; a verify has some too, as its cached keys are split like a decode's.
    `window_num_kv_splits` are what sliding layers are split by.
    """

    attn_logits: Tensor | None
    attn_lse: Tensor | None
    max_extend_len: int | None
    num_kv_splits: Tensor | None
    kv_indptr: Tensor
    kv_indices: Tensor
    qo_indptr: Tensor | None
    custom_mask: Tensor | None
    mask_indptr: Tensor | None
    window_kv_indptr: Tensor | None
    window_kv_indices: Tensor | None
    window_num_kv_splits: Tensor | None
    window_kv_offsets: Tensor | None
    swa_attn_logits: Tensor | None = None
    swa_out_cache_loc: Tensor | None = None
    out_cache_loc_full_physical: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What the layers of a step read: the full lists, the window's where the model has one, and the queries.

    Lists are split (`Lane`) for decode and verify. A decode has a query a request, and `queries` None. `one_pass`: the
    lists hold the new tokens too.
    """

    full: ExtendLane | Lane
    sliding: ExtendLane | Lane | None
    queries: Queries | None
    one_pass: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """One step's lists of multi-step drafting: a row a branch, in the table's slots, which are not translated yet.

    `counts` are the splits that all steps share; `out_loc` is where the step writes, None where its own batch says.
    """

    indptr: Tensor
    indices: Tensor
    counts: Tensor
    out_loc: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scratch:
    """Memory of partial states for one value dimension: accumulators, and two numbers beside each."""

    logits: Tensor
    lse: Tensor
    sums: Tensor

    @classmethod
    def of(cls, *, tokens: int, heads: int, splits: int, v_dim: int, device: torch.device) -> Scratch:
        """Return room for as many splits of as many query tokens."""
        shape = (tokens, heads, splits)
        return cls(
            logits=torch.empty(*shape, v_dim, dtype=torch.float32, device=device),
            lse=torch.empty(shape, dtype=torch.float32, device=device),
            sums=torch.empty(shape, dtype=torch.float32, device=device),
        )

    def partials(self, lane: Lane, spec: AttentionSpec, *, queries: int, layer: int) -> Partials:
        """Return the states of a lane's partials, of up to `queries` query tokens each, for a layer of that attention.

        Raises ValueError where the layer has more heads, or another value dimension, than the scratch was made for.
        """
        heads, v_dim = self.logits.shape[1], self.logits.shape[-1]
        require(
            spec.v_dim == v_dim,
            f"layer {layer}: v_head_dim {spec.v_dim}, the model runner says {v_dim}, for which scratch was made",
        )
        require(
            spec.heads <= heads,
            f"layer {layer}: tp_q_head_num {spec.heads}, the model runner says at most {heads}, for which scratch was "
            "made",
        )
        count, rows = lane.schedule.partials, spec.group * queries
        states = count * rows
        return Partials(
            acc=self.logits.view(-1)[: states * v_dim].view(count, rows, v_dim),
            max=self.lse.view(-1)[:states].view(count, rows),
            sum=self.sums.view(-1)[:states].view(count, rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A planned step: the record, what engines read, scratch; `out_loc`, where given, is where new tokens go.

    It then stands for the batch's own write slots.
    """

    mode: str
    metadata: ForwardMetadata
    reads: Reads
    scratch: Scratch
    sliding_scratch: Scratch
    out_loc: Tensor | None
