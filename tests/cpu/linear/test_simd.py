"""The SIMD vocabulary against NumPy, bit for bit, in this process's lowering."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from kinetic_core.backends.cpu import simd
from kinetic_core.backends.cpu.simd import (
    abs_,
    add,
    bitcast_f32,
    bitcast_i32,
    copy_bytes,
    div,
    duplicate_even,
    duplicate_odd,
    eq,
    extract,
    fma,
    ge,
    hmax,
    hmin,
    hsum,
    le,
    load_bf16,
    load_f16,
    load_f32,
    load_i8,
    load_i16,
    load_i32,
    load_u8,
    load_u16,
    load_u32,
    load_vf,
    load_vf_bf16,
    load_vf_f16,
    load_vf_partial,
    load_vi,
    lt,
    max_,
    min_,
    mul,
    neg,
    round_to_i32,
    sar,
    select,
    shl,
    shr,
    splat_f32,
    splat_i32,
    sqrt,
    stack_bytes,
    store_f16,
    store_f32,
    store_i32,
    store_vf,
    store_vf_f16,
    store_vf_partial,
    store_vi,
    sub,
    swap_pairs,
    to_f32,
    to_i32,
    zero_bytes,
)

F32 = npt.NDArray[np.float32]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, 65504, 65519.99, 65520, 2.0**-25], np.float32)


def at(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.tobytes() == b.tobytes()


def values(seed: int, count: int = 16) -> F32:
    return (np.random.default_rng(seed).standard_normal(count) * 100).astype(np.float32)


@njit(error_model="numpy")
def _arithmetic(a, b, c, out):
    x, y, z = load_vf(a), load_vf(b), load_vf(c)
    store_vf(out, add(x, y))
    store_vf(out + 64, sub(x, y))
    store_vf(out + 128, mul(x, y))
    store_vf(out + 192, div(x, y))
    store_vf(out + 256, fma(x, y, z))
    store_vf(out + 320, add(mul(x, y), z))
    store_vf(out + 384, sqrt(abs_(x)))
    store_vf(out + 448, neg(x))
    store_vf(out + 512, max_(x, y))
    store_vf(out + 576, min_(x, y))
    store_vf(out + 640, select(lt(x, y), z, x))
    store_vf(out + 704, select(ge(x, z), y, z))


def test_float_arithmetic_is_rounded_step_by_step_unless_fused() -> None:
    for seed in range(50):
        x, y, z = values(seed), values(seed + 100), values(seed + 200)
        z = -(x * y) * np.float32(1 + 2.0**-20)  # cancels, so that a fused result differs
        out = np.empty((12, 16), np.float32)
        _arithmetic(at(x), at(y), at(z), at(out))
        product = x.astype(np.float64) * y.astype(np.float64)  # exact: 48 bits
        fused = np.array([float(np.float64(p) + np.float64(q)) for p, q in zip(product, z, strict=True)])
        want = [x + y, x - y, x * y, x / y, fused.astype(np.float32), x * y + z, np.sqrt(np.abs(x)), -x]
        want += [np.where(x > y, x, y), np.where(x < y, x, y), np.where(x < y, z, x), np.where(x >= z, y, z)]
        for row, expected in enumerate(want):
            assert same_bits(out[row], expected.astype(np.float32)), (row, seed)
        assert not np.array_equal(out[4], out[5])


def test_maximum_and_minimum_return_the_second_argument_of_an_unordered_pair() -> None:
    x, y = np.full(16, np.nan, np.float32), np.arange(16, dtype=np.float32)
    out = np.empty((12, 16), np.float32)
    _arithmetic(at(x), at(y), at(y), at(out))
    assert same_bits(out[8], y) and same_bits(out[9], y)
    _arithmetic(at(y), at(x), at(y), at(out))
    assert np.isnan(out[8:10]).all()


@njit(error_model="numpy")
def _reductions(a, out):
    x = load_vf(a)
    store_f32(out, hsum(x))
    store_f32(out + 4, hmax(x))
    store_f32(out + 8, hmin(x))
    store_i32(out + 12, hsum(round_to_i32(x)))
    store_i32(out + 16, hmax(round_to_i32(x)))
    store_i32(out + 20, hmin(round_to_i32(x)))
    store_f32(out + 24, extract(x, 11))


def test_reductions_add_by_halves() -> None:
    for seed in range(20):
        x = values(seed)
        out = np.empty(7, np.float32)
        _reductions(at(x), at(out))
        tree = x.copy()
        while tree.size > 1:
            tree = tree[: tree.size // 2] + tree[tree.size // 2 :]
        whole = np.rint(x).astype(np.int32)
        assert same_bits(out[:3], np.array([tree[0], x.max(), x.min()], np.float32))
        assert out[3:6].view(np.int32).tolist() == [whole.sum(), whole.max(), whole.min()]
        assert out[6] == x[11]


@njit(error_model="numpy")
def _conversions(a, out):
    x = load_vf(a)
    store_vi(out, round_to_i32(x))
    store_vi(out + 64, to_i32(x))
    store_vf(out + 128, to_f32(bitcast_i32(x)))
    store_vi(out + 192, shl(bitcast_i32(x), 3))
    store_vi(out + 256, shr(bitcast_i32(x), 3))
    store_vi(out + 320, sar(bitcast_i32(x), 3))
    store_vf(out + 384, swap_pairs(x))
    store_vf(out + 448, duplicate_even(x))
    store_vf(out + 512, duplicate_odd(x))
    store_vi(out + 576, select(eq(load_vi(a), splat_i32(0)), splat_i32(7), splat_i32(-1)))
    store_vf(out + 640, bitcast_f32(bitcast_i32(x)))
    store_vf(out + 704, select(le(x, splat_f32(np.float32(0.5))), x, splat_f32(np.float32(9.0))))


def test_conversions_shifts_and_shuffles() -> None:
    x = values(3)
    x[:8] = [0.5, 1.5, 2.5, -0.5, -1.5, 0.0, 4194303.5, -4194303.5]
    out = np.empty((12, 16), np.int32)
    _conversions(at(x), at(out))
    bits, lanes = x.view(np.int32), np.arange(16)
    assert same_bits(out[0], np.rint(x).astype(np.int32))
    assert same_bits(out[1], np.trunc(x).astype(np.int32))
    assert same_bits(out[2], bits.astype(np.float32))
    assert same_bits(out[3], (bits.view(np.uint32) << 3))
    assert same_bits(out[4], (bits.view(np.uint32) >> 3))
    assert same_bits(out[5], bits >> 3)
    for row, order in ((6, lanes ^ 1), (7, lanes & ~1), (8, lanes | 1)):
        assert same_bits(out[row], x[order])
    assert same_bits(out[9], np.where(bits == 0, 7, -1).astype(np.int32))
    assert same_bits(out[10], x)
    assert same_bits(out[11], np.where(x <= 0.5, x, np.float32(9)))


@njit(error_model="numpy")
def _widen_halves(halves, out, count):
    for k in range(count // 16):
        store_vf(out + 64 * k, load_vf_f16(halves + 32 * k))


@njit(error_model="numpy")
def _narrow_floats(floats, out, count):
    for k in range(count // 16):
        store_vf_f16(out + 32 * k, load_vf(floats + 64 * k))


@njit(error_model="numpy")
def _scalar_halves(halves, out):
    store_f32(out, load_f16(halves))
    store_f32(out + 4, load_bf16(halves))
    store_f16(out + 8, load_f16(halves + 2))
    store_vf(out + 64, load_vf_bf16(halves))


def test_every_float16_widens_exactly() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)
    _widen_halves(at(halves), at(out), 65536)
    want = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(np.isnan(out), np.isnan(want))
    known = ~np.isnan(want)
    assert same_bits(out[known], want[known])


def test_narrowing_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng(0)
    exact = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    above, below = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))
    steps = np.sort(exact)
    halfway = (steps[1:] + steps[:-1]) / 2
    random = rng.integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    x = np.concatenate([exact, above, below, halfway, random[~np.isnan(random)], SPECIAL]).astype(np.float32)
    x = np.ascontiguousarray(np.resize(x, x.size // 16 * 16 + 16))
    out = np.empty(x.size, np.uint16)
    _narrow_floats(at(x), at(out), x.size)
    with np.errstate(over="ignore"):
        assert same_bits(out, x.astype(np.float16))


def test_scalar_halves_and_bfloat16() -> None:
    halves = np.array([0x3C01, 0x8001, *range(14)], np.uint16)
    out = np.zeros(32, np.float32)
    _scalar_halves(at(halves), at(out))
    assert out[0] == np.float32(np.array([0x3C01], np.uint16).view(np.float16)[0])
    assert out[1:2].view(np.uint32)[0] == 0x3C010000
    assert out[2:3].view(np.uint16)[0] == 0x8001
    assert same_bits(out[16:], (halves.astype(np.uint32) << 16))


@njit(error_model="numpy")
def _partial(a, out, count):
    store_vf_partial(out, load_vf(a), count)
    store_vf(out + 128, load_vf_partial(a, count))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 15, 16, 40])
def test_partial_loads_and_stores_touch_no_more(count: int) -> None:
    x, out = values(1), np.full(48, np.nan, np.float32)
    _partial(at(x), at(out), count)
    used = min(count, 16)
    assert same_bits(out[:used], x[:used])
    assert np.isnan(out[used:32]).all()
    assert same_bits(out[32:], np.where(np.arange(16) < used, x, np.float32(0)))


@njit(error_model="numpy")
def _memory(a, out):
    scratch = stack_bytes(64)
    zero_bytes(scratch, 64)
    copy_bytes(scratch, a, 13)
    copy_bytes(out, scratch, 64)
    return (
        load_i8(a),
        load_u8(a),
        load_i16(a),
        load_u16(a),
        load_i32(a),
        load_u32(a),
        load_f32(a + 4),
    )


def test_scalar_loads_extend_as_their_name_says() -> None:
    source = np.frombuffer(b"\xfe\xff\xff\xff" + np.float32(1.5).tobytes() + bytes(range(1, 57)), np.uint8).copy()
    out = np.full(64, 0xAA, np.uint8)
    got = _memory(at(source), at(out))
    assert got == (-2, 254, -2, 65534, -2, 0xFFFFFFFE, 1.5)
    assert same_bits(out[:13], source[:13])
    assert not out[13:].any()


def test_lanes_follow_the_lowering() -> None:
    assert (16 if simd.LOWERING == "avx512vnni" else 8) == simd.LANES
    assert simd.WF.count == simd.LANES
    assert simd.VF.count == 16
