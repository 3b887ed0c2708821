"""Unrolled runs of dot products over packed weights: load, take apart, multiply.

Each intrinsic takes parts (see `dot`), the address of packed weights and of the activations, and adds a run of steps.
A step is one vector of weight bytes: four inputs of LANES outputs. Consecutive vectors of a group of 16 outputs lie
`GROUP_VECTOR` bytes apart; with LANES = 8 the caller's address chooses the half.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.dot import (
    AVX2,
    AVX512,
    PART,
    _generic_dot,
    broadcast_i32,
    call,
    emit_dot_unsigned,
    emit_madd,
    pack_rows,
    row_address,
    unpack_rows,
)
from kinetic_core.backends.cpu.simd.types import I16, I64, WB, WI, WS, Rows, lane_constant, pointer, splat

__all__ = [
    "GROUP_VECTOR",
    "dot_bytes",
    "dot_nibbles",
    "dot_nibbles_joined",
    "dot_q6_k",
    "dot_signed_bytes",
    "signed_start",
]

#: Bytes from one packed vector of a group of 16 outputs to the next.
GROUP_VECTOR = 64


def load_bytes(builder, address, vector):
    """Emit the load of the `vector`-th weight vector at an address."""
    at = builder.add(address, ir.Constant(I64, GROUP_VECTOR * vector))
    return builder.load(pointer(builder, at, WB.ir), align=1, typ=WB.ir)


def mask_bytes(builder, value, mask):
    """Emit value & mask in every byte."""
    return builder.and_(value, lane_constant(WB.ir, mask))


def shift_bytes(builder, value, right, mask):
    """Emit (value >> right) & mask in every byte; a negative `right` shifts left."""
    words = builder.bitcast(value, WS.ir)
    if right > 0:
        words = builder.lshr(words, lane_constant(WS.ir, right))
    elif right < 0:
        words = builder.shl(words, lane_constant(WS.ir, -right))
    return mask_bytes(builder, builder.bitcast(words, WB.ir), mask)


def add_products(builder, parts, weights, x, x_stride, offset):
    """Emit one step for every row: parts + weights * the four activations at `offset` of the row."""
    return [
        emit_dot_unsigned(builder, part, weights, row_address(builder, x, x_stride, row, offset))
        for row, part in enumerate(parts)
    ]


def _is_parts(kind):
    return isinstance(kind, Rows) and kind.vec == PART


@intrinsic(prefer_literal=True)
def dot_nibbles(typingctx, low, high, weights, x, x_stride, steps, high_offset):
    """Two runs of 4-bit weights: low nibbles meet activations from `x`, high ones from `x + high_offset`.

    Returns (low, high). Bound: `PART_STEPS[4]` steps on each.
    """
    if not _is_parts(low) or low != high or not isinstance(steps, types.IntegerLiteral):
        return None
    result = types.UniTuple(low, 2)

    def codegen(context, builder, signature, args):
        lows, highs = (unpack_rows(builder, value, low) for value in args[:2])
        beyond = builder.add(args[3], args[6])
        for step in range(steps.literal_value):
            both = load_bytes(builder, args[2], step)
            lows = add_products(builder, lows, mask_bytes(builder, both, 15), args[3], args[4], 4 * step)
            highs = add_products(builder, highs, shift_bytes(builder, both, 4, 15), beyond, args[4], 4 * step)
        packed = [pack_rows(builder, vectors, low) for vectors in (lows, highs)]
        return context.make_tuple(builder, result, packed)

    return result(low, high, types.int64, types.int64, types.int64, steps, types.int64), codegen


@intrinsic(prefer_literal=True)
def dot_nibbles_joined(typingctx, parts, weights, x, x_stride, steps, high_offset):
    """`dot_nibbles` with one set of parts for both. Bound: 2 * steps are at most `PART_STEPS[4]`."""
    if not _is_parts(parts) or not isinstance(steps, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        beyond = builder.add(args[2], args[5])
        for step in range(steps.literal_value):
            both = load_bytes(builder, args[1], step)
            values = add_products(builder, values, mask_bytes(builder, both, 15), args[2], args[3], 4 * step)
            values = add_products(builder, values, shift_bytes(builder, both, 4, 15), beyond, args[3], 4 * step)
        return pack_rows(builder, values, parts)

    return parts(parts, types.int64, types.int64, types.int64, steps, types.int64), codegen


@intrinsic(prefer_literal=True)
def dot_bytes(typingctx, parts, weights, x, x_stride, steps):
    """A run of unsigned byte weights. Bound: the caller's, by the bits that the bytes use."""
    if not _is_parts(parts) or not isinstance(steps, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        for step in range(steps.literal_value):
            values = add_products(builder, values, load_bytes(builder, args[1], step), args[2], args[3], 4 * step)
        return pack_rows(builder, values, parts)

    return parts(parts, types.int64, types.int64, types.int64, steps), codegen


@intrinsic(prefer_literal=True)
def dot_q6_k(typingctx, parts, low, high, shift, x, x_stride, first, steps, stream):
    """A run of 6-bit weights of Q6_K: vectors `first` … of one of the four streams of a half block.

    low, high: addresses of the half block's 16 vectors of low nibbles and 8 vectors of high bit pairs. Stream 0 takes
    vectors 0-7 and the lowest bit pair, stream 1 vectors 8-15 and the second pair (`stream` is `Static`), both after a
    shift right by `shift`: 0 for the low nibbles and first two pairs, 4 for the high ones. Bound: `PART_STEPS[6]`.
    """
    literals = (first, steps)
    if not _is_parts(parts) or not all(isinstance(value, types.IntegerLiteral) for value in literals):
        return None
    begin, count = (value.literal_value for value in literals)
    which = stream.count

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        by = splat(builder, builder.trunc(args[3], I16), WS.ir)
        for step in range(count):
            nibbles = load_bytes(builder, args[1], begin + step + 8 * which)
            pairs = load_bytes(builder, args[2], begin + step)
            nibbles, pairs = (
                builder.bitcast(builder.lshr(builder.bitcast(value, WS.ir), by), WB.ir) for value in (nibbles, pairs)
            )
            lows, highs = mask_bytes(builder, nibbles, 15), shift_bytes(builder, pairs, 2 * which - 4, 48)
            values = add_products(builder, values, builder.or_(lows, highs), args[4], args[5], 4 * step)
        return pack_rows(builder, values, parts)

    address = types.int64
    return parts(parts, address, address, address, address, address, first, steps, stream), codegen


@intrinsic(prefer_literal=True)
def dot_signed_bytes(typingctx, totals, weights, x, x_stride, steps):
    """A run of signed byte weights added to totals that began with `signed_start`.

    AVX-512 adds 128 to the weights, and the totals begin with −128 times the sum of the activations. AVX2 multiplies
    |weight| by the activation with the weight's sign: at most 2 * 128 * 127 = 32512 in a 16-bit sum, which is widened
    at every step.
    """
    if not isinstance(totals, Rows) or totals.vec != WI or not isinstance(steps, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], totals)
        for step in range(steps.literal_value):
            weights = load_bytes(builder, args[1], step)
            values = add_signed_products(builder, values, weights, args[2], args[3], 4 * step)
        return pack_rows(builder, values, totals)

    return totals(totals, types.int64, types.int64, types.int64, steps), codegen


def add_signed_products(builder, totals, weights, x, x_stride, offset):
    """Emit one step of signed weight bytes for every row."""
    addresses = [row_address(builder, x, x_stride, row, offset) for row in range(len(totals))]
    if AVX512:
        lifted = builder.xor(weights, lane_constant(WB.ir, 0x80))
        return [emit_dot_unsigned(builder, t, lifted, at) for t, at in zip(totals, addresses, strict=True)]
    if not AVX2:
        return [_generic_dot(builder, t, weights, at, True) for t, at in zip(totals, addresses, strict=True)]
    results = []
    magnitude = call(builder, "llvm.abs.v32i8", WB.ir, [weights, ir.Constant(ir.IntType(1), 0)])
    for total, at in zip(totals, addresses, strict=True):
        x4 = builder.bitcast(broadcast_i32(builder, at), WB.ir)
        signed = call(builder, "llvm.x86.avx2.psign.b", WB.ir, [x4, weights])
        sums = call(builder, "llvm.x86.avx2.pmadd.ub.sw", WS.ir, [magnitude, signed])
        results.append(builder.add(total, emit_madd(builder, sums, lane_constant(WS.ir, 1))))
    return results


@intrinsic
def signed_start(typingctx, rows, x, x_stride):
    """Totals for `dot_signed_bytes`; the address holds each row's int32 −128 * sum of activations."""
    kind = Rows(WI, rows.count)

    def codegen(context, builder, signature, args):
        starts = [
            broadcast_i32(builder, row_address(builder, args[1], args[2], row)) if AVX512 else lane_constant(WI.ir, 0)
            for row in range(rows.count)
        ]
        return pack_rows(builder, starts, kind)

    return kind(rows, types.int64, types.int64), codegen
