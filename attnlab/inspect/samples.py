"""Queries, keys and values of a trained model, recorded and shipped with the package.

SmolLM2-135M-Instruct (Apache-2.0), after RoPE; see data/README.md for text, layers and layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from attnlab.assets import data_path, load_json
from attnlab.checks import one_of, require

MODEL = "SmolLM2-135M"
ROPE_BASE = 100_000.0
"""Of the model's rotary positions: pair i of a head's dimensions turns by `base ** (-2i / dim)` a position."""

_FILES: dict[str, dict[int, tuple[str, str]]] = {
    # text -> layer -> (file, suffix of the tensors' names)
    "long": {n: (f"smollm2_135m/long_layer{n:02d}.safetensors", str(n)) for n in (0, 18, 23)},
    "short": {n: ("smollm2_135m/short.safetensors", str(n)) for n in (0, 5, 12, 18, 22, 29)},
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSample:
    """One layer's recorded tensors, fp16. `q[i]` belongs to token `first_query + i`, `k[j]` and `v[j]` to token j."""

    q: Float[Tensor, "queries heads qk_dim"]
    k: Float[Tensor, "tokens kv_heads qk_dim"]
    v: Float[Tensor, "tokens kv_heads v_dim"]

    @property
    def first_query(self) -> int:
        """The first token whose query was recorded; all later ones were too."""
        return self.k.shape[0] - self.q.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A recorded text: its tokens, and its layers' queries, keys and values.

    >>> sample = Sample.load("long")
    >>> sample.layers, len(sample.tokens), "".join(sample.tokens[:3])
    ((0, 18, 23), 2048, 'Apache License')
    """

    text: str
    layers: tuple[int, ...]
    tokens: tuple[str, ...]

    @classmethod
    def load(cls, text: str) -> Sample:
        """Return the sample of that name: `long` (2,048 tokens, three layers) or `short` (88 tokens, six layers)."""
        one_of("sample", text, list(_FILES))
        tokens = tuple(load_json("smollm2_135m/tokens.json", text, "tokens"))
        return cls(text=text, layers=tuple(_FILES[text]), tokens=tokens)

    def layer(self, index: int) -> LayerSample:
        """Return a layer's tensors. Raises ValueError where it was not recorded, or its file is damaged."""
        known = ", ".join(map(str, self.layers))
        require(index in self.layers, f"layer: the {self.text} sample has layers {known}, got {index!r}")
        name, suffix = _FILES[self.text][index]
        path = data_path(name)
        try:
            tensors = load_file(path)
            q, k, v = (tensors[f"{x}{suffix}"] for x in "qkv")
        except Exception as error:  # safetensors raises its own exception type, and KeyError where a tensor is missing
            raise ValueError(f"data file {path} is damaged ({error}); reinstall attnlab") from error
        return LayerSample(q=q, k=k, v=v)


def random_layer(
    *, tokens: int, queries: int, heads: int, kv_heads: int, qk_dim: int, v_dim: int, seed: int
) -> LayerSample:
    """Return seeded standard normal tensors in a sample's shape, fp32, with queries for the last tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads, qk_dim), (tokens, kv_heads, qk_dim), (tokens, kv_heads, v_dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return LayerSample(q=q, k=k, v=v)


def turned(x: Float[Tensor, "tokens heads qk_dim"], by: Sequence[int]) -> Float[Tensor, "tokens heads qk_dim"]:
    """Return recorded queries or keys as RoPE has them `by[i]` positions later; by 0 they are the same bits.

    Nothing but the position changes. In layer 0, whose rows depend on the token alone, that is what the model computes
    there; in later layers a row keeps what it knows of the words that stood before it.
    Source of the method: RoFormer (Su et al., 2021), with dimensions 2i and 2i + 1 as pairs.
    """
    require(len(by) == x.shape[0], f"by: expected a distance for each of {x.shape[0]} tokens, got {len(by)}")
    dim = x.shape[-1]
    speed = ROPE_BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.tensor(by, dtype=torch.float64)[:, None, None] * speed  # (tokens, 1, pairs)
    real, imaginary = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (real * angle.cos() - imaginary * angle.sin(), real * angle.sin() + imaginary * angle.cos())
    return torch.stack(pairs, -1).flatten(-2).to(x.dtype)
