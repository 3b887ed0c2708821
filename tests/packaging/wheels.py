"""Wheels of this repository's projects, and environments to install them in, without the network."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment's variables without what leads to this Python or to settings of `make`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    return {**kept, **variables}


def run(*command: str, cwd: Path, status: int = 0, **variables: str) -> str:
    """Run without standard input and without this environment's Python.

    Returns what was printed on standard output, or on standard error where another `status` than 0 is expected.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == status, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stderr if status else done.stdout


def build_wheel(project: Path, directory: Path) -> Path:
    """Build a project's wheel into `directory`, with the hatchling of this environment."""
    before = set(directory.iterdir())
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(project))
    run(*command, cwd=directory)
    (wheel,) = set(directory.iterdir()) - before
    return wheel


@functools.cache
def core_wheel() -> Path:
    """The wheel of kinetic-core, alone in its folder; built once for all tests of a process."""
    directory = Path(tempfile.mkdtemp(prefix="kinetic-core-wheel-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return build_wheel(ROOT, directory)


def linked_environment(directory: Path, requirement: str, beside: Sequence[str] = ()) -> Path:
    """A new environment with pip, with what `requirement` needs but not itself, and `beside`; returns its `bin`.

    All of that is linked from this environment instead of being downloaded, and nothing else is: a dependency that
    the project does not declare is missing, as on a user's machine.
    """
    venv.create(directory, with_pip=True)
    (packages,) = (directory / "lib").glob("python*/site-packages")
    for needed in _needed(requirement, beside):
        _link(needed, packages)
    return directory / "bin"


def _needed(requirement: str, beside: Sequence[str]) -> list[Distribution]:
    """The distributions that `requirement` needs, directly and further on, and those of `beside`."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    root = Requirement(requirement)
    waiting = [(name, "") for name in beside] + [(root.name, extra) for extra in ("", *root.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            known = distribution(name)
        except PackageNotFoundError:
            raise AssertionError(f"{name} is needed here and not installed; run `make environment`") from None
        found[name] = known
        for needed in map(Requirement, known.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, other) for other in ("", *needed.extras)]
    del found[root.name]
    return list(found.values())


def _link(known: Distribution, packages: Path) -> None:
    """Link the files and folders of a distribution that lie in site-packages."""
    for top in sorted({path.parts[0] for path in known.files or ()} - {"..", "__pycache__"}):
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(known.locate_file(top))).resolve())
