"""Wheels in an empty environment, and the README's commands in a fresh clone."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest
from wheels import ROOT, build_wheel, core_wheel, run

from kinetic_core.plugins import FAMILY_PACKAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("clone") / "kinetic"
    run("git", "clone", "--quiet", str(ROOT), str(directory), cwd=ROOT)
    return directory


@pytest.fixture(scope="module")
def wheels(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel, of the core and of every plugin."""
    directory = tmp_path_factory.mktemp("wheels")
    plugins = [build_wheel(project, directory) for project in sorted((clone / "plugins").iterdir())]
    return {path.name.partition("-")[0].replace("_", "-"): path for path in (core_wheel(), *plugins)}


def install(directory: Path, *wheels: Path) -> str:
    """Install wheels, and nothing else of ours, in a new environment; returns the path of its `kinetic`."""
    venv.create(directory, with_pip=True)
    python = str(directory / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", *map(str, wheels), cwd=directory)
    return str(directory / "bin" / "kinetic")


def test_every_project_builds_a_wheel(clone: Path, wheels: dict[str, Path]) -> None:
    projects = [path.name for path in (clone / "plugins").iterdir()]
    assert "kinetic-arch-llama" in projects and {*FAMILY_PACKAGES.values(), "kinetic-drafters"} == set(projects)
    assert sorted(wheels) == sorted(["kinetic-core", *projects])
    for name, path in wheels.items():
        assert path.name == f"{name.replace('-', '_')}-0.1.0-py3-none-any.whl"


def test_wheels_install_in_an_empty_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    kinetic = install(tmp_path / "env", *wheels.values())
    listed = run(kinetic, "plugins", "--strict", "--json", cwd=tmp_path)
    assert {plugin["distribution"] for plugin in json.loads(listed)["plugins"]} == set(wheels)
    answer = run(kinetic, "run", "tiny-hybrid", "abc", "--raw", "--temperature", "0", "-n", "5", cwd=tmp_path)
    assert answer == "defgh\n"


def test_one_plugin_alone_runs_its_family_and_names_the_missing_one(
    clone: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    names = ("kinetic-core", "kinetic-arch-qwen35", "kinetic-drafters")  # what one family needs, and no other one
    kinetic = install(tmp_path / "env", *(wheels[name] for name in names))
    listed = json.loads(run(kinetic, "plugins", "--strict", "--json", cwd=tmp_path))
    assert listed["problems"] == []
    assert {plugin["distribution"] for plugin in listed["plugins"]} == set(names)
    data = clone / "tests" / "data"
    options = ("--raw", "--temperature", "0", "-n", "5")
    answers = [
        run(kinetic, "run", str(data / "qwen35-bf16.gguf"), "The sea is", *options, *backend, cwd=tmp_path)
        for backend in ((), ("--backend", "reference"))
    ]
    assert answers[0].strip() and answers[0] == answers[1]
    described = json.loads(run(kinetic, "info", str(data / "qwen35-bf16.gguf"), "--json", cwd=tmp_path))
    assert described["plugin"] == "kinetic-arch-qwen35" and {"context", "requests"} <= set(described["drafters"])
    granite = str(data / "granitehybrid-q4_k_m.gguf")
    error = run(kinetic, "run", granite, "The sea is", *options, cwd=tmp_path, status=1)
    assert error.startswith("error: no installed plugin runs this model's architecture: got 'granitehybrid'")
    assert error.endswith("; pip install kinetic-arch-granite\n") and error.count("\n") == 1
    described = json.loads(run(kinetic, "info", granite, "--json", cwd=tmp_path))
    assert described["plugin"] is None and described["missing"] == error.removeprefix("error: ").strip()


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
