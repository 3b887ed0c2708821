"""Vectors of R input rows at once: accumulators that are filled, added up row by row, and stored.

A `Rows` value is a vector of LANES outputs per row. Row addresses are `x + r * x_stride`.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.lowering import LANES
from kinetic_core.backends.cpu.simd.memory import masked_store, vector_load
from kinetic_core.backends.cpu.simd.products import broadcast_f32, emit_madd_add, row_address
from kinetic_core.backends.cpu.simd.types import (
    I8,
    I16,
    I64,
    WF,
    WI,
    WS,
    Rows,
    Static,
    lane_constant,
    pointer,
)
from kinetic_core.backends.cpu.simd.vector import emit_fma

__all__ = [
    "load_wf",
    "load_wi",
    "load_wi_u16",
    "rows_add",
    "rows_fma",
    "rows_fma_scaled",
    "rows_load",
    "rows_madd",
    "rows_store",
    "rows_sub",
    "rows_to_f32",
    "rows_zero_f32",
    "rows_zero_i32",
    "static",
]


def unpack_rows(builder, value, kind):
    """The LLVM vectors of a `Rows` value."""
    return [builder.extract_value(value, row) for row in range(kind.count)]


def pack_rows(builder, vectors, kind):
    """The `Rows` value of LLVM vectors."""
    value = ir.Constant(kind.ir, ir.Undefined)
    for row, vector in enumerate(vectors):
        value = builder.insert_value(value, vector, row)
    return value


load_wi = vector_load(WI.ir, WI, "LANES int32 at an address.")
load_wi_u16 = vector_load(ir.VectorType(I16, LANES), WI, "LANES uint16 at an address, zero-extended.", "zero")
load_wf = vector_load(WF.ir, WF, "LANES float32 at an address.")


@intrinsic(prefer_literal=True)
def static(typingctx, count):
    """The literal `count` as a type that survives being passed to a function."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        return ir.Constant(I8, 0)

    return Static(count.literal_value)(count), codegen


def rows_zero(vec, doc):
    """An intrinsic `f(rows)`: a vector of zeros per row."""

    def zero(typingctx, rows):
        if not isinstance(rows, Static):
            return None
        kind = Rows(vec, rows.count)

        def codegen(context, builder, signature, args):
            return pack_rows(builder, [lane_constant(vec.ir, 0)] * rows.count, kind)

        return kind(rows), codegen

    zero.__doc__ = doc
    return intrinsic(zero)


rows_zero_f32 = rows_zero(WF, "Float accumulators of +0.")
rows_zero_i32 = rows_zero(WI, "Totals of 0.")


def rows_operation(vec_in, vec_out, step, doc, n_vectors=0, vector=None, addressed=True):
    """An intrinsic `f(rows, vectors…, [x, x_stride])`: each row's vector becomes `step(builder, v, vs, address)`."""
    extra = [vector] * n_vectors + ([types.int64, types.int64] if addressed else [])

    def check(rows):
        return isinstance(rows, Rows) and rows.vec == vec_in

    def emit(rows, args, builder):
        vectors = args[1 : 1 + n_vectors]
        results = []
        for row, value in enumerate(unpack_rows(builder, args[0], rows)):
            address = row_address(builder, *args[-2:], row) if addressed else None
            results.append(step(builder, value, vectors, address))
        return pack_rows(builder, results, Rows(vec_out, rows.count))

    def build(rows):
        if not check(rows):
            return None

        def codegen(context, builder, signature, args):
            return emit(rows, args, builder)

        return Rows(vec_out, rows.count)(rows, *extra), codegen

    # numba matches arguments by position, so each number of them is written out.
    def none(typingctx, rows):
        return build(rows)

    def one(typingctx, rows, a):
        return build(rows)

    def two(typingctx, rows, a, b):
        return build(rows)

    def three(typingctx, rows, a, b, c):
        return build(rows)

    operation = (none, one, two, three)[len(extra)]
    operation.__doc__ = doc
    return intrinsic(operation)


def emit_to_f32(builder, value, *_):
    """Emit int32 lanes as float32."""
    return builder.sitofp(value, WF.ir)


rows_to_f32 = rows_operation(WI, WF, emit_to_f32, "Totals as float32, rounded to nearest even.", addressed=False)

rows_madd = rows_operation(
    WI,
    WI,
    lambda builder, total, vectors, address: emit_madd_add(builder, total, vectors[0], address),
    "Totals plus pairs of int16 times the row's two int16 at its address.",
    n_vectors=1,
    vector=WS,
)


def _rows_pairwise(float_op, int_op, doc):
    def operation(typingctx, a, b):
        if not isinstance(a, Rows) or a != b:
            return None

        def codegen(context, builder, signature, args):
            emit = getattr(builder, float_op if a.vec.is_float else int_op)
            pairs = zip(unpack_rows(builder, args[0], a), unpack_rows(builder, args[1], b), strict=True)
            return pack_rows(builder, [emit(*pair) for pair in pairs], a)

        return a(a, b), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


rows_add = _rows_pairwise("fadd", "add", "a + b, row by row.")
rows_sub = _rows_pairwise("fsub", "sub", "a - b, row by row.")

rows_fma = rows_operation(
    WF,
    WF,
    lambda builder, acc, vectors, address: emit_fma(builder, vectors[0], broadcast_f32(builder, address), acc),
    "acc + weights * the row's float32 at its address, rounded once.",
    n_vectors=1,
    vector=WF,
)


@intrinsic
def rows_fma_scaled(typingctx, acc, weights, x, x_stride, value):
    """acc + (weights * the row's float32 at its address) * value; the product in brackets and the sum are rounded."""
    if not isinstance(acc, Rows) or acc.vec != WF or acc != value:
        return None

    def codegen(context, builder, signature, args):
        results = []
        pairs = zip(unpack_rows(builder, args[0], acc), unpack_rows(builder, args[4], acc), strict=True)
        for row, (total, factor) in enumerate(pairs):
            scale = broadcast_f32(builder, row_address(builder, args[2], args[3], row))
            results.append(emit_fma(builder, builder.fmul(args[1], scale), factor, total))
        return pack_rows(builder, results, acc)

    return acc(acc, WF, types.int64, types.int64, acc), codegen


@intrinsic
def rows_load(typingctx, rows, address, stride):
    """Float accumulators from LANES float32 per row."""
    if not isinstance(rows, Static):
        return None
    kind = Rows(WF, rows.count)

    def codegen(context, builder, signature, args):
        where = [row_address(builder, args[1], args[2], row) for row in range(rows.count)]
        vectors = [builder.load(pointer(builder, at, WF.ir), align=1, typ=WF.ir) for at in where]
        return pack_rows(builder, vectors, kind)

    return kind(rows, types.int64, types.int64), codegen


@intrinsic
def rows_store(typingctx, acc, address, stride, lanes, n_valid):
    """Store the first `lanes` lanes of the first `n_valid` rows; memory past them is not touched."""
    if not isinstance(acc, Rows) or acc.vec != WF:
        return None

    def codegen(context, builder, signature, args):
        whole = builder.icmp_signed(">=", args[3], ir.Constant(I64, LANES))
        for row, vector in enumerate(unpack_rows(builder, args[0], acc)):
            at = row_address(builder, args[1], args[2], row)
            valid = builder.icmp_signed(">", args[4], ir.Constant(I64, row))
            with builder.if_then(valid), builder.if_else(whole) as (then, otherwise):
                with then:
                    builder.store(vector, pointer(builder, at, WF.ir), align=1)
                with otherwise:
                    masked_store(builder, at, vector, args[3])
        return context.get_dummy_value()

    return types.void(acc, types.int64, types.int64, types.int64, types.int64), codegen
