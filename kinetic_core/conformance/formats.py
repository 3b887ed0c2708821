"""In which formats the tiny models are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.convert.quantize import quantize
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, MemoryTensors, RawTensor, as_type, read_tensor
from kinetic_core.interfaces import TinyVariant
from kinetic_core.reference.random_model import may_be_quantized, quantized

FORMATS = ("F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M")
"""Exact; 8 and 4 bits in blocks of 32; 4 and 6 bits in blocks of 256; the usual mixture of Q4_K, Q5_K and Q6_K."""
MIXTURE = "Q4_K_M"
OWN_QUANTIZERS = frozenset({GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K})


def stored_types(variant: TinyVariant, format_name: str) -> dict[str, GGMLType]:
    """Tensor name -> its type, for those that a format changes: matrices whose rows are a whole number of blocks."""
    types: dict[str, GGMLType] = {}
    for name, shape in variant.tensors.items():
        type_ = _of_mixture(name) if format_name == MIXTURE else as_type(format_name)
        fits = shape[-1] % BLOCK_FORMATS[type_].block_size == 0
        if type_ is not GGMLType.F32 and fits and may_be_quantized(name, shape):
            types[name] = type_
    return types


def block_size(format_name: str) -> int:
    """What the rows of a matrix must be a multiple of to be stored so."""
    types = OWN_QUANTIZERS if format_name == MIXTURE else {as_type(format_name)}
    return max(BLOCK_FORMATS[type_].block_size for type_ in types)


def _of_mixture(name: str) -> GGMLType:
    """As published q4_k_m files: more bits where errors cost most, so that layers of one input differ in type."""
    if name == "output.weight" or any(part in name for part in ("attn_v.", "ffn_down")):
        return GGMLType.Q6_K
    return GGMLType.Q5_K if any(part in name for part in ("attn_k.", "attn_qkv")) else GGMLType.Q4_K


def with_types(source: MemoryTensors, types: Mapping[str, GGMLType]) -> MemoryTensors:
    """The same model with these tensors in these types."""
    tensors: dict[str, npt.NDArray[Any] | RawTensor] = {}
    for name in source.tensors:
        array = read_tensor(source, name)
        tensors[name] = _stored(name, array, types[name]) if name in types else array
    return MemoryTensors(source.metadata.raw, tensors)


def _stored(name: str, array: npt.NDArray[np.float32], type_: GGMLType) -> RawTensor:
    return quantize(name, array, type_) if type_ in OWN_QUANTIZERS else quantized(array, type_)
