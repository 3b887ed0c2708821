"""The table of block formats: sizes, described layouts and reference dequantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from kinetic_core.errors import TensorError, UnsupportedModelError
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, RawTensor, as_type, can_dequantize, dequantize
from kinetic_core.gguf.blocks import NEVER_STORED

KERNEL_TYPES = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
]  # fmt: skip
Block = np.ndarray[Any, np.dtype[Any]]


def test_every_type_has_a_format_and_the_sizes_of_the_gguf_package() -> None:
    assert set(BLOCK_FORMATS) == set(GGMLType)
    for type_, layout in BLOCK_FORMATS.items():
        other = gguf.GGMLQuantizationType(int(type_))
        assert other.name == layout.name == type_.name
        assert gguf.GGML_QUANT_SIZES[other] == (layout.block_size, layout.block_bytes)
        assert layout.block_dtype.itemsize == layout.block_bytes
    known = {int(type_) for type_ in gguf.GGMLQuantizationType}
    assert known <= set(map(int, GGMLType)) | set(NEVER_STORED)
    assert not set(map(int, GGMLType)) & set(NEVER_STORED)


def test_kernels_are_promised_for_the_common_formats() -> None:
    assert {type_.name for type_, layout in BLOCK_FORMATS.items() if layout.has_kernel} == set(KERNEL_TYPES)


def test_every_format_but_one_can_be_dequantized() -> None:
    assert [type_.name for type_ in GGMLType if not can_dequantize(type_)] == ["Q1_0"]
    with pytest.raises(UnsupportedModelError, match="Q1_0"):
        dequantize(bytes(18), GGMLType.Q1_0, (128,))


def test_types_by_name_and_id() -> None:
    assert as_type("q4_k") is as_type(12) is GGMLType.Q4_K
    for bad, text in (("q9", "'q9'"), (99, "99"), (4, "removed")):
        with pytest.raises(UnsupportedModelError, match=text):
            as_type(bad)


def test_sizes_of_tensors() -> None:
    q4_k = BLOCK_FORMATS[GGMLType.Q4_K]
    assert q4_k.n_bytes((3, 5, 512)) == 3 * 5 * 2 * 144
    assert q4_k.bits_per_element == 4.5
    with pytest.raises(TensorError, match="multiple of 256"):
        q4_k.n_bytes((512, 128))


def nibbles(qs: npt.NDArray[np.uint8], group: int) -> npt.NDArray[np.int64]:
    """Per `group` bytes: their low nibbles, then their high nibbles."""
    bytes_ = qs.reshape(-1, group).astype(np.int64)
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=1).reshape(-1)


def pairs_of_bits(qs: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Byte b of each 32 holds elements b, b + 32, b + 64 and b + 96 of its 128."""
    bytes_ = qs.reshape(-1, 1, 32).astype(np.int64)
    return (bytes_ >> np.array([0, 2, 4, 6])[:, None] & 3).reshape(-1)


def bits(qh: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Bit j of byte b belongs to element 32 j + b."""
    return (qh.astype(np.int64) >> np.arange(8)[:, None] & 1).reshape(-1)


def scales_6_bit(packed: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The 8 scales and 8 minimums of Q4_K and Q5_K."""
    s = packed.astype(np.int64)
    scale = np.concatenate([s[0:4] & 63, (s[8:12] & 15) | (s[0:4] >> 6 << 4)])
    minimum = np.concatenate([s[4:8] & 63, (s[8:12] >> 4) | (s[4:8] >> 6 << 4)])
    return scale, minimum


def fifth_bits(block: Block) -> npt.NDArray[np.int64]:
    return (np.int64(block["qh"]) >> np.arange(32) & 1) << 4


def q3_k(block: Block) -> npt.NDArray[np.float64]:
    s = block["scales"].astype(np.int64)
    low = np.concatenate([s[:8] & 15, s[:8] >> 4])
    high = np.concatenate([s[8:] >> shift & 3 for shift in (0, 2, 4, 6)])
    q = pairs_of_bits(block["qs"]) | bits(block["hmask"]) << 2
    return np.repeat(float(block["d"]) * ((low | high << 4) - 32), 16) * (q - 4)


def k_with_minimum(block: Block, q: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    scale, minimum = scales_6_bit(block["scales"])
    return np.repeat(float(block["d"]) * scale, 32) * q - np.repeat(float(block["dmin"]) * minimum, 32)


def iq4_xs(block: Block) -> npt.NDArray[np.float64]:
    low = nibbles_of_bytes(block["scales_l"])
    high = np.int64(block["scales_h"]) >> np.arange(0, 16, 2) & 3
    return np.repeat(float(block["d"]) * ((low | high << 4) - 32), 32) * LEVELS[nibbles(block["qs"], 16)]


def nibbles_of_bytes(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Low then high nibble of each byte in turn."""
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.int64)


LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

FORMULAS: dict[str, Callable[[Block], npt.NDArray[np.float64]]] = {
    "Q8_0": lambda b: float(b["d"]) * b["qs"].astype(np.float64),
    "Q4_0": lambda b: float(b["d"]) * (nibbles(b["qs"], 16) - 8),
    "Q4_1": lambda b: float(b["d"]) * nibbles(b["qs"], 16) + float(b["m"]),
    "Q5_0": lambda b: float(b["d"]) * ((nibbles(b["qs"], 16) | fifth_bits(b)) - 16),
    "Q5_1": lambda b: float(b["d"]) * (nibbles(b["qs"], 16) | fifth_bits(b)) + float(b["m"]),
    "Q2_K": lambda b: (
        np.repeat(float(b["d"]) * (b["scales"] & 15), 16) * pairs_of_bits(b["qs"])
        - np.repeat(float(b["dmin"]) * (b["scales"] >> 4), 16)
    ),
    "Q3_K": q3_k,
    "Q4_K": lambda b: k_with_minimum(b, nibbles(b["qs"], 32)),
    "Q5_K": lambda b: k_with_minimum(b, nibbles(b["qs"], 32) | bits(b["qh"]) << 4),
    "Q6_K": lambda b: (
        np.repeat(float(b["d"]) * b["scales"].astype(np.float64), 16)
        * ((nibbles(b["ql"], 64) | pairs_of_bits(b["qh"]) << 4) - 32)
    ),
    "IQ4_NL": lambda b: float(b["d"]) * LEVELS[nibbles(b["qs"], 16)],
    "IQ4_XS": iq4_xs,
    "MXFP4": lambda b: 2.0 ** (int(b["e"]) - 127) * E2M1[nibbles(b["qs"], 16)],
    "TQ2_0": lambda b: float(b["d"]) * (pairs_of_bits(b["qs"]) - 1),
}
"""Each format written down once more from the table's own description of its fields, in float64."""


@pytest.mark.parametrize("name", FORMULAS)
def test_dequantization_follows_the_described_layout(name: str) -> None:
    layout = BLOCK_FORMATS[GGMLType[name]]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, 6 * layout.block_bytes, np.uint8).view(layout.block_dtype)
    for field in ("d", "dmin", "m"):
        if field in (layout.block_dtype.names or ()):
            blocks[field] = rng.uniform(-2, 2, 6).astype(np.float16)
    if name == "MXFP4":
        blocks["e"] = rng.integers(117, 137, 6)
    expected = np.concatenate([FORMULAS[name](block) for block in blocks])
    values = dequantize(blocks.view(np.uint8), layout.type, (3, 2 * layout.block_size))
    assert values.dtype == np.float32 and values.shape == (3, 2 * layout.block_size)
    tolerance = 1e-6 * np.abs(expected).max()  # float32 roundings of the package's formula
    np.testing.assert_allclose(values.reshape(-1), expected, rtol=0, atol=tolerance)


def test_every_kernel_format_of_blocks_has_a_formula_here() -> None:
    assert set(KERNEL_TYPES) - set(FORMULAS) == {"F32", "F16", "BF16"}


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8"])
def test_numbers_come_back(dtype: str) -> None:
    array = np.array([[0, 1, -1], [100, -128, 3]], dtype)
    raw = RawTensor.from_array(array)
    assert raw.shape == (2, 3)
    values = dequantize(raw.to_bytes(), raw.type, raw.shape)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, array.astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    array = np.array([1.0, -2.5, 3.0e38, np.inf, 0.0078125], np.float32)
    raw = array.view("<u4") >> 16
    values = dequantize(raw.astype("<u2").view(np.uint8), GGMLType.BF16, (5,))
    np.testing.assert_array_equal(values, (raw << 16).astype("<u4").view("<f4"))
    assert values[1] == -2.5


def test_results_are_new_arrays() -> None:
    data = np.zeros(16, np.uint8)
    values = dequantize(data, GGMLType.F32, (4,))
    values[0] = 1
    assert not data.any()


def test_bytes_must_match_the_shape() -> None:
    for data, shape in ((bytes(34), (64,)), (bytes(35), (32,)), (bytes(0), (32,))):
        with pytest.raises(TensorError, match="bytes do not match"):
            dequantize(data, GGMLType.Q8_0, shape)
    with pytest.raises(TensorError, match="multiple of 32"):
        dequantize(bytes(34), GGMLType.Q8_0, (16, 2))
    with pytest.raises(TensorError, match="float32"):
        dequantize(np.zeros(34, np.float32), GGMLType.Q8_0, (32,))  # type: ignore[arg-type]


@pytest.mark.parametrize("type_", [type_ for type_ in GGMLType if type_.name != "Q1_0"])
def test_any_bits_dequantize_without_a_warning(type_: GGMLType) -> None:
    layout = BLOCK_FORMATS[type_]
    rng = np.random.default_rng(int(type_))
    for data in (
        np.full(4 * layout.block_bytes, 255, np.uint8),
        rng.integers(0, 256, 4 * layout.block_bytes, np.uint8),
    ):
        with np.errstate(all="raise"):
            assert dequantize(data, type_, (4, layout.block_size)).shape == (4, layout.block_size)
