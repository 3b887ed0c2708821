"""The output head contract: from hidden states to tokens and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kinetic_core.program.builder import ProgramBuilder
    from kinetic_core.program.values import Value, Weight


@dataclass(frozen=True)
class HeadCapabilities:
    """Questions about a head; every default is no."""

    skips_rows: bool = False
    """Does it read only a part of the output layer for a top-k request?"""


class OutputHead(ABC):
    """Records the operations between the last hidden state and the logits or candidates.

    The result must be the full layer's: same tokens, same order, same scores, bit for bit.
    """

    capabilities: ClassVar[HeadCapabilities]

    @abstractmethod
    def record(self, b: ProgramBuilder, hidden: Value, weight: Weight, scale: float) -> Value:
        """Record the head on hidden: f32[rows, d_model]; return logits: f32[outputs, vocab]."""
