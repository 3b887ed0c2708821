"""Running command lines in this process, on the miniature model and the NumPy reference."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from kinetic_core.cli import main

TINY = ("--backend", "reference")


@attrs.frozen
class Ended:
    status: int
    out: str
    err: str


Command = Callable[..., Ended]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def kinetic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Call with the words of a command line; `typed` is the standard input, None a terminal where nobody types."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("KINETIC_DEBUG", raising=False)
    monkeypatch.delenv("KINETIC_PLUGINS", raising=False)

    def call(*words: str, typed: str | None = "") -> Ended:
        monkeypatch.setattr("sys.stdin", _Terminal() if typed is None else io.StringIO(typed))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        shown = capsys.readouterr()
        return Ended(int(ended.value.code or 0), shown.out, shown.err)

    return call
