"""The choice of lowering: which machine instructions the SIMD vocabulary becomes.

A lowering never changes a result's bits, only its speed. `KINETIC_SIMD` names one (`auto`, `avx512vnni`, `avx2` or
`generic`); `auto` takes the widest that the features numba compiles for allow. numba takes the host's features unless
`NUMBA_CPU_FEATURES` names others: to hide the host set that to nothing, and `NUMBA_CPU_NAME` to a CPU, whose own
features then hold and are unknown here: `auto` takes the generic lowering, and a named lowering is taken on trust.
"""

from __future__ import annotations

import os
from typing import Any

from numba.core import config as numba_config
from numba.core.codegen import get_host_cpu_features

from kinetic_core.errors import BackendError, describe

config: Any = numba_config  # its attributes are set at run time

#: Every lowering, the widest first, with the CPU features (LLVM's names) that it needs.
LOWERINGS: dict[str, frozenset[str]] = {
    "avx512vnni": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "generic": frozenset(),
}


def cpu_features() -> frozenset[str]:
    """The CPU features that numba's code generator may use, by LLVM's names."""
    named = config.CPU_FEATURES
    features = get_host_cpu_features() if named is None else named
    return frozenset(part[1:] for part in features.split(",") if part.startswith("+"))


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
    if missing and (config.CPU_FEATURES is None or config.CPU_NAME is None):
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
