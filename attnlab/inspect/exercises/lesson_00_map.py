"""Lesson 00: the map."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from attnlab.eager import oracle
from attnlab.inspect.exercises.registry import TOY_LENS, Wrong, ask, exercise, near, off_by, same_tensor
from attnlab.inspect.exercises.toy import toy
from attnlab.inspect.workbench import Workbench


@exercise("00-1", Integral)
def bytes_of_a_token(answer: Any) -> str:
    """A key and a value for every KV head."""
    model = toy().model
    spec = model.layers[0].attention
    one = spec.kv_heads * spec.qk_dim * model.kv_dtype.itemsize
    hints = {
        one: "That is the key alone; its value is cached beside it.",
        2 * spec.heads * spec.qk_dim * model.kv_dtype.itemsize: "Only KV heads are cached, not all query heads.",
        2 * spec.kv_heads * spec.qk_dim: "Those are numbers; a float32 takes 4 bytes.",
    }
    wrong = hints.get(answer, "Multiply: key and value, KV heads, dimensions, bytes of a number.")
    return "" if answer == 2 * one else wrong


@exercise("00-2", Workbench)
def nothing_cut(answer: Any) -> str:
    """Any policy that leaves one range a request."""
    if answer.lens != TOY_LENS:
        return f"Keep the lengths {list(TOY_LENS)}; these are {list(answer.lens)}. Change how they are cut."
    counts = answer.plan().lane(0).splits.to_host().effective
    if max(counts) == 1:
        return ""
    return f"The requests are cut into {list(counts)} ranges. Which policy's ranges are longer than 200 keys?"


@exercise("00-3", Callable)
def grouped_attention(answer: Any) -> str:
    """Attention of one token, compared with the oracle; wrong results are compared with the usual mistakes'."""
    for heads, kv_heads, keys, scale in ((1, 1, 5, 0.125), (8, 8, 7, 0.125), (8, 2, 200, 0.125), (6, 3, 9, 0.3)):
        torch.manual_seed(heads + keys)
        q, k, v = torch.randn(heads, 64), torch.randn(keys, kv_heads, 64), torch.randn(keys, kv_heads, 32)
        case = f"With q [{heads}, 64], k [{keys}, {kv_heads}, 64], v [{keys}, {kv_heads}, 32] and scale {scale}"
        expected = oracle.attention(q, k, v, scale=scale)[0]
        got = same_tensor(case, ask(case, answer, q, k, v, scale), expected)
        if near(got, expected):
            continue
        ones = ask(case, answer, q, k, torch.ones_like(v), scale)
        raise Wrong(f"{case}: off by up to {off_by(got, expected):.3g}. {_hint(got, ones, (q, k, v), scale)}".rstrip())
    return ""


def _hint(got: Tensor, ones: Any, inputs: tuple[Tensor, Tensor, Tensor], scale: float) -> str:
    q, k, v = inputs
    heads, kv_heads = q.shape[0], k.shape[1]
    turns = torch.arange(heads) % kv_heads  # what k.repeat makes: KV heads in turn
    if near(got, oracle.attention(q, k, v, scale=1.0)[0]):
        return "That is what comes out without the scale: multiply the scores by it, before the softmax."
    if scale != 0.125 and near(got, oracle.attention(q, k, v, scale=0.125)[0]):
        return "Use the scale that is given."
    if near(got, oracle.attention(q, k[:, turns], v[:, turns], scale=scale)[0]):
        return (
            f"Head i reads KV head i % {kv_heads}, as repeat makes it. Neighbours share a KV head: "
            f"i // {heads // kv_heads}, as repeat_interleave makes it."
        )
    if not near(torch.as_tensor(ones), torch.ones_like(got)):
        return (
            "With values that are all 1 the result is not 1: a head's weights over the keys must sum to 1. Over what "
            "does the softmax go?"
        )
    return "Which KV head does each query head read?" if heads > 1 else ""
