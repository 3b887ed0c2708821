"""Compiling a kernel with numba, to an object file that needs nothing of numba when it is loaded."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from kinetic_core.backends.cpu import kernels
from kinetic_core.backends.cpu.machine_code import symbol
from kinetic_core.errors import BackendError, describe


@functools.cache
def registry() -> dict[str, Any]:
    """Every kernel function by name; imports all kernel modules."""
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    return kernels.KERNELS


def emit(name: str, function: Callable[..., None]) -> bytes:
    """The object file of a kernel: its machine code under `machine_code.symbol(name)`.

    numba's own entry for callbacks would print an error that a kernel returns, for which it calls into Python and
    numba. Kernels return none, so the entry made here drops it, and the object file stands alone.

    Raises BackendError when the kernel needs something that the object file does not hold, and what numba raises.
    """
    return bytes(library(name, function)._get_compiled_object())


def library(name: str, function: Callable[..., None]) -> Any:
    """numba's code library of a kernel, compiled anew; parameters and errors as for `emit`."""
    from llvmlite import ir
    from numba.core import compiler, sigutils
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    typing_context, target_context = cpu_target.typing_context, cpu_target.target_context
    flags: Any = compiler.Flags()
    cpu_target.options.parse_as_flags(flags, {"nopython": True, **kernels.OPTIONS})
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    arguments, returned = sigutils.normalize_signature(kernels.SIGNATURE)
    with global_compiler_lock:
        result = compiler.compile_extra(typing_context, target_context, function, arguments, returned, flags, {})
        described, made = result.fndesc, result.library
        module = made.create_ir_module("entry")
        convention = target_context.call_conv
        kind = convention.get_function_type(described.restype, described.argtypes)
        callee = ir.Function(module, kind, described.llvm_func_name)
        words = [ir.IntType(64)] * len(arguments)
        entry = ir.Function(module, ir.FunctionType(ir.VoidType(), words), symbol(name))
        builder = ir.IRBuilder(entry.append_basic_block("entry"))
        convention.call_function(
            builder, callee, described.restype, described.argtypes, entry.args, attrs=("noinline",)
        )
        builder.ret_void()
        made.add_ir_module(module)
        made.finalize()
    outside = {function.name for function in made._final_module.functions if function.is_declaration}
    missing = sorted(function for function in outside if not function.startswith("llvm."))
    if missing:
        raise BackendError(describe(f"the kernel {name} calls functions outside of it", got=", ".join(missing)))
    return made
