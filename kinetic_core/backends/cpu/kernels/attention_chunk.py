"""One chunk of attention: scores, exponentials, weighted values, and its combination with the chunks before.

Every function does for a query vector what it would do for it alone; see `attention` for the order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels.constants import MAX_HEAD_DIM
from kinetic_core.backends.cpu.kernels.mathfun import exp, exp_scalar
from kinetic_core.backends.cpu.simd import (
    add,
    and_,
    fma,
    ge,
    hmax,
    hsum,
    iota,
    load_f32,
    load_i64,
    load_vf,
    lt,
    max_,
    mul,
    select,
    splat_f32,
    splat_i32,
    store_f32,
    store_vf,
    sub,
    zero_f32,
)
from kinetic_core.backends.cpu.simd.attention import (
    STRIP,
    element_bytes,
    fixed,
    score_tiles,
    weigh_values,
)

CHUNK = 256
"""Positions of a chunk: a block."""
SCORE_BYTES, OUT_BYTES = 4 * CHUNK, 4 * MAX_HEAD_DIM
"""From one query vector's scores, and weighted values, to the next one's."""
_MINUS_INFINITY = np.float32(-np.inf)


@njit(error_model="numpy")
def score_chunk(cache, queries, keys, head_dim, first_tile, end_tile, scores):
    """Scores of four query vectors (repeated where there are fewer) against tiles of 16 positions."""
    tile_bytes = 16 * element_bytes(cache) * head_dim
    tile = first_tile
    while tile + STRIP <= end_tile:
        at, to = keys + tile * tile_bytes, scores + 64 * tile
        score_tiles(fixed(4), fixed(STRIP), cache, queries, at, head_dim, to, SCORE_BYTES)
        tile += STRIP
    if STRIP > 1:
        while tile < end_tile:
            at, to = keys + tile * tile_bytes, scores + 64 * tile
            score_tiles(fixed(4), fixed(1), cache, queries, at, head_dim, to, SCORE_BYTES)
            tile += 1


@njit(error_model="numpy", forceinline=True)
def _weigh(rows, cache, weights, values, head_dim, first, n, out):
    """out[vector] += weights * values over positions first … first + n - 1 of the chunk."""
    size = element_bytes(cache)
    value_bytes = size * head_dim
    weights += 4 * first
    values += value_bytes * first
    at = 0
    while at + 16 * STRIP <= head_dim:
        source, to = values + size * at, out + 4 * at
        weigh_values(rows, fixed(STRIP), cache, weights, SCORE_BYTES, source, value_bytes, n, to, OUT_BYTES)
        at += 16 * STRIP
    if STRIP > 1:
        while at < head_dim:
            source, to = values + size * at, out + 4 * at
            weigh_values(rows, fixed(1), cache, weights, SCORE_BYTES, source, value_bytes, n, to, OUT_BYTES)
            at += 16


@njit(error_model="numpy")
def weigh_four(cache, weights, values, head_dim, first, n, out):
    """out += weights * values of four vectors over positions first … first + n - 1 of the chunk."""
    _weigh(fixed(4), cache, weights, values, head_dim, first, n, out)


@njit(error_model="numpy")
def weigh_one(cache, weights, values, head_dim, first, n, out):
    """The same of one vector."""
    _weigh(fixed(1), cache, weights, values, head_dim, first, n, out)


@njit(error_model="numpy")
def softmax(scores, factor, low, high):
    """Scores of positions low … high - 1 become exponentials; (largest score, sum of exponentials)."""
    f, outside = splat_f32(factor), splat_f32(_MINUS_INFINITY)
    first, last = splat_i32(low), splat_i32(high)
    begin, end = low // 16, (high + 15) // 16
    largest = outside
    for tile in range(begin, end):
        position = add(iota(), splat_i32(16 * tile))
        inside = and_(ge(position, first), lt(position, last))
        s = select(inside, mul(load_vf(scores + 64 * tile), f), outside)
        store_vf(scores + 64 * tile, s)
        largest = max_(largest, s)
    top = hmax(largest)
    shift = splat_f32(top)
    total = zero_f32()
    for tile in range(begin, end):
        p = exp(sub(load_vf(scores + 64 * tile), shift))
        store_vf(scores + 64 * tile, p)
        total = add(total, p)
    return top, hsum(total)


@njit(error_model="numpy", forceinline=True)
def merge(head_dim, state, chunk_top, chunk_sum, chunk_out, out):
    """Combine a chunk with what the earlier ones gave. state: f32 (largest, sum), sum below 0 before the first."""
    top, total = load_f32(state), load_f32(state + 4)
    if total < np.float32(0.0):
        store_f32(state, chunk_top)
        store_f32(state + 4, chunk_sum)
        for at in range(0, head_dim, 16):
            store_vf(out + 4 * at, load_vf(chunk_out + 4 * at))
        return
    new_top = max_(top, chunk_top)
    old_factor = exp_scalar(np.float32(top - new_top))
    new_factor = exp_scalar(np.float32(chunk_top - new_top))
    store_f32(state, new_top)
    store_f32(state + 4, fma(chunk_sum, new_factor, np.float32(total * old_factor)))
    old, new = splat_f32(old_factor), splat_f32(new_factor)
    for at in range(0, head_dim, 16):
        store_vf(out + 4 * at, fma(load_vf(chunk_out + 4 * at), new, mul(load_vf(out + 4 * at), old)))


@njit(error_model="numpy")
def draft_scores(query, keys, key_bytes, path, n, head_dim, scores):
    """Scores of a query vector against `n` draft rows, each over the columns in order as a lane of a tile does it.

    Eight sums go on side by side: one after the other would wait for every product.
    """
    last = n - 1
    for k in range(0, n, 8):
        k1, k2, k3, k4 = min(k + 1, last), min(k + 2, last), min(k + 3, last), min(k + 4, last)
        k5, k6, k7 = min(k + 5, last), min(k + 6, last), min(k + 7, last)
        a0, a1 = keys + load_i64(path + 8 * k) * key_bytes, keys + load_i64(path + 8 * k1) * key_bytes
        a2, a3 = keys + load_i64(path + 8 * k2) * key_bytes, keys + load_i64(path + 8 * k3) * key_bytes
        a4, a5 = keys + load_i64(path + 8 * k4) * key_bytes, keys + load_i64(path + 8 * k5) * key_bytes
        a6, a7 = keys + load_i64(path + 8 * k6) * key_bytes, keys + load_i64(path + 8 * k7) * key_bytes
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0.0)
        for d in range(0, 4 * head_dim, 4):
            x = load_f32(query + d)
            s0, s1 = fma(x, load_f32(a0 + d), s0), fma(x, load_f32(a1 + d), s1)
            s2, s3 = fma(x, load_f32(a2 + d), s2), fma(x, load_f32(a3 + d), s3)
            s4, s5 = fma(x, load_f32(a4 + d), s4), fma(x, load_f32(a5 + d), s5)
            s6, s7 = fma(x, load_f32(a6 + d), s6), fma(x, load_f32(a7 + d), s7)
        store_f32(scores + 4 * k, s0)
        store_f32(scores + 4 * k1, s1)
        store_f32(scores + 4 * k2, s2)
        store_f32(scores + 4 * k3, s3)
        store_f32(scores + 4 * k4, s4)
        store_f32(scores + 4 * k5, s5)
        store_f32(scores + 4 * k6, s6)
        store_f32(scores + 4 * k7, s7)


@njit(error_model="numpy")
def weigh_drafts(weights, values, value_bytes, path, n, head_dim, out):
    """out += weights * values of one vector over `n` draft rows of a path."""
    for k in range(n):
        value = values + load_i64(path + 8 * k) * value_bytes
        w = splat_f32(load_f32(weights + 4 * k))
        for at in range(0, head_dim, 16):
            store_vf(out + 4 * at, fma(w, load_vf(value + 4 * at), load_vf(out + 4 * at)))
