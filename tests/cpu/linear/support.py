"""Random and worst-case weights of every format, and kernels called by address."""

from __future__ import annotations

import ctypes
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.kernels.constants import (
    BLOCK_32_BYTES,
    BLOCK_256_BYTES,
    TILE_32_BYTES,
    TILE_256_BYTES,
    TILE_ROWS,
    quantized_bytes,
)
from kinetic_core.backends.cpu.kernels.quantize import SCALE_32_AT, SCALE_256_AT
from kinetic_core.backends.cpu.packing import PACKED_TYPES, aligned_bytes, pack, packed_size
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType

FORMATS = sorted(PACKED_TYPES)
QUANTIZED = [type_ for type_ in FORMATS if BLOCK_FORMATS[type_].block_size > 1]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_NATIVE = {GGMLType.F32: np.float32, GGMLType.F16: np.float16}


def call(name: str, arguments: list[int], begin: int, end: int) -> None:
    """Run the work items of a kernel."""
    block = np.array(arguments, np.int64)
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    prototype(kernel_compile.get(name).address)(block.ctypes.data, begin, end)


def address(array: npt.NDArray[Any]) -> int:
    """Where the array's elements lie."""
    return int(array.ctypes.data)


def kind_of(type_: GGMLType) -> str:
    """The layout of activations that a format's kernel reads."""
    return {1: "f32", 32: "q8_32", 256: "q8_256"}[BLOCK_FORMATS[type_].block_size]


def random_weights(type_: GGMLType, n_out: int, n_in: int, seed: int = 0) -> U8:
    """u8[n_out * row_bytes]: every bit random but the scales, which are small and of both signs."""
    rng = np.random.default_rng(seed)
    if type_ is GGMLType.F32:
        return rng.standard_normal((n_out, n_in)).astype(np.float32).view(np.uint8).reshape(-1)
    if type_ is GGMLType.F16:
        return rng.standard_normal((n_out, n_in)).astype(np.float16).view(np.uint8).reshape(-1)
    if type_ is GGMLType.BF16:
        bits = rng.standard_normal((n_out, n_in)).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8).reshape(-1)
    layout = BLOCK_FORMATS[type_]
    blocks = rng.integers(0, 256, (n_out, n_in // layout.block_size, layout.block_bytes), np.uint8)
    return _set_scales(type_, blocks, lambda shape: rng.uniform(-0.02, 0.02, shape)).reshape(-1)


def extreme_weights(type_: GGMLType, n_out: int, n_in: int) -> U8:
    """u8[n_out * row_bytes] with all bits of row r's integers equal to those of one byte: 0x00, 0xFF, 0x80, 0x7F, …"""
    layout = BLOCK_FORMATS[type_]
    patterns = np.array([0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0, 0x3F, 0xC0, 0x88, 0x77], np.uint8)
    blocks = np.empty((n_out, n_in // layout.block_size, layout.block_bytes), np.uint8)
    blocks[:] = patterns[np.arange(n_out) % len(patterns)][:, None, None]
    return _set_scales(type_, blocks, lambda shape: np.full(shape, 0.5)).reshape(-1)


def _set_scales(type_: GGMLType, blocks: U8, values: Any) -> U8:
    at = 0
    for field in BLOCK_FORMATS[type_].fields:
        where = blocks[..., at : at + field.n_bytes]
        if field.dtype == "<f2":
            where[:] = values((*blocks.shape[:2], field.count)).astype(np.float16).view(np.uint8)
        elif type_ is GGMLType.MXFP4 and field.name == "e":
            where[:] = 118 + where % 7
        at += field.n_bytes
    return blocks


def dequantized(type_: GGMLType, weights: U8, n_out: int) -> F32:
    """f32[n_out, n_in] by the `gguf` package."""
    rows = weights.reshape(n_out, -1).view(_NATIVE.get(type_, np.uint8))
    kind = gguf.GGMLQuantizationType(int(type_))
    with np.errstate(over="ignore"):  # MXFP4's largest exponent
        return np.asarray(gguf.quants.dequantize(rows, kind), np.float32)


def packed(type_: GGMLType, weights: U8, n_out: int, n_in: int) -> U8:
    """The packed matrix."""
    target = aligned_bytes(packed_size(type_, n_out, n_in))
    pack(type_, weights, n_out, n_in, target)
    return target


def quantize(kind: str, x: F32) -> U8:
    """The rows as a kernel reads them; what no kernel may use is filled with ones."""
    n_rows, n_in = x.shape
    if kind == "f32":
        return np.ascontiguousarray(x).view(np.uint8).reshape(-1)
    target = aligned_bytes(quantized_bytes(kind, n_in, n_rows))
    target[:] = 0xFF
    call(f"quantize_{kind}", [n_rows, address(x), x.strides[0], address(target), 0, n_in], 0, n_rows)
    return target


def row_blocks(kind: str, quantized: U8, n_rows: int, n_in: int) -> U8:
    """u8[n_rows, n_blocks, block_bytes] of quantized rows."""
    size, n_bytes, tile = (256, BLOCK_256_BYTES, TILE_256_BYTES)
    if kind == "q8_32":
        size, n_bytes, tile = (32, BLOCK_32_BYTES, TILE_32_BYTES)
    tiles = quantized.reshape(-1, n_in // size, tile)[:, :, : TILE_ROWS * n_bytes]
    rows = tiles.reshape(-1, n_in // size, TILE_ROWS, n_bytes).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(rows.reshape(-1, n_in // size, n_bytes)[:n_rows])


def dequantized_rows(kind: str, quantized: U8, x: F32) -> F64:
    """f64[n_rows, n_in]: the values that quantized rows stand for."""
    if kind == "f32":
        return x.astype(np.float64)
    size, at = (256, SCALE_256_AT) if kind == "q8_256" else (32, SCALE_32_AT)
    blocks = row_blocks(kind, quantized, *x.shape)
    scale = blocks[..., at : at + 4].copy().view(np.float32).astype(np.float64)
    return (blocks[..., :size].view(np.int8) * scale).reshape(x.shape)


class Linear:
    """A packed matrix and its kernel."""

    def __init__(self, type_: GGMLType, weights: U8, n_out: int, n_in: int) -> None:
        self.type, self.n_out, self.n_in = type_, n_out, n_in
        self.matrix = packed(type_, weights, n_out, n_in)

    def __call__(self, quantized: U8, n_rows: int, pad: int = 3) -> F32:
        """f32[n_rows, n_out]; checks that nothing beyond that was written."""
        out = np.full((n_rows + 17, self.n_out + pad), np.nan, np.float32)
        arguments = [n_rows, address(quantized), 4 * self.n_in, address(self.matrix), self.n_in, self.n_out]
        groups = -(-self.n_out // 16)
        for group in range(groups):  # one by one and backwards: items are independent
            item = groups - 1 - group
            call(f"linear_{self.type.name.lower()}", [*arguments, address(out), out.strides[0]], item, item + 1)
        assert np.isnan(out[n_rows:]).all()
        assert np.isnan(out[:, self.n_out :]).all()
        return out[:n_rows, : self.n_out].copy()
