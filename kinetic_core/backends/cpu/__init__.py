"""The CPU backend: SIMD kernels compiled by numba, weights packed for them, a tape of calls, persistent threads.

Importing this package is cheap: numba comes with `CpuBackend`, which is imported when it is first named.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "CpuBackend":
        from kinetic_core.backends.cpu.backend import CpuBackend

        return CpuBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
