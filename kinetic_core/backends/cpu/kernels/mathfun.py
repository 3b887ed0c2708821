"""Elementary functions on 16 float32 lanes, built from exactly rounded operations: the same bits in every lowering.

`exp` reduces its argument by multiples of ln 2 held in two parts (Cody and Waite, "Software Manual for the Elementary
Functions", 1980) and evaluates a polynomial through the Chebyshev nodes; `log1p` is the series of artanh, fitted the
same way. The others follow from these two. Largest errors measured over the float32 range, in units of the last place
(tests/cpu/backend/test_mathfun.py): exp 1.0, sigmoid 2.5, silu 3.0, softplus 3.0. A NaN stays a NaN.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.types import F32, I32, VF, splat
from kinetic_core.backends.cpu.simd.vector import emit_fma

_LOG2_E = float.fromhex("0x1.715476p+0")
_LN2_HIGH = float.fromhex("0x1.62e400p-1")
_LN2_LOW = float.fromhex("0x1.7f7d1cp-20")
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000
_LARGEST, _LEAST = 89.0, -104.0
_EXP = tuple(
    float.fromhex(text)
    for text in ("0x1.a124eep-13", "0x1.6d4320p-10", "0x1.1110e0p-7", "0x1.5554eap-5", "0x1.555556p-3", "0x1.0p-1")
)
_ARTANH = tuple(
    float.fromhex(text)
    for text in ("0x1.a9bafap-4", "0x1.65ad56p-4", "0x1.c7fb36p-4", "0x1.248f58p-3", "0x1.9999a0p-3", "0x1.555556p-2")
)


def _constant(kind, value):
    return ir.Constant(kind, [value] * kind.count)


def _polynomial(builder, x, terms):
    result = _constant(x.type, terms[0])
    for term in terms[1:]:
        result = emit_fma(builder, result, x, _constant(x.type, term))
    return result


def emit_exp(builder, x):
    """Emit e^x of float lanes. Above 88.73 infinity, below -103.98 zero."""
    kind = x.type
    whole = ir.VectorType(I32, kind.count)
    top, bottom = _constant(kind, _LARGEST), _constant(kind, _LEAST)
    x = builder.select(builder.fcmp_ordered("<", top, x), top, x)
    x = builder.select(builder.fcmp_ordered(">", bottom, x), bottom, x)
    shifted = emit_fma(builder, x, _constant(kind, _LOG2_E), _constant(kind, _ROUNDER))
    n = builder.fsub(shifted, _constant(kind, _ROUNDER))
    power = builder.sub(builder.bitcast(shifted, whole), _constant(whole, _ROUNDER_BITS))
    r = emit_fma(builder, n, _constant(kind, -_LN2_HIGH), x)
    r = emit_fma(builder, n, _constant(kind, -_LN2_LOW), r)
    tail = builder.fmul(builder.fmul(r, r), _polynomial(builder, r, _EXP))
    value = builder.fadd(builder.fadd(r, tail), _constant(kind, 1.0))
    # 2^power in two factors, so that results from denormal to 2^128 are rounded once.
    half = builder.ashr(power, _constant(whole, 1))
    for part in (half, builder.sub(power, half)):
        bits = builder.shl(builder.add(part, _constant(whole, 127)), _constant(whole, 23))
        value = builder.fmul(value, builder.bitcast(bits, kind))
    return value


def emit_log1p(builder, u):
    """Emit ln(1 + u) of float lanes in 0 … 1."""
    two = _constant(u.type, 2.0)
    s = builder.fdiv(u, builder.fadd(u, two))
    z = builder.fmul(s, s)
    twice = builder.fmul(s, two)
    return emit_fma(builder, builder.fmul(twice, z), _polynomial(builder, z, _ARTANH), twice)


def _absolute(builder, x):
    kind = ir.FunctionType(x.type, [x.type])
    name = f"llvm.fabs.v{x.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def emit_sigmoid(builder, x):
    """Emit 1 / (1 + e^-x) of float lanes, by e^-|x|, which never overflows."""
    one = _constant(x.type, 1.0)
    small = emit_exp(builder, builder.fneg(_absolute(builder, x)))
    top = builder.select(builder.fcmp_ordered("<", x, _constant(x.type, 0.0)), small, one)
    return builder.fdiv(top, builder.fadd(one, small))


def emit_silu(builder, x):
    """Emit x / (1 + e^-x) of float lanes."""
    return builder.fmul(x, emit_sigmoid(builder, x))


def emit_softplus(builder, x):
    """Emit ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|) of float lanes."""
    zero = _constant(x.type, 0.0)
    positive = builder.select(builder.fcmp_ordered(">", zero, x), zero, x)
    return builder.fadd(positive, emit_log1p(builder, emit_exp(builder, builder.fneg(_absolute(builder, x)))))


def _lanes(emit, doc):
    def operation(typingctx, x):
        if x != VF:
            return None

        def codegen(context, builder, signature, args):
            return emit(builder, args[0])

        return VF(VF), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


exp = _lanes(emit_exp, "e^x of 16 lanes.")
sigmoid = _lanes(emit_sigmoid, "1 / (1 + e^-x) of 16 lanes.")
silu = _lanes(emit_silu, "x / (1 + e^-x) of 16 lanes.")
softplus = _lanes(emit_softplus, "ln(1 + e^x) of 16 lanes.")


@intrinsic
def exp_scalar(typingctx, x):
    """e^x of one float32: the bits of `exp`'s lanes."""

    def codegen(context, builder, signature, args):
        lanes = emit_exp(builder, splat(builder, args[0], ir.VectorType(F32, 4)))
        return builder.extract_element(lanes, ir.Constant(I32, 0))

    return types.float32(types.float32), codegen
