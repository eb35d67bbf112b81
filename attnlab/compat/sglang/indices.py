"""Index lists and split counts as the original builds them: into the caller's buffers, live entries alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.checks import contiguous, positive, require, tensor, whole
from attnlab.compat.sglang.adapt import to_sliding
from attnlab.compat.sglang.arguments import INTEGERS, check_rank, engine_on, entries
from attnlab.compat.sglang.launched import Grid, launched
from attnlab.compat.sglang.values import check_lengths, check_members, check_offsets, held
from attnlab.engines import Engine
from attnlab.plan.dcp import first_of
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policy import SplitContext
from attnlab.plan.splits import offsets_of


@launched("requests")
def create_flashinfer_kv_indices_triton(
    grid: Grid,
    req_to_token_ptr: Tensor,
    req_pool_indices_ptr: Tensor,
    page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor,
    kv_start_idx: Tensor | None,
    kv_indices_ptr: Tensor,
    req_to_token_ptr_stride: int,
    *,
    engine: str | Engine = "triton",
) -> None:
    """Copy each request's slots, from its first position on, to its place in `kv_indices`; `[(requests,)](...)`.

    `kv_indices[kv_indptr[r] + j] = req_to_token[req_pool_indices[r], start[r] + j]` for j below `lens[r]`, start 0
    without `kv_start_idx`; nothing else is written. The table is int32 `[pool, width]` of row stride
    `req_to_token_ptr_stride`; lists are int32 or int64 and may be longer than there are requests.

    Differs from the original: columns outside of the table give slot 0, and nothing is written outside of the buffer.
    On a CPU, ValueError for a row that the table has not, and for a length or an offset below 0.
    """
    _gather(
        grid[0],
        req_to_token_ptr,
        req_pool_indices_ptr,
        page_kernel_lens_ptr,
        kv_indptr,
        kv_start_idx,
        kv_indices_ptr,
        req_to_token_ptr_stride,
        1,
        0,
        engine,
    )


@launched("requests")
def create_triton_kv_indices_for_dcp_triton(
    grid: Grid,
    req_to_token_ptr: Tensor,
    req_pool_indices_ptr: Tensor,
    page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor,
    kv_start_idx: Tensor | None,
    kv_indices_ptr: Tensor,
    req_to_token_ptr_stride: int,
    dcp_size: int,
    dcp_rank: int,
    *,
    engine: str | Engine = "triton",
) -> None:
    """Copy the slots of one rank's positions, as that rank's storage counts them; `[(requests,)](...)`.

    With R ranks, `kv_indices[kv_indptr[r] + j] = req_to_token[req_pool_indices[r], first + j * R] // R` for j below
    the rank's length (see `get_dcp_lens`), first being the rank's first position from `kv_start_idx[r]` (or 0) on.
    Slots must leave the same remainder by R as their positions, which is not looked at. The rest is as in
    `create_flashinfer_kv_indices_triton`.
    """
    _gather(
        grid[0],
        req_to_token_ptr,
        req_pool_indices_ptr,
        page_kernel_lens_ptr,
        kv_indptr,
        kv_start_idx,
        kv_indices_ptr,
        req_to_token_ptr_stride,
        dcp_size,
        dcp_rank,
        engine,
    )


def _gather(
    reqs: int,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    indptr: Tensor,
    start: Tensor | None,
    out: Tensor,
    stride: int,
    ranks: int,
    rank: int,
    engine: str | Engine,
) -> None:
    """Fill the lists of the first `reqs` requests. What it is given goes by the original's names."""
    device = tensor("req_to_token_ptr", table, shape=("pool", "width"), dtype=torch.int32).device
    require(
        table.stride() == (stride, 1),
        f"req_to_token_ptr_stride: expected rows as far apart as in the table, strides {table.stride()}, got {stride}",
    )
    check_rank(ranks, rank)
    tensor("kv_indices_ptr", out, shape=["slots"], dtype=INTEGERS, device=device)
    starts = torch.zeros(reqs, dtype=torch.int64, device=device)
    if start is not None:
        starts = entries("kv_start_idx", start, count=reqs, device=device, dtype=torch.int64)
        check_lengths("kv_start_idx", starts)
    places = entries("req_pool_indices_ptr", rows, count=reqs, device=device, dtype=torch.int64)
    counts = entries("page_kernel_lens_ptr", lens, count=reqs, device=device, dtype=torch.int64)
    offsets = entries("kv_indptr", indptr, count=reqs, device=device, dtype=torch.int64)
    check_lengths("page_kernel_lens_ptr", counts)
    check_lengths("kv_indptr", offsets)
    check_members("req_pool_indices_ptr", places, count=table.shape[0], of="rows of req_to_token_ptr", live=counts > 0)
    engine_on(engine, device).ops.gather_shard(
        contiguous("kv_indices_ptr", out),
        table=table,
        rows=places,
        first=first_of(starts, ranks=ranks, rank=rank),
        lens=counts,
        starts=offsets,
        ranks=ranks,
    )


def build_unified_kv_indices(
    prefix_kv_indptr: Tensor,
    prefix_kv_indices: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    extend_kv_indices: Tensor,
    bs: int,
    *,
    engine: str | Engine = "triton",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (indptr `[bs + 1]`, slots, cached lengths `[bs]`) of lists that hold each request's cached keys, then new.

    Request r's cached slots are `prefix_kv_indices[prefix_kv_indptr[r]:prefix_kv_indptr[r + 1]]`, its new ones
    `extend_seq_lens[r]` of `extend_kv_indices` from `extend_start_loc[r]` on. Lists may be longer than `bs`. Slots are
    int64, as many as both buffers hold, with zeros behind the last list; cached lengths have the dtype of
    `prefix_kv_indptr`.

    Differs from the original: indptr is int32 (theirs int64), and the tail is 0 (theirs is what was there). Offsets and
    lengths that leave their lists are held to them; on a CPU, ValueError for lists that do not ascend inside
    `prefix_kv_indices`, and for a length or an offset below 0.
    """
    require(whole("bs", bs) >= 0, f"bs: expected at least 0, got {bs}")
    cached = tensor("prefix_kv_indices", prefix_kv_indices, shape=["slots"], dtype=INTEGERS)
    device, ops = cached.device, engine_on(engine, cached.device).ops
    new = tensor("extend_kv_indices", extend_kv_indices, shape=["slots"], dtype=INTEGERS, device=device).contiguous()
    indptr = entries("prefix_kv_indptr", prefix_kv_indptr, count=bs + 1, device=device, dtype=torch.int32)
    start = entries("extend_start_loc", extend_start_loc, count=bs, device=device, dtype=torch.int32)
    new_lens = entries("extend_seq_lens", extend_seq_lens, count=bs, device=device, dtype=torch.int32)
    check_offsets("prefix_kv_indptr", indptr, end=cached.shape[0], of="prefix_kv_indices")
    check_lengths("extend_start_loc", start)
    check_lengths("extend_seq_lens", new_lens)
    indptr, start = held(indptr, cached.shape[0]), start.clamp(min=0)
    new_indptr = held(offsets_of(new_lens.clamp(min=0)), new.shape[0])
    # Where new tokens begin need not be where those of the request before end: they are laid end to end first.
    packed = ops.gather(
        table=new[None],
        rows=torch.zeros_like(start),
        start=start,
        first=start,
        indptr=new_indptr,
        capacity=new.shape[0],
    )
    slots, joined = ops.join(first=cached.contiguous(), first_indptr=indptr, second=packed, second_indptr=new_indptr)
    return joined, slots, indptr.diff().to(prefix_kv_indptr.dtype)


@torch.no_grad()
def update_sliding_window_buffer(
    window_kv_indptr: Tensor,
    req_to_token: Tensor,
    sliding_window_size: int,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    bs: int,
    device: torch.device | str | None = None,
    token_to_kv_pool: Any = None,
    window_kv_indices: Tensor | None = None,
    skip_full_to_swa_translation: bool = False,
    *,
    engine: str | Engine = "triton",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (indptr `[bs + 1]`, slots, lengths, first positions) of lists of each request's last tokens.

    A list holds the last min(len, W) positions, W = `sliding_window_size`: before W earlier keys and the query itself,
    that is for the prefix of an extend; in a decode, whose `seq_lens` count the query's token, pass W + 1. indptr is
    the front of `window_kv_indptr`, which is written; slots are `window_kv_indices` (live entries alone are written) or
    new, int64, with zeros behind the last list. Where `token_to_kv_pool` has `translate_loc_from_full_to_swa`, live
    slots go through it, once. Lengths and positions have the dtype of `seq_lens`. `device` is the table's, or None.

    Differs from the original: a new list is as long as it may get, bs x W, since its length is known to the device
    alone. Entry 0 of `window_kv_indptr` is written too. A length below 0 is 0. On a CPU both that and a row that the
    table has not raise ValueError.
    """
    width = positive("sliding_window_size", sliding_window_size)
    table = tensor("req_to_token", req_to_token, shape=("pool", "width"), dtype=torch.int32)
    where = table.device
    require(
        device is None or torch.device(device).type == where.type,
        f"device: expected {where}, where req_to_token lies, or None, got {device}",
    )
    tensor("window_kv_indptr", window_kv_indptr, shape=["entries"], dtype=INTEGERS, device=where)
    require(whole("bs", bs) >= 0, f"bs: expected at least 0, got {bs}")
    require(
        bs < window_kv_indptr.shape[0],
        f"window_kv_indptr: expected at least {bs + 1} entries, got {window_kv_indptr.shape[0]}",
    )
    tensor("seq_lens", seq_lens, shape=["reqs"], dtype=INTEGERS, device=where)
    tokens = entries("seq_lens", seq_lens, count=bs, device=where, dtype=seq_lens.dtype)
    check_lengths("seq_lens", tokens)
    lens = tokens.clamp(min=0, max=width)
    start = tokens.clamp(min=0) - lens
    rows = entries("req_pool_indices", req_pool_indices, count=bs, device=where, dtype=torch.int64)
    check_members("req_pool_indices", rows, count=table.shape[0], of="rows of req_to_token", live=lens > 0)
    slots = window_kv_indices
    if slots is None:
        slots = torch.zeros(bs * min(width, table.shape[1]), dtype=torch.int64, device=where)
    tensor("window_kv_indices", slots, shape=["slots"], dtype=INTEGERS, device=where)
    indptr = window_kv_indptr[: bs + 1]
    indptr[:1].zero_()
    indptr[1:] = lens.cumsum(0)
    engine_on(engine, where).ops.gather_shard(
        contiguous("window_kv_indices", slots),
        table=table,
        rows=rows,
        first=start,
        lens=lens,
        starts=indptr[:-1].contiguous(),
        ranks=1,
    )
    translate = None if skip_full_to_swa_translation else to_sliding(token_to_kv_pool)
    if translate is not None:
        live = torch.arange(slots.shape[0], device=where) < indptr[-1]
        # What lies behind the lists may be anything: it is neither looked up nor written.
        slots.copy_(torch.where(live, translate(torch.where(live, slots, 0)), slots))
    return indptr, slots, lens, start


@launched("1")
def get_num_kv_splits_triton(
    grid: Grid,
    num_kv_splits_ptr: Tensor,
    seq_lens_ptr: Tensor,
    num_seq: int,
    num_group: int,
    num_head: int,
    num_kv_head: int,
    max_kv_splits: int,
    device_core_count: int,
    MAX_NUM_SEQ: int,  # noqa: N803  (the original's name)
    *,
    engine: str | Engine = "triton",
) -> None:
    """Fill `num_kv_splits [>= num_seq x num_group]` int32 with how many splits each row gets; `[(1,)](...)`.

    The policy "seed": `seq_lens` `[>= num_seq]` int32 or int64, of which `num_group` rows each share one.

    Differs from the original: a sequence of length 0 (below 0: ValueError on a CPU) takes no part in the shortest and
    longest and gets 0; all of them 0: all get 0. Lengths of 2^31 and more count as 2^31 - 1. Where `device_core_count`
    is not positive, which divides by zero there, all others get `max_kv_splits`.
    """
    require(grid == (1,), f"get_num_kv_splits_triton: grid: expected (1,), got {grid}")
    seqs, group = positive("num_seq", num_seq), positive("num_group", num_group)
    most, cores = whole("MAX_NUM_SEQ", MAX_NUM_SEQ), whole("device_core_count", device_core_count)
    require(seqs <= most, f"MAX_NUM_SEQ: expected at least num_seq {seqs}, got {most}")
    device = tensor("seq_lens_ptr", seq_lens_ptr, shape=["sequences"], dtype=INTEGERS).device
    lens = entries("seq_lens_ptr", seq_lens_ptr, count=seqs, device=device, dtype=torch.int32)
    check_lengths("seq_lens_ptr", lens)
    lens = lens.clamp(min=0)
    tensor("num_kv_splits_ptr", num_kv_splits_ptr, shape=["rows"], dtype=torch.int32, device=device)
    rows = num_kv_splits_ptr.shape[0]
    require(rows >= seqs * group, f"num_kv_splits_ptr: expected {seqs * group} rows, {seqs} x {group}, got {rows}")
    require(
        positive("num_head", num_head) >= positive("num_kv_head", num_kv_head),
        f"num_head: expected at least num_kv_head {num_kv_head}, got {num_head}",
    )
    policy = Seed(max_splits=positive("max_kv_splits", max_kv_splits))
    context = SplitContext(
        heads=num_head,
        kv_heads=num_kv_head,
        v_dim=1,
        mla=False,  # max_kv_splits is the cap as it is
        context_len=1,
        multiprocessors=cores if cores > 0 else None,
        rows_per_seq=group,
    )
    sizes = engine_on(engine, device).ops.sizes(policy, lens.repeat_interleave(group), context)
    num_kv_splits_ptr[: seqs * group] = sizes.nominal
