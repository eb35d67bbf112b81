"""Explore merges: choose a layer, a head, a request and the number of splits; see which split carries the answer.

Keys, values and queries are those of the trained model that ships with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from attnlab.backend import AttentionBackend
from attnlab.batch import HostLens
from attnlab.checks import positive, require
from attnlab.explore.explorer import Explorer, Option, dropdown, slider, steps, themed
from attnlab.inspect.merge import MergeSteps
from attnlab.inspect.samples import MODEL, Sample
from attnlab.inspect.workbench import Workbench, workbench
from attnlab.plan.plans import DecodePlan
from attnlab.plan.policies.static import Static
from attnlab.plots.picture import Picture
from attnlab.plots.show import show
from attnlab.plots.words import plural, share
from attnlab.spec import ModelSpec

LENS = (2048, 700, 96)
MOST_SPLITS = 64


class MergeExplorer(Explorer):
    """What `explore_merge` returns. Controls: `layer`, `head`, `request`, `splits`."""

    name = "explore_merge"

    def __init__(self, *, layer: int, head: int, request: int, splits: int, lens: tuple[int, ...], theme: str) -> None:
        self._lens, self._theme = lens, theme
        requests: list[Option] = [(f"r{i}: {plural(n, 'key')}", i) for i, n in enumerate(lens) if n]
        super().__init__(
            {
                "layer": dropdown("layer", _numbers(Sample.load("long").layers), layer, width="8em"),
                "head": dropdown("head", _numbers(range(_heads())), head, width="8em"),
                "request": dropdown("request", requests, request, width="14em"),
                "splits": slider("splits", steps(splits, least=1, most=MOST_SPLITS), splits, width="19em"),
            }
        )

    def _arguments(self) -> dict[str, Any]:
        chosen = {name: control.value for name, control in self.controls.items()}
        return {**chosen, "lens": list(self._lens), "theme": self._theme}

    def _look(self, state: dict[str, Any]) -> tuple[Picture, str]:
        layer, head, request = state["layer"], state["head"], state["request"]
        backend, plan = _decoded(self._lens, layer, state["splits"])
        merged = MergeSteps.of(
            backend.partials(layer, plan),
            plan.lane(layer),
            layer=layer,
            request=request,
            head=head,
        )
        return show(merged, theme=state["theme"]), _words(merged, state["splits"])


def explore_merge(
    *,
    layer: int = 18,
    head: int = 3,
    request: int = 0,
    splits: int = 8,
    lens: Sequence[int] = LENS,
    theme: str = "light",
) -> MergeExplorer:
    """Return controls over a picture of one head's merge, in SmolLM2-135M as it was recorded (layers 0, 18, 23).

    A request is the end of the recorded text, up to 2,048 tokens of it; `splits` are asked for, a short request gets
    fewer.

    >>> explorer = explore_merge(lens=[2048, 256])
    >>> explorer.controls["request"].value = 1
    >>> explorer.state["request"], len(explorer.state["lens"])
    (1, 2)
    """
    values = HostLens.of(lens, device="cpu").values
    recorded = Sample.load("long").layers
    _member("layer", layer, recorded, f"the recorded sample has layers {', '.join(map(str, recorded))}")
    _member("head", head, range(_heads()), f"the layer has heads 0 to {_heads() - 1}")
    with_keys = [i for i, n in enumerate(values) if n]
    _member("request", request, with_keys, f"requests with keys are {', '.join(map(str, with_keys)) or 'none'}")
    return MergeExplorer(
        layer=layer,
        head=head,
        request=request,
        splits=positive("splits", splits),
        lens=values,
        theme=themed(theme),
    )


@lru_cache(maxsize=4)
def _bench(lens: tuple[int, ...], layer: int) -> Workbench:
    """Fill a cache, once for a batch and layer: it takes longer than all the rest."""
    return workbench(MODEL, lens=lens, policy="static", engine="eager", layers=[layer])


@lru_cache(maxsize=16)
def _decoded(lens: tuple[int, ...], layer: int, splits: int) -> tuple[AttentionBackend, DecodePlan]:
    """Return a backend of its own over that cache, with the partial results of all heads in its scratch."""
    bench = _bench(lens, layer)
    backend = AttentionBackend(
        model=bench.model,
        pool=bench.pool,
        table=bench.table,
        engine="eager",
        policy=Static(splits=splits),
        max_requests=len(lens),
        multiprocessors=None,
    )
    plan = backend.plan(bench.batch)
    backend.decode(layer, *bench.newest(layer), plan)
    return backend, plan


def _words(merged: MergeSteps, asked: int) -> str:
    keys, weight = merged.ranges[-1][1], merged.weights
    heaviest = int(weight.argmax())
    cuts = plural(len(merged.ranges), "split") + (f" ({asked:,} asked for)" if len(merged.ranges) != asked else "")
    tells = f"split {heaviest + 1} weighs most, {share(float(weight[heaviest]))}"
    return f"{MODEL}, {merged.title}: {plural(keys, 'key')} in {cuts}; {tells}."


def _member(name: str, value: int, known: Sequence[int], words: str) -> None:
    require(type(value) is int and value in known, f"{name}: {words}, got {value!r}")


def _numbers(values: Sequence[int]) -> list[Option]:
    return [(str(value), value) for value in values]


@lru_cache(maxsize=1)
def _heads() -> int:
    return ModelSpec.load(MODEL).layers[0].attention.heads
