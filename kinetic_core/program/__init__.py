"""The recorded program: the list of operations that an architecture writes down once and a backend runs for any n.

`values` names what flows (values, weights, states), `ops` the operations, `builder` records them with shapes checked,
`program` is the finished record.
"""

from kinetic_core.program.builder import ProgramBuilder
from kinetic_core.program.program import Prediction, Program
from kinetic_core.program.values import KVLayer, RecurrentState, Value, Weight

__all__ = ["KVLayer", "Prediction", "Program", "ProgramBuilder", "RecurrentState", "Value", "Weight"]
