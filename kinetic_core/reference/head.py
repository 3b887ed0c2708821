"""The full head: every row of the output layer, for the rows whose logits are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinetic_core.interfaces.head import HeadCapabilities, OutputHead

if TYPE_CHECKING:
    from kinetic_core.program.builder import ProgramBuilder
    from kinetic_core.program.values import Value, Weight


class FullHead(OutputHead):
    """Reads the whole output layer for every wanted row."""

    capabilities = HeadCapabilities()

    def record(self, b: ProgramBuilder, hidden: Value, weight: Weight, scale: float) -> Value:
        """Gather the wanted rows, one linear layer, the logits' factor where it is not 1."""
        logits = b.linear(b.gather_outputs(hidden), weight)
        return logits if scale == 1.0 else b.scale(logits, scale)
