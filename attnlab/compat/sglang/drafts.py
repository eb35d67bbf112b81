"""Index lists of multi-step drafting: how large they are, and what is in them."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.checks import last_axis_contiguous, positive, require, tensor, whole
from attnlab.compat.sglang.arguments import INTEGERS, engine_on, entries
from attnlab.compat.sglang.launched import Grid, launched
from attnlab.compat.sglang.values import check_lengths, check_members
from attnlab.engines import Engine
from attnlab.memory.pool import Translation
from attnlab.plan.draft import branch_stride
from attnlab.spec import Sight


def draft_kv_indices_buffer_width(num_seqs: int, topk: int, max_context_len: int) -> int:
    """Return the entries that one step's lists may take: every branch of every sequence at its longest.

    Raises ValueError where they are 2^31 or more, which 32-bit offsets cannot count.
    """
    width = positive("num_seqs", num_seqs) * positive("topk", topk) * positive("max_context_len", max_context_len)
    require(
        width < 2**31,
        f"num_seqs, topk, max_context_len: expected a product below 2^31, got {num_seqs} x {topk} x {max_context_len}",
    )
    return width


def draft_kv_indices_used_len(seq_lens_sum: int, topk: int, bs: int, n: int) -> int:
    """Return the live entries of the step whose branches hold n drafts each: `bs` branches, topk a sequence."""
    sizes = {"seq_lens_sum": seq_lens_sum, "topk": topk, "bs": bs, "n": n}
    numbers = {name: whole(name, size) for name, size in sizes.items()}
    for name, size in numbers.items():
        require(size >= 0, f"{name}: expected at least 0, got {size}")
    return numbers["seq_lens_sum"] * numbers["topk"] + numbers["bs"] * numbers["n"]


@launched("steps", "sequences", "topk")
@torch.no_grad()
def generate_draft_decode_kv_indices(
    grid: Grid,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    positions: Tensor,
    pool_len: int,
    kv_indices_stride: int,
    kv_indptr_stride: int,
    bs_upper: int,
    iter_upper: int,
    num_tokens_upper: int,
    page_size: int,
    *,
    engine: str | Engine = "triton",
) -> None:
    """Fill the lists of all steps for all branches; `[(steps, sequences, topk)](...)`.

    In row i of `kv_indices` `[>= steps, width]`, counted from 0, branch t of sequence s, number `s * topk + t`, has the
    `paged_kernel_lens[s]` cached slots of row `req_pool_indices[s]` of `req_to_token`, then its own i + 1 drafts, which
    lie behind these: the branches' one after the other or, with pages, each in whole pages of its own. `kv_indptr`
    `[>= steps, > branches]` gets the offsets from column 1 on; column 0 must hold 0. Live entries alone are written.
    Strides are those of the tensors' rows; the upper bounds are powers of two that hold sequences, steps and branches.

    Differs from the original: a sequence of length 0 is padding and has no drafts. Offsets come from
    `paged_kernel_lens`; `positions` `[>= branches]`, which must repeat them and from which theirs come, is unread. Rows
    that are too narrow are cut off, not written beyond. On a CPU, ValueError for a length below 0, and for a row that
    the table has not.
    """
    steps, seqs, topk = grid
    branches = seqs * topk
    device = tensor("req_to_token", req_to_token, shape=("pool", "width"), dtype=torch.int32).device
    _check_rows("pool_len", "req_to_token", req_to_token, pool_len)
    tensor("kv_indices", kv_indices, shape=("steps", "width"), dtype=INTEGERS, device=device)
    _check_rows("kv_indices_stride", "kv_indices", kv_indices, kv_indices_stride)
    tensor("kv_indptr", kv_indptr, shape=("steps", "branches + 1"), dtype=INTEGERS, device=device)
    _check_rows("kv_indptr_stride", "kv_indptr", kv_indptr, kv_indptr_stride)
    fits = min(kv_indices.shape[0], kv_indptr.shape[0]) >= steps and kv_indptr.shape[1] > branches
    require(
        fits,
        f"kv_indices, kv_indptr: expected {steps} steps and {branches + 1} offsets of {seqs} x {topk} branches, got "
        f"{list(kv_indices.shape)} and {list(kv_indptr.shape)}",
    )
    bounds = {"bs_upper": (bs_upper, seqs), "iter_upper": (iter_upper, steps)}
    for name, (bound, count) in {**bounds, "num_tokens_upper": (num_tokens_upper, branches)}.items():
        require(whole(name, bound) >= count, f"{name}: expected at least {count}, as the grid says, got {bound}")
    entries("positions", positions, count=branches, device=device, dtype=torch.int64)
    cached = entries("paged_kernel_lens", paged_kernel_lens, count=seqs, device=device, dtype=torch.int32)
    rows = entries("req_pool_indices", req_pool_indices, count=seqs, device=device, dtype=torch.int64)
    check_lengths("paged_kernel_lens", cached)
    check_members("req_pool_indices", rows, count=req_to_token.shape[0], of="rows of req_to_token", live=cached > 0)
    lists = engine_on(engine, device).ops.drafts(
        table=req_to_token,
        rows=rows,
        cached=cached,
        stride=branch_stride(cached, steps=max(1, steps), page_size=positive("page_size", page_size)),
        topk=topk,
        steps=steps,
        sight=Sight(),
        translation=Translation.same("pool", page_size=page_size),
        capacity=kv_indices.shape[1],
    )
    live = torch.arange(kv_indices.shape[1], device=device) < lists.indptr[:, -1:]
    kv_indices[:steps] = torch.where(live, lists.slots, kv_indices[:steps])
    kv_indptr[:steps, 1 : branches + 1] = lists.indptr[:, 1:]


def _check_rows(name: str, of: str, x: Tensor, stride: int) -> None:
    last_axis_contiguous(of, x)
    require(whole(name, stride) == x.stride(0), f"{name}: expected {x.stride(0)}, as {of} has it, got {stride}")
