"""Peers: what is timed side by side. One file in `attnlab.bench.peers` and one registration each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from attnlab.bench.inputs import Inputs
from attnlab.bench.workload import Workload
from attnlab.registry import Registry
from attnlab.units import printable

MOST_WORDS = 300
"""Letters that are kept of a foreign error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all peers of a run are told: device, attnlab's engine, and where SGLang's kernel files lie, if anywhere."""

    device: torch.device
    engine: str
    sglang: Path | None = None


def as_it_is(answer: Any) -> Tensor:
    """Return an answer that is `[tokens, heads, v_dim]` already."""
    if not isinstance(answer, Tensor):
        raise TypeError(f"answer: expected a tensor, got {type(answer).__name__}")
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One way of doing a workload: `run` is timed, `read` turns its answer into `[tokens, heads, v_dim]`."""

    run: Callable[[], Any]
    read: Callable[[Any], Tensor] = as_it_is
    variant: str = ""


class Peer(Protocol):
    """Does workloads its own way."""

    def declines(self, work: Workload) -> str | None:
        """Return why this peer does not do a workload, in a few words; None: it does."""

    def calls(self, inputs: Inputs) -> list[Call]:
        """Return its ways of doing it, of which the quickest counts. What is prepared here is not timed."""


Make = TypeVar("Make", bound=Callable[[Setting], Peer])

peers: Registry[Callable[[Setting], Peer]] = Registry("peer", home="attnlab.bench.peers")
"""By name, in the order of the columns."""


def peer(name: str) -> Callable[[Make], Make]:
    """Register a class, or a function, that makes a peer of a Setting."""

    def add(make: Make) -> Make:
        peers.add(name, make, owner=make.__module__)
        return make

    return add


def imported(name: str) -> tuple[ModuleType | None, str]:
    """Return an optional package, or None and why it cannot be had."""
    try:
        return import_module(name), ""
    except ModuleNotFoundError as error:
        missing = error.name or name
        own = name == missing or name.startswith(f"{missing}.")
        return None, "not installed" if own else f"installed, but {missing} is not, which it needs"
    except Exception as error:  # of whatever type: what a foreign package raises while it is imported
        return None, f"cannot be imported: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Return an error's type and the first words of what it says."""
    words = " ".join(str(error).split())
    return printable(f"{type(error).__name__}: {words}"[:MOST_WORDS])


def unusual(work: Workload, *, but: tuple[str, ...] = ()) -> str | None:
    """Return the first thing about a workload's scores that a peer must know of, other than those in `but`.

    >>> from attnlab.bench.workloads import TABLE
    >>> unusual(TABLE[0]) is None
    True
    """
    spec = work.attention
    found = {
        "sinks": spec.has_sinks,
        "soft cap": spec.softcap is not None,
        "temperature": spec.temperature_len is not None,
        "window": spec.window is not None,
        "chunk": spec.chunk is not None,
        "tree": bool(work.tree),
        "fp8 keys": work.kv_dtype.itemsize == 1,
        "MLA": work.mla,
        "say in how many splits": work.splits is not None,
    }
    return next((name for name, there in found.items() if there and name not in but), None)
