"""What the tape needs of the machine: atomics, calls by address, a pause, a clock and the floating-point mode."""

from __future__ import annotations

import platform

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kinetic_core.backends.cpu.simd.types import I32, I64, pointer

IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "x86")
IS_ARM64 = platform.machine().lower() in ("aarch64", "arm64")

#: MXCSR with every exception masked, rounding to nearest, denormals kept: what a process starts with.
_DEFAULT_MXCSR = 0x1F80


@intrinsic
def atomic_add(typingctx, address, amount):
    """Add to the int64 at an 8-byte aligned address; return what it was. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typingctx, address, value):
    """Store an int64 at an 8-byte aligned address; return what it was. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_claim(typingctx, address, expected):
    """Add 1 to the int64 at an 8-byte aligned address if it is `expected`; was it? Sequentially consistent."""

    def codegen(context, builder, signature, args):
        more = builder.add(args[1], ir.Constant(I64, 1))
        result = builder.cmpxchg(pointer(builder, args[0], I64), args[1], more, "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at an 8-byte aligned address. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(pointer(builder, args[0], I64), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    """Store an int64 at an 8-byte aligned address. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], pointer(builder, args[0], I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        if IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif IS_ARM64:
            kind = ir.FunctionType(ir.VoidType(), [I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(function, [ir.Constant(I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(typingctx, function, args, begin, end):
    """Call the kernel at an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def call_yield(typingctx, function):
    """Call the C function `int f(void)` at an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(I32, [])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def opaque(typingctx, value):
    """The same int64, which the optimizer knows nothing about: it need not reason about large scratch by address."""

    def codegen(context, builder, signature, args):
        return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", list(args), True)

    return types.int64(types.int64), codegen


@intrinsic
def clock_ticks(typingctx):
    """A counter that runs at a constant rate, the same on every core; 0 where the machine is unknown."""

    def codegen(context, builder, signature, args):
        if IS_X86:
            kind = ir.FunctionType(I64, [])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])
        if IS_ARM64:
            kind = ir.FunctionType(I64, [])
            return builder.asm(kind, "mrs $0, cntvct_el0", "=r", [], True)
        return ir.Constant(I64, 0)

    return types.int64(), codegen


@intrinsic
def float_mode(typingctx):
    """The thread's floating-point control register: rounding, flush-to-zero, denormals-are-zero."""

    def codegen(context, builder, signature, args):
        if IS_X86:
            slot = cgutils.alloca_once(builder, I32)
            kind = ir.FunctionType(ir.VoidType(), [slot.type])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.stmxcsr"), [slot])
            return builder.zext(builder.load(slot, typ=I32), I64)
        if IS_ARM64:
            kind = ir.FunctionType(I64, [])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.get.fpcr"), [])
        return ir.Constant(I64, 0)

    return types.int64(), codegen


@intrinsic
def set_float_mode(typingctx, mode):
    """Restore what `float_mode` returned."""

    def codegen(context, builder, signature, args):
        _emit_set_float_mode(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def set_exact_float_mode(typingctx):
    """Rounding to nearest even, denormals kept, no traps."""

    def codegen(context, builder, signature, args):
        _emit_set_float_mode(builder, ir.Constant(I64, _DEFAULT_MXCSR if IS_X86 else 0))
        return context.get_dummy_value()

    return types.void(), codegen


def _emit_set_float_mode(builder, mode):
    if IS_X86:
        slot = cgutils.alloca_once(builder, I32)
        builder.store(builder.trunc(mode, I32), slot)
        kind = ir.FunctionType(ir.VoidType(), [slot.type])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.ldmxcsr"), [slot])
    elif IS_ARM64:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.set.fpcr"), [mode])
