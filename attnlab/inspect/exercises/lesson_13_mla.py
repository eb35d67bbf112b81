"""Lesson 13: multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from attnlab.eager import oracle
from attnlab.inspect.exercises.registry import Wrong, ask, exercise, near, off_by, same_tensor, whole_numbers
from attnlab.inspect.footprint import Footprint
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, workbench
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import SplitContext
from attnlab.plan.splits import cut
from attnlab.plan.workspace import scratch_bytes
from attnlab.spec import AttentionSpec, ModelSpec

KIMI, LARGER = "Kimi-K2-Instruct", "DeepSeek-V3"
"""The model that 13-1 asks for, and the lesson's."""
NOPE, ROPE, VALUE = 128, 64, 128
"""Columns of its heads' own keys, without and with position, and of their values."""
LENGTH, SHARE = 131_072, 0.1
"""The request of 13-2, and what its partial results may move, as a share of the keys' bytes."""


@exercise("13-1", Sequence, "a list of three numbers")
def costs(answer: Any) -> str:
    """What a token takes, what a range takes, and when to expand."""
    got = whole_numbers(answer)
    if len(got) != 3:
        return f"Expected a list of three numbers, (a), (b) and (c), got {answer!r}."
    spec = ModelSpec.load(KIMI).layers[0].attention
    return _token(got[0], spec) or _programs(got[1], spec) or _queries(got[2], spec)


def _token(got: int, spec: AttentionSpec) -> str:
    expected = spec.qk_dim * torch.float16.itemsize
    if got == expected:
        return ""
    if got == (spec.qk_dim + spec.v_dim) * torch.float16.itemsize:
        return "(a): the values are columns of the row, and take no memory of their own."
    if got == expected * spec.heads:
        return "(a): one row serves all heads."
    if got == spec.v_dim * torch.float16.itemsize:
        return "(a): the columns with the position are cached, too."
    if got == spec.qk_dim:
        return "(a): that is how many numbers a row has. How many bytes has each?"
    return f"(a): a row has {spec.v_dim} + {spec.qk_dim - spec.v_dim} numbers, of {torch.float16.itemsize} bytes each."


def _programs(got: int, spec: AttentionSpec) -> str:
    if got == _programs_a_range(KIMI):
        return ""
    if got == _programs_a_range(LARGER):
        return f"(b): that is for the heads of {LARGER}. This model has {spec.heads}."
    return f"(b): all {spec.heads} heads read the range, and a program has room for 16 of them."


def _programs_a_range(name: str) -> int:
    """Return how many programs read the one range of a request of one token."""
    bench = workbench(name, lens=[1], policy="static", engine="eager", layers=[0])
    spec = bench.model.layer(0).attention
    return Footprint.of(bench.plan().lane(0), spec, multiprocessors=H200_MULTIPROCESSORS).programs


def _queries(got: int, spec: AttentionSpec) -> str:
    """The fewest queries that pay for expanding; for every key and head, so that neither counts."""
    absorbed, own = spec.qk_dim + spec.v_dim, NOPE + ROPE + VALUE
    once = spec.v_dim * (NOPE + VALUE)
    expected = once // (absorbed - own) + 1
    if got == expected - 1:
        return f"(c) is one too few: with {got} new tokens the absorbed form multiplies less still."
    if got in (once // absorbed, once // absorbed + 1):
        return f"(c): the expanded form multiplies {own} times for each query, too, besides what expanding costs."
    if got != expected:
        return (
            f"(c): for n queries a key and head take {absorbed} n multiplications absorbed, and {own} n + {once:,} "
            f"expanded. From which n on are the second fewer?"
        )
    return ""


@exercise("13-2", Integral)
def smallest_tile(answer: Any) -> str:
    """The smallest tile whose partial results are cheap."""
    if answer < 1 or answer & (answer - 1):
        return f"Expected a power of two, such as 256 or 512, got {answer}."
    expected = next(1 << i for i in range(5, 18) if _moved(1 << i) <= SHARE)
    if answer < expected:
        return f"With tile={answer} partials move {_moved(int(answer)):.0%} of the keys' bytes."
    return "" if answer == expected else f"With tile={answer} they move less than a tenth, but a smaller tile would do."


def _moved(tile: int) -> float:
    """Bytes of partial results, written and read, as a share of the keys'."""
    spec = ModelSpec.load(LARGER).layers[0].attention
    ctx = SplitContext(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        v_dim=spec.v_dim,
        mla=True,
        context_len=LENGTH,
        multiprocessors=H200_MULTIPROCESSORS,
    )
    used = sum(cut(Tile(tile=tile), [LENGTH], ctx).to_host().effective)
    partials = scratch_bytes(partials=used, group=spec.group, v_dim=spec.v_dim)
    return 2 * partials / (LENGTH * spec.qk_dim * torch.bfloat16.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """A small case of 13-3: queries without and with position, cached rows, and the heads' matrices."""

    q_nope: Tensor
    q_rope: Tensor
    rows: Tensor
    w_uk: Tensor
    w_uv: Tensor
    scale: float

    @classmethod
    def drawn(cls, *, queries: int, keys: int, heads: int) -> Latent:
        """Return a case of normal numbers; all dimensions are different."""
        nope, rope, latent, v_dim = 5, 2, 7, 3
        generator = torch.Generator().manual_seed(13)
        shapes = ((queries, heads, nope), (queries, heads, rope), (keys, latent + rope))
        matrices = ((heads, nope, latent), (heads, v_dim, latent))
        q_nope, q_rope, rows, w_uk, w_uv = (torch.randn(s, generator=generator) for s in shapes + matrices)
        return cls(q_nope=q_nope, q_rope=q_rope, rows=rows, w_uk=w_uk, w_uv=w_uv, scale=(nope + rope) ** -0.5)

    def expanded(self, *, scale: float, rope: float = 1.0, late: int = 0) -> Tensor:
        """Return the oracle's answer over every head's own keys and values.

        With another scale, with less of the position, or with queries that stand `late` tokens further back, it is what
        a mistake gives.
        """
        latent, queries = self.w_uk.shape[2], self.q_nope.shape[0]
        c, r = self.rows[:, :latent].double(), self.rows[:, latent:].double()
        k = torch.einsum("kl,hdl->khd", c, self.w_uk.double())
        v = torch.einsum("kl,hdl->khd", c, self.w_uv.double())
        k = torch.cat([k, r[:, None].expand(-1, k.shape[1], -1)], -1)
        q = torch.cat([self.q_nope.double(), self.q_rope.double() * rope], -1)
        ends = [min(len(k), len(k) - queries + 1 + i + late) for i in range(queries)]
        return torch.stack([oracle.attention(q[i], k[:end], v[:end], scale=scale)[0] for i, end in enumerate(ends)])


@exercise("13-3", Callable)
def attend_latent(answer: Any) -> str:
    """The absorbed form for several queries."""
    for queries, keys, heads in ((1, 4, 1), (1, 9, 3), (3, 9, 4), (4, 4, 2)):
        x = Latent.drawn(queries=queries, keys=keys, heads=heads)
        words = f"{queries} quer{'y' if queries == 1 else 'ies'}, {keys} keys and {heads} head{'s' * (heads != 1)}"
        case = f"With {words}"
        expected = x.expanded(scale=x.scale)
        got = ask(case, answer, x.q_nope, x.q_rope, x.rows, x.w_uk, x.w_uv, x.scale)
        if isinstance(got, Tensor) and got.shape == (queries, heads, x.w_uv.shape[2]):
            raise Wrong(f"{case}: these are latents. Each head makes its output out of its own, with w_uv.")
        mine = same_tensor(case, got, expected)
        if not near(mine, expected):
            raise Wrong(f"{case}: off by {off_by(mine, expected):.3g}. {_why(x, mine)}".rstrip())
    return ""


def _why(x: Latent, got: Tensor) -> str:
    """Say what a wrong output looks like."""
    if near(got, x.expanded(scale=x.scale, late=x.rows.shape[0])):
        return "Every query sees all keys, also of tokens that come after its own."
    if near(got, x.expanded(scale=x.scale, late=-1)):
        return "A query sees its own key as well."
    if near(got, x.expanded(scale=x.scale, late=x.q_nope.shape[0] - x.rows.shape[0])):
        return (
            "The queries are those of the last tokens: query i of n stands at keys - n + i, and sees keys up to that "
            "one."
        )
    if near(got, x.expanded(scale=x.rows.shape[1] ** -0.5)):
        return "That is the scale of rows. Use the one that is given."
    if near(got, x.expanded(scale=1.0)):
        return "The scale is left out."
    if near(got, x.expanded(scale=x.scale, rope=0.0)):
        return "The scores leave out the columns with the position, q_rope and the last columns of rows."
    return ""
