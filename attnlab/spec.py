"""What a model's attention is: shapes, scale, caps, layers. Knows nothing of devices or batches.

The score pipeline's order is fixed, here and in every engine: scale, cap, temperature, modifier, mask.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.assets import load_json
from attnlab.checks import number, positive, require


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
class AttentionSpec:
    """One layer's attention: `heads` queries read `kv_heads` keys and values, in groups of `heads // kv_heads`.

    `scale` multiplies the dot products (under MLA: one over the root of the *unabsorbed* query dimension).
    `window` counts visible keys, the query's own included. `temperature_len` T multiplies the scores of a query
    at position p > T by log2(p) / log2(T). `has_sinks`: one logit per query head joins the softmax denominator.

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

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer that keeps keys and values: its number in the model, its attention, its place in the pool."""

    index: int
    attention: AttentionSpec
    pool_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's layers and cache shape.

    `layers` are those with attention; `linear` are the numbers of those that keep no KV (linear attention).
    `mla`: keys are latent rows whose first `v_dim` columns are the values.

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

    def layer(self, index: int) -> LayerSpec:
        """Return the layer of that number; raise ValueError with the numbers that exist."""
        for layer in self.layers:
            if layer.index == index:
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

    @classmethod
    def load(
        cls,
        name: str,
        *,
        page_size: int = 1,
        kv_dtype: torch.dtype = torch.bfloat16,
        context_len: int | None = None,
    ) -> ModelSpec:
        """Return a published model's shape from `data/models.json`.

        Raises ValueError where the model is unknown, or where a fact it needs is not verified in the data and no
        argument gives it.
        """
        rows = {row["name"]: row for row in load_json("models.json", "models")}
        if name not in rows:
            close = difflib.get_close_matches(str(name), rows, n=3, cutoff=0.3)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise ValueError(f"model: got {name!r}; {hint}data/models.json has {', '.join(rows)}")
        row = rows[name]
        context = context_len if context_len is not None else _known(row, "context", hint="pass context_len")
        pattern = _known(row, "pattern")
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


def _known(row: dict[str, Any], field: str, hint: str = "build the ModelSpec by hand") -> Any:
    if row[field] is None:
        raise ValueError(f"{field}: not verified for model {row['name']!r} in data/models.json; {hint}")
    return row[field]


def _spans(numbers: list[int]) -> str:
    """Words for a sorted list of numbers: `0 to 29`, or `0, 18, 23`."""
    if len(numbers) > 3 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
