"""`kinetic_core.checkpoint`: settings read with their types, and the functions that families share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kinetic_core.checkpoint import (
    CheckpointConfig,
    adjacent_pairs,
    block_rules,
    first_half,
    layer_types,
    negative_exp,
    rope_base,
    rope_type,
    scaled,
    second_half,
)
from kinetic_core.errors import MetadataError


def config(**values: Any) -> CheckpointConfig:
    return CheckpointConfig(values)


def test_the_text_models_settings_come_first():
    both = config(text_config={"a": 1, "b": None}, a=2, b=3, c=4)
    flat = CheckpointConfig(both.values, tensors={"x"}).flattened("text_config")
    assert dict(flat.values) == {"a": 1, "b": 3, "c": 4}
    assert flat.tensors == {"x"}
    assert dict(config(a=1).flattened("text_config").values) == {"a": 1}
    with pytest.raises(MetadataError, match=r"text_config.*an object"):
        config(text_config=[1]).flattened("text_config")


def test_numbers_of_a_list():
    assert config(m=[1, 2.5]).get_floats("m", 2, default=1.0) == (1.0, 2.5)
    assert config().get_floats("m", 3, default=1.0) == (1.0, 1.0, 1.0)
    for wrong in ([1.0], [1.0, True], [1.0, float("nan")], [1.0, "2"], 1.0):
        with pytest.raises(MetadataError, match=r"'m'.*2 finite numbers"):
            config(m=wrong).get_floats("m", 2, default=1.0)


def test_rope_settings_in_newer_and_older_places():
    assert rope_base(config(rope_parameters={"rope_theta": 5.0}, rope_theta=6.0)) == 5.0
    assert rope_base(config(rope_scaling={"type": "linear"}, rope_theta=6.0)) == 6.0
    assert rope_base(config(), 7.0) == 7.0
    assert rope_type(config(rope_scaling={"type": "linear"}), "linear") == "linear"
    with pytest.raises(MetadataError, match=r"rope_scaling, key 'type'.*linear.*default or llama3"):
        rope_type(config(rope_scaling={"type": "linear"}), "default", "llama3")


def test_kinds_of_layers():
    assert layer_types(config(num_hidden_layers=2), "a", default=("a", "a")) == ("a", "a")
    for kinds in (["a"], ["a", "b"]):
        with pytest.raises(MetadataError, match=r"layer_types.*2 of a, c"):
            layer_types(config(num_hidden_layers=2, layer_types=kinds), "a", "c")
    with pytest.raises(MetadataError, match="layer_types"):
        layer_types(config(num_hidden_layers=2), "a")


def test_halves():
    x = np.arange(24, dtype=np.float32)
    assert first_half(x[:4]).tolist() == [0, 1]
    assert second_half(x.reshape(4, 6)).tolist() == x.reshape(4, 6)[2:].tolist()
    assert second_half(x.reshape(2, 4, 3)).tolist() == x.reshape(2, 4, 3)[:, 2:].tolist()
    with pytest.raises(ValueError, match="odd"):
        first_half(x[:3])


def test_pairs_factors_and_decays():
    assert adjacent_pairs(4)(np.arange(8.0, dtype=np.float32)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    ones = np.ones((2, 3), np.float32)
    assert scaled(np.array([2.0, 3.0]))(ones).tolist() == [[2, 2, 2], [3, 3, 3]]
    assert scaled(0.1)(ones).dtype == np.float32
    assert scaled(1.0)(ones) is ones
    assert negative_exp(np.zeros(2, np.float32)).tolist() == [-1, -1]


def test_biases_of_a_block():
    rules = block_rules({"attn_norm": "n", "attn_q": "q"}, {"attn_q": scaled(2.0)}, biased=True)
    assert [rule.name for rule in rules] == [
        f"blk.{{layer}}.{n}" for n in ("attn_norm.weight", "attn_q.weight", "attn_q.bias")
    ]
    assert rules[2].source == "model.layers.{layer}.q.bias"
    assert rules[2].make(np.ones(1, np.float32)).tolist() == [2.0]
