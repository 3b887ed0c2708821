"""Where a backend loads tensors from: a file, or arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import TensorError, describe
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType, dequantize
from kinetic_core.gguf.header import TensorInfo
from kinetic_core.gguf.metadata import Metadata


@runtime_checkable
class TensorSource(Protocol):
    """What a backend loads a model from; `GGUFFile` and `MemoryTensors` are the two that exist."""

    @property
    def metadata(self) -> Metadata:
        """The model's metadata."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the source's order."""
        ...

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as a read-only `u8[n_bytes]`; TensorError names an unknown tensor."""
        ...

    def release(self, name: str) -> int:
        """The tensor's bytes are not needed soon: give their memory back. Bytes given back, 0 if none can be."""
        ...


@attrs.frozen(eq=False)
class RawTensor:
    """Stored bytes of a tensor with their type and shape (contiguous axis last)."""

    data: bytes | npt.NDArray[np.uint8]
    type: GGMLType
    shape: tuple[int, ...]

    @classmethod
    def from_array(cls, array: npt.NDArray[Any]) -> RawTensor:
        """The stored form of an array of float16, float32, float64 or signed integers.

        Raises TensorError for any other type or for an array without elements.
        """
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        type_ = _ARRAY_TYPES.get(little.dtype.str.lstrip("<|"))
        if type_ is None or not array.size or not array.ndim:
            raise TensorError(
                describe(
                    "an array cannot be stored as a tensor",
                    got=f"{array.dtype} of shape {array.shape}",
                    expected="float16, float32, float64 or a signed integer type, and at least one element",
                )
            )
        return cls(little.reshape(-1).view(np.uint8), type_, array.shape)

    def to_bytes(self) -> npt.NDArray[np.uint8]:
        """The bytes as `u8[n_bytes]`; TensorError when they do not match type and shape."""
        raw = np.frombuffer(self.data, np.uint8) if isinstance(self.data, bytes) else self.data.reshape(-1)
        expected = BLOCK_FORMATS[self.type].n_bytes(self.shape)
        if raw.dtype != np.uint8 or raw.size != expected:
            raise TensorError(
                describe(
                    "the bytes do not match type and shape",
                    where=f"a {self.type.name} tensor of shape {self.shape}",
                    got=f"{raw.size} elements of {raw.dtype}",
                    expected=f"{expected} bytes",
                )
            )
        return raw


_ARRAY_TYPES: Mapping[str, GGMLType] = MappingProxyType(
    {
        "f2": GGMLType.F16,
        "f4": GGMLType.F32,
        "f8": GGMLType.F64,
        "i1": GGMLType.I8,
        "i2": GGMLType.I16,
        "i4": GGMLType.I32,
        "i8": GGMLType.I64,
    }
)


class MemoryTensors:
    """A model in memory: metadata as a dict, tensors as NumPy arrays or `RawTensor`s.

    Arrays are copied, so that the caller may go on changing its own.
    """

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any] | RawTensor]) -> None:
        self.metadata = Metadata(metadata)
        self._data: dict[str, npt.NDArray[np.uint8]] = {}
        infos: dict[str, TensorInfo] = {}
        for name, tensor in tensors.items():
            raw = tensor if isinstance(tensor, RawTensor) else RawTensor.from_array(tensor)
            data = raw.to_bytes().copy()
            data.flags.writeable = False
            self._data[name] = data
            infos[name] = TensorInfo(name, tuple(raw.shape), raw.type, 0, data.size)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as a read-only `u8[n_bytes]`; TensorError names an unknown tensor."""
        require_tensor(self.tensors, name)
        return self._data[name]

    def release(self, name: str) -> int:
        """Nothing to give back: the arrays are the only copy. Returns 0; TensorError names an unknown tensor."""
        require_tensor(self.tensors, name)
        return 0


def require_tensor(tensors: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    """The tensor's description; TensorError names a tensor that is not there."""
    info = tensors.get(name)
    if info is None:
        raise TensorError(describe(f"no tensor {name!r}", got=f"a model of {len(tensors)} tensors"))
    return info


def read_tensor(source: TensorSource, name: str) -> npt.NDArray[np.float32]:
    """A tensor's elements as `f32[shape]`, dequantized by the reference; TensorError names an unknown tensor."""
    info = require_tensor(source.tensors, name)
    return dequantize(source.tensor_bytes(name), info.type, info.shape)
