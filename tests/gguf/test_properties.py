"""Properties of parser and writer over generated files."""

from __future__ import annotations

import math
import struct
import warnings
from typing import Any

import gguf
import numpy as np
import pytest
import raw_gguf as raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kinetic_core.errors import GGUFError, KineticError, MetadataError, TensorError
from kinetic_core.gguf import (
    BLOCK_FORMATS,
    GGMLType,
    Metadata,
    RawTensor,
    gguf_bytes,
    parse_header,
    write_gguf,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
NUMBER_TYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?"]
numbers = hnp.arrays(st.sampled_from([np.dtype(name) for name in NUMBER_TYPES]), st.integers(0, 20))
values = st.one_of(
    text,
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.lists(text, max_size=8),
    numbers,
)
metadata_dicts = st.dictionaries(names.filter(lambda key: key != "general.alignment"), values, max_size=6)


@st.composite
def stored_tensors(draw: st.DrawFn) -> RawTensor:
    layout = draw(st.sampled_from(list(BLOCK_FORMATS.values())))
    outer = draw(st.lists(st.integers(1, 3), max_size=3))
    shape = (*outer, layout.block_size * draw(st.integers(1, 2)))
    n_bytes = layout.n_bytes(shape)
    return RawTensor(draw(st.binary(min_size=n_bytes, max_size=n_bytes)), layout.type, shape)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return type(a) is type(b) and a == b


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    metadata=metadata_dicts,
    tensors=st.dictionaries(names, stored_tensors(), max_size=4),
    alignment=st.sampled_from([None, 8, 32, 256]),
    version=st.sampled_from([2, 3]),
)
def test_what_is_written_is_read(
    metadata: dict[str, Any], tensors: dict[str, RawTensor], alignment: int | None, version: int
) -> None:
    if alignment is not None:
        metadata = metadata | {"general.alignment": alignment}
    data = gguf_bytes(metadata, tensors, version=version)
    assert data == gguf_bytes(metadata, tensors, version=version)
    header = parse_header(data, "f")
    assert header.version == version and header.alignment == (alignment or 32)
    assert list(header.metadata) == list(metadata) and list(header.tensors) == list(tensors)
    for key, value in metadata.items():
        assert same(tuple(value) if isinstance(value, list) else value, header.metadata[key]), key
    end = header.data_offset
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert (info.shape, info.type) == (tensor.shape, tensor.type)
        assert info.n_bytes == BLOCK_FORMATS[info.type].n_bytes(info.shape) == len(tensor.data)
        assert info.n_elements == math.prod(tensor.shape)
        assert info.offset % header.alignment == 0 and end <= info.offset
        end = info.offset + info.n_bytes
        assert data[info.offset : end] == bytes(tensor.data)
    assert end <= header.n_bytes == len(data)


GOOD = gguf_bytes(
    {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 1,
        "llama.eps": 1e-5,
        "llama.list": [1, 2, 3],
        "llama.flags": [True, False],
        "tokens": ["a", "bc", "नमस्ते", ""],
    },
    {
        "blk.0.a": np.ones((3, 8), np.float32),
        "blk.0.b": RawTensor(bytes(34 * 4), GGMLType.Q8_0, (2, 64)),
        "norm": np.ones(8, np.float16),
    },
)
HEADER_BYTES = parse_header(GOOD, "f").data_offset
interesting = st.sampled_from([0, 1, 2, 31, 32, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 1])


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(HEADER_BYTES, len(data)) - 1)) if data else 0
        match draw(st.sampled_from(["byte", "u32", "u64", "insert", "remove", "cut"])):
            case "byte":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "u32":
                data[at : at + 4] = struct.pack("<I", draw(interesting) & 0xFFFFFFFF)
            case "u64":
                data[at : at + 8] = struct.pack("<Q", draw(interesting))
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "remove":
                del data[at : at + draw(st.integers(1, 16))]
            case "cut":
                del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


@settings(deadline=None, max_examples=1000)
@given(mutations())
def test_mutated_headers_are_read_or_refused(data: bytes) -> None:
    try:
        header = parse_header(data, "f")
    except GGUFError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
        return
    assert header.data_offset <= len(data) or not header.tensors
    end = 0
    for info in sorted(header.tensors.values(), key=lambda info: info.offset):
        assert max(end, header.data_offset) <= info.offset
        end = info.offset + info.n_bytes
        assert end <= len(data)
        assert info.n_bytes == info.format.n_bytes(info.shape)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 3), st.integers(0, 3))
def test_random_bytes_after_a_fixed_header(data: bytes, n_tensors: int, n_keys: int) -> None:
    try:
        parse_header(raw.fixed_header(n_tensors, n_keys) + data, "f")
    except GGUFError as error:
        assert error.offset is not None and 0 <= error.offset <= 24 + len(data)


READS = ["get_int", "get_float", "get_bool", "get_str", "get_ints", "get_floats", "get_bools", "get_strs"]


@settings(deadline=None)
@given(values, st.sampled_from(READS))
def test_typed_reads_give_their_type_or_a_named_error(value: Any, read: str) -> None:
    metadata = Metadata({"some.key": value})
    try:
        result = getattr(metadata.prefixed("some"), read)("key")
    except MetadataError as error:
        assert "some.key" in str(error)
        return
    expected = {"get_int": int, "get_float": float, "get_bool": bool, "get_str": str, "get_strs": tuple}
    assert type(result) is expected.get(read, np.ndarray)


@settings(deadline=None)
@given(values, st.integers(0, 4))
def test_per_layer_reads_give_one_per_layer_or_a_named_error(value: Any, n_layers: int) -> None:
    metadata = Metadata({"key": value})
    for read in (metadata.get_ints_per_layer, metadata.get_floats_per_layer, metadata.get_bools_per_layer):
        try:
            assert len(read("key", n_layers)) == n_layers
        except MetadataError as error:
            assert "key" in str(error)


def test_the_gguf_package_reads_what_is_written(tmp_path: Any) -> None:
    metadata = {
        "general.architecture": "llama", "a.int": 5, "a.negative": -5, "a.large": 2**40, "a.float": 0.5, "a.flag": True,
        "a.ints": [1, -2], "a.strings": ["x", "yz"], "a.bytes": np.array([1, 2], np.uint8), "a.mixed": [1, 2.5],
    }  # fmt: skip
    tensors = {
        "f": np.arange(6, dtype=np.float32).reshape(2, 3),
        "q": RawTensor(bytes(range(144)), GGMLType.Q4_K, (1, 256)),
    }
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, value in metadata.items():
        field = reader.get_field(key)
        assert field is not None
        read = field.contents()
        assert (read == value) if not isinstance(value, np.ndarray) else (read == value.tolist()), key
    kinds = {key: reader.get_field(key).types[-1].name for key in metadata}  # type: ignore[union-attr]
    assert kinds == {
        "general.architecture": "STRING", "a.int": "UINT32", "a.negative": "INT32", "a.large": "UINT64",
        "a.float": "FLOAT32", "a.flag": "BOOL", "a.ints": "INT32", "a.strings": "STRING", "a.bytes": "UINT8",
        "a.mixed": "FLOAT32",
    }  # fmt: skip
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    np.testing.assert_array_equal(by_name["f"].data, tensors["f"])
    assert by_name["q"].data.tobytes() == bytes(range(144)) and by_name["q"].tensor_type.name == "Q4_K"


def test_the_writer_refuses_by_name() -> None:
    for bad in (None, b"bytes", {}, [1, "a"], [True, 1], np.zeros((2, 2)), np.array(["a"]), 2**64, object(), [None]):
        with pytest.raises(MetadataError, match=r"'the\.key'"):
            gguf_bytes({"the.key": bad}, {})
    for bad_number in (
        1e39,
        -1e300,
        math.nan,
        math.inf,
        [1.0, -math.inf],
        [1, 1e39],
        2**64,
        -(2**63) - 1,
        [-1, 2**63],
        10**5000,
    ):
        with warnings.catch_warnings(), pytest.raises(MetadataError, match=r"'the\.key'.*got .*expected") as caught:
            warnings.simplefilter("error")  # NumPy's of an overflow, say
            gguf_bytes({"the.key": bad_number}, {})
        assert len(str(caught.value)) < 250
    largest = float(np.finfo(np.float32).max)
    exact = parse_header(gguf_bytes({"x": largest, "n": np.float32(np.nan)}, {}), "f").metadata
    assert exact["x"] == largest and math.isnan(exact["n"])
    for bad_alignment in (0, "32", -8, 1, 48, 2**17, True):
        with pytest.raises(MetadataError, match=r"'general\.alignment'"):
            gguf_bytes({"general.alignment": bad_alignment}, {})
    with pytest.raises(TensorError):
        gguf_bytes({}, {"t": np.zeros(3, np.complex64)})
    with pytest.raises(KineticError):
        gguf_bytes({"k": "lone surrogate \ud800"}, {})


def test_empty_lists_are_written_as_strings() -> None:
    metadata = parse_header(gguf_bytes({"e": [], "n": np.empty(0, np.int32)}, {}), "f").metadata
    assert metadata["e"] == () and isinstance(metadata["n"], np.ndarray)
