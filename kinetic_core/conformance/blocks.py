"""A check of every block format by itself: inputs that 8 bits hold exactly leave a kernel no excuse."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kinetic_core.conformance.models import ModelFamily, default_kv_type
from kinetic_core.conformance.steps import Part, make_batch, run
from kinetic_core.conformance.suite import Fault
from kinetic_core.gguf import BLOCK_FORMATS, BlockFormat, GGMLType, MemoryTensors, RawTensor, read_tensor
from kinetic_core.interfaces import LoadOptions
from kinetic_core.program import ProgramBuilder

N_IN, N_OUT, N_TOKENS = 512, 37, 9
LIMIT = 1e-5
"""Of the spread of the outputs: float32 sums of about 500 products."""
EXPONENTS = (118, 125)
"""Bytes between these (exclusive above) are exponents of MXFP4 that give numbers of a usual size."""


def blocks_are_multiplied_right(family: ModelFamily) -> None:
    """One linear layer in each block format that the CPU has kernels for; every bit of the blocks is random."""
    for type_, layout in BLOCK_FORMATS.items():
        if layout.has_kernel and layout.block_size > 1:
            _check(family, type_, layout)


def _check(family: ModelFamily, type_: GGMLType, layout: BlockFormat) -> None:
    rng = np.random.default_rng(int(type_))
    # 127 in every run of 16: then any scale of 8 bits, for runs of 16 or more, is 1, and no rounding takes place.
    inputs = rng.integers(-127, 128, (N_TOKENS, N_IN // 16, 16)).astype(np.float32)
    inputs[:, :, 0] = np.where(rng.integers(0, 2, inputs.shape[:2]), 127, -127)
    inputs = rng.permuted(inputs, axis=2).reshape(N_TOKENS, N_IN)
    weight = RawTensor(_random_blocks(layout, rng), type_, (N_OUT, N_IN))
    source = MemoryTensors({}, {"token_embd.weight": inputs, "output.weight": weight})
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = b.embedding(b.weight("token_embd.weight", inputs.shape))
    logits = b.linear(b.gather_outputs(hidden), b.weight("output.weight", (N_OUT, N_IN)))
    options = LoadOptions(n_threads=2, kv_type=default_kv_type(family.backend), n_blocks=1, n_slots=1)
    executable = family.backend().load(b.finish(hidden, logits), source, options)
    try:
        got = run(executable, make_batch(Part(tuple(range(N_TOKENS)), 0, (0,))))[0]
    finally:
        executable.close()
    expected = inputs.astype(np.float64) @ read_tensor(source, "output.weight").astype(np.float64).T
    error = float(np.abs(got - expected).max() / expected.std())
    if not error <= LIMIT:
        row, column = np.unravel_index(np.abs(got - expected).argmax(), got.shape)
        ours, right = got[row, column], expected[row, column]
        raise Fault(
            f"a matrix of {layout.name} times integers that 8 bits hold is {error:.2g} of the spread off, expected at "
            f"most {LIMIT:.2g}: output {column} of row {row} is {ours:.7g}, expected {right:.7g}"
        )


def _random_blocks(layout: BlockFormat, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """u8[bytes of the matrix]: random but for the scales, which are of a usual size and of both signs."""
    blocks = rng.integers(0, 256, (N_OUT * N_IN // layout.block_size, layout.block_bytes), np.uint8)
    at = 0
    for field in layout.fields:
        where = blocks[:, at : at + field.n_bytes]
        if field.dtype == "<f2":
            scales = rng.uniform(0.005, 0.02, (len(blocks), field.count)) * rng.choice((-1, 1), (len(blocks), 1))
            where[:] = scales.astype("<f2").view(np.uint8)
        elif layout.type is GGMLType.MXFP4 and field.name == "e":
            where[:] = rng.integers(*EXPONENTS, where.shape)
        at += field.n_bytes
    return blocks.reshape(-1)
