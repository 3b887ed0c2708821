"""From an architecture and a head to a finished program."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

from kinetic_core.errors import PluginError, describe
from kinetic_core.program.builder import ProgramBuilder
from kinetic_core.program.program import Program
from kinetic_core.program.values import Value, Weight

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.interfaces.architecture import Architecture
    from kinetic_core.interfaces.head import OutputHead


def record_program(architecture: Architecture, head: OutputHead, source: TensorSource) -> Program:
    """Record the forward pass of `architecture` with `head` over the tensors of `source`.

    Raises TensorError when a tensor is missing, has another shape than the architecture describes, or is one that
    the architecture neither reads nor ignores; PluginError when a method of the architecture returns something else
    than its contract says.
    """
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = _returned(architecture, "build", architecture.build(b))
    weight, scale = _returned_output(architecture, "output", architecture.output(b))
    logits = head.record(b, hidden, weight, scale)
    prediction = None
    if architecture.has_prediction:
        predicted = architecture.build_prediction(b, b.begin_prediction(hidden.width))
        predicted = _returned(architecture, "build_prediction", predicted)
        weight, scale = _returned_output(architecture, "prediction_output", architecture.prediction_output(b))
        prediction = predicted, head.record(b, predicted, weight, scale)
    return b.finish(hidden, logits, ignored=architecture.ignored_tensors(), prediction=prediction)


def _returned(architecture: Architecture, method: str, value: object) -> Value:
    if isinstance(value, Value):
        return value
    raise _wrong_return(architecture, method, value, "the hidden states, a value that the builder recorded")


def _returned_output(architecture: Architecture, method: str, value: object) -> tuple[Weight, float]:
    if isinstance(value, tuple) and len(value) == 2:
        weight, scale = value
        if isinstance(weight, Weight) and isinstance(scale, Real):
            return weight, float(scale)
    raise _wrong_return(architecture, method, value, "the output layer's weight and the factor of its logits")


def _wrong_return(architecture: Architecture, method: str, value: object, expected: str) -> PluginError:
    what = f"{type(architecture).__qualname__}.{method} returns something else than it should"
    return PluginError(describe(what, got=type(value).__name__, expected=expected))
