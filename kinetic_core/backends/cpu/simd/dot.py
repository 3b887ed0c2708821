"""Exact integer dot products of the linear kernels, by lowering.

A tile computes LANES outputs (one per 32-bit lane) of R input rows at once. Weights are vectors of 4 * LANES bytes:
four consecutive inputs of each output. The activations of a row are signed bytes, −127 … 127; four of them are
broadcast to all lanes. Three kinds of accumulators, all holding exact integers:

- *parts*: running sums of products of unsigned weight bytes. AVX-512 has them in 32 bits (`vpdpbusd`); AVX2 and the
  generic lowering have pairs of 16-bit sums (`vpmaddubsw`, `vpaddw`, or plain multiplications), so a kernel may add at
  most `PART_STEPS[bits]` steps of `bits`-bit weights before it empties them.
- *sums*: parts times the small integer scale of their sub-block. AVX-512 keeps them as float32, which is exact while
  their magnitude stays below 2**24: every kernel states that bound. The others keep int32.
- *totals*: int32 sums, as they are.

Everything is exact, so the bits do not depend on the lowering. Row addresses are `x + r * x_stride`.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.lowering import LANES, LOWERING
from kinetic_core.backends.cpu.simd.memory import masked_store, vector_load
from kinetic_core.backends.cpu.simd.types import (
    F32,
    I8,
    I16,
    I32,
    I64,
    WB,
    WF,
    WI,
    WS,
    Rows,
    Static,
    lane_constant,
    pointer,
    splat,
)
from kinetic_core.backends.cpu.simd.vector import emit_fma

__all__ = [
    "PART_STEPS",
    "as_pairs",
    "byte_scale",
    "load_wf",
    "load_wi",
    "load_wi_u16",
    "parts_start",
    "parts_zero",
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
    "signed_byte_scale",
    "splat_wi",
    "static",
    "sums_add",
    "sums_sub_pairs",
    "sums_to_f32",
    "sums_zero",
    "totals_add",
    "totals_load",
    "unpack_even_i8",
    "unpack_odd_i8",
]

AVX512, AVX2 = LOWERING == "avx512vnni", LOWERING == "avx2"

#: Most steps of `bits`-bit unsigned weights that parts may take. In 16 bits a step adds at most
#: 2 * (2**bits - 1) * 127, and the sum must stay within 32767. In 32 bits no kernel comes near the limit.
PART_STEPS: dict[int, int] = {bits: 1 << 10 if AVX512 else 32767 // (2 * (2**bits - 1) * 127) for bits in range(2, 8)}

#: The vectors of parts, sums and integer scales in this lowering.
PART = WI if AVX512 else WS
SUM = WF if AVX512 else WI
SCALE = WF if AVX512 else WS


def call(builder, name, result, arguments):
    """Emit the call of an LLVM intrinsic."""
    kind = ir.FunctionType(result, [value.type for value in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def row_address(builder, x, x_stride, row, offset=0):
    """Emit the address `x + row * x_stride + offset`."""
    if row:
        x = builder.add(x, builder.mul(x_stride, ir.Constant(I64, row)))
    return builder.add(x, ir.Constant(I64, offset)) if offset else x


def broadcast_i32(builder, address):
    """Emit LANES copies of the int32 at an address."""
    return splat(builder, builder.load(pointer(builder, address, I32), align=1, typ=I32), WI.ir)


def broadcast_f32(builder, address):
    """Emit LANES copies of the float32 at an address."""
    return splat(builder, builder.load(pointer(builder, address, F32), align=1, typ=F32), WF.ir)


def emit_madd(builder, a, b):
    """Emit the int32 sums of two neighbouring int16 products."""
    if AVX512:
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", WI.ir, [a, b])
    if AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.wd", WI.ir, [a, b])
    a, b = (builder.bitcast(value, WI.ir) for value in (a, b))
    sixteen = lane_constant(WI.ir, 16)
    low = builder.mul(builder.ashr(builder.shl(a, sixteen), sixteen), builder.ashr(builder.shl(b, sixteen), sixteen))
    return builder.add(low, builder.mul(builder.ashr(a, sixteen), builder.ashr(b, sixteen)))


#: LLVM 22 changed the type of the byte operands of vpdpbusd from 32-bit lanes to bytes.
_DPBUSD_BYTES = llvm.llvm_version_info[0] >= 22


def emit_add_products(builder, parts, weights, addresses):
    """Emit parts + the products of unsigned weight bytes with the four signed bytes at each row's address."""
    if AVX512:
        results = []
        for part, at in zip(parts, addresses, strict=True):
            x = broadcast_i32(builder, at)
            operands = [part, weights, builder.bitcast(x, WB.ir)]
            if not _DPBUSD_BYTES:
                operands = [part, builder.bitcast(weights, WI.ir), x]
            results.append(call(builder, "llvm.x86.avx512.vpdpbusd.512", WI.ir, operands))
        return results
    if AVX2:
        return [
            builder.add(part, call(builder, "llvm.x86.avx2.pmadd.ub.sw", WS.ir, [weights, x]))
            for part, x in zip(parts, (broadcast_bytes(builder, at) for at in addresses), strict=True)
        ]
    products = emit_byte_pairs(builder, weights, addresses, signed=False)
    return [builder.add(part, product) for part, product in zip(parts, products, strict=True)]


def broadcast_bytes(builder, address):
    """Emit LANES copies of the four bytes at an address."""
    return builder.bitcast(broadcast_i32(builder, address), WB.ir)


def _even_and_odd_bytes(builder, value, signed):
    pairs = builder.bitcast(value, WS.ir)
    eight = lane_constant(WS.ir, 8)
    if signed:
        return builder.ashr(builder.shl(pairs, eight), eight), builder.ashr(pairs, eight)
    return builder.and_(pairs, lane_constant(WS.ir, 255)), builder.lshr(pairs, eight)


def emit_byte_pairs(builder, weights, addresses, signed):
    """Emit, without vector instructions of their own, the 16-bit sums of two neighbouring byte products, per row.

    At most 2 * 128 * 127 = 32512 for signed weights; the caller bounds unsigned ones.
    """
    even, odd = _even_and_odd_bytes(builder, weights, signed)
    results = []
    for at in addresses:
        x_even, x_odd = _even_and_odd_bytes(builder, broadcast_bytes(builder, at), True)
        results.append(builder.add(builder.mul(even, x_even), builder.mul(odd, x_odd)))
    return results


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


def _zero(vec, doc):
    def zero(typingctx, rows):
        if not isinstance(rows, Static):
            return None
        kind = Rows(vec, rows.count)

        def codegen(context, builder, signature, args):
            return pack_rows(builder, [lane_constant(vec.ir, 0)] * rows.count, kind)

        return kind(rows), codegen

    zero.__doc__ = doc
    return intrinsic(zero)


rows_zero_f32 = _zero(WF, "Float accumulators of +0.")
rows_zero_i32 = _zero(WI, "Totals of 0.")
parts_zero = _zero(PART, "Parts of 0.")
sums_zero = _zero(SUM, "Sums of 0.")


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


def _start(typingctx, rows, x, x_stride):
    if not isinstance(rows, Static):
        return None
    kind = Rows(PART, rows.count)

    def codegen(context, builder, signature, args):
        if not AVX512:
            return pack_rows(builder, [lane_constant(PART.ir, 0)] * rows.count, kind)
        starts = [broadcast_i32(builder, row_address(builder, args[1], args[2], row)) for row in range(rows.count)]
        return pack_rows(builder, starts, kind)

    return kind(rows, types.int64, types.int64), codegen


_start.__doc__ = (
    "Parts that hold each row's int32 bias at its address; 16-bit parts begin with 0 and leave it to the caller."
)
parts_start = intrinsic(_start)


@intrinsic
def totals_add(typingctx, totals, parts):
    """Totals plus parts."""
    if not isinstance(totals, Rows) or totals.vec != WI or parts != Rows(PART, totals.count):
        return None

    def codegen(context, builder, signature, args):
        pairs = zip(unpack_rows(builder, args[0], totals), unpack_rows(builder, args[1], parts), strict=True)
        ones = lane_constant(WS.ir, 1)
        sums = [builder.add(t, p if AVX512 else emit_madd(builder, p, ones)) for t, p in pairs]
        return pack_rows(builder, sums, totals)

    return totals(totals, parts), codegen


@intrinsic
def totals_load(typingctx, rows, x, x_stride):
    """Totals that begin with each row's int32 at its address."""
    if not isinstance(rows, Static):
        return None
    kind = Rows(WI, rows.count)

    def codegen(context, builder, signature, args):
        starts = [broadcast_i32(builder, row_address(builder, args[1], args[2], row)) for row in range(rows.count)]
        return pack_rows(builder, starts, kind)

    return kind(rows, types.int64, types.int64), codegen


def _to_f32(builder, value, *_):
    return builder.sitofp(value, WF.ir)


rows_to_f32 = rows_operation(WI, WF, _to_f32, "Totals as float32, rounded to nearest even.", addressed=False)
if AVX512:
    sums_to_f32 = rows_operation(WF, WF, lambda builder, value, *_: value, "Sums as float32.", addressed=False)
else:
    sums_to_f32 = rows_operation(WI, WF, _to_f32, "Sums as float32.", addressed=False)


@intrinsic
def sums_add(typingctx, sums, parts, scale):
    """sums + parts * scale, exact."""
    if not isinstance(sums, Rows) or sums.vec != SUM or scale != SCALE:
        return None

    def codegen(context, builder, signature, args):
        results = []
        pairs = zip(unpack_rows(builder, args[0], sums), unpack_rows(builder, args[1], parts), strict=True)
        for total, part in pairs:
            if AVX512:
                results.append(emit_fma(builder, builder.sitofp(part, WF.ir), args[2], total))
            else:
                results.append(builder.add(total, emit_madd(builder, part, args[2])))
        return pack_rows(builder, results, sums)

    return sums(sums, parts, scale), codegen


@intrinsic
def sums_sub_pairs(typingctx, sums, pairs, x, x_stride):
    """sums − pairs of int16 times the row's two int16 at its address; AVX-512: sums, as `parts_start` did the same."""
    if not isinstance(sums, Rows) or sums.vec != SUM or pairs != WS:
        return None

    def codegen(context, builder, signature, args):
        if AVX512:
            return args[0]
        results = []
        for row, value in enumerate(unpack_rows(builder, args[0], sums)):
            two = builder.bitcast(broadcast_i32(builder, row_address(builder, args[2], args[3], row)), WS.ir)
            results.append(builder.sub(value, emit_madd(builder, args[1], two)))
        return pack_rows(builder, results, sums)

    return sums(sums, WS, types.int64, types.int64), codegen


def _byte_scale(signed, doc):
    def scale(typingctx, words, byte):
        if words != WI or not isinstance(byte, types.IntegerLiteral):
            return None
        at = byte.literal_value

        def codegen(context, builder, signature, args):
            if not AVX512:
                # The byte into the high half of both int16 of a lane, zeros elsewhere; then shifted down.
                order = [4 * (k // 4) + at if k % 2 else 32 for k in range(4 * LANES)]
                mask = ir.Constant(ir.VectorType(I32, 4 * LANES), order)
                source = builder.bitcast(args[0], WB.ir)
                high = builder.shuffle_vector(source, lane_constant(WB.ir, 0), mask)
                shift = builder.ashr if signed else builder.lshr
                return shift(builder.bitcast(high, WS.ir), lane_constant(WS.ir, 8))
            lifted = builder.shl(args[0], lane_constant(WI.ir, 24 - 8 * at)) if at < 3 else args[0]
            shift = builder.ashr if signed else builder.lshr
            value = shift(lifted, lane_constant(WI.ir, 24))
            return builder.sitofp(value, WF.ir)

        return SCALE(words, byte), codegen

    scale.__doc__ = doc
    return intrinsic(prefer_literal=True)(scale)


byte_scale = _byte_scale(False, "The scales that are byte `byte` (a literal) of each lane, unsigned.")
signed_byte_scale = _byte_scale(True, "The scales that are byte `byte` (a literal) of each lane, signed.")


@intrinsic
def splat_wi(typingctx, value):
    """LANES copies of the low 32 bits of an int64."""

    def codegen(context, builder, signature, args):
        return splat(builder, builder.trunc(args[0], I32), WI.ir)

    return WI(types.int64), codegen


@intrinsic
def as_pairs(typingctx, words):
    """int32 lanes seen as twice as many int16 lanes."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], WS.ir)

    return WS(WI), codegen


def _unpack_i8(odd, doc):
    def unpack(typingctx, words):
        def codegen(context, builder, signature, args):
            pairs, eight = builder.bitcast(args[0], WS.ir), lane_constant(WS.ir, 8)
            return builder.ashr(pairs if odd else builder.shl(pairs, eight), eight)

        return WS(WI), codegen

    unpack.__doc__ = doc
    return intrinsic(unpack)


unpack_even_i8 = _unpack_i8(False, "Bytes 0 and 2 of each lane as a pair of int16.")
unpack_odd_i8 = _unpack_i8(True, "Bytes 1 and 3 of each lane as a pair of int16.")


def emit_madd_add(builder, total, pairs, address):
    """Emit total + the sums of two neighbouring int16 products of `pairs` with the two int16 at an address."""
    x = builder.bitcast(broadcast_i32(builder, address), WS.ir)
    if AVX512:
        operands = [total, pairs, x]
        if not _DPBUSD_BYTES:
            operands[1:] = [builder.bitcast(value, WI.ir) for value in operands[1:]]
        return call(builder, "llvm.x86.avx512.vpdpwssd.512", WI.ir, operands)
    return builder.add(total, emit_madd(builder, pairs, x))


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
