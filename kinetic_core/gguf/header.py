"""A bounded parser for the header of a GGUF file: metadata, tensor table, and nothing of the tensors' bytes.

A file is untrusted. Every count, length and offset is a Python integer that is checked against the size of the file
and a stated limit before anything is allocated or sliced, so that a bad file costs no memory and little time. What
is refused is refused with a `GGUFError` that names the key or tensor, the offset, what was found and what was
expected. The format: docs/gguf.md of the ggml project, versions 2 and 3, little-endian.

Strings must be UTF-8, as the format says, token strings included (byte-level vocabularies write every byte as a
printable character). Bytes that are not UTF-8 are refused rather than smuggled through as surrogates: such a text
could later be neither printed, sent as JSON nor given to the tokenizer.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import GGUFError, describe
from kinetic_core.gguf.blocks import BLOCK_FORMATS, NEVER_STORED, BlockFormat, GGMLType

MAX_KEYS = 2**16
MAX_TENSORS = 2**17
MAX_DIMS = 4
MAX_NAME_BYTES = 2**16 - 1  # the format's own limit on keys
MAX_TENSOR_NAME_BYTES = 127
MAX_STRING_BYTES = 2**24
MAX_ARRAY_ELEMENTS = 2**24  # of all arrays of a file together; the largest vocabularies have 2**18 tokens
MIN_ALIGNMENT = 8  # the format asks for a multiple of 8
MAX_ALIGNMENT = 2**16
DEFAULT_ALIGNMENT = 32
SUPPORTED_VERSIONS = (2, 3)

MAGIC = b"GGUF"
_FIXED_HEADER_BYTES = 24
_MIN_KEY_BYTES = 8 + 1 + 4  # name and value type; what follows is checked when it is read
_MIN_TENSOR_BYTES = 8 + 1 + 4  # name and dimension count

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

STRING_TYPE = 8
ARRAY_TYPE = 9
BOOL_TYPE = 7
VALUE_TYPE_NAMES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32",
    "bool", "string", "array", "uint64", "int64", "float64",
)  # fmt: skip
SCALAR_DTYPES: Mapping[int, np.dtype] = MappingProxyType(
    {
        0: np.dtype("u1"),
        1: np.dtype("i1"),
        2: np.dtype("<u2"),
        3: np.dtype("<i2"),
        4: np.dtype("<u4"),
        5: np.dtype("<i4"),
        6: np.dtype("<f4"),
        7: np.dtype("u1"),
        10: np.dtype("<u8"),
        11: np.dtype("<i8"),
        12: np.dtype("<f8"),
    }
)
_SCALAR_STRUCTS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}

Value = bool | int | float | str | tuple[str, ...] | npt.NDArray[np.generic]
"""A metadata value: a scalar, an array of strings as a tuple, any other array as a read-only 1-d NumPy array."""


@attrs.frozen
class TensorInfo:
    """One tensor of the table.

    shape: NumPy order, contiguous axis last (`[outputs, inputs]` of a matrix); dims: GGUF order, contiguous first.
    offset: bytes from the start of the file (of its part, in a split set) to the tensor's first byte.
    part: index of the part of a split set that holds the tensor; 0 for an ordinary file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    n_bytes: int
    part: int = 0

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions as the file lists them: contiguous first."""
        return self.shape[::-1]

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def format(self) -> BlockFormat:
        """The layout of the tensor's blocks."""
        return BLOCK_FORMATS[self.type]


@attrs.frozen
class GGUFHeader:
    """What the header of one file says; every number in it has been checked against the file.

    data_offset: where the tensor data begins; n_bytes: size of the file.
    """

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    alignment: int
    data_offset: int
    n_bytes: int


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read the header of one file; see `kinetic_core.gguf.file.open_model_file` to use a model.

    Raises GGUFError when the file is not a complete, valid GGUF file, OSError when it cannot be read.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _FIXED_HEADER_BYTES:
            return parse_header(file.read(_FIXED_HEADER_BYTES), name)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            return parse_header(mapped, name)


def parse_header(data: bytes | mmap.mmap, file_name: str) -> GGUFHeader:
    """Parse the header from the whole file's bytes; `file_name` is for messages. Raises GGUFError."""
    return _HeaderParser(data, file_name).parse()


class _HeaderParser:
    def __init__(self, data: bytes | mmap.mmap, file_name: str) -> None:
        self.data = data
        self.size = len(data)
        self.file_name = file_name
        self.position = 0
        self.array_elements_left = MAX_ARRAY_ELEMENTS

    def parse(self) -> GGUFHeader:
        version, n_tensors, n_keys = self.fixed_header()
        metadata: dict[str, Value] = {}
        for index in range(n_keys):
            offset = self.position
            key = self.name(f"key {index + 1} of {n_keys}", MAX_NAME_BYTES)
            if key in metadata:
                self.refuse("a metadata key occurs twice", key, offset)
            metadata[key] = self.value(key)
        alignment = self.alignment(metadata)
        rows = []
        names: set[str] = set()
        for index in range(n_tensors):
            offset = self.position
            name = self.name(f"tensor {index + 1} of {n_tensors}", MAX_TENSOR_NAME_BYTES)
            if name in names:
                self.refuse("a tensor occurs twice", name, offset, kind="tensor")
            names.add(name)
            rows.append(self.tensor_row(name))
        data_offset = -(-self.position // alignment) * alignment
        tensors = self.place_tensors(rows, alignment, data_offset)
        return GGUFHeader(
            version, MappingProxyType(metadata), MappingProxyType(tensors), alignment, data_offset, self.size
        )

    def refuse(
        self,
        what: str,
        key: str | None,
        offset: int,
        *,
        kind: str = "key",
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> NoReturn:
        subject = "" if key is None else f"{kind} {_shown(key)} at "
        where = f"{self.file_name}, {subject}offset {offset}"
        raise GGUFError(describe(what, where=where, got=got, expected=expected, hint=hint), key=key, offset=offset)

    def fixed_header(self) -> tuple[int, int, int]:
        magic = self.data[: len(MAGIC)]
        if magic != MAGIC[: len(magic)]:
            self.refuse("not a GGUF file", None, 0, got=magic, expected=MAGIC)
        if self.size < _FIXED_HEADER_BYTES:
            self.refuse(
                "truncated header",
                None,
                self.size,
                got=f"a file of {self.size} bytes",
                expected=f"at least {_FIXED_HEADER_BYTES} bytes",
                hint="download the file again",
            )
        (version,) = _U32.unpack_from(self.data, 4)
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(self.data[4:8], "big")
            if swapped in (1, *SUPPORTED_VERSIONS):
                self.refuse(
                    "a big-endian GGUF file",
                    None,
                    4,
                    expected="little-endian",
                    hint="convert it with gguf-convert-endian",
                )
            self.refuse(
                "unsupported GGUF version",
                None,
                4,
                got=version,
                expected="version 2 or 3",
                hint="convert the model again with a current converter" if version == 1 else None,
            )
        (n_tensors,) = _U64.unpack_from(self.data, 8)
        (n_keys,) = _U64.unpack_from(self.data, 16)
        self.position = _FIXED_HEADER_BYTES
        left = self.size - self.position
        for what, count, limit, least, offset in (
            ("tensor", n_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES, 8),
            ("metadata key", n_keys, MAX_KEYS, _MIN_KEY_BYTES, 16),
        ):
            most = min(limit, left // least)
            if count > most:
                self.refuse(
                    f"the {what} count is too large",
                    None,
                    offset,
                    got=count,
                    expected=f"at most {most} (the file has {left} bytes left, the limit is {limit})",
                )
        return version, n_tensors, n_keys

    def take(self, n_bytes: int, key: str | None, what: str, kind: str = "key") -> int:
        """Advance by `n_bytes` that must lie inside the file; the offset where they begin."""
        begin = self.position
        if n_bytes > self.size - begin:
            self.refuse(
                f"{what} runs past the end of the file",
                key,
                begin,
                kind=kind,
                got=f"{n_bytes} bytes",
                expected=f"at most the {self.size - begin} bytes left",
            )
        self.position = begin + n_bytes
        return begin

    def u32(self, key: str | None, what: str, kind: str = "key") -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, key, what, kind))[0]
        return value

    def u64(self, key: str | None, what: str, kind: str = "key") -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, key, what, kind))[0]
        return value

    def name(self, which: str, limit: int) -> str:
        begin = self.position
        length = self.u64(None, f"the length of the name of {which}")
        if not 1 <= length <= limit and length <= self.size - self.position:
            self.refuse(
                f"the name of {which} has a bad length", None, begin, got=length, expected=f"1 to {limit} bytes"
            )
        start = self.take(length, None, f"the name of {which}")
        raw = self.data[start : start + length]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"the name of {which} is not UTF-8", None, start, got=_shown_bytes(raw))

    def string(self, key: str, element: int | None = None) -> str:
        what = "string" if element is None else f"string {element} of the array"
        begin = self.position
        length = self.u64(key, what)
        if MAX_STRING_BYTES < length <= self.size - self.position:
            self.refuse(f"{what} is too long", key, begin, got=length, expected=f"at most {MAX_STRING_BYTES} bytes")
        start = self.take(length, key, what)
        raw = self.data[start : start + length]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8", key, start, got=_shown_bytes(raw))

    def value(self, key: str) -> Value:
        begin = self.position
        type_id = self.u32(key, "the value type")
        if type_id == STRING_TYPE:
            return self.string(key)
        if type_id == ARRAY_TYPE:
            return self.array(key)
        if type_id not in _SCALAR_STRUCTS:
            self.refuse("unknown value type", key, begin, got=type_id, expected="0 to 12")
        layout = _SCALAR_STRUCTS[type_id]
        start = self.take(layout.size, key, "the value")
        value: bool | int | float = layout.unpack_from(self.data, start)[0]
        if type_id == BOOL_TYPE:
            if value > 1:
                self.refuse("not a bool", key, start, got=value, expected="0 or 1")
            return value == 1
        return value

    def array(self, key: str) -> Value:
        begin = self.position
        type_id = self.u32(key, "the element type of the array")
        count_offset = self.position
        count = self.u64(key, "the length of the array")
        if type_id == ARRAY_TYPE:
            self.refuse("an array of arrays is not supported", key, begin)
        if type_id != STRING_TYPE and type_id not in SCALAR_DTYPES:
            self.refuse("unknown element type of an array", key, begin, got=type_id, expected="0 to 12")
        element_bytes = 8 if type_id == STRING_TYPE else SCALAR_DTYPES[type_id].itemsize
        left = self.size - self.position
        if count > left // element_bytes:
            self.refuse(
                "array runs past the end of the file",
                key,
                count_offset,
                got=f"a length of {count} {VALUE_TYPE_NAMES[type_id]}",
                expected=f"at most {left // element_bytes} in the {left} bytes left",
            )
        if count > self.array_elements_left:
            self.refuse(
                "the arrays of the file are too long",
                key,
                count_offset,
                got=f"a length of {count}",
                expected=f"at most {MAX_ARRAY_ELEMENTS} elements in all arrays",
            )
        self.array_elements_left -= count
        if type_id == STRING_TYPE:
            return self.string_array(key, count)
        start = self.take(count * element_bytes, key, "array")
        array = np.frombuffer(self.data[start : self.position], SCALAR_DTYPES[type_id])
        if type_id == BOOL_TYPE:
            if count and array.max() > 1:
                bad = int(np.argmax(array > 1))
                self.refuse("not a bool", key, start + bad, got=array[bad], expected="0 or 1")
            return array.view(np.bool_)
        return array

    def string_array(self, key: str, count: int) -> tuple[str, ...]:
        """The hot loop: half a million strings in a large vocabulary. Whatever is odd is left to `string`."""
        data, size, position = self.data, self.size, self.position
        unpack_length = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        last_length_offset = size - 8
        try:
            for _ in range(count):
                if position > last_length_offset:
                    break
                start = position + 8
                end = start + unpack_length(data, position)[0]
                if end > size or end - start > MAX_STRING_BYTES:
                    break
                append(data[start:end].decode())
                position = end
        except UnicodeDecodeError:
            pass
        self.position = position
        if len(strings) < count:
            self.string(key, len(strings))  # raises: it checks what stopped the loop
            raise AssertionError("the string that stopped the loop must be refused")
        return tuple(strings)

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        key = "general.alignment"
        value = metadata.get(key, DEFAULT_ALIGNMENT)
        if isinstance(value, int) and MIN_ALIGNMENT <= value <= MAX_ALIGNMENT and value & (value - 1) == 0:
            return value
        self.refuse(
            "bad alignment",
            key,
            self.position,
            got=_shown_value(value),
            expected=f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
        )

    def tensor_row(self, name: str) -> tuple[str, tuple[int, ...], GGMLType, int, int, int]:
        """Name, shape, type, size, relative offset and the table's own offset of one row of the tensor table."""
        begin = self.position
        n_dims = self.u32(name, "the tensor's dimension count", "tensor")
        if not 1 <= n_dims <= MAX_DIMS:
            self.refuse("bad number of dimensions", name, begin, kind="tensor", got=n_dims, expected=f"1 to {MAX_DIMS}")
        dims = tuple(self.u64(name, "the tensor's shape", "tensor") for _ in range(n_dims))
        if 0 in dims:
            self.refuse("a dimension is 0", name, begin + 4, kind="tensor", got=list(dims), expected="at least 1")
        type_offset = self.position
        type_id = self.u32(name, "the tensor's type", "tensor")
        try:
            type_ = GGMLType(type_id)
        except ValueError:
            reason = NEVER_STORED.get(type_id)
            self.refuse(
                "unknown tensor type",
                name,
                type_offset,
                kind="tensor",
                got=f"{type_id} ({reason})" if reason else type_id,
                expected="a type of the ggml block formats",
            )
        layout = BLOCK_FORMATS[type_]
        if dims[0] % layout.block_size:
            self.refuse(
                "a row is not a whole number of blocks",
                name,
                begin + 4,
                kind="tensor",
                got=f"{dims[0]} elements of {type_.name}",
                expected=f"a multiple of {layout.block_size}",
            )
        n_bytes = math.prod(dims) // layout.block_size * layout.block_bytes
        offset_offset = self.position
        offset = self.u64(name, "the tensor's offset", "tensor")
        return name, dims[::-1], type_, n_bytes, offset, offset_offset

    def place_tensors(
        self,
        rows: list[tuple[str, tuple[int, ...], GGMLType, int, int, int]],
        alignment: int,
        data_offset: int,
    ) -> dict[str, TensorInfo]:
        tensors = {}
        for name, shape, type_, n_bytes, relative, table_offset in rows:
            if relative % alignment:
                self.refuse(
                    "the tensor's offset is not aligned",
                    name,
                    table_offset,
                    kind="tensor",
                    got=relative,
                    expected=f"a multiple of {alignment}",
                )
            offset = data_offset + relative
            if offset + n_bytes > self.size:
                self.refuse(
                    "the tensor runs past the end of the file",
                    name,
                    table_offset,
                    kind="tensor",
                    got=f"bytes {offset} to {offset + n_bytes}",
                    expected=f"at most {self.size}",
                    hint="the file is damaged or incomplete: download it again",
                )
            tensors[name] = TensorInfo(name, shape, type_, offset, n_bytes)
        table_offsets = {row[0]: row[5] for row in rows}
        before: TensorInfo | None = None
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if before is not None and info.offset < before.offset + before.n_bytes:
                self.refuse(
                    f"the tensor overlaps tensor {_shown(before.name)}",
                    info.name,
                    table_offsets[info.name],
                    kind="tensor",
                    got=f"data offset {info.offset}",
                    expected=f"at least {before.offset + before.n_bytes}",
                )
            before = info
        return tensors


def _shown(text: str, limit: int = 80) -> str:
    """A name from the file, safe and short enough for a message."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def _shown_bytes(raw: bytes, limit: int = 32) -> str:
    return repr(raw[:limit]) + ("…" if len(raw) > limit else "")


def _shown_value(value: Value) -> str:
    if isinstance(value, str):
        return f"the string {_shown(value)}"
    if isinstance(value, tuple | np.ndarray):
        return f"an array of {len(value)} elements"
    return repr(value)
