"""Score modifiers as the original passes them: a jitted device function, and one tensor that it may read.

The original calls it with (qk, q_pos, kv_pos, q_idx, head, mask, Aux0, aux0_stride_t, aux0_stride_h, aux0_len): what
the Triton half of a `ScoreMod` is called with too, so that any of these functions runs in our kernels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnlab._triton import is_jitted
from attnlab.checks import describe, last_axis_contiguous, require, tensor
from attnlab.engines import Engine
from attnlab.mods.relative_bias import relative_bias
from attnlab.plan.call import FLOATS
from attnlab.spec import ScoreMod

relative_bias_score_mod = relative_bias.triton
"""The original's example: adds `Aux0[q_idx, head, q_pos - kv_pos]` where the distance lies in the table."""


def modifier(
    score_mod: Any, aux_tensors: Sequence[Tensor] | None, *, q: Tensor, engine: Engine
) -> tuple[ScoreMod | None, Tensor | None]:
    """Return our modifier and the tensor that it reads, `[tokens, heads, width]`; (None, None) without one.

    A jitted function of the caller's has no torch half: it takes engine="triton". Raises NotImplementedError there, and
    for functions that are not jitted; ValueError unless `aux_tensors` is one tensor with a row for every query.
    """
    if score_mod is None:
        return None, None
    mod = _resolved(score_mod, engine)
    if not mod.needs_aux:
        return mod, None
    given = list(aux_tensors) if isinstance(aux_tensors, list | tuple) else [aux_tensors]
    require(len(given) == 1, f"aux_tensors: expected a list of one tensor, which score_mod reads, got {len(given)}")
    aux = tensor("aux_tensors", given[0], shape=("tokens", q.shape[1], "width"), dtype=FLOATS, device=q.device)
    require(
        aux.shape[0] >= q.shape[0] and aux.shape[2] >= 1,
        f"aux_tensors: expected [{q.shape[0]}, {q.shape[1]}, width], a row for every query, got {describe(aux)}",
    )
    return mod, last_axis_contiguous("aux_tensors", aux)[: q.shape[0]]


def _resolved(score_mod: Any, engine: Engine) -> ScoreMod:
    if isinstance(score_mod, ScoreMod):
        return score_mod
    if score_mod is relative_bias_score_mod:
        return relative_bias
    require(
        is_jitted(score_mod),
        f"score_mod: expected a device function made by triton.jit, or an attnlab.ScoreMod, got {describe(score_mod)}; "
        "decorate it with triton.jit",
        NotImplementedError,
    )
    require(
        engine.name == "triton",
        f"score_mod: a jitted function runs in kernels alone, and engine={engine.name!r} has none; pass "
        'engine="triton", or an attnlab.ScoreMod, which has a half in torch too',
        NotImplementedError,
    )
    return ScoreMod(name="of the caller", torch=_in_kernels_alone, triton=score_mod, needs_aux=True)


def _in_kernels_alone(*_: Any) -> Tensor:
    raise NotImplementedError('score_mod: a jitted function has no half in torch; pass engine="triton"')
