"""Explore splits: choose a policy, its parameter, another to compare with and a batch; see where the cuts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from attnlab.batch import HostLens
from attnlab.checks import one_of, positive, require
from attnlab.explore.explorer import Explorer, Option, dropdown, slider, steps, themed
from attnlab.inspect.traffic import draw_decode_lens, trace_names
from attnlab.inspect.workbench import H200_MULTIPROCESSORS
from attnlab.plan.policy import HostPolicy, SplitContext, SplitPolicy, resolve_policy, split_policies
from attnlab.plan.tiles import shares_tile
from attnlab.plots.picture import Picture
from attnlab.plots.schedule_view import ScheduleView, cut_view
from attnlab.plots.show import show
from attnlab.plots.words import plural
from attnlab.spec import ModelSpec

NOTHING, GIVEN = "", ""
"""The value of the choice to compare with nothing, and of the batch that came as an argument."""
TRACE, REQUESTS, SEEDS = "mooncake_fast25_conversation", 12, (0, 1, 2)
BELOW, ABOVE = 8, 32
"""A parameter's slider reaches from an eighth of the published value to 32 times that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A policy's one number: its name, and the published value."""

    name: str
    value: int


class SplitsExplorer(Explorer):
    """What `explore_splits` returns. Controls: `policy`, `parameter`, `compare`, `batch`."""

    name = "explore_splits"

    def __init__(self, *, policy: str, value: int | None, compare: str | None, batch: _Batch, fixed: _Fixed) -> None:
        self._batch, self._fixed = batch, fixed
        names: list[Option] = [(name, name) for name in split_policies.names()]
        nothing: Option = ("nothing", NOTHING)
        super().__init__(
            {
                "policy": dropdown("policy", names, policy, width="10em"),
                "parameter": _parameter_slider(policy, value),
                "compare": dropdown("compare with", [nothing, *names], compare or NOTHING, width="12.5em"),
                "batch": dropdown("batch", batch.options(), batch.chosen, width="20.5em"),
            }
        )

    def _changed(self, change: Any) -> None:
        if change.owner is self.controls["policy"]:
            with self._held():
                _offer(self.controls["parameter"], change.new)
        super()._changed(change)

    def _arguments(self) -> dict[str, Any]:
        policy = self.controls["policy"].value
        parameter = parameter_of(policy)
        return {
            "policy": policy,
            **({} if parameter is None else {parameter.name: self.controls["parameter"].value}),
            "compare": self.controls["compare"].value or None,
            **self._batch.arguments(self.controls["batch"].value),
            "model": self._fixed.model,
            "multiprocessors": self._fixed.multiprocessors,
            "theme": self._fixed.theme,
        }

    def _look(self, state: dict[str, Any]) -> tuple[Picture, str]:
        lens = self._batch.lens(self.controls["batch"].value)
        # As a plan of this batch would ask.
        ctx = replace(self._fixed.context(), requests=max(1, len(lens)), longest=max([1, *lens]))
        chosen = [policy_of(state["policy"], self.controls["parameter"].value)]
        other = None if state["compare"] is None else resolve_policy(state["compare"])
        if other is not None and other != chosen[0]:  # compared with itself a policy would be seen twice
            chosen.append(other)
        views = [cut_view(policy, lens, ctx) for policy in chosen]
        words = "; ".join(_view_words(view) for view in views)
        batch = f"{plural(len(lens), 'request')}, {plural(sum(lens), 'key')} ({_batch_words(state)})"
        return show(*views, theme=state["theme"]), f"{batch}: {words}."


def explore_splits(
    *,
    policy: str = "seed",
    compare: str | None = None,
    lens: Sequence[int] | None = None,
    trace: str | None = None,
    requests: int | None = None,
    seed: int | None = None,
    model: str = "Llama-3.1-8B",
    multiprocessors: int | None = H200_MULTIPROCESSORS,
    theme: str = "light",
    **parameter: int,
) -> SplitsExplorer:
    """Return controls over a picture of how a policy cuts a batch. No backend is built: lengths are all it takes.

    The policy's one parameter goes by its own name: `tile=512`. `compare` names a policy with its published parameter.
    The batch is `lens`, or so many `requests` drawn from a `trace` with a `seed` (12 of Mooncake's conversations).
    `model` gives the numbers of heads, `multiprocessors` is None where unknown.

    >>> explorer = explore_splits(policy="tile", tile=512, compare="seed", lens=[4096, 900])
    >>> explorer.controls["parameter"].value = 1024
    >>> print(explorer.words.split(": ")[1])
    tile 1024 cuts 5 ranges up to 1,024 keys; seed 8 cuts 10 ranges up to 512 keys.
    """
    names = split_policies.names()
    one_of("policy", policy, names)
    if compare is not None:
        one_of("compare", compare, names)
    value = _value_of(policy, parameter)
    if multiprocessors is not None:
        positive("multiprocessors", multiprocessors)
    batch = _Batch.of(lens=lens, trace=trace, requests=requests, seed=seed)
    fixed = _Fixed(model=model, multiprocessors=multiprocessors, theme=themed(theme))
    return SplitsExplorer(policy=policy, value=value, compare=compare, batch=batch, fixed=fixed)


def parameter_of(policy: str) -> Parameter | None:
    """Return the one number that a policy of that name is made with; None where there is none, or more than one.

    >>> parameter_of("tile")
    Parameter(name='tile', value=256)
    """
    made = resolve_policy(policy)
    if isinstance(made, HostPolicy) or not is_dataclass(made):
        return None
    found = [Parameter(name=x.name, value=getattr(made, x.name)) for x in fields(made)]
    return found[0] if len(found) == 1 and type(found[0].value) is int else None


def policy_of(policy: str, value: int) -> SplitPolicy | HostPolicy:
    """Return the policy of that name with this value of its parameter, if it has one."""
    made: Any = resolve_policy(policy)
    parameter = parameter_of(policy)
    changed: SplitPolicy | HostPolicy = made if parameter is None else replace(made, **{parameter.name: value})
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fixed:
    """What no control changes."""

    model: str
    multiprocessors: int | None
    theme: str

    def context(self) -> SplitContext:
        return _context(self.model, self.multiprocessors)


@lru_cache(maxsize=8)
def _context(model: str, multiprocessors: int | None) -> SplitContext:
    spec = ModelSpec.load(model)
    full = [layer.attention for layer in spec.layers if layer.attention.window is layer.attention.chunk is None]
    require(bool(full), f"model: every layer of {model} sees only part of the keys; choose one with full attention")
    return SplitContext(
        heads=full[0].heads,
        kv_heads=full[0].kv_heads,
        v_dim=full[0].v_dim,
        mla=spec.mla,
        context_len=spec.context_len,
        multiprocessors=multiprocessors,
        head_tile=shares_tile(full, mla=spec.mla, kv_dtype=spec.kv_dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The batches to choose from: lengths that were given, if any, and those that can be drawn."""

    given: tuple[int, ...] | None
    trace: str
    requests: int
    seed: int

    @classmethod
    def of(cls, *, lens: Sequence[int] | None, trace: str | None, requests: int | None, seed: int | None) -> _Batch:
        drawn = {"trace": trace, "requests": requests, "seed": seed}
        both = [name for name, value in drawn.items() if value is not None and lens is not None]
        require(not both, f"lens: the batch is either given or drawn, got lens and {' and '.join(both)}")
        if trace is not None:
            one_of("trace", trace, trace_names())
        require(seed is None or (type(seed) is int and seed >= 0), f"seed: expected an int of at least 0, got {seed!r}")
        return cls(
            given=None if lens is None else HostLens.of(lens, device="cpu").values,
            trace=TRACE if trace is None else trace,
            requests=REQUESTS if requests is None else positive("requests", requests),
            seed=0 if seed is None else seed,
        )

    @property
    def chosen(self) -> Any:
        """The control's first value."""
        return (self.trace, self.seed) if self.given is None else GIVEN

    def options(self) -> list[Option]:
        """Return the control's options; the values are (trace, seed), or GIVEN."""
        seeds = sorted({*SEEDS, self.seed})
        drawn: list[Option] = [(_draw_words(trace, seed), (trace, seed)) for trace in trace_names() for seed in seeds]
        return drawn if self.given is None else [(f"the given lengths ({len(self.given)})", GIVEN), *drawn]

    def arguments(self, chosen: Any) -> dict[str, Any]:
        """Return the arguments that choose this batch."""
        if chosen == GIVEN:
            return {"lens": list(self.given or ())}
        trace, seed = chosen
        return {"trace": trace, "requests": self.requests, "seed": seed}

    def lens(self, chosen: Any) -> list[int]:
        """Return the lengths."""
        return list(self.given or ()) if chosen == GIVEN else draw_decode_lens(chosen[0], self.requests, seed=chosen[1])


def _value_of(policy: str, given: dict[str, int]) -> int | None:
    """Return the parameter's value, if the policy has one; raise where another name was given."""
    parameter = parameter_of(policy)
    known = [] if parameter is None else [parameter.name]
    for name in given:
        what = f"its parameter is {known[0]}" if known else "it has no single number to set"
        require(name in known, f"explore_splits: {name!r} is no argument of policy {policy!r}; {what}", TypeError)
    if parameter is None:
        return None
    value = positive(parameter.name, given.get(parameter.name, parameter.value))
    policy_of(policy, value)  # which may refuse it
    return value


def _parameter_slider(policy: str, value: int | None) -> Any:
    made = slider("", [("", 0)], 0, width="17em")
    _offer(made, policy, value)
    return made


def _offer(control: Any, policy: str, value: int | None = None) -> None:
    """Let the slider stand for a policy's parameter, at the published value or at another."""
    parameter = parameter_of(policy)
    control.disabled = parameter is None
    if parameter is None:
        control.description, control.options = "no parameter", [("–", 0)]
        return
    at = parameter.value if value is None else value
    control.description = parameter.name
    control.options = steps(at, least=max(1, parameter.value // BELOW), most=parameter.value * ABOVE)
    control.value = at


def _view_words(view: ScheduleView) -> str:
    longest = max((end - start for mine in view.ranges for start, end in mine), default=0)
    count = sum(len(mine) for mine in view.ranges)
    return f"{view.name} cuts {plural(count, 'range')} up to {plural(longest, 'key')}"


def _batch_words(state: dict[str, Any]) -> str:
    return "given" if "lens" in state else _draw_words(state["trace"], state["seed"])


def _draw_words(trace: str, seed: int) -> str:
    words = trace.split("_")
    return f"{words[0]} {words[-1]}, seed {seed}"
