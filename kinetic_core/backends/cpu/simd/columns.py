"""Vectors as wide as a strip of columns: one source for strips of 16 columns and of several cache lines.

`columns` is `Static`: 16, or a larger multiple. Arithmetic is that of `vector`, which takes vectors of any width; lanes
never meet, so a column's bits do not depend on the width of its strip.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.memory import first_lanes, masked_store
from kinetic_core.backends.cpu.simd.types import I32, Static, Vec, pointer, splat

__all__ = [
    "load_columns",
    "load_first_columns",
    "splat_columns",
    "store_columns",
    "store_first_columns",
    "zero_columns",
]


@intrinsic
def load_columns(typingctx, address, columns):
    """`columns` float32 at an address."""
    if not isinstance(columns, Static):
        return None
    vec = Vec("f32", columns.count)

    def codegen(context, builder, signature, args):
        return builder.load(pointer(builder, args[0], vec.ir), align=1, typ=vec.ir)

    return vec(types.int64, columns), codegen


@intrinsic
def store_columns(typingctx, address, value):
    """Store every lane of a float vector."""
    if not isinstance(value, Vec) or not value.is_float:
        return None

    def codegen(context, builder, signature, args):
        builder.store(args[1], pointer(builder, args[0], value.ir), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@intrinsic
def load_first_columns(typingctx, address, count, columns):
    """The first `count` float32 at an address, the other lanes 0; vectors wider than 16 lanes are loaded whole."""
    if not isinstance(columns, Static):
        return None
    vec = Vec("f32", columns.count)

    def codegen(context, builder, signature, args):
        where = pointer(builder, args[0], vec.ir)
        if vec.count > 16:
            return builder.load(where, align=1, typ=vec.ir)
        mask = first_lanes(builder, args[1], vec.count)
        kind = ir.FunctionType(vec.ir, [where.type, I32, mask.type, vec.ir])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{vec.count}f32.p0")
        return builder.call(function, [where, ir.Constant(I32, 1), mask, ir.Constant(vec.ir, [0.0] * vec.count)])

    return vec(types.int64, types.int64, columns), codegen


@intrinsic
def store_first_columns(typingctx, address, value, count):
    """Store the first `count` lanes of a float vector; vectors wider than 16 lanes are stored whole."""
    if not isinstance(value, Vec) or not value.is_float:
        return None

    def codegen(context, builder, signature, args):
        if value.count > 16:
            builder.store(args[1], pointer(builder, args[0], value.ir), align=1)
        else:
            masked_store(builder, args[0], args[1], args[2])
        return context.get_dummy_value()

    return types.void(types.int64, value, types.int64), codegen


@intrinsic
def splat_columns(typingctx, value, columns):
    """A float32 in every lane."""
    if not isinstance(columns, Static):
        return None
    vec = Vec("f32", columns.count)

    def codegen(context, builder, signature, args):
        return splat(builder, args[0], vec.ir)

    return vec(types.float32, columns), codegen


@intrinsic
def zero_columns(typingctx, columns):
    """+0 in every lane."""
    if not isinstance(columns, Static):
        return None
    vec = Vec("f32", columns.count)

    def codegen(context, builder, signature, args):
        return ir.Constant(vec.ir, [0.0] * vec.count)

    return vec(columns), codegen
