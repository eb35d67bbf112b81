"""What launchers share: the dtype that tiles are computed in, the widths of tiles, strides, the interpreter's needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlab._triton import tl
from attnlab.kernels.pairs import POWERS
from attnlab.kernels.target import Target
from attnlab.memory.pool import KVView, span
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.spec import AttentionSpec

NARROW_BELOW = 2**31
"""Elements of a storage whose offsets fit 32 bits."""
C = TypeVar("C", DecodeCall, ExtendCall, VerifyCall)
_TL_DTYPES = {} if tl is None else {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dim_tiles(dim: int) -> tuple[int, int]:
    """Return (main, rest): tile widths that cover a head dimension, powers of two of at least 16; rest may be 0.

    Dimensions such as 576 = 512 + 64, 192 = 128 + 64 or 80 = 64 + 16 are covered without idle lanes; the others are
    padded to the next power of two.
    """
    main = 1 << (dim.bit_length() - 1)
    rest = dim - main
    if main >= 16 and rest >= 16 and rest & (rest - 1) == 0:
        return main, rest
    return padded(dim), 0


def padded(number: int) -> int:
    """Return the smallest tile that holds so many lanes: a power of two, at least 16, a tensor core's smallest side."""
    return max(16, 1 << (number - 1).bit_length())


def tile_constants(
    *, spec: AttentionSpec, view: KVView, target: Target, compute: torch.dtype, block_n: int
) -> dict[str, Any]:
    """Return the compile-time arguments of `attend_tile`, and the page size of its pointers."""
    block_d, block_r = dim_tiles(spec.qk_dim)
    return {
        "QK_DIM": spec.qk_dim,
        "V_DIM": spec.v_dim,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_R": block_r,
        "BLOCK_V": padded(spec.v_dim),
        "PAGE_SIZE": view.page_size,
        # V is the whole main tile of K: 512 of 576, 256 of 288.
        "V_IS_K_TILE": view.v_in_k and spec.v_dim == block_d,
        "HAS_SOFTCAP": spec.softcap is not None,
        "TEMPERATURE_LEN": spec.temperature_len or 0,
        "MOD": None if spec.mod is None else spec.mod.triton,
        # numpy knows no bf16: dots of such tiles would be silently wrong in the interpreter.
        "COMPUTE": tl.float32 if target.kind == "interpreter" else _TL_DTYPES[compute],
    }


def stored(view: KVView) -> tuple[Tensor, Tensor]:
    """Return a view's `k` and `v` as kernels for pairs read them: int16 where two columns make one number."""
    return (view.k.view(torch.int16), view.v.view(torch.int16)) if view.paired else (view.k, view.v)


def pair_constants(*, spec: AttentionSpec, view: KVView, compute: Any) -> dict[str, Any]:
    """Return what `tile_constants` becomes where a pool is read as pairs; nothing where it is not.

    BLOCK_D and BLOCK_R count pairs. Queries of 16 bits are multiplied in fp16, which holds every e4m3 number.
    """
    if not view.paired:
        return {}
    block_d, block_r = dim_tiles(spec.qk_dim // 2)
    return {
        "BLOCK_D": block_d,
        "BLOCK_R": block_r,
        "BLOCK_V": 2 * padded(spec.v_dim // 2),
        "V_IS_K_TILE": view.v_in_k and spec.v_dim == 2 * block_d,
        "COMPUTE": compute if compute == tl.float32 else tl.float16,
    }


def sight_constants(spec: AttentionSpec, *, masked: bool) -> dict[str, bool]:
    """Return the compile-time arguments that say what can hide a cached key."""
    sight = spec.sight
    return {"HAS_MASK": masked, "HAS_WINDOW": sight.window is not None, "HAS_CHUNK": sight.chunk is not None}


def slot_stride(view: KVView, x: Tensor) -> int:
    """Return the elements between two slots of a view's `k` or `v`, within a page or, with one slot a page, between."""
    return x.stride(0) if view.page_size == 1 else x.stride(-3)


def narrow(*tensors: Tensor) -> bool:
    """Whether offsets into all of these fit 32 bits, which leaves kernels more registers than 64 do."""
    return max(map(span, tensors)) < NARROW_BELOW


def traits(view: KVView) -> tuple[Hashable, ...]:
    """Return all that kernels could be compiled for of a view, whether its offsets fit 32 bits included."""
    return view.traits, view.elements < NARROW_BELOW


def scales_last(scale: float, k_scale: float) -> bool:
    """Whether products may be scaled after the largest of them is found, by a factor that takes log2(e) too.

    It must be above 0, and a normal number in fp32: one that a device rounds to 0 makes NaN of what is hidden.
    """
    return all(2.0**-126 <= factor < 2.0**126 for factor in (scale, scale * k_scale))


def plain_scores(spec: AttentionSpec, view: KVView) -> bool:
    """Whether scores are products times a number above 0, and nothing else, but for those that are hidden."""
    alone = spec.softcap is None and spec.temperature_len is None and spec.mod is None
    powers = POWERS if view.paired else (1.0,)
    return alone and all(scales_last(spec.scale * power, view.k_scale) for power in powers)


def lifted(x: Tensor, target: Target) -> Tensor:
    """Return a tensor as kernels may read it: the interpreter computes in fp32 alone."""
    return x.float() if target.kind == "interpreter" else x


def written(out: Tensor, target: Target) -> Tensor:
    """Return what a kernel writes to: the interpreter truncates where it should round to bf16, so torch rounds later.

    Rows that no program writes come out as they are.
    """
    return out.float() if target.kind == "interpreter" and out.dtype != torch.float32 else out


def sendable(call: C, target: Target) -> C:
    """Return the call as kernels may take it: see `lifted` and `written`. Its `out` may be another, to be copied."""
    if target.kind != "interpreter":
        return call
    q, out = lifted(call.q, target), written(call.out, target)
    if isinstance(call, DecodeCall):
        return replace(call, q=q, out=out)
    k, v = (None if x is None else lifted(x, target) for x in (call.k, call.v))
    return replace(call, q=q, out=out, k=k, v=v)


def merge_options(target: Target, *, num_warps: int) -> dict[str, int]:
    """Return the launch options of a merge: where the device can, it is launched while the split kernel still runs.

    Programmatic dependent launch: the split kernel says `release_dependents` at its end, the merge kernel waits in
    `wait_for_earlier` before it reads anything.
    """
    return {"num_warps": num_warps, "num_stages": 1, **early_launch(target)}


def early_launch(target: Target) -> dict[str, bool]:
    """Return the launch option of kernels that begin with `wait_for_earlier`.

    They are started once every program of the kernel before has said `release_dependents` or ended, and wait there
    until its writes can be seen. Every program waits, also one that has nothing to do: what is launched behind it could
    overtake the kernel before otherwise.
    """
    return {"launch_pdl": True} if target.has_pdl else {}
