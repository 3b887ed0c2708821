"""Linear kernels: agreement with gguf's dequantization, rows alone and together, worst-case integers."""

from __future__ import annotations

import numpy as np
import pytest

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType

from .support import (
    FORMATS,
    QUANTIZED,
    Linear,
    address,
    call,
    dequantized,
    dequantized_rows,
    extreme_weights,
    kind_of,
    quantize,
    random_weights,
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    kernel_compile.prepare(
        ["quantize_q8_32", "quantize_q8_256", *(f"linear_{type_.name.lower()}" for type_ in FORMATS)]
    )


def widths(type_: GGMLType) -> list[int]:
    return {1: [1, 64, 577], 32: [32, 64, 192, 576], 256: [256, 768]}[BLOCK_FORMATS[type_].block_size]


@pytest.mark.parametrize("type_", FORMATS)
def test_agrees_with_dequantized_weights(type_: GGMLType) -> None:
    for n_in in widths(type_):
        for n_out in (1, 8, 16, 40):
            weights = random_weights(type_, n_out, n_in, seed=n_in)
            x = np.random.default_rng(n_out).standard_normal((9, n_in)).astype(np.float32)
            quantized = quantize(kind_of(type_), x)
            got = Linear(type_, weights, n_out, n_in)(quantized, 9)
            rows, matrix = dequantized_rows(kind_of(type_), quantized, x), dequantized(type_, weights, n_out)
            want = rows @ matrix.T.astype(np.float64)
            # What float32 rounding can do to a sum: its terms' magnitudes, not its own.
            room = np.abs(rows) @ np.abs(matrix).T.astype(np.float64)
            assert (np.abs(got - want) <= 1e-6 * room).all(), (n_in, n_out)


@pytest.mark.parametrize("type_", FORMATS)
def test_a_row_alone_and_in_a_batch_has_the_same_bits(type_: GGMLType) -> None:
    n_in, n_out = widths(type_)[-1], 24
    linear = Linear(type_, random_weights(type_, n_out, n_in), n_out, n_in)
    x = np.random.default_rng(1).standard_normal((33, n_in)).astype(np.float32)
    alone = np.concatenate([linear(quantize(kind_of(type_), x[row : row + 1]), 1) for row in range(33)])
    for n_rows in (*range(1, 18), 33):
        together = linear(quantize(kind_of(type_), x[:n_rows]), n_rows)
        assert np.array_equal(together.view(np.uint32), alone[:n_rows].view(np.uint32)), n_rows


@pytest.mark.parametrize("type_", FORMATS)
def test_a_nan_row_leaves_the_others_alone(type_: GGMLType) -> None:
    n_in, n_out = widths(type_)[-1], 16
    linear = Linear(type_, random_weights(type_, n_out, n_in), n_out, n_in)
    x = np.random.default_rng(2).standard_normal((6, n_in)).astype(np.float32)
    clean = linear(quantize(kind_of(type_), x), 6)
    x[2, n_in // 2] = np.nan
    got = linear(quantize(kind_of(type_), x), 6)
    assert np.isnan(got[2]).all()
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(got[others].view(np.uint32), clean[others].view(np.uint32))


@pytest.mark.parametrize("type_", QUANTIZED)
def test_worst_case_integers_do_not_overflow(type_: GGMLType) -> None:
    """Rows of equal bits against activations of −127 and 127: every 16-bit and 24-bit sum at its largest."""
    n_in, n_out = 2 * BLOCK_FORMATS[type_].block_size, 20
    weights = extreme_weights(type_, n_out, n_in)
    x = np.full((5, n_in), 127, np.float32)
    x[1] = -127
    x[2, ::2] = -127
    x[3, n_in // 4 :] = -127
    x[4, (np.arange(n_in) // 16) % 2 == 0] = -127
    quantized = quantize(kind_of(type_), x)
    assert np.array_equal(dequantized_rows(kind_of(type_), quantized, x), x)
    got = Linear(type_, weights, n_out, n_in)(quantized, 5)
    want = x.astype(np.float64) @ dequantized(type_, weights, n_out).T.astype(np.float64)
    room = 127 * np.abs(dequantized(type_, weights, n_out)).sum(axis=1, dtype=np.float64)
    assert (np.abs(got - want) <= 2e-7 * room[None, :]).all()


@pytest.mark.parametrize("type_", [GGMLType.Q4_1, GGMLType.Q6_K, GGMLType.F16])
def test_no_rows_and_no_items_write_nothing(type_: GGMLType) -> None:
    n_in = widths(type_)[-1]
    linear = Linear(type_, random_weights(type_, 16, n_in), 16, n_in)
    quantized = quantize(kind_of(type_), np.ones((1, n_in), np.float32))
    out = np.full(16, np.nan, np.float32)
    for n_rows, end in ((0, 1), (1, 0)):
        arguments = [n_rows, address(quantized), 4 * n_in, address(linear.matrix), n_in, 16, address(out), 64]
        call(f"linear_{type_.name.lower()}", arguments, 0, end)
    assert np.isnan(out).all()
