"""Packing of weights: the blocks of 16 output rows of a file, interleaved field by field (see `packing`).

Arguments of `pack_groups` (int64 words). An item is a group of 16 output rows.

    0 source: the matrix as the file holds it   1 target: the packed matrix   2 output rows   3 blocks per row
    4 bytes of a block   5 bytes from one group of the target to the next
    6 i64[units, 5] of a group block: a unit's size in bytes and the offset of each byte in the file's block   7 units
    8 the same of the tail   9 units

The size is 1, 2 or 4 where a unit's bytes are neighbours in the file, and -4 where they are not.

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
def _copy_units(origin, to, units, n_units, row_bytes):
    """Copy one group block's units of 16 rows side by side. Returns the address after them."""
    for unit in range(n_units):
        entry = units + 40 * unit
        size, at = load_i64(entry), origin + load_i64(entry + 8)
        if size == 4:
            for row in range(GROUP):
                store_i32(to + 4 * row, load_i32(at + row * row_bytes))
        elif size == 2:
            for row in range(GROUP):
                store_i16(to + 2 * row, load_i16(at + row * row_bytes))
        elif size == 1:
            for row in range(GROUP):
                store_i8(to + row, load_i8(at + row * row_bytes))
        else:
            for row in range(GROUP):
                for byte in range(4):
                    at = origin + row * row_bytes + load_i64(entry + 8 + 8 * byte)
                    store_i8(to + 4 * row + byte, load_i8(at))
        to += GROUP * abs(size)
    return to


@njit(error_model="numpy")
def _copy_few(origin, to, units, n_units, row_bytes, n_rows):
    """The same of the first `n_rows` rows; the others are zeros."""
    for unit in range(n_units):
        entry = units + 40 * unit
        size = load_i64(entry)
        for row in range(GROUP):
            for byte in range(abs(size)):
                at = origin + row * row_bytes + load_i64(entry + 8 + 8 * byte)
                store_i8(to, load_i8(at) if row < n_rows else 0)
                to += 1
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
        for part in range(2):
            units, n_units = (main, n_main) if part == 0 else (tail, n_tail)
            for block in range(n_blocks):
                if n_rows == GROUP:
                    to = _copy_units(origin + block * block_bytes, to, units, n_units, row_bytes)
                else:
                    to = _copy_few(origin + block * block_bytes, to, units, n_units, row_bytes, n_rows)
        zero_bytes(to, target + (group + 1) * stride - to)
