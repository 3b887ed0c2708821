"""Memory by address: scalars, 16-lane vectors, partial vectors, prefetch, copies and scratch on the stack."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.types import F32, F64, I1, I8, I16, I32, I64, VF, VI, pointer, splat

__all__ = [
    "copy_bytes",
    "load_f32",
    "load_f64",
    "load_i8",
    "load_i16",
    "load_i32",
    "load_i64",
    "load_u8",
    "load_u16",
    "load_u32",
    "load_vf",
    "load_vf_partial",
    "load_vi",
    "load_vi_i8",
    "load_vi_i16",
    "load_vi_u8",
    "load_vi_u16",
    "prefetch",
    "stack_bytes",
    "store_f32",
    "store_i8",
    "store_i16",
    "store_i32",
    "store_i64",
    "store_vf",
    "store_vf_partial",
    "store_vi",
    "store_vi_i8",
    "zero_bytes",
]


def _scalar_load(machine, result, doc, extend=None):
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            value = builder.load(pointer(builder, args[0], machine), align=1, typ=machine)
            if extend == "sign":
                value = builder.sext(value, I64)
            elif extend == "zero":
                value = builder.zext(value, I64)
            return value

        return result(types.int64), codegen

    load.__doc__ = doc
    return intrinsic(load)


def _scalar_store(machine, value_type, doc, narrow=False):
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            value = builder.trunc(args[1], machine) if narrow else args[1]
            builder.store(value, pointer(builder, args[0], machine), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), codegen

    store.__doc__ = doc
    return intrinsic(store)


load_f32 = _scalar_load(F32, types.float32, "The float32 at an address.")
load_f64 = _scalar_load(F64, types.float64, "The float64 at an address.")
load_i64 = _scalar_load(I64, types.int64, "The int64 at an address.")
load_i32 = _scalar_load(I32, types.int64, "The int32 at an address, sign-extended to int64.", "sign")
load_u32 = _scalar_load(I32, types.int64, "The uint32 at an address, as int64.", "zero")
load_i16 = _scalar_load(I16, types.int64, "The int16 at an address, sign-extended to int64.", "sign")
load_u16 = _scalar_load(I16, types.int64, "The uint16 at an address, as int64.", "zero")
load_i8 = _scalar_load(I8, types.int64, "The int8 at an address, sign-extended to int64.", "sign")
load_u8 = _scalar_load(I8, types.int64, "The uint8 at an address, as int64.", "zero")
store_f32 = _scalar_store(F32, types.float32, "Store a float32 at an address.")
store_i64 = _scalar_store(I64, types.int64, "Store an int64 at an address.")
store_i32 = _scalar_store(I32, types.int64, "Store the low 32 bits of an int64.", narrow=True)
store_i16 = _scalar_store(I16, types.int64, "Store the low 16 bits of an int64.", narrow=True)
store_i8 = _scalar_store(I8, types.int64, "Store the low 8 bits of an int64.", narrow=True)


def vector_load(machine, result, doc, extend=None):
    """An intrinsic that loads a vector of `machine` type, extended lane by lane to `result` if asked."""

    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            value = builder.load(pointer(builder, args[0], machine), align=1, typ=machine)
            if extend == "sign":
                value = builder.sext(value, result.ir)
            elif extend == "zero":
                value = builder.zext(value, result.ir)
            return value

        return result(types.int64), codegen

    load.__doc__ = doc
    return intrinsic(load)


def vector_store(machine, value_type, doc, narrow=False):
    """An intrinsic that stores a vector of `value_type`, cut lane by lane to `machine` if asked."""

    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            value = builder.trunc(args[1], machine) if narrow else args[1]
            builder.store(value, pointer(builder, args[0], machine), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), codegen

    store.__doc__ = doc
    return intrinsic(store)


_B16, _S16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)
load_vf = vector_load(VF.ir, VF, "16 float32 at an address.")
load_vi = vector_load(VI.ir, VI, "16 int32 at an address.")
load_vi_i8 = vector_load(_B16, VI, "16 int8 at an address, sign-extended.", "sign")
load_vi_u8 = vector_load(_B16, VI, "16 uint8 at an address, zero-extended.", "zero")
load_vi_i16 = vector_load(_S16, VI, "16 int16 at an address, sign-extended.", "sign")
load_vi_u16 = vector_load(_S16, VI, "16 uint16 at an address, zero-extended.", "zero")
store_vf = vector_store(VF.ir, VF, "Store 16 float32.")
store_vi = vector_store(VI.ir, VI, "Store 16 int32.")
store_vi_i8 = vector_store(_B16, VI, "Store the low 8 bits of 16 int32 as 16 bytes.", narrow=True)


def first_lanes(builder, count, lanes):
    """The LLVM mask that is true in the first `count` (an int64 value) of `lanes` lanes."""
    wide = ir.VectorType(I64, lanes)
    return builder.icmp_signed("<", ir.Constant(wide, list(range(lanes))), splat(builder, count, wide))


@intrinsic
def load_vf_partial(typingctx, address, count):
    """The first `count` of 16 float32 at an address, the other lanes 0; memory past them is not touched."""

    def codegen(context, builder, signature, args):
        where = pointer(builder, args[0], VF.ir)
        mask = first_lanes(builder, args[1], 16)
        kind = ir.FunctionType(VF.ir, [where.type, I32, mask.type, VF.ir])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v16f32.p0")
        return builder.call(function, [where, ir.Constant(I32, 1), mask, ir.Constant(VF.ir, [0.0] * 16)])

    return VF(types.int64, types.int64), codegen


@intrinsic
def store_vf_partial(typingctx, address, value, count):
    """Store the first `count` of 16 float32; memory past them is not touched."""

    def codegen(context, builder, signature, args):
        masked_store(builder, args[0], args[1], args[2])
        return context.get_dummy_value()

    return types.void(types.int64, VF, types.int64), codegen


def masked_store(builder, address, value, count):
    """Emit the store of the first `count` lanes of a float vector."""
    lanes = value.type.count
    where = pointer(builder, address, value.type)
    mask = first_lanes(builder, count, lanes)
    kind = ir.FunctionType(ir.VoidType(), [value.type, where.type, I32, mask.type])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{lanes}f32.p0")
    builder.call(function, [value, where, ir.Constant(I32, 1), mask])


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address, to be read soon. Any address is safe."""

    def codegen(context, builder, signature, args):
        where = pointer(builder, args[0], I8)
        kind = ir.FunctionType(ir.VoidType(), [where.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [where, *(ir.Constant(I32, k) for k in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def copy_bytes(typingctx, destination, source, count):
    """Copy `count` bytes between two regions that do not overlap."""

    def codegen(context, builder, signature, args):
        to, origin = (pointer(builder, address, I8) for address in args[:2])
        kind = ir.FunctionType(ir.VoidType(), [to.type, to.type, I64, I1])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memcpy.p0.p0.i64")
        builder.call(function, [to, origin, args[2], ir.Constant(I1, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero_bytes(typingctx, destination, count):
    """Set `count` bytes to zero."""

    def codegen(context, builder, signature, args):
        to = pointer(builder, args[0], I8)
        kind = ir.FunctionType(ir.VoidType(), [to.type, I8, I64, I1])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memset.p0.i64")
        builder.call(function, [to, ir.Constant(I8, 0), args[1], ir.Constant(I1, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def stack_bytes(typingctx, count):
    """The address of `count` bytes (a literal) of 64-byte aligned scratch of the calling function."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    size = count.literal_value

    def codegen(context, builder, signature, args):
        # Not alloca_once: that stores zeros, byte by byte in LLVM's eyes, which costs seconds to compile.
        with builder.goto_entry_block():
            where = builder.alloca(ir.ArrayType(I8, size), name="scratch")
        where.align = 64
        return builder.ptrtoint(where, I64)

    return types.int64(count), codegen
