"""Writing GGUF files: whole ones from memory, or tensor by tensor. The same arguments always give the same bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.errors import MetadataError, TensorError, describe, shown
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType
from kinetic_core.gguf.header import (
    ARRAY_TYPE,
    BOOL_TYPE,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MIN_ALIGNMENT,
    SCALAR_DTYPES,
    STRING_TYPE,
)
from kinetic_core.gguf.source import RawTensor

_GREATEST = float(np.finfo(np.float32).max)
_TYPE_OF_DTYPE = {dtype.str.lstrip("<|"): type_id for type_id, dtype in SCALAR_DTYPES.items() if type_id != BOOL_TYPE}


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any] | RawTensor],
    *,
    version: int = 3,
) -> None:
    """Write a little-endian GGUF file; `general.alignment` in `metadata` is obeyed.

    metadata: bool, str, int (uint32, or int32, uint64, int64 where the value asks for it), float (float32), NumPy
    scalars and arrays (their own type, bit for bit), lists and tuples of one of these. tensors: arrays, or
    `RawTensor`s for the block formats.

    Raises MetadataError for a value that cannot be written: a whole number beyond 64 bits, a Python float that is not
    finite or too large for float32, an alignment that readers refuse, another kind of value; TensorError for a tensor
    that cannot.
    """
    stored = _stored(tensors)
    stream_gguf(path, metadata, {n: (t.type, t.shape) for n, t in stored.items()}, stored.__getitem__, version=version)


def stream_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[GGMLType, tuple[int, ...]]],
    produce: Callable[[str], RawTensor],
    *,
    version: int = 3,
) -> None:
    """As `write_gguf`, holding one tensor at a time: `produce` is asked for each, in the order of `tensors`.

    tensors: name -> type and shape (contiguous axis last), which what `produce` returns must have.
    """
    head = _head(metadata, tensors, version)
    alignment = _alignment(metadata)
    with open(path, "wb") as file:
        file.write(head)
        for name, (type_, shape) in tensors.items():
            tensor = produce(name)
            if tensor.type != type_ or tuple(tensor.shape) != tuple(shape):
                raise TensorError(
                    describe(
                        f"the tensor {name!r} is another than announced",
                        got=f"{tensor.type.name} {tuple(tensor.shape)}",
                        expected=f"{type_.name} {tuple(shape)}",
                    )
                )
            data = tensor.to_bytes()
            file.write(data.data)
            file.write(bytes(_padded(data.size, alignment) - data.size))


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any] | RawTensor], *, version: int = 3
) -> bytes:
    """The whole file as bytes; see `write_gguf`."""
    stored = _stored(tensors)
    out = bytearray(_head(metadata, {n: (t.type, t.shape) for n, t in stored.items()}, version))
    alignment = _alignment(metadata)
    for tensor in stored.values():
        data = tensor.to_bytes()
        out += data.tobytes()
        out += bytes(_padded(data.size, alignment) - data.size)
    return bytes(out)


def _stored(tensors: Mapping[str, npt.NDArray[Any] | RawTensor]) -> dict[str, RawTensor]:
    return {n: t if isinstance(t, RawTensor) else RawTensor.from_array(t) for n, t in tensors.items()}


def _head(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[GGMLType, tuple[int, ...]]], version: int) -> bytes:
    """Everything before the tensors' bytes."""
    alignment = _alignment(metadata)
    out = bytearray(MAGIC)
    out += struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _string(key, key)
        type_id, payload = _value(key, value)
        out += struct.pack("<I", type_id) + payload
    offset = 0
    for name, (type_, shape) in tensors.items():
        out += _string(name, name)
        out += struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", type_, offset)
        offset += _padded(BLOCK_FORMATS[type_].n_bytes(shape), alignment)
    out += bytes(_padded(len(out), alignment) - len(out))
    return bytes(out)


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    alignment = value.item() if isinstance(value, np.integer) else value
    if type(alignment) is not int or not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _out_of_range(
            "general.alignment", shown(value), f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        )
    return alignment


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _string(key: str, text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MetadataError(
            describe("a text is not valid Unicode", where=f"key {key!r}", got=ascii(text)[:80])
        ) from error
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """Type id and payload of a value."""
    if isinstance(value, str):
        return STRING_TYPE, _string(key, value)
    if isinstance(value, list | tuple):
        return ARRAY_TYPE, _sequence(key, value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        type_id, payload = _numbers(key, value)
        return ARRAY_TYPE, struct.pack("<IQ", type_id, value.size) + payload
    if isinstance(value, bool | int | float | np.generic):
        return _numbers(key, _array_of(key, [value]))
    raise _cannot_write(key, value)


def _sequence(key: str, values: Sequence[Any]) -> bytes:
    """Element type, length and elements of a list."""
    if all(isinstance(value, str) for value in values):
        return struct.pack("<IQ", STRING_TYPE, len(values)) + b"".join(_string(key, value) for value in values)
    if len({isinstance(value, bool | np.bool_) for value in values}) != 1:
        raise _cannot_write(key, values)
    type_id, payload = _numbers(key, _array_of(key, values))
    return struct.pack("<IQ", type_id, len(values)) + payload


def _array_of(key: str, values: Sequence[Any]) -> npt.NDArray[Any]:
    """Python numbers in the narrowest type that the docstring of `write_gguf` promises."""
    if all(isinstance(value, np.generic) for value in values):
        return np.array(values)
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        for dtype in (np.uint32, np.int32, np.uint64, np.int64):
            limits = np.iinfo(dtype)
            if limits.min <= min(values) and max(values) <= limits.max:
                return np.array(values, dtype)
        raise _out_of_range(key, shown(values[0] if len(values) == 1 else values), "whole numbers of 64 bits")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        for value in values:
            if not -_GREATEST <= value <= _GREATEST:  # compared, not converted: neither warns nor overflows; NaN fails
                raise _out_of_range(key, shown(value), "a finite number that float32 can hold")
        return np.array(values, np.float32)
    return np.array(values)


def _numbers(key: str, array: npt.NDArray[Any]) -> tuple[int, bytes]:
    if array.dtype == np.bool_:
        return BOOL_TYPE, array.astype(np.uint8).tobytes()
    little = array.astype(array.dtype.newbyteorder("<"))
    type_id = _TYPE_OF_DTYPE.get(little.dtype.str.lstrip("<|"))
    if type_id is None:
        raise _cannot_write(key, array)
    return type_id, little.tobytes()


def _out_of_range(key: str, got: str, expected: str) -> MetadataError:
    return MetadataError(describe("a value cannot be written", where=f"key {key!r}", got=got, expected=expected))


def _cannot_write(key: str, value: object) -> MetadataError:
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    return MetadataError(
        describe(
            "a value cannot be written",
            where=f"key {key!r}",
            got=kind,
            expected="a bool, number, string, or array of one type",
        )
    )
