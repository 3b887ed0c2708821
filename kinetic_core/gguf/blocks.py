"""Every ggml block format that a GGUF file may hold, as one described table, and their reference dequantization.

A tensor is stored row by row; a row is cut into blocks of `block_size` consecutive elements, each block takes
`block_bytes` bytes and is laid out as the format's `fields` say, in order and without padding. Numbers are
little-endian. The layouts are those of ggml's `ggml-common.h`; `BLOCK_FORMATS` is the only place of the project that
knows sizes.

The dequantization here is the plain truth that kernels are compared with. It is exact for the number formats and
delegates to the `gguf` package for the block formats; nothing here is meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import TensorError, UnsupportedModelError, describe


class GGMLType(IntEnum):
    """The type ids of the tensor table, for every type that is stored in files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


NEVER_STORED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2, removed from the format",
        5: "Q4_3, removed from the format",
        9: "Q8_1, a type of activations that is never stored",
        15: "Q8_K, a type of activations that is never stored",
        31: "Q4_0_4_4, removed from the format",
        32: "Q4_0_4_8, removed from the format",
        33: "Q4_0_8_8, removed from the format",
        36: "IQ4_NL_4_4, removed from the format",
        37: "IQ4_NL_4_8, removed from the format",
        38: "IQ4_NL_8_8, removed from the format",
    }
)
"""Type ids that ggml has or had and that no valid file holds, with the reason."""


@attrs.frozen
class BlockField:
    """One field of a block: `count` little-endian numbers of NumPy type `dtype`."""

    name: str
    dtype: str
    count: int
    meaning: str

    @property
    def n_bytes(self) -> int:
        """Bytes of the field."""
        return np.dtype(self.dtype).itemsize * self.count


@attrs.frozen
class BlockFormat:
    """How one ggml type is stored.

    block_size: elements per block; a row must be a whole number of blocks.
    fields: the block, in order and without padding.
    has_kernel: whether the CPU backend computes on this format directly; other formats are converted at load.
    value: the formula of one element.
    """

    type: GGMLType
    block_size: int
    fields: tuple[BlockField, ...]
    has_kernel: bool
    value: str

    @property
    def name(self) -> str:
        """The name as ggml spells it, `Q4_K`."""
        return self.type.name

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return sum(field.n_bytes for field in self.fields)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, scales included."""
        return self.block_bytes * 8 / self.block_size

    def n_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this format; `shape` has its contiguous axis last.

        Raises TensorError when a row is not a whole number of blocks.
        """
        row = int(shape[-1]) if len(shape) else 1
        if row % self.block_size:
            raise TensorError(
                describe(
                    "a row is not a whole number of blocks",
                    where=f"a {self.name} tensor of shape {tuple(shape)}",
                    got=f"{row} elements",
                    expected=f"a multiple of {self.block_size}",
                )
            )
        return math.prod(int(n) for n in shape) // self.block_size * self.block_bytes

    @property
    def block_dtype(self) -> np.dtype[Any]:
        """A structured NumPy type of one block: `data.view(block_dtype)["d"]` reads a field of every block."""
        return np.dtype([(f.name, f.dtype, (f.count,) if f.count > 1 else ()) for f in self.fields])


def _numbers(type_: GGMLType, dtype: str, has_kernel: bool, value: str = "x") -> BlockFormat:
    return BlockFormat(type_, 1, (BlockField("x", dtype, 1, "the element"),), has_kernel, value)


def _blocks(
    type_: GGMLType, block_size: int, has_kernel: bool, value: str, *fields: tuple[str, str, int, str]
) -> BlockFormat:
    return BlockFormat(type_, block_size, tuple(BlockField(*field) for field in fields), has_kernel, value)


_SCALE = ("d", "<f2", 1, "scale of the block")
_MINIMUM = ("m", "<f2", 1, "minimum of the block")
_NIBBLES_32 = ("qs", "u1", 16, "low nibbles: elements 0..15, high nibbles: elements 16..31")
_FIFTH_BITS = ("qh", "<u4", 1, "bit i: fifth bit of element i")
_MIN_SCALE = ("dmin", "<f2", 1, "scale of the sub-block minimums")
_SCALES_6_BIT = ("scales", "u1", 12, "8 scales and 8 minimums of 6 bits: low 6 bits of each first, high bits last")

_FORMATS: tuple[BlockFormat, ...] = (
    _numbers(GGMLType.F32, "<f4", True),
    _numbers(GGMLType.F16, "<f2", True),
    _numbers(GGMLType.BF16, "<u2", True, "the float32 whose upper 16 bits are x"),
    _numbers(GGMLType.F64, "<f8", False),
    _numbers(GGMLType.I8, "i1", False),
    _numbers(GGMLType.I16, "<i2", False),
    _numbers(GGMLType.I32, "<i4", False),
    _numbers(GGMLType.I64, "<i8", False),
    _blocks(GGMLType.Q8_0, 32, True, "d * q", _SCALE, ("qs", "i1", 32, "q of each element")),
    _blocks(GGMLType.Q4_0, 32, True, "d * (q - 8)", _SCALE, _NIBBLES_32),
    _blocks(GGMLType.Q4_1, 32, True, "d * q + m", _SCALE, _MINIMUM, _NIBBLES_32),
    _blocks(GGMLType.Q5_0, 32, True, "d * (q - 16)", _SCALE, _FIFTH_BITS, _NIBBLES_32),
    _blocks(GGMLType.Q5_1, 32, True, "d * q + m", _SCALE, _MINIMUM, _FIFTH_BITS, _NIBBLES_32),
    _blocks(
        GGMLType.Q2_K,
        256,
        True,
        "d * scale * q - dmin * minimum, sub-blocks of 16",
        ("scales", "u1", 16, "per sub-block: low nibble scale, high nibble minimum"),
        ("qs", "u1", 64, "2-bit q; byte b of 128-element half h holds elements b, b+32, b+64, b+96 of that half"),
        ("d", "<f2", 1, "scale of the sub-block scales"),
        _MIN_SCALE,
    ),
    _blocks(
        GGMLType.Q3_K,
        256,
        True,
        "d * (scale - 32) * (q - 4), q of 3 bits, sub-blocks of 16",
        ("hmask", "u1", 32, "third bit of q: bit j of byte b belongs to element 32 j + b"),
        ("qs", "u1", 64, "low 2 bits of q, ordered as in Q2_K"),
        ("scales", "u1", 12, "16 scales of 6 bits: low 4 bits in bytes 0..7, upper 2 bits in bytes 8..11"),
        ("d", "<f2", 1, "scale of the sub-block scales"),
    ),
    _blocks(
        GGMLType.Q4_K,
        256,
        True,
        "d * scale * q - dmin * minimum, sub-blocks of 32",
        ("d", "<f2", 1, "scale of the sub-block scales"),
        _MIN_SCALE,
        _SCALES_6_BIT,
        ("qs", "u1", 128, "byte b of each 32: low nibble element b, high nibble element b+32 of its 64"),
    ),
    _blocks(
        GGMLType.Q5_K,
        256,
        True,
        "d * scale * q - dmin * minimum, sub-blocks of 32",
        ("d", "<f2", 1, "scale of the sub-block scales"),
        _MIN_SCALE,
        _SCALES_6_BIT,
        ("qh", "u1", 32, "fifth bit of q: bit j of byte b belongs to element 32 j + b"),
        ("qs", "u1", 128, "low 4 bits of q, ordered as in Q4_K"),
    ),
    _blocks(
        GGMLType.Q6_K,
        256,
        True,
        "d * scale * (q - 32), sub-blocks of 16",
        ("ql", "u1", 128, "low 4 bits of q; per 128: low nibbles of bytes 0..63 first, then the high nibbles"),
        ("qh", "u1", 64, "upper 2 bits of q, ordered as in Q2_K"),
        ("scales", "i1", 16, "scale per sub-block"),
        ("d", "<f2", 1, "scale of the sub-block scales"),
    ),
    _blocks(GGMLType.IQ4_NL, 32, True, "d * codebook[q], 16 fixed levels", _SCALE, _NIBBLES_32),
    _blocks(
        GGMLType.IQ4_XS,
        256,
        True,
        "d * (scale - 32) * codebook[q], sub-blocks of 32, the levels of IQ4_NL",
        ("d", "<f2", 1, "scale of the sub-block scales"),
        ("scales_h", "<u2", 1, "upper 2 bits of the 8 scales"),
        ("scales_l", "u1", 4, "low 4 bits of the 8 scales"),
        ("qs", "u1", 128, "per sub-block 16 bytes, ordered as in IQ4_NL"),
    ),
    _blocks(
        GGMLType.MXFP4,
        32,
        True,
        "2^(e - 127) * e2m1[q], the 16 values of a 4-bit float with 2 exponent bits and 1 mantissa bit",
        ("e", "u1", 1, "exponent of the block (E8M0)"),
        _NIBBLES_32,
    ),
    _blocks(
        GGMLType.NVFP4,
        64,
        False,
        "scale * e2m1[q], sub-blocks of 16",
        ("d", "u1", 4, "scale per sub-block (unsigned E4M3)"),
        ("qs", "u1", 32, "per sub-block 8 bytes: low nibbles elements 0..7, high nibbles elements 8..15"),
    ),
    _blocks(GGMLType.Q1_0, 128, False, "d * sign", _SCALE, ("qs", "u1", 16, "bit i: sign of element i")),
    _blocks(
        GGMLType.IQ2_XXS,
        256,
        False,
        "d * scale * grid[q] * sign, sub-blocks of 32",
        _SCALE,
        ("qs", "<u2", 32, "per sub-block 4 grid indices of 8 bits, 4 sign indices of 7 bits, scale of 4 bits"),
    ),
    _blocks(
        GGMLType.IQ2_XS,
        256,
        False,
        "d * scale * grid[q] * sign, sub-blocks of 16",
        _SCALE,
        ("qs", "<u2", 32, "per 8 elements: grid index of 9 bits, sign index of 7 bits"),
        ("scales", "u1", 8, "per 32 elements two scales of 4 bits"),
    ),
    _blocks(
        GGMLType.IQ2_S,
        256,
        False,
        "d * scale * grid[q] * sign, sub-blocks of 16",
        _SCALE,
        ("qs", "u1", 64, "32 bytes low 8 bits of the grid indices, 32 bytes signs"),
        ("qh", "u1", 8, "upper 2 bits of the grid indices"),
        ("scales", "u1", 8, "per 32 elements two scales of 4 bits"),
    ),
    _blocks(
        GGMLType.IQ3_XXS,
        256,
        False,
        "d * scale * grid[q] * sign, sub-blocks of 32",
        _SCALE,
        ("qs", "u1", 96, "64 grid indices of 4 elements each, then per sub-block signs and scale in 4 bytes"),
    ),
    _blocks(
        GGMLType.IQ3_S,
        256,
        False,
        "d * scale * grid[q] * sign, sub-blocks of 32",
        _SCALE,
        ("qs", "u1", 64, "low 8 bits of the grid indices, of 4 elements each"),
        ("qh", "u1", 8, "ninth bit of the grid indices"),
        ("signs", "u1", 32, "bit i: sign of element i"),
        ("scales", "u1", 4, "per 64 elements two scales of 4 bits"),
    ),
    _blocks(
        GGMLType.IQ1_S,
        256,
        False,
        "d * scale * (grid[q] + delta), sub-blocks of 32",
        _SCALE,
        ("qs", "u1", 32, "low 8 bits of the grid indices, of 8 elements each"),
        ("qh", "<u2", 8, "per sub-block: upper 3 bits of 4 grid indices, scale of 3 bits, sign of delta"),
    ),
    _blocks(
        GGMLType.IQ1_M,
        256,
        False,
        "d * scale * (grid[q] + delta), sub-blocks of 16",
        ("qs", "u1", 32, "low 8 bits of the grid indices, of 8 elements each"),
        ("qh", "u1", 16, "per 16 elements: upper 3 bits of 2 grid indices, 2 signs of delta"),
        ("scales", "u1", 8, "16 scales of 3 bits; the upper nibbles of the four 16-bit words make d (float16)"),
    ),
    _blocks(
        GGMLType.TQ1_0,
        256,
        False,
        "d * (q - 1), q in 0..2",
        ("qs", "u1", 48, "5 ternary digits per byte"),
        ("qh", "u1", 4, "4 ternary digits per byte"),
        ("d", "<f2", 1, "scale of the block"),
    ),
    _blocks(
        GGMLType.TQ2_0,
        256,
        False,
        "d * (q - 1), q in 0..2",
        ("qs", "u1", 64, "2-bit q, ordered as in Q2_K"),
        ("d", "<f2", 1, "scale of the block"),
    ),
)

BLOCK_FORMATS: Mapping[GGMLType, BlockFormat] = MappingProxyType({f.type: f for f in _FORMATS})
"""Every stored format by its type."""


def as_type(value: GGMLType | int | str) -> GGMLType:
    """The type of an id (12) or of a name in any case ("q4_k"); UnsupportedModelError names what is unknown."""
    if isinstance(value, str):
        try:
            return GGMLType[value.upper()]
        except KeyError:
            pass
    else:
        try:
            return GGMLType(value)
        except ValueError:
            pass
    reason = NEVER_STORED.get(value) if isinstance(value, int) else None
    got = f"{value} ({reason})" if reason else repr(value)
    names = ", ".join(type_.name for type_ in GGMLType)
    raise UnsupportedModelError(describe("unknown tensor type", got=got, expected=f"one of {names}"))


def can_dequantize(type_: GGMLType) -> bool:
    """Whether `dequantize` knows the format with the installed `gguf` package."""
    layout = BLOCK_FORMATS[type_]
    try:
        dequantize(bytes(layout.block_bytes), type_, (layout.block_size,))
    except UnsupportedModelError:
        return False
    return True


_NUMBER_DTYPES: Mapping[GGMLType, str] = MappingProxyType(
    {f.type: f.fields[0].dtype for f in _FORMATS if f.block_size == 1 and f.type != GGMLType.BF16}
)


def dequantize(data: npt.NDArray[np.uint8] | bytes, type_: GGMLType, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """The elements of a tensor as `f32[shape]`, a new array.

    data: the tensor's bytes; shape: contiguous axis last. F32, F16, BF16 and the block formats are converted without
    rounding beyond the format's own float32 formula; F64 and the wide integers round to nearest.

    Raises TensorError when `data` is not exactly as long as the shape says, UnsupportedModelError when the format
    has no reference dequantization.
    """
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1)
    expected = BLOCK_FORMATS[type_].n_bytes(shape)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise TensorError(
            describe(
                "the bytes do not match the shape",
                where=f"a {type_.name} tensor of shape {tuple(shape)}",
                got=f"{raw.size} elements of {raw.dtype}",
                expected=f"{expected} bytes",
            )
        )
    with np.errstate(all="ignore"):  # a damaged file may hold any bits; a NaN weight is found where it matters
        if type_ == GGMLType.BF16:
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        if type_ in _NUMBER_DTYPES:
            return raw.view(_NUMBER_DTYPES[type_]).astype(np.float32).reshape(shape)
        from gguf import GGMLQuantizationType, quants  # imported here: it takes a quarter of a second

        rows = raw.reshape(-1, BLOCK_FORMATS[type_].n_bytes(shape[-1:]))
        try:
            values = quants.dequantize(rows, GGMLQuantizationType(int(type_)))
        except (NotImplementedError, ValueError):  # the package has no such routine, or does not know the id
            raise UnsupportedModelError(
                describe(
                    "no dequantization is known for this tensor type",
                    got=type_.name,
                    hint="requantize the model, to Q8_0 or Q4_K_M for example",
                )
            ) from None
        return np.ascontiguousarray(values, np.float32).reshape(shape)
