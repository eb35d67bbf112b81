"""What a model's attention is: shapes, scale, caps, layers. Knows nothing of devices or batches.

The score pipeline's order is fixed, here and in every engine: scale, cap, temperature, modifier, mask.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlab.assets import load_json
from attnlab.checks import number, positive, require

T = TypeVar("T", int, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMod:
    """A score modifier: a function of scores and positions, once in torch (its meaning), once in Triton (its text).

    Both halves run after scale, cap and temperature and before the mask, and return scores of the same shape.
    Index arguments broadcast against the scores; positions are global (counted from the request's first token).

    `torch`: (scores, q_pos, kv_pos, q_index, head, aux) -> scores; `aux` is `[tokens, heads, width]` or None.
    `triton`: a jitted (scores, q_pos, kv_pos, q_index, head, valid, aux_ptr, aux_stride_token, aux_stride_head,
    aux_width) -> scores.
    """

    name: str
    torch: Callable[..., Tensor]
    triton: Any
    needs_aux: bool

    def __post_init__(self) -> None:
        for half in ("torch", "triton"):
            value = getattr(self, half)
            given = value is not None and not isinstance(value, str)
            require(given, f"{half}: score modifier {self.name!r} needs both halves, got {value!r}", TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a query sees: `window` keys, its own included; back to the start of its `chunk`; or all (None).

    Not `causal`: of the tokens that come with it also those behind, within the window. `cross`: instead of its own
    request's keys all those of an encoder, whatever a mask says of the request's own.

    >>> Sight(window=4, chunk=None).first(5), Sight(window=None, chunk=8).first(21), Sight().first(5)
    (2, 16, 0)
    """

    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    cross: bool = False

    @property
    def partial(self) -> bool:
        """Whether there are keys that a query far enough behind does not see."""
        return self.window is not None or self.chunk is not None

    @property
    def span(self) -> int | None:
        """The most keys that one query sees; None: no bound."""
        return min((n for n in (self.window, self.chunk) if n is not None), default=None)

    def first(self, position: T) -> T:
        """Return the first position (int, or integer tensor) that queries at `position` see; at least 0."""
        first = position * 0
        if self.window is not None:
            first = _larger(first, position - (self.window - 1))
        if self.chunk is not None:
            first = _larger(first, position // self.chunk * self.chunk)
        return first

    def firsts(self, positions: Sequence[int]) -> list[int]:
        """Return the same for many positions that the host knows: every step asks, for every request."""
        if self.window is None or self.chunk is not None:
            return [self.first(position) for position in positions]
        behind = self.window - 1
        return [position - behind if position > behind else 0 for position in positions]

    def last(self, position: int, *, masked: bool = False) -> int | None:
        """Return the last position that a query at `position` sees; None: no bound but the tokens that there are.

        Where a custom mask decides (`masked`), causality is the mask's affair: only the chunk's end is left.
        """
        ends = [] if self.chunk is None else [position // self.chunk * self.chunk + self.chunk - 1]
        if not masked and self.causal:
            ends.append(position)
        elif not masked and self.window is not None:
            ends.append(position + self.window - 1)
        return min(ends, default=None)

    def __str__(self) -> str:
        if self.cross:
            return "all keys of an encoder"
        parts = [f"{name} {n:,}" for name, n in (("window", self.window), ("chunk", self.chunk)) if n is not None]
        return (" and ".join(parts) or "all keys") + ("" if self.causal else ", both ways")


@cache
def _sight(window: int | None, chunk: int | None, causal: bool, cross: bool) -> Sight:
    """Every layer of every step asks: what is seen alike is one object."""
    return Sight(window=window, chunk=chunk, causal=causal, cross=cross)


def _larger(a: T, b: T) -> T:
    return torch.maximum(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else max(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention: `heads` queries read `kv_heads` keys and values, in groups of `heads // kv_heads`.

    `scale` multiplies the dot products (under MLA: one over the root of the *unabsorbed* query dimension).
    `window` counts visible keys, the query's own included. `causal=False`: tokens that come together see each other
    both ways, as in an encoder, or a decoder whose prompts come whole: an earlier chunk does not see a later one.
    `temperature_len` T multiplies the scores of a query at position p > T by log2(p) / log2(T). `has_sinks`: one logit
    per query head joins the softmax denominator. `cross`: its keys are an encoder's, all of which every query sees; it
    is not causal, and has no positions to speak of.

    >>> spec = AttentionSpec(heads=9, kv_heads=3, qk_dim=64, v_dim=64, scale=0.125)
    >>> spec.group
    3
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    temperature_len: int | None = None
    mod: ScoreMod | None = None
    has_sinks: bool = False
    cross: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "qk_dim", "v_dim"):
            positive(name, getattr(self, name))
        require(
            self.heads % self.kv_heads == 0,
            f"heads: expected a multiple of kv_heads {self.kv_heads}, got {self.heads}; every KV head serves as many",
        )
        number("scale", self.scale, positive=False)
        for name in ("window", "chunk", "temperature_len"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.softcap is not None:
            number("softcap", self.softcap, positive=True)
        require(
            self.temperature_len != 1,
            "temperature_len: expected more than 1 or None, got 1, whose logarithm would divide by zero",
        )
        for name in ("window", "chunk", "temperature_len", "mod"):
            require(
                not self.cross or getattr(self, name) is None,
                f"cross, {name}: a layer that reads an encoder's keys sees all of them, and its queries stand at no "
                f"position among these; leave {name} away, or cross",
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def sight(self) -> Sight:
        """What its queries see."""
        return _sight(self.window, self.chunk, self.causal and not self.cross, self.cross)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer that keeps keys and values: its number in the model, its attention, its place in the pool.

    Places count from 0. Layers of one place share their keys and values.
    """

    index: int
    attention: AttentionSpec
    pool_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's layers and cache shape.

    `layers` are those with attention; `linear` are the numbers of those that keep no KV (linear attention).
    `mla`: keys are latent rows whose first `v_dim` columns are the values. Where a layer attends to the keys of an
    encoder (cross-attention), no layer has a window or chunk: such a model is refused.

    >>> ModelSpec.load("SmolLM2-135M").layer(18).attention.group
    3
    """

    name: str
    layers: tuple[LayerSpec, ...]
    context_len: int
    page_size: int
    kv_dtype: torch.dtype
    mla: bool
    linear: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        positive("context_len", self.context_len)
        positive("page_size", self.page_size)
        for layer in self.layers:
            got = f"layers: expected a LayerSpec each, got {type(layer).__name__}; ModelSpec.uniform makes equal ones"
            require(isinstance(layer, LayerSpec), got, TypeError)
        for layer in self.layers:
            sight = layer.attention.sight
            require(
                not (self.cross and sight.partial),
                f"cross, {'chunk' if sight.window is None else 'window'}: model {self.name!r} has an encoder (layer "
                f"{_spans(list(self.cross))} reads it), and layer {layer.index} sees {sight} only; the two do not go "
                "together",
            )
        require(len(self.layers) > 0, f"layers: model {self.name!r} has no layer with attention")
        seen: set[int] = set()
        for layer in self.layers:
            require(layer.index not in seen, f"layers: model {self.name!r} has layer {layer.index} twice")
            seen.add(layer.index)
            qk_dim, v_dim = layer.attention.qk_dim, layer.attention.v_dim
            require(
                not self.mla or v_dim <= qk_dim,
                f"v_dim: expected at most qk_dim {qk_dim} in layer {layer.index}, as values are columns of the latent "
                f"row, got {v_dim}",
            )

    @property
    def cross(self) -> tuple[int, ...]:
        """The numbers of the layers that attend to the keys of an encoder; none: the model has no encoder."""
        return tuple(layer.index for layer in self.layers if layer.attention.cross)

    def layer(self, index: int) -> LayerSpec:
        """Return the layer of that number; raise ValueError with the numbers that exist."""
        layers = self.layers
        if type(index) is int and 0 <= index < len(layers) and layers[index].index == index:  # no layer left out
            return layers[index]
        for layer in layers:
            if layer.index == index and not isinstance(index, bool):
                return layer
        known = _spans([layer.index for layer in self.layers])
        note = " (a linear-attention layer, which keeps no KV)" if index in self.linear else ""
        raise ValueError(f"layer: model {self.name!r} has attention in layers {known}, got {index!r}{note}")

    def only(self, indices: tuple[int, ...]) -> ModelSpec:
        """Return the same model cut down to some of its layers, which keep their numbers."""
        layers = tuple(replace(self.layer(index), pool_layer=place) for place, index in enumerate(indices))
        return replace(self, layers=layers)

    @classmethod
    def uniform(
        cls,
        attention: AttentionSpec,
        *,
        layers: int,
        context_len: int,
        page_size: int,
        kv_dtype: torch.dtype,
        mla: bool = False,
    ) -> ModelSpec:
        """Return a model of equal layers, for studies and tests."""
        return _model(
            "uniform",
            [(i, attention) for i in range(layers)],
            context_len,
            page_size,
            kv_dtype,
            mla,
        )

    @staticmethod
    def names() -> list[str]:
        """Return the names of the models that `load` knows, in the order of `data/models.json`.

        >>> [name for name in ModelSpec.names() if "gpt-oss" in name]
        ['gpt-oss-120b', 'gpt-oss-20b']
        """
        return [row["name"] for row in load_json("models.json", "models")]

    @classmethod
    def load(
        cls,
        name: str,
        *,
        page_size: int = 1,
        kv_dtype: torch.dtype = torch.bfloat16,
        context_len: int | None = None,
        **facts: Any,
    ) -> ModelSpec:
        """Return a published model's shape from `data/models.json`.

        `facts` fill what the data leave open, under their names there: `layers`, `q_heads`, `kv_heads`, `qk_dim`,
        `v_dim`, `sm_scale`, `window`, `chunk`, `pattern`. Raises ValueError where the model is unknown, where a fact it
        needs is not verified in the data and no argument gives it, or where an argument contradicts the data.
        """
        rows = {row["name"]: row for row in load_json("models.json", "models")}
        if name not in rows:
            close = difflib.get_close_matches(str(name), rows, n=3, cutoff=0.3)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise ValueError(f"model: got {name!r}; {hint}attnlab.ModelSpec.names() lists all {len(rows)}")
        row = _filled(rows[name], facts)
        context = context_len if context_len is not None else _known(row, "context", hint="pass context_len")
        pattern = _known(row, "pattern")
        require(
            isinstance(pattern, str) and pattern != "" and set(pattern) <= set("FSCL"),
            f"pattern: expected letters of F (full), S (sliding), C (chunked), L (linear), got {pattern!r}",
        )
        layers = [(i, _attention(row, pattern[i % len(pattern)])) for i in range(_known(row, "layers"))]
        return _model(name, layers, context, page_size, kv_dtype, row["mla"] is not None)


def _model(
    name: str,
    layers: list[tuple[int, AttentionSpec | None]],
    context_len: int,
    page_size: int,
    kv_dtype: torch.dtype,
    mla: bool,
) -> ModelSpec:
    with_kv = [(index, attention) for index, attention in layers if attention is not None]
    return ModelSpec(
        name=name,
        layers=tuple(LayerSpec(index=i, attention=a, pool_layer=place) for place, (i, a) in enumerate(with_kv)),
        linear=tuple(index for index, attention in layers if attention is None),
        context_len=context_len,
        page_size=page_size,
        kv_dtype=kv_dtype,
        mla=mla,
    )


def _attention(row: dict[str, Any], kind: str) -> AttentionSpec | None:
    """Return the attention of a layer of kind F(ull), S(liding), C(hunked) or L(inear: keeps no KV)."""
    if kind == "L":
        return None
    return AttentionSpec(
        heads=_known(row, "q_heads"),
        kv_heads=_known(row, "kv_heads"),
        qk_dim=_known(row, "qk_dim"),
        v_dim=_known(row, "v_dim"),
        scale=_known(row, "sm_scale"),
        window=_known(row, "window") if kind == "S" else None,
        chunk=_known(row, "chunk") if kind == "C" else None,
        softcap=row["softcap"],
        temperature_len=row["xai_temperature_len"],
        has_sinks=row["sinks"],
    )


FACTS = ("layers", "q_heads", "kv_heads", "qk_dim", "v_dim", "sm_scale", "window", "chunk", "pattern")
"""What an argument of `ModelSpec.load` may fill where the data leave it open."""


def _filled(row: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its gaps filled; nothing that the data know is overwritten."""
    pattern = facts.get("pattern", row["pattern"]) or ""
    for field, letter in (("window", "S"), ("chunk", "C")):
        used = field not in facts or not isinstance(pattern, str) or letter in pattern
        require(used, f"{field}: no layer of model {row['name']!r} has one (its pattern is {pattern!r})")
    for field, value in facts.items():
        require(field in FACTS, f"{field}: no fact of a model that could be filled; these can: {', '.join(FACTS)}")
        known = row[field]
        require(
            known is None or known == value,
            f"{field}: data/models.json has {known!r} for model {row['name']!r}, got {value!r}; change the loaded "
            "spec with dataclasses.replace",
        )
    return {**row, **facts}


def _known(row: dict[str, Any], field: str, hint: str | None = None) -> Any:
    if row[field] is None:
        way = hint or f"pass {field}=..."
        raise ValueError(f"{field}: not verified for model {row['name']!r} in data/models.json; {way}")
    return row[field]


def _spans(numbers: list[int]) -> str:
    """Words for a sorted list of numbers: `0 to 29`, or `0, 18, 23`."""
    if len(numbers) > 3 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
