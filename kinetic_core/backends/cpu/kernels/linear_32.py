"""Linear kernels of the formats with blocks of 32 inputs: activations `q8_32`."""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.linear import HALVES, tile_runner
from kinetic_core.backends.cpu.kernels.quantize import (
    BIAS_128_AT,
    BLOCK_32_BYTES,
    SCALE_32_AT,
    SCALED_SUM_AT,
    TILE_32_BYTES,
)
from kinetic_core.backends.cpu.simd import (
    dot_nibbles_joined,
    dot_signed_bytes,
    load_wf_f16,
    parts_total,
    parts_zero,
    rows_fma,
    rows_fma_scaled,
    rows_store,
    rows_to_f32,
    rows_zero_f32,
    signed_start,
)

#: Bytes from one row of a tile of activations to the next.
ROW = BLOCK_32_BYTES

#: Bytes of a half of 16 lanes of 4 and of 2 bytes.
HALF_4, HALF_2 = 64 // HALVES, 32 // HALVES

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
        acc = rows_fma_scaled(acc, d, x + SCALE_32_AT, ROW, rows_to_f32(parts_total(parts)))
        acc = rows_fma(acc, m, x + SCALED_SUM_AT, ROW)
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
        w += Q8_0_MAIN
        tail += 32
        x += TILE_32_BYTES
    rows_store(acc, out, out_stride, lanes, n_valid)


_run_q8_0 = tile_runner(_q8_0_tile, 32, Q8_0_BYTES, BLOCK_32_BYTES, TILE_32_BYTES)


@kernel("linear_q8_0")
def linear_q8_0(args, begin, end):
    """x · W for Q8_0 weights; activations `q8_32`. Arguments and work items: see `linear`."""
    _run_q8_0(args, begin, end)
