"""Cached launchers: a kernel's compiled variants, found by what they were compiled for and launched without a detour.

Triton's own way to a launch binds every argument by name, asks the compiler's backend about each, writes all answers
into a key and looks it up, at every call; most of a launch's time on the host goes there. Here arguments come in groups
that were looked at when they were made (`attnlab.arguments`), and what a call is compiled with is computed once for all
calls that ask for the same under the same table of choices (`tuning`). What is left is one look-up, and the compiled
kernel is launched with addresses.

Triton compiles what is not known yet, and launches it as it always does. Its way is taken throughout by the interpreter
and on ROCm, whose specialisation knows more than a group's kind does, and for as long as somebody watches: a launch
hook, a hook of the kernel, Triton's debug mode. Its other settings are read when a variant is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from attnlab._triton import triton
from attnlab.arguments import Arguments, remembered
from attnlab.kernels.launch import traits
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import current
from attnlab.kernels.tuning.rows import Table
from attnlab.memory.pool import KVView

Asked = Callable[..., tuple[dict[str, Any], dict[str, Any]]]
"""(**asked) -> compile-time arguments by name, and launch options."""
Grid = tuple[int, int, int]
Grids = Grid | Callable[[dict[str, Any]], Grid]
"""How many programs; where tiles decide a function of the constants, as Triton takes one."""
Order = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """A compiled kernel. `order` puts constants' `values` and the groups, one behind the other, into its own order."""

    kernel: Any
    table: Table
    run: Callable[..., None]
    function: int
    metadata: tuple[Any, ...]
    order: Order
    constants: dict[str, Any]
    values: tuple[Any, ...]

    def told(self, grid: Grid, stream: Any, sent: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what `run` takes, with what groups of the right kinds send; there are no hooks, nor data for them."""
        arguments = self.order(self.values + sent)
        return *grid, stream, self.function, self.metadata, None, None, None, *arguments


Launched = tuple[Variant, Grid, tuple[Arguments, ...]]
"""What was launched, for which grid, and with which groups."""


class Launcher:
    """Launches a kernel. `constants` says what a call is compiled with, by what it is asked with and the table alone.

    >>> import torch
    >>> from attnlab._triton import jit, tl
    >>> from attnlab.arguments import Arguments, Names
    >>> from attnlab.kernels.target import Target
    >>> @jit(do_not_specialize=("count",))
    ... def twice_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    ...     at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ...     tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count) * 2, mask=at < count)
    >>> twice = Launcher(twice_kernel, lambda block: ({"BLOCK": block}, {"num_warps": 1}))
    >>> names = Names(pointers=("x_ptr", "out_ptr"), free=("count",))
    >>> x = torch.arange(5.0, device="cuda" if torch.cuda.is_available() else "cpu")
    >>> out = torch.empty_like(x)
    >>> twice.launch(Target.of(x.device), (1, 1, 1), (Arguments(names, (x, out), free=(5,)),), block=8)
    >>> out.tolist()
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """

    def __init__(self, kernel: Any, constants: Asked) -> None:
        self.kernel, self.constants = kernel, constants
        self._variants: dict[Hashable, Variant] = {}

    def launch(self, target: Target, grid: Grids, groups: tuple[Arguments, ...], /, **asked: Any) -> Launched | None:
        """Launch for a grid of programs on the current device. Of what groups hold the kernel takes what it knows.

        `asked` goes to `constants`; its values are hashable, or a KVView. Returns what was launched, where that was a
        known variant.
        """
        if target.kind != "cuda":
            constants, options = self.constants(**asked)
            programs = _programs(grid, constants)
            self.kernel[programs](*self._order(constants, groups)(_given(constants, groups)), **options)
            return None
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key = (
            device,
            current(),
            *[group.kind for group in groups],
            *[traits(x) if type(x) is KVView else x for x in asked.values()],
        )
        variant = self._variants.get(key)
        if variant is None or not usable(variant):
            self._as_triton_does(key, grid, groups, asked)
            return None
        sent: tuple[Any, ...] = ()
        for group in groups:
            sent += group.sent
        programs = _programs(grid, variant.constants)
        variant.run(*variant.told(programs, driver.get_current_stream(device), sent))
        return variant, programs, groups

    def _as_triton_does(self, key: Hashable, grid: Grids, groups: tuple[Arguments, ...], asked: dict[str, Any]) -> None:
        """Launch as Triton does, which compiles what it has not yet; remember what was launched."""
        constants, options = self.constants(**asked)
        order = self._order(constants, groups)
        self._check_free(groups)
        handle = self.kernel[_programs(grid, constants)](*order(_given(constants, groups)), **options)
        if handle is not None and not watched(self.kernel):  # what was compiled to debug is none for later
            remembered(
                self._variants,
                key,
                Variant(
                    kernel=self.kernel,
                    table=current(),
                    run=handle.run,
                    function=handle.function,
                    metadata=handle.packed_metadata,
                    order=order,
                    constants=constants,
                    values=tuple(constants.values()),
                ),
            )

    def _order(self, constants: dict[str, Any], groups: tuple[Arguments, ...]) -> Order:
        """Return what puts constants and groups, one behind the other, into the kernel's order; raise unless all fit.

        Groups may hold more than the kernel takes: several kernels are launched with a call's arguments.
        """
        names = [*constants, *(name for group in groups for name in group.names.all)]
        taken = self.kernel.arg_names
        missing = [name for name in taken if name not in names]
        twice = sorted({name for name in names if names.count(name) > 1})
        unknown = [name for name in constants if name not in taken]
        if missing or twice or unknown:
            raise TypeError(
                f"{self.kernel.__name__}: expected each of its arguments once and no other constants; {missing} are "
                f"missing, {twice} come twice, constants {unknown} are not known"
            )
        return itemgetter(*map(names.index, taken))

    def _check_free(self, groups: tuple[Arguments, ...]) -> None:
        """Raise TypeError where Triton would specialise on a number that no kind tells apart from others."""
        free = {name for group in groups for name in group.names.free}
        bound = [p.name for p in self.kernel.params if p.name in free and not p.do_not_specialize]
        if bound:
            raise TypeError(f"{self.kernel.__name__}: {bound} are free; name them in do_not_specialize")


def _programs(grid: Grids, constants: dict[str, Any]) -> Grid:
    return grid(constants) if callable(grid) else grid


def _given(constants: dict[str, Any], groups: tuple[Arguments, ...]) -> tuple[Any, ...]:
    return tuple(constants.values()) + tuple(x for group in groups for x in group.given)


def with_times(constants: Asked) -> Asked:
    """Return the constants of a kernel whose programs note when they ran, if a call is `timed`."""

    def timed_constants(*, timed: bool, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found, options = constants(**asked)
        return {**found, "TIMES": timed}, options

    return timed_constants


def usable(*variants: Variant) -> bool:
    """Whether all may be launched as they are: their choices are of the table in use, and nobody watches."""
    table = current()
    for variant in variants:
        if variant.table is not table or variant.kernel.debug or variant.kernel.pre_run_hooks:
            return False
    return not _observed()


def watched(kernel: Any) -> bool:
    """Whether launches are observed or debugged, which takes all that Triton does around one."""
    return bool(kernel.debug or kernel.pre_run_hooks or _observed())


def _observed() -> bool:
    runtime = triton.knobs.runtime
    return bool(runtime.debug or _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook))


def _calls(hook: Any) -> bool:
    """Whether a hook does anything: a chain may be empty; one set by hand is a function, or None."""
    return bool(hook.calls) if type(hook) is triton.knobs.HookChain else hook is not None
