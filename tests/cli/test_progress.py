from __future__ import annotations

import io

import pytest

from kinetic_core.cli import console


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def take_stderr(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> Stream:
    """Called in the test's own body: pytest puts its capture in place after the fixtures."""
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


@pytest.mark.parametrize("terminal", [False, True])
def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stderr = take_stderr(monkeypatch, terminal)
    with console.progress_bar() as progress:
        progress("packing", 0.0)
        progress("packing", 1.0)
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_long_work_is_named(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stderr = take_stderr(monkeypatch, terminal)
    monkeypatch.setattr(console, "QUIET_S", -1.0)
    with console.progress_bar() as progress:
        for done in range(10):
            progress(f"compiling kernel {done} of 10", done / 10)
        progress("packing", 0.5)
    shown = stderr.getvalue()
    assert "packing" in shown
    if stderr.isatty():
        assert "50%" in shown
    else:
        assert shown.splitlines() == ["compiling kernel 0 of 10 …", "packing …"]
