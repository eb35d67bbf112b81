"""Cached launchers: a known variant is launched with addresses, and no variant for arguments of another kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import _triton
from attnlab.arguments import MOST, Arguments, Names
from attnlab.kernels import launch as launch_room
from attnlab.kernels.launcher import Launcher, with_times
from attnlab.kernels.target import Target
from attnlab.kernels.tuning import current, using
from attnlab.memory.pool import FP8, KVView
from tests.cases import lane_of

pytestmark = pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton")

if _triton.PROBLEM is None:
    import triton
    import triton.language as tl

    from tests.launches import NoDriver

H200 = Target(kind="cuda", arch=90)
NAMES = Names(pointers=("x_ptr", "y_ptr"), numbers=("scale", "stride"), free=("count",))


def _scaled(x_ptr, y_ptr, scale, stride, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + at * stride, mask=at < count) * scale
    if y_ptr is not None:
        tl.store(y_ptr + at, y, mask=at < count)


def _constants(*, block: int, view: KVView | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"BLOCK": block}, {"num_warps": 1}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoDriver]:
    """Triton believes that there is a GPU, whatever there is, and compiles for it."""
    driver = NoDriver()
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    yield driver
    triton.runtime.driver._active = before


@pytest.fixture
def asked_of_triton(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A note for every time that Triton itself is asked to launch."""
    asked: list[object] = []
    run = triton.JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", noted)
    return asked


def kernel() -> Any:
    """A kernel that is compiled also where this process interprets its own."""
    return triton.JITFunction(_scaled, do_not_specialize=["count"])


def made(
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    scale: float = 2.0,
    stride: int = 4,
    count: int = 5,
    without_y: bool = False,
) -> Arguments:
    x = torch.zeros(64) if x is None else x
    y = torch.zeros(64) if y is None else y
    return Arguments(NAMES, (x, None if without_y else y), (scale, stride), (count,))


def view_of(**changed: Any) -> KVView:
    k = torch.zeros(64, 2, 16)
    return replace(KVView(k=k, v=torch.zeros(64, 2, 16)), **changed)


def test_a_known_variant_is_launched_with_addresses_in_the_kernels_order(
    driver: NoDriver, asked_of_triton: list[object]
) -> None:
    launcher = Launcher(kernel(), _constants)
    for count, stream_of in ((5, 0), (6, 0)):
        x, y = torch.zeros(64), torch.zeros(64)
        launcher.launch(H200, (3, 2, 1), (made(x, y, count=count),), block=16)
        driver.device = stream_of
    first, second = driver.launches
    assert len(asked_of_triton) == 1
    assert second.arguments == (x.data_ptr(), y.data_ptr(), 2.0, 4, 6, 16)
    assert (second.grid, second.stream, second.function) == ((3, 2, 1), 70, first.function)
    assert second.hooks == (None, None, None)


def test_groups_come_in_any_order_and_may_hold_more(driver: NoDriver) -> None:
    launcher = Launcher(kernel(), _constants)
    x, y = torch.zeros(64), torch.zeros(64)
    numbers = Arguments(Names(pointers=("q_ptr", "y_ptr"), numbers=("stride",)), (torch.zeros(4), y), (4,))
    rest = Arguments(Names(pointers=("x_ptr",), numbers=("width", "scale"), free=("count",)), (x,), (7, 2.0), (5,))
    for _ in range(2):
        launcher.launch(H200, (1, 1, 1), (numbers, rest), block=16)
    by_triton, direct = driver.launches
    assert direct.arguments == (x.data_ptr(), y.data_ptr(), 2.0, 4, 5, 16)
    assert by_triton.arguments == (rest.given[0], y, 2.0, 4, 5, 16)


ZEROS = torch.zeros(128)
OTHERS: dict[str, Callable[[], Arguments]] = {
    "dtype": lambda: made(torch.zeros(64, dtype=torch.float16)),
    "place in 16 bytes": lambda: made(ZEROS[1:]),
    "no pointer": lambda: made(without_y=True),
    "stride of 1": lambda: made(stride=1),
    "stride of 16": lambda: made(stride=16),
    "stride of 17": lambda: made(stride=17),
    "stride of 64 bits": lambda: made(stride=2**31),
    "an int where a float was": lambda: made(scale=2),
    "count of 64 bits": lambda: made(count=2**31),
}


def test_names_in_another_order_are_of_another_kind(driver: NoDriver) -> None:
    launcher, x, y = Launcher(kernel(), _constants), torch.zeros(64), torch.zeros(64)
    other = replace(NAMES, pointers=("y_ptr", "x_ptr"))
    for names, pointers in ((NAMES, (x, y)), (other, (y, x))) * 2:
        launcher.launch(H200, (1, 1, 1), (Arguments(names, pointers, (2.0, 4), (5,)),), block=16)
    assert all(launch.arguments[:2] == (x.data_ptr(), y.data_ptr()) for launch in driver.launches[2:])


@pytest.mark.parametrize("other", OTHERS)
def test_arguments_of_another_kind_get_another_variant(
    other: str, driver: NoDriver, asked_of_triton: list[object]
) -> None:
    launcher = Launcher(kernel(), _constants)
    for group in (made(), OTHERS[other](), made(), OTHERS[other]()):
        launcher.launch(H200, (1, 1, 1), (group,), block=16)
    functions = [launch.function for launch in driver.launches]
    assert len(asked_of_triton) == 2, "known variants are launched without Triton"
    assert functions[0] == functions[2]
    assert functions[1] == functions[3]
    if other not in ("stride of 17",):  # which Triton compiles as it does one of 4
        assert functions[0] != functions[1]


def test_arguments_of_one_kind_share_a_variant(driver: NoDriver, asked_of_triton: list[object]) -> None:
    launcher = Launcher(kernel(), _constants)
    for group in (made(), made(), made(count=1), made(count=2**31 - 1), made(ZEROS[4:])):
        launcher.launch(H200, (1, 1, 1), (group,), block=16)
    assert len(asked_of_triton) == 1
    assert len({launch.function for launch in driver.launches}) == 1


def test_every_device_has_its_own_variant(driver: NoDriver, asked_of_triton: list[object]) -> None:
    launcher = Launcher(kernel(), _constants)
    for driver.device in (0, 1, 0, 1):
        launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    assert len(asked_of_triton) == 2
    functions, streams = zip(*((launch.function, launch.stream) for launch in driver.launches), strict=True)
    assert functions[0] == functions[2] != functions[1] == functions[3]
    assert streams == (70, 71, 70, 71)


K, V = torch.zeros(64, 2, 16), torch.zeros(64, 2, 16)
VIEWS: dict[str, Callable[[], KVView]] = {
    "dtype": lambda: view_of(k=K.to(FP8), v=V.to(FP8)),
    "page size": lambda: view_of(k=K.view(16, 4, 2, 16), v=V.view(16, 4, 2, 16)),
    "values in keys": lambda: KVView(k=K, v=K, v_in_k=True),
    "key scale": lambda: view_of(k_scale=2.0),
    "value scale": lambda: view_of(v_scale=2.0),
    "value dim": lambda: view_of(v=torch.zeros(64, 2, 8)),
    "heads": lambda: view_of(k=torch.zeros(64, 4, 16), v=torch.zeros(64, 4, 16)),
    "strides": lambda: view_of(k=torch.zeros(64, 2, 32)[..., :16]),
}


@pytest.mark.parametrize("other", VIEWS)
def test_constants_are_asked_again_for_another_view(other: str, driver: NoDriver) -> None:
    asked = []

    def constants(*, view: KVView) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.append(view)
        return _constants(block=16)

    launcher = Launcher(kernel(), constants)
    for view in (
        view_of(),
        VIEWS[other](),
        view_of(),
        VIEWS[other](),
        view_of(k=torch.zeros(96, 2, 16), v=V[:1].expand(96, 2, 16)),
    ):
        launcher.launch(H200, (1, 1, 1), (made(),), view=view)
    assert len(asked) == (3 if view.strides != asked[0].strides else 2)


def test_constants_are_asked_again_where_offsets_no_longer_fit(
    driver: NoDriver, asked_of_triton: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, view = Launcher(kernel(), _constants), view_of()
    launcher.launch(H200, (1, 1, 1), (made(),), block=16, view=view)
    monkeypatch.setattr(launch_room, "NARROW_BELOW", 0)
    launcher.launch(H200, (1, 1, 1), (made(),), block=16, view=view)
    assert len(asked_of_triton) == 2


def test_other_constants_are_another_variant(driver: NoDriver, asked_of_triton: list[object]) -> None:
    launcher = Launcher(kernel(), _constants)
    for block in (16, 32, 16, 32):
        launcher.launch(H200, (1, 1, 1), (made(),), block=block)
    assert [launch.arguments[-1] for launch in driver.launches] == [16, 32, 16, 32]
    assert len(asked_of_triton) == 2


def test_what_was_chosen_by_one_table_is_not_launched_by_another(driver: NoDriver) -> None:
    tables = []

    def constants() -> tuple[dict[str, Any], dict[str, Any]]:
        tables.append(current())
        return _constants(block=16 if len(tables) == 1 else 32)

    launcher, other = Launcher(kernel(), constants), replace(current())
    for _ in range(2):
        launcher.launch(H200, (1, 1, 1), (made(),))
    with using(other):
        for _ in range(2):
            launcher.launch(H200, (1, 1, 1), (made(),))
    launcher.launch(H200, (1, 1, 1), (made(),))
    assert tables == [current(), other]
    assert [launch.arguments[-1] for launch in driver.launches] == [16, 16, 32, 32, 16]


def test_kinds_tell_apart_whatever_triton_specialises_on(driver: NoDriver) -> None:
    function = kernel()
    binder = function.device_caches[0][-1]
    half = torch.zeros(64, dtype=torch.float16)
    groups = [
        made(x, y, scale=scale, stride=stride, count=count, without_y=without_y)
        for x in (ZEROS, ZEROS[1:], ZEROS[4:], half, half[2:], half[8:])
        for y in (ZEROS, ZEROS[3:])
        for scale in (2.0, 1.0, 1, 16)
        for stride in (1, 4, 16, 17, 32, 2**31, 2**35)
        for count in (1, 5, 16, -1, 2**31 - 1, -(2**31), 2**31, 2**63)
        for without_y in (False, True)
    ]
    specialised: dict[int, list[object]] = {}
    for group in groups:
        _, specialisation, _ = binder(*group.given, BLOCK=16)
        assert specialised.setdefault(group.kind, specialisation) == specialisation, group.given


def test_who_watches_sees_all_launches(driver: NoDriver, asked_of_triton: list[object]) -> None:
    launcher, seen = Launcher(kernel(), _constants), []
    hooks = triton.knobs.runtime
    launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    assert len(asked_of_triton) == 1
    note = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    hooks.launch_enter_hook.add(note)
    try:
        launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    finally:
        hooks.launch_enter_hook.remove(note)
    assert seen == ["_scaled"]
    assert len(asked_of_triton) == 2
    launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    assert len(asked_of_triton) == 2


def test_who_debugs_gets_a_variant_for_it_and_nobody_else_does(
    driver: NoDriver, asked_of_triton: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(kernel(), _constants)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "debug", True)
        for _ in range(2):
            launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    for _ in range(2):
        launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    functions = [launch.function for launch in driver.launches]
    assert functions[0] == functions[1] != functions[2] == functions[3]
    assert len(asked_of_triton) == 3


def test_a_hook_of_the_kernel_is_called_each_time(driver: NoDriver) -> None:
    function, seen = kernel(), []
    launcher = Launcher(function, _constants)
    launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    function.add_pre_run_hook(lambda *args, **kwargs: seen.append(args))
    for _ in range(2):
        launcher.launch(H200, (1, 1, 1), (made(),), block=16)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["interpreter", "hip"])
def test_triton_launches_by_itself_where_nothing_is_cached(kind: Any) -> None:
    taken = []

    class Kernel:
        arg_names = ("x_ptr", "y_ptr", "scale", "stride", "count", "BLOCK")

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **options: taken.append((grid, args, options))

    group = made()
    for _ in range(2):
        Launcher(Kernel(), _constants).launch(Target(kind=kind), (1, 1, 1), (group,), block=16)
    assert taken == [((1, 1, 1), (*group.given, 16), {"num_warps": 1})] * 2


WRONG: dict[str, tuple[Names, str]] = {
    "missing": (replace(NAMES, free=("tokens",)), r"\['count'\] are missing"),
    "not free": (Names(NAMES.pointers, ("scale",), ("stride", "count")), r"\['stride'\] are free"),
    "twice": (Names(NAMES.pointers, NAMES.numbers, ("count",)), r"\['count', .*\] come twice"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_names_that_do_not_fit_are_refused_before_a_launch(wrong: str, driver: NoDriver) -> None:
    names, message = WRONG[wrong]
    values = (2.0, 4, 5)
    cut = len(names.numbers)
    group = Arguments(names, (torch.zeros(64), torch.zeros(64)), values[:cut], tuple(int(n) for n in values[cut:]))
    with pytest.raises(TypeError, match=message):
        Launcher(kernel(), _constants).launch(H200, (1, 1, 1), (group,) * (1 + (wrong == "twice")), block=16)
    assert not driver.launches


def test_constants_that_a_kernel_does_not_know_are_refused(driver: NoDriver) -> None:
    with pytest.raises(TypeError, match=r"constants \['TIMES'\] are not known"):
        Launcher(kernel(), with_times(_constants)).launch(H200, (1, 1, 1), (made(),), block=16, timed=True)


def test_values_without_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected \[2, 2, 1\] pointers, numbers and free ones .*, got \[2, 1, 1\]"):
        Arguments(NAMES, (ZEROS, ZEROS), (1.0,), (5,))


@pytest.mark.parametrize("copied", [deepcopy, copy])
def test_a_copy_is_sent_where_its_own_tensors_lie(copied: Callable[[Any], Any]) -> None:
    lane = lane_of(torch.arange(1, 40), 2)
    first = lane.arguments
    again = copied(lane)
    tensors = again.layout.index.slots, again.layout.index.indptr, again.layout.start
    assert again.arguments.sent[:3] == tuple(x.data_ptr() for x in tensors)
    assert (again.arguments.sent == first.sent) == (copied is copy)


def test_what_is_remembered_is_bounded_and_no_number_is_given_twice() -> None:
    names = Names(numbers=("n",))
    kinds = [Arguments(names, numbers=(n,)).kind for n in range(2 * MOST + 10)]
    assert len(set(kinds)) == len(kinds)
    assert Arguments(names, numbers=(2 * MOST + 9,)).kind == kinds[-1]


@pytest.fixture(scope="module")
def steps(compiling: dict[str, str]) -> dict[str, Any]:
    """What steps of a server launch, in a process that compiles."""
    command = [sys.executable, "-m", "tests.launched_steps"]
    done = subprocess.run(command, env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_step_like_one_before_is_launched_without_triton(steps: dict[str, Any]) -> None:
    counts = steps["asked"]
    assert counts.keys() == {"seed 64", "balanced 64", "balanced 576", "balanced 64 fp8", "balanced 64 short"}
    for name, ((launches, asked), *later) in counts.items():
        each = 1 if "short" in name else 2  # what cannot be cut is not merged
        assert launches == 2 + 2 * each, f"{name}: two launches of a plan, and {each} of each layer's decode"
        assert 0 < asked <= 4
        assert [launched for launched, _ in later] == [launches] * 3
        assert later[0][1] == later[2][1] == 0, f"{name}: Triton was asked for what it had compiled"


def test_calls_of_one_kind_are_repeated_and_send_what_a_call_checked_in_full_sends(steps: dict[str, Any]) -> None:
    names = ("the same", "other tensors", "memory for the answer")
    alike = {f"decode, {policy}, {name}" for policy in ("seed", "balanced") for name in names}
    alike |= {
        f"verify, {policy}, {name}" for policy in ("seed", "balanced") for name in (*names, "one tensor for both")
    }
    assert {name for name, (repeats, _) in steps["repeated"].items() if repeats} == alike
    assert len(steps["repeated"]) == 2 * 11 + 2 * 14
    assert all(same for _, same in steps["repeated"].values())
