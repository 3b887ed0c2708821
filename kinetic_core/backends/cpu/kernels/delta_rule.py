"""The gated delta rule, see `strips` for how its states are run.

Arguments (int64 words, strides in bytes); from word 12 on those of `strips`, groups being key heads:

    0 q, 1 stride   2 k, 3 stride   4 v, 5 stride   6 decay, 7 stride   8 beta, 9 stride   10 out, 11 stride

The replay kernel takes the same arguments; rows are draft numbers, inputs what was copied aside, nothing is put out.
"""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.mathfun import exp_scalar
from kinetic_core.backends.cpu.kernels.strips import make_runner, splat_at
from kinetic_core.backends.cpu.simd import (
    add,
    fma,
    load_columns,
    load_f32,
    load_first_columns,
    load_i64,
    mul,
    splat_columns,
    store_columns,
    store_first_columns,
    sub,
    zero_columns,
)


@njit(error_model="numpy", forceinline=True)
def _decayed(source, g, columns):
    return mul(load_columns(source, columns), g)


@njit(error_model="numpy", forceinline=True)
def _update(source, g, k, delta, target, columns):
    s = fma(splat_at(k, columns), delta, _decayed(source, g, columns))
    store_columns(target, s)
    return s


@njit(error_model="numpy")
def _advance(args, row, head, column, lanes, columns, source, source_stride, target, target_stride):
    """Two passes over the strip: S^T k of the decayed state, then the update; the first leaves it in the cache.

    Sums over the key run in four interleaved parts. The decay is applied in both passes: a multiplication costs less
    than a store.
    """
    key_heads, key_dim, value_dim = load_i64(args + 96), load_i64(args + 112), load_i64(args + 120)
    key_at = 4 * key_dim * (head % key_heads)
    q = load_i64(args) + row * load_i64(args + 8) + key_at
    k = load_i64(args + 16) + row * load_i64(args + 24) + key_at
    value_at = 4 * (value_dim * head + column)
    v = load_first_columns(load_i64(args + 32) + row * load_i64(args + 40) + value_at, lanes, columns)
    decay = load_f32(load_i64(args + 48) + row * load_i64(args + 56) + 4 * head)
    beta = load_f32(load_i64(args + 64) + row * load_i64(args + 72) + 4 * head)
    g = splat_columns(exp_scalar(decay), columns)
    step = source_stride
    a0, a1, a2, a3 = zero_columns(columns), zero_columns(columns), zero_columns(columns), zero_columns(columns)
    at, i = source, 0
    while i + 4 <= key_dim:
        a0 = fma(_decayed(at, g, columns), splat_at(k + 4 * i, columns), a0)
        a1 = fma(_decayed(at + step, g, columns), splat_at(k + 4 * i + 4, columns), a1)
        a2 = fma(_decayed(at + 2 * step, g, columns), splat_at(k + 4 * i + 8, columns), a2)
        a3 = fma(_decayed(at + 3 * step, g, columns), splat_at(k + 4 * i + 12, columns), a3)
        at += 4 * step
        i += 4
    while i < key_dim:
        a0 = fma(_decayed(at, g, columns), splat_at(k + 4 * i, columns), a0)
        at += step
        i += 1
    delta = mul(splat_columns(beta, columns), sub(v, add(add(a0, a1), add(a2, a3))))
    a0, a1, a2, a3 = zero_columns(columns), zero_columns(columns), zero_columns(columns), zero_columns(columns)
    at, to, i = source, target, 0
    while i + 4 <= key_dim:
        s = _update(at, g, k + 4 * i, delta, to, columns)
        a0 = fma(s, splat_at(q + 4 * i, columns), a0)
        s = _update(at + step, g, k + 4 * i + 4, delta, to + target_stride, columns)
        a1 = fma(s, splat_at(q + 4 * i + 4, columns), a1)
        s = _update(at + 2 * step, g, k + 4 * i + 8, delta, to + 2 * target_stride, columns)
        a2 = fma(s, splat_at(q + 4 * i + 8, columns), a2)
        s = _update(at + 3 * step, g, k + 4 * i + 12, delta, to + 3 * target_stride, columns)
        a3 = fma(s, splat_at(q + 4 * i + 12, columns), a3)
        at += 4 * step
        to += 4 * target_stride
        i += 4
    while i < key_dim:
        s = _update(at, g, k + 4 * i, delta, to, columns)
        a0 = fma(s, splat_at(q + 4 * i, columns), a0)
        at += step
        to += target_stride
        i += 1
    out = load_i64(args + 80)
    if out != 0:
        store_first_columns(out + row * load_i64(args + 88) + value_at, add(add(a0, a1), add(a2, a3)), lanes)


_run = make_runner(_advance)


@kernel("delta_rule")
def delta_rule(args, begin, end):
    """Per row: S = e^decay S; delta = beta (v - S^T k); S = S + k delta^T; out = S^T q."""
    _run(args, begin, end, 0)


@kernel("replay_delta")
def replay_delta(args, begin, end):
    """The state after accepted drafts."""
    _run(args, begin, end, 1)
