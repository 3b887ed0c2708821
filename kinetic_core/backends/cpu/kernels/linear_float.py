"""Linear kernels of F32, F16 and BF16 weights: activations are the float32 rows as they are, n_in is any number.

An output has two accumulators, one for even and one for odd inputs; each takes its inputs in ascending order by fma,
and the output is the rounded sum even + odd.
"""

from __future__ import annotations

from typing import Any

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import GROUP
from kinetic_core.backends.cpu.kernels.linear import HALVES, TALL_ROWS, named
from kinetic_core.backends.cpu.simd import (
    LANES,
    load_i64,
    load_wf,
    load_wf_bf16,
    load_wf_f16,
    rows_add,
    rows_fma,
    rows_store,
    rows_zero_f32,
    static,
)


def _float_runner(name: str, load: Any, element_bytes: int) -> Any:
    """The compiled walk over groups and tiles of rows for weights that `load` reads LANES at a time."""
    vector_bytes = GROUP * element_bytes
    half_bytes = vector_bytes // HALVES

    def one_tile(rows, w, x, x_stride, n_in, out, out_stride, lanes):
        even, odd = rows_zero_f32(rows), rows_zero_f32(rows)
        for _ in range(n_in >> 1):
            even = rows_fma(even, load(w), x, x_stride)
            odd = rows_fma(odd, load(w + vector_bytes), x + 4, x_stride)
            w += 2 * vector_bytes
            x += 8
        if n_in & 1:
            even = rows_fma(even, load(w), x, x_stride)
        rows_store(rows_add(even, odd), out, out_stride, lanes, LANES)

    tile = named(one_tile, name)

    def run(args, begin, end):
        n_rows, x, x_stride, weights = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        n_in, n_out = load_i64(args + 32), load_i64(args + 40)
        out, out_stride = load_i64(args + 48), load_i64(args + 56)
        stride = (vector_bytes * n_in + 63) // 64 * 64
        for group in range(begin, end):
            for half in range(HALVES):
                first = group * GROUP + half * LANES
                lanes = n_out - first
                if lanes <= 0:
                    break
                w, a, y = weights + group * stride + half * half_bytes, x, out + 4 * first
                left = n_rows
                while left >= TALL_ROWS:
                    tile(static(TALL_ROWS), w, a, x_stride, n_in, y, out_stride, lanes)
                    a, y, left = a + TALL_ROWS * x_stride, y + TALL_ROWS * out_stride, left - TALL_ROWS
                while left >= 1:
                    tile(static(1), w, a, x_stride, n_in, y, out_stride, lanes)
                    a, y, left = a + x_stride, y + out_stride, left - 1

    return named(run, name)


_run_f32 = _float_runner("f32", load_wf, 4)
_run_f16 = _float_runner("f16", load_wf_f16, 2)
_run_bf16 = _float_runner("bf16", load_wf_bf16, 2)


@kernel("linear_f32")
def linear_f32(args, begin, end):
    """x · W for F32 weights and float32 rows. Arguments and work items: see `linear`."""
    _run_f32(args, begin, end)


@kernel("linear_f16")
def linear_f16(args, begin, end):
    """x · W for F16 weights and float32 rows. Arguments and work items: see `linear`."""
    _run_f16(args, begin, end)


@kernel("linear_bf16")
def linear_bf16(args, begin, end):
    """x · W for BF16 weights and float32 rows. Arguments and work items: see `linear`."""
    _run_bf16(args, begin, end)
