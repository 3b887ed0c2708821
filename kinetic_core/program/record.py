"""From an architecture and a head to a finished program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinetic_core.program.builder import ProgramBuilder
from kinetic_core.program.program import Program

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.interfaces.architecture import Architecture
    from kinetic_core.interfaces.head import OutputHead


def record_program(architecture: Architecture, head: OutputHead, source: TensorSource) -> Program:
    """Record the forward pass of `architecture` with `head` over the tensors of `source`.

    Raises TensorError when a tensor is missing, has another shape than the architecture describes, or is one that
    the architecture neither reads nor ignores.
    """
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = architecture.build(b)
    weight, scale = architecture.output(b)
    logits = head.record(b, hidden, weight, scale)
    prediction = None
    if architecture.has_prediction:
        predicted = architecture.build_prediction(b, b.begin_prediction(hidden.width))
        weight, scale = architecture.prediction_output(b)
        prediction = predicted, head.record(b, predicted, weight, scale)
    return b.finish(hidden, logits, ignored=architecture.ignored_tensors(), prediction=prediction)
