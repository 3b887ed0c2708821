"""How many bytes a decode step has to read and write, counted from the file and the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinetic_core.program.ops import Attention, Embedding, Experts, weights_of
from kinetic_core.program.program import KV_BYTES

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import Program


def bytes_per_token(program: Program, source: TensorSource, kv_type: str, position: int) -> int:
    """Bytes of one decode step at `position` (tokens before it).

    The file's bytes of the weights that the step needs (one row of a table that is only looked up, as many experts as a
    row uses), the keys and values it reads, and its recurrent states, read and written. Padding of packed weights does
    not count.
    """
    whole: set[str] = set()
    looked_up: set[str] = set()
    total = 0
    for op in program.ops:
        for weight in weights_of(op):
            if isinstance(op, Experts):
                total += source.tensors[weight.name].n_bytes // weight.shape[0] * op.experts.width
            else:
                (looked_up if isinstance(op, Embedding) else whole).add(weight.name)
    total += sum(source.tensors[name].n_bytes for name in whole)
    for name in looked_up - whole:
        total += source.tensors[name].n_bytes // source.tensors[name].shape[0]
    for layer in (op.layer for op in program.ops if isinstance(op, Attention)):
        seen = position if layer.window is None else min(position, layer.window)
        total += seen * 2 * layer.kv_heads * layer.head_dim * KV_BYTES[kv_type]
    return total + 2 * program.state_bytes
