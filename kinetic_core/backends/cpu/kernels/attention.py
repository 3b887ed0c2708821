"""Causal attention over the blocks of the cache, a chunk of 256 absolute positions at a time.

A chunk is a block. For each chunk, in ascending order: the scores of its positions, lane by lane over the columns of
the head; their largest, exponentials and sum (16 lanes, tiles in order, then the tree of `hsum`); the weighted values,
position after position. Chunks are combined by the larger of the two maxima, as in Milakov and Gimelshein 2018, arXiv
1805.02867. Every row does this for itself, so the bits do not depend on how rows are grouped: up to four query vectors
that read the same key head share the loads of keys and values, no more.

A chunk outside a row's window or beyond its position is not computed for it. Lanes of a tile outside, or before the
layer's first position, are computed and thrown away: what lies there may be anything.

Arguments (int64 words, strides in bytes; the factor is the bits of a float64). An item is a tile of rows and a key
head: item // tiles is the head.

    0 q, 1 stride   2 out, 3 stride   4 kv_heads   5 query heads per key head   6 head_dim   7 factor of the scores
    8 window (0: none)   9 tile records, 10 their number
    11 address of the layer in block 0, 12 bytes per block
    13 f32[rows, kv_heads, head_dim] with drafts' keys, 14 with their values   15 first position of the layer

A tile record is 10 words: first row, rows, position of the first row (of drafts: of the deepest), address of the i32
block table, and for drafts: positions that the blocks hold, address of two i64 per row, the address of the i64 rows of
its path after those (itself last) and their number, and a word that is not 0; it is 0 for committed rows. Then for a
part of a tile of one row: first chunk, end chunk, and where the part's result goes (else 0, a large number and 0): per
query head 16 + head_dim f32: largest score, sum of exponentials (negative: the part sees nothing), and from 16 on the
weighted values.

Arguments of `merge_attention`, which combines the parts of long rows in ascending order, so that many threads may
share one row's chunks: 0 out, 1 stride, 2 query heads, 3 head_dim, 4 records: row, parts, address of the first part's
result, bytes from part to part. An item is a record and a query head: item // heads is the record.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.attention_chunk import (
    CHUNK,
    OUT_BYTES,
    SCORE_BYTES,
    draft_scores,
    merge,
    score_chunk,
    softmax,
    weigh_drafts,
    weigh_four,
    weigh_one,
)
from kinetic_core.backends.cpu.kernels.constants import MERGE_WORDS, PART_HEADER, TILE_WORDS
from kinetic_core.backends.cpu.simd import (
    copy_bytes,
    div,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    load_vf,
    splat_f32,
    stack_bytes,
    store_f32,
    store_i64,
    store_vf,
    zero_bytes,
)
from kinetic_core.backends.cpu.simd.attention import (
    F16_CACHE,
    F32_CACHE,
    element_bytes,
    fixed,
)
from kinetic_core.backends.cpu.simd.machine import opaque

GROUP_VECTORS = 4

# Scratch of up to four query vectors, by offsets from one address. LOW, HIGH: positions seen, from … up to.
_QUERY, _TARGET, _LOW, _HIGH, _STATE, _CHUNK_STATE = 0, 32, 64, 96, 128, 160
_SCORES, _CHUNK_OUT, _OUT, _SCRATCH_BYTES = 256, 4352, 8448, 12544


@njit(error_model="numpy")
def _begin(args, record, kv_head, first_vector, count, scratch):
    """Fill in the scratch of vectors first_vector …: v is row v // group, query head v % group of the key head."""
    group, head_dim, window = load_i64(args + 40), load_i64(args + 48), load_i64(args + 64)
    row0, start, first = load_i64(record), load_i64(record + 16), load_i64(args + 120)
    held, paths, are_drafts = load_i64(record + 32), load_i64(record + 40), load_i64(record + 48)
    for k in range(GROUP_VECTORS):
        vector = first_vector + (k if k < count else 0)
        row = vector // group
        column = 4 * head_dim * (kv_head * group + vector - row * group)
        at = scratch + 8 * k
        store_i64(at + _QUERY, load_i64(args) + (row0 + row) * load_i64(args + 8) + column)
        store_i64(at + _TARGET, load_i64(args + 16) + (row0 + row) * load_i64(args + 24) + column)
        high = held + load_i64(paths + 16 * row + 8) if are_drafts != 0 else start + row + 1
        store_i64(at + _LOW, max(first, high - window) if window > 0 else first)
        store_i64(at + _HIGH, high)
        store_f32(at + _STATE + 4, np.float32(-1.0))


@njit(error_model="numpy")
def _part(vector, base, end):
    """The positions of base … end - 1 that a vector sees, from base; where it sees none, the second is not larger."""
    return max(load_i64(vector + _LOW) - base, 0), min(load_i64(vector + _HIGH), end) - base


@njit(error_model="numpy")
def _union(scratch, count, base, end):
    """The least and largest ends of the vectors' parts of base … end - 1 that are not empty."""
    low, high = CHUNK, 0
    for k in range(count):
        here, there = _part(scratch + 8 * k, base, end)
        if here < there:
            low, high = min(low, here), max(high, there)
    return low, high


@njit(error_model="numpy")
def _intersection(scratch, count, base, end):
    """The positions of base … end - 1 that every vector sees; (CHUNK, CHUNK) where there are none."""
    low, high = 0, CHUNK
    for k in range(count):
        here, there = _part(scratch + 8 * k, base, end)
        low, high = max(low, here), min(high, there)
    return (low, high) if low < high else (CHUNK, CHUNK)


@njit(error_model="numpy")
def _weigh_block(cache, scratch, count, values, head_dim, base, end):
    """Weighted values of a block: what all vectors see is shared; before and after it come what single ones see."""
    low, high = _intersection(scratch, count, base, end)
    zero_bytes(scratch + _CHUNK_OUT, GROUP_VECTORS * OUT_BYTES)
    if low > 0:
        for k in range(count):
            here, there = _part(scratch + 8 * k, base, end)
            there = min(there, low)
            if here < there:
                weights, out = scratch + _SCORES + SCORE_BYTES * k, scratch + _CHUNK_OUT + OUT_BYTES * k
                weigh_one(cache, weights, values, head_dim, here, there - here, out)
    if low < high:
        weigh_four(cache, scratch + _SCORES, values, head_dim, low, high - low, scratch + _CHUNK_OUT)
    if high < CHUNK:
        for k in range(count):
            here, there = _part(scratch + 8 * k, base, end)
            if max(here, high) < there:
                weights, out = scratch + _SCORES + SCORE_BYTES * k, scratch + _CHUNK_OUT + OUT_BYTES * k
                weigh_one(cache, weights, values, head_dim, high, there - high, out)


@njit(error_model="numpy")
def _soften(scratch, count, factor, base):
    """Scores to exponentials; each vector's largest score and sum to its chunk state."""
    for k in range(count):
        low, high = _part(scratch + 8 * k, base, base + CHUNK)
        if low < high:
            top, total = softmax(scratch + _SCORES + SCORE_BYTES * k, factor, low, high)
            store_f32(scratch + 8 * k + _CHUNK_STATE, top)
            store_f32(scratch + 8 * k + _CHUNK_STATE + 4, total)


@njit(error_model="numpy")
def _combine(scratch, count, head_dim, base):
    for k in range(count):
        low, high = _part(scratch + 8 * k, base, base + CHUNK)
        if low < high:
            merge(
                head_dim,
                scratch + 8 * k + _STATE,
                load_f32(scratch + 8 * k + _CHUNK_STATE),
                load_f32(scratch + 8 * k + _CHUNK_STATE + 4),
                scratch + _CHUNK_OUT + OUT_BYTES * k,
                scratch + _OUT + OUT_BYTES * k,
            )


@njit(error_model="numpy")
def _whole_range(scratch, count):
    """The least and largest ends of what the vectors see."""
    low, high = load_i64(scratch + _LOW), load_i64(scratch + _HIGH)
    for k in range(1, count):
        low, high = min(low, load_i64(scratch + 8 * k + _LOW)), max(high, load_i64(scratch + 8 * k + _HIGH))
    return low, high


@njit(error_model="numpy")
def _draft_part(vector, held, base):
    """(first draft that a vector sees in a chunk, counted from `held`; their number)."""
    first = max(held, base, load_i64(vector + _LOW))
    return first - held, min(load_i64(vector + _HIGH), base + CHUNK) - first


@njit(error_model="numpy")
def _attend(cache, args, record, kv_head, first_vector, count, scratch):
    """Up to four vectors. A draft's path goes on behind the blocks, in rows of this step; the chunks are the same."""
    head_dim, factor = load_i64(args + 48), np.float32(load_f64(args + 56))
    size, table = element_bytes(cache), load_i64(record + 24)
    layer = load_i64(args + 88) + kv_head * 2 * size * CHUNK * head_dim
    row_bytes = 4 * head_dim * load_i64(args + 32)
    draft_keys = load_i64(args + 104) + 4 * head_dim * kv_head
    draft_values = load_i64(args + 112) + 4 * head_dim * kv_head
    paths, are_drafts, group = load_i64(record + 40), load_i64(record + 48) != 0, load_i64(args + 40)
    least, most = _whole_range(scratch, count)
    held = load_i64(record + 32) if are_drafts else most
    first_chunk = max(least // CHUNK, load_i64(record + 56))
    end_chunk = min((most + CHUNK - 1) // CHUNK, load_i64(record + 64))
    for chunk in range(first_chunk, end_chunk):
        base = chunk * CHUNK
        end = min(base + CHUNK, held)
        keys = layer
        if base < held:
            keys += load_i32(table + 4 * chunk) * load_i64(args + 96)
        low, high = _union(scratch, count, base, end)
        if low < high:
            score_chunk(cache, scratch + _QUERY, keys, head_dim, low // 16, (high + 15) // 16, scratch + _SCORES)
        drafts_here = are_drafts and base + CHUNK > held
        if drafts_here:
            for k in range(count):
                first, n = _draft_part(scratch + 8 * k, held, base)
                if n > 0:
                    path = load_i64(paths + 16 * ((first_vector + k) // group)) + 8 * first
                    at = scratch + _SCORES + SCORE_BYTES * k + 4 * (held + first - base)
                    query = load_i64(scratch + 8 * k + _QUERY)
                    draft_scores(query, draft_keys, row_bytes, path, n, head_dim, at)
        _soften(scratch, count, factor, base)
        _weigh_block(cache, scratch, count, keys + size * CHUNK * head_dim, head_dim, base, end)
        if drafts_here:
            for k in range(count):
                first, n = _draft_part(scratch + 8 * k, held, base)
                path = load_i64(paths + 16 * ((first_vector + k) // group)) + 8 * first
                weights = scratch + _SCORES + SCORE_BYTES * k + 4 * (held + first - base)
                out = scratch + _CHUNK_OUT + OUT_BYTES * k
                weigh_drafts(weights, draft_values, row_bytes, path, n, head_dim, out)
        _combine(scratch, count, head_dim, base)


@njit(error_model="numpy")
def _finish(state, out, target, head_dim):
    """target = out / sum of exponentials."""
    total = splat_f32(load_f32(state + 4))
    for at in range(0, head_dim, 16):
        store_vf(target + 4 * at, div(load_vf(out + 4 * at), total))


@njit(error_model="numpy")
def _put_out(args, record, kv_head, first_vector, count, scratch):
    """Results of up to four vectors: finished rows, or what a part saw."""
    group, head_dim = load_i64(args + 40), load_i64(args + 48)
    part = load_i64(record + 72)
    for k in range(count):
        state, out = scratch + 8 * k + _STATE, scratch + _OUT + OUT_BYTES * k
        if part == 0:
            _finish(state, out, load_i64(scratch + 8 * k + _TARGET), head_dim)
        else:
            target = part + 4 * (PART_HEADER + head_dim) * (kv_head * group + first_vector + k)
            store_f32(target, load_f32(state))
            store_f32(target + 4, load_f32(state + 4))
            copy_bytes(target + 4 * PART_HEADER, out, 4 * head_dim)


@njit(error_model="numpy", forceinline=True)
def _attention(cache, args, begin, end):
    group, records, n_tiles = load_i64(args + 40), load_i64(args + 72), load_i64(args + 80)
    scratch = opaque(stack_bytes(_SCRATCH_BYTES))
    for item in range(begin, end):
        kv_head = item // n_tiles
        record = records + 8 * TILE_WORDS * (item - kv_head * n_tiles)
        n_vectors = load_i64(record + 8) * group
        vector = 0
        while vector < n_vectors:
            count = min(GROUP_VECTORS, n_vectors - vector)
            _begin(args, record, kv_head, vector, count, scratch)
            _attend(cache, args, record, kv_head, vector, count, scratch)
            _put_out(args, record, kv_head, vector, count, scratch)
            vector += count


@kernel("attention_f16")
def attention_f16(args, begin, end):
    """Attention over float16 keys and values."""
    _attention(fixed(F16_CACHE), args, begin, end)


@kernel("attention_f32")
def attention_f32(args, begin, end):
    """Attention over float32 keys and values."""
    _attention(fixed(F32_CACHE), args, begin, end)


@kernel("merge_attention")
def merge_attention(args, begin, end):
    """Rows from their parts: the sequence of `_merge` that one thread would have gone through."""
    heads, head_dim, records = load_i64(args + 16), load_i64(args + 24), load_i64(args + 32)
    state, out = opaque(stack_bytes(64)), opaque(stack_bytes(OUT_BYTES))
    for item in range(begin, end):
        number = item // heads
        head = item - number * heads
        record = records + 8 * MERGE_WORDS * number
        part = load_i64(record + 16) + 4 * (PART_HEADER + head_dim) * head
        store_f32(state + 4, np.float32(-1.0))
        for _ in range(load_i64(record + 8)):
            total = load_f32(part + 4)
            if total >= np.float32(0.0) or total != total:
                merge(head_dim, state, load_f32(part), total, part + 4 * PART_HEADER, out)
            part += load_i64(record + 24)
        target = load_i64(args) + load_i64(record) * load_i64(args + 8) + 4 * head_dim * head
        _finish(state, out, target, head_dim)
