"""What Gluon kernels share whose programs have groups of warps with ways of their own: one loads, the others attend.

Which tensors they can copy, who holds what of a tile, and the steps that all of them have: a segment of the schedule,
where slots begin, a sink, softmax states that are left or answers that are written. The steps say what those of
`core.py` say; in Gluon they are told which thread holds what.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab._triton import gl, gluon_jit, tl

WARPS = 4
"""Warps of a group: those that issue an instruction of Hopper's tensor cores together."""
STEP = 16
"""What divides a tensor's address, in bytes, and its strides, in numbers, where Triton copies 16 bytes at a time: of an
integer it knows no other divisor."""
HALVES = (torch.float16, torch.bfloat16)

COPYING: Any = None
COPIES: Any = None
COPY_ROWS: Any = None
COPY_COLUMNS: Any = None
TILE: Any = None
if gl is not None:  # else kernels are imported all the same, but not compiled
    COPYING = tl.constexpr(32 * WARPS)
    # Eight threads copy 128 bytes of a row, 16 each.
    COPIES = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    COPY_ROWS = tl.constexpr(gl.SliceLayout(1, COPIES.value))
    COPY_COLUMNS = tl.constexpr(gl.SliceLayout(0, COPIES.value))
    # Tiles lie in shared memory as tensor cores read them.
    TILE = tl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def can_copy(*tensors: Tensor) -> bool:
    """Whether tensors are of one half precision, in rows that can be copied to shared memory 16 bytes at a time."""
    dtype = tensors[0].dtype
    return dtype in HALVES and all(
        x.dtype == dtype and x.data_ptr() % STEP == 0 and all(n % STEP == 0 for n in x.stride()[:-1]) for x in tensors
    )


@gluon_jit
def load_segment(segments_ptr, number):
    """A segment of the schedule: request, KV head, first and last list entry, partial."""
    row = segments_ptr + number * 5
    req = gl.load(row).to(gl.int64)
    return req, gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), gl.load(row + 4).to(gl.int64)


@gluon_jit
def slot_offsets(slots, strides, PAGE_SIZE: tl.constexpr):
    """Element offsets of slots; `strides` are those of a page, a slot and a head."""
    if PAGE_SIZE == 1:
        offsets = slots * strides[1]
    else:
        offsets = (slots // PAGE_SIZE) * strides[0] + (slots % PAGE_SIZE) * strides[1]
    return offsets


@gluon_jit
def finite_or_zero(maximum):
    """What to subtract before exp or exp2: the maximum, or 0 where nothing was seen."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon_jit
def join_sink(running_max, running_sum, sink):
    """The state, of natural base, with the sink in its denominator: new maximum, new sum, what answers fade by."""
    new_max = gl.maximum(running_max, sink)
    shift = finite_or_zero(new_max)
    endless = sink == float("inf")  # takes everything: exp(inf - inf) would be NaN
    fade = gl.where(endless, 0.0, gl.exp(running_max - shift))
    return new_max, running_sum * fade + gl.where(endless, 1.0, gl.exp(sink - shift)), fade


@gluon_jit
def store_states(
    running_max, running_sum, acc, states, state, columns, mine, WIDTH: tl.constexpr, WITH_SUMS: tl.constexpr
):
    """Leave softmax states number `state`, unnormalised, to be merged: these `columns` of WIDTH, maxima and sums."""
    acc_ptr, max_ptr, sum_ptr = states
    gl.store(acc_ptr + state[:, None] * WIDTH + columns[None, :], acc, mask=mine[:, None])
    if WITH_SUMS:
        gl.store(max_ptr + state, running_max, mask=mine)
        gl.store(sum_ptr + state, running_sum, mask=mine)


@gluon_jit
def write_rows(running_max, running_sum, acc, v_scale, out_rows, lse_rows, columns, mine, HAS_LSE: tl.constexpr):
    """Write whole answers, normalised, from these columns on, and their LSE. Nothing seen: out 0, lse -inf."""
    safe = gl.where(running_sum == 0.0, 1.0, running_sum)
    answers = acc * (v_scale / safe)[:, None]
    gl.store(out_rows[:, None] + columns[None, :], answers.to(out_rows.dtype.element_ty), mask=mine[:, None])
    if HAS_LSE:
        gl.store(lse_rows, running_max + gl.log(safe), mask=mine)
