"""Mixture of experts: each row's experts, the rows of each expert, and an expert's layers over its rows.

`route` chooses a row's experts. `group_experts` then sorts the *entries* of a step (row r's slot s is entry
r * n_used + s) by expert and gives each a *position*: the positions of an expert follow each other, in ascending
order of rows, and begin where a tile of the linear kernels may begin. Everything between the routing and the combined
output lies by position: the gathered inputs, gate and up, the quantized product, down. `run_experts` calls the linear
kernel of the weights' format once per expert and stretch of outputs, so an entry has the bits of that kernel, whoever
shares its expert. `combine_experts` sums a row's experts in ascending slot, that is, in ascending expert id.

The table (int64 words): 0 active experts, 1 units of work in all, then from word 2 one record of `EXPERT_WORDS` words
for each active expert: expert, first position, rows, units of the records before. `run_experts` cuts the units, not
the experts, into equal shares, so that its items are as many as the threads want. After n_experts records come the
positions, i64[n_rows * n_used].

Arguments (int64 words, strides in bytes; floats as the bits of a float64). Rows that lie in tiles, by
(tile, tile bytes, row bytes): row r begins at (r // tile) * tile bytes + (r % tile) * row bytes.

`route`, an item is a row: 0 logits, 1 stride, 2 out: ids as float32, 3 stride, 4 out: weights, 5 stride, 6 n_experts,
    7 n_used, 8 scoring (`SOFTMAX`, `SIGMOID_SCORES`), 9 bias: f32[n_experts] or 0, 10 normalized, 11 eps

`group_experts`, one item: 0 ids, 1 stride, 2 n_rows, 3 n_used, 4 n_experts, 5 table

`gather_entries`, an item is an entry: 0 positions, 1 n_used, 2 x, 3 out, 4 tile, 5 tile bytes of x, 6 row bytes of x,
    7 tile bytes of out, 8 row bytes of out, 9 pieces of a row, 10 bytes from one piece to the next, 11 bytes of a piece

`run_experts`, an item is a share: 0 table, 1 address of the linear kernel, 2 x, 3 tile, 4 tile bytes, 5 row bytes,
    6 stride of x (float kernels), 7 weights, 8 bytes of an expert, 9 n_in, 10 n_out, 11 out, 12 stride of out,
    13 shares

`at_positions`, an item is an entry: 0 positions, 1 address of a kernel whose items are positions, 2 its arguments

`combine_experts`, an item is a segment of a row: 0 positions, 1 n_used, 2 weights, 3 stride, 4 y, 5 stride, 6 out,
    7 stride, 8 segment width, 9 segments, 10 width
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import (
    EXPERT_WORDS,
    GROUP,
    MAX_EXPERTS,
    MAX_EXPERTS_USED,
    SOFTMAX,
    TILE_ROWS,
    UNITS_OF_WEIGHTS,
)
from kinetic_core.backends.cpu.kernels.mathfun import exp, sigmoid
from kinetic_core.backends.cpu.simd import (
    add,
    copy_bytes,
    div,
    f32_bits,
    fma,
    hmax,
    hsum,
    iota,
    load_f32,
    load_f64,
    load_i64,
    load_vf,
    load_vf_partial,
    lt,
    max_,
    select,
    splat_f32,
    splat_i32,
    stack_bytes,
    store_f32,
    store_i64,
    store_vf,
    store_vf_partial,
    sub,
    zero_bytes,
    zero_f32,
)
from kinetic_core.backends.cpu.simd.machine import call_kernel

_SCORE_BYTES, _KEY_BYTES, _COUNT_BYTES = 4 * MAX_EXPERTS, 8 * MAX_EXPERTS_USED, 8 * MAX_EXPERTS
_LEAST = np.float32(-np.inf)
_MAGNITUDE = 0x7FFFFFFF
_NAN_KEY = -(1 << 31)
_IDS = 1 << 16


@njit(error_model="numpy", forceinline=True)
def _padded(logits, at, n):
    """Logits at … at + 15, minus infinity from n on."""
    v = load_vf_partial(logits + 4 * at, min(16, n - at))
    return select(lt(iota(), splat_i32(n - at)), v, splat_f32(_LEAST))


@njit(error_model="numpy")
def _score(scoring, logits, n, scores):
    """Sigmoid or softmax of n logits; scores has room for whole vectors. The sum runs 16 lanes wide."""
    if scoring != SOFTMAX:
        for at in range(0, n, 16):
            store_vf(scores + 4 * at, sigmoid(_padded(logits, at, n)))
        return
    largest = splat_f32(_LEAST)
    for at in range(0, n, 16):
        largest = max_(largest, _padded(logits, at, n))
    top = splat_f32(hmax(largest))
    total = zero_f32()
    for at in range(0, n, 16):
        v = exp(sub(_padded(logits, at, n), top))
        store_vf(scores + 4 * at, v)
        total = add(total, v)
    total = splat_f32(hsum(total))
    for at in range(0, n, 16):
        store_vf(scores + 4 * at, div(load_vf(scores + 4 * at), total))


@njit(error_model="numpy")
def _key(score, expert):
    """An integer that is larger for a higher score, then for a lower id; -0 equals +0, NaN is below all."""
    if score != score:
        return _NAN_KEY * _IDS + _IDS - 1 - expert
    bits = f32_bits(score + np.float32(0.0))
    if bits >= 1 << 31:
        bits -= 1 << 32
    if bits < 0:
        bits ^= _MAGNITUDE
    return bits * _IDS + _IDS - 1 - expert


@njit(error_model="numpy")
def _insert(keys, found, key):
    """Put a key into a descending list of `found`."""
    at = found
    while at > 0 and load_i64(keys + 8 * (at - 1)) < key:
        store_i64(keys + 8 * at, load_i64(keys + 8 * (at - 1)))
        at -= 1
    store_i64(keys + 8 * at, key)


@kernel("route")
def route(args, begin, end):
    """Each row's experts in ascending id, and their weights."""
    n_experts, n_used, bias = load_i64(args + 48), load_i64(args + 56), load_i64(args + 72)
    scores, keys, chosen = stack_bytes(_SCORE_BYTES), stack_bytes(_KEY_BYTES), stack_bytes(_KEY_BYTES)
    for row in range(begin, end):
        _score(load_i64(args + 64), load_i64(args) + row * load_i64(args + 8), n_experts, scores)
        found = 0
        for expert in range(n_experts):
            score = load_f32(scores + 4 * expert)
            if bias != 0:
                score = score + load_f32(bias + 4 * expert)
            key = _key(score, expert)
            if found < n_used:
                _insert(keys, found, key)
                found += 1
            elif load_i64(keys + 8 * (n_used - 1)) < key:
                _insert(keys, n_used - 1, key)
        # Ids in ascending order: the list runs downward, so by their negatives.
        for slot in range(n_used):
            _insert(chosen, slot, load_i64(keys + 8 * slot) % _IDS)
        ids = load_i64(args + 16) + row * load_i64(args + 24)
        weights = load_i64(args + 32) + row * load_i64(args + 40)
        total = np.float32(0.0)
        for slot in range(n_used):
            expert = _IDS - 1 - load_i64(chosen + 8 * slot)
            score = load_f32(scores + 4 * expert)
            store_f32(ids + 4 * slot, np.float32(expert))
            store_f32(weights + 4 * slot, score)
            total = total + score
        if load_i64(args + 80) != 0:
            total = total + np.float32(load_f64(args + 88))
            for slot in range(n_used):
                store_f32(weights + 4 * slot, load_f32(weights + 4 * slot) / total)


@njit(error_model="numpy", forceinline=True)
def _tile_height(rows):
    """Rows of the tile that some rows of an expert begin on: the least that the linear kernels take them in."""
    if rows > 8:
        return TILE_ROWS
    if rows > 4:
        return 8
    return 4 if rows > 1 else 1


@kernel("group_experts")
def group_experts(args, begin, end):
    """The table of a step. Experts with many rows come first: so every tile begins on a multiple of its height."""
    experts, stride = load_i64(args), load_i64(args + 8)
    n_rows, n_used, n_experts = load_i64(args + 16), load_i64(args + 24), load_i64(args + 32)
    table = load_i64(args + 40)
    counts = stack_bytes(_COUNT_BYTES)
    for _ in range(begin, end):
        zero_bytes(counts, 8 * n_experts)
        for row in range(n_rows):
            for slot in range(n_used):
                at = counts + 8 * np.int64(load_f32(experts + row * stride + 4 * slot))
                store_i64(at, load_i64(at) + 1)
        record = table + 16
        n_active, units, position = 0, 0, 0
        # Counts become negative where they are first positions already: -1 - position.
        for height in (16, 8, 4, 1):
            for expert in range(n_experts):
                rows = load_i64(counts + 8 * expert)
                if rows <= 0 or _tile_height(rows) != height:
                    continue
                store_i64(record, expert)
                store_i64(record + 8, position)
                store_i64(record + 16, rows)
                store_i64(record + 24, units)
                store_i64(counts + 8 * expert, -1 - position)
                record += 8 * EXPERT_WORDS
                position += (rows + height - 1) // height * height
                units += rows + UNITS_OF_WEIGHTS
                n_active += 1
        store_i64(table, n_active)
        store_i64(table + 8, units)
        positions = table + 16 + 8 * EXPERT_WORDS * n_experts
        for row in range(n_rows):
            for slot in range(n_used):
                at = counts + 8 * np.int64(load_f32(experts + row * stride + 4 * slot))
                position = -1 - load_i64(at)
                store_i64(positions + 8 * (row * n_used + slot), position)
                store_i64(at, -2 - position)


@kernel("gather_entries")
def gather_entries(args, begin, end):
    """Copy each entry's input row to its position."""
    n_used, tile = load_i64(args + 8), load_i64(args + 32)
    pieces, step, n_bytes = load_i64(args + 72), load_i64(args + 80), load_i64(args + 88)
    for entry in range(begin, end):
        row, position = entry // n_used, load_i64(load_i64(args) + 8 * entry)
        x = load_i64(args + 16) + row // tile * load_i64(args + 40) + row % tile * load_i64(args + 48)
        out = load_i64(args + 24) + position // tile * load_i64(args + 56) + position % tile * load_i64(args + 64)
        for piece in range(pieces):
            copy_bytes(out + piece * step, x + piece * step, n_bytes)


@kernel("run_experts")
def run_experts(args, begin, end):
    """out[position] = weights[expert] · x[position] for a share of all experts' groups of outputs."""
    table, x, tile = load_i64(args), load_i64(args + 16), load_i64(args + 24)
    n_out, out, out_stride, shares = load_i64(args + 80), load_i64(args + 88), load_i64(args + 96), load_i64(args + 104)
    groups = (n_out + GROUP - 1) // GROUP
    total = load_i64(table + 8) * groups
    low, high = total * begin // shares, total * end // shares
    linear = stack_bytes(64)
    store_i64(linear + 16, load_i64(args + 48))
    store_i64(linear + 32, load_i64(args + 72))
    store_i64(linear + 40, n_out)
    store_i64(linear + 56, out_stride)
    for number in range(load_i64(table)):
        record = table + 16 + 8 * EXPERT_WORDS * number
        expert, position, rows = load_i64(record), load_i64(record + 8), load_i64(record + 16)
        units, before = rows + UNITS_OF_WEIGHTS, load_i64(record + 24) * groups
        first = max(0, (low - before + units - 1) // units)
        last = min(groups, (high - before + units - 1) // units)
        if first < last:
            store_i64(linear, rows)
            store_i64(linear + 8, x + position // tile * load_i64(args + 32) + position % tile * load_i64(args + 40))
            store_i64(linear + 24, load_i64(args + 56) + expert * load_i64(args + 64))
            store_i64(linear + 48, out + position * out_stride)
            call_kernel(load_i64(args + 8), linear, first, last)


@kernel("at_positions")
def at_positions(args, begin, end):
    """Run another kernel's items at the positions of these entries."""
    for entry in range(begin, end):
        position = load_i64(load_i64(args) + 8 * entry)
        call_kernel(load_i64(args + 8), load_i64(args + 16), position, position + 1)


@kernel("combine_experts")
def combine_experts(args, begin, end):
    """out = sum over the slots, in ascending order, of weight * y, by fma from +0."""
    n_used, y, y_stride = load_i64(args + 8), load_i64(args + 32), load_i64(args + 40)
    segment, segments, width = load_i64(args + 64), load_i64(args + 72), load_i64(args + 80)
    for item in range(begin, end):
        row = item // segments
        first = segment * (item - row * segments)
        positions = load_i64(args) + 8 * n_used * row
        weights = load_i64(args + 16) + row * load_i64(args + 24)
        out = load_i64(args + 48) + row * load_i64(args + 56)
        for at in range(first, min(first + segment, width), 16):
            here = min(16, width - at)
            total = zero_f32()
            for slot in range(n_used):
                source = y + load_i64(positions + 8 * slot) * y_stride + 4 * at
                v = load_vf(source) if here == 16 else load_vf_partial(source, here)
                total = fma(splat_f32(load_f32(weights + 4 * slot)), v, total)
            if here == 16:
                store_vf(out + 4 * at, total)
            else:
                store_vf_partial(out + 4 * at, total, here)
