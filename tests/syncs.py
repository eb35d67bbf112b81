"""A guard against waiting for the device: whatever reads a tensor's numbers back fails inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from attnlab.compat.sglang import values
from attnlab.eager import index

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""What moves numbers of a tensor to the host."""

SHAPED_BY_NUMBERS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal")
"""Operations whose result is shaped by, or is, a number of a tensor; all of them wait."""


class Waited(AssertionError):
    """Something waited for the device."""


class _NoShapedByNumbers(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in SHAPED_BY_NUMBERS:
            raise Waited(f"{name} waits for the device")
        if name == "repeat_interleave" and kwargs is not None and kwargs.get("output_size") is None and args:
            raise Waited("repeat_interleave by counts of the device, without output_size, waits for it")
        if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
            raise Waited("indexing by a bool tensor waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def unread() -> Iterator[None]:
    """Let this CPU stand for a GPU: what is looked at only where that costs nothing is not looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "readable", lambda x: False)
        patch.setattr(index, "_copied_by_row", index._selected_at_once)
        yield


@contextmanager
def no_waiting(*, on_host: Sequence[Tensor] = ()) -> Iterator[None]:
    """Fail where anything but a kernel reads a tensor back; those of `on_host` are the host's own, and may be read."""
    own = {x.data_ptr() for x in on_host}
    in_kernel: list[bool] = []
    with unread(), pytest.MonkeyPatch.context() as patch:
        for name in READS:
            real = getattr(torch.Tensor, name)

            def guarded(x: Tensor, *args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                if not in_kernel and x.data_ptr() not in own:
                    raise Waited(f".{_name}() of a tensor {list(x.shape)} waits for the device")
                return _real(x, *args, **kwargs)

            patch.setattr(torch.Tensor, name, guarded)
        put = torch.Tensor.__setitem__

        def guarded_put(x: Tensor, where: Any, value: Any) -> None:
            if not in_kernel and isinstance(where, int) and not isinstance(value, Tensor) and x.data_ptr() not in own:
                raise Waited(f"a number put into a tensor {list(x.shape)} by its place is copied from the host")
            put(x, where, value)

        patch.setattr(torch.Tensor, "__setitem__", guarded_put)
        run = InterpretedFunction.run

        def launched(*args: Any, **kwargs: Any) -> None:
            """What the interpreter reads back is the kernel's own business: on a GPU it would run there."""
            in_kernel.append(True)
            try:
                with _disable_current_modes():
                    run(*args, **kwargs)
            finally:
                in_kernel.pop()

        patch.setattr(InterpretedFunction, "run", launched)
        with _NoShapedByNumbers():
            yield


@contextmanager
def nothing_waits(*on_host: Tensor) -> Iterator[None]:
    """On a GPU torch itself watches; on a CPU, where nothing ever waits, whatever would read numbers back is caught."""
    if not torch.cuda.is_available():
        with no_waiting(on_host=on_host):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
