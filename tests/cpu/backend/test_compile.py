"""The cache of machine code: what makes a kernel compile anew, and that nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kinetic_core
from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.errors import BackendError

LOOK = """
import json, sys
from kinetic_core.backends.cpu import compile as c
names = sys.argv[1].split()
heard = []
c.prepare(names, lambda text, share: heard.append(text))
code = {name: c.get(name)._library.get_asm_str() for name in names}
print(json.dumps({
    "digest": c.kernel_digest(),
    "hits": {name: c.get(name).cache_hits for name in names},
    "wide": {name: "zmm" in text for name, text in code.items()},
    "vector": {name: "ymm" in text or "zmm" in text for name, text in code.items()},
    "heard": heard,
}))
"""


def look(package: Path, cache: Path, names: str, **environment: str) -> dict:
    """Load kernels in a fresh process that imports kinetic_core from `package`."""
    variables = {**os.environ, "PYTHONPATH": str(package), "KINETIC_CACHE_DIR": str(cache), **environment}
    run = subprocess.run(
        [sys.executable, "-c", LOOK, names], env=variables, cwd=package, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A copy of the package that a test may edit."""
    root = tmp_path_factory.mktemp("package")
    source = Path(kinetic_core.__file__).parent
    shutil.copytree(source, root / "kinetic_core", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_what_compiles_anew(package: Path, tmp_path: Path):
    names = "gather_rows elementwise"
    first = look(package, tmp_path, names)
    assert first["heard"] == ["compiling kernel 1 of 2", "compiling kernel 2 of 2"]
    second = look(package, tmp_path, names)
    assert second["digest"] == first["digest"]
    assert second["heard"] == []
    assert second["hits"] == {"gather_rows": 1, "elementwise": 1}
    third = look(package, tmp_path, "gather_rows gate")
    assert third["hits"]["gather_rows"] == 1
    # An edit of a file that the kernel merely uses.
    vocabulary = package / "kinetic_core/backends/cpu/simd/memory.py"
    vocabulary.write_text(vocabulary.read_text() + "\n# edited\n")
    edited = look(package, tmp_path, names)
    assert edited["digest"] != first["digest"]
    assert edited["heard"] == first["heard"]
    assert edited["hits"] == {"gather_rows": 1, "elementwise": 1}  # compiled by the helper processes


def test_lowerings_have_their_own_machine_code(package: Path, tmp_path: Path):
    seen = {}
    for lowering in ("generic", "auto"):
        hidden = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": ""} if lowering == "generic" else {}
        seen[lowering] = look(package, tmp_path, "elementwise", KINETIC_SIMD=lowering, **hidden)
    assert seen["generic"]["digest"] != seen["auto"]["digest"]
    assert not seen["generic"]["vector"]["elementwise"]


def test_one_hit_per_kernel_in_a_second_process():
    """In the tests' own cache: kernels that a program needs load, none compiles twice."""
    from kinetic_core.backends.cpu.workers import KERNELS

    names = sorted({"gather_rows", "rms_norm", "store_kv_f32", "attention_f32", "linear_f32", *KERNELS})
    kernel_compile.prepare(names)
    root = Path(kinetic_core.__file__).parents[1]
    cache = kernel_compile.cache_directory().parents[1]
    assert look(root, cache, " ".join(names))["hits"] == dict.fromkeys(names, 1)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(BackendError, match="no such kernel"):
        kernel_compile.get("linear_q9")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KINETIC_CACHE_DIR", str(blocked))
    with pytest.raises(BackendError, match="KINETIC_CACHE_DIR"):
        kernel_compile._compile("gather_rows")


def test_the_digest_covers_the_sources():
    names = {path.name for path in kernel_compile.kernel_sources()}
    assert {"vector.py", "machine.py", "attention.py", "run_tape.py", "quantize.py", "packing.py"} <= names
