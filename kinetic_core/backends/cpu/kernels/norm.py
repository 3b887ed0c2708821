"""Root-mean-square and length norms, with the residual sum before and the quantization after in the same pass.

Sums of squares run over the columns in order, 16 lanes wide, and end in the fixed tree of `hsum`.

Arguments of the rms_norm kernels (int64 words; x, y and out are f32 rows):

    0 x, 1 stride     2 y, 3 stride, 4 factor: where y is not 0, x + y * factor is normed and
    5 sum, 6 stride   receives it
    7 weight, 8 bytes from one group's weights to the next (0: the same for all)
    9 group width, 10 groups, 11 eps
    12 out, 13 stride
    14 argument block of the quantization of out (the kernels named for it)

Arguments of l2_norm: 0 x, 1 stride, 2 out, 3 stride, 4 group width, 5 groups, 6 eps, 7 scale. An item is a row.
Strides are in bytes; eps, factor and scale are the bits of a float64.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.quantize import quantize_q8_32, quantize_q8_256
from kinetic_core.backends.cpu.simd import (
    fma,
    hsum,
    load_f64,
    load_i64,
    load_vf,
    load_vf_partial,
    mul,
    splat_f32,
    sqrt,
    store_vf,
    store_vf_partial,
    zero_f32,
)

_quantize_256 = njit(error_model="numpy")(quantize_q8_256)
_quantize_32 = njit(error_model="numpy")(quantize_q8_32)


@njit(error_model="numpy", forceinline=True)
def _sum_of_squares(x, width):
    total = zero_f32()
    at = 0
    while at + 16 <= width:
        v = load_vf(x + 4 * at)
        total = fma(v, v, total)
        at += 16
    if at < width:
        v = load_vf_partial(x + 4 * at, width - at)
        total = fma(v, v, total)
    return hsum(total)


@njit(error_model="numpy", forceinline=True)
def _add_rows(x, y, factor, out, width):
    f = splat_f32(factor)
    at = 0
    while at + 16 <= width:
        store_vf(out + 4 * at, fma(load_vf(y + 4 * at), f, load_vf(x + 4 * at)))
        at += 16
    if at < width:
        left = width - at
        v = fma(load_vf_partial(y + 4 * at, left), f, load_vf_partial(x + 4 * at, left))
        store_vf_partial(out + 4 * at, v, left)


@njit(error_model="numpy", forceinline=True)
def _scale_by(x, factor, weight, out, width):
    """out = x * factor * weight."""
    f = splat_f32(factor)
    at = 0
    while at + 16 <= width:
        store_vf(out + 4 * at, mul(mul(load_vf(x + 4 * at), f), load_vf(weight + 4 * at)))
        at += 16
    if at < width:
        left = width - at
        v = mul(mul(load_vf_partial(x + 4 * at, left), f), load_vf_partial(weight + 4 * at, left))
        store_vf_partial(out + 4 * at, v, left)


@njit(error_model="numpy")
def _norm_row(args, row):
    width, groups = load_i64(args + 72), load_i64(args + 80)
    eps = np.float32(load_f64(args + 88))
    x = load_i64(args) + row * load_i64(args + 8)
    y = load_i64(args + 16)
    if y != 0:
        y += row * load_i64(args + 24)
        total = load_i64(args + 40) + row * load_i64(args + 48)
        _add_rows(x, y, np.float32(load_f64(args + 32)), total, width * groups)
        x = total
    weight, weight_step = load_i64(args + 56), load_i64(args + 64)
    out = load_i64(args + 96) + row * load_i64(args + 104)
    for _ in range(groups):
        mean = _sum_of_squares(x, width) / np.float32(width)
        _scale_by(x, np.float32(1.0) / sqrt(np.float32(mean + eps)), weight, out, width)
        x += 4 * width
        out += 4 * width
        weight += weight_step


@kernel("rms_norm")
def rms_norm(args, begin, end):
    """out = (x + y * factor) / sqrt(mean of squares + eps) * weight."""
    for row in range(begin, end):
        _norm_row(args, row)


@kernel("rms_norm_q8_256")
def rms_norm_q8_256(args, begin, end):
    """rms_norm, then out is quantized by blocks of 256."""
    for row in range(begin, end):
        _norm_row(args, row)
        _quantize_256(load_i64(args + 112), row, row + 1)


@kernel("rms_norm_q8_32")
def rms_norm_q8_32(args, begin, end):
    """rms_norm, then out is quantized by blocks of 32."""
    for row in range(begin, end):
        _norm_row(args, row)
        _quantize_32(load_i64(args + 112), row, row + 1)


@kernel("l2_norm")
def l2_norm(args, begin, end):
    """Each group of columns: out = x / sqrt(sum of squares + eps) * scale."""
    width, groups = load_i64(args + 32), load_i64(args + 40)
    eps, scale = np.float32(load_f64(args + 48)), np.float32(load_f64(args + 56))
    for row in range(begin, end):
        x = load_i64(args) + row * load_i64(args + 8)
        out = load_i64(args + 16) + row * load_i64(args + 24)
        for _ in range(groups):
            factor = scale / sqrt(np.float32(_sum_of_squares(x, width) + eps))
            f = splat_f32(factor)
            at = 0
            while at + 16 <= width:
                store_vf(out + 4 * at, mul(load_vf(x + 4 * at), f))
                at += 16
            if at < width:
                store_vf_partial(out + 4 * at, mul(load_vf_partial(x + 4 * at, width - at), f), width - at)
            x += 4 * width
            out += 4 * width
