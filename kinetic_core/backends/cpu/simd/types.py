"""LLVM vectors as numba types.

`Vec` is one vector value; `Rows` is a small fixed number of equal vectors, one per input row of a tile, which LLVM
takes apart into registers. `Static` is an integer in a type, so that one Python function compiles to a
tile of any height.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import models, register_model

from kinetic_core.backends.cpu.simd.lowering import LANES

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

_ELEMENTS = {"i1": I1, "i8": I8, "i16": I16, "i32": I32, "f32": F32}


class Vec(types.Type):
    """A vector of `count` elements of the LLVM type called `element` (i1, i8, i16, i32 or f32)."""

    def __init__(self, element: str, count: int) -> None:
        self.element, self.count = element, count
        self.ir = ir.VectorType(_ELEMENTS[element], count)
        super().__init__(name=f"Vec({element} x {count})")

    @property
    def is_float(self) -> bool:
        """True for a vector of floats."""
        return self.element == "f32"


class Rows(types.Type):
    """`count` vectors of one type, one per input row of a tile."""

    def __init__(self, vec: Vec, count: int) -> None:
        self.vec, self.count = vec, count
        self.ir = ir.LiteralStructType([vec.ir] * count)
        super().__init__(name=f"Rows({vec.name} x {count})")


class Static(types.Type):
    """An integer that is known when code is compiled, such as the height of a tile: the value is in the type."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Static({count})")


@register_model(Vec)
@register_model(Rows)
class _ValueModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


@register_model(Static)
class _TokenModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, I8)


#: 16 lanes, whatever the lowering: the vectors of every kernel but the linear ones.
VF = Vec("f32", 16)
VI = Vec("i32", 16)
VM = Vec("i1", 16)

#: One register of the lowering (LANES 32-bit lanes): the vectors of the linear kernels.
WF = Vec("f32", LANES)
WI = Vec("i32", LANES)
WS = Vec("i16", 2 * LANES)
WB = Vec("i8", 4 * LANES)


def lane_constant(vec_ir: ir.VectorType, value) -> ir.Constant:
    """The LLVM constant whose lanes all hold `value`."""
    return ir.Constant(vec_ir, [value] * vec_ir.count)


def splat(builder, value, vec_ir: ir.VectorType):
    """A vector whose lanes all hold the LLVM scalar `value`."""
    undefined = ir.Constant(vec_ir, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, vec_ir.count), [0] * vec_ir.count)
    return builder.shuffle_vector(first, undefined, zeros)


def pointer(builder, address, target):
    """The LLVM pointer to `target` at an int64 address."""
    return builder.inttoptr(address, target.as_pointer())
