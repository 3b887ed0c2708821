"""How recurrent states [heads, state_dim, head_dim] are run: strip by strip of their columns, row after row.

Columns of a state never meet, so a strip goes through all rows of the batch before the next one starts. The first row
streams the state: a wide strip is read and written in place, whole cache lines one after the other. The rows after it
go in strips of 16 columns, which stay in the first-level cache: the first reads the state, the last committed one
writes it. Drafts start from the state, or from their parent's strip in scratch, and leave nothing; a branch is replayed
from the state. Columns that do not fill a wide strip take no wide one; fewer than 16 are copied to scratch, and back
after the committed rows.

A recurrence is a function `advance(args, row, head, column, lanes, columns, source, source_stride, target,
target_stride)`: it advances the strip of `columns` (`Static`) columns, of which `lanes` exist, from `source` to
`target` (which may be the same), both [state_dim] lines at a stride in bytes, by one row, and puts out the row's
columns. Its arguments 0 … 11 are its own; the others are (int64 words)

    12 groups   13 heads   14 state_dim   15 head_dim   16 items of a head: wide strips
    17 state in slot 0: f32[heads, state_dim, head_dim], 18 bytes per slot   19 sequence records

An item is a sequence, a head and a wide strip. A sequence record is 8 words: first row, committed rows, all rows, slot,
address of i64 parents of the drafts (offsets from the first row), number of snapshots, address of i64 (offset, slot)
pairs. To replay accepted drafts: 0, number of rows, 0, slot, address of i64 draft numbers, 0, 0.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels.constants import MAX_PATH, MAX_STATE_DIM, SEQUENCE_WORDS, WIDE_STRIP
from kinetic_core.backends.cpu.simd import (
    load_f32,
    load_first_columns,
    load_i64,
    splat_columns,
    stack_bytes,
    static,
    store_first_columns,
    store_i64,
)
from kinetic_core.backends.cpu.simd.machine import opaque

_PATH_BYTES, _STRIP_BYTES = 8 * MAX_PATH, 64 * MAX_STATE_DIM
#: Bytes of a line of a strip in scratch. Not a literal, which numba would compile functions anew for.
_LINE = np.int64(64)


@njit(error_model="numpy", forceinline=True)
def splat_at(address, columns):
    """The float32 at an address in every lane."""
    return splat_columns(load_f32(address), columns)


@njit(error_model="numpy")
def _copy_strip(n_lines, lanes, source, source_stride, target, target_stride):
    for i in range(n_lines):
        line = load_first_columns(source + source_stride * i, lanes, static(16))
        store_first_columns(target + target_stride * i, line, lanes)


@njit(error_model="numpy", forceinline=True)
def _place(args, slot, head, column):
    """The address of a strip of a slot's state."""
    state_dim, head_dim = load_i64(args + 112), load_i64(args + 120)
    return load_i64(args + 136) + slot * load_i64(args + 144) + 4 * (head * state_dim * head_dim + column)


@njit(error_model="numpy")
def _snapshot(args, record, offset, head, column, width, source, source_stride):
    """Write `width` columns of the state after a committed row to the slots that want it."""
    state_dim, stride = load_i64(args + 112), 4 * load_i64(args + 120)
    for k in range(load_i64(record + 40)):
        pair = load_i64(record + 48) + 16 * k
        if load_i64(pair) == offset:
            target = _place(args, load_i64(pair + 8), head, column)
            for at in range(0, width, 16):
                _copy_strip(state_dim, min(16, width - at), source + 4 * at, source_stride, target + 4 * at, stride)


@njit(error_model="numpy", forceinline=True)
def _row(record, offset, replayed):
    return load_i64(load_i64(record + 32) + 8 * offset) if replayed else load_i64(record) + offset


def make_runner(advance):
    """run(args, begin, end, replayed) of a recurrence; `replayed`: the records are of accepted drafts."""

    @njit(error_model="numpy")
    def drafts(args, record, head, column, lanes, strip, path):
        """Draft rows, from the state after the committed ones, which the slot keeps."""
        first, n_committed, n_rows = load_i64(record), load_i64(record + 8), load_i64(record + 16)
        parents = load_i64(record + 32)
        state_dim, state_stride = load_i64(args + 112), 4 * load_i64(args + 120)
        state = _place(args, load_i64(record + 24), head, column)
        reached = n_rows
        source, source_stride = strip, _LINE
        for offset in range(n_committed, n_rows):
            parent = load_i64(parents + 8 * (offset - n_committed))
            if parent != reached:
                if lanes >= 16:
                    source, source_stride = state, state_stride
                else:
                    _copy_strip(state_dim, lanes, state, state_stride, strip, _LINE)
                depth = 0
                while parent >= n_committed:
                    store_i64(path + 8 * depth, parent)
                    parent = load_i64(parents + 8 * (parent - n_committed))
                    depth += 1
                while depth > 0:
                    depth -= 1
                    row = first + load_i64(path + 8 * depth)
                    advance(args, row, head, column, lanes, static(16), source, source_stride, strip, _LINE)
                    source, source_stride = strip, _LINE
            advance(args, first + offset, head, column, lanes, static(16), source, source_stride, strip, _LINE)
            source, source_stride = strip, _LINE
            reached = offset

    @njit(error_model="numpy")
    def committed(args, record, begin, head, column, lanes, strip, replayed):
        """Committed rows from number `begin` on of a strip of 16 columns: the state, through scratch, and back."""
        state_dim, state_stride = load_i64(args + 112), 4 * load_i64(args + 120)
        state = _place(args, load_i64(record + 24), head, column)
        n_committed = load_i64(record + 8)
        source, source_stride = state, state_stride
        if lanes < 16:
            _copy_strip(state_dim, lanes, state, state_stride, strip, _LINE)
            source, source_stride = strip, _LINE
        for offset in range(begin, n_committed):
            target, target_stride = strip, _LINE
            if lanes >= 16 and offset == n_committed - 1:
                target, target_stride = state, state_stride
            row = _row(record, offset, replayed)
            advance(args, row, head, column, lanes, static(16), source, source_stride, target, target_stride)
            source, source_stride = target, target_stride
            _snapshot(args, record, offset, head, column, min(16, lanes), source, source_stride)
        if lanes < 16:
            _copy_strip(state_dim, lanes, strip, _LINE, state, state_stride)

    @njit(error_model="numpy")
    def run(args, begin, end, replayed):
        heads, head_dim, strips = load_i64(args + 104), load_i64(args + 120), load_i64(args + 128)
        stride = 4 * head_dim
        strip = opaque(stack_bytes(_STRIP_BYTES))
        path = opaque(stack_bytes(_PATH_BYTES))
        for item in range(begin, end):
            number = item // (heads * strips)
            place = item - number * heads * strips
            head = place // strips
            column = WIDE_STRIP * (place - head * strips)
            stop = min(column + WIDE_STRIP, head_dim)
            record = load_i64(args + 152) + 8 * SEQUENCE_WORDS * number
            n_committed, n_rows = load_i64(record + 8), load_i64(record + 16)
            streamed = 0
            if stop - column == WIDE_STRIP and n_committed > 0:
                streamed = 1
                state = _place(args, load_i64(record + 24), head, column)
                row = _row(record, 0, replayed)
                advance(args, row, head, column, stop - column, static(WIDE_STRIP), state, stride, state, stride)
                _snapshot(args, record, 0, head, column, stop - column, state, stride)
            for narrow in range(column, stop, 16):
                if n_committed > streamed:
                    committed(args, record, streamed, head, narrow, stop - narrow, strip, replayed)
                if n_rows > n_committed:
                    drafts(args, record, head, narrow, stop - narrow, strip, path)

    return run
