"""Metadata keys that mean the same in many families: read, and refused where their values do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinetic_core.gguf import Metadata


def read_kv_heads(meta: Metadata, n_layers: int, *, minimum: int = 1, required: bool = False) -> tuple[int, ...]:
    """Key and value heads of each layer, ``attention.head_count_kv``: a divisor of ``attention.head_count``.

    minimum:  0 where a layer without heads is one without attention.
    required: is a file without the key refused? Otherwise every query head then has a key head of its own.

    Raises MetadataError.
    """
    key, heads = "attention.head_count_kv", meta.get_int("attention.head_count", minimum=1)
    if required:
        kv_heads = meta.get_ints_per_layer(key, n_layers, minimum=minimum, maximum=heads)
    else:
        kv_heads = meta.get_ints_per_layer(key, n_layers, heads, minimum=minimum, maximum=heads)
    for layer, n in enumerate(kv_heads):
        if n and heads % n:
            either = "" if minimum else "0 or "
            raise meta.does_not_fit(f"{key}[{layer}]", n, f"{either}a divisor of {heads}, the heads")
    return kv_heads


def read_head_dim(meta: Metadata) -> int:
    """Columns of a head: ``attention.key_length``, or ``embedding_length`` shared out to the heads.

    Raises MetadataError, also where ``attention.value_length`` is another size.
    """
    heads, d_model = meta.get_int("attention.head_count", minimum=1), meta.get_int("embedding_length", minimum=1)
    head_dim = meta.get_int("attention.key_length", None, minimum=2)
    if head_dim is None:
        if d_model % heads:
            expected = f"a multiple of {heads}, the heads, without key_length"
            raise meta.does_not_fit("embedding_length", d_model, expected)
        head_dim = d_model // heads
    value_dim = meta.get_int("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise meta.does_not_fit("attention.value_length", value_dim, f"{head_dim}, the size of the key heads")
    return head_dim


def read_rotary_dim(meta: Metadata, head_dim: int, *, required: bool = False) -> int:
    """Columns of a head that rope turns, ``rope.dimension_count``: an even number, at most `head_dim`.

    required: is a file without the key refused? Otherwise rope then turns the whole head. Raises MetadataError.
    """
    key = "rope.dimension_count"
    if required:
        rotary_dim = meta.get_int(key, minimum=2, maximum=head_dim)
    else:
        rotary_dim = meta.get_int(key, head_dim, minimum=2, maximum=head_dim)
    if rotary_dim % 2:
        raise meta.does_not_fit(key, rotary_dim, "an even number: rope turns pairs")
    return rotary_dim


def refuse_rope_scaling(meta: Metadata, instead: str = "none") -> None:
    """Raises UnsupportedModelError where ``rope.scaling.type`` asks for angles that are scaled.

    instead: what the message says is expected. Type ``linear`` with factor 1 passes: converters write it where it has
    no effect.
    """
    scaling = meta.get_str("rope.scaling.type", "none")
    if scaling != "none" and (scaling != "linear" or meta.get_float("rope.scaling.factor", 1.0) != 1.0):
        raise meta.unsupported("rope.scaling.type", scaling, instead)


def require_values(meta: Metadata, values: Mapping[str, bool | int | float | str]) -> None:
    """Raises UnsupportedModelError where the file has one of these keys with another value than the given.

    For keys that ask for what is not in the family's equations. A value of another type is a MetadataError.
    """
    reads: Mapping[type, Any] = {bool: meta.get_bool, int: meta.get_int, float: meta.get_float, str: meta.get_str}
    for key, value in values.items():
        got = reads[type(value)](key, value)
        if got != value:
            raise meta.unsupported(key, got, f"{value} or no such key")
