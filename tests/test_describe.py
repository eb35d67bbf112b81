"""Plans as tables and plain numbers: every number is the plan's, and what is wrong with a list is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlab
from attnlab.batch import DecodeBatch, DraftBatch, ExtendBatch, VerifyBatch
from attnlab.eager.index import EagerPlanOps
from attnlab.inspect.describe import describe
from attnlab.inspect.index_view import IndexView
from attnlab.inspect.step import Step, prefix_and_new, runs_of, total
from attnlab.inspect.tree_view import TreeView
from attnlab.inspect.window_view import WindowView, sampled
from attnlab.mask import CustomMask
from attnlab.memory.cache import PagedCache
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.unified import UnifiedPool
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.build import Planner
from attnlab.plan.draft import draft_room
from attnlab.plan.plans import DecodePlan, Plan
from attnlab.plan.policies.static import Static
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec

TREE = (-1, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 9)


class Stand:
    """A pool whose requests grew side by side, with a layer (0) that sees part of the keys and one (1) that sees all.

    `spare` further tokens have their slots already. What slid out is what no query from the last token on sees.
    """

    def __init__(
        self,
        lens: Sequence[int],
        *,
        window: int | None = 128,
        chunk: int | None = None,
        page: int = 16,
        spare: int = 0,
        kind: str = "window",
        causal: bool = True,
    ) -> None:
        shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "qk_dim": 4, "v_dim": 4, "scale": 0.5, "causal": causal}
        specs = (AttentionSpec(**shape, window=window, chunk=chunk), AttentionSpec(**shape))
        self.lens, self.spare = list(lens), spare
        self.model = ModelSpec(
            name="toy",
            layers=tuple(LayerSpec(index=i, attention=spec, pool_layer=i) for i, spec in enumerate(specs)),
            context_len=1 << 20,
            page_size=page,
            kv_dtype=torch.float32,
            mla=False,
        )
        pages = 4 + sum(-(-(n + spare) // page) for n in lens)
        slots, device = {"num_slots": pages * page}, {"device": "cpu"}
        self.pool: KVPool
        if kind == "plain":
            self.pool = MHAPool(self.model, **slots, **device)
        elif kind == "window":
            self.pool = WindowPool(self.model, **slots, sliding_slots=pages * page, **device)
        else:
            virtual = 2 * pages * page
            self.pool = UnifiedPool(self.model, **slots, virtual_slots=virtual, sliding_slots=pages * page, **device)
        self.table = RequestTable(
            max_requests=len(lens) + 1,
            max_context=max([1, *lens]) + spare,
            num_slots=self.pool.num_slots,
            device="cpu",
        )
        self.cache = PagedCache(table=self.table, pool=self.pool)
        self.rows = [self.cache.admit() for _ in lens]
        self._grow(page, slides=kind != "plain" and causal)
        for row in self.rows:
            self.cache.append(row, spare)

    def _grow(self, page: int, *, slides: bool) -> None:
        step, held = max(3 * page, max(self.lens, default=0) // 12), [0] * len(self.lens)
        while held != self.lens:
            for i, length in enumerate(self.lens):
                more = min(step * (1 + i % 3) // 2 + 1, length - held[i])
                if more:
                    self.cache.append(self.rows[i], more)
                    held[i] += more
                    if slides:
                        self.cache.slide_out(self.rows[i], query=held[i] - 1)

    def planner(self, *, one_pass: bool = False) -> Planner:
        return Planner(
            model=self.model,
            pool=self.pool,
            table=self.table,
            policy=Static(),
            ops=EagerPlanOps(),
            multiprocessors=132,
            one_pass=one_pass,
        )

    def decode(self) -> DecodePlan:
        return self.planner().build(DecodeBatch.of(rows=self.rows, lens=self.lens, device="cpu"))

    def extend(self, new: Sequence[int], *, one_pass: bool = False, mask: CustomMask | None = None) -> Plan:
        more = {} if mask is None else {"mask": mask}
        batch = ExtendBatch.of(rows=self.rows, prefix=self.lens, new=new, device="cpu", **more)
        return self.planner(one_pass=one_pass).build(batch)

    def tree(self, parents: Sequence[Sequence[int]]) -> Any:
        batch = VerifyBatch.tree(rows=self.rows, prefix=self.lens, parents=parents, device="cpu")
        return self.planner().build(batch)

    def chain(self, drafts: int) -> Any:
        batch = VerifyBatch.chain(rows=self.rows, prefix=self.lens, drafts=drafts, device="cpu")
        return self.planner().build(batch)

    def view(self, plan: Plan, *, request: int = 0, layer: int = 0) -> WindowView:
        parts = {"pool": self.pool, "table": self.table, "model": self.model}
        return WindowView.of(**parts, plan=plan, request=request, layer=layer)


LENS = (388, 40, 700, 0, 129, 260)
NEW = (16, 3, 0, 7, 16, 9)


@cache
def stand(**options: Any) -> Stand:
    return Stand(LENS, spare=16, **options)


def noise(lens: Sequence[int], new: Sequence[int]) -> CustomMask:
    generator = torch.Generator().manual_seed(5)
    pairs = zip(lens, new, strict=True)
    return CustomMask.of([torch.rand(n, p + n, generator=generator) < 0.6 for p, n in pairs])


PLANS = {
    "decode": lambda: (stand(), stand().decode()),
    "decode, pages of 1": lambda: (stand(page=1), stand(page=1).decode()),
    "decode, pages of 64, unified": lambda: (s := stand(page=64, kind="unified"), s.decode()),
    "decode, chunk": lambda: (s := stand(window=None, chunk=64), s.decode()),
    "decode, plain": lambda: (s := stand(kind="plain"), s.decode()),
    "extend": lambda: (stand(), stand().extend(NEW)),
    "extend, one pass": lambda: (stand(), stand().extend(NEW, one_pass=True)),
    "extend, chunk": lambda: (s := stand(window=None, chunk=64), s.extend(NEW)),
    "extend, window and chunk": lambda: (s := stand(window=24, chunk=32), s.extend(NEW)),
    "extend, both ways": lambda: (s := stand(window=8, causal=False), s.extend(NEW)),
    "extend, mask": lambda: (stand(window=60), stand(window=60).extend(NEW, mask=noise(LENS, NEW))),
    "verify, tree": lambda: (s := stand(window=8), s.tree([TREE, (-1,), (), (-1, 0, 1), (-1, 0, 0), (-1, 0)])),
    "verify, chain": lambda: (stand(window=8), stand(window=8).chain(12)),
    "verify, chunk": lambda: (s := stand(window=None, chunk=4), s.tree([TREE] * 6)),
}
every_plan = pytest.mark.parametrize("name", PLANS)


def read_by(plan: Plan, request: int, query: int, layer: int) -> tuple[list[int], list[int], list[int]]:
    """What `explain` says of a query: positions of cached keys, number of new ones, and all slots."""
    (reading,) = (r for r in plan.explain(request, query) if layer in r.layers)
    prefix, _ = prefix_and_new(plan)
    old = [key.position for key in reading.keys if key.position < prefix[request]]
    return old, [key.position for key in reading.keys[len(old) :]], [key.slot for key in reading.keys]


def positions(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [p for first, end in runs for p in range(first, end)]


# ---------------------------------------------------------------- steps and views


@every_plan
def test_views_say_what_the_plan_explains(name):
    made, plan = PLANS[name]()
    _, new = prefix_and_new(plan)
    for layer in (0, 1):
        for request, count in enumerate(new):
            step = Step.of(plan, request=request, layer=layer)
            union: set[int] = set()
            most = 0
            for query in range(count):
                old, fresh, _ = read_by(plan, request, query, layer)
                assert positions(step.old(query)) == old
                assert step.positions[step.fresh(query)].tolist() == fresh
                union, most = union | set(old), max(most, len(fresh))
            assert positions(step.read()) == sorted(union)
            assert step.most_fresh() == most
            view = made.view(plan, request=request, layer=layer)
            assert (total(view.read), view.most_new) == (len(union), most)
            assert view.strays == () and not view.stale


@every_plan
def test_pages_lead_to_the_slots_that_are_read(name):
    made, plan = PLANS[name]()
    _, new = prefix_and_new(plan)
    for layer in (0, 1):
        view = made.view(plan, layer=layer)
        page = {p: piece for piece in view.pieces for p in range(piece.first, piece.end)}
        assert sorted(page) == list(range(view.tokens))
        old, _, slots = read_by(plan, 0, 0, layer)
        size = view.page_size
        assert [page[p].pages[-1] for p in old] == [slot // size for slot in slots[: len(old)]]
        for level, space in enumerate(view.spaces):
            mine = {piece.pages[level] for piece in view.pieces} - {None}
            assert not mine & set(space.others) and 0 not in mine
            assert max([0, *mine, *space.others]) < space.pages
        position, places = view.example
        assert position == view.edge and len(places) == len(view.spaces)
        if old and old[0] == position:
            assert places[-1] == slots[0]


def test_what_slid_out_has_no_page_and_is_counted():
    view = stand().view(stand().decode())
    gone = [piece for piece in view.pieces if piece.gone]
    assert [piece.end for piece in gone][-1] == 256 and view.gone == len(gone) == 16
    assert stand().pool.kept_from(0, stand().rows[0]) == 256
    assert stand().view(stand().decode(), layer=1).gone == 0


def test_queries_are_sampled_from_the_first_to_the_last():
    assert sampled(16) == list(range(16))
    some = sampled(5000)
    assert (some[0], some[-1], len(set(some))) == (0, 4999, 16)
    made = Stand([30], spare=40, window=8, page=1)
    view = made.view(made.extend([40]))
    assert [q.number for q in view.queries] == sampled(40) and view.new == 40


def test_a_plan_that_reads_elsewhere_than_the_pool_has_the_keys_is_found_out():
    made = Stand([40, 40], kind="unified", page=4)
    plan = made.decode()
    made.cache.release(made.rows[0])
    assert made.pool.compact() > 0
    view = made.view(plan, request=1)
    fresh = made.planner().build(DecodeBatch.of(rows=[1], lens=[40], device="cpu"))
    old, new = read_by(plan, 1, 0, 0)[2], read_by(fresh, 0, 0, 0)[2]
    moved = tuple(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    assert moved and view.stale and view.strays == moved
    assert not made.view(fresh).strays and not made.view(fresh).stale


def test_a_request_that_is_none_is_named():
    with pytest.raises(ValueError, match="^request: expected 0 to 5, got 6"):
        stand().view(stand().decode(), request=6)
    with pytest.raises(ValueError, match="^request: the plan has no request, got 0"):
        made = Stand([])
        made.view(made.decode())
    with pytest.raises(ValueError, match="^layer: this plan has layers 0, 1, got 7"):
        stand().view(stand().decode(), layer=7)


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["verify, tree", "verify, chain", "verify, chunk"])
def test_a_tree_is_found_again_in_the_plan(name, layer):
    _, plan = PLANS[name]()
    _, new = prefix_and_new(plan)
    for request, count in enumerate(new):
        view = TreeView.of(plan, request=request, layer=layer)
        assert view.astray == () and len(view.drafts) == count and sorted(view.order) == list(range(count))
        for draft in view.drafts:
            old, fresh, _ = read_by(plan, request, draft.number, layer)
            assert positions(draft.cached) == old and len(draft.seen) == len(fresh)
            path, at = [], draft
            while True:
                path.append(at.number)
                if at.parent is None:
                    break
                at = view.drafts[at.parent]
            assert sorted(draft.seen + draft.hidden) == sorted(path) and len(path) == draft.depth + 1


@given(st.data())
def test_parents_are_found_again(data):
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, data.draw(st.integers(1, 12)))]
    made = stand()
    view = TreeView.of(made.tree([parents, *[()] * 5]), request=0, layer=1)
    assert [-1 if draft.parent is None else draft.parent for draft in view.drafts] == parents
    assert view.is_chain == (parents == list(range(-1, len(parents) - 1)))
    rows = {number: row for row, number in enumerate(view.order)}
    assert all(rows[parent] < rows[i] for i, parent in enumerate(parents) if parent >= 0)


def test_a_mask_that_is_no_tree_is_found_out():
    made = Stand([4], spare=3, page=1)
    bits = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.uint8)
    batch = VerifyBatch.tree(rows=made.rows, prefix=[4], parents=[[-1, 0, 0]], device="cpu")
    plan = made.planner().build(dataclasses.replace(batch, mask=CustomMask.of([bits])))
    assert TreeView.of(plan, request=0, layer=1).astray == (2,)


def test_a_mask_of_new_keys_alone_is_told_as_what_is_seen():
    made = Stand([4], spare=3, page=1)
    batch = VerifyBatch.tree(rows=made.rows, prefix=[4], parents=[[-1, 0, 0]], device="cpu")
    hidden = batch.mask.bits.view(3, 7).clone()
    hidden[:, :4] = 0
    mask = CustomMask(bits=hidden.flatten(), cached_visible=True)
    told, tree = (made.planner().build(b) for b in (dataclasses.replace(batch, mask=mask), batch))
    keys = [[reading.keys for i in range(3) for reading in plan.explain(0, i)] for plan in (told, tree)]
    assert keys[0] == keys[1]
    steps = [Step.of(plan, request=0, layer=1) for plan in (told, tree)]
    assert (steps[0].bits == steps[1].bits).all()
    assert "a mask of 21 entries among new tokens" in str(describe(told))


def test_texts_are_of_the_drafts_or_of_all_keys():
    plan = stand(window=8).chain(3)
    view = TreeView.of(plan, request=1, layer=0, tokens=["a", "b", "c"])
    assert (view.text(1), view.cached_text(0)) == ("b", None)
    view = TreeView.of(plan, request=1, layer=0, tokens=[str(i) for i in range(43)])
    assert (view.text(1), view.cached_text(7)) == ("41", "7")
    with pytest.raises(ValueError, match="^tokens: expected a text for each of 3 drafts, or of 43 keys, got 2"):
        TreeView.of(plan, request=1, layer=0, tokens=["a", "b"])


# ---------------------------------------------------------------- lists


@every_plan
def test_lists_are_the_layouts_entry_by_entry(name):
    _, plan = PLANS[name]()
    for lane in plan.lanes:
        layout, view = lane.layout, IndexView.of(lane.layout)
        offsets = layout.index.indptr.tolist()
        assert view.used == offsets[-1] and view.unread == len(layout.index.slots) - offsets[-1]
        for r, row in enumerate(view.rows):
            slots = layout.index.slots[offsets[r] : offsets[r + 1]].tolist()
            spelled = [slot + i for (a, b), slot in zip(row.runs, row.slots, strict=True) for i in range(b - a)]
            assert spelled == slots[row.padding :] and row.entries == len(slots)
            assert row.visible == int(layout.start_visible[r])
            assert (row.padding > 0) == (row.start < row.visible and len(slots) > 0)


def test_the_longest_lists_keep_the_batchs_order():
    view = IndexView.of(stand().decode().lane(1).layout)
    assert view.longest(3) == [0, 2, 5]


# ---------------------------------------------------------------- describe


@every_plan
def test_a_description_has_the_plans_numbers(name):
    made, plan = PLANS[name]()
    described = describe(plan)
    prefix, new = prefix_and_new(plan)
    assert (described.requests, described.tokens, described.epoch) == (6, sum(new), plan.epoch)
    assert described.mode == name.partition(",")[0] and described.mode in described.head
    assert [lane.layers for lane in described.lanes] == [(0,), (1,)]
    for lane, lines in zip(plan.lanes, described.lanes, strict=True):
        assert (lines.space, lines.sight) == (lane.layout.index.space, lane.layout.sight)
        for r, line in enumerate(lines.lines):
            step = Step.of(plan, request=r, layer=lines.layers[0])
            assert (line.request, line.row, line.cached, line.new) == (r, made.rows[r], prefix[r], new[r])
            assert (line.start, line.listed_from) == (step.start, step.listed_from)
            assert list(line.slots) == step.slots.tolist() and list(line.write) == step.write.tolist()
            assert line.edge == min(lane.layout.sight.first(prefix[r]), prefix[r] + new[r])
            assert line.wrong == ""
            assert f"{line.listed:,}" in str(described)
        if lines.split is not None:
            host = lane.splits.to_host()
            assert (lines.split.asked, lines.split.used) == (sum(host.nominal), sum(host.effective))
            assert [line.used for line in lines.lines] == list(host.effective)


def test_a_description_reads_as_a_table():
    words = str(attnlab.describe(stand().decode()))
    head, *rows = words.split("\n\n")[1].splitlines()[2:]
    assert head.split()[:8] == ["request", "row", "len", "edge", "start", "listed", "positions", "unseen"]
    assert rows[0].split()[:10] == ["0", "0", "388", "260", "260", "128", "260", "to", "387", "260"]
    assert len({len(row) for row in (head, *rows)}) == 1
    assert "window 128" in words and "all keys" in words and "in 'sliding'" in words
    assert words.splitlines()[0].startswith("decode step: 6 requests, 5 query tokens · epoch ")
    assert "policy static 8 · 132 multiprocessors" in words.splitlines()[0]
    assert max(map(len, words.splitlines())) <= 240


def test_requests_beyond_the_limit_are_counted():
    described = attnlab.describe(stand().decode(), most=2)
    assert str(described).count("... and 4 other requests") == 2
    assert str(attnlab.describe(stand().decode(), most=5)).count("... and 1 other request\n") == 2
    assert "other request" not in str(attnlab.describe(stand().decode()))
    with pytest.raises(ValueError, match="^most: expected at least 1, got 0"):
        attnlab.describe(stand().decode(), most=0)


def test_a_description_of_no_request_is_short():
    words = str(attnlab.describe(Stand([]).decode()))
    assert words.startswith("decode step: 0 requests, 0 query tokens") and words.count("0 keys listed") == 2


def drafted(lens=(40, 0, 300), *, steps=3, **options):
    stand = Stand(lens, window=20, page=4, spare=draft_room(400, topk=2, steps=3, page_size=4), **options)
    batch = DraftBatch.of(rows=stand.rows, lens=lens, topk=2, steps=steps, device="cpu")
    return stand.planner().build(batch)


def test_a_draft_has_a_line_for_every_step():
    lines = str(describe(drafted())).splitlines()
    assert lines[0].startswith("draft: 3 requests, 2 x 3 drafts each · 2 decode steps · epoch ")
    assert lines[0].endswith(" · policy static 8")
    assert lines[2] == "layer 0, in 'sliding': window 20"
    assert lines[3].split("  ")[-1].strip() == "drafts go to"
    # Windows of 20 for each of four branches, and lists of 40 and 300 cached tokens with one draft, then with two.
    assert [line.split()[:4] for line in lines[4:6]] == [["0", "6", "80", "20"], ["1", "6", "80", "20"]]
    assert lines[7] == "layer 1, in 'full': all keys"
    assert [line.split()[:4] for line in lines[9:11]] == [["0", "6", "684", "301"], ["1", "6", "688", "302"]]
    assert [line.split()[4:7] for line in lines[9:11]] == [["32", "→", "14"]] * 2


def test_a_draft_without_a_step_is_described_in_one_line():
    assert len(str(describe(drafted(steps=1))).splitlines()) == 1
    assert describe(drafted(steps=1))._repr_html_().count("<p>") == 1


def test_a_wrong_list_of_a_draft_is_marked():
    plan = drafted()
    plan.steps[1].lanes[1].layout.index.slots[50] = 0
    words = str(describe(plan))
    assert "! step 1, row 1: the key at position 8 is read from slot 0, the sink" in words
    assert [line.endswith(" !") for line in words.splitlines()].count(True) == words.count("! step") == 1
    html = describe(plan)._repr_html_()
    assert "! step 1, row 1" in html and html.count("<table>") == 2


def test_a_wrong_list_is_marked():
    plan = stand().decode()
    lane = plan.lanes[0]
    start = lane.layout.start + 1
    late = dataclasses.replace(lane.layout, start=start, start_visible=start)
    wrong = dataclasses.replace(plan, lanes=(dataclasses.replace(lane, layout=late), plan.lanes[1]))
    words = str(describe(wrong))
    assert "! request 0: lengths and sight ask for keys 260 to 387, the list names 128 from 261 on" in words
    assert words.count("! request") == 5 and " !\n" in words
    slots = lane.layout.index.slots.clone()
    slots[3] = 0
    index = dataclasses.replace(lane.layout.index, slots=slots)
    sunk = dataclasses.replace(lane, layout=dataclasses.replace(lane.layout, index=index))
    words = str(describe(dataclasses.replace(plan, lanes=(sunk,), lane_of_layer={0: 0})))
    assert "! request 0: the key at position 263 is read from slot 0, the sink" in words


def test_notebooks_get_tables_whose_words_are_escaped():
    described = describe(stand().extend(NEW))
    html = dataclasses.replace(described, facts=("<b>&",))._repr_html_()
    assert html.count("<table>") == 2 and html.count("<tr>") == 14 and "&lt;b&gt;&amp;" in html and "<b>&" not in html
    assert "http" not in html and "<script" not in html


@given(st.sets(st.integers(0, 60)))
def test_runs_are_what_they_are_made_of(numbers):
    runs = runs_of(sorted(numbers))
    assert positions(runs) == sorted(numbers) and total(runs) == len(numbers)
    assert all(a[1] < b[0] for a, b in zip(runs, runs[1:], strict=False))
    assert runs_of(np.array(sorted(numbers), dtype=np.int64)) == runs
