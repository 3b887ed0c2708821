"""docs/tutorial-plugin.md as data: the files that it writes, the commands that it gives, the mistakes that it makes."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
from wheels import ROOT

TEXT = (ROOT / "docs" / "tutorial-plugin.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "docs" / "examples" / "kinetic-arch-toy"
_BLOCK = re.compile(
    r"(?:^`(?P<path>[\w./-]+)`\n\n|^<!-- test: (?P<mark>[^>]*) -->\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@attrs.frozen
class Block:
    """path: the file that the block is the contents of, or empty."""

    language: str
    body: str
    path: str
    skipped: bool


BLOCKS = [Block(m["language"], m["body"], m["path"] or "", m["mark"] is not None) for m in _BLOCK.finditer(TEXT)]


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """(command, lines that it must print) of a console block."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.body, re.MULTILINE)
    return [(command, expected.splitlines()) for command, expected in found]


@attrs.frozen
class Mistake:
    """A change of one line of the package, and what the suite finds."""

    file: str
    line: str
    wrong: str
    findings: list[str]

    def apply(self, package: Path) -> None:
        """Make the mistake in a copy of the package's folder."""
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.line) == 1, f"{self.line!r} is not one line of {self.file}"
        path.write_text(text.replace(self.line, self.wrong), encoding="utf-8")


def mistakes() -> list[Mistake]:
    """Each `diff` block with the `text` block after it."""
    found = []
    for block, after in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        if block.language == "diff":
            assert after is not None and after.language == "text"
            change = re.fullmatch(r"--- (\S+)\n-(.*\n)(?:\+(.*\n))?", block.body)
            assert change is not None, block.body
            found.append(Mistake(change[1], change[2], change[3] or "", after.body.splitlines()))
    return found


def shows(expected: str, printed: str) -> bool:
    """Does a printed line have the expected one in it? An ellipsis stands for anything."""
    return re.search(".*".join(re.escape(part.strip()) for part in expected.split("…")), printed) is not None
