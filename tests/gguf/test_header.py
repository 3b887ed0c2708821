"""The header parser on files that are cut, lie about themselves, or are fine."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import raw_gguf as raw

from kinetic_core.errors import GGUFError
from kinetic_core.gguf import GGMLType, gguf_bytes, open_model_file, parse_header, read_header
from kinetic_core.gguf import header as header_module


def refused(data: bytes) -> GGUFError:
    with pytest.raises(GGUFError) as caught:
        parse_header(data, "test.gguf")
    assert "test.gguf" in str(caught.value)
    return caught.value


def assert_refused_cheaply(data: bytes) -> GGUFError:
    """Refused, in under 100 ms and with next to no memory."""
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        error = refused(data)
        seconds = time.perf_counter() - begin
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 0.1
    assert peak_bytes < 200_000
    return error


def test_good_file_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(raw.good_file())
    header = read_header(path)
    assert header.version == 3
    assert dict(header.metadata) == {"general.architecture": "llama", "llama.block_count": 1}
    assert list(header.tensors) == ["blk.0.a", "b"]
    first, second = header.tensors.values()
    assert (first.shape, first.dims, first.type, first.n_bytes, first.n_elements) == (
        (4, 8),
        (8, 4),
        GGMLType.F32,
        128,
        32,
    )
    assert first.offset == header.data_offset == len(raw.good_file()) - 256
    assert second.offset + second.n_bytes == header.n_bytes == len(raw.good_file())
    assert first.format.name == "F32"
    with pytest.raises(TypeError):
        header.tensors["c"] = first  # type: ignore[index]


def test_g1_array_longer_than_the_file() -> None:
    error = assert_refused_cheaply(raw.fixed_header(0, 1) + raw.array_key("a", 4, 2**61))
    assert error.key == "a"
    assert "'a'" in str(error) and str(2**61) in str(error)


@pytest.mark.parametrize("type_id", [0, 7, 8, 12])
def test_array_of_every_width_is_checked_before_it_is_read(type_id: int) -> None:
    error = assert_refused_cheaply(raw.fixed_header(0, 1) + raw.array_key("a", type_id, 2**40, bytes(64)))
    assert "array runs past the end of the file" in str(error)


def test_g2_string_longer_than_the_file() -> None:
    data = raw.fixed_header(0, 1) + raw.key("k", 8, struct.pack("<Q", 2**63 + 5))
    error = assert_refused_cheaply(data)
    assert "string runs past the end of the file" in str(error)
    assert error.offset == len(data) and f"offset {len(data)}" in str(error)
    assert str(2**63 + 5) in str(error)


@pytest.mark.parametrize("data", [b"", b"GGU", b"GGUF", b"GGUF\x03\0\0\0", raw.fixed_header(0, 0)[:-1]])
def test_g3_truncated_header(data: bytes, tmp_path: Path) -> None:
    assert "truncated header" in str(refused(data))
    path = tmp_path / "short.gguf"
    path.write_bytes(data)
    for open_it in (read_header, open_model_file):
        with pytest.raises(GGUFError, match="truncated header"):
            open_it(path)


def test_smallest_file_opens() -> None:
    header = parse_header(raw.fixed_header(0, 0), "f")
    assert not header.metadata and not header.tensors


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(40), b"ggml" + bytes(40), b"\x80"])
def test_other_files_are_not_gguf(data: bytes) -> None:
    assert "not a GGUF file" in str(refused(data))


def test_versions() -> None:
    two = bytearray(raw.good_file())
    two[4] = 2
    assert parse_header(bytes(two), "f").version == 2
    for version in (0, 1, 4, 2**31):
        error = refused(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        assert "unsupported GGUF version" in str(error) and str(version) in str(error)
    for version in (2, 3):
        assert "big-endian" in str(refused(b"GGUF" + struct.pack(">IQQ", version, 0, 0)))


@pytest.mark.parametrize("n_dims", [9, 0, 5, 2**31])
def test_g4_number_of_dimensions(n_dims: int) -> None:
    row = raw.tensor("t", [8], 0, 0, n_dims=n_dims)
    error = assert_refused_cheaply(raw.padded(raw.fixed_header(1, 0) + row) + bytes(64))
    assert "bad number of dimensions" in str(error)
    assert error.key == "t" and str(n_dims) in str(error)


@pytest.mark.parametrize("n_dims", [1, 2, 3, 4])
def test_four_dimensions_are_fine(n_dims: int) -> None:
    row = raw.tensor("t", [2] * n_dims, 0, 0)
    header = parse_header(raw.padded(raw.fixed_header(1, 0) + row) + bytes(4 * 2**n_dims), "f")
    assert header.tensors["t"].shape == (2,) * n_dims


@pytest.mark.parametrize("dims", [[0], [8, 0], [2**63, 2], [2**32, 2**32], [2**63, 2**63, 2**63, 2**63]])
def test_shapes_that_no_file_can_hold(dims: list[int]) -> None:
    error = assert_refused_cheaply(raw.padded(raw.fixed_header(1, 0) + raw.tensor("t", dims, 0, 0)) + bytes(64))
    assert error.key == "t"
    assert "a dimension is 0" in str(error) if 0 in dims else "runs past the end" in str(error)


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 48, 2**17, 2**30])
def test_g5_bad_alignment(alignment: int) -> None:
    data = raw.fixed_header(0, 1) + raw.key("general.alignment", 4, struct.pack("<I", alignment))
    error = refused(data)
    assert error.key == "general.alignment" and f"got {alignment}," in str(error)


@pytest.mark.parametrize(
    "key",
    [
        raw.string_key("general.alignment", "32"),
        raw.key("general.alignment", 6, struct.pack("<f", 32.0)),
        raw.key("general.alignment", 7, b"\1"),
        raw.array_key("general.alignment", 4, 1, struct.pack("<I", 32)),
        raw.array_key("general.alignment", 8, 1, raw.string("32")),
    ],
)
def test_g5_alignment_of_another_type(key: bytes) -> None:
    assert "bad alignment" in str(refused(raw.fixed_header(0, 1) + key))


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096, 65536])
def test_g5_good_alignment(alignment: int) -> None:
    metadata = {"general.alignment": alignment}
    tensors = {"a": np.arange(3, dtype=np.float32), "b": np.ones(5, np.float32)}
    header = parse_header(gguf_bytes(metadata, tensors), "f")
    assert header.alignment == alignment
    assert header.data_offset % alignment == 0
    assert header.tensors["b"].offset == header.data_offset + alignment * -(-12 // alignment)


def test_g6_last_tensor_one_byte_short() -> None:
    error = refused(raw.good_file()[:-1])
    assert error.key == "b" and "the tensor runs past the end of the file" in str(error)


def test_g6_tensor_that_begins_sixteen_bytes_before_the_end() -> None:
    row = raw.tensor("t", [8], 0, 96)
    error = refused(raw.padded(raw.fixed_header(1, 0) + row) + bytes(96 + 16))
    assert error.key == "t" and "the tensor runs past the end of the file" in str(error)


def test_g6_is_refused_before_any_view_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_view(*arguments: object) -> None:
        raise AssertionError("a view was made of a file that is not valid")

    path = tmp_path / "cut.gguf"
    path.write_bytes(raw.good_file()[:-1])
    monkeypatch.setattr(np, "frombuffer", no_view)
    with pytest.raises(GGUFError, match="runs past the end"):
        open_model_file(path)


def test_every_prefix_of_a_good_file_is_refused() -> None:
    good = raw.good_file()
    for length in range(len(good)):
        refused(good[:length])


def test_tensor_offsets() -> None:
    def file(*rows: bytes) -> bytes:
        return raw.padded(raw.fixed_header(len(rows), 0) + b"".join(rows)) + bytes(256)

    assert "not aligned" in str(refused(file(raw.tensor("t", [4], 0, 8))))
    error = refused(file(raw.tensor("first", [16], 0, 0), raw.tensor("second", [16], 0, 32)))
    assert error.key == "second" and "overlaps tensor 'first'" in str(error)
    refused(file(raw.tensor("same", [8], 0, 0), raw.tensor("place", [8], 0, 0)))
    refused(file(raw.tensor("t", [8], 0, 2**64 - 32)))
    out_of_order = parse_header(file(raw.tensor("last", [8], 0, 64), raw.tensor("first", [8], 0, 0)), "f")
    assert list(out_of_order.tensors) == ["last", "first"]


@pytest.mark.parametrize(
    ("type_id", "reason"), [(4, "removed"), (9, "activations"), (33, "removed"), (42, ""), (2**31, "")]
)
def test_unknown_tensor_types(type_id: int, reason: str) -> None:
    error = refused(raw.padded(raw.fixed_header(1, 0) + raw.tensor("t", [32], type_id, 0)) + bytes(256))
    assert "unknown tensor type" in str(error) and str(type_id) in str(error) and reason in str(error)


@pytest.mark.parametrize(("type_id", "row"), [(8, 31), (8, 48), (12, 128)])
def test_rows_are_whole_blocks(type_id: int, row: int) -> None:
    error = refused(raw.padded(raw.fixed_header(1, 0) + raw.tensor("t", [row, 32], type_id, 0)) + bytes(8192))
    assert "whole number of blocks" in str(error)


def test_counts_that_the_file_cannot_hold() -> None:
    for n_tensors, n_keys, what in ((2**62, 0, "tensor"), (0, 2**62, "metadata key"), (1, 0, "tensor")):
        error = assert_refused_cheaply(raw.fixed_header(n_tensors, n_keys) + bytes(12))
        assert f"the {what} count is too large" in str(error)


def test_limits_hold_even_if_the_file_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    data = raw.good_file()
    for name in ("MAX_KEYS", "MAX_TENSORS"):
        with monkeypatch.context() as patch:
            patch.setattr(header_module, name, 1)
            assert "count is too large" in str(refused(data))
    with monkeypatch.context() as patch:
        patch.setattr(header_module, "MAX_STRING_BYTES", 4)
        assert "string is too long" in str(refused(data))
        array = raw.fixed_header(0, 1) + raw.array_key("a", 8, 2, raw.string("fine") + raw.string("longer"))
        assert "string 1 of the array is too long" in str(refused(array))
    with monkeypatch.context() as patch:
        patch.setattr(header_module, "MAX_ARRAY_ELEMENTS", 5)
        three = struct.pack("<3I", 1, 2, 3)
        two_arrays = raw.fixed_header(0, 2) + raw.array_key("a", 4, 3, three) + raw.array_key("b", 4, 3, three)
        error = refused(two_arrays)
        assert error.key == "b" and "too long" in str(error)


def test_names() -> None:
    def keys(*rows: bytes) -> bytes:
        return raw.fixed_header(0, len(rows)) + b"".join(rows)

    one = struct.pack("<I", 1)
    error = refused(keys(raw.key("k", 4, one), raw.key("k", 4, one)))
    assert error.key == "k" and "occurs twice" in str(error)
    assert "bad length" in str(refused(keys(raw.key("", 4, one))))
    assert "bad length" in str(refused(keys(raw.key("k" * 70000, 4, one))))
    assert "not UTF-8" in str(refused(keys(raw.key(b"k\xff", 4, one))))
    row = raw.tensor("t", [8], 0, 0)
    twice = raw.padded(raw.fixed_header(2, 0) + row + raw.tensor("t", [8], 0, 32)) + bytes(64)
    assert "a tensor occurs twice" in str(refused(twice))
    long_name = raw.padded(raw.fixed_header(1, 0) + raw.tensor("t" * 128, [8], 0, 0)) + bytes(64)
    assert "bad length" in str(refused(long_name))


def test_text_that_is_not_utf8_is_refused_by_place() -> None:
    error = refused(raw.fixed_header(0, 1) + raw.string_key("general.name", b"caf\xe9"))
    assert error.key == "general.name" and "not UTF-8" in str(error)
    tokens = raw.string("good") + raw.string(b"\xf0\x9f") + raw.string("after")
    error = refused(raw.fixed_header(0, 1) + raw.array_key("tokenizer.ggml.tokens", 8, 3, tokens))
    assert "string 1 of the array is not UTF-8" in str(error) and error.key == "tokenizer.ggml.tokens"
    surrogate = raw.string_key("k", b"\xed\xa0\x80")
    assert "not UTF-8" in str(refused(raw.fixed_header(0, 1) + surrogate))


def test_string_array_cut_in_the_middle() -> None:
    strings = raw.string("one") + raw.string("two") + struct.pack("<Q", 100) + b"cut"
    error = refused(raw.fixed_header(0, 1) + raw.array_key("a", 8, 3, strings))
    assert "string 2 of the array runs past the end of the file" in str(error)
    lengths_only = raw.fixed_header(0, 1) + raw.array_key("a", 8, 3, raw.string("abcdefghijklmnop"))
    assert "string 1 of the array runs past the end of the file" in str(refused(lengths_only))


def test_value_types() -> None:
    assert "unknown value type" in str(refused(raw.fixed_header(0, 1) + raw.key("k", 13, bytes(8))))
    assert "unknown element type" in str(refused(raw.fixed_header(0, 1) + raw.array_key("k", 13, 1, bytes(8))))
    nested = raw.array_key("k", 9, 1, struct.pack("<IQ", 4, 0))
    assert "array of arrays" in str(refused(raw.fixed_header(0, 1) + nested))
    error = refused(raw.fixed_header(0, 1) + raw.key("k", 7, b"\2"))
    assert "not a bool" in str(error) and "got 2" in str(error)
    error = refused(raw.fixed_header(0, 1) + raw.array_key("k", 7, 3, b"\0\1\7"))
    assert "not a bool" in str(error) and "got 7" in str(error)
    assert error.offset == 24 + len(raw.array_key("k", 7, 3)) + 2


def test_scalars_and_arrays_of_every_type() -> None:
    scalars = {
        0: ("<B", 255), 1: ("<b", -128), 2: ("<H", 65535), 3: ("<h", -32768), 4: ("<I", 2**32 - 1), 5: ("<i", -(2**31)),
        6: ("<f", 0.5), 7: ("<B", 1), 10: ("<Q", 2**64 - 1), 11: ("<q", -(2**63)), 12: ("<d", 0.1),
    }  # fmt: skip
    data = raw.fixed_header(0, 2 * len(scalars))
    for type_id, (layout, value) in scalars.items():
        payload = struct.pack(layout, value)
        data += raw.key(f"s{type_id}", type_id, payload) + raw.array_key(f"a{type_id}", type_id, 2, payload * 2)
    metadata = parse_header(data, "f").metadata
    for type_id, (_, value) in scalars.items():
        assert metadata[f"s{type_id}"] == value
        array = metadata[f"a{type_id}"]
        assert isinstance(array, np.ndarray) and array.tolist() == [value, value]
        assert not array.flags.writeable
    assert metadata["s7"] is True and metadata["a7"].dtype == np.bool_  # type: ignore[union-attr]


def test_messages_stay_short_and_printable() -> None:
    name = "k\n\x1b[31m" + "x" * 60000
    error = refused(raw.fixed_header(0, 1) + raw.key(name, 13, bytes(8)))
    assert len(str(error)) < 400 and str(error).isprintable()
    error = refused(raw.fixed_header(0, 1) + raw.string_key("k", b"\xff" * 10000))
    assert len(str(error)) < 400


def test_a_large_vocabulary_is_read_whole(tmp_path: Path) -> None:
    count = 248_320
    tokens = [f"token{number}" for number in range(count)]
    merges = [f"left{number} right{number}" for number in range(count)]
    types = np.arange(count, dtype=np.int32)
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf_bytes({"tokens": tokens, "merges": merges, "types": types, "after": 7}, {}))
    metadata = read_header(path).metadata
    assert metadata["tokens"] == tuple(tokens) and metadata["merges"] == tuple(merges)
    assert np.array_equal(metadata["types"], types) and metadata["after"] == 7
