"""One line and a documented exit status, whatever goes wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import IO, Any

import pytest
import typer

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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("nonsense", "no such command 'nonsense'; see kinetic --help"),
        ("info --threads 2", "no such option: --threads.*; see kinetic info --help"),
        ("bench --runs 0", "invalid value for '--runs'.*greater than or equal to 1; see kinetic bench --help"),
        ("run --top-k some hello", "invalid value for '--top-k'.*integer; see kinetic run --help"),
        ("run a b c", "invalid value for PROMPT: too many arguments: put the prompt in quotes; see kinetic run --help"),
        ("serve --port", "option '--port' requires an argument; see kinetic .*--help"),
    ],
)
def test_usage_errors_are_one_line(kinetic: Any, words: str, line: str) -> None:
    ended = kinetic(*words.split())
    assert (ended.status, ended.out) == (2, "")
    assert re.fullmatch(f"error: {line}\n", ended.err)


def test_no_command_shows_the_commands(kinetic: Any) -> None:
    ended = kinetic()
    assert (ended.status, ended.err) == (2, "")
    assert all(name in ended.out for name in ("chat", "run", "serve", "bench", "info", "pull", "models", "plugins"))


def test_help_shows_no_type_beside_a_flag(kinetic: Any) -> None:
    for words in ([], ["bench"], ["run"], ["plugins"]):
        ended = kinetic(*words, "--help")
        assert ended.status == 0
        assert "--help" in ended.out and "bool" not in ended.out.lower()
    assert re.search(r"--threads +-t +\S*int", kinetic("run", "--help").out, re.IGNORECASE)


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["models", "--help", "run tiny-hybrid hello --backend reference"])
def test_a_full_disk(words: str, unbuffered: str) -> None:
    """Whether the write fails at once or what is buffered cannot be written at the end."""
    ended = outside(words, open("/dev/full", "w"), unbuffered)  # noqa: SIM115 - closed there
    assert ended.stderr == "error: the output cannot be written: No space left on device\n"
    assert ended.returncode == 74


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe that nobody reads is another error there")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_went_away(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = outside("models", os.fdopen(writer, "w"), unbuffered)
    assert (ended.returncode, ended.stderr) == (1, "")


def outside(words: str, out: IO[str], unbuffered: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which writes to `out`."""
    with out:
        return subprocess.run(
            [sys.executable, "-m", "kinetic_core", *words.split()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "KINETIC_DEBUG": "", "KINETIC_PLUGINS": "kinetic-core"},
            text=True,
            check=False,
        )


def test_what_a_command_returns_is_not_its_status(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry:
        def names(self, kind: str) -> tuple[str, ...]:
            return ("count",)

        def get(self, kind: str, name: str) -> Any:
            def add(app: Any) -> None:
                @app.command()
                def count() -> int:
                    """Count."""
                    return 3

                @app.command()
                def stop() -> None:
                    """Stop."""
                    raise typer.Exit(4)

            return add

    monkeypatch.setattr(application, "load_registry", Registry)
    assert kinetic("count").status == 0
    assert kinetic("stop").status == 4


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
