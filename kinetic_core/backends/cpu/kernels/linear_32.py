"""Linear kernels of the formats with blocks of 32 inputs: activations `q8_32`."""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.linear import HALVES, INLINE, tile_runner
from kinetic_core.backends.cpu.kernels.quantize import (
    BIAS_8_AT,
    BIAS_16_AT,
    BIAS_128_AT,
    BLOCK_32_BYTES,
    SCALE_32_AT,
    SCALED_SUM_AT,
    TILE_32_BYTES,
)
from kinetic_core.backends.cpu.simd import (
    dot_codebook,
    dot_fifth_bits,
    dot_nibbles_joined,
    dot_signed_bytes,
    load_wf_f16,
    load_wf_half_e8m0,
    load_wi,
    parts_zero,
    prefetch_weights,
    rows_fma,
    rows_fma_scaled,
    rows_store,
    rows_to_f32,
    rows_zero_f32,
    rows_zero_i32,
    signed_start,
    totals_add,
    totals_load,
)

#: Bytes from one row of a tile of activations to the next.
ROW = BLOCK_32_BYTES

#: Bytes of a half of 16 lanes of 4, of 2 and of 1 bytes.
HALF_4, HALF_2, HALF_1 = 64 // HALVES, 32 // HALVES, 16 // HALVES

Q4_1_BYTES, Q4_1_MAIN = 20, 16 * 20


@njit(error_model="numpy")
def _q4_1_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, then acc += m (dx sum x); both fma.

    In 16 bits: 8 steps of 2 * 15 * 127 = 30480.
    """
    acc = rows_zero_f32(rows)
    w, halves = weights + HALF_4 * half, weights + HALF_2 * half
    for _ in range(n_blocks):
        d, m = load_wf_f16(halves), load_wf_f16(halves + 32)
        parts = dot_nibbles_joined(parts_zero(rows), w + 64, x, ROW, 4, 16)
        acc = rows_fma_scaled(acc, d, x + SCALE_32_AT, ROW, rows_to_f32(totals_add(rows_zero_i32(rows), parts)))
        acc = rows_fma(acc, m, x + SCALED_SUM_AT, ROW)
        prefetch_weights(w, Q4_1_MAIN)
        w += Q4_1_MAIN
        halves += Q4_1_MAIN
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q4_1 = tile_runner(_q4_1_tile, 32, Q4_1_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_q4_1")
def linear_q4_1(args, begin, end):
    """x · W for Q4_1 weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_q4_1(args, begin, end)


Q8_0_BYTES, Q8_0_MAIN = 34, 16 * 32


@njit(error_model="numpy")
def _q8_0_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, fma. Bounds: see `dot_signed_bytes`."""
    acc = rows_zero_f32(rows)
    w = weights + HALF_4 * half
    tail = weights + Q8_0_MAIN * n_blocks + HALF_2 * half
    for _ in range(n_blocks):
        d = load_wf_f16(tail)
        totals = dot_signed_bytes(signed_start(rows, x + BIAS_128_AT, ROW), w, x, ROW, 8)
        acc = rows_fma_scaled(acc, d, x + SCALE_32_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, Q8_0_MAIN)
        w += Q8_0_MAIN
        tail += 32
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q8_0 = tile_runner(_q8_0_tile, 32, Q8_0_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_q8_0")
def linear_q8_0(args, begin, end):
    """x · W for Q8_0 weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_q8_0(args, begin, end)


Q4_0_BYTES, Q4_0_MAIN = 18, 16 * 16


@njit(error_model="numpy")
def _q4_0_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, S = sum of (q − 8) * activation; fma.

    In 16 bits: 8 steps of 2 * 15 * 127 = 30480.
    """
    acc = rows_zero_f32(rows)
    w = weights + HALF_4 * half
    tail = weights + Q4_0_MAIN * n_blocks + HALF_2 * half
    for _ in range(n_blocks):
        parts = dot_nibbles_joined(parts_zero(rows), w, x, ROW, 4, 16)
        totals = totals_add(totals_load(rows, x + BIAS_8_AT, ROW), parts)
        acc = rows_fma_scaled(acc, load_wf_f16(tail), x + SCALE_32_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, Q4_0_MAIN)
        w += Q4_0_MAIN
        tail += 32
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q4_0 = tile_runner(_q4_0_tile, 32, Q4_0_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_q4_0")
def linear_q4_0(args, begin, end):
    """x · W for Q4_0 weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_q4_0(args, begin, end)


@njit(**INLINE)
def _five_bit_totals(rows, totals, bits, w, x):
    """totals + the sum of q * activation of 32 inputs of 5 bits.

    In 16 bits: 4 steps of 2 * 31 * 127 = 31496, so the low and the high nibbles have parts of their own.
    """
    totals = totals_add(totals, dot_fifth_bits(parts_zero(rows), bits, w, x, ROW, 4, 0))
    return totals_add(totals, dot_fifth_bits(parts_zero(rows), bits, w, x + 16, ROW, 4, 4))


Q5_0_BYTES, Q5_0_MAIN = 22, 16 * 20


@njit(error_model="numpy")
def _q5_0_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, S = sum of (q − 16) * activation; fma."""
    acc = rows_zero_f32(rows)
    w = weights + HALF_4 * half
    tail = weights + Q5_0_MAIN * n_blocks + HALF_2 * half
    for _ in range(n_blocks):
        totals = totals_load(rows, x + BIAS_16_AT, ROW)
        totals = _five_bit_totals(rows, totals, load_wi(w), w + 64, x)
        acc = rows_fma_scaled(acc, load_wf_f16(tail), x + SCALE_32_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, Q5_0_MAIN)
        w += Q5_0_MAIN
        tail += 32
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q5_0 = tile_runner(_q5_0_tile, 32, Q5_0_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_q5_0")
def linear_q5_0(args, begin, end):
    """x · W for Q5_0 weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_q5_0(args, begin, end)


Q5_1_BYTES, Q5_1_MAIN = 24, 16 * 24


@njit(error_model="numpy")
def _q5_1_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, then acc += m (dx sum x); both fma."""
    acc = rows_zero_f32(rows)
    w, halves = weights + HALF_4 * half, weights + HALF_2 * half
    for _ in range(n_blocks):
        d, m = load_wf_f16(halves), load_wf_f16(halves + 32)
        totals = _five_bit_totals(rows, rows_zero_i32(rows), load_wi(w + 64), w + 128, x)
        acc = rows_fma_scaled(acc, d, x + SCALE_32_AT, ROW, rows_to_f32(totals))
        acc = rows_fma(acc, m, x + SCALED_SUM_AT, ROW)
        prefetch_weights(w, Q5_1_MAIN)
        w += Q5_1_MAIN
        halves += Q5_1_MAIN
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q5_1 = tile_runner(_q5_1_tile, 32, Q5_1_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_q5_1")
def linear_q5_1(args, begin, end):
    """x · W for Q5_1 weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_q5_1(args, begin, end)


IQ4_NL_BYTES, IQ4_NL_MAIN = 18, 16 * 16


@njit(error_model="numpy")
def _iq4_nl_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, S = sum of level * activation; fma. Bounds: see `dot_signed_bytes`."""
    acc = rows_zero_f32(rows)
    w = weights + HALF_4 * half
    tail = weights + IQ4_NL_MAIN * n_blocks + HALF_2 * half
    for _ in range(n_blocks):
        totals = dot_codebook(signed_start(rows, x + BIAS_128_AT, ROW), w, x, ROW, 0)
        acc = rows_fma_scaled(acc, load_wf_f16(tail), x + SCALE_32_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, IQ4_NL_MAIN)
        w += IQ4_NL_MAIN
        tail += 32
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_iq4_nl = tile_runner(_iq4_nl_tile, 32, IQ4_NL_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_iq4_nl")
def linear_iq4_nl(args, begin, end):
    """x · W for IQ4_NL weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_iq4_nl(args, begin, end)


MXFP4_BYTES, MXFP4_MAIN = 17, 16 * 16


@njit(error_model="numpy")
def _mxfp4_tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid):
    """Per block: acc += (d dx) S, S = sum of twice the value * activation, d = 2**(e − 128); fma.

    Bounds: see `dot_signed_bytes`.
    """
    acc = rows_zero_f32(rows)
    w = weights + HALF_4 * half
    tail = weights + MXFP4_MAIN * n_blocks + HALF_1 * half
    for _ in range(n_blocks):
        totals = dot_codebook(signed_start(rows, x + BIAS_128_AT, ROW), w, x, ROW, 1)
        acc = rows_fma_scaled(acc, load_wf_half_e8m0(tail), x + SCALE_32_AT, ROW, rows_to_f32(totals))
        prefetch_weights(w, MXFP4_MAIN)
        w += MXFP4_MAIN
        tail += 16
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_mxfp4 = tile_runner(_mxfp4_tile, 32, MXFP4_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_mxfp4")
def linear_mxfp4(args, begin, end):
    """x · W for MXFP4 weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_mxfp4(args, begin, end)
