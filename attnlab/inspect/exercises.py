"""The exercises of the notebooks check themselves: `check_exercise("03-2", answer)` says yes, or what is wrong.

What is right is computed by the package itself, from the toy batch of the lessons, and not written down here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from attnlab.eager import oracle
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, Workbench, workbench
from attnlab.memory.slots import SlotAllocator
from attnlab.plan.index import KVIndex
from attnlab.plan.policies.static import Static
from attnlab.plan.policy import SplitContext, resolve_policy
from attnlab.plan.splits import cut
from attnlab.spec import AttentionSpec, ModelSpec

TOY_LENS = (5, 64, 200, 1)
"""The batch of every lesson."""
LONG_LENS = (2048, 96, 700)
"""The batch of recorded keys."""
CLOSE = 1e-4
"""An answer in fp32 is right where it is this near to the fp64 oracle, as a share of one plus the largest value."""

Check = Callable[[Any], str]
_CHECKS: dict[str, tuple[Any, Check]] = {}
_WORDS: dict[Any, str] = {Integral: "a whole number", Real: "a number", Callable: "a function", Sequence: "a list"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check says. `wrong` is empty where the answer is right."""

    number: str
    wrong: str

    @property
    def right(self) -> bool:
        """Whether the answer is right."""
        return not self.wrong

    def __repr__(self) -> str:
        return f"{self.number}: yes, that is right." if self.right else f"{self.number}: not yet. {self.wrong}"


def check_exercise(number: str, answer: object) -> Verdict:
    """Say whether an answer is right; where it is not, what is wrong and what to look at.

    An answer that raises is a wrong one: the verdict says what it raised. Raises ValueError where there is no such
    exercise.

    >>> check_exercise("04-1", 8)
    04-1: not yet. 8 is what was asked for. Rounding makes ranges longer, and so fewer: how long is one, in 32s?
    """
    if number not in _CHECKS:
        raise ValueError(f"exercise: expected one of {', '.join(_CHECKS)}, got {number!r}")
    if _missing(answer):
        return Verdict(number=number, wrong="There is no answer yet: replace the dots in the cell above, and run it.")
    kind, check = _CHECKS[number]
    if not isinstance(answer, kind):
        wanted = _WORDS.get(kind, f"a {kind.__name__}")
        return Verdict(number=number, wrong=f"Expected {wanted}, got {type(answer).__name__}.")
    try:
        return Verdict(number=number, wrong=check(answer))
    except Exception as error:  # the reader's code may raise anything, and that is an answer too
        where = " Call it yourself to see where." if callable(answer) else ""
        return Verdict(number=number, wrong=f"It raised {type(error).__name__}: {error}.{where}")


def toy(policy: str = "seed") -> Workbench:
    """Return the toy batch on a workbench: 4 requests, 8 query heads, 2 KV heads, 64 dimensions, pages of 4."""
    attention = AttentionSpec(heads=8, kv_heads=2, qk_dim=64, v_dim=64, scale=0.125)
    model = ModelSpec.uniform(attention, layers=1, context_len=2048, page_size=4, kv_dtype=torch.float32)
    return workbench(model, lens=TOY_LENS, policy=policy, engine="eager", multiprocessors=H200_MULTIPROCESSORS)


def _exercise(number: str, kind: Any) -> Callable[[Check], Check]:
    """Register the check of an exercise whose answer is of a kind; it returns what is wrong, or nothing."""

    def add(check: Check) -> Check:
        _CHECKS[number] = (kind, check)
        return check

    return add


def _missing(x: object) -> bool:
    return x is None or x is ...


def _same_tensor(got: Any, expected: Tensor, what: str) -> str:
    """Return what is wrong with a tensor that should be near another, or nothing."""
    if _missing(got):
        return "Your function returns nothing yet."
    got = torch.as_tensor(got)
    if got.shape != expected.shape:
        return f"{what}: expected shape {list(expected.shape)}, got {list(got.shape)}."
    if not torch.isfinite(got).all():
        return f"{what}: the result holds inf or nan. Is the maximum subtracted before exp?"
    off = float((got.double() - expected.double()).abs().max())
    limit = CLOSE * (1 + float(expected.abs().max()))
    return "" if off <= limit else f"{what}: off by up to {off:.3g}."


# 00: the map


@_exercise("00-1", Integral)
def _bytes_of_a_token(answer: Any) -> str:
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


@_exercise("00-2", Workbench)
def _nothing_cut(answer: Any) -> str:
    if answer.lens != TOY_LENS:
        return f"Keep the lengths {list(TOY_LENS)}; these are {list(answer.lens)}. Change how they are cut."
    counts = answer.plan().lane(0).splits.to_host().effective
    if max(counts) == 1:
        return ""
    return f"The requests are cut into {list(counts)} ranges. Which policy's ranges are longer than 200 keys?"


@_exercise("00-3", Callable)
def _grouped_attention(answer: Any) -> str:
    for heads, kv_heads, keys in ((1, 1, 5), (8, 8, 7), (8, 2, 200)):
        torch.manual_seed(heads + keys)
        q, k, v = torch.randn(heads, 64), torch.randn(keys, kv_heads, 64), torch.randn(keys, kv_heads, 32)
        expected = oracle.attention(q, k, v, scale=0.125)[0]
        what = f"With {heads} query heads, {kv_heads} KV heads and {keys} keys"
        wrong = _same_tensor(answer(q, k, v, 0.125), expected, what)
        if wrong:
            return wrong
    return ""


# 01: the paged cache


@_exercise("01-1", Sequence)
def _slots_after_release(answer: Any) -> str:
    slots = SlotAllocator(num_slots=24, page_size=4)
    slots.allocate("a", 5)
    slots.allocate("b", 3)
    slots.allocate("a", 4)
    slots.release("b")
    expected = slots.allocate("c", 6).tolist()
    got = [int(slot) for slot in answer]
    if got == expected:
        return ""
    if len(got) != len(expected):
        return f"Expected a list of {len(expected)} slots, one for each token."
    if got[:4] != expected[:4]:
        return "b gave its page back, and the lowest free page is handed out first. Which one is that?"
    return "The first four are right. Which page is the next free one? Those of a are taken."


@_exercise("01-2", Integral)
def _smallest_pool(answer: Any) -> str:
    page_size = 16
    expected = page_size * (1 + sum(-(-n // page_size) for n in TOY_LENS))
    if answer == expected:
        return ""
    if answer == expected - page_size:
        return "One page short: page 0 is the sink, and nobody's."
    return "Too few: not every request fits." if answer < expected else "It fits, but fewer slots would do."


@_exercise("01-3", Callable)
def _slot_of_position(answer: Any) -> str:
    for page_size in (1, 4, 16):
        slots = SlotAllocator(num_slots=64 * page_size, page_size=page_size)
        for _ in range(6):
            slots.allocate("neighbour", page_size)
            slots.allocate("mine", page_size + 1)
        expected = slots.slots_of("mine").tolist()
        pages = [slot // page_size for slot in expected[::page_size]]
        for position, slot in enumerate(expected):
            got = answer(pages, page_size, position)
            if _missing(got):
                return "Your function returns nothing yet."
            if int(got) != slot:
                return (
                    f"pages {pages[:3]}..., page size {page_size}, position {position}: expected slot {slot}, "
                    f"got {got}. Which entry of pages is it, and which slot within that page?"
                )
    return ""


# 02: the index


@_exercise("02-1", Sequence)
def _owner_of_entry(answer: Any) -> str:
    indptr = toy().plan().lane(0).layout.index.indptr.tolist()
    request = max(r for r, start in enumerate(indptr[:-1]) if start <= 100)
    expected = (request, 100 - indptr[request])
    if len(answer) != 2:
        return f"Expected a pair (request, position), got {answer!r}."
    if answer[0] != expected[0]:
        return "Not that request. The lists begin at the sums of the lengths before: 0, 5, ..."
    return "" if answer[1] == expected[1] else "The request is right. Count the position from where its list begins."


@_exercise("02-2", KVIndex)
def _index_of_two(answer: Any) -> str:
    bench = toy()
    lists = [bench.table.slots_of(bench.table.rows[r]).tolist() for r in (2, 0)]
    if answer.reqs != 2:
        return f"It holds {answer.reqs} requests; two need an indptr of three entries."
    expected = [0, len(lists[0]), len(lists[0]) + len(lists[1])]
    if answer.indptr.tolist() != expected:
        return f"indptr is {answer.indptr.tolist()}. Request 2 comes first, with {expected[1]} slots."
    got = answer.slots[: expected[-1]].tolist()
    return "" if got == lists[0] + lists[1] else "indptr is right, the slots are not: are they those of 2, then of 0?"


@_exercise("02-3", Callable)
def _gather(answer: Any) -> str:
    generator = torch.Generator().manual_seed(0)
    for rows, lens in (([0, 1], [3, 2]), ([2, 0, 1], [4, 0, 7]), ([1], [8]), ([0, 2], [0, 0])):
        table = torch.randint(1, 500, (3, 8), generator=generator, dtype=torch.int32)
        got = answer(table, torch.tensor(rows), torch.tensor(lens))
        if _missing(got):
            return "Your function returns nothing yet."
        what = f"rows {rows}, lens {lens}"
        indptr, slots = (torch.as_tensor(x).tolist() for x in got)
        offsets = torch.tensor([0, *lens]).cumsum(0).tolist()
        if indptr != offsets:
            return f"{what}: expected indptr {offsets}, got {indptr}."
        expected = [slot for row, n in zip(rows, lens, strict=True) for slot in table[row, :n].tolist()]
        if slots != expected:
            return f"{what}: indptr is right. Expected slots {expected}, got {slots}."
    return ""


# 03: merging softmax states


@_exercise("03-1", Real)
def _weight_of_b(answer: Any) -> str:
    lse = torch.tensor([2.0, 2.0 + math.log(3)], dtype=torch.float64)
    expected = float(torch.softmax(lse, 0)[1])
    if abs(float(answer) - expected) < 1e-3:
        return ""
    if abs(float(answer) - (1 - expected)) < 1e-3:
        return "That is the weight of A."
    return "The number of keys does not matter, the LSEs do: B's is larger by ln 3. What is exp of that?"


@_exercise("03-2", Callable)
def _merge_with_nothing(answer: Any) -> str:
    empty = (torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(3))
    torch.manual_seed(0)
    some, other = _state(torch.randn(4), torch.randn(4, 3)), _state(torch.randn(2) + 90, torch.randn(2, 3))
    cases = {
        "two states with keys": (some, other, _merged(some, other)),
        "nothing on the right": (some, empty, some),
        "nothing on the left": (empty, some, some),
        "nothing on both sides": (empty, empty, empty),
    }
    for what, (a, b, expected) in cases.items():
        got = answer(a, b)
        if _missing(got):
            return "Your function returns nothing yet."
        for name, mine, theirs in zip(("max", "sum", "acc"), got, expected, strict=True):
            mine = torch.as_tensor(mine)
            if torch.isnan(mine).any():
                return f"{what}: {name} is nan. -inf minus -inf is nan; what may be subtracted instead?"
            if not torch.allclose(mine.double(), theirs.double(), atol=CLOSE):
                return f"{what}: {name} should be {theirs.tolist()}, got {mine.tolist()}."
    return ""


def _state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = torch.exp(scores - scores.max())
    return scores.max(), p.sum(), p @ values


def _merged(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    top = torch.maximum(a[0], b[0])
    fade_a, fade_b = torch.exp(a[0] - top), torch.exp(b[0] - top)
    return top, a[1] * fade_a + b[1] * fade_b, a[2] * fade_a + b[2] * fade_b


@_exercise("03-3", Callable)
def _in_blocks(answer: Any) -> str:
    torch.manual_seed(0)
    for keys, block, scale in ((5, 2, 1.0), (64, 16, 1.0), (200, 32, 1.0), (200, 32, 500.0), (1, 8, 1.0)):
        scores, values = torch.randn(keys) * scale, torch.randn(keys, 8)
        expected = torch.softmax(scores.double(), 0) @ values.double()
        what = f"{keys} scores up to {scores.max():.0f} in blocks of {block}"
        wrong = _same_tensor(answer(scores, values, block), expected, what)
        if wrong:
            return wrong
    return ""


# 04: splitting


def _context() -> SplitContext:
    return SplitContext(
        heads=9, kv_heads=3, v_dim=64, mla=False, context_len=8192, multiprocessors=H200_MULTIPROCESSORS
    )


@_exercise("04-1", Integral)
def _ranges_of_257(answer: Any) -> str:
    (expected,) = cut(Static(splits=8), [257], _context()).to_host().effective
    if answer == expected:
        return ""
    if answer == 8:
        return "8 is what was asked for. Rounding makes ranges longer, and so fewer: how long is one, in 32s?"
    return "257 / 8 keys, rounded up to a multiple of 32, is the length of a range. How many of them cover 257?"


def _longest(splits: int) -> int:
    ranges = cut(Static(splits=splits), LONG_LENS, _context()).to_host().ranges
    return max(end - start for mine in ranges for start, end in mine)


@_exercise("04-2", Integral)
def _smallest_static(answer: Any) -> str:
    expected = next(n for n in range(1, LONG_LENS[0]) if _longest(n) <= 128)
    if answer < 1:
        return f"Expected at least one split, got {answer}."
    if answer < expected:
        return f"With {answer} splits the longest range still holds {_longest(answer)} keys."
    return "" if answer == expected else f"With {answer} no range is above 128 keys, but fewer splits would do."


@_exercise("04-3", object)
def _even_policy(answer: Any) -> str:
    policy = resolve_policy(answer)
    lens = [0, 1, 96, 97, 200, 1000, *LONG_LENS]
    ranges = cut(policy, lens, _context()).to_host().ranges
    for length, mine in zip(lens, ranges, strict=True):
        sizes = [end - start for start, end in mine]
        if sizes and max(sizes) > 96:
            return f"A request of {length} keys has a range of {max(sizes)}; at most 96 are allowed."
        if len(sizes) > -(-length // 96):
            return f"A request of {length} keys is cut into {len(sizes)} ranges; {-(-length // 96)} would do."
        if sizes and max(sizes) - min(sizes) > 1:
            return f"A request of {length} keys is cut into {sizes[:8]}: make them equal but for one key."
    bench = workbench("SmolLM2-135M", lens=LONG_LENS, policy=policy, engine="eager", layers=[18])
    out, q = bench.decode(18), bench.newest(18)[0]
    k, v = bench.cached(18, 0)
    expected = oracle.attention(q[0], k, v, scale=bench.model.layer(18).attention.scale)[0]
    off = float((out[0].double() - expected).abs().max())
    return "" if off < 0.01 else f"The ranges are right, but the output is off by {off:.3g}."
