"""Quantization of activations: float32 rows to signed bytes with one scale per block.

Two layouts, named by their block length. Rows lie in tiles of 16 (`TILE_ROWS`), so that a linear kernel reaches the
same block of 16 rows at constant offsets: block b of row r begins at

    (r // 16) * n_blocks * TILE + b * TILE + (r % 16) * BLOCK

with `BLOCK_256_BYTES` and `TILE_256_BYTES`, or `BLOCK_32_BYTES` and `TILE_32_BYTES`. (A tile's block is padded by one
cache line, else the blocks of a lone row would all meet in a few sets of the cache.) `quantized_bytes` gives the size
of a buffer; kernels may read, but never use, the rows of the last tile that nobody wrote.

In a block with largest magnitude `amax`, scale d = amax / 127 and each q = round_half_even(x * (127 / amax)), so
−127 ≤ q ≤ 127; products and quotients are rounded to float32 one by one. A block with amax below `TINY` is all zeros.
A block that holds a NaN or an infinity has d = NaN and zeros, so that every output that reads it is NaN.

`q8_256`, 384 bytes per 256 inputs:

    0    i8[256]   q
    256  i16[8]    sums of 32 q, in the order 0 2 1 3 4 6 5 7 (pairs of sub-blocks as Q4_K's packed minimums meet them)
    272  i16[16]   sums of 16 q
    304  f32       d
    308            padding
    320  i32[16]   −32 times the sums of 16 q

`q8_32`, 52 bytes per 32 inputs:

    0    i8[32]    q
    32   f32       d
    36   f32       d * sum of q
    40   i32       −8 * sum of q
    44   i32       −16 * sum of q
    48   i32       −128 * sum of q

Arguments of the kernels (int64 each): n_rows (not read), x address (f32[n_in] rows), x row stride in bytes,
destination address, unused, n_in. A work item is a row.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import (
    BLOCK_32_BYTES,
    BLOCK_256_BYTES,
    TILE_32_BYTES,
    TILE_256_BYTES,
    TILE_ROWS,
)
from kinetic_core.backends.cpu.simd import (
    and_,
    bitcast_i32,
    bits_f32,
    hmax,
    hsum,
    load_i64,
    load_vf,
    max_,
    mul,
    round_to_i32,
    splat_f32,
    splat_i32,
    store_f32,
    store_i16,
    store_i32,
    store_vi_i8,
    zero_bytes,
    zero_i32,
)

SUMS_32_AT, SUMS_16_AT, SCALE_256_AT, BIAS_32_AT = 256, 272, 304, 320
SCALE_32_AT, SCALED_SUM_AT, BIAS_8_AT, BIAS_16_AT, BIAS_128_AT = 32, 36, 40, 44, 48

#: A block whose largest magnitude is below this counts as zero: 127 / amax would overflow for far smaller ones.
TINY = np.float32(1e-30)
_INFINITY_BITS, _NAN_BITS, _MAGNITUDE = 0x7F800000, 0x7FC00000, 0x7FFFFFFF


@njit(error_model="numpy")
def _largest_bits(x, n_vectors):
    """The bits of the largest magnitude of 16 * n_vectors float32; NaN is larger than all."""
    largest = zero_i32()
    for k in range(n_vectors):
        largest = max_(largest, and_(bitcast_i32(load_vf(x + 64 * k)), splat_i32(_MAGNITUDE)))
    return hmax(largest)


@njit(error_model="numpy")
def _sixteen(x, inverse, to):
    """Quantize 16 inputs; their sum."""
    q = round_to_i32(mul(load_vf(x), splat_f32(inverse)))
    store_vi_i8(to, q)
    return hsum(q)


@kernel("quantize_q8_256")
def quantize_q8_256(args, begin, end):
    """Rows to `q8_256`; n_in is a multiple of 256."""
    x, x_stride = load_i64(args + 8), load_i64(args + 16)
    to, n_in = load_i64(args + 24), load_i64(args + 40)
    for row in range(begin, end):
        first_block = to + (row // TILE_ROWS) * (n_in // 256) * TILE_256_BYTES + (row % TILE_ROWS) * BLOCK_256_BYTES
        for block in range(n_in // 256):
            source = x + row * x_stride + 1024 * block
            target = first_block + TILE_256_BYTES * block
            bits = _largest_bits(source, 16)
            amax = bits_f32(bits)
            if bits >= _INFINITY_BITS or amax < TINY:
                zero_bytes(target, BLOCK_256_BYTES)
                if bits >= _INFINITY_BITS:
                    store_f32(target + SCALE_256_AT, bits_f32(_NAN_BITS))
                continue
            inverse = np.float32(127.0) / amax
            store_f32(target + SCALE_256_AT, amax / np.float32(127.0))
            for sub in range(8):
                first = _sixteen(source + 128 * sub, inverse, target + 32 * sub)
                second = _sixteen(source + 128 * sub + 64, inverse, target + 32 * sub + 16)
                store_i16(target + SUMS_16_AT + 4 * sub, first)
                store_i16(target + SUMS_16_AT + 4 * sub + 2, second)
                store_i32(target + BIAS_32_AT + 8 * sub, -32 * first)
                store_i32(target + BIAS_32_AT + 8 * sub + 4, -32 * second)
                swapped = (sub & 4) | ((sub & 1) << 1) | ((sub & 2) >> 1)
                store_i16(target + SUMS_32_AT + 2 * swapped, first + second)


@kernel("quantize_q8_32")
def quantize_q8_32(args, begin, end):
    """Rows to `q8_32`; n_in is a multiple of 32."""
    x, x_stride = load_i64(args + 8), load_i64(args + 16)
    to, n_in = load_i64(args + 24), load_i64(args + 40)
    for row in range(begin, end):
        first_block = to + (row // TILE_ROWS) * (n_in // 32) * TILE_32_BYTES + (row % TILE_ROWS) * BLOCK_32_BYTES
        for block in range(n_in // 32):
            source = x + row * x_stride + 128 * block
            target = first_block + TILE_32_BYTES * block
            bits = _largest_bits(source, 2)
            amax = bits_f32(bits)
            if bits >= _INFINITY_BITS or amax < TINY:
                zero_bytes(target, BLOCK_32_BYTES)
                if bits >= _INFINITY_BITS:
                    store_f32(target + SCALE_32_AT, bits_f32(_NAN_BITS))
                    store_f32(target + SCALED_SUM_AT, bits_f32(_NAN_BITS))
                continue
            inverse = np.float32(127.0) / amax
            scale = amax / np.float32(127.0)
            total = _sixteen(source, inverse, target) + _sixteen(source + 64, inverse, target + 16)
            store_f32(target + SCALE_32_AT, scale)
            store_f32(target + SCALED_SUM_AT, scale * np.float32(total))
            store_i32(target + BIAS_8_AT, -8 * total)
            store_i32(target + BIAS_16_AT, -16 * total)
            store_i32(target + BIAS_128_AT, -128 * total)
