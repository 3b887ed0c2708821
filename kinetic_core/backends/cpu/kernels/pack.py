"""Packing of weights: the blocks of 16 output rows of a file, interleaved field by field (see `packing`).

Arguments of `pack_groups` (int64 words). An item is a group of 16 output rows.

    0 source: the matrix as the file holds it   1 target: the packed matrix   2 output rows   3 blocks per row
    4 bytes of a block   5 bytes from one group of the target to the next
    6 i64[units, 3] of a group block: a unit's size in bytes (1, 2, 4), row of 16 and offset in the block   7 units
    8 the same of the tail   9 units

Rows past the last are zeros, and so are the bytes between a group's end and the next.
"""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import GROUP
from kinetic_core.backends.cpu.simd import (
    load_i8,
    load_i16,
    load_i32,
    load_i64,
    store_i8,
    store_i16,
    store_i32,
    zero_bytes,
)


@njit(error_model="numpy")
def _copy_units(origin, to, units, n_units, row_bytes, n_rows):
    """Copy one group block's units side by side; rows from `n_rows` on are zeros. Returns the address after them."""
    for unit in range(n_units):
        entry = units + 24 * unit
        size, row = load_i64(entry), load_i64(entry + 8)
        at = origin + row * row_bytes + load_i64(entry + 16)
        if size == 4:
            store_i32(to, load_i32(at) if row < n_rows else 0)
        elif size == 2:
            store_i16(to, load_i16(at) if row < n_rows else 0)
        else:
            store_i8(to, load_i8(at) if row < n_rows else 0)
        to += size
    return to


@kernel("pack_groups")
def pack_groups(args, begin, end):
    """Pack groups of a matrix."""
    source, target, n_out, n_blocks = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
    block_bytes, stride = load_i64(args + 32), load_i64(args + 40)
    main, n_main, tail, n_tail = load_i64(args + 48), load_i64(args + 56), load_i64(args + 64), load_i64(args + 72)
    row_bytes = n_blocks * block_bytes
    for group in range(begin, end):
        n_rows = min(GROUP, n_out - group * GROUP)
        origin = source + group * GROUP * row_bytes
        to = target + group * stride
        for block in range(n_blocks):
            to = _copy_units(origin + block * block_bytes, to, main, n_main, row_bytes, n_rows)
        for block in range(n_blocks):
            to = _copy_units(origin + block * block_bytes, to, tail, n_tail, row_bytes, n_rows)
        zero_bytes(to, target + (group + 1) * stride - to)
