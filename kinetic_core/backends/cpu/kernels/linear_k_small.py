"""Linear kernels of Q2_K, Q3_K and IQ4_XS: blocks of 256 inputs, activations `q8_256`."""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.linear import HALVES, INLINE, tile_runner
from kinetic_core.backends.cpu.kernels.quantize import (
    BLOCK_256_BYTES,
    SCALE_256_AT,
    SUMS_16_AT,
    TILE_256_BYTES,
)
from kinetic_core.backends.cpu.simd import (
    and_,
    as_pairs,
    byte_scale,
    dot_bits,
    dot_codebook,
    dot_with_plane,
    load_wf_f16,
    load_wi,
    load_wi_u16,
    mul,
    neg,
    or_,
    parts_zero,
    prefetch_weights,
    rows_fma_scaled,
    rows_madd,
    rows_store,
    rows_sub,
    rows_to_f32,
    rows_zero_f32,
    rows_zero_i32,
    shl,
    shr,
    signed_byte_scale,
    signed_start_pairs,
    splat_wi,
    static,
    sub,
    sums_add,
    sums_to_f32,
    sums_zero,
    to_f32,
    unpack_even_i8,
    unpack_odd_i8,
    xor,
)

#: Bytes from one row of a tile of activations to the next.
ROW = BLOCK_256_BYTES

#: Bytes of a half of 16 lanes of 4 and of 2 bytes.
HALF_4, HALF_2 = 64 // HALVES, 32 // HALVES

Q2_K_BYTES, Q2_K_MAIN = 84, 16 * 84


@njit(**INLINE)
def _q2_k_four(rows, sums, scales, q, x, low_shift, high_shift):
    """sums + scale * (q · x) of four sub-blocks of 16: two bit pairs of 32 bytes, scales in bytes 0 2 1 3."""
    sums = sums_add(sums, dot_bits(parts_zero(rows), q, x, ROW, 4, low_shift, 3), byte_scale(scales, 0))
    sums = sums_add(sums, dot_bits(parts_zero(rows), q + 256, x + 16, ROW, 4, low_shift, 3), byte_scale(scales, 2))
    sums = sums_add(sums, dot_bits(parts_zero(rows), q, x + 32, ROW, 4, high_shift, 3), byte_scale(scales, 1))
    return sums_add(sums, dot_bits(parts_zero(rows), q + 256, x + 48, ROW, 4, high_shift, 3), byte_scale(scales, 3))


@njit(error_model="numpy")
def _q2_k_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, then acc += (−dmin dx) M; both fma.

    A part is at most 16 * 3 * 127 = 6096; times a scale of at most 15, all 16 stay below 2**24 (1463040). In 16 bits: 4
    steps of 2 * 3 * 127 = 762.
    """
    acc = rows_zero_f32(rows)
    w, halves = weights + HALF_4 * half, weights + 1280 + HALF_2 * half
    for _ in range(n_blocks):
        sums, totals = sums_zero(rows), rows_zero_i32(rows)
        for part in range(2):
            q, y = w + 256 + 512 * part, x + 128 * part
            for pair in range(2):
                words = load_wi(w + 128 * part + 64 * pair)
                scales = and_(words, splat_wi(0x0F0F0F0F))
                z, s = y + 64 * pair, x + SUMS_16_AT + 16 * part + 8 * pair
                if pair == 0:
                    sums = _q2_k_four(rows, sums, scales, q, z, static(0), static(2))
                else:
                    sums = _q2_k_four(rows, sums, scales, q, z, static(4), static(6))
                minimums = splat_wi(0x000F000F)
                totals = rows_madd(totals, as_pairs(and_(shr(words, 4), minimums)), s, ROW)
                totals = rows_madd(totals, as_pairs(and_(shr(words, 12), minimums)), s + 4, ROW)
        acc = rows_fma_scaled(acc, load_wf_f16(halves), x + SCALE_256_AT, ROW, sums_to_f32(sums))
        acc = rows_fma_scaled(acc, neg(load_wf_f16(halves + 32)), x + SCALE_256_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, Q2_K_MAIN)
        w += Q2_K_MAIN
        halves += Q2_K_MAIN
        x += TILE_256_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q2_k = tile_runner(_q2_k_tile, 256, Q2_K_BYTES, BLOCK_256_BYTES, TILE_256_BYTES)


@kernel("linear_q2_k")
def linear_q2_k(args, begin, end):
    """x · W for Q2_K weights; activations `q8_256`. Arguments and work items: see `linear`."""
    _run_q2_k(args, begin, end)


Q3_K_BYTES, Q3_K_MAIN = 110, 16 * 108


@njit(**INLINE)
def _q3_k_words(a, b, c):
    """The four words of signed scales (6 bits − 32), from the three packed ones."""
    four, two, offset = splat_wi(0x0F0F0F0F), splat_wi(0x03030303), splat_wi(0x20202020)
    first = or_(and_(a, four), shl(and_(c, two), 4))
    second = or_(and_(b, four), shl(and_(shr(c, 2), two), 4))
    third = or_(and_(shr(a, 4), four), shl(and_(shr(c, 4), two), 4))
    fourth = or_(and_(shr(b, 4), four), shl(and_(shr(c, 6), two), 4))
    return (
        _minus_32(first, offset),
        _minus_32(second, offset),
        _minus_32(third, offset),
        _minus_32(fourth, offset),
    )


@njit(**INLINE)
def _minus_32(scales, offset):
    """Each byte (0 … 63) less 32, as a signed byte: no borrow leaves a byte whose top bit is set first."""
    top = splat_wi(-0x7F7F7F80)
    return xor(sub(or_(scales, top), offset), top)


@njit(**INLINE)
def _q3_k_pair(rows, sums, s0, s1, q, mask, x, shift, bit):
    """sums + scale * (q · x) of two sub-blocks of 16, q of 3 bits (0 … 7)."""
    parts = dot_with_plane(parts_zero(rows), q, shift, static(3), mask, bit, static(4), x, ROW, 0, 4)
    sums = sums_add(sums, parts, s0)
    parts = dot_with_plane(parts_zero(rows), q, shift, static(3), mask, bit, static(4), x + 16, ROW, 4, 4)
    return sums_add(sums, parts, s1)


@njit(**INLINE)
def _q3_k_half(rows, sums, first, second, q, mask, x, b0, b1, b2, b3):
    """sums + scale * (q · x) of 128 inputs; the scales of four sub-blocks are bytes 0 2 1 3 of a word."""
    s0, s1 = signed_byte_scale(first, 0), signed_byte_scale(first, 2)
    sums = _q3_k_pair(rows, sums, s0, s1, q, mask, x, static(0), b0)
    s0, s1 = signed_byte_scale(first, 1), signed_byte_scale(first, 3)
    sums = _q3_k_pair(rows, sums, s0, s1, q, mask, x + 32, static(2), b1)
    s0, s1 = signed_byte_scale(second, 0), signed_byte_scale(second, 2)
    sums = _q3_k_pair(rows, sums, s0, s1, q, mask, x + 64, static(4), b2)
    s0, s1 = signed_byte_scale(second, 1), signed_byte_scale(second, 3)
    return _q3_k_pair(rows, sums, s0, s1, q, mask, x + 96, static(6), b3)


@njit(**INLINE)
def _q3_k_offsets(totals, scales, x):
    """totals + 4 times the scales times the sums of 16 activations, four sub-blocks."""
    totals = rows_madd(totals, shl(unpack_even_i8(scales), 2), x, ROW)
    return rows_madd(totals, shl(unpack_odd_i8(scales), 2), x + 4, ROW)


@njit(error_model="numpy")
def _q3_k_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, fma; S = sum of scale * (q − 4) * activation = T − 4 U.

    T: a part is at most 16 * 7 * 127 = 14224; times a scale of at most 32, all 16 stay below 2**24 (7282688). 4 U is at
    most 16 * 128 * 2032 = 4161536. So T, 4 U and S are exact in float32. In 16 bits: 4 steps of 2 * 7 * 127 = 1778.
    """
    acc = rows_zero_f32(rows)
    w = weights + HALF_4 * half
    tail = weights + Q3_K_MAIN * n_blocks + HALF_2 * half
    for _ in range(n_blocks):
        q, s = w + 512, w + 1536
        a, b, c, d = _q3_k_words(load_wi(s), load_wi(s + 64), load_wi(s + 128))
        sums = sums_zero(rows)
        sums = _q3_k_half(rows, sums, a, b, q, w, x, static(-2), static(-1), static(0), static(1))
        sums = _q3_k_half(rows, sums, c, d, q + 512, w, x + 128, static(2), static(3), static(4), static(5))
        totals = _q3_k_offsets(rows_zero_i32(rows), a, x + SUMS_16_AT)
        totals = _q3_k_offsets(totals, b, x + SUMS_16_AT + 8)
        totals = _q3_k_offsets(totals, c, x + SUMS_16_AT + 16)
        totals = _q3_k_offsets(totals, d, x + SUMS_16_AT + 24)
        value = rows_sub(sums_to_f32(sums), rows_to_f32(totals))
        acc = rows_fma_scaled(acc, load_wf_f16(tail), x + SCALE_256_AT, ROW, value)
        prefetch_weights(w, Q3_K_MAIN)
        w += Q3_K_MAIN
        tail += 32
        x += TILE_256_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q3_k = tile_runner(_q3_k_tile, 256, Q3_K_BYTES, BLOCK_256_BYTES, TILE_256_BYTES)


@kernel("linear_q3_k")
def linear_q3_k(args, begin, end):
    """x · W for Q3_K weights; activations `q8_256`. Arguments and work items: see `linear`."""
    _run_q3_k(args, begin, end)


IQ4_XS_BYTES, IQ4_XS_MAIN = 136, 16 * 136


@njit(error_model="numpy")
def _iq4_xs_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per sub-block of 32: acc += ((d (scale − 32)) dx) S, S = sum of level * activation; fma.

    d times the scale is exact: 11 by 6 bits. Bounds: see `dot_signed_bytes`.
    """
    acc = rows_zero_f32(rows)
    w, halves = weights + HALF_4 * half, weights + HALF_2 * half
    for _ in range(n_blocks):
        d, upper, lower = load_wf_f16(halves), load_wi_u16(halves + 32), load_wi(w + 64)
        for block in range(8):
            low = and_(shr(lower, 4 * block), splat_wi(15))
            high = shl(and_(shr(upper, 2 * block), splat_wi(3)), 4)
            scale = mul(d, to_f32(sub(or_(low, high), splat_wi(32))))
            totals = signed_start_pairs(rows, x + SUMS_16_AT + 4 * block, ROW)
            totals = dot_codebook(totals, w + 128 + 256 * block, x + 32 * block, ROW, 0)
            acc = rows_fma_scaled(acc, scale, x + SCALE_256_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, IQ4_XS_MAIN)
        w += IQ4_XS_MAIN
        halves += IQ4_XS_MAIN
        x += TILE_256_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_iq4_xs = tile_runner(_iq4_xs_tile, 256, IQ4_XS_BYTES, BLOCK_256_BYTES, TILE_256_BYTES)


@kernel("linear_iq4_xs")
def linear_iq4_xs(args, begin, end):
    """x · W for IQ4_XS weights; activations `q8_256`. Arguments and work items: see `linear`."""
    _run_iq4_xs(args, begin, end)
