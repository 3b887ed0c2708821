"""Embedding rows: the bits of gguf's dequantization, from the file's layout and from the packed one."""

from __future__ import annotations

import numpy as np
import pytest

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.packing import row_offsets
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType

from .support import FORMATS, address, call, dequantized, packed, random_weights


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    kernel_compile.prepare([f"embedding_{type_.name.lower()}" for type_ in FORMATS])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("type_", FORMATS)
def test_rows_have_the_bits_of_gguf(type_: GGMLType, is_packed: bool) -> None:
    size = BLOCK_FORMATS[type_].block_size
    n_out, n_in = 40, 37 if size == 1 else 3 * size
    weights = random_weights(type_, n_out, n_in, seed=3)
    if type_ is GGMLType.MXFP4:  # exponents whose scale is a denormal, and the largest ones
        weights.reshape(n_out, -1, 17)[:, :, 0] = np.array([0, 1, 2, 3, 254, 127, 100, 5], np.uint8)[
            np.arange(n_out) % 8
        ][:, None]
    ids = np.array([0, 39, 17, 17, 3, 16, 31, 1], np.int32)
    out = np.full((len(ids), n_in + 2), np.nan, np.float32)
    matrix = packed(type_, weights, n_out, n_in) if is_packed else weights
    offsets = address(row_offsets(type_)) if is_packed else 0
    arguments = [len(ids), address(ids), address(matrix), n_in, address(out), out.strides[0], offsets]
    call(f"embedding_{type_.name.lower()}", arguments, 0, len(ids))
    want = dequantized(type_, weights, n_out)[ids]
    assert np.array_equal(out[:, :n_in].view(np.uint32), want.view(np.uint32))
    assert np.isnan(out[:, n_in:]).all()
