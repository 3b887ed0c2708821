"""Every lowering gives the same bits, the generic one also where the host's features are hidden from LLVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kinetic_core.backends.cpu.target import LOWERINGS, cpu_features

from .support import FORMATS

ROOT, CPU_TESTS = Path(__file__).parents[3], Path(__file__).parents[1]
HIDDEN = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": ""}


def environment(variables: dict[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KINETIC_SIMD", "NUMBA_CPU"))}
    return inherited | {"PYTHONPATH": str(ROOT)} | variables


def digests(variables: dict[str, str]) -> dict[str, str]:
    names = [type_.name for type_ in FORMATS]
    command = [sys.executable, "-m", f"{Path(__file__).parent.name}.lowering_digests", *names]
    done = subprocess.run(
        command, cwd=CPU_TESTS, env=environment(variables), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.timeout(900)
def test_the_same_bits_in_every_lowering() -> None:
    hidden = digests(HIDDEN)
    assert hidden.pop("lowering") == "generic"
    runnable = [name for name, needs in LOWERINGS.items() if needs and needs <= cpu_features()]
    for name in runnable:
        got = digests({"KINETIC_SIMD": name})
        assert got.pop("lowering") == name
        assert got == hidden


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_generic_lowering_with_the_hosts_features() -> None:
    assert digests({"KINETIC_SIMD": "generic"}) == digests(HIDDEN)


@pytest.mark.parametrize("variables", [HIDDEN, {"KINETIC_SIMD": "generic"}, {"KINETIC_SIMD": "avx2"}])
def test_the_vocabulary_holds_in_other_lowerings(variables: dict[str, str]) -> None:
    if not LOWERINGS.get(variables.get("KINETIC_SIMD", ""), frozenset()) <= cpu_features():
        pytest.skip("this CPU cannot run the lowering")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).parent / "test_simd.py"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(variables), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout


def import_lowering(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "from kinetic_core.backends.cpu.simd.lowering import LOWERING; print(LOWERING)"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(variables), capture_output=True, text=True, check=False
    )


def test_auto_takes_the_widest_lowering_that_the_features_allow() -> None:
    avx2 = "+avx2,+fma,+f16c"
    wide = avx2 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
    for features, expected in (("", "generic"), ("+avx2,+fma", "generic"), (avx2, "avx2"), (wide, "avx512vnni")):
        done = import_lowering({"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": features})
        assert done.stdout.strip() == expected, done.stderr


def test_an_unknown_lowering_is_refused_by_name() -> None:
    done = import_lowering({"KINETIC_SIMD": "sse9"})
    assert done.returncode != 0
    assert "no such SIMD lowering in KINETIC_SIMD: got sse9, expected auto, avx512vnni, avx2, generic" in done.stderr


def test_a_lowering_that_the_cpu_lacks_is_refused() -> None:
    done = import_lowering({"KINETIC_SIMD": "avx2", "NUMBA_CPU_FEATURES": "+fma"})
    assert done.returncode != 0
    assert (
        "this CPU cannot run the SIMD lowering in KINETIC_SIMD: got avx2, expected a CPU with avx2, f16c" in done.stderr
    )
