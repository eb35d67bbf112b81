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
