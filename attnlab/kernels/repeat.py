"""The next layer's decode or verify call: where it is like one that was launched, only addresses are new.

All layers of a kind are launched with the same lane, scratch and constants. The first of them is checked in full, and
its variants are looked up (`launcher`); for the others a look at what they bring themselves is enough.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from attnlab._triton import triton
from attnlab.arguments import Arguments
from attnlab.checks import storages
from attnlab.kernels.launch import traits
from attnlab.kernels.launcher import Grid, Launched, Order, Variant, usable
from attnlab.memory.pool import KVView
from attnlab.plan.call import DecodeCall
from attnlab.plan.extend_call import VerifyCall
from attnlab.plan.plans import Queries

PLACES = {
    "stream": 0,
    "q_ptr": 1,
    "out_ptr": 2,
    "sinks_ptr": 3,
    "k_new_ptr": 4,
    "v_new_ptr": 5,
    "k_ptr": 6,
    "v_ptr": 7,
    # Neither is read or written: queries stand there, as they do in a call that is checked in full.
    "aux_ptr": 1,
    "lse_ptr": 1,
}
"""Where in a repeat's tuple of what is new the addresses of tensors lie, by the names that kernels have for them."""


class Repeat:
    """A call that was launched, to be launched again: for another layer's keys, queries and sinks of its kind.

    It holds what its lane, its scratch and the layer's attention stand for, and asks for the same ones; a verify's
    queries, too, which are looked at. Calls that bring aux, or want an LSE, times or all states, are not repeated.
    """

    __slots__ = ("_again", "_drafts", "_out", "_q", "_queries", "_sinks", "_variants", "_view")

    def __init__(self, call: DecodeCall | VerifyCall, launched: tuple[Launched, ...]) -> None:
        drafts = call if isinstance(call, VerifyCall) else None
        self._q, self._out, self._sinks = _kind(call.q), _kind(call.out), _kind(call.sinks)
        self._drafts = None if drafts is None else (_kind(drafts.k), _kind(drafts.v))
        self._queries = None if drafts is None else drafts.queries
        self._view = call.view.arguments.kind, traits(call.view)
        self._variants = tuple(variant for variant, *_ in launched)
        self._again = [_again(*one) for one in launched]

    @classmethod
    def of(cls, call: DecodeCall | VerifyCall, *launched: Launched | None) -> Repeat | None:
        """Return what can be repeated of a call; None where nothing can, or where Triton itself launched it."""
        known = tuple(one for one in launched if one is not None)
        timed = isinstance(call, DecodeCall) and call.times is not None
        plain = call.aux is call.lse is None and call.out.is_contiguous() and not call.keeps and not timed
        return cls(call, known) if plain and len(known) == len(launched) else None

    def fits(
        self,
        view: KVView,
        q: Tensor,
        out: Tensor,
        sinks: Tensor | None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        queries: Queries | None = None,
    ) -> bool:
        """Whether a call over the same lane, scratch and attention can be launched like this one.

        `k` and `v` are drafts', and so are `queries`. `out` shares no memory with the pool and the scratch. Where
        somebody watches launches nothing fits.
        """
        return (
            queries is self._queries
            and _kind(q) == self._q
            and _kind(out) == self._out
            and _kind(sinks) == self._sinks
            and (self._drafts is None or (_kind(k), _kind(v)) == self._drafts)
            and out.untyped_storage().data_ptr() not in storages(q, sinks, k, v)
            and (view.arguments.kind, traits(view)) == self._view
            and usable(*self._variants)
        )

    def launch(
        self,
        view: KVView,
        q: Tensor,
        out: Tensor,
        sinks: Tensor | None,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> None:
        """Launch a call that fits, on the current device."""
        driver = triton.runtime.driver.active
        stream, read = driver.get_current_stream(driver.get_current_device()), q.data_ptr()
        brought = [read if x is None else x.data_ptr() for x in (sinks, k, v)]
        new = (stream, read, out.data_ptr(), *brought, *view.arguments.sent[:2])
        for run, order, known in self._again:
            run(*order(new + known))


def _again(variant: Variant, grid: Grid, groups: tuple[Arguments, ...]) -> tuple[Any, Order, tuple[Any, ...]]:
    """Return what runs a variant again, the order of what is new and what is known, and what is known.

    A view that is read as pairs lies where it does, so that its address is the view's own.
    """
    known = variant.told(grid, 0, tuple(x for group in groups for x in group.sent))
    named = variant.told(grid, "stream", tuple(name for group in groups for name in group.names.all))
    new, count = [PLACES.get(x) if type(x) is str else None for x in named], max(PLACES.values()) + 1
    return variant.run, itemgetter(*(count + i if place is None else place for i, place in enumerate(new))), known


def _kind(x: Tensor | None) -> object:
    """Return all that a call is checked for, and compiled for, of a tensor that it brings."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return type(x)
    return x.shape, x.dtype, x.device, x.stride(), x.data_ptr() % 16
