"""Rotary position embedding by tables, and the write of a row's key and value into the cache.

A table holds, per position, f32[n] cosines and then f32[n] sines. Half-split: n = rotary_dim / 2. Interleaved:
n = rotary_dim, each pair's cosine twice and its sine as (-sin, sin), so that out = x * cos + swap(x) * sin.

Arguments of `rope` (int64 words, strides in bytes). An item is a row.

    0 x, 1 stride   2 out, 3 stride   4 heads   5 head_dim   6 rotary_dim   7 interleaved (0, 1)
    8 table, 9 bytes per position   10 i64 positions of the rows

Arguments of the store_kv kernels. An item is a row.

    0 k, 1 stride   2 v, 3 stride   4 kv_heads   5 head_dim
    6 i64 positions of the rows     7 i64 KV block of each row, -1 for a draft
    8 address of the layer in block 0   9 bytes per block
    10 f32[rows, kv_heads, head_dim] for drafts' keys, 11 the same for values, rounded to the cache type
    12 argument block of the rope that makes k first, or 0

The cache: per block and layer, per key head, K as [16 tiles][head_dim][16 positions], then V as [256][head_dim].
"""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.simd import (
    copy_bytes,
    fma,
    load_f16,
    load_i32,
    load_i64,
    load_u16,
    load_vf,
    load_vf_partial,
    mul,
    neg,
    stack_bytes,
    store_f32,
    store_i16,
    store_i32,
    store_vf,
    store_vf_f16,
    store_vf_partial,
    swap_pairs,
)
from kinetic_core.backends.cpu.simd.attention import F16_CACHE, F32_CACHE, element_bytes, fixed

BLOCK_POSITIONS = 256
TILE_POSITIONS = 16


@njit(error_model="numpy", forceinline=True)
def _rotate_halves(x, out, half, cosines, sines):
    at = 0
    while at < half:
        here = min(16, half - at)
        if here == 16:
            c, s = load_vf(cosines + 4 * at), load_vf(sines + 4 * at)
            a, b = load_vf(x + 4 * at), load_vf(x + 4 * (at + half))
            store_vf(out + 4 * at, fma(neg(b), s, mul(a, c)))
            store_vf(out + 4 * (at + half), fma(a, s, mul(b, c)))
        else:
            c, s = load_vf_partial(cosines + 4 * at, here), load_vf_partial(sines + 4 * at, here)
            a, b = load_vf_partial(x + 4 * at, here), load_vf_partial(x + 4 * (at + half), here)
            store_vf_partial(out + 4 * at, fma(neg(b), s, mul(a, c)), here)
            store_vf_partial(out + 4 * (at + half), fma(a, s, mul(b, c)), here)
        at += 16


@njit(error_model="numpy", forceinline=True)
def _rotate_pairs(x, out, rotary_dim, cosines, sines):
    at = 0
    while at < rotary_dim:
        here = min(16, rotary_dim - at)
        if here == 16:
            a = load_vf(x + 4 * at)
            v = fma(swap_pairs(a), load_vf(sines + 4 * at), mul(a, load_vf(cosines + 4 * at)))
            store_vf(out + 4 * at, v)
        else:
            a = load_vf_partial(x + 4 * at, here)
            v = mul(a, load_vf_partial(cosines + 4 * at, here))
            v = fma(swap_pairs(a), load_vf_partial(sines + 4 * at, here), v)
            store_vf_partial(out + 4 * at, v, here)
        at += 16


@njit(error_model="numpy")
def _rope_row(args, row):
    x = load_i64(args) + row * load_i64(args + 8)
    out = load_i64(args + 16) + row * load_i64(args + 24)
    heads, head_dim, rotary_dim = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
    interleaved = load_i64(args + 56)
    position = load_i64(load_i64(args + 80) + 8 * row)
    cosines = load_i64(args + 64) + position * load_i64(args + 72)
    for _ in range(heads):
        if interleaved:
            _rotate_pairs(x, out, rotary_dim, cosines, cosines + 4 * rotary_dim)
        else:
            _rotate_halves(x, out, rotary_dim // 2, cosines, cosines + 2 * rotary_dim)
        if rotary_dim < head_dim:
            copy_bytes(out + 4 * rotary_dim, x + 4 * rotary_dim, 4 * (head_dim - rotary_dim))
        x += 4 * head_dim
        out += 4 * head_dim


@kernel("rope")
def rope(args, begin, end):
    """Turn every head of the rows by their positions."""
    for row in range(begin, end):
        _rope_row(args, row)


@njit(error_model="numpy", forceinline=True)
def _store_head(cache, k, v, keys, values, slot, head_dim):
    """One head's key (into its tile's columns) and value (into its row)."""
    size = element_bytes(cache)
    column = keys + size * ((slot // TILE_POSITIONS) * TILE_POSITIONS * head_dim + slot % TILE_POSITIONS)
    target = values + size * slot * head_dim
    if size == 2:
        halves = stack_bytes(512)
        for at in range(0, head_dim, 16):
            store_vf_f16(halves + 2 * at, load_vf(k + 4 * at))
            store_vf_f16(target + 2 * at, load_vf(v + 4 * at))
        for d in range(head_dim):
            store_i16(column + 32 * d, load_u16(halves + 2 * d))
    else:
        for d in range(head_dim):
            store_i32(column + 64 * d, load_i32(k + 4 * d))
        copy_bytes(target, v, 4 * head_dim)


@njit(error_model="numpy", forceinline=True)
def _store_draft(cache, source, target, width):
    """A draft's row as f32, rounded to the cache type."""
    if element_bytes(cache) == 2:
        halves = stack_bytes(32)
        for at in range(0, width, 16):
            store_vf_f16(halves, load_vf(source + 4 * at))
            for lane in range(16):
                store_f32(target + 4 * (at + lane), load_f16(halves + 2 * lane))
    else:
        copy_bytes(target, source, 4 * width)


@njit(error_model="numpy", forceinline=True)
def _store_kv(cache, args, begin, end):
    kv_heads, head_dim = load_i64(args + 32), load_i64(args + 40)
    width = kv_heads * head_dim
    rope_args = load_i64(args + 96)
    size = element_bytes(cache)
    for row in range(begin, end):
        if rope_args != 0:
            _rope_row(rope_args, row)
        k = load_i64(args) + row * load_i64(args + 8)
        v = load_i64(args + 16) + row * load_i64(args + 24)
        block = load_i64(load_i64(args + 56) + 8 * row)
        if block < 0:
            _store_draft(cache, k, load_i64(args + 80) + 4 * width * row, width)
            _store_draft(cache, v, load_i64(args + 88) + 4 * width * row, width)
            continue
        slot = load_i64(load_i64(args + 48) + 8 * row) % BLOCK_POSITIONS
        keys = load_i64(args + 64) + block * load_i64(args + 72)
        for _ in range(kv_heads):
            values = keys + size * BLOCK_POSITIONS * head_dim
            _store_head(cache, k, v, keys, values, slot, head_dim)
            keys = values + size * BLOCK_POSITIONS * head_dim
            k += 4 * head_dim
            v += 4 * head_dim


@kernel("store_kv_f16")
def store_kv_f16(args, begin, end):
    """Round keys and values to float16 and write them to the rows' blocks, or aside for drafts."""
    _store_kv(fixed(F16_CACHE), args, begin, end)


@kernel("store_kv_f32")
def store_kv_f32(args, begin, end):
    """Write keys and values to the rows' blocks, or aside for drafts."""
    _store_kv(fixed(F32_CACHE), args, begin, end)
