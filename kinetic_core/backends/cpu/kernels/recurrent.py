"""Recurrences: the causal short convolution and the gated delta rule, row by row, with drafts beside the state.

A sequence's committed rows advance its state in place. Draft rows start from their parent's state in scratch and
leave nothing: a chain goes on from row to row, a branch is replayed from the state after the committed rows. `commit`
replays the accepted rows' inputs, which were copied aside, with the same code.

A sequence record is 8 words: first row, committed rows, all rows, slot, address of i64 parents of the drafts (offsets
from the first row), number of snapshots, address of i64 (offset, slot) pairs.

Arguments of `short_conv` (int64 words, strides in bytes). An item is a sequence and a strip of CONV_STRIP columns.

    0 x, 1 stride   2 out, 3 stride   4 width   5 strips   6 taps K
    7 weights, transposed: f32[K, width]   8 bias: f32[width], or 0   9 activation: 0 none, 1 silu
    10 state in slot 0: f32[K - 1, width], 11 bytes per slot   12 sequence records

Arguments of `delta_rule`. An item is a sequence, a value head and a strip of 16 columns of its values.

    0 q, 1 stride   2 k, 3 stride   4 v, 5 stride   6 decay, 7 stride   8 beta, 9 stride   10 out, 11 stride
    12 key_heads   13 value_heads   14 key_dim   15 value_dim   16 strips of a head
    17 state in slot 0: f32[value_heads, key_dim, value_dim], 18 bytes per slot   19 sequence records

The replay kernels take the same arguments; rows are draft numbers, inputs what was copied aside, nothing is put out,
and a record is: 0, number of rows, 0, slot, address of i64 draft numbers.
"""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import CONV_STRIP, MAX_KEY_DIM, MAX_PATH, MAX_TAPS, SEQUENCE_WORDS
from kinetic_core.backends.cpu.kernels.mathfun import exp_scalar, silu
from kinetic_core.backends.cpu.simd import (
    add,
    copy_bytes,
    fma,
    load_f32,
    load_i64,
    load_vf,
    load_vf_partial,
    mul,
    splat_f32,
    stack_bytes,
    store_i64,
    store_vf,
    store_vf_partial,
    sub,
    zero_f32,
)
from kinetic_core.backends.cpu.simd.machine import opaque

_PATH_BYTES, _STRIP_BYTES, _SOURCES_BYTES = 8 * MAX_PATH, 64 * MAX_KEY_DIM, 8 * MAX_TAPS


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


@njit(error_model="numpy")
def _advance(args, row, head, column, lanes, strip):
    """One row's update of a strip [key_dim][16]; sums over the key run in four interleaved parts."""
    key_heads, key_dim, value_dim = load_i64(args + 96), load_i64(args + 112), load_i64(args + 120)
    key_at = 4 * key_dim * (head % key_heads)
    q = load_i64(args) + row * load_i64(args + 8) + key_at
    k = load_i64(args + 16) + row * load_i64(args + 24) + key_at
    value_at = 4 * (value_dim * head + column)
    v = _load(load_i64(args + 32) + row * load_i64(args + 40) + value_at, lanes)
    decay = load_f32(load_i64(args + 48) + row * load_i64(args + 56) + 4 * head)
    beta = load_f32(load_i64(args + 64) + row * load_i64(args + 72) + 4 * head)
    g = splat_f32(exp_scalar(decay))
    a0, a1, a2, a3 = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    i = 0
    while i + 4 <= key_dim:
        s0, s1 = mul(load_vf(strip + 64 * i), g), mul(load_vf(strip + 64 * i + 64), g)
        s2, s3 = mul(load_vf(strip + 64 * i + 128), g), mul(load_vf(strip + 64 * i + 192), g)
        store_vf(strip + 64 * i, s0)
        store_vf(strip + 64 * i + 64, s1)
        store_vf(strip + 64 * i + 128, s2)
        store_vf(strip + 64 * i + 192, s3)
        a0 = fma(s0, splat_f32(load_f32(k + 4 * i)), a0)
        a1 = fma(s1, splat_f32(load_f32(k + 4 * i + 4)), a1)
        a2 = fma(s2, splat_f32(load_f32(k + 4 * i + 8)), a2)
        a3 = fma(s3, splat_f32(load_f32(k + 4 * i + 12)), a3)
        i += 4
    while i < key_dim:
        s0 = mul(load_vf(strip + 64 * i), g)
        store_vf(strip + 64 * i, s0)
        a0 = fma(s0, splat_f32(load_f32(k + 4 * i)), a0)
        i += 1
    delta = mul(splat_f32(beta), sub(v, add(add(a0, a1), add(a2, a3))))
    a0, a1, a2, a3 = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    i = 0
    while i + 4 <= key_dim:
        s0 = fma(splat_f32(load_f32(k + 4 * i)), delta, load_vf(strip + 64 * i))
        s1 = fma(splat_f32(load_f32(k + 4 * i + 4)), delta, load_vf(strip + 64 * i + 64))
        s2 = fma(splat_f32(load_f32(k + 4 * i + 8)), delta, load_vf(strip + 64 * i + 128))
        s3 = fma(splat_f32(load_f32(k + 4 * i + 12)), delta, load_vf(strip + 64 * i + 192))
        store_vf(strip + 64 * i, s0)
        store_vf(strip + 64 * i + 64, s1)
        store_vf(strip + 64 * i + 128, s2)
        store_vf(strip + 64 * i + 192, s3)
        a0 = fma(s0, splat_f32(load_f32(q + 4 * i)), a0)
        a1 = fma(s1, splat_f32(load_f32(q + 4 * i + 4)), a1)
        a2 = fma(s2, splat_f32(load_f32(q + 4 * i + 8)), a2)
        a3 = fma(s3, splat_f32(load_f32(q + 4 * i + 12)), a3)
        i += 4
    while i < key_dim:
        s0 = fma(splat_f32(load_f32(k + 4 * i)), delta, load_vf(strip + 64 * i))
        store_vf(strip + 64 * i, s0)
        a0 = fma(s0, splat_f32(load_f32(q + 4 * i)), a0)
        i += 1
    out = load_i64(args + 80)
    if out != 0:
        _store(out + row * load_i64(args + 88) + value_at, add(add(a0, a1), add(a2, a3)), lanes)


@njit(error_model="numpy")
def _read_strip(args, slot, head, column, lanes, strip):
    key_dim, value_dim = load_i64(args + 112), load_i64(args + 120)
    state = load_i64(args + 136) + slot * load_i64(args + 144) + 4 * (head * key_dim * value_dim + column)
    for i in range(key_dim):
        store_vf(strip + 64 * i, _load(state + 4 * value_dim * i, lanes))


@njit(error_model="numpy")
def _write_strip(args, slot, head, column, lanes, strip):
    key_dim, value_dim = load_i64(args + 112), load_i64(args + 120)
    state = load_i64(args + 136) + slot * load_i64(args + 144) + 4 * (head * key_dim * value_dim + column)
    for i in range(key_dim):
        _store(state + 4 * value_dim * i, load_vf(strip + 64 * i), lanes)


@njit(error_model="numpy")
def _delta_drafts(args, record, head, column, lanes, strip, path):
    """Draft rows, from the state after the committed ones, which `strip` holds and the slot keeps."""
    first, n_committed, n_rows = load_i64(record), load_i64(record + 8), load_i64(record + 16)
    parents = load_i64(record + 32)
    reached = n_committed - 1
    for offset in range(n_committed, n_rows):
        parent = load_i64(parents + 8 * (offset - n_committed))
        if parent != reached:
            _read_strip(args, load_i64(record + 24), head, column, lanes, strip)
            depth = 0
            while parent >= n_committed:
                store_i64(path + 8 * depth, parent)
                parent = load_i64(parents + 8 * (parent - n_committed))
                depth += 1
            while depth > 0:
                depth -= 1
                _advance(args, first + load_i64(path + 8 * depth), head, column, lanes, strip)
        _advance(args, first + offset, head, column, lanes, strip)
        reached = offset


@kernel("delta_rule")
def delta_rule(args, begin, end):
    """Per row: S = e^decay S; delta = beta (v - S^T k); S = S + k delta^T; out = S^T q."""
    value_heads, value_dim, strips = load_i64(args + 104), load_i64(args + 120), load_i64(args + 128)
    strip = opaque(stack_bytes(_STRIP_BYTES))
    path = opaque(stack_bytes(_PATH_BYTES))
    for item in range(begin, end):
        number = item // (value_heads * strips)
        place = item - number * value_heads * strips
        head = place // strips
        column = 16 * (place - head * strips)
        lanes = value_dim - column
        record = load_i64(args + 152) + 8 * SEQUENCE_WORDS * number
        first, n_committed, slot = load_i64(record), load_i64(record + 8), load_i64(record + 24)
        _read_strip(args, slot, head, column, lanes, strip)
        for offset in range(n_committed):
            _advance(args, first + offset, head, column, lanes, strip)
            for k in range(load_i64(record + 40)):
                pair = load_i64(record + 48) + 16 * k
                if load_i64(pair) == offset:
                    _write_strip(args, load_i64(pair + 8), head, column, lanes, strip)
        _write_strip(args, slot, head, column, lanes, strip)
        if load_i64(record + 16) > n_committed:
            _delta_drafts(args, record, head, column, lanes, strip, path)


@kernel("replay_delta")
def replay_delta(args, begin, end):
    """The state after accepted drafts."""
    value_heads, value_dim, strips = load_i64(args + 104), load_i64(args + 120), load_i64(args + 128)
    strip = opaque(stack_bytes(_STRIP_BYTES))
    for item in range(begin, end):
        number = item // (value_heads * strips)
        place = item - number * value_heads * strips
        head = place // strips
        column = 16 * (place - head * strips)
        lanes = value_dim - column
        record = load_i64(args + 152) + 8 * SEQUENCE_WORDS * number
        slot = load_i64(record + 24)
        _read_strip(args, slot, head, column, lanes, strip)
        for k in range(load_i64(record + 8)):
            _advance(args, load_i64(load_i64(record + 32) + 8 * k), head, column, lanes, strip)
        _write_strip(args, slot, head, column, lanes, strip)
