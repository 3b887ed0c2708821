"""Unrolled runs of dot products over packed weights: load, take apart, multiply.

Each intrinsic takes parts (see `dot`), the address of packed weights and of the activations, and adds a run of steps.
A step is one vector of weight bytes: four inputs of LANES outputs. Consecutive vectors of a group of 16 outputs lie
`GROUP_VECTOR` bytes apart; with LANES = 8 the caller's address chooses the half.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.dot import PART
from kinetic_core.backends.cpu.simd.products import (
    AVX2,
    AVX512,
    broadcast_bytes,
    broadcast_i32,
    call,
    emit_add_products,
    emit_byte_pairs,
    emit_madd,
    emit_madd_add,
    row_address,
)
from kinetic_core.backends.cpu.simd.rows import pack_rows, unpack_rows
from kinetic_core.backends.cpu.simd.types import I8, I32, I64, WB, WI, WS, Rows, lane_constant, pointer

__all__ = [
    "CODEBOOKS",
    "GROUP_VECTOR",
    "dot_bits",
    "dot_codebook",
    "dot_fifth_bits",
    "dot_nibbles",
    "dot_nibbles_joined",
    "dot_q6_k",
    "dot_signed_bytes",
    "dot_with_plane",
    "prefetch_weights",
    "signed_start",
    "signed_start_pairs",
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
    addresses = [row_address(builder, x, x_stride, row, offset) for row in range(len(parts))]
    return emit_add_products(builder, parts, weights, addresses)


def _literal(*values):
    return all(isinstance(value, types.IntegerLiteral) for value in values)


def _is_parts(kind):
    return isinstance(kind, Rows) and kind.vec == PART


#: How far ahead of their use packed weights are asked for, in bytes: the best of 2048 to 8192 when measured.
PREFETCH_AHEAD = 6144


@intrinsic(prefer_literal=True)
def prefetch_weights(typingctx, weights, n_bytes):
    """Ask for `n_bytes` (a literal) of packed weights, `PREFETCH_AHEAD` beyond an address. Any address is safe.

    With few rows a kernel waits for memory, and the hardware alone does not keep enough requests under way: reading
    reached three quarters of the bandwidth without this. With many rows it costs little.
    """
    if not _literal(n_bytes):
        return None

    def codegen(context, builder, signature, args):
        for line in range(0, n_bytes.literal_value, 64):
            at = pointer(builder, builder.add(args[0], ir.Constant(I64, PREFETCH_AHEAD + line)), I8)
            kind = ir.FunctionType(ir.VoidType(), [at.type, I32, I32, I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(function, [at, *(ir.Constant(I32, k) for k in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64, n_bytes), codegen


@intrinsic(prefer_literal=True)
def dot_nibbles(typingctx, parts, weights, x, x_stride, steps, shift):
    """A run of 4-bit weights: the low nibbles (shift 0) or the high ones (shift 4, both literals) of `steps` vectors.

    Bound: `PART_STEPS[4]` steps.
    """
    literals = (steps, shift)
    if not _is_parts(parts) or not all(isinstance(value, types.IntegerLiteral) for value in literals):
        return None

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        for step in range(steps.literal_value):
            nibbles = shift_bytes(builder, load_bytes(builder, args[1], step), shift.literal_value, 15)
            values = add_products(builder, values, nibbles, args[2], args[3], 4 * step)
        return pack_rows(builder, values, parts)

    return parts(parts, types.int64, types.int64, types.int64, steps, shift), codegen


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
def dot_q6_k(typingctx, parts, low, high, x, x_stride, first, steps, stream):
    """A run of 6-bit weights of Q6_K: vectors `first` … of one of the four streams of a half block.

    low, high: addresses of the half block's 16 vectors of low nibbles and 8 vectors of high bit pairs. Streams 0 and 1
    (`stream` is `Static`) take the low nibbles of vectors 0-7 and 8-15 and the first and second bit pairs, streams 2
    and 3 the high nibbles and the third and fourth pairs. Bound: `PART_STEPS[6]` steps.
    """
    literals = (first, steps)
    if not _is_parts(parts) or not all(isinstance(value, types.IntegerLiteral) for value in literals):
        return None
    begin, count = (value.literal_value for value in literals)
    which = stream.count

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        for step in range(count):
            nibbles = load_bytes(builder, args[1], begin + step + 8 * (which % 2))
            pairs = load_bytes(builder, args[2], begin + step)
            lows = shift_bytes(builder, nibbles, 4 * (which // 2), 15)
            highs = shift_bytes(builder, pairs, 2 * which - 4, 48)
            values = add_products(builder, values, builder.or_(lows, highs), args[3], args[4], 4 * step)
        return pack_rows(builder, values, parts)

    address = types.int64
    return parts(parts, address, address, address, address, first, steps, stream), codegen


@intrinsic(prefer_literal=True)
def dot_signed_bytes(typingctx, totals, weights, x, x_stride, steps):
    """A run of signed byte weights added to totals that began with `signed_start`.

    AVX-512 adds 128 to the weights, and the totals begin with −128 times the sum of the activations. AVX2 multiplies
    |weight| by the activation with the weight's sign. In 16 bits at most 2 * 128 * 127 = 32512, widened at every step.
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
        return emit_add_products(builder, totals, lifted, addresses)
    ones = lane_constant(WS.ir, 1)
    if AVX2:
        magnitude = call(builder, "llvm.abs.v32i8", WB.ir, [weights, ir.Constant(ir.IntType(1), 0)])
        sums = []
        for at in addresses:
            signed = call(builder, "llvm.x86.avx2.psign.b", WB.ir, [broadcast_bytes(builder, at), weights])
            sums.append(call(builder, "llvm.x86.avx2.pmadd.ub.sw", WS.ir, [magnitude, signed]))
    else:
        sums = emit_byte_pairs(builder, weights, addresses, signed=True)
    return [builder.add(total, emit_madd(builder, s, ones)) for total, s in zip(totals, sums, strict=True)]


@intrinsic(prefer_literal=True)
def dot_bits(typingctx, parts, weights, x, x_stride, steps, shift, mask):
    """A run of weights that are the bits `mask` of each byte shifted right by `shift` (`Static`)."""
    if not _is_parts(parts) or not _literal(steps, mask):
        return None

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        for step in range(steps.literal_value):
            loaded = load_bytes(builder, args[1], step)
            weights = shift_bytes(builder, loaded, shift.count, mask.literal_value)
            values = add_products(builder, values, weights, args[2], args[3], 4 * step)
        return pack_rows(builder, values, parts)

    address = types.int64
    return parts(parts, address, address, address, steps, shift, mask), codegen


@intrinsic(prefer_literal=True)
def dot_with_plane(typingctx, parts, low, low_shift, low_mask, high, high_shift, high_bit, x, x_stride, first, steps):
    """A run of weights with one more bit in a plane of its own: low bits as in `dot_bits`, plus a bit of `high`.

    The bit `high_bit` (a mask) of a weight is found `high_shift` places above it in the byte of `high` (below it when
    negative). Vectors `first` … of both. Everything but addresses is `Static`, or literal (`first`, `steps`).
    """
    if not _is_parts(parts) or not _literal(first, steps):
        return None
    begin, count = first.literal_value, steps.literal_value

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        for step in range(count):
            lows = shift_bytes(builder, load_bytes(builder, args[1], begin + step), low_shift.count, low_mask.count)
            loaded = load_bytes(builder, args[4], begin + step)
            highs = shift_bytes(builder, loaded, high_shift.count, high_bit.count)
            values = add_products(builder, values, builder.or_(lows, highs), args[7], args[8], 4 * step)
        return pack_rows(builder, values, parts)

    address = types.int64
    signature = parts(
        parts, address, low_shift, low_mask, address, high_shift, high_bit, address, address, first, steps
    )
    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_fifth_bits(typingctx, parts, bits, weights, x, x_stride, steps, shift):
    """A run of 5-bit weights: nibbles as in `dot_nibbles`, the fifth bits from words of 32 bits, one per output.

    `bits` holds LANES words; step s of low nibbles (shift 0) takes bits 4 s … 4 s + 3, of high ones (shift 4) bits
    16 + 4 s …, for its four bytes. Bound: `PART_STEPS[5]` steps.
    """
    if not _is_parts(parts) or bits != WI or not _literal(steps, shift):
        return None

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], parts)
        for step in range(steps.literal_value):
            at = 4 * step + 4 * shift.literal_value
            four = builder.and_(builder.lshr(args[1], lane_constant(WI.ir, at)), lane_constant(WI.ir, 15))
            # Bit c times 2**(7 c + 4) lands on bit 8 c + 4, and no other product does.
            spread = builder.mul(four, lane_constant(WI.ir, 1 << 4 | 1 << 11 | 1 << 18 | 1 << 25))
            highs = mask_bytes(builder, builder.bitcast(spread, WB.ir), 16)
            lows = shift_bytes(builder, load_bytes(builder, args[2], step), shift.literal_value, 15)
            values = add_products(builder, values, builder.or_(lows, highs), args[3], args[4], 4 * step)
        return pack_rows(builder, values, parts)

    address = types.int64
    return parts(parts, WI, address, address, address, steps, shift), codegen


#: Codebooks of 4-bit formats: the 16 levels of IQ4_NL, and twice the values of a 4-bit float (e2m1) of MXFP4.
CODEBOOKS = (
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
)


def look_up(builder, nibbles, codebook):
    """Emit the signed codebook bytes of nibbles (bytes 0 … 15)."""
    levels = CODEBOOKS[codebook]
    table = ir.Constant(WB.ir, [level & 255 for level in levels] * (WB.count // 16))
    if AVX512:
        return call(builder, "llvm.x86.avx512.pshuf.b.512", WB.ir, [table, nibbles])
    if AVX2:
        return call(builder, "llvm.x86.avx2.pshuf.b", WB.ir, [table, nibbles])
    values = [lane_constant(WB.ir, level & 255) for level in levels]
    for bit in (1, 2, 4, 8):
        is_set = builder.icmp_unsigned("!=", mask_bytes(builder, nibbles, bit), lane_constant(WB.ir, 0))
        values = [builder.select(is_set, values[k + 1], values[k]) for k in range(0, len(values), 2)]
    return values[0]


@intrinsic(prefer_literal=True)
def dot_codebook(typingctx, totals, weights, x, x_stride, codebook):
    """32 inputs of codebook weights (|level| ≤ 127): low nibbles of 4 vectors, then the high ones; totals signed.

    codebook: a literal index of `CODEBOOKS`. The totals began with `signed_start` or `signed_start_pairs`.
    """
    if not isinstance(totals, Rows) or totals.vec != WI or not _literal(codebook):
        return None

    def codegen(context, builder, signature, args):
        values = unpack_rows(builder, args[0], totals)
        for step in range(4):
            loaded = load_bytes(builder, args[1], step)
            for high in (0, 1):
                nibbles = shift_bytes(builder, loaded, 4 * high, 15)
                weights = look_up(builder, nibbles, codebook.literal_value)
                values = add_signed_products(builder, values, weights, args[2], args[3], 16 * high + 4 * step)
        return pack_rows(builder, values, totals)

    return totals(totals, types.int64, types.int64, types.int64, codebook), codegen


@intrinsic
def signed_start_pairs(typingctx, rows, x, x_stride):
    """`signed_start` where the address holds each row's two int16 sums of activations."""
    kind = Rows(WI, rows.count)

    def codegen(context, builder, signature, args):
        zero = lane_constant(WI.ir, 0)
        if not AVX512:
            return pack_rows(builder, [zero] * rows.count, kind)
        bias = lane_constant(WS.ir, -128)
        starts = [
            emit_madd_add(builder, zero, bias, row_address(builder, args[1], args[2], row)) for row in range(rows.count)
        ]
        return pack_rows(builder, starts, kind)

    return kind(rows, types.int64, types.int64), codegen


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
