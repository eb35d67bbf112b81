"""attnlab: the Triton attention backend of an LLM server, opened up to learn from, study and improve.

The public names, in reading order. Each is loaded when it is first asked for, so that `import attnlab` needs neither
Triton nor a display.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnlab import _boot as _boot  # decides how kernels run, before anything imports Triton

if TYPE_CHECKING:
    from attnlab import bench as bench
    from attnlab import graphs as graphs
    from attnlab.backend import AttentionBackend as AttentionBackend
    from attnlab.batch import DecodeBatch as DecodeBatch
    from attnlab.batch import DeviceLens as DeviceLens
    from attnlab.batch import DraftBatch as DraftBatch
    from attnlab.batch import Encoder as Encoder
    from attnlab.batch import ExtendBatch as ExtendBatch
    from attnlab.batch import HostLens as HostLens
    from attnlab.batch import VerifyBatch as VerifyBatch
    from attnlab.choice import backend_for as backend_for
    from attnlab.explore.merge import explore_merge as explore_merge
    from attnlab.explore.splits import explore_splits as explore_splits
    from attnlab.inspect.compare import compare as compare
    from attnlab.inspect.describe import describe as describe
    from attnlab.inspect.heads import heads as heads
    from attnlab.inspect.info import info as info
    from attnlab.inspect.record import Scores as Scores
    from attnlab.inspect.record import record as record
    from attnlab.inspect.workbench import Workbench as Workbench
    from attnlab.inspect.workbench import workbench as workbench
    from attnlab.mask import CustomMask as CustomMask
    from attnlab.memory.cache import PagedCache as PagedCache
    from attnlab.memory.pools.mha import MHAPool as MHAPool
    from attnlab.memory.pools.mla import MLAPool as MLAPool
    from attnlab.memory.pools.unified import UnifiedPool as UnifiedPool
    from attnlab.memory.pools.window import WindowPool as WindowPool
    from attnlab.memory.requests import RequestTable as RequestTable
    from attnlab.memory.slots import SlotAllocator as SlotAllocator
    from attnlab.plan.draft import DraftPlan as DraftPlan
    from attnlab.plan.draft import draft_room as draft_room
    from attnlab.plan.plans import DecodePlan as DecodePlan
    from attnlab.plan.plans import ExtendPlan as ExtendPlan
    from attnlab.plan.plans import VerifyPlan as VerifyPlan
    from attnlab.plan.policy import SplitContext as SplitContext
    from attnlab.plan.policy import SplitPolicy as SplitPolicy
    from attnlab.plan.policy import split_policies as split_policies
    from attnlab.plan.policy import split_policy as split_policy
    from attnlab.plots.show import show as show
    from attnlab.spec import AttentionSpec as AttentionSpec
    from attnlab.spec import LayerSpec as LayerSpec
    from attnlab.spec import ModelSpec as ModelSpec
    from attnlab.spec import ScoreMod as ScoreMod
    from attnlab.trace import Trace as Trace

__version__ = "0.1.0"

_HOME = {
    "info": "inspect.info",
    "workbench": "inspect.workbench",
    "Workbench": "inspect.workbench",
    "show": "plots.show",
    "explore_splits": "explore.splits",
    "explore_merge": "explore.merge",
    "describe": "inspect.describe",
    "record": "inspect.record",
    "Scores": "inspect.record",
    "compare": "inspect.compare",
    "Trace": "trace",
    "heads": "inspect.heads",
    "AttentionSpec": "spec",
    "LayerSpec": "spec",
    "ModelSpec": "spec",
    "ScoreMod": "spec",
    "HostLens": "batch",
    "DeviceLens": "batch",
    "DecodeBatch": "batch",
    "ExtendBatch": "batch",
    "VerifyBatch": "batch",
    "DraftBatch": "batch",
    "draft_room": "plan.draft",
    "Encoder": "batch",
    "CustomMask": "mask",
    "SlotAllocator": "memory.slots",
    "RequestTable": "memory.requests",
    "MHAPool": "memory.pools.mha",
    "MLAPool": "memory.pools.mla",
    "WindowPool": "memory.pools.window",
    "UnifiedPool": "memory.pools.unified",
    "PagedCache": "memory.cache",
    "SplitContext": "plan.policy",
    "SplitPolicy": "plan.policy",
    "split_policy": "plan.policy",
    "split_policies": "plan.policy",
    "DecodePlan": "plan.plans",
    "ExtendPlan": "plan.plans",
    "VerifyPlan": "plan.plans",
    "DraftPlan": "plan.draft",
    "AttentionBackend": "backend",
    "backend_for": "choice",
}

_PACKAGES = ("graphs", "bench")
"""Packages among the public names."""

__all__ = ["__version__", *_HOME, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"attnlab.{name}")
    if name not in _HOME:
        known = ", ".join([*_HOME, *_PACKAGES])
        raise AttributeError(f"module 'attnlab' has no attribute {name!r}; its names are {known}")
    return getattr(import_module(f"attnlab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
