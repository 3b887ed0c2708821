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
    load_wf_f16,
    load_wi,
    neg,
    or_,
    parts_start,
    parts_zero,
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
    low, high = dot_nibbles(parts_zero(rows), parts_zero(rows), q, x, ROW, 8, 32)
    sums = sums_add(sums_zero(rows), low, byte_scale(scales, 0))
    sums = sums_add(sums, high, byte_scale(scales, 1))
    low, high = dot_nibbles(parts_zero(rows), parts_zero(rows), q + 512, x + 64, ROW, 8, 32)
    sums = sums_add(sums, low, byte_scale(scales, 2))
    return sums_add(sums, high, byte_scale(scales, 3))


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


@njit(**INLINE)
def _q6_k_sub_block(rows, sums, scale, low, high, shift, x, bias, stream):
    """sums + scale * (q · x) of 16 inputs; q − 32 where parts begin with the bias, else q. 4 steps or 2 and 2."""
    if _WHOLE_SUB_BLOCKS:
        parts = parts_start(rows, bias, ROW)
        return sums_add(sums, dot_q6_k(parts, low, high, shift, x, ROW, 0, 4, stream), scale)
    parts = dot_q6_k(parts_zero(rows), low, high, shift, x, ROW, 0, 2, stream)
    sums = sums_add(sums, parts, scale)
    parts = dot_q6_k(parts_zero(rows), low, high, shift, x + 8, ROW, 2, 2, stream)
    return sums_add(sums, parts, scale)


@njit(**INLINE)
def _q6_k_stream(rows, acc, d, first_scale, second_scale, pairs, low, high, shift, x, sub, x_block, stream):
    """One stream of 32 inputs (two sub-blocks of 16) of a half block: acc += (d dx) (s0 P0 + s1 P1), fma.

    P = sum of (q − 32) * activation is at most 16 * 32 * 127 = 65024 in magnitude; times a scale of at most 128, two
    of them stay below 2**24 (16646144). In 16 bits: 2 steps of 2 * 63 * 127 = 32004.
    pairs: the two scales times 32, as int16; sub: the number of the first sub-block, 0 to 14.
    """
    bias = x_block + BIAS_32_AT + 4 * sub
    sums = _q6_k_sub_block(rows, sums_zero(rows), first_scale, low, high, shift, x, bias, stream)
    sums = _q6_k_sub_block(rows, sums, second_scale, low + 256, high + 256, shift, x + 16, bias + 4, stream)
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
        for quarter in range(4):
            # Quarters 0 and 1 are the low and the high nibbles of the first 128 inputs, 2 and 3 of the others.
            low, high = w + 256 + 1024 * (quarter >> 1), w + 2304 + 512 * (quarter >> 1)
            shift, y, sub = 4 * (quarter & 1), x + 64 * quarter, 4 * quarter
            words = load_wi(w + 64 * quarter)
            pairs = shl(unpack_even_i8(words), 5)
            s0, s1 = signed_byte_scale(words, 0), signed_byte_scale(words, 2)
            acc = _q6_k_stream(rows, acc, d, s0, s1, pairs, low, high, shift, y, sub, x, static(0))
            pairs = shl(unpack_odd_i8(words), 5)
            s0, s1 = signed_byte_scale(words, 1), signed_byte_scale(words, 3)
            acc = _q6_k_stream(rows, acc, d, s0, s1, pairs, low, high, shift, y + 32, sub + 2, x, static(1))
        w += Q6_K_MAIN
        tail += 32
        x += TILE_256_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q6_k = tile_runner(_q6_k_tile, 256, Q6_K_BYTES, BLOCK_256_BYTES, TILE_256_BYTES)


@kernel("linear_q6_k")
def linear_q6_k(args, begin, end):
    """x · W for Q6_K weights; activations `q8_256`. Arguments and work items: see `linear`."""
    _run_q6_k(args, begin, end)
