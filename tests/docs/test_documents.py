"""What the documents say is run, and what they list is complete.

A fenced `console` block is run line by line (lines that start with "$ "); each other line must occur in what its
command prints. A `python` block is run as a program. A comment before a block changes that: `<!-- test: slow -->` or
`<!-- test: skip, the reason -->`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import typer

from kinetic_core import errors
from kinetic_core.cli import INTERNAL_ERROR_STATUS, INTERRUPTED_STATUS, NOBODY_READS_STATUS, OUTPUT_ERROR_STATUS
from kinetic_core.cli.application import USAGE_STATUS, make_application
from kinetic_core.gguf import BLOCK_FORMATS

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
WALKED_THROUGH = {"docs/tutorial-plugin.md"}
"""Run in order, in an environment of its own, by tests/packaging/test_toy.py."""
BLOCK = re.compile(
    r"(?:<!-- test: (?P<mark>[^>]*?) -->\n)?^```(?P<language>console|python)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@attrs.frozen
class Block:
    name: str
    language: str
    body: str
    mark: str


def blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text[: match.start("body")].count("\n")
            name = document.relative_to(ROOT).as_posix()
            yield Block(f"{name}:{line}", match["language"], match["body"], match["mark"] or "")


def cases() -> list[object]:
    return [
        pytest.param(block, id=block.name, marks=[pytest.mark.slow] if block.mark == "slow" else [])
        for block in blocks()
        if not block.mark.startswith("skip") and block.name.partition(":")[0] not in WALKED_THROUGH
    ]


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KINETIC_") or k == "KINETIC_CACHE_DIR"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("block", cases())
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    if block.language == "python":
        done = run([sys.executable, "-c", block.body], tmp_path)
        assert done.returncode == 0, done.stderr
        return
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.body, re.MULTILINE)
    assert commands, "a console block without a command"
    for command, expected in commands:
        done = run(["sh", "-c", command], tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        for line in expected.splitlines():
            assert line in done.stdout, f"{command}: {line!r} is not in {done.stdout!r}"


def test_skips_have_a_reason_and_marks_are_known() -> None:
    for block in blocks():
        assert block.mark in ("", "slow") or re.fullmatch(r"skip, .{10,}", block.mark), (block.name, block.mark)


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24]
    assert "$ make chat" in first_screen and "$ make test" in first_screen


def test_every_error_is_listed_with_its_status() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    listed = {name: int(status) for status, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)}
    kinds = [errors.KineticError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    actual = {kind.__name__: kind.exit_status for kind in kinds if kind.__module__ == errors.__name__}
    assert listed == actual
    ours = (NOBODY_READS_STATUS, USAGE_STATUS, INTERNAL_ERROR_STATUS, OUTPUT_ERROR_STATUS, INTERRUPTED_STATUS)
    for status in ours:
        assert f"\n| {status} | | " in text


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    group = typer.main.get_command(make_application())
    commands = group.commands  # type: ignore[attr-defined]
    headings = set(re.findall(r"^## kinetic (\w+)", text, re.MULTILINE))
    assert headings == set(commands)
    for name, command in commands.items():
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("--") and option != "--help":
                    assert re.search(rf"`{option}\b", text), f"{name} {option}"
    documented = set(re.findall(r"`(--[a-z-]+)", text)) - {"--help"}
    known = {option for command in commands.values() for parameter in command.params for option in parameter.opts}
    assert documented <= known


def test_every_variable_is_documented() -> None:
    read = set()
    for path in ROOT.glob("kinetic_core/**/*.py"):
        read |= set(re.findall(r'"(KINETIC_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (KINETIC_[A-Z_]+) \|", text, re.MULTILINE)) == read


def test_the_index_lists_every_page() -> None:
    folder = ROOT / "docs"
    pages = {path.name for path in folder.glob("*.md")} - {"README.md"} | {"adr/README.md"}
    listed = re.findall(r"^\| \[([^]]+)\]\(\1\) \|", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    decisions = {path.name for path in folder.glob("adr/0*.md")}
    assert set(re.findall(r"\]\(([^)]+)\)", (folder / "adr" / "README.md").read_text(encoding="utf-8"))) == decisions


def test_every_block_format_is_listed_with_its_kernel() -> None:
    text = (ROOT / "docs" / "gguf.md").read_text(encoding="utf-8")
    for answer in ("yes", "no"):
        (listed,) = re.findall(rf"^\| {answer} \| (.*) \|$", text, re.MULTILINE)
        expected = {block.name for block in BLOCK_FORMATS.values() if block.has_kernel == (answer == "yes")}
        assert set(listed.split(", ")) == expected


def test_lines_are_no_longer_than_those_of_code() -> None:
    for document in [*DOCUMENTS, ROOT / "CHANGELOG.md", *ROOT.glob("docs/adr/*.md")]:
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120 or line.startswith("|"), f"{document.name}:{number}"  # a table's row is one line


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
