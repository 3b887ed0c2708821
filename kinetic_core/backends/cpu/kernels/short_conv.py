"""The causal short convolution, row by row, with drafts beside the state.

A sequence's committed rows advance its state in place. Draft rows start from their parent's state in scratch and
leave nothing: a chain goes on from row to row, a branch is replayed from the state after the committed rows. `commit`
replays the accepted rows' inputs, which were copied aside, with the same code.

A sequence record is 8 words: first row, committed rows, all rows, slot, address of i64 parents of the drafts (offsets
from the first row), number of snapshots, address of i64 (offset, slot) pairs.

Arguments of `short_conv` (int64 words, strides in bytes). An item is a sequence and a strip of CONV_STRIP columns.

    0 x, 1 stride   2 out, 3 stride   4 width   5 strips   6 taps K
    7 weights, transposed: f32[K, width]   8 bias: f32[width], or 0   9 activation: 0 none, 1 silu
    10 state in slot 0: f32[K - 1, width], 11 bytes per slot   12 sequence records

The replay kernel takes the same arguments; rows are draft numbers, inputs what was copied aside, nothing is put out,
and a record is: 0, number of rows, 0, slot, address of i64 draft numbers.
"""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import CONV_STRIP, MAX_TAPS, SEQUENCE_WORDS
from kinetic_core.backends.cpu.kernels.mathfun import silu
from kinetic_core.backends.cpu.simd import (
    copy_bytes,
    fma,
    load_i64,
    load_vf,
    load_vf_partial,
    stack_bytes,
    store_i64,
    store_vf,
    store_vf_partial,
    zero_f32,
)

_SOURCES_BYTES = 8 * MAX_TAPS


@njit(error_model="numpy", forceinline=True)
def _load(address, lanes):
    return load_vf(address) if lanes >= 16 else load_vf_partial(address, lanes)


@njit(error_model="numpy", forceinline=True)
def _store(address, value, lanes):
    if lanes >= 16:
        store_vf(address, value)
    else:
        store_vf_partial(address, value, lanes)


@njit(error_model="numpy")
def _input(args, record, state, offset):
    """The address of the input row at an offset in the sequence; before its first row, in the state."""
    if offset >= 0:
        return load_i64(args) + (load_i64(record) + offset) * load_i64(args + 8)
    return state + 4 * load_i64(args + 32) * (load_i64(args + 48) - 1 + offset)


@njit(error_model="numpy", forceinline=True)
def _convolve(args, sources, out, column, width):
    taps, weights, bias = load_i64(args + 48), load_i64(args + 56), load_i64(args + 64)
    row_bytes = 4 * load_i64(args + 32)
    for at in range(column, column + width, 16):
        lanes = column + width - at
        total = zero_f32()
        if bias != 0:
            total = _load(bias + 4 * at, lanes)
        for tap in range(taps):
            x = _load(load_i64(sources + 8 * tap) + 4 * at, lanes)
            total = fma(_load(weights + row_bytes * tap + 4 * at, lanes), x, total)
        if load_i64(args + 72) == 1:
            total = silu(total)
        _store(out + 4 * at, total, lanes)


@njit(error_model="numpy")
def _keep_inputs(args, record, state, target, n_rows, column, width):
    """Write the last K - 1 inputs after `n_rows` rows. In place it runs from old to new: nothing is read too late."""
    row_bytes = 4 * load_i64(args + 32)
    kept = load_i64(args + 48) - 1
    for k in range(kept):
        source = _input(args, record, state, n_rows - kept + k)
        if source + 4 * column != target + row_bytes * k + 4 * column:
            copy_bytes(target + row_bytes * k + 4 * column, source + 4 * column, 4 * width)


@kernel("short_conv")
def short_conv(args, begin, end):
    """out = act(bias + sum over the taps of weight * input), and the state after the committed rows."""
    strips, taps = load_i64(args + 40), load_i64(args + 48)
    sources = stack_bytes(_SOURCES_BYTES)
    for item in range(begin, end):
        number = item // strips
        column = CONV_STRIP * (item - number * strips)
        width = min(CONV_STRIP, load_i64(args + 32) - column)
        record = load_i64(args + 96) + 8 * SEQUENCE_WORDS * number
        n_committed, n_rows = load_i64(record + 8), load_i64(record + 16)
        state = load_i64(args + 80) + load_i64(record + 24) * load_i64(args + 88)
        for offset in range(n_rows):
            before = offset
            for tap in range(taps - 1, -1, -1):
                store_i64(sources + 8 * tap, _input(args, record, state, before))
                if before >= n_committed:
                    before = load_i64(load_i64(record + 32) + 8 * (before - n_committed))
                else:
                    before -= 1
            out = load_i64(args + 16) + (load_i64(record) + offset) * load_i64(args + 24)
            _convolve(args, sources, out, column, width)
        for k in range(load_i64(record + 40)):
            pair = load_i64(record + 48) + 16 * k
            target = load_i64(args + 80) + load_i64(pair + 8) * load_i64(args + 88)
            _keep_inputs(args, record, state, target, load_i64(pair) + 1, column, width)
        _keep_inputs(args, record, state, state, n_committed, column, width)


@kernel("replay_conv")
def replay_conv(args, begin, end):
    """The state after accepted drafts."""
    strips, kept = load_i64(args + 40), load_i64(args + 48) - 1
    row_bytes = 4 * load_i64(args + 32)
    for item in range(begin, end):
        number = item // strips
        column = CONV_STRIP * (item - number * strips)
        width = min(CONV_STRIP, load_i64(args + 32) - column)
        record = load_i64(args + 96) + 8 * SEQUENCE_WORDS * number
        state = load_i64(args + 80) + load_i64(record + 24) * load_i64(args + 88) + 4 * column
        for k in range(load_i64(record + 8)):
            row = load_i64(load_i64(record + 32) + 8 * k)
            for old in range(1, kept):
                copy_bytes(state + row_bytes * (old - 1), state + row_bytes * old, 4 * width)
            source = load_i64(args) + row * load_i64(args + 8) + 4 * column
            copy_bytes(state + row_bytes * (kept - 1), source, 4 * width)
