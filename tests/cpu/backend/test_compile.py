"""The cache of machine code: what makes a kernel compile anew, and that nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kinetic_core
from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu import emit, machine_code
from kinetic_core.backends.cpu.target import choose_lowering
from kinetic_core.errors import BackendError

LOOK = """
import json, sys
from kinetic_core.backends.cpu import compile as c
names = sys.argv[1].split()
heard = []
c.prepare(names, lambda text, share: heard.append(text))
code = {name: c.get(name) for name in names}
print(json.dumps({
    "digest": c.kernel_digest(),
    "stored": {name: one.stored for name, one in code.items()},
    "code": {name: one.code_digest for name, one in code.items()},
    "heard": heard,
    "numba": "numba" in sys.modules,
}))
"""
ASSEMBLE = """
import sys
import threading
from kinetic_core.backends.cpu import emit
print(emit.library(sys.argv[1], emit.registry()[sys.argv[1]]).get_asm_str())
"""
GENERATE = """
import sys
import threading
import kinetic_core
with kinetic_core.load(sys.argv[1], ctx=64) as model:
    print(model.generate("The", temperature=0, max_tokens=4).token_ids)
print("numba" in sys.modules)
"""


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """What a fresh process prints."""
    variables = {**os.environ, **environment}
    cwd = environment.get("PYTHONPATH")
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, check=True).stdout


def look(package: Path, cache: Path, names: str, **environment: str) -> dict:
    """Load kernels in a fresh process that imports kinetic_core from `package`."""
    return json.loads(run_python(LOOK, names, PYTHONPATH=str(package), KINETIC_CACHE_DIR=str(cache), **environment))


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
    assert second["stored"] == {"gather_rows": True, "elementwise": True}
    assert second["code"] == first["code"]
    assert not second["numba"]
    third = look(package, tmp_path, "gather_rows gate")
    assert third["stored"] == {"gather_rows": True, "gate": False}
    # An edit of a file that the kernel merely uses.
    vocabulary = package / "kinetic_core/backends/cpu/simd/memory.py"
    vocabulary.write_text(vocabulary.read_text() + "\n# edited\n")
    edited = look(package, tmp_path, names)
    assert edited["digest"] != first["digest"]
    assert edited["heard"] == first["heard"]
    assert edited["stored"] == {"gather_rows": True, "elementwise": True}  # compiled by the helper processes


def test_lowerings_have_their_own_machine_code(package: Path, tmp_path: Path):
    hidden = {"KINETIC_SIMD": "generic", "NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": ""}
    own = look(package, tmp_path, "elementwise")
    generic = look(package, tmp_path, "elementwise", **hidden)
    assert generic["digest"] != own["digest"]
    assert generic["code"] != own["code"]
    wide = {"avx512vnni": "zmm", "avx2": "ymm", "generic": "xmm"}[choose_lowering()]
    assert wide in run_python(ASSEMBLE, "elementwise")
    assembly = run_python(ASSEMBLE, "elementwise", **hidden)
    assert "ymm" not in assembly and "zmm" not in assembly


def test_one_hit_per_kernel_in_a_second_process():
    """In the tests' own cache: kernels that a program needs load, none compiles twice, none needs numba."""
    from kinetic_core.backends.cpu.workers import KERNELS

    names = sorted({"gather_rows", "rms_norm", "store_kv_f32", "attention_f32", "linear_f32", "pack_groups", *KERNELS})
    kernel_compile.prepare(names)
    root = Path(kinetic_core.__file__).parents[1]
    cache = kernel_compile.cache_directory().parents[1]
    second = look(root, cache, " ".join(names))
    assert second["stored"] == dict.fromkeys(names, True)
    assert not second["numba"]


def test_a_model_whose_kernels_are_stored_runs_without_numba():
    file = str(Path(__file__).parents[2] / "data" / "llama-q4_k_m.gguf")
    first, second = run_python(GENERATE, file), run_python(GENERATE, file)
    tokens, imported = second.splitlines()
    assert first.splitlines()[0] == tokens
    assert imported == "False"


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "changed"])
def test_damaged_machine_code_is_compiled_again(package: Path, tmp_path: Path, damage: str):
    first = look(package, tmp_path, "gather_rows")
    (file,) = tmp_path.glob("kernels/*/gather_rows.code")
    whole = file.read_bytes()
    changed = bytes([whole[-40] ^ 1])
    file.write_bytes(
        {"empty": b"", "cut": whole[:-1], "longer": whole + b"\0", "changed": whole[:-40] + changed + whole[-39:]}[
            damage
        ]
    )
    second = look(package, tmp_path, "gather_rows")
    assert second["stored"] == {"gather_rows": False}
    assert second["code"] == first["code"]
    assert file.read_bytes() == whole


def test_an_object_file_that_cannot_be_linked_is_compiled_again(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KINETIC_CACHE_DIR", str(tmp_path))
    machine_code.write(kernel_compile._path("gather_rows"), b"no object file")
    assert kernel_compile._load("gather_rows") is None
    assert not kernel_compile._path("gather_rows").exists()


def test_the_digest_does_not_depend_on_who_reads_numbas_settings():
    digest = "from kinetic_core.backends.cpu.compile import kernel_digest; print(kernel_digest())"
    assert run_python(digest) == run_python("import numba\n" + digest)
    named = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+avx2"}
    assert run_python(digest, **named) == run_python("import numba\n" + digest, **named) != run_python(digest)
    assert run_python(digest, NUMBA_OPT="1") != run_python(digest)


def test_a_kernel_that_calls_outside_is_refused():
    from numba import types

    outside = types.ExternalFunction("PyErr_Clear", types.void())

    def reach(args, begin, end):
        outside()

    with pytest.raises(BackendError, match="PyErr_Clear"):
        emit.emit("reach", reach)


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
    assert {"vector.py", "machine.py", "attention.py", "run_tape.py", "quantize.py", "packing.py", "target.py"} <= names
    # numba's cache on disk knows nothing of the digest.
    assert not [path for path in kernel_compile.kernel_sources() if "cache=True" in path.read_text()]


def test_helpers_that_end_at_once_leave_the_work_here(monkeypatch, caplog):
    """What was not sent breaks the pipe when it is closed, too; no thread may end with that."""

    class Ended(subprocess.Popen):
        def __init__(self, command: list[str], **options):
            super().__init__([sys.executable, "-c", ""], **options)
            self.wait()

    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(subprocess, "Popen", Ended)
    kernel_compile._compile_in_processes(["one", "two", "three"], 2, None)
    assert not errors
    assert sorted(record.args for record in caplog.records) == [("three",), ("two",)]
