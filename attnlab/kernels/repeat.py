"""The next layer's decode call: where it is like one that was launched, only addresses are new.

All layers of a kind are launched with the same lane, scratch and constants. The first of them is checked in full, and
its variants are looked up (`launcher`); for the others a look at what they bring themselves is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab._triton import triton
from attnlab.kernels.launch import traits
from attnlab.kernels.launcher import Launched
from attnlab.memory.pool import KVView
from attnlab.plan.call import DecodeCall


class Repeat:
    """A decode call that was launched, to be launched again: for another layer's keys, queries and sinks of its kind.

    It holds what its lane, its scratch and the layer's attention stand for, and asks for the same ones. Calls that
    bring aux, or want an LSE, times or all states, are not repeated.
    """

    __slots__ = ("_lse", "_numbers", "_out", "_q", "_sent", "_sinks", "_view")

    def __init__(self, call: DecodeCall, launched: tuple[Launched, ...]) -> None:
        self._q, self._out, self._sinks = _kind(call.q), _kind(call.out), _kind(call.sinks)
        self._view = call.view.arguments.kind, traits(call.view)
        self._lse = call.partials.max.data_ptr()
        self._numbers = call.arguments.sent[len(call.arguments.names.pointers) :]
        self._sent = [
            (variant, grid, groups[1] is not call.view.arguments, tuple(x for group in groups[2:] for x in group.sent))
            for variant, grid, groups in launched
        ]

    @classmethod
    def of(cls, call: DecodeCall, *launched: Launched | None) -> Repeat | None:
        """Return what can be repeated of a call; None where nothing can, or where Triton itself launched it."""
        known = tuple(one for one in launched if one is not None)
        plain = call.aux is call.lse is call.times is None and call.out.is_contiguous() and not call.keeps
        return cls(call, known) if plain and len(known) == len(launched) else None

    def fits(self, view: KVView, q: Tensor, out: Tensor, sinks: Tensor | None) -> bool:
        """Whether a call over the same lane, scratch and attention can be launched like this one.

        `out` shares no memory with the pool and the scratch. Where somebody watches launches nothing fits.
        """
        return (
            _kind(q) == self._q
            and _kind(out) == self._out
            and _kind(sinks) == self._sinks
            and (written := out.untyped_storage().data_ptr()) != q.untyped_storage().data_ptr()
            and (sinks is None or sinks.untyped_storage().data_ptr() != written)
            and (view.arguments.kind, traits(view)) == self._view
            and all(variant.usable for variant, *_ in self._sent)
        )

    def launch(self, view: KVView, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Launch a call that fits, on the current device."""
        read = q.data_ptr()
        # In the order of `plan.call.CALL`; where no aux, LSE or sinks are read or written any tensor stands.
        own = (read, read, out.data_ptr(), self._lse, self._lse if sinks is None else sinks.data_ptr(), None)
        brought = own + self._numbers
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        for variant, grid, in_pairs, rest in self._sent:
            stored = view.pair_arguments if in_pairs else view.arguments
            variant.send(grid, stream, brought + stored.sent + rest)


def _kind(x: Tensor | None) -> object:
    """Return all that a call is checked for, and compiled for, of a tensor that it brings."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return type(x)
    return x.shape, x.dtype, x.device, x.stride(), x.data_ptr() % 16
