"""Weights as the linear kernels want them: the blocks of 16 output rows interleaved, no larger than in the file.

A packed matrix is a sequence of groups of 16 output rows (the last one filled up with zero rows), each `group_bytes`
long. A group is the sequence of its group blocks along the inputs: the same block of all 16 rows, field by field. A
field is cut into units of 1, 2 or 4 bytes, and each unit of the 16 rows lies side by side, so one load takes four
inputs of every row. In formats whose scale would push every other vector off a cache line, the scales come after all
group blocks (the *tail*). `_LAYOUTS` says how each format is cut; a unit's bytes may be permuted on the way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.kernels.constants import GROUP
from kinetic_core.errors import TensorError, UnsupportedModelError, describe
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType

_KERNEL_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True)
class _Field:
    """`count` units of `unit` bytes each, found in a file's block at the byte offsets `sources` (unit * count long)."""

    unit: int
    sources: tuple[int, ...]


def _plain(unit: int, start: int, n_bytes: int) -> _Field:
    return _Field(unit, tuple(range(start, start + n_bytes)))


def _every(unit: int, order: list[int]) -> _Field:
    return _Field(unit, tuple(order))


def _swapped(start: int, n_bytes: int) -> list[int]:
    """Bytes in the order 0 2 1 3 of each four, so that the even bytes of a lane were neighbours."""
    return [start + 4 * word + byte for word in range(n_bytes // 4) for byte in (0, 2, 1, 3)]


@dataclass(frozen=True)
class _Layout:
    """The fields of a group block in packed order, and those of its tail."""

    main: tuple[_Field, ...]
    tail: tuple[_Field, ...] = ()


_LAYOUTS: dict[GGMLType, _Layout] = {
    GGMLType.F32: _Layout((_plain(4, 0, 4),)),
    GGMLType.F16: _Layout((_plain(2, 0, 2),)),
    GGMLType.BF16: _Layout((_plain(2, 0, 2),)),
    GGMLType.Q8_0: _Layout((_plain(4, 2, 32),), (_plain(2, 0, 2),)),
    GGMLType.Q4_0: _Layout((_plain(4, 2, 16),), (_plain(2, 0, 2),)),
    GGMLType.Q4_1: _Layout((_plain(2, 0, 2), _plain(2, 2, 2), _plain(4, 4, 16))),
    GGMLType.Q5_0: _Layout((_plain(4, 2, 4), _plain(4, 6, 16)), (_plain(2, 0, 2),)),
    GGMLType.Q5_1: _Layout((_plain(2, 0, 2), _plain(2, 2, 2), _plain(4, 4, 4), _plain(4, 8, 16))),
    GGMLType.IQ4_NL: _Layout((_plain(4, 2, 16),), (_plain(2, 0, 2),)),
    GGMLType.MXFP4: _Layout((_plain(4, 1, 16),), (_plain(1, 0, 1),)),
    GGMLType.Q2_K: _Layout((_every(4, _swapped(0, 16)), _plain(4, 16, 64), _plain(2, 80, 2), _plain(2, 82, 2))),
    GGMLType.Q3_K: _Layout((_plain(4, 0, 32), _plain(4, 32, 64), _every(4, _swapped(96, 12))), (_plain(2, 108, 2),)),
    GGMLType.Q5_K: _Layout((_plain(2, 0, 2), _plain(2, 2, 2), _plain(4, 4, 12), _plain(4, 16, 32), _plain(4, 48, 128))),
    GGMLType.IQ4_XS: _Layout((_plain(2, 0, 2), _plain(2, 2, 2), _plain(4, 4, 4), _plain(4, 8, 128))),
    GGMLType.Q4_K: _Layout((_plain(2, 0, 2), _plain(2, 2, 2), _plain(4, 4, 12), _plain(4, 16, 128))),
    GGMLType.Q6_K: _Layout((_every(4, _swapped(192, 16)), _plain(4, 0, 128), _plain(4, 128, 64)), (_plain(2, 208, 2),)),
}

#: The formats that `pack` knows, that is, that have a linear kernel.
PACKED_TYPES: frozenset[GGMLType] = frozenset(_LAYOUTS)


def _shape(type_: GGMLType, n_out: int, n_in: int) -> tuple[int, int, int]:
    """(groups, blocks per row, bytes per block) of a matrix."""
    if type_ not in _LAYOUTS:
        raise UnsupportedModelError(
            describe(
                "no packed layout",
                got=GGMLType(type_).name,
                expected=", ".join(sorted(known.name for known in PACKED_TYPES)),
                hint="convert the tensor to F32 or F16 first",
            )
        )
    block = BLOCK_FORMATS[type_]
    if n_in % block.block_size:
        raise TensorError(
            describe(
                "a row is not a whole number of blocks",
                where=f"a {block.name} matrix",
                got=f"{n_in} inputs",
                expected=f"a multiple of {block.block_size}",
            )
        )
    return -(-n_out // GROUP), n_in // block.block_size, block.block_bytes


def group_bytes(n_blocks: int, block_bytes: int) -> int:
    """Bytes from one group of 16 rows to the next: whole cache lines."""
    return -(-GROUP * n_blocks * block_bytes // 64) * 64


def packed_size(type_: GGMLType, n_out: int, n_in: int) -> int:
    """Bytes of a packed matrix of `n_out` rows by `n_in` inputs."""
    groups, n_blocks, block_bytes = _shape(type_, n_out, n_in)
    return groups * group_bytes(n_blocks, block_bytes)


def aligned_bytes(n_bytes: int) -> npt.NDArray[np.uint8]:
    """u8[n_bytes] that begins on a cache line, as kernels are fastest with; its contents are undefined."""
    room = np.empty(n_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + n_bytes]


@cache
def _units(type_: GGMLType) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """i64[units, 5] of the group block and of its tail, as kernels/pack.py reads them."""
    layout = _LAYOUTS[type_]
    tables = []
    for fields in (layout.main, layout.tail):
        table = []
        for field in fields:
            for start in range(0, len(field.sources), field.unit):
                unit = field.sources[start : start + field.unit]
                neighbours = unit == tuple(range(unit[0], unit[0] + field.unit))
                table.append((field.unit if neighbours else -field.unit, *unit, *(0 for _ in range(4 - field.unit))))
        tables.append(np.array(table, np.int64).reshape(-1, 5))
    return tables[0], tables[1]


def pack(
    type_: GGMLType,
    source: npt.NDArray[np.uint8],
    n_out: int,
    n_in: int,
    target: npt.NDArray[np.uint8],
    first_row: int = 0,
    n_rows: int | None = None,
) -> None:
    """Pack rows of a matrix, all of them or a slice; slices may be packed by several threads (the GIL is released).

    source: u8[n_out * row_bytes], the matrix as the file holds it (a mapped view will do).
    target: u8[packed_size], written for the rows of the slice and the filling of its last group.
    first_row, n_rows: the slice; `first_row` is a multiple of 16, and so is `n_rows` unless it ends the matrix.

    Raises TensorError when a size does not fit, UnsupportedModelError for a format without a packed layout.
    """
    groups, n_blocks, block_bytes = _shape(type_, n_out, n_in)
    last_row = n_out if n_rows is None else first_row + n_rows
    stride = group_bytes(n_blocks, block_bytes)
    expected = (n_out * n_blocks * block_bytes, groups * stride)
    if (source.nbytes, target.nbytes) != expected or source.dtype != np.uint8 or target.dtype != np.uint8:
        raise TensorError(
            describe(
                "wrong sizes for packing",
                where=f"a {type_.name} matrix of {n_out} by {n_in}",
                got=f"{source.nbytes} and {target.nbytes} bytes",
                expected=f"{expected[0]} and {expected[1]} bytes of uint8",
            )
        )
    if not 0 <= first_row <= last_row <= n_out or first_row % GROUP or (last_row % GROUP and last_row < n_out):
        raise TensorError(
            describe(
                "rows to pack must be whole groups",
                where=f"a {type_.name} matrix of {n_out} rows",
                got=f"rows {first_row} to {last_row}",
                expected=f"multiples of {GROUP}",
            )
        )
    if not (source.flags.c_contiguous and target.flags.c_contiguous):
        raise TensorError(describe("packing needs contiguous bytes", where=f"a {type_.name} matrix"))
    main, tail = _units(type_)
    args = np.array(
        [
            *(source.ctypes.data, target.ctypes.data, n_out, n_blocks, block_bytes, stride),
            *(main.ctypes.data, len(main), tail.ctypes.data, len(tail)),
        ],
        np.int64,
    )
    _kernel()(args.ctypes.data, first_row // GROUP, -(-last_row // GROUP))


@cache
def _kernel() -> Any:
    return _KERNEL_TYPE(kernel_compile.get("pack_groups").address)


@cache
def row_offsets(type_: GGMLType) -> npt.NDArray[np.int32]:
    """i32[16, block_bytes]: where each byte of each row's block of the file lies in a packed group.

    An offset counts from the group block; −1 − offset counts from the block's tail.
    """
    table = np.zeros((GROUP, BLOCK_FORMATS[type_].block_bytes), np.int32)
    for is_tail, units in enumerate(_units(type_)):
        at = 0
        for size, *offsets in units.tolist():
            for row in range(GROUP):
                where = np.arange(at, at + abs(size))
                table[row, offsets[: abs(size)]] = -1 - where if is_tail else where
                at += abs(size)
    return table


def unpack_row(
    type_: GGMLType, packed: npt.NDArray[np.uint8], n_out: int, n_in: int, row: int
) -> npt.NDArray[np.uint8]:
    """u8[row_bytes]: one row of a packed matrix, as the file holds it."""
    groups, n_blocks, block_bytes = _shape(type_, n_out, n_in)
    group = packed.reshape(groups, -1)[row // GROUP]
    offsets = row_offsets(type_)[row % GROUP].astype(np.int64)
    tail = GROUP * int((offsets < 0).sum())
    main = GROUP * block_bytes - tail
    blocks = np.arange(n_blocks)[:, None]
    where = np.where(offsets < 0, n_blocks * main + blocks * tail - 1 - offsets, blocks * main + offsets)
    return group[where].reshape(-1)
