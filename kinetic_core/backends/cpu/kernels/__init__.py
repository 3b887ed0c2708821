"""The kernels of the CPU backend, and the registry that names them.

A kernel is a plain module-level function `kernel(args, begin, end)` of three int64: the address of a block of int64
arguments (each kernel documents its fields; a float argument is the bits of a float64), and the range of work items
to do. The ranges of one call may run on several threads at the same time. A kernel never raises and never locks.

`@kernel` only registers: nothing is compiled when a kernel module is imported. `kinetic_core.backends.cpu.compile`
turns a registered function into machine code by numba with `OPTIONS`, once per cache directory. What the callers of
kernels need to know of them is in `constants`, which imports no numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., None])

#: The numba signature that every kernel has.
SIGNATURE = "void(int64,int64,int64)"

#: What a kernel is compiled with: IEEE division instead of exceptions, no fast-math.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": False}

#: Every registered kernel by name; complete once every module of this package is imported.
KERNELS: dict[str, Callable[[int, int, int], None]] = {}


def kernel(name: str) -> Callable[[F], F]:
    """Register the decorated function as the kernel `name`."""

    def register(function: F) -> F:
        if name in KERNELS and KERNELS[name].__module__ != function.__module__:
            raise ValueError(f"two kernels are called {name}")
        KERNELS[name] = function
        return function

    return register
