"""The recurrence of Mamba-2, see `strips` for how its states are run.

Arguments (int64 words, strides in bytes); from word 12 on those of `strips`:

    0 x, 1 stride   2 b, 3 stride   4 c, 5 stride   6 dt, 7 stride   8 out, 9 stride
    10 a: f32[heads]   11 d: f32[heads]

The replay kernel takes the same arguments; rows are draft numbers, inputs what was copied aside (c is not needed: b is
given in its place), nothing is put out.
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
    zero_columns,
)


@njit(error_model="numpy", forceinline=True)
def _update(source, decay, b, x, target, columns):
    s = fma(splat_at(b, columns), x, mul(load_columns(source, columns), decay))
    store_columns(target, s)
    return s


@njit(error_model="numpy")
def _advance(args, row, head, column, lanes, columns, source, source_stride, target, target_stride):
    """One pass: each line of the strip is read once and written once; sums over them run in four interleaved parts."""
    groups, heads = load_i64(args + 96), load_i64(args + 104)
    state_dim, head_dim = load_i64(args + 112), load_i64(args + 120)
    group_at = 4 * state_dim * (head // (heads // groups))
    b = load_i64(args + 16) + row * load_i64(args + 24) + group_at
    c = load_i64(args + 32) + row * load_i64(args + 40) + group_at
    column_at = 4 * (head_dim * head + column)
    x = load_first_columns(load_i64(args) + row * load_i64(args + 8) + column_at, lanes, columns)
    dt = load_f32(load_i64(args + 48) + row * load_i64(args + 56) + 4 * head)
    decay = splat_columns(exp_scalar(dt * load_f32(load_i64(args + 80) + 4 * head)), columns)
    step = mul(splat_columns(dt, columns), x)
    a0, a1, a2, a3 = zero_columns(columns), zero_columns(columns), zero_columns(columns), zero_columns(columns)
    n = 0
    while n + 4 <= state_dim:
        s = _update(source, decay, b + 4 * n, step, target, columns)
        a0 = fma(s, splat_at(c + 4 * n, columns), a0)
        s = _update(source + source_stride, decay, b + 4 * n + 4, step, target + target_stride, columns)
        a1 = fma(s, splat_at(c + 4 * n + 4, columns), a1)
        s = _update(source + 2 * source_stride, decay, b + 4 * n + 8, step, target + 2 * target_stride, columns)
        a2 = fma(s, splat_at(c + 4 * n + 8, columns), a2)
        s = _update(source + 3 * source_stride, decay, b + 4 * n + 12, step, target + 3 * target_stride, columns)
        a3 = fma(s, splat_at(c + 4 * n + 12, columns), a3)
        source += 4 * source_stride
        target += 4 * target_stride
        n += 4
    while n < state_dim:
        s = _update(source, decay, b + 4 * n, step, target, columns)
        a0 = fma(s, splat_at(c + 4 * n, columns), a0)
        source += source_stride
        target += target_stride
        n += 1
    out = load_i64(args + 64)
    if out != 0:
        d = splat_at(load_i64(args + 88) + 4 * head, columns)
        total = fma(d, x, add(add(a0, a1), add(a2, a3)))
        store_first_columns(out + row * load_i64(args + 72) + column_at, total, lanes)


_run = make_runner(_advance)


@kernel("mamba2_scan")
def mamba2_scan(args, begin, end):
    """Per row: S = e^(dt a) S + b (dt x)^T; out = S^T c + d x."""
    _run(args, begin, end, 0)


@kernel("replay_mamba2")
def replay_mamba2(args, begin, end):
    """The state after accepted drafts."""
    _run(args, begin, end, 1)
