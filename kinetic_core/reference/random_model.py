"""Random models in memory: from the description of a tiny variant, in any tensor type that `gguf` can quantize to."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.errors import UnsupportedModelError, describe
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, MemoryTensors, RawTensor, as_type, read_tensor
from kinetic_core.interfaces.architecture import TinyVariant


def random_model(architecture: str, variant: TinyVariant, seed: int = 0) -> MemoryTensors:
    """A model of `variant` with normally distributed weights.

    architecture: what ``general.architecture`` says; keys of the variant without a known prefix belong to it.
    A tensor's values depend on `seed`, its own name and its shape alone.
    """
    metadata: dict[str, Any] = {"general.architecture": architecture, "general.name": f"{architecture} {variant.name}"}
    for key, value in variant.metadata.items():
        whole = key.startswith(("general.", "tokenizer."))
        metadata[key if whole else f"{architecture}.{key}"] = value
    tensors = {name: _random(name, shape, variant, seed) for name, shape in variant.tensors.items()}
    return MemoryTensors(metadata, tensors)


def _random(name: str, shape: tuple[int, ...], variant: TinyVariant, seed: int) -> npt.NDArray[np.float32]:
    mean, deviation = variant.values.get(name, (0.0, 0.3 * shape[-1] ** -0.5))
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (mean + deviation * rng.standard_normal(shape)).astype(np.float32)


def may_be_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Is this a matrix that published files quantize? Vectors, norms, convolution kernels and routers stay F32."""
    return len(shape) >= 2 and not any(part in name for part in ("norm", "conv.weight", "conv1d", "ffn_gate_inp"))


def with_tensor_type(source: MemoryTensors, type_name: str) -> MemoryTensors:
    """The same model with its matrices stored as `type_name` (``"Q8_0"``, ``"F16"``, ``"BF16"`` …).

    What published files do not quantize stays as it is, and so do matrices whose rows are no whole number of blocks.
    Raises UnsupportedModelError for a type that `gguf` cannot quantize to.
    """
    type_ = as_type(type_name)
    block = BLOCK_FORMATS[type_].block_size
    tensors: dict[str, npt.NDArray[Any] | RawTensor] = {}
    for name in source.tensors:
        array = read_tensor(source, name)
        whole_blocks = array.shape[-1] % block == 0
        tensors[name] = quantized(array, type_) if whole_blocks and may_be_quantized(name, array.shape) else array
    return MemoryTensors(source.metadata.raw, tensors)


def quantized(array: npt.NDArray[np.float32], type_: GGMLType) -> RawTensor:
    """f32[...] as the `gguf` package stores it. Raises UnsupportedModelError for a type that it cannot write."""
    from gguf import GGMLQuantizationType, quants

    try:
        stored = quants.quantize(array, GGMLQuantizationType(int(type_)))
    except NotImplementedError as error:
        raise UnsupportedModelError(
            describe(f"cannot quantize to {type_.name}", expected="a type that the gguf package can write")
        ) from error
    return RawTensor(np.ascontiguousarray(stored).reshape(-1).view(np.uint8), type_, tuple(array.shape))
