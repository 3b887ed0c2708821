"""What machine code is made for: the CPU, its features, and the lowering chosen for them. Imports no numba.

A lowering is a choice of machine instructions that the SIMD vocabulary becomes. It never changes a result's bits, only
its speed. `KINETIC_SIMD` names one (`auto`, `avx512vnni`, `avx2` or `generic`); `auto` takes the widest that the
features numba compiles for allow. numba takes the host's features unless `NUMBA_CPU_FEATURES` names others: to hide
the host set that to nothing, and `NUMBA_CPU_NAME` to a CPU, whose own features then hold and are unknown here: `auto`
takes the generic lowering, and a named lowering is taken on trust.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import attrs

from kinetic_core.errors import BackendError, describe

#: Every lowering, the widest first, with the CPU features (LLVM's names) that it needs.
LOWERINGS: dict[str, frozenset[str]] = {
    "avx512vnni": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "generic": frozenset(),
}

_CONFIGURATION_FILE = ".numba_config.yaml"
_PLAIN_VARIABLES = frozenset({"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS"})
"""Settings of numba that are read here as numba reads them, or that machine code does not depend on."""
_CPUS_WITHOUT_AVX = frozenset({"corei7-avx", "core-avx-i", "sandybridge", "ivybridge", "nocona"})
"""CPUs for which numba may leave AVX out."""


@attrs.frozen
class CompilerSettings:
    """What numba compiles for.

    cpu_name: by LLVM's name. cpu_features: comma list of LLVM's names with + or -. own_features: they are the host's.
    optimization: 0 to 3 or max. bounds_checks: as numba writes it.
    """

    cpu_name: str
    cpu_features: str
    own_name: bool
    own_features: bool
    optimization: str
    bounds_checks: str


@functools.cache
def compiler_settings() -> CompilerSettings:
    """numba's settings; numba is imported for them only where they are out of the ordinary."""
    import llvmlite.binding as llvm

    host = llvm.get_host_cpu_name()
    set_ = {name for name in os.environ if name.startswith("NUMBA_")}
    name = os.environ.get("NUMBA_CPU_NAME")
    plain = set_ <= _PLAIN_VARIABLES and not _CPUS_WITHOUT_AVX & {name, host}
    if not plain or "numba" in sys.modules or os.path.exists(_CONFIGURATION_FILE):
        return _numbas_own(host)
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None and str(name).lower() == "generic":
        features = ""
    return CompilerSettings(
        cpu_name=name or host,
        cpu_features=_host_features() if features is None else features,
        own_name=name is None,
        own_features=features is None,
        optimization="3",
        bounds_checks="None",
    )


def _host_features() -> str:
    import llvmlite.binding as llvm

    try:
        features: str = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM does not know this kind of machine
        return ""
    return features


def _numbas_own(host: str) -> CompilerSettings:
    from numba.core import codegen
    from numba.core import config as module

    config: Any = module  # its attributes are set at run time
    name, features = config.CPU_NAME, config.CPU_FEATURES
    return CompilerSettings(
        cpu_name=name or host,
        cpu_features=codegen.get_host_cpu_features() if features is None else features,
        own_name=name is None,
        own_features=features is None,
        optimization="max" if config.OPT.is_opt_max else str(int(config.OPT)),
        bounds_checks=str(config.BOUNDSCHECK),
    )


def cpu_features() -> frozenset[str]:
    """The CPU features that numba's code generator may use, by LLVM's names."""
    return frozenset(part[1:] for part in compiler_settings().cpu_features.split(",") if part.startswith("+"))


@functools.cache
def choose_lowering() -> str:
    """The lowering of this process, from `KINETIC_SIMD` and the host.

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
    settings = compiler_settings()
    missing = LOWERINGS[wanted] - features
    if missing and (settings.own_features or settings.own_name):
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
