"""What dot products are made of, by lowering: products of bytes and of int16 that are added up exactly."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from kinetic_core.backends.cpu.simd.lowering import LOWERING
from kinetic_core.backends.cpu.simd.types import (
    F32,
    I32,
    I64,
    WB,
    WF,
    WI,
    WS,
    lane_constant,
    pointer,
    splat,
)

AVX512, AVX2 = LOWERING == "avx512vnni", LOWERING == "avx2"


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


def emit_madd_add(builder, total, pairs, address):
    """Emit total + the sums of two neighbouring int16 products of `pairs` with the two int16 at an address."""
    x = builder.bitcast(broadcast_i32(builder, address), WS.ir)
    if AVX512:
        operands = [total, pairs, x]
        if not _DPBUSD_BYTES:
            operands[1:] = [builder.bitcast(value, WI.ir) for value in operands[1:]]
        return call(builder, "llvm.x86.avx512.vpdpwssd.512", WI.ir, operands)
    return builder.add(total, emit_madd(builder, pairs, x))
