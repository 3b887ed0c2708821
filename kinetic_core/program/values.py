"""What a program's operations read and write."""

from __future__ import annotations

from enum import Enum

import attrs


class Axis(Enum):
    """The first axis of a value."""

    ROWS = "rows"
    """Every row of the step."""
    OUTPUTS = "outputs"
    """Only the rows whose logits are wanted."""


@attrs.frozen
class Value:
    """f32[axis, width], made by one operation. `index` is its number in the program."""

    index: int
    width: int
    axis: Axis = Axis.ROWS


@attrs.frozen
class Weight:
    """A tensor of the file. shape: outermost (outputs) first, the contiguous axis last."""

    name: str
    shape: tuple[int, ...]


@attrs.frozen
class KVLayer:
    """One attention layer's keys and values in the sequence's blocks.

    window: positions that a row sees, itself included; None: all.
    first_position: the first position that exists in this layer; no row at an earlier one is run.
    """

    index: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    first_position: int = 0


@attrs.frozen
class RecurrentState:
    """One f32 array per sequence that an operation advances row by row. Zero for an empty sequence."""

    index: int
    name: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes per sequence."""
        size = 4
        for extent in self.shape:
            size *= extent
        return size
