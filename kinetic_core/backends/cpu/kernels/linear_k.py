"""Linear kernels of the K-quants: blocks of 256 inputs, activations `q8_256`."""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.linear import HALVES, INLINE, tile_runner
from kinetic_core.backends.cpu.kernels.quantize import (
    BIAS_32_AT,
    BLOCK_256_BYTES,
    SCALE_256_AT,
    SUMS_16_AT,
    SUMS_32_AT,
    TILE_256_BYTES,
)
from kinetic_core.backends.cpu.simd import (
    PART_STEPS,
    and_,
    as_pairs,
    byte_scale,
    dot_nibbles,
    dot_q6_k,
    dot_with_plane,
    load_wf_f16,
    load_wi,
    neg,
    or_,
    parts_start,
    parts_zero,
    prefetch_weights,
    rows_fma_scaled,
    rows_madd,
    rows_store,
    rows_to_f32,
    rows_zero_f32,
    rows_zero_i32,
    shl,
    shr,
    signed_byte_scale,
    splat_wi,
    static,
    sums_add,
    sums_sub_pairs,
    sums_to_f32,
    sums_zero,
    unpack_even_i8,
    unpack_odd_i8,
)

#: Bytes from one row of a tile of activations to the next.
ROW = BLOCK_256_BYTES

#: Bytes of a half of 16 lanes of 4 and of 2 bytes.
HALF_4, HALF_2 = 64 // HALVES, 32 // HALVES

Q4_K_BYTES, Q4_K_MAIN = 144, 16 * 144


@njit(**INLINE)
def _six_bit_scales(w):
    """The scales and minimums 0-3 and 4-7 of Q4_K and Q5_K as bytes of lanes, from three packed vectors at `w`."""
    first, second, third = load_wi(w), load_wi(w + 64), load_wi(w + 128)
    six, four, two = splat_wi(0x3F3F3F3F), splat_wi(0x0F0F0F0F), splat_wi(0x03030303)
    high_scales = or_(and_(third, four), shl(and_(shr(first, 6), two), 4))
    high_minimums = or_(and_(shr(third, 4), four), shl(and_(shr(second, 6), two), 4))
    return and_(first, six), high_scales, and_(second, six), high_minimums


@njit(**INLINE)
def _add_minimums(totals, minimums, x):
    """totals + four minimums (bytes of lanes) times the sums of 32 activations at `x`."""
    even = splat_wi(0x00FF00FF)
    totals = rows_madd(totals, as_pairs(and_(minimums, even)), x, ROW)
    return rows_madd(totals, as_pairs(and_(shr(minimums, 8), even)), x + 4, ROW)


@njit(**INLINE)
def _q4_k_half(rows, scales, q, x):
    """Exact sums of 128 inputs: four sub-blocks of 32.

    A part is at most 32 * 15 * 127 = 60960; times a scale of at most 63, four of them stay below 2**24 (15361920).
    In 16 bits: 8 steps of 2 * 15 * 127 = 30480.
    """
    parts = dot_nibbles(parts_zero(rows), q, x, ROW, 8, 0)
    sums = sums_add(sums_zero(rows), parts, byte_scale(scales, 0))
    parts = dot_nibbles(parts_zero(rows), q, x + 32, ROW, 8, 4)
    sums = sums_add(sums, parts, byte_scale(scales, 1))
    parts = dot_nibbles(parts_zero(rows), q + 512, x + 64, ROW, 8, 0)
    sums = sums_add(sums, parts, byte_scale(scales, 2))
    parts = dot_nibbles(parts_zero(rows), q + 512, x + 96, ROW, 8, 4)
    return sums_add(sums, parts, byte_scale(scales, 3))


@njit(error_model="numpy")
def _q4_k_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S for the first 128 inputs, then the last 128, then acc += (−dmin dx) M; all fma."""
    acc = rows_zero_f32(rows)
    w, halves = weights + HALF_4 * half, weights + HALF_2 * half
    for _ in range(n_blocks):
        scales, next_scales, low_minimums, high_minimums = _six_bit_scales(w + 64)
        d, negative_dmin = load_wf_f16(halves), neg(load_wf_f16(halves + 32))
        for part in range(2):
            sums = _q4_k_half(rows, scales, w + 256 + 1024 * part, x + 128 * part)
            acc = rows_fma_scaled(acc, d, x + SCALE_256_AT, ROW, sums_to_f32(sums))
            scales = next_scales
        totals = _add_minimums(rows_zero_i32(rows), low_minimums, x + SUMS_32_AT)
        totals = _add_minimums(totals, high_minimums, x + SUMS_32_AT + 8)
        acc = rows_fma_scaled(acc, negative_dmin, x + SCALE_256_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, Q4_K_MAIN)
        w += Q4_K_MAIN
        halves += Q4_K_MAIN
        x += TILE_256_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q4_k = tile_runner(_q4_k_tile, 256, Q4_K_BYTES, BLOCK_256_BYTES, TILE_256_BYTES)


@kernel("linear_q4_k")
def linear_q4_k(args, begin, end):
    """x · W for Q4_K weights; activations `q8_256`. Arguments and work items: see `linear`."""
    _run_q4_k(args, begin, end)


Q6_K_BYTES, Q6_K_MAIN = 210, 16 * 208

#: Whether parts take the four steps of a sub-block of 16 inputs of 6-bit weights, or (AVX2) two at a time.
_WHOLE_SUB_BLOCKS = PART_STEPS[6] >= 4

#: Whether parts take the eight steps of a sub-block of 32 inputs of 5-bit weights, or (AVX2) four at a time.
_LONG_5_BIT_RUNS = PART_STEPS[5] >= 8


@njit(**INLINE)
def _q6_k_stream(rows, acc, d, first_scale, second_scale, pairs, low, high, x, sub, x_block, stream):
    """One stream of 32 inputs (two sub-blocks of 16) of a half block: acc += (d dx) (s0 P0 + s1 P1), fma.

    P = sum of (q − 32) * activation is at most 16 * 32 * 127 = 65024 in magnitude; times a scale of at most 128, two
    of them stay below 2**24 (16646144). In 16 bits: 2 steps of 2 * 63 * 127 = 32004.
    pairs: the two scales times 32, as int16; sub: the number of the first sub-block, 0 to 14.
    """
    bias = x_block + BIAS_32_AT + 4 * sub
    if _WHOLE_SUB_BLOCKS:
        parts = dot_q6_k(parts_start(rows, bias, ROW), low, high, x, ROW, 0, 4, stream)
        sums = sums_add(sums_zero(rows), parts, first_scale)
        parts = dot_q6_k(parts_start(rows, bias + 4, ROW), low, high, x + 16, ROW, 4, 4, stream)
        sums = sums_add(sums, parts, second_scale)
    else:
        sums = sums_add(sums_zero(rows), dot_q6_k(parts_zero(rows), low, high, x, ROW, 0, 2, stream), first_scale)
        sums = sums_add(sums, dot_q6_k(parts_zero(rows), low, high, x + 8, ROW, 2, 2, stream), first_scale)
        sums = sums_add(sums, dot_q6_k(parts_zero(rows), low, high, x + 16, ROW, 4, 2, stream), second_scale)
        sums = sums_add(sums, dot_q6_k(parts_zero(rows), low, high, x + 24, ROW, 6, 2, stream), second_scale)
        sums = sums_sub_pairs(sums, pairs, x_block + SUMS_16_AT + 2 * sub, ROW)
    return rows_fma_scaled(acc, d, x_block + SCALE_256_AT, ROW, sums_to_f32(sums))


@njit(error_model="numpy")
def _q6_k_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block, for every 32 inputs in order: acc += (d dx) S, fma."""
    acc = rows_zero_f32(rows)
    w = weights + HALF_4 * half
    tail = weights + Q6_K_MAIN * n_blocks + HALF_2 * half
    for _ in range(n_blocks):
        d = load_wf_f16(tail)
        for part in range(2):
            low, high = w + 256 + 1024 * part, w + 2304 + 512 * part
            y, sub = x + 128 * part, 8 * part
            s = load_wi(w + 128 * part)
            p0, p1 = shl(unpack_even_i8(s), 5), shl(unpack_odd_i8(s), 5)
            s0, s1, s2, s3 = (
                signed_byte_scale(s, 0),
                signed_byte_scale(s, 2),
                signed_byte_scale(s, 1),
                signed_byte_scale(s, 3),
            )
            acc = _q6_k_stream(rows, acc, d, s0, s1, p0, low, high, y, sub, x, static(0))
            acc = _q6_k_stream(rows, acc, d, s2, s3, p1, low, high, y + 32, sub + 2, x, static(1))
            s = load_wi(w + 128 * part + 64)
            p0, p1 = shl(unpack_even_i8(s), 5), shl(unpack_odd_i8(s), 5)
            s0, s1, s2, s3 = (
                signed_byte_scale(s, 0),
                signed_byte_scale(s, 2),
                signed_byte_scale(s, 1),
                signed_byte_scale(s, 3),
            )
            acc = _q6_k_stream(rows, acc, d, s0, s1, p0, low, high, y + 64, sub + 4, x, static(2))
            acc = _q6_k_stream(rows, acc, d, s2, s3, p1, low, high, y + 96, sub + 6, x, static(3))
        prefetch_weights(w, Q6_K_MAIN)
        w += Q6_K_MAIN
        tail += 32
        x += TILE_256_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


# Taller tiles spill here: measured no faster with AVX-512.
_run_q6_k = tile_runner(_q6_k_tile, 256, Q6_K_BYTES, BLOCK_256_BYTES, TILE_256_BYTES, tall_rows=4)


@kernel("linear_q6_k")
def linear_q6_k(args, begin, end):
    """x · W for Q6_K weights; activations `q8_256`. Arguments and work items: see `linear`."""
    _run_q6_k(args, begin, end)


Q5_K_BYTES, Q5_K_MAIN = 176, 16 * 176


@njit(**INLINE)
def _q5_k_sub_block(rows, sums, scale, q, bits, x, shift, bit):
    """sums + scale * (q · x) of 32 inputs; in 16 bits: 4 steps of 2 * 31 * 127 = 31496."""
    if _LONG_5_BIT_RUNS:
        parts = dot_with_plane(parts_zero(rows), q, shift, static(15), bits, bit, static(16), x, ROW, 0, 8)
        return sums_add(sums, parts, scale)
    parts = dot_with_plane(parts_zero(rows), q, shift, static(15), bits, bit, static(16), x, ROW, 0, 4)
    sums = sums_add(sums, parts, scale)
    parts = dot_with_plane(parts_zero(rows), q, shift, static(15), bits, bit, static(16), x + 16, ROW, 4, 4)
    return sums_add(sums, parts, scale)


@njit(**INLINE)
def _q5_k_pair(rows, acc, d, low_scale, high_scale, q, bits, x, x_block, low_bit, high_bit):
    """Two sub-blocks of 32 inputs that share bytes: acc += (d dx) S, fma.

    A part is at most 32 * 31 * 127 = 125984; times a scale of at most 63, two stay below 2**24 (15873984).
    """
    sums = _q5_k_sub_block(rows, sums_zero(rows), low_scale, q, bits, x, static(0), low_bit)
    sums = _q5_k_sub_block(rows, sums, high_scale, q, bits, x + 32, static(4), high_bit)
    return rows_fma_scaled(acc, d, x_block + SCALE_256_AT, ROW, sums_to_f32(sums))


@njit(error_model="numpy")
def _q5_k_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S for every 64 inputs in order, then acc += (−dmin dx) M; all fma."""
    acc = rows_zero_f32(rows)
    w, halves = weights + HALF_4 * half, weights + HALF_2 * half
    for _ in range(n_blocks):
        s, t, low_minimums, high_minimums = _six_bit_scales(w + 64)
        d, negative_dmin = load_wf_f16(halves), neg(load_wf_f16(halves + 32))
        bits, q = w + 256, w + 768
        s0, s1, s2, s3 = byte_scale(s, 0), byte_scale(s, 1), byte_scale(s, 2), byte_scale(s, 3)
        acc = _q5_k_pair(rows, acc, d, s0, s1, q, bits, x, x, static(-4), static(-3))
        acc = _q5_k_pair(rows, acc, d, s2, s3, q + 512, bits, x + 64, x, static(-2), static(-1))
        s0, s1, s2, s3 = byte_scale(t, 0), byte_scale(t, 1), byte_scale(t, 2), byte_scale(t, 3)
        acc = _q5_k_pair(rows, acc, d, s0, s1, q + 1024, bits, x + 128, x, static(0), static(1))
        acc = _q5_k_pair(rows, acc, d, s2, s3, q + 1536, bits, x + 192, x, static(2), static(3))
        totals = _add_minimums(rows_zero_i32(rows), low_minimums, x + SUMS_32_AT)
        totals = _add_minimums(totals, high_minimums, x + SUMS_32_AT + 8)
        acc = rows_fma_scaled(acc, negative_dmin, x + SCALE_256_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, Q5_K_MAIN)
        w += Q5_K_MAIN
        halves += Q5_K_MAIN
        x += TILE_256_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q5_k = tile_runner(_q5_k_tile, 256, Q5_K_BYTES, BLOCK_256_BYTES, TILE_256_BYTES)


@kernel("linear_q5_k")
def linear_q5_k(args, begin, end):
    """x · W for Q5_K weights; activations `q8_256`. Arguments and work items: see `linear`."""
    _run_q5_k(args, begin, end)
