"""Arithmetic on vectors and scalars; reductions over 16 lanes with one fixed tree.

Functions that take `Vec` values work on every vector type of the right element, float and int32 alike where both make
sense, and where said on float32 or int64 scalars too.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.types import F32, I32, VF, VI, Vec, splat

__all__ = [
    "abs_",
    "add",
    "and_",
    "bitcast_f32",
    "bitcast_i32",
    "bits_f32",
    "bits_f64",
    "div",
    "duplicate_even",
    "duplicate_odd",
    "eq",
    "extract",
    "f32_bits",
    "fma",
    "ge",
    "gt",
    "hmax",
    "hmin",
    "hsum",
    "iota",
    "le",
    "lt",
    "max_",
    "min_",
    "mul",
    "neg",
    "or_",
    "round_to_i32",
    "sar",
    "select",
    "shl",
    "shr",
    "splat_f32",
    "splat_i32",
    "sqrt",
    "sub",
    "swap_pairs",
    "to_f32",
    "to_i32",
    "xor",
    "zero_f32",
    "zero_i32",
]


def _same(a, b):
    return isinstance(a, Vec) and a == b


def _binary(float_op, int_op, doc):
    def operation(typingctx, a, b):
        if not _same(a, b):
            return None
        name = float_op if a.is_float else int_op
        if name is None:
            return None

        def codegen(context, builder, signature, args):
            return getattr(builder, name)(args[0], args[1])

        return a(a, b), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


add = _binary("fadd", "add", "a + b, lane by lane; int32 wraps.")
sub = _binary("fsub", "sub", "a - b, lane by lane; int32 wraps.")
mul = _binary("fmul", "mul", "a * b, lane by lane; int32 wraps.")
div = _binary("fdiv", None, "a / b of floats, lane by lane, correctly rounded.")
and_ = _binary(None, "and_", "Bitwise and of integer vectors or masks.")
or_ = _binary(None, "or_", "Bitwise or of integer vectors or masks.")
xor = _binary(None, "xor", "Bitwise exclusive or of integer vectors or masks.")


def _shift(name, doc):
    def operation(typingctx, a, count):
        if not isinstance(a, Vec) or a.is_float:
            return None

        def codegen(context, builder, signature, args):
            narrow = builder.trunc(args[1], a.ir.element)
            return getattr(builder, name)(args[0], splat(builder, narrow, a.ir))

        return a(a, types.int64), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


shl = _shift("shl", "Shift every lane left by one count (0 to the lane's bits - 1).")
shr = _shift("lshr", "Shift every lane right by one count, zeros in.")
sar = _shift("ashr", "Shift every lane right by one count, the sign in.")


def _compare(symbol, doc):
    def operation(typingctx, a, b):
        if not _same(a, b):
            return None

        def codegen(context, builder, signature, args):
            if a.is_float:
                return builder.fcmp_ordered(symbol, args[0], args[1])
            return builder.icmp_signed(symbol, args[0], args[1])

        return Vec("i1", a.count)(a, b), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


eq = _compare("==", "Mask of a == b; false where a float is NaN.")
lt = _compare("<", "Mask of a < b, signed; false where a float is NaN.")
le = _compare("<=", "Mask of a <= b, signed; false where a float is NaN.")
gt = _compare(">", "Mask of a > b, signed; false where a float is NaN.")
ge = _compare(">=", "Mask of a >= b, signed; false where a float is NaN.")


@intrinsic
def select(typingctx, mask, a, b):
    """Lanes of `a` where the mask is true, else of `b`."""
    if not _same(a, b) or mask != Vec("i1", a.count):
        return None

    def codegen(context, builder, signature, args):
        return builder.select(*args)

    return a(mask, a, b), codegen


def _extremum(symbol, doc):
    def operation(typingctx, a, b):
        if a == types.float32 and b == types.float32:
            is_float = True
        elif _same(a, b):
            is_float = a.is_float
        else:
            return None

        def codegen(context, builder, signature, args):
            compare = builder.fcmp_ordered if is_float else builder.icmp_signed
            return builder.select(compare(symbol, args[0], args[1]), args[0], args[1])

        return a(a, b), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


max_ = _extremum(">", "a where a > b, else b (so b where either is NaN). Vectors or float32 scalars.")
min_ = _extremum("<", "a where a < b, else b (so b where either is NaN). Vectors or float32 scalars.")


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [value.type for value in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _overload_name(base, kind):
    return f"llvm.{base}.{'f32' if kind == types.float32 else f'v{kind.count}f32'}"


def _is_float_value(kind):
    return kind == types.float32 or (isinstance(kind, Vec) and kind.is_float)


def emit_fma(builder, a, b, c):
    """Emit a * b + c of LLVM float vectors, rounded once."""
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once. Float vectors or float32 scalars."""
    if not _is_float_value(a) or a != b or a != c:
        return None

    def codegen(context, builder, signature, args):
        return _call(builder, _overload_name("fma", a), args[0].type, list(args))

    return a(a, b, c), codegen


def _unary_float(base, doc):
    def operation(typingctx, a):
        if not _is_float_value(a):
            return None

        def codegen(context, builder, signature, args):
            return _call(builder, _overload_name(base, a), args[0].type, [args[0]])

        return a(a), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


sqrt = _unary_float("sqrt", "Correctly rounded square root. Float vectors or float32 scalars.")
abs_ = _unary_float("fabs", "The sign bit cleared. Float vectors or float32 scalars.")


@intrinsic
def neg(typingctx, a):
    """The sign bit flipped (float vectors and float32 scalars), or 0 - a (int32 vectors)."""
    if not _is_float_value(a) and not (isinstance(a, Vec) and a.element == "i32"):
        return None

    def codegen(context, builder, signature, args):
        return builder.fneg(args[0]) if _is_float_value(a) else builder.neg(args[0])

    return a(a), codegen


def _splat(vec, scalar, doc):
    def operation(typingctx, value):
        def codegen(context, builder, signature, args):
            value = args[0] if vec.is_float else builder.trunc(args[0], I32)
            return splat(builder, value, vec.ir)

        return vec(scalar), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


splat_f32 = _splat(VF, types.float32, "16 lanes of one float32.")
splat_i32 = _splat(VI, types.int64, "16 lanes of the low 32 bits of one int64.")


def _constant(vec, values, doc):
    def operation(typingctx):
        def codegen(context, builder, signature, args):
            return ir.Constant(vec.ir, values)

        return vec(), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


zero_f32 = _constant(VF, [0.0] * 16, "16 lanes of +0.")
zero_i32 = _constant(VI, [0] * 16, "16 lanes of 0.")
iota = _constant(VI, list(range(16)), "The lanes 0, 1, … 15.")


@intrinsic
def to_f32(typingctx, a):
    """int32 lanes as float32, rounded to nearest even."""
    if not isinstance(a, Vec) or a.element != "i32":
        return None
    result = Vec("f32", a.count)

    def codegen(context, builder, signature, args):
        return builder.sitofp(args[0], result.ir)

    return result(a), codegen


@intrinsic
def to_i32(typingctx, a):
    """float32 lanes as int32, truncated toward zero; |a| must be below 2**31."""
    if not isinstance(a, Vec) or not a.is_float:
        return None
    result = Vec("i32", a.count)

    def codegen(context, builder, signature, args):
        return builder.fptosi(args[0], result.ir)

    return result(a), codegen


#: 1.5 * 2**23: a float32 of magnitude below 2**22 added to it is rounded to an integer, to nearest even.
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000


@intrinsic
def round_to_i32(typingctx, a):
    """float32 lanes rounded to nearest even, as int32; |a| must be below 2**22, else some int32."""
    if not isinstance(a, Vec) or not a.is_float:
        return None
    result = Vec("i32", a.count)

    def codegen(context, builder, signature, args):
        shifted = builder.fadd(args[0], ir.Constant(a.ir, [_ROUNDER] * a.count))
        bits = builder.bitcast(shifted, result.ir)
        return builder.sub(bits, ir.Constant(result.ir, [_ROUNDER_BITS] * a.count))

    return result(a), codegen


def _bitcast(source, target, doc):
    def operation(typingctx, a):
        if not isinstance(a, Vec) or a.element != source:
            return None
        result = Vec(target, a.count)

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], result.ir)

        return result(a), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


bitcast_i32 = _bitcast("f32", "i32", "The bits of float32 lanes as int32 lanes.")
bitcast_f32 = _bitcast("i32", "f32", "The bits of int32 lanes as float32 lanes.")


@intrinsic
def f32_bits(typingctx, value):
    """The bits of a float32 scalar as a non-negative int64."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.bitcast(args[0], I32), ir.IntType(64))

    return types.int64(types.float32), codegen


@intrinsic
def bits_f32(typingctx, value):
    """The float32 scalar whose bits are the low 32 bits of an int64."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), codegen


@intrinsic
def bits_f64(typingctx, value):
    """The float64 scalar whose bits are an int64."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


def _shuffle(pattern, doc):
    def operation(typingctx, a):
        if a not in (VF, VI):
            return None

        def codegen(context, builder, signature, args):
            order = ir.Constant(ir.VectorType(I32, 16), [pattern(lane) for lane in range(16)])
            return builder.shuffle_vector(args[0], args[0], order)

        return a(a), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


swap_pairs = _shuffle(lambda lane: lane ^ 1, "Lanes 1, 0, 3, 2, … of a 16-lane vector.")
duplicate_even = _shuffle(lambda lane: lane & ~1, "Lanes 0, 0, 2, 2, … of a 16-lane vector.")
duplicate_odd = _shuffle(lambda lane: lane | 1, "Lanes 1, 1, 3, 3, … of a 16-lane vector.")


@intrinsic
def extract(typingctx, a, lane):
    """One lane of a 16-lane vector: float32, or int64 for int32 lanes."""
    if a not in (VF, VI):
        return None

    def codegen(context, builder, signature, args):
        value = builder.extract_element(args[0], builder.trunc(args[1], I32))
        return value if a is VF or a.is_float else builder.sext(value, ir.IntType(64))

    return (types.float32 if a.is_float else types.int64)(a, types.int64), codegen


def _reduction(float_step, int_step, doc):
    def operation(typingctx, a):
        if a not in (VF, VI):
            return None

        def codegen(context, builder, signature, args):
            step = float_step if a.is_float else int_step
            value = args[0]
            for half in (8, 4, 2, 1):
                low, high = (
                    builder.shuffle_vector(
                        value, value, ir.Constant(ir.VectorType(I32, half), list(range(at, at + half)))
                    )
                    for at in (0, half)
                )
                value = step(builder, low, high)
            lane = builder.extract_element(value, ir.Constant(I32, 0))
            return lane if a.is_float else builder.sext(lane, ir.IntType(64))

        return (types.float32 if a.is_float else types.int64)(a), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


def _pick(symbol, is_float):
    def step(builder, low, high):
        compare = builder.fcmp_ordered if is_float else builder.icmp_signed
        return builder.select(compare(symbol, low, high), low, high)

    return step


hsum = _reduction(
    lambda builder, low, high: builder.fadd(low, high),
    lambda builder, low, high: builder.add(low, high),
    "Sum of 16 lanes by halves: lane k + lane k+8, then k+4, k+2, k+1. float32, or int64 of a wrapped int32.",
)
hmax = _reduction(
    _pick(">", True), _pick(">", False), "Largest of 16 lanes by halves, as max_ compares: float32 or int64."
)
hmin = _reduction(
    _pick("<", True), _pick("<", False), "Smallest of 16 lanes by halves, as min_ compares: float32 or int64."
)
