"""The pictures that the README shows, drawn from the shipped data into a folder: `attnlab gallery`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from attnlab.inspect.samples import MODEL
from attnlab.inspect.traffic import draw_decode_lens
from attnlab.inspect.workbench import H200_MULTIPROCESSORS, workbench
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import SplitContext, SplitPolicy
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import cut
from attnlab.plots.picture import Picture
from attnlab.plots.schedule_view import ScheduleView, schedule_views
from attnlab.plots.show import show


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
    return show(*(_view(lens, policy, ctx) for policy in (Seed(max_splits=8), Tile(tile=4096))))


def _view(lens: list[int], policy: SplitPolicy, ctx: SplitContext) -> ScheduleView:
    splits = cut(policy, lens, ctx)
    schedule = Schedule.one_range_a_program(splits, kv_heads=ctx.kv_heads)
    (view,) = schedule_views(splits, multiprocessors=ctx.multiprocessors)
    return replace(view, kv_heads=ctx.kv_heads, programs=schedule.programs)


def lse_merge() -> Picture:
    """Return the merges of a sink head and of a diffuse head."""
    bench = workbench(MODEL, lens=[2048], policy=Static(splits=8), engine="eager")
    return show(bench.merge(18, request=0, head=3), bench.merge(0, request=0, head=5))


PICTURES: dict[str, Callable[[], Picture]] = {"split_schedule": split_schedule, "lse_merge": lse_merge}


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
