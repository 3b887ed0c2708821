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

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.lowering import LANES
from kinetic_core.backends.cpu.simd.products import AVX512, broadcast_i32, emit_madd, row_address
from kinetic_core.backends.cpu.simd.rows import emit_to_f32, pack_rows, rows_operation, rows_zero, unpack_rows
from kinetic_core.backends.cpu.simd.types import (
    I32,
    WB,
    WF,
    WI,
    WS,
    Rows,
    Static,
    lane_constant,
    splat,
)
from kinetic_core.backends.cpu.simd.vector import emit_fma

__all__ = [
    "PART_STEPS",
    "as_pairs",
    "byte_scale",
    "parts_start",
    "parts_zero",
    "signed_byte_scale",
    "splat_wi",
    "sums_add",
    "sums_sub_pairs",
    "sums_to_f32",
    "sums_zero",
    "totals_add",
    "totals_load",
    "unpack_even_i8",
    "unpack_odd_i8",
]

#: Most steps of `bits`-bit unsigned weights that parts may take. In 16 bits a step adds at most
#: 2 * (2**bits - 1) * 127, and the sum must stay within 32767. In 32 bits no kernel comes near the limit.
PART_STEPS: dict[int, int] = {bits: 1 << 10 if AVX512 else 32767 // (2 * (2**bits - 1) * 127) for bits in range(2, 8)}

#: The vectors of parts, sums and integer scales in this lowering.
PART = WI if AVX512 else WS
SUM = WF if AVX512 else WI
SCALE = WF if AVX512 else WS
parts_zero = rows_zero(PART, "Parts of 0.")
sums_zero = rows_zero(SUM, "Sums of 0.")


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


if AVX512:
    sums_to_f32 = rows_operation(WF, WF, lambda builder, value, *_: value, "Sums as float32.", addressed=False)
else:
    sums_to_f32 = rows_operation(WI, WF, emit_to_f32, "Sums as float32.", addressed=False)


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
