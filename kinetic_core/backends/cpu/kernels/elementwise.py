"""Column-by-column operations on f32 rows, gating with quantization in the same pass, and gathered rows.

Arguments of `elementwise` (int64 words, strides in bytes; floats as the bits of a float64). An item is a row.

    0 operation (the constants below)   1 width
    2 x, 3 stride                       4 out, 5 stride
    6 y, 7 stride                       the second operand: b of `ADD` and `MULTIPLY`, f32[width] for `DECAY` (a)
    8 bias: f32[width]                  for `DECAY` and `SOFTPLUS`
    9 factor                            for `ADD` and `SCALE`

Arguments of the gate kernels. An item is a segment of a row: item // segments is the row.

    0 gate, 1 stride, 2 x, 3 stride, 4 out, 5 stride
    6 segment width, 7 segments
    8 run: columns that share one gate (1: each its own); where it is not 1 there is one segment
    9 activation: 0 silu, 1 sigmoid
    10 argument block of the quantization of out; segments are whole blocks (the kernels named for it)

Arguments of `concatenate`: 0 a, 1 stride, 2 bytes, 3 b, 4 stride, 5 bytes, 6 out, 7 stride. An item is a row.

Arguments of `gather_rows`: 0 x, 1 stride, 2 i64 row numbers, 3 out, 4 stride, 5 bytes. An item is an output row.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import ADD, DECAY, MULTIPLY, SCALE, SIGMOID, SILU_GATE, SOFTPLUS
from kinetic_core.backends.cpu.kernels.mathfun import sigmoid, silu, softplus
from kinetic_core.backends.cpu.kernels.quantize import (
    TILE_32_BYTES,
    TILE_256_BYTES,
    TILE_ROWS,
    quantize_q8_32,
    quantize_q8_256,
)
from kinetic_core.backends.cpu.simd import (
    add,
    copy_bytes,
    extract,
    fma,
    load_f32,
    load_f64,
    load_i64,
    load_vf,
    load_vf_partial,
    mul,
    splat_f32,
    stack_bytes,
    store_i64,
    store_vf,
    store_vf_partial,
)

_quantize_256 = njit(error_model="numpy")(quantize_q8_256)
_quantize_32 = njit(error_model="numpy")(quantize_q8_32)


@njit(error_model="numpy", forceinline=True)
def _part_of_row(args, row, first, width, block, tile_bytes, part):
    """Fill `part` with arguments that quantize columns first … first + width - 1 of a row, as row `row % TILE_ROWS`."""
    tile = row // TILE_ROWS
    x_stride = load_i64(args + 16)
    store_i64(part + 8, load_i64(args + 8) + tile * TILE_ROWS * x_stride + 4 * first)
    store_i64(part + 16, x_stride)
    blocks_before = tile * (load_i64(args + 40) // block) + first // block
    store_i64(part + 24, load_i64(args + 24) + tile_bytes * blocks_before)
    store_i64(part + 40, width)


@njit(error_model="numpy")
def quantize_columns_256(args, row, first, width):
    """Quantize columns first … first + width - 1 of one row to `q8_256`; both are multiples of 256."""
    part = stack_bytes(48)
    _part_of_row(args, row, first, width, 256, TILE_256_BYTES, part)
    _quantize_256(part, row % TILE_ROWS, row % TILE_ROWS + 1)


@njit(error_model="numpy")
def quantize_columns_32(args, row, first, width):
    """Quantize columns first … first + width - 1 of one row to `q8_32`; both are multiples of 32."""
    part = stack_bytes(48)
    _part_of_row(args, row, first, width, 32, TILE_32_BYTES, part)
    _quantize_32(part, row % TILE_ROWS, row % TILE_ROWS + 1)


@njit(error_model="numpy", forceinline=True)
def _combine(operation, a, b, bias, factor):
    if operation == ADD:
        return fma(b, factor, a)
    if operation == MULTIPLY:
        return mul(a, b)
    if operation == SCALE:
        return mul(a, factor)
    if operation == SIGMOID:
        return sigmoid(a)
    opened = softplus(add(a, bias))
    return opened if operation == SOFTPLUS else mul(b, opened)


@kernel("elementwise")
def elementwise(args, begin, end):
    """out = operation(x, y), column by column."""
    operation, width = load_i64(args), load_i64(args + 8)
    second = operation in (ADD, MULTIPLY, DECAY)
    factor = splat_f32(np.float32(load_f64(args + 72)))
    for row in range(begin, end):
        x = load_i64(args + 16) + row * load_i64(args + 24)
        out = load_i64(args + 32) + row * load_i64(args + 40)
        y = load_i64(args + 48) + row * load_i64(args + 56) if second else x
        bias = load_i64(args + 64) if operation in (DECAY, SOFTPLUS) else x
        at = 0
        while at + 16 <= width:
            v = _combine(operation, load_vf(x + 4 * at), load_vf(y + 4 * at), load_vf(bias + 4 * at), factor)
            store_vf(out + 4 * at, v)
            at += 16
        if at < width:
            left = width - at
            a, b = load_vf_partial(x + 4 * at, left), load_vf_partial(y + 4 * at, left)
            v = _combine(operation, a, b, load_vf_partial(bias + 4 * at, left), factor)
            store_vf_partial(out + 4 * at, v, left)


@njit(error_model="numpy", forceinline=True)
def _open(activation, g):
    return silu(g) if activation == SILU_GATE else sigmoid(g)


@njit(error_model="numpy", forceinline=True)
def _gate_columns(activation, gate, x, out, width):
    at = 0
    while at + 16 <= width:
        store_vf(out + 4 * at, mul(_open(activation, load_vf(gate + 4 * at)), load_vf(x + 4 * at)))
        at += 16
    if at < width:
        left = width - at
        v = mul(_open(activation, load_vf_partial(gate + 4 * at, left)), load_vf_partial(x + 4 * at, left))
        store_vf_partial(out + 4 * at, v, left)


@njit(error_model="numpy", forceinline=True)
def _gate_runs(activation, gate, x, out, width, run):
    for start in range(0, width, run):
        opened = splat_f32(extract(_open(activation, splat_f32(load_f32(gate + 4 * (start // run)))), 0))
        at = start
        stop = start + run
        while at + 16 <= stop:
            store_vf(out + 4 * at, mul(opened, load_vf(x + 4 * at)))
            at += 16
        if at < stop:
            store_vf_partial(out + 4 * at, mul(opened, load_vf_partial(x + 4 * at, stop - at)), stop - at)


@njit(error_model="numpy")
def _gate_item(args, item):
    width, segments, run, activation = (
        load_i64(args + 48),
        load_i64(args + 56),
        load_i64(args + 64),
        load_i64(args + 72),
    )
    row = item // segments
    shift = 4 * width * (item - row * segments)
    gate = load_i64(args) + row * load_i64(args + 8)
    x = load_i64(args + 16) + row * load_i64(args + 24) + shift
    out = load_i64(args + 32) + row * load_i64(args + 40) + shift
    if run == 1:
        _gate_columns(activation, gate + shift, x, out, width)
    else:
        _gate_runs(activation, gate, x, out, width, run)


@kernel("gate")
def gate(args, begin, end):
    """out = activation(gate) * x."""
    for item in range(begin, end):
        _gate_item(args, item)


@kernel("gate_q8_256")
def gate_q8_256(args, begin, end):
    """gate, then out is quantized by blocks of 256."""
    for item in range(begin, end):
        _gate_item(args, item)
        width, segments = load_i64(args + 48), load_i64(args + 56)
        row = item // segments
        quantize_columns_256(load_i64(args + 80), row, width * (item - row * segments), width)


@kernel("gate_q8_32")
def gate_q8_32(args, begin, end):
    """gate, then out is quantized by blocks of 32."""
    for item in range(begin, end):
        _gate_item(args, item)
        width, segments = load_i64(args + 48), load_i64(args + 56)
        row = item // segments
        quantize_columns_32(load_i64(args + 80), row, width * (item - row * segments), width)


@kernel("concatenate")
def concatenate(args, begin, end):
    """out = the columns of a, then those of b."""
    first, second = load_i64(args + 16), load_i64(args + 40)
    for row in range(begin, end):
        out = load_i64(args + 48) + row * load_i64(args + 56)
        copy_bytes(out, load_i64(args) + row * load_i64(args + 8), first)
        copy_bytes(out + first, load_i64(args + 24) + row * load_i64(args + 32), second)


@kernel("gather_rows")
def gather_rows(args, begin, end):
    """out[i] = x[rows[i]]."""
    for item in range(begin, end):
        row = load_i64(load_i64(args + 16) + 8 * item)
        source = load_i64(args) + row * load_i64(args + 8)
        copy_bytes(load_i64(args + 24) + item * load_i64(args + 32), source, load_i64(args + 40))
