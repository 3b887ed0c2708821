"""The choice of lowering: which machine instructions the SIMD vocabulary becomes.

A lowering never changes a result's bits, only its speed. `KINETIC_SIMD` names one (`auto`, `avx512vnni`, `avx2` or
`generic`); `auto` takes the widest that the host has. Whether a feature is there follows what numba compiles for: with
`NUMBA_CPU_NAME` set to another CPU the host's features count for nothing, and `auto` takes the generic lowering unless
`NUMBA_CPU_FEATURES` says more.
"""

from __future__ import annotations

import os

from numba.core import config
from numba.core.codegen import get_host_cpu_features

from kinetic_core.errors import BackendError, describe

#: Every lowering, the widest first, with the CPU features (LLVM's names) that it needs.
LOWERINGS: dict[str, frozenset[str]] = {
    "avx512vnni": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "generic": frozenset(),
}


def cpu_features() -> frozenset[str]:
    """The CPU features that numba's code generator may use, by LLVM's names."""
    if config.CPU_FEATURES is not None:
        return frozenset(part[1:] for part in config.CPU_FEATURES.split(",") if part.startswith("+"))
    if _host_is_hidden():
        return frozenset()
    return frozenset(part[1:] for part in get_host_cpu_features().split(",") if part.startswith("+"))


def _host_is_hidden() -> bool:
    return config.CPU_NAME not in (None, "host")


def choose_lowering() -> str:
    """The lowering for this process, from `KINETIC_SIMD` and the host.

    Raises:
        BackendError: `KINETIC_SIMD` names no lowering, or one that this CPU cannot run.
    """
    wanted = os.environ.get("KINETIC_SIMD") or "auto"
    features = cpu_features()
    if wanted == "auto":
        return next(name for name, needs in LOWERINGS.items() if needs <= features)
    if wanted not in LOWERINGS:
        raise BackendError(
            describe(
                "no such SIMD lowering",
                where="KINETIC_SIMD",
                got=wanted,
                expected="auto, " + ", ".join(LOWERINGS),
                hint="unset KINETIC_SIMD to let Kinetic choose",
            )
        )
    missing = LOWERINGS[wanted] - features
    if missing and not _host_is_hidden():
        raise BackendError(
            describe(
                "this CPU cannot run the SIMD lowering",
                where="KINETIC_SIMD",
                got=wanted,
                expected="a CPU with " + ", ".join(sorted(missing)),
                hint="unset KINETIC_SIMD to let Kinetic choose",
            )
        )
    return wanted


#: The lowering of this process.
LOWERING: str = choose_lowering()

#: 32-bit lanes of the vectors of the linear kernels: one machine register.
LANES: int = 16 if LOWERING == "avx512vnni" else 8
