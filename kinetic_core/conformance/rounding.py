"""The NumPy reference with activations rounded to 8 bits: how far that rounding alone moves a model's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kinetic_core.gguf import BLOCK_FORMATS
from kinetic_core.interfaces import LoadOptions
from kinetic_core.program import Program, ops
from kinetic_core.reference import ops as truth
from kinetic_core.reference.backend import ReferenceBackend, ReferenceExecutable
from kinetic_core.reference.ops import F32

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource


def rounded(x: F32, block_size: int) -> F32:
    """x: f32[width], each run of block_size numbers rounded to 127ths of its largest magnitude; 1 keeps x as it is."""
    if block_size == 1:
        return x
    blocks = x.reshape(-1, block_size).astype(np.float64)
    steps = np.abs(blocks).max(axis=1, keepdims=True) / 127
    steps[steps == 0] = 1
    return (np.rint(blocks / steps) * steps).astype(np.float32).reshape(-1)


class RoundingExecutable(ReferenceExecutable):
    """A quantized matrix meets its inputs rounded to 8 bits, in runs as long as its own blocks, `longest` at most.

    That is what backends do which multiply integers. All else is the reference's.
    """

    def __init__(self, program: Program, source: TensorSource, options: LoadOptions, longest: int) -> None:
        super().__init__(program, source, options)
        sizes = {name: BLOCK_FORMATS[info.type].block_size for name, info in source.tensors.items()}
        self._block_sizes = {name: min(size, longest) for name, size in sizes.items()}

    def _run_op(self, op: ops.Op, step: Any) -> None:
        match op:
            case ops.Linear():
                for out, matrix, bias_weight in zip(op.outs, op.weights, op.biases, strict=True):
                    weight, bias, size = (
                        self._weight(matrix),
                        self._optional(bias_weight),
                        self._block_sizes[matrix.name],
                    )
                    step.put(out, [truth.linear(rounded(x, size), weight, bias) for x in step[op.x]])
            case ops.Experts():
                routed = zip(step[op.x], step[op.experts], step[op.weights], strict=True)
                step.put(op.out, [self._experts(op, *row) for row in routed])
            case _:
                super()._run_op(op, step)

    def _experts(self, op: ops.Experts, x: F32, chosen: F32, weights: F32) -> F32:
        gate, up, down = (self._weight(weight) for weight in (op.gate, op.up, op.down))
        seen = [rounded(x, self._block_sizes[weight.name]) for weight in (op.gate, op.up)]
        total = np.zeros(len(x))
        for expert, weight in zip(chosen.astype(np.int64), weights, strict=True):
            gates, ups = (truth.linear(x, w[expert], None) for x, w in zip(seen, (gate, up), strict=True))
            inner = rounded(truth.gate(gates, ups, "silu"), self._block_sizes[op.down.name])
            total += float(weight) * truth.linear(inner, down[expert], None)
        return total.astype(np.float32)


class RoundingBackend(ReferenceBackend):
    """Loads `RoundingExecutable`: one scale for as many activations as the matrix's blocks are long."""

    longest = 256

    def load(self, program: Program, source: TensorSource, options: LoadOptions) -> RoundingExecutable:
        """As the reference."""
        return RoundingExecutable(program, source, options, self.longest)


class ShortRoundingBackend(RoundingBackend):
    """The same with one scale for 32 activations at most."""

    longest = 32
