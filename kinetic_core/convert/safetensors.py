"""Reading safetensors files: 8 bytes of length, a JSON table of tensors, their bytes. The files are untrusted.

The layout is that of https://huggingface.co/docs/safetensors. Offsets are checked against the file's size and every
tensor's type and shape before any view is made; data is memory-mapped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import TensorError, describe, shown

MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 100_000_000
MAX_DIMENSIONS = 8
INDEX_NAME = "model.safetensors.index.json"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@attrs.frozen
class CheckpointTensor:
    """Where a tensor lies: `dtype` is F32, F16 or BF16, `begin` the offset in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def n_bytes(self) -> int:
        """Its length in the file."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def read(self) -> npt.NDArray[np.float32]:
        """The elements as f32[shape], a copy; exact for all three types."""
        count = math.prod(self.shape)
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.dtype]
        stored = np.memmap(self.path, np.dtype(kind), "r", self.begin, (count,))
        if self.dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        return np.array(stored, np.float32).reshape(self.shape)


def read_checkpoint(folder: Path) -> Mapping[str, CheckpointTensor]:
    """The tensors of a folder: of every file that the index names, or of its only safetensors file.

    Raises TensorError naming the file for a missing or damaged one, for a tensor that two files hold, and for an index
    that disagrees with the files.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            got = ", ".join(path.name for path in found) or "none"
            raise _refused("the weights cannot be told", folder, got, f"one safetensors file, or {INDEX_NAME}")
        return MappingProxyType(read_table(found[0]))
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise _refused("the index is too long", index, index.stat().st_size, f"at most {MAX_INDEX_BYTES} bytes")
    table = _json(index.read_bytes(), index)
    places = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(places, dict) or not all(_is_plain_name(name) for name in places.values()):
        raise _refused("the index has no usable weight_map", index, shown(places), "tensor names to file names")
    tensors: dict[str, CheckpointTensor] = {}
    for name in sorted(set(places.values())):
        part = read_table(folder / name)
        for tensor, entry in part.items():
            if places.get(tensor) != name:
                raise _refused(
                    f"the index and the file disagree about {tensor!r}", folder / name, places.get(tensor), name
                )
            tensors[tensor] = entry
    missing = sorted(set(places) - set(tensors))
    if missing:
        raise _refused("tensors of the index are in no file", index, f"no {missing[0]!r}", "every tensor it names")
    return MappingProxyType(tensors)


def read_table(path: Path) -> dict[str, CheckpointTensor]:
    """The table of one file; raises TensorError naming what is wrong with it."""
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise _refused("a file of the checkpoint is not there", path, "no such file", "a safetensors file")
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) != 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                expected = f"2 bytes to the least of {MAX_HEADER_BYTES} and what the file has"
                raise _refused("the length of the header cannot be", path, length, expected)
            table = _json(file.read(length), path)
    except OSError as error:
        raise _refused("a file cannot be read", path, error.strerror or str(error), "a safetensors file") from error
    if not isinstance(table, dict):
        raise _refused("the header is no table", path, shown(table), "a JSON object")
    begin = 8 + length
    tensors = {
        name: _entry(path, name, entry, begin, size - begin) for name, entry in table.items() if name != "__metadata__"
    }
    end, before = begin, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < end:  # the same bytes again and again would make a small file a huge one
            raise _refused("two tensors have bytes in common", path, f"{before[:200]!r} and {name[:200]!r}", "none")
        end, before = tensor.begin + tensor.n_bytes, name
    return tensors


def _entry(path: Path, name: str, entry: Any, begin: int, n_bytes: int) -> CheckpointTensor:
    where = f"{path}, tensor {name[:200]!r}"
    if not isinstance(entry, dict):
        raise _refused("an entry of the header is no object", where, shown(entry), "dtype, shape and data_offsets")
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        hint = "convert the checkpoint to BF16 first"
        raise _refused("this type of numbers is not supported", where, shown(dtype), ", ".join(_ITEM_BYTES), hint)
    if not _are_counts(shape) or not 1 <= len(shape) <= MAX_DIMENSIONS or not all(shape):
        raise _refused("the shape cannot be used", where, shown(shape), f"1 to {MAX_DIMENSIONS} positive numbers")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= n_bytes:
        raise _refused("data_offsets lie outside the file", where, shown(offsets), f"two ascending up to {n_bytes}")
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        got = f"{offsets[1] - offsets[0]} bytes"
        raise _refused("data_offsets do not match type and shape", where, got, f"{expected} bytes")
    return CheckpointTensor(path, dtype, tuple(shape), begin + offsets[0])


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(element) is int and 0 <= element < 2**63 for element in value)


def _is_plain_name(name: Any) -> bool:
    """A file of the folder itself: an index must not lead outside."""
    plain = isinstance(name, str) and name.isprintable() and name == Path(name).name
    return plain and "\\" not in name and name not in ("", ".", "..")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; ValueError where it says one key twice, which Python's reader takes in silence."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:200]!r} is there twice")
        table[name] = value
    return table


def _json(raw: bytes, where: Path) -> Any:
    try:
        return json.loads(raw, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _refused("the JSON cannot be read", where, str(error)[:240], "valid JSON") from error


def _refused(what: str, where: object, got: object, expected: str, hint: str | None = None) -> TensorError:
    return TensorError(describe(what, where=str(where), got=got, expected=expected, hint=hint))
