"""Rows of an embedding matrix as float32, from any format with a kernel: the bits of `gguf`'s dequantization.

The matrix is either as the file holds it, or packed (the copy that a tied output layer multiplies by). A block is
brought into the file's byte order first, then taken apart one element at a time; multiplications, sums and
differences are rounded one by one.

Arguments (int64 each):

    0  n_rows
    8  ids: address of i32[n_rows], each in 0 … n_out − 1
    16 weights: address of the matrix
    24 n_in
    32 out: address of f32[n_rows, n_in]
    40 bytes from one row of out to the next
    48 offsets: address of i32[16, block_bytes] (`packing.row_offsets`) if the matrix is packed, else 0

A work item is a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.linear import INLINE, named
from kinetic_core.backends.cpu.simd import (
    CODEBOOKS,
    bits_f32,
    load_bf16,
    load_f16,
    load_f32,
    load_i8,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    stack_bytes,
    store_f32,
    store_i8,
)

_LARGEST_BLOCK = 256


@njit(error_model="numpy")
def _gather_block(weights, row, block, n_blocks, block_bytes, offsets, to):
    """Bring one block of a packed row into the file's byte order."""
    n_tail = 0
    for k in range(block_bytes):
        n_tail += load_i32(offsets + 4 * k) < 0
    tail_bytes = 16 * n_tail
    main_bytes = 16 * block_bytes - tail_bytes
    group = weights + (row // 16) * ((16 * n_blocks * block_bytes + 63) // 64 * 64)
    main = group + block * main_bytes
    tail = group + n_blocks * main_bytes + block * tail_bytes
    table = offsets + (row % 16) * 4 * block_bytes
    for k in range(block_bytes):
        offset = load_i32(table + 4 * k)
        store_i8(to + k, load_i8(main + offset if offset >= 0 else tail - 1 - offset))


def _embedding(dequantize: Any, block_inputs: int, block_bytes: int) -> Any:
    """The compiled walk over rows and blocks; `dequantize(block address, out address)` does one block."""

    def run(args, begin, end):
        ids, weights, n_in = load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        out, out_stride, offsets = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
        scratch = stack_bytes(_LARGEST_BLOCK)
        n_blocks = n_in // block_inputs
        for item in range(begin, end):
            row = load_i32(ids + 4 * item)
            for block in range(n_blocks):
                source = weights + (row * n_blocks + block) * block_bytes
                if offsets != 0:
                    source = scratch
                    _gather_block(weights, row, block, n_blocks, block_bytes, offsets, scratch)
                dequantize(source, out + item * out_stride + 4 * block_inputs * block)

    return named(run, dequantize.py_func.__name__)


@njit(**INLINE)
def _copy_f32(block, out):
    store_f32(out, load_f32(block))


@njit(**INLINE)
def _copy_f16(block, out):
    store_f32(out, load_f16(block))


@njit(**INLINE)
def _copy_bf16(block, out):
    store_f32(out, load_bf16(block))


@njit(error_model="numpy")
def _q8_0(block, out):
    d = load_f16(block)
    for k in range(32):
        store_f32(out + 4 * k, np.float32(load_i8(block + 2 + k)) * d)


@njit(error_model="numpy")
def _q4_0(block, out):
    d = load_f16(block)
    for k in range(16):
        q = load_u8(block + 2 + k)
        store_f32(out + 4 * k, d * np.float32((q & 15) - 8))
        store_f32(out + 64 + 4 * k, d * np.float32((q >> 4) - 8))


@njit(error_model="numpy")
def _q4_1(block, out):
    d, m = load_f16(block), load_f16(block + 2)
    for k in range(16):
        q = load_u8(block + 4 + k)
        store_f32(out + 4 * k, d * np.float32(q & 15) + m)
        store_f32(out + 64 + 4 * k, d * np.float32(q >> 4) + m)


@njit(error_model="numpy")
def _q5_0(block, out):
    d, bits = load_f16(block), load_u32(block + 2)
    for k in range(16):
        q = load_u8(block + 6 + k)
        store_f32(out + 4 * k, d * np.float32(((q & 15) | (((bits >> k) & 1) << 4)) - 16))
        store_f32(out + 64 + 4 * k, d * np.float32(((q >> 4) | (((bits >> (k + 16)) & 1) << 4)) - 16))


@njit(error_model="numpy")
def _q5_1(block, out):
    d, m, bits = load_f16(block), load_f16(block + 2), load_u32(block + 4)
    for k in range(16):
        q = load_u8(block + 8 + k)
        store_f32(out + 4 * k, d * np.float32((q & 15) | (((bits >> k) & 1) << 4)) + m)
        store_f32(out + 64 + 4 * k, d * np.float32((q >> 4) | (((bits >> (k + 16)) & 1) << 4)) + m)


_IQ4_NL_LEVELS = np.array(CODEBOOKS[0], np.float32)
_MXFP4_LEVELS = np.array(CODEBOOKS[1], np.float32)


@njit(error_model="numpy")
def _iq4_nl(block, out):
    d = load_f16(block)
    for k in range(16):
        q = load_u8(block + 2 + k)
        store_f32(out + 4 * k, d * _IQ4_NL_LEVELS[q & 15])
        store_f32(out + 64 + 4 * k, d * _IQ4_NL_LEVELS[q >> 4])


@njit(error_model="numpy")
def _mxfp4(block, out):
    e = load_u8(block)
    d = bits_f32((e - 1) << 23 if e >= 2 else 0x200000 << e)
    for k in range(16):
        q = load_u8(block + 1 + k)
        store_f32(out + 4 * k, d * _MXFP4_LEVELS[q & 15])
        store_f32(out + 64 + 4 * k, d * _MXFP4_LEVELS[q >> 4])


@njit(error_model="numpy")
def _q2_k(block, out):
    d, dmin = load_f16(block + 80), load_f16(block + 82)
    for sub in range(16):
        scale = load_u8(block + sub)
        factor, minimum = d * np.float32(scale & 15), dmin * np.float32(scale >> 4)
        q, shift = block + 16 + 32 * (sub >> 3) + 16 * (sub & 1), sub & 6
        for k in range(16):
            value = np.float32((load_u8(q + k) >> shift) & 3)
            store_f32(out + 64 * sub + 4 * k, factor * value - minimum)


@njit(error_model="numpy")
def _q3_k(block, out):
    d = load_f16(block + 108)
    for sub in range(16):
        low = load_u8(block + 96 + (sub & 7)) >> (4 * (sub >> 3))
        high = load_u8(block + 104 + (sub & 3)) >> (2 * (sub >> 2))
        factor = d * np.float32(((low & 15) | ((high & 3) << 4)) - 32)
        q, shift = block + 32 + 32 * (sub >> 3) + 16 * (sub & 1), sub & 6
        mask = block + 16 * (sub & 1)
        for k in range(16):
            bit = (load_u8(mask + k) >> (sub >> 1)) & 1
            value = np.float32(((load_u8(q + k) >> shift) & 3) - 4 * (1 - bit))
            store_f32(out + 64 * sub + 4 * k, factor * value)


@njit(error_model="numpy")
def _six_bits(scales, sub, at):
    """A 6-bit number of sub-block `sub` of Q4_K and Q5_K: the scale (at = 0) or the minimum (at = 1)."""
    if sub < 4:
        return load_u8(scales + 4 * at + sub) & 63
    low = (load_u8(scales + 4 + sub) >> (4 * at)) & 15
    return low | ((load_u8(scales + 4 * at + sub - 4) >> 6) << 4)


@njit(error_model="numpy")
def _q4_k(block, out):
    d, dmin = load_f16(block), load_f16(block + 2)
    for sub in range(8):
        factor = d * np.float32(_six_bits(block + 4, sub, 0))
        offset = dmin * np.float32(_six_bits(block + 4, sub, 1))
        q, shift = block + 16 + 32 * (sub >> 1), 4 * (sub & 1)
        for k in range(32):
            value = np.float32((load_u8(q + k) >> shift) & 15)
            store_f32(out + 128 * sub + 4 * k, factor * value - offset)


@njit(error_model="numpy")
def _q5_k(block, out):
    d, dmin = load_f16(block), load_f16(block + 2)
    for sub in range(8):
        factor = d * np.float32(_six_bits(block + 4, sub, 0))
        offset = dmin * np.float32(_six_bits(block + 4, sub, 1))
        q, shift = block + 48 + 32 * (sub >> 1), 4 * (sub & 1)
        for k in range(32):
            fifth = (load_u8(block + 16 + k) >> sub) & 1
            value = np.float32(((load_u8(q + k) >> shift) & 15) | (fifth << 4))
            store_f32(out + 128 * sub + 4 * k, factor * value - offset)


@njit(error_model="numpy")
def _q6_k(block, out):
    d = load_f16(block + 208)
    for sub in range(16):
        factor = d * np.float32(load_i8(block + 192 + sub))
        part, stream = sub >> 3, (sub >> 1) & 3
        low = block + 64 * part + 32 * (stream & 1) + 16 * (sub & 1)
        high = block + 128 + 32 * part + 16 * (sub & 1)
        for k in range(16):
            nibble = (load_u8(low + k) >> (4 * (stream >> 1))) & 15
            pair = (load_u8(high + k) >> (2 * stream)) & 3
            store_f32(out + 64 * sub + 4 * k, factor * np.float32((nibble | (pair << 4)) - 32))


@njit(error_model="numpy")
def _iq4_xs(block, out):
    d, upper = load_f16(block), load_u16(block + 2)
    for sub in range(8):
        low = (load_u8(block + 4 + (sub >> 1)) >> (4 * (sub & 1))) & 15
        factor = d * np.float32((low | (((upper >> (2 * sub)) & 3) << 4)) - 32)
        for k in range(16):
            q = load_u8(block + 8 + 16 * sub + k)
            store_f32(out + 128 * sub + 4 * k, factor * _IQ4_NL_LEVELS[q & 15])
            store_f32(out + 128 * sub + 64 + 4 * k, factor * _IQ4_NL_LEVELS[q >> 4])


_run_f32 = _embedding(_copy_f32, 1, 4)


@kernel("embedding_f32")
def embedding_f32(args, begin, end):
    """Rows of an F32 matrix as float32."""
    _run_f32(args, begin, end)


_run_f16 = _embedding(_copy_f16, 1, 2)


@kernel("embedding_f16")
def embedding_f16(args, begin, end):
    """Rows of an F16 matrix as float32."""
    _run_f16(args, begin, end)


_run_bf16 = _embedding(_copy_bf16, 1, 2)


@kernel("embedding_bf16")
def embedding_bf16(args, begin, end):
    """Rows of a BF16 matrix as float32."""
    _run_bf16(args, begin, end)


_run_q8_0 = _embedding(_q8_0, 32, 34)


@kernel("embedding_q8_0")
def embedding_q8_0(args, begin, end):
    """Rows of a Q8_0 matrix as float32."""
    _run_q8_0(args, begin, end)


_run_q4_0 = _embedding(_q4_0, 32, 18)


@kernel("embedding_q4_0")
def embedding_q4_0(args, begin, end):
    """Rows of a Q4_0 matrix as float32."""
    _run_q4_0(args, begin, end)


_run_q4_1 = _embedding(_q4_1, 32, 20)


@kernel("embedding_q4_1")
def embedding_q4_1(args, begin, end):
    """Rows of a Q4_1 matrix as float32."""
    _run_q4_1(args, begin, end)


_run_q5_0 = _embedding(_q5_0, 32, 22)


@kernel("embedding_q5_0")
def embedding_q5_0(args, begin, end):
    """Rows of a Q5_0 matrix as float32."""
    _run_q5_0(args, begin, end)


_run_q5_1 = _embedding(_q5_1, 32, 24)


@kernel("embedding_q5_1")
def embedding_q5_1(args, begin, end):
    """Rows of a Q5_1 matrix as float32."""
    _run_q5_1(args, begin, end)


_run_iq4_nl = _embedding(_iq4_nl, 32, 18)


@kernel("embedding_iq4_nl")
def embedding_iq4_nl(args, begin, end):
    """Rows of an IQ4_NL matrix as float32."""
    _run_iq4_nl(args, begin, end)


_run_mxfp4 = _embedding(_mxfp4, 32, 17)


@kernel("embedding_mxfp4")
def embedding_mxfp4(args, begin, end):
    """Rows of an MXFP4 matrix as float32."""
    _run_mxfp4(args, begin, end)


_run_q2_k = _embedding(_q2_k, 256, 84)


@kernel("embedding_q2_k")
def embedding_q2_k(args, begin, end):
    """Rows of a Q2_K matrix as float32."""
    _run_q2_k(args, begin, end)


_run_q3_k = _embedding(_q3_k, 256, 110)


@kernel("embedding_q3_k")
def embedding_q3_k(args, begin, end):
    """Rows of a Q3_K matrix as float32."""
    _run_q3_k(args, begin, end)


_run_q4_k = _embedding(_q4_k, 256, 144)


@kernel("embedding_q4_k")
def embedding_q4_k(args, begin, end):
    """Rows of a Q4_K matrix as float32."""
    _run_q4_k(args, begin, end)


_run_q5_k = _embedding(_q5_k, 256, 176)


@kernel("embedding_q5_k")
def embedding_q5_k(args, begin, end):
    """Rows of a Q5_K matrix as float32."""
    _run_q5_k(args, begin, end)


_run_q6_k = _embedding(_q6_k, 256, 210)


@kernel("embedding_q6_k")
def embedding_q6_k(args, begin, end):
    """Rows of a Q6_K matrix as float32."""
    _run_q6_k(args, begin, end)


_run_iq4_xs = _embedding(_iq4_xs, 256, 136)


@kernel("embedding_iq4_xs")
def embedding_iq4_xs(args, begin, end):
    """Rows of an IQ4_XS matrix as float32."""
    _run_iq4_xs(args, begin, end)
