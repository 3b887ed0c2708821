"""Quantized activations against the written-out definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from kinetic_core.backends.cpu.kernels.constants import quantized_bytes
from kinetic_core.backends.cpu.kernels.quantize import (
    BIAS_8_AT,
    BIAS_16_AT,
    BIAS_32_AT,
    BIAS_128_AT,
    SCALE_32_AT,
    SCALE_256_AT,
    SCALED_SUM_AT,
    SUMS_16_AT,
    SUMS_32_AT,
)

from .support import F32, U8, quantize, row_blocks

KINDS = {"q8_32": 32, "q8_256": 256}


def expected(x: F32, size: int) -> tuple[np.ndarray, F32]:
    """(q of every element as i32[rows, blocks, size], d of every block): float32 arithmetic, rounded step by step."""
    blocks = x.reshape(x.shape[0], -1, size)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    used = amax >= np.float32(1e-30)
    inverse = np.float32(127) / np.where(used, amax, np.float32(1))
    q = np.where(used, np.rint(blocks * inverse), 0).astype(np.int32)
    return q, np.where(used, amax / np.float32(127), 0)[..., 0].astype(np.float32)


def field(blocks: U8, at: int, count: int, dtype: str) -> np.ndarray:
    n_bytes = count * np.dtype(dtype).itemsize
    return np.ascontiguousarray(blocks[..., at : at + n_bytes]).view(dtype)


def rows(n_rows: int, n_in: int) -> F32:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n_rows, n_in)).astype(np.float32) * np.exp(rng.standard_normal((n_rows, 1))).astype(
        np.float32
    )
    x[0, : n_in // 2] = 0
    x[1] = 127 * np.sign(x[1])
    x[2, ::2] = np.arange((n_in + 1) // 2) % 253 / 2 - 63  # halves: ties
    x[2, ::32] = 127
    x[3] *= np.float32(1e-33)
    x[4] = -0.0
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_rows", [7, 33])
def test_every_field(kind: str, n_rows: int) -> None:
    size = KINDS[kind]
    n_in = 3 * size
    x = rows(n_rows, n_in)
    blocks = row_blocks(kind, quantize(kind, x), n_rows, n_in)
    q, d = expected(x, size)
    assert np.array_equal(blocks[..., :size].view(np.int8), q)
    assert np.abs(q).max() == 127
    scale_at = SCALE_32_AT if size == 32 else SCALE_256_AT
    assert np.array_equal(field(blocks, scale_at, 1, "<f4")[..., 0].view(np.uint32), d.view(np.uint32))
    if size == 32:
        total = q.sum(axis=2, dtype=np.int32)
        scaled = d * total.astype(np.float32)
        assert np.array_equal(field(blocks, SCALED_SUM_AT, 1, "<f4")[..., 0], scaled)
        for at, factor in ((BIAS_8_AT, -8), (BIAS_16_AT, -16), (BIAS_128_AT, -128)):
            assert np.array_equal(field(blocks, at, 1, "<i4")[..., 0], factor * total)
    else:
        sixteen = q.reshape(n_rows, -1, 16, 16).sum(axis=3)
        thirty_two = q.reshape(n_rows, -1, 8, 32).sum(axis=3)
        assert np.array_equal(field(blocks, SUMS_16_AT, 16, "<i2"), sixteen)
        assert np.array_equal(field(blocks, SUMS_32_AT, 8, "<i2"), thirty_two[..., [0, 2, 1, 3, 4, 6, 5, 7]])
        assert np.array_equal(field(blocks, BIAS_32_AT, 16, "<i4"), -32 * sixteen)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_round_to_even(kind: str) -> None:
    size = KINDS[kind]
    x = np.zeros((1, size), np.float32)
    x[0, :6] = [127, 0.5, 1.5, -2.5, 125.5, -126.5]
    q = row_blocks(kind, quantize(kind, x), 1, size)[0, 0, :6].view(np.int8)
    assert q.tolist() == [127, 0, 2, -2, 126, -126]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_nan_or_infinity_has_a_nan_scale(kind: str, bad: float) -> None:
    size = KINDS[kind]
    x = np.ones((1, 2 * size), np.float32)
    x[0, size + 5] = bad
    blocks = row_blocks(kind, quantize(kind, x), 1, 2 * size)
    at = SCALE_32_AT if size == 32 else SCALE_256_AT
    scales = field(blocks, at, 1, "<f4").reshape(-1)
    assert scales[0] == np.float32(1) / np.float32(127)
    assert np.isnan(scales[1])
    assert not blocks[0, 1, :size].any()


def test_buffer_sizes() -> None:
    assert quantized_bytes("f32", 100, 3) == 1200
    assert quantized_bytes("q8_32", 64, 16) * 2 == quantized_bytes("q8_32", 64, 17)
    with pytest.raises(ValueError, match="multiple of 256 inputs, got 576"):
        quantized_bytes("q8_256", 576, 1)
