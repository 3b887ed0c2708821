"""What the linear kernels share: their arguments, and the walk over groups of outputs and tiles of rows.

A linear kernel multiplies every row of a batch by one packed weight matrix. Arguments (int64 each):

    0  n_rows
    8  x: address of the rows, in the layout that the kernel's format wants (`ACTIVATIONS`)
    16 bytes from one row of x to the next (float kernels only; quantized rows lie in tiles)
    24 weights: address of the packed matrix (see `packing`)
    32 n_in
    40 n_out
    48 out: address of f32[n_rows, n_out]; nothing past n_out is written
    56 bytes from one row of out to the next

A work item is one group of 16 outputs, for all rows. `n_groups` gives the number of items.

The float sequence of an output is the same in every tile and lowering: one accumulator that begins with +0 and takes
its blocks in ascending order, as each kernel writes down. What is inside a block is an exact integer.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from kinetic_core.backends.cpu.kernels.constants import GROUP, TILE_ROWS
from kinetic_core.backends.cpu.simd import LANES, load_i64, static

#: How the helpers of kernels are compiled: into their caller.
INLINE: dict[str, Any] = {"error_model": "numpy", "forceinline": True}

#: Rows of the tallest tile: its accumulators should mostly fit the registers (32 in AVX-512, else 16).
TALL_ROWS: int = 8 if LANES == GROUP else 4

HALVES: int = GROUP // LANES


def tile_runner(
    tile: Any, block_inputs: int, block_bytes: int, row_bytes: int, x_tile_bytes: int, tall_rows: int = TALL_ROWS
) -> Any:
    """The compiled walk `run(args, begin, end)` that calls a format's tile for every group, half and tile of rows.

    tile: `tile(rows, weights, half, x, n_blocks, out, out_stride, lanes, n_valid)`, compiled by numba. weights is the
    address of the group; half says which LANES of its 16 outputs; lanes how many of them to store, n_valid how many
    rows. A tile may have more rows than are valid: it then computes on what lies in the buffer and stores nothing.
    tall_rows: rows of the tallest tile, 4 or more.
    """

    def run(args, begin, end):
        n_rows, x, weights = load_i64(args), load_i64(args + 8), load_i64(args + 24)
        n_blocks, n_out = load_i64(args + 32) // block_inputs, load_i64(args + 40)
        out, out_stride = load_i64(args + 48), load_i64(args + 56)
        stride = (GROUP * n_blocks * block_bytes + 63) // 64 * 64
        for group in range(begin, end):
            w = weights + group * stride
            for half in range(HALVES):
                first = group * GROUP + half * LANES
                lanes = n_out - first
                if lanes <= 0:
                    break
                row = 0
                while row < n_rows:
                    left = n_rows - row
                    a = x + (row // TILE_ROWS) * n_blocks * x_tile_bytes + (row % TILE_ROWS) * row_bytes
                    y = out + 4 * first + row * out_stride
                    if tall_rows > 4 and left > 4:
                        tile(static(tall_rows), w, half, a, n_blocks, y, out_stride, lanes, left)
                        row += tall_rows
                    elif left > 1:
                        tile(static(4), w, half, a, n_blocks, y, out_stride, lanes, left)
                        row += 4
                    else:
                        tile(static(1), w, half, a, n_blocks, y, out_stride, lanes, left)
                        row += 1

    return named(run, tile.py_func.__name__)


def named(function: Any, name: str) -> Any:
    """Compile a function made by another function, under a name of its own.

    numba names machine code after the qualified name, a count within the process, and the argument types. Closures of
    one factory differ in the count only; code that was compiled in several processes and comes from the cache can then
    meet under one name, and the linker would take either.
    """
    function.__qualname__ = f"{function.__qualname__}.{name}"
    return njit(error_model="numpy")(function)
