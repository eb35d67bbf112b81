"""Shared by all tests: attnlab first, so that it decides how kernels run before anything imports Triton."""

import attnlab  # noqa: F401  isort: skip

import os

import hypothesis
import pytest
import torch
from hypothesis import Phase

from attnlab import _triton
from attnlab._boot import INTERPRETED
from tests import interpreter

if INTERPRETED and _triton.PROBLEM is None:
    interpreter.hasten()

UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target)
"""For who asks whether a test fails, not where first: any example that fails will do."""

hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=1000, deadline=None)
hypothesis.settings.register_profile("once", max_examples=5000, deadline=None)
hypothesis.settings.register_profile("unshrunk", parent=hypothesis.settings.get_profile("ci"), phases=UNSHRUNK)
hypothesis.settings.load_profile("ci")

HAS_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # xdist runs a process per core


@pytest.fixture(scope="session")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that compiles instead of interpreting; all share a cache, empty at first."""
    cache = str(tmp_path_factory.mktemp("triton"))
    return {**os.environ, "ATTNLAB_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
