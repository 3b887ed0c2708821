"""What needs no model imports neither numba nor cupy: each case in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CASES = {
    "the package": "import kinetic_core",
    "listing plugins": "from kinetic_core.plugins import load_registry; assert load_registry().plugins",
    "an architecture": "from kinetic_core.plugins import load_registry; load_registry().architecture_for('llama')",
    "the contract": "import kinetic_core.interfaces, kinetic_core.program, kinetic_core.hookspecs",
    "reading files": "import kinetic_core.gguf",
    "the reference": "import kinetic_core.reference.backend, kinetic_core.reference.tiny_hybrid",
}


@pytest.mark.parametrize("what", CASES)
def test_no_compiler_is_imported(what: str):
    code = CASES[what] + "\nimport sys\nprint(sorted({'numba', 'llvmlite', 'cupy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_check_sees_an_import():
    code = "import llvmlite, sys\nprint(sorted({'numba', 'llvmlite', 'cupy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "['llvmlite']"
