"""The pictures that the README shows, drawn from the shipped data into a folder: `attnlab gallery`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from attnlab.assets import data_path
from attnlab.backend import AttentionBackend
from attnlab.batch import DecodeBatch, DraftBatch, VerifyBatch
from attnlab.bench.result import load
from attnlab.graphs.graph import capture
from attnlab.graphs.shapes import VerifyShape
from attnlab.inspect.compare import compare
from attnlab.inspect.recorder import Scores
from attnlab.inspect.samples import MODEL
from attnlab.inspect.traffic import draw_decode_lens, scale_to
from attnlab.inspect.tree_view import TreeView
from attnlab.inspect.window_view import WindowView
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, Workbench, workbench
from attnlab.memory.cache import PagedCache
from attnlab.memory.pools.window import WindowPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.draft import draft_room
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import SplitContext
from attnlab.plots.picture import Picture
from attnlab.plots.schedule_view import cut_view
from attnlab.plots.show import show
from attnlab.spec import ModelSpec
from attnlab.trace import Trace


def split_schedule() -> Picture:
    """Return where two policies cut twelve requests of real traffic, for a model of Llama 3's shape on an H200."""
    lens = draw_decode_lens("azure_llm_2023_conv", 6, seed=1) + draw_decode_lens(
        "mooncake_fast25_conversation", 6, seed=1
    )
    ctx = SplitContext(
        heads=32,
        kv_heads=8,
        v_dim=128,
        mla=False,
        context_len=131072,
        multiprocessors=H200_MULTIPROCESSORS,
    )
    return show(*(cut_view(policy, lens, ctx) for policy in (Seed(max_splits=8), Tile(tile=4096))))


def _whole_text() -> Workbench:
    return workbench(MODEL, lens=[2048], policy=Static(splits=8), engine="eager")


def lse_merge() -> Picture:
    """Return the merges of a sink head and of a diffuse head."""
    bench = _whole_text()
    merges = [bench.merge(layer, request=0, head=head) for layer, head in ((18, 3), (0, 5))]
    return show(*(replace(merge, about="the whole text") for merge in merges))


def attention_scores() -> Picture:
    """Return what nine heads of layer 18 give to 2,048 tokens."""
    return show(_whole_text().scores(18, request=0))


def score_stages() -> Picture:
    """Return what the scores of an induction head go through."""
    return show(_whole_text().stages(18, request=0, head=6))


def comparison() -> Picture:
    """Return what it changes that one page of a request is overwritten with another's keys and values."""
    bench = workbench(
        MODEL,
        lens=[2048, 1200, 700, 300, 96, 40],
        policy=Static(splits=8),
        engine="eager",
        layers=(18,),
        page_size=16,
        kv_dtype=torch.float32,
    )
    runs = [_scored(bench)]
    pages = [bench.table.slots_of(row)[640:656].long() for row in bench.table.rows[:2]]
    layer = bench.model.layer(18).pool_layer
    view = bench.pool.view(layer)
    bench.pool.write(layer, pages[1], view.k[pages[0]], view.v[pages[0]])
    runs.append(_scored(bench))
    return show(compare(*runs, names=("before", "after")))


def _scored(bench: Workbench) -> Trace:
    with bench.record(scores=Scores(stages=("raw",), pool="key")) as trace:
        # In fp32: fp16 outputs would count a few differences more or less on another machine.
        bench.backend.decode(18, bench.newest(18)[0].float(), None, None, bench.plan(), save=False)
    return trace


def page_map() -> Picture:
    """Return the pool of a small server, its pages mixed by requests that came and grew."""
    lens = scale_to(draw_decode_lens("azure_llm_2023_conv", 9, seed=2), 600)
    bench = workbench(MODEL, lens=lens, policy=Static(splits=8), engine="eager", layers=(18,), page_size=16)
    for row in bench.table.rows[2:8:3]:
        bench.pool.allocator.release(row)
    return show(bench.pool.allocator)


def sliding_window() -> Picture:
    """Return what a decode step reads of a request whose older keys have slid out of the sliding storage."""
    server = _SlidingServer(scale_to(draw_decode_lens("azure_llm_2023_conv", 5, seed=4), 420))
    lens = [server.table.length(row) for row in server.table.rows]
    request = lens.index(max(lens))
    plan = server.backend.plan(DecodeBatch.of(rows=server.table.rows, lens=lens, device="cpu"))
    return show(
        WindowView.of(
            pool=server.pool, table=server.table, model=server.model, plan=plan, request=request, layer=server.sliding
        )
    )


def tree_mask() -> Picture:
    """Return what the drafts of a tree see, in a layer with a window."""
    server = _SlidingServer([400])
    parents = [-1, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 9]
    batch = VerifyBatch.tree(rows=[0], prefix=[400 - len(parents)], parents=[parents], device="cpu")
    return show(TreeView.of(server.backend.plan(batch), request=0, layer=server.sliding))


def draft_pages() -> Picture:
    """Return what four branches of a draft read in every step, and where they lie."""
    server = _SlidingServer([396], max_requests=4)
    cached = 396
    server.cache.append(0, draft_room(cached, topk=4, steps=4, page_size=server.pool.page_size))
    plan = server.backend.plan(DraftBatch.of(rows=[0], lens=[cached], topk=4, steps=4, device="cpu"))
    return show(plan, layer=server.full)


def graph_memory() -> Picture:
    """Return the memory of a graph that verifies trees, when five requests come after eight."""
    drafts, lens = 4, scale_to(draw_decode_lens("azure_llm_2023_conv", 8, seed=4), 420)
    server = _SlidingServer([n + drafts for n in lens], max_drafts=drafts)
    hidden = torch.zeros(8 * drafts, 2880)
    shape = VerifyShape(requests=8, longest=512, drafts=drafts, masked=True)
    graph = capture(server.backend, lambda plan, hidden: hidden, shape, inputs={"hidden": hidden}, rerun=True)
    for rows in (range(8), range(5)):
        prefix, trees = [lens[row] for row in rows], [(-1, 0, 0, 1) for _ in rows]
        batch = VerifyBatch.tree(rows=list(rows), prefix=prefix, parents=trees, device="cpu")
        graph.run(batch, hidden=torch.ones(len(rows) * drafts, 2880))
    return show(graph)


class _SlidingServer:
    """A small server of gpt-oss-20b's first two layers, whose requests came in turns and grew."""

    def __init__(self, lens: list[int], *, step: int = 48, max_requests: int = 0, max_drafts: int = 1) -> None:
        self.model = ModelSpec.load("gpt-oss-20b", page_size=16).only((0, 1))
        self.sliding = next(layer.index for layer in self.model.layers if layer.attention.sight.partial)
        self.full = next(layer.index for layer in self.model.layers if not layer.attention.sight.partial)
        self.pool = WindowPool(self.model, num_slots=2048, sliding_slots=1152, device="cpu")
        self.table = RequestTable(
            max_requests=len(lens),
            max_context=1024,
            num_slots=2048,
            device="cpu",
            page_size=self.pool.page_size,
        )
        self.cache = cache = PagedCache(table=self.table, pool=self.pool)
        rows = [cache.admit() for _ in lens]
        for at in range(0, max(lens), step):
            for row, length in zip(rows, lens, strict=True):
                if at < length:
                    cache.append(row, min(step, length - at))
                    cache.slide_out(row, query=max(0, self.table.length(row) - step))
        self.backend = AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=self.table,
            engine="eager",
            policy=Static(splits=8),
            max_requests=max(len(lens), max_requests),
            max_drafts=max_drafts,
            multiprocessors=H200_MULTIPROCESSORS,
        )


def measured(mode: str) -> Picture:
    """Return what was measured on an H200, beside peers in the same run: one of RECORDED."""
    return show(load(data_path(f"h200/{mode}.json")))


RECORDED = ("decode", "verify", "extend", "curves", "hooks", "host")
"""Runs of `data/h200` that have a picture."""
PICTURES: dict[str, Callable[[], Picture]] = {
    "split_schedule": split_schedule,
    "lse_merge": lse_merge,
    "attention_scores": attention_scores,
    "score_stages": score_stages,
    "comparison": comparison,
    "page_map": page_map,
    "sliding_window": sliding_window,
    "tree_mask": tree_mask,
    "draft_pages": draft_pages,
    "graph_memory": graph_memory,
    **{f"measured_{mode}": partial(measured, mode) for mode in RECORDED},
}


def draw_gallery(folder: Path) -> list[Path]:
    """Write every picture as SVG, light and dark; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in PICTURES.items():
        picture = make()
        for theme in ("light", "dark"):
            path = folder / f"{name}_{theme}.svg"
            picture.to_svg(path, theme=theme)
            written.append(path)
    return written
