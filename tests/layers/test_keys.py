"""Keys that families share: what they say, what is refused, and by which name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kinetic_core.errors import MetadataError, UnsupportedModelError
from kinetic_core.gguf import Metadata
from kinetic_core.layers import read_head_dim, read_kv_heads, read_rotary_dim, refuse_rope_scaling, require_values

HEADS, KV, SIZE, VALUE = (f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length"))
D, ROTARY, SCALING, FACTOR = "embedding_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"


def keys(values: dict[str, Any]) -> Metadata:
    return Metadata({f"toy.{key}": value for key, value in values.items()}).prefixed("toy")


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ({HEADS: 4, KV: 2}, {}, (2, 2, 2)),
        ({HEADS: 4, KV: [1, 2, 4]}, {}, (1, 2, 4)),
        ({HEADS: 4, KV: [0, 2, 0]}, {"minimum": 0, "required": True}, (0, 2, 0)),
        ({HEADS: 4}, {}, (4, 4, 4)),
    ],
)
def test_key_heads(values: dict[str, Any], options: dict[str, Any], expected: tuple[int, ...]):
    assert read_kv_heads(keys(values), 3, **options) == expected


def test_head_sizes():
    assert read_head_dim(keys({HEADS: 4, D: 64})) == 16
    assert read_head_dim(keys({HEADS: 4, D: 64, SIZE: 32, VALUE: 32})) == 32
    assert read_head_dim(keys({HEADS: 3, D: 64, SIZE: 32})) == 32
    assert read_rotary_dim(keys({}), 16) == 16
    assert read_rotary_dim(keys({ROTARY: 8}), 16, required=True) == 8


def test_values_that_change_nothing_pass():
    refuse_rope_scaling(keys({}))
    refuse_rope_scaling(keys({SCALING: "none", FACTOR: 4.0}))
    refuse_rope_scaling(keys({SCALING: "linear", FACTOR: 1.0}))
    refuse_rope_scaling(keys({SCALING: "linear"}))
    require_values(keys({"a": 0, "b": True, "c": 1.5, "d": "yes"}), {"a": 0, "b": True, "c": 1.5, "d": "yes", "e": 7})


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no divisor": (
        lambda: read_kv_heads(keys({HEADS: 4, KV: [4, 3]}), 2),
        MetadataError,
        r"toy.*kv\[1\].*3.*a divisor",
    ),
    "no key head": (lambda: read_kv_heads(keys({HEADS: 4, KV: [4, 0]}), 2), MetadataError, r"toy.*kv\[1\].*0.*1 to 4"),
    "too many": (lambda: read_kv_heads(keys({HEADS: 4, KV: 8}), 2, minimum=0), MetadataError, "8.*0 to 4"),
    "zero is named": (
        lambda: read_kv_heads(keys({HEADS: 4, KV: 3}), 1, minimum=0),
        MetadataError,
        "3, expected 0 or a divisor of 4",
    ),
    "key heads": (lambda: read_kv_heads(keys({HEADS: 4}), 2, required=True), MetadataError, "head_count_kv.*missing"),
    "heads": (lambda: read_kv_heads(keys({KV: 4}), 2), MetadataError, r"toy\.attention\.head_count'.*missing"),
    "no multiple": (lambda: read_head_dim(keys({HEADS: 3, D: 64})), MetadataError, "toy.embedding_length.*64.*of 3"),
    "value heads": (
        lambda: read_head_dim(keys({HEADS: 4, D: 64, VALUE: 8})),
        MetadataError,
        "toy.attention.value_length.*8, expected 16",
    ),
    "odd": (lambda: read_rotary_dim(keys({ROTARY: 7}), 16), MetadataError, "toy.rope.dimension_count.*7.*even"),
    "odd head": (lambda: read_rotary_dim(keys({}), 15), MetadataError, "toy.rope.dimension_count.*15.*even"),
    "wide": (lambda: read_rotary_dim(keys({ROTARY: 18}), 16), MetadataError, "toy.rope.dimension_count.*18.*2 to 16"),
    "rotary": (lambda: read_rotary_dim(keys({}), 16, required=True), MetadataError, "dimension_count.*missing"),
    "yarn": (lambda: refuse_rope_scaling(keys({SCALING: "yarn"})), UnsupportedModelError, "toy.rope.*yarn.*none"),
    "yarn with factor 1": (
        lambda: refuse_rope_scaling(keys({SCALING: "yarn", FACTOR: 1.0}), instead="factors"),
        UnsupportedModelError,
        "yarn, expected factors",
    ),
    "linear": (
        lambda: refuse_rope_scaling(keys({SCALING: "linear", FACTOR: 2.0})),
        UnsupportedModelError,
        "toy.rope.scaling.type.*linear",
    ),
    "another value": (
        lambda: require_values(keys({"a": 0, "b": 2}), {"a": 0, "b": 1}),
        UnsupportedModelError,
        "'toy.b'.*got 2, expected 1 or no such key",
    ),
    "another type": (lambda: require_values(keys({"b": 1}), {"b": True}), MetadataError, r"another type.*toy\.b"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str):
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()
