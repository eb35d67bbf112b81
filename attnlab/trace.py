"""What a recording holds: plain numbers on the host, saved and read back without a GPU and without pickle.

Reference of the format: safetensors, with one JSON document in its header. Tensors are named `call.field.request`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnlab.checks import require
from attnlab.plan.call import DecodeCall
from attnlab.plan.plans import Lane

Stage = Literal["raw", "scaled", "capped", "masked", "weights"]
STAGES: tuple[Stage, ...] = ("raw", "scaled", "capped", "masked", "weights")
"""What a score goes through: the dot product, times the scale, capped (tempered and modified too), masked, softmax."""
FORMAT = 1


@runtime_checkable
class Tracer(Protocol):
    """Looks at every call of a backend while it is attached."""

    def times_for(self, layer: int, lane: Lane) -> Tensor | None:
        """Return a tensor for the programs of this layer's call to note when they ran, or None."""

    def decoded(self, call: DecodeCall) -> None:
        """Look at a call. It must not change a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreTrace:
    """One request's scores at one stage. `values` is `[heads, bins]` fp32; bin i holds keys `edges[i]` to `edges[i
    + 1]`.

    `heads` are query head numbers; `reduce` says how the keys of a bin became one number (`max`, `sum`, `logsumexp`).
    """

    request: int
    stage: str
    reduce: str
    heads: tuple[int, ...]
    edges: tuple[int, ...]
    values: Tensor

    @property
    def by_key(self) -> bool:
        """Whether every bin is one key."""
        return self.edges == tuple(range(len(self.edges)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallTrace:
    """One recorded decode call. Lists run over requests.

    `ranges` are the split ranges; `partial_lse[r]` is `[splits, heads]` and `partial_out[r]` `[splits, heads,
    v_dim]`, natural log and normalised; `lse` is `[reqs, heads]` without sinks. `times`, where programs noted them,
    is `[programs, 3]` int64: multiprocessor, start and end in nanoseconds of the device's clock. Parts that were
    not asked for are empty.
    """

    layer: int
    policy: str
    heads: int
    kv_heads: int
    scale: float
    page_size: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    nominal: tuple[int, ...]
    lse: Tensor
    partial_lse: tuple[Tensor, ...] = ()
    partial_out: tuple[Tensor, ...] = ()
    scores: tuple[ScoreTrace, ...] = ()
    times: Tensor | None = None

    @property
    def lens(self) -> tuple[int, ...]:
        """Keys per request."""
        return tuple(mine[-1][1] if mine else 0 for mine in self.ranges)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Merge weights per request, `[splits, heads]`: exp(partial lse - lse). They sum to 1 over the splits."""
        return tuple(torch.exp(mine - self.lse[r]) for r, mine in enumerate(self.partial_lse))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for _, x in self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "lse", self.lse
        for name, parts in (("partial_lse", self.partial_lse), ("partial_out", self.partial_out)):
            yield from ((f"{name}.{r}", x) for r, x in enumerate(parts))
        yield from ((f"scores.{i}", s.values) for i, s in enumerate(self.scores))
        if self.times is not None:
            yield "times", self.times


@dataclass(slots=True, kw_only=True, eq=False)
class Trace:
    """A recording: its calls in order, and what did not fit the budget, in words.

    `tokens[r]` are the texts of request r's tokens, where the recorder was told them.
    """

    calls: list[CallTrace] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tokens: tuple[tuple[str, ...], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(call.bytes for call in self.calls)

    def call(self, layer: int) -> CallTrace:
        """Return the first recorded call of a layer; raise ValueError with the layers that were recorded."""
        for call in self.calls:
            if call.layer == layer:
                return call
        known = ", ".join(dict.fromkeys(str(call.layer) for call in self.calls)) or "none"
        raise ValueError(f"layer: this trace has calls of layers {known}, got {layer!r}")

    def save(self, path: str | Path) -> None:
        """Write the trace as one safetensors file; its header carries everything that is no tensor, as JSON."""
        path = Path(path)
        require(path.parent.is_dir(), f"trace: there is no folder {path.parent} to save into; make it first")
        tensors = {f"{i}.{name}": x.contiguous() for i, call in enumerate(self.calls) for name, x in call._tensors()}
        document = {
            "format": FORMAT,
            "calls": [_call_document(call) for call in self.calls],
            "left_out": self.left_out,
            "tokens": self.tokens,
        }
        save_file(tensors, path, metadata={"attnlab_trace": json.dumps(document)})

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a saved trace. Raises FileNotFoundError, or ValueError where the file is no whole trace."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"trace: there is no file {path}")
        try:
            with safe_open(path, framework="pt") as file:
                header = (file.metadata() or {}).get("attnlab_trace")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        except Exception as error:  # safetensors raises an exception type of its own for anything malformed
            raise ValueError(f"trace: {path} is no whole safetensors file ({error})") from error
        if header is None:
            raise ValueError(f"trace: {path} is a safetensors file, but no trace of attnlab's")
        try:
            return _trace_of(json.loads(header), tensors)
        except (KeyError, TypeError, IndexError, ValueError, OverflowError, RecursionError, AttributeError) as error:
            raise ValueError(
                f"trace: the header of {path} is damaged, or disagrees with its tensors ({error!r})"
            ) from error


_PLAIN = ("layer", "policy", "heads", "kv_heads", "scale", "page_size", "ranges", "nominal")
_SCORE_PLAIN = ("request", "stage", "reduce", "heads", "edges")


def _call_document(call: CallTrace) -> dict[str, Any]:
    return {
        **{name: getattr(call, name) for name in _PLAIN},
        "partials": [len(call.partial_lse), len(call.partial_out)],
        "scores": [{name: getattr(score, name) for name in _SCORE_PLAIN} for score in call.scores],
        "times": call.times is not None,
    }


def _trace_of(document: dict[str, Any], tensors: dict[str, Tensor]) -> Trace:
    require(document["format"] == FORMAT, f"format: expected {FORMAT}, got {document['format']!r}")
    calls = [_call_of(row, i, tensors) for i, row in enumerate(document["calls"])]
    tokens = tuple(tuple(str(t) for t in texts) for texts in document["tokens"])
    return Trace(calls=calls, left_out=[str(x) for x in document["left_out"]], tokens=tokens)


def _call_of(row: dict[str, Any], i: int, tensors: dict[str, Tensor]) -> CallTrace:
    """Rebuild a call, and hold every tensor to the shape that its header promises."""
    ranges = tuple(tuple((int(a), int(b)) for a, b in mine) for mine in row["ranges"])
    reqs, heads = len(ranges), int(row["heads"])
    lses, outs = (int(n) for n in row["partials"])
    require({lses, outs} <= {0, reqs} and reqs == len(row["nominal"]), "calls: lists of different lengths")

    def get(name: str, *shape: int | None) -> Tensor:
        x = tensors[f"{i}.{name}"]
        fits = x.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
        require(fits, f"{i}.{name}: expected {list(shape)}, got {list(x.shape)}")
        return x

    return CallTrace(
        layer=int(row["layer"]),
        policy=str(row["policy"]),
        heads=heads,
        kv_heads=int(row["kv_heads"]),
        scale=float(row["scale"]),
        page_size=int(row["page_size"]),
        ranges=ranges,
        nominal=tuple(int(n) for n in row["nominal"]),
        lse=get("lse", reqs, heads),
        partial_lse=tuple(get(f"partial_lse.{r}", len(ranges[r]), heads) for r in range(lses)),
        partial_out=tuple(get(f"partial_out.{r}", len(ranges[r]), heads, None) for r in range(outs)),
        scores=tuple(_score_of(s, get, n) for n, s in enumerate(row["scores"])),
        times=get("times", None, 3) if row["times"] else None,
    )


def _score_of(row: dict[str, Any], get: Any, n: int) -> ScoreTrace:
    heads, edges = tuple(int(h) for h in row["heads"]), tuple(int(e) for e in row["edges"])
    return ScoreTrace(
        request=int(row["request"]),
        stage=str(row["stage"]),
        reduce=str(row["reduce"]),
        heads=heads,
        edges=edges,
        values=get(f"scores.{n}", len(heads), len(edges) - 1),
    )
