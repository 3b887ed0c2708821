"""The conversation: piped, with a model that a test controls, and typed at through a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinetic_core.cli.chat import Conversation
from kinetic_core.engine.request import Chunk, Timings, Usage
from kinetic_core.errors import ContextLengthError, RequestError

TINY = ("--backend", "reference", "--temperature", "0")


class ScriptedModel:
    """Answers with what the test put into `answers`: chunks of text, or an exception in their place."""

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.answers = list(answers)
        self.seen: list[list[dict[str, str]]] = []
        self.options: dict[str, Any] = {}

    def chat(self, messages: list[dict[str, str]], *, stream: bool, **options: Any) -> Iterator[Chunk]:
        assert stream
        self.seen.append([dict(message) for message in messages])
        self.options = options
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield Chunk(0, piece)
        yield Chunk(0, "", finish_reason="stop", usage=Usage(9, 5), timings=Timings(0.0, 0.1, 2.0))


def talk(model: ScriptedModel, *lines: str, system: str | None = None) -> str:
    out = io.StringIO()
    Conversation(model, {"max_tokens": 5}, system, out).run(iter(lines))  # type: ignore[arg-type]
    return out.getvalue()


def test_the_conversation_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(["One", "."], ["Two\x1b[2J."])
    assert talk(model, "first", "", "second") == "One.\nTwo[2J.\n"
    assert model.seen == [
        [{"role": "user", "content": "first"}],
        [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "second"},
        ],
    ]
    assert model.options == {"max_tokens": 5}
    assert capsys.readouterr().err.startswith("[5 tokens, 2.0 tok/s · first after 0.")


def test_reset_forgets_and_keeps_the_system_message() -> None:
    model = ScriptedModel(["a"], ["b"])
    assert "forgotten" in talk(model, "first", "/reset", "second", system="Be kind.")
    assert model.seen[1] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "second"}]


def test_system_is_set_and_shown() -> None:
    model = ScriptedModel(["a"], ["b"])
    shown = talk(model, "/system", "first", "/system Be brief.", "/system", "second")
    assert "No system message is set.\n" in shown and "\nBe brief.\n" in shown
    assert [messages[0]["role"] for messages in model.seen] == ["user", "system"]
    assert model.seen[1][0]["content"] == "Be brief." and len(model.seen[1]) == 4


def test_quit_ends_and_unknown_commands_are_named() -> None:
    model = ScriptedModel()
    shown = talk(model, "/qiut", "/help", "/quit", "never")
    assert "no command /qiut; /help lists them" in shown and "/reset" in shown
    assert model.seen == []


def test_a_stopped_answer_stays_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(["Once upon", KeyboardInterrupt()], ["b"])
    talk(model, "tell", "go on")
    assert "stopped" in capsys.readouterr().err
    assert model.seen[1][1] == {"role": "assistant", "content": "Once upon"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ContextLengthError(90, 64), "too long (90 of 64 tokens); /reset"),
        (RequestError("bad\nthing"), "error: bad thing"),
    ],
)
def test_an_error_leaves_the_conversation_as_it_was(
    capsys: pytest.CaptureFixture[str], error: Exception, text: str
) -> None:
    model = ScriptedModel([error], ["b"])
    talk(model, "first", "second")
    assert text in capsys.readouterr().err
    assert model.seen[1] == [{"role": "user", "content": "second"}]


def test_piped_lines_are_messages(kinetic: Any) -> None:
    ended = kinetic("chat", "tiny-hybrid", *TINY, "-n", "4", typed="hello\r\nmore\n/quit\nnever\n")
    assert ended.status == 0
    lines = ended.out.splitlines()
    assert len(lines) == 2 and all(len(line) == 4 for line in lines)
    assert ended.err.count("tok/s") == 2 and "context 2048 tokens" in ended.err


def test_nobody_types(kinetic: Any) -> None:
    ended = kinetic("chat", "tiny-hybrid", *TINY, typed="")
    assert (ended.status, ended.out) == (0, "")


def test_a_bad_option_is_refused_before_the_first_message(kinetic: Any) -> None:
    ended = kinetic("chat", "tiny-hybrid", "--backend", "reference", "--temperature", "-3", typed="")
    assert ended.status == 7 and "temperature" in ended.err


PROMPT = r"\x1b\[\?2004h.*>"
"""prompt_toolkit asks for bracketed paste whenever it reads a line."""


class Terminal:
    """`kinetic chat` on a pseudo-terminal."""

    def __init__(self, cache: Path, *words: str) -> None:
        self.screen = ""
        pid, self._fd = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background inherits that it is ignored
            os.environ.update(TERM="xterm", KINETIC_CACHE_DIR=str(cache), PROMPT_TOOLKIT_NO_CPR="1", COLUMNS="100")
            os.execv(sys.executable, [sys.executable, "-m", "kinetic_core", "chat", *words])
        self._pid = pid

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def read_until(self, pattern: str, seconds: float = 60.0) -> str:
        """What came up to a match of the pattern; the rest stays for the next call."""
        end = time.monotonic() + seconds
        while True:
            match = re.search(pattern, self.screen, re.DOTALL)
            if match:
                shown, self.screen = self.screen[: match.end()], self.screen[match.end() :]
                return shown
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.screen!r}"
            try:
                self.screen += os.read(self._fd, 65536).decode(errors="replace")
            except OSError as error:  # Linux says so when the other side has ended
                raise AssertionError(f"ended without {pattern!r}: {self.screen!r}") from error

    def wait(self, seconds: float = 30.0) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(self._pid, signal.SIGKILL)
        raise AssertionError("the chat did not end")


def test_typed_at_like_a_person(tmp_path: Path) -> None:
    # This penalty makes the model say "a" until the length limit: long enough to be stopped on any machine.
    terminal = Terminal(tmp_path, "tiny-hybrid", *TINY, "--presence-penalty=-50", "-n", "900")
    terminal.read_until("/help lists")
    terminal.read_until(PROMPT)
    terminal.type("hello\x1b\rthere\r")  # Alt-Enter starts a new line, Enter sends both
    shown = terminal.read_until(r"tok/s[^·]*· first after [\d.]+ s")
    assert "900 tokens" in shown and "there" in shown
    terminal.read_until(PROMPT)
    terminal.type("again\r")
    terminal.read_until("aaaaa")
    terminal.type("\x03")  # Ctrl-C
    terminal.read_until("stopped")
    terminal.read_until(PROMPT)
    terminal.type("half a li\x03")  # empties the line
    terminal.type("/quit\r")
    assert terminal.wait() == 0
    history = (tmp_path / "chat_history").read_text()
    assert "+hello\n+there\n" in history and "+again" in history and "half" not in history
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0


def test_end_of_file_ends_the_chat(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "tiny-hybrid", *TINY)
    terminal.read_until(PROMPT)
    terminal.type("\x04")
    assert terminal.wait() == 0
