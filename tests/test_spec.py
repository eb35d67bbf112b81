"""Attention, layers and models: what is refused, and every model of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlab.assets import load_json
from attnlab.spec import AttentionSpec, LayerSpec, ModelSpec, Sight

MODELS: dict[str, dict[str, Any]] = {row["name"]: row for row in load_json("models.json", "models")}


def attention(**changes: Any) -> AttentionSpec:
    fields: dict[str, Any] = {"heads": 8, "kv_heads": 2, "qk_dim": 16, "v_dim": 16, "scale": 0.25, **changes}
    return AttentionSpec(**fields)


def model(*indices: int, **changes: Any) -> ModelSpec:
    layers = tuple(LayerSpec(index=i, attention=attention(), pool_layer=place) for place, i in enumerate(indices))
    fields: dict[str, Any] = {
        "name": "m",
        "layers": layers,
        "context_len": 64,
        "page_size": 1,
        "kv_dtype": torch.float32,
        "mla": False,
        **changes,
    }
    return ModelSpec(**fields)


@pytest.mark.parametrize("field", ["heads", "kv_heads", "qk_dim", "v_dim", "window", "chunk"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_a_count_is_an_int_of_at_least_one(field: str, value: Any) -> None:
    """B19: no window is None; 0 and -1 are no sentinels here."""
    with pytest.raises((TypeError, ValueError), match=f"{field}: expected a"):
        attention(**{field: value})


def test_every_kv_head_serves_as_many_query_heads() -> None:
    assert attention(heads=9, kv_heads=3).group == 3
    with pytest.raises(ValueError, match="heads: expected a multiple of kv_heads 3, got 8"):
        attention(heads=8, kv_heads=3)


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_is_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="scale: expected a number of at most"):
        attention(scale=scale)


@pytest.mark.parametrize("softcap", [0.0, -5.0, float("inf"), float("nan")])
def test_a_soft_cap_is_a_positive_finite_number(softcap: float) -> None:
    """An infinite cap would multiply infinity by tanh(0)."""
    with pytest.raises(ValueError, match="softcap: expected a positive number"):
        attention(softcap=softcap)


@pytest.mark.parametrize("length", [1, 0, -1, 2.5])
def test_a_temperature_length_has_a_logarithm_to_divide_by(length: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="temperature_len: expected"):
        attention(temperature_len=length)


def test_latent_values_are_columns_of_the_latent_row() -> None:
    wide = attention(kv_heads=1, v_dim=17)
    model(0, layers=(LayerSpec(index=0, attention=wide, pool_layer=0),))
    with pytest.raises(ValueError, match="v_dim: expected at most qk_dim 16 .* got 17"):
        model(0, layers=(LayerSpec(index=0, attention=wide, pool_layer=0),), mla=True)


def test_a_model_needs_a_layer_with_attention() -> None:
    with pytest.raises(ValueError, match="layers: model 'm' has no layer with attention"):
        model()


@pytest.mark.parametrize("field", ["context_len", "page_size"])
def test_a_model_has_room(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected at least 1, got 0"):
        model(0, **{field: 0})


def test_two_layers_do_not_share_a_number() -> None:
    with pytest.raises(ValueError, match="layers: model 'm' has layer 3 twice"):
        model(3, 4, 3)


def test_an_unknown_layer_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="layer: model 'm' has attention in layers 0 to 4, got 5"):
        model(0, 1, 2, 3, 4).layer(5)
    with pytest.raises(ValueError, match="layers 18, 2, 7, got 0"):
        model(18, 2, 7).layer(0)


def test_a_cut_model_keeps_numbers_and_fills_the_pool_without_gaps() -> None:
    cut = ModelSpec.load("SmolLM2-135M").only((18, 23))
    assert [(layer.index, layer.pool_layer) for layer in cut.layers] == [(18, 0), (23, 1)]
    assert cut.layer(23).attention == ModelSpec.load("SmolLM2-135M").layer(23).attention


def test_linear_layers_keep_no_kv_and_say_so() -> None:
    spec = ModelSpec.load("MiniMax-Text-01")
    assert [layer.index for layer in spec.layers] == list(range(7, 80, 8))
    assert [layer.pool_layer for layer in spec.layers] == list(range(10))
    assert set(spec.linear) == set(range(80)) - set(range(7, 80, 8))
    for same in (spec, spec.only((7, 15))):
        with pytest.raises(ValueError, match=r"got 6 \(a linear-attention layer, which keeps no KV\)"):
            same.layer(6)


def test_layers_alternate_as_the_pattern_says() -> None:
    windows = [layer.attention.window for layer in ModelSpec.load("Gemma-2-2b").layers]
    assert windows == [4096, None] * 13
    chunks = [layer.attention.chunk for layer in ModelSpec.load("Llama-4-Scout-17B-16E", context_len=2**20).layers]
    assert chunks == [8192, 8192, 8192, None] * 12


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    words = f"lists all {len(MODELS)}$"
    with pytest.raises(
        ValueError,
        match=rf"model: got 'gpt-oss'; did you mean gpt-oss-20b or gpt-oss-120b.* attnlab.ModelSpec.names.. {words}",
    ):
        ModelSpec.load("gpt-oss")
    with pytest.raises(ValueError, match=f"model: got '☃'; attnlab.ModelSpec.names.. {words}"):
        ModelSpec.load("☃")
    assert ModelSpec.names() == list(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_table_loads_or_names_the_fact_that_is_missing(name: str) -> None:
    row = MODELS[name]
    needed = ["context", "pattern", "layers", "q_heads", "kv_heads", "qk_dim", "v_dim", "sm_scale"]
    missing = [field for field in needed if row[field] is None]
    if not missing:
        spec = ModelSpec.load(name)
        assert len(spec.layers) + len(spec.linear) == row["layers"]
        assert (spec.context_len, spec.mla) == (row["context"], row["mla"] is not None)
        assert {layer.attention.group for layer in spec.layers} == {row["q_heads"] // row["kv_heads"]}
        return
    with pytest.raises(ValueError, match=f"{missing[0]}: not verified for model '.*' in data/models.json"):
        ModelSpec.load(name)


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row["context"] is None and row["layers"]])
def test_an_argument_fills_a_missing_context(name: str) -> None:
    with pytest.raises(ValueError, match="pass context_len"):
        ModelSpec.load(name)
    assert ModelSpec.load(name, context_len=4096).context_len == 4096


def test_the_next_missing_fact_is_named_where_an_argument_fills_the_first() -> None:
    name = next(name for name, row in MODELS.items() if row["context"] is None and row["layers"] is None)
    with pytest.raises(ValueError, match="layers: not verified for model .* pass layers=..."):
        ModelSpec.load(name, context_len=4096)


def test_a_latent_models_scale_is_that_of_the_unabsorbed_dimension() -> None:
    """B41: one over the root of 192, not of 576."""
    spec = ModelSpec.load("DeepSeek-V3").layer(0).attention
    assert (spec.heads, spec.kv_heads, spec.qk_dim, spec.v_dim) == (128, 1, 576, 512)
    assert abs(spec.scale - 192**-0.5) < 1e-9


@pytest.mark.parametrize("sight", [Sight(window=1), Sight(window=5), Sight(chunk=4), Sight(window=3, chunk=8), Sight()])
def test_many_positions_see_back_to_where_each_does(sight: Sight) -> None:
    positions = range(-1, 30)
    assert sight.firsts(positions) == [sight.first(position) for position in positions]
