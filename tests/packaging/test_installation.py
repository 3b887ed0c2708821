"""Wheels in an empty environment, and the README's commands in a fresh clone."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Run without standard input and without this environment's Python; returns what was printed."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("clone") / "kinetic"
    run("git", "clone", "--quiet", str(ROOT), str(directory), cwd=ROOT)
    return directory


def test_wheels_install_in_an_empty_environment(clone: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    for project in (clone, clone / "plugins" / "kinetic-arch-llama"):
        run(sys.executable, "-m", "build", "--wheel", "--outdir", str(wheels), str(project), cwd=tmp_path)
    names = sorted(path.name for path in wheels.iterdir())
    assert names == ["kinetic_arch_llama-0.1.0-py3-none-any.whl", "kinetic_core-0.1.0-py3-none-any.whl"]
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", *(str(wheels / name) for name in names), cwd=tmp_path)
    listed = run(str(python.with_name("kinetic")), "plugins", "--strict", cwd=tmp_path)
    assert "kinetic-core 0.1.0: builtins" in listed and "kinetic-arch-llama 0.1.0: llama" in listed
    answer = run(
        str(python.with_name("kinetic")),
        *("run", "tiny-hybrid", "abc", "--raw", "--temperature", "0", "-n", "5"),
        cwd=tmp_path,
    )
    assert answer == "defgh\n"


def test_make_chat_in_a_fresh_clone(clone: Path, tmp_path: Path) -> None:
    printed = run("make", "chat", cwd=clone, KINETIC_CACHE_DIR=str(tmp_path / "cache"))
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in printed
    answer = subprocess.run(
        [clone / ".venv" / "bin" / "kinetic", "chat", "--temperature", "0", "--max-tokens", "20"],
        input="What color is the sky?\n/quit\n",
        env={**os.environ, "KINETIC_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "sky" in answer.stdout and "blue" in answer.stdout
