"""float16 and bfloat16 in memory, float32 in registers.

Narrowing rounds to nearest even. AVX2 and AVX-512 convert with the F16C instructions; the generic lowering with
integer operations that give the same bits, denormals, infinities and quiet NaNs included.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.lowering import LOWERING
from kinetic_core.backends.cpu.simd.types import F16, F32, I8, I16, I32, VF, WF, pointer

__all__ = [
    "load_bf16",
    "load_f16",
    "load_vf_bf16",
    "load_vf_f16",
    "load_wf_bf16",
    "load_wf_f16",
    "load_wf_half_e8m0",
    "store_f16",
    "store_vf_f16",
]


def _lanes(kind, count):
    return ir.VectorType(kind, count)


def _const(vec_ir, value):
    return ir.Constant(vec_ir, [value] * vec_ir.count)


def emit_from_f16(builder, halves):
    """Emit the float32 lanes of a vector of i16 that holds float16 bits."""
    count = halves.type.count
    wide, floats = _lanes(I32, count), _lanes(F32, count)
    if LOWERING != "generic":
        return builder.fpext(builder.bitcast(halves, _lanes(F16, count)), floats)
    bits = builder.zext(halves, wide)
    sign = builder.shl(builder.and_(bits, _const(wide, 0x8000)), _const(wide, 16))
    magnitude = builder.and_(bits, _const(wide, 0x7FFF))
    shifted = builder.shl(magnitude, _const(wide, 13))
    normal = builder.add(shifted, _const(wide, 112 << 23))
    special = builder.or_(builder.add(shifted, _const(wide, 224 << 23)), _quiet(builder, magnitude, wide))
    tiny = builder.fmul(builder.sitofp(magnitude, floats), _const(floats, 2.0**-24))
    is_special = builder.icmp_signed(">=", magnitude, _const(wide, 0x7C00))
    is_tiny = builder.icmp_signed("<", magnitude, _const(wide, 0x400))
    value = builder.select(is_special, special, normal)
    value = builder.select(is_tiny, builder.bitcast(tiny, wide), value)
    return builder.bitcast(builder.or_(value, sign), floats)


def _quiet(builder, magnitude, wide):
    """The quiet bit of float32 where a float16 magnitude is NaN, as the instruction sets it."""
    is_nan = builder.icmp_signed(">", magnitude, _const(wide, 0x7C00))
    return builder.select(is_nan, _const(wide, 1 << 22), _const(wide, 0))


def emit_to_f16(builder, value):
    """Emit the i16 lanes that hold float32 lanes as float16, rounded to nearest even."""
    count = value.type.count
    wide, floats, narrow = _lanes(I32, count), _lanes(F32, count), _lanes(I16, count)
    if LOWERING != "generic":
        return builder.bitcast(builder.fptrunc(value, _lanes(F16, count)), narrow)
    bits = builder.bitcast(value, wide)
    magnitude = builder.and_(bits, _const(wide, 0x7FFFFFFF))
    sign = builder.lshr(builder.xor(bits, magnitude), _const(wide, 16))
    odd = builder.and_(builder.lshr(magnitude, _const(wide, 13)), _const(wide, 1))
    rounded = builder.add(builder.add(magnitude, _const(wide, 0xFFF)), odd)
    normal = builder.sub(builder.lshr(rounded, _const(wide, 13)), _const(wide, 112 << 10))
    # Added to 0.5, a magnitude below 2**-14 is rounded to a multiple of 2**-24, float16's smallest step.
    half = builder.fadd(builder.bitcast(magnitude, floats), _const(floats, 0.5))
    tiny = builder.sub(builder.bitcast(half, wide), _const(wide, 0x3F000000))
    payload = builder.and_(builder.lshr(magnitude, _const(wide, 13)), _const(wide, 0x3FF))
    nan = builder.or_(payload, _const(wide, 0x7E00))
    result = builder.select(builder.icmp_signed("<", magnitude, _const(wide, 113 << 23)), tiny, normal)
    is_large = builder.icmp_signed(">=", magnitude, _const(wide, 0x477FF000))
    result = builder.select(is_large, _const(wide, 0x7C00), result)
    is_nan = builder.icmp_signed(">", magnitude, _const(wide, 0x7F800000))
    result = builder.select(is_nan, nan, result)
    return builder.trunc(builder.or_(result, sign), narrow)


def _load_halves(vec, doc, brain=False):
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            narrow = _lanes(I16, vec.count)
            halves = builder.load(pointer(builder, args[0], narrow), align=1, typ=narrow)
            if not brain:
                return emit_from_f16(builder, halves)
            wide = _lanes(I32, vec.count)
            return builder.bitcast(builder.shl(builder.zext(halves, wide), _const(wide, 16)), vec.ir)

        return vec(types.int64), codegen

    load.__doc__ = doc
    return intrinsic(load)


load_vf_f16 = _load_halves(VF, "16 float16 at an address, as float32.")
load_vf_bf16 = _load_halves(VF, "16 bfloat16 at an address, as float32.", brain=True)
load_wf_f16 = _load_halves(WF, "LANES float16 at an address, as float32.")
load_wf_bf16 = _load_halves(WF, "LANES bfloat16 at an address, as float32.", brain=True)


@intrinsic
def store_vf_f16(typingctx, address, value):
    """Store 16 float32 as float16, rounded to nearest even."""

    def codegen(context, builder, signature, args):
        narrow = emit_to_f16(builder, args[1])
        builder.store(narrow, pointer(builder, args[0], narrow.type), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VF), codegen


@intrinsic
def load_wf_half_e8m0(typingctx, address):
    """LANES scales 2**(e − 128) from bytes e at an address; e = 0 and 1 give denormal float32."""

    def codegen(context, builder, signature, args):
        narrow = _lanes(I8, WF.count)
        wide = _lanes(I32, WF.count)
        e = builder.zext(builder.load(pointer(builder, args[0], narrow), align=1, typ=narrow), wide)
        normal = builder.shl(builder.sub(e, _const(wide, 1)), _const(wide, 23))
        is_one = builder.icmp_signed("==", e, _const(wide, 1))
        tiny = builder.select(is_one, _const(wide, 0x400000), _const(wide, 0x200000))
        bits = builder.select(builder.icmp_signed("<", e, _const(wide, 2)), tiny, normal)
        return builder.bitcast(bits, WF.ir)

    return WF(types.int64), codegen


def _scalar_load(brain, doc):
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            half = builder.load(pointer(builder, args[0], I16), align=1, typ=I16)
            if brain:
                return builder.bitcast(builder.shl(builder.zext(half, I32), ir.Constant(I32, 16)), F32)
            one = _lanes(I16, 4)
            vector = builder.insert_element(ir.Constant(one, [0] * 4), half, ir.Constant(I32, 0))
            return builder.extract_element(emit_from_f16(builder, vector), ir.Constant(I32, 0))

        return types.float32(types.int64), codegen

    load.__doc__ = doc
    return intrinsic(load)


load_f16 = _scalar_load(False, "The float16 at an address, as float32.")
load_bf16 = _scalar_load(True, "The bfloat16 at an address, as float32.")


@intrinsic
def store_f16(typingctx, address, value):
    """Store a float32 scalar as float16, rounded to nearest even."""

    def codegen(context, builder, signature, args):
        four = _lanes(F32, 4)
        vector = builder.insert_element(ir.Constant(four, [0.0] * 4), args[1], ir.Constant(I32, 0))
        half = builder.extract_element(emit_to_f16(builder, vector), ir.Constant(I32, 0))
        builder.store(half, pointer(builder, args[0], I16), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen
