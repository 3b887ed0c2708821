"""The finished record of a forward pass."""

from __future__ import annotations

import attrs

from kinetic_core.program.ops import Op
from kinetic_core.program.values import KVLayer, RecurrentState, Value, Weight

KV_BYTES = {"f16": 2, "f32": 4}


@attrs.frozen
class Prediction:
    """The block that predicts the token after the next, a program of its own on the same weights and KV blocks.

    A row is a token at its position and the hidden state of the position before it. Its attention layers are among
    the program's `kv_layers`; its values are numbered with the program's.

    hidden: f32[rows, d_model] after its last norm: what the next guess takes in place of the trunk's hidden state.
    logits: f32[outputs, vocab] of the token after the row's.
    """

    ops: tuple[Op, ...]
    hidden: Value
    logits: Value


@attrs.frozen
class Program:
    """A model as a list of operations on named values with a symbolic number of rows.

    ops:       in execution order.
    n_values:  values are numbered 0 … n_values - 1.
    weights:   every tensor that an operation reads, once.
    kv_layers: the attention layers' keys and values.
    states:    the recurrent states.
    hidden:    f32[rows, d_model] after the last norm.
    logits:    f32[outputs, vocab].
    prediction: the prediction block, if the model has one.
    """

    ops: tuple[Op, ...]
    n_values: int
    weights: tuple[Weight, ...]
    kv_layers: tuple[KVLayer, ...]
    states: tuple[RecurrentState, ...]
    hidden: Value
    logits: Value
    prediction: Prediction | None = None

    def kv_bytes_per_position(self, kv_type: str = "f16") -> int:
        """Bytes of keys and values that one position of one sequence takes, all layers."""
        return sum(2 * layer.kv_heads * layer.head_dim for layer in self.kv_layers) * KV_BYTES[kv_type]

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """The operations of the trunk, then those of the prediction block."""
        return self.ops + (self.prediction.ops if self.prediction is not None else ())

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state of one sequence."""
        return sum(state.n_bytes for state in self.states)

    def __str__(self) -> str:
        return "\n".join(f"{number:4d}  {op}" for number, op in enumerate(self.all_ops))
