"""One line and a documented exit status, whatever goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic_core import errors
from kinetic_core.cli import application, plugins
from kinetic_core.errors import KineticError


def every_error() -> list[type[KineticError]]:
    found = [KineticError]
    for error in found:
        found += error.__subclasses__()
    return [error for error in found if error.__module__ == errors.__name__]


def raised(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(strict: bool = False) -> None:
        raise error

    monkeypatch.setattr(plugins, "load_registry", fail)


@pytest.mark.parametrize("kind", every_error())
def test_every_error_ends_with_its_status_and_one_line(
    kinetic: Any, monkeypatch: pytest.MonkeyPatch, kind: type[KineticError]
) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "what\n  went\x1b wrong")
    raised(monkeypatch, error)
    ended = kinetic("plugins")
    assert (ended.status, ended.out, ended.err) == (kind.exit_status, "", "error: what went wrong\n")


def test_an_error_of_ours_is_no_traceback(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(monkeypatch, ZeroDivisionError("by zero"))
    ended = kinetic("plugins")
    assert ended.status == 70
    assert ended.err == "error: internal error: ZeroDivisionError: by zero; KINETIC_DEBUG=1 shows where\n"
    monkeypatch.setenv("KINETIC_DEBUG", "1")
    assert "Traceback" in kinetic("plugins").err


def test_an_interrupt(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(monkeypatch, KeyboardInterrupt())
    assert kinetic("plugins").status == 130


def test_usage_errors(kinetic: Any) -> None:
    assert kinetic("nonsense").status == 2
    assert kinetic("info", "--threads", "2").status == 2


def test_a_command_of_a_plugin(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry:
        def names(self, kind: str) -> tuple[str, ...]:
            return ("good", "bad")

        def get(self, kind: str, name: str) -> Any:
            if name == "bad":
                raise errors.PluginError("cannot import it")

            def add(app: Any) -> None:
                @app.command()
                def shout() -> None:
                    """Shout."""
                    print("HO")

            return add

    monkeypatch.setattr(application, "load_registry", Registry)
    ended = kinetic("shout")
    assert (ended.status, ended.out, ended.err) == (0, "HO\n", "warning: cannot import it\n")
