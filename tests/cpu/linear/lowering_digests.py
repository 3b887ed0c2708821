"""Prints as JSON the lowering and a digest of each named format's results. Run in a process of its own."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.simd import LOWERING
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType

from .support import Linear, extreme_weights, kind_of, quantize, random_weights


def main(names: list[str]) -> None:
    kernel_compile.prepare(["quantize_q8_32", "quantize_q8_256", *(f"linear_{name.lower()}" for name in names)])
    results = {"lowering": LOWERING}
    for name in names:
        type_ = GGMLType[name]
        size = BLOCK_FORMATS[type_].block_size
        n_in, n_out = {1: 67, 32: 576, 256: 768}[size], 20
        x = np.random.default_rng(4).standard_normal((13, n_in)).astype(np.float32)
        x[10], x[11], x[12] = 127, -127, 127 * np.sign(x[12])  # with equal bits in a row: the largest sums
        quantized = quantize(kind_of(type_), x)
        digest = hashlib.sha256(Linear(type_, random_weights(type_, n_out, n_in), n_out, n_in)(quantized, 13).tobytes())
        if size > 1:
            digest.update(Linear(type_, extreme_weights(type_, n_out, n_in), n_out, n_in)(quantized, 13).tobytes())
        results[name] = digest.hexdigest()
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
