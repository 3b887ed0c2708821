"""Packed weights: every format comes back whole, slices equal the whole, sizes and errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kinetic_core.backends.cpu.packing import (
    PACKED_TYPES,
    aligned_bytes,
    group_bytes,
    pack,
    packed_size,
    row_offsets,
    unpack_row,
)
from kinetic_core.errors import TensorError, UnsupportedModelError
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType

from .support import FORMATS, packed, random_weights


def test_every_format_with_a_kernel_is_packed() -> None:
    assert {type_ for type_, layout in BLOCK_FORMATS.items() if layout.has_kernel} == PACKED_TYPES


@pytest.mark.parametrize("type_", FORMATS)
@pytest.mark.parametrize("n_out", [1, 16, 23])
def test_every_row_comes_back(type_: GGMLType, n_out: int) -> None:
    n_in = 3 * BLOCK_FORMATS[type_].block_size
    weights = random_weights(type_, n_out, n_in)
    matrix = packed(type_, weights, n_out, n_in)
    rows = weights.reshape(n_out, -1)
    for row in range(n_out):
        assert np.array_equal(unpack_row(type_, matrix, n_out, n_in, row), rows[row])


@pytest.mark.parametrize("type_", FORMATS)
def test_filling_rows_are_zero(type_: GGMLType) -> None:
    n_in = 2 * BLOCK_FORMATS[type_].block_size
    matrix = packed(type_, np.full(17 * 2 * BLOCK_FORMATS[type_].block_bytes, 0xAB, np.uint8), 17, n_in)
    for row in range(17, 32):
        assert not unpack_row(type_, matrix, 17, n_in, row).any()


@pytest.mark.parametrize("type_", FORMATS)
def test_offsets_name_each_byte_of_a_group_block_once(type_: GGMLType) -> None:
    offsets = row_offsets(type_)
    main, tail = offsets[offsets >= 0], -1 - offsets[offsets < 0]
    assert np.array_equal(np.sort(main), np.arange(main.size))
    assert np.array_equal(np.sort(tail), np.arange(tail.size))
    assert main.size + tail.size == 16 * BLOCK_FORMATS[type_].block_bytes


@pytest.mark.parametrize("type_", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0])
def test_slices_by_several_threads_equal_the_whole(type_: GGMLType) -> None:
    n_out, n_in = 100, 512
    weights = random_weights(type_, n_out, n_in)
    target = aligned_bytes(packed_size(type_, n_out, n_in))
    target[:] = 0x55
    slices = [(0, 32), (32, 16), (48, 52)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda s: pack(type_, weights, n_out, n_in, target, *s), slices))
    assert np.array_equal(target, packed(type_, weights, n_out, n_in))


@pytest.mark.parametrize("type_", FORMATS)
def test_packed_size_is_the_files_and_a_group_is_whole_cache_lines(type_: GGMLType) -> None:
    layout = BLOCK_FORMATS[type_]
    n_blocks = 8 * 64 // layout.block_size or 1
    in_file = 64 * n_blocks * layout.block_bytes
    assert 0 <= packed_size(type_, 64, n_blocks * layout.block_size) - in_file < 4 * 64
    assert group_bytes(n_blocks, layout.block_bytes) % 64 == 0
    assert aligned_bytes(100).ctypes.data % 64 == 0


def test_wrong_sizes_and_slices_are_refused() -> None:
    weights = random_weights(GGMLType.Q8_0, 32, 64)
    target = aligned_bytes(packed_size(GGMLType.Q8_0, 32, 64))
    with pytest.raises(TensorError, match="wrong sizes for packing in a Q8_0 matrix of 32 by 64"):
        pack(GGMLType.Q8_0, weights[1:], 32, 64, target)
    with pytest.raises(TensorError, match="wrong sizes"):
        pack(GGMLType.Q8_0, weights, 32, 64, target[1:])
    with pytest.raises(TensorError, match=r"whole groups.*rows 8 to 32"):
        pack(GGMLType.Q8_0, weights, 32, 64, target, 8)
    with pytest.raises(TensorError, match=r"whole groups.*rows 0 to 20"):
        pack(GGMLType.Q8_0, weights, 32, 64, target, 0, 20)
    with pytest.raises(TensorError, match="contiguous"):
        pack(GGMLType.Q8_0, np.repeat(weights, 2)[::2], 32, 64, target)
    with pytest.raises(TensorError, match="whole number of blocks in a Q4_K matrix: got 128 inputs"):
        packed_size(GGMLType.Q4_K, 16, 128)
    with pytest.raises(UnsupportedModelError, match="no packed layout: got IQ2_XXS"):
        packed_size(GGMLType.IQ2_XXS, 16, 256)
