"""The tutorial of plugins, walked through: from an empty folder to a wheel that conforms, in an empty environment."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from toy_tutorial import BLOCKS, EXAMPLE, commands, shows
from wheels import clean_environment, core_wheel, linked_environment, run

PIP_OPTIONS = "--quiet --no-index --no-build-isolation --find-links"

pytestmark = pytest.mark.timeout(900)  # with cold caches every kernel is compiled twice


def test_the_tutorial_from_nothing_to_a_wheel_that_conforms(tmp_path: Path) -> None:
    """Every file is written and every command run in the tutorial's order."""
    programs = linked_environment(tmp_path / "env", "kinetic-core[conformance]", beside=("hatchling",))
    core = core_wheel().parent
    folder = tmp_path / "work"
    folder.mkdir()
    ran = []
    for block in BLOCKS:
        if block.path:
            path = folder / block.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        if block.language != "console" or block.skipped:
            continue
        for command, expected in commands(block):
            # What a user's pip fetches is here already.
            offline = re.sub(r"^pip (install|wheel) ", rf"pip \1 {PIP_OPTIONS} {core} ", command)
            printed = run_in(programs, offline, folder)
            for line in expected:
                assert any(shows(line, actual) for actual in printed.splitlines()), (command, line, printed)
            ran.append(command)
    assert {"kinetic plugins", "kinetic conform toy", "python make_model.py"} <= set(ran)
    (wheel,) = (folder / "dist").iterdir()
    listed = run(str(programs / "python"), "-m", "zipfile", "-l", str(wheel), cwd=folder)
    modules = {path.relative_to(EXAMPLE).as_posix() for path in (EXAMPLE / "kinetic_arch_toy").glob("*.py")}
    assert modules == set(re.findall(r"^(kinetic_arch_toy/\S+)", listed, re.MULTILINE))


def run_in(programs: Path, command: str, folder: Path) -> str:
    """What a shell command prints, with the programs of an environment first."""
    search = f"{programs}:{clean_environment()['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=clean_environment(PATH=search, COLUMNS="80"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
