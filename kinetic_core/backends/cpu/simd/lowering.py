"""The lowering of this process, as constants: the vocabulary is written for it when it is imported."""

from __future__ import annotations

from kinetic_core.backends.cpu.target import LOWERINGS, choose_lowering, cpu_features

__all__ = ["LANES", "LOWERING", "LOWERINGS", "choose_lowering", "cpu_features"]

#: The lowering of this process.
LOWERING: str = choose_lowering()

#: 32-bit lanes of the vectors of the linear kernels: one machine register.
LANES: int = 16 if LOWERING == "avx512vnni" else 8
