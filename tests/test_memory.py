"""Slots, the request table and the pools: who owns what, what comes back, and what an error leaves behind."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from torch import Tensor

from attnlab.memory.pool import KVView
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.memory.rows import FP8_MAX, quantize
from attnlab.memory.slots import OutOfSlots, SlotAllocator
from attnlab.spec import AttentionSpec, ModelSpec
from tests.strategies import DEVICE, PAGE_SIZES

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.float16, torch.bfloat16, FP8]
LAYOUTS = ["slots", "pages"]


# --- SlotAllocator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_slot_of_the_sink_page_is_ever_given(page_size: int) -> None:
    slots = SlotAllocator(num_slots=4 * page_size, page_size=page_size)
    assert slots.allocate("a", 3 * page_size).tolist() == list(range(page_size, 4 * page_size))


def test_next_tokens_fill_the_last_page_before_a_new_one_is_taken() -> None:
    slots = SlotAllocator(num_slots=64, page_size=16)
    slots.allocate("a", 3)
    slots.allocate("b", 1)
    assert slots.allocate("a", 14).tolist() == [*range(19, 32), 48]
    assert slots.slots_of("a").tolist() == [*range(16, 32), 48]


def test_released_pages_are_given_again_the_lowest_first() -> None:
    slots = SlotAllocator(num_slots=8, page_size=1)
    for owner in "abcd":
        slots.allocate(owner, 1)
    slots.release("c")
    slots.release("a")
    assert slots.allocate("e", 3).tolist() == [1, 3, 5]


def test_a_second_release_is_an_error_that_frees_nothing() -> None:
    slots = SlotAllocator(num_slots=8, page_size=1)
    slots.allocate("a", 3)
    slots.release("a")
    with pytest.raises(ValueError, match="'a' holds no slots; it was released before"):
        slots.release("a")
    assert slots.free_pages == 7


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_out_of_slots_changes_nothing(page_size: int) -> None:
    slots = SlotAllocator(num_slots=4 * page_size, page_size=page_size)
    slots.allocate("a", 2 * page_size - 1 if page_size > 1 else 2)
    before = (slots.free_pages, slots.owners, slots.slots_of("a").tolist(), slots.epoch)
    for owner in ("a", "new"):
        with pytest.raises(OutOfSlots, match=f"'{owner}' needs . more pages of {page_size} slots .* 1 are free"):
            slots.allocate(owner, 2 * page_size + 1)
    assert (slots.free_pages, slots.owners, slots.slots_of("a").tolist(), slots.epoch) == before
    slots.check_integrity(live=["a"])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_truncate_keeps_the_front_and_gives_whole_pages_back(page_size: int) -> None:
    slots = SlotAllocator(num_slots=6 * page_size, page_size=page_size)
    given = slots.allocate("a", 4 * page_size).tolist()
    for kept in range(4 * page_size, -1, -1):
        epoch = slots.epoch
        slots.truncate("a", kept)
        assert slots.slots_of("a").tolist() == given[:kept]
        assert slots.free_pages == 5 - -(-kept // page_size)
        assert (slots.epoch > epoch) == (kept < 4 * page_size)  # the first keeps all
        slots.check_integrity(live=["a"])
    assert slots.owners == ["a"]


def test_after_a_truncate_the_last_page_is_filled_again() -> None:
    slots = SlotAllocator(num_slots=32, page_size=4)
    slots.allocate("a", 11)
    slots.allocate("b", 1)
    slots.truncate("a", 5)
    assert slots.allocate("a", 5).tolist() == [9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("owner", "tokens", "message"),
    [
        ("a", 4, "tokens: expected at most the 3 that 'a' holds, got 4"),
        ("a", -1, "tokens: expected an int of at least 0, got -1"),
        ("b", 0, "owner: 'b' holds no slots"),
    ],
)
def test_a_truncate_that_cannot_be_changes_nothing(owner: str, tokens: int, message: str) -> None:
    slots = SlotAllocator(num_slots=8, page_size=1)
    slots.allocate("a", 3)
    before = (slots.epoch, slots.free_pages, slots.slots_of("a").tolist())
    with pytest.raises(ValueError, match=message):
        slots.truncate(owner, tokens)
    assert (slots.epoch, slots.free_pages, slots.slots_of("a").tolist()) == before


def test_a_free_changes_the_epoch_and_no_other_allocator_has_had_it() -> None:
    a, b = (SlotAllocator(num_slots=8, page_size=1) for _ in range(2))
    seen = {a.epoch, b.epoch}
    assert len(seen) == 2
    for slots in (a, b, a):
        slots.allocate("x", 1)
        assert slots.epoch in seen
        slots.release("x")
        assert slots.epoch not in seen
        seen.add(slots.epoch)


@pytest.mark.parametrize("tokens", [-1, 2.0, "3", None])
def test_a_token_count_that_is_none_is_named(tokens: Any) -> None:
    with pytest.raises(ValueError, match=f"tokens: expected an int of at least 0, got {tokens!r}"):
        SlotAllocator(num_slots=8, page_size=1).allocate("a", tokens)


@pytest.mark.parametrize(
    ("num_slots", "page_size", "message"),
    [
        (8, 3, "page_size: expected a divisor of num_slots 8, got 3"),
        (16, 16, "num_slots: expected at least two pages of 16"),
        (0, 1, "num_slots: expected at least 1, got 0"),
        (8, 0, "page_size: expected at least 1, got 0"),
    ],
)
def test_a_pool_that_cannot_be_paged_is_refused(num_slots: int, page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlotAllocator(num_slots=num_slots, page_size=page_size)


def test_an_owner_that_is_not_live_is_a_leak() -> None:
    slots = SlotAllocator(num_slots=8, page_size=1)
    slots.allocate("a", 1)
    slots.allocate("b", 2)
    slots.check_integrity(live=["a", "b"])
    with pytest.raises(RuntimeError, match=r"leak: \['b'\] hold 2 pages"):
        slots.check_integrity(live=["a"])


CORRUPTIONS: dict[str, tuple[Callable[[SlotAllocator], Any], str]] = {
    "shared page": (lambda s: s._pages["b"].append(s._pages["a"][0]), "page 1 is held by 'a' and by 'b'"),
    "freed but owned": (lambda s: s._free._heap.append(1), "page 1 is held by 'the free list' and by 'a'"),
    "freed twice": (lambda s: s._free._heap.append(3), "page 3 is held by 'the free list' and by 'the free list'"),
    "lost page": (lambda s: s._free._heap.remove(7), r"pages \[7\] are neither free nor owned"),
    "owned sink": (lambda s: s._pages["a"].append(0), "'a' holds page 0"),
    "free sink": (lambda s: s._free._heap.append(0), "'the free list' holds page 0"),
    "page beyond the pool": (lambda s: s._free._heap.append(8), "'the free list' holds page 8"),
    "too many tokens": (lambda s: s._tokens.update(a=5), "'a' holds 1 pages for 5 tokens, which need 2"),
    "too few tokens": (lambda s: s._tokens.update(a=0), "'a' holds 1 pages for 0 tokens, which need 0"),
    "tokens of nobody": (lambda s: s._tokens.update(c=1), r"\['c'\]"),
    "pages of nobody": (lambda s: s._tokens.pop("a"), r"\['a'\]"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_integrity_check_finds(name: str) -> None:
    corrupt, message = CORRUPTIONS[name]
    slots = SlotAllocator(num_slots=32, page_size=4)
    slots.allocate("a", 3)
    slots.allocate("b", 4)
    slots.check_integrity()
    corrupt(slots)
    with pytest.raises(RuntimeError, match=message):
        slots.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls, beside a model that keeps every owner's slots as a list."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.page_size, self.pages = 4, 12
        self.slots = SlotAllocator(num_slots=self.page_size * self.pages, page_size=self.page_size)
        self.model: dict[int, list[int]] = {}
        self.count = 0

    def pages_of(self, owner: int, tokens: int = 0) -> int:
        return -(-(len(self.model.get(owner, [])) + tokens) // self.page_size)

    def free(self) -> int:
        return self.pages - 1 - sum(self.pages_of(owner) for owner in self.model)

    def grow(self, owner: int, tokens: int) -> bool:
        fits = self.pages_of(owner, tokens) - self.pages_of(owner) <= self.free()
        if not fits:
            with pytest.raises(OutOfSlots):
                self.slots.allocate(owner, tokens)
            return False
        new = self.slots.allocate(owner, tokens).tolist()
        assert len(new) == tokens
        self.model.setdefault(owner, []).extend(new)
        return True

    @rule(target=owners, tokens=st.integers(0, 20))
    def admit(self, tokens: int) -> Any:
        self.count += 1
        return self.count if self.grow(self.count, tokens) else multiple()

    @rule(owner=owners, tokens=st.integers(0, 9))
    def extend(self, owner: int, tokens: int) -> None:
        self.grow(owner, tokens)

    @rule(owner=owners, data=st.data())
    def truncate(self, owner: int, data: st.DataObject) -> None:
        epoch, held = self.slots.epoch, len(self.model[owner])
        kept = data.draw(st.integers(0, held))
        self.slots.truncate(owner, kept)
        assert (self.slots.epoch > epoch) == (kept < held)
        del self.model[owner][kept:]

    @rule(owner=consumes(owners))
    def release(self, owner: int) -> None:
        epoch = self.slots.epoch
        self.slots.release(owner)
        assert self.slots.epoch > epoch
        del self.model[owner]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.slots.check_integrity(live=self.model)
        assert self.slots.free_pages == self.free()
        assert self.slots.owners == list(self.model)
        held = [slot for mine in self.model.values() for slot in mine]
        assert len(held) == len(set(held)) and all(slot >= self.page_size for slot in held)
        for owner, mine in self.model.items():
            assert self.slots.slots_of(owner).tolist() == mine
            assert all(b == a + 1 or (a + 1) % self.page_size == 0 for a, b in zip(mine, mine[1:], strict=False))


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)


# --- RequestTable -----------------------------------------------------------------------------------------------


def table(max_requests: int = 3, max_context: int = 8) -> RequestTable:
    return RequestTable(max_requests=max_requests, max_context=max_context, num_slots=16, device=DEVICE)


def test_a_row_holds_its_slots_in_position_order() -> None:
    t = table()
    row = t.admit()
    t.append(row, torch.tensor([7, 3]))
    t.append(row, torch.tensor([9], dtype=torch.int32))
    assert t.length(row) == 3
    assert t.slots_of(row).tolist() == [7, 3, 9]
    assert t.slots_of(row).data_ptr() == t.slots[row].data_ptr()


@pytest.mark.parametrize("bad", [0, -1, 16])
def test_a_slot_outside_the_pool_writes_nothing(bad: int) -> None:
    t = table()
    row = t.admit()
    t.append(row, torch.tensor([5]))
    before = t.slots.clone()
    with pytest.raises(
        ValueError, match=rf"slots: expected 1 to 15 \(slot 0 is the sink\), got \[{bad}\] for request 0"
    ):
        t.append(row, torch.tensor([4, bad, 6]))
    assert torch.equal(t.slots, before) and t.length(row) == 1


def test_more_tokens_than_columns_write_nothing() -> None:
    t = table(max_context=4)
    row = t.admit()
    t.append(row, torch.tensor([1, 2, 3, 4]))
    before = t.slots.clone()
    with pytest.raises(
        ValueError, match="request 0 would hold 5 tokens, the table has 4 columns; build it with a larger max_context"
    ):
        t.append(row, torch.tensor([5]))
    assert torch.equal(t.slots, before) and t.length(row) == 4


@pytest.mark.parametrize("slots", [[4], torch.tensor([4.0]), torch.tensor([[4]])])
def test_slots_of_another_shape_or_dtype_are_refused(slots: Any) -> None:
    t = table()
    with pytest.raises((TypeError, ValueError), match=r"slots: expected \[tokens\] int32 or int64, got"):
        t.append(t.admit(), slots)


def test_a_full_table_says_so() -> None:
    t = table(max_requests=2)
    assert [t.admit(), t.admit()] == [0, 1]
    with pytest.raises(RuntimeError, match="all 2 rows are in use"):
        t.admit()


def test_release_sets_the_row_back_to_the_sink_and_frees_it() -> None:
    t = table()
    rows = [t.admit() for _ in range(3)]
    for row in rows:
        t.append(row, torch.tensor([row + 1, row + 4]))
    t.release(1)
    assert t.slots[1].tolist() == [0] * 8
    assert t.slots_of(2).tolist() == [3, 6]
    assert t.rows == [0, 2]
    assert t.admit() == 1 and t.length(1) == 0


def test_truncate_sets_what_is_cut_back_to_the_sink() -> None:
    t = table()
    row = t.admit()
    t.append(row, torch.tensor([7, 3, 9, 4]))
    t.truncate(row, 4)
    assert t.length(row) == 4
    t.truncate(row, 1)
    assert t.length(row) == 1 and t.slots[row].tolist() == [7] + [0] * 7
    for length, message in ((2, "at most the 1 tokens of request 0, got 2"), (-1, "an int of at least 0, got -1")):
        with pytest.raises(ValueError, match=f"length: expected {message}"):
            t.truncate(row, length)
    t.append(row, torch.tensor([5]))
    assert t.slots_of(row).tolist() == [7, 5]
    with pytest.raises(ValueError, match="row: 1 is not in use"):
        t.truncate(1, 0)


def paged_table() -> RequestTable:
    return RequestTable(max_requests=3, max_context=12, num_slots=32, device=DEVICE, page_size=4)


def test_requests_lie_page_wise_however_they_grow() -> None:
    t = paged_table()
    row = t.admit()
    for slots in ([12, 13, 14], [15], [], [8, 9, 10, 11, 20]):
        t.append(row, torch.tensor(slots, dtype=torch.int64))
    for length, more in ((9, [21]), (6, [10]), (4, [28]), (3, [15, 4, 5])):
        t.truncate(row, length)
        t.append(row, torch.tensor(more))
    assert t.slots_of(row).tolist() == [12, 13, 14, 15, 4, 5]
    t.release(row)
    t.append(t.admit(), torch.tensor([8, 9]))
    assert t.slots_of(row).tolist() == [8, 9]


@pytest.mark.parametrize(
    ("held", "more", "message"),
    [
        ([], [13, 14], "a multiple of 4 at position 0 of request 0, got 13"),
        ([12, 13], [15], "slot 14 at position 2 of request 0, got 15"),
        ([12, 13], [14, 16], "slot 15 at position 3 of request 0, got 16"),
        ([12, 13], [18, 19], "slot 14 at position 2 of request 0, got 18"),
        ([12, 13], [14, 15, 17, 18], "a multiple of 4 at position 4 of request 0, got 17"),
        ([12, 13, 14, 15], [8, 9, 11], "slot 10 at position 6 of request 0, got 11"),
    ],
)
def test_slots_that_do_not_lie_page_wise_write_nothing(held: list[int], more: list[int], message: str) -> None:
    t = paged_table()
    row = t.admit()
    t.append(row, torch.tensor(held, dtype=torch.int64))
    before = t.slots.clone()
    with pytest.raises(ValueError, match=f"slots: expected {message}; .* or build the table with page_size=1"):
        t.append(row, torch.tensor(more))
    assert torch.equal(t.slots, before) and t.length(row) == len(held)
    t.append(row, torch.tensor([*range(12 + len(held), 16), 24]))


def first_off_its_page(length: int, held: list[int], more: list[int], size: int) -> int | None:
    """The plain rule, token by token: the first position whose slot is not that of its page."""
    given = [*held, *more]
    for position in range(length, len(given)):
        starts_page = position % size == 0
        if given[position] % size > 0 if starts_page else given[position] != given[position - 1] + 1:
            return position
    return None


@given(data=st.data(), size=st.sampled_from([1, 2, 4, 16]))
def test_slots_are_held_to_the_plain_rule(data: st.DataObject, size: int) -> None:
    """Requests that grow in several steps, in pages that were drawn, with a slot here and there that is another."""
    t = RequestTable(max_requests=1, max_context=64, num_slots=256, device=DEVICE, page_size=size)
    row, held = t.admit(), list[int]()
    for count in data.draw(st.lists(st.integers(0, 20), max_size=3)):
        more: list[int] = []
        for position in range(len(held), len(held) + count):
            before = [*held, *more]
            page = data.draw(st.integers(1, 256 // size - 1)) * size
            more.append(page if position % size == 0 else min(255, before[-1] + 1))
        for at in data.draw(st.sets(st.integers(0, max(0, count - 1)), max_size=1)):
            more[at : at + 1] = [data.draw(st.integers(1, 255))] * (count > 0)
        at = first_off_its_page(len(held), held, more, size) if size > 1 else None
        if at is not None:
            with pytest.raises(ValueError, match=f"at position {at} of request 0, got {[*held, *more][at]};"):
                t.append(row, torch.tensor(more))
            break
        t.append(row, torch.tensor(more, dtype=torch.int64))
        held += more
        assert t.slots_of(row).tolist() == held


@pytest.mark.parametrize("size", [1, 16])
def test_a_long_prompt_takes_no_more_lines_than_a_short_one(size: int) -> None:
    """Lines of Python that a call runs are counted: none may be a token's, or a page's."""
    lines: list[int] = []
    for tokens in (32, 100_000):
        t = RequestTable(max_requests=1, max_context=tokens, num_slots=tokens + size, device=DEVICE, page_size=size)
        row, slots = t.admit(), torch.arange(size, size + tokens)
        with counted_lines() as count:
            t.append(row, slots)
        lines.append(count["requests.py"])
    assert lines[0] == lines[1] > 0


@contextmanager
def counted_lines() -> Iterator[Counter[str]]:
    """Count the lines of Python that run, by file."""
    count: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        count[Path(frame.f_code.co_filename).name] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def test_the_pages_of_a_table_stay_what_they_are() -> None:
    t = paged_table()
    with pytest.raises(AttributeError, match="page_size"):
        t.page_size = 1  # type: ignore[misc]
    assert t.page_size == 4


def test_requests_share_whole_pages_of_a_prefix() -> None:
    t = paged_table()
    first, second = t.admit(), t.admit()
    t.append(first, torch.tensor([12, 13, 14, 15, 20, 21]))
    t.append(second, t.slots_of(first)[:4])
    t.append(second, torch.tensor([24, 25]))
    third = t.admit()
    t.append(third, t.slots_of(first)[:5])
    with pytest.raises(ValueError, match="whole ones alone can be shared: copy the rest of a prefix"):
        t.append(third, torch.tensor([29]))


@pytest.mark.parametrize("call", ["length", "slots_of", "release"])
def test_a_free_row_has_nothing(call: str) -> None:
    t = table()
    t.admit()
    with pytest.raises(ValueError, match=r"row: 1 is not in use; rows in use are \[0\]"):
        getattr(t, call)(1)


def test_a_batch_that_asks_for_more_than_a_row_holds_is_refused() -> None:
    t = table()
    t.append(t.admit(), torch.tensor([4, 5]))
    t.check_holds([0, 2, 2], [2, 0, 0])
    with pytest.raises(ValueError, match="seq: request 0 asks for 3 tokens, row 0 of the table holds 2"):
        t.check_holds([0], [3])
    with pytest.raises(ValueError, match="rows: requests 0 and 1 are both row 0; they would write the same slot"):
        t.check_holds([0, 0], [2, 2])
    with pytest.raises(ValueError, match="seq: request 0 asks for 1 tokens, row 1 of the table holds 0"):
        t.check_holds([1], [1])
    with pytest.raises(ValueError, match="rows: request 0 is in row 3; the table has rows 0 to 2"):
        t.check_holds([3], [0])


# --- Pools ------------------------------------------------------------------------------------------------------


def model(*, page_size: int = 1, dtype: torch.dtype = torch.float32, mla: bool = False, layers: int = 2) -> ModelSpec:
    kv_heads, v_dim = (1, 16) if mla else (2, 20)
    attention = AttentionSpec(heads=4, kv_heads=kv_heads, qk_dim=24, v_dim=v_dim, scale=0.2)
    return ModelSpec.uniform(attention, layers=layers, context_len=64, page_size=page_size, kv_dtype=dtype, mla=mla)


def rows(tokens: int, heads: int, dim: int) -> Tensor:
    """Distinct numbers that every storage dtype but fp8 keeps exactly."""
    return (torch.arange(tokens * heads * dim, device=DEVICE) % 251 - 125).float().view(tokens, heads, dim) / 16


def poison(pool: MHAPool | MLAPool, layers: int = 2) -> None:
    for layer in range(layers):
        pool.view(layer).k.fill_(float("nan"))
        pool.view(layer).v.fill_(float("nan"))


def bits(view: KVView) -> tuple[Tensor, Tensor]:
    """The stored bits: NaN compares equal to itself, fp8 too."""
    as_int = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tuple(x.contiguous().view(as_int[x.element_size()]) for x in (view.k, view.v))  # type: ignore[return-value]


def read(view: KVView, x: Tensor, slots: Tensor) -> Tensor:
    heads = torch.arange(view.kv_heads, device=slots.device)
    return view.rows(x, slots[:, None], heads[None])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_read_back_and_nothing_else_changes(dtype: torch.dtype, layout: Any, page_size: int) -> None:
    pool = MHAPool(model(page_size=page_size, dtype=dtype), num_slots=64, device=DEVICE, layout=layout)
    poison(pool)
    slots = torch.tensor([63, 16, 40, 17, 1], device=DEVICE)
    k, v = rows(5, 2, 24), rows(5, 2, 20) + 1
    pool.write(1, slots, k, v)
    view = pool.view(1)
    assert (view.page_size, view.num_slots) == (page_size if layout == "pages" else 1, 64)
    assert torch.equal(read(view, view.k, slots).float(), k.to(dtype).float())
    assert torch.equal(read(view, view.v, slots).float(), v.to(dtype).float())
    unowned = torch.tensor([s for s in range(64) if s not in slots.tolist()], device=DEVICE)
    for x in (view.k, view.v):
        assert read(view, x, unowned).float().isnan().all()
    assert pool.view(0).k.float().isnan().all() and pool.view(0).v.float().isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_divide_what_is_stored_each_its_own(layout: Any) -> None:
    """B39: scales that differ from 1 and from each other, so that neither can be dropped or swapped."""
    pool = MHAPool(model(dtype=FP8, page_size=2), num_slots=8, device=DEVICE, layout=layout, k_scale=0.05, v_scale=0.2)
    slots = torch.tensor([3, 6], device=DEVICE)
    pool.write(0, slots, torch.full((2, 2, 24), 0.8, device=DEVICE), torch.full((2, 2, 20), 0.8, device=DEVICE))
    view = pool.view(0)
    assert torch.equal(read(view, view.k, slots).float(), torch.full((2, 2, 24), 16.0, device=DEVICE))
    assert torch.equal(read(view, view.v, slots).float(), torch.full((2, 2, 20), 4.0, device=DEVICE))
    assert (view.k_scale, view.v_scale) == (0.05, 0.2)


def test_fp8_rounds_to_within_half_a_step() -> None:
    x = torch.linspace(0.02, 20, 4001)
    back = quantize(x, 0.05, torch.empty(0, dtype=FP8)).float() * 0.05
    assert ((back - x).abs() <= x * 2**-4 * (1 + 2**-20)).all()


@pytest.mark.parametrize("value", [449.0, 1e6, float("inf")])
def test_fp8_saturates_at_its_largest_value(value: float) -> None:
    stored = quantize(torch.tensor([value, -value, 448.0]), 1.0, torch.empty(0, dtype=FP8)).float()
    assert stored.tolist() == [FP8_MAX, -FP8_MAX, FP8_MAX]


def test_a_nan_stays_one_in_fp8() -> None:
    assert quantize(torch.tensor([float("nan")]), 0.05, torch.empty(0, dtype=FP8)).float().isnan().all()


def test_a_page_of_all_layers_is_one_piece() -> None:
    pool = MHAPool(model(page_size=4), num_slots=16, device=DEVICE, layout="pages")
    page = pool.view(0).k.stride(0)
    assert page == 4 * 2 * (2 * (24 + 20))
    pieces = [(x.storage_offset(), x[0].numel()) for layer in (0, 1) for x in (pool.view(layer).k, pool.view(layer).v)]
    ends = [start + size for start, size in pieces]
    assert [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] == page


BAD_WRITES: dict[str, tuple[dict[str, Any], str]] = {
    "slot beyond": ({"slots": [3, 64]}, "slots: expected 0 to 63, got 64; the pool has 64 slots"),
    "negative slot": ({"slots": [-1, 4]}, "slots: expected 0 to 63, got -1"),
    "float slots": ({"slots": [3.0, 4.0]}, r"slots: expected \[tokens\] int32 or int64"),
    "too few keys": ({"k": (1, 2, 24)}, r"k: expected \[2, 2, 24\] .* got \[1, 2, 24\]"),
    "key heads": ({"k": (2, 4, 24)}, r"k: expected \[2, 2, 24\]"),
    "value dim": ({"v": (2, 2, 24)}, r"v: expected \[2, 2, 20\] .* got \[2, 2, 24\]"),
    "no values": ({"v": None}, "v: expected values beside the keys, got None"),
    "no layer": ({"layer": 2}, "pool_layer: the pool has layers 0 to 1, got 2; .* LayerSpec.pool_layer"),
    "negative layer": ({"layer": -1}, "pool_layer: the pool has layers 0 to 1, got -1"),
    "int keys": ({"k_dtype": torch.int32}, r"k: expected .* float32 or float16"),
    "fp8 keys": ({"k_dtype": FP8}, r"k: expected .* float32 or float16"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BAD_WRITES)
def test_a_failed_write_leaves_the_pool_untouched(name: str, layout: Any) -> None:
    change, message = BAD_WRITES[name]
    pool = MHAPool(model(page_size=2), num_slots=64, device=DEVICE, layout=layout)
    poison(pool)
    before = [bits(pool.view(layer)) for layer in (0, 1)]
    args: dict[str, Any] = {"layer": 0, "slots": [3, 4], "k": (2, 2, 24), "v": (2, 2, 20), **change}
    k = torch.zeros(args["k"], device=DEVICE).to(args.get("k_dtype", torch.float32))
    v = None if args["v"] is None else torch.zeros(args["v"], device=DEVICE)
    with pytest.raises((TypeError, ValueError), match=message):
        pool.write(args["layer"], torch.tensor(args["slots"], device=DEVICE), k, v)
    for layer in (0, 1):
        for was, now in zip(before[layer], bits(pool.view(layer)), strict=True):
            assert torch.equal(was, now)


def test_no_token_may_be_written() -> None:
    pool = MHAPool(model(), num_slots=8, device=DEVICE)
    pool.write(0, torch.zeros(0, dtype=torch.int64, device=DEVICE), rows(0, 2, 24), rows(0, 2, 20))


def test_padded_rows_may_write_to_the_sink() -> None:
    pool = MHAPool(model(), num_slots=8, device=DEVICE)
    poison(pool)
    pool.write(0, torch.zeros(3, dtype=torch.int64, device=DEVICE), rows(3, 2, 24), rows(3, 2, 20))
    assert pool.view(0).k[1:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_under_mla_the_values_are_a_view_of_the_keys(dtype: torch.dtype) -> None:
    pool = MLAPool(model(dtype=dtype, mla=True, page_size=2), num_slots=16, device=DEVICE, scale=0.5)
    poison(pool)
    slots = torch.tensor([5, 2], device=DEVICE)
    latent = rows(2, 1, 24)
    pool.write(1, slots, latent, None)
    view = pool.view(1)
    assert view.v_in_k and view.v.data_ptr() == view.k.data_ptr() and view.v.shape[-1] == 16
    assert (view.k_scale, view.v_scale) == (0.5, 0.5)
    assert torch.equal(read(view, view.k, slots).float(), (latent * 2).to(dtype).float())
    assert torch.equal(read(view, view.v, slots), read(view, view.k, slots)[..., :16])
    assert view.k.float().isnan().all(-1).flatten().sum() == 14


def test_mla_takes_its_own_view_as_values_and_no_other() -> None:
    pool = MLAPool(model(mla=True), num_slots=8, device=DEVICE)
    slots, latent = torch.tensor([1, 2], device=DEVICE), rows(2, 1, 24)
    pool.write(0, slots, latent, latent[..., :16])
    before = bits(pool.view(0))
    with pytest.raises(ValueError, match="v: under MLA the values are the first columns of k"):
        pool.write(0, slots, latent + 1, latent[..., :16].clone())
    with pytest.raises(ValueError, match=r"k: expected \[2, 1, 24\]"):
        pool.write(0, slots, latent[..., :16], None)
    assert torch.equal(bits(pool.view(0))[0], before[0])


def test_each_pool_sends_the_other_kind_of_model_away() -> None:
    with pytest.raises(ValueError, match="'uniform' keeps latent rows; build an MLAPool"):
        MHAPool(model(mla=True), num_slots=8, device=DEVICE)
    with pytest.raises(ValueError, match="'uniform' keeps keys and values apart; build an MHAPool"):
        MLAPool(model(), num_slots=8, device=DEVICE)


@pytest.mark.parametrize("build", [MHAPool, MLAPool])
def test_a_storage_dtype_that_no_kernel_reads_is_refused(build: Any) -> None:
    spec = model(dtype=torch.float64, mla=build is MLAPool)
    with pytest.raises(TypeError, match="kv_dtype: expected one of float32, float16, bfloat16, float8_e4m3fn, got"):
        build(spec, num_slots=8, device=DEVICE)


def test_an_unknown_layout_is_named() -> None:
    layout: Any = "rows"
    with pytest.raises(ValueError, match="layout: expected one of slots, pages, got 'rows'"):
        MHAPool(model(), num_slots=8, device=DEVICE, layout=layout)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="v_scale: expected a positive number"):
        MHAPool(model(), num_slots=8, device=DEVICE, v_scale=scale)


def test_a_plain_pool_has_one_id_space_and_its_allocators_epoch() -> None:
    pools = [MHAPool(model(), num_slots=8, device=DEVICE), MLAPool(model(mla=True), num_slots=8, device=DEVICE)]
    for pool in pools:
        slots = torch.tensor([3, 1])
        assert torch.equal(pool.translation(0).apply(slots), slots)
        before = pool.epoch
        pool.allocator.allocate("a", 2)
        pool.allocator.release("a")
        assert pool.epoch == pool.allocator.epoch > before
        pool.check_integrity()
        pool.allocator._free.take(1)
        with pytest.raises(RuntimeError, match="neither free nor owned"):
            pool.check_integrity()


# --- KVView -----------------------------------------------------------------------------------------------------


BAD_VIEWS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "two axes": (lambda: {"k": torch.zeros(4, 8), "v": torch.zeros(4, 8)}, r"k: expected \[slots, kv_heads, dim\] or"),
    "fp64": (lambda: {"k": torch.zeros(4, 1, 8).double(), "v": torch.zeros(4, 1, 8)}, "k: expected one of float32"),
    "strided": (lambda: {"k": torch.zeros(4, 1, 16)[..., ::2], "v": torch.zeros(4, 1, 8)}, "k: the last axis must be"),
    "heads": (lambda: {"k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 1, 8)}, "v: expected slots, heads, dtype"),
    "dtypes": (lambda: {"k": torch.zeros(4, 1, 8), "v": torch.zeros(4, 1, 8).half()}, "v: expected slots, heads"),
    "layouts": (lambda: {"k": torch.zeros(4, 1, 8), "v": torch.zeros(2, 2, 1, 8)}, "v: expected slots, heads"),
    "not a view": (lambda: {"k": torch.zeros(4, 1, 8), "v": torch.zeros(4, 1, 8), "v_in_k": True}, "v_in_k: expected"),
}


@pytest.mark.parametrize("name", BAD_VIEWS)
def test_a_view_that_kernels_could_not_read_is_refused(name: str) -> None:
    build, message = BAD_VIEWS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        KVView(**build())


def test_values_in_keys_are_no_wider_than_the_keys() -> None:
    k = torch.zeros(4, 1, 8)
    wider = k.as_strided((3, 1, 12), k.stride())
    with pytest.raises(ValueError, match="v_in_k: expected v to be a view of the first columns of k"):
        KVView(k=k[:3], v=wider, v_in_k=True)


def test_a_view_names_the_attention_that_it_does_not_fit() -> None:
    view = KVView(k=torch.zeros(4, 2, 8), v=torch.zeros(4, 2, 6))
    view.check_fits(AttentionSpec(heads=4, kv_heads=2, qk_dim=8, v_dim=6, scale=1.0))
    with pytest.raises(ValueError, match=r"expected \(kv_heads, qk_dim, v_dim\) \(2, 8, 8\) .* got \(2, 8, 6\)"):
        view.check_fits(AttentionSpec(heads=4, kv_heads=2, qk_dim=8, v_dim=8, scale=1.0))


def test_a_layer_of_a_model_is_found_by_its_place_in_the_pool() -> None:
    spec = ModelSpec.load("SmolLM2-135M").only((0, 18, 23))
    pool = MHAPool(spec, num_slots=4, device=DEVICE)
    place = spec.layer(18).pool_layer
    assert pool.view(pool_layer=place).k.data_ptr() == pool.view(1).k.data_ptr()
    with pytest.raises(
        ValueError, match="^pool_layer: the pool has layers 0 to 2, got 18; a model's layer has its number"
    ):
        pool.view(18)
